//! Release from quarantine, its cost, and packs that could not be read.

use crate::common::rig::{Backend, Rig};
use crate::common::{Snapshot, accuse, push, repository, snapshot};
use pfr_schema::{Digest, Kind};
use pfr_store::{Error, GcOptions, Options, ScrubOptions, Store};

on_every_backend!(
    a_scrub_lets_go_what_is_good_where_it_lies,
    a_verification_and_a_check_of_the_tables_do_so_too,
    what_is_bad_stays_in_quarantine_and_what_is_good_does_not_stay_because_of_it,
);

fn all(snapshot: &Snapshot) -> Vec<(Digest, Kind)> {
    let pages = snapshot.pages.iter().map(|page| (Digest::sha256(page), Kind::Blob));
    pages.chain(snapshot.documents().into_iter().map(|d| (d.digest, d.kind))).collect()
}

async fn is_well(store: &Store, snapshot: &Snapshot) {
    assert!(store.damaged().await.unwrap().is_empty());
    let session = store.open_push(&repository()).await.unwrap();
    assert_eq!(store.missing(&session.id, all(snapshot)).await.unwrap(), Vec::<usize>::new());
    store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn a_scrub_lets_go_what_is_good_where_it_lies(on: Backend) {
    for full in [false, true] {
        let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2], vec![]));
        push(&rig.store, &snapshot, "t").await.unwrap();
        let digests: Vec<Digest> = all(&snapshot).into_iter().map(|(digest, _)| digest).collect();
        accuse(&rig.store, &digests).await;
        let report = rig.store.scrub(&ScrubOptions { full, bytes_per_second: None }, &mut |_| ()).await.unwrap();
        assert!(report.damaged.is_empty() && report.bad_packs.is_empty(), "{report:?}");
        is_well(&rig.store, &snapshot).await;
    }
}

async fn a_verification_and_a_check_of_the_tables_do_so_too(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2], vec![]));
    push(&rig.store, &snapshot, "t").await.unwrap();
    accuse(&rig.store, &[Digest::sha256(&snapshot.pages[0]), snapshot.runs[0].digest]).await;
    rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    is_well(&rig.store, &snapshot).await;
    accuse(&rig.store, &[snapshot.tree.digest, snapshot.manifest.digest]).await;
    let fsck = rig.store.fsck(false, &mut |_| ()).await.unwrap();
    assert_eq!(fsck.discrepancies, Vec::<String>::new());
    is_well(&rig.store, &snapshot).await;
}

async fn what_is_bad_stays_in_quarantine_and_what_is_good_does_not_stay_because_of_it(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2], vec![]));
    push(&rig.store, &snapshot, "t").await.unwrap();
    let bad = Digest::sha256(&snapshot.pages[1]);
    let location = rig.metadata.locate(vec![bad]).await.unwrap()[0].clone().unwrap();
    let pack = rig.pack_paths().await[0].clone();
    // The checksum is right: only its hash shows that it is another blob.
    let mut bytes = rig.bytes(&pack).await;
    let end = (location.offset + location.frame_len) as usize;
    bytes[end - 10] ^= 1;
    let payload = end - 4 - location.raw_len as usize..end - 4;
    let checksum = crc32c(&bytes[payload]);
    bytes[end - 4..end].copy_from_slice(&checksum.to_le_bytes());
    rig.put(&pack, bytes).await;
    accuse(&rig.store, &[Digest::sha256(&snapshot.pages[0]), bad]).await;
    for full in [false, true] {
        let report = rig.store.scrub(&ScrubOptions { full, bytes_per_second: None }, &mut |_| ()).await.unwrap();
        assert_eq!(report.damaged.iter().map(|blob| blob.digest).collect::<Vec<_>>(), [bad], "full: {full}");
    }
    assert!(matches!(rig.store.verify(&snapshot.manifest.digest, &mut |_| ()).await, Err(Error::Corrupt { digest, .. }) if digest == bad));
    assert_eq!(rig.store.damaged().await.unwrap().len(), 1);
}

/// CRC-32C, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

#[tokio::test]
async fn a_collection_does_not_read_nodes_because_something_is_in_quarantine() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::default()).await.unwrap();
    let (hurt, other) = (snapshot(&[1, 2], vec![]), snapshot(&[8], vec![]));
    push(&store, &hurt, "t").await.unwrap();
    push(&store, &other, "u").await.unwrap();
    accuse(&store, &[Digest::sha256(&hurt.pages[0])]).await;
    let tables = rusqlite::Connection::open(dir.path().join("metadata.sqlite")).unwrap();
    // Reading the row of this node fails.
    let spoil = |digest: &Digest, children: &str| -> Vec<u8> {
        let id: i64 = tables.query_row("SELECT id FROM objects WHERE digest = ?1", [digest.to_key()], |r| r.get(0)).unwrap();
        let before = tables.query_row("SELECT children FROM containers WHERE object = ?1", [id], |r| r.get(0)).unwrap();
        tables.execute(&format!("UPDATE containers SET children = {children} WHERE object = ?1"), [id]).unwrap();
        before
    };
    let collects = async || store.gc(&GcOptions::default(), &mut |_| ()).await.map(|report| report.error);
    spoil(&other.runs[0].digest, "x'ff'");
    assert_eq!(collects().await.unwrap(), None);
    let damaged = store.damaged().await.unwrap();
    assert_eq!(damaged[0].snapshots, [format!("{}@{}", repository(), hurt.manifest.digest)], "what is well is not looked at");
    // Not even at those that are marked, as long as nothing was healed.
    let before = spoil(&hurt.runs[0].digest, "x'ff'");
    assert_eq!(collects().await.unwrap(), None);
    let hex: String = before.iter().map(|byte| format!("{byte:02x}")).collect();
    spoil(&hurt.runs[0].digest, &format!("x'{hex}'"));
    // Then it does what is to be done, and once.
    let location = store.metadata().locate(vec![Digest::sha256(&hurt.pages[0])]).await.unwrap()[0].clone().unwrap();
    assert_eq!(store.metadata().lift_quarantine(vec![(Digest::sha256(&hurt.pages[0]), location.pack)]).await.unwrap(), 1);
    assert_eq!(collects().await.unwrap(), None);
    is_well(&store, &hurt).await;
    assert_eq!(store.reassess().await.unwrap(), 0);
}
