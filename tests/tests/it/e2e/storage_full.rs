//! A full disk: a clear error, reads go on, and there is always a way back.

mod reserve;

use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Group, PageTree};
use pfr_schema::{Digest, Kind, media_type, tree::Document};
use pfr_tests::{LoopDisk, Pf, Registry, Shape, SmallDisk, SnapshotDir, Wire, binary, seed, wait_for};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn a_full_disk_is_said_clearly_reads_go_on_and_a_retry_succeeds() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 32) else { return };
    let ballast = disk.path().join("ballast");
    let registry = Registry::over(&disk.path().join("data"), &[]);
    let pf = Pf::new(&registry.url());
    let small = SnapshotDir::write(&pf.path("small"), Shape::SMALL, &(0..100).collect::<Vec<_>>());
    let large = SnapshotDir::write(&pf.path("large"), Shape::SMALL, &(1000..1500).collect::<Vec<_>>());
    pf.run(&["push", small.arg(), "a:small"]).ok();
    std::fs::write(&ballast, vec![1; 18 << 20]).unwrap();
    let before = pf.visible();
    let output = pf.run(&["push", large.arg(), "a:large"]);
    assert_eq!(output.code, 8, "{output:?}");
    assert!(output.stderr.contains("full"), "{output:?}");
    assert_eq!(pf.visible(), before);
    pf.run(&["verify", "a:small"]).ok();
    pf.run(&["pull", "a:small"]).ok();
    std::fs::remove_file(&ballast).unwrap();
    pf.run(&["push", large.arg(), "a:large"]).ok();
    pf.run(&["verify", "a:large"]).ok();
}

/// Bytes that others leave on the disk in a short run: fewer pushes fill it.
const LEFT: u64 = 24 << 20;
/// Pages of 16 KiB a side: 64 MiB take a moment, and the last bytes are taken by small pushes.
const SIZES: [u64; 3] = [48, 6, 1];
const REPOSITORY: &str = "/v1/repositories/a";
/// Seconds after which what was uploaded and not committed can be collected.
const LEASE: &str = "2";
/// Part of the message for an upload that took longer than its lease.
const LATE: &str = "longer than its lease";

/// A registry on a small disk, and what it has acknowledged.
struct Trial {
    registry: Registry,
    disk: PathBuf,
    client: Client,
    random: StdRng,
    /// Acknowledged, by tag, and not asked to be deleted.
    told: BTreeMap<String, Digest>,
    next: u64,
}

/// A snapshot as a body of frames.
struct Upload {
    manifest: Digest,
    frames: Vec<u8>,
}

impl Upload {
    /// Pages with numbers from `first` on.
    fn of(first: u64, pages: u64) -> Self {
        let blobs: Vec<Vec<u8>> = (2 * first..2 * (first + pages)).map(|number| Shape::SMALL.page(number)).collect();
        let entry = |(ix, kv): (usize, &[Vec<u8>])| Page { ix: ix as u32, k: Digest::sha256(&kv[0]), v: Digest::sha256(&kv[1]) };
        let entries: Vec<Page> = blobs.chunks(2).enumerate().map(entry).collect();
        let sequence = Sequence { id: "s".into(), page_ixs: (0..entries.len() as u32).collect(), fill_in_last_page: 1 };
        let flat = FlatManifest::new(Shape::SMALL.geometry, entries, vec![sequence], &Default::default()).unwrap();
        let (tree, chunks) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
        let tree = tree.to_document();
        let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
        let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], Default::default()).to_document();
        let documents = chunks.iter().chain([&tree, &config, &manifest]).map(|d| Wire::frame(d.kind, d.digest, &d.bytes));
        let frames: Vec<Vec<u8>> = blobs.iter().map(|blob| Wire::blob(blob)).chain(documents).collect();
        Self { manifest: manifest.digest, frames: Wire::stream(&frames) }
    }

    async fn push(&self, client: &Client, base: &str, tag: &str) -> Result<Option<Value>, reqwest::Error> {
        let opened = client.post(format!("{base}/pushes")).send().await?;
        let push = match answer(opened).await? {
            Ok(push) => format!("{base}/pushes/{}", push["id"].as_str().unwrap()),
            Err(full) => return Ok(Some(full)),
        };
        let put = client.put(format!("{push}/frames")).header("content-type", media_type::FRAMES).body(self.frames.clone()).send().await?;
        if let Err(full) = answer(put).await? {
            drop(client.delete(&push).send().await?);
            return Ok(Some(full));
        }
        let commit = client.post(format!("{push}/commit")).json(&json!({"manifest": self.manifest, "tag": tag})).send().await?;
        Ok(answer(commit).await?.err())
    }
}

