//! The log of events: each change once, in order, for any reader that comes back, and an end of it
//! that can be told.

use crate::common::rig::{Backend, Rig};
use crate::common::{pieces, push, repository, snapshot, tag};
use pfr_schema::journal::Record;
use pfr_store::{Event, EventLog, GcOptions, GcRun, GcTrigger, Happening, Metadata, Options};
use std::time::Duration;

/// Events after a number, as short texts.
async fn said(metadata: &dyn Metadata, after: u64) -> Vec<String> {
    metadata.events(after, 1000).await.unwrap().events.iter().map(short).collect()
}

fn short(event: &Event) -> String {
    match &event.what {
        Happening::Names(Record::Snapshot { manifest, parents, .. }) => format!("pushed {} {}", manifest.short(), parents.len()),
        Happening::Names(Record::Tag { tag, manifest, .. }) => format!("tagged {tag} {}", manifest.short()),
        Happening::Names(Record::Untag { tag, .. }) => format!("untagged {tag}"),
        Happening::Names(Record::Delete { manifest, .. }) => format!("deleted {}", manifest.short()),
        Happening::Collection(report) => format!("collected {}", report.released > 0),
    }
}

async fn log(metadata: &dyn Metadata) -> EventLog {
    metadata.events(0, 1).await.unwrap().log.expect("a log")
}

async fn each_change_is_an_event_once_the_log_has_begun_and_restarts_and_replicas_share_it(backend: Backend) {
    let mut rig = Rig::new(backend).await;
    let (a, b) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    push(&rig.store, &a, "before").await.unwrap();
    assert_eq!(rig.metadata.events(0, 10).await.unwrap().log, None, "no reader: nothing is kept");
    let begun = rig.store.begin_events().await.unwrap();
    assert_eq!((begun.forgotten, begun.last), (0, 0));
    push(&rig.store, &b, "t").await.unwrap();
    let other = rig.another().await;
    assert_eq!(other.begin_events().await.unwrap().epoch, begun.epoch, "replicas share it");
    other.put_tag(&repository(), tag("u"), a.manifest.digest, None).await.unwrap();
    rig.reopen().await;
    rig.store.delete_tag(&repository(), &tag("u"), None).await.unwrap();
    rig.store.delete_snapshot(&repository(), &b.manifest.digest).await.unwrap();
    let (a, b) = (a.manifest.digest.short(), b.manifest.digest.short());
    let expected =
        [format!("pushed {b} 0"), format!("tagged t {b}"), format!("tagged u {a}"), "untagged u".to_owned(), format!("deleted {b}")];
    assert_eq!(said(&*rig.metadata, 0).await, expected);
    let events = rig.metadata.events(0, 1000).await.unwrap().events;
    assert!(events.is_sorted_by(|a, b| a.number < b.number), "{events:?}");
    for (at, event) in events.iter().enumerate() {
        assert_eq!(said(&*rig.metadata, event.number).await, expected[at + 1..], "after the event {at}");
    }
    assert_eq!(log(&*rig.metadata).await, EventLog { epoch: begun.epoch, forgotten: 0, last: events[4].number });
}

/// A change whose journal object is not written yet may be lost with the database.
async fn a_change_is_no_event_before_it_is_in_the_journal(backend: Backend) {
    let rig = Rig::new(backend).await;
    rig.store.begin_events().await.unwrap();
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "t").await.unwrap();
    // Below the store: nothing writes the journal.
    rig.metadata.delete_tag(repository(), tag("t"), None).await.unwrap();
    assert_eq!(said(&*rig.metadata, 0).await.len(), 2);
    rig.store.flush_journal().await.unwrap();
    assert_eq!(said(&*rig.metadata, 0).await[2], "untagged t");
}

async fn a_collection_is_an_event_in_its_order(backend: Backend) {
    let rig = Rig::new(backend).await;
    let s = snapshot(&[1, 2], vec![]);
    push(&rig.store, &s, "t").await.unwrap();
    rig.store.begin_events().await.unwrap();
    let collect = async || rig.store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap();
    collect().await;
    assert_eq!(said(&*rig.metadata, 0).await, Vec::<String>::new(), "it found nothing");
    rig.store.delete_snapshot(&repository(), &s.manifest.digest).await.unwrap();
    rig.wait(Duration::from_secs(48 * 3600));
    collect().await;
    let deleted = format!("deleted {}", s.manifest.digest.short());
    assert_eq!(said(&*rig.metadata, 0).await, [deleted.clone(), "collected true".to_owned()]);

    // It waits for a change of names that is not in the journal yet, and comes with it.
    push(&rig.store, &snapshot(&[3], vec![]), "u").await.unwrap();
    rig.metadata.delete_tag(repository(), tag("u"), None).await.unwrap();
    let report = pfr_schema::api::GcReport { released: 1, finished_at: Some(7), ..Default::default() };
    let report = serde_json::to_string(&report).unwrap();
    let run = GcRun { id: "run".into(), trigger: GcTrigger::Command, started_at: 5, finished_at: Some(7), report };
    rig.metadata.record_gc_run(run).await.unwrap();
    assert!(!rig.metadata.note_collections().await.unwrap());
    assert_eq!(said(&*rig.metadata, 0).await.len(), 4);
    rig.store.flush_journal().await.unwrap();
    assert_eq!(said(&*rig.metadata, 0).await[4..], ["untagged u"]);
    assert!(rig.metadata.note_collections().await.unwrap());
    assert_eq!(said(&*rig.metadata, 0).await[4..], ["untagged u", "collected true"]);
    assert_eq!(rig.metadata.unjournaled(10).await.unwrap(), []);
    // The journal has no collections: a rebuild must read it.
    let lost = rig.beside().await;
    assert!(lost.store.rebuild(&mut |_| ()).await.unwrap().refused.is_empty());
}

