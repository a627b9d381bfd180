//! What capture agents report: the last report of each, page by page, until it is too old.

use crate::common::rig::{Backend, Rig};
use pfr_schema::{Digest, ErrorCode};
use pfr_store::{AgentInfo, AgentName, AgentReport, Metadata, Options};
use serde_json::json;
use std::time::Duration;

on_backends!([sqlite = SqliteDisk, postgres = PostgresDisk]:
    each_agent_has_its_last_report_with_its_time_until_it_is_forgotten,
    a_report_that_this_version_cannot_read_hides_no_other,
    there_is_a_limit_on_agents_and_those_that_are_known_report_on,
    a_new_agent_takes_the_place_of_the_one_that_has_been_silent_for_longest,
    an_agent_that_is_forgotten_is_there_again_after_its_next_report,
);

const DAY: Duration = Duration::from_secs(86_400);
/// Three of the longest intervals.
const STALE: Duration = Duration::from_secs(3 * 3600);

fn name(text: &str) -> AgentName {
    text.parse().unwrap()
}

fn report(version: &str) -> AgentReport {
    let engine = json!({
        "engine": "e", "model": "m\u{0}", "fingerprint": Digest::sha256(b"f"), "state": "ready",
        "snapshots": 1, "restores": 2, "staged": 0,
    });
    serde_json::from_value(json!({"version": version, "interval_seconds": 30, "engines": [engine], "jobs": []})).unwrap()
}

async fn put(metadata: &dyn Metadata, agent: &str, version: &str) {
    metadata.report_agent(name(agent), Some("a token".into()), report(version)).await.unwrap();
}

async fn all(metadata: &dyn Metadata) -> Vec<AgentInfo> {
    metadata.agents(None, 2000).await.unwrap().rows
}

async fn each_agent_has_its_last_report_with_its_time_until_it_is_forgotten(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    assert!(all(metadata).await.is_empty());
    for agent in ["gpu-2", "gpu-1", "GPU-3"] {
        put(metadata, agent, "1").await;
    }
    rig.seconds(30);
    put(metadata, "gpu-1", "2").await;
    metadata.report_agent(name("gpu-2"), None, report("2")).await.unwrap();
    let listed = all(metadata).await;
    let shown: Vec<(&str, &str, Option<&str>)> =
        listed.iter().map(|agent| (agent.name.as_str(), agent.report.version.as_str(), agent.label.as_deref())).collect();
    assert_eq!(shown, [("GPU-3", "1", Some("a token")), ("gpu-1", "2", Some("a token")), ("gpu-2", "2", None)]);
    assert_eq!(listed[1].report, report("2"));
    assert_eq!((listed[1].seen_at, listed[2].seen_at), (listed[0].seen_at + 30_000, listed[0].seen_at + 30_000));

    // Page by page.
    let first = metadata.agents(None, 2).await.unwrap();
    assert_eq!((first.rows.as_slice(), first.next.as_deref()), (&listed[..2], Some("gpu-1")));
    let rest = metadata.agents(first.next, 2).await.unwrap();
    assert_eq!((rest.rows.as_slice(), rest.next), (&listed[2..], None));

    // Three intervals after the last report, and a day after it.
    let silent = async || all(metadata).await.iter().map(|agent| agent.silent).collect::<Vec<_>>();
    rig.seconds(60);
    assert_eq!(silent().await, [false, false, false]);
    rig.seconds(1);
    assert_eq!(silent().await, [true, false, false]);
    put(metadata, "GPU-3", "1").await;
    assert_eq!(silent().await, [false, false, false]);
    assert_eq!(metadata.forget_agents(DAY).await.unwrap(), 0);
    rig.wait(DAY - Duration::from_secs(30));
    assert_eq!(metadata.forget_agents(DAY).await.unwrap(), 2);
    assert_eq!(all(metadata).await.iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>(), ["GPU-3"]);
}

async fn a_report_that_this_version_cannot_read_hides_no_other(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    for agent in ["a", "b", "c"] {
        put(&*rig.metadata, agent, "1").await;
    }
    // As a newer version would.
    rig.sql("UPDATE agents SET report = '{\"version\":\"2\",\"hosts\":7}' WHERE name = 'b'");
    let first = rig.metadata.agents(None, 2).await.unwrap();
    assert_eq!((first.rows.len(), first.next.as_deref()), (1, Some("b")));
    let rest = rig.metadata.agents(first.next, 2).await.unwrap();
    assert_eq!((rest.rows.len(), rest.rows[0].name.as_str()), (1, "c"));
}

async fn there_is_a_limit_on_agents_and_those_that_are_known_report_on(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    // At once: one commit then waits for the disk with many others.
    futures::future::join_all((0..1000).map(|number| async move { put(metadata, &format!("gpu-{number}"), "1").await })).await;
    let refused = rig.metadata.report_agent(name("one-more"), None, report("1")).await.unwrap_err();
    assert!(refused.code() == ErrorCode::TooLarge && refused.to_string().contains("1000"), "{refused}");
    put(&*rig.metadata, "gpu-7", "2").await;
    assert_eq!(all(&*rig.metadata).await.len(), 1000);
    rig.wait(DAY);
    put(&*rig.metadata, "gpu-7", "3").await;
    assert_eq!(rig.metadata.forget_agents(DAY - Duration::from_secs(1)).await.unwrap(), 999);
    put(&*rig.metadata, "one-more", "1").await;
}

async fn a_new_agent_takes_the_place_of_the_one_that_has_been_silent_for_longest(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    put(metadata, "first", "1").await;
    rig.seconds(1);
    futures::future::join_all((0..999).map(|number| async move { put(metadata, &format!("gpu-{number}"), "1").await })).await;
    let is_refused = async |agent: &str| {
        let refused = metadata.report_agent(name(agent), None, report("1")).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::TooLarge, "{refused}");
    };
    let lacks = async |gone: &[&str]| {
        let names: Vec<String> = all(metadata).await.iter().map(|agent| agent.name.to_string()).collect();
        assert_eq!(names.len(), 1000);
        for agent in gone {
            assert!(!names.iter().any(|name| name == agent), "{agent} is there");
        }
    };
    rig.wait(STALE - Duration::from_secs(1));
    is_refused("new-1").await;
    lacks(&["new-1"]).await;
    // Only the first one has been silent for longer than that.
    rig.seconds(1);
    put(metadata, "new-1", "1").await;
    is_refused("new-2").await;
    lacks(&["first", "new-2"]).await;
    // One that reports again in time stays.
    put(metadata, "gpu-0", "2").await;
    rig.seconds(1);
    put(metadata, "new-2", "1").await;
    lacks(&["first", "gpu-1"]).await;
    assert!(all(metadata).await.iter().any(|agent| agent.name.as_str() == "gpu-0"));
}

async fn an_agent_that_is_forgotten_is_there_again_after_its_next_report(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    for agent in ["gpu-1", "gpu-2"] {
        put(metadata, agent, "1").await;
    }
    assert!(metadata.forget_agent(name("gpu-1"), None).await.unwrap());
    assert!(!metadata.forget_agent(name("gpu-1"), None).await.unwrap(), "it is forgotten already");
    assert_eq!(all(metadata).await.iter().map(|agent| agent.name.as_str()).collect::<Vec<_>>(), ["gpu-2"]);
    put(metadata, "gpu-1", "2").await;
    assert_eq!(all(metadata).await[0].report.version, "2");
}
