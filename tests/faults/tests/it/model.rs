//! Random histories, and planted bugs that they must catch.

use pfr_faults::case::{self, Counts, Failure};
use pfr_faults::world::{Database, Plant};
use std::time::{Duration, Instant};

const WAVES: u64 = 40;

fn play(seed: u64, plant: Option<Plant>) -> Result<Counts, Failure> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(case::play(Database::Sqlite, seed, WAVES, plant))
}

/// `PF_SEED` names the first seed; without it every run plays others.
fn first_seed() -> u64 {
    std::env::var("PF_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| u64::from(std::process::id()) << 16)
}

#[test]
fn random_histories_lose_nothing_and_leave_nothing_over() {
    let (first, begun) = (first_seed(), Instant::now());
    let mut total = Counts::default();
    for seed in first.. {
        match play(seed, None) {
            Ok(counts) => total.add(&counts),
            Err(failure) => panic!("repeat with PF_SEED={seed}\n{failure}"),
        }
        if begun.elapsed() > Duration::from_secs(45) {
            break;
        }
    }
    println!("first seed {first}: {}", serde_json::to_string(&total).unwrap());
    assert!(total.acknowledged > 100 && total.cut > 10 && total.crashes > 10 && total.rebuilds > 0 && total.flipped > 0, "{total:?}");
}

fn caught(plant: Plant, mut seeds: std::ops::Range<u64>) {
    let found = seeds.find_map(|seed| play(seed, Some(plant)).err().map(|failure| (seed, failure.what)));
    let (seed, what) = found.unwrap_or_else(|| panic!("{plant:?} was not caught"));
    println!("{plant:?} was caught by seed {seed}: {what}");
}

#[test]
fn a_missing_fsync_is_caught() {
    caught(Plant::NoFsync, 1..20);
}

#[test]
fn leases_that_do_not_hold_are_caught() {
    caught(Plant::NoLeases, 1..20);
}

#[test]
fn packs_that_go_without_a_horizon_are_caught() {
    caught(Plant::NoHorizon, 100..400);
}
