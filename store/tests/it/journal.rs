//! The journal of tags and snapshots: the loss of the database loses nothing that was acknowledged.

use crate::common::rig::{Backend, Rig};
use crate::common::{pieces, property, push, repository, snapshot, tag};
use pfr_schema::api::TagState;
use pfr_schema::journal::{Journal, PREFIX, Part};
use pfr_schema::{Digest, ErrorCode, Limits, RepositoryName};
use pfr_store::{NamesCursor, SnapshotRow, Store, TagMove, TagRow};
use proptest::prelude::*;

on_every_backend_and_memory!(replicas_that_write_and_summarize_at_once_lose_nothing, any_history_replays_to_the_same_names,);
on_every_backend!(
    after_the_loss_of_the_database_everything_acknowledged_is_back,
    a_rebuilt_store_collects_what_no_name_reaches_and_nothing_else,
    what_is_acknowledged_is_in_the_journal,
    changes_of_many_at_once_share_objects,
    a_change_whose_writer_was_killed_before_the_journal_is_written_by_the_next,
    an_object_whose_row_was_not_written_does_no_harm_and_goes_with_the_next_summary,
    a_summary_keeps_the_journal_small_and_loses_nothing,
    a_snapshot_that_came_again_while_a_summary_was_written_keeps_its_place_in_lists,
    a_torn_object_of_the_journal_is_reported_and_scrub_makes_up_for_it_while_the_database_lives,
    a_snapshot_whose_pack_is_lost_with_the_database_is_named_and_the_others_are_back,
    a_pack_without_its_index_still_gives_back_what_is_well_in_it,
    a_healed_blob_is_taken_from_where_it_was_healed,
);

/// All tags and snapshots, in the order of lists.
type Listing = Vec<(RepositoryName, Vec<SnapshotRow>, Vec<TagRow>)>;

async fn listing(store: &Store) -> Listing {
    let mut all = Vec::new();
    for repository in store.repositories(None, 1000).await.unwrap().rows {
        let snapshots = store.snapshots(&repository.name, None, 1000).await.unwrap().rows;
        // Row ids are not names.
        let snapshots = snapshots.into_iter().map(|row| SnapshotRow { object: 0, ..row }).collect();
        all.push((repository.name.clone(), snapshots, store.tags(&repository.name, None, 1000).await.unwrap().rows));
    }
    all
}

/// New metadata from the packs and the journal of a rig.
async fn rebuilt(rig: &Rig) -> (Rig, pfr_schema::api::RebuildReport) {
    let new = rig.beside().await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    (new, report)
}

async fn journals(rig: &Rig) -> Vec<(String, Journal)> {
    let mut all = Vec::new();
    for path in rig.list(Some(PREFIX)).await {
        let journal = Journal::parse(path.as_ref(), &rig.bytes(&path).await, &Limits::default()).unwrap();
        all.push((path.to_string(), journal));
    }
    all
}

/// Writes a summary if it pays, and deletes what it makes superfluous; returns how many objects.
async fn summarize(store: &Store) -> u64 {
    store.summarize_journal().await.unwrap();
    store.trim_journal(usize::MAX).await.unwrap()
}

async fn push_to(store: &Store, repository: &str, numbers: &[u64], parents: Vec<Digest>, name: Option<&str>) -> Digest {
    let snapshot = snapshot(numbers, parents);
    let session = store.open_push(&repository.parse().unwrap()).await.unwrap();
    store.ingest(&session.id, pieces(&snapshot.stream(), 4096)).await.unwrap();
    store.commit(&session.id, snapshot.manifest.digest, name.map(tag), None).await.unwrap();
    snapshot.manifest.digest
}

/// Pushes, forks, tag moves, deletions, over two repositories.
async fn live(store: &Store) {
    let base = push_to(store, "team/agent", &[1, 2, 3], vec![], Some("main")).await;
    let child = push_to(store, "team/agent", &[1, 2, 3, 4], vec![base], Some("main")).await;
    push_to(store, "other/agent", &[1, 2, 3], vec![], Some("copy")).await;
    store.fork(&repository(), child, "fork", 12).await.unwrap();
    let gone = push_to(store, "team/agent", &[7, 8], vec![child, base], Some("gone")).await;
    store.delete_tag(&repository(), &tag("fork-3"), None).await.unwrap();
    store.put_tag(&repository(), tag("fork-4"), base, Some(TagState::At(child))).await.unwrap();
    store.delete_snapshot(&repository(), &gone).await.unwrap();
    push_to(store, "team/agent", &[9], vec![base], None).await;
}

