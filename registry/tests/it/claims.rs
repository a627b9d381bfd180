//! Claims: a session that asks what is missing learns what others are about to send, and nothing
//! that it may not know.

use crate::common::snapshot::{page, snapshot, stream};
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::api::{self, FramesStored, MissingResponse};
use pfr_schema::tree::Document;
use pfr_schema::{AccessToken, Digest, ErrorCode, Kind, media_type};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

fn blobs(count: u64) -> Vec<Document> {
    (0..count).map(|seed| Document::new(Kind::Blob, page(seed))).collect()
}

/// A group of a question. `claim` may be null.
fn group(blobs: &[Document], claim: Option<u64>) -> Value {
    let digests: Vec<Digest> = blobs.iter().map(|blob| blob.digest).collect();
    match claim {
        Some(claim) => json!({"kind": "blob", "digests": digests, "claim": claim}),
        None => json!({"kind": "blob", "digests": digests}),
    }
}

async fn ask_of(registry: &Registry, push: &str, groups: &[Value]) -> MissingResponse {
    ok(registry.post(&format!("{push}/missing"), &json!({"groups": groups})).await).await
}

async fn ask(registry: &Registry, push: &str, blobs: &[Document], claim: u64) -> MissingResponse {
    ask_of(registry, push, &[group(blobs, Some(claim))]).await
}

#[tokio::test]
async fn what_one_session_sends_is_coming_for_the_others_until_it_is_stored_or_the_session_is_over() {
    let registry = Registry::start().await;
    let blobs = blobs(6);
    let opened: api::Push = ok(registry.post(&format!("/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    assert_eq!(opened.claim_seconds, 30);
    let (one, two) = (registry.open_push(REPO).await, registry.open_push("other").await);
    let first = ask(&registry, &one, &blobs, 4).await;
    assert_eq!((first.missing, first.coming, first.wait_ms), (vec![(0, 6)], vec![], None));
    let second = ask(&registry, &two, &blobs, 6).await;
    assert_eq!((second.missing, second.coming), (vec![(0, 6)], vec![(0, 4)]));
    assert!(second.wait_ms.is_some_and(|wait| (1..=1000).contains(&wait)), "{:?}", second.wait_ms);
    let as_before = ask_of(&registry, &one, &[group(&blobs, None)]).await;
    assert_eq!(
        (as_before.missing, as_before.coming, as_before.wait_ms),
        (vec![(0, 6)], vec![], None),
        "a question without it is answered as before"
    );
    let mixed = ask_of(&registry, &two, &[group(&blobs[..2], None), group(&blobs[2..], Some(0))]).await;
    assert_eq!((mixed.missing, mixed.coming), (vec![(0, 6)], vec![(2, 2)]), "positions are those of all groups");

    let _: FramesStored = ok(registry.put_frames(&one, stream(&blobs[..3])).await).await;
    let rest = ask(&registry, &two, &blobs, 0).await;
    assert_eq!((rest.missing, rest.coming), (vec![(3, 3)], vec![(3, 1)]));
    assert_eq!(registry.delete(&one).await.status(), StatusCode::NO_CONTENT);
    let rest = ask(&registry, &two, &blobs, 0).await;
    assert_eq!((rest.missing, rest.coming), (vec![(3, 3)], vec![]), "no other session sends it");
}

#[tokio::test]
async fn a_session_whose_upload_fails_keeps_nothing_from_others() {
    let registry = Registry::start().await;
    let blobs = blobs(3);
    let (one, two) = (registry.open_push(REPO).await, registry.open_push(REPO).await);
    ask(&registry, &one, &blobs, 3).await;
    assert_eq!(ask(&registry, &two, &blobs, 0).await.coming, [(0, 3)]);
    let whole = stream(&blobs);
    refused(registry.put_frames(&one, whole[..whole.len() - 20].to_vec()).await, ErrorCode::Truncated).await;
    let rest = ask(&registry, &two, &blobs, 0).await;
    assert_eq!(rest.coming, []);
    assert!(!rest.missing.is_empty());
}

async fn open_as(registry: &Registry, token: &AccessToken, repo: &str) -> String {
    let path = format!("/v1/repositories/{repo}/pushes");
    let opened: api::Push = ok(registry.send_as(token, registry.request(Method::POST, &path)).await).await;
    format!("{path}/{}", opened.id)
}

#[tokio::test]
async fn a_caller_learns_nothing_of_sessions_in_repositories_that_it_does_not_see() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let blobs = blobs(3);
    let secret = registry.token(&["secret/*:pull,push"]).await;
    let writer = registry.token(&["secret/*:push"]).await;
    let other = registry.token(&["other/*:pull,push"]).await;
    let operator = registry.token(&["*:pull,push"]).await;
    let (all, none) = (vec![(0, 3)], vec![]);
    let questions = [
        (&secret, "secret%2Fa", 3, &none, "the first that asks"),
        (&secret, "secret%2Fb", 3, &all, "it sees the repository"),
        (&writer, "secret%2Fa", 3, &all, "it pushes to the same repository"),
        (&writer, "secret%2Fb", 0, &none, "it does not see the other one"),
        (&operator, "third", 0, &all, "it sees everything"),
        (&other, "other%2Fa", 3, &none, "it sees neither"),
        (&other, "other%2Fb", 0, &all, "what became of its own claim tells it nothing either"),
        (&secret, "secret%2Fc", 0, &all, "the hidden claim holds as before"),
    ];
    // A session for each first, so that no claim ends before the last question.
    let mut sessions = Vec::new();
    for (token, repo, ..) in &questions {
        sessions.push(open_as(&registry, token, repo).await);
    }
    for ((token, _, claim, coming, why), session) in questions.into_iter().zip(sessions) {
        let body = json!({"groups": [group(&blobs, Some(claim))]});
        let request = registry.request(Method::POST, &format!("{session}/missing")).json(&body);
        let answer: MissingResponse = ok(registry.send_as(token, request).await).await;
        assert_eq!((&answer.missing, &answer.coming), (&all, coming), "{why}");
    }
}

/// Its manifest stays missing for them: without the end of the claim each would wait for the one
/// before until its claim ends by time.
#[tokio::test]
async fn callers_that_may_not_pull_do_not_wait_for_a_push_that_was_committed() {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let writer = registry.token(&["x/*:push"]).await;
    let made = snapshot(0..4, vec![]);
    let mut sessions = Vec::new();
    for repo in ["x%2Fa"; 8] {
        sessions.push(open_as(&registry, &writer, repo).await);
    }
    let ask = async |session: &str, claim: u64| -> MissingResponse {
        let body = json!({"groups": [{"kind": "manifest", "digests": [made.manifest], "claim": claim}]});
        let request = registry.request(Method::POST, &format!("{session}/missing")).json(&body);
        ok(registry.send_as(&writer, request).await).await
    };
    for (n, session) in sessions.iter().enumerate() {
        let asked = ask(session, 1).await;
        assert_eq!((asked.missing, asked.coming), (vec![(0, 1)], vec![]), "client {n}");
        if let Some(next) = sessions.get(n + 1) {
            assert_eq!(ask(next, 0).await.coming, [(0, 1)], "client {n} is about to send it");
        }
        let frames = registry.request(Method::PUT, &format!("{session}/frames")).header("content-type", media_type::FRAMES);
        let _: FramesStored = ok(registry.send_as(&writer, frames.body(made.stream())).await).await;
        let commit = registry.request(Method::POST, &format!("{session}/commit"));
        let _: api::Committed = ok(registry.send_as(&writer, commit.json(&json!({"manifest": made.manifest}))).await).await;
    }
}
