//! The same test over every pair of metadata and storage.

use super::backend::{Backend, Database, Packs, assert_same};
use pfr_tests::{Pf, Shape, SnapshotDir};

fn everyday_use(database: Database, packs: Packs) {
    let backend = Backend::new(database, packs);
    let mut registry = backend.registry(&[]);
    let pf = Pf::new(&registry.url());
    let first = SnapshotDir::write(&pf.path("first"), Shape::SMALL, &(0..700).collect::<Vec<_>>());
    let digest = pf.run(&["push", first.arg(), "team/agent:base"]).ok().last_line().to_owned();
    let second = SnapshotDir::write(&pf.path("second"), Shape::SMALL, &(20..720).collect::<Vec<_>>());
    let pushed = pf.json(&["push", second.arg(), "team/agent:next"]);
    let new = pushed["sent_bytes"].as_u64().unwrap();
    assert!(new < 60 * Shape::SMALL.page_bytes() as u64, "20 of 700 pages are new, {new} bytes were sent: {pushed}");
    pf.run(&["fork", "team/agent:base", "-n", "3", "--prefix", "try"]).ok();
    pf.run(&["tag", "team/agent:next", "best"]).ok();
    // Acknowledged changes are not only in the process, or only in its directory.
    registry.restart();
    let other = Pf::new(&registry.url());
    let tags = other.tags("team/agent");
    assert_eq!(tags.keys().map(String::as_str).collect::<Vec<_>>(), ["base", "best", "next", "try-1", "try-2", "try-3"]);
    assert_eq!(tags["try-2"], digest);
    for (tag, dir) in [("try-3", &first), ("best", &second)] {
        let reference = format!("team/agent:{tag}");
        other.run(&["pull", &reference, other.path(tag).to_str().unwrap()]).ok();
        assert_same(&other.path(tag), &dir.path);
        other.run(&["verify", &reference]).ok();
    }
    let stats = other.json(&["stats"]);
    let page = 2 * Shape::SMALL.page_bytes() as u64;
    let unique = stats["unique_bytes"].as_u64().unwrap();
    assert!(unique >= 720 * page && unique < 721 * page + (1 << 18), "720 pages of {page} bytes, unique is {unique}");
}

#[test]
fn sqlite_and_a_directory() {
    everyday_use(Database::Sqlite, Packs::Directory);
}

#[test]
fn sqlite_and_a_bucket() {
    everyday_use(Database::Sqlite, Packs::Bucket);
}

#[test]
fn postgres_and_a_directory() {
    everyday_use(Database::Postgres, Packs::Directory);
}

#[test]
fn postgres_and_a_bucket() {
    everyday_use(Database::Postgres, Packs::Bucket);
}
