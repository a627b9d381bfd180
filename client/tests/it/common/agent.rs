//! A capture agent that answers as a test says.

use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;

/// The answer to one request.
pub enum Answer {
    Json(Value),
    /// A problem: its status, its code, and a sentence.
    Problem(u16, &'static str, &'static str),
    /// The connection is closed before the answer.
    Gone,
}

/// Serves at `socket` until the process ends. The rule gets the first line of a request without the
/// version of HTTP, such as `GET /v1/engines`.
pub fn agent(socket: &Path, mut rule: impl FnMut(&str) -> Answer + Send + 'static) {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            let mut head = Vec::new();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line.trim().is_empty() {
                    break;
                }
                head.push(line.trim().to_owned());
            }
            let length = head.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
            // A connection that is closed with bytes unread loses the answer.
            reader.read_exact(&mut vec![0; length.unwrap_or(0)]).unwrap();
            let request = head[0].rsplit_once(' ').unwrap().0;
            let (status, kind, body) = match rule(request) {
                Answer::Json(body) => (200, "application/json", body),
                Answer::Problem(status, code, detail) => {
                    let problem = json!({"type": "t", "title": "t", "status": status, "detail": detail, "code": code, "retryable": false});
                    (status, "application/problem+json", problem)
                }
                Answer::Gone => continue,
            };
            let body = body.to_string();
            let length = body.len();
            let head = format!("HTTP/1.1 {status} S\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n");
            drop(reader.get_mut().write_all((head + &body).as_bytes()));
        }
    });
}

/// A push of the agent, in a state.
pub fn push(state: &str) -> Value {
    let digest = pfr_schema::Digest::sha256(b"x");
    json!({"id": "1", "digest": digest, "reference": "team/agent:y", "state": state, "attempts": 1, "error": "no room", "bytes_sent": 7})
}

/// The report of a capture whose push is in a state.
pub fn captured(push_state: &str) -> Value {
    json!({
        "digest": pfr_schema::Digest::sha256(b"x"), "reference": "team/agent:y", "engine": "e", "sequence": "s", "boundary": 3,
        "tokens": 4, "pages": 1, "bytes_resident": 10, "bytes_moved": 10, "bytes_new": 10, "bytes_state": 0, "pause_seconds": 0.0,
        "total_seconds": 0.1, "exactness": "bit-exact", "oracle": false, "push": push(push_state),
    })
}

/// A job of the agent that has ended: of the kind that the request names, with this result.
pub fn job(request: &Value, state: &str, result: &Value) -> Value {
    let kind = request["kind"].as_str().unwrap();
    let mut job = json!({
        "id": "1", "request": request, "state": state, "started_at": 1_700_000_000_000_u64, "finished_at": 1_700_000_001_000_u64,
        "bytes_done": 10, "bytes_total": 10, "rate": 10.0,
    });
    job[kind] = result.clone();
    job
}

/// A warm job that has ended.
pub fn warmed(state: &str) -> Value {
    let item = json!({
        "reference": "http://r:1/team/agent:y", "digest": pfr_schema::Digest::sha256(b"x"), "boundary": 3, "bytes": 10, "bytes_total": 20,
        "bytes_received": 9, "state": "done", "keep_ends_at": 1_700_086_400_000_u64,
    });
    job(&json!({"kind": "warm", "references": ["team/agent:y"]}), state, &json!({"items": [item], "bytes": 10, "recompute_tokens": 3}))
}

/// A drain that has ended.
pub fn drained(result: &Value) -> Value {
    let state = if result["failed"].as_array().unwrap().is_empty() { "done" } else { "failed" };
    job(&json!({"kind": "drain", "repository": "team/x"}), state, result)
}
