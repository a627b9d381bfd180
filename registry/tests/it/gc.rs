//! Garbage collection by request, on schedule and by command.

use crate::common::snapshot::snapshot;
use crate::common::trouble::{self, Trouble};
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::ErrorCode;
use pfr_schema::api::{GcReport, GcRuns, Usage};
use pfr_store::{Clock, Options, Store};
use pfr_testkit::json::without_moments;
use reqwest::StatusCode;
use serde_json::json;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Calls `done` until it returns a value, for at most a minute.
async fn until<T>(what: &str, mut done: impl AsyncFnMut() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(value) = done().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), wait).await.unwrap_or_else(|_| panic!("waited a minute: {what}"))
}

#[tokio::test]
async fn a_collection_is_asked_for_and_tells_how_it_went() {
    let dir = tempfile::tempdir().expect("a directory");
    let now = Arc::new(AtomicU64::new(1_000_000_000));
    let told = Arc::clone(&now);
    let options = Options { clock: Clock::new(move || told.load(Ordering::SeqCst)), ..Options::default() };
    let store = Store::open(dir.path(), options).await.expect("a store");
    let registry = Registry::start_over(store).await;
    let (keep, lose) = (snapshot(0..20, vec![]), snapshot(10..50, vec![]));
    registry.push(REPO, &keep, Some("keep")).await;
    registry.push(REPO, &lose, Some("lose")).await;
    let gone = registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{}", lose.manifest)).await;
    assert!(gone.status().is_success());
    now.fetch_add(3_600_001, Ordering::SeqCst);

    let response = registry.post("/v1/gc", &json!({"dry_run": true})).await;
    assert_eq!(response.status(), StatusCode::OK);
    let planned: GcReport = ok(response).await;
    assert!(planned.dry_run && planned.released > 60, "{planned:?}");
    let runs: GcRuns = ok(registry.get("/v1/gc").await).await;
    assert!(runs.runs.is_empty(), "a dry run leaves no trace");

    let response = registry.post("/v1/gc", &json!({})).await;
    assert_eq!(response.status(), StatusCode::ACCEPTED);
    let begun: GcReport = ok(response).await;
    assert_eq!((begun.trigger.as_str(), begun.dry_run), ("request", false));
    let path = format!("/v1/gc/{}", begun.id);
    let ended = until("the collection ends", async || {
        let report: GcReport = ok(registry.get(&path).await).await;
        report.finished_at.is_some().then_some(report)
    })
    .await;
    assert_eq!((ended.released, ended.freed_bytes, ended.error), (planned.released, planned.freed_bytes, None));
    assert!(ended.draining_bytes > 0 && ended.packs_deleted == 0, "the grace period is an hour");
    let runs: GcRuns = ok(registry.get("/v1/gc?limit=1").await).await;
    assert_eq!((runs.runs.len(), &runs.runs[0].id), (1, &begun.id));
    let whole = registry.fetch(REPO, &keep.digests()).await;
    assert_eq!(whole.len(), keep.blobs.len());

    refused(registry.get("/v1/gc/0190aaaa-0000-7000-8000-000000000000").await, ErrorCode::NotFound).await;
    refused(registry.get("/v1/gc/x").await, ErrorCode::NotFound).await;
    refused(registry.post("/v1/gc", &json!({"dry": true})).await, ErrorCode::InvalidRequest).await;
    let text = registry.get("/metrics").await.text().await.expect("text");
    assert!(text.contains("pf_gc_runs_total{trigger=\"request\",outcome=\"done\"} 1"), "{text}");
    assert!(text.contains(&format!("pf_gc_freed_objects_total {}", ended.released)), "{text}");
    assert!(text.contains(&format!("pf_gc_draining_bytes {}", ended.draining_bytes)), "{text}");
}

