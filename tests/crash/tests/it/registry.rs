//! The life of a registry, recorded: pushes, commits, deletions, a collection with compaction, WAL
//! checkpoints, a kill, restarts.

mod full_disk;

use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use pfr_crash::check::{DATA, DOMAIN, REPOSITORY, folder, push, repository, run};
use pfr_crash::oracle::{Change, History};
use pfr_crash::record::{Recorded, Recorder, is_possible};
use pfr_crash::trace::{Action, Op, Trace};
use pfr_store::{KeyOptions, Keys, Options, Store};
use pfr_tests::{Pf, Shape, SmallDisk, SnapshotDir, ask, binary, own_address, skip, wait_for};
use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// How long leases last: deleted snapshots are collected after that.
const LEASE: Duration = Duration::from_secs(1);
/// More bytes than any disk has. With this floor the log of the metadata is truncated after every
/// transaction, and nothing new is stored.
const FULL: &str = "1152921504606846976";

/// What was recorded, and what the clients were told.
pub struct Life {
    pub trace: Trace,
    pub history: History,
    /// Those with the keys of encrypted domains.
    pub files: Option<Arc<KeyFiles>>,
}

impl Life {
    /// The keys that are there after `at` operations.
    pub fn keys(&self, at: usize) -> Keys {
        self.files.as_ref().map_or_else(Keys::default, |files| files.at(at))
    }
}

/// The files with the keys that wrap those of domains. The second one replaces the first.
pub struct KeyFiles {
    dir: TempDir,
    /// Operations when all keys were said to be wrapped by the second: then the first is destroyed.
    destroyed_at: usize,
}

impl KeyFiles {
    fn new() -> Self {
        let files = Self { dir: tempfile::tempdir().unwrap(), destroyed_at: usize::MAX };
        for (path, letter) in [(files.old(), "A"), (files.new_one(), "B")] {
            // 32 bytes as base64.
            std::fs::write(&path, format!("{}A=\n", letter.repeat(42))).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        files
    }

    fn old(&self) -> PathBuf {
        self.dir.path().join("old.key")
    }

    fn new_one(&self) -> PathBuf {
        self.dir.path().join("new.key")
    }

    fn at(&self, at: usize) -> Keys {
        let old_key_file = (at < self.destroyed_at).then(|| self.old());
        Keys::new(KeyOptions { key_file: Some(self.new_one()), old_key_file, ..KeyOptions::default() }).unwrap()
    }
}

/// None where this process may not trace others.
pub fn recorded() -> Option<Life> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let mut registry = Registry::new();
    registry.start(&[]);
    let first = registry.push("first", &[0, 1, 2, 3, 4, 5, 6, 7]);
    let fork = registry.push("fork", &[0, 1, 2, 13, 14]);
    registry.change(&["tag", &format!("{REPOSITORY}@{fork}"), "head"], Change::Tag("head".into(), fork.clone()));
    registry.change(&["tag", &format!("{REPOSITORY}@{first}"), "head"], Change::Tag("head".into(), first.clone()));
    registry.change(&["rm", &format!("{REPOSITORY}:first")], Change::Untag("first".into()));
    registry.change(&["rm", &format!("{REPOSITORY}@{first}")], Change::Remove(first));
    std::thread::sleep(LEASE);
    let collected = registry.collect();
    assert!(collected["packs_compacted"].as_u64() > Some(0) && collected["packs_deleted"].as_u64() > Some(0), "{collected}");
    // The last connection removes the log of the metadata.
    registry.stop(Signal::SIGTERM);

    registry.start(&[]);
    let last = registry.push("last", &[20, 21]);
    registry.stop(Signal::SIGKILL);

    registry.start(&["--min-free-bytes", FULL]);
    registry.change(&["rm", &format!("{REPOSITORY}@{last}")], Change::Remove(last));
    std::thread::sleep(LEASE);
    let collected = registry.collect();
    assert!(collected["packs_deleted"].as_u64() > Some(0), "{collected}");
    registry.stop(Signal::SIGKILL);

    registry.start(&[]);
    registry.push("again", &[0, 1, 30]);
    registry.stop(Signal::SIGTERM);
    Some(registry.end())
}

