//! The storage is out of reach, but its objects are not lost: nothing counts as lost, and
//! everything works when it is back.

use crate::common::rig::{Backend, Rig};
use crate::common::watched::Watched;
use crate::common::{leaks, pieces, push, repository, snapshot, tag};
use async_trait::async_trait;
use futures::future::join_all;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path as Key;
use object_store::{ObjectStore, ObjectStoreExt as _};
use pfr_schema::ErrorCode;
use pfr_schema::api::ScrubReport;
use pfr_schema::journal::PREFIX;
use pfr_store::{
    Clock, DomainHome, DomainPacks, DomainTables, Domains, Error, GcOptions, Metadata, Options, PackState, Result, ScrubOptions,
    SqliteMetadata, Store, storage,
};
use pfr_testkit::storage::{Call, Hooks, Moment, Say, hooked, reset, watched};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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
    // It is for people to put back, and an empty one will do. The next process that pushes
    // completes it.
    std::fs::remove_file(dir.path().join("packs/pf-store")).unwrap();
    is_out_of_reach("ready", store.ready().await);
    std::fs::write(dir.path().join("packs/pf-store"), b"").unwrap();
    store.ready().await.unwrap();
    push(&store, &snapshot(&[2], vec![]), "t").await.unwrap();
    push(&open(dir.path()).await, &snapshot(&[3], vec![]), "t").await.unwrap();
    assert_eq!(id_on(&dir.path().join("packs")), id_of(&store).await);
}

/// Unmounts the disk of a directory; returns what to mount again.
fn unmount(packs: &Path) -> PathBuf {
    let away = packs.with_file_name("away");
    std::fs::rename(packs, &away).unwrap();
    std::fs::create_dir(packs).unwrap();
    away
}

fn mount(away: &Path, packs: &Path) {
    std::fs::remove_dir_all(packs).unwrap();
    std::fs::rename(away, packs).unwrap();
}

async fn open(dir: &Path) -> Store {
    Store::open(dir, Options::default()).await.unwrap()
}

/// The id that the tables of a store have.
async fn id_of(store: &Store) -> Option<String> {
    store.metadata().storage_id().await.unwrap()
}

fn id_in(marker: &str) -> Option<String> {
    marker.lines().find_map(|line| line.strip_prefix("id ")).map(str::to_owned)
}

/// The id that the marker in a directory has.
fn id_on(packs: &Path) -> Option<String> {
    id_in(&std::fs::read_to_string(packs.join("pf-store")).unwrap())
}

/// A marker as earlier versions wrote it.
fn put_marker_without_id(packs: &Path) {
    std::fs::write(packs.join("pf-store"), "Packs and the journal of a pf store lie beside this.\n").unwrap();
}

#[tokio::test]
async fn a_store_that_was_never_used_takes_no_push_while_its_disk_is_not_mounted() {
    let dir = tempfile::tempdir().unwrap();
    let packs = dir.path().join("packs");
    let before = open(dir.path()).await;
    before.begin_serving().await.unwrap();
    assert!(id_of(&before).await.is_some());
    let away = unmount(&packs);
    // It starts all the same, and waits for the disk.
    let after = open(dir.path()).await;
    after.begin_serving().await.unwrap();
    for store in [&before, &after] {
        is_out_of_reach("ready", store.ready().await);
        is_out_of_reach("a push", push(store, &snapshot(&[1], vec![]), "t").await);
    }
    assert!(leaks::files(&packs).is_empty(), "neither a pack nor a marker lies on the disk below");
    mount(&away, &packs);
    for store in [&before, &after] {
        let s = snapshot(&[1], vec![]);
        push(store, &s, "t").await.unwrap();
        store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
    }
}

