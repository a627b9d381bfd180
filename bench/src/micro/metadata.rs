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

/// Gives the position of a digest in the table, by its position in the request and the round.
type Place<'a> = &'a dyn Fn(usize, usize) -> usize;

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
    // A lease that a session has is not taken again: each case has a session of its own.
    let (later, last) = (PushId("later".into()), PushId("last".into()));
    for session in [&later, &last] {
        metadata.open_push(session.clone(), "bench/w".parse()?, LEASE).await?;
    }
    let step = (objects / ASKED).max(1);
    // Spread over the whole table, or one after the other as a push stores them. Each round takes
    // another part of it.
    let spread = |i: usize, round: usize| (i * step + round) % objects;
    let together = |i: usize, round: usize| (i + round * ASKED) % objects;
    let cases: [(&str, usize, &PushId, Place<'_>); 4] = [
        ("of which it has all", 0, &push, &spread),
        ("of which it has none", objects, &push, &spread),
        ("of which it has all, to be leased, stored together", 0, &later, &together),
        ("of which it has all, to be leased", 0, &last, &spread),
    ];
    let mut medians = Vec::new();
    for (what, first, session, place) in cases {
        let mut speeds = Vec::new();
        for round in 0..rounds {
            let wanted: Vec<(Digest, Kind)> = (0..ASKED.min(objects)).map(|i| (digest(first + place(i, round)), Kind::Blob)).collect();
            let count = wanted.len() as f64;
            let (took, _) = timed(metadata.missing(session.clone(), wanted, LEASE)).await?;
            speeds.push(count / took);
        }
        medians.push(line(&format!("{on}: missing, {ASKED} digests asked among {objects}, {what}"), &speeds, "digests/s"));
    }
    // The goal is about look-ups: a lease is a write, and waits for the disk.
    Ok(medians[0].min(medians[1]))
}