/// The JSON of a success, or the problem of a full disk or an ended lease. Nothing else may occur.
async fn answer(response: Response) -> Result<Result<Value, Value>, reqwest::Error> {
    let (status, text) = (response.status(), response.text().await?);
    let value = serde_json::from_str(&text).unwrap_or_default();
    if status.is_success() {
        return Ok(Ok(value));
    }
    if value["code"] != "push_unknown" && !text.contains(LATE) {
        assert_eq!((status, &value["code"]), (StatusCode::INSUFFICIENT_STORAGE, &json!("storage_full")), "{text}");
    }
    Ok(Err(value))
}

impl Trial {
    /// What the registry logs goes to `folder`: it is not on the small disk.
    fn on(disk: &Path, folder: &Path, seed: u64) -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let options = ["--lease-seconds", LEASE, "--gc-interval-seconds", "0", "--gc-grace-seconds", "0"];
        let registry = Registry::over(&elsewhere(disk, folder), &options);
        // A connection of a killed registry is not used again.
        let client = Client::builder().no_proxy().pool_max_idle_per_host(0).timeout(Duration::from_secs(60)).build().unwrap();
        Self { registry, disk: disk.to_owned(), client, random: StdRng::seed_from_u64(seed), told: BTreeMap::new(), next: 0 }
    }

    fn base(&self) -> String {
        format!("{}{REPOSITORY}", self.registry.url())
    }

    /// Pushes; whether there was space for it.
    async fn push(&mut self, pages: u64) -> bool {
        let (upload, tag) = (Upload::of(self.next, pages), format!("t{}", self.next));
        self.next += pages;
        loop {
            match upload.push(&self.client, &self.base(), &tag).await.unwrap() {
                None => {
                    self.told.insert(tag, upload.manifest);
                    return true;
                }
                Some(refused) if refused["code"] == "storage_full" => return false,
                Some(late) => println!("leases are short here, and this machine was slow: {late}"),
            }
        }
    }

    /// Pushes until not even the smallest snapshot has space, with a kill on the way.
    async fn fill(&mut self) {
        for pages in SIZES {
            while self.push(pages).await {}
        }
        let Some((tag, _)) = self.told.first_key_value() else { panic!("nothing had space") };
        let mut names = 0..1000;
        // Each takes a few KiB, so that they stop as well.
        for name in names.by_ref() {
            let tags = format!("{}/tags/more-{name}", self.base());
            if answer(self.client.put(tags).json(&json!({"snapshot": tag})).send().await.unwrap()).await.unwrap().is_err() {
                break;
            }
        }
        assert!(!names.is_empty(), "tags are never refused");
        let forks = format!("{}/forks", self.base());
        let forked = self.client.post(forks).json(&json!({"snapshot": tag, "count": 3, "prefix": "f"})).send().await.unwrap();
        assert_eq!(forked.status(), StatusCode::INSUFFICIENT_STORAGE, "a fork: {}", forked.text().await.unwrap());
    }

    /// Kills the registry while it takes an upload, and starts it again: its outcome is not known.
    async fn kill_during_a_push(&mut self) {
        let (upload, base, client) = (Upload::of(self.next, SIZES[0]), self.base(), self.client.clone());
        self.next += SIZES[0];
        let tag = format!("unknown-{}", self.next);
        let push = tokio::spawn(async move { drop(upload.push(&client, &base, &tag).await) });
        tokio::time::sleep(Duration::from_millis(self.random.random_range(0..60))).await;
        self.registry.restart();
        push.await.unwrap();
    }

    /// Another program takes every byte that is left.
    fn others_take_all(&self) {
        let file = std::fs::File::create(self.disk.join("ballast")).unwrap();
        for piece in [1 << 20, 4096, 1] {
            while (&file).write_all(&vec![1; piece]).is_ok() {}
        }
        drop(file.sync_all());
        assert!(available(&self.disk) < 64 << 10, "{} bytes are left", available(&self.disk));
    }

    /// Deletes everything but a few, with a kill on the way.
    async fn delete_most(&mut self) {
        let doomed: Vec<String> = self.told.keys().skip(2).cloned().collect();
        let kill_after = self.random.random_range(0..doomed.len());
        for (number, tag) in doomed.into_iter().enumerate() {
            let digest = self.told.remove(&tag).unwrap();
            let deleted = self.client.delete(format!("{}/snapshots/{digest}", self.base())).send().await.unwrap();
            assert!(deleted.status().is_success(), "{tag}: {} {}", deleted.status(), deleted.text().await.unwrap());
            if number == kill_after {
                self.registry.restart();
            }
        }
        // A killed request may have taken effect.
        let listed: Value = self.client.get(format!("{}/snapshots?limit=1000", self.base())).send().await.unwrap().json().await.unwrap();
        for snapshot in listed["snapshots"].as_array().unwrap() {
            let digest = snapshot["digest"].as_str().unwrap();
            if !self.told.values().any(|told| told.to_string() == digest) {
                let deleted = self.client.delete(format!("{}/snapshots/{digest}", self.base())).send().await.unwrap();
                assert!(deleted.status().is_success(), "{digest}: {}", deleted.text().await.unwrap());
            }
        }
    }

    /// Collects until so many bytes are free, with the program and by request in turn, and a kill
    /// on the way.
    async fn collect(&mut self, wanted: u64) {
        let mut killed = tool(self.registry.data(), "gc", &["--grace", "0"]).spawn().unwrap();
        tokio::time::sleep(Duration::from_millis(self.random.random_range(0..200))).await;
        drop(killed.kill());
        killed.wait().unwrap();
        if self.random.random_bool(0.5) {
            let asked = self.client.post(format!("{}/v1/gc", self.registry.url())).json(&json!({})).send().await.unwrap();
            assert_eq!(asked.status(), StatusCode::ACCEPTED, "{}", asked.text().await.unwrap());
        }
        let data = self.registry.data().to_owned();
        // What was uploaded and not committed is leased for some seconds.
        wait_for("space", 60, || {
            let output = tool(&data, "gc", &["--grace", "0"]).output().unwrap();
            assert!(output.status.success(), "{output:?}");
            (available(&self.disk) >= wanted).then_some(())
        });
    }

    /// Asserts that everything acknowledged is there and complete.
    async fn verify(&self) {
        for (tag, digest) in &self.told {
            let found: Value = self.client.get(format!("{}/tags/{tag}", self.base())).send().await.unwrap().json().await.unwrap();
            assert_eq!(found["digest"], json!(digest), "{tag}: {found}");
            let verified = self.client.post(format!("{}/snapshots/{digest}/verify", self.base())).send().await.unwrap();
            let (status, text) = (verified.status(), verified.text().await.unwrap());
            assert!(status.is_success(), "{tag}: {status} {text}");
        }
    }

    fn fsck(&self) {
        let output = tool(self.registry.data(), "fsck", &[]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}

/// A data directory on a small disk, by a name on another one: the harness puts the log beside it.
fn elsewhere(disk: &Path, folder: &Path) -> PathBuf {
    let link = folder.join("data");
    std::fs::create_dir(disk.join("data")).unwrap();
    std::os::unix::fs::symlink(disk.join("data"), &link).unwrap();
    link
}

fn tool(data: &Path, command: &str, options: &[&str]) -> Command {
    let mut tool = Command::new(binary("pf-registry"));
    tool.arg(command).args(options).args(["--lease-seconds", LEASE, "--data"]).arg(data).stdout(Stdio::piped()).stderr(Stdio::piped());
    tool
}

/// Bytes that are free on the file system of a directory.
fn available(dir: &Path) -> u64 {
    let output = Command::new("df").args(["-B1", "--output=avail"]).arg(dir).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().last().unwrap().trim().parse().unwrap()
}

/// Fills the disk, deletes, collects and pushes again, with kills in between and the disk full to
/// the last byte every other round.
async fn rounds(disk: &Path, folder: &Path, rounds: u64, left: Option<u64>) {
    if let Some(left) = left {
        let taken = std::fs::File::create(disk.join("others")).unwrap();
        let ballast = available(disk) - left;
        (0..ballast >> 20).for_each(|_| (&taken).write_all(&vec![1; 1 << 20]).unwrap());
    }
    let mut trial = Trial::on(disk, folder, seed());
    for round in 0..rounds {
        if round % 3 == 1 {
            trial.kill_during_a_push().await;
        }
        trial.fill().await;
        if round % 2 == 0 {
            trial.others_take_all();
            trial.registry.restart();
            trial.fsck();
            trial.verify().await;
        }
        trial.delete_most().await;
        trial.collect(6 << 20).await;
        assert!(trial.push(SIZES[0]).await, "round {round}: there is space again, and a push finds none");
        drop(std::fs::remove_file(disk.join("ballast")));
        trial.verify().await;
    }
    trial.registry.restart();
    trial.verify().await;
    trial.fsck();
    let log = trial.registry.log();
    let wrong =
        |line: &&str| ["code=\"internal\"", "code=\"unavailable\"", "panicked"].iter().any(|w| line.contains(w)) && !line.contains(LATE);
    assert_eq!(log.lines().find(wrong), None, "the cause is called by its name");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_is_freed_on_a_full_ext4_and_pushes_go_on() {
    let folder = tempfile::TempDir::new().unwrap();
    if let Some(disk) = LoopDisk::mount(folder.path(), 64) {
        rounds(disk.path(), folder.path(), 3, Some(LEFT)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn space_is_freed_on_a_full_tmpfs_and_pushes_go_on() {
    let folder = tempfile::TempDir::new().unwrap();
    if let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 64) {
        rounds(disk.path(), folder.path(), 3, Some(LEFT)).await;
    }
}

#[test]
fn a_registry_starts_without_a_free_byte_and_without_its_reserve() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 16) else { return };
    let link = elsewhere(disk.path(), folder.path());
    let mut registry = Registry::over(&link, &["--gc-interval-seconds", "0"]);
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..40).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:b"]).ok();
    registry.kill();
    // As a kill during a start leaves it: the index of the log is gone, and so is what was kept for
    // it.
    for gone in ["metadata.sqlite-reserve", "metadata.sqlite-shm"] {
        std::fs::remove_file(link.join(gone)).unwrap();
    }
    let ballast = disk.path().join("ballast");
    let file = std::fs::File::create(&ballast).unwrap();
    while (&file).write_all(&[1; 4096]).is_ok() {}
    // Beside no registry `fsck` needs no space, but a collection has none to write with.
    for (command, code, said) in [("fsck", 0, ""), ("gc", 8, "full"), ("fsck", 0, "")] {
        let output = tool(&link, command, &["--json"]).output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(code) && words.contains(said), "{command}: {output:?}");
    }
    registry.restart();
    pf.run(&["verify", "a:b"]).ok();
    let output = pf.run(&["push", dir.arg(), "a:c"]);
    assert!(output.code == 8 && output.stderr.contains("full"), "{output:?}");
    assert!(registry.log().contains("no other process can open the metadata"), "{}", registry.log());
    // A collection needs a MiB of the disk.
    registry.kill();
    file.set_len(file.metadata().unwrap().len() - (1 << 20)).unwrap();
    let output = tool(&link, "gc", &["--grace", "0"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    drop(file);
    registry.restart();
    // With space it is shared again, and the reserve is put back.
    std::fs::remove_file(&ballast).unwrap();
    let output = tool(&link, "fsck", &[]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    pf.run(&["push", dir.arg(), "a:c"]).ok();
    assert!(std::fs::metadata(link.join("metadata.sqlite-reserve")).unwrap().len() >= 512 << 10);
}

/// Runs a command that a message printed, in the shell of a user without variables.
fn paste(line: &str) -> (i32, String) {
    let (home, programs) = (tempfile::TempDir::new().unwrap(), binary("pf"));
    let mut shell = Command::new("/bin/sh");
    let output = shell.env_clear().env("HOME", home.path()).env("PATH", programs.parent().unwrap()).args(["-c", line]).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8(text).unwrap())
}

/// The commands between backticks.
fn commands(hint: &str) -> Vec<String> {
    hint.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Takes every byte that a disk has left.
fn take_all(disk: &Path) {
    let file = std::fs::File::options().create(true).append(true).open(disk.join("ballast")).unwrap();
    for piece in [1 << 20, 4096, 1] {
        while (&file).write_all(&vec![1; piece]).is_ok() {}
    }
}

#[test]
fn a_pull_onto_a_full_disk_names_that_disk_and_says_how_to_free_space_there() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 48) else { return };
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("large"), Shape::SMALL, &(0..600).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:large"]).ok();
    let ballast = disk.path().join("ballast");
    let (store, out) = (disk.path().join("store"), disk.path().join("out"));
    for (place, arguments) in [
        ("directory", ["pull", "a:large", out.to_str().unwrap(), "--store", "/nonexistent"]),
        ("store", ["pull", "a:large", "--store", store.to_str().unwrap(), "--quiet"]),
    ] {
        std::fs::write(&ballast, vec![1; 36 << 20]).unwrap();
        let said = pf.run(&arguments);
        assert!(said.code == 8 && said.stdout.is_empty() && said.stderr.contains("hint: free space on"), "{place}: {said:?}");
        let output = pf.run(&[&arguments[..], &["--json"]].concat());
        let error: Value = serde_json::from_str(&output.stderr).unwrap_or_else(|e| panic!("{place}: {e}: {output:?}"));
        assert_eq!((output.code, &error["code"], &error["exit_code"]), (8, &json!("storage_full"), &json!(8)), "{place}: {error}");
        let hint = error["hint"].as_str().unwrap();
        if place == "directory" {
            assert!(hint.contains("that disk") && commands(hint).is_empty(), "no command of pf frees space there: {hint}");
            assert!(error["message"].as_str().unwrap().contains(out.to_str().unwrap()), "{error}");
        } else {
            assert!(hint.contains("the store's disk"), "{hint}");
            let flags = format!(" --local --store {}", store.display());
            assert_eq!(commands(hint), [format!("pf stats{flags}"), format!("pf gc{flags}")]);
            for command in commands(hint) {
                let (code, text) = paste(&command);
                assert_eq!(code, 0, "{command}: {text}");
            }
        }
        std::fs::remove_file(&ballast).unwrap();
        pf.run(&arguments).ok();
        drop(std::fs::remove_dir_all(&out));
    }
    pf.run(&["verify", "a:large", "--local", "--store", store.to_str().unwrap()]).ok();
}

#[test]
fn what_a_refused_deletion_prints_frees_space_and_then_the_deletion_succeeds() {
    let folder = tempfile::TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 32) else { return };
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let store = disk.path().join("store");
    let at = ["--local", "--store", store.to_str().unwrap()];
    for (name, pages) in [("kept", 0..10), ("old", 1000..1100)] {
        let dir = SnapshotDir::write(&pf.path(name), Shape::SMALL, &pages.collect::<Vec<_>>());
        pf.run(&["push", dir.arg(), &format!("a:{name}")]).ok();
        pf.run(&["pull", &format!("a:{name}"), "--store", at[2]]).ok();
    }
    pf.run(&[&["fork", "a:kept", "-n", "6"], &at[..]].concat()).ok();
    let old = pf.run(&[&["inspect", "a:old", "--json"], &at[..]].concat()).ok().json()["summary"]["digest"].as_str().unwrap().to_owned();
    pf.run(&[&["rm", &format!("a@{old}")], &at[..]].concat()).ok();
    // As if deletions had used up their part of the reserve, and others had taken the space.
    let reserve = std::fs::File::options().write(true).open(store.join("metadata.sqlite-reserve")).unwrap();
    let mut refused = None;
    for number in 1..=6 {
        reserve.set_len(reserve.metadata().unwrap().len() / 2).unwrap();
        take_all(disk.path());
        let name = format!("a:kept-fork-{number}");
        let output = pf.run(&[&["rm", &name], &at[..]].concat());
        if output.code != 0 {
            refused = Some((name, output));
            break;
        }
    }
    let (name, output) = refused.expect("the reserve has an end");
    assert!(output.code == 8 && output.stderr.contains("reserved for garbage collection"), "{output:?}");
    let found = commands(output.stderr.split_once("hint:").unwrap().1);
    assert_eq!(found.iter().map(|command| &command[..8]).collect::<Vec<_>>(), ["pf stats", "pf gc --"], "{output:?}");
    for command in &found {
        let (code, text) = paste(command);
        assert_eq!(code, 0, "{command}: {text}");
    }
    pf.run(&[&["rm", &name], &at[..]].concat()).ok();
    pf.run(&[&["verify", "a:kept"], &at[..]].concat()).ok();
}

mod long {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fifty_times_on_a_full_ext4() {
        let folder = tempfile::TempDir::new().unwrap();
        if let Some(disk) = LoopDisk::mount(folder.path(), 64) {
            rounds(disk.path(), folder.path(), 50, None).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn fifty_times_on_a_full_tmpfs() {
        let folder = tempfile::TempDir::new().unwrap();
        if let Some(disk) = SmallDisk::mount(&folder.path().join("disk"), 64) {
            rounds(disk.path(), folder.path(), 50, None).await;
        }
    }
}
