//! One log line a request, with its id, and with the cause that the client was not told.

use pfr_store::{Domains, NewAccessToken, Options, Store};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

/// What the log says of the requests, of which each is a path, an id and more headers.
fn requests(data: &Path, options: &[&str], requests: &[(&str, &str, &str)]) -> Vec<serde_json::Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pf-registry"))
        .args(["serve", "--listen", "127.0.0.1:0", "--log-format", "json", "--log", "info", "--data"])
        .arg(data)
        .args(options)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let mut stream = std::net::TcpStream::connect(line.trim_end().trim_start_matches("listening on http://")).expect("it listens");
    for (at, (path, id, more)) in requests.iter().enumerate() {
        let then = if at + 1 == requests.len() { "close" } else { "keep-alive" };
        let head = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\n{more}connection: {then}\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("written");
    }
    let mut answers = String::new();
    stream.read_to_string(&mut answers).expect("answers");
    assert!(requests.iter().all(|(_, id, _)| answers.contains(id)), "{answers}");
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill runs");
    let mut log = String::new();
    child.stderr.take().expect("its log").read_to_string(&mut log).expect("its log");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));

    let lines: Vec<serde_json::Value> = log.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect();
    lines.into_iter().filter(|l| l["message"] == "request").collect()
}

#[test]
fn a_request_is_one_line_of_json_with_its_id() {
    let dir = tempfile::tempdir().expect("a directory");
    let logged = requests(dir.path(), &[], &[("/livez", "quiet-1", ""), ("/v1/repositories/x/tags", "trace-7", "")]);
    assert_eq!(logged.len(), 1, "health is for debugging only: {logged:?}");
    let request = &logged[0];
    assert_eq!(
        (request["request_id"].as_str(), request["status"].as_str(), request["code"].as_str(), request["path"].as_str()),
        (Some("trace-7"), Some("404"), Some("repository_unknown"), Some("/v1/repositories/x/tags")),
    );
    assert!(request["duration_ms"].is_number(), "{request}");
}

#[tokio::test]
async fn the_log_line_of_a_request_names_its_token_and_no_line_has_the_secret() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path(), Options::default()).await.expect("a store");
    let new = NewAccessToken { label: "x".into(), domain: None, scopes: vec!["*:pull".parse().expect("a scope")], expires_at: None };
    let (token, _) = Domains::new(store.clone(), None).access_tokens().create(new).await.expect("a token");
    drop(store);
    let bearer = format!("authorization: Bearer {}\r\n", token.expose());
    let asked = [("/v1/repositories", "with-1", bearer.as_str()), ("/v1/tasks", "with-2", &bearer), ("/v1/repositories", "without", "")];
    let logged = requests(dir.path(), &["--require-tokens"], &asked);
    let seen: Vec<_> = logged.iter().map(|line| (line["status"].as_str(), line["token"].as_str())).collect();
    let id = token.id();
    assert_eq!(seen, [(Some("200"), Some(id.as_str())), (Some("403"), Some(id.as_str())), (Some("401"), None)]);
    assert!(logged.iter().all(|line| !line.to_string().contains(&token.expose()[21..85])));
}
