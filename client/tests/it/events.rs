//! Following events: each once, whatever happens to the connection, and as a command.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, push_dir, remote};
use pfr_client::{EventFilter, Followed};
use pfr_schema::ErrorCode;
use pfr_schema::api::{EventId, EventKind};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

/// Answers one request with the beginning of a stream, and closes the connection. Returns the
/// request.
async fn answer(listener: &TcpListener, body: &str) -> String {
    let (mut stream, _) = listener.accept().await.unwrap();
    let (mut request, mut byte) = (Vec::new(), [0]);
    while !request.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).await.unwrap();
        request.push(byte[0]);
    }
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}");
    stream.write_all(answer.as_bytes()).await.unwrap();
    String::from_utf8(request).unwrap().to_ascii_lowercase()
}

fn event(id: &str, kind: &str) -> String {
    format!("id: {id}\nevent: {kind}\ndata: {{\"id\":\"{id}\",\"at\":5,\"kind\":\"{kind}\",\"repository\":\"team/agent\"}}\n\n")
}

#[tokio::test]
async fn a_stream_that_is_cut_is_asked_for_again_behind_what_was_read() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let remote = remote(&format!("http://{}", listener.local_addr().unwrap()));
    let serving = tokio::spawn(async move {
        let mut requests = vec![answer(&listener, &format!("retry: 2000\nid: e-1\n\n{}", event("e-2", "pushed"))).await];
        // In the middle of an event; then a kind of a later version, and only an id.
        let half = event("e-4", "tagged");
        requests.push(answer(&listener, &format!("{}{}", event("e-3", "tagged"), &half[..half.len() - 9])).await);
        requests.push(answer(&listener, &format!("{}{}:\nid: e-6\n\n", half, event("e-5", "renamed"))).await);
        let reset = "id: f-1\nevent: reset\ndata: {\"id\":\"f-1\",\"reason\":\"gone\"}\n\n";
        requests.push(answer(&listener, reset).await);
        requests
    });
    let filter = EventFilter { repository: Some("team/*".parse().unwrap()), kind: Some(EventKind::Tagged), ..EventFilter::default() };
    let mut events = remote.events(&filter);
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(match events.next().await.unwrap().unwrap() {
            Followed::Event(event) => event.id,
            Followed::Reset(reset) => format!("reset {}", reset.id),
        });
    }
    assert_eq!(ids, ["e-2", "e-3", "e-4", "reset f-1"]);
    assert_eq!(events.last(), Some("f-1"));
    let requests = serving.await.unwrap();
    assert!(requests[0].starts_with("get /v1/events?repository=team%2f*&kind=tagged&follow=true "), "{}", requests[0]);
    assert!(!requests[0].contains("last-event-id"), "{}", requests[0]);
    for (request, id) in requests[1..].iter().zip(["e-2", "e-3", "e-6"]) {
        assert!(request.contains(&format!("last-event-id: {id}\r\n")), "{request}");
    }
}

#[tokio::test]
async fn a_stream_that_is_no_stream_of_events_is_an_error_and_no_endless_loop() {
    for body in ["id: e-1\nevent: pushed\ndata: {\"half\":\n\n", "id: e-1\nevent: reset\ndata: []\n\n"] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let remote = remote(&format!("http://{}", listener.local_addr().unwrap()));
        let serving = tokio::spawn(async move { answer(&listener, body).await });
        let error = remote.events(&EventFilter::default()).next().await.unwrap_err();
        assert!(error.to_string().contains("does not parse"), "{error}");
        serving.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_prints_each_event_and_goes_on_behind_an_id() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let log = registry.store.begin_events().await.unwrap();
    let start = EventId { epoch: log.epoch, number: log.last }.to_string();
    push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let run = |args: &[&str]| {
        let (code, stdout, stderr) = pf(dir.path(), &[&["events", "--once", "--registry", &registry.url][..], args].concat());
        assert_eq!(code, 0, "{args:?}: {stderr}");
        stdout
    };
    let lines: Vec<Value> =
        run(&["--json", "--after", &start]).lines().map(|line| serde_json::from_str(line).expect("a document on one line")).collect();
    let kinds: Vec<&str> = lines.iter().map(|line| line["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["pushed", "tagged"]);
    assert_eq!((&lines[1]["repository"], &lines[1]["tag"]), (&"team/agent".into(), &"a".into()));
    let middle = lines[0]["id"].as_str().unwrap();
    let text = run(&["--after", middle]);
    assert!(text.contains("  tagged     team/agent:a  ") && !text.contains("pushed"), "{text}");
    let again = format!("`pf events --once --after {} --registry {}` goes on from here", lines[1]["id"].as_str().unwrap(), registry.url);
    assert!(text.contains(&again), "{text}");
    assert_eq!(run(&["--json", "--after", &start, "other/*"]), "");
    assert_eq!(run(&["--json", "--after", &start, "--kind", "deleted"]), "");
    // Events that the registry has forgotten.
    registry.store.metadata().trim_events(std::time::Duration::ZERO, 0, 100).await.unwrap();
    let reset: Value = serde_json::from_str(&run(&["--json", "--after", &start])).unwrap();
    assert_eq!((&reset["kind"], &reset["id"]), (&"reset".into(), &lines[1]["id"]));
    for wrong in [&["--after", "x"][..], &["--kind", "moved"], &["a b"]] {
        let (code, _, stderr) = pf(dir.path(), &[&["events", "--registry", &registry.url][..], wrong].concat());
        assert_eq!(code, 1, "{wrong:?}: {stderr}");
    }
}

/// A registry of an older version has no such route.
#[tokio::test]
async fn a_registry_without_events_says_so() {
    let registry = Registry::start().await;
    let elsewhere = remote(&format!("{}/domains/default/v1/nothing", registry.url));
    let error = elsewhere.events(&EventFilter::default()).next().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotFound, "{error}");
}
