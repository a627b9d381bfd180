//! The audit log over HTTP and as a file: who, what, when, from where and how it ended; no secret;
//! each domain its own; and nothing acknowledged that it lacks, also if the process is killed.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, ok, problem, refused};
use pfr_schema::api::{self, AuditList, AuditOutcome, AuditRecord};
use pfr_schema::{AccessToken, Digest, ErrorCode};
use pfr_store::NewAccessToken;
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const ALL: &str = "*:pull,push,delete,admin";

async fn start() -> (Registry, AccessToken) {
    let registry = Registry::start_with(|config| config.require_tokens = true).await;
    let operator = registry.token(&[ALL]).await;
    (registry, operator)
}

/// One page of the log.
async fn list(registry: &Registry, token: &AccessToken, base: &str, query: &str) -> AuditList {
    ok(registry.send_as(token, registry.request(Method::GET, &format!("{base}/v1/audit{query}"))).await).await
}

async fn records(registry: &Registry, token: &AccessToken, query: &str) -> Vec<AuditRecord> {
    list(registry, token, "", query).await.records
}

fn operations(records: &[AuditRecord]) -> Vec<&str> {
    records.iter().map(|record| record.operation.as_str()).collect()
}

/// Pushes and commits under a tag.
async fn push(registry: &Registry, token: &AccessToken, repo: &str, seed: u64, tag: &str) -> Digest {
    let s = snapshot([seed], vec![]);
    let path = format!("/v1/repositories/{repo}/pushes");
    let opened: api::Push = ok(registry.send_as(token, registry.request(Method::POST, &path)).await).await;
    let session = format!("{path}/{}", opened.id);
    let frames = registry.request(Method::PUT, &format!("{session}/frames")).header("content-type", pfr_schema::media_type::FRAMES);
    let _: api::FramesStored = ok(registry.send_as(token, frames.body(s.stream())).await).await;
    let commit = registry.request(Method::POST, &format!("{session}/commit")).json(&json!({"manifest": s.manifest, "tag": tag}));
    let _: api::Committed = ok(registry.send_as(token, commit.header("x-request-id", format!("push-{tag}"))).await).await;
    s.manifest
}

#[tokio::test]
async fn a_change_is_recorded_with_who_what_when_from_where_and_how_it_ended() {
    let (registry, operator) = start().await;
    let new =
        NewAccessToken { label: "build machine".into(), domain: None, scopes: vec!["team/*:pull,push".parse().unwrap()], expires_at: None };
    let (team, _) = registry.tokens().create(new).await.unwrap();
    let before = registry.store.options().clock.now();
    let digest = push(&registry, &team, REPO, 1, "t").await;
    let moved =
        registry.request(Method::PUT, &format!("/v1/repositories/{REPO}/tags/t")).json(&json!({"snapshot": "t", "if_tag_is": "absent"}));
    refused(registry.send_as(&team, moved).await, ErrorCode::TagMoved).await;
    let fork = registry.request(Method::POST, &format!("/v1/repositories/{REPO}/forks"));
    let fork = fork.json(&json!({"snapshot": "t", "count": 5, "prefix": "f"}));
    assert_eq!(registry.send_as(&team, fork).await.status(), StatusCode::CREATED);
    let pause = registry.request(Method::POST, "/v1/tasks/scrub/pause").json(&json!({"seconds": 60}));
    assert_eq!(registry.send_as(&operator, pause).await.status(), StatusCode::OK);

    // Newest first. Sessions, uploads and reads are no changes.
    let found = records(&registry, &operator, "").await;
    assert_eq!(operations(&found), ["pause_task", "fork", "put_tag", "commit"]);
    let [pause, fork, moved, commit] = &found[..] else { panic!("{found:?}") };
    assert!((before..=registry.store.options().clock.now()).contains(&commit.at), "{commit:?}");
    let expected = AuditRecord {
        number: commit.number,
        at: commit.at,
        operation: "commit".into(),
        action: "push".into(),
        outcome: AuditOutcome::Done,
        status: Some(201),
        token: Some(team.id().to_string()),
        label: Some("build machine".into()),
        from: Some("127.0.0.1".into()),
        request_id: Some("push-t".into()),
        domain: Some("default".parse().unwrap()),
        repository: Some("team/agent".parse().unwrap()),
        tag: Some("t".parse().unwrap()),
        digest: Some(digest),
        ..AuditRecord::default()
    };
    assert_eq!(*commit, expected);
    assert_eq!((fork.tag.as_ref().map(|tag| tag.to_string()), fork.tags, fork.digest), (Some("f-1".to_owned()), Some(5), Some(digest)));
    assert_eq!((moved.outcome, moved.status, moved.code.as_deref()), (AuditOutcome::Failed, Some(412), Some("tag_moved")));
    assert_eq!(moved.tag.as_ref().map(|tag| tag.to_string()).as_deref(), Some("t"));
    assert_eq!((pause.outcome, pause.status, pause.subject.as_deref()), (AuditOutcome::Begun, None, Some("scrub")));

    // Pages and conditions.
    let first = list(&registry, &operator, "", "?limit=3").await;
    assert_eq!(first.records, found[..3]);
    let rest = list(&registry, &operator, "", &format!("?limit=3&after={}", first.next.unwrap())).await;
    assert_eq!((rest.records.as_slice(), rest.next), (&found[3..], None));
    let oldest: Vec<AuditRecord> = found.iter().rev().cloned().collect();
    assert_eq!(records(&registry, &operator, "?order=oldest").await, oldest);
    assert_eq!(operations(&records(&registry, &operator, "?repository=team/agent").await), ["fork", "put_tag", "commit"]);
    assert_eq!(records(&registry, &operator, "?repository=team/other").await, []);
    assert_eq!(operations(&records(&registry, &operator, &format!("?token={}", operator.id())).await), ["pause_task"]);
    assert_eq!(records(&registry, &operator, &format!("?until={before}")).await, []);
    assert_eq!(records(&registry, &operator, &format!("?since={before}")).await, found);
    for wrong in ["?after=x", "?limit=0", "?repository=UPPER", "?order=sideways", "?since=yesterday", "?page=2"] {
        let answer = registry.send_as(&operator, registry.request(Method::GET, &format!("/v1/audit{wrong}"))).await;
        refused(answer, ErrorCode::InvalidRequest).await;
    }
}

