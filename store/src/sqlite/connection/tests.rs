//! What the connections promise when callers go away and when the disk is full.

use super::*;
use futures::FutureExt as _;
use std::sync::mpsc::channel;

async fn on_disk(dir: &tempfile::TempDir) -> Database {
    Database::open(Some(dir.path().join("metadata.sqlite"))).await.expect("a new file")
}

fn fail(error: rusqlite::Error) -> Error {
    Error::metadata(&error)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_nobody_waits_for_any_more_still_count() {
    let dir = tempfile::tempdir().expect("a directory");
    let database = on_disk(&dir).await;
    let readers = Arc::clone(database.readers.as_ref().expect("a file has readers"));
    let (begun, begins) = channel();
    let mut gates = Vec::new();
    for _ in 0..READERS {
        let (open, gate) = channel::<()>();
        gates.push(open);
        let begun = begun.clone();
        let mut read = Box::pin(database.read(move |_| {
            begun.send(()).unwrap_or_default();
            gate.recv().unwrap_or_default();
            Ok(())
        }));
        assert!((&mut read).now_or_never().is_none());
        tokio::task::block_in_place(|| begins.recv()).expect("it begins");
        // Its caller has gone.
        drop(read);
    }
    assert_eq!(readers.permits.available_permits(), 0, "they all still read");
    let mut late = Box::pin(database.read(move |_| {
        begun.send(()).unwrap_or_default();
        Ok(())
    }));
    assert!((&mut late).now_or_never().is_none());
    drop(gates);
    late.await.expect("there is room again");
    drop(readers.permits.acquire_many(READERS as u32).await.expect("all are idle again"));
    assert!(readers.idle.lock().len() <= READERS);
}

#[tokio::test]
async fn a_transaction_that_sqlite_rolled_back_takes_no_later_one_along() {
    let dir = tempfile::tempdir().expect("a directory");
    let database = on_disk(&dir).await;
    database
        .write(|tx| {
            tx.execute_batch("CREATE TABLE filled (what TEXT, bytes BLOB)").map_err(fail)?;
            let pages: i64 = tx.query_row("PRAGMA page_count", [], |row| row.get(0)).map_err(fail)?;
            let limit: i64 = tx.query_row(&format!("PRAGMA max_page_count = {}", pages + 4), [], |row| row.get(0)).map_err(fail)?;
            assert!(limit <= pages + 4);
            Ok(())
        })
        .await
        .expect("the table is made");
    let (open, gate) = channel::<()>();
    let insert = |what: &'static str, bytes: usize, gate: Option<std::sync::mpsc::Receiver<()>>| {
        database.write(move |tx| {
            if let Some(gate) = gate {
                gate.recv().unwrap_or_default();
            }
            tx.execute("INSERT INTO filled VALUES (?1, zeroblob(?2))", rusqlite::params![what, bytes as i64]).map_err(fail)
        })
    };
    // The first one waits until all are in the queue: they come into one transaction.
    let mut jobs = [insert("first", 1, Some(gate)), insert("large", 1 << 20, None), insert("last", 1, None)].map(Box::pin);
    for job in &mut jobs {
        assert!(job.now_or_never().is_none());
    }
    drop(open);
    let [first, large, last] = jobs;
    let (first, large, last) = (first.await, large.await, last.await);
    assert!(matches!(large, Err(Error::Full(_))), "{large:?}");
    let found: Vec<String> = database
        .read(|tx| {
            let mut select = tx.prepare("SELECT what FROM filled ORDER BY what").map_err(fail)?;
            select.query_map([], |row| row.get(0)).and_then(Iterator::collect).map_err(fail)
        })
        .await
        .expect("it can be read");
    let promised: Vec<&str> =
        [("first", first.is_ok()), ("last", last.is_ok())].iter().filter(|(_, ok)| *ok).map(|(what, _)| *what).collect();
    assert_eq!(found, promised, "what is there against what was answered");
    assert_eq!(promised, ["last"], "what came after it is not its business");
}
