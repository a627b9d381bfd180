//! Reports of capture agents: taken, listed, and shown as what was once they are old.

use crate::common::{Registry, ok, refused};
use object_store::memory::InMemory;
use pfr_schema::api::AuditOutcome;
use pfr_schema::{AccessToken, Digest, ErrorCode, api};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn report(version: &str) -> Value {
    json!({
        "version": version, "interval_seconds": 30,
        "engines": [{
            "engine": "e", "fingerprint": Digest::sha256(b"f"), "state": "incomplete", "note": "rank 1 of 2",
            "snapshots": 1, "restores": 0, "staged": 0,
        }],
        "jobs": [{
            "id": "j", "kind": "drain", "about": "undisclosed/vault", "state": "failed", "started_at": 1, "bytes_done": 5, "bytes_total": 9,
            "note": "undisclosed/vault: no room",
        }],
    })
}

async fn list(registry: &Registry, base: &str) -> Vec<api::AgentInfo> {
    let list: api::AgentList = ok(registry.get(&format!("{base}/v1/agents")).await).await;
    list.agents
}

#[tokio::test]
async fn the_last_report_of_each_agent_is_listed_in_its_domain() {
    let registry = Registry::start().await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    for (path, version) in
        [("/v1/agents/gpu-1", "1"), ("/v1/agents/gpu-1", "2"), ("/v1/agents/gpu-1", "2"), ("/domains/acme/v1/agents/x.y", "3")]
    {
        let answer = registry.put(path, &report(version)).await;
        assert_eq!(answer.status(), StatusCode::NO_CONTENT, "{path}");
        assert!(answer.bytes().await.expect("no body").is_empty(), "{path}");
    }
    let (here, there) = (list(&registry, "").await, list(&registry, "/domains/acme").await);
    let [agent] = &here[..] else { panic!("one agent in {here:?}") };
    assert_eq!((agent.name.as_str(), agent.silent, agent.label.as_deref()), ("gpu-1", false, None));
    assert_eq!(serde_json::to_value(&agent.report).expect("JSON"), report("2"));
    assert_eq!((there.len(), there[0].name.as_str(), there[0].report.version.as_str()), (1, "x.y", "3"));
    for number in 2..5 {
        assert!(registry.put(&format!("/v1/agents/gpu-{number}"), &report("1")).await.status().is_success());
    }
    let page: api::AgentList = ok(registry.get("/v1/agents?limit=3").await).await;
    assert_eq!((page.agents.len(), page.next.as_deref()), (3, Some("gpu-3")));
    let page: api::AgentList = ok(registry.get("/v1/agents?limit=3&after=gpu-3").await).await;
    assert_eq!((page.agents.len(), page.next), (1, None));
}

/// A report may be large: an answer with a thousand of them would take hundreds of megabytes.
#[tokio::test]
async fn an_answer_has_at_most_a_hundred_agents_whatever_its_limit() {
    let registry = Registry::start().await;
    for number in 100..201 {
        assert!(registry.put(&format!("/v1/agents/gpu-{number}"), &report("1")).await.status().is_success());
    }
    let page: api::AgentList = ok(registry.get("/v1/agents?limit=1000").await).await;
    assert_eq!((page.agents.len(), page.next.as_deref()), (100, Some("gpu-199")));
    let page: api::AgentList = ok(registry.get("/v1/agents?limit=1000&after=gpu-199").await).await;
    assert_eq!((page.agents.len(), page.agents[0].name.as_str(), page.next), (1, "gpu-200", None));
}

