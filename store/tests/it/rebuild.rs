//! Rebuilding from what lies on storage: nodes that were plain blobs first, frames with bad
//! headers, and what is no pack.

use crate::common::rig::{Backend, Rig};
use crate::common::{Snapshot, blob_frame, page, pieces, push, repository, snapshot, stream, tag};
use object_store::path::Path;
use pfr_schema::api::RebuildReport;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, Kind, Limits};
use pfr_store::{GcOptions, Store, document_frame};
use std::time::Duration;

/// New metadata from the packs and the journal of a rig. Two databases over the same packs would
/// collect each other's: it has its own.
async fn rebuilt(rig: &Rig) -> (Rig, RebuildReport) {
    let new = rig.over_memory(rig.fork().await).await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    (new, report)
}

/// Lets every lease end and collects, with compaction, until nothing is left to do.
async fn collect_all(rig: &Rig) {
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    for _ in 0..4 {
        rig.wait(Duration::from_secs(48 * 3600));
        rig.store.gc(&options, &mut |_| ()).await.unwrap();
    }
}

/// Stores documents as plain blobs, as attachments are.
async fn attach(store: &Store, snapshot: &Snapshot) {
    let session = store.open_push(&repository()).await.unwrap();
    let frames = snapshot.documents().into_iter().map(|d| blob_frame(&d.bytes));
    store.ingest(&session.id, pieces(&stream(frames), 500)).await.unwrap();
}

/// The kind that the frame of a blob says, where it lies.
async fn says(rig: &Rig, digest: &Digest) -> Kind {
    let location = rig.metadata.locate(vec![*digest]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await.into_iter().find(|p| p.as_ref().contains(&location.pack)).unwrap();
    let at = location.offset as usize;
    let bytes = rig.bytes(&pack).await[at..at + Header::len(digest.algorithm())].to_vec();
    Header::parse_exact(&bytes, 0, &Limits::default()).unwrap().kind
}

/// Everything is back after the loss of the database, of the one after it, and of the one after
/// that, with collections in between.
async fn survives(rig: &Rig, snapshot: &Snapshot) {
    let mut current = None;
    for round in 0..3 {
        let before = current.as_ref().unwrap_or(rig);
        collect_all(before).await;
        assert_eq!(before.metadata.audit(false).await.unwrap().discrepancies, [], "round {round}");
        let (new, report) = rebuilt(before).await;
        assert!(report.lost.is_empty() && report.refused.is_empty(), "round {round}: {report:?}");
        assert_eq!(new.store.tag(&repository(), &tag("t")).await.unwrap().digest, snapshot.manifest.digest, "round {round}");
        new.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        current = Some(new);
    }
}

#[tokio::test]
async fn nodes_that_were_plain_blobs_first_are_nodes_after_a_rebuild() {
    let (rig, snapshot) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2, 3], vec![]));
    attach(&rig.store, &snapshot).await;
    push(&rig.store, &snapshot, "t").await.unwrap();
    for document in snapshot.documents() {
        assert_eq!(says(&rig, &document.digest).await, document.kind);
    }
    assert_eq!(rig.metadata.audit(false).await.unwrap().discrepancies, []);
    survives(&rig, &snapshot).await;
}

#[tokio::test]
async fn nodes_that_come_as_plain_blobs_in_the_same_stream_too() {
    let (rig, snapshot) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2, 3], vec![]));
    let session = rig.store.open_push(&repository()).await.unwrap();
    let plain = snapshot.documents().into_iter().map(|d| blob_frame(&d.bytes));
    let pages = snapshot.pages.iter().map(|p| blob_frame(p));
    let frames = plain.chain(pages).chain(snapshot.documents().into_iter().map(document_frame));
    rig.store.ingest(&session.id, pieces(&stream(frames), 500)).await.unwrap();
    rig.store.commit(&session.id, snapshot.manifest.digest, Some(tag("t")), None).await.unwrap();
    for document in snapshot.documents() {
        assert_eq!(says(&rig, &document.digest).await, document.kind);
    }
    survives(&rig, &snapshot).await;
}

