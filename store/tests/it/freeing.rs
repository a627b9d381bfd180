//! Freeing at once: the end of a session ends its leases, reports say what stays and why, and the
//! dry run is the run without its writes.

use crate::common::rig::{Backend, Rig};
use crate::common::watched::Watched;
use crate::common::{Snapshot, leaks, pieces, property, push, repository, snapshot, tag};
use pfr_schema::api::GcReport;
use pfr_schema::journal::{Journal, Numbered};
use pfr_schema::{Digest, Kind};
use pfr_store::{GcOptions, LivePush, Metadata, Options, Pin, Store, TagMove};
use proptest::prelude::*;
use std::sync::Arc;
use std::time::Duration;

const LEASE: u64 = 3600;

on_every_backend!(
    a_deleted_snapshot_is_freed_at_once_and_said_to_be_one,
    an_aborted_push_is_garbage_at_once,
    what_a_live_session_was_told_is_present_stays_when_another_session_ends,
    a_pack_that_compaction_wrote_frees_its_leases_at_once_too,
    the_report_says_what_is_protected_by_whom_and_until_when,
    ending_all_sessions_frees_what_an_interrupted_pull_left,
    the_end_of_all_captures_frees_what_they_stored_and_ends_no_pull,
    eviction_frees_bytes_at_once,
    what_takes_up_room_adds_up,
    what_takes_up_room_is_counted_in_as_many_transactions_for_more_packs,
    the_end_of_a_session_costs_no_write_for_each_object,
    the_dry_run_counts_sessions_and_the_objects_of_the_journal,
);
on_every_backend_and_memory!(the_dry_run_says_exactly_what_the_run_does);

async fn rig(on: Backend) -> Rig {
    rig_with_packs_of(on, 64 << 20).await
}

async fn rig_with_packs_of(on: Backend, pack_bytes: u64) -> Rig {
    Rig::still(on, Options { pack_bytes, lease: Duration::from_secs(LEASE), ..Options::default() }).await
}

fn at_once() -> GcOptions {
    GcOptions { grace: Duration::ZERO, batch: 50, ..GcOptions::default() }
}

async fn gc(rig: &Rig) -> GcReport {
    rig.store.gc(&at_once(), &mut |_| ()).await.unwrap()
}

fn pages(range: std::ops::Range<u64>) -> Snapshot {
    snapshot(&range.collect::<Vec<_>>(), vec![])
}

/// An open session that has uploaded a snapshot.
async fn uploaded(rig: &Rig, s: &Snapshot) -> LivePush {
    let session = rig.store.open_push(&repository()).await.unwrap().id;
    rig.store.ingest(&session, pieces(&s.stream(), 4096)).await.unwrap();
    session
}

async fn disk(rig: &Rig) -> u64 {
    rig.store.metadata().disk_bytes().await.unwrap()
}

async fn a_deleted_snapshot_is_freed_at_once_and_said_to_be_one(on: Backend) {
    let rig = rig(on).await;
    let s = pages(0..120);
    push(&rig.store, &s, "a").await.unwrap();
    let all = leaks::reachable(&rig.store).await.1;
    rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    let report = gc(&rig).await;
    assert_eq!((report.released, report.unclaimed), (all, 0), "{report:?}");
    assert_eq!((report.packs_deleted > 0, disk(&rig).await), (true, 0), "{report:?}");
    assert_eq!(report.protected.unwrap().bytes, 0);
    leaks::assert_none(&rig).await;
}

