//! Registries that keep a client waiting: they hang, work for long, or send a byte now and then.

use crate::common::{digest_of, repository};
use axum::http::StatusCode;
use axum::routing::{any, get};
use axum::{Json, Router};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_client::{Error, Remote, RemoteOptions};
use pfr_schema::codec::Codecs;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Serves each connection by `serve`.
async fn server<F: Future<Output = std::io::Result<()>> + Send + 'static>(serve: fn(TcpStream) -> F) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // The client may leave in the middle: that is what it is asked to do.
            drop(serve(stream).await);
        }
    });
    url
}

/// A client that waits for 300 ms and expects 300 bytes in them.
fn remote(url: &str) -> Remote {
    let options = RemoteOptions {
        retries: 0,
        retry_for: Duration::ZERO,
        idle_timeout: Duration::from_millis(300),
        min_rate: 1000,
        ..RemoteOptions::default()
    };
    Remote::new(url, options).unwrap()
}

/// Answers with an endless body, a byte every 10 ms.
async fn drip(mut stream: TcpStream) -> std::io::Result<()> {
    let mut request = [0; 4096];
    assert!(stream.read(&mut request).await? > 0);
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n{").await?;
    loop {
        stream.write_all(b" ").await?;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Takes a body, a hundred bytes every 10 ms.
async fn sip(mut stream: TcpStream) -> std::io::Result<()> {
    let mut taken = [0; 100];
    while stream.read(&mut taken).await? > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test]
async fn a_document_that_comes_drop_by_drop_is_given_up() {
    let remote = remote(&server(drip).await);
    let error = tokio::time::timeout(TIMEOUT, remote.snapshot(&repository(), &"t".parse().unwrap())).await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::TooSlow { .. }) && error.to_string().contains("comes too slowly"), "{error}");
    assert_eq!(error.code().exit_code(), 7);
}

#[tokio::test]
async fn a_stream_of_frames_that_comes_drop_by_drop_is_given_up() {
    let remote = remote(&server(drip).await);
    let read = async { remote.frames(&repository(), vec![], Codecs::ALL).await.unwrap().try_collect::<Vec<_>>().await };
    let error = tokio::time::timeout(TIMEOUT, read).await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::TooSlow { .. }) && error.to_string().contains("comes too slowly"), "{error}");
}

#[tokio::test]
async fn an_upload_that_is_taken_drop_by_drop_is_given_up() {
    let remote = remote(&server(sip).await);
    let piece = bytes::Bytes::from(vec![0; 64 << 10]);
    let frames = move || futures::stream::repeat(piece.clone()).map(Ok).boxed();
    let error = tokio::time::timeout(TIMEOUT, remote.put_frames(&repository(), "x", frames)).await.unwrap().unwrap_err();
    assert!(matches!(&error, Error::Unreachable { .. }), "{error}");
}

/// A registry that verifies a snapshot until it was asked nine times whether it lives: more than
/// twice as long as [`worked_on`] waits for a sign of life. `status` is its answer to that.
async fn worker(status: StatusCode) -> String {
    let asked = Arc::new(Semaphore::new(0));
    let counted = Arc::clone(&asked);
    let lives = move || {
        counted.add_permits(1);
        async move { status }
    };
    let work = move || {
        let asked = Arc::clone(&asked);
        async move {
            let _all = asked.acquire_many(9).await.unwrap();
            Json(json!({"digest": digest_of(b""), "blobs": 1, "bytes": 1}))
        }
    };
    let routes = Router::new().route("/livez", get(lives)).fallback(any(work));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

/// What a client gets that takes a registry for dead after a second without a sign of life.
async fn worked_on(url: &str) -> Result<u64, Error> {
    let idle_timeout = Duration::from_secs(1);
    let options = RemoteOptions { retries: 0, retry_for: Duration::ZERO, idle_timeout, ..RemoteOptions::default() };
    let remote = Remote::new(url, options).unwrap();
    let verified = tokio::time::timeout(TIMEOUT, remote.verify(&repository(), &digest_of(b""))).await.unwrap();
    verified.map(|verified| verified.blobs)
}

#[tokio::test]
async fn a_registry_that_works_for_long_is_waited_for_while_it_lives() {
    // A registry of a kind that has no such page lives, too.
    for (status, domain) in [(StatusCode::OK, ""), (StatusCode::NOT_FOUND, ""), (StatusCode::OK, "/domains/acme")] {
        let url = worker(status).await + domain;
        assert_eq!(worked_on(&url).await.unwrap(), 1, "{url}: {status}");
    }
}

#[tokio::test]
async fn a_registry_that_hangs_at_work_is_given_up() {
    // The kernel takes the connections; no program ever reads from them.
    let hangs = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let gateway = worker(StatusCode::GATEWAY_TIMEOUT).await;
    for url in [format!("http://{}", hangs.local_addr().unwrap()), gateway] {
        let error = worked_on(&url).await.unwrap_err();
        assert!(matches!(&error, Error::Unreachable { .. }) && error.retryable(), "{error}");
        assert!(error.to_string().contains("none to /livez for 1 seconds"), "{error}");
    }
}
