//! `--json`: one set of field names, moments as RFC 3339, and errors as JSON; exit codes for
//! permissions and full disks.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, push_dir};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// The one JSON object on standard error.
fn error(dir: &Path, args: &[&str]) -> (i32, Value) {
    let (code, stdout, stderr) = pf(dir, args);
    assert_eq!((stdout.as_str(), stderr.lines().count()), ("", 1), "{args:?}: {stderr}");
    (code, serde_json::from_str(&stderr).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_is_one_json_object_with_code_message_hint_and_exit_code() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let url = registry.url.as_str();
    for (args, code, exit) in [
        (&["ls", "no/such"][..], "repository_unknown", 5),
        (&["inspect", "team/agent:absent"], "tag_unknown", 5),
        (
            &["tag", "team/agent:a", "b", "--if-tag-is", "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"],
            "tag_moved",
            3,
        ),
        (&["rm", "team/agent"], "invalid_request", 1),
        (&["frobnicate"], "invalid_request", 1),
        (&["push"], "invalid_request", 1),
        (&["login"], "invalid_request", 1),
        (&["inspect", "Upper/Case"], "invalid_request", 1),
        (&["ls", "--local"], "not_found", 5),
        (&["engines", "--agent", "/nonexistent/agent.sock"], "unavailable", 7),
    ] {
        let (exited, document) = error(dir.path(), &[args, &["--json", "--registry", url]].concat());
        assert_eq!(
            (exited, document["exit_code"].as_i64(), document["code"].as_str()),
            (exit, Some(exit.into()), Some(code)),
            "{document}"
        );
        assert!(!document["message"].as_str().unwrap().is_empty(), "{document}");
        assert!(document["hint"].as_str().is_none_or(|hint| !hint.is_empty()), "{document}");
    }
    let (exit, document) = error(dir.path(), &["ls", "--json", "--registry", "http://127.0.0.1:1", "--retries", "0"]);
    assert_eq!((exit, document["code"].as_str()), (7, Some("unavailable")));
    assert!(document["message"].as_str().unwrap().contains("tried once"), "{document}");
}

/// Every name of a field, and its value.
fn fields<'a>(value: &'a Value, found: &mut Vec<(&'a str, &'a Value)>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| fields(item, found)),
        Value::Object(object) => {
            for (name, value) in object {
                found.push((name, value));
                // Stored documents have the names of their formats.
                if !["manifest", "config", "trees"].contains(&name.as_str()) {
                    fields(value, found);
                }
            }
        }
        _ => {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_end_in_bytes_and_moments_are_rfc_3339_in_every_command() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let source = directory(SMALL, &[1, 2, 3]);
    let (url, source) = (registry.url.as_str(), source.path().to_str().unwrap());
    let mut seen = Vec::new();
    for args in [
        &["push", source, "team/agent:a"][..],
        &["push", source, "team/agent:b", "--parent", ":a"],
        &["pull", "team/agent:a"],
        &["ls"],
        &["ls", "team/agent"],
        &["ls", "--local"],
        &["ls", "--local", "--pinned"],
        &["log", "team/agent:b"],
        &["inspect", "team/agent:a"],
        &["diff", "team/agent:a", ":b"],
        &["stats"],
        &["stats", "--local", "team/agent"],
        &["verify", "team/agent:a"],
        &["verify", "--local"],
        &["gc", "--dry-run"],
        &["gc", "--local"],
        &["scrub"],
        &["scrub", "--local", "--rate", "100MB"],
        &["prune", "*", "--keep-last", "5", "--dry-run"],
        &["fork", "team/agent:a", "-n", "2"],
        &["rm", "team/agent:a-fork-1"],
    ] {
        let (code, stdout, stderr) = pf(dir.path(), &[args, &["--json", "--registry", url]].concat());
        assert_eq!(code, 0, "{args:?}: {stderr}");
        let value: Value = serde_json::from_str(&stdout).unwrap();
        let mut found = Vec::new();
        fields(&value, &mut found);
        for (name, value) in found {
            assert!(!name.starts_with("bytes_") && !name.contains("_bytes_"), "{args:?}: {name}");
            let bare = ["logical", "new", "shared", "exclusive", "unique", "stored", "disk"];
            assert!(!bare.contains(&name), "{args:?}: {name} has no unit");
            if name.ends_with("_at") && !value.is_null() {
                let text = value.as_str().unwrap_or_else(|| panic!("{args:?}: {name} is {value}"));
                assert!(text.len() == 24 && text.starts_with("20") && text.ends_with('Z') && &text[10..11] == "T", "{text}");
            }
            seen.push(name.to_owned());
        }
    }
    for name in [
        "pushed_at",
        "updated_at",
        "finished_at",
        "logical_bytes",
        "new_bytes",
        "sent_bytes",
        "received_bytes",
        "disk_bytes",
        "shared_bytes",
    ] {
        assert!(seen.iter().any(|seen| seen == name), "no {name}");
    }
}

/// `pf` as a user that may do nothing here.
fn unprivileged(program: &Path, dir: &Path, args: &[&str]) -> (i32, String) {
    let mut command = Command::new(program);
    command.env_clear().env("HOME", "/nonexistent").current_dir("/").args(args).stdin(Stdio::null());
    if rustix::process::geteuid().is_root() {
        command.uid(65_534).gid(65_534);
    }
    let output = command.output().unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_permitted_has_exit_code_6() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let open = |mode| std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(mode)).unwrap();
    // The program must be within reach of the other user; the directory that it is built in may not
    // be.
    let program = dir.path().join("pf");
    std::fs::copy(env!("CARGO_BIN_EXE_pf"), &program).unwrap();
    let closed = dir.path().join("closed");
    std::fs::create_dir_all(closed.join("packs")).unwrap();
    std::fs::write(closed.join("metadata.sqlite"), b"").unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (closed_store, new_store, new_dir) = (path("closed"), path("closed/new"), path("closed/out"));
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
    open(0o755);
    for args in [
        &["ls", "--local", "--store", &closed_store][..],
        &["pull", "team/agent:a", "--store", &new_store, "--registry", &registry.url],
        &["pull", "team/agent:a", &new_dir, "--store", "/nonexistent", "--registry", &registry.url],
        &["push", &closed_store, "team/agent:b", "--registry", &registry.url],
    ] {
        let (code, stderr) = unprivileged(&program, dir.path(), args);
        assert!(code == 6 && stderr.contains("ermi"), "{args:?}: {code} {stderr}");
        let (code, stderr) = unprivileged(&program, dir.path(), &[args, &["--json"]].concat());
        let document: Value = serde_json::from_str(&stderr).unwrap();
        assert_eq!((code, document["code"].as_str()), (6, Some("denied")), "{document}");
    }
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o755)).unwrap();
}