#[tokio::test]
async fn every_refusal_is_recorded_with_its_reason_and_repeated_ones_are_counted() {
    let (registry, operator) = start().await;
    let other = registry.token(&["other/*:pull"]).await;
    let secret = push(&registry, &operator, "secret%2Fa", 1, "t").await;
    push(&registry, &operator, "other%2Fa", 2, "t").await;
    let _: api::DomainInfo = ok(registry.send_as(&operator, registry.request(Method::PUT, "/v1/domains/acme")).await).await;
    let of_acme =
        NewAccessToken { label: "x".into(), domain: Some("acme".parse().unwrap()), scopes: vec![ALL.parse().unwrap()], expires_at: None };
    let (of_acme, _) = registry.tokens().create(of_acme).await.unwrap();
    let get = |path: &str| registry.request(Method::GET, path);
    // No token; a repository that is hidden; an action that is not permitted; a snapshot that is
    // hidden; a domain that the token is not for.
    refused(get("/v1/stats").send().await.unwrap(), ErrorCode::Unauthorized).await;
    refused(registry.send_as(&other, get("/v1/repositories/secret%2Fa/tags")).await, ErrorCode::RepositoryUnknown).await;
    refused(registry.send_as(&other, registry.request(Method::DELETE, "/v1/repositories/other%2Fa/tags/t")).await, ErrorCode::Denied).await;
    let frames = registry.request(Method::POST, "/v1/repositories/other%2Fa/frames").json(&json!({"digests": [secret]}));
    refused(registry.send_as(&other, frames).await, ErrorCode::BlobUnknown).await;
    refused(registry.send_as(&of_acme, get("/v1/stats")).await, ErrorCode::DomainUnknown).await;
    // What is merely not there is no refusal.
    refused(registry.send_as(&operator, get("/v1/repositories/nobody/tags")).await, ErrorCode::RepositoryUnknown).await;

    let found = records(&registry, &operator, "?limit=5").await;
    let said: Vec<_> =
        found.iter().map(|record| (record.operation.as_str(), record.status.unwrap(), record.code.as_deref().unwrap())).collect();
    let expected = [
        ("stats", 404, "domain_unknown"),
        ("get_frames", 404, "blob_unknown"),
        ("delete_tag", 403, "denied"),
        ("list_tags", 404, "repository_unknown"),
        ("stats", 401, "unauthorized"),
    ];
    assert_eq!(said, expected);
    assert!(found.iter().all(|record| record.outcome == AuditOutcome::Refused && record.from.as_deref() == Some("127.0.0.1")));
    let [of_domain, blob, denied, hidden, stranger] = &found[..] else { panic!("{found:?}") };
    assert_eq!(blob.digest, Some(secret), "which snapshot it tried to download");
    assert_eq!((&of_domain.token, &of_domain.token_domain), (&Some(of_acme.id().to_string()), &Some("acme".parse().unwrap())));
    assert_eq!((denied.tag.as_ref().map(|tag| tag.to_string()), &denied.token), (Some("t".to_owned()), &Some(other.id().to_string())));
    assert_eq!(hidden.repository, Some("secret/a".parse().unwrap()));
    assert_eq!((&stranger.token, &stranger.label, &stranger.repository), (&None, &None, &None));

    // A thousand like these are no thousand rows.
    let rows = registry.store.metadata().last_audit_record().await.unwrap();
    for _ in 0..50 {
        refused(get("/v1/stats").send().await.unwrap(), ErrorCode::Unauthorized).await;
        refused(registry.send_as(&other, get("/v1/repositories/secret%2Fa/tags")).await, ErrorCode::RepositoryUnknown).await;
    }
    assert_eq!(registry.store.metadata().last_audit_record().await.unwrap(), rows);
    let dir = registry.stop_keeping_files().await;
    let registry = Registry::start_again(&dir.path().join("store"), |config| config.require_tokens = true).await;
    let counted = records(&registry, &operator, "?limit=2").await;
    assert!(counted.iter().all(|record| record.times == Some(50)), "a stop writes what was counted: {counted:?}");
}

