//! The command line of `pf-registry`: help, sizes, errors as JSON, and mirrors that have nothing to
//! do.

use crate::common::snapshot::snapshot;
use crate::common::{REPO, Registry};
use pfr_schema::AccessToken;
use pfr_store::{Options, Store};
use serde_json::Value;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

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

#[tokio::test]
async fn the_help_of_a_tool_lists_its_own_options_and_which_store() {
    let shared = ["config", "data", "database", "storage", "help"];
    for (tool, own) in [
        ("gc", &["dry-run", "grace", "domain", "json"][..]),
        ("scrub", &["full", "rate", "heal-from", "heal-token", "domain", "json"]),
        ("fsck", &["repair", "domain", "json"]),
        ("rebuild", &["domain", "json"]),
        ("health", &["live", "json"]),
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
    let dir = data().await;
    let data = dir.path().to_str().expect("a path");
    let (code, _, stderr) = run(&["gc", "--data", data, "--lease-seconds", "3", "--listen", "127.0.0.1:0"]);
    assert_eq!(code, 0, "{stderr}");
}

#[tokio::test]
async fn tokens_are_made_listed_and_revoked_on_the_database() {
    let dir = data().await;
    let data = dir.path().to_str().expect("a path");
    let (code, stdout, stderr) = run(&[
        "token",
        "create",
        "--data",
        data,
        "--label",
        "robot",
        "--scope",
        "team/*:push,pull",
        "--scope",
        "a:delete",
        "--expires-in",
        "2d",
    ]);
    assert!(code == 0 && stderr.is_empty(), "{stderr}");
    let token = AccessToken::parse(stdout.trim_end()).expect("a token, and nothing else");
    let (code, stdout, _) =
        run(&["token", "create", "--data", data, "--label", "x\u{202e}", "--scope", "*:admin", "--domain", "default", "--json"]);
    let made: Value = serde_json::from_str(&stdout).expect("JSON");
    let other = AccessToken::parse(made["token"].as_str().expect("text")).expect("a token");
    assert_eq!((code, made["info"]["id"].as_str(), made["info"]["domain"].as_str()), (0, Some(other.id().as_str()), Some("default")));

    let (_, list, _) = run(&["token", "list", "--data", data]);
    let line = list.lines().next().expect("a line");
    assert!(line.starts_with(token.id().as_str()) && line.contains("never used") && line.contains("expires 2"), "{list}");
    assert!(line.ends_with("all domains  team/*:pull,push a:delete  robot"), "{list}");
    assert!(list.ends_with("domain default  *:admin  x\\u{202e}\n"), "what is not seen is shown: {list}");
    for named in [token.id().as_str(), token.expose()] {
        let (code, stdout, _) = run(&["token", "revoke", "--data", data, named]);
        assert_eq!((code, stdout), (0, format!("revoked  {} (robot)\n", token.id())), "once more changes nothing");
    }
    let (_, list, _) = run(&["token", "list", "--data", data, "--json"]);
    assert!(!list.contains(&token.expose()[21..85]) && !list.contains("hash"), "{list}");
    let list: Value = serde_json::from_str(&list).expect("JSON");
    assert!(list["tokens"][0]["revoked_at"].as_str().is_some_and(|at| at.starts_with('2')), "{list}");
    assert_eq!(list["tokens"].as_array().map(Vec::len), Some(2));

    for (args, exits, says) in [
        (&["token", "revoke", "--data", data, "0123456789abcdef"][..], 5, "no access token"),
        (&["token", "revoke", "--data", data, "robot"], 1, "16 lower-case hex digits"),
        (&["token", "create", "--data", data, "--label", "x", "--scope", "*"], 1, "team/*:pull,push"),
        (&["token", "create", "--data", data, "--label", "x"], 1, "--scope"),
        (&["token", "create", "--data", data, "--label", "x", "--scope", "*:pull", "--expires-in", "1M"], 1, "minutes"),
        (&["token", "create", "--data", data, "--label", "x", "--scope", "*:pull", "--domain", "nowhere"], 5, "nowhere"),
        (&["token", "list", "--data", "/nonexistent"], 5, "no store"),
    ] {
        let (code, stdout, stderr) = run(args);
        assert!(code == exits && stdout.is_empty() && stderr.contains(says), "{args:?}: {code}: {stderr}");
    }
}

#[test]
fn errors_are_reported_as_pf_reports_its_own() {
    let dir = tempfile::tempdir().expect("a directory");
    let data = dir.path().to_str().expect("a path");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let listen = taken.local_addr().expect("an address").to_string();
    let (code, _, stderr) = run(&["serve", "--data", data, "--listen", &listen]);
    let says = format!("error: cannot listen on {listen}: ");
    assert!(code == 1 && stderr.contains(&says) && stderr.contains("\n  hint: another process listens there"), "{code}: {stderr}");
    let new = dir.path().join("new");
    let (code, _, stderr) = run(&["serve", "--data", new.to_str().expect("a path"), "--listen", &listen]);
    assert!(code == 1 && stderr.contains(&says) && !new.exists(), "{code}: {stderr}");
    let (code, _, stderr) = run(&["serve", "--data", data, "--listen", "localhost"]);
    assert!(code == 1 && stderr.contains("such as 127.0.0.1:5077") && !stderr.contains("syntax"), "{code}: {stderr}");
    let (code, _, stderr) = run(&["token", "list", "--data", "/nonexistent", "--json"]);
    let document: Value = serde_json::from_str(stderr.lines().last().expect("a line")).expect("JSON");
    assert_eq!((code, document["code"].as_str()), (5, Some("not_found")), "{stderr}");
}

#[test]
fn only_the_help_of_a_server_says_that_the_directory_is_made() {
    let words = |text: String| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
    let says = |arguments: &[&str]| words(run(arguments).1).contains("Made if it does not exist");
    assert!(says(&["serve", "--help"]));
    for tool in [&["token", "create", "--help"][..], &["domain", "list", "--help"], &["gc", "--help"], &["fsck", "--help"]] {
        assert!(!says(tool), "{tool:?}");
    }
}

#[test]
fn the_program_alone_prints_its_help_and_usage_ignores_the_environment() {
    let (code, stdout, stderr) = run(&[]);
    assert!(code == 0 && stdout.contains("Usage: pf-registry") && stderr.is_empty(), "{stdout}{stderr}");
    let (code, _, stderr) = run(&["scrub", "--rate"]);
    assert!(code == 1 && !stderr.contains("--listen"), "{stderr}");
}

/// A data directory with a store that holds nothing.
async fn data() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    drop(Store::open(dir.path(), Options::default()).await.expect("a store"));
    dir
}

