//! Writes the prefix index: at a commit, and for snapshots that are not in it yet.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{PrefixMark, PrefixPath};
use crate::tasks::{Budget, Lane, RunEnd, Task};
use async_trait::async_trait;
use pfr_schema::resume::Legal;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::{Digest, media_type, prefix};
use std::time::Duration;

/// Snapshots that are indexed in one transaction.
const BATCH: usize = 64;
/// Bytes of a list of tokens that is read: 16 Mi tokens.
const LIST: u64 = 64 << 20;
/// Bytes of a list from which on one is read at a time.
const LARGE: u64 = 4 << 20;

impl Store {
    /// The rows of a snapshot in the prefix index; none if it does not say which prefix it is
    /// of. Reads and hashes its list of tokens: 10 ms for 380,000.
    pub(crate) async fn prefix_marks(&self, manifest: &Manifest, config: &SnapshotConfig) -> Result<Vec<PrefixMark>> {
        match self.marks_with_list(manifest, config, manifest.layers_of(media_type::TOKENS).next()).await {
            // If the list cannot be read, the snapshot is found by its length.
            Err(Error::Corrupt { .. } | Error::Format(_) | Error::BlobUnknown { .. }) => self.marks_with_list(manifest, config, None).await,
            marks => marks,
        }
    }

    /// The same, if its list of tokens is this one; an error if it cannot be read.
    async fn marks_with_list(&self, manifest: &Manifest, config: &SnapshotConfig, list: Option<&Descriptor>) -> Result<Vec<PrefixMark>> {
        let (Some(key), Some(fingerprint)) = (config.prefix.clone(), config.fingerprint) else { return Ok(Vec::new()) };
        if key.scheme != prefix::SCHEME {
            return Ok(Vec::new());
        }
        let legal = match self.legal(manifest, key.tokens).await {
            // Then it is found by its end only.
            Err(Error::Corrupt { .. } | Error::Format(_) | Error::BlobUnknown { .. }) => Legal::of(key.tokens, [], true),
            legal => legal?,
        };
        let list = list.filter(|list| list.size <= LIST && list.size / 4 >= key.tokens);
        let _alone = match list {
            Some(list) if list.size > LARGE => {
                Some(self.large.take(self.options.queue, "other large documents are being read; try again in a moment").await?)
            }
            _ => None,
        };
        let bytes = match list {
            Some(list) => Some(self.read(&list.digest).await?),
            None => None,
        };
        let marks = move || {
            let tokens = bytes.map(|bytes| {
                let tokens = bytes.as_chunks::<4>().0.iter().map(|token| u32::from_le_bytes(*token));
                tokens.take(usize::try_from(key.tokens).unwrap_or(usize::MAX)).collect()
            });
            let path = tokens.map(|tokens| PrefixPath::new(tokens, &fingerprint, &key.salt, key.adapter.as_deref()));
            let mut marks = PrefixMark::of(&key, path.as_ref(), &fingerprint);
            // Tokens that are not those of the key would lead to state of other ones.
            if let Some(path) = path.filter(|path| legal.first().is_some() && path.key(key.tokens) == Some(key.prefix)) {
                marks.extend(PrefixMark::waypoints(&path));
            }
            marks
        };
        pfr_service::task::spawn_blocking(marks).await.map_err(Error::from)
    }

    /// Where a snapshot of so many tokens may be resumed.
    pub(super) async fn legal(&self, manifest: &Manifest, end: u64) -> Result<Legal> {
        let has_states = manifest.layers_of(media_type::CHECKPOINT).next().is_some();
        Ok(Legal::of_trees(end, &self.trees(manifest).await?, has_states))
    }

    /// Puts snapshots into the prefix index that are not in it yet: those that were committed
    /// before there was one, and those that a rebuild brought back. Ends early when the budget is
    /// used up. Returns how many snapshots it indexed; snapshots that cannot be read are tried
    /// again the next time.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`].
    #[boxed]
    pub async fn index_prefixes(&self, budget: &Budget) -> Result<u64> {
        let (mut indexed, mut after) = (0, 0);
        loop {
            let found = self.metadata.unprefixed(after, BATCH).await?;
            let Some(last) = found.last().filter(|_| !budget.is_used_up()) else { return Ok(indexed) };
            after = last.0;
            let mut marks = Vec::with_capacity(found.len());
            for (id, digest) in found {
                match self.marks_of(&digest).await {
                    Ok(of_it) => marks.push((id, of_it)),
                    // It has no prefix key that could match.
                    Err(Error::Format(_)) => marks.push((id, Vec::new())),
                    // Deleted since it was listed.
                    Err(Error::BlobUnknown { .. }) => {}
                    Err(error @ (Error::Unavailable { .. } | Error::Full(_))) => return Err(error),
                    Err(error) => tracing::warn!(%error, %digest, "indexing a snapshot for matching failed"),
                }
            }
            indexed += self.metadata.index_prefixes(marks).await?;
        }
    }

    async fn marks_of(&self, digest: &Digest) -> Result<Vec<PrefixMark>> {
        match self.prefix_documents(digest).await? {
            Some((manifest, config)) => self.prefix_marks(&manifest, &config).await,
            None => Ok(Vec::new()),
        }
    }

    /// The rows that a snapshot should have in the prefix index, and those that it may have
    /// instead: its list of tokens could not be read when it was indexed.
    ///
    /// # Errors
    /// Those of [`Self::read`], if one of its documents cannot be read now: nothing is known then.
    pub(crate) async fn expected_marks(&self, digest: &Digest) -> Result<[Vec<PrefixMark>; 2]> {
        let Some((manifest, config)) = self.prefix_documents(digest).await? else { return Ok([Vec::new(), Vec::new()]) };
        let list = manifest.layers_of(media_type::TOKENS).next();
        Ok([self.marks_with_list(&manifest, &config, list).await?, self.marks_with_list(&manifest, &config, None).await?])
    }

    /// Manifest and configuration of a snapshot; none if the manifest is not that of a snapshot.
    pub(super) async fn prefix_documents(&self, digest: &Digest) -> Result<Option<(Manifest, SnapshotConfig)>> {
        let manifest = self.manifest(digest).await?;
        if !manifest.is_snapshot() {
            return Ok(None);
        }
        let config = SnapshotConfig::parse(&self.read(&manifest.config.digest).await?, &self.options.limits)?;
        Ok(Some((manifest, config)))
    }
}

/// Keeps the prefix index complete: see [`Store::index_prefixes`].
#[derive(Debug)]
pub struct PrefixIndexTask {
    /// The store.
    pub store: Store,
    /// Time between two runs.
    pub interval: Duration,
}

#[async_trait]
impl Task for PrefixIndexTask {
    fn name(&self) -> &'static str {
        "prefix-index"
    }

    fn interval(&self) -> Duration {
        self.interval
    }

    fn lane(&self) -> Lane {
        Lane::Index
    }

    async fn run(&self, budget: &Budget) -> Result<RunEnd> {
        let indexed = self.store.index_prefixes(budget).await?;
        if indexed > 0 {
            tracing::info!(snapshots = indexed, "snapshots indexed for matching");
        }
        Ok(if budget.is_used_up() { RunEnd::Stopped } else { RunEnd::Finished })
    }
}