#[tokio::test]
async fn a_report_that_is_none_is_refused_and_the_last_one_stays() {
    let registry = Registry::start().await;
    assert!(registry.put("/v1/agents/gpu-1", &report("1")).await.status().is_success());
    for (place, value, word) in [
        ("/interval_seconds", json!(0), "1 to 3600"),
        ("/interval_seconds", json!("30"), "interval_seconds"),
        ("/engines/0/state", json!("asleep"), "asleep"),
        ("/engines/0/engine", json!("e".repeat(129)), "128 characters"),
        ("/engines", json!(vec![report("1")["engines"][0].clone(); 65]), "at most 64"),
        ("/jobs", Value::Null, "jobs"),
    ] {
        let mut wrong = report("2");
        *wrong.pointer_mut(place).expect("a place") = value;
        let detail = refused(registry.put("/v1/agents/gpu-1", &wrong).await, ErrorCode::InvalidRequest).await;
        assert!(detail.contains(word), "{place}: {detail}");
    }
    for name in ["-gpu", "a%2Fb", "a%20b", &"a".repeat(254)] {
        refused(registry.put(&format!("/v1/agents/{name}"), &report("2")).await, ErrorCode::InvalidName).await;
    }
    refused(registry.put("/domains/nowhere/v1/agents/gpu-1", &report("2")).await, ErrorCode::DomainUnknown).await;
    refused(registry.get("/v1/agents?limit=0").await, ErrorCode::InvalidRequest).await;
    let listed = list(&registry, "").await;
    assert_eq!((listed.len(), listed[0].report.version.as_str()), (1, "1"));
}

/// Agents are often upgraded before their registry.
#[tokio::test]
async fn what_a_newer_agent_adds_to_its_report_is_ignored_within_the_limit_on_bodies() {
    let registry = Registry::start_with(|config| config.max_json_bytes = 1 << 20).await;
    let with = |more: Value| {
        let mut newer = report("2");
        for place in ["", "/engines/0", "/jobs/0"] {
            newer.pointer_mut(place).expect("a place")["more"] = more.clone();
        }
        newer
    };
    let answer = registry.put("/v1/agents/gpu-1", &with(json!({"hosts": [7], "notes": "x".repeat(1000)}))).await;
    assert_eq!(answer.status(), StatusCode::NO_CONTENT);
    let listed = list(&registry, "").await;
    assert_eq!(serde_json::to_value(&listed[0].report).expect("JSON"), report("2"), "the rest is not kept");
    refused(registry.put("/v1/agents/gpu-1", &with(json!("x".repeat(1 << 20)))).await, ErrorCode::TooLarge).await;
}

#[tokio::test]
async fn an_operator_forgets_an_agent_and_the_audit_log_says_so() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let (host, operator) = (registry.token(&["*:push"]).await, registry.token(&["*:pull,admin"]).await);
    let of_agent = |method| registry.request(method, "/v1/agents/gpu-1");
    let forget = async |token: &AccessToken| registry.send_as(token, of_agent(Method::DELETE)).await;
    let put = async || registry.send_as(&host, of_agent(Method::PUT).json(&report("1"))).await.status();
    assert_eq!(put().await, StatusCode::NO_CONTENT);
    // Its own token does not suffice: several agents may share it.
    refused(forget(&host).await, ErrorCode::Denied).await;
    assert_eq!(forget(&operator).await.status(), StatusCode::NO_CONTENT);
    let again = refused(forget(&operator).await, ErrorCode::NotFound).await;
    assert!(again.contains("gpu-1"), "{again}");
    assert_eq!(put().await, StatusCode::NO_CONTENT);
    assert_eq!(forget(&operator).await.status(), StatusCode::NO_CONTENT, "it was there again");

    let log = registry.request(Method::GET, "/v1/audit?order=oldest");
    let log: api::AuditList = ok(registry.send_as(&operator, log).await).await;
    let said: Vec<_> = log.records.iter().map(|r| (r.operation.as_str(), r.outcome, r.subject.as_deref())).collect();
    let of = |outcome| ("forget_agent", outcome, Some("gpu-1"));
    assert_eq!(said, [AuditOutcome::Refused, AuditOutcome::Done, AuditOutcome::Failed, AuditOutcome::Done].map(of));
}

