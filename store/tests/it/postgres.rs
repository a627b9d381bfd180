//! What only a shared database has: concurrent writers, lost connections, restarts of the server.

mod crash;
mod events;
mod failures;
mod images;
mod sessions;
mod upgrade;

use crate::common::{repository, snapshot, tag};
use futures::future::join_all;
use pfr_schema::api::TagState;
use pfr_schema::codec::Codec;
use pfr_schema::container::Container;
use pfr_schema::frame::Header;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, ErrorCode, Kind, Limits, Tag};
use pfr_store::{
    Collected, Commit, Error, Metadata, Moved, NewContainer, NewFrame, PackSizes, PostgresMetadata, PostgresOptions, PushId, QuotaLimits,
    Result, TagMove,
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
    Commit {
        manifest,
        parents: vec![],
        artifact_type: None,
        subject: None,
        tag,
        pin: None,
        marks: vec![],
        agent: None,
        audit: None,
        signed: None,
    }
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