/// A registry that finds its folders made by a process that was killed before it synced them, or by
/// another one that is about to.
pub fn recorded_in_folders_of_others() -> Option<Life> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let mut registry = Registry::new();
    let packs = Path::new(DATA).join("packs");
    registry.make_folders([DATA.into()]);
    registry.start(&[]);
    registry.stop(Signal::SIGKILL);
    registry.make_folders((0..=255).map(|number| packs.join(format!("{number:02x}"))).chain([packs.join("journal")]));
    registry.start(&[]);
    registry.push("first", &[0, 1, 2]);
    registry.stop(Signal::SIGKILL);
    Some(registry.end())
}

/// A WAL checkpoint beside the writer, and the log that starts again at its beginning. The log is
/// short because the disk is small.
pub fn recorded_checkpoint() -> Option<Life> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let home = folder();
    let disk = SmallDisk::mount(&home.path().join("root"), 8)?;
    let before = fill(&disk.path().join(DATA), async |store| push(store, 0, "before").await);
    let mut registry = Registry::on(home, Some(disk));
    registry.history.note(0, 0, Change::Commit(before, "before".into()));
    registry.start(&[]);
    let begun = registry.recorder.position();
    let is_of = |op: &Op, name: &str| op.path == Path::new(DATA).join(name);
    let is_checkpoint = |op: &Op| matches!(op.action, Action::Sync(_)) && is_of(op, "metadata.sqlite");
    let begins_log = |op: &Op| matches!(op.action, Action::Write { offset: 0, .. }) && is_of(op, "metadata.sqlite-wal");
    for number in 0.. {
        registry.push(&format!("t{number}"), &(number * 200..number * 200 + 200).collect::<Vec<_>>());
        // If commits came while the checkpoint ran, the log goes on behind it. It begins again
        // after a later checkpoint: at the latest after one that the writer runs itself.
        let checkpoint = registry.recorder.find(begun, is_checkpoint);
        if checkpoint.is_some_and(|at| registry.recorder.find(at, begins_log).is_some()) {
            break;
        }
        assert!(number < 40, "the log never began again: checkpoint {checkpoint:?}");
    }
    // Its commit overwrites what the checkpoint copied, and is acknowledged.
    registry.push("after", &[1, 2]);
    registry.stop(Signal::SIGKILL);
    Some(registry.end())
}

/// A merge of small packs.
pub fn recorded_merge() -> Option<Life> {
    let mut registry = Registry::filled(async |store| {
        let mut changes = Vec::new();
        for number in 0..8 {
            let tag = format!("t{number}");
            changes.push(Change::Commit(push(store, number * 4, &tag).await?, tag));
        }
        Ok(changes)
    })?;
    registry.start(&[]);
    let collected = registry.collect();
    assert!(collected["packs_merged"].as_u64() > Some(7) && collected["packs_deleted"].as_u64() > Some(7), "{collected}");
    registry.push("again", &[0, 1, 30]);
    registry.stop(Signal::SIGKILL);
    Some(registry.end())
}

/// A summary of the journal, and the deletion of the objects that it makes superfluous.
pub fn recorded_summary() -> Option<Life> {
    let mut registry = Registry::filled(async |store| {
        let both = [push(store, 0, "a").await?, push(store, 4, "b").await?];
        let mut changes = vec![Change::Commit(both[0].clone(), "a".into()), Change::Commit(both[1].clone(), "b".into())];
        for number in 0..CHANGES {
            let at = &both[number % 2];
            let moved = store.put_tag(&repository(), "head".parse().unwrap(), at.parse().unwrap(), None).await;
            moved.map_err(|e| e.to_string())?;
            changes.push(Change::Tag("head".into(), at.clone()));
        }
        Ok(changes)
    })?;
    registry.start(&[]);
    registry.collect();
    let objects = std::fs::read_dir(registry.home.path().join("root").join(DATA).join("packs/journal")).unwrap().count();
    assert!(objects < CHANGES, "there is no summary: {objects} objects");
    registry.change(&["rm", &format!("{REPOSITORY}:head")], Change::Untag("head".into()));
    registry.stop(Signal::SIGKILL);
    Some(registry.end())
}

