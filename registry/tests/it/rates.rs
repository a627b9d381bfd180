//! Limits on requests and bytes a second: a caller that floods is refused or slowed down, and
//! others are not.

use crate::common::snapshot::{page, snapshot, stream};
use crate::common::{REPO, Registry, client, ok, refused};
use pfr_schema::tree::Document;
use pfr_schema::{AccessToken, Digest, ErrorCode, Kind, api, media_type};
use reqwest::{Method, StatusCode};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const ALL: &str = "*:pull,push,delete,admin";

#[tokio::test]
async fn a_token_that_floods_is_refused_and_an_innocent_one_never_is() {
    let registry = Arc::new(
        Registry::start_with(|config| {
            (config.require_tokens, config.caller_requests_per_second, config.burst_seconds) = (true, 20, 5);
            config.max_requests = 16;
        })
        .await,
    );
    let (flooding, innocent) = (registry.token(&[ALL]).await, registry.token(&[ALL]).await);
    let (over, refusals) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let flood: Vec<_> = (0..24)
        .map(|_| {
            let (registry, token, over, refusals) = (Arc::clone(&registry), flooding.clone(), Arc::clone(&over), Arc::clone(&refusals));
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let answer = registry.send_as(&token, registry.request(Method::GET, "/v1/repositories")).await;
                    if answer.status() == StatusCode::OK {
                        continue;
                    }
                    assert_eq!(answer.headers()["retry-after"], "1");
                    refused(answer, ErrorCode::RateLimited).await;
                    refusals.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    while refusals.load(Ordering::Relaxed) < 100 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // Its whole push, and what it costs, in the middle of the flood.
    let s = snapshot(0..3, vec![]);
    let send = async |request: reqwest::RequestBuilder| registry.send_as(&innocent, request).await;
    let path = format!("/v1/repositories/{REPO}/pushes");
    let opened: api::Push = ok(send(registry.request(Method::POST, &path)).await).await;
    let session = format!("{path}/{}", opened.id);
    let frames = registry.request(Method::PUT, &format!("{session}/frames")).header("content-type", media_type::FRAMES);
    let _: api::FramesStored = ok(send(frames.body(s.stream())).await).await;
    let commit = registry.request(Method::POST, &format!("{session}/commit")).json(&json!({"manifest": s.manifest, "tag": "t"}));
    let _: api::Committed = ok(send(commit).await).await;
    for _ in 0..40 {
        let tags: api::TagList = ok(send(registry.request(Method::GET, &format!("/v1/repositories/{REPO}/tags"))).await).await;
        assert_eq!(tags.tags.len(), 1);
    }
    // Health is never limited.
    for _ in 0..200 {
        assert_eq!(registry.get("/livez").await.status(), StatusCode::OK);
    }
    over.store(true, Ordering::Relaxed);
    for task in flood {
        task.await.expect("the flood ends");
    }
    let metrics = registry.send_as(&flooding, registry.request(Method::GET, "/metrics")).await;
    assert_eq!(metrics.status(), StatusCode::OK, "metrics are not limited either");
    let text = metrics.text().await.expect("text");
    assert!(text.lines().any(|line| line.starts_with("pf_rate_limited_requests_total{limit=\"token\"} ")), "{text}");
}

/// How many requests are answered as expected before the first that is refused.
async fn before_a_refusal(expected: StatusCode, mut ask: impl AsyncFnMut() -> StatusCode) -> usize {
    for passed in 0..100 {
        match ask().await {
            StatusCode::TOO_MANY_REQUESTS => return passed,
            other => assert_eq!(other, expected),
        }
    }
    panic!("a hundred requests passed");
}

/// A caller that guesses tokens is limited by its address, and one with a good token beside it is
/// not.
#[tokio::test]
async fn strangers_are_limited_by_their_address() {
    let registry = Registry::start_with(|config| {
        (config.require_tokens, config.caller_requests_per_second, config.burst_seconds) = (true, 1, 5);
    })
    .await;
    let (good, new) = (registry.token(&[ALL]).await, registry.token(&[ALL]).await);
    let ask = async |token: Option<AccessToken>| {
        let request = registry.request(Method::GET, "/v1/repositories");
        let request = match token {
            Some(token) => request.bearer_auth(token.expose()),
            None => request,
        };
        request.send().await.expect("an answer").status()
    };
    assert_eq!(ask(Some(good.clone())).await, StatusCode::OK);
    // None, and made-up ones, of which each is new.
    let mut n = 0_u8;
    let passed = before_a_refusal(StatusCode::UNAUTHORIZED, async || {
        n += 1;
        ask(n.is_multiple_of(2).then(|| AccessToken::new([n; 8], [n; 32]))).await
    })
    .await;
    assert!(passed >= 5, "{passed}");
    // Callers with valid tokens share the address, and nothing else: one that was used before, and
    // one that the registry sees for the first time.
    assert_eq!(ask(Some(good)).await, StatusCode::OK);
    assert_eq!(ask(None).await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(ask(Some(new)).await, StatusCode::OK);
    // Without tokens all callers are strangers.
    let open = Registry::start_with(|config| (config.caller_requests_per_second, config.burst_seconds) = (1, 3)).await;
    let passed = before_a_refusal(StatusCode::OK, async || open.get("/v1/repositories").await.status()).await;
    assert!(passed >= 3, "{passed}");
}

/// Pages are requests like others. A browser gets the refusal as a page too.
#[tokio::test]
async fn pages_are_limited_and_say_so() {
    let registry = Registry::start_with(|config| (config.caller_requests_per_second, config.burst_seconds) = (1, 3)).await;
    for asked in 0.. {
        assert!(asked < 100, "a hundred pages passed");
        let answer = registry.request(Method::GET, "/ui/-/tasks").header("accept", "text/html").send().await.expect("an answer");
        assert_eq!(answer.headers()["content-type"], "text/html; charset=utf-8");
        if answer.status() == StatusCode::OK {
            continue;
        }
        assert!(answer.status() == StatusCode::TOO_MANY_REQUESTS && asked >= 3, "{asked}: {}", answer.status());
        assert_eq!(answer.headers()["retry-after"], "1");
        let text = answer.text().await.expect("text");
        assert!(text.contains("rate_limited") && text.contains("from this address"), "{text}");
        break;
    }
    // What every page is made with.
    assert_eq!(registry.get("/ui/-/style.css").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn the_callers_of_a_domain_share_its_limit_and_those_of_another_do_not() {
    let registry = Registry::start_with(|config| {
        (config.require_tokens, config.domain_requests_per_second, config.burst_seconds) = (true, 1, 4);
    })
    .await;
    let tokens = [registry.token(&[ALL]).await, registry.token(&[ALL]).await];
    let outsider = registry.token(&["nothing:push"]).await;
    let domain = registry.send_as(&tokens[0], registry.request(Method::PUT, "/v1/domains/acme")).await;
    assert_eq!(domain.status(), StatusCode::CREATED);
    // One that may do nothing there uses nothing up.
    for _ in 0..20 {
        refused(registry.send_as(&outsider, registry.request(Method::GET, "/v1/stats")).await, ErrorCode::Denied).await;
    }
    let mut n = 0;
    let passed = before_a_refusal(StatusCode::OK, async || {
        n += 1;
        let answer = registry.send_as(&tokens[n % 2], registry.request(Method::GET, "/v1/repositories")).await;
        let status = answer.status();
        if status != StatusCode::OK {
            let detail = refused(answer, ErrorCode::RateLimited).await;
            assert!(detail.contains("for the domain default"), "{detail}");
        }
        status
    })
    .await;
    // The creation of the domain was one.
    assert!(passed >= 3, "{passed}");
    let answer = registry.send_as(&tokens[0], registry.request(Method::GET, "/domains/acme/v1/repositories")).await;
    assert_eq!(answer.status(), StatusCode::OK);
}

/// Blobs of about so many MiB.
fn blobs(mib: u64, seed: u64) -> Vec<Document> {
    let bytes = page(0).len() as u64;
    (0..mib).map(|n| Document::new(Kind::Blob, page(seed + n).repeat(((1 << 20) / bytes) as usize))).collect()
}

/// A stream is slowed down, not refused, and holds no place meanwhile.
#[tokio::test]
async fn streams_of_a_caller_keep_its_rate_and_those_of_another_pass_by() {
    const MIB: u64 = 8;
    let registry = Registry::start_with(|config| {
        (config.require_tokens, config.caller_bytes_per_second, config.burst_seconds) = (true, 2 << 20, 1);
        (config.max_requests, config.max_uploads, config.max_downloads) = (2, 1, 1);
    })
    .await;
    let (slow, other) = (registry.token(&[ALL]).await, registry.token(&[ALL]).await);
    let path = format!("/v1/repositories/{REPO}/pushes");
    let upload = async |token: &AccessToken, blobs: &[Document]| {
        let opened: api::Push = ok(registry.send_as(token, registry.request(Method::POST, &path)).await).await;
        let frames = registry.request(Method::PUT, &format!("{path}/{}/frames", opened.id)).header("content-type", media_type::FRAMES);
        let (began, body) = (Instant::now(), stream(blobs));
        assert!(body.len() >= blobs.len() << 20, "they are not compressed");
        let stored: api::FramesStored = ok(registry.send_as(token, frames.body(body)).await).await;
        assert_eq!(stored.frames, blobs.len() as u64);
        (began, Instant::now())
    };
    let (large, small) = (blobs(MIB, 1000), blobs(1, 5000));
    let ((began, ended), (_, passed)) = tokio::join!(upload(&slow, &large), async {
        // When the large one is under way.
        tokio::time::sleep(Duration::from_millis(500)).await;
        upload(&other, &small).await
    });
    // 8 MiB at 2 MiB a second, of which one second's worth goes at once, and the last piece is not
    // waited for.
    assert!(ended - began >= Duration::from_secs(1), "{:?}", ended - began);
    assert!(passed < ended, "the upload of another caller waited for a slow one");

    // A repository comes into being with its first commit.
    let s = snapshot(0..2, vec![]);
    let opened: api::Push = ok(registry.send_as(&slow, registry.request(Method::POST, &path)).await).await;
    let session = format!("{path}/{}", opened.id);
    let frames = registry.request(Method::PUT, &format!("{session}/frames")).header("content-type", media_type::FRAMES);
    let _: api::FramesStored = ok(registry.send_as(&slow, frames.body(s.stream())).await).await;
    let commit = registry.request(Method::POST, &format!("{session}/commit")).json(&json!({"manifest": s.manifest}));
    let _: api::Committed = ok(registry.send_as(&slow, commit).await).await;
    let digests: Vec<_> = large.iter().map(|blob| blob.digest).collect();
    let frames = registry.request(Method::POST, &format!("/v1/repositories/{REPO}/frames")).json(&json!({"digests": digests}));
    let began = Instant::now();
    let answer = registry.send_as(&slow, frames).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(crate::common::snapshot::decode(answer.bytes().await.expect("a whole body")).len(), large.len());
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
}

/// A layer of an image is a stream like one of frames.
#[tokio::test]
async fn layers_of_images_keep_the_rate_of_their_caller() {
    let registry = Registry::start_with(|config| {
        (config.caller_bytes_per_second, config.burst_seconds) = (2 << 20, 1);
    })
    .await;
    let layer = vec![7_u8; 8 << 20];
    let digest = Digest::sha256(&layer);
    let upload = registry.request(Method::POST, &format!("/v2/team/app/blobs/uploads/?digest={digest}"));
    let began = Instant::now();
    let answer = upload.header("content-type", "application/octet-stream").body(layer.clone()).send().await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::CREATED);
    assert!(began.elapsed() >= Duration::from_secs(1), "up: {:?}", began.elapsed());
    let began = Instant::now();
    let answer = registry.get(&format!("/v2/team/app/blobs/{digest}")).await;
    assert_eq!(answer.status(), StatusCode::OK);
    assert_eq!(answer.bytes().await.expect("a whole body"), layer);
    assert!(began.elapsed() >= Duration::from_secs(1), "down: {:?}", began.elapsed());
}

/// A download that waits for its limit is like one whose client is slow: it keeps no connection
/// from others.
#[tokio::test]
async fn a_download_that_waits_for_its_limit_makes_room_for_a_new_connection() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("t")).await;
    let (push, large) = (registry.open_push(REPO).await, blobs(8, 9000));
    let _: api::FramesStored = ok(registry.put_frames(&push, stream(&large)).await).await;
    registry.stopped().await;
    let registry = Registry::start_again(data.path(), |config| {
        (config.caller_bytes_per_second, config.burst_seconds) = (1 << 20, 1);
        (config.max_connections, config.queue_seconds) = (1, 2);
    })
    .await;
    let digests: Vec<_> = large.iter().map(|blob| blob.digest).collect();
    let answer = registry.post(&format!("/v1/repositories/{REPO}/frames"), &json!({"digests": digests})).await;
    assert_eq!(answer.status(), StatusCode::OK);
    // Its client takes all that comes: eight seconds of it.
    let download = tokio::spawn(answer.bytes());
    let other = client(&[]).get(registry.url("/v1/repositories")).send().await.expect("there is room");
    assert_eq!(other.status(), StatusCode::OK);
    assert!(download.await.expect("the task ends").is_err(), "it made room");
}

/// A layer that looks at a request before its handler does not make two of it.
#[tokio::test]
async fn a_request_counts_once_also_where_an_upstream_is_asked_first() {
    let upstream = Registry::start().await;
    let registry = Registry::start_with(|config| {
        config.upstream.clone_from(&upstream.base);
        config.audit_reads = true;
        (config.caller_requests_per_second, config.burst_seconds) = (1, 20);
    })
    .await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("t")).await;
    let path = format!("/v1/repositories/{REPO}/tags");
    let begun = Instant::now();
    let passed = before_a_refusal(StatusCode::OK, async || registry.get(&path).await.status()).await;
    // The push was three.
    assert!(passed >= 15, "{passed} in {:?}", begun.elapsed());
    let records: api::AuditList = loop {
        let answer = registry.get("/v1/audit?limit=1000").await;
        match answer.status() {
            StatusCode::TOO_MANY_REQUESTS => tokio::time::sleep(Duration::from_millis(100)).await,
            _ => break ok(answer).await,
        }
    };
    let reads = records.records.iter().filter(|record| record.operation == "list_tags").count();
    assert_eq!(reads, passed, "a record for each");
}

/// Names that are none cost as much as others.
#[tokio::test]
async fn malformed_requests_count_too() {
    let registry = Registry::start_with(|config| (config.caller_requests_per_second, config.burst_seconds) = (1, 5)).await;
    let passed = before_a_refusal(StatusCode::BAD_REQUEST, async || registry.get("/v1/repositories/UPPER/tags").await.status()).await;
    assert!(passed >= 5, "{passed}");
}