#[tokio::test]
async fn a_new_domain_takes_no_push_while_its_disk_is_not_mounted() {
    let dir = tempfile::tempdir().unwrap();
    let (data, root) = (dir.path().join("data"), dir.path().join("storage"));
    std::fs::create_dir(&root).unwrap();
    let process = async || {
        let packs = DomainPacks::Files { root: root.clone(), inside: "" };
        Domains::new(open(&data).await, Some(DomainHome { tables: DomainTables::Files(data.clone()), packs }))
    };
    let (early, late) = ("early".parse().unwrap(), "late".parse().unwrap());
    let before = process().await;
    before.create(&early).await.unwrap();
    let away = unmount(&root);
    let after = process().await;
    for domains in [&before, &after] {
        let store = domains.open(&early).await.unwrap();
        is_out_of_reach("ready", store.ready().await);
        is_out_of_reach("a push", push(&store, &snapshot(&[1], vec![]), "t").await);
    }
    is_out_of_reach("once more", after.create(&early).await);
    assert!(leaks::files(&root).is_empty(), "neither a pack nor a marker lies on the disk below");
    // One that is made now lies on the disk below, and only there.
    after.create(&late).await.unwrap();
    push(&after.open(&late).await.unwrap(), &snapshot(&[2], vec![]), "t").await.unwrap();
    mount(&away, &root);
    for domains in [&before, &after] {
        push(&domains.open(&early).await.unwrap(), &snapshot(&[1], vec![]), "t").await.unwrap();
        is_out_of_reach("a push", push(&domains.open(&late).await.unwrap(), &snapshot(&[3], vec![]), "t").await);
    }
}

/// A process over a directory, and tables that it shares with others.
fn replica(tables: &Arc<dyn Metadata>, packs: &Path) -> Store {
    Store::new(storage::open_dir(packs).unwrap().0, Arc::clone(tables), Options::default()).with_packs_dir(packs)
}

fn bucket() -> Arc<dyn ObjectStore> {
    Arc::new(InMemory::new())
}

/// A process over a bucket, and tables that it shares with others.
fn over(tables: &Arc<dyn Metadata>, bucket: &Arc<dyn ObjectStore>) -> Store {
    Store::new(Arc::clone(bucket), Arc::clone(tables), Options::default())
}

async fn new_tables() -> Arc<dyn Metadata> {
    SqliteMetadata::open_in_memory(Clock::system()).await.unwrap()
}

/// Keys of the journal in a bucket.
async fn journal_in(bucket: &Arc<dyn ObjectStore>) -> Vec<Key> {
    let mut keys: Vec<Key> = bucket.list(Some(&Key::from(PREFIX))).map_ok(|object| object.location).try_collect().await.unwrap();
    keys.sort();
    keys
}

#[tokio::test]
async fn no_change_of_names_is_confirmed_over_another_bucket() {
    let [right, of_another, empty] = [(); 3].map(|()| bucket());
    let (tables, others) = (new_tables().await, new_tables().await);
    let (kept, goes) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    let before = over(&tables, &right);
    push(&before, &kept, "kept").await.unwrap();
    push(&before, &kept, "gone").await.unwrap();
    push(&before, &goes, "goes").await.unwrap();
    push(&over(&others, &of_another), &kept, "kept").await.unwrap();

    for wrong in [&of_another, &empty] {
        let (store, journal) = (over(&tables, wrong), journal_in(wrong).await);
        is_out_of_reach("a tag", store.put_tag(&repository(), tag("new"), kept.manifest.digest, None).await);
        is_out_of_reach("forks", store.fork(&repository(), kept.manifest.digest, "fork", 2).await);
        is_out_of_reach("the deletion of a tag", store.delete_tag(&repository(), &tag("gone"), None).await);
        is_out_of_reach("the deletion of a snapshot", store.delete_snapshot(&repository(), &goes.manifest.digest).await);
        assert_eq!(journal_in(wrong).await, journal);
    }
    // They are noted, and are confirmed when the journal has them.
    assert!(!tables.unjournaled(1).await.unwrap().is_empty());
    let store = over(&tables, &right);
    store.put_tag(&repository(), tag("new"), kept.manifest.digest, None).await.unwrap();
    let rebuilt = over(&new_tables().await, &right);
    rebuilt.rebuild(&mut |_| ()).await.unwrap();
    let tags = async |store: &Store| store.tags(&repository(), None, 100).await.unwrap().rows;
    let found = tags(&rebuilt).await;
    assert_eq!(found, tags(&store).await);
    assert!(found.iter().map(|row| row.name.as_str()).eq(["fork-1", "fork-2", "kept", "new"]), "{found:?}");
}

