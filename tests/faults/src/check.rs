//! The checks: every acknowledged byte is there, and at the end nothing is left over.

use crate::names::{Names, Repository};
use crate::snapshots::Snapshot;
use crate::world::{HOUR, World};
use object_store::path::Path;
use pfr_schema::codec::{self, Codec};
use pfr_schema::frame::{CHECKSUM, Header};
use pfr_schema::journal::PREFIX;
use pfr_schema::{Digest, DomainName, Limits};
use pfr_store::{GcOptions, Health, PackRow, PackState, Result, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// Every snapshot that was ever pushed, by digest.
pub type Library = BTreeMap<Digest, Arc<Snapshot>>;

/// Tags and snapshots, as a store lists them.
///
/// # Errors
/// The errors of the metadata.
pub async fn names(store: &Store) -> Result<Names> {
    let mut names = Names::new();
    for row in store.repositories(None, 10_000).await?.rows {
        let mut repository = Repository::default();
        for snapshot in store.snapshots(&row.name, None, 10_000).await?.rows {
            repository.snapshots.insert(snapshot.digest, snapshot.parents);
        }
        for tag in store.tags(&row.name, None, 10_000).await?.rows {
            repository.tags.insert(tag.name, tag.digest);
        }
        names.insert(row.name, repository);
    }
    Ok(names)
}

/// The path of a pack on the disk.
#[must_use]
pub fn path(key: &str) -> Path {
    let shard = key.get(key.len().saturating_sub(2)..).unwrap_or("00");
    Path::from(format!("{shard}/{key}.pfpack"))
}

/// Whether an object lies in another domain than the default one.
#[must_use]
pub fn is_of_domain(key: &str) -> bool {
    key.strip_prefix(DomainName::FOLDER).is_some_and(|rest| rest.starts_with('/'))
}

/// The blobs of all snapshots in `names`.
fn reached<'a>(names: &Names, library: &'a Library) -> BTreeMap<Digest, &'a [u8]> {
    let snapshots = names.values().flat_map(|repository| repository.snapshots.keys());
    snapshots.filter_map(|digest| library.get(digest)).flat_map(|s| s.blobs.iter().map(|(digest, bytes)| (*digest, &bytes[..]))).collect()
}

/// Reads every blob of the snapshots in `names` from the disk, without the store's own readers, and
/// compares it with the pushed bytes. Returns the number of bytes.
///
/// # Errors
/// A text about the first blob that is lost or corrupt.
pub async fn complete(world: &World, names: &Names, library: &Library) -> std::result::Result<u64, String> {
    let reached = reached(names, library);
    let digests: Vec<Digest> = reached.keys().copied().collect();
    let locations = world.observer.metadata().locate(digests).await.map_err(|e| e.to_string())?;
    let mut packs = BTreeMap::new();
    let mut bytes = 0;
    for ((digest, expected), location) in reached.iter().zip(locations) {
        let location = location.ok_or_else(|| format!("LOST: {digest} is not stored, and a snapshot reaches it"))?;
        if location.health != Health::Complete {
            return Err(format!("CORRUPT: {digest} is marked {:?}", location.health));
        }
        let pack = packs.entry(location.pack.clone()).or_insert_with(|| world.disk.bytes(&path(&location.pack)));
        let pack = pack.as_ref().ok_or_else(|| format!("LOST: {digest} lies in pack {}, which is not there", location.pack))?;
        let range = usize::try_from(location.offset).unwrap_or(0)..usize::try_from(location.offset + location.frame_len).unwrap_or(0);
        let frame = pack.get(range).ok_or_else(|| format!("CORRUPT: {digest} lies beyond the end of pack {}", location.pack))?;
        let found = blob(frame, digest).ok_or_else(|| format!("CORRUPT: no frame of {digest} where metadata says"))?;
        if found != **expected {
            return Err(format!("CORRUPT: {digest} has other bytes"));
        }
        bytes += found.len() as u64;
    }
    Ok(bytes)
}

/// The raw bytes of a frame, if it is undamaged and its header has `digest`.
fn blob(frame: &[u8], digest: &Digest) -> Option<Vec<u8>> {
    let start = Header::len(digest.algorithm());
    let header = Header::parse_exact(frame.get(..start)?, 0, &Limits::default()).ok()?;
    let payload = frame.get(start..frame.len().checked_sub(CHECKSUM)?)?;
    let checksum = u32::from_le_bytes(frame.get(frame.len() - CHECKSUM..)?.try_into().ok()?);
    if header.digest != *digest || crc32c::crc32c(payload) != checksum {
        return None;
    }
    match header.codec {
        Codec::Raw => Some(payload.to_vec()),
        other => codec::decode(other, payload, header.raw_len).ok(),
    }
}

