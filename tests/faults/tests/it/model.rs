//! Random histories, and planted bugs that they must catch.

use pfr_faults::case::{self, Counterexample, Counts};
use pfr_faults::world::{Database, Plant};
use pfr_tests::seed;

const WAVES: u64 = 40;
/// Histories of a normal run, if they show enough.
const LEAST: u64 = 3;
/// Histories that must show enough.
const HISTORIES: u64 = 8;

fn play(database: Database, seed: u64, plant: Option<Plant>) -> Result<Counts, Counterexample> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(case::play(database, seed, WAVES, plant))
}

/// Whether enough of each kind has happened.
fn is_telling(total: &Counts) -> bool {
    total.acknowledged > 100
        && total.cut > 10
        && total.crashes > 10
        && total.rebuilds > 0
        && total.flipped > 0
        && total.events > 100
        && total.expired > 0
}

/// Plays `count` histories with consecutive seeds, and more until they have `rounds` operations and
/// enough of each kind, which [`HISTORIES`] must have.
fn histories(database: Database, count: u64, rounds: u64) {
    let (first, mut played, mut total) = (seed(), 0, Counts::default());
    while played < count || total.rounds < rounds || (played < HISTORIES && !is_telling(&total)) {
        let seed = first.wrapping_add(played);
        match play(database, seed, None) {
            Ok(counts) => total.add(&counts),
            Err(failure) => panic!("repeat with PF_SEED={seed}\n{failure}"),
        }
        played += 1;
    }
    println!("{played} histories from seed {first}: {}", serde_json::to_string(&total).unwrap());
    assert!(is_telling(&total), "{total:?}");
}

#[test]
fn random_histories_lose_nothing_and_leave_nothing_over() {
    histories(Database::Sqlite, LEAST, 0);
}

mod long {
    use super::{Database, HISTORIES, Plant, caught, histories};

    const ROUNDS: u64 = 10_000;

    #[test]
    fn random_histories_over_sqlite_lose_nothing_and_leave_nothing_over() {
        histories(Database::Sqlite, HISTORIES, ROUNDS);
    }

    #[test]
    fn random_histories_over_postgres_lose_nothing_and_leave_nothing_over() {
        histories(Database::Postgres, HISTORIES, ROUNDS);
    }

    /// Few histories read a pack at the moment when it is deleted, so this test plays many of them.
    #[test]
    fn packs_that_are_deleted_without_a_grace_period_are_caught() {
        caught(Plant::NoGrace, 100..400);
    }
}

fn caught(plant: Plant, mut seeds: std::ops::Range<u64>) {
    let found = seeds.find_map(|seed| play(Database::Sqlite, seed, Some(plant)).err().map(|failure| (seed, failure.what)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{plant:?} was not caught"));
    println!("{plant:?} was caught by seed {seed}: {what}");
}

#[test]
fn a_missing_fsync_is_caught() {
    caught(Plant::NoFsync, 1..20);
}

#[test]
fn a_collection_that_ignores_leases_is_caught() {
    caught(Plant::NoLeases, 1..20);
}
