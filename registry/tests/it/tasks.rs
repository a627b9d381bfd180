//! Background tasks over HTTP.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::ErrorCode;
use pfr_schema::api::{TaskInfo, TaskList, TaskState};
use pfr_store::{Options, Store};
use serde_json::json;
use std::time::Duration;

async fn list(registry: &Registry) -> Vec<TaskInfo> {
    let list: TaskList = ok(registry.get("/v1/tasks").await).await;
    list.tasks
}

/// Waits, for at most a minute, until a task meets a condition.
async fn until(registry: &Registry, name: &str, is: impl Fn(&TaskInfo) -> bool) -> TaskInfo {
    for _ in 0..3000 {
        let task = list(registry).await.into_iter().find(|task| task.name == name).expect("the task");
        if is(&task) {
            return task;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{name} never was as it should be: {:?}", list(registry).await)
}

#[tokio::test]
async fn tasks_are_listed_with_their_intervals_in_the_order_in_which_they_run() {
    let registry = Registry::start_with(|config| config.scrub_interval_seconds = 604_800).await;
    let tasks = list(&registry).await;
    let shown: Vec<(&str, u64)> = tasks.iter().map(|task| (task.name.as_str(), task.interval_seconds)).collect();
    let wanted = [
        ("collection", 300),
        ("journal-summary", 300),
        ("merging", 300),
        ("compaction", 300),
        ("retention", 3600),
        ("audit-retention", 1800),
        ("event-retention", 1800),
        ("prefix-index", 300),
        ("scrub", 604_800),
        ("domain-removal", 60),
    ];
    assert_eq!(shown, wanted);
    let scrub = until(&registry, "scrub", |task| task.next_run_at.is_some()).await;
    assert_eq!((scrub.state, scrub.succeeded_at), (TaskState::Idle, None));
    let off = Registry::start_with(|config| config.gc_interval_seconds = 0).await;
    // Without collections, too, deleted domains are removed, the index is filled, retention
    // policies are followed, and the audit log and the events are kept small.
    let others = ["retention", "audit-retention", "event-retention", "prefix-index", "domain-removal"];
    let collections = list(&off).await.into_iter().filter(|task| !others.contains(&&*task.name));
    assert!(collections.into_iter().all(|task| task.state == TaskState::Off && task.next_run_at.is_none()));
}

#[tokio::test]
async fn a_scheduled_scrub_finds_damage_by_itself() {
    let registry = Registry::start_with(|config| (config.scrub_interval_seconds, config.scrub_bytes_per_second) = (1, 0)).await;
    registry.push(REPO, &snapshot(0..20, vec![]), Some("t")).await;
    until(&registry, "scrub", |task| task.succeeded_at.is_some()).await;
    for (path, bytes) in packs(registry.dir.path()) {
        let mut bytes = bytes;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path, bytes).expect("written");
    }
    for _ in 0..3000 {
        let damaged: Vec<pfr_schema::api::DamagedBlob> = ok(registry.get("/v1/damaged").await).await;
        if !damaged.is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no scrub found the damage");
}

fn packs(dir: &std::path::Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let (mut found, mut dirs) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                dirs.push(path);
            } else if path.extension().is_some_and(|kind| kind == "pfpack") {
                found.push((path.clone(), std::fs::read(&path).expect("read")));
            }
        }
    }
    assert!(!found.is_empty());
    found
}

#[tokio::test]
async fn a_pause_holds_in_every_replica_and_after_a_restart_and_can_be_ended() {
    let store = Store::open_in_memory(Options::default()).await.expect("a store");
    let start = || Registry::start_over_with(store.clone(), |config| config.gc_interval_seconds = 1);
    let (one, two) = (start().await, start().await);
    until(&two, "compaction", |task| task.runs > 0).await;
    let paused: TaskInfo = ok(one.post("/v1/tasks/compaction/pause", &json!({"seconds": 3600})).await).await;
    let end = paused.pause_ends_at.expect("an end");
    let seen = until(&two, "compaction", |task| task.state == TaskState::Paused).await;
    assert_eq!(seen.pause_ends_at, Some(end));
    let collected = until(&two, "collection", |_| true).await.runs;
    until(&two, "collection", |task| task.runs > collected + 2).await;
    assert_eq!(until(&two, "compaction", |_| true).await.runs, seen.runs, "it does not run while others do");
    two.stopped().await;
    let two = start().await;
    until(&two, "collection", |task| task.runs > 1).await;
    let compaction = until(&two, "compaction", |_| true).await;
    assert_eq!((compaction.runs, compaction.pause_ends_at), (0, Some(end)));
    let _: TaskInfo = ok(two.post("/v1/tasks/compaction/resume", &json!({})).await).await;
    until(&two, "compaction", |task| task.runs > 0 && task.pause_ends_at.is_none()).await;
    until(&one, "compaction", |task| task.state != TaskState::Paused).await;
    let text = one.get("/metrics").await.text().await.expect("text");
    assert!(text.contains("pf_paused_tasks{task=\"compaction\"} 0"), "{text}");
}

#[tokio::test]
async fn an_unknown_task_and_a_pause_without_end_are_refused() {
    let registry = Registry::start().await;
    let detail = refused(registry.post("/v1/tasks/other/pause", &json!({"seconds": 60})).await, ErrorCode::NotFound).await;
    assert!(detail.contains("/v1/tasks"), "{detail}");
    refused(registry.post("/v1/tasks/other/resume", &json!({})).await, ErrorCode::NotFound).await;
    for seconds in [0, 30 * 86_400 + 1] {
        let body = json!({"seconds": seconds});
        refused(registry.post("/v1/tasks/scrub/pause", &body).await, ErrorCode::InvalidRequest).await;
    }
    refused(registry.post("/v1/tasks/scrub/pause", &json!({})).await, ErrorCode::InvalidRequest).await;
}
