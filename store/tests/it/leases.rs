//! Uploads that take longer than a lease: their leases are renewed, and if that failed they leave
//! nothing behind.

use crate::common::rig::{Backend, Rig};
use crate::common::{blob_frame, page, pieces, repository, stream};
use futures::future::BoxFuture;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::ObjectStoreExt as _;
use object_store::path::Path;
use parking_lot::Mutex;
use pfr_schema::frame::Header;
use pfr_schema::{Algorithm, Digest, Kind};
use pfr_store::{Error, GcOptions, PackState, Store};
use pfr_testkit::storage::{Moment, reset, watched};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

type Hook = Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// Hooks of the test before an upload is completed, or an object is read.
#[derive(Clone, Default)]
struct Hooks {
    complete: Arc<Mutex<Option<Hook>>>,
    get: Arc<Mutex<Option<Hook>>>,
    /// The effect of completing happens, the answer is lost.
    lose_answer: bool,
}

impl Hooks {
    async fn say(self, moment: Moment) -> object_store::Result<()> {
        let hook = match moment {
            Moment::Complete => self.complete.lock().clone(),
            Moment::Get => self.get.lock().clone(),
            Moment::Completed if self.lose_answer => return Err(reset()),
            _ => None,
        };
        if let Some(hook) = hook {
            hook().await;
        }
        Ok(())
    }
}

/// The store of a rig, with its packs behind hooks.
fn hooked(rig: &Rig, hooks: Hooks) -> Store {
    let packs = watched(Arc::clone(&rig.packs), Arc::new(move |moment| Box::pin(hooks.clone().say(moment))));
    Store::new(packs, Arc::clone(&rig.metadata), rig.options())
}

const MINUTE: Duration = Duration::from_secs(60);

/// A blob of `mib` MiB, different for each seed.
fn blob(seed: u64, mib: u64) -> Vec<u8> {
    (0..mib << 13).flat_map(|i| page(seed << 32 | i)).collect()
}

#[tokio::test]
async fn an_upload_of_many_leases_is_taken_in() {
    // Its session is nearly at half of its lease when the upload begins, or nearly at its end.
    for waited in [29, 59] {
        takes_in_many_leases(waited * MINUTE).await;
    }
}

async fn takes_in_many_leases(waited: Duration) {
    let rig = Rig::new(Backend::Memory).await;
    let blobs = [page(1), blob(2, 12), page(3)];
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.wait(waited);
    // Collection runs all the time.
    let bytes = stream(blobs.iter().map(|b| blob_frame(b)));
    let slow = pieces(&bytes, 1 << 20).then(|piece| async {
        rig.wait(20 * MINUTE);
        rig.metadata.collect(1000).await.unwrap();
        assert_eq!(rig.metadata.empty_packs(1000).await.unwrap().abandoned, 0);
        piece
    });
    let done = rig.store.ingest(&session.id, Box::pin(slow)).await.unwrap();
    assert_eq!(done.frames, 3);
    // Blobs that came hours before are leased as long as the session lives.
    let wanted = blobs.iter().map(|b| (Digest::sha256(b), Kind::Blob)).collect();
    assert!(rig.store.missing(&session.id, wanted).await.unwrap().is_empty());
}

