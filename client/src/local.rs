//! A push session of a local store: what a pull into the store and a push into it have in common.

use crate::error::{Error, Result};
use crate::plan::{Item, PlanDestination};
use futures::stream::{self, StreamExt as _};
use pfr_schema::RepositoryName;
use pfr_schema::frame::end_mark;
use pfr_schema::tree::Document;
use pfr_store::{LivePush, Store, document_frame};
use std::convert::Infallible;

pub(crate) struct LocalSession<'a> {
    pub store: &'a Store,
    pub push: LivePush,
}

impl<'a> LocalSession<'a> {
    pub async fn open(store: &'a Store, repository: &RepositoryName) -> Result<Self> {
        Ok(Self { store, push: store.open_push(repository).await?.id })
    }

    /// Ends the session if its work failed. Stored blobs stay until the next collection, so that
    /// the next try finds them.
    pub async fn end<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err()
            && let Err(error) = self.store.abort(&self.push).await
        {
            tracing::debug!(%error, "a local session stays open until its lease ends");
        }
        result
    }

    /// Stores nodes, children first, once everything that they list is stored.
    pub async fn accept(&self, containers: Vec<Document>) -> Result<()> {
        if !containers.is_empty() {
            let end = end_mark(containers.len() as u64).into();
            let frames = stream::iter(containers).map(|d| Ok::<_, Infallible>(document_frame(&d))).chain(stream::iter([Ok(end)]));
            self.store.ingest(&self.push, frames.boxed()).await?;
        }
        Ok(())
    }
}

impl PlanDestination for LocalSession<'_> {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        let wanted = items.iter().map(|item| (item.digest, item.kind)).collect();
        self.store.missing(&self.push, wanted).await.map_err(Error::from)
    }
}
