//! Quotas over HTTP: set by the registry's operator, kept at every push, shown in usage and
//! metrics.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, problem, refused, until_metric};
use pfr_schema::ErrorCode;
use pfr_schema::api::{self, DomainQuota, Quota};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use std::process::Command;

/// Pushes to a domain; the first answer that is a refusal, or the answer to the commit.
async fn push(registry: &Registry, base: &str, s: &Snapshot, tag: &str) -> Response {
    let opened: api::Push = ok(registry.post(&format!("{base}/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    let session = format!("{base}/v1/repositories/{REPO}/pushes/{}", opened.id);
    let stored = registry.put_frames(&session, s.stream()).await;
    if !stored.status().is_success() {
        return stored;
    }
    registry.post(&format!("{session}/commit"), &json!({"manifest": s.manifest, "tag": tag})).await
}

async fn set(registry: &Registry, domain: &str, limits: Value) -> Option<Quota> {
    let answer = registry.put(&format!("/v1/domains/{domain}/quota"), &limits).await;
    ok::<DomainQuota>(answer).await.quota
}

#[tokio::test]
async fn a_push_beyond_the_quota_is_refused_for_good_and_pulls_and_deletions_go_on() {
    let registry = Registry::start().await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    let (one, two) = (snapshot(0..4, vec![]), snapshot(4..8, vec![]));
    assert!(push(&registry, "/domains/acme", &one, "one").await.status().is_success());
    let none: DomainQuota = ok(registry.get("/v1/domains/acme/quota").await).await;
    assert_eq!(none.quota, None);
    let quota = set(&registry, "acme", json!({"bytes": 1_u64 << 40, "snapshots": 2})).await.expect("a quota");
    let blobs = one.blobs.len() as u64;
    assert_eq!((quota.limits.bytes, quota.limits.objects, quota.used_objects, quota.used_snapshots), (Some(1 << 40), None, blobs, 1));
    let full = quota.used_bytes;
    set(&registry, "acme", json!({"bytes": full})).await;

    let answer = push(&registry, "/domains/acme", &two, "two").await;
    assert_eq!((answer.status(), answer.headers().get("retry-after")), (StatusCode::FORBIDDEN, None));
    let problem = problem(answer).await;
    assert!(problem.code == ErrorCode::QuotaExceeded && !problem.retryable, "{problem:?}");
    let size = pfr_service::units::bytes(full);
    let says = [format!("is used up: it holds {size} of {size}"), "delete snapshots".to_owned(), "garbage collection".to_owned()];
    assert!(says.iter().all(|words| problem.detail.contains(words)), "{}", problem.detail);
    // Another domain has its own, and none.
    assert!(push(&registry, "", &two, "two").await.status().is_success());
    // Reads, tags and deletions.
    let repo = format!("/domains/acme/v1/repositories/{REPO}");
    let frames = registry.post(&format!("{repo}/frames"), &json!({"digests": one.digests()})).await;
    assert_eq!(frames.status(), StatusCode::OK);
    assert_eq!(registry.put(&format!("{repo}/tags/also"), &json!({"snapshot": "one"})).await.status(), StatusCode::OK);
    assert_eq!(registry.delete(&format!("{repo}/snapshots/{}", one.manifest)).await.status(), StatusCode::NO_CONTENT);
    // A collection makes room.
    let _: api::GcReport = ok(registry.post("/domains/acme/v1/gc", &json!({})).await).await;
    until_metric(&registry, "pf_quota_used_bytes{domain=\"acme\"} 0").await;
    until_metric(&registry, &format!("pf_quota_bytes{{domain=\"acme\"}} {full}")).await;
    // Its documents may be a few bytes longer than those of the first.
    set(&registry, "acme", json!({"bytes": full + 1000})).await;
    let answer = push(&registry, "/domains/acme", &two, "two").await;
    assert!(answer.status().is_success(), "{:?}", answer.text().await);
    let usage: api::Usage = ok(registry.get("/domains/acme/v1/usage").await).await;
    let used = usage.quota.expect("a quota");
    assert_eq!((used.limits.bytes, used.used_snapshots), (Some(full + 1000), 1));
    assert_eq!(used.used_bytes, usage.live_bytes + usage.leased.bytes + usage.garbage_bytes, "{usage:?}");
    let usage: api::Usage = ok(registry.get("/v1/usage").await).await;
    assert_eq!(usage.quota, None);
}

#[tokio::test]
async fn a_quota_is_set_as_a_whole_taken_back_and_refused_where_it_cannot_be() {
    let registry = Registry::start().await;
    assert_eq!(set(&registry, "default", json!({"objects": 5, "snapshots": 1})).await.expect("a quota").limits.objects, Some(5));
    let now = set(&registry, "default", json!({"snapshots": 1})).await.expect("a quota").limits;
    assert_eq!((now.bytes, now.objects, now.snapshots), (None, None, Some(1)), "what is left out is no limit");
    registry.push(REPO, &snapshot(0..2, vec![]), Some("t")).await;
    let answer = push(&registry, "", &snapshot(2..4, vec![]), "u").await;
    let detail = refused(answer, ErrorCode::QuotaExceeded).await;
    assert!(detail.contains("has no room for this: it holds 1 of 1 snapshots, and this adds 1"), "{detail}");
    assert_eq!(set(&registry, "default", json!({})).await, None);
    assert!(push(&registry, "", &snapshot(2..4, vec![]), "u").await.status().is_success());
    let put = async |domain: &str, body: Value| registry.put(&format!("/v1/domains/{domain}/quota"), &body).await;
    refused(put("default", json!({"bytes": u64::MAX})).await, ErrorCode::InvalidRequest).await;
    refused(put("default", json!({"bytes": -1})).await, ErrorCode::InvalidRequest).await;
    refused(put("default", json!({"byte": 1})).await, ErrorCode::InvalidRequest).await;
    refused(put("nobody", json!({"bytes": 1})).await, ErrorCode::DomainUnknown).await;
    refused(registry.get("/v1/domains/nobody/quota").await, ErrorCode::DomainUnknown).await;
    refused(registry.get("/domains/acme/v1/domains/acme/quota").await, ErrorCode::NotFound).await;
}

/// The administrator of a domain sees how much it may hold, and cannot change it.
#[tokio::test]
async fn only_an_operator_of_the_registry_sets_a_quota() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let new = pfr_store::NewAccessToken {
        label: "tenant".into(),
        domain: Some("default".parse().unwrap()),
        scopes: vec!["*:pull,push,delete,admin".parse().unwrap()],
        expires_at: None,
    };
    let (tenant, _) = registry.tokens().create(new).await.unwrap();
    let operator = registry.token(&["*:admin"]).await;
    let put = || registry.request(Method::PUT, "/v1/domains/default/quota").json(&json!({"bytes": 100}));
    refused(registry.send_as(&tenant, put()).await, ErrorCode::Denied).await;
    assert_eq!(registry.send_as(&operator, put()).await.status(), StatusCode::OK);
    let usage = registry.send_as(&tenant, registry.request(Method::GET, "/v1/usage")).await;
    assert_eq!(ok::<api::Usage>(usage).await.quota.expect("a quota").limits.bytes, Some(100));
}

#[tokio::test]
async fn the_command_sets_and_shows_a_quota_beside_a_registry_that_serves() {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("t")).await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    let data = registry.dir.path().join("store");
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_pf-registry")).arg("domain").args(arguments).arg("--data").arg(&data).output();
        let output = output.expect("the program runs");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    assert_eq!(run(&["list"]), (Some(0), "acme  live\ndefault  live\n".to_owned(), String::new()));
    assert_eq!(run(&["quota", "default"]).1, "no quota\n");
    let (code, said, _) = run(&["quota", "default", "--bytes", "1GiB", "--snapshots", "1"]);
    assert!(code == Some(0) && said.ends_with("of 1.00 GiB\nsnapshots  1 of 1\n"), "{said}");
    refused(push(&registry, "", &snapshot(2..4, vec![]), "u").await, ErrorCode::QuotaExceeded).await;
    // The others stay as they are.
    let (_, said, _) = run(&["quota", "default", "--snapshots", "none", "--json"]);
    let said: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((&said["quota"]["limits"], &said["quota"]["used_snapshots"]), (&json!({"bytes": 1 << 30}), &json!(1)));
    assert!(push(&registry, "", &snapshot(2..4, vec![]), "u").await.status().is_success());
    assert_eq!(run(&["quota", "default", "--bytes", "none"]).1, "no quota\n");
    let (code, _, stderr) = run(&["quota", "nobody"]);
    assert!(code == Some(5) && stderr.contains("nobody"), "{stderr}");
    let (code, _, stderr) = run(&["quota", "default", "--bytes", "lots"]);
    assert!(code == Some(1) && stderr.contains("500GiB"), "{stderr}");
}
