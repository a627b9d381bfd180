//! How long a registry is tried again, and what a user sees of it.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, pull_dir, push_dir, tag};
use axum::Router;
use axum::http::StatusCode;
use axum::response::Html;
use axum::routing::{any, get};
use pfr_client::{Error, Remote, RemoteOptions};
use pfr_schema::ErrorCode;
use pfr_testkit::front::{Fate, Front, Seen};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A registry that answers once, loses so many answers, and is well again.
async fn restarting(registry: &Registry, lost: usize) -> Front {
    let mut asked = 0;
    Front::start(&registry.url, move |_: &Seen| {
        asked += 1;
        if asked > 1 && asked <= 1 + lost { Fate::LoseAnswer } else { Fate::Pass }
    })
}

fn remote(url: &str, retry_for: Duration, heard: &Arc<Mutex<Vec<Option<u32>>>>) -> Remote {
    let heard = Arc::clone(heard);
    let on_retry = pfr_client::OnRetry::new(move |retrying| heard.lock().unwrap().push(retrying.map(|r| r.attempt)));
    Remote::new(url, RemoteOptions { retries: 0, retry_for, on_retry: Some(on_retry), ..RemoteOptions::default() }).unwrap()
}

#[tokio::test]
async fn a_registry_that_answered_before_is_tried_again_for_a_while_and_the_caller_is_told() {
    let (registry, heard) = (Registry::start().await, Arc::default());
    let front = restarting(&registry, 3).await;
    let patient = remote(&front.url, Duration::from_secs(60), &heard);
    patient.stats(None).await.unwrap();
    patient.stats(None).await.unwrap();
    assert_eq!(*heard.lock().unwrap(), [Some(1), Some(2), Some(3), None]);

    let front = restarting(&registry, 3).await;
    let impatient = remote(&front.url, Duration::ZERO, &heard);
    impatient.stats(None).await.unwrap();
    assert!(impatient.stats(None).await.unwrap_err().retryable());
    assert_eq!(heard.lock().unwrap().len(), 4, "nothing was tried again");
}

#[tokio::test]
async fn an_address_that_never_answered_is_not_waited_for() {
    // A port that no test is ever given.
    let remote = remote("http://127.0.0.1:1", Duration::from_secs(600), &Arc::default());
    let error = tokio::time::timeout(Duration::from_secs(30), remote.stats(None)).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unreachable { attempts: 1, .. }), "{error}");
}

/// A port whose server takes a request and is gone, and is there again after so long; then it says
/// that it has no such tag.
async fn gone_for(outage: Duration) -> String {
    let first = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = first.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut taken, _) = first.accept().await.unwrap();
        let _ = tokio::io::AsyncReadExt::read(&mut taken, &mut [0; 1024]).await.unwrap();
        drop((first, taken));
        tokio::time::sleep(outage).await;
        let again = tokio::net::TcpListener::bind(address).await.unwrap();
        let problem = pfr_schema::api::Problem::new(ErrorCode::TagUnknown, "there is none");
        let answer = move || {
            let body = serde_json::to_string(&problem).unwrap();
            async move { (StatusCode::NOT_FOUND, [("content-type", "application/problem+json")], body) }
        };
        axum::serve(again, Router::new().fallback(any(answer))).await
    });
    format!("http://{address}")
}

#[tokio::test]
async fn a_registry_that_goes_away_under_the_first_request_is_waited_for() {
    let url = gone_for(Duration::from_millis(500)).await;
    let heard = Arc::default();
    let remote = remote(&url, Duration::from_secs(60), &heard);
    let error = remote.tag(&crate::common::repository(), &tag("t")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::TagUnknown, "{error}");
    assert!(heard.lock().unwrap().contains(&Some(2)), "the connection was cut, and then refused: {heard:?}");
}

async fn commands_of_one_request_outlast(outage: Duration) {
    let commands: [&[&str]; 3] = [&["tag", "team/agent:x", "y"], &["rm", "team/agent:x"], &["scrub"]];
    let ended = commands.map(|args| {
        tokio::spawn(async move {
            let (url, home) = (gone_for(outage).await, tempfile::tempdir().unwrap());
            tokio::task::spawn_blocking(move || pf(home.path(), &[args, &["--registry", &url]].concat())).await.unwrap()
        })
    });
    for (args, ended) in commands.into_iter().zip(ended) {
        let (code, _, stderr) = ended.await.unwrap();
        assert!(code == 5 && stderr.contains("registry not reachable, retrying (2) …"), "{args:?}: {code}: {stderr}");
        assert!(stderr.contains("the registry answers again"), "{args:?}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_one_request_outlasts_a_restart_and_says_so() {
    commands_of_one_request_outlast(Duration::from_millis(700)).await;
}

mod long {
    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_of_one_request_outlasts_a_restart_and_says_so() {
        super::commands_of_one_request_outlast(std::time::Duration::from_secs(10)).await;
    }
}

#[tokio::test]
async fn a_server_that_speaks_something_else_is_not_waited_for() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, b"SSH-2.0-OpenSSH_9.9\r\n").await;
            open.push(stream);
        }
    });
    let remote = remote(&url, Duration::from_secs(600), &Arc::default());
    let error = tokio::time::timeout(Duration::from_secs(30), remote.stats(None)).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unreachable { attempts: 1, .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_cuts_every_connection_is_not_waited_for() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 1024]).await;
        }
    });
    let remote = remote(&url, Duration::from_secs(600), &Arc::default());
    let error = tokio::time::timeout(Duration::from_secs(30), remote.stats(None)).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Unreachable { attempts: 3, .. }), "{error}");
}

