//! Power cuts while a registry works: no acknowledged change is lost, and nothing is left over.

use crate::registry::{
    Life, recorded, recorded_domains, recorded_encrypted, recorded_in_folders_of_others, recorded_merge, recorded_summary,
};
use pfr_crash::check::{each, goes_on, is_rebuilt, run};
use pfr_crash::states::{Bound, States};
use pfr_tests::seed;
use std::path::Path;
use std::time::Instant;

/// Number of failures after which the search ends.
const SHOWN: usize = 4;

/// Whether a path belongs to the storage and not to the database.
pub fn is_storage(path: &Path) -> bool {
    !path.to_string_lossy().contains("metadata.sqlite")
}

/// Checks the states that a power cut may leave of a recorded registry, with the database and
/// rebuilt without it. Returns texts about the wrong ones, and stops after `enough` of them.
pub fn wrong(life: &Life, bound: Bound, enough: usize) -> Vec<String> {
    let begun = Instant::now();
    let states = States::of(&life.trace, bound, seed(), |_| true);
    let mut wrong = each(&states, |_| true, enough, |dir, at| run(goes_on(dir, life.keys(at), &life.history.allowed(at))));
    let opened = begun.elapsed();
    let mut rebuilt = 0;
    if wrong.len() < enough {
        let storages = States::of(&life.trace, bound, seed(), is_storage);
        rebuilt = storages.states.len();
        wrong.extend(each(&storages, is_storage, enough - wrong.len(), |dir, at| {
            run(is_rebuilt(dir, life.keys(at), &life.history.allowed_without_databases(at)))
        }));
    }
    println!(
        "{{\"operations\":{},\"syncs\":{},\"enumerated\":{},\"opened\":{},\"seconds\":{:.1},\"rebuilt\":{},\"rebuild_seconds\":{:.1},\"wrong\":{}}}",
        life.trace.ops.len(),
        life.trace.syncs().count(),
        states.enumerated,
        states.states.len(),
        opened.as_secs_f64(),
        rebuilt,
        (begun.elapsed() - opened).as_secs_f64(),
        wrong.len()
    );
    wrong
}

fn no_power_cut_harms(life: Option<Life>, bound: Bound) {
    let Some(life) = life else { return };
    let wrong = wrong(&life, bound, SHOWN);
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn no_power_cut_loses_what_was_acknowledged_or_leaves_anything_over() {
    no_power_cut_harms(recorded(), Bound::NORMAL);
}

#[test]
fn folders_that_others_made_and_did_not_sync_are_durable_too() {
    no_power_cut_harms(recorded_in_folders_of_others(), Bound::SHORT);
}

#[test]
fn no_power_cut_while_small_packs_are_merged_loses_anything() {
    no_power_cut_harms(recorded_merge(), Bound::SHORT);
}

#[test]
fn no_power_cut_while_the_journal_is_summarised_loses_anything() {
    no_power_cut_harms(recorded_summary(), Bound::SHORT);
}

#[test]
fn no_power_cut_while_domains_are_made_and_deleted_loses_one_or_leaves_anything_over() {
    no_power_cut_harms(recorded_domains(), Bound::SHORT);
}

#[test]
fn no_power_cut_loses_the_key_of_an_encrypted_domain_or_what_it_wraps() {
    no_power_cut_harms(recorded_encrypted(), Bound::SHORT);
}

mod long {
    use super::{
        Bound, no_power_cut_harms, recorded, recorded_domains, recorded_encrypted, recorded_in_folders_of_others, recorded_merge,
        recorded_summary,
    };
    use crate::registry::recorded_checkpoint;

    #[test]
    fn no_power_cut_during_a_wal_checkpoint_beside_the_writer_loses_anything() {
        no_power_cut_harms(recorded_checkpoint(), Bound::MEDIUM);
    }

    #[test]
    fn folders_that_others_made_and_did_not_sync_are_durable_too() {
        no_power_cut_harms(recorded_in_folders_of_others(), Bound::MEDIUM);
    }

    #[test]
    fn no_power_cut_while_small_packs_are_merged_loses_anything() {
        no_power_cut_harms(recorded_merge(), Bound::COARSE);
    }

    #[test]
    fn no_power_cut_while_the_journal_is_summarised_loses_anything() {
        no_power_cut_harms(recorded_summary(), Bound::COARSE);
    }

    #[test]
    fn no_power_cut_while_domains_are_made_and_deleted_loses_one_or_leaves_anything_over() {
        no_power_cut_harms(recorded_domains(), Bound::COARSE);
    }

    #[test]
    fn no_power_cut_loses_the_key_of_an_encrypted_domain_or_what_it_wraps() {
        no_power_cut_harms(recorded_encrypted(), Bound::COARSE);
    }

    #[test]
    fn no_power_cut_loses_what_was_acknowledged_or_leaves_anything_over() {
        no_power_cut_harms(recorded(), Bound::LONG);
    }
}