#[tokio::test]
async fn a_variable_that_is_no_setting_is_named_in_the_log() {
    let dir = data().await;
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf-registry"));
    command.arg("gc").env_clear().env("PF_REGISTRY_DATA", dir.path());
    let stderr = |command: &mut Command| {
        let output = command.output().expect("the program runs");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{stderr}");
        stderr
    };
    command.env("PF_REGISTRY_UPSTREAM_TOKEN", "hush").env("PF_REGISTRY_SERVICE_HOST", "10.0.0.1");
    let said = stderr(&mut command);
    assert!(!said.contains("environment variables"), "{said}");
    let said = stderr(command.env("PF_REGISTRY_GC_GRACE", "7"));
    let warning = "these environment variables are no settings and have no effect";
    assert!(said.contains(warning) && said.contains("PF_REGISTRY_GC_GRACE") && !said.contains("UPSTREAM"), "{said}");
}

#[tokio::test]
async fn a_rate_is_a_size() {
    let dir = data().await;
    let data = dir.path().to_str().expect("a path");
    for rate in ["100MB", "64MiB", "1000000"] {
        let (code, stdout, stderr) = run(&["scrub", "--rate", rate, "--data", data]);
        assert!(code == 0 && stdout.contains("0 packs, 0 blobs, 0 B"), "{stdout}{stderr}");
    }
    for (rate, says) in [("fast", "expected a size"), ("100", "expected 64.0 KiB a second or more")] {
        let (code, _, stderr) = run(&["scrub", "--rate", rate, "--data", data]);
        assert!(code == 1 && stderr.contains(says), "{stderr}");
    }
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
        (&["serve", "--json", "--data", file], "unavailable", 7),
        (&["serve", "--json", "--nonsense"], "invalid_request", 1),
        (&["health", "--json", "--listen", "127.0.0.1:1"], "unavailable", 7),
        (&["health", "--json", "--listen", "nowhere"], "invalid_request", 1),
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

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("permissions");
}

