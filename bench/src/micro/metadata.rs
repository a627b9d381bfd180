//! Metadata: inserts and look-ups at size, on SQLite and on PostgreSQL.

use super::{line, timed};
use crate::Result;
use pfr_schema::codec::Codec;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, Kind};
use pfr_store::{Clock, Metadata, NewFrame, PackSizes, PostgresMetadata, PostgresOptions, PushId, SqliteMetadata};
use pfr_testkit::postgres::Cluster;
use std::path::Path;
use std::time::Duration;

/// Frames of a full pack of TinyLlama pages.
const PACK: usize = 372;
/// Digests in one request.
const ASKED: usize = 50_000;
const LEASE: Duration = Duration::from_secs(3600);

/// On SQLite, in a file below `disk`. Returns how many digests a second `missing` answers, the
/// slower of having and lacking.
pub async fn sqlite(disk: &Path, objects: usize, rounds: usize) -> Result<f64> {
    let dir = tempfile::tempdir_in(disk)?;
    let metadata = SqliteMetadata::open(&dir.path().join("metadata.sqlite"), Clock::system()).await?;
    measure(&*metadata, "SQLite", objects, rounds).await
}

/// The same on a PostgreSQL server of its own, which syncs as in production. Its files are in the
/// system's temporary directory until this returns.
pub async fn postgres(objects: usize, rounds: usize) -> Result<f64> {
    let cluster = tokio::task::spawn_blocking(Cluster::start).await?;
    let metadata = PostgresMetadata::connect(&cluster.create_database(), PostgresOptions::default()).await?;
    measure(&*metadata, "PostgreSQL", objects, rounds).await
}

async fn measure(metadata: &dyn Metadata, on: &str, objects: usize, rounds: usize) -> Result<f64> {
    let push = PushId("bench".into());
    metadata.open_push(push.clone(), "bench/w".parse()?, LEASE).await?;
    let digest = |number: usize| Digest::sha256(&number.to_le_bytes());
    let (mut insert, mut seconds, mut inserted) = (Vec::new(), 0.0, 0);
    let numbers: Vec<usize> = (0..objects).collect();
    for (number, part) in numbers.chunks(PACK).enumerate() {
        let header = |i: &usize| Header { codec: Codec::Raw, kind: Kind::Blob, digest: digest(*i), raw_len: 180_224, stored_len: 180_224 };
        let frame = |(at, i)| NewFrame { header: header(i), offset: 8 + at as u64 * 180_288, container: None };
        let frames: Vec<NewFrame> = part.iter().enumerate().map(frame).collect();
        let pack = metadata.begin_pack(format!("bench-{number}"), LEASE).await?;
        let (took, _) =
            timed(metadata.finish_pack(push.clone(), pack, PackSizes { bytes: 64 << 20, frame_bytes: 64 << 20 }, frames, LEASE)).await?;
        (seconds, inserted) = (seconds + took, inserted + part.len());
        if inserted >= objects / 5 || number * PACK + part.len() == objects {
            insert.push(inserted as f64 / seconds);
            (seconds, inserted) = (0.0, 0);
        }
    }
    line(&format!("{on}: insert through finish_pack, {PACK} a transaction, fsync each, up to {objects} objects"), &insert, "objects/s");
    let mut slowest = f64::MAX;
    for (what, first) in [("of which it has all", 0), ("of which it has none", objects)] {
        let mut speeds = Vec::new();
        for round in 0..rounds {
            // Spread over the whole table, another part of it every round.
            let step = (objects / ASKED).max(1);
            let wanted: Vec<(Digest, Kind)> =
                (0..ASKED.min(objects)).map(|i| (digest(first + (i * step + round) % objects), Kind::Blob)).collect();
            let count = wanted.len() as f64;
            let (took, _) = timed(metadata.missing(push.clone(), wanted, LEASE)).await?;
            speeds.push(count / took);
        }
        slowest = slowest.min(line(&format!("{on}: missing, {ASKED} digests asked among {objects}, {what}"), &speeds, "digests/s"));
    }
    Ok(slowest)
}