async fn an_aborted_push_is_garbage_at_once(on: Backend) {
    let rig = rig(on).await;
    let kept = pages(0..10);
    push(&rig.store, &kept, "kept").await.unwrap();
    let session = uploaded(&rig, &pages(5..40)).await;
    assert_eq!(gc(&rig).await.unclaimed, 0);
    rig.store.abort(&session).await.unwrap();
    let report = gc(&rig).await;
    assert!(report.unclaimed > 60 && report.released == 0, "{report:?}");
    leaks::assert_none(&rig).await;
    rig.store.verify(&kept.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn what_a_live_session_was_told_is_present_stays_when_another_session_ends(on: Backend) {
    let rig = rig(on).await;
    let s = pages(0..30);
    let wanted: Vec<(Digest, Kind)> = s.pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
    for asked_first in [false, true] {
        let older = rig.store.open_push(&repository()).await.unwrap().id;
        let first = uploaded(&rig, &s).await;
        let asking = if asked_first { older.clone() } else { rig.store.open_push(&repository()).await.unwrap().id };
        assert!(rig.store.missing(&asking, wanted.clone()).await.unwrap().is_empty());
        rig.store.abort(&first).await.unwrap();
        // Longer than a lease: a session keeps what it leases as long as it lives.
        for _ in 0..3 {
            rig.seconds(LEASE * 3 / 4);
            rig.store.live_push(&repository(), &asking).await.unwrap();
            gc(&rig).await;
            assert!(rig.store.missing(&asking, wanted.clone()).await.unwrap().is_empty(), "{asked_first}");
        }
        rig.store.abort(&asking).await.unwrap();
        rig.store.abort(&older).await.unwrap();
        gc(&rig).await;
        leaks::assert_none(&rig).await;
    }
}

async fn a_pack_that_compaction_wrote_frees_its_leases_at_once_too(on: Backend) {
    let rig = rig(on).await;
    let session = uploaded(&rig, &pages(0..100)).await;
    let asking = rig.store.open_push(&repository()).await.unwrap().id;
    let wanted = pages(0..20).pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
    assert!(rig.store.missing(&asking, wanted).await.unwrap().is_empty());
    rig.store.abort(&session).await.unwrap();
    let report = gc(&rig).await;
    assert!(report.unclaimed > 100 && report.packs_compacted == 1, "{report:?}");
    rig.store.abort(&asking).await.unwrap();
    assert_eq!(gc(&rig).await.unclaimed, 40);
    assert_eq!(disk(&rig).await, 0);
    leaks::assert_none(&rig).await;
}

async fn the_report_says_what_is_protected_by_whom_and_until_when(on: Backend) {
    let rig = rig(on).await;
    let s = pages(0..50);
    let until = rig.store.options().clock.now() + LEASE * 1000;
    let session = uploaded(&rig, &s).await;
    let stored: u64 = rig.store.metadata().packs(None, 10).await.unwrap().iter().map(|pack| pack.live_bytes).sum();
    for dry_run in [true, false] {
        let report = rig.store.gc(&GcOptions { dry_run, ..at_once() }, &mut |_| ()).await.unwrap();
        let protected = report.protected.unwrap();
        // The session lives through the millisecond in which it expires.
        assert_eq!((report.freed_bytes, protected.bytes, protected.expires_at), (0, stored, Some(until + 1)), "{dry_run}");
        assert_eq!(protected.objects, s.pages.len() as u64 + s.documents().len() as u64);
        assert_eq!(protected.sessions.iter().map(|s| (&s.repository, s.expires_at)).collect::<Vec<_>>(), [(&repository(), until)]);
    }
    rig.store.commit(&session, s.manifest.digest, None, None).await.unwrap();
    assert_eq!(gc(&rig).await.protected.unwrap().bytes, 0, "a snapshot holds it now");
    // The report says when the grace period ends.
    rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    let hour = GcOptions { grace: Duration::from_secs(3600), ..at_once() };
    let expected = rig.store.options().clock.now() + 3_600_000;
    for dry_run in [true, false] {
        let report = rig.store.gc(&GcOptions { dry_run, ..hour.clone() }, &mut |_| ()).await.unwrap();
        assert_eq!((report.packs_deleted, report.draining_bytes, report.draining_ends_at), (0, disk(&rig).await, Some(expected)));
    }
}

async fn ending_all_sessions_frees_what_an_interrupted_pull_left(on: Backend) {
    let rig = rig(on).await;
    let kept = pages(0..20);
    push(&rig.store, &kept, "kept").await.unwrap();
    let session = uploaded(&rig, &pages(100..140)).await;
    // A pack whose upload was killed.
    let key = "0190aaaa-0000-7000-8000-0000000000cd";
    rig.store.metadata().begin_pack(key.into(), Duration::from_secs(LEASE)).await.unwrap();
    let options = GcOptions { end_sessions: true, ..at_once() };
    let planned = rig.store.gc(&GcOptions { dry_run: true, ..options.clone() }, &mut |_| ()).await.unwrap();
    assert!(rig.store.live_push(&repository(), &session).await.is_ok(), "a dry run ends no session");
    let done = rig.store.gc(&options, &mut |_| ()).await.unwrap();
    assert!(done.unclaimed > 80 && done.packs_abandoned == 1 && done.sessions == 1, "{done:?}");
    same(&planned, &done);
    assert!(rig.store.live_push(&repository(), &session).await.is_err());
    leaks::assert_none(&rig).await;
    rig.store.verify(&kept.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn the_end_of_all_captures_frees_what_they_stored_and_ends_no_pull(on: Backend) {
    let rig = rig(on).await;
    let pulled = pages(0..20);
    let pull = uploaded(&rig, &pulled).await;
    let capture = rig.store.open_capture(&repository()).await.unwrap().id;
    rig.store.ingest(&capture, pieces(&pages(20..60).stream(), 4096)).await.unwrap();
    assert_eq!(gc(&rig).await.unclaimed, 0);
    assert_eq!(rig.store.end_captures().await.unwrap(), 1);
    let over = rig.store.live_push(&repository(), &capture).await;
    assert!(matches!(over, Err(pfr_store::Error::PushUnknown(_))), "{over:?}");
    let report = gc(&rig).await;
    assert!(report.unclaimed > 40, "{report:?}");
    rig.store.live_push(&repository(), &pull).await.unwrap();
    let wanted = pulled.pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
    assert!(rig.store.missing(&pull, wanted).await.unwrap().is_empty());
    assert_eq!(rig.store.end_captures().await.unwrap(), 0);
    rig.store.abort(&pull).await.unwrap();
    gc(&rig).await;
    leaks::assert_none(&rig).await;
}

async fn eviction_frees_bytes_at_once(on: Backend) {
    let rig = rig_with_packs_of(on, 4096).await;
    for (i, name) in ["a", "b", "c"].into_iter().enumerate() {
        push(&rig.store, &pages(i as u64 * 100..i as u64 * 100 + 40), name).await.unwrap();
        rig.seconds(1);
    }
    let limit = disk(&rig).await / 2;
    let planned = rig.store.evict(limit, &GcOptions { dry_run: true, ..at_once() }, &mut |_| ()).await.unwrap();
    let done = rig.store.evict(limit, &at_once(), &mut |_| ()).await.unwrap();
    assert!(done.evicted == 2 && done.deleted_bytes > 0 && disk(&rig).await <= limit, "{done:?}");
    assert_eq!(planned.evicted, done.evicted);
    same(&planned, &done);
    leaks::assert_none(&rig).await;
}

async fn what_takes_up_room_adds_up(on: Backend) {
    let rig = rig_with_packs_of(on, 4096).await;
    let (kept, gone) = (pages(0..60), pages(40..100));
    push(&rig.store, &kept, "kept").await.unwrap();
    push(&rig.store, &gone, "gone").await.unwrap();
    rig.store.pin(&repository(), &kept.manifest.digest, Pin::ByHand, true).await.unwrap();
    rig.store.delete_snapshot(&repository(), &gone.manifest.digest).await.unwrap();
    let session = uploaded(&rig, &pages(200..230)).await;
    let grace = Duration::from_secs(60);
    let before = rig.store.usage(grace).await.unwrap();
    let live = leaks::reachable(&rig.store).await.0;
    assert_eq!((before.live_bytes, before.snapshots, before.pinned), (live, 1, 1), "{before:?}");
    assert!(before.garbage_bytes > 0 && before.leased.bytes > 0 && before.dead_bytes > 0 && before.draining_bytes == 0, "{before:?}");
    assert_eq!(before.disk_bytes, disk(&rig).await);
    assert_eq!(
        before.live_bytes
            + before.leased.bytes
            + before.garbage_bytes
            + before.dead_bytes
            + before.draining_bytes
            + before.unfinished.bytes,
        before.disk_bytes
    );
    let report = rig.store.gc(&GcOptions { grace, ..at_once() }, &mut |_| ()).await.unwrap();
    assert_eq!(report.freed_bytes, before.garbage_bytes);
    let after = rig.store.usage(grace).await.unwrap();
    assert_eq!((after.garbage_bytes, after.live_bytes, after.leased.clone()), (0, live, before.leased), "{after:?}");
    assert_eq!((after.draining_bytes, after.draining_ends_at), (report.draining_bytes, report.draining_ends_at));
    assert!(after.draining_bytes > 0);
    rig.store.abort(&session).await.unwrap();
    gc(&rig).await;
    let end = rig.store.usage(Duration::ZERO).await.unwrap();
    assert_eq!((end.live_bytes, end.leased.bytes + end.garbage_bytes + end.draining_bytes), (live, 0), "{end:?}");
}

/// Every push leaves a pack, and an entry of the queue for it.
async fn what_takes_up_room_is_counted_in_as_many_transactions_for_more_packs(on: Backend) {
    let rig = rig(on).await;
    let watched = Watched::new(Arc::clone(&rig.metadata));
    let store = Store::new(Arc::clone(&rig.packs), Arc::clone(&watched) as Arc<dyn Metadata>, rig.options());
    let mut calls = Vec::new();
    for round in 1..=2_u64 {
        for number in 0..12 {
            let first = 1000 * round + 10 * number;
            push(&rig.store, &pages(first..first + 2), &format!("t-{first}")).await.unwrap();
            let _ = uploaded(&rig, &pages(first + 5..first + 6)).await;
        }
        let before = watched.calls();
        let usage = store.usage(Duration::ZERO).await.unwrap();
        calls.push(watched.calls() - before);
        assert!(usage.snapshots == 12 * round && usage.leased.objects >= 12 * round && usage.pinned == 0, "{usage:?}");
        assert!(rig.metadata.queue(false, 1000).await.unwrap().len() as u64 >= 12 * round, "each has an entry");
    }
    assert_eq!(calls[0], calls[1]);
    assert!(calls[0] < 20, "{calls:?}");
}

async fn the_end_of_a_session_costs_no_write_for_each_object(on: Backend) {
    let rig = rig(on).await;
    let s = pages(0..400);
    let session = uploaded(&rig, &s).await;
    let before = rig.store.metadata().rows_written();
    rig.store.commit(&session, s.manifest.digest, None, None).await.unwrap();
    let written = rig.store.metadata().rows_written() - before;
    assert!(written < 20, "{written} rows for a commit of {} objects", s.pages.len());
}

/// Plans, runs, and asserts that both say the same. Returns what they say.
async fn planned_and_done(rig: &Rig, options: &GcOptions) -> GcReport {
    let planned = rig.store.gc(&GcOptions { dry_run: true, ..options.clone() }, &mut |_| ()).await.unwrap();
    let done = rig.store.gc(options, &mut |_| ()).await.unwrap();
    same(&planned, &done);
    done
}

async fn the_dry_run_counts_sessions_and_the_objects_of_the_journal(on: Backend) {
    let rig = rig(on).await;
    let kept = pages(0..2);
    push(&rig.store, &kept, "base").await.unwrap();
    let base = kept.manifest.digest;
    let changes = async |count: usize| {
        for _ in 0..count {
            rig.store.put_tag(&repository(), tag("more"), base, None).await.unwrap();
            rig.store.delete_tag(&repository(), &tag("more"), None).await.unwrap();
        }
    };
    // Some are over, by a commit and by themselves, and some are open.
    uploaded(&rig, &pages(10..12)).await;
    assert_eq!(planned_and_done(&rig, &at_once()).await.sessions, 0);
    rig.seconds(LEASE + 1);
    let (_, options) = (uploaded(&rig, &pages(20..22)).await, GcOptions { end_sessions: true, ..at_once() });
    assert_eq!(planned_and_done(&rig, &options).await.sessions, 3);
    // So few objects of the journal stay, and so does one that no row names.
    rig.metadata.put_tags(repository(), base, vec![TagMove { tag: tag("left"), expected: None }]).await.unwrap();
    let left = rig.metadata.unjournaled(10).await.unwrap();
    let numbered = left.into_iter().map(|change| Numbered { seq: change.seq, change: change.record }).collect();
    let (key, bytes) = Journal::changes(numbered).to_object();
    rig.put(&key.as_str().into(), bytes).await;
    changes(10).await;
    assert_eq!(planned_and_done(&rig, &at_once()).await.journal_deleted, 0);
    // A summary makes all superfluous, with the change that a killed process left.
    changes(120).await;
    rig.metadata.put_tags(repository(), base, vec![TagMove { tag: tag("last"), expected: None }]).await.unwrap();
    let done = planned_and_done(&rig, &at_once()).await;
    assert!(done.journal_deleted > 256, "{done:?}");
    // The next one does so with that summary, too.
    assert_eq!(planned_and_done(&rig, &at_once()).await.journal_deleted, 0);
    changes(130).await;
    let done = planned_and_done(&rig, &at_once()).await;
    assert_eq!(done.journal_deleted, 261, "{done:?}");
}

/// Asserts that a dry run and the run after it report the same, but for what tells runs apart.
fn same(planned: &GcReport, done: &GcReport) {
    let told = |report: &GcReport| GcReport {
        id: String::new(),
        dry_run: false,
        started_at: 0,
        finished_at: None,
        // A dry run has none.
        disk_bytes: None,
        ..report.clone()
    };
    assert_eq!(told(planned), told(done));
}

#[derive(Clone, Debug)]
enum Step {
    /// Push pages from here on, so many, and commit.
    Push(u64, u64),
    /// The same, and leave the session open, or abort it.
    Upload(u64, u64, bool),
    /// An upload of a pack that is cut off after so many bytes.
    CutOff(usize),
    /// Ask in the open session that is the oldest whether these pages are there.
    Ask(u64, u64),
    /// Delete the oldest snapshot.
    Delete,
    Wait(u64),
    /// Plan, then run: with a grace period or without one, and with these sessions or without them.
    Collect {
        grace: bool,
        end_sessions: bool,
    },
    /// Plan and run an eviction to so many percent.
    Evict(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..60_u64, 1..40_u64);
    prop_oneof![
        4 => range().prop_map(|(from, n)| Step::Push(from, n)),
        3 => (range(), any::<bool>()).prop_map(|((from, n), abort)| Step::Upload(from, n, abort)),
        1 => (1..4000_usize).prop_map(Step::CutOff),
        1 => range().prop_map(|(from, n)| Step::Ask(from, n)),
        3 => Just(Step::Delete),
        1 => (1..LEASE * 3 / 2).prop_map(Step::Wait),
        4 => (any::<bool>(), proptest::bool::weighted(0.2)).prop_map(|(grace, end_sessions)| Step::Collect { grace, end_sessions }),
        1 => (10..100_u64).prop_map(Step::Evict),
    ]
}

async fn the_dry_run_says_exactly_what_the_run_does(on: Backend) {
    let case = move |steps: Vec<Step>| async move {
        let rig = rig_with_packs_of(on, 6000).await;
        let mut open: Vec<LivePush> = Vec::new();
        let mut packs = 0_u64..;
        // The first push marks the storage.
        push(&rig.store, &pages(0..1), "first").await.unwrap();
        for step in steps.into_iter().chain([Step::Collect { grace: false, end_sessions: false }]) {
            match step {
                Step::Push(from, n) => {
                    push(&rig.store, &pages(from..from + n), &format!("t{from}-{n}")).await.unwrap();
                }
                Step::Upload(from, n, abort) => {
                    let session = uploaded(&rig, &pages(from..from + n)).await;
                    match abort {
                        true => rig.store.abort(&session).await.unwrap(),
                        false => open.push(session),
                    }
                }
                Step::CutOff(bytes) => {
                    let key = format!("0190aaaa-0000-7000-8000-{:012x}", packs.next().unwrap());
                    rig.store.metadata().begin_pack(key.clone(), Duration::from_secs(LEASE)).await.unwrap();
                    // A bucket shows nothing of it.
                    if matches!(on, Backend::SqliteDisk | Backend::PostgresDisk) {
                        let shard = rig.packs_dir().join(&key[key.len() - 2..]);
                        std::fs::create_dir_all(&shard).unwrap();
                        std::fs::write(shard.join(format!("{key}.pfpack#1")), vec![1; bytes]).unwrap();
                    }
                }
                Step::Ask(from, n) => {
                    let wanted = pages(from..from + n).pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
                    if let Some(session) = open.first() {
                        // It may be over.
                        drop(rig.store.missing(session, wanted).await);
                    }
                }
                Step::Delete => {
                    if let Ok(page) = rig.store.snapshots(&repository(), None, 100).await
                        && let Some(oldest) = page.rows.last()
                    {
                        rig.store.delete_snapshot(&repository(), &oldest.digest).await.unwrap();
                    }
                }
                Step::Wait(seconds) => rig.seconds(seconds),
                Step::Collect { grace, end_sessions } => {
                    let grace = if grace { Duration::from_secs(600) } else { Duration::ZERO };
                    let options = GcOptions { grace, end_sessions, ..at_once() };
                    let planned = rig.store.gc(&GcOptions { dry_run: true, ..options.clone() }, &mut |_| ()).await.unwrap();
                    same(&planned, &rig.store.gc(&options, &mut |_| ()).await.unwrap());
                }
                Step::Evict(percent) => {
                    let limit = disk(&rig).await * percent / 100;
                    let planned = rig.store.evict(limit, &GcOptions { dry_run: true, ..at_once() }, &mut |_| ()).await.unwrap();
                    same(&planned, &rig.store.evict(limit, &at_once(), &mut |_| ()).await.unwrap());
                }
            }
        }
    };
    property(on.some(60, 5), proptest::collection::vec(step(), 3..16), case).await;
}
