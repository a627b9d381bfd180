//! Pull into a local store.

use super::fetch::{Fetcher, IN_FLIGHT, Watched, batches};
use super::{Counted, Lacking};
use crate::error::Result;
use crate::local::LocalSession;
use crate::meter::Tally;
use crate::plain::as_blobs;
use crate::plan::{Above, Below, CHUNKS, Item, Plan, PlanDestination, Totals, children, plan_above, plan_below};
use crate::progress::Phase;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use pfr_schema::api::TagState;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, RepositoryName, Tag};
use pfr_store::Store;
use std::mem::take;
use std::sync::Arc;

pub(super) async fn pull(
    fetcher: &Fetcher<'_>,
    digest: Digest,
    store: &Store,
    repository: &RepositoryName,
    tag: Option<Tag>,
) -> Result<Totals> {
    let session = Session { fetcher, repository, local: LocalSession::open(store, repository).await? };
    session.local.end(session.run(digest, tag).await).await
}

/// What a pull would fetch that is not counted yet, and what it counts. The session takes leases on
/// what is here, and ends at once.
pub(super) async fn lacking(
    fetcher: &Fetcher<'_>,
    digest: Digest,
    store: &Store,
    repository: &RepositoryName,
    counted: &Counted,
) -> Result<(Lacking, Counted)> {
    let session = Session { fetcher, repository, local: LocalSession::open(store, repository).await? };
    let found = session.lacking(digest, counted).await;
    if let Err(error) = store.abort(&session.local.push).await {
        tracing::debug!(%error, "a local session stays open until its lease ends");
    }
    found
}

pub(super) struct Session<'a> {
    pub fetcher: &'a Fetcher<'a>,
    pub repository: &'a RepositoryName,
    pub local: LocalSession<'a>,
}

impl Session<'_> {
    async fn run(&self, digest: Digest, tag: Option<Tag>) -> Result<Totals> {
        let (fetcher, progress) = (self.fetcher, self.fetcher.progress);
        let Above { plan: above, chunks } = plan_above(Item::manifest(digest), fetcher, &self.local, &fetcher.limits).await?;
        let totals = self.totals(digest, &above.containers).await?;
        progress.begin(&totals);
        // Bytes that are to be moved, or are here.
        let mut known = above.bytes();
        let mut blobs = above.blobs;
        let mut parts = chunks.chunks(CHUNKS).peekable();
        loop {
            let part = parts.next().unwrap_or_default();
            let Below { plan: below, listed } = plan_below(part, &blobs, fetcher, &self.local, &fetcher.limits).await?;
            let moving = below.bytes();
            progress.add_bytes_deduplicated(listed.saturating_sub(moving));
            known = known.saturating_add(listed.max(moving));
            let is_last = parts.peek().is_none();
            if is_last {
                progress.add_bytes_deduplicated(totals.bytes.saturating_sub(known));
            }
            blobs.extend(below.blobs);
            self.fetch(take(&mut blobs)).await?;
            let mut nodes = below.containers;
            if is_last {
                nodes.extend(above.containers);
                self.publish(nodes, digest, tag, None).await?;
                return Ok(totals);
            }
            // Their pages are here. The trees, which list them, come last.
            fetcher.release(bytes_of(&nodes));
            self.local.accept(nodes).await?;
        }
    }

    async fn lacking(&self, digest: Digest, counted: &Counted) -> Result<(Lacking, Counted)> {
        let fetcher = self.fetcher;
        let Above { plan: above, mut chunks } = plan_above(Item::manifest(digest), fetcher, &self.local, &fetcher.limits).await?;
        let totals = self.totals(digest, &above.containers).await?;
        let (mut new, mut lacking) = (Counted::default(), Lacking { bytes_total: totals.bytes, ..Lacking::default() });
        let mut count = |plan: &Plan| {
            let blobs = plan.blobs.iter().map(|item| (&item.digest, false, item.bytes()));
            let nodes = plan.containers.iter().map(|document| (&document.digest, true, document.bytes.len() as u64));
            for (digest, is_node, bytes) in blobs.chain(nodes) {
                if !counted.has(digest, is_node) && new.insert(digest, is_node) {
                    lacking.blobs += 1;
                    lacking.bytes = lacking.bytes.saturating_add(bytes);
                }
            }
        };
        count(&above);
        // The pages of a page chunk that is counted are counted, too.
        chunks.retain(|chunk| !counted.has(&chunk.digest, true));
        for part in chunks.chunks(CHUNKS) {
            let below = plan_below(part, &[], fetcher, &self.local, &fetcher.limits).await?.plan;
            count(&below);
            fetcher.release(bytes_of(&below.containers));
        }
        Ok((lacking, new))
    }

    /// Fetches blobs into the store.
    pub async fn fetch(&self, blobs: Vec<Item>) -> Result<()> {
        self.fetcher.progress.enter(Phase::Receiving);
        stream::iter(batches(blobs))
            .map(|batch| self.fetcher.fetch_all(batch, |left| self.receive(left)))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await
    }

    /// Stores the nodes, and makes the snapshot visible: everything else that it lists is here. The
    /// tag stays if it is not where it should be.
    pub async fn publish(&self, containers: Vec<Document>, digest: Digest, tag: Option<Tag>, if_tag_is: Option<TagState>) -> Result<()> {
        let progress = self.fetcher.progress;
        progress.enter(Phase::Writing);
        self.local.accept(containers).await?;
        progress.enter(Phase::Committing);
        let LocalSession { store, push } = &self.local;
        let committed = match store.commit(push, digest, tag, if_tag_is).await {
            Err(pfr_store::Error::TagMoved { .. }) => store.commit(push, digest, None, None).await?,
            committed => committed?,
        };
        if !committed.created {
            // The snapshot was here before. For eviction it counts as used again.
            store.touch(self.repository, &digest).await?;
        }
        Ok(())
    }

    /// Fetches blobs into the store, and returns those still to fetch.
    async fn receive(&self, items: Arc<[Item]>) -> (Vec<Item>, Result<()>) {
        let tally = Tally::new(self.fetcher.progress);
        let result = self.ingest(&items, &tally).await;
        self.fetcher.count(&tally);
        if result.is_ok() {
            return (Vec::new(), result);
        }
        // Complete frames were stored.
        tally.reset();
        match self.local.lacks(&items).await {
            Ok(left) => (left.into_iter().map(|i| items[i]).collect(), result),
            Err(error) => (items.to_vec(), Err(error)),
        }
    }

    async fn ingest(&self, items: &Arc<[Item]>, tally: &Arc<Tally>) -> Result<()> {
        let LocalSession { store, push } = &self.local;
        let Watched { frames, slot } = self.fetcher.frames(items, store.options().codecs, tally).await?;
        let stored = store.ingest(push, as_blobs(frames, &self.fetcher.limits)).await;
        stored.map(|_| ()).map_err(|error| self.fetcher.remote.received(&slot, error))
    }

    /// Sums over the manifest, page trees and checkpoints, fetched now or stored before.
    async fn totals(&self, manifest: Digest, fetched: &[Document]) -> Result<Totals> {
        let manifest = self.document(Item::manifest(manifest), fetched).await?;
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
        let bytes = self.local.store.read(&item.digest).await?.to_vec();
        Ok(Document { digest: item.digest, kind: item.kind, bytes })
    }
}

fn bytes_of(documents: &[Document]) -> u64 {
    documents.iter().map(|document| document.bytes.len() as u64).sum()
}