/// Every command as a user to whom a folder, or only the database in it, is closed.
#[tokio::test]
async fn what_is_not_permitted_has_exit_code_6() {
    const NOBODY: u32 = 65_534;
    let dir = tempfile::tempdir().expect("a directory");
    set_mode(dir.path(), 0o755);
    // The folder that the program is built in may be closed to the other user.
    let program = dir.path().join("pf-registry");
    std::fs::copy(env!("CARGO_BIN_EXE_pf-registry"), &program).expect("a copy");
    let [closed, unreadable, other] = ["closed", "unreadable", "other"].map(|name| dir.path().join(name));
    for data in [&closed, &unreadable, &other] {
        drop(Store::open(data, Options::default()).await.expect("a store"));
    }
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    if is_root {
        for data in [&unreadable, &other] {
            for entry in std::fs::read_dir(data).expect("a directory").flatten() {
                chown(entry.path(), Some(NOBODY), Some(NOBODY)).expect("another owner");
            }
            chown(data, Some(NOBODY), Some(NOBODY)).expect("another owner");
        }
    }
    set_mode(&unreadable.join("metadata.sqlite"), 0o000);
    set_mode(&closed, 0o000);
    let (below, storage) = (closed.join("new"), format!("file://{}/packs", closed.display()));
    let [closed_data, below, unreadable_data, other] = [&closed, &below, &unreadable, &other].map(|path| path.display().to_string());
    for arguments in [
        &["serve", "--data", &closed_data][..],
        &["serve", "--data", &below],
        &["serve", "--data", &unreadable_data],
        &["rebuild", "--data", &closed_data],
        &["rebuild", "--data", &below],
        &["gc", "--data", &closed_data],
        &["fsck", "--data", &unreadable_data],
        &["scrub", "--data", &unreadable_data],
        &["gc", "--data", &other, "--storage", &storage],
    ] {
        let mut command = Command::new(&program);
        command.args(arguments).env_clear().env("PF_REGISTRY_LISTEN", "127.0.0.1:0").current_dir("/");
        if is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command.output().expect("the program runs");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(6) && stderr.contains("ermi"), "{arguments:?}: {:?} {stderr}", output.status);
        // No report of a run that has not begun.
        assert!(arguments[0] == "serve" || output.stdout.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    }
    set_mode(&closed, 0o755);
}

/// A mistyped `--data` would pass for a store that holds nothing, and a mirror of it empties its
/// target.
#[tokio::test(flavor = "multi_thread")]
async fn a_tool_refuses_a_folder_without_a_store_and_makes_nothing_there() {
    let (target, dir) = (Registry::start().await, tempfile::tempdir().expect("a directory"));
    target.push(REPO, &snapshot(0..3, vec![]), Some("latest")).await;
    let url = format!("http://{}", target.address);
    let [absent, empty, lost] = ["absent", "empty", "lost"].map(|name| dir.path().join(name));
    std::fs::create_dir(&empty).expect("a directory");
    std::fs::create_dir_all(lost.join("packs")).expect("a directory");
    for (data, says) in [(&absent, "--data"), (&empty, "--data"), (&lost, "`pf-registry rebuild`")] {
        let before = data.exists().then(|| std::fs::read_dir(data).expect("a directory").count());
        let path = data.to_str().expect("a path");
        for arguments in [
            &["gc", "--data", path][..],
            &["fsck", "--data", path],
            &["scrub", "--data", path],
            &["mirror", "--to", &url, "--data", path, "--delete"],
        ] {
            let (code, stdout, stderr) = run(arguments);
            assert!(code == 5 && stdout.is_empty() && stderr.contains(says), "{arguments:?}: {code} {stdout}{stderr}");
        }
        if data != &lost {
            let (code, _, stderr) = run(&["rebuild", "--data", path]);
            assert!(code == 5 && stderr.contains("packs"), "{code} {stderr}");
        }
        assert_eq!(data.exists().then(|| std::fs::read_dir(data).expect("a directory").count()), before, "{path}");
    }
    // A store that holds nothing is a source for a mirror that deletes nothing.
    let nothing = data().await;
    let mirror = ["mirror", "--to", &url, "--data", nothing.path().to_str().expect("a path")];
    let (code, _, stderr) = run(&[&mirror[..], &["--delete"]].concat());
    assert!(code == 1 && stderr.contains("the right source"), "{code} {stderr}");
    assert_eq!(run(&mirror).0, 0);
    assert_eq!(target.get(&format!("/v1/repositories/{REPO}/tags/latest")).await.status(), 200);
}

