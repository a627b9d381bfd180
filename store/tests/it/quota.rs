//! Quotas: kept exactly, whatever happens at the same time; deletions and reads go on; a collection
//! makes room again.

use crate::common::rig::{Backend, Rig};
use crate::common::{Snapshot, accuse, blob_frame, pieces, push, repository, snapshot, stream, tag};
use bytes::Bytes;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_store::{Error, Metadata, Options, PackState, Quota, QuotaLimits, Store};
use pfr_testkit::frames::zstd;

const NONE: QuotaLimits = QuotaLimits { bytes: None, objects: None, snapshots: None };

async fn set(metadata: &dyn Metadata, limits: QuotaLimits) -> Quota {
    metadata.set_quota(limits, None).await.unwrap().expect("a quota")
}

/// What is used: bytes, blobs, snapshots.
async fn used(metadata: &dyn Metadata) -> (u64, u64, u64) {
    let quota = metadata.quota().await.unwrap().expect("a quota");
    (quota.used_bytes, quota.used_objects, quota.used_snapshots)
}

/// The counts of the quota are those that fsck finds.
async fn assert_sound(metadata: &dyn Metadata) {
    let audit = metadata.audit(false).await.unwrap();
    assert_eq!(audit.wrong, 0, "{:#?}", audit.discrepancies);
}

fn code<T: std::fmt::Debug>(result: pfr_store::Result<T>) -> ErrorCode {
    result.unwrap_err().code()
}

async fn a_quota_counts_what_is_there_and_follows_what_happens(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    let (one, two) = (snapshot(&[1, 2], vec![]), snapshot(&[2, 3], vec![]));
    push(&rig.store, &one, "one").await.unwrap();
    assert_eq!(metadata.quota().await.unwrap(), None);
    let first = set(metadata, QuotaLimits { snapshots: Some(100), ..NONE }).await;
    let live = |packs: Vec<pfr_store::PackRow>| packs.iter().map(|pack| pack.live_bytes).sum::<u64>();
    assert_eq!(first.used_bytes, live(metadata.packs(None, 100).await.unwrap()));
    assert_eq!((first.used_objects, first.used_snapshots), (one.pages.len() as u64 + one.documents().len() as u64, 1));
    push(&rig.store, &two, "two").await.unwrap();
    let both = used(metadata).await;
    assert!(both.0 > first.used_bytes && both.1 > first.used_objects && both.2 == 2, "{both:?}");
    assert_sound(metadata).await;
    // The same snapshot again, and a fork, take nothing.
    push(&rig.store, &two, "again").await.unwrap();
    rig.store.fork(&repository(), two.manifest.digest, "f", 10).await.unwrap();
    assert_eq!(used(metadata).await, both);
    // A changed limit counts nothing anew, and no limit is no quota.
    assert_eq!(set(metadata, QuotaLimits { bytes: Some(1 << 40), ..NONE }).await.used_bytes, both.0);
    rig.store.delete_snapshot(&repository(), &one.manifest.digest).await.unwrap();
    assert_eq!(used(metadata).await, (both.0, both.1, 1), "blobs stay until a collection");
    rig.collect().await;
    let left = used(metadata).await;
    assert!(left.0 < both.0 && left.1 < both.1, "{left:?} of {both:?}");
    assert_sound(metadata).await;
    assert_eq!(metadata.set_quota(NONE, None).await.unwrap(), None);
    push(&rig.store, &one, "one").await.unwrap();
    assert_sound(metadata).await;
}

