//! Registries that keep a client waiting by sending a byte now and then.

use crate::common::repository;
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_client::{Error, Remote, RemoteOptions};
use pfr_schema::codec::Codecs;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

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
