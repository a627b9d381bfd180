//! Packs during their upload: their lease is renewed with that of their session, and a writer that
//! lost a pack gets an error.

use super::model::{LEASE, LEASE_MS, Universe, frames_of};
use crate::common::repository;
use pfr_store::{Clock, Error, NewFrame, PackSizes, PushId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

fn upload() -> (PackSizes, Vec<NewFrame>) {
    let (frames, sizes) = frames_of(&Universe::new().0[0], u32::MAX);
    (sizes, frames.into_iter().map(|(_, frame)| frame).collect())
}

#[tokio::test]
async fn a_pack_and_its_session_live_as_long_as_they_are_renewed() {
    let dir = tempfile::tempdir().unwrap();
    let now = Arc::new(AtomicU64::new(1_000_000));
    let clock = Clock::new({
        let now = Arc::clone(&now);
        move || now.load(Ordering::SeqCst)
    });
    let wait = |time: u64| now.fetch_add(time, Ordering::SeqCst);
    for (name, metadata) in super::backends(clock, dir.path()).await {
        let (sizes, frames) = upload();
        let push = PushId("push".into());
        metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
        let pack = metadata.begin_pack("slow".into(), LEASE).await.unwrap();
        for _ in 0..5 {
            wait(LEASE_MS / 4 * 3);
            metadata.renew_pack(Some(push.clone()), pack, LEASE).await.unwrap();
            assert_eq!(metadata.empty_packs(10).await.unwrap().abandoned, 0, "{name}");
        }
        wait(LEASE_MS / 4 * 3);
        assert_eq!(
            metadata.finish_pack(push.clone(), pack, sizes, frames.clone(), LEASE).await.unwrap().new,
            frames.len() as u64,
            "{name}"
        );
        let live = metadata.renew_pack(Some(push.clone()), pack, LEASE).await;
        assert!(matches!(live, Err(Error::PackLost(_))), "{name}: it is not being written any more: {live:?}");

        // A pack without a session, as compaction writes it.
        let alone = metadata.begin_pack("alone".into(), LEASE).await.unwrap();
        wait(LEASE_MS / 4 * 3);
        metadata.renew_pack(None, alone, LEASE).await.unwrap();
        wait(LEASE_MS / 4 * 3);
        assert_eq!(metadata.empty_packs(10).await.unwrap().abandoned, 0, "{name}");

        // A session that is over keeps no pack.
        let orphan = metadata.begin_pack("orphan".into(), LEASE).await.unwrap();
        metadata.close_push(push.clone()).await.unwrap();
        wait(LEASE_MS / 4 * 3);
        let over = metadata.renew_pack(Some(push.clone()), orphan, LEASE).await;
        assert!(matches!(over, Err(Error::PushUnknown(_))), "{name}: {over:?}");
        wait(LEASE_MS / 4 * 3);
        assert_eq!(metadata.empty_packs(10).await.unwrap().abandoned, 2, "{name}: the failed renewal renewed nothing");

        // If both pack and session are gone, the error is about the pack: only the writer can
        // delete its bytes.
        for forgotten in [false, true] {
            if forgotten {
                metadata.forget_packs(vec![orphan]).await.unwrap();
            }
            let lost = metadata.finish_pack(push.clone(), orphan, sizes, frames.clone(), LEASE).await;
            assert!(matches!(lost, Err(Error::PackLost(_))), "{name}: {lost:?}");
            let lost = metadata.renew_pack(Some(push.clone()), orphan, Duration::ZERO).await;
            assert!(matches!(lost, Err(Error::PackLost(_))), "{name}: {lost:?}");
        }
    }
}
