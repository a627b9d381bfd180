//! Upgrades of a database, and transactions that wait for something other than SQLite.

use super::*;
use crate::metadata::Lease;
use crate::metadata::sql::{Column, Sql, values};
use crate::metadata::tx::{Outcome, Tx};
use rusqlite::{Connection, StatementStatus};

#[tokio::test]
async fn a_database_of_each_version_keeps_its_leases_and_sessions() {
    let digest = format!("01{}", "07".repeat(32));
    let rows = format!(
        "INSERT INTO repositories (id, domain, name) VALUES (1, 1, 'a');
         INSERT INTO pushes (id, repository, expires) VALUES ('later', 1, 200), ('sooner', 1, 100);
         INSERT INTO packs (id, key, state, keep_until) VALUES (1, 'p', 'live', 0);
         INSERT INTO objects (id, domain, digest, size, kind, keep_until, pack, offset, frame_len, codec) VALUES (7, 1, x'{digest}', 1, 0, 150, 1, 8, 1, 0);
         INSERT INTO manifests (id, repository, object, pushed_at, used_at, logical_bytes, new_bytes) VALUES (3, 1, 7, 1, 1, 1, 1);
         INSERT INTO suspects (due, pack) VALUES (150, 1);
         INSERT INTO suspects (due, object) VALUES (150, 7);",
    );
    let migrations = migrations!("sqlite");
    for version in 1..migrations.len() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("metadata.sqlite");
        let old = Connection::open(&path).expect("a file");
        for (number, (name, migration)) in (1..=version).zip(&migrations) {
            old.execute_batch(migration).unwrap_or_else(|e| panic!("{name}: {e}"));
            if number == 1 {
                old.execute_batch(&rows).expect("rows");
            }
        }
        old.execute_batch(&format!("PRAGMA user_version = {version}")).expect("a version");
        drop(old);
        let metadata = SqliteMetadata::open(&path, Clock::new(|| 90)).await.expect("the new version");
        let open = metadata.unfinished(10).await.expect("sessions");
        let open: Vec<(i64, u64)> = open.iter().map(|session| (session.session, session.until)).collect();
        assert_eq!(open, [(1, 100), (2, 200)], "from version {version}");
        let leases = metadata.leases(vec![7]).await.expect("leases");
        assert_eq!(leases, [(7, Lease { until: 150, session: None })], "from version {version}");
        let queue = metadata.queue(false, 10).await.expect("the queue");
        assert_eq!(queue.iter().map(|entry| entry.released).collect::<Vec<_>>(), [true, false], "from version {version}");
        let unprefixed = metadata.unprefixed(0, 10).await.expect("snapshots");
        let unprefixed: Vec<(i64, String)> = unprefixed.iter().map(|(id, digest)| (*id, digest.hex())).collect();
        assert_eq!(unprefixed, [(3, "07".repeat(32))], "from version {version}");
    }
}

#[tokio::test]
async fn a_transaction_that_waits_for_something_else_is_refused() {
    let metadata: &dyn Backend = &SqliteMetadata::in_memory(Clock::system()).await.expect("in memory");
    let waits = metadata.run(Mode::WRITE, (), |_, ()| Box::pin(std::future::pending::<crate::metadata::tx::Outcome<()>>())).await;
    assert!(matches!(waits, Err(Error::Internal(_))), "{waits:?}");
}

#[tokio::test]
async fn a_statement_for_many_rows_gets_them_in_their_order_and_not_those_of_the_time_before() {
    const WALK: Sql = Sql::at_once("", "SELECT a.rowid - 1, quote(a.value) FROM rarray($1) AS a WHERE $2 = 7");
    async fn walk(tx: &mut dyn Tx) -> Outcome<Vec<Vec<(i64, String)>>> {
        let columns: [Column; 6] = [
            [5_i64, -1].into_iter().collect(),
            [None, Some(5_i64)].into_iter().collect(),
            [false, true].into_iter().collect(),
            ["a".to_owned(), "b".to_owned()].into_iter().collect(),
            [vec![7_u8, 0], vec![9]].into_iter().collect(),
            Column::Ints(Vec::new()),
        ];
        let mut found = Vec::new();
        for column in columns {
            found.push(tx.rows(WALK, vec![column], values![7_i64], false).await?);
        }
        Ok(found)
    }
    let metadata: &dyn Backend = &SqliteMetadata::in_memory(Clock::system()).await.expect("in memory");
    let found = metadata.run(Mode::READ, (), |tx, ()| Box::pin(walk(tx))).await.expect("rows");
    let rows = |first: &str, second: &str| vec![(0, first.to_owned()), (1, second.to_owned())];
    let expected = [rows("5", "-1"), rows("NULL", "5"), rows("0", "1"), rows("'a'", "'b'"), rows("X'0700'", "X'09'"), Vec::new()];
    assert_eq!(found, expected);
}

impl SqliteMetadata {
    /// How often the writer ran a statement.
    pub(crate) async fn runs(&self, statement: &str) -> i32 {
        let statement = statement.replace('$', "?");
        let count = self.database.write(Box::new(move |tx| {
            let statement = tx.prepare_cached(&statement).map_err(|e| Error::metadata(&e))?;
            Ok(Box::new(statement.get_status(StatementStatus::Run)))
        }));
        *count.await.expect("a count").downcast().expect("a number")
    }
}

/// `.cargo/config.toml` says why: all readers would wait for each other at every page.
#[test]
fn connections_share_neither_pages_nor_a_count_of_memory() {
    let connection = Connection::open_in_memory().expect("in memory");
    let mut statement = connection.prepare("PRAGMA compile_options").expect("a statement");
    let options = statement.query_map([], |row| row.get(0)).expect("options");
    let options: Vec<String> = options.collect::<rusqlite::Result<_>>().expect("texts");
    assert!(!options.iter().any(|option| option == "ENABLE_MEMORY_MANAGEMENT"), "{options:?}");
    assert!(options.iter().any(|option| option == "DEFAULT_MEMSTATUS=0"), "{options:?}");
}

/// A process of the version before events runs these statements, beside one of this version.
#[tokio::test]
async fn what_a_process_of_the_version_before_journals_is_an_event_too() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("metadata.sqlite");
    let metadata = SqliteMetadata::open(&path, Clock::system()).await.expect("a database");
    let old = Connection::open(&path).expect("a second process");
    let change = |tag: &str| {
        let insert = format!(r#"INSERT INTO changes (record) VALUES ('{{"op":"untag","repository":"a","tag":"{tag}"}}')"#);
        old.execute(&insert, []).expect("a change");
        old.execute("DELETE FROM changes WHERE seq BETWEEN 1 AND 1000", []).expect("it is journaled");
    };
    change("before");
    assert_eq!(metadata.events(0, 10).await.expect("a look").log, None, "nothing is kept without a reader");
    metadata.begin_events("epoch".into()).await.expect("a log");
    change("after");
    let events = metadata.events(0, 10).await.expect("events").events;
    assert_eq!(events.iter().map(|event| event.number).collect::<Vec<_>>(), [2]);
}