async fn events_are_kept_for_a_time_and_up_to_a_number_and_the_log_says_which_are_gone(backend: Backend) {
    let rig = Rig::still(backend, Options::default()).await;
    let s = snapshot(&[1], vec![]);
    push(&rig.store, &s, "t").await.unwrap();
    rig.store.begin_events().await.unwrap();
    for n in 0..20 {
        rig.store.put_tag(&repository(), tag(&format!("t{n}")), s.manifest.digest, None).await.unwrap();
        rig.seconds(60);
    }
    let metadata = &*rig.metadata;
    let numbers: Vec<u64> = metadata.events(0, 1000).await.unwrap().events.iter().map(|event| event.number).collect();
    let (minutes, all) = (|n: u64| Duration::from_secs(n * 60), 1 << 40);
    assert_eq!(metadata.trim_events(minutes(100), all, 100).await.unwrap(), 0);
    assert_eq!(metadata.trim_events(minutes(15), all, 3).await.unwrap(), 3, "in steps");
    assert_eq!(metadata.trim_events(minutes(15), all, 100).await.unwrap(), 2);
    assert_eq!(log(metadata).await.forgotten, numbers[4]);
    assert_eq!(metadata.trim_events(minutes(100), numbers[19] - numbers[15], 100).await.unwrap(), 11);
    assert_eq!((log(metadata).await.forgotten, said(metadata, 0).await.len()), (numbers[15], 4));
    assert_eq!(metadata.trim_events(Duration::ZERO, all, 100).await.unwrap(), 4);
    assert_eq!((log(metadata).await.forgotten, log(metadata).await.last), (numbers[19], numbers[19]), "an empty log goes on");
    rig.store.delete_tag(&repository(), &tag("t0"), None).await.unwrap();
    assert_eq!(said(metadata, numbers[19]).await, ["untagged t0"]);
    assert!(log(metadata).await.last > numbers[19]);
}

/// Numbers of a rebuilt database may be those of events that it does not have.
async fn a_rebuilt_database_begins_a_log_with_another_epoch(backend: Backend) {
    let rig = Rig::new(backend).await;
    let before = rig.store.begin_events().await.unwrap();
    push(&rig.store, &snapshot(&[1], vec![]), "t").await.unwrap();
    let lost = rig.beside().await;
    // A reader came to the empty database, and numbers would go on in its log.
    let between = lost.store.begin_events().await.unwrap();
    lost.store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(lost.metadata.events(0, 10).await.unwrap().log, None);
    let after = lost.store.begin_events().await.unwrap();
    assert!(after.epoch != before.epoch && after.epoch != between.epoch);
    assert_eq!(lost.metadata.events(0, 10).await.unwrap().events, [], "what the journal brought back is no news");
}

/// A process that is killed after the journal object and before its row writes the change again:
/// it is an event once.
async fn a_change_that_is_journaled_again_is_one_event(backend: Backend) {
    let rig = Rig::new(backend).await;
    rig.store.begin_events().await.unwrap();
    let s = snapshot(&[1], vec![]);
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&s.stream(), 777)).await.unwrap();
    rig.store.commit(&session.id, s.manifest.digest, Some(tag("t")), None).await.unwrap();
    let rows = rig.metadata.journal().await.unwrap();
    rig.metadata.journaled(rows).await.unwrap();
    rig.store.flush_journal().await.unwrap();
    assert_eq!(said(&*rig.metadata, 0).await.len(), 2);
}

on_every_backend!(
    each_change_is_an_event_once_the_log_has_begun_and_restarts_and_replicas_share_it,
    a_change_is_no_event_before_it_is_in_the_journal,
    a_collection_is_an_event_in_its_order,
    events_are_kept_for_a_time_and_up_to_a_number_and_the_log_says_which_are_gone,
    a_rebuilt_database_begins_a_log_with_another_epoch,
    a_change_that_is_journaled_again_is_one_event,
);
