//! The tools of `pf-registry` on a store that is hurt: the real program, its exit codes, and
//! another registry to heal from.

use pfr_schema::api::{DamagedBlob, FsckReport, RebuildReport, ScrubReport};
use pfr_schema::codec::Codec;
use pfr_schema::frame::{self, Header};
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, RepositoryName};
use pfr_store::{Options, Store, document_frame};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

fn repository() -> RepositoryName {
    "team/agent".parse().unwrap()
}

/// Pushes a snapshot with one attachment; returns the manifest and the attachment.
async fn push(data: &Path, content: &[u8]) -> (Digest, Digest) {
    push_to(&repository(), data, content).await
}

async fn push_to(repository: &RepositoryName, data: &Path, content: &[u8]) -> (Digest, Digest) {
    let store = Store::open(data, Options::default()).await.unwrap();
    let blob = Digest::sha256(content);
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let layer = Descriptor {
        media_type: "application/octet-stream".into(),
        digest: blob,
        size: content.len() as u64,
        ..Descriptor::of("x/y", &config)
    };
    let manifest = Manifest::snapshot(&config, vec![layer], Default::default()).to_document();
    let len = content.len() as u64;
    let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: blob, raw_len: len, stored_len: len };
    let mut stream = frame::encode(&header, content);
    stream.extend_from_slice(&document_frame(&config));
    stream.extend_from_slice(&document_frame(&manifest));
    stream.extend_from_slice(&frame::end_mark(3));
    let session = store.open_push(repository).await.unwrap();
    let pieces = futures::stream::iter([Ok::<_, std::io::Error>(bytes::Bytes::from(stream))]);
    store.ingest(&session.id, pieces).await.unwrap();
    store.commit(&session.id, manifest.digest, Some("main".parse().unwrap()), None).await.unwrap();
    (manifest.digest, blob)
}

fn packs(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(packs(&path));
        } else if path.extension().is_some_and(|e| e == "pfpack") {
            found.push(path);
        }
    }
    found
}

fn tool<T: serde::de::DeserializeOwned>(data: &Path, args: &[&str]) -> (i32, T) {
    let output = Command::new(env!("CARGO_BIN_EXE_pf-registry")).args(args).arg("--json").arg("--data").arg(data).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {errors}"));
    (output.status.code().unwrap(), report)
}

/// A registry that serves until it is dropped.
struct Serving(Child, String);

impl Serving {
    fn over(data: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pf-registry"))
            .args(["serve", "--listen", "127.0.0.1:0", "--data"])
            .arg(data)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").unwrap().to_owned();
        Self(child, url)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn damage_is_found_named_and_healed_from_another_registry() {
    // Another test of this process may have been first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (hurt, good) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let content = vec![7; 10_000];
    let (manifest, blob) = push(hurt.path(), &content).await;
    push(good.path(), &content).await;
    let (code, report): (i32, ScrubReport) = tool(hurt.path(), &["scrub", "--full"]);
    assert_eq!((code, report.packs, report.frames), (0, 1, 3));
    let pack = packs(&hurt.path().join("packs")).pop().unwrap();
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&pack, &bytes).unwrap();
    let (code, report): (i32, ScrubReport) = tool(hurt.path(), &["scrub"]);
    let name = format!("team/agent@{manifest}");
    assert_eq!(code, 4, "{report:?}");
    assert_eq!(report.damaged.iter().map(|d| (d.digest, d.snapshots.clone())).collect::<Vec<_>>(), [(blob, vec![name])]);
    {
        let serving = Serving::over(hurt.path());
        let damaged: Vec<DamagedBlob> = reqwest::get(format!("{}/v1/damaged", serving.1)).await.unwrap().json().await.unwrap();
        assert_eq!(damaged, report.damaged);
        let scrub = reqwest::Client::new().post(format!("{}/v1/scrub?full=true", serving.1)).send().await.unwrap();
        let scrubbed: ScrubReport = scrub.json().await.unwrap();
        assert_eq!((scrubbed.full, scrubbed.damaged), (true, report.damaged));
    }
    let mirror = Serving::over(good.path());
    let (code, healed): (i32, ScrubReport) = tool(hurt.path(), &["scrub", "--heal-from", &mirror.1]);
    assert_eq!((code, healed.healed, healed.damaged.len()), (0, 1, 0), "{healed:?}");
    let store = Store::open(hurt.path(), Options::default()).await.unwrap();
    store.verify(&manifest, &mut |_| ()).await.unwrap();
}

/// Damages the content in every pack.
fn hurt_all(data: &Path) {
    for pack in packs(&data.join("packs")) {
        let mut bytes = std::fs::read(&pack).unwrap();
        bytes[5000] ^= 1;
        std::fs::write(&pack, &bytes).unwrap();
    }
}

#[tokio::test]
async fn what_one_registry_cannot_heal_is_reported_and_the_rest_is_healed() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (hurt, good) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // A blob that both have, a blob that is damaged in both, and a blob in a repository that the
    // other lacks and that comes first by name.
    let (shared, both, lacked) = (vec![1; 10_000], vec![2; 10_000], vec![3; 10_000]);
    push(good.path(), &both).await;
    hurt_all(good.path());
    push(good.path(), &shared).await;
    push(hurt.path(), &shared).await;
    let (_, in_both) = push(hurt.path(), &both).await;
    let (_, in_none) = push_to(&"a/lacked".parse().unwrap(), hurt.path(), &lacked).await;
    hurt_all(hurt.path());
    let (code, found): (i32, ScrubReport) = tool(hurt.path(), &["scrub"]);
    assert_eq!((code, found.damaged.len()), (4, 3), "{found:?}");
    // A port that no test is ever given.
    let (code, report): (i32, ScrubReport) = tool(hurt.path(), &["scrub", "--heal-from", "http://127.0.0.1:1"]);
    assert_eq!(
        (code, report.healed, report.damaged.len()),
        (7, 0, 3),
        "a registry that is down heals nothing, and hides nothing: {report:?}"
    );
    for known in [false, true] {
        // Read and found bad in the middle of an answer; then known to be bad.
        let mirror = Serving::over(good.path());
        if known {
            reqwest::Client::new().post(format!("{}/v1/scrub", mirror.1)).send().await.unwrap();
        }
        let (code, report): (i32, ScrubReport) = tool(hurt.path(), &["scrub", "--heal-from", &mirror.1]);
        let left: std::collections::BTreeSet<Digest> = report.damaged.iter().map(|d| d.digest).collect();
        assert_eq!((code, report.healed, left), (4, u64::from(!known), [in_both, in_none].into()), "known: {known}, {report:?}");
    }
}

