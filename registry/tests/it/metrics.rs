//! What operators scrape: every metric described, its unit in its name, and moved by what it
//! counts.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, refused};
use pfr_schema::ErrorCode;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

async fn scrape(registry: &Registry) -> (String, BTreeMap<String, f64>) {
    let response = registry.get("/metrics").await;
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
    let text = response.text().await.expect("text");
    let values = text.lines().filter(|l| !l.starts_with('#')).filter_map(|l| l.rsplit_once(' '));
    let values = values.map(|(name, value)| (name.to_owned(), value.parse().unwrap_or_else(|e| panic!("{name} {value}: {e}")))).collect();
    (text, values)
}

// The recorder is the process's, so this file has one test.
#[tokio::test]
async fn metrics_are_described_and_count_what_they_say() {
    let registry = Registry::start().await;
    let sample = snapshot(0..2, vec![]);
    let (_, before) = scrape(&registry).await;
    assert_eq!((before["pf_frames_received_total"], before["pf_tag_conflicts_total"]), (0.0, 0.0), "what has not happened is 0");
    registry.push(REPO, &sample, Some("latest")).await;
    registry.push(REPO, &sample, Some("latest")).await;
    registry.fetch(REPO, &sample.digests()).await;
    let body = json!({"snapshot": "latest", "if_tag_is": "absent"});
    refused(registry.put(&format!("/v1/repositories/{REPO}/tags/latest"), &body).await, ErrorCode::TagMoved).await;
    refused(registry.get("/v1/repositories/nobody/tags").await, ErrorCode::RepositoryUnknown).await;
    registry.get("/somewhere/else").await;

    let (text, values) = scrape(&registry).await;
    let frames = sample.blobs.len() as f64;
    let bytes = sample.stream().len() as f64;
    let raw = sample.blobs.iter().map(|blob| blob.bytes.len()).sum::<usize>() as f64;
    let expected = [
        ("pf_frames_received_total".to_owned(), 2.0 * frames),
        ("pf_frames_new_total".to_owned(), frames),
        ("pf_frames_received_bytes_total".to_owned(), 2.0 * bytes),
        ("pf_frames_received_raw_bytes_total".to_owned(), 2.0 * raw),
        ("pf_frames_sent_bytes_total".to_owned(), bytes),
        ("pf_commits_total{created=\"true\"}".to_owned(), 1.0),
        ("pf_commits_total{created=\"false\"}".to_owned(), 1.0),
        ("pf_tag_conflicts_total".to_owned(), 1.0),
        ("pf_errors_total{code=\"tag_moved\"}".to_owned(), 1.0),
        ("pf_errors_total{code=\"repository_unknown\"}".to_owned(), 1.0),
        ("pf_http_requests_total{route=\"/v1/repositories/{repo}/pushes/{id}/frames\",method=\"PUT\",status=\"200\"}".to_owned(), 2.0),
        ("pf_task_runs_total{task=\"collection\"}".to_owned(), 0.0),
        ("pf_running_tasks{task=\"compaction\"}".to_owned(), 0.0),
        ("pf_http_requests_total{route=\"unmatched\",method=\"GET\",status=\"404\"}".to_owned(), 1.0),
        ("pf_http_request_duration_seconds_count{route=\"/v1/repositories/{repo}/pushes\",method=\"POST\"}".to_owned(), 2.0),
    ];
    for (name, value) in expected {
        assert_eq!(values.get(&name), Some(&value), "{name} in\n{text}");
    }
    assert!(values["pf_store_rows_written_total"] > 0.0 && values["pf_store_disk_bytes"] > 0.0, "{text}");
    assert_eq!(values["pf_database_up"], 1.0, "{text}");
    assert!(values["pf_store_packs"] > 0.0 && values["pf_store_small_packs"] == values["pf_store_packs"], "{text}");
    assert!(values["pf_http_in_flight_requests"] >= 1.0, "the scrape itself is in flight");

    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations.md");
    let page = std::fs::read_to_string(page).expect("the page on operations");
    let (_, listed) = page.split_once("### What each metric means").expect("a list of metrics");
    for line in text.lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().unwrap_or_default();
        let description = text.lines().find_map(|l| l.strip_prefix(&format!("# HELP {name} ")));
        assert!(description.is_some_and(|d| !d.is_empty()), "{name} has no description");
        let units = [
            "_total",
            "_seconds",
            "_bytes",
            "_requests",
            "_connections",
            "_candidates",
            "_tasks",
            "_packs",
            "_objects",
            "_snapshots",
            "_streams",
            "_up",
        ];
        assert!(units.iter().any(|unit| name.ends_with(unit)), "{name} does not name its unit");
        let is_listed = ["`", "{"].iter().any(|end| listed.contains(&format!("`{name}{end}")));
        assert!(is_listed, "{name} is not in docs/operations.md");
    }
}
