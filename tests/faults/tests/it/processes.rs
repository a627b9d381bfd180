//! Real registries, clients and collections, killed at random over one directory: what a client was told survives, and in the end nothing is left over.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, binary, files, seed, wait_for};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const REPOSITORY: &str = "team/agent";
/// Short leases and horizons, and a collection every second: it runs into every push.
const OPTIONS: [&str; 8] = ["--lease-seconds", "3", "--gc-interval-seconds", "1", "--gc-horizon-seconds", "2", "--pack-bytes", "400000"];

fn collection(data: &Path, horizon: &str) -> Child {
    Command::new(binary("pf-registry"))
        .args(["gc", "--horizon", horizon, "--lease-seconds", "3", "--data"])
        .arg(data)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The digest that a push printed, if it ended well.
fn acknowledged(child: Child) -> Option<String> {
    let output = child.wait_with_output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().lines().last().unwrap().to_owned())
}

/// Strikes at least so many kills.
fn survives(kills_wanted: u64) {
    let mut random = StdRng::seed_from_u64(seed());
    let home = tempfile::tempdir().unwrap();
    let data = home.path().join("data");
    let mut registry = Registry::over(&data, &OPTIONS);
    let hosts = [Pf::new(&registry.url()), Pf::new(&registry.url())];
    // By tag: the digest of which a client was told.
    let mut told: BTreeMap<String, String> = BTreeMap::new();
    let (mut kills, mut acknowledgements, mut round) = (0, 0, 0_u64);
    let begun = Instant::now();
    while kills < kills_wanted {
        round += 1;
        let mut pushes = Vec::new();
        for (i, host) in hosts.iter().enumerate() {
            let mut numbers: Vec<u64> = (0..60).collect();
            for _ in 0..20 {
                let at = random.random_range(0..60);
                numbers[at] = random.random_range(0..2_000);
            }
            let dir = SnapshotDir::write(&host.path("dir"), Shape::SMALL, &numbers);
            let tag = format!("t{round}-{i}");
            let reference = format!("{REPOSITORY}:{tag}");
            pushes.push((tag, host.command(&["push", dir.arg(), &reference, "--quiet"]).spawn().unwrap()));
        }
        let mut collecting = random.random_bool(0.5).then(|| collection(&data, "2"));
        std::thread::sleep(Duration::from_millis(random.random_range(1..250)));
        match random.random_range(0..4) {
            0 => {}
            1 => {
                drop(pushes[random.random_range(0..2)].1.kill());
                kills += 1;
            }
            2 => {
                if let Some(child) = &mut collecting {
                    drop(child.kill());
                    kills += 1;
                }
            }
            _ => {
                pushes.iter_mut().for_each(|(_, child)| drop(child.kill()));
                kills += 2;
            }
        }
        if random.random_bool(0.7) {
            registry.restart();
            kills += 1;
        }
        for (tag, child) in pushes {
            if let Some(digest) = acknowledged(child) {
                acknowledgements += 1;
                told.insert(tag, digest);
            }
        }
        if let Some(mut child) = collecting {
            drop(child.wait());
        }
        let tags = hosts[0].tags(REPOSITORY);
        for (tag, digest) in &told {
            assert_eq!(tags.get(tag), Some(digest), "round {round}: LOST {tag}");
            hosts[0].run(&["verify", &format!("{REPOSITORY}@{digest}")]).ok();
        }
        // A few at a time are kept: the others become garbage.
        while told.len() > 4 {
            let tag = told.keys().nth(random.random_range(0..told.len())).unwrap().clone();
            let digest = told.remove(&tag).unwrap();
            let others = told.values().any(|other| *other == digest);
            if !others {
                hosts[0].run(&["rm", &format!("{REPOSITORY}@{digest}")]).ok();
            }
        }
    }
    for digest in told.values() {
        let out = hosts[1].path(&format!("out-{}", &digest[7..19]));
        hosts[1].run(&["pull", &format!("{REPOSITORY}@{digest}"), out.to_str().unwrap()]).ok();
    }
    let tags = hosts[0].tags(REPOSITORY);
    let mut digests: Vec<&String> = tags.values().collect();
    digests.sort();
    digests.dedup();
    for digest in digests {
        hosts[0].run(&["rm", &format!("{REPOSITORY}@{digest}")]).ok();
    }
    let packs = data.join("packs");
    let left = || {
        files(&packs)
            .into_iter()
            .map(|(path, _)| path)
            .filter(|path| !path.starts_with("journal") && path != Path::new("pf-store"))
            .collect::<Vec<_>>()
    };
    let mut last = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    wait_for("collection to leave nothing", 90, || {
        drop(collection(&data, "0").wait());
        last = left();
        assert!(last.is_empty() || Instant::now() < deadline, "LEAKED: {last:?}");
        last.is_empty().then_some(())
    });
    let seconds = begun.elapsed().as_secs();
    println!(
        "{{\"rounds\":{round},\"kills\":{kills},\"acknowledged\":{acknowledgements},\"lost\":0,\"corrupt\":0,\"leaked\":0,\"seconds\":{seconds}}}"
    );
    assert!(acknowledgements > 0, "no push was acknowledged: the test tests nothing");
}

#[test]
fn what_was_acknowledged_survives_kills_of_everything_and_nothing_is_left_over() {
    survives(8);
}

mod long {
    #[test]
    fn what_was_acknowledged_survives_kills_of_everything_and_nothing_is_left_over() {
        super::survives(300);
    }
}
