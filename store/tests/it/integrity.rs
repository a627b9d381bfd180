//! Scrub, quarantine, healing and fsck: whatever byte of a pack is wrong, it is found, and what it
//! was comes back with the next push.

use crate::common::rig::{Backend, Rig};
use crate::common::{Snapshot, blob_frame, page, pieces, property, push, repository, snapshot, stream, tag};
use object_store::ObjectStoreExt as _;
use object_store::path::Path;
use pfr_schema::api::ScrubReport;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, media_type};
use pfr_store::{Error, Packed, ScrubOptions, Store, document_frame};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

on_every_backend_and_memory!(any_byte_of_a_pack_that_changes_is_found_and_a_push_heals_what_it_was, in_a_pack_of_many_reads_too,);
on_every_backend!(
    a_pack_that_is_gone_or_cut_costs_what_lay_in_it_until_it_is_pushed_again,
    a_bad_frame_behind_a_bad_index_is_found_by_the_rows,
    damage_names_every_snapshot_that_reaches_it_and_one_push_heals_all,
    a_mirror_heals_what_is_damaged,
    a_copy_that_moved_since_is_not_quarantined,
    fsck_finds_and_corrects_counts,
    fsck_never_takes_unknown_children_for_none,
    fsck_finds_what_collection_forgot,
    what_is_attached_is_its_bytes_whatever_they_are_besides,
    a_scrub_after_a_repair_alarms_no_more,
    a_scrub_reads_no_faster_than_it_may,
);

async fn scrub(store: &Store, full: bool) -> ScrubReport {
    store.scrub(&ScrubOptions { full, bytes_per_second: None }, &mut |_| ()).await.unwrap()
}

fn is_clean(report: &ScrubReport) -> bool {
    report.damaged.is_empty() && report.bad_packs.is_empty() && report.dead_frames.is_empty()
}

/// Everything of a snapshot with its kind, children first.
fn blobs(snapshot: &Snapshot) -> Vec<(Digest, Kind)> {
    let pages = snapshot.pages.iter().map(|p| (Digest::sha256(p), Kind::Blob));
    pages.chain(snapshot.documents().into_iter().map(|d| (d.digest, d.kind))).collect()
}

/// Sends what the store says it lacks of a snapshot, as a client does; returns it.
async fn push_missing(store: &Store, snapshot: &Snapshot) -> BTreeSet<Digest> {
    let all = blobs(snapshot);
    let session = store.open_push(&repository()).await.unwrap();
    let missing = store.missing(&session.id, all.clone()).await.unwrap();
    let missing: BTreeSet<Digest> = missing.into_iter().map(|i| all[i].0).collect();
    let pages = snapshot.pages.iter().filter(|p| missing.contains(&Digest::sha256(p))).map(|p| blob_frame(p));
    let documents = snapshot.documents().into_iter().filter(|d| missing.contains(&d.digest)).map(document_frame);
    store.ingest(&session.id, pieces(&stream(pages.chain(documents)), 500)).await.unwrap();
    store.commit(&session.id, snapshot.manifest.digest, Some(tag("t")), None).await.unwrap();
    missing
}

/// A blob and what reaches it in a snapshot of one run.
fn above(snapshot: &Snapshot, damaged: Digest) -> BTreeSet<Digest> {
    let (run, tree, manifest) = (snapshot.runs[0].digest, snapshot.tree.digest, snapshot.manifest.digest);
    let chain = match damaged {
        d if d == manifest => vec![],
        d if d == tree || d == snapshot.config.digest => vec![manifest],
        d if d == run => vec![tree, manifest],
        _ => vec![run, tree, manifest],
    };
    chain.into_iter().chain([damaged]).collect()
}

/// A snapshot in one pack, in which one frame is dead: the blob lies in an older pack. Returns the
/// pack's path and what lies in it.
async fn small(on: Backend) -> (Rig, Snapshot, Path, Vec<Packed>) {
    let rig = Rig::new(on).await;
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&stream([blob_frame(&page(2))]), 100)).await.unwrap();
    let first = rig.pack_paths().await;
    let snapshot = snapshot(&[1], vec![]);
    push(&rig.store, &snapshot, "t").await.unwrap();
    let pack = rig.pack_paths().await.into_iter().find(|p| !first.contains(p)).unwrap();
    let row = rig.metadata.packs(None, 10).await.unwrap().into_iter().find(|row| pack.as_ref().contains(&row.key)).unwrap();
    let contents = rig.metadata.pack_contents(row.id).await.unwrap();
    assert_eq!(contents.len(), 5, "a page, a run, a tree, a configuration, a manifest");
    (rig, snapshot, pack, contents)
}