async fn after_the_loss_of_the_database_everything_acknowledged_is_back(on: Backend) {
    let rig = Rig::new(on).await;
    live(&rig.store).await;
    let before = listing(&rig.store).await;
    let stats = rig.store.stats(None).await.unwrap();
    let rig = rig.beside().await;
    let store = &rig.store;
    assert!(listing(store).await.is_empty());
    let report = store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(listing(store).await, before);
    assert_eq!((report.snapshots, report.tags), (4, 13), "{report:?}");
    assert!(report.lost.is_empty() && report.refused.is_empty(), "{report:?}");
    for (_, snapshots, _) in &before {
        for snapshot in snapshots {
            store.verify(&snapshot.digest, &mut |_| ()).await.unwrap();
        }
    }
    assert_eq!(store.stats(None).await.unwrap().unique, stats.unique);
    let audit = store.fsck(false, &mut |_| ()).await.unwrap();
    assert_eq!(audit.discrepancies, Vec::<String>::new());
    let error = store.rebuild(&mut |_| ()).await.unwrap_err();
    assert!(error.code() == ErrorCode::InvalidRequest && error.to_string().contains("move it away"), "{error}");
    // It goes on as a store does.
    push(store, &snapshot(&[40], vec![]), "next").await.unwrap();
}

async fn a_rebuilt_store_collects_what_no_name_reaches_and_nothing_else(on: Backend) {
    let rig = Rig::new(on).await;
    live(&rig.store).await;
    let before = listing(&rig.store).await;
    // Two databases over the same packs would collect each other's.
    let new = rig.beside_copy().await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(listing(&new.store).await, before, "{report:?}");
    assert_eq!(new.metadata.audit(false).await.unwrap().discrepancies, []);
    rig.collect().await;
    new.collect().await;
    for rig in [&rig, &new] {
        assert_eq!(rig.metadata.audit(false).await.unwrap().discrepancies, []);
    }
    let objects = rig.metadata.audit(false).await.unwrap().objects;
    assert_eq!(new.metadata.audit(false).await.unwrap().objects, objects, "no garbage is kept");
    assert!(report.objects > objects, "there was garbage: {report:?}");
    for (_, snapshots, _) in &before {
        for snapshot in snapshots {
            new.store.verify(&snapshot.digest, &mut |_| ()).await.unwrap();
        }
    }
}

async fn what_is_acknowledged_is_in_the_journal(on: Backend) {
    let rig = Rig::new(on).await;
    live(&rig.store).await;
    assert_eq!(rig.metadata.unjournaled(1).await.unwrap(), []);
    let rows = rig.metadata.journal().await.unwrap();
    assert_eq!(
        rows.iter().map(|row| row.key.clone()).collect::<Vec<_>>(),
        journals(&rig).await.into_iter().map(|(key, _)| key).collect::<Vec<_>>()
    );
    let records: usize = journals(&rig).await.iter().map(|(_, journal)| journal.records.len()).sum();
    assert_eq!(records as u64, rig.metadata.begin_names().await.unwrap().0, "each change once, and all of them");
}

async fn changes_of_many_at_once_share_objects(on: Backend) {
    let rig = Rig::new(on).await;
    let base = push_to(&rig.store, "team/agent", &[1], vec![], None).await;
    let before = journals(&rig).await.len();
    let puts = (0..100).map(|i| {
        let store = rig.store.clone();
        async move { store.put_tag(&repository(), tag(&format!("t{i}")), base, None).await }
    });
    futures::future::try_join_all(puts).await.unwrap();
    let written = journals(&rig).await.len() - before;
    assert!(written < 50, "{written} objects for 100 changes");
    let (new, _) = rebuilt(&rig).await;
    assert_eq!(listing(&new.store).await, listing(&rig.store).await);
}

