//! Summaries of the journal: in parts, beside changes, and what they make superfluous.

use crate::common::rig::{Backend, Rig};
use crate::common::{push, repository, snapshot, tag};
use futures::future::join_all;
use object_store::ObjectStoreExt as _;
use object_store::memory::InMemory;
use pfr_schema::journal::{Journal, Key, PREFIX};
use pfr_schema::{Digest, Limits};
use pfr_store::{GcOptions, Options, Store, TagMove, TagRow};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// A store that writes and reads objects of at most so many bytes.
fn with_small_objects(rig: &Rig, bytes: u64) -> Store {
    let options = rig.options();
    let limits = Limits { journal_bytes: bytes, ..options.limits.clone() };
    Store::new(rig.packs.clone(), Arc::clone(&rig.metadata), Options { limits, ..options })
}

async fn base(store: &Store) -> Digest {
    let snapshot = snapshot(&[1, 2], vec![]);
    push(store, &snapshot, "base").await.unwrap();
    snapshot.manifest.digest
}

async fn tags(store: &Store) -> Vec<TagRow> {
    store.tags(&repository(), None, 100_000).await.unwrap().rows
}

/// What a new database beside the same packs says.
async fn rebuilt(rig: &Rig, packs: Arc<InMemory>) -> (Vec<TagRow>, pfr_schema::api::RebuildReport) {
    let new = rig.over_memory(packs).await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    (tags(&new.store).await, report)
}

async fn keys(rig: &Rig) -> Vec<String> {
    rig.list(Some(PREFIX)).await.into_iter().map(|path| path.to_string()).collect()
}

async fn parts(rig: &Rig) -> Vec<String> {
    keys(rig).await.into_iter().filter(|key| Key::parse(key).unwrap().part.is_some()).collect()
}

async fn changes(store: &Store, base: Digest, count: usize) {
    for i in 0..count {
        store.put_tag(&repository(), tag(&format!("c{}", i / 2 % 10)), base, None).await.unwrap();
        store.delete_tag(&repository(), &tag(&format!("c{}", i / 2 % 10)), None).await.unwrap();
    }
}

#[tokio::test]
async fn a_large_summary_has_many_parts_and_all_of_them_count() {
    let rig = Rig::new(Backend::Memory).await;
    let store = with_small_objects(&rig, 4000);
    let base = base(&store).await;
    store.fork(&repository(), base, "fork", 200).await.unwrap();
    changes(&store, base, 150).await;
    // A change whose writer was killed before the journal: pages have it, so it must be in the
    // journal when the summary counts.
    rig.metadata.put_tags(repository(), base, vec![TagMove { tag: tag("unwritten"), expected: None }]).await.unwrap();
    let before = tags(&store).await;
    assert!(store.summarize_journal().await.unwrap());
    assert_eq!(rig.metadata.unjournaled(1).await.unwrap(), []);
    let parts = parts(&rig).await;
    assert!(parts.len() > 5, "{}", parts.len());
    for key in keys(&rig).await {
        let bytes = rig.bytes(&key.as_str().into()).await;
        assert!(bytes.len() <= 4000, "{key}: {}", bytes.len());
        Journal::parse(&key, &bytes, &Limits::default()).unwrap();
    }
    let recorded: BTreeSet<String> = rig.metadata.journal().await.unwrap().into_iter().map(|row| row.key).collect();
    assert_eq!(recorded, keys(&rig).await.into_iter().collect());
    // Whichever part is not there, the changes are what counts as long as they are.
    for (number, part) in parts.iter().enumerate() {
        let packs = rig.fork().await;
        packs.delete(&part.as_str().into()).await.unwrap();
        let (names, report) = rebuilt(&rig, packs).await;
        assert_eq!(names, before, "without part {number}: {report:?}");
        // Without the last part it looks like one whose writer was killed, and that is no damage.
        assert_eq!(report.refused.is_empty(), number + 1 == parts.len(), "without part {number}: {report:?}");
    }
    let trimmed = store.trim_journal(usize::MAX).await.unwrap();
    assert!(trimmed > 300, "{trimmed}");
    assert_eq!(keys(&rig).await, parts);
    let (names, report) = rebuilt(&rig, rig.fork().await).await;
    assert_eq!(names, before, "{report:?}");
    assert_eq!((report.journal, report.refused.len()), (parts.len() as u64, 0), "{report:?}");
    // Now it is all there is: without one of its parts no name comes back, and the report says so.
    let packs = rig.fork().await;
    packs.delete(&parts[1].as_str().into()).await.unwrap();
    let new = rig.over_memory(packs).await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    assert!(report.tags == 0 && report.refused.len() == 1, "{report:?}");
}

