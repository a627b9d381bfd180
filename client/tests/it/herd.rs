//! Several clients push the same at once: it is sent about once, and a client that claims and does
//! not send delays the others briefly.

use crate::common::sample::{LARGE, directory};
use crate::common::{Registry, push_dir, remote, repository};
use pfr_client::Remote;
use pfr_schema::api::{DigestGroup, MissingRequest};
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_testkit::front::{Fate, Front, Seen};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const CLIENTS: usize = 16;

/// Digests of the pages of these numbers.
fn pages(numbers: std::ops::Range<u64>) -> Vec<Digest> {
    numbers.flat_map(|n| [2 * n, 2 * n + 1]).map(|n| Digest::sha256(&LARGE.page(n))).collect()
}

/// Opens a session that claims these blobs. Returns its id.
async fn claim(remote: &Remote, digests: Vec<Digest>) -> String {
    let session = remote.open_push(&repository()).await.unwrap().id;
    let (count, claim) = (digests.len(), Some(digests.len() as u64));
    let request = MissingRequest { groups: vec![DigestGroup { kind: Kind::Blob, digests, claim }] };
    let missing = remote.missing(&repository(), &session, &request).await.unwrap();
    assert_eq!((missing.lacking.len(), missing.coming.len()), (count, 0));
    session
}

