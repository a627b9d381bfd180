//! A registry that lies, a network that cuts at the worst byte, a directory that is a trap: nothing wrong is ever published.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs, reason = "a test that cannot go on should stop and say where")]

mod cuts;
mod liar;
mod lies;
mod readers;
mod titles;
mod traps;

use pfr_tests::Pf;
use std::path::Path;

/// What a failed pull must leave behind: nothing that anybody could take for a snapshot.
fn nothing_published(host: &Pf, out: &Path, what: &str) {
    for name in ["page_manifest.json", "snapshot.json", "config.json"] {
        assert!(!out.join(name).exists(), "{what}: {name} was published");
    }
    let local = host.run(&["ls", "--local", "--json"]);
    if local.code == 0 {
        assert_eq!(local.json()["repositories"], serde_json::json!([]), "{what}: the local store shows something");
    }
}
