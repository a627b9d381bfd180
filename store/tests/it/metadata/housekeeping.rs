//! What random histories do not check: the order of eviction, pins and their reasons, and how many
//! runs are remembered.

use super::backends;
use super::model::{LEASE, Universe, frames_of};
use crate::common::{repository, tag};
use pfr_schema::Digest;
use pfr_store::{Clock, Commit, GC_RUNS, GcRun, GcTrigger, Metadata, Moved, PackSizes, Packed, Pin, PushId, TagMove};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn stopped() -> (Arc<AtomicU64>, Clock) {
    let now = Arc::new(AtomicU64::new(1_000_000_000));
    let clock = {
        let now = Arc::clone(&now);
        Clock::new(move || now.load(Ordering::SeqCst))
    };
    (now, clock)
}

/// Uploads everything that the universe has.
async fn upload(metadata: &dyn Metadata, universe: &Universe) {
    let pack = metadata.begin_pack("pack".into(), LEASE).await.unwrap();
    metadata.open_push(PushId("upload".into()), repository(), LEASE).await.unwrap();
    let frames = universe.0.iter().flat_map(|blobs| frames_of(blobs, u32::MAX).0).map(|(_, f)| f).collect();
    metadata.finish_pack(PushId("upload".into()), pack, PackSizes { bytes: 1000, frame_bytes: 900 }, frames, LEASE).await.unwrap();
}

async fn commit(metadata: &dyn Metadata, session: &str, manifest: Digest) -> bool {
    let push = PushId(session.into());
    metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
    let commit = Commit {
        manifest,
        parents: vec![],
        artifact_type: None,
        subject: None,
        tag: None,
        pin: None,
        marks: vec![],
        agent: None,
        audit: None,
        signed: None,
    };
    metadata.commit(push, commit).await.unwrap().created
}

async fn order(metadata: &dyn Metadata) -> Vec<Digest> {
    metadata.evictable(100).await.unwrap().into_iter().map(|snapshot| snapshot.digest).collect()
}

