//! Tests of what a pack of copies costs in SQLite.

use super::*;
use crate::Clock;
use crate::backends::SqliteMetadata;
use crate::metadata::Metadata as _;
use crate::metadata::tx::{AnyBackend, Backend, Mode};
use std::sync::Arc;

const FRAMES: i64 = 100;
/// The pack of all frames, the one that they are copied into, and another one.
const OLD: PackId = 1;
const NEW: PackId = 2;
const OTHER: PackId = 3;

async fn fill(tx: &mut dyn Tx) -> Outcome<()> {
    let pack =
        Sql::from("INSERT INTO packs (id, key, state, bytes, frame_bytes, live_bytes, keep_until) VALUES ($1, $2, $3, $4, $4, $4, 0)");
    tx.execute(pack, values![OLD, "old", "live", FRAMES]).await?;
    tx.execute(pack, values![NEW, "new", "writing", 0_i64]).await?;
    tx.execute(pack, values![OTHER, "other", "live", 0_i64]).await?;
    let columns = vec![(1..=FRAMES).collect(), (1..=FRAMES).map(|id| Digest::sha256(&id.to_le_bytes())).collect()];
    let objects = Sql::from(
        r#"INSERT INTO objects (id, digest, size, kind, refs, keep_until, pack, "offset", frame_len, codec)
        SELECT u.id, u.digest, 1, 0, 1, 0, 1, u.id, 1, 0 FROM unnest($1::bigint[], $2::bytea[]) AS u(id, digest)"#,
    );
    tx.execute_each(objects, columns, &[]).await.map(drop)
}

/// Copies of all frames. The first was copied out of a pack where its object is not any more.
fn copies() -> Vec<Moved> {
    let from = |object| if object == 1 { OTHER } else { OLD };
    (1..=FRAMES).map(|object| Moved { object, from: from(object), offset: 1000 + object as u64 }).collect()
}

/// How many objects lie in a pack, the sum of their offsets, and the pack's live bytes.
async fn inside(tx: &mut dyn Tx, pack: PackId) -> Outcome<(i64, i64, i64)> {
    let find = Sql::from(
        r#"SELECT COUNT(*), COALESCE(SUM(o."offset"), 0), MAX(p.live_bytes) FROM packs p LEFT JOIN objects o ON o.pack = p.id
                  WHERE p.id = $1"#,
    );
    tx.one(find, values![pack]).await
}

#[tokio::test]
async fn any_number_of_objects_is_pointed_to_its_copies_by_one_statement() {
    let sqlite = Arc::new(SqliteMetadata::in_memory(Clock::system()).await.expect("in memory"));
    let database = AnyBackend(Arc::clone(&sqlite) as Arc<dyn Backend>);
    database.0.run(Mode::WRITE, (), |tx, ()| Box::pin(fill(tx))).await.expect("rows");
    database.finish_compaction(NEW, PackSizes { bytes: 300, frame_bytes: 200 }, copies()).await.expect("copies");
    let found = database.0.run(Mode::WRITE, NEW, |tx, pack| Box::pin(inside(tx, *pack))).await.expect("the new pack");
    let offsets: i64 = (2..=FRAMES).map(|object| 1000 + object).sum();
    assert_eq!(found, (FRAMES - 1, offsets, FRAMES - 1));
    let found = database.0.run(Mode::WRITE, OLD, |tx, pack| Box::pin(inside(tx, *pack))).await.expect("the old pack");
    assert_eq!(found, (1, 1, 1), "the object that was copied from elsewhere stays");
    assert_eq!(sqlite.runs(REPOINT).await, 1, "one for each object takes quadratic time, and all transactions wait for the writer");
}
