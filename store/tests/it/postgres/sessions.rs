//! Sessions that are opened while other transactions read which sessions live.

use super::{LEASE, collect_all, connect, frames, unique, upload};
use crate::common::repository;
use pfr_schema::Kind;
use pfr_store::PushId;
use pfr_testkit::postgres;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, raw_sql};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

/// Waits until so many sessions of the database wait for locks, or the work is done.
pub async fn until_waiting<T>(url: &str, count: u32, work: &JoinHandle<T>) {
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while !work.is_finished() && postgres::sql(url, waiting).parse::<u32>().unwrap() < count {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn say(connection: &mut PgConnection, words: String) {
    raw_sql(AssertSqlSafe(words)).execute(connection).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_are_opened_at_the_same_time_become_visible_in_the_order_of_their_numbers() {
    let url = postgres::database();
    let store = connect(&url).await;
    // It makes the repository.
    store.open_push(PushId(unique("push")), repository(), LEASE).await.unwrap();
    // The first has its number, and its commit waits for the other connection.
    let linger =
        "CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$;
                  CREATE CONSTRAINT TRIGGER linger AFTER INSERT ON pushes DEFERRABLE INITIALLY DEFERRED
                    FOR EACH ROW WHEN (NEW.id = 'first') EXECUTE FUNCTION linger()";
    drop(postgres::sql(&url, linger));
    let mut stranger = PgConnection::connect(&url).await.unwrap();
    say(&mut stranger, "SELECT pg_advisory_lock(7)".into()).await;
    let open = |id: &str| {
        let (store, id) = (Arc::clone(&store), PushId(id.into()));
        tokio::spawn(async move { store.open_push(id, repository(), LEASE).await })
    };
    let first = open("first");
    until_waiting(&url, 1, &first).await;
    let second = open("second");
    until_waiting(&url, 2, &second).await;
    assert!(!first.is_finished() && !second.is_finished(), "the second is visible, and the first, which is older, is not");
    say(&mut stranger, "SELECT pg_advisory_unlock(7)".into()).await;
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    let number = |id| postgres::sql(&url, &format!("SELECT number FROM pushes WHERE id = '{id}'")).parse::<u64>().unwrap();
    assert!(number("first") < number("second"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lease_of_a_newer_session_is_not_overwritten_by_an_older_one_that_does_not_see_it() {
    let url = postgres::database();
    let store = connect(&url).await;
    let (frames, _) = frames(&[1]);
    let (over, _) = upload(&*store, &frames, LEASE).await.unwrap();
    store.close_push(over).await.unwrap();
    let page = frames[0].header.digest;
    let object = store.find(vec![page]).await.unwrap()[0].as_ref().unwrap().id;
    let (old, new) = (PushId(unique("push")), PushId(unique("push")));
    store.open_push(old.clone(), repository(), LEASE).await.unwrap();
    // The old session asks, and waits for the object. It does not see what is opened meanwhile.
    let mut stranger = PgConnection::connect(&url).await.unwrap();
    say(&mut stranger, format!("BEGIN; SELECT 1 FROM objects WHERE id = {object} FOR UPDATE")).await;
    let asking = tokio::spawn({
        let (store, old) = (Arc::clone(&store), old.clone());
        async move { store.missing(old, vec![(page, Kind::Blob)], LEASE).await }
    });
    until_waiting(&url, 1, &asking).await;
    assert!(!asking.is_finished(), "it did not wait for the object: this tests nothing");
    store.open_push(new.clone(), repository(), LEASE).await.unwrap();
    let lease = format!("UPDATE objects SET lessee = (SELECT number FROM pushes WHERE id = '{new}') WHERE id = {object}; COMMIT");
    say(&mut stranger, lease).await;
    assert!(asking.await.unwrap().unwrap().is_empty());
    store.close_push(old).await.unwrap();
    collect_all(&*store, 1000).await.unwrap();
    assert!(store.find(vec![page]).await.unwrap()[0].is_some(), "the new session still leases it");
    store.close_push(new).await.unwrap();
    collect_all(&*store, 1000).await.unwrap();
    assert!(store.find(vec![page]).await.unwrap()[0].is_none());
}