async fn a_push_beyond_the_quota_stores_nothing_and_room_comes_with_a_collection(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    let (one, two) = (snapshot(&[1, 2], vec![]), snapshot(&[3, 4], vec![]));
    push(&rig.store, &one, "one").await.unwrap();
    let full = set(metadata, QuotaLimits { bytes: Some(1 << 40), ..NONE }).await.used_bytes;
    set(metadata, QuotaLimits { bytes: Some(full + 10), ..NONE }).await;
    let files = rig.pack_files().await;
    let refused = push(&rig.store, &two, "two").await.unwrap_err();
    let text = refused.to_string();
    assert!(matches!(refused, Error::QuotaExceeded { what: "bytes", used, added, .. } if used == full && added > 10), "{text}");
    assert!(text.contains("has no room for this: it holds ") && text.contains("delete snapshots"), "{text}");
    assert!(text.contains(&format!("{} of ", pfr_service::units::bytes(full))) && !refused.code().retryable(), "{text}");
    assert_eq!(used(metadata).await, (full, one.pages.len() as u64 + one.documents().len() as u64, 1), "all or nothing");
    assert_eq!(rig.pack_files().await, files, "the bytes of a refused pack are deleted");
    let packs = metadata.packs(None, 100).await.unwrap();
    assert!(packs.iter().all(|pack| pack.state == PackState::Live), "and its row: {packs:?}");
    // Exactly full: not even one blob more is taken in, and what is there can still be committed.
    set(metadata, QuotaLimits { bytes: Some(full), ..NONE }).await;
    assert_eq!(code(push(&rig.store, &two, "two").await), ErrorCode::QuotaExceeded);
    let other = "other".parse().unwrap();
    let session = rig.store.open_push(&other).await.unwrap();
    assert_eq!(rig.store.missing(&session.id, vec![(one.manifest.digest, Kind::Manifest)]).await.unwrap(), [] as [usize; 0]);
    rig.store.commit_in(&other, &session.id, one.manifest.digest, Some(tag("t")), None).await.unwrap();
    // Reads and deletions go on, and a collection makes room.
    set(metadata, QuotaLimits { bytes: Some(full + full / 2), ..NONE }).await;
    assert_eq!(code(push(&rig.store, &two, "two").await), ErrorCode::QuotaExceeded);
    rig.store.verify(&one.manifest.digest, &mut |_| {}).await.unwrap();
    rig.store.delete_snapshot(&other, &one.manifest.digest).await.unwrap();
    rig.store.delete_snapshot(&repository(), &one.manifest.digest).await.unwrap();
    rig.collect().await;
    push(&rig.store, &two, "two").await.unwrap();
    assert_sound(metadata).await;
}

/// Uploads one frame.
async fn send(store: &Store, frame: Bytes) -> pfr_store::Result<()> {
    let session = store.open_push(&repository()).await?;
    store.ingest(&session.id, pieces(&stream([frame]), 777)).await.map(drop)
}

async fn a_full_quota_lets_damaged_blobs_be_replaced_and_nothing_be_added(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (metadata, store) = (&*rig.metadata, &rig.store);
    let (one, two, text) = (snapshot(&[1, 2], vec![]), snapshot(&[3], vec![]), [b'x'; 5000]);
    push(store, &one, "one").await.unwrap();
    send(store, zstd(&text)).await.unwrap();
    set(metadata, QuotaLimits { snapshots: Some(1), ..NONE }).await;
    let full = used(metadata).await;
    set(metadata, QuotaLimits { bytes: Some(full.0), objects: Some(full.1), snapshots: Some(1) }).await;
    assert_eq!(code(send(store, blob_frame(&one.pages[0])).await), ErrorCode::QuotaExceeded, "nothing is to be healed");

    accuse(store, &[Digest::sha256(&one.pages[0])]).await;
    assert_eq!(code(push(store, &two, "two").await), ErrorCode::QuotaExceeded);
    send(store, blob_frame(&one.pages[0])).await.unwrap();
    // The nodes above it may come in an upload of their own.
    push(store, &one, "again").await.unwrap();
    assert_eq!(used(metadata).await, full);
    store.verify(&one.manifest.digest, &mut |_| {}).await.unwrap();

    // The good copy may be longer than what it replaces.
    accuse(store, &[Digest::sha256(&text)]).await;
    send(store, blob_frame(&text)).await.unwrap();
    assert!(store.damaged().await.unwrap().is_empty());
    let healed = used(metadata).await;
    assert!(healed.0 > full.0 && (healed.1, healed.2) == (full.1, full.2), "{healed:?} after {full:?}");
    assert_eq!(code(push(store, &two, "two").await), ErrorCode::QuotaExceeded);
    assert_sound(metadata).await;
}

