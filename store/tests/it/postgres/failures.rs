//! Connections, sessions and servers that fail in the middle of anything: writers do not notice.

use super::*;
use pfr_store::{JournalRow, ObjectRow};

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
    cut_connections(10).await;
}

async fn cut_connections(times: u32) {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    let kept = litter(&store).await;
    let done = Arc::new(AtomicBool::new(false));
    let cutting = tokio::task::spawn_blocking({
        let (done, cut) = (Arc::clone(&done), Arc::clone(&store));
        move || {
            for _ in 0..times {
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
    sessions_end_or_lose(1).await;
}

/// In so many of two ways at each table; of one, the other at the next table.
async fn sessions_end_or_lose(ways: usize) {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    let ends = "PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60);";
    let loses = "RAISE EXCEPTION 'as asked for' USING ERRCODE = 'serialization_failure';";
    let mut round = 0;
    let tables = ["repositories", "packs", "objects", "containers", "manifests", "tags", "pushes", "suspects", "changes", "journal"];
    for (number, table) in tables.into_iter().enumerate() {
        for how in [ends, loses].into_iter().cycle().skip(number).take(ways) {
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

mod long {
    use super::{cut_connections, sessions_end_or_lose};

    #[tokio::test(flavor = "multi_thread")]
    async fn connections_that_are_cut_at_any_moment_are_not_noticed() {
        cut_connections(25).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_session_that_ends_or_loses_at_any_step_is_not_noticed_and_nothing_happens_twice() {
        sessions_end_or_lose(2).await;
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