#[tokio::test]
async fn the_summary_before_counts_until_the_last_part_of_the_next_is_there() {
    let rig = Rig::new(Backend::Memory).await;
    let store = with_small_objects(&rig, 4000);
    let base = base(&store).await;
    changes(&store, base, 150).await;
    assert!(store.summarize_journal().await.unwrap());
    store.trim_journal(usize::MAX).await.unwrap();
    let first = parts(&rig).await;
    store.fork(&repository(), base, "fork", 100).await.unwrap();
    changes(&store, base, 150).await;
    let killed = rig.fork().await;
    let before = tags(&store).await;
    assert!(store.summarize_journal().await.unwrap());
    let second: Vec<String> = parts(&rig).await.into_iter().filter(|key| !first.contains(key)).collect();
    assert!(second.len() > 3);
    // As if the process had ended before the last part.
    for key in &second[..second.len() - 1] {
        killed.put(&key.as_str().into(), rig.bytes(&key.as_str().into()).await.into()).await.unwrap();
    }
    let new = rig.over_memory(killed).await;
    let report = new.store.rebuild(&mut |_| ()).await.unwrap();
    assert!(report.refused.is_empty(), "{report:?}");
    assert_eq!(tags(&new.store).await, before);
    let recorded: Vec<String> = new.metadata.journal().await.unwrap().into_iter().map(|row| row.key).collect();
    assert!(first.iter().all(|key| recorded.contains(key)) && !second.iter().any(|key| recorded.contains(key)));
    // The next summary takes what is left of it along.
    changes(&new.store, base, 150).await;
    assert!(new.store.summarize_journal().await.unwrap());
    new.store.trim_journal(usize::MAX).await.unwrap();
    assert_eq!(keys(&new).await.len(), 1);
    assert_eq!(rebuilt(&new, new.fork().await).await.0, before);
}

#[tokio::test]
async fn names_that_change_while_summaries_are_written_are_all_back() {
    change_names_and_write_summaries(2).await;
}

mod long {
    #[tokio::test]
    async fn names_that_change_while_summaries_are_written_are_all_back() {
        super::change_names_and_write_summaries(20).await;
    }
}

async fn change_names_and_write_summaries(rounds: u64) {
    let rig = Rig::new(Backend::Memory).await;
    let first = base(&rig.store).await;
    rig.store.fork(&repository(), first, "fork", 100).await.unwrap();
    for round in 0..rounds {
        let replicas = [rig.another().await, rig.another().await, rig.another().await];
        let writers = (0..).zip(replicas).map(|(writer, store): (u64, Store)| {
            tokio::spawn(async move {
                for i in 0..60_u64 {
                    let name = format!("w{}", (writer + i) % 5);
                    let snapshot = snapshot(&[100 + (writer + i) % 4], vec![]);
                    // Others delete the same ones: some of this is refused.
                    drop(push(&store, &snapshot, &name).await);
                    drop(
                        store.put_tag(&repository(), tag(&format!("fork-{}", 1 + (round + i) % 100)), snapshot.manifest.digest, None).await,
                    );
                    if i % 3 == 0 {
                        drop(store.delete_snapshot(&repository(), &snapshot.manifest.digest).await);
                    }
                }
            })
        });
        let summaries = (0..2).map(|_| {
            // Walks of some ten pages and parts.
            let store = with_small_objects(&rig, 3000);
            tokio::spawn(async move {
                for _ in 0..40 {
                    store.summarize_journal().await.unwrap();
                    store.trim_journal(usize::MAX).await.unwrap();
                }
            })
        });
        let tasks: Vec<_> = writers.chain(summaries).collect();
        join_all(tasks).await.into_iter().for_each(|done| done.unwrap());
        let (names, report) = rebuilt(&rig, rig.fork().await).await;
        assert!(report.refused.is_empty() && report.lost.is_empty(), "{report:?}");
        assert_eq!(names, tags(&rig.store).await, "round {round}");
    }
    assert!(!parts(&rig).await.is_empty(), "there was no summary");
}

#[tokio::test]
async fn a_summary_is_written_when_a_quarter_of_its_names_has_changed() {
    let rig = Rig::new(Backend::Memory).await;
    let base = base(&rig.store).await;
    for prefix in ["a", "b", "c"] {
        rig.store.fork(&repository(), base, prefix, 1000).await.unwrap();
    }
    changes(&rig.store, base, 150).await;
    assert!(rig.store.summarize_journal().await.unwrap());
    let state = rig.metadata.journal_state(1000).await.unwrap();
    assert_eq!((state.names, state.summary, state.objects), (3002, state.last, 0), "{state:?}");
    changes(&rig.store, base, 200).await;
    assert_eq!(rig.metadata.journal_state(300).await.unwrap().objects, 300, "counted as far as was asked for");
    assert!(!rig.store.summarize_journal().await.unwrap(), "400 changes, of 3,002 names");
    changes(&rig.store, base, 200).await;
    assert!(rig.store.summarize_journal().await.unwrap(), "800 changes");
}

