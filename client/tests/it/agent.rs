//! The client of the capture agent: an agent that is not running, one that ends or hangs, a socket
//! that is not an agent's, and the text of a refusal.

use pfr_client::{AgentClient, Error};
use pfr_schema::ErrorCode;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;

/// Answers one connection with these bytes, and hangs up.
fn answers(answer: &'static str) -> (tempfile::TempDir, AgentClient) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        drop(stream.read(&mut [0; 4096]));
        drop(stream.write_all(answer.as_bytes()));
    });
    let client = AgentClient::new(socket).unwrap();
    (dir, client)
}

#[tokio::test]
async fn a_missing_agent_is_told_from_one_that_went_away() {
    let dir = tempfile::tempdir().unwrap();
    let error = AgentClient::new(dir.path().join("no.sock")).unwrap().engines().await.unwrap_err();
    assert!(matches!(&error, Error::NoAgent { .. }), "{error}");
    assert!(error.to_string().contains("no capture agent answers at") && error.code() == ErrorCode::Unavailable, "{error}");

    for cut in ["", "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"engines\":["] {
        let (_dir, client) = answers(cut);
        let error = client.engines().await.unwrap_err();
        assert!(matches!(&error, Error::AgentGone { .. }), "{cut:?}: {error}");
        assert!(!error.retryable(), "a snapshot asked for again would be a second one");
    }
}

#[tokio::test(start_paused = true)]
async fn an_agent_that_hangs_is_not_waited_for_where_it_has_the_answer_at_hand() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("agent.sock");
    // The system takes connections, and nothing reads them.
    let _hangs = UnixListener::bind(&socket).unwrap();
    let client = AgentClient::new(socket).unwrap();
    let refusals = [
        client.engines().await.unwrap_err(),
        client.engine("e").await.unwrap_err(),
        client.restores(Some("e"), 1).await.unwrap_err(),
        client.pushes().await.unwrap_err(),
        client.jobs().await.unwrap_err(),
        client.job("j").await.unwrap_err(),
    ];
    for error in refusals {
        assert!(matches!(&error, Error::AgentSilent { .. }), "{error}");
        assert!(error.to_string().ends_with("has not answered for 30 seconds") && error.retryable(), "{error}");
        assert_eq!(error.code(), ErrorCode::Unavailable);
    }
}

#[tokio::test]
async fn a_refusal_keeps_its_code_and_a_stranger_is_named() {
    let (_dir, client) = answers(concat!(
        "HTTP/1.1 409 Conflict\r\nconnection: close\r\ncontent-type: application/problem+json\r\n\r\n",
        r#"{"type":"urn:pf:problem:engine_busy","title":"t","status":409,"detail":"busy with a snapshot","code":"engine_busy","retryable":true}"#
    ));
    let error = client.engines().await.unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (ErrorCode::EngineBusy, "busy with a snapshot"));

    for answer in ["HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello", "HTTP/1.1 500 Oops\r\nconnection: close\r\n\r\nhello"] {
        let (_dir, client) = answers(answer);
        let error = client.engines().await.unwrap_err();
        assert!(matches!(&error, Error::NotAnAgent { .. }), "{answer:?}: {error}");
    }
}
