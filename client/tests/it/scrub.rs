//! `pf scrub` of a registry and of the local store: damaged blobs are named and quarantined, and
//! come back with a push or a pull.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, packs, pf, pull_store, push_dir, repository};
use pfr_schema::api::ScrubReport;
use pfr_store::{Options, Store};
use std::path::Path;

/// Changes one byte in the first frame of the largest pack.
fn damage(packs: &[std::path::PathBuf]) {
    let pack = packs.iter().max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let mut bytes = std::fs::read(pack).unwrap();
    bytes[100] ^= 0x20;
    std::fs::write(pack, bytes).unwrap();
}

fn report(dir: &Path, args: &[&str]) -> (i32, ScrubReport) {
    let (code, stdout, stderr) = pf(dir, &[args, &["--json"]].concat());
    (code, serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{e}: {stdout}{stderr}")))
}

/// Scrubs: clean, damaged, named, and after `heal`, which is the `verb` of the hint, well again.
async fn story(dir: &Path, args: &[&str], pack: Vec<std::path::PathBuf>, verb: &str, heal: impl AsyncFn()) {
    let (code, stdout, stderr) = pf(dir, args);
    assert!(code == 0 && stdout.contains("read and compared with checksums"), "{stdout}{stderr}");
    damage(&pack);
    let (code, stdout, stderr) = pf(dir, args);
    assert_eq!(code, 4, "{stdout}{stderr}");
    assert!(stdout.contains("blob sha256:") && stdout.contains(&format!("in {}@sha256:", repository())), "{stdout}");
    assert!(stderr.contains("1 blob") && stderr.contains(&format!("hint: {verb} the snapshots named above again: that heals")), "{stderr}");
    let full = [args, &["--full"]].concat();
    let (code, found) = report(dir, &full);
    assert!(code == 4 && found.full && found.damaged.len() == 1, "it stays in quarantine: {found:?}");
    heal().await;
    let (code, found) = report(dir, args);
    assert!(code == 0 && found.damaged.is_empty() && found.bad_packs.is_empty(), "{found:?}");
    let (code, found) = report(dir, &full);
    assert!(code == 0 && found.packs > 0 && found.damaged.is_empty() && found.bad_packs.is_empty(), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_store_is_healed_by_a_pull() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "t").await.unwrap();
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    let digest = pull_store(&registry.remote(), "t", &store).await.unwrap().digest;
    story(dir.path(), &["scrub", "--local"], packs(&dir.path().join("store")), "pull", async || {
        pull_store(&registry.remote(), "t", &store).await.unwrap();
    })
    .await;
    store.verify(&digest, &mut |_| ()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_is_healed_by_a_push() {
    let (registry, dir, source) = (Registry::start().await, tempfile::tempdir().unwrap(), directory(SMALL, &[1, 2, 3]));
    let digest = push_dir(&registry.remote(), source.path(), "t").await.unwrap().digest;
    let url = registry.url.clone();
    story(dir.path(), &["scrub", "--rate", "1GB", "--registry", &url], registry.packs(), "push", async || {
        push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    })
    .await;
    registry.store.verify(&digest, &mut |_| ()).await.unwrap();
}