#[tokio::test]
async fn no_journal_of_another_store_is_trimmed() {
    let ([own, of_another], tables) = ([(); 2].map(|()| bucket()), new_tables().await);
    let (store, s) = (over(&tables, &own), snapshot(&[1], vec![]));
    push(&over(&new_tables().await, &of_another), &s, "t").await.unwrap();
    push(&store, &s, "t").await.unwrap();
    for number in 0..260 {
        store.put_tag(&repository(), tag(&format!("t-{number}")), s.manifest.digest, None).await.unwrap();
    }
    assert!(store.summarize_journal().await.unwrap());
    // A process with the wrong bucket collects.
    let (wrong, journal) = (over(&tables, &of_another), journal_in(&of_another).await);
    is_out_of_reach("a trim", wrong.trim_journal(usize::MAX).await);
    assert!(!journal.is_empty() && journal_in(&of_another).await == journal);
    assert!(store.trim_journal(usize::MAX).await.unwrap() > 256);
}

/// Counts looks for the marker.
#[derive(Debug, Default)]
struct Looks(AtomicUsize);

#[async_trait]
impl Hooks for Looks {
    async fn before(&self, call: &Call) -> object_store::Result<Option<object_store::Error>> {
        if call.moment == Moment::Get && call.location == Key::from("pf-store") {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        Ok(None)
    }
}

#[tokio::test]
async fn a_process_looks_for_the_marker_of_a_bucket_once() {
    let (bucket, tables) = (bucket(), new_tables().await);
    let s = snapshot(&[1], vec![]);
    push(&over(&tables, &bucket), &s, "t").await.unwrap();
    let looks = Arc::new(Looks::default());
    let store = over(&tables, &hooked(bucket, looks.clone()));
    for number in 2..4 {
        store.put_tag(&repository(), tag(&format!("t-{number}")), s.manifest.digest, None).await.unwrap();
        assert_eq!(looks.0.load(Ordering::SeqCst), 1);
        push(&store, &snapshot(&[number], vec![]), "t").await.unwrap();
    }
    assert_eq!(looks.0.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn of_two_replicas_the_one_whose_disk_is_not_mounted_takes_no_push() {
    let dir = tempfile::tempdir().unwrap();
    let (there, below) = (dir.path().join("there"), dir.path().join("below"));
    let s = snapshot(&[1], vec![]);
    let tables: Arc<dyn Metadata> = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let (mounted, unmounted) = (replica(&tables, &there), replica(&tables, &below));
    mounted.begin_serving().await.unwrap();
    unmounted.begin_serving().await.unwrap();
    is_out_of_reach("a push", push(&unmounted, &s, "t").await);
    assert!(leaks::files(&below).is_empty());
    push(&mounted, &s, "t").await.unwrap();
    is_out_of_reach("a push", push(&unmounted, &snapshot(&[2], vec![]), "t").await);
    assert!(leaks::files(&below).is_empty());
}

#[tokio::test]
async fn of_two_replicas_over_two_disks_that_start_at_once_one_takes_pushes() {
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let disks = [dir.path().join("a"), dir.path().join("b")];
        let tables: Arc<dyn Metadata> = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
        let replicas = [replica(&tables, &disks[0]), replica(&tables, &disks[1])];
        let started = join_all(replicas.iter().map(Store::begin_serving)).await;
        assert!(started.iter().any(Result::is_ok), "{started:?}");
        let id = id_of(&replicas[0]).await;
        assert!(id.is_some());
        for (store, disk) in replicas.iter().zip(&disks) {
            let pushed = push(store, &snapshot(&[1], vec![]), "t").await;
            if disk.join("pf-store").exists() && id_on(disk) == id {
                pushed.unwrap();
                store.ready().await.unwrap();
            } else {
                is_out_of_reach("a push", pushed);
                is_out_of_reach("ready", store.ready().await);
            }
        }
    }
}

async fn replicas_that_start_at_once_have_one_id(backend: Backend) {
    let rig = Rig::new(backend).await;
    let replicas = join_all((0..4).map(|_| rig.another())).await;
    for started in join_all(replicas.iter().map(Store::begin_serving)).await {
        started.unwrap();
    }
    let marker = String::from_utf8(rig.bytes(&Key::from("pf-store")).await).unwrap();
    let id = id_in(&marker);
    assert!(id.is_some(), "{marker}");
    for (number, store) in (1..).zip(&replicas) {
        assert_eq!(id_of(store).await, id);
        push(store, &snapshot(&[number], vec![]), "t").await.unwrap();
    }
}

on_backends!([memory = Memory, sqlite_disk = SqliteDisk, postgres_disk = PostgresDisk]: replicas_that_start_at_once_have_one_id);

async fn the_tables_keep_the_id_that_came_first_and_a_rebuild_takes_that_of_the_marker(backend: Backend) {
    let rig = Rig::new(backend).await;
    let tables = &rig.metadata;
    assert_eq!(tables.storage_id().await.unwrap(), None);
    assert_eq!(tables.enter_storage_id("one".into()).await.unwrap(), "one");
    assert_eq!(tables.enter_storage_id("other".into()).await.unwrap(), "one");
    assert_eq!(tables.storage_id().await.unwrap().as_deref(), Some("one"));
    tables.forget_storage_id().await.unwrap();
    assert_eq!(tables.storage_id().await.unwrap(), None);
    assert!(tables.is_empty().await.unwrap());

    // A local store is not started. Its first push gives it the id.
    push(&rig.store, &snapshot(&[1, 2], vec![]), "t").await.unwrap();
    let id = id_of(&rig.store).await;
    assert_eq!(id_in(std::str::from_utf8(&rig.bytes(&Key::from("pf-store")).await).unwrap()), id);
    let new = rig.beside_copy().await;
    new.store.rebuild(&mut |_| ()).await.unwrap();
    assert!(id.is_some() && id_of(&new.store).await == id);
    push(&new.store, &snapshot(&[3], vec![]), "t").await.unwrap();
}

on_every_backend!(the_tables_keep_the_id_that_came_first_and_a_rebuild_takes_that_of_the_marker);

#[tokio::test]
async fn a_start_that_was_cut_between_marker_and_tables_is_finished_by_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let packs = dir.path().join("packs");
    let tables = Watched::new(SqliteMetadata::open_in_memory(Clock::system()).await.unwrap());
    let shared: Arc<dyn Metadata> = tables.clone();
    tables.fail("enter_storage_id", 1);
    let cut = replica(&shared, &packs).begin_serving().await.unwrap_err();
    assert!(cut.to_string().contains("injected"), "{cut}");
    let id = id_on(&packs);
    assert!(id.is_some() && shared.storage_id().await.unwrap().is_none());
    let next = replica(&shared, &packs);
    next.begin_serving().await.unwrap();
    assert_eq!((id_on(&packs), id_of(&next).await), (id.clone(), id));
    push(&next, &snapshot(&[1], vec![]), "t").await.unwrap();
}

/// A new store starts although its storage fails, or does not answer, to all but lists. Its first
/// push gives it the id.
async fn a_new_store_starts_while(hangs: bool) {
    let away = Arc::new(AtomicBool::new(true));
    let say: Say = {
        let away = Arc::clone(&away);
        Arc::new(move |_| {
            let away = away.load(Ordering::SeqCst);
            Box::pin(async move {
                if away && hangs {
                    std::future::pending::<()>().await;
                }
                if away { Err(reset()) } else { Ok(()) }
            })
        })
    };
    let tables: Arc<dyn Metadata> = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let store = Store::new(watched(Arc::new(InMemory::new()), say), Arc::clone(&tables), Options::default());
    store.begin_serving().await.unwrap();
    assert_eq!(id_of(&store).await, None);
    away.store(false, Ordering::SeqCst);
    push(&store, &snapshot(&[1], vec![]), "t").await.unwrap();
    assert!(id_of(&store).await.is_some());
}

#[tokio::test]
async fn a_new_store_starts_while_its_marker_cannot_be_read() {
    a_new_store_starts_while(false).await;
}

mod long {
    #[tokio::test]
    async fn a_new_store_starts_while_no_answer_comes_for_its_marker() {
        super::a_new_store_starts_while(true).await;
    }
}

#[tokio::test]
async fn a_store_of_an_earlier_version_gets_its_id_where_its_marker_is() {
    for used in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let packs = dir.path().join("packs");
        let earlier = open(dir.path()).await;
        if used {
            push(&earlier, &snapshot(&[1], vec![]), "t").await.unwrap();
            earlier.metadata().forget_storage_id().await.unwrap();
        }
        drop(earlier);
        put_marker_without_id(&packs);
        if used {
            // It may be upgraded while its disk is not mounted.
            let away = unmount(&packs);
            let store = open(dir.path()).await;
            store.begin_serving().await.unwrap();
            is_out_of_reach("a push", push(&store, &snapshot(&[2], vec![]), "t").await);
            assert!(leaks::files(&packs).is_empty() && id_of(&store).await.is_none());
            mount(&away, &packs);
        }
        let store = open(dir.path()).await;
        store.begin_serving().await.unwrap();
        let id = id_of(&store).await;
        assert!(id.is_some() && id_on(&packs) == id, "used: {used}");
        // A kill before the marker had it, or a replica of the earlier version beside this one.
        put_marker_without_id(&packs);
        let next = open(dir.path()).await;
        for store in [&store, &next] {
            store.ready().await.unwrap();
            push(store, &snapshot(&[3], vec![]), "t").await.unwrap();
        }
        assert_eq!((id_on(&packs), id_of(&next).await), (id.clone(), id), "used: {used}");
    }
}