async fn names_that_the_journal_restores_count(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    let snapshots: Vec<Snapshot> = (0..3).map(|n| snapshot(&[n], vec![])).collect();
    for (n, snapshot) in snapshots.iter().enumerate() {
        push(&rig.store, snapshot, &format!("t{n}")).await.unwrap();
    }
    set(metadata, QuotaLimits { snapshots: Some(1), ..NONE }).await;
    let deleted = |n: usize| Record::Delete { repository: repository(), manifest: snapshots[n].manifest.digest };
    let restored = |n: usize| Record::Snapshot {
        repository: repository(),
        manifest: snapshots[n].manifest.digest,
        parents: vec![],
        artifact_type: None,
        subject: None,
        at: 1,
        new_bytes: 0,
    };
    for (records, left) in [
        (vec![deleted(0), deleted(1), restored(1)], 2),
        (vec![restored(1), deleted(2), deleted(1)], 0),
        (vec![restored(0), restored(1), restored(2)], 3),
    ] {
        assert_eq!(metadata.restore_names(records, 0).await.unwrap(), []);
        assert_eq!(used(metadata).await.2, left);
        assert_sound(metadata).await;
    }
}

async fn a_quota_below_what_is_used_takes_no_new_snapshot_even_of_stored_blobs(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let metadata = &*rig.metadata;
    let (one, two) = (snapshot(&[1, 2], vec![]), snapshot(&[3, 4], vec![]));
    push(&rig.store, &one, "one").await.unwrap();
    // Uploaded before the quota was lowered.
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&two.stream(), 777)).await.unwrap();
    set(metadata, QuotaLimits { objects: Some(1), ..NONE }).await;
    assert_eq!(code(rig.store.commit(&session.id, two.manifest.digest, Some(tag("two")), None).await), ErrorCode::QuotaExceeded);
    // Tags and forks add nothing.
    rig.store.fork(&repository(), one.manifest.digest, "f", 3).await.unwrap();
    rig.store.delete_tag(&repository(), &tag("f-1"), None).await.unwrap();
    set(metadata, QuotaLimits { objects: Some(1000), ..NONE }).await;
    rig.store.commit(&session.id, two.manifest.digest, Some(tag("two")), None).await.unwrap();
    assert_sound(metadata).await;
}

async fn a_limit_on_snapshots_holds_at_the_commit(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    set(&*rig.metadata, QuotaLimits { snapshots: Some(2), ..NONE }).await;
    let made: Vec<Snapshot> = (0..3).map(|n| snapshot(&[n], vec![])).collect();
    push(&rig.store, &made[0], "a").await.unwrap();
    push(&rig.store, &made[1], "b").await.unwrap();
    let refused = push(&rig.store, &made[2], "c").await.unwrap_err();
    assert!(matches!(refused, Error::QuotaExceeded { what: "snapshots", used: 2, limit: 2, added: 1 }), "{refused}");
    push(&rig.store, &made[1], "again").await.unwrap();
    rig.store.delete_snapshot(&repository(), &made[0].manifest.digest).await.unwrap();
    push(&rig.store, &made[2], "c").await.unwrap();
    assert_sound(&*rig.metadata).await;
}

/// Transactions at the same time, of several processes: each sees what the others added.
async fn pushes_at_the_same_time_do_not_exceed_a_quota_together(backend: Backend) {
    const PUSHES: u64 = 12;
    let rig = Rig::still(backend, Options::default()).await;
    push(&rig.store, &snapshot(&[1000], vec![]), "first").await.unwrap();
    let before = set(&*rig.metadata, QuotaLimits { bytes: Some(1 << 40), ..NONE }).await.used_bytes;
    push(&rig.store, &snapshot(&[1001], vec![]), "second").await.unwrap();
    let (after, ..) = used(&*rig.metadata).await;
    // Each push takes about as much as the second: about five fit.
    let limit = after + (after - before) * 11 / 2;
    set(&*rig.metadata, QuotaLimits { bytes: Some(limit), ..NONE }).await;
    let other = rig.another().await;
    let pushes = (0..PUSHES).map(|n| {
        let store = if n % 2 == 0 { rig.store.clone() } else { other.clone() };
        tokio::spawn(async move { push(&store, &snapshot(&[n], vec![]), &format!("t{n}")).await.map(drop) })
    });
    let (mut stored, mut refused) = (0, 0);
    for done in pushes.collect::<Vec<_>>() {
        match done.await.unwrap() {
            Ok(()) => stored += 1,
            Err(error) if error.code() == ErrorCode::QuotaExceeded => refused += 1,
            Err(error) => panic!("{error}"),
        }
    }
    let (bytes, ..) = used(&*rig.metadata).await;
    assert!(bytes <= limit, "{bytes} of {limit}");
    assert!(stored >= 3 && refused >= 3, "{stored} stored, {refused} refused");
    assert_sound(&*rig.metadata).await;
}