#[tokio::test]
async fn a_nearly_full_disk_refuses_reports_and_not_the_deletion_of_one() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    assert!(registry.put("/v1/agents/gpu-1", &report("1")).await.status().is_success());
    registry.stopped().await;
    // The floor is so high that the disk is always below it.
    let registry = Registry::start_again(data.path(), |config| config.min_free_bytes = u64::MAX).await;
    for agent in ["gpu-1", "gpu-2"] {
        refused(registry.put(&format!("/v1/agents/{agent}"), &report("2")).await, ErrorCode::StorageFull).await;
    }
    assert_eq!(list(&registry, "").await[0].report.version, "1");
    assert_eq!(registry.delete("/v1/agents/gpu-1").await.status(), StatusCode::NO_CONTENT);
    assert!(list(&registry, "").await.is_empty());
    registry.stopped().await;
}

#[tokio::test]
async fn an_agent_that_has_stopped_is_shown_as_stopped() {
    let registry = Registry::start().await;
    let mut last = report("1");
    (last["stopped"], last["jobs"][0]["state"]) = (json!(true), json!("running"));
    assert!(registry.put("/v1/agents/gpu-1", &last).await.status().is_success());
    let listed = list(&registry, "").await;
    assert!(listed[0].report.stopped && !listed[0].silent, "{listed:?}");
    let page = registry.get("/ui/-/engines").await.text().await.expect("text");
    assert!(page.contains("stopped <time") && page.matches(">not known<").count() == 2 && !page.contains("incomplete"), "{page}");
    // It is there again.
    assert!(registry.put("/v1/agents/gpu-1", &report("1")).await.status().is_success());
    let page = registry.get("/ui/-/engines").await.text().await.expect("text");
    assert!(!page.contains("stopped <time") && page.contains("incomplete"), "{page}");
}

#[tokio::test]
async fn an_agent_that_reports_no_more_is_silent_and_every_replica_says_so() {
    let ahead = Arc::new(AtomicU64::new(0));
    let clock = {
        let (ahead, system) = (Arc::clone(&ahead), Clock::system());
        Clock::new(move || system.now() + ahead.load(Ordering::Relaxed))
    };
    let metadata = SqliteMetadata::open_in_memory(clock.clone()).await.expect("metadata");
    let store = Store::new(Arc::new(InMemory::new()), metadata, Options { clock, ..Options::default() });
    let (one, two) = (Registry::start_over(store.clone()).await, Registry::start_over(store).await);
    assert!(one.put("/v1/agents/gpu-1", &report("1")).await.status().is_success());
    let silent = async || [list(&one, "").await[0].silent, list(&two, "").await[0].silent];
    assert_eq!(silent().await, [false, false]);
    ahead.store(91_000, Ordering::Relaxed);
    assert_eq!(silent().await, [true, true]);
    assert!(two.put("/v1/agents/gpu-1", &report("1")).await.status().is_success());
    assert_eq!(silent().await, [false, false]);
}

#[tokio::test]
async fn references_of_jobs_are_shown_to_callers_that_see_all_repositories() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let host = registry.token(&["team/*:push"]).await;
    let put = registry.request(Method::PUT, "/v1/agents/gpu-1").json(&report("1"));
    assert_eq!(registry.send_as(&host, put).await.status(), StatusCode::NO_CONTENT);
    let all = registry.token(&["*:pull,admin"]).await;
    let some = registry.token(&["*:admin", "team/*:pull"]).await;
    for (token, shown) in [(&all, true), (&some, false)] {
        for path in ["/v1/agents", "/ui/-/engines"] {
            let answer = registry.send_as(token, registry.request(Method::GET, path)).await;
            let (status, text) = (answer.status(), answer.text().await.expect("text"));
            assert_eq!((status, text.contains("undisclosed")), (StatusCode::OK, shown), "{path}: {text}");
            assert!(text.contains("gpu-1") && text.contains("failed") && text.contains("test"), "{path}: {text}");
        }
    }
}
