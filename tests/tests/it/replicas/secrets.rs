//! What the log and the errors say, and that they never contain a secret.

use pfr_testkit::s3;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, binary};
use std::process::Command;
use tempfile::TempDir;

/// Tries to start a registry that must not; its exit code and words.
fn refused(options: &[&str], environment: &[(String, String)]) -> (i32, String) {
    let dir = TempDir::new().unwrap();
    let mut command = Command::new(binary("pf-registry"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--log", "debug"]).args(options).current_dir(dir.path());
    let output = command.envs(environment.iter().map(|(n, v)| (n, v))).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    (output.status.code().unwrap_or(-1), said)
}

#[test]
fn one_line_says_what_the_storage_can_do_and_none_says_a_secret() {
    let s3 = s3::Server::shared();
    let storage = format!("s3://{}/p", s3.bucket());
    let options = ["--storage", &storage, "--redirect-downloads", "--log", "trace"];
    let registry = Registry::start_with(true, &options, &s3.env());
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..50).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    pf.run(&["pull", "a:t"]).ok();
    let log = registry.log();
    let line = log.lines().find(|line| line.contains("create_if_absent")).unwrap_or_else(|| panic!("no line about the storage: {log}"));
    for part in [storage.as_str(), "write=true", "read=true", "list=true", "delete=true", "create_if_absent=true", "signed_urls=true"] {
        assert!(line.contains(part), "{part} is not in {line}");
    }
    for text in [log, registry.metrics()] {
        assert!(!text.contains(s3::SECRET), "a secret is in {text}");
    }
}

#[test]
fn a_wrong_secret_or_bucket_stops_the_registry_with_words_that_hold_no_secret() {
    let s3 = s3::Server::shared();
    let storage = format!("s3://{}/p", s3.bucket());
    let mut environment = s3.env();
    environment.iter_mut().filter(|(name, _)| name == "AWS_SECRET_ACCESS_KEY").for_each(|(_, value)| *value = "wrong-hush".into());
    let (code, said) = refused(&["--data", "data", "--storage", &storage], &environment);
    assert_eq!(code, 7, "{said}");
    assert!(said.contains("cannot open the store") && !said.contains("wrong-hush"), "{said}");

    for options in [
        &["--data", "data", "--storage", "s3://key:hush-hush@bucket"][..],
        &["--data", "data", "--storage", "s4://hush-hush"],
        &["--data", "data", "--database", "mysql://u:hush-hush@h/d"],
        &["--storage", "s3://hush-hush"],
        &["--database", "postgres://u:hush-hush@h/d"],
        &["--data", "data", "--redirect-downloads"],
        &["--data", "data", "--redirect-downloads", "--storage", "file:///tmp"],
    ] {
        let (code, said) = refused(options, &s3.env());
        assert_eq!(code, 1, "{options:?}: {said}");
        assert!(!said.contains("hush-hush"), "{options:?}: {said}");
    }
    let (code, said) = refused(&["--storage", &storage, "--database", "postgres://user:hush-hush@127.0.0.1:1/pf"], &s3.env());
    assert!(code != 0 && !said.contains("hush-hush"), "{said}");
}