async fn a_change_whose_writer_was_killed_before_the_journal_is_written_by_the_next(on: Backend) {
    let rig = Rig::new(on).await;
    let base = push_to(&rig.store, "team/agent", &[1], vec![], Some("a")).await;
    // As if the process had ended between the transaction and the journal.
    rig.metadata.put_tags(repository(), base, vec![TagMove { tag: tag("b"), expected: None }]).await.unwrap();
    assert_eq!(rig.metadata.unjournaled(10).await.unwrap().len(), 1);
    rig.store.put_tag(&repository(), tag("c"), base, None).await.unwrap();
    let (new, _) = rebuilt(&rig).await;
    assert_eq!(listing(&new.store).await, listing(&rig.store).await);
}

async fn an_object_whose_row_was_not_written_does_no_harm_and_goes_with_the_next_summary(on: Backend) {
    let rig = Rig::new(on).await;
    let base = push_to(&rig.store, "team/agent", &[1], vec![], Some("a")).await;
    rig.metadata.put_tags(repository(), base, vec![TagMove { tag: tag("b"), expected: None }]).await.unwrap();
    // As if the process had ended between the object and its row.
    let changes = rig.metadata.unjournaled(10).await.unwrap();
    let numbered = changes.into_iter().map(|c| pfr_schema::journal::Numbered { seq: c.seq, change: c.record }).collect();
    let (key, bytes) = Journal::changes(numbered).to_object();
    rig.put(&key.as_str().into(), bytes).await;
    rig.store.put_tag(&repository(), tag("c"), base, None).await.unwrap();
    rig.store.delete_tag(&repository(), &tag("b"), None).await.unwrap();
    let (new, report) = rebuilt(&rig).await;
    assert_eq!(listing(&new.store).await, listing(&rig.store).await, "{report:?}");
    many_changes(&rig.store, base, 130).await;
    assert!(summarize(&rig.store).await > 150);
    assert_eq!(journals(&rig).await.len(), 1, "and {key} is not the one that is left");
}

async fn many_changes(store: &Store, base: Digest, count: usize) {
    for i in 0..count {
        store.put_tag(&repository(), tag(&format!("many-{}", i % 50)), base, None).await.unwrap();
        store.delete_tag(&repository(), &tag(&format!("many-{}", i % 50)), None).await.unwrap();
    }
}

async fn a_summary_keeps_the_journal_small_and_loses_nothing(on: Backend) {
    let rig = Rig::new(on).await;
    live(&rig.store).await;
    let base = rig.store.tag(&repository(), &tag("fork-4")).await.unwrap().digest;
    assert!(!rig.store.summarize_journal().await.unwrap(), "there are few objects: it would not pay");
    many_changes(&rig.store, base, 130).await;
    assert!(summarize(&rig.store).await > 256);
    assert_eq!(summarize(&rig.store).await, 0);
    let left = journals(&rig).await;
    assert!(left.len() == 1 && left[0].1.summary.is_some(), "{left:?}");
    rig.store.put_tag(&repository(), tag("after"), base, None).await.unwrap();
    let (new, report) = rebuilt(&rig).await;
    assert_eq!((report.journal, report.lost.len()), (2, 0));
    assert_eq!(listing(&new.store).await, listing(&rig.store).await);
    // Numbers go on where they were, also in a store rebuilt from a rebuilt one.
    let (before, _) = new.metadata.begin_names().await.unwrap();
    assert_eq!(before, rig.metadata.begin_names().await.unwrap().0);
    new.store.put_tag(&repository(), tag("later"), base, None).await.unwrap();
    many_changes(&new.store, base, 130).await;
    assert!(summarize(&new.store).await > 256, "the rebuilt store knows the old objects");
    let (third, _) = rebuilt(&new).await;
    assert_eq!(listing(&third.store).await, listing(&new.store).await);
    assert!(third.metadata.begin_names().await.unwrap().0 > before);
}

