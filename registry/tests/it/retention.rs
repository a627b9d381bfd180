//! Retention over HTTP: policies that a domain's administrator sets, runs on request and by
//! schedule, tags that stay.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, refused, until_metric};
use pfr_schema::ErrorCode;
use pfr_schema::api::{self, RetentionPolicies, RetentionReport};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

async fn set(registry: &Registry, policies: Value) -> RetentionPolicies {
    ok(registry.put("/v1/retention", &json!({"policies": policies})).await).await
}

async fn run(registry: &Registry, dry_run: bool) -> RetentionReport {
    ok(registry.post("/v1/retention/run", &json!({"dry_run": dry_run})).await).await
}

async fn snapshots(registry: &Registry) -> usize {
    let list: api::SnapshotList = ok(registry.get(&format!("/v1/repositories/{REPO}/snapshots")).await).await;
    list.snapshots.len()
}

#[tokio::test]
async fn policies_are_set_as_a_whole_and_a_run_does_what_the_dry_run_says() {
    let registry = Registry::start().await;
    let none: RetentionPolicies = ok(registry.get("/v1/retention").await).await;
    assert_eq!(none, RetentionPolicies::default());
    for n in 0..4 {
        registry.push(REPO, &snapshot(n..n + 2, vec![]), (n != 1).then_some(&*format!("t{n}"))).await;
    }
    let policies = json!([
        {"name": "last", "repositories": "team/*", "keep_last": 2},
        {"name": "keep", "repositories": "*", "keep_tags": ["t0"]},
    ]);
    let set_now = set(&registry, policies).await;
    assert_eq!(set_now, ok::<RetentionPolicies>(registry.get("/v1/retention").await).await);
    let dry = run(&registry, true).await;
    assert_eq!((dry.snapshots, dry.kept, dry.deleted[0].policy.as_deref(), snapshots(&registry).await), (1, 3, Some("last"), 4));
    assert!(dry.freed.is_some_and(|freed| freed.snapshots == 1 && freed.bytes > 0), "{:?}", dry.freed);
    let done = run(&registry, false).await;
    assert_eq!((&done.deleted, done.dry_run, snapshots(&registry).await), (&dry.deleted, false, 3));
    assert_eq!(done.freed, None, "only a dry run says it");
    until_metric(&registry, "pf_retention_deleted_snapshots_total 1").await;
    // Each deletion is in the audit log, as the run is.
    let log: api::AuditList = ok(registry.get("/v1/audit?order=oldest&limit=1000").await).await;
    let about = |record: &api::AuditRecord| (record.operation.clone(), record.outcome, record.subject.clone(), record.digest);
    let found: Vec<_> = log.records.iter().filter(|record| record.operation.contains("retention")).map(about).collect();
    let said =
        |operation: &str, outcome, subject: Option<&str>, digest| (operation.to_owned(), outcome, subject.map(str::to_owned), digest);
    let expected = [
        said("set_retention", api::AuditOutcome::Done, None, None),
        said("run_retention", api::AuditOutcome::Begun, None, None),
        said("run_retention", api::AuditOutcome::Begun, None, None),
        said("run_retention", api::AuditOutcome::Done, Some("last"), Some(done.deleted[0].digest)),
    ];
    assert_eq!(found, expected);

    for (wrong, words) in [
        (json!([{"name": "a", "repositories": "*", "untagged": true}]), "$.policies[0].keep_last"),
        (json!([{"name": "a", "repositories": "*", "keep_lats": 1}]), "keep_lats"),
        (json!([{"name": "a", "repositories": "a b"}]), "repositories"),
    ] {
        let detail = refused(registry.put("/v1/retention", &json!({"policies": wrong})).await, ErrorCode::InvalidRequest).await;
        assert!(detail.contains(words), "{detail}");
    }
    assert_eq!(set_now, ok::<RetentionPolicies>(registry.get("/v1/retention").await).await, "a refused request changes nothing");
    assert_eq!(set(&registry, json!([])).await, RetentionPolicies::default());
}