#[tokio::test]
async fn compaction_of_many_leases_comes_to_its_end() {
    let rig = Rig::new(Backend::Memory).await;
    let hooks = Hooks::default();
    let store = hooked(&rig, hooks.clone());
    // One pack, of which less than half stays.
    let kept = blob(1, 14);
    let others: Vec<Vec<u8>> = (2..8).map(|seed| blob(seed, 3)).collect();
    let session = store.open_push(&repository()).await.unwrap();
    let bytes = stream([&kept].into_iter().chain(&others).map(|b| blob_frame(b)));
    store.ingest(&session.id, pieces(&bytes, 1 << 20)).await.unwrap();
    rig.wait(40 * MINUTE);
    let other = store.open_push(&repository()).await.unwrap();
    let wanted = vec![(Digest::sha256(&kept), Kind::Blob)];
    assert!(store.missing(&other.id, wanted).await.unwrap().is_empty());
    rig.wait(40 * MINUTE);
    let (metadata, now) = (Arc::clone(&rig.metadata), Arc::clone(&rig.now));
    *hooks.get.lock() = Some(Arc::new(move || {
        let (metadata, now) = (Arc::clone(&metadata), Arc::clone(&now));
        Box::pin(async move {
            now.fetch_add(40 * 60_000, Ordering::SeqCst);
            metadata.empty_packs(1000).await.unwrap();
        })
    }));
    let report = store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap();
    assert_eq!((report.packs_compacted, report.packs_abandoned), (1, 0), "{report:?}");
    *hooks.get.lock() = None;
    assert_eq!(read_back(&store, &kept).await, kept);
}

/// The payload of a blob's frame.
async fn read_back(store: &Store, blob: &[u8]) -> Vec<u8> {
    let frames: Vec<bytes::Bytes> = store.frames(vec![Digest::sha256(blob)]).await.unwrap().try_collect().await.unwrap();
    let start = Header::len(Algorithm::Sha256);
    frames.concat()[start..start + blob.len()].to_vec()
}

/// The upload's process is stopped while time goes on for others: lease and grace period pass, and
/// the row of its pack is deleted.
fn row_goes(rig: &Rig) -> Hook {
    let (metadata, now, packs) = (Arc::clone(&rig.metadata), Arc::clone(&rig.now), Arc::clone(&rig.packs));
    Arc::new(move || {
        let rig = (Arc::clone(&metadata), Arc::clone(&now), Arc::clone(&packs));
        Box::pin(async move {
            let (metadata, now, packs) = rig;
            now.fetch_add(48 * 3_600_000, Ordering::SeqCst);
            metadata.collect(1000).await.unwrap();
            assert_eq!(metadata.empty_packs(10).await.unwrap().abandoned, 1);
            now.fetch_add(1000, Ordering::SeqCst);
            let emptied = metadata.emptied_packs(Duration::ZERO, 10).await.unwrap();
            for pack in &emptied {
                let shard = &pack.key[pack.key.len() - 2..];
                drop(packs.delete(&Path::from(format!("{shard}/{}.pfpack", pack.key))).await);
            }
            metadata.forget_packs(emptied.iter().map(|pack| pack.id).collect()).await.unwrap();
            assert!(metadata.packs(None, 10).await.unwrap().is_empty());
        })
    })
}

#[tokio::test]
async fn bytes_that_land_after_the_row_of_their_pack_is_gone_are_removed_by_their_writer() {
    for lose_answer in [false, true] {
        let rig = Rig::new(Backend::Memory).await;
        let hooks = Hooks { lose_answer, ..Hooks::default() };
        *hooks.complete.lock() = Some(row_goes(&rig));
        let store = hooked(&rig, hooks);
        let session = store.open_push(&repository()).await.unwrap();
        let error = store.ingest(&session.id, pieces(&stream([blob_frame(&page(1))]), 100)).await.unwrap_err();
        assert!(matches!((&error, lose_answer), (Error::PackLost(_), false) | (Error::Unavailable { .. }, true)), "{error}");
        assert!(rig.pack_paths().await.is_empty(), "bytes without a record");
    }
}

#[tokio::test]
async fn a_lost_answer_costs_no_bytes_that_a_row_names() {
    let rig = Rig::new(Backend::Memory).await;
    let store = hooked(&rig, Hooks { lose_answer: true, ..Hooks::default() });
    let session = store.open_push(&repository()).await.unwrap();
    store.ingest(&session.id, pieces(&stream([blob_frame(&page(1))]), 100)).await.unwrap_err();
    assert_eq!(rig.pack_paths().await.len(), 1);
    assert_eq!(rig.metadata.packs(None, 10).await.unwrap()[0].state, PackState::Writing);
    rig.collect().await;
    assert!(rig.pack_paths().await.is_empty());
}
