//! Shutdown: requests in flight finish, those that do not finish are cut, and the process says how
//! it ended.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, held_request};
use pfr_schema::api::FramesStored;
use pfr_schema::media_type::FRAMES;
use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Waits until the port is closed.
async fn refused_connection(registry: &Registry) {
    let wait = async { while TcpStream::connect(registry.address).await.is_ok() {} };
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("the listener closes");
}

#[tokio::test]
async fn an_upload_in_flight_is_finished() {
    let mut registry = Registry::start().await;
    let sample = snapshot(0..4, vec![]);
    let whole = sample.stream();
    let push = registry.open_push(REPO).await;
    let mut upload = held_request(&registry, "PUT", &format!("{push}/frames"), FRAMES, whole.len()).await;
    registry.begin_stop();
    refused_connection(&registry).await;
    assert!(!registry.has_stopped(), "it did not wait for the upload");
    upload.write_all(&whole).await.expect("written");
    let mut answer = String::new();
    upload.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    let stored: FramesStored = serde_json::from_str(body).expect("what was stored");
    assert_eq!(stored.frames, sample.blobs.len() as u64);
    registry.stopped().await;
}

#[tokio::test]
async fn what_does_not_finish_in_the_grace_period_is_cut() {
    let registry = Registry::start_with(|config| config.shutdown_grace = 1).await;
    let push = registry.open_push(REPO).await;
    let mut upload = held_request(&registry, "PUT", &format!("{push}/frames"), FRAMES, 1 << 20).await;
    upload.write_all(b"P").await.expect("written");
    tokio::time::timeout(Duration::from_secs(30), registry.stopped()).await.expect("it stops");
    let mut answer = String::new();
    let read = upload.read_to_string(&mut answer).await;
    assert!(answer.is_empty(), "a cut request must not look answered ({read:?}): {answer}");
}

/// The program, its first line of output read.
fn start(arguments: &[&str]) -> (Child, String, BufReader<std::process::ChildStdout>) {
    let mut child = command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the program starts");
    let mut out = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    out.read_line(&mut line).expect("a line");
    (child, line, out)
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PF_REGISTRY_")) {
        command.env_remove(name);
    }
    command.arg("serve").args(arguments);
    command
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), child.id().to_string()]).status().expect("kill runs");
    assert!(status.success());
}

#[test]
fn the_program_says_where_it_listens_and_ends_with_0_on_either_signal() {
    for name in ["TERM", "INT"] {
        let dir = tempfile::tempdir().expect("a directory");
        let data = dir.path().to_str().expect("a path");
        let (mut child, line, mut rest) = start(&["--data", data, "--listen", "127.0.0.1:0"]);
        let port = line.strip_prefix("listening on http://127.0.0.1:").and_then(|p| p.trim_end().parse::<u16>().ok());
        assert!(port.is_some_and(|p| p != 0), "{line:?}");
        std::net::TcpStream::connect(("127.0.0.1", port.unwrap_or_default())).expect("it listens when it says so");
        signal(&child, name);
        assert_eq!(child.wait().expect("it ends").code(), Some(0), "SIG{name}");
        let mut more = String::new();
        rest.read_to_string(&mut more).expect("its output");
        assert_eq!(more, "", "standard output has one line");
    }
}

#[test]
fn with_json_the_program_and_its_health_write_documents() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut child, line, _rest) = start(&["--json", "--data", dir.path().to_str().expect("a path"), "--listen", "127.0.0.78:0"]);
    let ready: serde_json::Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
    let address = ready["url"].as_str().and_then(|url| url.strip_prefix("http://")).expect("its address").to_owned();
    for (more, status) in [(&["--json"][..], "ready"), (&["--json", "--live"], "alive")] {
        let output = health_command(&address, more).output().expect("it runs");
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a document");
        assert_eq!(document, serde_json::json!({ "status": status }));
    }
    signal(&child, "KILL");
    child.wait().expect("it ends");
}