#[tokio::test]
async fn a_store_of_an_earlier_version_takes_no_id_where_its_packs_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let (packs, other) = (dir.path().join("packs"), dir.path().join("other"));
    let s = snapshot(&[1, 2], vec![]);
    let earlier = open(dir.path()).await;
    push(&earlier, &snapshot(&[9], vec![]), "first").await.unwrap();
    let first = packs_in(&packs);
    push(&earlier, &s, "t").await.unwrap();
    let own = packs_in(&packs);
    assert_eq!((first.len(), own.len()), (1, 2));
    earlier.metadata().forget_storage_id().await.unwrap();
    drop(earlier);
    put_marker_without_id(&packs);
    let away = unmount(&packs);

    let is_refused = async |place: &str| {
        let store = open(dir.path()).await;
        store.begin_serving().await.unwrap();
        is_out_of_reach(place, store.ready().await);
        is_out_of_reach(place, scrub(&store, false).await);
        is_out_of_reach(place, push(&store, &snapshot(&[4], vec![]), "u").await);
        assert_eq!(store.damaged().await.unwrap(), [], "{place}: nothing is quarantined");
        assert_eq!(id_of(&store).await, None, "{place}");
    };
    push(&open(&other).await, &snapshot(&[3], vec![]), "t").await.unwrap();
    mount(&other.join("packs"), &packs);
    is_refused("the disk of another store").await;
    std::fs::remove_dir_all(&packs).unwrap();
    std::fs::create_dir(&packs).unwrap();
    put_marker_without_id(&packs);
    is_refused("a marker alone").await;
    for pack in &own {
        std::fs::create_dir_all(packs.join(pack).parent().unwrap()).unwrap();
        std::fs::write(packs.join(pack), b"another length").unwrap();
    }
    is_out_of_reach("packs of another length", open(dir.path()).await.ready().await);

    // One pack that is there is enough.
    mount(&away, &packs);
    let (place, aside) = (packs.join(&first[0]), dir.path().join("aside"));
    std::fs::rename(&place, &aside).unwrap();
    let store = open(dir.path()).await;
    store.begin_serving().await.unwrap();
    store.ready().await.unwrap();
    let id = id_of(&store).await;
    assert!(id.is_some() && id_on(&packs) == id);
    std::fs::rename(&aside, &place).unwrap();
    push(&store, &snapshot(&[4], vec![]), "u").await.unwrap();
    store.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn a_new_database_takes_no_storage_with_packs_until_it_is_rebuilt(backend: Backend) {
    let rig = Rig::new(backend).await;
    let s = snapshot(&[1, 2], vec![]);
    // Nothing is in the journal yet.
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&s.stream(), 777)).await.unwrap();
    let new = rig.beside().await;
    let started = new.store.begin_serving().await.unwrap_err();
    let pushed = push(&new.store, &snapshot(&[3], vec![]), "t").await.unwrap_err();
    for refused in [started, pushed] {
        assert!(matches!(&refused, Error::Unavailable { reason, .. } if reason.contains("storage of its own")), "{refused}");
    }
    assert_eq!((id_of(&new.store).await, rig.pack_paths().await.len()), (None, 1));

    // The store that has them goes on, and a rebuild takes them.
    rig.store.commit(&session.id, s.manifest.digest, Some(tag("t")), None).await.unwrap();
    let rebuilt = rig.beside().await;
    let report = rebuilt.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((report.snapshots, report.tags), (1, 1), "{report:?}");
    rebuilt.store.begin_serving().await.unwrap();
    assert_eq!(id_of(&rebuilt.store).await, id_of(&rig.store).await);
}

