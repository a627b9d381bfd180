//! The client of the capture agent: an agent that is not running, one that ends or hangs, a socket
//! that is not an agent's, the text of a refusal, and a push that a user waits for.

use crate::common::agent::{Answer, agent, captured, push};
use crate::common::pf;
use pfr_client::{AgentClient, Error};
use pfr_schema::{Digest, ErrorCode};
use serde_json::json;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

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

/// An agent that has captured, and whose push is in each of these states in turn, the last for
/// ever.
fn pushing(home: &Path, states: &'static [&'static str]) -> String {
    let socket = home.join("agent.sock");
    let mut asked = 0;
    agent(&socket, move |request| match request {
        "POST /v1/engines/e/snapshots" => Answer::Json(captured("running")),
        "GET /v1/pushes" => {
            asked += 1;
            Answer::Json(json!({"pushes": [push(states[states.len().min(asked) - 1])]}))
        }
        other => panic!("{other}"),
    });
    socket.display().to_string()
}

#[test]
fn a_push_that_is_waited_for_says_what_keeps_it_and_the_digest_comes_last() {
    let home = tempfile::tempdir().unwrap();
    let socket = pushing(home.path(), &["waiting", "running", "waiting", "done"]);
    let (code, stdout, stderr) = pf(home.path(), &["snapshot", "e", "team/agent:y", "--push", "wait", "--agent", &socket]);
    assert_eq!(code, 0, "{stderr}");
    let digest = Digest::sha256(b"x").to_string();
    let said = format!(
        "team/agent:y is in the agent's store as {digest}; `pf pushes --agent {socket}` shows its push; the push is queued, and tried \
         again: no room\n"
    );
    assert_eq!(stderr, said, "once, not each time that it is looked at");
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines[0].starts_with("team/agent:y of s at token 3") && lines[3] == "pushed, 7 B sent" && lines[4] == digest, "{stdout}");
    assert_eq!(lines.len(), 5, "{stdout}");

    let home = tempfile::tempdir().unwrap();
    let socket = pushing(home.path(), &["running", "failed"]);
    let (code, stdout, stderr) = pf(home.path(), &["snapshot", "e", "team/agent:y", "--push", "wait", "--agent", &socket]);
    assert!(code == 7 && stderr.contains("was not pushed: no room") && stdout.ends_with(&format!("{digest}\n")), "{stdout}{stderr}");
}

#[test]
fn ctrl_c_names_what_is_done_and_the_command_that_shows_the_rest() {
    let home = tempfile::tempdir().unwrap();
    let socket = pushing(home.path(), &["waiting"]);
    let args = ["snapshot", "e", "team/agent:y", "--push", "wait", "--agent", &socket];
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
    command.env_clear().env("HOME", home.path()).args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut waits = command.spawn().unwrap();
    let mut lines = BufReader::new(waits.stderr.take().unwrap());
    let mut said = String::new();
    lines.read_line(&mut said).unwrap();
    assert!(said.contains("the push is queued"), "{said}");
    assert!(Command::new("kill").args(["-INT", &waits.id().to_string()]).status().unwrap().success());
    let status = waits.wait().unwrap();
    said.clear();
    lines.read_to_string(&mut said).unwrap();
    let digest = Digest::sha256(b"x");
    let expected = format!(
        "interrupted; team/agent:y is in the agent's store as {digest}, and its push goes on without this command: `pf pushes --agent \
         {socket}` shows it\n"
    );
    assert_eq!((status.code(), said), (Some(130), expected));
}