/// `pf-registry health` for a registry that listens there.
fn health_command(listen: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PF_REGISTRY_")) {
        command.env_remove(name);
    }
    // As in an image: the settings are variables, and a data directory is not among them.
    command.arg("health").args(more).env("PF_REGISTRY_LISTEN", listen);
    command
}

/// Its exit code and standard error.
fn health(listen: &str, more: &[&str]) -> (Option<i32>, String) {
    let output = health_command(listen, more).output().expect("it runs");
    (output.status.code(), String::from_utf8(output.stderr).expect("text"))
}

#[test]
fn the_health_of_a_registry_is_asked_where_its_settings_say() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().join("data");
    // A registry of another test must not answer in its place.
    let (mut child, line, _rest) = start(&["--data", data.to_str().expect("a path"), "--listen", "127.0.0.77:0"]);
    let address = line.trim_end().trim_start_matches("listening on http://").to_owned();
    for more in [&[][..], &["--live"]] {
        assert_eq!(health(&address, more), (Some(0), String::new()));
    }
    // A link that leads nowhere: a storage that cannot be read, whether or not packs are there.
    std::fs::remove_dir_all(data.join("packs")).expect("the packs are gone");
    std::os::unix::fs::symlink("packs", data.join("packs")).expect("a link to itself");
    let (code, error) = health(&address, &[]);
    assert!(code == Some(7) && error.contains("is not ready: it answers 503: the registry cannot reach its "), "{code:?} {error}");
    assert_eq!(health(&address, &["--live"]).0, Some(0), "the process still works");
    assert_eq!(health("nowhere", &[]).0, Some(1), "a setting is wrong");
    signal(&child, "KILL");
    child.wait().expect("it ends");
    let (code, error) = health(&address, &["--live"]);
    assert!(code == Some(7) && error.contains(&format!("http://{address} does not answer: ")), "{code:?} {error}");
}

#[test]
fn a_second_signal_does_not_wait() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().to_str().expect("a path");
    let (mut child, line, _rest) = start(&["--data", data, "--listen", "127.0.0.1:0", "--shutdown-grace", "3600"]);
    let address = line.trim_end().trim_start_matches("listening on http://").to_owned();
    // A request that never ends.
    let mut held = std::net::TcpStream::connect(&address).expect("it listens");
    let body = "POST /v1/repositories/x/frames HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n";
    std::io::Write::write_all(&mut held, body.as_bytes()).expect("written");
    let mut answer = [0; 12];
    held.read_exact(&mut answer).expect("it wants the body");
    assert_eq!(&answer, b"HTTP/1.1 100");
    signal(&child, "TERM");
    while std::net::TcpStream::connect(&address).is_ok() {}
    assert!(child.try_wait().expect("its state").is_none(), "it did not wait for the request");
    signal(&child, "TERM");
    assert_eq!(child.wait().expect("it ends").code(), Some(1));
}

#[test]
fn what_it_refuses_to_start_with_it_explains() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().to_str().expect("a path");
    let file = dir.path().join("not-a-directory");
    std::fs::write(&file, "").expect("a file");
    let file = file.to_str().expect("a path");
    let cases: [(&[&str], i32, &str); 6] = [
        (&["--data", data, "--listen", "0.0.0.0:0"], 1, "no tokens are required"),
        (&["--data", data, "--max-requests", "0"], 1, "max-requests is 0"),
        (&["--data", data, "--no-such-flag"], 1, "--no-such-flag"),
        (&["--data", data, "--log", "a=b=c"], 1, "log filter"),
        (&[], 1, "no data directory"),
        (&["--data", file, "--listen", "127.0.0.1:0"], 7, "cannot open the store"),
    ];
    for (arguments, code, words) in cases {
        let output = command(arguments).output().expect("the program runs");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {error}");
        assert!(error.contains(words), "{arguments:?}: {error:?} does not say {words:?}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn an_exposed_address_is_taken_when_asked_for() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().to_str().expect("a path");
    let (mut child, line, _rest) = start(&["--data", data, "--listen", "0.0.0.0:0", "--insecure-listen-anywhere"]);
    assert!(line.starts_with("listening on http://0.0.0.0:"), "{line:?}");
    signal(&child, "TERM");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}