on_every_backend!(a_new_database_takes_no_storage_with_packs_until_it_is_rebuilt);

/// Another replica makes the first push while this one looks for packs.
#[derive(Debug)]
struct Faster(Store, AtomicBool);

#[async_trait]
impl Hooks for Faster {
    async fn before(&self, call: &Call) -> object_store::Result<Option<object_store::Error>> {
        if call.moment == Moment::ListFolder && !self.1.swap(true, Ordering::SeqCst) {
            push(&self.0, &snapshot(&[1], vec![]), "faster").await.unwrap();
        }
        Ok(None)
    }
}

#[tokio::test]
async fn a_replica_that_starts_during_the_first_push_of_another_one_knows_its_packs() {
    let bucket: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let tables: Arc<dyn Metadata> = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let process = |packs| Store::new(packs, Arc::clone(&tables), Options::default());
    // A start was cut between marker and tables.
    let id = "0190f3c2-7d4e-7b61-9c55-2f0a6be1d8a4";
    bucket.put(&Key::from("pf-store"), format!("id {id}\n").into()).await.unwrap();
    let faster = Arc::new(Faster(process(Arc::clone(&bucket)), AtomicBool::new(false)));
    let late = process(hooked(bucket, faster.clone()));
    late.begin_serving().await.unwrap();
    assert!(faster.1.load(Ordering::SeqCst), "it looked for packs");
    push(&late, &snapshot(&[2], vec![]), "late").await.unwrap();
    assert_eq!(id_of(&late).await.as_deref(), Some(id));
}