#[tokio::test]
async fn a_commit_ends_its_leases_and_usage_tells_what_takes_up_room() {
    let registry = Registry::start_with(|config| (config.gc_interval_seconds, config.gc_grace_seconds) = (0, 0)).await;
    let (gone, unfinished) = (snapshot(0..20, vec![]), snapshot(30..50, vec![]));
    registry.push(REPO, &gone, Some("gone")).await;
    let push = registry.open_push(REPO).await;
    let _: pfr_schema::api::FramesStored = ok(registry.put_frames(&push, unfinished.stream()).await).await;
    let before: Usage = ok(registry.get("/v1/usage").await).await;
    assert!(before.live_bytes > 0 && before.leased.bytes > 0 && before.garbage_bytes == 0 && before.snapshots == 1, "{before:?}");
    assert_eq!(before.leased.sessions[0].repository.as_str(), "team/agent");
    assert!(registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{}", gone.manifest)).await.status().is_success());
    let deleted: Usage = ok(registry.get("/v1/usage").await).await;
    // The unfinished push has uploaded the configuration too: that blob is leased now.
    assert_eq!((deleted.live_bytes, deleted.garbage_bytes + deleted.leased.bytes), (0, before.live_bytes + before.leased.bytes));
    let planned: GcReport = ok(registry.post("/v1/gc", &json!({"dry_run": true})).await).await;
    let begun: GcReport = ok(registry.post("/v1/gc", &json!({})).await).await;
    let ended = until("the collection ends", async || {
        let report: GcReport = ok(registry.get(&format!("/v1/gc/{}", begun.id)).await).await;
        report.finished_at.is_some().then_some(report)
    })
    .await;
    assert_eq!((ended.freed_bytes, ended.unclaimed), (deleted.garbage_bytes, 0), "{ended:?}");
    assert_eq!(
        (planned.released, planned.packs_deleted, planned.deleted_bytes),
        (ended.released, ended.packs_deleted, ended.deleted_bytes)
    );
    assert_eq!(ended.protected, Some(deleted.leased));
}

#[tokio::test]
async fn a_collection_that_a_stop_ends_says_so() {
    let (store, switch) = trouble::store().await;
    let mut registry = Registry::start_over(store.clone()).await;
    let sample = snapshot(0..20, vec![]);
    registry.push(REPO, &sample, Some("t")).await;
    // The deletion is in the tables and not yet in the journal. A collection first writes it to the
    // journal, and that write hangs.
    switch.set(Trouble::Unreachable);
    refused(registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{}", sample.manifest)).await, ErrorCode::Unavailable).await;
    switch.set(Trouble::Hang);
    let begun: GcReport = ok(registry.post("/v1/gc", &json!({})).await).await;
    let now: GcReport = ok(registry.get(&format!("/v1/gc/{}", begun.id)).await).await;
    assert_eq!(now.finished_at, None);
    registry.begin_stop();
    registry.stopped().await;
    let runs = store.metadata().gc_runs(None, 10).await.expect("runs").rows;
    assert_eq!(runs.len(), 1);
    assert!(runs[0].finished_at.is_some());
    let report: GcReport = serde_json::from_str(&runs[0].report).expect("a report");
    assert_eq!((&report.id, report.finished_at), (&begun.id, runs[0].finished_at));
    assert!(report.error.expect("a reason").contains("stopped"));
}

#[tokio::test]
async fn the_schedule_collects_what_was_never_committed() {
    let change = |config: &mut pfr_registry::Config| {
        (config.lease_seconds, config.gc_interval_seconds, config.gc_grace_seconds) = (1, 1, 0);
    };
    let mut registry = Registry::start_with(change).await;
    let push = registry.open_push(REPO).await;
    let _: pfr_schema::api::FramesStored = ok(registry.put_frames(&push, snapshot(0..30, vec![]).stream()).await).await;
    assert!(registry.store.metadata().disk_bytes().await.expect("bytes") > 0);
    until("the disk is free", async || (registry.store.metadata().disk_bytes().await.expect("bytes") == 0).then_some(())).await;
    let runs: GcRuns = ok(registry.get("/v1/gc").await).await;
    assert!(runs.runs.iter().all(|run| run.trigger == "schedule") && !runs.runs.is_empty());
    assert!(runs.runs.iter().map(|run| run.unclaimed).sum::<u64>() > 60);
    registry.begin_stop();
    registry.stopped().await;
}

fn command(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PF_REGISTRY_")) {
        command.env_remove(name);
    }
    command.arg("gc").args(arguments).output().expect("the program runs")
}

#[tokio::test]
async fn the_command_collects_beside_a_registry_that_serves() {
    let registry = Registry::start_with(|config| config.gc_interval_seconds = 0).await;
    let sample = snapshot(0..30, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    let gone = registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{}", sample.manifest)).await;
    assert!(gone.status().is_success());
    let data = registry.dir.path().join("store");
    let data = data.to_str().expect("a path").to_owned();
    let report = |arguments: &[&str]| -> GcReport {
        let output = command(&[&["--data", &data, "--json"], arguments].concat());
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a report");
        without_moments(&mut report);
        serde_json::from_value(report).expect("a report")
    };
    let blobs = sample.blobs.len() as u64;
    let planned = report(&["--dry-run", "--grace", "0"]);
    assert_eq!((planned.released, planned.unclaimed), (blobs, 0), "{planned:?}");
    let done = report(&["--grace", "0"]);
    assert_eq!((done.trigger.as_str(), done.dry_run), ("command", false));
    assert_eq!((done.released, done.unclaimed), (blobs, 0), "the first run frees it: {done:?}");
    assert_eq!(registry.store.metadata().disk_bytes().await.expect("bytes"), 0);
    let output = command(&["--data", &data, "--grace", "0"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("objects freed") && text.contains("grace period"), "{text}");
}
