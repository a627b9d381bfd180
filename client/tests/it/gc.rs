//! `pf gc` and `pf pin`, over real stores and a real registry.

use crate::common::sample::directory;
use crate::common::{Registry, pf, pull_store, push_dir, repository, tag, target};
use pfr_client::{Progress, Source, push};
use pfr_schema::api::{GcReport, Usage};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_store::{Options, Store};
use pfr_testkit::json::without_moments;
use pfr_testkit::snapshot::Shape;
use std::path::Path;

const SHAPE: Shape = Shape::of(Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 64, dtype: Dtype::Bf16 });

fn report(dir: &Path, args: &[&str]) -> GcReport {
    let (code, stdout, stderr) = pf(dir, &[args, &["--json"]].concat());
    assert_eq!(code, 0, "{stderr}");
    let mut report: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    // `--json` gives moments as text, the API in milliseconds.
    without_moments(&mut report);
    serde_json::from_value(report).unwrap()
}

/// A registry with three snapshots, and a local store that has pulled them.
async fn pulled() -> (Registry, tempfile::TempDir, u64) {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let mut size = 0;
    for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
        let numbers: Vec<u64> = (i as u64 * 100..i as u64 * 100 + 40).collect();
        let source = directory(SHAPE, &numbers);
        push_dir(&registry.remote(), source.path(), name).await.unwrap();
        let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
        let digest = pull_store(&registry.remote(), name, &store).await.unwrap().digest;
        store.put_tag(&repository(), tag(name), digest, None).await.unwrap();
        size = store.metadata().disk_bytes().await.unwrap();
    }
    (registry, dir, size)
}

