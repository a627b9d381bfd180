//! Clients that send too much, too slowly, or all at once: they are refused or cut, and what they
//! held is free again.

use crate::common::snapshot::{Snapshot, page, snapshot, stream};
use crate::common::trouble::{self, Trouble};
use crate::common::{REPO, Registry, held_request, ok, problem, refused, until_metric};
use futures::StreamExt as _;
use futures::future::join_all;
use object_store::path::Path;
use pfr_schema::api::{self, FramesStored};
use pfr_schema::checkpoint::Key;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, media_type, prefix};
use pfr_store::Options;
use reqwest::header::HeaderValue;
use reqwest::{Body, Method, Response, StatusCode};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

/// A body that is sent piece by piece, as the test says.
fn slow_body() -> (mpsc::UnboundedSender<Vec<u8>>, Body) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let pieces = futures::stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|piece: Vec<u8>| (Ok::<_, std::io::Error>(piece), receiver))
    });
    (sender, Body::wrap_stream(pieces.boxed()))
}

const HELD_BODY: &[u8] = br#"{"groups":[]}"#;

/// Repeats a request until its answer is as wanted.
async fn until<F: Future<Output = Response>>(ask: impl Fn() -> F, wanted: StatusCode) -> Response {
    let repeat = async {
        loop {
            let response = ask().await;
            if response.status() == wanted {
                return response;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), repeat).await.unwrap_or_else(|_| panic!("no {wanted} within 30 s"))
}

#[tokio::test]
async fn an_upload_that_stalls_is_cut_and_what_came_whole_is_kept() {
    let registry = Registry::start_with(|config| config.body_idle_seconds = 1).await;
    let sample = snapshot(0..2, vec![]);
    let push = registry.open_push(REPO).await;
    let (sender, body) = slow_body();
    let request = registry.request(Method::PUT, &format!("{push}/frames")).header("content-type", media_type::FRAMES).body(body);
    let upload = tokio::spawn(async { request.send().await.expect("an answer") });
    let whole = sample.stream();
    sender.send(whole[..whole.len() / 2].to_vec()).expect("the upload listens");
    // The sender stays open and says nothing more.
    let problem = problem(upload.await.expect("the upload ends")).await;
    assert_eq!((problem.code, problem.retryable), (ErrorCode::Timeout, true));
    drop(sender);
    let stored: FramesStored = ok(registry.put_frames(&push, whole).await).await;
    assert!(stored.new < sample.blobs.len() as u64, "frames that had come whole were thrown away: {stored:?}");
}

#[tokio::test]
async fn a_json_body_that_stalls_or_trickles_is_cut() {
    let registry = Registry::start_with(|config| config.body_idle_seconds = 1).await;
    let push = registry.open_push(REPO).await;
    let (sender, body) = slow_body();
    let request = registry.request(Method::POST, &format!("{push}/missing")).header("content-type", "application/json").body(body);
    let trickle = tokio::spawn(async move {
        // One byte at a time, for as long as anybody listens.
        while sender.send(b" ".to_vec()).is_ok() {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    refused(request.send().await.expect("an answer"), ErrorCode::Timeout).await;
    trickle.await.expect("the body was dropped");
}

#[tokio::test]
async fn headers_that_do_not_come_close_the_connection() {
    let registry = Registry::start_with(|config| config.header_seconds = 1).await;
    let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
    stream.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Slow: ").await.expect("written");
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut answer)).await.expect("the connection is closed");
    assert!(read.is_ok_and(|_| !answer.starts_with(b"HTTP/1.1 200")));
}

#[tokio::test]
async fn a_reader_that_does_not_read_is_cut() {
    let registry = Registry::start_with(|config| config.body_idle_seconds = 1).await;
    // More than the kernel's buffers of a loopback connection hold.
    let large = Document::new(Kind::Blob, page(1).into_iter().cycle().take(48 << 20).collect());
    let push = registry.open_push(REPO).await;
    let _: FramesStored = ok(registry.put_frames(&push, stream(std::slice::from_ref(&large))).await).await;
    registry.push(REPO, &snapshot(0..1, vec![]), Some("latest")).await;

    let body = json!({"digests": [large.digest]}).to_string();
    let head = format!(
        "POST /v1/repositories/{REPO}/frames HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
    stream.write_all(head.as_bytes()).await.expect("written");
    until_metric(&registry, r#"pf_http_requests_total{route="/v1/repositories/{repo}/frames",method="POST",status="cut"} 1"#).await;
}

#[tokio::test]
async fn a_json_body_over_the_limit_is_refused_whether_or_not_it_tells_its_length() {
    let registry = Registry::start_with(|config| config.max_json_bytes = 1 << 20).await;
    let push = registry.open_push(REPO).await;
    let large = vec![b' '; 8 << 20];
    let request = || registry.request(Method::POST, &format!("{push}/missing")).header("content-type", "application/json");
    refused(request().body(large.clone()).send().await.expect("an answer"), ErrorCode::TooLarge).await;
    let pieces: Vec<_> = large.chunks(64 << 10).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
    let streamed = request().body(Body::wrap_stream(futures::stream::iter(pieces))).send().await.expect("an answer");
    refused(streamed, ErrorCode::TooLarge).await;
    let untouched: api::MissingResponse = ok(registry.post(&format!("{push}/missing"), &json!({"groups": []})).await).await;
    assert_eq!(untouched.missing, []);
}

#[tokio::test]
async fn more_digests_than_one_request_may_carry_are_refused() {
    let registry = Registry::start_with(|config| config.max_digests = 2).await;
    registry.push(REPO, &snapshot(0..1, vec![]), None).await;
    let digests: Vec<Digest> = (0..3_u8).map(|i| Digest::sha256(&[i])).collect();
    let push = registry.open_push(REPO).await;
    let groups = json!({"groups": [{"kind": "blob", "digests": &digests[..2]}, {"kind": "run", "digests": &digests[2..]}]});
    refused(registry.post(&format!("{push}/missing"), &groups).await, ErrorCode::TooLarge).await;
    refused(registry.post(&format!("/v1/repositories/{REPO}/frames"), &json!({"digests": digests})).await, ErrorCode::TooLarge).await;
}

#[tokio::test]
async fn as_many_digests_as_a_session_allows_fit_into_one_request() {
    let registry = Registry::start().await;
    let push: api::Push = ok(registry.post(&format!("/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    let digests: Vec<String> = (0..push.max_digests).map(|i| format!("sha512:{i:0128x}")).collect();
    let path = format!("/v1/repositories/{REPO}/pushes/{}/missing", push.id);
    let body = json!({"groups": [{"kind": "blob", "digests": digests}]});
    let answer: api::MissingResponse = ok(registry.post(&path, &body).await).await;
    assert_eq!(answer.missing, [(0, push.max_digests)]);
}

#[tokio::test]
async fn beyond_the_limit_requests_wait_and_are_then_refused_and_health_is_not() {
    let (store, switch) = trouble::store().await;
    let registry = Registry::start_over_with(store, |config| {
        config.max_requests = 1;
        config.queue_seconds = 1;
    })
    .await;
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    // A request that is worked on for as long as the storage does not answer.
    switch.set(Trouble::Hang);
    let path = format!("/v1/repositories/{REPO}/snapshots/latest");
    let working = tokio::spawn(registry.request(Method::GET, &path).send());
    let refusal = until(|| registry.get("/v1/repositories"), StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(refusal.headers()["retry-after"], "1");
    refused(refusal, ErrorCode::Overloaded).await;
    for path in ["/livez", "/metrics"] {
        assert_eq!(registry.get(path).await.status(), StatusCode::OK, "{path}");
    }
    // Streams of frames have places of their own.
    let frames = registry.post(&format!("/v1/repositories/{REPO}/frames"), &json!({"digests": [Digest::sha256(b"absent")]})).await;
    refused(frames, ErrorCode::BlobUnknown).await;
    working.abort();
    until(|| registry.get("/v1/repositories"), StatusCode::OK).await;
}

/// A supervisor would restart a registry that does not answer, and a client would give up its
/// request.
#[tokio::test]
async fn a_registry_that_works_for_as_many_connections_as_it_may_answers_probes_and_refuses_others() {
    const QUEUE: u64 = 3;
    let (store, hold) = trouble::holding(Options::default()).await;
    let registry = Registry::start_over_with(store, |config| {
        config.max_connections = 1;
        config.queue_seconds = QUEUE;
    })
    .await;
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    hold.set(Some(pack_of(&registry, sample.manifest).await));
    // It keeps the only connection for as long as the storage does not answer.
    let verify = format!("/v1/repositories/{REPO}/snapshots/latest/verify");
    let working = tokio::spawn(registry.request(Method::POST, &verify).send());
    drop(hold.held.acquire().await.expect("a read"));
    // A connection for each request, as a supervisor has.
    let client = reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).build().expect("a client");
    let ask = |path: &str| client.get(registry.url(path)).send();
    let probes = async || {
        for path in ["/livez", "/readyz", "/metrics"] {
            let answer = ask(path).await.expect("an answer");
            assert_eq!((answer.status(), &answer.headers()["connection"]), (StatusCode::OK, &HeaderValue::from_static("close")), "{path}");
        }
    };
    let begun = Instant::now();
    probes().await;
    assert!(begun.elapsed() < Duration::from_secs(QUEUE), "no probe waits for a place");
    // Many more than may wait.
    let beyond = join_all((0..80).map(|_| ask("/v1/repositories")));
    let (refusals, ()) = tokio::join!(beyond, probes());
    for refusal in refusals {
        let refusal = refusal.expect("an answer");
        assert_eq!(refusal.headers()["retry-after"], "1");
        let detail = refused(refusal, ErrorCode::Overloaded).await;
        assert!(detail.contains("connections"), "{detail}");
    }
    hold.set(None);
    let _: api::Verified = ok(working.await.expect("the task ends").expect("an answer")).await;
    assert_eq!(ask("/v1/repositories").await.expect("an answer").status(), StatusCode::OK);
}

/// A snapshot whose list of tokens is so large that a commit reads it while no other such list is
/// read: the list, and the documents that name it.
fn with_large_list() -> (Document, [Document; 2]) {
    let list = Document::new(Kind::Blob, vec![7; (4 << 20) + 4]);
    let fingerprint = Digest::sha256(b"deployment");
    let prefix = prefix::key(&fingerprint, "", None, &[7]);
    let key = Key { scheme: prefix::SCHEME.into(), prefix, tokens: 1, alignment: 1, salt: String::new(), adapter: None };
    let config = SnapshotConfig { fingerprint: Some(fingerprint), prefix: Some(key), ..SnapshotConfig::default() };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let layers = vec![Descriptor::of(media_type::TOKENS, &list)];
    let manifest = Manifest::snapshot(&config, layers, BTreeMap::new()).to_document();
    (list, [config, manifest])
}

/// The pack that a blob is in.
async fn pack_of(registry: &Registry, blob: Digest) -> Path {
    let pack = registry.store.metadata().locate(vec![blob]).await.expect("metadata")[0].clone().expect("the blob").pack;
    Path::from(format!("{}/{pack}.pfpack", &pack[pack.len() - 2..]))
}

#[tokio::test]
async fn a_commit_that_waits_too_long_for_another_large_document_is_told_to_come_back() {
    let options = Options { queue: Duration::from_millis(100), ..Options::default() };
    let (store, hold) = trouble::holding(options).await;
    let registry = Registry::start_over(store).await;
    let (list, documents) = with_large_list();
    let pushes = [registry.open_push(REPO).await, registry.open_push(REPO).await];
    // In a pack of its own: the first commit waits for nothing else.
    for blobs in [std::slice::from_ref(&list), &documents] {
        let _: FramesStored = ok(registry.put_frames(&pushes[0], stream(blobs)).await).await;
    }
    hold.set(Some(pack_of(&registry, list.digest).await));
    let body = json!({"manifest": documents[1].digest});
    let commit = |push: &str| registry.request(Method::POST, &format!("{push}/commit")).json(&body).send();
    let first = tokio::spawn(commit(&pushes[0]));
    drop(hold.held.acquire().await.expect("a read of the list"));
    let refusal = commit(&pushes[1]).await.expect("an answer");
    assert_eq!(refusal.headers()["retry-after"], "1");
    refused(refusal, ErrorCode::Overloaded).await;
    hold.set(None);
    let first: api::Committed = ok(first.await.expect("the commit ends").expect("an answer")).await;
    let second: api::Committed = ok(commit(&pushes[1]).await.expect("an answer")).await;
    assert!(first.created && !second.created);
}

#[tokio::test]
async fn statistics_that_take_long_hold_up_no_reader_and_no_commit() {
    let ([first, store], hold) = trouble::holding_twice(Options::default()).await;
    let old = snapshot(0..2, vec![]);
    let registry = Registry::start_over(first).await;
    registry.push(REPO, &old, Some("old")).await;
    registry.stopped().await;
    // Rebuilt tables know no agents: the first question about one reads the configurations.
    store.rebuild(&mut |_| ()).await.expect("the tables are rebuilt");
    let registry = Registry::start_over_with(store, |config| config.queue_seconds = 1).await;
    hold.set(Some(pack_of(&registry, old.config).await));
    let stats = format!("/v1/repositories/{REPO}/stats?agent=test");
    let asked: Vec<_> = (0..6).map(|_| tokio::spawn(registry.request(Method::GET, &stats).send())).collect();
    // They have all places for statistics.
    refused(until(|| registry.get("/v1/stats"), StatusCode::SERVICE_UNAVAILABLE).await, ErrorCode::Overloaded).await;
    let new = snapshot(10..12, vec![old.manifest]);
    let innocent = async {
        registry.push(REPO, &new, Some("new")).await;
        let detail: api::SnapshotDetail = ok(registry.get(&format!("/v1/repositories/{REPO}/snapshots/new")).await).await;
        assert_eq!(detail.summary.digest, new.manifest);
    };
    tokio::time::timeout(Duration::from_secs(30), innocent).await.expect("an innocent client is served");
    hold.set(None);
    let mut served = 0;
    for answer in asked {
        let answer = answer.await.expect("it ends").expect("an answer");
        served += usize::from(answer.status() == StatusCode::OK);
    }
    assert!(served >= 2, "those that had a place: {served}");
    let both: api::Stats = ok(registry.get(&stats).await).await;
    assert_eq!(both.snapshots.len(), 2);
}

#[tokio::test]
async fn a_request_that_waits_for_its_client_takes_no_place() {
    let registry = Registry::start_with(|config| {
        config.max_requests = 1;
        config.queue_seconds = 1;
    })
    .await;
    let push = registry.open_push(REPO).await;
    let mut held = Vec::new();
    for _ in 0..5 {
        held.push(held_request(&registry, "POST", &format!("{push}/missing"), "application/json", HELD_BODY.len()).await);
        held.push(held_request(&registry, "PUT", &format!("{push}/frames"), media_type::FRAMES, 1 << 20).await);
    }
    assert_eq!(registry.get("/v1/repositories").await.status(), StatusCode::OK);
    let sample = snapshot(0..2, vec![]);
    registry.push(REPO, &sample, Some("latest")).await;
    held[0].write_all(HELD_BODY).await.expect("written");
    let mut answer = [0; 15];
    held[0].read_exact(&mut answer).await.expect("an answer");
    assert_eq!(&answer, b"HTTP/1.1 200 OK", "its body is taken when it comes");
}

/// Bodies that come fast at first and then stall spend the memory of those that arrive. Other
/// requests have their permits, and other bodies the memory of the slowest.
#[tokio::test]
async fn a_request_that_waits_for_memory_takes_no_place() {
    let registry = Registry::start_with(|config| {
        config.max_requests = 2;
        config.queue_seconds = 30;
        config.max_json_bytes = 1 << 20;
    })
    .await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("latest")).await;
    let push = registry.open_push(REPO).await;
    // A hundred and twenty-three of them fill the 36 MiB.
    let (mut held, piece) = (Vec::new(), vec![b' '; 300 << 10]);
    for at in 0..130 {
        let begun = Instant::now();
        assert_eq!(registry.get(&format!("/v1/repositories/{REPO}/tags/latest")).await.status(), StatusCode::OK);
        let mut body = held_request(&registry, "POST", &format!("{push}/missing"), "application/json", 1 << 20).await;
        assert!(begun.elapsed() < Duration::from_secs(10), "beside {at} slow bodies: {:?}", begun.elapsed());
        body.write_all(&piece).await.expect("written");
        held.push(body);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    registry.push(REPO, &snapshot(5..9, vec![]), Some("beside")).await;
    let digests: Vec<Digest> = (0..10_000_u64).map(|i| Digest::sha256(&i.to_le_bytes())).collect();
    let large = json!({"groups": [{"kind": "blob", "digests": digests}]});
    let _: api::MissingResponse = ok(registry.post(&format!("{push}/missing"), &large).await).await;
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_refused_upload_reads_its_answer_and_not_a_broken_pipe() {
    let registry = Registry::start().await;
    let blobs: Vec<Document> = (0..64_u64).map(|i| Document::new(Kind::Blob, page(i).repeat(256))).collect();
    let whole = stream(&blobs);
    assert!(whole.len() > 8 << 20);
    for _ in 0..4 {
        let path = format!("/v1/repositories/{REPO}/pushes/{}", uuid::Uuid::now_v7());
        refused(registry.put_frames(&path, whole.clone()).await, ErrorCode::PushUnknown).await;
    }
}

#[tokio::test]
async fn many_pushes_at_once_all_arrive() {
    let registry = Registry::start().await;
    let samples: Vec<Snapshot> = (0..12).map(|i| snapshot(i * 5..i * 5 + 10, vec![])).collect();
    let pushes = samples.iter().enumerate().map(|(i, sample)| {
        let registry = &registry;
        async move { registry.push(REPO, sample, Some(&format!("tag-{i}"))).await }
    });
    for committed in futures::future::join_all(pushes).await {
        assert!(committed.created);
    }
    for sample in &samples {
        let path = format!("/v1/repositories/{REPO}/snapshots/{}/verify", sample.manifest);
        let _: api::Verified = ok(registry.post(&path, &json!({})).await).await;
    }
}
