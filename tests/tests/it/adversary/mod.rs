//! A registry that gives false answers, a network that cuts at the worst byte, a directory that is
//! a trap: no wrong bytes ever become visible.

mod cuts;
mod lies;
mod readers;
mod titles;
mod traps;

use pfr_tests::{Pf, files};
use std::path::Path;

/// Asserts that two directories hold the same files, without printing their contents.
fn same_files(found: &Path, expected: &Path, what: &str) {
    let (found, expected) = (files(found), files(expected));
    assert!(!expected.is_empty(), "{what}: there is nothing to compare with");
    let names = |files: &[(std::path::PathBuf, Vec<u8>)]| files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&found), names(&expected), "{what}");
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        assert!(found == expected, "{what}: {} differs", name.display());
    }
}

/// Asserts that a failed pull leaves nothing that looks like a snapshot.
fn nothing_published(host: &Pf, out: &Path, what: &str) {
    for name in ["page_manifest.json", "snapshot.json", "config.json"] {
        assert!(!out.join(name).exists(), "{what}: {name} was published");
    }
    let local = host.run(&["ls", "--local", "--json"]);
    if local.code == 0 {
        assert_eq!(local.json()["repositories"], serde_json::json!([]), "{what}: the local store shows something");
    }
}
