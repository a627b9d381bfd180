//! Real registries, clients and collections, killed at random over one store: an acknowledged push
//! survives, and in the end nothing is left over.

use pfr_testkit::postgres::{self, Cluster, Durability};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, binary, files, seed, wait_for};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const REPOSITORY: &str = "team/agent";
/// Short leases and grace periods, and a collection every second: it runs into every push.
const OPTIONS: [&str; 8] = ["--lease-seconds", "3", "--gc-interval-seconds", "1", "--gc-grace-seconds", "2", "--pack-bytes", "400000"];

/// The database of the metadata.
#[derive(Clone, Copy, Debug)]
enum Database {
    /// A file in the data directory.
    Sqlite,
    /// A database on the run's server.
    Postgres,
    /// A server of the test's own, which crashes too.
    CrashingPostgres,
}

/// Storage and database of a history.
struct Place {
    /// Options that give them to every program.
    options: Vec<String>,
    /// The directory of the packs.
    packs: PathBuf,
    /// The server that crashes.
    server: Option<Cluster>,
}

impl Place {
    fn new(database: Database, home: &Path) -> Self {
        let (url, server) = match database {
            Database::Sqlite => {
                let data = home.join("data");
                return Self { options: vec!["--data".into(), text(&data)], packs: data.join("packs"), server: None };
            }
            Database::Postgres => (postgres::database(), None),
            Database::CrashingPostgres => {
                // Only its processes are killed, not the machine, so nothing needs to reach the
                // disk.
                let server = Cluster::start_with(Durability::Fast);
                (server.create_database(), Some(server))
            }
        };
        let packs = home.join("packs");
        let storage = format!("file://{}", packs.display());
        Self { options: vec!["--database".into(), url, "--storage".into(), storage], packs, server }
    }

    fn registry(&self) -> Registry {
        let options: Vec<&str> = self.options.iter().map(String::as_str).chain(OPTIONS).collect();
        Registry::start_with(false, &options, &[])
    }

    fn collection(&self, grace: &str) -> Child {
        Command::new(binary("pf-registry"))
            .args(["gc", "--grace", grace, "--lease-seconds", "3"])
            .args(&self.options)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// Files that belong to packs, without probe objects: a start that was killed may leave one,
    /// and a start an hour later removes it.
    fn left(&self) -> Vec<PathBuf> {
        let paths = files(&self.packs).into_iter().map(|(path, _)| path);
        paths.filter(|path| !path.starts_with("journal") && !path.starts_with("probe") && path != Path::new("pf-store")).collect()
    }
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

/// The digest that a push printed, if it succeeded.
fn acknowledged(child: Child) -> Option<String> {
    let output = child.wait_with_output().unwrap();
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().lines().last().unwrap().to_owned())
}

/// Kills a process, and counts it if it had not ended by itself.
fn kill(child: &mut Child) -> u64 {
    let runs = matches!(child.try_wait(), Ok(None));
    drop(child.kill());
    u64::from(runs)
}

/// Kills processes at least `kills_wanted` times.
fn survives(database: Database, kills_wanted: u64) {
    let mut random = StdRng::seed_from_u64(seed());
    let home = tempfile::tempdir().unwrap();
    let mut place = Place::new(database, home.path());
    let mut registry = place.registry();
    let hosts = [Pf::new(&registry.url()), Pf::new(&registry.url())];
    // The acknowledged digest of each tag.
    let mut told: BTreeMap<String, String> = BTreeMap::new();
    let (mut kills, mut crashes, mut acknowledgements, mut round) = (0, 0, 0, 0_u64);
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
        let mut collecting = random.random_bool(0.5).then(|| place.collection("2"));
        std::thread::sleep(Duration::from_millis(random.random_range(1..250)));
        match random.random_range(0..4) {
            0 => {}
            1 => {
                let at = random.random_range(0..2);
                kills += kill(&mut pushes[at].1);
            }
            2 => {
                if let Some(child) = &mut collecting {
                    kills += kill(child);
                }
            }
            _ => kills += pushes.iter_mut().map(|(_, child)| kill(child)).sum::<u64>(),
        }
        if let Some(server) = &mut place.server
            && random.random_bool(0.2)
        {
            server.kill9();
            server.start_again();
            kills += 1;
            crashes += 1;
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
    let mut last = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    wait_for("collection to leave nothing", 90, || {
        drop(place.collection("0").wait());
        last = place.left();
        assert!(last.is_empty() || Instant::now() < deadline, "LEAKED: {last:?}");
        last.is_empty().then_some(())
    });
    let seconds = begun.elapsed().as_secs();
    println!(
        "{{\"database\":\"{database:?}\",\"rounds\":{round},\"kills\":{kills},\"server_crashes\":{crashes},\"acknowledged\":{acknowledgements},\"lost\":0,\"corrupt\":0,\"leaked\":0,\"seconds\":{seconds}}}"
    );
    assert!(acknowledgements > 0, "no push was acknowledged: the test tests nothing");
    assert!(crashes > 0 || place.server.is_none(), "the server never crashed: the test tests nothing");
}

#[test]
fn what_was_acknowledged_survives_kills_over_sqlite_and_nothing_is_left_over() {
    survives(Database::Sqlite, 5);
}

#[test]
fn what_was_acknowledged_survives_kills_over_postgres_and_nothing_is_left_over() {
    survives(Database::Postgres, 5);
}

mod long {
    use super::{Database, survives};

    #[test]
    fn what_was_acknowledged_survives_kills_over_sqlite_and_nothing_is_left_over() {
        survives(Database::Sqlite, 300);
    }

    #[test]
    fn what_was_acknowledged_survives_kills_over_postgres_which_crashes_too_and_nothing_is_left_over() {
        survives(Database::CrashingPostgres, 300);
    }
}