async fn any_byte_of_a_pack_that_changes_is_found_and_a_push_heals_what_it_was(on: Backend) {
    // Packs have the same content on every back end.
    let so_many = match on {
        Backend::Memory => 11,
        Backend::PostgresDisk | Backend::PostgresS3 => 263,
        _ => 131,
    };
    one_byte_in(so_many, on).await;
}

mod long {
    use super::{Backend, one_byte_in};

    #[tokio::test]
    async fn every_single_byte_of_a_pack_that_changes_is_found_and_a_push_heals_what_it_was() {
        one_byte_in(1, Backend::Memory).await;
    }
}

/// Changes one byte in so many, each in a pack of its own.
async fn one_byte_in(so_many: usize, on: Backend) {
    let (rig, _, pack, _) = small(on).await;
    let len = rig.bytes(&pack).await.len();
    for at in (0..len).step_by(so_many) {
        let (rig, snapshot, pack, contents) = small(on).await;
        rig.flip(&pack, at).await;
        let report = scrub(&rig.store, at % 2 == 0).await;
        let hit = contents.iter().find(|p| (p.offset..p.offset + p.frame_len).contains(&(at as u64)));
        let name = format!("{}@{}", repository(), snapshot.manifest.digest);
        match hit {
            Some(hit) => {
                let found: Vec<_> = report.damaged.iter().map(|d| (d.digest, d.snapshots.clone())).collect();
                assert_eq!(found, [(hit.digest, vec![name])], "byte {at}: {report:?}");
                assert!(report.bad_packs.is_empty(), "byte {at}: {report:?}");
                assert!(rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.is_err());
                assert_eq!(push_missing(&rig.store, &snapshot).await, above(&snapshot, hit.digest), "byte {at}");
            }
            None => {
                assert!(report.damaged.is_empty() && report.bad_packs.len() + report.dead_frames.len() == 1, "byte {at}: {report:?}");
                assert!(push_missing(&rig.store, &snapshot).await.is_empty(), "byte {at}");
            }
        }
        rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        if hit.is_none() {
            // The good blobs are in a new pack. The old pack is deleted with the bad ones.
            rig.collect().await;
            assert!(rig.packs.head(&pack).await.is_err(), "byte {at}");
            let again = scrub(&rig.store, true).await;
            assert!(is_clean(&again), "byte {at}: {again:?}");
            rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        }
        assert_eq!(rig.metadata.audit(false).await.unwrap().discrepancies, [], "byte {at}");
    }
}