/// Pushes a snapshot from many clients at once. Returns the bytes of all of them, and those of one
/// alone.
async fn herd(request_bytes: u64) -> (u64, u64) {
    let source = directory(LARGE, &(0..300).collect::<Vec<_>>());
    let start = || Registry::start_with(move |config| config.max_frames_bytes = request_bytes);
    let alone = push_dir(&start().await.remote(), source.path(), "t").await.unwrap();
    let registry = start().await;
    let mut clients = JoinSet::new();
    for n in 0..CLIENTS {
        let (remote, path) = (registry.remote(), source.path().to_owned());
        clients.spawn(async move { push_dir(&remote, &path, &format!("t{n}")).await.unwrap() });
    }
    let mut sent = 0;
    while let Some(pushed) = clients.join_next().await {
        let pushed = pushed.unwrap();
        assert_eq!((pushed.digest, pushed.bytes_raw), (alone.digest, alone.bytes_raw));
        assert!(pushed.bytes_deduplicated + pushed.bytes_sent_raw <= pushed.bytes_raw, "{pushed:?}");
        sent += pushed.bytes_sent;
    }
    registry.store.verify(&alone.digest, &mut |_| {}).await.unwrap();
    (sent, alone.bytes_sent)
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_clients_send_a_snapshot_of_one_request_about_once() {
    let (sent, alone) = herd(64 << 20).await;
    assert!(sent < 2 * alone, "{sent} bytes for {alone}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sixteen_clients_share_a_snapshot_of_many_requests() {
    let (sent, alone) = herd(500_000).await;
    assert!(sent < 2 * alone, "{sent} bytes for {alone}");
}

#[tokio::test]
async fn a_client_that_claims_and_sends_nothing_is_waited_for_and_then_replaced() {
    let registry = Registry::start().await;
    let source = directory(LARGE, &(0..20).collect::<Vec<_>>());
    // Some of the pages; the others are sent meanwhile.
    claim(&registry.remote(), pages(0..10)).await;
    let front = Front::start(&registry.url, |_| Fate::Pass);
    let pushed = push_dir(&remote(&front.url), source.path(), "t").await.unwrap();
    assert_eq!(pushed.blobs_sent, pushed.blobs_total);
    let seen = front.seen();
    let uploads: Vec<usize> = (0..seen.len()).filter(|at| is_upload(&seen[*at])).collect();
    assert!(uploads.len() >= 2, "{} uploads", uploads.len());
    let waits = (uploads[0]..uploads[1]).filter(|at| is_question(&seen[*at])).count();
    assert!(waits > 1, "it sent the unclaimed blobs, and asked {waits} times before it sent the rest");
}

#[tokio::test]
async fn what_a_client_that_gave_up_had_claimed_is_sent_at_once() {
    let registry = Registry::start().await;
    let source = directory(LARGE, &(0..20).collect::<Vec<_>>());
    let other = registry.remote();
    let session = claim(&other, pages(0..20)).await;
    other.abort(&repository(), &session).await.unwrap();
    let pushed = push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    assert_eq!((pushed.round_trips, pushed.blobs_sent), (6, pushed.blobs_total));
}

#[tokio::test]
async fn a_registry_that_says_for_ever_that_others_send_it_is_not_believed() {
    let registry = Registry::start().await;
    let source = directory(LARGE, &(0..20).collect::<Vec<_>>());
    let front = Front::start(&registry.url, |seen| {
        if is_question(seen) {
            changed(|answer| answer["coming"] = answer["missing"].clone())
        } else if seen.path.ends_with("/pushes") {
            changed(|answer| answer["claim_seconds"] = json!(1))
        } else {
            Fate::Pass
        }
    });
    let pushed = push_dir(&remote(&front.url), source.path(), "t").await.unwrap();
    assert_eq!(pushed.blobs_sent, pushed.blobs_total);
    registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
}

#[tokio::test]
async fn a_registry_that_knows_no_claims_is_asked_for_none() {
    let registry = Registry::start_with(|config| config.max_frames_bytes = 100_000).await;
    let source = directory(LARGE, &(0..20).collect::<Vec<_>>());
    let front = Front::start(&registry.url, |seen| {
        if seen.path.ends_with("/pushes") {
            return changed(|answer| drop(answer.as_object_mut().unwrap().remove("claim_seconds")));
        }
        Fate::Pass
    });
    let pushed = push_dir(&remote(&front.url), source.path(), "t").await.unwrap();
    assert_eq!(pushed.blobs_sent, pushed.blobs_total);
    let seen = front.seen();
    let first = seen.iter().position(is_upload).unwrap();
    assert!(!seen[first..].iter().any(is_question), "what is missing is sent without another question");
    for question in seen.iter().filter(|seen| is_question(seen)) {
        assert!(!has_claim(question), "{}", String::from_utf8_lossy(&question.body));
    }
}

#[tokio::test]
async fn a_replica_that_refuses_claims_is_asked_without_them_from_then_on() {
    let source = directory(LARGE, &(0..20).collect::<Vec<_>>());
    // Another session sends some of it, so that the push asks again while it sends.
    for passed in 0..5 {
        let registry = Registry::start_with(|config| config.max_frames_bytes = 100_000).await;
        claim(&registry.remote(), pages(0..5)).await;
        let mut claims = 0;
        // A replica of the new version opens the session and answers some questions.
        let front = Front::start(&registry.url, move |seen| {
            let is_claim = is_question(seen) && has_claim(seen);
            claims += usize::from(is_claim);
            if is_claim && claims > passed { Fate::Refuse(ErrorCode::InvalidRequest) } else { Fate::Pass }
        });
        let pushed = push_dir(&remote(&front.url), source.path(), "t").await.unwrap_or_else(|error| panic!("after {passed}: {error}"));
        assert_eq!((pushed.blobs_sent, front.struck()), (pushed.blobs_total, 1), "after {passed}");
        registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    }
}

/// Whether a question has claims, which an older registry refuses as an unknown field.
fn has_claim(seen: &Seen) -> bool {
    let body: Value = serde_json::from_slice(&seen.body).unwrap();
    body["groups"].as_array().unwrap().iter().any(|group| group.get("claim").is_some())
}

fn is_upload(seen: &Seen) -> bool {
    seen.method == "PUT" && seen.path.ends_with("/frames")
}

fn is_question(seen: &Seen) -> bool {
    seen.path.ends_with("/missing")
}

/// The answer with a change of its JSON.
fn changed(change: fn(&mut Value)) -> Fate {
    Fate::change(move |body| {
        let mut answer = serde_json::from_slice(&body).unwrap();
        change(&mut answer);
        serde_json::to_vec(&answer).unwrap()
    })
}
