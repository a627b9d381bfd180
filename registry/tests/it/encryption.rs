//! Encrypted domains over HTTP and by the command line.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry, config, ok, problem, refused};
use pfr_registry::config::{Overrides, SettingsError};
use pfr_registry::{Config, Server};
use pfr_schema::ErrorCode;
use pfr_schema::api::{self, DomainInfo};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// A key file: 32 bytes as base64.
fn key(dir: &TempDir, digit: char) -> PathBuf {
    let path = dir.path().join(format!("{digit}.key"));
    std::fs::write(&path, format!("{}A=\n", digit.to_string().repeat(42))).expect("written");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("private");
    path
}

async fn put(registry: &Registry, path: &str) -> reqwest::Response {
    registry.request(Method::PUT, path).send().await.expect("an answer")
}

async fn push(registry: &Registry, base: &str) {
    let s = snapshot(0..3, vec![]);
    let opened: api::Push = ok(registry.post(&format!("{base}/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    let session = format!("{base}/v1/repositories/{REPO}/pushes/{}", opened.id);
    let _: api::FramesStored = ok(registry.put_frames(&session, s.stream()).await).await;
    let _: api::Committed = ok(registry.post(&format!("{session}/commit"), &json!({"manifest": s.manifest, "tag": "t"})).await).await;
}

async fn verified(registry: &Registry, base: &str) -> StatusCode {
    registry.post(&format!("{base}/v1/repositories/{REPO}/snapshots/t/verify"), &json!({})).await.status()
}

#[tokio::test]
async fn a_request_decides_whether_a_domain_is_encrypted_and_the_settings_are_the_default() {
    let keys = tempfile::tempdir().expect("a directory");
    let file = key(&keys, 'a');
    let registry = Registry::start_with(|config| (config.key_file, config.encrypt_new_domains) = (file.clone(), true)).await;
    for (path, encrypted) in [("a", true), ("b?encrypted=true", true), ("c?encrypted=false", false)] {
        let answer = put(&registry, &format!("/v1/domains/{path}")).await;
        assert_eq!(answer.status(), StatusCode::CREATED, "{path}");
        assert_eq!(ok::<DomainInfo>(answer).await.encrypted, encrypted, "{path}");
    }
    // The same request again changes nothing. A domain stays encrypted or unencrypted.
    assert_eq!(put(&registry, "/v1/domains/c").await.status(), StatusCode::OK);
    for path in ["a?encrypted=false", "c?encrypted=true", "default?encrypted=false", "d?encrypted=perhaps", "d?encrypt=true"] {
        refused(put(&registry, &format!("/v1/domains/{path}")).await, ErrorCode::InvalidRequest).await;
    }
    let list: api::DomainList = ok(registry.get("/v1/domains").await).await;
    let seen: Vec<(&str, bool)> = list.domains.iter().map(|domain| (domain.name.as_str(), domain.encrypted)).collect();
    assert_eq!(seen, [("a", true), ("b", true), ("c", false), ("default", true)]);
    for base in ["", "/domains/a", "/domains/c"] {
        push(&registry, base).await;
        assert_eq!(verified(&registry, base).await, StatusCode::OK, "{base}");
    }
    registry.stopped().await;
    // Without a key none is made, however often a client asks.
    let registry = Registry::start().await;
    refused(put(&registry, "/v1/domains/a?encrypted=true").await, ErrorCode::InvalidRequest).await;
}

#[test]
fn settings_that_name_two_keys_or_none_are_refused() {
    let given = |overrides: Overrides| Config::load(None, Overrides { data: Some("/data".into()), ..overrides });
    let (file, command) = (Some(PathBuf::from("/key")), Some(PathBuf::from("/command")));
    let two = given(Overrides { key_file: file.clone(), key_command: command.clone(), ..Overrides::default() });
    assert!(matches!(two, Err(SettingsError::TwoKeys)));
    let none = given(Overrides { encrypt_new_domains: Some(true), old_key_file: file.clone(), ..Overrides::default() });
    assert!(matches!(none, Err(SettingsError::NoKey)));
    for one in [Overrides { key_file: file, ..Overrides::default() }, Overrides { key_command: command, ..Overrides::default() }] {
        assert!(given(Overrides { encrypt_new_domains: Some(true), ..one }).is_ok());
    }
}

#[tokio::test]
async fn without_its_key_a_domain_is_not_served_and_no_answer_names_the_key_file() {
    let keys = tempfile::tempdir().expect("a directory");
    let (right, wrong) = (key(&keys, 'a'), key(&keys, 'b'));
    let registry = Registry::start_with(|config| config.key_file = right.clone()).await;
    assert_eq!(put(&registry, "/v1/domains/acme?encrypted=true").await.status(), StatusCode::CREATED);
    push(&registry, "/domains/acme").await;
    let files = registry.stop_keeping_files().await;
    let data = files.path().join("store");
    let registry = Registry::start_again(&data, |config| config.key_file = wrong.clone()).await;
    // Other domains are served.
    push(&registry, "").await;
    let answer = problem(registry.get(&format!("/domains/acme/v1/repositories/{REPO}/tags/t")).await).await;
    assert_eq!(answer.code, ErrorCode::Unavailable);
    assert!(!answer.detail.contains(".key"), "{}", answer.detail);
    registry.stopped().await;
    let registry = Registry::start_again(&data, |config| config.key_file = right.clone()).await;
    assert_eq!(verified(&registry, "/domains/acme").await, StatusCode::OK);
    registry.stopped().await;

    // Without the key of the default domain, the registry does not start.
    let dir = tempfile::tempdir().expect("a directory");
    let with = |file: &Path| Config { key_file: file.to_owned(), encrypt_new_domains: true, ..config(&dir) };
    let registry = Registry::start_again(&dir.path().join("store"), |config| *config = with(&right)).await;
    push(&registry, "").await;
    registry.stopped().await;
    let error = Server::bind(with(&wrong)).await.err().expect("a refusal").to_string();
    assert!(error.contains("b.key") && error.contains("old-key-file") && error.contains("domain default"), "{error}");
    let registry = Registry::start_again(&dir.path().join("store"), |config| *config = with(&right)).await;
    assert_eq!(verified(&registry, "").await, StatusCode::OK);
    registry.stopped().await;
}

#[tokio::test]
async fn the_command_rewraps_all_keys_while_a_registry_serves() {
    let keys = tempfile::tempdir().expect("a directory");
    let (old, new) = (key(&keys, 'a'), key(&keys, 'b'));
    let registry = Registry::start_with(|config| config.key_file = old.clone()).await;
    for path in ["/v1/domains/one?encrypted=true", "/v1/domains/two?encrypted=true", "/v1/domains/clear"] {
        assert_eq!(put(&registry, path).await.status(), StatusCode::CREATED);
    }
    push(&registry, "/domains/one").await;
    let data = registry.dir.path().join("store");
    let run = |arguments: &[&str], files: &[(&str, &Path)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
        command.arg("domain").args(arguments).arg("--data").arg(&data);
        for (option, file) in files {
            command.arg(option).arg(file);
        }
        let output = command.output().expect("the program runs");
        let text = |bytes| String::from_utf8(bytes).expect("text");
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, said, _) = run(&["list"], &[]);
    assert_eq!((code, said.as_str()), (Some(0), "clear  live\ndefault  live\none  live, encrypted\ntwo  live, encrypted\n"));
    // Without the old key, no key is wrapped again.
    let (code, _, stderr) = run(&["rewrap"], &[("--key-file", new.as_path())]);
    assert!(code != Some(0) && stderr.contains("old-key-file"), "{stderr}");
    let both = [("--key-file", new.as_path()), ("--old-key-file", old.as_path())];
    let (code, said, stderr) = run(&["rewrap", "one"], &both);
    assert_eq!((code, said.as_str()), (Some(0), "one  rewrapped\n"), "{stderr}");
    for _ in 0..2 {
        let (code, said, stderr) = run(&["rewrap", "--json"], &both);
        let said: Value = serde_json::from_str(&said).expect("JSON");
        let expected = (&json!(["one", "two"]), &json!(["clear", "default"]));
        assert_eq!((code, (&said["domains"], &said["unencrypted"])), (Some(0), expected), "{stderr}");
    }
    assert_eq!(verified(&registry, "/domains/one").await, StatusCode::OK, "the domain is still served");
    let audit: api::AuditList = ok(registry.get("/v1/audit?limit=1000").await).await;
    let rewraps = audit.records.iter().filter(|record| record.operation == "rewrap_domain").count();
    assert_eq!(rewraps, 2, "a key that is wrapped already is not wrapped again: {audit:?}");
    let files = registry.stop_keeping_files().await;
    let registry = Registry::start_again(&files.path().join("store"), |config| config.key_file = new).await;
    assert_eq!(verified(&registry, "/domains/one").await, StatusCode::OK);
    registry.stopped().await;
}
