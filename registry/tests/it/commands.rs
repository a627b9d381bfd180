//! The command line of `pf-registry`: help, sizes, errors as JSON, and mirrors that have nothing to
//! do.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry};
use serde_json::Value;
use std::process::Command;

/// Exit code, standard output and standard error.
fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("PF_REGISTRY_")) {
        command.env_remove(name);
    }
    let output = command.args(arguments).env("PF_REGISTRY_LISTEN", "127.0.0.1:0").output().expect("the program runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("an exit code"), text(output.stdout), text(output.stderr))
}

/// Long options that a help text lists.
fn options(help: &str) -> Vec<&str> {
    let lists = |line: &&str| line.trim_start().starts_with('-');
    help.lines().filter(lists).filter_map(|line| line.split_whitespace().find_map(|word| word.strip_prefix("--"))).collect()
}

#[test]
fn the_help_of_a_tool_lists_its_own_options_and_which_store() {
    let shared = ["config", "data", "database", "storage", "help"];
    for (tool, own) in [
        ("gc", &["dry-run", "grace", "domain", "json"][..]),
        ("scrub", &["full", "rate", "heal-from", "heal-token", "domain", "json"]),
        ("fsck", &["repair", "domain", "json"]),
        ("rebuild", &["domain", "json"]),
        ("mirror", &["from", "to", "repository", "interval", "once", "delete", "json"]),
    ] {
        for flag in ["-h", "--help"] {
            let (code, stdout, stderr) = run(&[tool, flag]);
            assert_eq!(code, 0, "{stderr}");
            let mut listed = options(&stdout);
            listed.sort_unstable();
            let mut expected = [own, &shared].concat();
            expected.sort_unstable();
            assert_eq!(listed, expected, "{tool} {flag}: {stdout}");
        }
    }
    let (_, serve, _) = run(&["serve", "--help"]);
    assert!(options(&serve).contains(&"listen") && options(&serve).contains(&"max-requests"), "{serve}");
    // Options that the help leaves out are still taken: one set of variables is for all commands.
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().to_str().expect("a path");
    let (code, _, stderr) = run(&["gc", "--data", data, "--lease-seconds", "3", "--listen", "127.0.0.1:0"]);
    assert_eq!(code, 0, "{stderr}");
}

#[test]
fn the_program_alone_prints_its_help_and_usage_ignores_the_environment() {
    let (code, stdout, stderr) = run(&[]);
    assert!(code == 0 && stdout.contains("Usage: pf-registry") && stderr.is_empty(), "{stdout}{stderr}");
    let (code, _, stderr) = run(&["scrub", "--rate"]);
    assert!(code == 1 && !stderr.contains("--listen"), "{stderr}");
}

#[test]
fn a_rate_is_a_size() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().to_str().expect("a path");
    for rate in ["100MB", "64MiB", "1000000"] {
        let (code, stdout, stderr) = run(&["scrub", "--rate", rate, "--data", data]);
        assert!(code == 0 && stdout.contains("0 packs, 0 blobs, 0 B"), "{stdout}{stderr}");
    }
    assert_eq!(run(&["scrub", "--rate", "fast", "--data", data]).0, 1);
}

#[test]
fn an_error_with_json_is_one_object() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    std::fs::write(&file, b"").expect("written");
    let file = file.to_str().expect("a path");
    for (arguments, code, exit) in [
        (&["gc", "--json"][..], "invalid_request", 1),
        (&["gc", "--json", "--nonsense"], "invalid_request", 1),
        (&["scrub", "--json", "--data", file], "unavailable", 7),
        (&["mirror", "--json", "--from", "http://127.0.0.1:1", "--to", "http://127.0.0.1:1/"], "invalid_request", 1),
    ] {
        let (exited, _, stderr) = run(arguments);
        let last = stderr.lines().last().expect("a line");
        let document: Value = serde_json::from_str(last).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {stderr}"));
        assert_eq!(
            (exited, document["code"].as_str(), document["exit_code"].as_i64()),
            (exit, Some(code), Some(exit.into())),
            "{document}"
        );
        assert!(!document["message"].as_str().expect("a message").is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_has_nothing_to_do_says_so() {
    let (from, to) = (Registry::start().await, Registry::start().await);
    from.push(REPO, &snapshot(0..3, vec![]), Some("latest")).await;
    let mirror = |options: &[&str]| run(&[&["mirror"], options].concat());
    let (source, target) = (format!("http://{}", from.address), format!("http://{}", to.address));
    let (code, _, stderr) = mirror(&["--from", &source, "--to", &source]);
    assert!(code == 1 && stderr.contains("the same registry"), "{stderr}");
    let (code, stdout, stderr) = mirror(&["--from", &source, "--to", &target, "--repository", "nosuch/*", "--repository", "team/*"]);
    assert!(code == 5 && stderr.contains("nosuch/*") && !stderr.contains("team/*"), "{stderr}");
    assert!(stdout.starts_with("1 repository: 1 snapshot copied"), "what matched was copied: {stdout}");
    let (code, stdout, stderr) = mirror(&["--from", &source, "--to", &target, "--repository", "team/*"]);
    assert!(code == 0 && stdout.contains("0 snapshots copied, 1 there already"), "{stdout}{stderr}");
}
