//! Collection: what it deletes, what it keeps, and that nothing leaks.

use crate::common::rig::{Backend, Rig, pack_path};
use crate::common::{blob_frame, leaks, page, pieces, push, repository, snapshot, stream, tag};
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::ObjectStoreExt as _;
use pfr_schema::{Digest, Kind};
use pfr_store::{Error, GcOptions, GcTrigger, Options, PackState, Pin, Store, document_frame};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LEASE: u64 = 60;

async fn rig(on: Backend) -> Rig {
    rig_with_packs_of(on, 64 << 20).await
}

async fn rig_with_packs_of(on: Backend, pack_bytes: u64) -> Rig {
    Rig::still(on, Options { pack_bytes, lease: Duration::from_secs(LEASE), ..Options::default() }).await
}

async fn gc(rig: &Rig) -> pfr_schema::api::GcReport {
    rig.store.gc(&at_once(), &mut |_| ()).await.unwrap()
}

async fn count_files(rig: &Rig) -> usize {
    rig.pack_files().await.len()
}

on_every_backend!(
    what_only_a_deleted_snapshot_reached_goes_and_nothing_else,
    everything_deleted_leaves_an_empty_directory,
    a_lease_holds_an_open_push_until_it_ends,
    pages_that_were_collected_before_their_node_came_are_asked_for_again,
    an_upload_that_outlives_its_lease_is_refused_and_removes_its_own_bytes,
    bytes_stay_for_the_grace_period,
    compaction_moves_frames_and_a_reader_that_located_them_before_still_reads_them,
    large_frames_are_moved_in_parts,
    a_bad_frame_is_not_moved,
    several_at_once_free_everything_once,
    unknown_children_are_not_taken_for_none,
    killed_after_any_step_the_next_run_ends_it,
    a_dry_run_changes_nothing_and_says_what_a_real_one_does,
    a_schedule_that_finds_nothing_leaves_no_row,
    eviction_takes_the_least_recently_used_and_leaves_what_is_pinned,
);
// An unfinished upload leaves files in a directory only; a bucket shows nothing of it.
on_backends!([sqlite_disk = SqliteDisk, postgres_disk = PostgresDisk]: what_a_killed_upload_left_is_removed_with_its_staging_files);

on_backends!([sqlite_disk = SqliteDisk, postgres_disk = PostgresDisk]: a_collection_in_the_last_millisecond_of_a_lease_ends);

/// A session lives through the millisecond in which it expires. A candidate that it keeps is looked
/// at again after that, and not again and again by a transaction for which time stands still.
async fn a_collection_in_the_last_millisecond_of_a_lease_ends(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&snapshot(&[1, 2], vec![]).stream(), 777)).await.unwrap();
    let objects = async || rig.metadata.audit(false).await.unwrap().objects;
    let stored = objects().await;
    assert!(stored > 2);
    rig.wait(rig.options().lease);
    let collection = async { rig.store.gc(&at_once(), &mut |_| ()).await };
    tokio::time::timeout(Duration::from_secs(20), collection).await.expect("it ends").unwrap();
    assert_eq!(objects().await, stored, "the session lives");
    rig.wait(Duration::from_millis(1));
    rig.store.gc(&at_once(), &mut |_| ()).await.unwrap();
    assert_eq!(objects().await, 0);
}