#[tokio::test]
async fn nodes_that_came_again_as_plain_blobs_stay_nodes_through_two_rebuilds() {
    let (rig, snapshot) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2, 3], vec![]));
    push(&rig.store, &snapshot, "t").await.unwrap();
    // Dead space, and newer: a rebuild comes across it first.
    attach(&rig.store, &snapshot).await;
    let (new, _) = rebuilt(&rig).await;
    for document in snapshot.documents() {
        assert_eq!(says(&new, &document.digest).await, document.kind);
    }
    survives(&new, &snapshot).await;
}

#[tokio::test]
async fn a_good_plain_copy_is_preferred_to_a_bad_node() {
    let (rig, snapshot) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2, 3], vec![]));
    push(&rig.store, &snapshot, "t").await.unwrap();
    let location = rig.metadata.locate(vec![snapshot.tree.digest]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await[0].clone();
    attach(&rig.store, &snapshot).await;
    rig.flip(&pack, (location.offset + location.frame_len) as usize - 10).await;
    let (new, report) = rebuilt(&rig).await;
    assert!(report.lost.is_empty(), "{report:?}");
    new.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

#[tokio::test]
async fn a_node_healed_by_a_plain_blob_has_its_kind_again_after_a_scrub() {
    let (rig, snapshot) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2, 3], vec![]));
    push(&rig.store, &snapshot, "t").await.unwrap();
    let location = rig.metadata.locate(vec![snapshot.tree.digest]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await[0].clone();
    rig.flip(&pack, (location.offset + location.frame_len) as usize - 10).await;
    assert_eq!(rig.store.scrub(&Default::default(), &mut |_| ()).await.unwrap().damaged.len(), 1);
    attach(&rig.store, &snapshot).await;
    rig.store.reassess().await.unwrap();
    rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    assert_eq!(says(&rig, &snapshot.tree.digest).await, Kind::Blob);
    let report = rig.store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert!(report.bad_packs.iter().any(|words| words.contains("another kind in")), "{report:?}");
    assert_eq!(says(&rig, &snapshot.tree.digest).await, Kind::Tree);
    survives(&rig, &snapshot).await;
}

#[tokio::test]
async fn a_bad_header_costs_no_name() {
    for frame in 0..9 {
        let (rig, first, second) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2], vec![]), snapshot(&[7], vec![]));
        push(&rig.store, &first, "t").await.unwrap();
        push(&rig.store, &second, "u").await.unwrap();
        let row = rig.metadata.packs(None, 10).await.unwrap()[0].clone();
        let contents = rig.metadata.pack_contents(row.id).await.unwrap();
        assert_eq!(contents.len(), 8, "four pages, a run, a tree, a configuration, a manifest");
        // The last round is that of all headers at once.
        let hit: Vec<Digest> = contents.iter().enumerate().filter(|(i, _)| frame == *i || frame == 8).map(|(_, p)| p.digest).collect();
        let pack = rig.pack_paths().await.into_iter().find(|p| p.as_ref().contains(&row.key)).unwrap();
        for packed in contents.iter().filter(|packed| hit.contains(&packed.digest)) {
            rig.flip(&pack, packed.offset as usize + 9).await;
        }
        let (new, report) = rebuilt(&rig).await;
        assert_eq!((report.snapshots, report.tags, report.lost.len()), (2, 2, 0), "frame {frame}: {report:?}");
        assert_eq!(report.refused.len(), hit.len(), "frame {frame}: {report:?}");
        assert_eq!(new.store.tag(&repository(), &tag("t")).await.unwrap().digest, first.manifest.digest);
        let mut damaged: Vec<Digest> = new.store.damaged().await.unwrap().into_iter().map(|blob| blob.digest).collect();
        damaged.sort();
        // The configuration has a good copy in the other snapshot's pack: that is taken.
        let mut expected: Vec<Digest> = hit.iter().copied().filter(|digest| *digest != first.config.digest).collect();
        expected.sort();
        assert_eq!(damaged, expected, "frame {frame}");
        assert_eq!(new.store.verify(&first.manifest.digest, &mut |_| ()).await.is_ok(), expected.is_empty(), "frame {frame}");
        push(&new.store, &first, "t").await.unwrap();
        new.store.reassess().await.unwrap();
        for snapshot in [&first, &second] {
            new.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
        }
        assert!(new.store.damaged().await.unwrap().is_empty());
        assert_eq!(new.metadata.audit(false).await.unwrap().discrepancies, []);
    }
}

