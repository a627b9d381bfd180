//! `pf verify` and `pf scrub` over a local store of which something is damaged, or cannot be read;
//! attachments that have the form of nodes.

use crate::common::sample::{directory, write_checkpoint};
use crate::common::{Registry, memory, pull_store, push_dir, repository, tag, target};
use pfr_client::{Progress, Source, push};
use pfr_schema::Digest;
use pfr_schema::api::ScrubReport;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_store::{Options, Store};
use pfr_testkit::snapshot::Shape;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const SHAPE: Shape = Shape::of(Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 64, dtype: Dtype::Bf16 });

/// `pf` over the store in `dir`; exit code, stdout, stderr.
fn pf(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
    command.env_clear().env("HOME", dir).env("PF_STORE", dir.join("store")).args(args).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// A local store of three snapshots, each in a pack of its own, and these packs in order.
async fn three() -> (tempfile::TempDir, Vec<PathBuf>) {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
        let numbers: Vec<u64> = (i as u64 * 100..i as u64 * 100 + 40).collect();
        let source = directory(SHAPE, &numbers);
        push_dir(&registry.remote(), source.path(), name).await.unwrap();
        let digest = pull_store(&registry.remote(), name, &store).await.unwrap().digest;
        store.put_tag(&repository(), tag(name), digest, None).await.unwrap();
    }
    let folders = std::fs::read_dir(dir.path().join("store/packs")).unwrap().map(|entry| entry.unwrap().path());
    let files = folders
        .filter(|path| path.is_dir() && path.file_name().unwrap() != "journal")
        .flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let mut packs: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    packs.sort_by_key(|path| path.file_name().unwrap().to_owned());
    assert!(packs.len() >= 3, "{packs:?}");
    (dir, packs)
}

#[tokio::test]
async fn a_damaged_snapshot_does_not_keep_the_others_from_being_proven() {
    let (dir, packs) = three().await;
    let (code, stdout, stderr) = pf(dir.path(), &["verify", "--local", "--json"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(serde_json::from_str::<Vec<serde_json::Value>>(&stdout).unwrap().len(), 3);
    let mut bytes = std::fs::read(&packs[0]).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&packs[0], bytes).unwrap();
    let (code, stdout, stderr) = pf(dir.path(), &["verify", "--local"]);
    assert_eq!(code, 4, "{stderr}");
    let lines = |word: &str| stdout.lines().filter(|line| line.starts_with(word)).count();
    assert_eq!((lines("verified"), lines("failed")), (2, 1), "{stdout}");
    assert!(stderr.contains("1 of 3 snapshots"), "{stderr}");
    let (code, stdout, stderr) = pf(dir.path(), &["verify", "--local", "--json"]);
    assert_eq!(code, 4, "{stderr}");
    let proofs: Vec<serde_json::Value> = serde_json::from_str(&stdout).unwrap();
    let failed: Vec<_> = proofs.iter().filter(|proof| proof.get("error").is_some()).collect();
    assert_eq!((proofs.len(), failed.len()), (3, 1), "{stdout}");
    assert!(failed[0]["error"]["exit_code"] == 4 && failed[0]["name"] == format!("{}:a", repository()), "{stdout}");
    assert!(proofs.iter().filter(|proof| proof["blobs"].as_u64() > Some(40)).count() == 2, "{stdout}");
}

#[tokio::test]
async fn a_pack_that_cannot_be_read_is_unread_and_not_damaged() {
    let (dir, packs) = three().await;
    let aside = packs[1].with_extension("aside");
    std::fs::rename(&packs[1], &aside).unwrap();
    // Opening it fails with "too many levels of symbolic links".
    std::os::unix::fs::symlink(&packs[1], &packs[1]).unwrap();
    let (code, stdout, stderr) = pf(dir.path(), &["scrub", "--local", "--json"]);
    let report: ScrubReport = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, report.unread.len()), (7, 1), "{stdout}{stderr}");
    assert!(report.damaged.is_empty() && report.bad_packs.is_empty(), "{stdout}");
    let (code, stdout, stderr) = pf(dir.path(), &["scrub", "--local"]);
    assert!(code == 7 && stdout.contains("unread") && !stderr.contains("named above"), "{stdout}{stderr}");
    std::fs::rename(&aside, &packs[1]).unwrap();
    assert_eq!(pf(dir.path(), &["scrub", "--local"]).0, 0);
}

#[tokio::test]
async fn an_attachment_may_have_the_bytes_of_another_snapshots_node() {
    let (with, copying) = (directory(SHAPE, &[1, 2]), directory(SHAPE, &[3]));
    write_checkpoint(with.path());
    std::fs::create_dir(copying.path().join("attachments")).unwrap();
    std::fs::copy(with.path().join("checkpoint.json"), copying.path().join("attachments/copy.json")).unwrap();
    for order in [["with", "copying"], ["copying", "with"]] {
        let registry = Registry::start().await;
        for name in order {
            push_dir(&registry.remote(), if name == "with" { with.path() } else { copying.path() }, name).await.unwrap();
        }
        // Into a store that has nothing else, from which it goes on into a registry that has
        // nothing else.
        for name in order {
            let (store, other) = (memory().await, Registry::start().await);
            let digest = pull_store(&registry.remote(), name, &store).await.unwrap().digest;
            store.verify(&digest, &mut |_| ()).await.unwrap();
            push_from(&store, digest, &other, name).await;
        }
        // And from one that has both, one by one.
        let both = memory().await;
        for name in order {
            pull_store(&registry.remote(), name, &both).await.unwrap();
        }
        for name in order {
            let digest = pull_store(&registry.remote(), name, &both).await.unwrap().digest;
            push_from(&both, digest, &Registry::start().await, name).await;
        }
    }
}

async fn push_from(store: &Store, snapshot: Digest, registry: &Registry, name: &str) {
    let source = Source::Store { store: store.clone(), snapshot };
    push(&source, &registry.remote(), target(name), &Progress::default()).await.unwrap();
    assert_eq!(pull_store(&registry.remote(), name, &memory().await).await.unwrap().digest, snapshot);
}
