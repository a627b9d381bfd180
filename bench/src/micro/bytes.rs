//! Bytes through the store, in memory: verified ingest, and frames out.

use super::line;
use crate::Result;
use crate::contender::sibling;
use crate::workload::Workload;
use bytes::Bytes;
use futures::StreamExt as _;
use pfr_schema::Digest;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{self, Header};
use pfr_schema::{Kind, digest::Algorithm};
use pfr_store::{Options, Store};
use std::convert::Infallible;
use std::path::Path;
use std::time::Instant;

/// Bytes of a request's body, as clients send them.
const REQUEST: usize = 64 << 20;
/// Requests at a time.
const STREAMS: usize = 4;

pub async fn run(tmpfs: &Path, pages: usize, rounds: usize) -> Result<()> {
    let workload = Workload::prepare(pages, &sibling("pf-kv")?)?;
    let mut bodies: Vec<(Vec<Bytes>, Vec<Digest>)> = vec![Default::default()];
    let mut size = 0;
    for blob in &workload.base.blobs {
        let digest = Digest::from_bytes(Algorithm::Sha256, &blob.digest)?;
        let len = blob.len as u64;
        let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest, raw_len: len, stored_len: len };
        if size + blob.len > REQUEST {
            bodies.push(Default::default());
            size = 0;
        }
        size += blob.len;
        if let Some((pieces, digests)) = bodies.last_mut() {
            pieces.push(frame::encode(&header, &std::fs::read(&blob.path)?).into());
            digests.push(digest);
        }
    }
    for (pieces, digests) in &mut bodies {
        pieces.push(frame::end_mark(digests.len() as u64).into());
    }
    let gigabytes = workload.base.bytes() as f64 / 1e9;
    for streams in [1, STREAMS] {
        let (mut into, mut out) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let dir = tempfile::tempdir_in(tmpfs)?;
            let store = Store::open(dir.path(), Options::default()).await?;
            let push = store.open_push(&"bench/w".parse()?).await?.id;
            let start = Instant::now();
            each(streams, &bodies, |(pieces, _)| {
                let (store, push) = (store.clone(), push.clone());
                async move { store.ingest(&push, futures::stream::iter(pieces.into_iter().map(Ok::<_, Infallible>))).await.map(drop) }
            })
            .await?;
            into.push(gigabytes / start.elapsed().as_secs_f64());
            let start = Instant::now();
            each(streams, &bodies, |(_, digests)| {
                let store = store.clone();
                async move {
                    let mut frames = store.frames(digests).await?;
                    while let Some(piece) = frames.next().await {
                        drop(piece?);
                    }
                    Ok(())
                }
            })
            .await?;
            out.push(gigabytes / start.elapsed().as_secs_f64());
        }
        line(&format!("verified ingest on tmpfs, streams at a time: {streams}"), &into, "GB/s");
        line(&format!("frames out of tmpfs, streams at a time: {streams}"), &out, "GB/s");
    }
    Ok(())
}

/// Runs `work` on every body, `streams` at a time, each in a task of its own.
async fn each<T, F>(streams: usize, bodies: &[T], work: impl Fn(T) -> F) -> Result<()>
where
    T: Clone,
    F: Future<Output = pfr_store::Result<()>> + Send + 'static,
{
    let mut running = futures::stream::iter(bodies.iter().cloned()).map(|body| tokio::spawn(work(body))).buffer_unordered(streams);
    while let Some(done) = running.next().await {
        done??;
    }
    Ok(())
}