#[tokio::test]
async fn the_children_of_an_unreadable_node_are_named_and_kept_for_a_day() {
    let (rig, first) = (Rig::new(Backend::Memory).await, snapshot(&[1, 2], vec![]));
    push(&rig.store, &first, "t").await.unwrap();
    let location = rig.metadata.locate(vec![first.tree.digest]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await[0].clone();
    rig.flip(&pack, (location.offset + location.frame_len) as usize - 10).await;
    for _ in 0..2 {
        // Also when it is in quarantine already.
        let fsck = rig.store.fsck(false, &mut |_| ()).await.unwrap();
        let names = |words: &String| words.contains(&first.tree.digest.to_string()) && words.contains(&first.manifest.digest.to_string());
        assert!(fsck.wrong == 1 && names(&fsck.discrepancies[0]), "{fsck:?}");
    }
    let (new, report) = rebuilt(&rig).await;
    assert!(report.lost.len() == 1 && report.lost[0].contains(&first.manifest.digest.to_string()), "{report:?}");
    assert!(report.refused.iter().any(|words| words.contains(&first.tree.digest.to_string())), "{report:?}");
    new.wait(Duration::from_secs(20 * 3600));
    new.store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap();
    let session = new.store.open_push(&repository()).await.unwrap();
    let pages = first.pages.iter().map(|page| (Digest::sha256(page), Kind::Blob)).collect();
    assert!(new.store.missing(&session.id, pages).await.unwrap().is_empty(), "the pages wait for a push of it");
    push(&new.store, &first, "t").await.unwrap();
    new.store.verify(&first.manifest.digest, &mut |_| ()).await.unwrap();
}

#[tokio::test]
async fn the_object_of_a_probe_is_not_taken_for_a_pack() {
    let rig = Rig::new(Backend::Memory).await;
    push(&rig.store, &snapshot(&[1], vec![]), "t").await.unwrap();
    rig.put(&Path::from("probe/0190-left"), page(1)).await;
    let (_, report) = rebuilt(&rig).await;
    assert!(report.refused.is_empty() && report.snapshots == 1, "{report:?}");
    rig.put(&Path::from("stranger"), page(1)).await;
    let (_, report) = rebuilt(&rig).await;
    assert!(report.refused.len() == 1 && report.refused[0].contains("no pack"), "{report:?}");
}

/// Asserts that nothing can be pushed, collected or served.
async fn is_refused(rig: &Rig) {
    for error in [
        rig.store.names_are_known().await.unwrap_err(),
        push(&rig.store, &snapshot(&[7], vec![]), "t").await.unwrap_err(),
        rig.store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap_err(),
    ] {
        assert!(matches!(&error, pfr_store::Error::Unavailable { reason, .. } if reason.contains("rebuild the tables")), "{error}");
    }
}

#[tokio::test]
async fn a_lost_database_is_not_replaced_by_an_empty_one_over_a_journal() {
    for on in [Backend::Memory, Backend::SqliteDisk, Backend::PostgresDisk] {
        let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2, 3], vec![]));
        rig.store.names_are_known().await.unwrap();
        push(&rig.store, &snapshot, "t").await.unwrap();
        rig.store.names_are_known().await.unwrap();
        is_refused(&rig.beside_copy().await).await;

        // Killed in the middle: there are packs, and no names.
        let lost = rig.beside_copy().await;
        let store = lost.store.clone();
        let rebuilding = tokio::spawn(async move { store.rebuild(&mut |report| assert!(report.packs == 0, "killed")).await });
        assert!(rebuilding.await.unwrap_err().is_panic());
        assert!(!lost.metadata.packs(None, 10).await.unwrap().is_empty());
        is_refused(&lost).await;

        let whole = rig.beside_copy().await;
        whole.store.rebuild(&mut |_| ()).await.unwrap();
        push(&whole.store, &crate::common::snapshot(&[7], vec![]), "u").await.unwrap();
        assert_eq!(whole.store.tag(&repository(), &tag("t")).await.unwrap().digest, snapshot.manifest.digest);
    }
}
