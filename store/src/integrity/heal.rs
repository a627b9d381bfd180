//! Replaces damaged blobs by those of a good copy.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::Health;
use bytes::Bytes;
use futures::Stream;
use pfr_schema::{Digest, RepositoryName};

impl Store {
    /// Takes in frames of damaged blobs of a repository (children before the nodes that list them,
    /// with an end mark), verified as any upload; returns how many blobs are healed. Call
    /// [`Self::reassess`] when all is taken in.
    ///
    /// # Errors
    /// Those of [`Self::ingest`].
    pub async fn heal<S, E>(&self, repository: &RepositoryName, digests: &[Digest], stream: S) -> Result<u64>
    where
        S: Stream<Item = std::result::Result<Bytes, E>> + Send + Unpin,
        E: std::fmt::Display,
    {
        let before = self.count_damaged(digests).await?;
        let session = self.open_push(repository).await?;
        let taken = self.ingest(&session.id, stream).await;
        self.abort(&session.id).await?;
        taken?;
        Ok(before.saturating_sub(self.count_damaged(digests).await?))
    }

    /// Clears the marks of nodes below which everything is healed; returns how many.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn reassess(&self) -> Result<u64> {
        self.metadata.reassess().await
    }

    async fn count_damaged(&self, digests: &[Digest]) -> Result<u64> {
        let locations = self.metadata.locate(digests.to_vec()).await?;
        let damaged = locations.iter().flatten().filter(|location| location.health == Health::Damaged).count();
        u64::try_from(damaged).map_err(|e| Error::Internal(e.to_string()))
    }
}