#[tokio::test]
async fn the_background_task_follows_the_policies_of_each_domain() {
    let registry = Registry::start_with(|config| config.retention_interval_seconds = 1).await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    let (one, two) = (snapshot(0..2, vec![]), snapshot(2..4, vec![]));
    registry.push(REPO, &one, None).await;
    registry.push(REPO, &two, Some("t")).await;
    // Those of another domain are its own.
    let policy = json!([{"name": "last", "repositories": "*", "keep_last": 1}]);
    let _: RetentionPolicies = ok(registry.put("/domains/acme/v1/retention", &json!({"policies": policy})).await).await;
    assert_eq!(run(&registry, false).await.kept, 0, "no policy, no repository that is looked at");
    set(&registry, policy).await;
    until_metric(&registry, "pf_retention_deleted_snapshots_total 1").await;
    assert_eq!(snapshots(&registry).await, 1);
    let log: api::AuditList = ok(registry.get(&format!("/v1/audit?repository={REPO}&limit=1")).await).await;
    let last = &log.records[0];
    assert_eq!((last.operation.as_str(), last.label.as_deref(), last.digest), ("retention", Some("background task"), Some(one.manifest)));
}

/// The answers to a caller with this scope that moves the tag `v1`, deletes it, and deletes the
/// snapshot that `v2` points at.
async fn tries(registry: &Registry, scope: &str, second: &Snapshot, third: &Snapshot) -> Vec<(StatusCode, Option<String>)> {
    let token = registry.token(&[scope]).await;
    let repository = format!("/v1/repositories/{REPO}");
    let opened = registry.request(Method::POST, &format!("{repository}/pushes")).json(&json!({}));
    let opened: api::Push = ok(registry.send_as(&token, opened).await).await;
    let commit = json!({"manifest": second.manifest, "tag": "v1"});
    let requests = [
        registry.request(Method::POST, &format!("{repository}/pushes/{}/commit", opened.id)).json(&commit),
        registry.request(Method::PUT, &format!("{repository}/tags/v1")).json(&json!({"snapshot": third.manifest})),
        registry.request(Method::DELETE, &format!("{repository}/tags/v1")),
        registry.request(Method::DELETE, &format!("{repository}/snapshots/{}", second.manifest)),
    ];
    let mut answers = Vec::new();
    for request in requests {
        let answer = registry.send_as(&token, request).await;
        let status = answer.status();
        let problem: Value = serde_json::from_slice(&answer.bytes().await.expect("a body")).unwrap_or_default();
        answers.push((status, problem["code"].as_str().map(str::to_owned)));
    }
    answers
}

#[tokio::test]
async fn only_an_administrator_moves_or_deletes_an_immutable_tag() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let (one, two, three) = (snapshot(0..2, vec![]), snapshot(2..4, vec![]), snapshot(4..6, vec![]));
    for (snapshot, tag) in [(&one, "v1"), (&two, "v2"), (&three, "main")] {
        registry.push(REPO, snapshot, Some(tag)).await;
    }
    set(&registry, json!([{"name": "releases", "repositories": "team/*", "immutable_tags": ["v*"]}])).await;
    // Without tokens no caller is an administrator: the pattern is taken back first.
    let tag = format!("/v1/repositories/{REPO}/tags/v1");
    let detail = refused(registry.delete(&tag).await, ErrorCode::TagImmutable).await;
    assert!(detail.contains("administrator"), "{detail}");
    assert_eq!(registry.put(&tag, &json!({"snapshot": one.manifest})).await.status(), StatusCode::OK, "it is there already");
    let forks = json!({"snapshot": "v1", "count": 2, "prefix": "v1-try"});
    assert_eq!(registry.post(&format!("/v1/repositories/{REPO}/forks"), &forks).await.status(), StatusCode::CREATED, "new ones are made");
    registry.stopped().await;

    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    let immutable = (StatusCode::FORBIDDEN, Some("tag_immutable".to_owned()));
    let answers = tries(&registry, "team/*:pull,push,delete", &two, &three).await;
    assert!(answers.iter().all(|answer| *answer == immutable), "{answers:?}");
    let answers = tries(&registry, "team/*:pull,push,delete,admin", &two, &three).await;
    let done = [StatusCode::OK, StatusCode::OK, StatusCode::NO_CONTENT, StatusCode::NO_CONTENT];
    assert!(answers.iter().map(|(status, _)| *status).eq(done), "{answers:?}");
    // The refusals are in the audit log as such.
    let admin = registry.token(&["*:admin"]).await;
    let log = registry.send_as(&admin, registry.request(Method::GET, "/v1/audit?limit=1000")).await;
    let log: api::AuditList = ok(log).await;
    let refusals = log.records.iter().filter(|record| record.code.as_deref() == Some("tag_immutable"));
    let outcomes: Vec<api::AuditOutcome> = refusals.map(|record| record.outcome).collect();
    assert_eq!(outcomes, [api::AuditOutcome::Refused; 5]);
    registry.stopped().await;
}