/// The same for the directory of the packs, where the tables are elsewhere.
#[tokio::test]
async fn a_tool_refuses_a_storage_that_is_not_there_and_makes_nothing_there() {
    let (store, dir) = (data().await, tempfile::tempdir().expect("a directory"));
    let [absent, new] = ["absent", "new"].map(|name| dir.path().join(name).display().to_string());
    let (data, storage) = (store.path().to_str().expect("a path"), format!("file://{absent}"));
    // Nothing asks the database before the packs are there.
    let database = "postgres://nobody@127.0.0.1:1/nothing";
    for (which, says) in [
        (&["--data", data, "--storage", &storage][..], "--storage"),
        (&["--database", database, "--storage", &storage], "--storage"),
        (&["--database", database, "--data", &absent], "--data"),
    ] {
        for tool in [&["gc"][..], &["fsck"], &["scrub"], &["mirror", "--to", "http://127.0.0.1:1", "--delete"], &["rebuild"]] {
            let (code, stdout, stderr) = run(&[tool, which].concat());
            assert!(code == 5 && stdout.is_empty() && stderr.contains(says), "{tool:?} {which:?}: {code} {stdout}{stderr}");
        }
    }
    let (code, _, stderr) = run(&["rebuild", "--data", &new, "--storage", &storage]);
    assert!(code == 5 && stderr.contains("--storage"), "{code} {stderr}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("a directory").count(), 0, "a refused tool made something");
    // An empty directory is the storage of a store that got no pack yet.
    std::fs::create_dir(&absent).expect("a directory");
    assert_eq!(run(&["gc", "--data", data, "--storage", &storage]).0, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_has_nothing_to_do_says_so() {
    let (from, to) = (Registry::start().await, Registry::start().await);
    from.push(REPO, &snapshot(0..3, vec![]), Some("latest")).await;
    let mirror = |options: &[&str]| run(&[&["mirror"], options].concat());
    let (source, target) = (format!("http://{}", from.address), format!("http://{}", to.address));
    for (same, more) in [(source.clone(), &[][..]), (format!("{source}/domains/default/"), &["--interval", "3600"][..])] {
        let (code, stdout, stderr) = mirror(&[&["--from", &source, "--to", &same][..], more].concat());
        assert!(code == 1 && stdout.is_empty() && stderr.contains("the same registry"), "{stdout}{stderr}");
    }
    let (code, stdout, stderr) = mirror(&["--from", &source, "--to", &target, "--repository", "nosuch/*", "--repository", "team/*"]);
    assert!(code == 5 && stderr.contains("nosuch/*") && !stderr.contains("team/*"), "{stderr}");
    assert!(stdout.starts_with("1 repository: 1 snapshot copied"), "what matched was copied: {stdout}");
    let (code, stdout, stderr) = mirror(&["--from", &source, "--to", &target, "--repository", "team/*"]);
    assert!(code == 0 && stdout.contains("0 snapshots copied, 1 there already"), "{stdout}{stderr}");
}
