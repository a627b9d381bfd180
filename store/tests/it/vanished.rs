//! The storage is out of reach, but its objects are not lost: nothing counts as lost, and
//! everything works when it is back.

use crate::common::{leaks, pieces, push, repository, snapshot, tag};
use futures::StreamExt as _;
use pfr_schema::ErrorCode;
use pfr_schema::api::ScrubReport;
use pfr_store::{Clock, Error, GcOptions, Options, PackState, Result, ScrubOptions, Store};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

async fn scrub(store: &Store, full: bool) -> Result<ScrubReport> {
    store.scrub(&ScrubOptions { full, bytes_per_second: None }, &mut |_| ()).await
}

fn is_out_of_reach<T: std::fmt::Debug>(what: &str, result: Result<T>) {
    let error = result.expect_err(what);
    assert_eq!(error.code(), ErrorCode::Unavailable, "{what}: {error}");
    assert!(error.to_string().contains("is it mounted"), "{what}: {error}");
}

/// What is in the place of a disk that is not mounted.
#[derive(Clone, Copy, Debug)]
enum Left {
    AnEmptyDirectory,
    Nothing,
    /// Another program has written there since.
    AStranger,
}

#[tokio::test]
async fn a_directory_that_is_not_mounted_costs_nothing() {
    for left in [Left::AnEmptyDirectory, Left::Nothing, Left::AStranger] {
        let dir = tempfile::tempdir().unwrap();
        let now = Arc::new(AtomicU64::new(1_000_000_000));
        let clock = {
            let now = Arc::clone(&now);
            Clock::new(move || now.load(Ordering::SeqCst))
        };
        let options = Options { clock, pack_bytes: 2048, ..Options::default() };
        let lease = options.lease;
        let store = Store::open(dir.path(), options).await.unwrap();
        let (kept, goes) = (snapshot(&[1, 2, 3, 4, 5, 6, 7, 8], vec![]), snapshot(&[100, 101, 102, 103], vec![]));
        push(&store, &kept, "kept").await.unwrap();
        push(&store, &goes, "goes").await.unwrap();
        store.ready().await.unwrap();
        // Packs that wait for their grace period.
        store.delete_snapshot(&repository(), &goes.manifest.digest).await.unwrap();
        now.fetch_add(2 * lease.as_millis() as u64, Ordering::SeqCst);
        let hour = GcOptions { grace: Duration::from_secs(3600), ..GcOptions::default() };
        store.gc(&hour, &mut |_| ()).await.unwrap();
        let emptied = || async {
            let packs = store.metadata().packs(None, 1000).await.unwrap();
            packs.iter().filter(|pack| pack.state == PackState::Emptied).count()
        };
        let waiting = emptied().await;
        assert!(waiting > 0);

        let (packs, away) = (dir.path().join("packs"), dir.path().join("away"));
        std::fs::rename(&packs, &away).unwrap();
        put(&packs, left);
        for full in [false, true] {
            is_out_of_reach("scrub", scrub(&store, full).await);
        }
        assert_eq!(store.damaged().await.unwrap(), [], "{left:?}: nothing is quarantined");
        is_out_of_reach("ready", store.ready().await);
        is_out_of_reach("a read", store.read(&kept.manifest.digest).await);
        is_out_of_reach("a proof", store.verify(&kept.manifest.digest, &mut |_| ()).await);
        is_out_of_reach("fsck", store.fsck(false, &mut |_| ()).await);
        is_out_of_reach("a push", push(&store, &snapshot(&[200, 201], vec![]), "new").await);
        assert_eq!(store.damaged().await.unwrap(), [], "{left:?}: nothing is quarantined");
        // Rows of what may come back stay.
        now.fetch_add(2 * 3_600_000, Ordering::SeqCst);
        is_out_of_reach("gc", store.gc(&hour, &mut |_| ()).await);
        assert_eq!(emptied().await, waiting, "{left:?}");

        drop(std::fs::remove_dir_all(&packs));
        std::fs::rename(&away, &packs).unwrap();
        store.ready().await.unwrap();
        let report = scrub(&store, true).await.unwrap();
        assert!(report.packs > 0 && report.bad_packs.is_empty() && report.damaged.is_empty(), "{left:?}: {report:?}");
        store.verify(&kept.manifest.digest, &mut |_| ()).await.unwrap();
        store.gc(&hour, &mut |_| ()).await.unwrap();
        leaks::assert_none_in(&store, dir.path()).await;
    }
}

/// Files of packs in a directory.
fn packs_in(dir: &Path) -> Vec<String> {
    leaks::files(dir).into_keys().filter(|name| leaks::is_pack(name)).collect()
}

