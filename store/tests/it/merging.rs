//! Small packs become few: nothing is lost, nothing is copied without end, and a nearly full disk
//! is left alone.

use crate::common::rig::{Backend, Rig, pack_path};
use crate::common::{Snapshot, blob_frame, leaks, push, repository, snapshot, stream};
use futures::TryStreamExt as _;
use object_store::ObjectStoreExt as _;
use pfr_schema::api::GcReport;
use pfr_schema::{Digest, ErrorCode};
use pfr_store::{Clock, GcOptions, GcPart, Options, PackCounts, PackRow, Store};
use std::time::Duration;

const LEASE: u64 = 60;
const DAY: u64 = 24 * 3600;

on_every_backend!(
    small_packs_are_merged_and_readers_go_on,
    many_small_pushes_leave_few_packs,
    after_a_day_of_rest_one_small_pack_is_left,
    a_pack_that_cannot_be_read_keeps_no_other_from_being_merged_once,
    several_runs_at_once_share_the_packs,
    a_bad_frame_stays_and_is_not_tried_again,
    killed_after_any_step_the_next_run_ends_it,
);

async fn rig(on: Backend, pack_bytes: u64) -> Rig {
    Rig::still(on, Options { pack_bytes, lease: Duration::from_secs(LEASE), ..Options::default() }).await
}

fn merging() -> GcOptions {
    GcOptions { part: GcPart::Merging, grace: Duration::ZERO, ..GcOptions::default() }
}

async fn merge(store: &Store) -> GcReport {
    store.gc(&merging(), &mut |_| ()).await.unwrap()
}

async fn packs(rig: &Rig) -> Vec<PackRow> {
    rig.store.metadata().packs(None, 1000).await.unwrap()
}

/// How many packs are live, and how many of these are small.
async fn counts(rig: &Rig) -> (u64, u64) {
    let PackCounts { live, small } = rig.metadata.count_packs(rig.store.full_pack()).await.unwrap();
    (live, small)
}

/// Pushes snapshots of three pages each, a pack each.
async fn pushed(rig: &Rig, numbers: std::ops::Range<u64>) -> Vec<Snapshot> {
    let mut all = Vec::new();
    for i in numbers {
        let s = snapshot(&[3 * i, 3 * i + 1, 3 * i + 2], vec![]);
        push(&rig.store, &s, &format!("t{i}")).await.unwrap();
        all.push(s);
    }
    all
}

async fn assert_well(rig: &Rig, snapshots: &[Snapshot]) {
    leaks::assert_none(rig).await;
    for s in snapshots {
        rig.store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    }
    assert_eq!(rig.store.fsck(false, &mut |_| ()).await.unwrap().wrong, 0);
}

async fn small_packs_are_merged_and_readers_go_on(on: Backend) {
    let rig = rig(on, 1 << 20).await;
    let mut snapshots = pushed(&rig, 0..7).await;
    assert_eq!(merge(&rig.store).await.packs_merged, 0, "seven are left alone");
    snapshots.extend(pushed(&rig, 7..9).await);
    let before = rig.store.usage(Duration::ZERO).await.unwrap();
    let wanted: Vec<Digest> = snapshots.iter().flat_map(|s| &s.pages).map(|page| Digest::sha256(page)).collect();
    let reader = rig.store.frames(wanted.clone()).await.unwrap();
    let planned = rig.store.gc(&GcOptions { dry_run: true, ..merging() }, &mut |_| ()).await.unwrap();
    assert_eq!(counts(&rig).await, (9, 9));
    let done = merge(&rig.store).await;
    assert_eq!(counts(&rig).await, (1, 1), "emptied packs are not counted");
    assert_eq!((done.packs_merged, done.packs_deleted, done.packs_compacted), (9, 9, 0), "{done:?}");
    assert_eq!((planned.packs_merged, planned.moved_bytes), (done.packs_merged, done.moved_bytes));
    assert_eq!(packs(&rig).await.len(), 1);
    let read: Vec<bytes::Bytes> = reader.try_collect().await.unwrap();
    assert_eq!(read.concat(), stream(snapshots.iter().flat_map(|s| &s.pages).map(|page| blob_frame(page))));
    let after = rig.store.usage(Duration::ZERO).await.unwrap();
    assert_eq!((after.live_bytes, after.draining_bytes), (before.live_bytes, 0));
    assert!(after.disk_bytes < before.disk_bytes, "{after:?}");
    assert_eq!(merge(&rig.store).await.packs_merged, 0, "it is alone");
    assert_well(&rig, &snapshots).await;
    // Merged blobs are freed like all others.
    for s in &snapshots {
        rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    }
    rig.store.gc(&GcOptions { part: GcPart::All, ..merging() }, &mut |_| ()).await.unwrap();
    assert_eq!(rig.pack_files().await.len(), 0);
}