async fn a_scrub_after_a_repair_alarms_no_more(on: Backend) {
    let (rig, snapshot, pack, contents) = small(on).await;
    rig.flip(&pack, contents[0].offset as usize + 70).await;
    assert_eq!(scrub(&rig.store, true).await.damaged.len(), 1);
    push_missing(&rig.store, &snapshot).await;
    let next = scrub(&rig.store, true).await;
    assert!(next.damaged.is_empty() && next.bad_packs.is_empty() && next.unread.is_empty(), "{next:?}");
    assert!(next.dead_frames.len() == 1 && next.dead_frames[0].contains(&contents[0].digest.to_string()), "{next:?}");
    // The pack with the bad frame was left.
    assert!(is_clean(&scrub(&rig.store, true).await));
    rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn in_a_pack_of_many_reads_too(on: Backend) {
    let where_and_how = (0.0..1.0_f64, 0..8_u8, any::<bool>());
    property(on.some(6, 2), where_and_how, move |(place, bit, full)| async move {
        let rig = Rig::new(on).await;
        let session = rig.store.open_push(&repository()).await.unwrap();
        let large: Vec<u8> = (0..700_000_u64).flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
        let small = (0..2000).map(|i| blob_frame(&page(i)));
        let frames =
            small.chain([blob_frame(&large[..3 << 20])]).chain((2000..4000).map(|i| blob_frame(&page(i)))).chain([blob_frame(&large)]);
        rig.store.ingest(&session.id, pieces(&stream(frames), 60_000)).await.unwrap();
        assert!(is_clean(&scrub(&rig.store, full).await));
        let packs = rig.pack_paths().await;
        assert_eq!(packs.len(), 2, "a large blob has a pack of its own");
        let pack = &packs[usize::from(bit % 2)];
        let mut bytes = rig.bytes(pack).await;
        let at = (bytes.len() as f64 * place) as usize;
        bytes[at] ^= 1 << bit;
        rig.put(pack, bytes).await;
        let report = scrub(&rig.store, full).await;
        assert_eq!(report.damaged.len() + report.bad_packs.len(), 1, "byte {at}: {report:?}");
    })
    .await;
}

async fn a_pack_that_is_gone_or_cut_costs_what_lay_in_it_until_it_is_pushed_again(on: Backend) {
    for cut in [None, Some(0), Some(20), Some(300), Some(900)] {
        let (rig, snapshot, pack, contents) = small(on).await;
        match cut {
            None => rig.packs.delete(&pack).await.unwrap(),
            Some(len) => rig.put(&pack, rig.bytes(&pack).await[..len].to_vec()).await,
        }
        // Damage, and not a storage that is out of reach; a tool that looks at everything goes on.
        let read = rig.store.read(&snapshot.manifest.digest).await;
        assert!(matches!(read, Err(Error::Corrupt { .. })), "cut to {cut:?}: {read:?}");
        assert!(rig.store.fsck(false, &mut |_| ()).await.unwrap().wrong > 0, "cut to {cut:?}");
        let report = scrub(&rig.store, false).await;
        let lost = contents.iter().filter(|p| p.offset + p.frame_len > cut.unwrap_or(0) as u64);
        let lost: BTreeSet<Digest> = lost.map(|p| p.digest).collect();
        assert_eq!(report.damaged.iter().map(|d| d.digest).collect::<BTreeSet<_>>(), lost, "cut to {cut:?}: {report:?}");
        assert_eq!(report.bad_packs.len(), 1, "{report:?}");
        assert!(push_missing(&rig.store, &snapshot).await.is_superset(&lost));
        rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        assert!(scrub(&rig.store, true).await.damaged.is_empty());
        assert_eq!(rig.metadata.audit(false).await.unwrap().discrepancies, []);
    }
}

async fn a_bad_frame_behind_a_bad_index_is_found_by_the_rows(on: Backend) {
    let (rig, snapshot, pack, contents) = small(on).await;
    let len = rig.bytes(&pack).await.len();
    rig.flip(&pack, len - 100).await;
    let hit = contents[1];
    // Its header: where the next frame begins is then not known from the bytes.
    rig.flip(&pack, hit.offset as usize + 20).await;
    let report = scrub(&rig.store, false).await;
    assert_eq!(report.damaged.iter().map(|d| d.digest).collect::<Vec<_>>(), [hit.digest], "{report:?}");
    assert_eq!(report.bad_packs.len(), 1, "{report:?}");
    assert_eq!(push_missing(&rig.store, &snapshot).await, above(&snapshot, hit.digest));
    rig.collect().await;
    assert!(rig.packs.head(&pack).await.is_err(), "the pack was left");
    assert!(is_clean(&scrub(&rig.store, true).await));
    rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn damage_names_every_snapshot_that_reaches_it_and_one_push_heals_all(on: Backend) {
    let rig = Rig::new(on).await;
    let (a, b, c) = (snapshot(&[1, 2], vec![]), snapshot(&[1, 2, 3], vec![]), snapshot(&[9], vec![]));
    for (snapshot, name) in [(&a, "a"), (&b, "b"), (&c, "c")] {
        push(&rig.store, snapshot, name).await.unwrap();
    }
    let shared = Digest::sha256(&a.pages[0]);
    let location = rig.metadata.locate(vec![shared]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await.into_iter().find(|p| p.as_ref().contains(&location.pack)).unwrap();
    rig.flip(&pack, (location.offset + location.frame_len) as usize - 10).await;
    assert!(matches!(rig.store.verify(&b.manifest.digest, &mut |_| ()).await, Err(Error::Corrupt { digest, .. }) if digest == shared));
    let damaged = rig.store.damaged().await.unwrap();
    let names = [&a, &b].map(|s| format!("{}@{}", repository(), s.manifest.digest));
    assert_eq!(damaged.iter().map(|d| (d.digest, d.snapshots.clone())).collect::<Vec<_>>(), [(shared, names.to_vec())], "found by verify");
    assert!(matches!(rig.store.read(&shared).await, Err(Error::Corrupt { .. })));
    // A question for a document of this name gets the answer of a missing one.
    assert!(matches!(rig.store.manifest(&shared).await, Err(Error::BlobUnknown { kind: Kind::Manifest, digest }) if digest == shared));
    rig.store.verify(&c.manifest.digest, &mut |_| ()).await.unwrap();
    assert_eq!(push_missing(&rig.store, &a).await, above(&a, shared));
    rig.store.reassess().await.unwrap();
    let session = rig.store.open_push(&repository()).await.unwrap();
    assert_eq!(rig.store.missing(&session.id, blobs(&b)).await.unwrap(), Vec::<usize>::new(), "the other one is well too");
    for snapshot in [&a, &b, &c] {
        rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    }
    rig.collect().await;
    let report = scrub(&rig.store, true).await;
    assert!(report.damaged.is_empty(), "{report:?}");
}

async fn a_mirror_heals_what_is_damaged(on: Backend) {
    let (rig, snapshot, pack, _) = small(on).await;
    let mirror = Rig::new(on).await;
    push(&mirror.store, &snapshot, "t").await.unwrap();
    rig.packs.delete(&pack).await.unwrap();
    let report = scrub(&rig.store, false).await;
    assert_eq!(report.damaged.len(), 5);
    // Children before the nodes that list them.
    let damaged: Vec<Digest> =
        blobs(&snapshot).into_iter().map(|(d, _)| d).filter(|d| report.damaged.iter().any(|b| b.digest == *d)).collect();
    let frames = mirror.store.frames(damaged.clone()).await.unwrap();
    assert_eq!(rig.store.heal(&repository(), &damaged, frames).await.unwrap(), 5);
    assert_eq!(rig.store.reassess().await.unwrap(), 0, "nothing above was left marked");
    rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    assert!(scrub(&rig.store, true).await.damaged.is_empty());
}

async fn a_copy_that_moved_since_is_not_quarantined(on: Backend) {
    let (rig, snapshot, _, _) = small(on).await;
    let damage = pfr_store::Damage { digest: snapshot.tree.digest, pack: "another".into(), reason: "bad".into() };
    assert!(rig.metadata.quarantine(vec![damage]).await.unwrap().is_empty());
    rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    assert!(rig.store.damaged().await.unwrap().is_empty());
}

/// A store with one snapshot, whose tables can be spoilt from outside.
async fn with_snapshot(on: Backend) -> (Rig, Snapshot) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2, 3], vec![]));
    push(&rig.store, &snapshot, "t").await.unwrap();
    (rig, snapshot)
}

