//! `--json`: one set of field names, moments as RFC 3339, and errors as JSON; exit codes for
//! permissions and full disks.

use crate::common::agent::{Answer, agent, captured, push as agent_push, warmed};
use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, commands, pf, push_dir};
use pfr_schema::signature::PublicKey;
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// The flags that say which registry a command means. The capture agent has its own.
fn at<'a>(args: &[&str], url: &'a str) -> Vec<&'a str> {
    // Of the statistics, it is not the socket of an agent.
    if args.contains(&"--agent") && args[0] != "stats" { Vec::new() } else { vec!["--registry", url] }
}

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
        let (exited, document) = error(dir.path(), &[args, &["--json"], &at(args, url)[..]].concat());
        assert_eq!(
            (exited, document["exit_code"].as_i64(), document["code"].as_str()),
            (exit, Some(exit.into()), Some(code)),
            "{document}"
        );
        assert!(!document["message"].as_str().unwrap().is_empty(), "{document}");
        assert_eq!(document["retryable"], false, "{document}");
        assert!(document["hint"].as_str().is_none_or(|hint| !hint.is_empty()), "{document}");
    }
    let (_, document) = error(dir.path(), &["engines", "--agent", "/nonexistent/agent.sock", "--json"]);
    assert!(document["hint"].as_str().unwrap().starts_with("`pf-agent serve` starts one; --agent, PF_AGENT_SOCKET,"), "{document}");
    let (exit, document) = error(dir.path(), &["ls", "--json", "--registry", "http://127.0.0.1:1", "--retries", "0"]);
    assert_eq!((exit, document["code"].as_str(), &document["retryable"]), (7, Some("unavailable"), &json!(true)));
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

/// Commands that write no result of their own as JSON, or one for each event.
const WITHOUT: [&str; 5] = ["completions", "demo", "events", "help", "login"];

