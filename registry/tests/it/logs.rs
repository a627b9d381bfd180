//! One log line a request, with its id, and with the cause that the client was not told.

use pfr_schema::api::AgentReport;
use pfr_store::{Domains, NewAccessToken, Options, Store};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

/// What the log says of the requests, of which each is a path, an id and more headers.
fn requests(data: &Path, options: &[&str], requests: &[(&str, &str, &str)]) -> Vec<serde_json::Value> {
    let texts: Vec<String> = requests
        .iter()
        .enumerate()
        .map(|(at, (path, id, more))| {
            let then = if at + 1 == requests.len() { "close" } else { "keep-alive" };
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: {id}\r\n{more}connection: {then}\r\n\r\n")
        })
        .collect();
    let (answers, lines) = served(data, options, &texts);
    assert!(requests.iter().all(|(_, id, _)| answers.contains(id)), "{answers}");
    lines.into_iter().filter(|l| l["message"] == "request").collect()
}

/// The answers to requests on one connection, which the last of them closes, and the log.
fn served(data: &Path, options: &[&str], requests: &[String]) -> (String, Vec<serde_json::Value>) {
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
    for request in requests {
        stream.write_all(request.as_bytes()).expect("written");
    }
    let mut answers = String::new();
    stream.read_to_string(&mut answers).expect("answers");
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill runs");
    let mut log = String::new();
    child.stderr.take().expect("its log").read_to_string(&mut log).expect("its log");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));

    (answers, log.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect())
}

/// The reports of these agents, after which the connection is closed.
fn reports(agents: &[&str]) -> Vec<String> {
    let body = r#"{"version":"1","interval_seconds":30,"engines":[],"jobs":[]}"#;
    let report = |(at, agent): (usize, &&str)| {
        let then = if at + 1 == agents.len() { "close" } else { "keep-alive" };
        format!(
            "PUT /v1/agents/{agent} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
             connection: {then}\r\n\r\n{body}",
            body.len()
        )
    };
    agents.iter().enumerate().map(report).collect()
}

#[test]
fn reports_of_agents_have_no_lines_and_a_full_disk_has_one_for_all_of_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let reports = reports(&["gpu-0", "gpu-1", "gpu-2"]);
    // The second time the floor is so high that the disk is always below it.
    for (options, status, warnings) in [(&[][..], "204", 0), (&["--min-free-bytes", "1000000000000000"], "507", 1)] {
        let (answers, lines) = served(dir.path(), options, &reports);
        assert_eq!(answers.matches(&format!("HTTP/1.1 {status}")).count(), 3, "{answers}");
        assert!(lines.iter().all(|line| line["message"] != "request"), "{lines:?}");
        let of_disk = |line: &&serde_json::Value| line["message"].as_str().is_some_and(|text| text.contains("reports of agents"));
        assert_eq!(lines.iter().filter(of_disk).count(), warnings, "{lines:?}");
    }
}

#[tokio::test]
async fn an_agent_for_which_its_domain_has_no_place_has_one_warning() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = Store::open(dir.path(), Options::default()).await.expect("a store");
    for number in 0..1000 {
        let report = AgentReport { version: "1".into(), interval_seconds: 30, engines: vec![], jobs: vec![], stopped: false };
        store.metadata().report_agent(format!("old-{number}").parse().expect("a name"), None, report).await.expect("it is kept");
    }
    drop(store);
    let (answers, lines) = served(dir.path(), &[], &reports(&["gpu-0", "gpu-1", "gpu-0", "old-7", "gpu-1"]));
    assert_eq!((answers.matches("HTTP/1.1 413").count(), answers.matches("HTTP/1.1 204").count()), (4, 1), "{answers}");
    let warned: Vec<_> = lines.iter().filter(|line| line["level"] == "WARN" && line["agent"].is_string()).collect();
    let agents: Vec<_> = warned.iter().map(|line| line["agent"].as_str()).collect();
    assert_eq!(agents, [Some("gpu-0"), Some("gpu-1")], "{lines:?}");
    assert!(warned.iter().all(|line| line["error"].as_str().is_some_and(|why| why.contains("1000"))), "{warned:?}");
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
