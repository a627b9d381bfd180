//! What only a shared database has: concurrent writers, lost connections, restarts of the server.

mod crash;
mod events;
mod images;
mod sessions;

use crate::common::{repository, snapshot, tag};
use futures::future::join_all;
use pfr_schema::api::TagState;
use pfr_schema::codec::Codec;
use pfr_schema::container::Container;
use pfr_schema::frame::Header;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, ErrorCode, Kind, Limits, Tag};
use pfr_store::{
    Collected, Commit, Error, JournalRow, Metadata, Moved, NewContainer, NewFrame, ObjectRow, PackSizes, PostgresMetadata, PostgresOptions,
    PushId, QuotaLimits, Result, TagMove,
};
use pfr_testkit::postgres::{Cluster, Durability};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, raw_sql};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(600);

pub async fn connect(url: &str) -> Arc<dyn Metadata> {
    PostgresMetadata::connect(url, PostgresOptions { max_connections: 8, ..PostgresOptions::default() }).await.unwrap()
}

/// A name that no other push or pack has.
fn unique(prefix: &str) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    format!("{prefix}-{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// A snapshot as the frames of one pack, and its manifest.
pub fn frames(numbers: &[u64]) -> (Vec<NewFrame>, Digest) {
    let s = snapshot(numbers, vec![]);
    let pages = s.pages.iter().map(|p| (Digest::sha256(p), Kind::Blob, p.len() as u64, None));
    let documents = s.documents().into_iter().map(|d| {
        let container = Container::parse(d.kind, &d.bytes, &Limits::default()).unwrap();
        let container = container.map(|c| NewContainer { children: c.children(), shape: c.shape() });
        (d.digest, d.kind, d.bytes.len() as u64, container)
    });
    let mut seen = BTreeSet::new();
    let blobs: Vec<_> = pages.chain(documents).filter(|b| seen.insert(b.0)).collect();
    let frame = |(i, (digest, kind, len, container)): (usize, (Digest, Kind, u64, Option<NewContainer>))| NewFrame {
        header: Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len },
        offset: 8 + i as u64,
        container,
    };
    (blobs.into_iter().enumerate().map(frame).collect(), s.manifest.digest)
}

fn sizes(frames: &[NewFrame]) -> PackSizes {
    let frame_bytes = frames.iter().map(|f| f.header.frame_len()).sum();
    PackSizes { bytes: frame_bytes + 100, frame_bytes }
}

async fn upload(metadata: &dyn Metadata, frames: &[NewFrame], lease: Duration) -> Result<(PushId, u64)> {
    let push = PushId(unique("push"));
    metadata.open_push(push.clone(), repository(), LEASE).await?;
    let pack = metadata.begin_pack(unique("pack"), LEASE).await?;
    let stored = metadata.finish_pack(push.clone(), pack, sizes(frames), frames.to_vec(), lease).await?;
    Ok((push, stored.new))
}

fn commit_of(manifest: Digest, tag: Option<Tag>) -> Commit {
    let tag = tag.map(|tag| TagMove { tag, expected: None });
    Commit { manifest, parents: vec![], artifact_type: None, subject: None, tag, pin: None, marks: vec![], audit: None, signed: None }
}

/// Uploads and commits; returns how many blobs were new.
async fn push(metadata: &dyn Metadata, numbers: &[u64], name: &str) -> Result<u64> {
    push_for(LEASE, metadata, numbers, name).await
}

/// The same, with a lease of its blobs that may end at once.
pub async fn push_for(lease: Duration, metadata: &dyn Metadata, numbers: &[u64], name: &str) -> Result<u64> {
    let (frames, manifest) = frames(numbers);
    let (push, new) = upload(metadata, &frames, lease).await?;
    metadata.commit(push, commit_of(manifest, Some(tag(name)))).await?;
    Ok(new)
}

async fn assert_sound(metadata: &dyn Metadata) {
    let audit = metadata.audit(false).await.unwrap();
    assert_eq!(audit.wrong, 0, "{:#?}", audit.discrepancies);
}

async fn count(metadata: &dyn Metadata) -> u64 {
    metadata.audit(false).await.unwrap().objects
}