fn at_once() -> GcOptions {
    GcOptions { grace: Duration::ZERO, batch: 50, ..GcOptions::default() }
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

async fn what_only_a_deleted_snapshot_reached_goes_and_nothing_else(on: Backend) {
    let rig = rig(on).await;
    let (old, new) = (snapshot(&numbers(0..100), vec![]), snapshot(&numbers(60..160), vec![]));
    push(&rig.store, &old, "old").await.unwrap();
    push(&rig.store, &new, "new").await.unwrap();
    let (_, before) = leaks::reachable(&rig.store).await;
    rig.store.delete_snapshot(&repository(), &old.manifest.digest).await.unwrap();
    let (kept_bytes, kept) = leaks::reachable(&rig.store).await;
    rig.seconds(LEASE + 1);
    let report = gc(&rig).await;
    assert_eq!(report.released, before - kept, "{report:?}");
    leaks::assert_none(&rig).await;
    rig.store.verify(&new.manifest.digest, &mut |_| ()).await.unwrap();
    for number in 0..160_u64 {
        let stored = rig.store.metadata().find(vec![Digest::sha256(&page(2 * number))]).await.unwrap()[0].is_some();
        assert_eq!(stored, number >= 60, "page {number}");
    }
    let disk = rig.store.metadata().disk_bytes().await.unwrap();
    assert!(disk < kept_bytes * 2 + 4096, "{disk} bytes for {kept_bytes}");
    let runs = rig.store.metadata().gc_runs(None, 10).await.unwrap().rows;
    assert_eq!((runs.len(), runs[0].trigger, runs[0].finished_at.is_some()), (1, GcTrigger::Command, true));
    let kept: pfr_schema::api::GcReport = serde_json::from_str(&runs[0].report).unwrap();
    assert_eq!((kept.released, kept.id), (report.released, report.id));
}

async fn everything_deleted_leaves_an_empty_directory(on: Backend) {
    let rig = rig_with_packs_of(on, 2048).await;
    for (i, from) in [0, 30, 60].into_iter().enumerate() {
        let s = snapshot(&numbers(from..from + 50), vec![]);
        push(&rig.store, &s, &format!("t{i}")).await.unwrap();
        rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    }
    assert!(count_files(&rig).await > 3);
    rig.seconds(LEASE + 1);
    let report = gc(&rig).await;
    assert_eq!((count_files(&rig).await, report.draining_bytes), (0, 0));
    assert_eq!(report.packs_deleted, report.packs_emptied);
    assert_eq!(rig.store.metadata().disk_bytes().await.unwrap(), 0);
    leaks::assert_none(&rig).await;
}

async fn a_lease_holds_an_open_push_until_it_ends(on: Backend) {
    let rig = rig(on).await;
    let s = snapshot(&numbers(0..40), vec![]);
    let session = rig.store.open_push(&repository()).await.unwrap();
    let ingested = rig.store.ingest(&session.id, pieces(&s.stream(), 999)).await.unwrap();
    assert_eq!(gc(&rig).await.unclaimed, 0);
    rig.seconds(LEASE / 2 + 1);
    // A request for missing blobs renews their leases, and the lease of a node covers its children.
    assert!(rig.store.missing(&session.id, vec![(s.manifest.digest, Kind::Manifest)]).await.unwrap().is_empty());
    rig.seconds(LEASE - 5);
    assert_eq!(gc(&rig).await.unclaimed, 0);
    rig.store.commit(&session.id, s.manifest.digest, Some(tag("kept")), None).await.unwrap();
    rig.seconds(LEASE * 2);
    assert_eq!(gc(&rig).await.unclaimed, 0);
    rig.store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    leaks::assert_none(&rig).await;

    let other = snapshot(&numbers(100..140), vec![]);
    let session = rig.store.open_push(&repository()).await.unwrap();
    let other_ingested = rig.store.ingest(&session.id, pieces(&other.stream(), 999)).await.unwrap();
    rig.seconds(LEASE + 1);
    let report = gc(&rig).await;
    // The configuration is the same blob in both.
    assert_eq!((report.unclaimed, report.sessions), (other_ingested.new, 1), "{ingested:?}");
    let refused = rig.store.commit(&session.id, other.manifest.digest, None, None).await.unwrap_err();
    assert!(matches!(refused, Error::BlobUnknown { .. } | Error::PushUnknown(_)), "{refused}");
    leaks::assert_none(&rig).await;
    push(&rig.store, &other, "again").await.unwrap();
    rig.store.verify(&other.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn pages_that_were_collected_before_their_node_came_are_asked_for_again(on: Backend) {
    let rig = rig(on).await;
    let s = snapshot(&numbers(0..10), vec![]);
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&stream(s.pages.iter().map(|p| blob_frame(p))), 500)).await.unwrap();
    rig.seconds(LEASE + 1);
    assert_eq!(gc(&rig).await.unclaimed, 20);
    let session = rig.store.open_push(&repository()).await.unwrap();
    let documents = stream(s.documents().into_iter().map(document_frame));
    let error = rig.store.ingest(&session.id, pieces(&documents, 500)).await.unwrap_err();
    assert!(matches!(&error, Error::Missing { missing, .. } if !missing.is_empty()), "{error}");
    push(&rig.store, &s, "whole").await.unwrap();
    rig.store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    rig.seconds(LEASE + 1);
    gc(&rig).await;
    leaks::assert_none(&rig).await;
}

async fn what_a_killed_upload_left_is_removed_with_its_staging_files(on: Backend) {
    let rig = rig(on).await;
    push(&rig.store, &snapshot(&numbers(0..2), vec![]), "kept").await.unwrap();
    let kept = count_files(&rig).await;
    let key = "0190aaaa-0000-7000-8000-0000000000cd";
    rig.store.metadata().begin_pack(key.into(), Duration::from_secs(LEASE)).await.unwrap();
    let shard = rig.packs_dir().join("cd");
    std::fs::create_dir_all(&shard).unwrap();
    for number in 1..=3 {
        std::fs::write(shard.join(format!("{key}.pfpack#{number}")), b"half").unwrap();
    }
    let until = rig.store.options().clock.now() + LEASE * 1000;
    let unfinished = gc(&rig).await.unfinished.unwrap();
    assert_eq!((unfinished.packs, unfinished.bytes, unfinished.expires_at), (1, 12, Some(until)));
    assert_eq!(count_files(&rig).await, kept + 3, "its lease still runs");
    rig.seconds(LEASE + 1);
    let report = gc(&rig).await;
    assert_eq!((report.packs_abandoned, report.packs_deleted, report.deleted_bytes), (1, 1, 12));
    assert_eq!((report.unfinished.unwrap().packs, count_files(&rig).await), (0, kept));
    leaks::assert_none(&rig).await;
}

async fn an_upload_that_outlives_its_lease_is_refused_and_removes_its_own_bytes(on: Backend) {
    let rig = rig(on).await;
    let session = rig.store.open_push(&repository()).await.unwrap();
    let (feed, mut fed) = tokio::sync::mpsc::unbounded_channel::<bytes::Bytes>();
    // Counts the pieces that the store has processed: it asks for the next piece only then.
    let (mut given, worked_off) = (0, Arc::new(AtomicU64::new(0)));
    let seen = Arc::clone(&worked_off);
    let input = futures::stream::poll_fn(move |cx| {
        let polled = fed.poll_recv(cx);
        if polled.is_ready() {
            given += 1;
        } else {
            seen.store(given, Ordering::SeqCst);
        }
        polled
    });
    let input = input.map(Ok::<_, std::io::Error>);
    let (store, id) = (rig.store.clone(), session.id.clone());
    let upload = tokio::spawn(async move { store.ingest(&id, input).await });
    // A large blob is written as it comes.
    let bytes = stream([blob_frame(&vec![1_u8; 6 << 20])]);
    let (first, rest) = bytes.split_at(bytes.len() / 2);
    feed.send(bytes::Bytes::copy_from_slice(first)).unwrap();
    while worked_off.load(Ordering::SeqCst) < 1 {
        tokio::task::yield_now().await;
    }
    rig.seconds(LEASE / 2 + 1);
    rig.store.live_push(&repository(), &session.id).await.unwrap();
    rig.seconds(LEASE / 2);
    let late = GcOptions { grace: Duration::from_secs(1000), ..at_once() };
    assert_eq!(rig.store.gc(&late, &mut |_| ()).await.unwrap().packs_abandoned, 1);
    feed.send(bytes::Bytes::copy_from_slice(rest)).unwrap();
    drop(feed);
    let error = upload.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::PackLost(_)), "{error}");
    assert_eq!(count_files(&rig).await, 0);
    rig.seconds(1001);
    gc(&rig).await;
    leaks::assert_none(&rig).await;
}

