//! Writes millions of rows straight into the tables, as many pushes would have left them, at the
//! speed of the disk.

use super::rows::{DOCUMENT_BYTES, PACK, PAGE_BYTES, StoredRun, digest, lengths, run_bytes, shape};
use crate::Result;
use pfr_schema::codec::Codec;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, Kind};
use pfr_store::PrefixMark;
use rusqlite::{CachedStatement, Connection, params};
use std::path::Path;

const OBJECT: &str = "INSERT INTO objects (id, digest, size, kind, refs, keep_until, pack, offset, frame_len, codec)
                      VALUES (?1, ?2, ?3, ?4, 1, 0, ?5, ?6, ?7, 0)";
const CONTAINER: &str = "INSERT INTO containers (object, children, pages, components, page_bytes, logical_bytes, new_bytes)
                         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6)";
const MANIFEST: &str = "INSERT INTO manifests (repository, object, pushed_at, used_at, logical_bytes, new_bytes, prefixed, agent)
                        VALUES (?1, ?2, 0, 0, ?3, ?3, 1, '')";
const PREFIX: &str = "INSERT INTO prefixes (repository, key, tokens, proof, manifest) VALUES (?1, ?2, ?3, ?4, ?5)";

/// Snapshots between two lines that say how far the writing is.
const SAID: usize = 100_000;

/// Fills tables that exist and are empty with snapshots of `per_snapshot` objects each. Returns the
/// number of objects, and a page chunk that other snapshots may list.
pub fn fill(path: &Path, repository: &str, objects: u64, per_snapshot: u64, run_pages: usize) -> Result<(u64, StoredRun)> {
    let (written, first) = write(path, &["objects"], |connection| {
        let (mut filler, mut first) = (Filler::new(connection, repository)?, None);
        while filler.id < objects {
            let own = filler.snapshot(per_snapshot.min(objects - filler.id).max(6), run_pages)?;
            first = first.or(own);
        }
        filler.close_pack()?;
        Ok((filler.id, first))
    })?;
    Ok((written, first.ok_or("no run was written")?))
}

/// A snapshot that has tokens and no pages.
pub struct Listing {
    /// How many tokens it has.
    pub tokens: u64,
    /// Its rows in the prefix index.
    pub marks: Vec<PrefixMark>,
}

/// Fills tables that exist and are empty with `snapshots`, of which there are `count`. Each has a
/// configuration and a list of tokens of its own.
pub fn fill_prefixes(path: &Path, repository: &str, count: usize, snapshots: impl Iterator<Item = Listing>) -> Result<()> {
    write(path, &["objects", "manifests", "prefixes"], |connection| {
        let (mut filler, mut rows) = (Filler::new(connection, repository)?, Vec::new());
        for (number, Listing { tokens, marks }) in snapshots.enumerate() {
            let manifest = filler.listing(tokens)?;
            rows.extend(marks.into_iter().map(|mark| (mark, manifest)));
            if (number + 1).is_multiple_of(SAID) {
                eprintln!("{} of {count} snapshots are in the tables", number + 1);
            }
        }
        filler.close_pack()?;
        // The table is its own index, which cannot be dropped: in its order, rows are appended.
        rows.sort_unstable();
        let mut insert = connection.prepare(PREFIX)?;
        for (mark, manifest) in &rows {
            insert.execute([filler.repository, mark.key, mark.tokens, mark.proof, *manifest])?;
        }
        eprintln!("{} rows are in the prefix index; next are the other indexes", rows.len());
        Ok(())
    })
}