/// Also where the path does not name the snapshot, and where nothing but the digest was guessed.
#[tokio::test]
async fn an_attempt_on_a_snapshot_names_its_digest() {
    let (registry, operator) = start().await;
    let writer = registry.token(&["other/*:pull,push"]).await;
    let secret = push(&registry, &operator, "secret%2Fa", 1, "t").await;
    push(&registry, &operator, "other%2Fa", 2, "t").await;
    let other = "/v1/repositories/other%2Fa";
    let opened: api::Push = ok(registry.send_as(&writer, registry.request(Method::POST, &format!("{other}/pushes"))).await).await;
    let post = |path: String, body: Value| registry.send_as(&writer, registry.request(Method::POST, &path).json(&body));
    refused(post(format!("{other}/pushes/{}/commit", opened.id), json!({"manifest": secret})).await, ErrorCode::BlobUnknown).await;
    refused(post(format!("{other}/forks"), json!({"snapshot": secret, "count": 1, "prefix": "f"})).await, ErrorCode::SnapshotUnknown).await;
    let tag = registry.request(Method::PUT, &format!("{other}/tags/u")).json(&json!({"snapshot": secret}));
    refused(registry.send_as(&writer, tag).await, ErrorCode::SnapshotUnknown).await;
    let read = registry.request(Method::GET, &format!("/v1/repositories/secret%2Fa/snapshots/{secret}"));
    refused(registry.send_as(&writer, read).await, ErrorCode::RepositoryUnknown).await;
    let found = records(&registry, &operator, "?limit=4").await;
    assert_eq!(operations(&found), ["get_snapshot", "put_tag", "fork", "commit"]);
    assert!(found.iter().all(|record| record.digest == Some(secret) && record.token.is_some()), "{found:?}");
    let outcomes = [AuditOutcome::Refused, AuditOutcome::Failed, AuditOutcome::Failed, AuditOutcome::Refused];
    assert_eq!(found.iter().map(|record| record.outcome).collect::<Vec<_>>(), outcomes);
}

#[tokio::test]
async fn changes_that_come_too_early_for_a_limit_are_recorded() {
    let registry = Registry::start_with(|config| {
        (config.require_tokens, config.caller_requests_per_second, config.burst_seconds) = (true, 1, 5);
    })
    .await;
    let (operator, team) = (registry.token(&[ALL]).await, registry.token(&["team/*:pull,push"]).await);
    let flood = async |request: &dyn Fn() -> RequestBuilder| {
        for _ in 0..100 {
            if request().send().await.unwrap().status() == StatusCode::TOO_MANY_REQUESTS {
                return;
            }
        }
        panic!("a hundred requests passed");
    };
    let tags = format!("/v1/repositories/{REPO}/tags");
    // Reads that come too early are no attempt to change something.
    flood(&|| registry.request(Method::GET, &tags).bearer_auth(team.expose())).await;
    flood(&|| registry.request(Method::PUT, &format!("{tags}/t")).bearer_auth(team.expose()).json(&json!({"snapshot": "u"}))).await;
    // Without a valid token all of them are attempts.
    flood(&|| registry.request(Method::GET, "/v1/stats")).await;
    let found = records(&registry, &operator, "").await;
    let limited: Vec<_> = found.iter().filter(|record| record.code.as_deref() == Some("rate_limited")).collect();
    let [stranger, change] = &limited[..] else { panic!("{found:?}") };
    assert_eq!((stranger.operation.as_str(), stranger.outcome, &stranger.token), ("stats", AuditOutcome::Refused, &None));
    assert_eq!((change.operation.as_str(), change.outcome, change.status), ("put_tag", AuditOutcome::Refused, Some(429)));
    assert_eq!((&change.token, &change.repository), (&Some(team.id().to_string()), &Some("team/agent".parse().unwrap())));
}

