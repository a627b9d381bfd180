//! A nearly full disk: growth is refused, and work that frees space goes on.

use crate::common::{pieces, push, repository, snapshot, tag};
use pfr_schema::ErrorCode;
use pfr_schema::api::TagState;
use pfr_store::{AgentReport, Clock, GcOptions, Options, Store};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A store whose disk has less than the floor free, whatever the disk.
async fn nearly_full(dir: &Path, clock: &Arc<AtomicU64>) -> Store {
    opened(dir, clock, Some(u64::MAX)).await
}

async fn opened(dir: &Path, clock: &Arc<AtomicU64>, min_free: Option<u64>) -> Store {
    let now = Arc::clone(clock);
    let options = Options { clock: Clock::new(move || now.load(Ordering::SeqCst)), min_free, ..Options::default() };
    Store::open(dir, options).await.unwrap()
}

fn is_full<T: std::fmt::Debug>(what: &str, result: pfr_store::Result<T>) {
    let error = result.expect_err(what);
    assert_eq!(error.code(), ErrorCode::StorageFull, "{what}: {error}");
}

#[tokio::test]
async fn below_the_floor_nothing_grows_and_deletions_and_collections_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicU64::new(1_000_000_000));
    let (kept, goes, new) = (snapshot(&[1, 2, 3, 4], vec![]), snapshot(&[10, 11, 12, 13, 14, 15], vec![]), snapshot(&[20, 21], vec![]));
    let (begun, uploaded) = {
        let store = opened(dir.path(), &clock, None).await;
        push(&store, &kept, "kept").await.unwrap();
        push(&store, &goes, "goes").await.unwrap();
        let begun = store.open_push(&repository()).await.unwrap();
        let uploaded = store.open_push(&repository()).await.unwrap();
        store.ingest(&uploaded.id, pieces(&new.stream(), 1000)).await.unwrap();
        (begun, uploaded)
    };
    let store = nearly_full(dir.path(), &clock).await;
    is_full("a session", store.open_push(&repository()).await);
    is_full("an upload", store.ingest(&begun.id, pieces(&snapshot(&[30, 31], vec![]).stream(), 1000)).await);
    is_full("a commit", store.commit(&uploaded.id, new.manifest.digest, Some(tag("new")), None).await);
    is_full("a tag", store.put_tag(&repository(), tag("more"), kept.manifest.digest, Some(TagState::Absent)).await);
    is_full("a fork", store.fork(&repository(), kept.manifest.digest, "fork", 3).await);
    let report = json!({"version": "1", "interval_seconds": 30, "engines": [], "jobs": []});
    let report: AgentReport = serde_json::from_value(report).unwrap();
    is_full("a report of an agent", store.metadata().report_agent("gpu-1".parse().unwrap(), None, report).await);
    assert_eq!(store.tags(&repository(), None, 10).await.unwrap().rows.len(), 2, "nothing was half done");
    assert_eq!(store.metadata().agents(None, 10).await.unwrap().rows, []);

    store.delete_tag(&repository(), &tag("goes"), None).await.unwrap();
    store.delete_snapshot(&repository(), &goes.manifest.digest).await.unwrap();
    clock.fetch_add(2 * store.options().lease.as_millis() as u64, Ordering::SeqCst);
    let before = store.metadata().disk_bytes().await.unwrap();
    let report = store.gc(&GcOptions { grace: Duration::ZERO, ..GcOptions::default() }, &mut |_| ()).await.unwrap();
    assert!(report.packs_deleted > 0 && store.metadata().disk_bytes().await.unwrap() < before, "{report:?}");
    assert_eq!(store.fsck(false, &mut |_| ()).await.unwrap().wrong, 0);
    store.verify(&kept.manifest.digest, &mut |_| ()).await.unwrap();
    drop(store);

    let store = opened(dir.path(), &clock, None).await;
    push(&store, &new, "new").await.unwrap();
    store.verify(&new.manifest.digest, &mut |_| ()).await.unwrap();
}

#[tokio::test]
async fn the_log_is_cut_after_each_transaction_below_the_floor() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(AtomicU64::new(1_000_000_000));
    let store = opened(dir.path(), &clock, None).await;
    for number in 0..5 {
        push(&store, &snapshot(&[number], vec![]), &format!("t{number}")).await.unwrap();
    }
    let log = || std::fs::metadata(dir.path().join("metadata.sqlite-wal")).unwrap().len();
    assert!(log() > 0, "there is space: the log is not truncated");
    let full = nearly_full(dir.path(), &clock).await;
    full.delete_tag(&repository(), &tag("t0"), None).await.unwrap();
    assert_eq!(log(), 0);
}