async fn collect_all(metadata: &dyn Metadata, budget: usize) -> Result<Collected> {
    let mut all = Collected::default();
    loop {
        let step = metadata.collect(budget).await?;
        all.released += step.released;
        all.unclaimed += step.unclaimed;
        all.frame_bytes += step.frame_bytes;
        if !step.more {
            return Ok(all);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pushes_of_overlapping_snapshots_at_the_same_time_store_each_blob_once() {
    let url = pfr_testkit::postgres::database();
    let stores = [connect(&url).await, connect(&url).await];
    for round in 0..5_u64 {
        let before = count(&*stores[0]).await;
        let base = round * 100;
        let pushes = (0..8_u64).map(|i| {
            let (store, numbers) = (Arc::clone(&stores[i as usize % 2]), [base, base + 1, base + i % 4, base + 10]);
            tokio::spawn(async move { push(&*store, &numbers, &format!("t{i}")).await.unwrap() })
        });
        let new: u64 = join_all(pushes).await.into_iter().map(|new| new.unwrap()).sum();
        assert_eq!(count(&*stores[1]).await - before, new, "every blob was new to exactly one push");
        assert_sound(&*stores[0]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_races_collection_either_holds_everything_or_fails() {
    let url = pfr_testkit::postgres::database();
    let (store, collector) = (connect(&url).await, connect(&url).await);
    for round in 0..24_u64 {
        let (frames, manifest) = frames(&[round, 1000]);
        // Its session is over: collection may take it as soon as it is there.
        let (over, _) = upload(&*store, &frames, LEASE).await.unwrap();
        let push = PushId(unique("push"));
        store.open_push(push.clone(), repository(), LEASE).await.unwrap();
        store.close_push(over).await.unwrap();
        let collecting = tokio::spawn({
            let collector = Arc::clone(&collector);
            async move { collect_all(&*collector, 3).await.unwrap() }
        });
        let committed = store.commit(push, commit_of(manifest, None)).await;
        collecting.await.unwrap();
        let found = store.find(frames.iter().map(|f| f.header.digest).collect()).await.unwrap();
        match committed {
            Ok(_) => assert!(found.iter().all(Option::is_some), "round {round}: a snapshot lacks something"),
            Err(error) => assert_eq!(error.code(), ErrorCode::BlobUnknown, "round {round}: {error}"),
        }
        assert_sound(&*store).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_races_collection_of_the_same_blobs_ends_with_all_of_them() {
    let url = pfr_testkit::postgres::database();
    let (store, collector) = (connect(&url).await, connect(&url).await);
    for round in 0..24_u64 {
        let (over, _) = upload(&*store, &frames(&[1, 2, 3]).0, LEASE).await.unwrap();
        store.close_push(over).await.unwrap();
        let collecting = tokio::spawn({
            let collector = Arc::clone(&collector);
            async move { collect_all(&*collector, 1000).await.unwrap() }
        });
        push(&*store, &[1, 2, 3], "t").await.unwrap();
        collecting.await.unwrap();
        assert!(store.find(frames(&[1, 2, 3]).0.iter().map(|f| f.header.digest).collect()).await.unwrap().iter().all(Option::is_some));
        assert_sound(&*store).await;
        store.delete_snapshot(repository(), frames(&[1, 2, 3]).1).await.unwrap();
        if round % 2 == 0 {
            collect_all(&*store, 1000).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_collections_share_the_garbage_and_delete_each_object_once() {
    let url = pfr_testkit::postgres::database();
    let stores = [connect(&url).await, connect(&url).await];
    for i in 0..30_u64 {
        push_for(Duration::ZERO, &*stores[0], &[i, i + 1, 500], "t").await.unwrap();
    }
    push_for(Duration::ZERO, &*stores[0], &[500, 501], "kept").await.unwrap();
    let before = count(&*stores[0]).await;
    for i in 0..30_u64 {
        stores[0].delete_snapshot(repository(), frames(&[i, i + 1, 500]).1).await.unwrap();
    }
    let collections = stores.iter().map(|store| {
        let store = Arc::clone(store);
        tokio::spawn(async move { collect_all(&*store, 7).await.unwrap() })
    });
    let released: u64 = join_all(collections).await.into_iter().map(|done| done.unwrap()).map(|done| done.released + done.unclaimed).sum();
    // Objects that one collection held when the other found nothing due.
    let rest = collect_all(&*stores[0], 1000).await.unwrap();
    assert_eq!(before - count(&*stores[0]).await, released + rest.released + rest.unclaimed);
    let kept: BTreeSet<Digest> = frames(&[500, 501]).0.iter().map(|f| f.header.digest).collect();
    assert_eq!(count(&*stores[0]).await, kept.len() as u64);
    assert_sound(&*stores[1]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_compactions_claim_different_packs_and_the_second_to_move_a_frame_moves_nothing() {
    let url = pfr_testkit::postgres::database();
    let stores = [connect(&url).await, connect(&url).await];
    // Packs in which one page of a hundred stays.
    for i in 0..4_u64 {
        let numbers: Vec<u64> = (i * 100..i * 100 + 60).collect();
        push_for(Duration::ZERO, &*stores[0], &numbers, &format!("old{i}")).await.unwrap();
        push_for(Duration::ZERO, &*stores[0], &numbers[..2], &format!("new{i}")).await.unwrap();
        stores[0].delete_snapshot(repository(), frames(&numbers).1).await.unwrap();
    }
    collect_all(&*stores[0], 10_000).await.unwrap();
    let claims = join_all(stores.iter().map(|s| s.claim_sparse_packs(3, LEASE))).await;
    let claims: Vec<Vec<i64>> = claims.into_iter().map(|c| c.unwrap().into_iter().map(|p| p.id).collect()).collect();
    let all: BTreeSet<i64> = claims.iter().flatten().copied().collect();
    assert_eq!((all.len(), claims.iter().map(Vec::len).sum::<usize>()), (4, 4), "{claims:?}");
    // Both copy everything nevertheless, as after a claim that ran out.
    let mut moved = Vec::new();
    for pack in &all {
        for packed in stores[0].pack_contents(*pack).await.unwrap() {
            moved.push(Moved { object: packed.object, from: *pack, offset: 8 + moved.len() as u64 });
        }
    }
    let sizes = PackSizes { bytes: 100_000, frame_bytes: 90_000 };
    let finish = stores.iter().map(|store| {
        let (store, mut moved) = (Arc::clone(store), moved.clone());
        tokio::spawn(async move {
            let pack = store.begin_pack(unique("compacted"), LEASE).await.unwrap();
            // In whatever order they come.
            moved.reverse();
            store.finish_compaction(pack, sizes, moved).await.unwrap();
            pack
        })
    });
    let new: Vec<i64> = join_all(finish).await.into_iter().map(|pack| pack.unwrap()).collect();
    let contents = join_all(new.iter().map(|pack| stores[0].pack_contents(*pack))).await;
    let mut lens: Vec<usize> = contents.into_iter().map(|c| c.unwrap().len()).collect();
    lens.sort_unstable();
    assert_eq!(lens, [0, moved.len()]);
    assert_sound(&*stores[0]).await;
    let emptied = stores[0].emptied_packs(Duration::ZERO, 100).await.unwrap();
    assert!(all.iter().all(|pack| emptied.iter().any(|row| row.id == *pack)), "the old packs are emptied");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_moves_of_a_tag_from_the_same_state_one_wins() {
    let url = pfr_testkit::postgres::database();
    let stores = [connect(&url).await, connect(&url).await];
    for i in 0..8 {
        push(&*stores[0], &[i], &format!("t{i}")).await.unwrap();
    }
    let mut state = TagState::Absent;
    for round in 0..10 {
        let moves = (0..8_u64).map(|i| {
            let store = Arc::clone(&stores[i as usize % 2]);
            let moves = vec![TagMove { tag: tag("contended"), expected: Some(state) }];
            tokio::spawn(async move { store.put_tags(repository(), frames(&[i]).1, moves).await })
        });
        let outcomes: Vec<Result<()>> = join_all(moves).await.into_iter().map(|o| o.unwrap()).collect();
        // A move to where the tag already is succeeds too: from the second round on, at most one
        // more.
        let won = outcomes.iter().filter(|o| o.is_ok()).count();
        assert!(won == 1 || (won == 2 && round > 0), "round {round}: {outcomes:?}");
        let lost = outcomes.iter().filter_map(|o| o.as_ref().err());
        assert!(lost.clone().all(|e| e.code() == ErrorCode::TagMoved), "{outcomes:?}");
        state = TagState::At(stores[1].tag(repository(), tag("contended")).await.unwrap().digest);
        assert_sound(&*stores[0]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_changed_in_every_order_at_the_same_time_bring_no_error_of_the_database() {
    let url = pfr_testkit::postgres::database();
    let stores = [connect(&url).await, connect(&url).await];
    for i in 0..4 {
        push(&*stores[0], &[i, 9], &format!("t{i}")).await.unwrap();
    }
    let workers = (0..8_u64).map(|worker| {
        let store = Arc::clone(&stores[worker as usize % 2]);
        tokio::spawn(async move {
            for step in 0..15_u64 {
                let target = (worker + step) % 4;
                let mut moves: Vec<TagMove> = ["a", "b", "c"].into_iter().map(|t| TagMove { tag: tag(t), expected: None }).collect();
                if worker % 2 == 0 {
                    moves.reverse();
                }
                let outcome = match (worker + step) % 5 {
                    0 => store.delete_tag(repository(), tag("b"), None).await,
                    1 => store.delete_snapshot(repository(), frames(&[target, 9]).1).await,
                    2 => push(&*store, &[target, 9], &format!("t{target}")).await.map(|_| ()),
                    3 => collect_all(&*store, 5).await.map(|_| ()),
                    _ => store.put_tags(repository(), frames(&[target, 9]).1, moves).await,
                };
                let fine = |code| matches!(code, ErrorCode::TagUnknown | ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown);
                assert!(outcome.as_ref().err().is_none_or(|e| fine(e.code())), "worker {worker}, step {step}: {outcome:?}");
            }
        })
    });
    join_all(workers).await.into_iter().for_each(|worker| worker.unwrap());
    assert_sound(&*stores[0]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_of_changes_become_visible_in_their_order() {
    let url = pfr_testkit::postgres::database();
    let (store, reader) = (connect(&url).await, connect(&url).await);
    let done = Arc::new(AtomicBool::new(false));
    let watching = tokio::spawn({
        let done = Arc::clone(&done);
        async move {
            let mut known: BTreeSet<u64> = BTreeSet::new();
            loop {
                let last_look = done.load(Ordering::SeqCst);
                let seen: BTreeSet<u64> = reader.unjournaled(1000).await.unwrap().into_iter().map(|u| u.seq).collect();
                let high = known.last().copied().unwrap_or(0);
                assert!(seen.iter().all(|seq| *seq > high || known.contains(seq)), "{seen:?} after {known:?}");
                known = seen;
                let (last, _) = reader.begin_names().await.unwrap();
                assert!(last >= known.last().copied().unwrap_or(0));
                if last_look {
                    return known.len();
                }
            }
        }
    });
    let pushes = (0..6_u64).map(|worker| {
        let store = Arc::clone(&store);
        tokio::spawn(async move {
            for i in 0..6_u64 {
                push(&*store, &[worker * 10 + i], &format!("t{worker}")).await.unwrap();
            }
        })
    });
    join_all(pushes).await.into_iter().for_each(|worker| worker.unwrap());
    done.store(true, Ordering::SeqCst);
    assert_eq!(watching.await.unwrap(), 6 * 6 * 2, "a snapshot and a tag for each push");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_over_names_and_their_writers_do_not_wait_for_each_other() {
    let url = pfr_testkit::postgres::database();
    let (store, other) = (connect(&url).await, connect(&url).await);
    for i in 0..3 {
        push(&*store, &[i], &format!("t{i}")).await.unwrap();
    }
    let soon = Duration::from_secs(10);
    let (last, mut cursor) = store.begin_names().await.unwrap();
    // A transaction that has been open for long.
    let mut writer = PgConnection::connect(&url).await.unwrap();
    sqlx::query("BEGIN").execute(&mut writer).await.unwrap();
    sqlx::query("INSERT INTO changes (record) VALUES ('{}')").execute(&mut writer).await.unwrap();
    let (mut snapshots, mut tags) = (BTreeSet::new(), BTreeSet::new());
    for i in 10.. {
        let (records, next) = tokio::time::timeout(soon, store.names(cursor, 1)).await.expect("it waits for a writer").unwrap();
        for record in records {
            match record {
                Record::Snapshot { manifest, .. } => assert!(snapshots.insert(manifest)),
                Record::Tag { tag, .. } => assert!(tags.insert(tag)),
                other => panic!("{other:?}"),
            }
        }
        // A name of which the walk is past, so that it comes to an end.
        tokio::time::timeout(soon, push(&*other, &[i], "a")).await.expect("a writer waits for it").unwrap();
        match next {
            Some(next) => cursor = next,
            None => break,
        }
    }
    sqlx::query("ROLLBACK").execute(&mut writer).await.unwrap();
    assert_eq!(snapshots, (0..3).map(|i| frames(&[i]).1).collect::<BTreeSet<_>>(), "newer ones are in the journal");
    assert!((0..3).all(|i| tags.contains(&tag(&format!("t{i}")))), "{tags:?}");
    let first = store.unjournaled(1000).await.unwrap();
    assert_eq!(first.iter().filter(|change| change.seq <= last).count(), 6, "the walk contains these");
    assert!(store.begin_names().await.unwrap().0 > last);
}

/// Pushes from several tasks until told to stop; returns what was acknowledged, and how many blobs
/// were new.
async fn push_until(store: &Arc<dyn Metadata>, done: &Arc<AtomicBool>) -> (BTreeSet<Digest>, u64) {
    let workers = (0..4_u64).map(|worker| {
        let (store, done) = (Arc::clone(store), Arc::clone(done));
        tokio::spawn(async move {
            let (mut acknowledged, mut new) = (BTreeSet::new(), 0);
            for i in 0.. {
                if done.load(Ordering::SeqCst) {
                    break;
                }
                let numbers = [worker * 1000 + i, 7];
                let pushed = push(&*store, &numbers, &format!("t{worker}")).await;
                new += pushed.unwrap_or_else(|e| panic!("worker {worker}, push {i}: {e}"));
                acknowledged.insert(frames(&numbers).1);
            }
            (acknowledged, new)
        })
    });
    let workers: Vec<(BTreeSet<Digest>, u64)> = join_all(workers).await.into_iter().map(|worker| worker.unwrap()).collect();
    let new = workers.iter().map(|(_, new)| new).sum();
    (workers.into_iter().flat_map(|(acknowledged, _)| acknowledged).collect(), new)
}

/// Garbage of many snapshots, in packs of which a little is kept by snapshots whose manifests are
/// returned.
async fn litter(store: &Arc<dyn Metadata>) -> BTreeSet<Digest> {
    let mut kept = BTreeSet::new();
    for i in 0..20_u64 {
        let numbers: Vec<u64> = (100_000 + i * 40..100_000 + i * 40 + 30).collect();
        push_for(Duration::ZERO, &**store, &numbers, "litter").await.unwrap();
        push_for(Duration::ZERO, &**store, &numbers[..2], &format!("kept{}", i % 4)).await.unwrap();
        store.delete_snapshot(repository(), frames(&numbers).1).await.unwrap();
        kept.insert(frames(&numbers[..2]).1);
    }
    let changes = store.unjournaled(1_000_000).await.unwrap();
    let (first, last) = (changes[0].seq, changes[changes.len() - 1].seq);
    store.journaled(vec![JournalRow { key: unique("journal"), first, last, summary: false, records: 1 }]).await.unwrap();
    kept
}

/// Collects, compacts and forgets from several tasks until told to stop; returns how many objects
/// were deleted.
async fn collect_until(store: &Arc<dyn Metadata>, done: &Arc<AtomicBool>) -> u64 {
    let workers = (0..2).map(|_| {
        let (store, done) = (Arc::clone(store), Arc::clone(done));
        tokio::spawn(async move {
            let mut deleted = 0;
            while !done.load(Ordering::SeqCst) {
                let step = store.collect(3).await.unwrap();
                deleted += step.released + step.unclaimed;
                compact(&store).await.unwrap();
                store.empty_packs(2).await.unwrap();
                let emptied = store.emptied_packs(Duration::ZERO, 2).await.unwrap();
                store.forget_packs(emptied.iter().map(|pack| pack.id).collect()).await.unwrap();
            }
            deleted
        })
    });
    join_all(workers).await.into_iter().map(|worker| worker.unwrap()).sum()
}

/// Moves what is alive in one sparse pack.
async fn compact(store: &Arc<dyn Metadata>) -> Result<()> {
    for sparse in store.claim_sparse_packs(1, LEASE).await? {
        let (mut moved, mut offset) = (Vec::new(), 8);
        for packed in store.pack_contents(sparse.id).await? {
            moved.push(Moved { object: packed.object, from: sparse.id, offset });
            offset += packed.frame_len;
        }
        let pack = store.begin_pack(unique("compacted"), LEASE).await?;
        store.finish_compaction(pack, PackSizes { bytes: offset + 100, frame_bytes: offset - 8 }, moved).await?;
    }
    Ok(())
}

/// Pushes and collects at the same time, beside `kept`, until `done`. No call fails because of what
/// happens to the server meanwhile, and each change is made once.
async fn assert_unnoticed(store: &Arc<dyn Metadata>, done: &Arc<AtomicBool>, mut kept: BTreeSet<Digest>) {
    let before = count(&**store).await;
    let ((acknowledged, new), deleted) = tokio::join!(push_until(store, done), collect_until(store, done));
    assert!(!acknowledged.is_empty());
    assert_eq!(count(&**store).await, before + new - deleted, "what was said to be new and deleted, and what there is");
    // Each change once, also where the answer to its commit was lost: a snapshot and a tag for each
    // push.
    assert_eq!(store.unjournaled(1_000_000).await.unwrap().len(), acknowledged.len() * 2);
    kept.extend(acknowledged);
    let snapshots: Vec<Digest> = store.snapshots(repository(), None, 100_000).await.unwrap().rows.into_iter().map(|s| s.digest).collect();
    assert_eq!(snapshots.iter().copied().collect::<BTreeSet<_>>(), kept);
    assert_eq!(snapshots.len(), kept.len());
    assert_sound(&**store).await;
    collect_all(&**store, 1000).await.unwrap();
    let mut reached = BTreeSet::new();
    let mut level: Vec<Option<ObjectRow>> = store.find(snapshots).await.unwrap();
    while !level.is_empty() {
        let rows: Vec<ObjectRow> = level.into_iter().flatten().filter(|row| reached.insert(row.id)).collect();
        level = store.objects(rows.into_iter().flat_map(|row| row.children).collect()).await.unwrap().into_iter().map(Some).collect();
    }
    assert_eq!(count(&**store).await, reached.len() as u64, "nothing is left but what snapshots reach");
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_are_cut_at_any_moment_are_not_noticed() {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    let kept = litter(&store).await;
    let done = Arc::new(AtomicBool::new(false));
    let cutting = tokio::task::spawn_blocking({
        let (done, cut) = (Arc::clone(&done), Arc::clone(&store));
        move || {
            for _ in 0..25 {
                // Enough happens in between that no transaction is hit at each of its attempts.
                let before = cut.rows_written();
                pfr_testkit::postgres::cut_connections(&url);
                while cut.rows_written() < before + 200 {
                    std::thread::yield_now();
                }
            }
            done.store(true, Ordering::SeqCst);
        }
    });
    assert_unnoticed(&store, &done, kept).await;
    cutting.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_or_crashes_is_waited_for() {
    // It is only killed. The fsyncs of a shutdown and of a recovery may take longer on a slow disk
    // than clients wait.
    let mut cluster = Cluster::start_with(Durability::Fast);
    let store = connect(&cluster.create_database()).await;
    let kept = litter(&store).await;
    let done = Arc::new(AtomicBool::new(false));
    let restarting = tokio::task::spawn_blocking({
        let (done, store) = (Arc::clone(&done), Arc::clone(&store));
        move || {
            // Something happens in between each time.
            let wait = |rows: u64| {
                let deadline = std::time::Instant::now() + Duration::from_secs(120);
                while store.rows_written() < rows {
                    assert!(std::time::Instant::now() < deadline, "nothing is written any more");
                    std::thread::yield_now()
                }
            };
            wait(store.rows_written() + 200);
            cluster.restart();
            wait(store.rows_written() + 200);
            cluster.kill9();
            cluster.start_again();
            wait(store.rows_written() + 200);
            done.store(true, Ordering::SeqCst);
            cluster
        }
    });
    assert_unnoticed(&store, &done, kept).await;
    drop(restarting.await.unwrap());
}

#[tokio::test]
async fn a_server_that_stays_away_is_unavailable() {
    let cluster = Cluster::start_with(Durability::Fast);
    let url = cluster.create_database();
    drop(cluster);
    let error = PostgresMetadata::connect(&url, PostgresOptions::default()).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { what: "metadata", .. }), "{error}");
    assert_eq!(error.code(), ErrorCode::Unavailable);
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_refused_and_one_of_this_version_is_opened_again() {
    let cluster = Cluster::start_with(Durability::Fast);
    let url = cluster.create_database();
    // Instances that start together wait for each other.
    let stores = join_all((0..6).map(|_| connect(&url))).await;
    push(&*stores[0], &[1], "t").await.unwrap();
    assert_eq!(stores[5].tags(repository(), None, 10).await.unwrap().rows.len(), 1);
    drop(cluster.sql(&url, "INSERT INTO _sqlx_migrations VALUES (99, 'from the future', now(), true, '', 0)"));
    let error = PostgresMetadata::connect(&url, PostgresOptions::default()).await.unwrap_err().to_string();
    assert!(error.contains("version 99") && error.contains("newer"), "{error}");
}

#[tokio::test]
async fn a_pack_that_was_given_up_is_lost_to_its_upload_before_and_after_it_is_forgotten() {
    let store = connect(&pfr_testkit::postgres::database()).await;
    let push = PushId(unique("push"));
    store.open_push(push.clone(), repository(), LEASE).await.unwrap();
    let (frames, _) = frames(&[1]);
    let pack = store.begin_pack(unique("pack"), Duration::ZERO).await.unwrap();
    assert_eq!(store.empty_packs(10).await.unwrap().abandoned, 1);
    for forgotten in [false, true] {
        let error = store.finish_pack(push.clone(), pack, sizes(&frames), frames.clone(), LEASE).await.unwrap_err();
        assert!(matches!(error, Error::PackLost(_)), "forgotten: {forgotten}: {error}");
        store.forget_packs(vec![pack]).await.unwrap();
    }
    assert_eq!(count(&*store).await, 0);
}

/// Makes writing to a table fail: the `n`th time that it is come by, if `when` says so. It is come
/// by with every statement, and once more for every row at the end of the transaction.
fn trip(url: &str, table: &str, when: &str, how: &str) {
    let statement = format!(
        "CREATE SEQUENCE tripped; CREATE FUNCTION trip() RETURNS trigger LANGUAGE plpgsql AS $$
           DECLARE n bigint := nextval('tripped'); BEGIN IF {when} THEN {how} END IF; RETURN NULL; END $$;
         CREATE TRIGGER trip AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION trip();
         CREATE CONSTRAINT TRIGGER trip_later AFTER INSERT OR UPDATE OR DELETE ON {table} DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW EXECUTE FUNCTION trip();"
    );
    drop(pfr_testkit::postgres::sql(url, &statement));
}

/// How often it was come by.
fn untrip(url: &str) -> u32 {
    let tripped = pfr_testkit::postgres::sql(url, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM tripped").parse().unwrap();
    drop(pfr_testkit::postgres::sql(url, "DROP FUNCTION trip() CASCADE; DROP SEQUENCE tripped"));
    tripped
}

/// Everything that writes, once; the same each time.
async fn every_write(store: &Arc<dyn Metadata>, round: u64) {
    let (kept, gone) = ([round * 100, round * 100 + 1], [round * 100 + 1, round * 100 + 2]);
    push_for(Duration::ZERO, &**store, &kept, "kept").await.unwrap();
    push_for(Duration::ZERO, &**store, &gone, "gone").await.unwrap();
    store.put_tags(repository(), frames(&kept).1, vec![TagMove { tag: tag("moved"), expected: None }]).await.unwrap();
    store.delete_tag(repository(), tag("moved"), Some(TagState::At(frames(&kept).1))).await.unwrap();
    store.delete_snapshot(repository(), frames(&gone).1).await.unwrap();
    let done = collect_all(&**store, 4).await.unwrap();
    assert_eq!(done.released + done.unclaimed, 5, "two pages, a run, a tree, a manifest: each counted once");
    store.empty_packs(100).await.unwrap();
    let emptied = store.emptied_packs(Duration::ZERO, 100).await.unwrap();
    store.forget_packs(emptied.into_iter().map(|pack| pack.id).collect()).await.unwrap();
    let changes = store.unjournaled(100).await.unwrap();
    // Two snapshots, two tags, a tag put and deleted, a snapshot deleted.
    assert_eq!(changes.len(), 7);
    let (first, last) = (changes[0].seq, changes[6].seq);
    store.journaled(vec![JournalRow { key: unique("journal"), first, last, summary: false, records: 1 }]).await.unwrap();
    assert_sound(&**store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_ends_or_loses_at_any_step_is_not_noticed_and_nothing_happens_twice() {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    let ends = "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60);";
    let loses = "RAISE EXCEPTION 'as asked for' USING ERRCODE = 'serialization_failure';";
    let mut round = 0;
    for table in ["repositories", "packs", "objects", "containers", "manifests", "tags", "pushes", "suspects", "changes", "journal"] {
        for how in [ends, loses] {
            // The first statement, the end of the transaction that is next, and one of those that
            // follow.
            trip(&url, table, "n IN (1, 3, 5)", how);
            every_write(&store, round).await;
            let tripped = untrip(&url);
            // The repository is made in the first round.
            assert!(tripped > 5 || (table == "repositories" && round > 0), "{table}: {tripped}");
            round += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_stays_is_not_tried_for_ever_and_one_of_the_tables_not_at_all() {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    let fails = |code: &str| format!("RAISE EXCEPTION 'as asked for' USING ERRCODE = '{code}';");
    for (code, expected, least, most) in
        [("23514", ErrorCode::Internal, 1, 1), ("53100", ErrorCode::StorageFull, 1, 1), ("40P01", ErrorCode::Unavailable, 2, 10)]
    {
        trip(&url, "changes", "true", &fails(code));
        let error = push(&*store, &[1, 2], "t").await.unwrap_err();
        let tripped = untrip(&url);
        assert_eq!(error.code(), expected, "{code}: {error}");
        assert!((least..=most).contains(&tripped), "{code}: {tripped} tries");
        assert!(store.repositories(None, 10).await.unwrap().rows.is_empty(), "nothing of it is left");
        assert_sound(&*store).await;
    }
    push(&*store, &[1, 2], "t").await.unwrap();
}

/// A proxy to the database that can be silenced: existing connections then pass nothing on, and new
/// ones work.
async fn silenced(url: &str) -> (String, tokio::sync::watch::Sender<u64>) {
    let server = url.split(['@', '/']).find(|part| part.contains("127.0.0.1:")).unwrap().to_owned();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let through = url.replace(&server, &listener.local_addr().unwrap().to_string());
    let silence = tokio::sync::watch::Sender::new(0);
    let heard = silence.subscribe();
    tokio::spawn(async move {
        while let Ok((mut ours, _)) = listener.accept().await {
            let (mut heard, server) = (heard.clone(), server.clone());
            tokio::spawn(async move {
                let mut theirs = tokio::net::TcpStream::connect(server).await.unwrap();
                let generation = *heard.borrow();
                let silent = async { drop(heard.wait_for(|now| *now > generation).await) };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut ours, &mut theirs) => return,
                    () = silent => {}
                }
                // The host has lost power, and its transactions are lost without notice.
                drop(theirs);
                std::future::pending().await
            });
        }
    });
    (through, silence)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_silent_is_not_waited_for_for_ever() {
    let (url, silence) = silenced(&pfr_testkit::postgres::database()).await;
    let options = PostgresOptions { max_connections: 4, limit: Duration::from_secs(2), ..PostgresOptions::default() };
    let store: Arc<dyn Metadata> = PostgresMetadata::connect(&url, options).await.unwrap();
    push(&*store, &[1, 2], "t").await.unwrap();
    for round in 0..3_u64 {
        let (stop, stopped) = (Arc::new(AtomicBool::new(false)), AtomicU64::new(0));
        let pushing = (0..4).map(|worker| {
            let (store, stop) = (Arc::clone(&store), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut last = Ok(0);
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let number = 1_000_000 * (round + 1) + 10_000 * worker + n;
                    last = push(&*store, &[number], &format!("t{round}-{worker}")).await;
                }
                last
            })
        });
        let pushing: Vec<_> = pushing.collect();
        tokio::time::sleep(Duration::from_millis(300)).await;
        silence.send_modify(|generation| *generation += 1);
        tokio::time::sleep(Duration::from_millis(500)).await;
        stop.store(true, Ordering::Relaxed);
        let ended = tokio::time::timeout(Duration::from_secs(60), join_all(pushing)).await.expect("every push ends");
        for last in ended {
            // The outcome of a commit may stay unknown; everything else was tried again.
            match last.unwrap() {
                Ok(_) | Err(Error::Unavailable { .. }) => stopped.fetch_add(1, Ordering::Relaxed),
                Err(error) => panic!("{error}"),
            };
        }
        assert_eq!(stopped.load(Ordering::Relaxed), 4);
        push(&*store, &[round], "t").await.unwrap();
    }
    assert_sound(&*store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_that_waits_for_a_slow_transaction_gives_up_and_lets_pushes_go_on() {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    push(&*store, &[1], "t").await.unwrap();
    let mut slow = PgConnection::connect(&url).await.unwrap();
    for statement in ["BEGIN", "LOCK TABLE objects IN ROW EXCLUSIVE MODE"] {
        raw_sql(statement).execute(&mut slow).await.unwrap();
    }
    let limits = QuotaLimits { snapshots: Some(9), ..QuotaLimits::default() };
    let setting = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.set_quota(limits, None).await }
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while pfr_testkit::postgres::sql(&url, waiting) == "0" {
        tokio::task::yield_now().await;
    }
    // It waits behind the one that sets the quota, until that one gives up.
    push(&*store, &[7, 8], "u").await.unwrap();
    assert_eq!(setting.await.unwrap().unwrap_err().code(), ErrorCode::Overloaded);
    raw_sql("COMMIT").execute(&mut slow).await.unwrap();
    assert!(store.set_quota(limits, None).await.unwrap().is_some());
    assert_sound(&*store).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_victim_of_a_deadlock_tries_again() {
    let url = pfr_testkit::postgres::database();
    // Our connection checks for deadlocks once, after this wait. The other connection must be in
    // the deadlock by then.
    let timeout = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''6s''', current_database()); END $$";
    drop(pfr_testkit::postgres::sql(&url, timeout));
    let store = connect(&url).await;
    push(&*store, &[1, 2], "t").await.unwrap();
    let (frames, _) = frames(&[1, 2]);
    let mut ids: Vec<i64> =
        store.find(frames.iter().map(|f| f.header.digest).collect()).await.unwrap().into_iter().flatten().map(|r| r.id).collect();
    ids.sort_unstable();
    let (first, last) = (ids[0], ids[ids.len() - 1]);
    // Another connection that locks in the other order and never checks for deadlocks itself.
    let mut stranger = PgConnection::connect(&url).await.unwrap();
    let lock = |id: i64| format!("SELECT 1 FROM objects WHERE id = {id} FOR UPDATE");
    for statement in ["SET deadlock_timeout = '1h'".to_owned(), "BEGIN".to_owned(), lock(last)] {
        raw_sql(AssertSqlSafe(statement)).execute(&mut stranger).await.unwrap();
    }
    let pushing = tokio::spawn({
        let (store, frames) = (Arc::clone(&store), frames.clone());
        async move { upload(&*store, &frames, LEASE).await.map(|(_, new)| new) }
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while pfr_testkit::postgres::sql(&url, waiting) == "0" {
        tokio::task::yield_now().await;
    }
    raw_sql(AssertSqlSafe(lock(first))).execute(&mut stranger).await.unwrap();
    assert!(!pushing.is_finished(), "the push waits for the other connection, which has both locks");
    raw_sql("COMMIT").execute(&mut stranger).await.unwrap();
    assert_eq!(pushing.await.unwrap().unwrap(), 0, "everything was there");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    while pfr_testkit::postgres::sql(&url, deadlocks) == "0" {
        tokio::task::yield_now().await;
    }
    assert_sound(&*store).await;
}