/// A folder that may be written to, and may not be listed.
#[derive(Debug)]
struct Unlisted;

#[async_trait]
impl Hooks for Unlisted {
    async fn before(&self, call: &Call) -> object_store::Result<Option<object_store::Error>> {
        if call.moment != Moment::ListFolder {
            return Ok(None);
        }
        let denied = Box::new(std::io::Error::from(std::io::ErrorKind::PermissionDenied));
        Err(object_store::Error::Generic { store: "test", source: denied })
    }
}

#[tokio::test]
async fn a_start_that_was_cut_is_finished_in_a_folder_that_may_not_be_listed() {
    let (bucket, tables) = (bucket(), new_tables().await);
    // Between marker and tables.
    let id = "0190f3c2-7d4e-7b61-9c55-2f0a6be1d8a4";
    bucket.put(&Key::from("pf-store"), format!("id {id}\n").into()).await.unwrap();
    let store = over(&tables, &hooked(bucket, Arc::new(Unlisted)));
    store.begin_serving().await.unwrap();
    assert_eq!(id_of(&store).await.as_deref(), Some(id));
    push(&store, &snapshot(&[1], vec![]), "t").await.unwrap();
}

#[tokio::test]
async fn the_storage_of_another_store_is_refused_with_both_ids_until_it_is_rebuilt() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("from"), dir.path().join("to"));
    let (there, s) = (open(&from).await, snapshot(&[1, 2], vec![]));
    push(&there, &s, "t").await.unwrap();
    let here = open(&to).await;
    here.begin_serving().await.unwrap();
    let (old, new) = (id_of(&here).await.unwrap(), id_of(&there).await.unwrap());
    // Its packs are moved to the place of a store that was started and never used.
    std::fs::remove_dir_all(to.join("packs")).unwrap();
    std::fs::rename(from.join("packs"), to.join("packs")).unwrap();
    let refused = here.ready().await.unwrap_err();
    assert!(refused.to_string().contains(&old) && refused.to_string().contains(&new), "{refused}");
    is_out_of_reach("ready", Err::<(), _>(refused));
    let report = here.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!((report.snapshots, report.tags), (1, 1), "{report:?}");
    assert_eq!(id_of(&here).await, Some(new));
    push(&here, &snapshot(&[3], vec![]), "u").await.unwrap();
    here.verify(&s.manifest.digest, &mut |_| ()).await.unwrap();
}
