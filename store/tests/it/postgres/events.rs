//! Events where several replicas write: numbers are handed out before they become visible.

use super::{connect, push, unique};
use futures::future::join_all;
use pfr_schema::api::GcReport;
use pfr_schema::journal::Record;
use pfr_store::{GcRun, GcTrigger, Happening, JournalRow, Metadata};
use sqlx::{Connection as _, PgConnection};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Writes all changes to the journal, one at a time, as the store does.
async fn journal(metadata: &dyn Metadata) {
    for change in metadata.unjournaled(1000).await.unwrap() {
        let row = JournalRow { key: unique("journal"), first: change.seq, last: change.seq, summary: false, records: 1 };
        metadata.journaled(vec![row]).await.unwrap();
    }
}

/// Two transactions: the one with the smaller number commits later.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_waits_for_those_with_smaller_numbers_and_readers_wait_for_none() {
    let url = pfr_testkit::postgres::database();
    let (store, reader) = (connect(&url).await, connect(&url).await);
    reader.begin_events("epoch".into()).await.unwrap();
    let mut slow = PgConnection::connect(&url).await.unwrap();
    sqlx::query("BEGIN").execute(&mut slow).await.unwrap();
    let insert = r#"INSERT INTO changes (record) VALUES ('{"op":"untag","repository":"team/agent","tag":"slow"}')"#;
    sqlx::query(insert).execute(&mut slow).await.unwrap();
    push(&*store, &[1], "fast").await.unwrap();
    let journaling = tokio::spawn({
        let store = Arc::clone(&store);
        async move { journal(&*store).await }
    });
    for _ in 0..20 {
        let page = tokio::time::timeout(Duration::from_secs(10), reader.events(0, 100)).await.expect("a reader waits for a writer");
        assert_eq!(page.unwrap().events, [], "the transaction with the smaller number is not over");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(!journaling.is_finished());
    sqlx::query("COMMIT").execute(&mut slow).await.unwrap();
    journaling.await.unwrap();
    let events = reader.events(0, 100).await.unwrap().events;
    assert!(matches!(&events[0].what, Happening::Names(Record::Untag { tag, .. }) if tag.as_str() == "slow"), "{events:?}");
    assert!(events.len() == 3 && events.is_sorted_by(|a, b| a.number < b.number), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_sees_each_event_once_and_in_order_while_replicas_write_and_journal() {
    const WRITERS: u64 = 4;
    const EACH: u64 = 8;
    let url = pfr_testkit::postgres::database();
    let stores = [connect(&url).await, connect(&url).await];
    let reader = connect(&url).await;
    reader.begin_events("epoch".into()).await.unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let reading = tokio::spawn({
        let done = Arc::clone(&done);
        async move {
            let mut seen: Vec<u64> = Vec::new();
            loop {
                let last_look = done.load(Ordering::SeqCst);
                let page = reader.events(seen.last().copied().unwrap_or(0), 3).await.unwrap();
                let is_empty = page.events.is_empty();
                seen.extend(page.events.iter().map(|event| event.number));
                if last_look && is_empty {
                    return (seen, reader.events(0, 1000).await.unwrap().events);
                }
            }
        }
    });
    let writers = (0..WRITERS).map(|writer| {
        let store = Arc::clone(&stores[writer as usize % 2]);
        tokio::spawn(async move {
            for i in 0..EACH {
                push(&*store, &[writer * 100 + i], &format!("t{writer}")).await.unwrap();
                journal(&*store).await;
            }
        })
    });
    join_all(writers).await.into_iter().for_each(|writer| writer.unwrap());
    done.store(true, Ordering::SeqCst);
    let (seen, all) = reading.await.unwrap();
    assert_eq!(seen, all.iter().map(|event| event.number).collect::<Vec<_>>(), "none appeared behind one that was read");
    assert_eq!(seen.len() as u64, WRITERS * EACH * 2, "a snapshot and a tag for each push");
}

/// A replica of the version before events runs these statements, beside one of this version.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_replica_of_the_version_before_journals_is_an_event_too() {
    let url = pfr_testkit::postgres::database();
    let store = connect(&url).await;
    store.begin_events("epoch".into()).await.unwrap();
    push(&*store, &[1], "a").await.unwrap();
    let report = GcReport { released: 1, finished_at: Some(7), ..GcReport::default() };
    let report = serde_json::to_string(&report).unwrap();
    let run = GcRun { id: "run".into(), trigger: GcTrigger::Command, started_at: 5, finished_at: Some(7), report };
    store.record_gc_run(run).await.unwrap();
    let mut old = PgConnection::connect(&url).await.unwrap();
    let insert = r#"INSERT INTO changes (record) VALUES ('{"op":"untag","repository":"team/agent","tag":"old"}')"#;
    sqlx::query(insert).execute(&mut old).await.unwrap();
    let find = "SELECT record FROM changes ORDER BY seq LIMIT 1000";
    let records: Vec<String> = sqlx::query_scalar(find).fetch_all(&mut old).await.unwrap();
    assert_eq!(records.len(), 3);
    for record in &records {
        assert!(serde_json::from_str::<Record>(record).is_ok(), "it cannot read {record}");
    }
    sqlx::query("DELETE FROM changes WHERE seq BETWEEN 1 AND 1000").execute(&mut old).await.unwrap();
    let events = store.events(0, 100).await.unwrap().events;
    let kinds: Vec<bool> = events.iter().map(|event| matches!(event.what, Happening::Names(_))).collect();
    assert_eq!(kinds, [true, true, false, true], "{events:?}");
    assert!(events.is_sorted_by(|a, b| a.number < b.number), "{events:?}");
    assert!(matches!(&events[3].what, Happening::Names(Record::Untag { tag, .. }) if tag.as_str() == "old"), "{events:?}");
    assert!(store.unjournaled(10).await.unwrap().is_empty() && store.note_collections().await.unwrap());
    assert_eq!(store.events(0, 100).await.unwrap().events, events, "each once");
}
