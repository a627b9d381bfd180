//! The queue of collection.

use crate::common::rig::{Backend, Rig};
use crate::common::{blob_frame, page, pieces, repository, stream};
use pfr_schema::{Digest, Kind};
use pfr_store::Options;

const SESSIONS: u64 = 6;

on_every_backend!(a_pack_is_queued_once_for_each_session_that_leases_in_it);

async fn a_pack_is_queued_once_for_each_session_that_leases_in_it(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let blobs: Vec<Vec<u8>> = (0..SESSIONS).map(page).collect();
    let upload = rig.store.open_push(&repository()).await.unwrap();
    let bytes = stream(blobs.iter().map(|blob| blob_frame(blob)));
    rig.store.ingest(&upload.id, pieces(&bytes, 1 << 20)).await.unwrap();
    rig.store.abort(&upload.id).await.unwrap();
    let mut sessions = Vec::new();
    for blob in &blobs {
        let session = rig.store.open_push(&repository()).await.unwrap();
        assert!(rig.store.missing(&session.id, vec![(Digest::sha256(blob), Kind::Blob)]).await.unwrap().is_empty());
        sessions.push(session);
    }
    for open in (1..=sessions.len()).rev() {
        while rig.metadata.collect(1000).await.unwrap().more {}
        let queue = rig.metadata.queue(false, 1000).await.unwrap();
        assert_eq!(queue.len(), open, "{open} sessions lease in the pack: {queue:?}");
        rig.store.abort(&sessions.remove(0).id).await.unwrap();
    }
    while rig.metadata.collect(1000).await.unwrap().more {}
    assert!(rig.metadata.queue(false, 1000).await.unwrap().is_empty());
    assert_eq!(rig.metadata.audit(false).await.unwrap().objects, 0);
}
