//! A program that leaves out a sync is caught. Its trace is that of the real program without those
//! syncs.

use crate::registry::{Life, recorded};
use crate::store::wrong;
use pfr_crash::states::Bound;
use pfr_crash::trace::{Action, Op, Synced, Trace};
use std::collections::BTreeMap;
use std::path::Path;

/// What a path stands for: names of packs, of their folders and of objects of the journal are
/// random.
fn class(path: &Path, synced: Synced) -> String {
    let text = path.to_string_lossy().into_owned();
    let parts: Vec<&str> = text.split('/').collect();
    let what = match synced {
        Synced::All => return "everything".into(),
        Synced::Directory(_) => "names in",
        Synced::File(_) => "bytes of",
    };
    let place = match parts[..] {
        [""] => "the root".to_owned(),
        ["data", "packs", "journal"] => text.clone(),
        ["data", "packs", "journal", _] => "data/packs/journal/OBJECT".to_owned(),
        ["data", "packs", folder] if folder.len() == 2 => "data/packs/FOLDER".to_owned(),
        ["data", "packs", folder, _] if folder.len() == 2 => "data/packs/FOLDER/PACK".to_owned(),
        ["data", "domains", _, "packs"] => "data/domains/NAME/packs".to_owned(),
        ["data", "packs", marker] if marker.starts_with("pf-store") => "data/packs/pf-store".to_owned(),
        _ => text.clone(),
    };
    format!("{what} {place}")
}

/// Syncs of the log that `PRAGMA synchronous = NORMAL` leaves out: all but the last ones before the
/// database is written.
fn of_commits_only(trace: &Trace) -> Vec<usize> {
    let mut left_out = Vec::new();
    let mut last = None;
    for (at, op) in trace.ops.iter().enumerate() {
        match op.action {
            Action::Sync(_) if op.path.ends_with("metadata.sqlite-wal") => left_out.extend(last.replace(at)),
            Action::Write { .. } if op.path.ends_with("metadata.sqlite") => last = None,
            _ => {}
        }
    }
    left_out.extend(last);
    left_out
}

fn without(life: &Life, dropped: impl Fn(usize, &str) -> bool) -> Vec<String> {
    let trace = life.trace.without_syncs(|at, path, synced| dropped(at, &class(path, synced)));
    wrong(&Life { trace, history: life.history.clone(), files: life.files.clone() }, Bound::COARSE, 1)
}

#[test]
fn a_missing_sync_of_the_names_of_packs_or_of_the_log_is_caught() {
    let Some(life) = recorded() else { return };
    let normal = of_commits_only(&life.trace);
    assert!(normal.len() > 5, "{normal:?}");
    let found = without(&life, |_, class| class == "names in data/packs/FOLDER");
    println!("without the sync of the names of packs: {}", found.first().expect("it is not caught"));
    let found = without(&life, |at, _| normal.contains(&at));
    println!("with synchronous = NORMAL: {}", found.first().expect("synchronous = NORMAL is not caught"));
}

mod long {
    use super::*;
    use crate::registry::{recorded_checkpoint, recorded_domains, recorded_encrypted, recorded_merge, recorded_summary};

    #[test]
    fn a_missing_sync_is_caught_in_each_kind_of_work() {
        for (life, missing) in [
            (recorded_checkpoint(), "bytes of data/metadata.sqlite"),
            (recorded_merge(), "bytes of data/packs/FOLDER/PACK"),
            (recorded_summary(), "bytes of data/packs/journal/OBJECT"),
            (recorded_domains(), "names in data/domains/NAME/packs"),
        ] {
            let Some(life) = life else { continue };
            let found = without(&life, |_, class| class == missing);
            println!("without the sync of the {missing}: {}", found.first().unwrap_or_else(|| panic!("{missing}: not caught")));
        }
    }

    /// A rebuild would take the domain for one without a key, and find nothing in it.
    #[test]
    fn a_wrapped_key_that_goes_before_the_marker_is_caught() {
        let Some(mut life) = recorded_encrypted() else { return };
        let removal = |name: &str| {
            let is_removal = |op: &Op| matches!(op.action, Action::Name { node: None, .. }) && op.path.ends_with(name);
            life.trace.ops.iter().position(is_removal).unwrap_or_else(|| panic!("{name} is not removed"))
        };
        let (marker, key) = (removal("domains/acme/packs/pf-store"), removal("domains/acme/packs/pf-key"));
        assert!(marker < key, "{marker} {key}");
        life.trace.ops.swap(marker, key);
        let found = wrong(&life, Bound { most: usize::MAX, ..Bound::COARSE }, 1);
        println!("with the key before the marker: {}", found.first().expect("it is not caught"));
    }

    /// Syncs whose need the states that are opened may not show, and why they are made.
    const UNSHOWN: [(&str, &str); 2] = [
        ("bytes of data/metadata.sqlite-journal", "SQLite writes it while it makes the database: few of the states show it"),
        ("bytes of data/packs/pf-store", "the marker is found by its name; an id that it lost comes back from the tables"),
    ];

    #[test]
    fn every_sync_is_needed() {
        let Some(life) = recorded() else { return };
        let mut classes: BTreeMap<String, usize> = BTreeMap::new();
        for (_, path, synced) in life.trace.syncs() {
            *classes.entry(class(path, synced)).or_default() += 1;
        }
        let mut unshown = Vec::new();
        for (missing, count) in &classes {
            let found = without(&life, |_, class| class == missing);
            println!("{count:4} × {missing}: {}", found.first().and_then(|words| words.lines().next()).unwrap_or("not shown to be needed"));
            if found.is_empty() {
                unshown.push(missing.as_str());
            }
        }
        unshown.retain(|class| !UNSHOWN.iter().any(|(may, _)| may == class));
        assert!(unshown.is_empty(), "no state shows that these are needed: {unshown:?}");
    }
}