/// Lets the store verify every snapshot.
///
/// # Errors
/// A text about the first snapshot that is corrupt.
pub async fn verified(store: &Store, names: &Names) -> std::result::Result<(), String> {
    for (name, repository) in names {
        for digest in repository.snapshots.keys() {
            store.verify(digest, &mut |_| ()).await.map_err(|e| format!("CORRUPT: {name}@{digest}: {e}"))?;
        }
    }
    Ok(())
}

async fn all_packs(store: &Store) -> Result<Vec<PackRow>> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let rows = store.metadata().packs(after, 1000).await?;
        let Some(last) = rows.last() else { return Ok(all) };
        after = Some(last.id);
        all.extend(rows);
    }
}

/// Ends all leases and grace periods, collects until nothing is left to do, and compares storage
/// and tables with the blobs of the snapshots in `names`.
///
/// # Errors
/// A text about the first thing that leaked, is lost or is wrong.
pub async fn swept(world: &World, names: &Names, library: &Library, known_debris: &BTreeSet<String>) -> std::result::Result<(), String> {
    let store = &world.observer;
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let mut before = None;
    // The clock may have been set back by a day many times, so jump far beyond that.
    world.jump(i64::try_from(3000 * HOUR).unwrap_or(0));
    for _ in 0..20 {
        world.jump(i64::try_from(30 * HOUR).unwrap_or(0));
        let report = store.gc(&options, &mut |_| ()).await.map_err(|e| format!("the last collection: {e}"))?;
        let now = (world.disk.keys(), all_packs(store).await.map_err(|e| e.to_string())?);
        let copied = report.packs_compacted + report.packs_merged;
        let idle = report.released + report.unclaimed + report.packs_emptied + copied + report.packs_deleted == 0;
        if idle && before.as_ref() == Some(&now) {
            break;
        }
        before = Some(now);
    }
    let fsck = store.fsck(false, &mut |_| ()).await.map_err(|e| e.to_string())?;
    if fsck.wrong > 0 {
        return Err(format!("the tables are wrong: {:#?}", fsck.discrepancies));
    }
    let small = store.metadata().small_packs(store.full_pack(), usize::MAX).await.map_err(|e| e.to_string())?;
    if small.len() > 1 {
        return Err(format!("LEAKED: after days without a push, these packs were not merged: {small:?}"));
    }
    let packs = all_packs(store).await.map_err(|e| e.to_string())?;
    let mut named: BTreeSet<String> = known_debris.clone();
    let mut stored: BTreeSet<Digest> = BTreeSet::new();
    for pack in &packs {
        if pack.state != PackState::Live || pack.live_bytes == 0 {
            return Err(format!("LEAKED: {pack:?} is left"));
        }
        if pack.live_bytes * 2 < pack.frame_bytes {
            return Err(format!("LEAKED: more than half of {pack:?} is dead, and it was not compacted"));
        }
        let contents = store.metadata().pack_contents(pack.id).await.map_err(|e| e.to_string())?;
        let live: u64 = contents.iter().map(|frame| frame.frame_len).sum();
        if live != pack.live_bytes {
            return Err(format!("{pack:?} has {live} live bytes"));
        }
        stored.extend(contents.iter().map(|frame| frame.digest));
        named.insert(path(&pack.key).to_string());
    }
    let reached: BTreeSet<Digest> = reached(names, library).into_keys().collect();
    if let Some(leaked) = stored.difference(&reached).next() {
        let row = store.metadata().find(vec![*leaked]).await;
        return Err(format!("LEAKED: {leaked} is stored and nothing reaches it: {row:?}"));
    }
    let journal = store.metadata().journal().await.map_err(|e| e.to_string())?;
    named.extend(journal.into_iter().map(|row| row.key));
    // A writer that dies may leave a journal object without a row. Such an object stays until the
    // next summary, which finds it by its key: there are a few hundred at most. The marker always
    // stays. Other domains have their own checks.
    let is_debris = |key: &str| key.starts_with(PREFIX) || key == "pf-store" || is_of_domain(key);
    let found: BTreeMap<String, u64> = world.disk.keys().into_iter().filter(|(key, _)| named.contains(key) || !is_debris(key)).collect();
    let leaked: Vec<_> = found.iter().filter(|(key, _)| !named.contains(*key)).collect();
    if !leaked.is_empty() {
        return Err(format!("LEAKED: no row names {leaked:?}"));
    }
    if let Some(lost) = named.iter().find(|key| !found.contains_key(*key) && !known_debris.contains(*key)) {
        return Err(format!("LOST: {lost} is named and not there"));
    }
    complete(world, names, library).await.map(|_| ())
}