/// Domains are made, used, deleted to the last byte and made again.
pub fn recorded_domains() -> Option<Life> {
    let mut registry = Registry::filled(async |store| Ok(vec![Change::Commit(push(store, 0, "t").await?, "t".into())]))?;
    registry.start(&[]);
    registry.domain("PUT", DOMAIN, Change::MakeDomain);
    registry.push_to(DOMAIN, "first", &[0, 1, 2]);
    registry.push_to(DOMAIN, "second", &[0, 1, 3]);
    registry.push("beside", &[0, 1, 4]);
    registry.domain("PUT", "empty", Change::MakeDomain);
    registry.domain("DELETE", DOMAIN, Change::DeleteDomain);
    let address = registry.address.clone();
    wait_for("the domain to be gone", 60, || {
        ask(&address, "GET", &format!("/v1/domains/{DOMAIN}")).starts_with("HTTP/1.1 404").then_some(())
    });
    registry.domain("PUT", DOMAIN, Change::MakeDomain);
    registry.push_to(DOMAIN, "again", &[0, 5]);
    registry.domain("DELETE", "empty", Change::DeleteDomain);
    registry.stop(Signal::SIGKILL);
    Some(registry.end())
}

/// An encrypted domain is made and used, its key is wrapped again and the file that wrapped it
/// before destroyed; then it is deleted to the last byte.
pub fn recorded_encrypted() -> Option<Life> {
    let mut registry = Registry::filled(async |store| Ok(vec![Change::Commit(push(store, 0, "t").await?, "t".into())]))?;
    let mut files = KeyFiles::new();
    let (old, new) = (files.old(), files.new_one());
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let (old, new) = (text(&old), text(&new));
    registry.start(&["--key-file", &old]);
    registry.domain("PUT", &format!("{DOMAIN}?encrypted=true"), Change::MakeDomain);
    registry.push_to(DOMAIN, "first", &[0, 1, 2]);
    registry.stop(Signal::SIGKILL);
    registry.rewrap(&old, &new);
    files.destroyed_at = registry.recorder.position();
    registry.start(&["--key-file", &new]);
    registry.push_to(DOMAIN, "second", &[0, 1, 3]);
    registry.domain("DELETE", DOMAIN, Change::DeleteDomain);
    let address = registry.address.clone();
    wait_for("the domain to be gone", 60, || {
        ask(&address, "GET", &format!("/v1/domains/{DOMAIN}")).starts_with("HTTP/1.1 404").then_some(())
    });
    registry.stop(Signal::SIGKILL);
    Some(Life { files: Some(Arc::new(files)), ..registry.end() })
}

/// Number of changes after which a journal is summarised.
const CHANGES: usize = 270;

/// Lets a store in this process do something that is not recorded, and closes it.
fn fill<T>(data: &Path, work: impl AsyncFnOnce(&Store) -> Result<T, String>) -> T {
    let mut result = None;
    run(async {
        let store = Store::open(data, Options::default()).await.map_err(|e| e.to_string())?;
        result = Some(work(&store).await?);
        Ok(())
    })
    .unwrap();
    // The last connection removes the log.
    let log = data.join("metadata.sqlite-wal");
    wait_for("the database to be closed", 60, || (!log.exists()).then_some(()));
    result.unwrap()
}

/// A registry that is recorded, and its client.
struct Registry {
    // Unmounted before its folder is removed.
    disk: Option<SmallDisk>,
    home: TempDir,
    address: String,
    recorder: Recorder,
    running: Option<Recorded>,
    pf: Pf,
    starts: usize,
    history: History,
}

impl Registry {
    fn new() -> Self {
        let home = folder();
        std::fs::create_dir(home.path().join("root")).unwrap();
        Self::on(home, None)
    }

    /// Over what lies below the folder, on its disk.
    fn on(home: TempDir, disk: Option<SmallDisk>) -> Self {
        let recorder = Recorder::new(&home.path().join("root"));
        let history = History::default();
        Self { disk, home, address: String::new(), recorder, running: None, pf: Pf::new(""), starts: 0, history }
    }

    /// Over a store with which something was done before the recording. None where this process may
    /// not trace others.
    fn filled(work: impl AsyncFnOnce(&Store) -> Result<Vec<Change>, String>) -> Option<Self> {
        if !is_possible() {
            skip("ptrace", "this process may not trace its children");
            return None;
        }
        let home = folder();
        let changes = fill(&home.path().join("root").join(DATA), work);
        let mut registry = Self::on(home, None);
        changes.into_iter().for_each(|change| registry.history.note(0, 0, change));
        Some(registry)
    }

