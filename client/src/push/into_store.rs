//! The same push into a local store instead of a registry.

use crate::boxed;
use crate::directory::{Directory, frames};
use crate::error::{Error, Result};
use crate::plan::{Item, Plan, PlanDestination, cut, plan};
use crate::progress::{Phase, Progress};
use crate::slot::Slot;
use bytes::Bytes;
use futures::stream::{self, StreamExt as _};
use pfr_schema::api::Committed;
use pfr_schema::frame::end_mark;
use pfr_schema::tree::Document;
use pfr_schema::{Kind, RepositoryName, Tag};
use pfr_store::{PushId, Store, document_frame};
use std::convert::Infallible;
use std::sync::Arc;

/// Raw bytes taken in at a time: what a cut leaves to be done again.
const BATCH: u64 = 256 << 20;

/// Stores and commits a directory that was read. Returns the commit, and how many raw bytes the store lacked.
///
/// # Errors
/// [`Error::WrongBytes`] for a file that is not what its name says, [`Error::Store`] for what the store refuses.
#[boxed]
pub async fn push_into_store(
    directory: &Arc<Directory>,
    store: &Store,
    repository: &RepositoryName,
    tag: Tag,
    progress: &Progress,
) -> Result<(Committed, u64)> {
    progress.enter(Phase::Reading);
    let totals = directory.totals()?;
    progress.add_bytes_total(totals.bytes);
    progress.add_blobs_total(totals.blobs);
    let push = store.open_push(repository).await?.id;
    let session = Session { directory, store, push, progress };
    let result = session.run(tag, totals.bytes).await;
    if result.is_err() {
        // What was stored stays until the next collection: the next try finds it.
        if let Err(error) = store.abort(&session.push).await {
            tracing::debug!(%error, "a local session stays open until its lease ends");
        }
    }
    result
}

struct Session<'a> {
    directory: &'a Arc<Directory>,
    store: &'a Store,
    push: PushId,
    progress: &'a Progress,
}

impl Session<'_> {
    async fn run(&self, tag: Tag, total: u64) -> Result<(Committed, u64)> {
        let manifest = Item { digest: self.directory.digest(), kind: Kind::Manifest, size: None };
        let plan = plan(manifest, &**self.directory, self, self.directory.limits()).await?;
        let moving = plan.bytes();
        self.progress.add_bytes_deduplicated(total.saturating_sub(moving));
        self.progress.enter(Phase::Writing);
        let Plan { blobs, containers } = plan;
        for batch in cut(blobs, Item::bytes, BATCH) {
            self.blobs(batch).await?;
        }
        self.containers(containers).await?;
        self.progress.enter(Phase::Committing);
        let committed = self.store.commit(&self.push, manifest.digest, Some(tag), None).await?;
        self.progress.enter(Phase::Done);
        Ok((committed, moving))
    }

    async fn blobs(&self, items: Vec<Item>) -> Result<()> {
        let (slot, bytes) = (Slot::default(), items.iter().map(Item::bytes).sum());
        let end = Bytes::from(end_mark(items.len() as u64));
        let keep = slot.clone();
        let frames = frames::frames(Arc::clone(self.directory), items.into()).map(move |piece| piece.map_err(|e| keep.keep(e)));
        let frames = frames.chain(stream::iter([Ok(end)])).boxed();
        match self.store.ingest(&self.push, frames).await {
            Ok(_) => self.progress.add_bytes_done(bytes),
            Err(error) => return Err(slot.take().unwrap_or_else(|| self.explain(error))),
        }
        Ok(())
    }

    async fn containers(&self, containers: Vec<Document>) -> Result<()> {
        if containers.is_empty() {
            return Ok(());
        }
        let end = Bytes::from(end_mark(containers.len() as u64));
        let frames = stream::iter(containers).map(|d| Ok::<_, Infallible>(document_frame(&d))).chain(stream::iter([Ok(end)]));
        self.store.ingest(&self.push, frames.boxed()).await?;
        Ok(())
    }

    /// Names the file behind the store's complaint about bytes.
    fn explain(&self, error: pfr_store::Error) -> Error {
        let pfr_store::Error::Frame { digest, source, .. } = &error else { return error.into() };
        match self.directory.path_for_people(digest) {
            Some(path) => Error::WrongBytes { path, digest: *digest, code: source.code(), reason: source.to_string() },
            None => error.into(),
        }
    }
}

impl PlanDestination for Session<'_> {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        let wanted = items.iter().map(|item| (item.digest, item.kind)).collect();
        self.store.missing(&self.push, wanted).await.map_err(Error::from)
    }
}
