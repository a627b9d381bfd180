//! Access tokens over HTTP: made and shown once, revoked within seconds, and blind to what they may
//! not pull.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, problem, refused};
use object_store::memory::InMemory;
use pfr_faults::faults::Faults;
use pfr_faults::transactions::Transactions;
use pfr_schema::api::{self, AccessTokenCreated, AccessTokenInfo, AccessTokenList};
use pfr_schema::{AccessToken, Digest, ErrorCode, Kind};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

const ALL: &str = "*:pull,push,delete,admin";

async fn start() -> Registry {
    Registry::start_with(|config| config.require_tokens = true).await
}

/// Pushes as the client does: asks what is missing, sends that, commits. Returns the answer to the
/// commit, and which of its blobs the registry asked for.
async fn push(registry: &Registry, token: &AccessToken, repo: &str, s: &Snapshot, tag: &str) -> (reqwest::Response, Vec<Digest>) {
    let path = format!("/v1/repositories/{repo}/pushes");
    let opened: api::Push = ok(registry.send_as(token, registry.request(Method::POST, &path)).await).await;
    let session = format!("{path}/{}", opened.id);
    let mut missing = Vec::new();
    for blob in &s.blobs {
        if is_missing(registry, token, &session, blob.digest, blob.kind).await {
            missing.push(blob.digest);
        }
    }
    let blobs: Vec<_> = s.blobs.iter().filter(|blob| missing.contains(&blob.digest)).cloned().collect();
    let frames = registry.request(Method::PUT, &format!("{session}/frames")).header("content-type", pfr_schema::media_type::FRAMES);
    let _: api::FramesStored = ok(registry.send_as(token, frames.body(crate::common::snapshot::stream(&blobs))).await).await;
    (commit(registry, token, &session, s.manifest, tag).await, missing)
}

async fn is_missing(registry: &Registry, token: &AccessToken, session: &str, digest: Digest, kind: Kind) -> bool {
    let request = registry.request(Method::POST, &format!("{session}/missing"));
    let answer = registry.send_as(token, request.json(&json!({"groups": [{"kind": kind, "digests": [digest]}]}))).await;
    !ok::<api::MissingResponse>(answer).await.missing.is_empty()
}

async fn commit(registry: &Registry, token: &AccessToken, session: &str, manifest: Digest, tag: &str) -> reqwest::Response {
    let request = registry.request(Method::POST, &format!("{session}/commit"));
    registry.send_as(token, request.json(&json!({"manifest": manifest, "tag": tag}))).await
}

async fn frames(registry: &Registry, token: &AccessToken, repo: &str, digests: &[Digest]) -> reqwest::Response {
    let request = registry.request(Method::POST, &format!("/v1/repositories/{repo}/frames"));
    registry.send_as(token, request.json(&json!({"digests": digests}))).await
}