    /// Makes folders that are not there, and syncs none of them.
    fn make_folders(&self, folders: impl IntoIterator<Item = PathBuf>) {
        let root = self.home.path().join("root");
        let mut command = Command::new("mkdir");
        command.arg("-p").args(folders.into_iter().map(|folder| root.join(folder)));
        self.recorder.start(command).unwrap().wait().unwrap();
    }

    fn start(&mut self, options: &[&str]) {
        self.starts += 1;
        let place = |name: &str| self.home.path().join(format!("{name}-{}", self.starts));
        let (out, log) = (place("out"), place("log"));
        let mut command = Command::new(binary("pf-registry"));
        command
            .args(["serve", "--listen", &format!("{}:0", own_address())])
            .args(["--lease-seconds", &LEASE.as_secs().to_string(), "--gc-interval-seconds", "0", "--gc-grace-seconds", "0"])
            .arg("--data")
            .arg(self.home.path().join("root").join(DATA))
            .args(options)
            .stdout(File::create(&out).unwrap())
            .stderr(File::create(&log).unwrap());
        self.running = Some(self.recorder.start(command).unwrap());
        let address = wait_for("the registry to listen", 60, || {
            let text = std::fs::read_to_string(&out).unwrap();
            text.lines().find_map(|line| line.strip_prefix("listening on ")).filter(|_| text.ends_with('\n')).map(str::to_owned)
        });
        self.pf.talk_to(&address);
        self.address = address.trim_start_matches("http://").to_owned();
    }

    fn stop(&mut self, signal: Signal) {
        let running = self.running.take().unwrap();
        running.signal(signal);
        running.wait().unwrap();
    }

    /// Notes what a command changes.
    fn change(&mut self, arguments: &[&str], change: Change) {
        let begun = self.recorder.position();
        self.pf.run(arguments).ok();
        self.history.note(begun, self.recorder.position(), change);
    }

    /// Pushes pages under a tag; the digest.
    fn push(&mut self, tag: &str, numbers: &[u64]) -> String {
        let dir = SnapshotDir::write(&self.pf.path(tag), Shape::TINY, numbers);
        let begun = self.recorder.position();
        let digest = self.pf.run(&["push", dir.arg(), &format!("{REPOSITORY}:{tag}")]).ok().last_line().to_owned();
        self.history.note(begun, self.recorder.position(), Change::Commit(digest.clone(), tag.to_owned()));
        digest
    }

    /// Pushes to a domain.
    fn push_to(&mut self, domain: &str, tag: &str, numbers: &[u64]) {
        let dir = SnapshotDir::write(&self.pf.path(tag), Shape::TINY, numbers);
        let begun = self.recorder.position();
        let reference = format!("http://{}/domains/{domain}/{REPOSITORY}:{tag}", self.address);
        let digest = self.pf.run(&["push", dir.arg(), &reference]).ok().last_line().to_owned();
        self.history.note(begun, self.recorder.position(), Change::In(domain.to_owned(), Box::new(Change::Commit(digest, tag.to_owned()))));
    }

    /// Makes or deletes a domain; options follow its name after a question mark.
    fn domain(&mut self, method: &str, name: &str, change: fn(String) -> Change) {
        let begun = self.recorder.position();
        let answer = ask(&self.address, method, &format!("/v1/domains/{name}"));
        assert!(answer.starts_with("HTTP/1.1 20"), "{answer}");
        let name = name.split('?').next().unwrap_or(name);
        self.history.note(begun, self.recorder.position(), change(name.to_owned()));
    }

    /// Wraps the keys of all domains again, by the key file `new`.
    fn rewrap(&self, old: &str, new: &str) {
        let mut command = Command::new(binary("pf-registry"));
        command
            .args(["domain", "rewrap", "--old-key-file", old, "--key-file", new, "--data"])
            .arg(self.home.path().join("root").join(DATA))
            .stdout(Stdio::null());
        let status = self.recorder.start(command).unwrap().wait().unwrap();
        assert!(matches!(status, WaitStatus::Exited(_, 0)), "{status:?}");
    }

    fn collect(&mut self) -> serde_json::Value {
        self.pf.json(&["gc"])
    }

    fn end(self) -> Life {
        drop(self.disk);
        Life { trace: self.recorder.finish().unwrap(), history: self.history, files: None }
    }
}