#[tokio::test]
async fn an_upload_beyond_the_quota_is_recorded_and_so_are_the_limits() {
    let registry = Registry::start().await;
    let quota = registry.put("/v1/domains/default/quota", &json!({"bytes": 1, "snapshots": 7})).await;
    assert_eq!(quota.status(), StatusCode::OK);
    let session = registry.open_push(REPO).await;
    for _ in 0..3 {
        refused(registry.put_frames(&session, snapshot(0..4, vec![]).stream()).await, ErrorCode::QuotaExceeded).await;
    }
    let list: AuditList = ok(registry.get("/v1/audit").await).await;
    assert_eq!(operations(&list.records), ["put_frames", "set_quota"], "and equal ones once");
    let [upload, quota] = &list.records[..] else { panic!("{list:?}") };
    assert_eq!((upload.outcome, upload.status, upload.code.as_deref()), (AuditOutcome::Failed, Some(403), Some("quota_exceeded")));
    assert_eq!(upload.repository, Some("team/agent".parse().unwrap()));
    let limits = api::QuotaLimits { bytes: Some(1), objects: None, snapshots: Some(7) };
    assert_eq!((quota.new_quota, quota.subject.as_deref()), (Some(limits), Some("default")));
}

#[tokio::test]
async fn what_another_site_asks_for_names_the_token_that_it_tried_to_use() {
    let (registry, operator) = start().await;
    let ask = |token: Option<&AccessToken>| {
        let request = registry.request(Method::POST, "/v1/gc").header("sec-fetch-site", "cross-site");
        match token {
            Some(token) => request.basic_auth("me", Some(token.expose())),
            None => request,
        }
    };
    for token in [Some(&operator), None, Some(&AccessToken::new([7; 8], [9; 32]))] {
        refused(ask(token).send().await.unwrap(), ErrorCode::Denied).await;
    }
    let found = records(&registry, &operator, "").await;
    let said: Vec<_> =
        found.iter().map(|record| (record.operation.as_str(), record.outcome, record.code.as_deref(), &record.token)).collect();
    let expected = |token| ("start_gc", AuditOutcome::Refused, Some("denied"), token);
    // The second one without a token is like the first.
    assert_eq!(said, [expected(&None), expected(&Some(operator.id().to_string()))]);
}

#[tokio::test]
async fn a_token_that_makes_names_up_has_a_bounded_number_of_records() {
    const ASKED: u64 = 100;
    let (registry, operator) = start().await;
    let other = registry.token(&["other/*:pull"]).await;
    for n in 0..ASKED {
        let answer = registry.send_as(&other, registry.request(Method::GET, &format!("/v1/repositories/made-up-{n}/tags"))).await;
        refused(answer, ErrorCode::RepositoryUnknown).await;
    }
    let found = records(&registry, &operator, "?limit=1000").await;
    let named = found.iter().filter(|record| record.repository.is_some()).count() as u64;
    assert!(found.len() as u64 == named + 1 && named < ASKED, "{} records, {named} with names", found.len());
    let dir = registry.stop_keeping_files().await;
    let registry = Registry::start_again(&dir.path().join("store"), |config| config.require_tokens = true).await;
    let counted = records(&registry, &operator, "?limit=1").await.remove(0);
    assert_eq!((counted.operation.as_str(), counted.repository.clone(), counted.times), ("list_tags", None, Some(ASKED - named - 1)));
    assert_eq!(counted.token, Some(other.id().to_string()), "{counted:?}");
}