async fn fsck_finds_and_corrects_counts(on: Backend) {
    let (rig, snapshot) = with_snapshot(on).await;
    let store = &rig.store;
    let sound = store.fsck(false, &mut |_| ()).await.unwrap();
    assert_eq!((sound.wrong, sound.containers, sound.objects, sound.packs), (0, 3, 10, 1), "{sound:?}");
    for (spoil, differences) in [
        ("UPDATE objects SET refs = refs + 1 WHERE kind = 1", 1),
        ("UPDATE objects SET refs = 0", 10),
        ("UPDATE packs SET live_bytes = live_bytes - 1", 1),
        ("UPDATE packs SET state = 'draining', draining_since = 0", 1),
        ("UPDATE containers SET logical_bytes = 7 WHERE pages IS NOT NULL", 1),
        ("UPDATE manifests SET logical_bytes = 7", 1),
    ] {
        drop(rig.sql(spoil));
        let found = store.fsck(false, &mut |_| ()).await.unwrap();
        assert_eq!((found.wrong, found.repaired), (differences, false), "{spoil}: {found:?}");
        let repaired = store.fsck(true, &mut |_| ()).await.unwrap();
        assert_eq!((repaired.wrong, repaired.repaired), (differences, true), "{spoil}: {repaired:?}");
        assert_eq!(store.fsck(false, &mut |_| ()).await.unwrap(), sound, "{spoil}");
        store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    }
}