async fn many_small_pushes_leave_few_packs(on: Backend) {
    let pack_bytes = 16 << 10;
    let rig = rig(on, pack_bytes).await;
    let (mut snapshots, mut moved) = (Vec::new(), 0);
    for round in 0..12 {
        snapshots.extend(pushed(&rig, 4 * round..4 * (round + 1)).await);
        moved += merge(&rig.store).await.moved_bytes;
    }
    let live = leaks::reachable(&rig.store).await.0;
    let ideal = live.div_ceil(pack_bytes) + 1;
    let rows = packs(&rig).await;
    let is_small = |pack: &&PackRow| pack.frame_bytes < pack_bytes / 2;
    assert_eq!(counts(&rig).await, (rows.len() as u64, rows.iter().filter(is_small).count() as u64));
    assert!(rows.iter().any(|pack| !is_small(&pack)), "{rows:?}");
    let packs = rows.len() as u64;
    println!("{packs} packs, ideal {ideal}; {moved} bytes copied of {live}");
    assert!(packs <= 2 * ideal && moved <= 4 * live, "{packs} packs, ideal {ideal}; {moved} bytes copied of {live}");
    assert_well(&rig, &snapshots).await;
}

async fn after_a_day_of_rest_one_small_pack_is_left(on: Backend) {
    let rig = rig(on, 1 << 20).await;
    let snapshots = pushed(&rig, 0..3).await;
    rig.seconds(DAY / 2);
    assert_eq!(merge(&rig.store).await.packs_merged, 0);
    rig.seconds(DAY);
    assert_eq!(merge(&rig.store).await.packs_merged, 3);
    rig.seconds(2 * DAY);
    assert_eq!(merge(&rig.store).await.packs_merged, 0);
    assert_well(&rig, &snapshots).await;
}

async fn a_pack_that_cannot_be_read_keeps_no_other_from_being_merged_once(on: Backend) {
    let rig = rig(on, 1 << 20).await;
    let snapshots = pushed(&rig, 0..3).await;
    let page = Digest::sha256(&snapshots[1].pages[0]);
    let away = pack_path(&rig.metadata.locate(vec![page]).await.unwrap()[0].clone().unwrap().pack);
    let bytes = rig.bytes(&away).await;
    rig.packs.delete(&away).await.unwrap();
    rig.seconds(2 * DAY);
    let mut last = GcReport::default();
    let failed = rig.store.gc(&merging(), &mut |report| last.clone_from(report)).await.unwrap_err();
    assert_eq!(failed.code(), ErrorCode::Unavailable, "{failed}");
    assert_eq!(last.packs_merged, 2, "{last:?}");
    // One at rest is left, and the copy of the others is new: each run would copy that again.
    rig.seconds(LEASE + 1);
    let next = merge(&rig.store).await;
    assert_eq!((next.packs_merged, next.moved_bytes), (0, 0), "{next:?}");
    rig.put(&away, bytes).await;
    rig.seconds(2 * DAY);
    assert_eq!(merge(&rig.store).await.packs_merged, 2);
    assert_well(&rig, &snapshots).await;
}