#[tokio::test]
async fn a_domain_has_its_own_log_and_that_of_the_registry_is_for_its_operators() {
    let (registry, operator) = start().await;
    let _: api::DomainInfo = ok(registry.send_as(&operator, registry.request(Method::PUT, "/v1/domains/acme")).await).await;
    let of = async |name: &str| {
        let domain = Some(name.parse().unwrap());
        let new = NewAccessToken { label: name.into(), domain, scopes: vec![ALL.parse().unwrap()], expires_at: None };
        registry.tokens().create(new).await.unwrap().0
    };
    let (acme, default) = (of("acme").await, of("default").await);
    let quota = registry.request(Method::PUT, "/v1/domains/acme/quota").json(&json!({"snapshots": 9}));
    assert_eq!(registry.send_as(&operator, quota).await.status(), StatusCode::OK);
    let gc = registry.request(Method::POST, "/domains/acme/v1/gc").json(&json!({"dry_run": true}));
    assert_eq!(registry.send_as(&acme, gc).await.status(), StatusCode::OK);
    push(&registry, &default, REPO, 1, "t").await;

    assert_eq!(operations(&list(&registry, &acme, "/domains/acme", "").await.records), ["start_gc", "set_quota"]);
    assert_eq!(operations(&records(&registry, &default, "").await), ["commit"], "an operator of one domain");
    assert_eq!(operations(&records(&registry, &operator, "").await), ["commit", "create_domain"]);
    // A domain that is not there has no log. The operators of the default one are not told of it.
    let outsider = registry.token(&["nothing:push"]).await;
    let answer = registry.send_as(&outsider, registry.request(Method::GET, "/domains/nowhere/v1/stats")).await;
    refused(answer, ErrorCode::Denied).await;
    assert_eq!(operations(&records(&registry, &default, "").await), ["commit"]);
    assert_eq!(operations(&records(&registry, &operator, "").await), ["stats", "commit", "create_domain"]);
    let answer = registry.send_as(&acme, registry.request(Method::GET, "/v1/audit")).await;
    refused(answer, ErrorCode::DomainUnknown).await;
    let reader = registry.token(&["*:pull,push,delete"]).await;
    refused(registry.send_as(&reader, registry.request(Method::GET, "/v1/audit")).await, ErrorCode::Denied).await;
}

#[tokio::test]
async fn reads_are_recorded_before_they_are_answered_if_that_is_asked_for() {
    let registry = Registry::start_with(|config| config.audit_reads = true).await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("t")).await;
    let _: api::TagList = ok(registry.get(&format!("/v1/repositories/{REPO}/tags")).await).await;
    assert_eq!(registry.request(Method::HEAD, "/v1/repositories").send().await.unwrap().status(), StatusCode::OK);
    assert_eq!(registry.get(&format!("/ui/{REPO}/t")).await.status(), StatusCode::OK);
    registry.get("/ui/-/style.css").await;
    registry.get("/livez").await;
    registry.get("/metrics").await;
    let list: AuditList = ok(registry.get("/v1/audit?order=oldest").await).await;
    let expected = ["open_push", "put_frames", "commit", "list_tags", "list_repositories", "GET /ui/{repo}/{ref}", "list_audit"];
    assert_eq!(operations(&list.records), expected);
    let outcomes: Vec<bool> = list.records.iter().map(|record| record.outcome == AuditOutcome::Begun).collect();
    assert_eq!(outcomes, [true, true, false, true, true, true, true]);
    assert_eq!(list.records[5].repository, Some("team/agent".parse().unwrap()));
    assert!(list.records.iter().all(|record| record.token.is_none()), "no tokens are required");
}

#[tokio::test]
async fn no_secret_is_in_a_record() {
    let (registry, operator) = start().await;
    let body = json!({"label": "new", "scopes": ["*:pull"], "expires_at": 200_000_000_000_000_u64});
    let made: api::AccessTokenCreated =
        ok(registry.send_as(&operator, registry.request(Method::POST, "/v1/tokens").json(&body)).await).await;
    let wrong = AccessToken::new([7; 8], [9; 32]);
    refused(registry.send_as(&wrong, registry.request(Method::GET, "/v1/tokens")).await, ErrorCode::Unauthorized).await;
    let answer = registry.send_as(&operator, registry.request(Method::GET, "/v1/audit")).await;
    let text = answer.text().await.unwrap();
    assert!(text.contains(made.info.id.as_str()) && text.contains("create_token"), "{text}");
    for secret in [operator.expose(), made.token.as_str(), wrong.expose()] {
        assert!(!text.contains(&secret[21..85]), "{text}");
    }
    let list: AuditList = serde_json::from_str(&text).unwrap();
    let token = list.records.iter().find_map(|record| record.new_token.clone()).expect("what was made");
    let scopes: Vec<String> = token.scopes.iter().map(ToString::to_string).collect();
    assert_eq!((token.label.as_str(), token.domain, token.expires_at), ("new", None, Some(200_000_000_000_000)));
    assert_eq!(scopes, ["*:pull"]);
}