async fn replicas_that_write_and_summarize_at_once_lose_nothing(on: Backend) {
    let rig = Rig::new(on).await;
    let base = push_to(&rig.store, "team/agent", &[1], vec![], None).await;
    for round in 0..on.some(3, 1) {
        let stores = futures::future::join_all((0..4).map(|_| rig.another())).await;
        let replicas = stores.into_iter().enumerate().map(|(replica, store)| async move {
            for i in 0..150 {
                store.put_tag(&repository(), tag(&format!("r{replica}-{round}-{i}")), base, None).await.unwrap();
                if i % 40 == 7 {
                    summarize(&store).await;
                }
            }
            summarize(&store).await;
        });
        futures::future::join_all(replicas.map(tokio::spawn)).await.into_iter().for_each(|done| done.unwrap());
        let (new, report) = rebuilt(&rig).await;
        assert_eq!(listing(&new.store).await, listing(&rig.store).await, "round {round}: {report:?}");
    }
}

async fn a_torn_object_of_the_journal_is_reported_and_scrub_makes_up_for_it_while_the_database_lives(on: Backend) {
    let rig = Rig::new(on).await;
    live(&rig.store).await;
    let torn = rig.list(Some(PREFIX)).await[2].clone();
    let bytes = rig.bytes(&torn).await;
    rig.put(&torn, bytes[..bytes.len() / 2].to_vec()).await;
    let (_, report) = rebuilt(&rig).await;
    assert!(report.refused.len() == 1 && report.refused[0].starts_with(torn.as_ref()), "{report:?}");
    let report = rig.store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert!(report.bad_packs.len() == 1 && report.bad_packs[0].starts_with(torn.as_ref()), "{report:?}");
    let (new, report) = rebuilt(&rig).await;
    assert_eq!(listing(&new.store).await, listing(&rig.store).await, "{report:?}");
}

async fn a_snapshot_whose_pack_is_lost_with_the_database_is_named_and_the_others_are_back(on: Backend) {
    let rig = Rig::new(on).await;
    let first = push_to(&rig.store, "team/agent", &[1], vec![], Some("first")).await;
    let pack = rig.pack_paths().await[0].clone();
    let second = push_to(&rig.store, "team/agent", &[2], vec![first], Some("second")).await;
    let bytes = rig.bytes(&pack).await;
    rig.put(&pack, bytes[..50].to_vec()).await;
    let (new, report) = rebuilt(&rig).await;
    assert!(report.lost.len() == 1 && report.lost[0].contains(&first.to_string()), "{report:?}");
    assert_eq!(report.refused.len(), 1, "{report:?}");
    assert_eq!((report.snapshots, report.tags), (1, 1));
    let left = new.store.snapshot(&repository(), &second).await.unwrap();
    assert_eq!((left.parents, left.tags), (vec![first], vec![tag("second")]));
}

async fn a_pack_without_its_index_still_gives_back_what_is_well_in_it(on: Backend) {
    let rig = Rig::new(on).await;
    live(&rig.store).await;
    for pack in rig.pack_paths().await {
        let len = rig.bytes(&pack).await.len();
        rig.flip(&pack, len - 40).await;
    }
    let (new, report) = rebuilt(&rig).await;
    assert_eq!(report.refused.len(), rig.pack_paths().await.len(), "{report:?}");
    assert_eq!(listing(&new.store).await, listing(&rig.store).await);
    // A scrub then writes packs that have one.
    assert!(new.store.scrub(&Default::default(), &mut |_| ()).await.unwrap().damaged.is_empty());
    new.collect().await;
    let again = new.store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert!(again.bad_packs.is_empty(), "{again:?}");
    assert_eq!(new.metadata.audit(false).await.unwrap().discrepancies, []);
}

async fn a_healed_blob_is_taken_from_where_it_was_healed(on: Backend) {
    let rig = Rig::new(on).await;
    let snapshot = snapshot(&[1, 2], vec![]);
    push(&rig.store, &snapshot, "t").await.unwrap();
    let pack = rig.pack_paths().await[0].clone();
    rig.flip(&pack, 100).await;
    assert_eq!(rig.store.scrub(&Default::default(), &mut |_| ()).await.unwrap().damaged.len(), 1);
    // Keys begin with the time: of two copies a rebuild takes the later one.
    let bad: uuid::Uuid = pack.filename().unwrap().trim_end_matches(".pfpack").parse().unwrap();
    while uuid::Uuid::now_v7() <= bad {
        tokio::task::yield_now().await;
    }
    push(&rig.store, &snapshot, "t").await.unwrap();
    let (new, _) = rebuilt(&rig).await;
    new.store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

#[derive(Clone, Debug)]
enum Op {
    Push(u64, Option<u8>),
    Put(u64, u8),
    Untag(u8),
    Delete(u64),
    /// Begins a summary. One that is under way is left as it is, as if its writer had been killed.
    Begin,
    /// Writes one more name of the summary, in a part of its own.
    Page,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..4_u64, proptest::option::of(0..3_u8)).prop_map(|(s, t)| Op::Push(s, t)),
        3 => (0..4_u64, 0..3_u8).prop_map(|(s, t)| Op::Put(s, t)),
        2 => (0..3_u8).prop_map(Op::Untag),
        2 => (0..4_u64).prop_map(Op::Delete),
        1 => Just(Op::Begin),
        6 => Just(Op::Page),
    ]
}