/// Answers every request that `pf` makes to an agent.
fn answering(socket: &Path) {
    let digest = pfr_schema::Digest::sha256(b"x");
    agent(socket, move |request| {
        Answer::Json(match request {
            "GET /v1/engines" => json!({"engines": [{
                "engine": "e", "state": {"state": "ready"}, "verbs": [], "world": 1, "deployment": {}, "fingerprint": digest,
                "groups": ["g"], "mapped_bytes": 1, "snapshots": 1, "restores": 0,
            }]}),
            "GET /v1/engines/e/sequences" => json!({
                "sequences": [{"id": "s", "state": "running", "tokens": 4, "boundary": 3}],
                "saves": [{"ticket": "t", "engine": "e", "sequence": "s", "reference": "team/agent:y", "state": "pending"}],
            }),
            "GET /v1/pushes" => json!({"pushes": [agent_push("done")]}),
            "POST /v1/engines/e/snapshots" => captured("done"),
            "POST /v1/engines/e/restores" => json!({
                "digest": digest, "engine": "e", "boundary": 3, "tokens": 4, "pages": 1, "bytes_pulled": 1, "bytes_written": 1,
                "values_computed": 0, "values_attested": 0, "oracle": false, "total_seconds": 0.1,
            }),
            "GET /v1/restores?limit=100" => json!({"restores": [
                {"engine": "e", "noted_at": 951_782_400_123_u64, "outcome": "not-taken", "reason": "fill-late", "requests": 2},
            ]}),
            // A job of both kinds: this agent does not read what it is asked for.
            "POST /v1/jobs" | "GET /v1/jobs/1" => {
                let mut job = warmed("done");
                job["drain"] = json!({
                    "plan": [{"engine": "e", "sequence": "s", "reference": "team/e:s", "boundary": 3, "bytes": 10}],
                    "done": [captured("done")], "failed": [], "bytes": 10, "recompute_tokens": 3,
                });
                job
            }
            "GET /v1/jobs" => json!({"jobs": [warmed("done")]}),
            "DELETE /v1/jobs/1" => warmed("cancelled"),
            _ => return Answer::Problem(404, "not_found", "no such resource"),
        })
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_end_in_bytes_and_moments_are_rfc_3339_in_every_command() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let source = directory(SMALL, &[1, 2, 3]);
    let (url, source) = (registry.url.as_str(), source.path().to_str().unwrap());
    let socket = dir.path().join("agent.sock");
    answering(&socket);
    let tokens = dir.path().join("tokens.json");
    std::fs::write(&tokens, "[1, 2, 3]").unwrap();
    let policies = dir.path().join("policies.json");
    std::fs::write(&policies, r#"{"policies": [{"name": "all", "repositories": "*", "max_age_seconds": 1}]}"#).unwrap();
    let (key, signing) = (dir.path().join("a.key"), dir.path().join("signing.json"));
    std::fs::write(
        &signing,
        json!({"policies": [{"name": "v", "repositories": "*", "tags": ["v*"], "keys": [PublicKey::new([1; 32])]}]}).to_string(),
    )
    .unwrap();
    let (key, signing) = (key.to_str().unwrap(), signing.to_str().unwrap());
    let public = format!("{key}.pub");
    let (agent, tokens, policies) = (socket.to_str().unwrap(), tokens.to_str().unwrap(), policies.to_str().unwrap());
    let fingerprint = pfr_schema::Digest::sha256(b"f").to_string();
    let layout = dir.path().join("layout");
    let layout = layout.to_str().unwrap();
    let mut seen = Vec::new();
    let mut without = commands(dir.path());
    assert!(without.len() > 25 && WITHOUT.iter().all(|command| without.remove(*command)), "{without:?}");
    for args in [
        &["push", source, "team/agent:a"][..],
        &["push", source, "team/agent:b", "--parent", ":a"],
        &["pull", "team/agent:a"],
        &["copy", "team/agent:a", "team/copy"],
        &["export", "team/agent:a", "team/agent:b", layout],
        &["import", layout],
        &["ls"],
        &["ls", "team/agent"],
        &["ls", "--local"],
        &["pin", "--local", "team/agent:a"],
        &["ls", "--local", "--pinned"],
        &["tag", "team/agent:a", "c"],
        &["tag", "team/agent:a", "c", "--local"],
        &["log", "team/agent:b"],
        &["inspect", "team/agent:a"],
        &["diff", "team/agent:a", ":b"],
        &["stats"],
        &["stats", "--local", "team/agent"],
        &["stats", "team/agent", "--below", "a"],
        &["stats", "team/agent", "--local", "--agent", "nobody"],
        &["stats", "--agent", "nobody"],
        &["stats", "--local", "--agent", "nobody"],
        &["df"],
        &["df", "--local"],
        &["verify", "team/agent:a"],
        &["verify", "--local"],
        &["gc", "--dry-run"],
        &["gc", "--local"],
        &["scrub"],
        &["scrub", "--local", "--rate", "100MB"],
        &["tasks"],
        &["tasks", "pause", "compaction", "--for", "1h"],
        &["tasks", "resume", "compaction"],
        &["keygen", key],
        &["sign", "team/agent:a", "--key", key],
        &["sign", "team/agent:a", "--key", key, "--local"],
        &["verify", "team/agent:a", "--key", &public],
        &["inspect", "team/agent:a"],
        &["signing"],
        &["signing", "set", signing],
        &["retention"],
        &["retention", "set", policies],
        &["retention", "run", "--dry-run"],
        &["prune", "*", "--keep-last", "5", "--dry-run"],
        &["fork", "team/agent:a", "-n", "2"],
        &["match", "team/agent", "--tokens", tokens, "--fingerprint", &fingerprint],
        &["rm", "team/agent:a-fork-1", "--dry-run"],
        &["rm", "team/agent:a-fork-1"],
        &["engines", "--agent", agent],
        &["engines", "--fleet"],
        &["sequences", "e", "--agent", agent],
        &["snapshot", "e", "team/agent:y", "--push", "wait", "--agent", agent],
        &["restore", "team/agent:y", "e", "--agent", agent],
        &["restores", "--agent", agent],
        &["pushes", "--agent", agent],
        &["logout"],
        &["drain", "team/evacuated", "--agent", agent],
        &["warm", "team/agent:y", "--agent", agent],
        &["warm", "team/*", "--plan", "--agent", agent],
        &["jobs", "--agent", agent],
        &["jobs", "cancel", "1", "--agent", agent],
    ] {
        without.remove(args[0]);
        let (code, stdout, stderr) = pf(dir.path(), &[args, &["--json"], &at(args, url)[..]].concat());
        // No snapshot here has tokens. The document says so, too.
        assert_eq!(code, if args[0] == "match" { 5 } else { 0 }, "{args:?}: {stderr}");
        let value: Value = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {stdout}"));
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
    assert!(without.is_empty(), "no case for these commands of `pf --help`: {without:?}");
    for name in [
        "pushed_at",
        "signed_at",
        "updated_at",
        "finished_at",
        "logical_bytes",
        "new_bytes",
        "sent_bytes",
        "received_bytes",
        "disk_bytes",
        "shared_bytes",
        "pause_ends_at",
        "garbage_bytes",
        "mapped_bytes",
        "resident_bytes",
        "pulled_bytes",
        "total_bytes",
        "started_at",
        "noted_at",
        "keep_ends_at",
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
    let socket = path("closed/agent.sock");
    let _agent = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o000)).unwrap();
    open(0o755);
    for args in [
        &["ls", "--local", "--store", &closed_store][..],
        &["pull", "team/agent:a", "--store", &new_store, "--registry", &registry.url],
        &["pull", "team/agent:a", &new_dir, "--store", "/nonexistent", "--registry", &registry.url],
        &["push", &closed_store, "team/agent:b", "--registry", &registry.url],
        &["engines", "--agent", &socket],
    ] {
        let (code, stderr) = unprivileged(&program, dir.path(), args);
        assert!(code == 6 && stderr.contains("ermi"), "{args:?}: {code} {stderr}");
        let (code, stderr) = unprivileged(&program, dir.path(), &[args, &["--json"]].concat());
        let document: Value = serde_json::from_str(&stderr).unwrap();
        assert_eq!((code, document["code"].as_str()), (6, Some("denied")), "{document}");
    }
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o755)).unwrap();
}
