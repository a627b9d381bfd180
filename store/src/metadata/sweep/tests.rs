//! Tests of what a set leaves in the queue.

use super::*;
use crate::Clock;
use crate::backends::SqliteMetadata;
use crate::metadata::tx::{Backend, Mode};
use pfr_schema::Digest;

const CONTAINERS: i64 = 3000;
/// Objects of a set. A node counts with the bytes of its list: two thirds of those found are
/// left.
const ROOM: usize = 100;

/// Nodes that list the same blob, in one pack, and the pack in the queue.
async fn fill(tx: &mut dyn Tx) -> Outcome<()> {
    let pack = "INSERT INTO packs (id, key, state, bytes, frame_bytes, live_bytes, keep_until) VALUES (1, 'p', 'live', $1, $1, $1, 0)";
    tx.execute(pack, values![CONTAINERS + 1]).await?;
    let ids = || 1..=CONTAINERS + 1;
    let child = |id: i64| id > CONTAINERS;
    let columns = vec![
        ids().collect(),
        ids().map(|id| Digest::sha256(&id.to_le_bytes())).collect(),
        ids().map(|id| if child(id) { Kind::Blob } else { Kind::Run }).collect(),
        ids().map(|id| if child(id) { CONTAINERS } else { 0 }).collect(),
    ];
    let objects = r#"INSERT INTO objects (id, digest, size, kind, refs, keep_until, pack, "offset", frame_len, codec)
        SELECT u.id, u.digest, 1, u.kind, u.refs, 0, 1, u.id, 1, 0
        FROM unnest($1::bigint[], $2::bytea[], $3::bigint[], $4::bigint[]) AS u(id, digest, kind, refs)"#;
    tx.execute_each(objects, columns, &[]).await?;
    let containers = "INSERT INTO containers (object, children, logical_bytes, new_bytes)
        SELECT u.id, u.children, 0, 0 FROM unnest($1::bigint[], $2::bytea[]) AS u(id, children)";
    let packed = children::pack(vec![CONTAINERS + 1]);
    let columns = vec![(1..=CONTAINERS).collect(), (1..=CONTAINERS).map(|_| packed.clone()).collect()];
    tx.execute_each(containers, columns, &[]).await?;
    tx.execute("INSERT INTO suspects (due, pack) VALUES (0, 1)", &[]).await.map(drop)
}

async fn count(tx: &mut dyn Tx) -> Outcome<(u64, u64)> {
    let objects = tx.one("SELECT count(*) FROM objects", &[]).await?;
    Ok((objects, tx.one("SELECT count(*) FROM suspects", &[]).await?))
}

/// Fills the tables and takes one set after the other. Returns the number of sets, the length of
/// the longest queue, and the number of objects that are left.
async fn sets(database: &dyn Backend) -> (i64, u64, u64) {
    database.run(Mode::WRITE, (), |tx, ()| Box::pin(fill(tx))).await.expect("rows");
    let (mut sets, mut longest) = (0, 0);
    loop {
        let done = database.run(Mode::WRITE, (), |tx, ()| Box::pin(set(tx, ROOM))).await.expect("a set");
        let (objects, queue) = database.run(Mode::WRITE, (), |tx, ()| Box::pin(count(tx))).await.expect("counts");
        sets += 1;
        longest = longest.max(queue);
        if !done.more {
            return (sets, longest, objects);
        }
    }
}

#[tokio::test]
async fn what_a_set_leaves_in_a_large_pack_does_not_fill_the_queue() {
    let database = SqliteMetadata::in_memory(Clock::system()).await.expect("in memory");
    let (sets, longest, objects) = sets(&database).await;
    assert!(sets > CONTAINERS / ROOM as i64, "{sets} sets: each took all that it found, so this tests nothing");
    assert!(longest <= ROOM as u64, "{longest} entries for {CONTAINERS} objects");
    assert_eq!(objects, 0);
}