/// A summary as a store writes it, one name at a time.
struct Walk {
    last: u64,
    cursor: NamesCursor,
    set: String,
    number: u32,
}

impl Walk {
    async fn begin(rig: &Rig) -> Self {
        let (last, cursor) = rig.metadata.begin_names().await.unwrap();
        Self { last, cursor, set: uuid::Uuid::now_v7().simple().to_string(), number: 0 }
    }

    /// Returns itself if there is more to write.
    async fn page(mut self, rig: &Rig) -> Option<Self> {
        let (records, next) = rig.metadata.names(self.cursor, 1).await.unwrap();
        let part = Part { set: self.set.clone(), number: self.number, end: next.is_none() };
        let (key, bytes) = Journal::part(self.last, part, records).to_object();
        rig.put(&key.as_str().into(), bytes).await;
        self.number += 1;
        self.cursor = next?;
        Some(self)
    }
}

/// Asserts that tags and snapshots are the same after a rebuild beside the same packs.
async fn replays_to_the_same(on: Backend, ops: Vec<Op>) {
    let rig = Rig::new(on).await;
    let name = |t: u8| tag(&format!("t{t}"));
    let mut walk = None;
    for op in &ops {
        // Some of these are refused, as they should be: names then stay as they are.
        match op {
            Op::Push(s, t) => drop(push_to(&rig.store, "team/agent", &[*s], vec![], t.map(|t| format!("t{t}")).as_deref()).await),
            Op::Put(s, t) => drop(rig.store.put_tag(&repository(), name(*t), snapshot(&[*s], vec![]).manifest.digest, None).await),
            Op::Untag(t) => drop(rig.store.delete_tag(&repository(), &name(*t), None).await),
            Op::Delete(s) => drop(rig.store.delete_snapshot(&repository(), &snapshot(&[*s], vec![]).manifest.digest).await),
            Op::Begin => walk = Some(Walk::begin(&rig).await),
            Op::Page => {
                walk = match walk {
                    Some(walk) => walk.page(&rig).await,
                    None => None,
                }
            }
        }
    }
    let (new, report) = rebuilt(&rig).await;
    assert!(report.lost.is_empty() && report.refused.is_empty(), "{ops:?}: {report:?}");
    assert_eq!(listing(&new.store).await, listing(&rig.store).await, "{ops:?}");
    assert_eq!(new.metadata.audit(false).await.unwrap().discrepancies, [], "{ops:?}");
}

async fn a_snapshot_that_came_again_while_a_summary_was_written_keeps_its_place_in_lists(on: Backend) {
    let rig = Rig::new(on).await;
    let first = push_to(&rig.store, "team/agent", &[1], vec![], None).await;
    push_to(&rig.store, "team/agent", &[2], vec![], None).await;
    let mut walk = Some(Walk::begin(&rig).await);
    rig.store.delete_snapshot(&repository(), &first).await.unwrap();
    push_to(&rig.store, "team/agent", &[1], vec![], None).await;
    push_to(&rig.store, "team/agent", &[3], vec![], None).await;
    while let Some(under_way) = walk {
        walk = under_way.page(&rig).await;
    }
    let (new, report) = rebuilt(&rig).await;
    assert_eq!(listing(&new.store).await, listing(&rig.store).await, "{report:?}");
}

async fn any_history_replays_to_the_same_names(on: Backend) {
    let histories = proptest::collection::vec(op(), 1..30);
    property(on.some(48, 4), histories, move |ops| replays_to_the_same(on, ops)).await;
}