/// A quota that is set while others push and collect counts each of them once.
async fn a_first_quota_counts_exactly_beside_pushes_and_collections(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let (store, other) = (rig.store.clone(), rig.another().await);
    let pushing = tokio::spawn(async move {
        for n in 0..20 {
            let s = snapshot(&[n, n + 1], vec![]);
            push(&store, &s, "t").await.unwrap();
            if n % 3 == 0 {
                store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
            }
        }
    });
    let collecting = tokio::spawn(async move {
        for _ in 0..40 {
            other.metadata().collect(5).await.unwrap();
        }
    });
    for n in 0..20 {
        rig.metadata.set_quota(NONE, None).await.unwrap();
        set(&*rig.metadata, QuotaLimits { snapshots: Some(1000 + n), ..NONE }).await;
    }
    pushing.await.unwrap();
    collecting.await.unwrap();
    assert_sound(&*rig.metadata).await;
}

async fn fsck_finds_and_corrects_a_wrong_count(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    push(&rig.store, &snapshot(&[1], vec![]), "t").await.unwrap();
    let right = set(&*rig.metadata, QuotaLimits { bytes: Some(1 << 40), ..NONE }).await;
    rig.sql("UPDATE quota SET used_bytes = used_bytes + 5, used_objects = 1");
    let audit = rig.metadata.audit(false).await.unwrap();
    assert!(audit.wrong == 2 && audit.discrepancies.iter().all(|found| found.what == "quota"), "{audit:?}");
    assert!(rig.metadata.audit(true).await.unwrap().repaired);
    assert_eq!(rig.metadata.quota().await.unwrap(), Some(right));
    assert_sound(&*rig.metadata).await;
}

/// A replica of a version without quotas stored what this one has deleted since.
async fn a_count_below_zero_is_shown_as_none_and_found_by_fsck(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    set(&*rig.metadata, QuotaLimits { snapshots: Some(1), ..NONE }).await;
    rig.sql("UPDATE quota SET used_snapshots = -2");
    assert_eq!(used(&*rig.metadata).await, (0, 0, 0));
    let audit = rig.metadata.audit(true).await.unwrap();
    assert!(audit.repaired && audit.wrong == 1 && audit.discrepancies[0].found == "-2 snapshots", "{audit:?}");
    push(&rig.store, &snapshot(&[1], vec![]), "t").await.unwrap();
    assert_eq!(used(&*rig.metadata).await.2, 1);
    assert_sound(&*rig.metadata).await;
}

on_every_backend!(
    a_quota_counts_what_is_there_and_follows_what_happens,
    a_push_beyond_the_quota_stores_nothing_and_room_comes_with_a_collection,
    a_full_quota_lets_damaged_blobs_be_replaced_and_nothing_be_added,
    names_that_the_journal_restores_count,
    a_quota_below_what_is_used_takes_no_new_snapshot_even_of_stored_blobs,
    a_limit_on_snapshots_holds_at_the_commit,
    pushes_at_the_same_time_do_not_exceed_a_quota_together,
    a_first_quota_counts_exactly_beside_pushes_and_collections,
    fsck_finds_and_corrects_a_wrong_count,
    a_count_below_zero_is_shown_as_none_and_found_by_fsck,
);
