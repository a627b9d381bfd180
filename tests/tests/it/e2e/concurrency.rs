//! Concurrent pushes, moves of tags, and hosts with one local store.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir};

#[test]
fn overlapping_and_equal_pushes_at_once_all_succeed_and_are_stored_once() {
    overlapping_pushes(2);
}

mod long {
    #[test]
    fn overlapping_and_equal_pushes_at_once_all_succeed_and_are_stored_once() {
        super::overlapping_pushes(4);
    }
}

fn overlapping_pushes(rounds: u64) {
    for round in 0..rounds {
        let registry = Registry::start();
        let hosts: Vec<Pf> = (0..4).map(|_| Pf::new(&registry.url())).collect();
        // Hosts 0 and 1 push the same; 2 and 3 overlap with it and with each other.
        let starts = [0, 0, 100, 150];
        let dirs: Vec<SnapshotDir> = hosts
            .iter()
            .zip(starts)
            .map(|(host, start)| {
                SnapshotDir::write(&host.path("dir"), Shape::SMALL, &(start + 1000 * round..start + 1000 * round + 300).collect::<Vec<_>>())
            })
            .collect();
        let children: Vec<_> = hosts
            .iter()
            .zip(&dirs)
            .enumerate()
            .map(|(i, (host, dir))| host.command(&["push", dir.arg(), &format!("team/agent:t{i}")]).spawn().unwrap())
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        let stats = hosts[0].json(&["stats"]);
        let pages = 450 * 2 * Shape::SMALL.page_bytes() as u64;
        let unique = stats["unique_bytes"].as_u64().unwrap();
        assert!(unique >= pages && unique < pages + (1 << 19), "450 pages are {pages} bytes, unique is {unique}");
        assert_eq!(stats["snapshots"].as_array().unwrap().len(), 3);
        for (i, host) in hosts.iter().enumerate() {
            host.run(&["verify", &format!("team/agent:t{i}")]).ok();
        }
    }
}

#[test]
fn of_many_that_move_a_tag_from_one_state_exactly_one_wins() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let first = SnapshotDir::write(&pf.path("first"), Shape::TINY, &[0]);
    let mut at = pf.run(&["push", first.arg(), "a:t"]).ok().last_line().to_owned();
    for round in 0..3_u64 {
        let dirs: Vec<SnapshotDir> =
            (0..8_u64).map(|i| SnapshotDir::write(&pf.path(&format!("d{round}-{i}")), Shape::TINY, &[1 + round * 10 + i])).collect();
        let children: Vec<_> =
            dirs.iter().map(|dir| pf.command(&["push", dir.arg(), "a:t", "--if-tag-is", &at]).spawn().unwrap()).collect();
        let mut winners = Vec::new();
        for child in children {
            let output = child.wait_with_output().unwrap();
            match output.status.code() {
                Some(0) => winners.push(String::from_utf8_lossy(&output.stdout).lines().last().unwrap().to_owned()),
                Some(3) => {}
                other => panic!("{other:?}: {}", String::from_utf8_lossy(&output.stderr)),
            }
        }
        assert_eq!(winners.len(), 1, "{winners:?}");
        assert_eq!(pf.tags("a")["t"], winners[0]);
        at.clone_from(&winners[0]);
    }
    assert_eq!(pf.visible().as_array().unwrap().len(), 4, "losers leave no snapshot");
}

#[test]
fn two_hosts_share_one_local_store() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    for i in 0..4_u64 {
        let dir = SnapshotDir::write(&pf.path(&format!("d{i}")), Shape::SMALL, &(i * 20..i * 20 + 60).collect::<Vec<_>>());
        pf.run(&["push", dir.arg(), &format!("a:t{i}")]).ok();
    }
    let host = Pf::new(&registry.url());
    let children: Vec<_> = (0..4).map(|i| host.command(&["pull", &format!("a:t{i}")]).spawn().unwrap()).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    host.run(&["verify", "--local"]).ok();
}
