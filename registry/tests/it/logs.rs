//! One log line a request, with its id, and with the cause that the client was not told.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};

#[test]
fn a_request_is_one_line_of_json_with_its_id() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = Command::new(env!("CARGO_BIN_EXE_pf-registry"))
        .args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json", "--log", "info", "--data"])
        .arg(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let mut stream = std::net::TcpStream::connect(line.trim_end().trim_start_matches("listening on http://")).expect("it listens");
    for (path, id, then) in [("/livez", "quiet-1", "keep-alive"), ("/v1/repositories/x/tags", "trace-7", "close")] {
        let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nx-request-id: {id}\r\nconnection: {then}\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("written");
    }
    let mut answers = String::new();
    stream.read_to_string(&mut answers).expect("answers");
    assert!(answers.contains("trace-7"), "{answers}");
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill runs");
    let mut log = String::new();
    child.stderr.take().expect("its log").read_to_string(&mut log).expect("its log");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));

    let lines: Vec<serde_json::Value> = log.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect();
    let requests: Vec<_> = lines.iter().filter(|l| l["message"] == "request").collect();
    assert_eq!(requests.len(), 1, "health is for debugging only: {log}");
    let request = requests[0];
    assert_eq!(
        (request["request_id"].as_str(), request["status"].as_str(), request["code"].as_str(), request["path"].as_str()),
        (Some("trace-7"), Some("404"), Some("repository_unknown"), Some("/v1/repositories/x/tags")),
    );
    assert!(request["duration_ms"].is_number(), "{request}");
}