#[tokio::test]
async fn a_proxy_in_front_says_where_requests_come_from() {
    for (proxies, expected) in [(0, "127.0.0.1"), (1, "203.0.113.9")] {
        let registry = Registry::start_with(|config| config.proxies = proxies).await;
        let request = registry.request(Method::POST, "/v1/gc").json(&json!({"dry_run": true}));
        let answer = request.header("x-forwarded-for", "6.6.6.6, 203.0.113.9").send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let list: AuditList = ok(registry.get("/v1/audit").await).await;
        assert_eq!(list.records[0].from.as_deref(), Some(expected));
    }
}

/// A registry as a process of its own.
struct Process {
    child: Child,
    url: String,
}

impl Process {
    fn start(data: &Path, options: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_pf-registry"))
            .args(["serve", "--listen", "127.0.0.1:0", "--log", "warn", "--data"])
            .arg(data)
            .args(options)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        let url = line.trim_end().trim_start_matches("listening on ").to_owned();
        assert!(url.starts_with("http://"), "{line}");
        Self { child, url }
    }

    fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("ended");
    }

    /// Ends it as a service manager does.
    fn stop(mut self) {
        self.signal("-TERM");
        assert_eq!(self.child.wait().expect("ended").code(), Some(0));
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().expect("kill runs").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn client() -> reqwest::Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().expect("a client")
}

/// A data directory with one snapshot.
async fn data() -> tempfile::TempDir {
    let registry = Registry::start().await;
    registry.push(REPO, &snapshot(0..2, vec![]), Some("base")).await;
    registry.stop_keeping_files().await
}

