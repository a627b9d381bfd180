//! Heads of requests that two readers may read differently: they are refused. And clients that go
//! away.

use crate::common::snapshot::{page, stream};
use crate::common::{REPO, Registry, ok, refused};
use pfr_schema::api::MissingResponse;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, media_type};
use reqwest::Method;
use serde_json::json;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The status line of the answer to these bytes.
async fn answer(registry: &Registry, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
    stream.write_all(bytes).await.expect("written");
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while !answer.windows(2).any(|w| w == b"\r\n") {
        match stream.read(&mut piece).await.expect("an answer") {
            0 => break,
            n => answer.extend_from_slice(&piece[..n]),
        }
    }
    String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn a_request_has_one_host() {
    let registry = Registry::start().await;
    for head in [
        "GET /livez HTTP/1.1\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost:\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: a\r\nX: y\r\nhost: b\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: a b\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: user@a\r\n\r\n",
        "GET http://a/livez HTTP/1.1\r\n\r\n",
        "GET /livez HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n",
    ] {
        assert!(answer(&registry, head.as_bytes()).await.ends_with(" 400 Bad Request"), "{head:?}");
    }
    for head in [
        "GET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: a:80\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
        "GET http://a/livez HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET /livez HTTP/1.0\r\n\r\n",
    ] {
        assert!(answer(&registry, head.as_bytes()).await.ends_with(" 200 OK"), "{head:?}");
    }
}

/// A page of another site whose name leads to this machine: for its browser it is the same site.
#[tokio::test]
async fn a_name_that_another_site_has_lead_here_is_refused_unless_tokens_are_required() {
    let registry = Registry::start_with(|config| config.host_names = "pf.example".parse().expect("names")).await;
    let ask = async |registry: &Registry, method: Method, path: &str, host: &str| {
        let request = registry.request(method, path).header("host", host).header("sec-fetch-site", "same-origin");
        request.send().await.expect("an answer")
    };
    for (method, path) in [(Method::GET, "/v1/repositories"), (Method::DELETE, "/v1/domains/acme"), (Method::GET, "/metrics")] {
        let detail = refused(ask(&registry, method, path, "evil.example:5077").await, ErrorCode::Denied).await;
        assert!(detail.contains("\"evil.example\"") && detail.contains("host-names"), "{detail}");
    }
    let image = ask(&registry, Method::GET, "/v2/", "evil.example").await;
    assert_eq!((image.status().as_u16(), image.text().await.expect("text").contains("DENIED")), (403, true));
    for (path, host) in [("/livez", "evil.example"), ("/readyz", "evil.example"), ("/v1/repositories", "pf.example:80")] {
        assert_eq!(ask(&registry, Method::GET, path, host).await.status().as_u16(), 200, "{path} as {host}");
    }
    let guarded = Registry::start_with(|config| config.require_tokens = true).await;
    refused(ask(&guarded, Method::GET, "/v1/repositories", "evil.example").await, ErrorCode::Unauthorized).await;
}

#[tokio::test]
async fn a_bare_line_feed_in_a_head_is_refused() {
    let registry = Registry::start().await;
    for head in [
        "GET /livez HTTP/1.1\nHost: a\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: a\nX: y\r\n\r\n",
        "GET /livez HTTP/1.1\r\nHost: a\r\n\n",
        "GET /livez HTTP/1.1\nHost: a\n\n",
        "\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
    ] {
        assert_eq!(answer(&registry, head.as_bytes()).await, "HTTP/1.1 400 Bad Request", "{head:?}");
    }
    // Also behind a body, and never in one.
    let push = registry.open_push("team").await;
    let json = "{\n\"groups\":\n[]}";
    let head = format!("POST {push}/missing HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n");
    for body in [
        format!("Content-Length: {}\r\n\r\n{json}", json.len()),
        format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{json}\r\n0\r\n\r\n", json.len()),
    ] {
        let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
        stream.write_all(format!("{head}{body}GET /livez HTTP/1.1\nHost: a\r\n\r\n").as_bytes()).await.expect("written");
        let mut answers = String::new();
        stream.read_to_string(&mut answers).await.expect("it is closed");
        let statuses: Vec<&str> = answers.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
        assert_eq!(statuses, ["200", "400"], "{answers}");
    }
}

/// hyper takes it for the beginning of a trailer, and would wait for more.
#[tokio::test]
async fn a_bare_line_feed_between_chunks_is_refused_at_once() {
    let registry = Registry::start().await;
    let push = registry.open_push("team").await;
    let json = r#"{"groups":[]}"#;
    let head =
        format!("POST {push}/missing HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n");
    let chunk = format!("{:x}\r\n{json}\r\n", json.len());
    for end in ["0\r\n\n", "0\r\n\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n", "0\r\nt: u\n\r\n", "0\n\r\n", "0\n\n"] {
        for pieces in [vec![format!("{head}{chunk}{end}")], vec![format!("{head}{chunk}"), end.to_owned()]] {
            let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
            for piece in &pieces {
                stream.write_all(piece.as_bytes()).await.expect("written");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            let mut answers = String::new();
            let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_string(&mut answers)).await;
            read.unwrap_or_else(|_| panic!("{end:?}: no answer")).expect("it is closed");
            let statuses: Vec<&str> = answers.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
            assert_eq!(statuses, ["400"], "{end:?}: {answers}");
            assert!(answers.contains("a line feed without a carriage return"), "{answers}");
        }
    }
}

/// The registry keeps the blobs that came before it.
#[tokio::test]
async fn a_bare_line_feed_between_the_chunks_of_an_upload_ends_it() {
    let registry = Registry::start().await;
    let push = registry.open_push("team").await;
    let blob = Document::new(Kind::Blob, page(1));
    let frames = stream(std::slice::from_ref(&blob));
    let head = format!(
        "PUT {push}/frames HTTP/1.1\r\nHost: localhost\r\nContent-Type: {}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n",
        media_type::FRAMES,
        frames.len()
    );
    let end = b"\r\n0\r\n\nGET /livez HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut client = TcpStream::connect(registry.address).await.expect("a connection");
    client.write_all(&[head.as_bytes(), &frames, end].concat()).await.expect("written");
    let mut answers = String::new();
    let read = tokio::time::timeout(Duration::from_secs(10), client.read_to_string(&mut answers)).await;
    read.expect("an answer").expect("it is closed");
    let statuses: Vec<&str> = answers.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    assert_eq!(statuses, ["422"], "{answers}");
    let groups = json!({"groups": [{"kind": "blob", "digests": [blob.digest]}]});
    let missing: MissingResponse = ok(registry.post(&format!("{push}/missing"), &groups).await).await;
    assert!(missing.missing.is_empty(), "{missing:?}");
}

/// A client that goes away in the middle of an upload sends the rest when it comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_came_of_an_upload_is_kept_if_its_client_goes_away() {
    let registry = Registry::start().await;
    let push = registry.open_push(REPO).await;
    for round in 0..10 {
        let blobs: Vec<Document> = (0..40).map(|i| Document::new(Kind::Blob, page(round << 16 | i).repeat(40))).collect();
        let bytes = stream(&blobs);
        let head = format!(
            "PUT {push}/frames HTTP/1.1\r\nhost: localhost\r\ncontent-type: {}\r\ncontent-length: {}\r\n\r\n",
            media_type::FRAMES,
            bytes.len()
        );
        let mut client = TcpStream::connect(registry.address).await.expect("a connection");
        client.write_all(head.as_bytes()).await.expect("written");
        // All of it, without waiting for the answer, or all but a part of the last blob.
        let sent = if round < 6 { bytes.len() } else { bytes.len() - 1000 };
        client.write_all(&bytes[..sent]).await.expect("written");
        // A connection is closed, or reset as that of a killed client is.
        if round % 2 == 0 {
            client.set_zero_linger().expect("set");
        }
        drop(client);
        let digests: Vec<Digest> = blobs.iter().map(|blob| blob.digest).collect();
        let kept = async {
            loop {
                let groups = json!({"groups": [{"kind": "blob", "digests": digests}]});
                let missing: MissingResponse = ok(registry.post(&format!("{push}/missing"), &groups).await).await;
                if missing.missing.iter().map(|(_, count)| count).sum::<u64>() < digests.len() as u64 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), kept).await.unwrap_or_else(|_| panic!("round {round}: nothing was kept"));
    }
}
