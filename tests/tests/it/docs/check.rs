//! `./check` says what it can run, starts nothing that it does not know, and ends with what was
//! slow.

use super::page::root;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

fn check(arguments: &[&str]) -> (Option<i32>, String, String) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../check");
    let Output { status, stdout, stderr } = Command::new(script).args(arguments).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn check_prints_its_usage_when_asked_for_it() {
    for word in ["--help", "-h", "help"] {
        let (code, stdout, stderr) = check(&[word]);
        assert_eq!((code, stderr.as_str()), (Some(0), ""), "{word}");
        for said in ["usage: ./check", "quick ", "all ", "long ", "real-engine ", "PF_BASE", "PF_SEED"] {
            assert!(stdout.contains(said), "{word}: no {said:?} in {stdout}");
        }
    }
}

#[test]
fn check_refuses_a_word_that_it_does_not_know() {
    for (words, says) in [(&["typo"][..], "there is no \"typo\""), (&["quick", "all"], "one word at most, found: quick all")] {
        let (code, stdout, stderr) = check(words);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{words:?}: {stderr}");
        assert!(stderr.contains(says) && stderr.contains("usage: ./check"), "{words:?}: {stderr}");
    }
}

/// Writes a program that prints nothing and ends well, after it has run `script`.
fn program(folder: &Path, name: &str, script: &str) {
    std::fs::write(folder.join(name), format!("#!/bin/sh\n{script}\nexit 0\n")).unwrap();
    std::fs::set_permissions(folder.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// How nextest ends if the tests do not compile: it runs none and writes nothing.
const NOT_BUILT: i32 = 101;

/// Runs `./check MODE` with a `cargo` whose tests end with `code`, and everything else it needs.
fn check_with_tests_that_end(mode: &str, code: i32) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    let (programs, target) = (dir.path().join("bin"), dir.path().join("target"));
    std::fs::create_dir_all(target.join("debug")).unwrap();
    std::fs::create_dir(&programs).unwrap();
    let times: String = (1..=12).map(|n| format!("<testcase name=\"n{n}\" time=\"{n}.5\"/>")).collect();
    let report = format!("<testsuites time=\"20\"><testsuite name=\"pfr-x\">{times}</testsuite></testsuites>");
    let profile = if mode == "all" { "default" } else { mode };
    let folder = target.join("nextest").join(profile);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("junit.xml"), "of an earlier run").unwrap();
    let file = folder.join("junit.xml");
    program(
        &programs,
        "cargo",
        &format!("[ \"$1\" != nextest ] || {{ [ {code} = {NOT_BUILT} ] || echo '{report}' >{}; exit {code}; }}", file.display()),
    );
    for name in ["cc", "c++", "clippy-driver", "cargo-nextest", "cargo-deny", "git", "initdb"] {
        program(&programs, name, "");
    }
    program(&target.join("debug"), "pf-rig", "shift 2; exec \"$@\"");
    let mut command = Command::new(root().join("check"));
    command.arg(mode).env("PATH", format!("{}:{}", programs.display(), std::env::var("PATH").unwrap()));
    let output = command.env("CARGO_TARGET_DIR", &target).env("PF_TEST_WEED", "/bin/true").output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap())
}

#[test]
fn check_ends_with_the_ten_slowest_tests_and_what_it_found() {
    if !super::has_python() {
        return pfr_tests::skip("python", "tests/slowest is written in Python");
    }
    for (mode, code, says) in [("quick", 0, "all passed"), ("quick", 100, "FAILED in \"tests of "), ("all", 100, "FAILED in \"tests\"")] {
        let (status, output) = check_with_tests_that_end(mode, code);
        assert_eq!(status, Some(code), "{mode}: {output}");
        let lines: Vec<&str> = output.lines().collect();
        let begin = lines.iter().position(|line| line.starts_with("12 tests in 20 s")).unwrap_or_else(|| panic!("{mode}: {output}"));
        assert!(lines[begin + 1].ends_with("12.5 s  pfr-x  n12") && lines[begin + 10].ends_with("3.5 s  pfr-x  n3"), "{mode}: {output}");
        // Then the seconds of each step, and the end.
        assert_eq!(lines[begin + 11], "", "{mode}: {output}");
        assert!(lines[begin + 12..].iter().all(|line| line.contains(" s  ")), "{mode}: {output}");
        assert!(lines.last().unwrap().contains(says), "{mode}: {output}");
    }
}

#[test]
fn check_says_nothing_of_the_tests_of_an_earlier_run() {
    for mode in ["quick", "all"] {
        let (status, output) = check_with_tests_that_end(mode, NOT_BUILT);
        assert!(status == Some(NOT_BUILT) && output.contains("FAILED in \"tests"), "{mode}: {output}");
        assert!(!output.contains("slowest"), "{mode}: {output}");
    }
}

#[test]
fn the_page_on_testing_names_every_step_of_the_long_run_alone() {
    let check = std::fs::read_to_string(root().join("check")).unwrap();
    let page = std::fs::read_to_string(root().join("docs/testing.md")).unwrap();
    let (_, table) = page.split_once("| left out of the normal run |").unwrap();
    let table = table.split("\n\n").next().unwrap();
    let (mut long, mut titles) = (false, 0);
    for line in check.lines() {
        // Blocks of the outermost level alone: others are within one of these.
        match line {
            "if [ \"$mode\" = long ]; then" => long = true,
            "fi" => long = false,
            _ => {}
        }
        let Some(title) = line.trim_start().strip_prefix("step \"").and_then(|rest| rest.split('"').next()).filter(|_| long) else {
            continue;
        };
        titles += 1;
        assert!(table.contains(&format!("| {title}")), "docs/testing.md does not say that the normal run lacks {title:?}");
    }
    assert!(titles >= 10, "{titles} steps found");
}
