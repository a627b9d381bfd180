//! The same push into a local store instead of a registry.

use super::Source;
use super::source::OpenedSource;
use crate::boxed;
use crate::encoding::Encoding;
use crate::error::{Error, Result};
use crate::local::LocalSession;
use crate::plan::{Above, Below, CHUNKS, Item, cut, plan_above, plan_below};
use crate::progress::{Phase, Progress};
use crate::slot::Slot;
use bytes::Bytes;
use futures::stream::{self, StreamExt as _};
use pfr_schema::api::Committed;
use pfr_schema::codec::Compression;
use pfr_schema::frame::end_mark;
use pfr_schema::{RepositoryName, Tag};
use pfr_store::Store;
use std::mem::take;

/// Raw bytes stored at a time. A crash loses at most so many.
const BATCH: u64 = 256 << 20;

/// Stores and commits a snapshot; the blobs of a directory are encoded as `compression` says.
/// Returns the commit, and the number of raw bytes that the store lacked.
///
/// # Errors
/// Those of the source; [`Error::WrongBytes`] for a file that is not what its name says,
/// [`Error::Store`] for what the store refuses.
#[boxed]
pub async fn push_into_store(
    source: &Source,
    store: &Store,
    repository: &RepositoryName,
    tag: Option<Tag>,
    compression: Compression,
    progress: &Progress,
) -> Result<(Committed, u64)> {
    progress.enter(Phase::Reading);
    let source = OpenedSource::open(source, &[]).await?;
    let totals = source.totals().await?;
    progress.begin(&totals);
    let encoding = Encoding::new(compression, store.options().codecs);
    let session = Session { source: &source, local: LocalSession::open(store, repository).await?, encoding, progress };
    session.local.end(session.run(tag, totals.bytes).await).await
}

struct Session<'a> {
    source: &'a OpenedSource,
    local: LocalSession<'a>,
    encoding: Encoding,
    progress: &'a Progress,
}

impl Session<'_> {
    async fn run(&self, tag: Option<Tag>, total: u64) -> Result<(Committed, u64)> {
        let (source, limits, manifest) = (self.source, self.source.limits(), self.source.manifest());
        let Above { plan: above, chunks } = plan_above(manifest, source, &self.local, limits).await?;
        let mut moved = above.bytes();
        // Bytes that are to be moved, or are here.
        let (mut known, mut blobs, mut nodes) = (moved, above.blobs, above.containers);
        let mut parts = chunks.chunks(CHUNKS).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let Below { plan: below, listed } = plan_below(part, &blobs, source, &self.local, limits).await?;
            let moving = below.bytes();
            self.progress.add_bytes_deduplicated(listed.saturating_sub(moving));
            (moved, known) = (moved.saturating_add(moving), known.saturating_add(listed.max(moving)));
            let is_last = parts.peek().is_none();
            if is_last {
                self.progress.add_bytes_deduplicated(total.saturating_sub(known));
            }
            self.progress.enter(Phase::Writing);
            blobs.extend(below.blobs);
            for batch in cut(take(&mut blobs), Item::bytes, BATCH) {
                self.blobs(batch).await?;
            }
            let mut accepted = below.containers;
            if is_last {
                accepted.append(&mut nodes);
            }
            self.local.accept(accepted).await?;
            if is_last {
                break;
            }
        }
        self.progress.enter(Phase::Committing);
        let committed = self.local.store.commit(&self.local.push, manifest.digest, tag, None).await?;
        self.progress.enter(Phase::Done);
        Ok((committed, moved))
    }

    async fn blobs(&self, items: Vec<Item>) -> Result<()> {
        let items = self.source.check(items).await?;
        let (slot, bytes) = (Slot::default(), items.iter().map(Item::bytes).sum());
        let end = Bytes::from(end_mark(items.len() as u64));
        let keep = slot.clone();
        let frames = self.source.blob_frames(items.into(), &self.encoding);
        let frames = frames.map(move |piece| piece.map_err(|e| keep.keep(e)));
        let frames = frames.chain(stream::iter([Ok(end)])).boxed();
        match self.local.store.ingest(&self.local.push, frames).await {
            Ok(_) => self.progress.add_bytes_done(bytes),
            Err(error) => return Err(slot.take().unwrap_or_else(|| self.explain(error))),
        }
        Ok(())
    }

    /// Names the file whose bytes the store refused.
    fn explain(&self, error: pfr_store::Error) -> Error {
        let pfr_store::Error::Frame { digest, source, .. } = &error else { return error.into() };
        let OpenedSource::Directory(directory) = self.source else { return error.into() };
        match directory.path_for_people(digest) {
            Some(path) => Error::WrongBytes { path, digest: *digest, code: source.code(), reason: source.to_string() },
            None => error.into(),
        }
    }
}