/// A change and its record are one transaction: neither is there without the other, whenever the
/// process is killed.
#[tokio::test]
async fn after_a_kill_every_change_has_its_record_and_every_record_its_change() {
    const ROUNDS: u64 = 6;
    const WRITERS: u64 = 6;
    let dir = data().await;
    let data = dir.path().join("store");
    let client = client();
    let mut cut = 0;
    for round in 0..ROUNDS {
        let process = Process::start(&data, &[]);
        let mut writers = Vec::new();
        for writer in 0..WRITERS {
            let (client, url) = (client.clone(), process.url.clone());
            writers.push(tokio::spawn(async move {
                let mut answered = 0;
                loop {
                    let (name, repo) = (format!("r{round}-{writer}-{answered}"), format!("{url}/v1/repositories/{REPO}"));
                    let request = match writer % 3 {
                        0 => client.put(format!("{repo}/tags/{name}")).json(&json!({"snapshot": "base"})),
                        1 => client.post(format!("{repo}/forks")).json(&json!({"snapshot": "base", "count": 2, "prefix": name})),
                        _ => client.post(format!("{url}/v1/tokens")).json(&json!({"label": name, "scopes": ["*:pull"]})),
                    };
                    match request.send().await {
                        Ok(answer) => assert!(answer.status().is_success(), "{}", answer.status()),
                        // The answer is lost, and perhaps the change.
                        Err(_) => return answered,
                    }
                    answered += 1;
                }
            }));
        }
        tokio::time::sleep(Duration::from_millis(40 + 60 * round)).await;
        process.kill();
        for writer in writers {
            cut += writer.await.expect("a writer");
        }
    }
    assert!(cut > ROUNDS * WRITERS, "only {cut} requests were answered before the kills");
    let registry = Registry::start_again(&data, |_| ()).await;
    let changed = |found: &mut Vec<AuditRecord>, list: AuditList| {
        found.extend(list.records.into_iter().filter(|record| record.outcome == AuditOutcome::Done));
        list.next
    };
    let (mut done, mut after) = (Vec::new(), Some("0".to_owned()));
    while let Some(from) = after {
        after = changed(&mut done, ok(registry.get(&format!("/v1/audit?order=oldest&limit=1000&after={from}")).await).await);
    }
    let mut said = BTreeSet::new();
    let mut tokens = 0;
    for record in &done {
        match (record.operation.as_str(), &record.tag) {
            ("put_tag", Some(tag)) => assert!(said.insert(tag.to_string()), "{tag} twice"),
            ("fork", Some(tag)) => {
                let prefix = tag.as_str().strip_suffix("-1").expect("the first tag of a fork");
                assert!((1..=2).all(|n| said.insert(format!("{prefix}-{n}"))), "{prefix} twice");
            }
            ("create_token", None) => tokens += 1,
            ("commit", _) => {}
            other => panic!("{other:?}"),
        }
    }
    let (mut tags, mut after) = (BTreeSet::new(), String::new());
    loop {
        let list: api::TagList = ok(registry.get(&format!("/v1/repositories/{REPO}/tags?limit=1000{after}")).await).await;
        tags.extend(list.tags.into_iter().map(|tag| tag.name.to_string()).filter(|name| name != "base"));
        match list.next {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(tags, said);
    let (mut made, mut after) = (0, None);
    loop {
        let page = registry.tokens().list(after, 1000).await.unwrap();
        made += page.rows.len();
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(made, tokens);
}

/// The records in a file; none if there is no such file.
fn in_file(path: &Path) -> Vec<AuditRecord> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

async fn until(what: &str, mut is: impl AsyncFnMut() -> bool) {
    let waited = async {
        while !is().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), waited).await.unwrap_or_else(|_| panic!("{what}: not within 30 s"));
}

#[tokio::test]
async fn the_file_follows_the_log_over_rotations_kills_and_domains_and_lacks_nothing() {
    let dir = data().await;
    let (data, file) = (dir.path().join("store"), dir.path().join("audit.log"));
    let (old, options) = (dir.path().join("audit.log.1"), ["--audit-log", file.to_str().unwrap()]);
    let client = client();
    let tag = async |process: &Process, name: &str| {
        let url = format!("{}/v1/repositories/{REPO}/tags/{name}", process.url);
        let answer = client.put(url).json(&json!({"snapshot": "base"})).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
    };
    let process = Process::start(&data, &options);
    tag(&process, "one").await;
    let made = client.put(format!("{}/v1/domains/acme", process.url)).send().await.unwrap();
    assert_eq!(made.status(), StatusCode::CREATED);
    let gc = client.post(format!("{}/domains/acme/v1/gc", process.url)).json(&json!({"dry_run": true}));
    assert_eq!(gc.send().await.unwrap().status(), StatusCode::OK);
    // What was recorded before there was a file is in it too.
    until("the file has all", async || in_file(&file).len() == 4).await;
    let domains: BTreeSet<Option<String>> =
        in_file(&file).iter().map(|record| record.domain.as_ref().map(|name| name.to_string())).collect();
    assert_eq!(domains, [None, Some("default".to_owned()), Some("acme".to_owned())].into());
    // Rotated, as logrotate does it.
    std::fs::rename(&file, &old).unwrap();
    process.signal("-HUP");
    tag(&process, "two").await;
    until("the new file has the next one", async || in_file(&file).len() == 1).await;
    assert_eq!(in_file(&old).len(), 4);
    for n in 0..20 {
        tag(&process, &format!("kill-{n}")).await;
    }
    process.kill();
    let process = Process::start(&data, &options);
    tag(&process, "last").await;
    let numbers = || -> BTreeSet<(Option<String>, u64)> {
        let both = in_file(&old).into_iter().chain(in_file(&file));
        // What is about the registry is in the log of the default domain.
        both.map(|record| (record.domain.map(|name| name.to_string()).filter(|name| name != "default"), record.number)).collect()
    };
    until("the files have all", async || numbers().len() == 4 + 1 + 20 + 1).await;
    process.stop();
    let expected: BTreeSet<_> = (1..=25).map(|n| (None, n)).chain([(Some("acme".to_owned()), 1)]).collect();
    assert_eq!(numbers(), expected);
}

/// As after a rebuild, or on tables from a backup: numbers begin anew, and may be past those in the
/// file when it is looked at.
#[tokio::test]
async fn a_log_that_began_anew_is_in_the_file_from_its_first_record() {
    let (dir, other) = (data().await, data().await);
    let file = dir.path().join("audit.log");
    let (client, options) = (client(), ["--audit-log", file.to_str().unwrap()]);
    let tag = async |process: &Process, name: &str| {
        let url = format!("{}/v1/repositories/{REPO}/tags/{name}", process.url);
        assert!(client.put(url).json(&json!({"snapshot": "base"})).send().await.unwrap().status().is_success());
    };
    let process = Process::start(&dir.path().join("store"), &options);
    tag(&process, "one").await;
    until("the file has both", async || in_file(&file).len() == 2).await;
    process.stop();
    let anew = other.path().join("store");
    let process = Process::start(&anew, &[]);
    for name in ["a", "b", "c"] {
        tag(&process, name).await;
    }
    process.stop();
    let process = Process::start(&anew, &options);
    until("the file has all of the new log too", async || in_file(&file).len() == 2 + 4).await;
    process.stop();
    let numbers: Vec<u64> = in_file(&file).iter().map(|record| record.number).collect();
    assert_eq!(numbers, [1, 2, 1, 2, 3, 4]);
}

/// The file is a copy: while it cannot be written, nothing is lost and nothing waits.
#[tokio::test]
async fn a_full_disk_under_the_file_stops_no_change_and_is_seen() {
    let dir = data().await;
    // Every write fails as on a full disk.
    let path = dir.path().join("full");
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let process = Process::start(&dir.path().join("store"), &["--audit-log", path.to_str().unwrap()]);
    let client = client();
    let url = format!("{}/v1/repositories/{REPO}/tags/one", process.url);
    assert_eq!(client.put(url).json(&json!({"snapshot": "base"})).send().await.unwrap().status(), StatusCode::OK);
    let list: AuditList = ok(client.get(format!("{}/v1/audit", process.url)).send().await.unwrap()).await;
    assert_eq!(operations(&list.records), ["put_tag", "commit"]);
    let lag = async || {
        let text = client.get(format!("{}/metrics", process.url)).send().await.unwrap().text().await.unwrap();
        text.lines().find_map(|line| line.strip_prefix("pf_audit_file_lag_seconds ")?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    until("the metric shows it", async || lag().await > 0.0).await;
    // Space is there again.
    std::fs::remove_file(&path).unwrap();
    process.signal("-HUP");
    until("the file has all", async || in_file(&path).len() == 2).await;
    process.stop();
}

#[tokio::test]
async fn a_file_that_cannot_be_written_is_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let run = |file: PathBuf| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--data"]).arg(dir.path().join("store")).arg("--audit-log").arg(file);
        let output = command.output().expect("the program runs");
        (output.status.code(), String::from_utf8(output.stderr).expect("text"))
    };
    let (code, said) = run(dir.path().join("no/such/folder/audit.log"));
    assert!(code == Some(5) && said.contains("cannot write the audit file"), "{code:?}: {said}");
    std::fs::write(dir.path().join("audit.log.position"), "half").unwrap();
    let (code, said) = run(dir.path().join("audit.log"));
    assert!(code == Some(1) && said.contains("cannot write the audit file"), "{code:?}: {said}");
}

/// Commands on the registry's machine are callers too.
#[tokio::test]
async fn commands_on_the_database_are_recorded() {
    let dir = data().await;
    let data = dir.path().join("store");
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_pf-registry")).args(arguments).arg("--data").arg(&data).output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    let token = run(&["token", "create", "--label", "x", "--scope", "*:pull"]);
    let token = AccessToken::parse(token.trim_end()).unwrap();
    run(&["domain", "quota", "default", "--snapshots", "5"]);
    run(&["token", "revoke", token.id().as_str()]);
    let registry = Registry::start_again(&data, |_| ()).await;
    let list: AuditList = ok(registry.get("/v1/audit?limit=3").await).await;
    let said: Vec<_> = list.records.iter().map(|record| (record.operation.as_str(), record.subject.as_deref().unwrap())).collect();
    assert_eq!(said, [("revoke_token", token.id().as_str()), ("set_quota", "default"), ("create_token", token.id().as_str())]);
    assert!(list.records.iter().all(|record| record.label.as_deref() == Some("command line") && record.from.is_none()));
}

/// A caller without a token may send anything: nothing of it may break the log.
#[tokio::test]
async fn a_hostile_request_is_recorded_harmlessly() {
    let (registry, operator) = start().await;
    let send = async |request: RequestBuilder| problem(request.send().await.unwrap()).await;
    for path in ["/v1/repositories/%00%0A/tags/%22", "/v1/tasks/%0Aevil/pause", "/domains/%22x/v1/gc", "/v1/domains/%00"] {
        for method in [Method::GET, Method::PUT, Method::POST, Method::DELETE] {
            let sent = registry.request(method.clone(), path).header("x-forwarded-for", "\"\\").header("x-request-id", "a b");
            send(sent).await;
            let sent = registry.request(method, path).bearer_auth(operator.expose());
            send(sent).await;
        }
    }
    let text = registry.send_as(&operator, registry.request(Method::GET, "/v1/audit?limit=1000")).await.text().await.unwrap();
    let parsed: Value = serde_json::from_str(&text).expect("JSON");
    assert!(parsed["records"].as_array().is_some_and(|records| !records.is_empty()));
    assert!(!text.contains("evil") && !text.contains("\\u0000"), "{text}");
}