/// `pf` with its stderr piped.
fn spawn(home: &Path, args: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
    command.env_clear().env("HOME", home).args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_is_told_once_that_requests_are_retried_and_once_that_it_is_over() {
    let registry = Registry::start().await;
    push_dir(&registry.remote(), directory(SMALL, &[1, 2]).path(), "t").await.unwrap();
    let front = restarting(&registry, 4).await;
    let home = tempfile::tempdir().unwrap();
    let url = front.url.clone();
    let (code, _, stderr) =
        tokio::task::spawn_blocking(move || pf(home.path(), &["pull", "team/agent:t", "--registry", &url])).await.unwrap();
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(stderr.matches("registry not reachable, retrying (2) …").count(), 1, "{stderr}");
    assert_eq!(stderr.matches("retrying").count(), 1, "{stderr}");
    assert!(stderr.trim_end().ends_with("the registry answers again"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_at_its_limit_is_told_once_to_wait_and_not_that_the_registry_answers_again() {
    let registry = Registry::start().await;
    push_dir(&registry.remote(), directory(SMALL, &[1, 2]).path(), "t").await.unwrap();
    let mut asked = 0;
    let front = Front::start(&registry.url, move |_: &Seen| {
        asked += 1;
        if asked % 3 == 1 || asked == 2 { Fate::Refuse(ErrorCode::RateLimited) } else { Fate::Pass }
    });
    let (home, url) = (tempfile::tempdir().unwrap(), front.url.clone());
    let (code, _, stderr) =
        tokio::task::spawn_blocking(move || pf(home.path(), &["pull", "team/agent:t", "--registry", &url])).await.unwrap();
    assert_eq!(code, 0, "{stderr}");
    assert!(front.struck() > 2, "refused more than once");
    assert_eq!(stderr.matches("the registry asks to wait 1 s").count(), 1, "{stderr}");
    assert!(!stderr.contains("answers again") && !stderr.contains("retrying"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_the_wait_for_a_registry_at_once() {
    let registry = Registry::start().await;
    push_dir(&registry.remote(), directory(SMALL, &[1, 2]).path(), "t").await.unwrap();
    let front = restarting(&registry, usize::MAX - 1).await;
    let (home, url) = (tempfile::tempdir().unwrap(), front.url.clone());
    let interrupted = move || {
        let mut pull = spawn(home.path(), &["pull", "team/agent:t", "--registry", &url]);
        let mut lines = BufReader::new(pull.stderr.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.contains("retrying (2)"), "{line}");
        let start = Instant::now();
        assert!(Command::new("kill").args(["-INT", &pull.id().to_string()]).status().unwrap().success());
        let status = pull.wait().unwrap();
        lines.read_to_string(&mut line).unwrap();
        (status.code(), start.elapsed(), line)
    };
    let (code, took, said) = tokio::task::spawn_blocking(interrupted).await.unwrap();
    assert!(code == Some(130) && said.ends_with("interrupted; run the same command again to resume\n"), "{code:?}: {said}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[tokio::test]
async fn https_to_a_port_that_speaks_http_says_so() {
    let registry = Registry::start().await;
    let https = registry.url.replacen("http", "https", 1);
    let error = Remote::new(&https, RemoteOptions::default()).unwrap().stats(None).await.unwrap_err();
    assert!(error.to_string().ends_with(&format!("it speaks http, not https; write {}", registry.url)), "{error}");
    assert_eq!((error.code(), error.retryable()), (ErrorCode::InvalidRequest, false));
}

async fn serve(routes: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

#[tokio::test]
async fn another_web_server_is_told_apart_without_showing_its_pages() {
    const PAGE: Html<&str> = Html("<!DOCTYPE HTML>\n<html><h1>secret</h1></html>");
    let page = |status: StatusCode| Router::new().fallback(any(move || async move { (status, PAGE) }));
    let text = || Router::new().fallback(any(async || (StatusCode::NOT_FOUND, "404 page not found\n")));
    let servers = [
        (page(StatusCode::NOT_FOUND), "404 with a web page"),
        (page(StatusCode::NOT_IMPLEMENTED), "501 with a web page"),
        (page(StatusCode::OK), "200 with a web page"),
        (text(), "404 with \"404 page not found\""),
    ];
    for (routes, words) in servers {
        let remote = Remote::new(&serve(routes).await, RemoteOptions::default()).unwrap();
        let error = remote.tag(&crate::common::repository(), &tag("t")).await.unwrap_err();
        let said = error.to_string();
        assert!(said.contains(words) && said.contains("is it a pf registry?"), "{said}");
        assert!(!said.contains('<') && !said.contains("secret"), "{said}");
        assert_eq!((error.code(), error.retryable()), (ErrorCode::InvalidRequest, false), "{said}");
    }
}

#[test]
fn a_registry_that_is_gone_is_tried_again_for_two_minutes_unless_told_otherwise() {
    let RemoteOptions { retries, retry_for, .. } = RemoteOptions::default();
    assert_eq!((retries, retry_for), (5, Duration::from_secs(120)));
    let (_, help, _) = pf(Path::new("/"), &["help", "ls"]);
    let said: Vec<&str> = help.split_whitespace().collect();
    assert!(said.join(" ").contains("during a restart [default: 120]"), "{help}");
}

/// A registry whose list of tags has a next page for ever, and how many pages it was asked for.
async fn endless(page: impl Fn(usize) -> serde_json::Value + Send + Sync + 'static) -> (String, Arc<AtomicUsize>) {
    let (page, pages) = (Arc::new(page), Arc::new(AtomicUsize::new(0)));
    let asked = Arc::clone(&pages);
    let list = move || {
        let page = page(pages.fetch_add(1, Ordering::Relaxed));
        async move { axum::Json(page) }
    };
    (serve(Router::new().route("/v1/repositories/{repo}/tags", get(list))).await, asked)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_whose_next_page_is_always_there_ends_with_an_error() {
    let one = |name: &str| serde_json::json!([{"name": name, "digest": pfr_schema::Digest::sha256(b""), "updated_at": 1}]);
    type Page = Box<dyn Fn(usize) -> serde_json::Value + Send + Sync>;
    let lists: [(Page, usize, &str); 3] = [
        (Box::new(move |_| serde_json::json!({"tags": one("t"), "next": "t"})), 3, "leads back"),
        (Box::new(|n| serde_json::json!({"tags": [], "next": format!("t{n}")})), 1, "an empty page"),
        // A new cursor each time, and one name a page.
        (Box::new(move |n| serde_json::json!({"tags": one(&format!("t{n}")), "next": format!("t{n}")})), 10_001, "more than any registry"),
    ];
    for (page, most, why) in lists {
        let (url, asked) = endless(page).await;
        let home = tempfile::tempdir().unwrap();
        let run = move || pf(home.path(), &["ls", "team/agent", "--registry", &url]);
        let (code, stdout, stderr) = tokio::task::spawn_blocking(run).await.unwrap();
        assert!(code == 1 && stdout.is_empty() && stderr.contains("a list does not end") && stderr.contains(why), "{code}: {stderr}");
        assert!(asked.load(Ordering::Relaxed) <= most, "{why}: {asked:?}");
    }
}

/// A registry that lets a caller send only so many requests a second slows its pushes and pulls
/// down, and fails none.
#[tokio::test]
async fn a_caller_that_is_limited_goes_on_by_itself() {
    let registry = Registry::start_with(|config| (config.caller_requests_per_second, config.burst_seconds) = (3, 1)).await;
    let heard: Arc<Mutex<Vec<Option<u32>>>> = Arc::default();
    let patient = remote(&registry.url, Duration::from_secs(120), &heard);
    let snapshots = [directory(SMALL, &[1, 2]), directory(SMALL, &[3, 4])];
    for (n, snapshot) in snapshots.iter().enumerate() {
        push_dir(&patient, snapshot.path(), &format!("t{n}")).await.unwrap();
    }
    let out = tempfile::tempdir().unwrap();
    pull_dir(&patient, "t1", &out.path().join("x")).await.unwrap();
    assert!(heard.lock().unwrap().contains(&Some(1)), "no request was refused: the test tests nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_beyond_the_quota_says_so_at_once_with_its_exit_code_and_what_frees_room() {
    let registry = Registry::start().await;
    let limits = pfr_store::QuotaLimits { objects: Some(1), ..pfr_store::QuotaLimits::default() };
    registry.store.metadata().set_quota(limits, None).await.unwrap();
    let (home, source, url) = (tempfile::tempdir().unwrap(), directory(SMALL, &[1, 2]), registry.url.clone());
    let run = move || pf(home.path(), &["push", source.path().to_str().unwrap(), "team/agent:t", "--registry", &url]);
    let (code, _, stderr) = tokio::task::spawn_blocking(run).await.unwrap();
    assert!(code == 8 && stderr.contains("it holds 0 of 1 blobs"), "{code}: {stderr}");
    assert!(stderr.contains("hint: free space in the domain") && !stderr.contains("retrying"), "{stderr}");
}