/// Lets `rows` write to a database that nothing else uses, in one transaction, without waiting for
/// the disk, while the indexes of `tables` are not there.
fn write<T>(path: &Path, tables: &[&str], rows: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
    let connection = Connection::open(path)?;
    // The connection that made the tables may still be closing.
    let mut tries = 0;
    while let Err(error) = connection.execute_batch("PRAGMA journal_mode = OFF") {
        tries += 1;
        if tries > 200 {
            return Err(error.into());
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    connection.execute_batch("PRAGMA synchronous = OFF; PRAGMA cache_size = -500000; PRAGMA foreign_keys = OFF;")?;
    // Rows in order first, then each index sorted at once: random insertion would take an hour.
    let mut indexes: Vec<(String, String)> = Vec::new();
    for table in tables {
        let find = "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = ?1 AND sql IS NOT NULL";
        let mut find = connection.prepare(find)?;
        let found = find.query_map([*table], |row| Ok((row.get(0)?, row.get(1)?)))?.collect::<rusqlite::Result<Vec<(String, String)>>>()?;
        indexes.extend(found);
    }
    for (name, _) in &indexes {
        connection.execute_batch(&format!("DROP INDEX {name}"))?;
    }
    connection.execute_batch("BEGIN")?;
    let written = rows(&connection)?;
    connection.execute_batch("COMMIT; PRAGMA threads = 2;")?;
    for (_, statement) in &indexes {
        connection.execute_batch(statement)?;
    }
    connection.execute_batch("PRAGMA journal_mode = WAL;")?;
    Ok(written)
}

struct Filler<'a> {
    connection: &'a Connection,
    object: CachedStatement<'a>,
    container: CachedStatement<'a>,
    manifest: CachedStatement<'a>,
    /// Row id of the repository.
    repository: i64,
    id: u64,
    pack: i64,
    frames: usize,
    end: u64,
}

impl<'a> Filler<'a> {
    fn new(connection: &'a Connection, repository: &str) -> Result<Self> {
        connection.execute("INSERT INTO repositories (name) VALUES (?1)", [repository])?;
        Ok(Self {
            connection,
            object: connection.prepare_cached(OBJECT)?,
            container: connection.prepare_cached(CONTAINER)?,
            manifest: connection.prepare_cached(MANIFEST)?,
            repository: connection.last_insert_rowid(),
            id: 0,
            pack: 0,
            frames: 0,
            end: 8,
        })
    }

    /// Writes the next object. Returns its id.
    fn put(&mut self, kind: Kind, len: u64) -> Result<i64> {
        if self.frames == 0 {
            let key = uuid::Uuid::now_v7().to_string();
            self.connection.prepare_cached("INSERT INTO packs (key, state, keep_until) VALUES (?1, 'live', 0)")?.execute([key])?;
            self.pack = self.connection.last_insert_rowid();
        }
        self.id += 1;
        let digest: Digest = digest(self.id);
        let header = Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len };
        let frame_len = header.frame_len() as i64;
        self.object.execute(params![self.id as i64, digest.to_key(), len as i64, kind as i64, self.pack, self.end as i64, frame_len])?;
        self.end += header.frame_len();
        self.frames += 1;
        if self.frames == PACK {
            self.close_pack()?;
        }
        Ok(self.id as i64)
    }

    fn close_pack(&mut self) -> Result<()> {
        if self.frames > 0 {
            let (bytes, frame_bytes) = ((self.end + 40 * self.frames as u64) as i64, (self.end - 8) as i64);
            self.connection.prepare_cached("UPDATE packs SET bytes = ?1, frame_bytes = ?2, live_bytes = ?2 WHERE id = ?3")?.execute([
                bytes,
                frame_bytes,
                self.pack,
            ])?;
            self.connection.prepare_cached("INSERT INTO suspects (due, pack) VALUES (0, ?1)")?.execute([self.pack])?;
        }
        (self.frames, self.end) = (0, 8);
        Ok(())
    }

    fn contain(&mut self, object: i64, children: &[i64], pages: Option<usize>, reach: u64) -> Result<()> {
        let shape = pages.map(shape);
        self.container.execute(params![
            object,
            packed(children),
            shape.map(|s| s.pages),
            shape.map(|s| s.components),
            shape.map(|s| s.page_bytes as i64),
            reach as i64
        ])?;
        Ok(())
    }

    fn snapshot(&mut self, objects: u64, run_pages: usize) -> Result<Option<StoredRun>> {
        let (mut runs, mut reach, mut first) = (Vec::new(), 0, None);
        for pages in lengths(objects, run_pages) {
            let children: Vec<i64> = (0..2 * pages).map(|_| self.put(Kind::Blob, PAGE_BYTES)).collect::<Result<_>>()?;
            let run = self.put(Kind::Run, run_bytes(pages))?;
            first = first.or(Some(StoredRun { digest: digest(self.id), shape: shape(pages) }));
            let below = 2 * pages as u64 * PAGE_BYTES;
            self.contain(run, &children, Some(pages), below)?;
            reach += below + run_bytes(pages);
            runs.push(run);
        }
        let config = self.put(Kind::Blob, DOCUMENT_BYTES)?;
        let tree = self.put(Kind::Tree, DOCUMENT_BYTES)?;
        self.contain(tree, &runs, None, reach)?;
        let manifest = self.put(Kind::Manifest, DOCUMENT_BYTES)?;
        reach += 2 * DOCUMENT_BYTES;
        self.contain(manifest, &[config, tree], None, reach)?;
        self.manifest.execute([self.repository, manifest, (reach + DOCUMENT_BYTES) as i64])?;
        Ok(first)
    }

    /// Writes a snapshot without pages. Returns the row id of its manifest.
    fn listing(&mut self, tokens: u64) -> Result<i64> {
        let (config, list) = (self.put(Kind::Blob, DOCUMENT_BYTES)?, self.put(Kind::Blob, 4 * tokens)?);
        let manifest = self.put(Kind::Manifest, DOCUMENT_BYTES)?;
        let reach = DOCUMENT_BYTES + 4 * tokens;
        self.contain(manifest, &[config, list], None, reach)?;
        self.manifest.execute([self.repository, manifest, (reach + DOCUMENT_BYTES) as i64])?;
        Ok(self.connection.last_insert_rowid())
    }
}

/// Ascending ids as varint differences, as the tables have them.
fn packed(ids: &[i64]) -> Vec<u8> {
    let (mut out, mut previous) = (Vec::with_capacity(ids.len() + 8), 0);
    for id in ids {
        let mut difference = (id - previous).unsigned_abs();
        while difference >= 0x80 {
            out.push((difference & 0x7f) as u8 | 0x80);
            difference >>= 7;
        }
        out.push(difference as u8);
        previous = *id;
    }
    out
}