#[tokio::test]
async fn a_token_is_made_shown_once_used_and_revoked() {
    let registry = start().await;
    let operator = registry.token(&["*:admin"]).await;
    let post = |body: Value| registry.request(Method::POST, "/v1/tokens").json(&body);
    let in_an_hour = registry.store.options().clock.now() + 3_600_000;
    let body = json!({"label": "build machine", "scopes": ["team/*:push,pull"], "expires_at": in_an_hour});
    let answer = registry.send_as(&operator, post(body)).await;
    assert_eq!((answer.status(), &answer.headers()["cache-control"]), (StatusCode::CREATED, &"no-store".parse().expect("a value")));
    let AccessTokenCreated { token, info } = ok(answer).await;
    let token = AccessToken::parse(&token).expect("a token");
    let scopes: Vec<String> = info.scopes.iter().map(ToString::to_string).collect();
    assert_eq!((&info.id, info.label.as_str(), scopes.join(" ").as_str()), (&token.id(), "build machine", "team/*:pull,push"));
    assert_eq!((info.expires_at, info.used_at, info.revoked_at, &info.domain), (Some(in_an_hour), None, None, &None));

    // As a bearer, and as the password of any user.
    let s = snapshot(0..3, vec![]);
    assert!(push(&registry, &token, REPO, &s, "t").await.0.status().is_success());
    let tags = format!("/v1/repositories/{REPO}/tags");
    for user in ["", "robot"] {
        let answer = registry.request(Method::GET, &tags).basic_auth(user, Some(token.expose())).send().await.expect("an answer");
        assert_eq!(ok::<api::TagList>(answer).await.tags.len(), 1);
    }
    let list = async || {
        let answer = registry.send_as(&operator, registry.request(Method::GET, "/v1/tokens")).await;
        let text = answer.text().await.expect("text");
        assert!(!text.contains(token.expose()) && !text.contains(&token.expose()[21..85]), "{text}");
        let list: AccessTokenList = serde_json::from_str(&text).expect("a list");
        list.tokens.into_iter().find(|other| other.id == info.id).expect("it is listed")
    };
    // The use is noted beside the request.
    let deadline = Instant::now() + Duration::from_secs(30);
    while list().await.used_at.is_none() {
        assert!(Instant::now() < deadline, "the use was not noted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // The process that revokes it refuses it at once.
    let path = format!("/v1/tokens/{}", info.id);
    for _ in 0..2 {
        let answer = registry.send_as(&operator, registry.request(Method::DELETE, &path)).await;
        assert_eq!(answer.status(), StatusCode::NO_CONTENT, "once more changes nothing");
        refused(registry.send_as(&token, registry.request(Method::GET, &tags)).await, ErrorCode::Unauthorized).await;
    }
    let revoked: AccessTokenInfo = list().await;
    assert!(revoked.revoked_at.is_some(), "{revoked:?}");

    let unknown = registry.send_as(&operator, registry.request(Method::DELETE, "/v1/tokens/0123456789abcdef")).await;
    refused(unknown, ErrorCode::TokenUnknown).await;
    for (wrong, code) in [
        (json!({"label": "", "scopes": ["*:pull"]}), ErrorCode::InvalidRequest),
        (json!({"label": "x", "scopes": []}), ErrorCode::InvalidRequest),
        (json!({"label": "x", "scopes": ["*:write"]}), ErrorCode::InvalidRequest),
        (json!({"label": "x", "scopes": ["*:pull"], "expires_at": 1}), ErrorCode::InvalidRequest),
        (json!({"label": "x", "scopes": ["*:pull"], "expires": 1}), ErrorCode::InvalidRequest),
        (json!({"label": "x", "scopes": ["*:pull"], "domain": "nowhere"}), ErrorCode::DomainUnknown),
    ] {
        refused(registry.send_as(&operator, post(wrong)).await, code).await;
    }
    refused(registry.send_as(&operator, registry.request(Method::DELETE, "/v1/tokens/me")).await, ErrorCode::InvalidName).await;
}

/// As another replica, or `pf-registry token revoke`, does it: only the database knows.
#[tokio::test]
async fn a_token_that_another_process_revoked_is_refused_within_seconds_and_not_looked_up_before() {
    let registry = start().await;
    let token = registry.token(&[ALL]).await;
    let status = async || registry.send_as(&token, registry.request(Method::GET, "/v1/repositories")).await.status();
    assert_eq!(status().await, StatusCode::OK);
    let looked_up = Instant::now();
    registry.tokens().revoke(&token.id()).await.expect("revoked");
    // What was looked up a moment ago is believed: no request of a push asks the database.
    if looked_up.elapsed() < Duration::from_secs(2) {
        assert_eq!(status().await, StatusCode::OK);
    }
    while status().await == StatusCode::OK {
        assert!(looked_up.elapsed() < Duration::from_secs(8), "it is accepted for longer than five seconds");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(status().await, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn lists_show_what_the_token_may_pull_page_by_page() {
    let registry = start().await;
    let operator = registry.token(&[ALL]).await;
    for (n, repo) in ["a", "a%2Fx", "a%2Fy", "b%2Fx", "c", "zz%2F1", "zz%2F2"].into_iter().enumerate() {
        push(&registry, &operator, repo, &snapshot([n as u64 + 1], vec![]), "t").await;
    }
    for (scopes, expected) in [
        (&["*:pull"][..], &["a", "a/x", "a/y", "b/x", "c", "zz/1", "zz/2"][..]),
        (&["a/*:pull", "zz/*:pull,push"], &["a/x", "a/y", "zz/1", "zz/2"]),
        (&["*/x:pull", "c:push"], &["a/x", "b/x"]),
        (&["nothing*:pull"], &[]),
    ] {
        let token = registry.token(scopes).await;
        for limit in 1..4 {
            let (mut found, mut after): (Vec<String>, Option<String>) = (Vec::new(), None);
            loop {
                let cursor = after.map(|after| format!("&after={after}")).unwrap_or_default();
                let request = registry.request(Method::GET, &format!("/v1/repositories?limit={limit}{cursor}"));
                let list: api::RepositoryList = ok(registry.send_as(&token, request).await).await;
                assert!(list.next.is_none() || list.repositories.len() == limit, "a short page tells of what is not shown");
                assert!(list.next.iter().all(|next| expected.contains(&next.as_str())), "a cursor names {:?}", list.next);
                found.extend(list.repositories.into_iter().map(|repository| repository.name.to_string()));
                after = list.next;
                if after.is_none() {
                    break;
                }
            }
            assert_eq!(found, expected, "{scopes:?} by {limit}");
        }
    }
}

/// Knowing the digest of a snapshot is not enough to learn that it exists, to download it, or to
/// make it one's own. Having its bytes is.
#[tokio::test]
async fn a_snapshot_of_a_repository_that_may_not_be_pulled_is_unknown_by_its_digest() {
    let registry = start().await;
    let (secret, own) = (snapshot(0..4, vec![]), snapshot(4..6, vec![]));
    let owner = registry.token(&["secret/*:pull,push"]).await;
    let other = registry.token(&["other/*:pull,push"]).await;
    assert!(push(&registry, &owner, "secret%2Fa", &secret, "t").await.0.status().is_success());
    assert!(push(&registry, &other, "other%2Fa", &own, "t").await.0.status().is_success());

    // Download through the caller's own repository: like a blob that is not stored.
    let nowhere = Digest::sha256(b"nowhere");
    let answer = async |digest| problem(frames(&registry, &other, "other%2Fa", &[own.manifest, digest]).await).await;
    let (hidden, missing) = (answer(secret.manifest).await, answer(nowhere).await);
    assert_eq!((hidden.code, missing.code), (ErrorCode::BlobUnknown, ErrorCode::BlobUnknown));
    assert_eq!(hidden.detail.replace(&secret.manifest.to_string(), "X"), missing.detail.replace(&nowhere.to_string(), "X"));
    assert_eq!(frames(&registry, &other, "other%2Fa", &[own.manifest]).await.status(), StatusCode::OK);

    // Question and commit without the bytes.
    let opened = registry.request(Method::POST, "/v1/repositories/other%2Fa/pushes");
    let opened: api::Push = ok(registry.send_as(&other, opened).await).await;
    let session = format!("/v1/repositories/other%2Fa/pushes/{}", opened.id);
    for kind in [Kind::Manifest, Kind::Blob] {
        assert!(is_missing(&registry, &other, &session, secret.manifest, kind).await, "{kind:?}");
    }
    assert!(!is_missing(&registry, &other, &session, own.manifest, Kind::Manifest).await, "its own snapshot is there");
    let refusal = async |digest| problem(commit(&registry, &other, &session, digest, "stolen").await).await;
    let (hidden, missing) = (refusal(secret.manifest).await, refusal(nowhere).await);
    assert_eq!((hidden.code, missing.code), (ErrorCode::BlobUnknown, ErrorCode::BlobUnknown));
    assert_eq!(hidden.detail.replace(&secret.manifest.to_string(), "X"), missing.detail.replace(&nowhere.to_string(), "X"));

    // A caller with the bytes sends the manifest again, and only that.
    let (committed, sent) = push(&registry, &other, "other%2Fb", &secret, "t").await;
    assert!(committed.status().is_success(), "{:?}", committed.text().await);
    assert_eq!(sent, [secret.manifest]);
    // A caller that sees the whole domain sends nothing.
    let everywhere = registry.token(&["*:pull,push"]).await;
    let (committed, sent) = push(&registry, &everywhere, "third", &secret, "t").await;
    assert!(committed.status().is_success() && sent.is_empty(), "{sent:?}");
}

#[tokio::test]
async fn a_repository_that_a_pusher_may_not_pull_still_takes_its_pushes() {
    let registry = start().await;
    let writer = registry.token(&["drop/*:push"]).await;
    let s = snapshot(0..3, vec![]);
    for tag in ["first", "again"] {
        let (committed, _) = push(&registry, &writer, "drop%2Fbox", &s, tag).await;
        assert!(committed.status().is_success(), "{:?}", committed.text().await);
    }
    let tags = registry.send_as(&writer, registry.request(Method::GET, "/v1/repositories/drop%2Fbox/tags")).await;
    refused(tags, ErrorCode::RepositoryUnknown).await;
}

#[tokio::test]
async fn metrics_need_the_operators_token_unless_they_are_open() {
    let registry = start().await;
    let (operator, other) = (registry.token(&["*:admin"]).await, registry.token(&["*:pull,push,delete"]).await);
    refused(registry.get("/metrics").await, ErrorCode::Unauthorized).await;
    refused(registry.send_as(&other, registry.request(Method::GET, "/metrics")).await, ErrorCode::Denied).await;
    assert_eq!(registry.send_as(&operator, registry.request(Method::GET, "/metrics")).await.status(), StatusCode::OK);
    let open = Registry::start_with(|config| (config.require_tokens, config.open_metrics) = (true, true)).await;
    assert_eq!(open.get("/metrics").await.status(), StatusCode::OK);
    refused(open.get("/v1/repositories").await, ErrorCode::Unauthorized).await;
}

/// The database holds a hash, which does not give the token.
#[tokio::test]
async fn the_secret_is_in_no_file_of_the_registry() {
    let registry = start().await;
    let token = registry.token(&[ALL]).await;
    for _ in 0..2 {
        assert_eq!(registry.send_as(&token, registry.request(Method::GET, "/v1/repositories")).await.status(), StatusCode::OK);
    }
    let dir = registry.stop_keeping_files().await;
    let data = dir.path().join("store");
    let secret = &token.expose().as_bytes()[21..85];
    let (mut folders, mut read) = (vec![data], 0);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                // The database removes its own temporary files when it closes.
                let Ok(bytes) = std::fs::read(&path) else { continue };
                assert!(!bytes.windows(secret.len()).any(|window| window == secret), "{}", path.display());
                read += bytes.windows(16).filter(|window| *window == token.id().as_str().as_bytes()).count();
            }
        }
    }
    assert!(read > 0, "the token's row was read");
}

/// An upstream is asked with the registry's own token, which may open more than the caller's.
#[tokio::test]
async fn an_upstream_is_not_asked_for_blobs_by_a_caller_that_does_not_see_everything() {
    let upstream = Registry::start().await;
    let there = snapshot(0..3, vec![]);
    upstream.push(REPO, &there, Some("t")).await;
    let url = upstream.url("");
    let registry = Registry::start_with(|config| (config.require_tokens, config.upstream) = (true, url)).await;
    let (team, everywhere) = (registry.token(&["team/*:pull,push"]).await, registry.token(&["*:pull"]).await);
    // The repository is here, too.
    assert!(push(&registry, &team, REPO, &snapshot(5..6, vec![]), "own").await.0.status().is_success());
    let answer = frames(&registry, &team, REPO, &[there.manifest]).await;
    let detail = refused(answer, ErrorCode::BlobUnknown).await;
    assert!(!detail.contains("upstream"), "{detail}");
    assert_eq!(frames(&registry, &everywhere, REPO, &[there.manifest]).await.status(), StatusCode::OK);
    // Through the snapshot, it sees what it may pull, and nothing else.
    let get = async |path: &str| registry.send_as(&team, registry.request(Method::GET, path)).await;
    assert_eq!(get(&format!("/v1/repositories/{REPO}/tags/t")).await.status(), StatusCode::OK);
    upstream.push("secret", &there, Some("t")).await;
    refused(get("/v1/repositories/secret/tags/t").await, ErrorCode::RepositoryUnknown).await;
}

#[tokio::test]
async fn while_the_database_cannot_be_asked_no_token_is_called_wrong() {
    let faults = Faults::new(0, 0.0);
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.expect("metadata");
    let metadata = Arc::new(Transactions::new(metadata, faults.clone()));
    let store = Store::new(Arc::new(InMemory::new()), metadata, Options::default());
    let registry = Registry::start_over_with(store, |config| config.require_tokens = true).await;
    let (used, fresh, unknown) = (registry.token(&["*:pull"]).await, registry.token(&["*:pull"]).await, AccessToken::new([9; 8], [9; 32]));
    let ask = async |token: &AccessToken| registry.send_as(token, registry.request(Method::GET, "/v1/repositories")).await;
    let _: api::RepositoryList = ok(ask(&used).await).await;
    faults.set(1.0, false);
    for token in [&used, &fresh, &unknown] {
        let problem = problem(ask(token).await).await;
        assert_eq!((problem.code, problem.status, problem.retryable), (ErrorCode::Unavailable, 503, true), "{}", problem.detail);
    }
    // Without a token there is nothing to ask.
    refused(registry.get("/v1/repositories").await, ErrorCode::Unauthorized).await;
    faults.set(0.0, false);
    let _: api::RepositoryList = ok(ask(&fresh).await).await;
    refused(ask(&unknown).await, ErrorCode::Unauthorized).await;
}
