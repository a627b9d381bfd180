//! Several registries over one database and one bucket: no leader, no state of their own.

use super::backend::{Backend, Database, Packs, assert_same};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, seed, wait_for};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use std::time::Duration;

const HOSTS: usize = 6;

/// Whether the registry has begun to take in what a push sends.
fn receiving(registry: &Registry) -> bool {
    registry.metric("pf_frames_received_bytes_total") > 0.0
}

fn overlapping_pushes(rounds: usize) {
    let mut random = StdRng::seed_from_u64(seed());
    let backend = Backend::new(Database::Postgres, Packs::Bucket);
    let mut registries: Vec<Registry> = (0..3).map(|_| backend.registry(&[])).collect();
    for round in 0..rounds {
        let hosts: Vec<Pf> = (0..HOSTS).map(|i| Pf::new(&registries[i % 3].url())).collect();
        // Neighbours share most of their pages; hosts 0 and 5 push the same through different
        // registries.
        let start = |host: usize| (1000 * round + 60 * (host % 5)) as u64;
        let dirs: Vec<SnapshotDir> = (0..HOSTS)
            .map(|i| SnapshotDir::write(&hosts[i].path("dir"), Shape::SMALL, &(start(i)..start(i) + 400).collect::<Vec<_>>()))
            .collect();
        let tag = |i: usize| format!("team/agent:r{round}-h{i}");
        let pushes: Vec<_> =
            (0..HOSTS).map(|i| hosts[i].command(&["push", dirs[i].arg(), &tag(i), "--retries", "30"]).spawn().unwrap()).collect();
        let victim = random.random_range(0..3);
        wait_for("the victim to receive", 60, || receiving(&registries[victim]).then_some(()));
        std::thread::sleep(Duration::from_millis(random.random_range(0..80)));
        registries[victim].restart();
        for push in pushes {
            let output = push.wait_with_output().unwrap();
            assert!(output.status.success(), "round {round}: {}", String::from_utf8_lossy(&output.stderr));
        }
        for (i, dir) in dirs.iter().enumerate() {
            // Through another registry than the one that took it.
            let reader = Pf::new(&registries[(i + 1) % 3].url());
            reader.run(&["pull", &tag(i), reader.path("out").to_str().unwrap()]).ok();
            assert_same(&reader.path("out"), &dir.path);
        }
    }
    let views: Vec<serde_json::Value> = registries.iter().map(|registry| Pf::new(&registry.url()).visible()).collect();
    assert!(views.windows(2).all(|pair| pair[0] == pair[1]), "registries see different things");
    assert_eq!(views[0].as_array().unwrap().len(), rounds * (HOSTS - 1), "each snapshot once");
    let pf = Pf::new(&registries[0].url());
    for i in 0..HOSTS {
        pf.run(&["verify", &format!("team/agent:r{}-h{i}", rounds - 1)]).ok();
    }
}

#[test]
fn overlapping_pushes_through_three_registries_one_of_them_killed_are_whole_through_any() {
    overlapping_pushes(1);
}

mod long {
    #[test]
    fn overlapping_pushes_through_three_registries_one_of_them_killed_are_whole_through_any() {
        super::overlapping_pushes(20);
    }
}

#[test]
fn of_many_that_move_a_tag_through_different_registries_exactly_one_wins() {
    let backend = Backend::new(Database::Postgres, Packs::Bucket);
    let registries: Vec<Registry> = (0..3).map(|_| backend.registry(&[])).collect();
    let pf = Pf::new(&registries[0].url());
    let first = SnapshotDir::write(&pf.path("first"), Shape::TINY, &[0]);
    let at = pf.run(&["push", first.arg(), "a:t"]).ok().last_line().to_owned();
    let hosts: Vec<Pf> = (0..6).map(|i| Pf::new(&registries[i % 3].url())).collect();
    let dirs: Vec<SnapshotDir> = (0..6).map(|i| SnapshotDir::write(&hosts[i].path("dir"), Shape::TINY, &[1 + i as u64])).collect();
    let pushes: Vec<_> = (0..6).map(|i| hosts[i].command(&["push", dirs[i].arg(), "a:t", "--if-tag-is", &at]).spawn().unwrap()).collect();
    let mut winners = Vec::new();
    for push in pushes {
        let output = push.wait_with_output().unwrap();
        match output.status.code() {
            Some(0) => winners.push(String::from_utf8_lossy(&output.stdout).lines().last().unwrap().to_owned()),
            Some(3) => {}
            other => panic!("{other:?}: {}", String::from_utf8_lossy(&output.stderr)),
        }
    }
    assert_eq!(winners.len(), 1, "{winners:?}");
    for registry in &registries {
        assert_eq!(Pf::new(&registry.url()).tags("a")["t"], winners[0]);
    }
}

#[test]
fn a_task_paused_through_one_registry_is_paused_in_all_and_after_a_restart() {
    let backend = Backend::new(Database::Postgres, Packs::Bucket);
    let mut registries: Vec<Registry> = (0..2).map(|_| backend.registry(&["--gc-interval-seconds", "1"])).collect();
    let runs = |registry: &Registry, task: &str| registry.metric(&format!("pf_task_runs_total{{task=\"{task}\"}}"));
    wait_for("the second to collect", 60, || (runs(&registries[1], "collection") > 0.0).then_some(()));
    let output = Pf::new(&registries[0].url()).run(&["tasks", "pause", "collection", "--for", "1h"]).ok();
    assert!(output.stdout.contains("collection is paused until"), "{output:?}");
    registries[1].restart();
    let second = Pf::new(&registries[1].url());
    wait_for("the other tasks to go on", 60, || (runs(&registries[1], "compaction") > 2.0).then_some(()));
    assert_eq!(runs(&registries[1], "collection"), 0.0, "a restart does not end a pause");
    let task = second.json(&["tasks"])["tasks"][0].clone();
    assert_eq!((&task["name"], &task["state"]), (&"collection".into(), &"paused".into()));
    assert!(task["pause_ends_at"].as_str().is_some_and(|end| end.ends_with('Z')), "{task}");
    second.run(&["tasks", "resume", "collection"]).ok();
    wait_for("the second to collect again", 60, || (runs(&registries[1], "collection") > 0.0).then_some(()));
    let unknown = second.run(&["tasks", "pause", "other"]);
    assert!(unknown.code == 5 && unknown.stderr.contains("pf tasks"), "{unknown:?}");
}