#[tokio::test]
async fn what_is_confirmed_never_lies_on_the_disk_below_one_that_is_not_mounted() {
    let dir = tempfile::tempdir().unwrap();
    let (packs, away) = (dir.path().join("packs"), dir.path().join("away"));
    let (old, new, late) = (snapshot(&[1, 2, 3], vec![]), snapshot(&[4, 5, 6], vec![]), snapshot(&[7, 8, 9], vec![]));
    let before = Store::open(dir.path(), Options::default()).await.unwrap();
    push(&before, &old, "old").await.unwrap();

    // It goes in the middle of an upload.
    let session = before.open_push(&repository()).await.unwrap();
    let frames = late.stream();
    let last = frames.len().div_ceil(100);
    let mut piece = 0;
    let upload = pieces(&frames, 100).inspect(|_| {
        piece += 1;
        if piece == last {
            std::fs::rename(&packs, &away).unwrap();
            std::fs::create_dir(&packs).unwrap();
        }
    });
    is_out_of_reach("an upload", before.ingest(&session.id, upload).await);
    assert!(away.exists());

    // Neither the process that has written to it nor one that starts now takes the other disk.
    let after = Store::open(dir.path(), Options::default()).await.unwrap();
    let below = packs_in(&packs);
    for (store, name) in [(&before, "one"), (&after, "other")] {
        is_out_of_reach("a push", push(store, &new, "new").await);
        is_out_of_reach("a tag", store.put_tag(&repository(), tag(name), old.manifest.digest, None).await);
    }
    assert_eq!(packs_in(&packs), below);

    std::fs::remove_dir_all(&packs).unwrap();
    std::fs::rename(&away, &packs).unwrap();
    for (store, snapshot, name) in [(&before, &new, "new"), (&after, &late, "late")] {
        push(store, snapshot, name).await.unwrap();
    }
    for snapshot in [&old, &new, &late] {
        after.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    }
    // The tags that could not be confirmed were noted, and are in the journal now.
    for name in ["one", "other"] {
        assert_eq!(after.tag(&repository(), &tag(name)).await.unwrap().digest, old.manifest.digest);
    }
    assert!(after.metadata().unjournaled(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_store_whose_packs_were_all_collected_is_not_taken_for_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let now = Arc::new(AtomicU64::new(1_000_000_000));
    let options = || {
        let now = Arc::clone(&now);
        Options { clock: Clock::new(move || now.load(Ordering::SeqCst)), ..Options::default() }
    };
    let before = Store::open(dir.path(), options()).await.unwrap();
    let (old, new) = (snapshot(&[1, 2, 3], vec![]), snapshot(&[4, 5, 6], vec![]));
    push(&before, &old, "old").await.unwrap();
    before.delete_snapshot(&repository(), &old.manifest.digest).await.unwrap();
    for _ in 0..3 {
        now.fetch_add(48 * 3_600_000, Ordering::SeqCst);
        before.gc(&GcOptions { grace: Duration::ZERO, ..GcOptions::default() }, &mut |_| ()).await.unwrap();
    }
    assert!(before.metadata().packs(None, 1).await.unwrap().is_empty());

    let (packs, away) = (dir.path().join("packs"), dir.path().join("away"));
    std::fs::rename(&packs, &away).unwrap();
    std::fs::create_dir(&packs).unwrap();
    let after = Store::open(dir.path(), options()).await.unwrap();
    for store in [&before, &after] {
        is_out_of_reach("ready", store.ready().await);
        is_out_of_reach("a push", push(store, &new, "new").await);
    }
    assert!(leaks::files(&packs).is_empty(), "neither a pack nor a marker lies on the disk below");

    std::fs::remove_dir_all(&packs).unwrap();
    std::fs::rename(&away, &packs).unwrap();
    for store in [&before, &after] {
        push(store, &new, "new").await.unwrap();
        store.verify(&new.manifest.digest, &mut |_| ()).await.unwrap();
    }
}

fn put(packs: &Path, left: Left) {
    match left {
        Left::Nothing => {}
        Left::AnEmptyDirectory => std::fs::create_dir(packs).unwrap(),
        Left::AStranger => {
            std::fs::create_dir_all(packs.join("aa")).unwrap();
            std::fs::write(packs.join("aa/0190aaaa-0000-7000-8000-0000000000aa.pfpack"), b"another's").unwrap();
        }
    }
}

#[tokio::test]
async fn a_pack_that_is_lost_from_a_storage_that_is_there_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::default()).await.unwrap();
    let s = snapshot(&[1, 2, 3], vec![]);
    push(&store, &s, "t").await.unwrap();
    let packs = leaks::files(&dir.path().join("packs"));
    for name in packs.keys().filter(|name| leaks::is_pack(name)) {
        std::fs::remove_file(dir.path().join("packs").join(name)).unwrap();
    }
    store.ready().await.unwrap();
    assert!(matches!(store.read(&s.tree.digest).await, Err(Error::Corrupt { .. })));
    let report = scrub(&store, false).await.unwrap();
    assert!(report.damaged.len() == s.pages.len() + s.documents().len() && report.bad_packs.len() == 1, "{report:?}");
    push(&store, &s, "t").await.unwrap();
    store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
}

#[tokio::test]
async fn an_empty_store_needs_no_marker_and_a_new_one_gets_it_with_its_first_pack() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::default()).await.unwrap();
    store.ready().await.unwrap();
    assert_eq!(scrub(&store, false).await.unwrap().packs, 0);
    push(&store, &snapshot(&[1], vec![]), "t").await.unwrap();
    assert!(dir.path().join("packs/pf-store").exists());
    // It is for people to put back; its content does not matter.
    std::fs::remove_file(dir.path().join("packs/pf-store")).unwrap();
    is_out_of_reach("ready", store.ready().await);
    std::fs::write(dir.path().join("packs/pf-store"), b"").unwrap();
    store.ready().await.unwrap();
}
