//! Heads of requests that two readers may read differently: they are refused.

use crate::common::Registry;
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
    let head = format!("POST {push}/missing HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n");
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
