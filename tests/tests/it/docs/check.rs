//! `./check` says what it can run, and starts nothing that it does not know.

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