#[test]
fn a_url_that_is_none_is_refused_without_its_password() {
    let data = tempfile::tempdir().unwrap();
    let url = "http://user:hush@127.0.0.1:1/x";
    for arguments in
        [&["scrub", "--heal-from", url][..], &["mirror", "--from", url], &["serve", "--listen", "127.0.0.1:0", "--upstream", url]]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_pf-registry")).args(arguments).arg("--data").arg(data.path()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(!text.contains("hush") && text.contains("http://127.0.0.1:1"), "{text}");
    }
}

#[tokio::test]
async fn a_lost_database_is_rebuilt_and_one_that_is_not_lost_is_left_alone() {
    let data = tempfile::tempdir().unwrap();
    let (manifest, _) = push(data.path(), b"content").await;
    let refused = Command::new(env!("CARGO_BIN_EXE_pf-registry")).args(["rebuild", "--data"]).arg(data.path()).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("move it away"));
    let lose = || {
        for file in ["metadata.sqlite", "metadata.sqlite-wal", "metadata.sqlite-shm"] {
            let _ = std::fs::remove_file(data.path().join(file));
        }
    };
    lose();
    // A domain was being deleted: its marker is gone, and a pack is left.
    let gone = data.path().join("domains/gone/packs/0a");
    std::fs::create_dir_all(&gone).unwrap();
    std::fs::write(gone.join("left.pfpack"), b"a pack").unwrap();
    let (code, report): (i32, RebuildReport) = tool(data.path(), &["rebuild"]);
    assert_eq!((code, report.packs, report.snapshots, report.tags), (0, 1, 1, 1), "{report:?}");
    assert_eq!((report.domains, report.left), (vec![], vec!["gone".parse().unwrap()]));
    lose();
    let output = Command::new(env!("CARGO_BIN_EXE_pf-registry")).args(["rebuild", "--data"]).arg(data.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.starts_with("left ")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("gone: ") && line.contains("DELETE /v1/domains/gone") && line.contains("--domain gone"), "{line}");
    let (code, report): (i32, FsckReport) = tool(data.path(), &["fsck"]);
    assert_eq!((code, report.wrong, report.containers), (0, 0, 1), "{report:?}");
    let store = Store::open(data.path(), Options::default()).await.unwrap();
    assert_eq!(store.tag(&repository(), &"main".parse().unwrap()).await.unwrap().digest, manifest);
    store.verify(&manifest, &mut |_| ()).await.unwrap();
}
