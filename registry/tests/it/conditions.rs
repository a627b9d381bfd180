//! Tags move by compare-and-swap when asked, in whichever spelling, and a snapshot is deleted only
//! with the tags that the client saw.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::ErrorCode;
use pfr_schema::api::TagInfo;
use reqwest::{Method, StatusCode};
use serde_json::json;

#[tokio::test]
async fn if_match_and_if_none_match_mean_what_if_tag_is_means() {
    let registry = Registry::start().await;
    let (a, b) = (snapshot(0..1, vec![]), snapshot(0..2, vec![]));
    for sample in [&a, &b] {
        registry.push(REPO, sample, None).await;
    }
    let path = format!("/v1/repositories/{REPO}/tags/head");
    let body = |to: &crate::common::snapshot::Snapshot| json!({"snapshot": to.manifest});
    let etag = |of: &crate::common::snapshot::Snapshot| format!("\"{}\"", of.manifest);
    let put = |to, name: &'static str, value: String| registry.request(Method::PUT, &path).header(name, value).json(&body(to)).send();

    refused(put(&a, "if-match", etag(&a)).await.expect("an answer"), ErrorCode::TagMoved).await;
    let made = put(&a, "if-none-match", "*".into()).await.expect("an answer");
    assert_eq!(made.headers()["etag"].to_str().ok(), Some(&*etag(&a)));
    assert_eq!(ok::<TagInfo>(made).await.digest, a.manifest);
    refused(put(&b, "if-none-match", "*".into()).await.expect("an answer"), ErrorCode::TagMoved).await;
    refused(put(&b, "if-match", etag(&b)).await.expect("an answer"), ErrorCode::TagMoved).await;
    let moved = put(&b, "if-match", etag(&a)).await.expect("an answer");
    assert_eq!(ok::<TagInfo>(moved).await.digest, b.manifest);
    refused(put(&b, "if-match", b.manifest.to_string()).await.expect("an answer"), ErrorCode::InvalidRequest).await;

    let in_body = json!({"snapshot": a.manifest, "if_tag_is": a.manifest});
    refused(registry.put(&path, &in_body).await, ErrorCode::TagMoved).await;
    let in_body = json!({"snapshot": a.manifest, "if_tag_is": b.manifest});
    assert_eq!(ok::<TagInfo>(registry.put(&path, &in_body).await).await.digest, a.manifest);

    let known = registry.request(Method::GET, &path).header("if-none-match", etag(&a)).send().await.expect("an answer");
    assert_eq!((known.status(), known.headers()["etag"].to_str().ok()), (StatusCode::NOT_MODIFIED, Some(&*etag(&a))));
    let old = registry.request(Method::GET, &path).header("if-none-match", etag(&b)).send().await.expect("an answer");
    assert_eq!(ok::<TagInfo>(old).await.digest, a.manifest);

    let delete = |value| registry.request(Method::DELETE, &path).header("if-match", value).send();
    refused(delete(etag(&b)).await.expect("an answer"), ErrorCode::TagMoved).await;
    assert_eq!(delete(etag(&a)).await.expect("an answer").status(), StatusCode::NO_CONTENT);
    refused(registry.get(&path).await, ErrorCode::TagUnknown).await;
    refused(registry.delete(&path).await, ErrorCode::TagUnknown).await;
}

#[tokio::test]
async fn a_snapshot_that_got_a_tag_since_it_was_read_is_not_deleted() {
    let registry = Registry::start().await;
    let sample = snapshot(0..1, vec![]);
    registry.push(REPO, &sample, Some("a")).await;
    let path = format!("/v1/repositories/{REPO}/snapshots/{}", sample.manifest);
    let read = || async { registry.get(&path).await.headers()["etag"].to_str().expect("text").to_owned() };
    let delete = |name: &'static str, value: String| registry.request(Method::DELETE, &path).header(name, value).send();
    let before = read().await;
    assert_eq!(before, read().await, "nothing has changed");
    ok::<TagInfo>(registry.put(&format!("/v1/repositories/{REPO}/tags/b"), &json!({"snapshot": sample.manifest})).await).await;
    let stale = delete("if-match", before.clone()).await.expect("an answer");
    refused(stale, ErrorCode::TagMoved).await;
    // A condition that is not understood is not ignored.
    refused(delete("if-match", "*".into()).await.expect("an answer"), ErrorCode::InvalidRequest).await;
    refused(delete("if-none-match", before.clone()).await.expect("an answer"), ErrorCode::InvalidRequest).await;
    let now = read().await;
    assert_ne!(now, before);
    assert_eq!(delete("if-match", now).await.expect("an answer").status(), StatusCode::NO_CONTENT);
    refused(registry.get(&path).await, ErrorCode::RepositoryUnknown).await;
}

#[tokio::test]
async fn of_many_moves_of_a_tag_from_one_state_one_wins() {
    let registry = Registry::start().await;
    let samples: Vec<_> = (0..8).map(|i| snapshot(i..i + 1, vec![])).collect();
    for sample in &samples {
        registry.push(REPO, sample, None).await;
    }
    let path = format!("/v1/repositories/{REPO}/tags/head");
    let moves = samples.iter().map(|sample| {
        let body = json!({"snapshot": sample.manifest, "if_tag_is": "absent"});
        let (registry, path) = (&registry, &path);
        async move { registry.put(path, &body).await.status().as_u16() }
    });
    let mut answers = futures::future::join_all(moves).await;
    answers.sort_unstable();
    assert_eq!(answers, [200, 412, 412, 412, 412, 412, 412, 412]);
}

#[tokio::test]
async fn a_commit_moves_its_tag_only_from_the_given_state_and_then_does_nothing() {
    let registry = Registry::start().await;
    let (a, b) = (snapshot(0..1, vec![]), snapshot(0..2, vec![]));
    registry.push(REPO, &a, Some("latest")).await;
    let push = registry.open_push(REPO).await;
    registry.put_frames(&push, b.stream()).await;
    let commit = format!("{push}/commit");
    refused(registry.post(&commit, &json!({"manifest": b.manifest, "tag": "latest", "if_tag_is": "absent"})).await, ErrorCode::TagMoved)
        .await;
    refused(registry.get(&format!("/v1/repositories/{REPO}/snapshots/{}", b.manifest)).await, ErrorCode::SnapshotUnknown).await;
    let response = registry.post(&commit, &json!({"manifest": b.manifest, "tag": "latest", "if_tag_is": a.manifest})).await;
    assert_eq!(response.status(), StatusCode::CREATED, "the session outlives a refused commit");
}
