//! A push that takes many times as long as its lease, and a registry that collects without a
//! grace period all the while. The registry's clock stands still unless the test moves it.

use crate::common::sample::{LARGE, directory};
use crate::common::{Registry, is_empty, push_dir, remote, until};
use pfr_client::{Error, PushReport};
use pfr_schema::api::GcReport;
use pfr_store::{Clock, GcOptions, Options, Store};
use pfr_testkit::front::{Fate, Front, Seen};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

const LEASE: u64 = 1000;

fn upload(seen: &Seen) -> bool {
    seen.method == "PUT" && seen.path.ends_with("/frames")
}

fn question(seen: &Seen) -> bool {
    seen.path.ends_with("/missing")
}

/// A push of which one upload is held back.
struct Slow {
    registry: Registry,
    now: Arc<AtomicU64>,
    front: Front,
    gate: Arc<Semaphore>,
    push: JoinHandle<Result<PushReport, Error>>,
    /// Questions that it takes to go once through everything.
    round: usize,
    _source: tempfile::TempDir,
}

impl Slow {
    async fn begin() -> Self {
        let (dir, now) = (tempfile::tempdir().unwrap(), Arc::new(AtomicU64::new(1_000_000_000)));
        let clock = {
            let now = Arc::clone(&now);
            Clock::new(move || now.load(Ordering::SeqCst))
        };
        let options = Options { clock, lease: Duration::from_millis(LEASE), ..Options::default() };
        let store = Store::open(&dir.path().join("store"), options).await.unwrap();
        let registry = Registry::over(store, dir, |c| (c.max_frames_bytes, c.gc_interval_seconds) = (200_000, 0)).await;
        let gate = Arc::new(Semaphore::new(0));
        let (held, mut uploads) = (Arc::clone(&gate), 0);
        let front = Front::start(&registry.url, move |seen| {
            uploads += usize::from(upload(seen));
            if upload(seen) && uploads == 3 { Fate::Hold(Arc::clone(&held)) } else { Fate::Pass }
        });
        let source = directory(LARGE, &(0..40).collect::<Vec<_>>());
        let (url, path) = (front.url.clone(), source.path().to_owned());
        let push = tokio::spawn(async move { push_dir(&remote(&url), &path, "t").await });
        // Six requests of pages: five arrive, one waits.
        until("all uploads but one are there", || front.seen().iter().filter(|s| upload(s)).count() >= 6).await;
        let round = front.seen().iter().take_while(|s| !upload(s)).filter(|s| question(s)).count();
        assert!(round > 0);
        Self { registry, now, front, gate, push, round, _source: source }
    }

    fn pass(&self, milliseconds: u64) {
        self.now.fetch_add(milliseconds, Ordering::SeqCst);
    }

    async fn gc(&self) -> GcReport {
        let at_once = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
        self.registry.store.gc(&at_once, &mut |_| ()).await.unwrap()
    }

    fn questions(&self) -> usize {
        self.front.seen().iter().filter(|s| question(s)).count()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_slower_than_its_lease_keeps_what_it_sent() {
    let slow = Slow::begin().await;
    for _ in 0..6 {
        let before = slow.questions();
        slow.pass(LEASE * 6 / 10);
        let report = slow.gc().await;
        assert_eq!((report.unclaimed, report.packs_abandoned, report.sessions), (0, 0, 0), "{report:?}");
        // One round of questions from its beginning to its end, wherever it was.
        until("everything was asked about again", || slow.questions() > before + 2 * slow.round).await;
        let report = slow.gc().await;
        assert_eq!((report.unclaimed, report.packs_abandoned, report.sessions), (0, 0, 0), "{report:?}");
    }
    assert!(is_empty(&slow.registry.store).await);
    slow.gate.add_permits(1);
    let pushed = slow.push.await.unwrap().unwrap();
    slow.registry.store.verify(&pushed.digest, &mut |_| ()).await.unwrap();
    let opened = slow.front.seen().iter().filter(|s| s.path.ends_with("/pushes")).count();
    assert_eq!(opened, 1, "one session did it");
    assert_eq!(pushed.blobs_sent, pushed.blobs_total, "nothing was sent twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_that_is_gone_had_sent_is_collected_when_its_lease_ends() {
    let slow = Slow::begin().await;
    let stored = async || slow.registry.store.metadata().packs(None, 1000).await.unwrap().iter().any(|p| p.live_bytes > 0);
    while !stored().await {
        tokio::task::yield_now().await;
    }
    slow.push.abort();
    assert_eq!(slow.gc().await.unclaimed, 0, "its lease still runs");
    slow.pass(2 * LEASE);
    let report = slow.gc().await;
    assert!(report.unclaimed > 0 && report.sessions == 1, "{report:?}");
    // Bytes that were on their way when the client went may have arrived since.
    let gone = async {
        while !slow.registry.packs().is_empty() {
            slow.pass(2 * LEASE);
            slow.gc().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), gone).await.unwrap();
    assert_eq!(slow.registry.store.metadata().disk_bytes().await.unwrap(), 0);
}
