//! Packs on an object store that fails: before and after the effect, in parts, on completion, on
//! reads. Whatever fails, nothing unfinished becomes visible and a retry succeeds.

use crate::common::{pieces, push, repository, snapshot, tag};
use object_store::memory::InMemory;
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use pfr_testkit::storage::{Moment, reset, watched};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// A store on which the operation `fault` fails once its counter reaches zero.
async fn failing(fault: Moment) -> (Store, Arc<AtomicI64>) {
    let countdown = Arc::new(AtomicI64::new(i64::MAX));
    let left = Arc::clone(&countdown);
    let say = move |moment| {
        let strikes = moment == fault && left.fetch_sub(1, Ordering::SeqCst) == 0;
        Box::pin(async move { if strikes { Err(reset()) } else { Ok(()) } }) as _
    };
    let packs = watched(Arc::new(InMemory::new()), Arc::new(say));
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    // Small packs: several in one stream, so that failures strike between them.
    let options = Options { pack_bytes: 8 << 10, ..Options::default() };
    (Store::new(packs, metadata, options), countdown)
}

#[tokio::test]
async fn whichever_write_fails_a_retry_completes_and_nothing_unfinished_is_visible() {
    for fault in [Moment::Open, Moment::Part, Moment::Complete, Moment::Completed] {
        for after in 0..4 {
            let (store, countdown) = failing(fault).await;
            let snapshot = snapshot(&(0..100).collect::<Vec<_>>(), vec![]);
            countdown.store(after, Ordering::SeqCst);
            let session = store.open_push(&repository()).await.unwrap();
            let error = store.ingest(&session.id, pieces(&snapshot.stream(), 1000)).await.unwrap_err();
            assert_eq!(error.code(), ErrorCode::Unavailable, "{fault:?} after {after}: {error}");
            let error = store.commit(&session.id, snapshot.manifest.digest, Some(tag("t")), None).await.unwrap_err();
            assert_eq!(error.code(), ErrorCode::BlobUnknown, "{fault:?} after {after}: {error}");
            assert!(store.repositories(None, 10).await.unwrap().rows.is_empty());
            // Every blob that the store reports as present can be read.
            for raw in &snapshot.pages {
                let digest = Digest::sha256(raw);
                if store.missing(&session.id, vec![(digest, Kind::Blob)]).await.unwrap().is_empty() {
                    assert_eq!(store.read(&digest).await.unwrap(), raw[..]);
                }
            }
            push(&store, &snapshot, "t").await.unwrap();
            store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_pack_that_cannot_be_read_once_is_unread_and_not_bad() {
    let (store, countdown) = failing(Moment::Get).await;
    let snapshot = snapshot(&(0..100).collect::<Vec<_>>(), vec![]);
    push(&store, &snapshot, "t").await.unwrap();
    let packs = store.scrub(&Default::default(), &mut |_| ()).await.unwrap().packs;
    assert!(packs > 2, "several packs, so that one is not the storage");
    for after in 0..4 {
        countdown.store(after, Ordering::SeqCst);
        let report = store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
        assert!(report.bad_packs.is_empty() && report.damaged.is_empty(), "{report:?}");
        assert_eq!((report.unread.len(), report.packs), (1, packs - 1), "{report:?}");
        assert!(report.unread[0].contains("injected"), "{report:?}");
    }
    let report = store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert!(report.unread.is_empty() && report.packs == packs, "{report:?}");
}

#[tokio::test]
async fn a_failing_read_is_unavailable_not_missing_and_not_damage() {
    let (store, countdown) = failing(Moment::Get).await;
    let snapshot = snapshot(&[1, 2, 3], vec![]);
    push(&store, &snapshot, "t").await.unwrap();
    countdown.store(0, Ordering::SeqCst);
    let error = store.read(&snapshot.tree.digest).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
    assert!(error.code().retryable());
    store.read(&snapshot.tree.digest).await.unwrap();
    for after in 0..3 {
        countdown.store(after, Ordering::SeqCst);
        if let Err(error) = store.verify(&snapshot.manifest.digest, &mut |_| ()).await {
            assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
        }
    }
}