async fn several_runs_at_once_share_the_packs(on: Backend) {
    let rig = rig(on, 16 << 10).await;
    let snapshots = pushed(&rig, 0..40).await;
    let before = leaks::reachable(&rig.store).await.0;
    let (other, third) = (rig.another().await, rig.another().await);
    let (a, b, c) = tokio::join!(merge(&rig.store), merge(&other), merge(&third));
    // A run may copy once more what another one wrote meanwhile, if that is due.
    let (merged, moved) = (a.packs_merged + b.packs_merged + c.packs_merged, a.moved_bytes + b.moved_bytes + c.moved_bytes);
    assert!(merged >= 30 && moved < before * 3 / 2, "{a:?} {b:?} {c:?}");
    assert_well(&rig, &snapshots).await;
}

async fn a_bad_frame_stays_and_is_not_tried_again(on: Backend) {
    let rig = rig(on, 1 << 20).await;
    let snapshots = pushed(&rig, 0..8).await;
    let bad = Digest::sha256(&snapshots[3].pages[1]);
    let at = rig.store.metadata().locate(vec![bad]).await.unwrap()[0].clone().unwrap();
    rig.flip(&pack_path(&at.pack), (at.offset + at.frame_len - 10) as usize).await;
    assert_eq!(merge(&rig.store).await.packs_merged, 8);
    let left = packs(&rig).await;
    assert_eq!((left.len(), left[0].live_bytes), (2, at.frame_len), "{left:?}");
    // However many there are: damage does not make a tier due, nor does a day.
    rig.seconds(2 * DAY);
    assert_eq!(merge(&rig.store).await.packs_merged, 0);
    // A push heals it, and then its pack goes.
    push(&rig.store, &snapshots[3], "again").await.unwrap();
    rig.store.gc(&GcOptions { part: GcPart::All, ..merging() }, &mut |_| ()).await.unwrap();
    assert_well(&rig, &snapshots).await;
}

async fn killed_after_any_step_the_next_run_ends_it(on: Backend) {
    for killed_after in 1..4 {
        let mut rig = rig(on, 1 << 20).await;
        let snapshots = pushed(&rig, 0..8).await;
        let metadata = rig.store.metadata();
        let lease = Duration::from_secs(LEASE);
        let claimed = metadata.claim_small_packs(rig.store.full_pack(), None, lease).await.unwrap();
        assert_eq!(claimed.len(), 8);
        assert!(
            metadata.claim_small_packs(rig.store.full_pack(), None, lease).await.unwrap().is_empty(),
            "what is claimed is not claimed again"
        );
        let key = "0190aaaa-0000-7000-8000-0000000000ab";
        if killed_after > 1 {
            metadata.begin_pack(key.into(), lease).await.unwrap();
        }
        if killed_after > 2 {
            rig.put(&pack_path(key), b"complete, and not indexed".to_vec()).await;
        }
        rig.reopen().await;
        assert_eq!(merge(&rig.store).await.packs_merged, 0, "the claim lasts");
        rig.seconds(LEASE + 1);
        assert_eq!(merge(&rig.store).await.packs_merged, 8);
        rig.store.gc(&GcOptions { part: GcPart::All, ..merging() }, &mut |_| ()).await.unwrap();
        assert_well(&rig, &snapshots).await;
    }
}

#[tokio::test]
async fn below_the_floor_nothing_is_merged() {
    let dir = tempfile::tempdir().unwrap();
    let opened = async |min_free, pack_bytes| {
        let options = Options { clock: Clock::system(), min_free, pack_bytes, ..Options::default() };
        Store::open(dir.path(), options).await.unwrap()
    };
    {
        let store = opened(None, 1 << 20).await;
        for i in 0..8 {
            push(&store, &snapshot(&[i], vec![]), &format!("t{i}")).await.unwrap();
        }
    }
    let full = opened(Some(u64::MAX), 1 << 20).await;
    let report = full.gc(&GcOptions { part: GcPart::All, ..merging() }, &mut |_| ()).await.unwrap();
    assert_eq!((report.packs_merged, report.error), (0, None));
    // The metadata have space, and the packs do not: a full pack would not fit.
    let packs = opened(None, 1 << 60).await;
    assert_eq!(merge(&packs).await.packs_merged, 0);
    assert_eq!(merge(&opened(None, 1 << 20).await).await.packs_merged, 8);
    leaks::assert_none_in(&full, dir.path()).await;
}
