//! A clock that is set back a day, at any moment of a store's life: leases and grace periods last
//! longer, nothing acknowledged is lost, and when the clock has caught up nothing is left over.

use crate::common::{Snapshot, leaks, pieces, push, repository, snapshot, tag};
use pfr_schema::Digest;
use pfr_store::{Clock, GcOptions, Options, PushSession, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LEASE: u64 = 60;
const HOUR: u64 = 3600;
const DAY: u64 = 24 * HOUR;

struct World {
    dir: tempfile::TempDir,
    now: Arc<AtomicU64>,
    store: Store,
    /// The step before which the clock is set back.
    jump: usize,
}

impl World {
    async fn new(jump: usize) -> Self {
        let (dir, now) = (tempfile::tempdir().unwrap(), Arc::new(AtomicU64::new(1_800_000_000_000)));
        let clock = {
            let now = Arc::clone(&now);
            Clock::new(move || now.load(Ordering::SeqCst))
        };
        let options = Options { clock, pack_bytes: 4096, lease: Duration::from_secs(LEASE), ..Options::default() };
        let store = Store::open(dir.path(), options).await.unwrap();
        Self { dir, now, store, jump }
    }

    fn step(&self, number: usize) {
        if number == self.jump {
            self.now.fetch_sub(DAY * 1000, Ordering::SeqCst);
        }
    }

    /// Moves the clock on, and collects without a grace period.
    async fn seconds(&self, seconds: u64) {
        self.now.fetch_add(seconds * 1000, Ordering::SeqCst);
        self.store.gc(&GcOptions { grace: Duration::ZERO, ..GcOptions::default() }, &mut |_| ()).await.unwrap();
    }

    async fn upload(&self, snapshot: &Snapshot) -> PushSession {
        let session = self.store.open_push(&repository()).await.unwrap();
        self.store.ingest(&session.id, pieces(&snapshot.stream(), 500)).await.unwrap();
        session
    }

    async fn are_whole(&self, snapshots: &[&Snapshot]) {
        for snapshot in snapshots {
            self.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap_or_else(|e| panic!("jump {}: {e}", self.jump));
        }
    }
}

#[tokio::test]
async fn set_back_a_day_at_some_moments_it_loses_nothing_and_leaks_nothing() {
    set_back_a_day(&[1, 3, 5]).await;
}

mod long {
    #[tokio::test]
    async fn set_back_a_day_at_any_moment_it_loses_nothing_and_leaks_nothing() {
        // The last jump never comes: the same history without a jump.
        super::set_back_a_day(&[0, 1, 2, 3, 4, 5, 6, 7]).await;
    }
}

async fn set_back_a_day(jumps: &[usize]) {
    for &jump in jumps {
        let w = World::new(jump).await;
        let of = |range: std::ops::Range<u64>| snapshot(&range.collect::<Vec<_>>(), vec![]);
        let (kept, goes, late, never, after) = (of(0..60), of(50..150), of(140..200), of(190..260), of(0..20));
        push(&w.store, &kept, "kept").await.unwrap();
        w.step(0);
        push(&w.store, &goes, "goes").await.unwrap();
        w.step(1);
        let open = w.upload(&late).await;
        let forsaken = w.upload(&never).await;
        w.step(2);
        w.seconds(1).await;
        w.store.delete_snapshot(&repository(), &goes.manifest.digest).await.unwrap();
        w.step(3);
        w.seconds(LEASE / 2).await;
        w.step(4);
        w.seconds(1).await;
        w.store.commit(&open.id, late.manifest.digest, Some(tag("late")), None).await.unwrap_or_else(|e| panic!("jump {jump}: {e}"));
        w.step(5);
        w.seconds(LEASE + 1).await;
        w.are_whole(&[&kept, &late]).await;
        w.step(6);
        push(&w.store, &after, "after").await.unwrap();
        // The clock catches up.
        for _ in 0..DAY / (4 * HOUR) + 1 {
            w.seconds(4 * HOUR).await;
            w.are_whole(&[&kept, &late, &after]).await;
        }
        w.seconds(2 * LEASE).await;
        leaks::assert_none_in(&w.store, w.dir.path()).await;
        let rows = w.store.metadata().find(never.pages[30..].iter().map(|p| Digest::sha256(p)).collect()).await.unwrap();
        assert!(rows.iter().all(Option::is_none), "jump {jump}: what no client came back for is gone");
        let refused = w.store.commit(&forsaken.id, never.manifest.digest, None, None).await.unwrap_err();
        assert!(!refused.to_string().is_empty());
        assert_eq!(w.store.metadata().audit(false).await.unwrap().wrong, 0);
        w.are_whole(&[&kept, &late, &after]).await;
    }
}

#[tokio::test]
async fn a_lease_that_was_taken_before_the_jump_holds_till_the_clock_has_caught_up() {
    let w = World::new(0).await;
    let s = snapshot(&[1, 2, 3, 4], vec![]);
    let open = w.upload(&s).await;
    w.step(0);
    for _ in 0..DAY / HOUR {
        w.seconds(HOUR).await;
        let stored = w.store.metadata().find(vec![s.manifest.digest]).await.unwrap();
        assert!(stored[0].is_some());
    }
    w.store.commit(&open.id, s.manifest.digest, Some(tag("t")), None).await.unwrap();
    w.seconds(2 * LEASE).await;
    w.are_whole(&[&s]).await;
    leaks::assert_none_in(&w.store, w.dir.path()).await;
}
