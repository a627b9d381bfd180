//! One registry for a data directory; tools beside it.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, binary};
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

fn run(command: &str, data: &Path, options: &[&str]) -> Output {
    let mut program = Command::new(binary("pf-registry"));
    program.arg(command).args(options).arg("--data").arg(data).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_second_registry_and_a_rebuild_are_refused_on_a_data_directory_in_use_and_tools_are_not() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[1, 2, 3]);
    pf.run(&["push", dir.arg(), "a:b"]).ok();
    for (command, options) in [("serve", &["--listen", "127.0.0.1:0"][..]), ("rebuild", &[])] {
        let output = run(command, registry.data(), options);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        let named = [registry.data().to_str().unwrap(), &format!("process {}", registry.pid())].iter().all(|word| said.contains(word));
        assert!(named && said.contains("is in use"), "{command}: {said}");
    }
    for (command, options) in [("gc", &["--grace", "0"][..]), ("fsck", &[]), ("scrub", &["--full"])] {
        let output = run(command, registry.data(), options);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
    pf.run(&["verify", "a:b"]).ok();
}

#[test]
fn a_registry_over_the_storage_of_another_one_says_so_and_what_to_do() {
    let (registry, other) = (Registry::start(), tempfile::tempdir().unwrap());
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[1, 2, 3]);
    pf.run(&["push", dir.arg(), "a:b"]).ok();
    let storage = format!("file://{}", registry.data().join("packs").display());
    let output = run("serve", other.path(), &["--listen", "127.0.0.1:0", "--storage", &storage]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    for words in
        ["If another registry uses this storage, two databases cannot share it", "a storage of its own", "while nothing else uses it"]
    {
        assert!(said.contains(words), "{said}");
    }
}

#[test]
fn a_start_waits_for_a_process_that_is_about_to_end() {
    let mut registry = Registry::start();
    registry.kill();
    let dir = std::fs::File::open(registry.data()).unwrap();
    dir.lock().unwrap();
    let mut program = Command::new(binary("pf-registry"));
    program.args(["serve", "--listen", "127.0.0.1:0", "--data"]).arg(registry.data()).stdin(Stdio::null());
    let mut started = program.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(started.stderr.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.find(|line| line.contains("another process holds the lock; waiting"));
    assert!(said.is_some_and(|line| line.contains(registry.data().to_str().unwrap())), "it says for what it waits");
    dir.unlock().unwrap();
    let mut ready = String::new();
    BufReader::new(started.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert!(ready.starts_with("listening on "), "{ready}");
    started.kill().unwrap();
    started.wait().unwrap();
}

#[test]
fn a_repair_beside_pushes_and_deletions_changes_nothing_that_is_right() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let pushes = scope.spawn(|| {
            for number in 0..12 {
                let dir = SnapshotDir::write(&pf.path(&format!("dir-{number}")), Shape::TINY, &[number, number + 1, 100]);
                pf.run(&["push", dir.arg(), &format!("a:t{number}")]).ok();
                if number % 3 == 2 {
                    pf.run(&["rm", &format!("a:t{}", number - 1)]).ok();
                    pf.run(&["prune", "a", "--untagged"]).ok();
                    pf.run(&["gc"]).ok();
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let mut repairs = 0;
        while !stop.load(Ordering::Relaxed) && !pushes.is_finished() {
            let output = run("fsck", registry.data(), &["--repair", "--json"]);
            let said = String::from_utf8_lossy(&output.stdout);
            // Rows that a push or a collection is changing must not be taken for wrong, or they
            // would be corrected.
            assert!(output.status.success() && said.contains("\"wrong\":0"), "{said}{}", String::from_utf8_lossy(&output.stderr));
            repairs += 1;
        }
        pushes.join().unwrap();
        assert!(repairs > 1, "the repairs did not run beside the pushes");
    });
    for number in [0, 2, 3, 5, 6, 8, 9, 11] {
        pf.run(&["verify", &format!("a:t{number}")]).ok();
    }
}

#[test]
fn the_lock_ends_with_the_process_that_holds_it() {
    let mut registry = Registry::start();
    let pf = Pf::new(&registry.url());
    for number in 0..3 {
        let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[number]);
        pf.run(&["push", dir.arg(), "a:b"]).ok();
        registry.restart();
    }
    registry.kill();
    let output = run("rebuild", registry.data(), &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("the database is not empty"), "it is not in use, only not lost: {said}");
}
