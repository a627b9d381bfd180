//! Readers while others write.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn a_pull_of_a_tag_that_moves_gets_one_complete_snapshot() {
    let registry = Registry::start();
    let writer = Pf::new(&registry.url());
    let numbers = |round: u64| (0..120).map(|i| if i % 6 == 0 { 10_000 * round + i } else { i }).collect::<Vec<_>>();
    // Manifests by digest of the snapshot: what a reader may see.
    let known: Mutex<BTreeMap<String, Vec<u8>>> = Mutex::default();
    let write = |round: u64| {
        let dir = SnapshotDir::write(&writer.path(&format!("d{round}")), Shape::SMALL, &numbers(round));
        let output = writer.run(&["push", dir.arg(), "a:head"]).ok();
        let bytes = std::fs::read(dir.manifest()).unwrap();
        known.lock().unwrap().insert(output.last_line().to_owned(), bytes);
    };
    write(0);
    let done = AtomicBool::new(false);
    let seen: Mutex<Vec<(String, Vec<u8>)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let host = Pf::new(&registry.url());
                let mut round = 0;
                while !done.load(Ordering::SeqCst) || round == 0 {
                    let out = host.path(&format!("out-{round}"));
                    let output = host.run(&["pull", "a:head", out.to_str().unwrap()]).ok();
                    let manifest = std::fs::read(out.join("page_manifest.json")).unwrap();
                    seen.lock().unwrap().push((output.last_line().to_owned(), manifest));
                    host.run(&["pull", "a:head"]).ok();
                    host.run(&["verify", "--local", "a:head"]).ok();
                    host.run(&["stats", "a"]).ok();
                    round += 1;
                }
            });
        }
        // A writer that panics must not leave the readers waiting.
        let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (1..=12).for_each(&write)));
        done.store(true, Ordering::SeqCst);
        assert!(written.is_ok(), "a push failed while others read");
    });
    let (known, seen) = (known.into_inner().unwrap(), seen.into_inner().unwrap());
    println!("{} reads of {} snapshots", seen.len(), known.len());
    // One of each, however long the disk takes.
    assert!(seen.len() >= 2, "{} reads", seen.len());
    for (digest, manifest) in &seen {
        assert_eq!(known.get(digest), Some(manifest), "{digest} is nothing that was written");
    }
}

#[test]
fn equal_and_overlapping_pushes_at_once_leave_what_one_after_the_other_leaves() {
    pushes_at_once(2);
}

mod long {
    #[test]
    fn equal_and_overlapping_pushes_at_once_leave_what_one_after_the_other_leaves() {
        super::pushes_at_once(6);
    }
}

fn pushes_at_once(rounds: u64) {
    let unique = |at_once: bool, round: u64| {
        let registry = Registry::start();
        let hosts: Vec<Pf> = (0..4).map(|_| Pf::new(&registry.url())).collect();
        let write = |(i, host): (usize, &Pf)| {
            let start = [0, 0, 50, 90][i] + 1000 * round;
            SnapshotDir::write(&host.path("dir"), Shape::SMALL, &(start..start + 150).collect::<Vec<_>>())
        };
        let dirs: Vec<SnapshotDir> = hosts.iter().enumerate().map(write).collect();
        let children: Vec<_> = hosts
            .iter()
            .zip(&dirs)
            .enumerate()
            .filter_map(|(i, (host, dir))| {
                let mut child = host.command(&["push", dir.arg(), &format!("a:t{i}")]).spawn().unwrap();
                if at_once {
                    return Some(child);
                }
                assert!(child.wait().unwrap().success());
                None
            })
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let stats = hosts[0].json(&["stats"]);
        (stats["unique_bytes"].clone(), stats["logical_bytes"].clone(), hosts[0].tags("a"))
    };
    for round in 0..rounds {
        assert_eq!(unique(true, round), unique(false, round), "round {round}");
    }
}