async fn bytes_stay_for_the_grace_period(on: Backend) {
    let rig = rig(on).await;
    let s = snapshot(&numbers(0..20), vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    rig.seconds(LEASE + 1);
    let hour = GcOptions { grace: Duration::from_secs(3600), ..at_once() };
    let report = rig.store.gc(&hour, &mut |_| ()).await.unwrap();
    assert!(report.packs_emptied > 0 && report.packs_deleted == 0 && report.draining_bytes > 0, "{report:?}");
    let files = count_files(&rig).await;
    rig.seconds(3599);
    rig.store.gc(&hour, &mut |_| ()).await.unwrap();
    assert_eq!(count_files(&rig).await, files);
    rig.seconds(2);
    let report = rig.store.gc(&hour, &mut |_| ()).await.unwrap();
    assert_eq!((report.packs_deleted, count_files(&rig).await), (files as u64, 0));
    leaks::assert_none(&rig).await;
}

async fn compaction_moves_frames_and_a_reader_that_located_them_before_still_reads_them(on: Backend) {
    let rig = rig(on).await;
    let all = snapshot(&numbers(0..400), vec![]);
    push(&rig.store, &all, "all").await.unwrap();
    let some = snapshot(&(0..400).step_by(4).collect::<Vec<_>>(), vec![]);
    push(&rig.store, &some, "some").await.unwrap();
    let wanted: Vec<Digest> = some.pages.iter().map(|p| Digest::sha256(p)).collect();
    let before = rig.store.metadata().locate(wanted.clone()).await.unwrap();
    let reader = rig.store.frames(wanted.clone()).await.unwrap();
    rig.store.delete_snapshot(&repository(), &all.manifest.digest).await.unwrap();
    rig.seconds(LEASE + 1);
    let disk = rig.store.metadata().disk_bytes().await.unwrap();
    let report = gc(&rig).await;
    assert!(report.packs_compacted > 0 && report.moved_bytes > 0, "{report:?}");
    assert!(rig.store.metadata().disk_bytes().await.unwrap() < disk / 2);
    let after = rig.store.metadata().locate(wanted.clone()).await.unwrap();
    assert!(before.iter().zip(&after).all(|(b, a)| b.as_ref().unwrap().pack != a.as_ref().unwrap().pack));
    let read: Vec<bytes::Bytes> = reader.try_collect().await.unwrap();
    assert_eq!(read.concat(), stream(some.pages.iter().map(|p| blob_frame(p))));
    rig.store.verify(&some.manifest.digest, &mut |_| ()).await.unwrap();
    leaks::assert_none(&rig).await;
    assert_eq!(gc(&rig).await.packs_compacted, 0, "nothing is sparse any more");
}

async fn large_frames_are_moved_in_parts(on: Backend) {
    let rig = rig(on).await;
    let (stays, goes) = (vec![1_u8; 5 << 20], [vec![2_u8; 3 << 20], vec![3_u8; 3 << 20]]);
    let s = with_layer(&stays);
    let session = rig.store.open_push(&repository()).await.unwrap();
    // A large blob begins a pack; the following blobs are packed with it.
    let frames = stream([&stays, &goes[0], &goes[1]].into_iter().map(|b| blob_frame(b)).chain(s.iter().map(document_frame)));
    rig.store.ingest(&session.id, pieces(&frames, 1 << 20)).await.unwrap();
    rig.store.commit(&session.id, s[1].digest, Some(tag("a")), None).await.unwrap();
    rig.seconds(LEASE + 1);
    let report = gc(&rig).await;
    assert_eq!((report.unclaimed, report.packs_compacted), (2, 1), "{report:?}");
    leaks::assert_none(&rig).await;
    let read: Vec<bytes::Bytes> = rig.store.frames(vec![Digest::sha256(&stays)]).await.unwrap().try_collect().await.unwrap();
    assert_eq!(read.concat(), stream([blob_frame(&stays)]));
    assert!(rig.store.metadata().disk_bytes().await.unwrap() < 6 << 20);
}

/// A configuration, and a manifest that lists a blob of any kind.
fn with_layer(layer: &[u8]) -> Vec<pfr_schema::tree::Document> {
    use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
    use pfr_schema::tree::Document;
    let config = Document::new(Kind::Blob, SnapshotConfig::default().to_bytes());
    let layer = Descriptor {
        media_type: "application/octet-stream".into(),
        digest: Digest::sha256(layer),
        size: layer.len() as u64,
        annotations: Default::default(),
    };
    vec![config.clone(), Manifest::snapshot(&config, vec![layer], Default::default()).to_document()]
}

async fn a_bad_frame_is_not_moved(on: Backend) {
    let rig = rig(on).await;
    let all = snapshot(&numbers(0..200), vec![]);
    let some = snapshot(&numbers(0..20), vec![]);
    push(&rig.store, &all, "all").await.unwrap();
    push(&rig.store, &some, "some").await.unwrap();
    let bad = Digest::sha256(&some.pages[7]);
    let at = rig.store.metadata().locate(vec![bad]).await.unwrap()[0].clone().unwrap();
    rig.flip(&pack_path(&at.pack), (at.offset + at.frame_len - 10) as usize).await;
    rig.store.delete_snapshot(&repository(), &all.manifest.digest).await.unwrap();
    rig.seconds(LEASE + 1);
    // This test is not about quarantine, so the result does not matter.
    drop(rig.store.gc(&at_once(), &mut |_| ()).await);
    assert_eq!(rig.store.metadata().locate(vec![bad]).await.unwrap()[0].as_ref().unwrap().pack, at.pack);
    let good = rig.store.metadata().locate(vec![Digest::sha256(&some.pages[8])]).await.unwrap()[0].clone().unwrap();
    assert_ne!(good.pack, at.pack);
    assert_eq!(rig.store.read(&Digest::sha256(&some.pages[8])).await.unwrap(), some.pages[8][..]);
}

async fn several_at_once_free_everything_once(on: Backend) {
    let rig = rig_with_packs_of(on, 4096).await;
    for i in 0..4_u64 {
        let s = snapshot(&numbers(i * 100..i * 100 + 120), vec![]);
        push(&rig.store, &s, &format!("t{i}")).await.unwrap();
        if i != 2 {
            rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
        }
    }
    rig.seconds(LEASE + 1);
    let (other, third) = (rig.another().await, rig.another().await);
    let options = GcOptions { batch: 7, ..at_once() };
    let run = |store: Store| {
        let options = options.clone();
        async move { store.gc(&options, &mut |_| ()).await }
    };
    let (a, b, c) = tokio::join!(run(rig.store.clone()), run(other), run(third));
    let released: u64 = [a, b, c].into_iter().map(|r| r.unwrap().released).sum();
    // Objects that one collection left because another held them are collected now.
    let rest = gc(&rig).await.released;
    let kept = leaks::reachable(&rig.store).await.1;
    assert_eq!(rest, 0);
    assert!(released > kept, "{released} released, {kept} kept");
    gc(&rig).await;
    leaks::assert_none(&rig).await;
    let kept = snapshot(&numbers(200..320), vec![]);
    rig.store.verify(&kept.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn unknown_children_are_not_taken_for_none(on: Backend) {
    for damage in ["UPDATE containers SET children = x'ffffffffffffffffffffffff'", "DELETE FROM containers"] {
        let rig = rig(on).await;
        let s = snapshot(&numbers(0..30), vec![]);
        push(&rig.store, &s, "a").await.unwrap();
        rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
        rig.seconds(LEASE + 1);
        drop(rig.sql(damage));
        let files = rig.pack_files().await;
        let report = gc(&rig).await;
        assert_eq!((report.deferred, report.released, report.unclaimed), (1, 0, 0), "{damage}: {report:?}");
        assert_eq!(rig.pack_files().await, files);
        for raw in &s.pages {
            assert_eq!(rig.store.read(&Digest::sha256(raw)).await.unwrap(), raw[..], "{damage}");
        }
        let runs = rig.store.metadata().gc_runs(None, 1).await.unwrap().rows;
        assert!(runs[0].report.contains(r#""deferred":1"#), "{}", runs[0].report);
    }
}

async fn killed_after_any_step_the_next_run_ends_it(on: Backend) {
    for killed_after in 0..5 {
        let mut rig = rig_with_packs_of(on, 8192).await;
        let (old, new) = (snapshot(&numbers(0..200), vec![]), snapshot(&numbers(150..220), vec![]));
        push(&rig.store, &old, "old").await.unwrap();
        push(&rig.store, &new, "new").await.unwrap();
        rig.store.delete_snapshot(&repository(), &old.manifest.digest).await.unwrap();
        rig.seconds(LEASE + 1);
        for step in 0..killed_after {
            let metadata = rig.store.metadata();
            match step {
                0 => drop(metadata.collect(30).await.unwrap()),
                1 => while metadata.collect(100).await.unwrap().more {},
                2 => drop(metadata.empty_packs(1).await.unwrap()),
                // Compaction's claim, and a pack it did not finish.
                3 => {
                    metadata.claim_sparse_packs(10, Duration::from_secs(LEASE)).await.unwrap();
                    metadata.begin_pack("0190aaaa-0000-7000-8000-0000000000ab".into(), Duration::from_secs(LEASE)).await.unwrap();
                }
                // Bytes deleted, rows not.
                _ => {
                    metadata.empty_packs(1000).await.unwrap();
                    for pack in metadata.emptied_packs(Duration::ZERO, 1000).await.unwrap() {
                        rig.packs.delete(&pack_path(&pack.key)).await.unwrap();
                    }
                }
            }
            rig.reopen().await;
        }
        rig.seconds(LEASE + 1);
        gc(&rig).await;
        leaks::assert_none(&rig).await;
        rig.store.verify(&new.manifest.digest, &mut |_| ()).await.unwrap();
    }
}

async fn a_dry_run_changes_nothing_and_says_what_a_real_one_does(on: Backend) {
    let rig = rig(on).await;
    let (old, new) = (snapshot(&numbers(0..90), vec![]), snapshot(&numbers(50..120), vec![]));
    push(&rig.store, &old, "old").await.unwrap();
    push(&rig.store, &new, "new").await.unwrap();
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&snapshot(&numbers(300..310), vec![]).stream(), 500)).await.unwrap();
    rig.store.delete_snapshot(&repository(), &old.manifest.digest).await.unwrap();
    rig.seconds(LEASE + 1);
    let (rows, files) = (rig.store.metadata().rows_written(), rig.pack_files().await);
    let planned = rig.store.gc(&GcOptions { dry_run: true, ..at_once() }, &mut |_| ()).await.unwrap();
    assert_eq!((rig.store.metadata().rows_written(), rig.pack_files().await), (rows, files));
    assert!(rig.store.metadata().gc_runs(None, 1).await.unwrap().rows.is_empty());
    let done = gc(&rig).await;
    assert!(planned.dry_run && planned.released > 0 && planned.unclaimed > 0);
    assert_eq!((planned.released, planned.unclaimed, planned.freed_bytes), (done.released, done.unclaimed, done.freed_bytes));
}

async fn a_schedule_that_finds_nothing_leaves_no_row(on: Backend) {
    let rig = rig(on).await;
    let schedule = GcOptions { trigger: GcTrigger::Schedule, ..at_once() };
    rig.store.gc(&schedule, &mut |_| ()).await.unwrap();
    assert!(rig.store.metadata().gc_runs(None, 1).await.unwrap().rows.is_empty());
    let s = snapshot(&numbers(0..5), vec![]);
    push(&rig.store, &s, "a").await.unwrap();
    rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    rig.seconds(LEASE + 1);
    rig.store.gc(&schedule, &mut |_| ()).await.unwrap();
    assert_eq!(rig.store.metadata().gc_runs(None, 10).await.unwrap().rows.len(), 1);
}

async fn eviction_takes_the_least_recently_used_and_leaves_what_is_pinned(on: Backend) {
    let rig = rig(on).await;
    let snapshots: Vec<_> = (0..4_u64).map(|i| snapshot(&numbers(i * 100..i * 100 + 50), vec![])).collect();
    for (i, s) in snapshots.iter().enumerate() {
        push(&rig.store, s, &format!("t{i}")).await.unwrap();
        rig.seconds(1);
    }
    let digest = |i: usize| snapshots[i].manifest.digest;
    let there = || async {
        let rows = rig.store.snapshots(&repository(), None, 10).await;
        rows.map(|page| (0..4).filter(|i| page.rows.iter().any(|r| r.digest == digest(*i))).collect())
            .unwrap_or_else(|_| Vec::<usize>::new())
    };
    let one = rig.store.metadata().disk_bytes().await.unwrap() / 4;
    // The oldest was used again, the second oldest is pinned: the third is the first to go.
    rig.store.metadata().touch_snapshot(repository(), digest(0)).await.unwrap();
    rig.store.metadata().pin_snapshot(repository(), digest(1), Pin::ByHand, true).await.unwrap();
    assert_eq!(rig.store.evict(one * 5, &at_once(), &mut |_| ()).await.unwrap().evicted, 0);
    let dry = GcOptions { dry_run: true, ..at_once() };
    assert_eq!(rig.store.evict(one * 3 + one / 2, &dry, &mut |_| ()).await.unwrap().evicted, 1);
    assert_eq!(there().await, [0, 1, 2, 3]);
    // Leases still run, so no byte goes; that must not cost another snapshot, neither now nor next
    // time.
    for expected in [1, 0] {
        assert_eq!(rig.store.evict(one * 3 + one / 2, &at_once(), &mut |_| ()).await.unwrap().evicted, expected);
        assert_eq!(there().await, [0, 1, 3]);
    }
    rig.seconds(LEASE + 1);
    rig.store.evict(one * 3 + one / 2, &at_once(), &mut |_| ()).await.unwrap();
    assert_eq!(there().await, [0, 1, 3]);
    assert!(rig.store.metadata().disk_bytes().await.unwrap() <= one * 3 + one / 2);
    leaks::assert_none(&rig).await;
    assert_eq!(rig.store.evict(one * 2 + one / 2, &at_once(), &mut |_| ()).await.unwrap().evicted, 1);
    assert_eq!(there().await, [0, 1]);
    let report = rig.store.evict(one / 2, &at_once(), &mut |_| ()).await.unwrap();
    assert!(report.error.as_ref().is_some_and(|e| e.contains("pinned") && e.contains(&digest(1).to_string())), "{report:?}");
    assert_eq!(there().await, [1]);
    rig.store.metadata().pin_snapshot(repository(), digest(1), Pin::ByHand, false).await.unwrap();
    rig.store.evict(one / 2, &at_once(), &mut |_| ()).await.unwrap();
    assert_eq!((there().await.len(), count_files(&rig).await), (0, 0));
    assert!(rig.store.metadata().packs(None, 10).await.unwrap().iter().all(|p| p.state == PackState::Live));
}
