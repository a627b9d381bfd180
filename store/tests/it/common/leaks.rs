//! That a store takes up exactly what it holds.

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

/// Whether a key of the storage is a pack's or a stranger's, and not the journal's or the store's marker.
pub fn is_pack(key: &str) -> bool {
    !key.starts_with("journal/") && key != "pf-store"
}

/// Frame bytes of everything that snapshots reach, and how many objects that are.
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

/// What storage and tables of the rig's store hold is exactly what snapshots reach.
pub async fn assert_none(rig: &Rig) {
    assert_holds_only(&rig.store, rig.pack_files().await).await;
}

/// The same for a store in a directory.
pub async fn assert_none_in(store: &Store, dir: &Path) {
    let mut found = files(&dir.join("packs"));
    found.retain(|name, _| is_pack(name));
    assert_holds_only(store, found).await;
}

/// Every object where packs are is a pack's, every pack is live and as long as it should be, and what objects take up is exactly what
/// snapshots reach.
async fn assert_holds_only(store: &Store, found: BTreeMap<String, u64>) {
    let packs = store.metadata().packs(None, 100_000).await.unwrap();
    let strangers: Vec<_> = packs.iter().filter(|pack| pack.state != PackState::Live).collect();
    assert!(strangers.is_empty(), "packs that should be gone: {strangers:?}");
    let expected: BTreeMap<String, u64> =
        packs.iter().map(|pack| (format!("{}/{}.pfpack", &pack.key[pack.key.len() - 2..], pack.key), pack.bytes)).collect();
    assert_eq!(found, expected, "files against rows");
    let live: u64 = packs.iter().map(|pack| pack.live_bytes).sum();
    assert_eq!(live, reachable(store).await.0, "bytes of objects that no snapshot reaches");
    for pack in &packs {
        let contents = store.metadata().pack_contents(pack.id).await.unwrap();
        assert_eq!(contents.iter().map(|p| p.frame_len).sum::<u64>(), pack.live_bytes, "live bytes of {pack:?}");
    }
}
