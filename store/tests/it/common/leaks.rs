//! Checks that a store keeps nothing but what its snapshots reach.

use crate::common::rig::Rig;
use pfr_store::{ObjectId, PackState, Store};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// Files below `dir`, with their sizes, as paths relative to it.
pub fn files(dir: &Path) -> BTreeMap<String, u64> {
    let (mut files, mut dirs) = (BTreeMap::new(), vec![dir.to_owned()]);
    while let Some(next) = dirs.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            if meta.is_dir() {
                dirs.push(entry.path());
            } else {
                files.insert(entry.path().strip_prefix(dir).unwrap().to_str().unwrap().to_owned(), meta.len());
            }
        }
    }
    files
}

/// Whether a key on storage is one that only packs should have: not the journal's, not that of the
/// marker or of the wrapped key.
pub fn is_pack(key: &str) -> bool {
    !key.starts_with("journal/") && key != "pf-store" && key != "pf-key"
}

/// Frame bytes and number of all objects that snapshots reach.
pub async fn reachable(store: &Store) -> (u64, u64) {
    let mut level: Vec<ObjectId> = Vec::new();
    for repository in store.repositories(None, 1000).await.unwrap().rows {
        level.extend(store.snapshots(&repository.name, None, 1000).await.unwrap().rows.iter().map(|row| row.object));
    }
    let (mut seen, mut bytes) = (HashSet::new(), 0);
    while !level.is_empty() {
        level.retain(|id| seen.insert(*id));
        let rows = store.metadata().objects(level.clone()).await.unwrap();
        assert_eq!(rows.len(), level.len(), "a snapshot reaches objects that are gone");
        bytes += rows.iter().map(|row| row.frame_len).sum::<u64>();
        level = rows.into_iter().flat_map(|row| row.children).collect();
    }
    (bytes, seen.len() as u64)
}

/// Asserts that storage and tables of the rig's store hold exactly what snapshots reach.
pub async fn assert_none(rig: &Rig) {
    assert_holds_only(&rig.store, rig.pack_files().await).await;
}

/// Asserts the same of a store in a directory.
pub async fn assert_none_in(store: &Store, dir: &Path) {
    let mut found = files(&dir.join("packs"));
    found.retain(|name, _| is_pack(name));
    assert_holds_only(store, found).await;
}

/// Asserts that every object among `found` is a live pack of the right length, and that packs hold
/// exactly the bytes that snapshots reach.
async fn assert_holds_only(store: &Store, found: BTreeMap<String, u64>) {
    let packs = store.metadata().packs(None, 100_000).await.unwrap();
    let leftover: Vec<_> = packs.iter().filter(|pack| pack.state != PackState::Live).collect();
    assert!(leftover.is_empty(), "packs that should be gone: {leftover:?}");
    let expected: BTreeMap<String, u64> =
        packs.iter().map(|pack| (format!("{}/{}.pfpack", &pack.key[pack.key.len() - 2..], pack.key), pack.bytes)).collect();
    assert_eq!(found, expected, "files on storage are not those of the table");
    let live: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
    assert_eq!(live, reachable(store).await.0, "bytes of objects that no snapshot reaches");
    for pack in &packs {
        let contents = store.metadata().pack_contents(pack.id).await.unwrap();
        assert_eq!(contents.iter().map(|p| p.frame_len).sum::<u64>(), pack.live_bytes, "live bytes of {pack:?}");
    }
}
