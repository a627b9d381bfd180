//! Pushes, deletions and collections of the same objects at the same time, on a database that
//! several processes share.

use crate::common::{pieces, repository, snapshot, tag};
use crate::postgres::{connect, push_for};
use futures::future::join_all;
use object_store::memory::InMemory;
use pfr_schema::{Digest, Kind};
use pfr_store::{Error, GcOptions, Listing, Metadata, Options, PrefixMark, QuotaLimits, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages that all pushes choose from.
const POOL: u64 = 40;
/// Pages of a push.
const PAGES: usize = 24;

/// Pseudo-random numbers, the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Replicas over one database and one storage, and what they count together.
struct Fleet {
    url: String,
    stores: Vec<Store>,
    done: AtomicBool,
    collected: AtomicU64,
}

impl Fleet {
    /// The database looks for deadlocks soon: each would otherwise take a second.
    async fn new(lease: Duration) -> Self {
        let url = pfr_testkit::postgres::database();
        let soon = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''20ms''', current_database()); END $$";
        drop(pfr_testkit::postgres::sql(&url, soon));
        let packs: Arc<InMemory> = Arc::default();
        let mut stores = Vec::new();
        for _ in 0..2 {
            let metadata: Arc<dyn Metadata> = connect(&url).await;
            stores.push(Store::new(Arc::clone(&packs) as _, metadata, Options { lease, ..Options::default() }));
        }
        // Rows alone leave no marker on the storage, and collections look for it.
        stores[0].begin_serving().await.unwrap();
        Self { url, stores, done: AtomicBool::new(false), collected: AtomicU64::new(0) }
    }

    fn store(&self, worker: u64) -> &Store {
        &self.stores[worker as usize % self.stores.len()]
    }

    /// Pushes snapshots of pages that other tasks push too. Returns how long each took. Pushes
    /// again what was collected meanwhile.
    async fn push(&self, worker: u64, pushes: u64) -> Vec<Duration> {
        let (mut numbers, mut took) = (Numbers(worker), Vec::new());
        for i in 0..pushes {
            let pages: Vec<u64> = (0..PAGES).map(|_| numbers.below(POOL)).chain([1000 + worker * pushes + i]).collect();
            let start = Instant::now();
            while let Err(error) = self.try_push(worker, &pages).await {
                let collected = matches!(error, Error::BlobUnknown { .. } | Error::Missing { .. } | Error::PackLost(_));
                assert!(collected, "worker {worker}, push {i}: {error}");
            }
            took.push(start.elapsed());
        }
        took
    }

    async fn try_push(&self, worker: u64, pages: &[u64]) -> pfr_store::Result<()> {
        let (store, name, snapshot) = (self.store(worker), format!("t{worker}"), snapshot(pages, vec![]));
        if store.options().lease.is_zero() {
            // Only rows, with leases that end at once, so that collections and pushes touch the
            // same objects.
            return push_for(Duration::ZERO, store.metadata(), pages, &name).await.map(drop);
        }
        let session = store.open_push(&repository()).await?;
        let wanted = snapshot.pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
        store.missing(&session.id, wanted).await?;
        store.ingest(&session.id, pieces(&snapshot.stream(), 1 << 20)).await?;
        store.commit(&session.id, snapshot.manifest.digest, Some(tag(&name)), None).await?;
        Ok(())
    }

    /// Deletes what is there, the newest and the oldest, until the pushes are done.
    async fn delete(&self, worker: u64) {
        let (mut numbers, store) = (Numbers(worker), self.store(worker));
        while !self.done.load(Ordering::SeqCst) {
            let listed = store.snapshots(&repository(), None, 20).await.map(|page| page.rows).unwrap_or_default();
            if listed.len() > 4 {
                let which = numbers.below(listed.len() as u64) as usize;
                if let Err(error) = store.delete_snapshot(&repository(), &listed[which].digest).await {
                    assert_eq!(error.code().status(), 404, "{error}");
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Collects until the pushes are done.
    async fn collect(&self, worker: u64) {
        while !self.done.load(Ordering::SeqCst) {
            let options = GcOptions { compact: !self.store(worker).options().lease.is_zero(), ..GcOptions::default() };
            let report = self.store(worker).gc(&options, &mut |_| ()).await.unwrap();
            self.collected.fetch_add(report.released + report.unclaimed, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sets first quotas and repairs the tables until the pushes are done. Returns how often.
    async fn count(&self, worker: u64) -> u64 {
        let (metadata, mut rounds) = (self.store(worker).metadata(), 0);
        while !self.done.load(Ordering::SeqCst) {
            for snapshots in [None, Some(1 << 40)] {
                metadata.set_quota(QuotaLimits { snapshots, ..QuotaLimits::default() }, None).await.unwrap();
            }
            let audit = metadata.audit(true).await.unwrap();
            assert_eq!(audit.wrong, 0, "{:#?}", audit.discrepancies);
            rounds += 1;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        rounds
    }

    /// Runs `pushers` at the same time, with or without deletions and collections. Returns the
    /// times of the pushes, sorted.
    async fn run(self: &Arc<Self>, pushers: u64, pushes: u64, beside: bool) -> Vec<Duration> {
        self.done.store(false, Ordering::SeqCst);
        let others: Vec<_> = (0..if beside { 4 } else { 0 })
            .map(|worker| {
                let fleet = Arc::clone(self);
                tokio::spawn(async move { if worker < 2 { fleet.delete(worker).await } else { fleet.collect(worker).await } })
            })
            .collect();
        let pushing = (0..pushers).map(|worker| {
            let fleet = Arc::clone(self);
            tokio::spawn(async move { fleet.push(worker, pushes).await })
        });
        let mut took: Vec<Duration> = join_all(pushing).await.into_iter().flat_map(|took| took.unwrap()).collect();
        self.done.store(true, Ordering::SeqCst);
        join_all(others).await.into_iter().for_each(|other| other.unwrap());
        took.sort();
        took
    }

    /// Deadlocks since the database was made. Sessions report theirs when they end at the latest.
    async fn deadlocks(self: Arc<Self>) -> u64 {
        let audit = self.stores[0].metadata().audit(false).await.unwrap();
        assert_eq!(audit.wrong, 0, "{:#?}", audit.discrepancies);
        let url = self.url.clone();
        drop(self);
        let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
        while pfr_testkit::postgres::sql(&url, sessions) != "0" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        pfr_testkit::postgres::sql(&url, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").parse().unwrap()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pushes_deletions_and_collections_of_shared_pages_do_not_deadlock() {
    let fleet = Arc::new(Fleet::new(Duration::ZERO).await);
    fleet.run(6, 25, true).await;
    assert!(fleet.collected.load(Ordering::SeqCst) > 100, "collections and pushes have met");
    assert_eq!(fleet.deadlocks().await, 0);
}

/// They lock the table of objects, while all others lock rows of several tables.
#[tokio::test(flavor = "multi_thread")]
async fn first_quotas_and_repairs_beside_them_do_not_deadlock_and_find_nothing_wrong() {
    let fleet = Arc::new(Fleet::new(Duration::ZERO).await);
    let counting = tokio::spawn({
        let fleet = Arc::clone(&fleet);
        async move { fleet.count(1).await }
    });
    fleet.run(6, 15, true).await;
    assert!(counting.await.unwrap() > 2, "counts and pushes have met");
    assert_eq!(fleet.deadlocks().await, 0);
}

/// They change other columns of the same rows, and each finds these rows in another order.
#[tokio::test(flavor = "multi_thread")]
async fn notes_about_the_same_snapshots_at_the_same_time_do_not_deadlock() {
    const SNAPSHOTS: u64 = 32;
    let fleet = Arc::new(Fleet::new(Duration::ZERO).await);
    for number in 0..SNAPSHOTS {
        fleet.try_push(number, &[number]).await.unwrap();
    }
    // Rows are found in the order in which they were written last.
    let forget = "DO $$ DECLARE m record; BEGIN DELETE FROM prefixes; FOR m IN SELECT id FROM manifests ORDER BY id DESC LOOP
                  UPDATE manifests SET prefixed = false, linked = false, agent = NULL WHERE id = m.id; END LOOP; END $$";
    for round in 0..8 {
        drop(pfr_testkit::postgres::sql(&fleet.url, forget));
        let metadata = fleet.store(round).metadata();
        let rows = metadata.unprefixed(0, SNAPSHOTS as usize).await.unwrap();
        assert_eq!(rows.len() as u64, SNAPSHOTS);
        let mark = PrefixMark { key: 1, tokens: 1, proof: 1 };
        let marks: Vec<(i64, Vec<PrefixMark>)> = rows.iter().map(|(row, _)| (*row, vec![mark])).collect();
        let listings = rows.iter().map(|(row, _)| Listing { manifest: *row, needs: None }).collect();
        let agents = rows.iter().rev().map(|(row, _)| (*row, "agent".to_owned())).collect();
        let corrected = marks.iter().rev().cloned().collect();
        let (indexed, linked, noted, correct) = tokio::join!(
            metadata.index_prefixes(marks),
            metadata.link_manifests(repository(), listings),
            metadata.note_agents(agents),
            metadata.correct_prefixes(corrected),
        );
        assert!(indexed.is_ok() && linked.is_ok() && noted.is_ok() && correct.is_ok(), "{indexed:?} {linked:?} {noted:?} {correct:?}");
        assert!(metadata.unprefixed(0, 1).await.unwrap().is_empty());
    }
    assert_eq!(fleet.deadlocks().await, 0);
}

mod long {
    use super::*;

    /// Rounds without collection, and as many beside it. They alternate: other programs use this
    /// machine too.
    const ROUNDS: u64 = 5;
    /// Objects that collections free in a round, at least: the pushes of a round make some
    /// thousands.
    const COLLECTED: u64 = 500;

    /// The 99th percentile of all pushes beside deletions and collections is at most twice that of
    /// all pushes alone.
    #[tokio::test(flavor = "multi_thread")]
    async fn pushes_beside_collection_do_not_deadlock_and_take_at_most_twice_as_long() {
        let fleet = Arc::new(Fleet::new(Duration::from_secs(1)).await);
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            for beside in [false, true] {
                let before = fleet.collected.load(Ordering::SeqCst);
                times[usize::from(beside)].extend(fleet.run(4, 100, beside).await);
                let collected = fleet.collected.load(Ordering::SeqCst) - before;
                println!("round {round}, beside collection: {beside}: {collected} objects collected");
                assert!(if beside { collected >= COLLECTED } else { collected == 0 }, "collections and pushes have met");
            }
        }
        let [alone, beside] = times.map(|mut took| {
            took.sort();
            let at = |share: f64| took[(took.len() as f64 * share) as usize].as_secs_f64() * 1e3;
            println!("{} pushes: p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms", took.len(), at(0.5), at(0.9), at(0.99));
            at(0.99)
        });
        assert!(beside <= 2.0 * alone, "99th percentile beside collection {beside:.1} ms, alone {alone:.1} ms");
        assert_eq!(fleet.deadlocks().await, 0);
    }
}