async fn fsck_never_takes_unknown_children_for_none(on: Backend) {
    for spoil in [
        "UPDATE containers SET children = x'ff' WHERE pages IS NOT NULL",
        "UPDATE containers SET children = x'01' WHERE pages IS NOT NULL",
        "DELETE FROM containers WHERE pages IS NOT NULL",
        "UPDATE objects SET kind = 0 WHERE kind = 1",
    ] {
        let (rig, _) = with_snapshot(on).await;
        let store = &rig.store;
        let refs = || rig.sql("SELECT SUM(refs) FROM objects");
        let before = refs();
        drop(rig.sql(spoil));
        let found = store.fsck(true, &mut |_| ()).await.unwrap();
        assert!(found.wrong > 0 && !found.repaired, "{spoil}: {found:?}");
        assert_eq!(refs(), before, "{spoil}: no count was corrected");
    }
}

/// A manifest that lists documents of a snapshot as attachments.
fn attaching(documents: &[&Document], label: &str) -> (Document, Document) {
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let layer = |d: &&Document| Descriptor {
        media_type: media_type::OCTETS.into(),
        digest: d.digest,
        size: d.bytes.len() as u64,
        annotations: Default::default(),
    };
    let annotations = BTreeMap::from([("label".to_owned(), label.to_owned())]);
    let manifest = Manifest::snapshot(&config, documents.iter().map(layer).collect(), annotations).to_document();
    (config, manifest)
}

async fn attach(store: &Store, documents: &[&Document], label: &str) -> Vec<usize> {
    let (config, manifest) = attaching(documents, label);
    let session = store.open_push(&repository()).await.unwrap();
    let wanted = documents.iter().map(|d| (d.digest, Kind::Blob)).collect();
    let missing = store.missing(&session.id, wanted).await.unwrap();
    let frames = missing.iter().map(|at| blob_frame(&documents[*at].bytes)).chain([&config, &manifest].map(document_frame));
    store.ingest(&session.id, pieces(&stream(frames), 500)).await.unwrap();
    store.commit(&session.id, manifest.digest, Some(tag(label)), None).await.unwrap();
    missing
}

async fn what_is_attached_is_its_bytes_whatever_they_are_besides(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2, 3], vec![]));
    assert_eq!(attach(&rig.store, &[&snapshot.runs[0], &snapshot.tree], "first").await, [0, 1]);
    // They become nodes, and what they reach is not counted in what attached them before.
    push(&rig.store, &snapshot, "t").await.unwrap();
    let found = rig.store.fsck(false, &mut |_| ()).await.unwrap();
    assert_eq!(found.wrong, 0, "{found:?}");

    // With a page below them damaged they are incomplete as nodes, and as bytes what they
    // were.
    let page = Digest::sha256(&snapshot.pages[0]);
    let location = rig.metadata.locate(vec![page]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await.into_iter().find(|p| p.as_ref().contains(&location.pack)).unwrap();
    rig.flip(&pack, (location.offset + location.frame_len) as usize - 10).await;
    assert_eq!(scrub(&rig.store, false).await.damaged.len(), 1);
    assert!(attach(&rig.store, &[&snapshot.runs[0], &snapshot.tree], "second").await.is_empty());
    let session = rig.store.open_push(&repository()).await.unwrap();
    let as_container = rig.store.missing(&session.id, vec![(snapshot.tree.digest, Kind::Tree)]).await.unwrap();
    assert_eq!(as_container, [0], "it is asked for as what it cannot be relied on as");
}

async fn fsck_finds_what_collection_forgot(on: Backend) {
    let (rig, _) = with_snapshot(on).await;
    let store = &rig.store;
    let session = store.open_push(&repository()).await.unwrap();
    store.ingest(&session.id, pieces(&stream([blob_frame(b"unclaimed")]), 100)).await.unwrap();
    drop(rig.sql("DELETE FROM suspects"));
    let found = store.fsck(true, &mut |_| ()).await.unwrap();
    assert_eq!((found.wrong, found.repaired), (1, true), "{found:?}");
    assert_eq!(rig.sql("SELECT COUNT(*) FROM suspects WHERE object IS NOT NULL"), "1");
}

async fn a_scrub_reads_no_faster_than_it_may(on: Backend) {
    let (rig, _, _, contents) = small(on).await;
    let rate = 10_000;
    let before = tokio::time::Instant::now();
    let report = rig.store.scrub(&ScrubOptions { full: false, bytes_per_second: Some(rate) }, &mut |_| ()).await.unwrap();
    assert!(is_clean(&report));
    let read: u64 = contents.iter().map(|packed| packed.frame_len).sum();
    assert!(before.elapsed().as_secs_f64() >= read as f64 / rate as f64, "{:?} for {read} bytes", before.elapsed());
}
