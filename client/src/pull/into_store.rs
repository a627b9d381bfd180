//! Pull into a local store.

use super::fetch::{Fetcher, IN_FLIGHT, Watched, batches, manifest_item};
use crate::boxed;
use crate::error::{Error, Result};
use crate::meter::Tally;
use crate::plain::as_blobs;
use crate::plan::{Item, Plan, PlanDestination, Totals, children, plan};
use crate::progress::{Phase, Progress};
use crate::remote::Remote;
use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use pfr_schema::frame::end_mark;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use pfr_store::{PushId, Store, document_frame};
use std::convert::Infallible;
use std::sync::Arc;

pub(super) async fn pull(
    fetcher: &Fetcher<'_>,
    digest: Digest,
    store: &Store,
    repository: &RepositoryName,
    tag: Option<Tag>,
) -> Result<Totals> {
    let push = store.open_push(repository).await?.id;
    let session = Session { fetcher, store, repository, push };
    let result = session.run(digest, tag).await;
    if result.is_err() {
        // What was stored stays until the next collection: the next try finds it.
        if let Err(error) = store.abort(&session.push).await {
            tracing::debug!(%error, "a local session stays open until its lease ends");
        }
    }
    result
}

/// Digests in one request of [`fetch_blobs`].
const REPAIR: usize = 1024;

/// Fetches blobs of a repository into a push session of a store, verified; how many came. Containers are taken as containers: give them after
/// what they list. Nothing becomes visible: what is stored already and whole stays where it is, what was missing or damaged is replaced.
///
/// # Errors
/// `blob_unknown` if the registry does not have one of them; `digest_mismatch` and its like for wrong bytes; [`Error::Unreachable`].
#[boxed]
pub async fn fetch_blobs(remote: &Remote, repository: &RepositoryName, digests: &[Digest], store: &Store, push: &PushId) -> Result<u64> {
    let progress = Progress::new();
    let fetcher = Fetcher::new(remote, repository, &progress);
    for part in digests.chunks(REPAIR) {
        let items: Arc<[Item]> = part.iter().map(|digest| Item { digest: *digest, kind: Kind::Blob, size: None }).collect();
        let tally = Tally::new(&progress);
        let Watched { frames, slot } = fetcher.frames(&items, &tally).await?;
        store.ingest(push, frames).await.map_err(|error| slot.take().unwrap_or_else(|| fetcher.received(error)))?;
        fetcher.count(&tally);
    }
    Ok(fetcher.blobs())
}

struct Session<'a> {
    fetcher: &'a Fetcher<'a>,
    store: &'a Store,
    repository: &'a RepositoryName,
    push: PushId,
}

impl Session<'_> {
    async fn run(&self, digest: Digest, tag: Option<Tag>) -> Result<Totals> {
        let progress = self.fetcher.progress;
        let Plan { blobs, containers } = plan(manifest_item(digest), self.fetcher, self, &self.fetcher.limits).await?;
        let totals = self.totals(digest, &containers).await?;
        progress.add_bytes_total(totals.bytes);
        progress.add_blobs_total(totals.blobs);
        let moving = blobs.iter().map(Item::bytes).sum::<u64>() + containers.iter().map(|d| d.bytes.len() as u64).sum::<u64>();
        progress.add_bytes_deduplicated(totals.bytes.saturating_sub(moving));
        progress.enter(Phase::Receiving);
        stream::iter(batches(blobs))
            .map(|batch| self.fetcher.until_all_there(batch, |left| self.receive(left)))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await?;
        progress.enter(Phase::Writing);
        self.accept(containers).await?;
        progress.enter(Phase::Committing);
        let committed = self.store.commit(&self.push, digest, tag, None).await?;
        if !committed.created {
            // It was here: eviction should know that somebody wanted it again.
            self.store.touch(self.repository, &digest).await?;
        }
        Ok(totals)
    }

    /// Fetches blobs into the store; what is left to fetch.
    async fn receive(&self, items: Arc<[Item]>) -> (Vec<Item>, Result<()>) {
        let tally = Tally::new(self.fetcher.progress);
        let result = self.ingest(&items, &tally).await;
        self.fetcher.count(&tally);
        if result.is_ok() {
            return (Vec::new(), result);
        }
        // What came whole was kept.
        tally.reset();
        match self.lacks(&items).await {
            Ok(left) => (left.into_iter().map(|i| items[i]).collect(), result),
            Err(error) => (items.to_vec(), Err(error)),
        }
    }

    async fn ingest(&self, items: &Arc<[Item]>, tally: &Arc<Tally>) -> Result<()> {
        let Watched { frames, slot } = self.fetcher.frames(items, tally).await?;
        match self.store.ingest(&self.push, as_blobs(frames, &self.fetcher.limits)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(slot.take().unwrap_or_else(|| self.fetcher.received(error))),
        }
    }

    /// Stores containers, children first, now that everything they list is there.
    async fn accept(&self, containers: Vec<Document>) -> Result<()> {
        if containers.is_empty() {
            return Ok(());
        }
        let end = Bytes::from(end_mark(containers.len() as u64));
        let frames = stream::iter(containers).map(|d| Ok::<_, Infallible>(document_frame(&d))).chain(stream::iter([Ok(end)]));
        self.store.ingest(&self.push, frames.boxed()).await.map_err(|e| self.fetcher.received(e)).map(|_| ())
    }

    /// Sums over the manifest and what of its layers lists more, from what was fetched and from what was here.
    async fn totals(&self, manifest: Digest, fetched: &[Document]) -> Result<Totals> {
        let manifest = self.document(manifest_item(manifest), fetched).await?;
        let mut documents = Vec::new();
        for item in children(&manifest, &self.fetcher.limits)? {
            if matches!(item.kind, Kind::Tree | Kind::Checkpoint) {
                documents.push(self.document(item, fetched).await?);
            }
        }
        documents.push(manifest);
        Totals::of(&documents, &self.fetcher.limits)
    }

    async fn document(&self, item: Item, fetched: &[Document]) -> Result<Document> {
        if let Some(document) = fetched.iter().find(|d| d.digest == item.digest) {
            return Ok(document.clone());
        }
        let bytes = self.store.read(&item.digest).await?.to_vec();
        Ok(Document { digest: item.digest, kind: item.kind, bytes })
    }
}

impl PlanDestination for Session<'_> {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        let wanted = items.iter().map(|item| (item.digest, item.kind)).collect();
        self.store.missing(&self.push, wanted).await.map_err(Error::from)
    }
}