/// Bytes that the packs of the local store take.
fn disk(dir: &Path) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&pf(dir, &["stats", "--local", "--json"]).1).unwrap();
    stats["disk_bytes"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_outgrew_its_size_loses_what_was_not_used_and_keeps_what_is_pinned() {
    let (registry, dir, size) = pulled().await;
    let (code, stdout, _) = pf(dir.path(), &["pin", "--local", "team/agent:a"]);
    assert!(code == 0 && stdout.contains("pinned"), "{stdout}");
    let limit = (size * 2 / 3 + size / 6).to_string();
    let args = ["gc", "--local", "--max-size", limit.as_str()];
    assert_eq!(report(dir.path(), &[&args[..], &["--dry-run"]].concat()).evicted, 1);
    let done = report(dir.path(), &args);
    assert!(done.evicted == 1 && disk(dir.path()) <= size * 5 / 6, "one run frees it: {done:?}, {} bytes", disk(dir.path()));
    assert_eq!(report(dir.path(), &args).evicted, 0);
    let there = |name: &str| pf(dir.path(), &["inspect", "--local", &format!("team/agent:{name}")]).0 == 0;
    assert_eq!([there("a"), there("b"), there("c")], [true, false, true]);
    let (code, stdout, _) = pf(dir.path(), &["gc", "--local", "--max-size", "1kB"]);
    assert!(code == 0 && stdout.contains("pinned") && stdout.contains("evicted"), "{stdout}");
    assert_eq!([there("a"), there("c")], [true, false]);
    assert_eq!(pf(dir.path(), &["pin", "--local", "team/agent:a", "--remove"]).0, 0);
    let done = report(dir.path(), &["gc", "--local", "--max-size", "0"]);
    assert_eq!((done.evicted, disk(dir.path())), (1, 0), "{done:?}");
    assert!(!there("a"));
    // An evicted snapshot can be pulled again.
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    let digest = pull_store(&registry.remote(), "b", &store).await.unwrap().digest;
    store.verify(&digest, &mut |_| ()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_makes_room_if_the_configuration_limits_the_store() {
    let (registry, dir, size) = pulled().await;
    let config = dir.path().join(".config/pf");
    std::fs::create_dir_all(&config).unwrap();
    let url = registry.remote().url().to_string();
    std::fs::write(config.join("config.toml"), format!("registry = {url:?}\nmax-store-size = \"{}B\"\n", size * 5 / 6)).unwrap();
    let (code, _, stderr) = pf(dir.path(), &["pull", "team/agent:a"]);
    assert_eq!(code, 0, "{stderr}");
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    let left = store.snapshots(&repository(), None, 10).await.unwrap().rows;
    // The pull used `a` again, so `b` is what was not used for longest. The last pull is tagged
    // `here`, too.
    let tags: Vec<String> = left.iter().flat_map(|row| row.tags.iter().map(ToString::to_string)).collect();
    assert_eq!(tags, ["c", "here", "a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_pushed_or_pulled_again_is_used_again() {
    let (registry, dir, size) = pulled().await;
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    let digests = async || {
        let mut found = Vec::new();
        for name in ["a", "b", "c"] {
            found.push(store.tag(&repository(), &tag(name)).await.unwrap().digest);
        }
        found
    };
    let order = async || store.metadata().evictable(10).await.unwrap().into_iter().map(|snapshot| snapshot.digest).collect::<Vec<_>>();
    let [a, b, c] = digests().await[..] else { panic!("three snapshots") };
    assert_eq!(order().await, [a, b, c]);
    let source = Source::Store { store: store.clone(), snapshot: a };
    push(&source, &registry.remote(), target("again"), &Progress::default()).await.unwrap();
    assert_eq!(order().await, [b, c, a], "a was pushed again");
    pull_store(&registry.remote(), "b", &store).await.unwrap();
    assert_eq!(order().await, [c, a, b], "b was pulled again");
    let limit = (size * 2 / 3 + size / 6).to_string();
    assert_eq!(report(dir.path(), &["gc", "--local", "--max-size", &limit]).evicted, 1);
    assert_eq!(order().await, [a, b], "c was not used for longest");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_interrupted_pull_left_is_told_and_freed_at_once() {
    let (dir, source) = (tempfile::tempdir().unwrap(), directory(SHAPE, &(0..40).collect::<Vec<_>>()));
    let registry = Registry::start().await;
    push_dir(&registry.remote(), source.path(), "a").await.unwrap();
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    pull_store(&registry.remote(), "a", &store).await.unwrap();
    let size = store.metadata().disk_bytes().await.unwrap();
    let ls = || pf(dir.path(), &["ls", "--local"]).1;
    assert!(!ls().contains("unfinished"), "{}", ls());
    // As a killed process leaves it: a session that neither committed nor ended, and what it took
    // in.
    let manifest = store.tag(&repository(), &tag("here")).await.unwrap().digest;
    let session = store.open_push(&repository()).await.unwrap();
    assert!(store.missing(&session.id, vec![(manifest, pfr_schema::Kind::Manifest)]).await.unwrap().is_empty());
    store.delete_snapshot(&repository(), &manifest).await.unwrap();
    let unfinished = "of an unfinished pull, import or capture into team/agent, kept until";
    assert!(ls().contains("holds no snapshot yet, but") && ls().contains(unfinished) && ls().contains("pf gc --unfinished"), "{}", ls());
    let (code, stdout, _) = pf(dir.path(), &["gc", "--local"]);
    assert!(
        code == 0 && stdout.contains("nothing freed: ") && stdout.contains("unreferenced, protected by an unfinished pull"),
        "{stdout}"
    );
    let df = || {
        let mut usage: serde_json::Value = serde_json::from_str(&pf(dir.path(), &["df", "--local", "--json"]).1).unwrap();
        without_moments(&mut usage);
        serde_json::from_value::<Usage>(usage).unwrap()
    };
    let usage = df();
    assert!(usage.leased.bytes > 0 && usage.live_bytes + usage.garbage_bytes == 0 && usage.disk_bytes == size, "{usage:?}");
    let (code, stdout, _) = pf(dir.path(), &["df", "--local"]);
    assert!(code == 0 && stdout.contains("  NOTE\n") && stdout.contains("leased") && stdout.contains("into team/agent"), "{stdout}");
    let planned = report(dir.path(), &["gc", "--local", "--unfinished", "--dry-run"]);
    let done = report(dir.path(), &["gc", "--local", "--unfinished"]);
    assert_eq!((planned.released, planned.freed_bytes, planned.packs_deleted), (done.released, usage.leased.bytes, done.packs_deleted));
    assert_eq!((done.freed_bytes, done.unclaimed, df().disk_bytes), (usage.leased.bytes, 0, 0));
    assert!(ls().contains("holds nothing yet"), "{}", ls());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_collects_when_asked() {
    let registry = Registry::start_with(|config| (config.gc_interval_seconds, config.gc_grace_seconds) = (0, 0)).await;
    let (dir, source) = (tempfile::tempdir().unwrap(), directory(SHAPE, &(0..40).collect::<Vec<_>>()));
    let digest = push_dir(&registry.remote(), source.path(), "a").await.unwrap().digest;
    registry.remote().delete_snapshot(&repository(), &digest).await.unwrap();
    let url = registry.remote().url().to_string();
    let done = report(dir.path(), &["gc", "--registry", &url]);
    assert!(done.trigger == "request" && done.released > 80 && done.deleted_bytes > 0, "the first run frees it: {done:?}");
    assert_eq!(registry.store.metadata().disk_bytes().await.unwrap(), 0);
    let (code, stdout, stderr) = pf(dir.path(), &["gc", "--remote", "--dry-run", "--registry", &url]);
    assert!(code == 0 && stdout.contains("nothing was changed") && stdout.contains("nothing would be freed"), "{stdout}{stderr}");
    let (code, stdout, stderr) = pf(dir.path(), &["df", "--registry", &url]);
    assert!(code == 0 && stdout.contains("snapshots") && stdout.contains("total"), "{stdout}{stderr}");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    for args in [
        &["gc", "--max-size", "much"][..],
        &["gc", "--max-size", "1GiB"],
        &["gc", "--unfinished"],
        &["pin"],
        &["pin", "a:b"],
        &["pin", "--local", "http://r:1/a:b"],
    ] {
        let (code, stdout, stderr) = pf(dir.path(), args);
        assert_eq!((code, stdout.as_str()), (1, ""), "{args:?}: {stderr}");
    }
    assert_eq!(pf(dir.path(), &["gc", "--local"]).0, 5);
}