#[tokio::test]
async fn what_is_superfluous_goes_in_steps_bytes_before_rows() {
    let rig = Rig::new(Backend::Memory).await;
    let base = base(&rig.store).await;
    changes(&rig.store, base, 150).await;
    let first = keys(&rig).await;
    assert_eq!(rig.store.trim_journal(1000).await.unwrap(), 0, "nothing is superfluous without a summary");
    assert!(rig.store.summarize_journal().await.unwrap());
    rig.store.put_tag(&repository(), tag("after"), base, None).await.unwrap();
    assert_eq!(rig.store.trim_journal(10).await.unwrap(), 10);
    let left = keys(&rig).await;
    assert_eq!(left.len(), first.len() + 2 - 10);
    assert!(first[10..].iter().all(|key| left.contains(key)), "the oldest go first");
    let recorded: BTreeSet<String> = rig.metadata.journal().await.unwrap().into_iter().map(|row| row.key).collect();
    assert_eq!(recorded, left.into_iter().collect());
    // Bytes that went with a process that was killed before it wrote so.
    rig.packs.delete(&first[10].as_str().into()).await.unwrap();
    let before = tags(&rig.store).await;
    let scrub = rig.store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert_eq!(scrub.bad_packs, Vec::<String>::new(), "it was superfluous");
    let report = rig.store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap();
    assert_eq!(report.journal_deleted, first.len() as u64 - 10, "{report:?}");
    assert_eq!(keys(&rig).await.len(), 2);
    assert_eq!(rebuilt(&rig, rig.fork().await).await.0, before);
}

#[tokio::test]
async fn a_torn_part_is_reported_and_scrub_writes_another_summary() {
    let rig = Rig::new(Backend::Memory).await;
    let store = with_small_objects(&rig, 4000);
    let base = base(&store).await;
    store.fork(&repository(), base, "fork", 100).await.unwrap();
    changes(&store, base, 150).await;
    assert!(store.summarize_journal().await.unwrap());
    store.trim_journal(usize::MAX).await.unwrap();
    let torn = parts(&rig).await[2].clone();
    let bytes = rig.bytes(&torn.as_str().into()).await;
    rig.put(&torn.as_str().into(), bytes[..bytes.len() / 2].to_vec()).await;
    let scrub = store.scrub(&Default::default(), &mut |_| ()).await.unwrap();
    assert!(scrub.bad_packs.len() == 1 && scrub.bad_packs[0].starts_with(&torn), "{scrub:?}");
    assert!(!keys(&rig).await.contains(&torn));
    let (names, report) = rebuilt(&rig, rig.fork().await).await;
    assert!(report.refused.is_empty(), "{report:?}");
    assert_eq!(names, tags(&store).await);
}

#[tokio::test]
async fn unfinished_objects_of_journal_tasks_and_marker_are_removed_when_their_writers_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::default()).await.unwrap();
    let base = base(&store).await;
    let journal = dir.path().join("packs").join(PREFIX);
    let file = |name: &str, age: Duration| {
        let path = journal.join(name);
        let file = std::fs::File::create(&path).unwrap();
        file.set_modified(file.metadata().unwrap().modified().unwrap() - age).unwrap();
        path
    };
    let key = Journal::changes(vec![]).to_object().0;
    let name = key.strip_prefix("journal/").unwrap();
    let (lease, hour) = (Options::default().lease, Duration::from_secs(3600));
    let old = [file(&format!("{name}#1"), lease + hour), file(&format!("{name}#12"), lease + hour)];
    let kept = [file(&format!("{name}#2"), Duration::ZERO), file(&format!("{name}#x"), lease + hour), file("other#1", lease + hour)];
    let objects = std::fs::read_dir(&journal).unwrap().count();
    std::fs::create_dir_all(dir.path().join("packs/tasks")).unwrap();
    let old_others = [file("../pf-store#1", lease + hour), file("../tasks/scrub.paused-until#1", lease + hour)];
    let others = [
        file("../pf-store", lease + hour),
        file("../pf-store#2", Duration::ZERO),
        file("../pf-store-2#1", lease + hour),
        file("../tasks/scrub.paused-until#2", Duration::ZERO),
    ];
    store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap();
    assert!(old.iter().chain(&old_others).all(|path| !path.exists()));
    assert!(kept.iter().chain(&others).all(|path| path.exists()));
    assert_eq!(std::fs::read_dir(&journal).unwrap().count(), objects - old.len());
    store.put_tag(&repository(), tag("after"), base, None).await.unwrap();
}