#[tokio::test]
async fn eviction_takes_first_what_was_committed_or_touched_longest_ago() {
    let (dir, (now, clock)) = (tempfile::tempdir().unwrap(), stopped());
    for (name, metadata) in backends(clock, dir.path()).await {
        let (universe, metadata) = (Universe::new(), &*metadata);
        upload(metadata, &universe).await;
        let [a, b, c] = [0, 1, 2].map(|i| universe.manifest(i));
        for (session, manifest) in [("1", a), ("2", b), ("3", c)] {
            now.fetch_add(10, Ordering::SeqCst);
            assert!(commit(metadata, session, manifest).await);
        }
        assert_eq!(order(metadata).await, [a, b, c], "{name}");
        now.fetch_add(10, Ordering::SeqCst);
        assert!(!commit(metadata, "4", a).await, "{name}: the snapshot is there already");
        assert_eq!(order(metadata).await, [b, c, a], "{name}: a second push counts as a use");
        now.fetch_add(10, Ordering::SeqCst);
        metadata.touch_snapshot(repository(), b).await.unwrap();
        assert_eq!(order(metadata).await, [c, a, b], "{name}");
        // A clock that was set back makes nothing older than it is.
        now.fetch_sub(1000, Ordering::SeqCst);
        metadata.touch_snapshot(repository(), b).await.unwrap();
        assert!(!commit(metadata, "5", a).await);
        assert_eq!(order(metadata).await, [c, a, b], "{name}");
        now.fetch_add(1000, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_pin_is_taken_back_only_for_the_reason_it_was_given() {
    let (dir, (now, clock)) = (tempfile::tempdir().unwrap(), stopped());
    for (name, metadata) in backends(clock, dir.path()).await {
        let (universe, metadata) = (Universe::new(), &*metadata);
        upload(metadata, &universe).await;
        let snapshot = universe.manifest(0);
        commit(metadata, "1", snapshot).await;
        let pin = |reason, on| metadata.pin_snapshot(repository(), snapshot, reason, on);
        let evictable = async || order(metadata).await.contains(&snapshot);
        let pins = async || {
            let pinned = metadata.pinned(10).await.unwrap();
            assert!(pinned.iter().all(|row| (&row.repository, row.snapshot.digest) == (&repository(), snapshot)), "{name}: {pinned:?}");
            pinned.into_iter().flat_map(|row| row.pins).collect::<Vec<_>>()
        };
        assert_eq!(pins().await, [], "{name}");
        for (first, second) in [(Pin::ByHand, Pin::UntilPushed), (Pin::UntilPushed, Pin::ByHand)] {
            assert!(pin(first, true).await.unwrap() && pin(second, true).await.unwrap());
            // Twice is once.
            assert!(pin(second, true).await.unwrap());
            assert_eq!(pins().await, [Pin::ByHand, Pin::UntilPushed], "{name}");
            assert!(pin(second, false).await.unwrap(), "{name}: {first:?} is left");
            assert!(pin(second, false).await.unwrap() && !evictable().await, "{name}");
            assert_eq!(pins().await, [first], "{name}");
            assert!(!pin(first, false).await.unwrap() && evictable().await, "{name}");
        }
        assert!(pin(Pin::Warm, true).await.unwrap() && pin(Pin::UntilPushed, true).await.unwrap());
        assert_eq!(pins().await, [Pin::UntilPushed, Pin::Warm], "{name}");
        assert!(pin(Pin::UntilPushed, false).await.unwrap() && !evictable().await, "{name}");
        assert!(!pin(Pin::Warm, false).await.unwrap() && evictable().await, "{name}");
        // A snapshot that was pinned or used since it was listed is not evicted. One that was not
        // is evicted.
        let listed = async || metadata.evictable(10).await.unwrap().into_iter().find(|s| s.digest == snapshot).unwrap();
        let before = listed().await;
        pin(Pin::UntilPushed, true).await.unwrap();
        assert!(!metadata.evict_snapshot(before.clone()).await.unwrap(), "{name}: it is pinned");
        pin(Pin::UntilPushed, false).await.unwrap();
        now.fetch_add(1000, Ordering::SeqCst);
        metadata.touch_snapshot(repository(), snapshot).await.unwrap();
        assert!(!metadata.evict_snapshot(before.clone()).await.unwrap(), "{name}: it was used");
        assert!(metadata.evict_snapshot(listed().await).await.unwrap(), "{name}");
        assert!(!metadata.evict_snapshot(before).await.unwrap(), "{name}: it is gone");
        // Pinned by its commit: there is no moment in which it is not.
        metadata.open_push(PushId("pinned".into()), repository(), LEASE).await.unwrap();
        let commit = Commit {
            manifest: snapshot,
            parents: vec![],
            artifact_type: None,
            subject: None,
            tag: None,
            pin: Some(Pin::UntilPushed),
            marks: vec![],
            agent: None,
            audit: None,
            signed: None,
        };
        metadata.commit(PushId("pinned".into()), commit).await.unwrap();
        assert!(!evictable().await, "{name}");
        let unknown = metadata.pin_snapshot(repository(), universe.manifest(1), Pin::ByHand, true).await;
        assert_eq!(unknown.unwrap_err().code(), pfr_schema::ErrorCode::SnapshotUnknown, "{name}");
    }
}

#[tokio::test]
async fn compaction_leaves_alone_what_lies_elsewhere_by_now() {
    let (dir, (_, clock)) = (tempfile::tempdir().unwrap(), stopped());
    for (name, metadata) in backends(clock, dir.path()).await {
        let (universe, metadata) = (Universe::new(), &*metadata);
        // Snapshots 0 and 1 in a pack each: what both hold lies in the first.
        let mut packs = Vec::new();
        for snapshot in [0, 1] {
            let pack = metadata.begin_pack(format!("pack-{snapshot}"), LEASE).await.unwrap();
            let push = PushId(format!("push-{snapshot}"));
            metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
            let (frames, sizes) = frames_of(&universe.0[snapshot], u32::MAX);
            metadata.finish_pack(push, pack, sizes, frames.into_iter().map(|(_, f)| f).collect(), LEASE).await.unwrap();
            packs.push(pack);
        }
        let rows = async || metadata.packs(None, 10).await.unwrap();
        let before = rows().await;
        let stays = metadata.pack_contents(packs[1]).await.unwrap();
        let mut moved: Vec<Moved> = stays.iter().map(|p| Moved { object: p.object, from: packs[0], offset: 8 }).collect();
        let goes = metadata.pack_contents(packs[0]).await.unwrap()[0];
        moved.push(Moved { object: goes.object, from: packs[0], offset: 8 });
        let into = metadata.begin_pack("compacted".into(), LEASE).await.unwrap();
        let sizes = PackSizes { bytes: goes.frame_len + 100, frame_bytes: goes.frame_len };
        metadata.finish_compaction(into, sizes, moved).await.unwrap();
        let there = |packed: Vec<Packed>| packed.into_iter().map(|p| (p.object, p.offset)).collect::<Vec<_>>();
        assert_eq!(there(metadata.pack_contents(packs[1]).await.unwrap()), there(stays), "{name}");
        assert_eq!(there(metadata.pack_contents(into).await.unwrap()), [(goes.object, 8)], "{name}");
        let after = rows().await;
        assert_eq!(after[1].live_bytes, before[1].live_bytes, "{name}");
        assert_eq!((after[0].live_bytes, after[2].live_bytes), (before[0].live_bytes - goes.frame_len, goes.frame_len), "{name}");
    }
}

#[tokio::test]
async fn the_newest_runs_are_remembered_and_no_more() {
    let (dir, (_, clock)) = (tempfile::tempdir().unwrap(), stopped());
    for (name, metadata) in backends(clock, dir.path()).await {
        let run = |number: usize, finished_at| GcRun {
            id: format!("0190aaaa-0000-7000-8000-{number:012}"),
            trigger: GcTrigger::Schedule,
            started_at: number as u64,
            finished_at,
            report: "{}".into(),
        };
        for number in 0..GC_RUNS + 3 {
            metadata.record_gc_run(run(number, None)).await.unwrap();
        }
        // The end of a run is the same row.
        metadata.record_gc_run(run(GC_RUNS + 2, Some(7))).await.unwrap();
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = metadata.gc_runs(after, 300).await.unwrap();
            found.extend(page.rows);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let expected: Vec<u64> = (3..GC_RUNS as u64 + 3).rev().collect();
        assert_eq!(found.iter().map(|run| run.started_at).collect::<Vec<_>>(), expected, "{name}");
        assert_eq!(found[0].finished_at, Some(7), "{name}");
    }
}

#[tokio::test]
async fn a_tag_put_for_an_upstream_is_known_until_it_is_moved() {
    let (dir, (_, clock)) = (tempfile::tempdir().unwrap(), stopped());
    for (name, metadata) in backends(clock, dir.path()).await {
        let (universe, metadata) = (Universe::new(), &*metadata);
        upload(metadata, &universe).await;
        let [a, b] = [0, 1].map(|i| universe.manifest(i));
        for (session, manifest) in [("1", a), ("2", b)] {
            commit(metadata, session, manifest).await;
        }
        let put = |to| metadata.put_tags(repository(), to, vec![TagMove { tag: tag("t"), expected: None }]);
        let followed = async || metadata.tag(repository(), tag("t")).await.unwrap().followed;
        let mark = |at| metadata.mark_followed(repository(), tag("t"), at);
        put(a).await.unwrap();
        assert!(!followed().await, "{name}");
        mark(b).await.unwrap();
        assert!(!followed().await, "{name}: it points elsewhere");
        mark(a).await.unwrap();
        assert!(followed().await && metadata.tags(repository(), None, 10).await.unwrap().rows[0].followed, "{name}");
        put(a).await.unwrap();
        assert!(followed().await, "{name}: it was not moved");
        put(b).await.unwrap();
        assert!(!followed().await, "{name}");
    }
}
