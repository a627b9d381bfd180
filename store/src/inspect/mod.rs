//! Reads about snapshots: details, lineage, differences, statistics, matching, verification.

mod coherence;
mod diff;
mod matching;
mod prefixes;
mod stats;
mod values;
mod verify;

pub use prefixes::PrefixIndexTask;
pub use stats::StatsFilter;
pub(crate) use stats::agent_of;
pub use verify::VerifyProgress;

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{ObjectId, ObjectRow, SnapshotRow};
use pfr_schema::container::Container;
use pfr_schema::flat::FlatManifest;
use pfr_schema::run::Run;
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::tree::PageTree;
use pfr_schema::{Digest, Kind, RepositoryName, api, media_type};

/// Rows looked up in one metadata transaction.
const ROWS: usize = 8192;

impl From<SnapshotRow> for api::SnapshotSummary {
    fn from(row: SnapshotRow) -> Self {
        Self {
            digest: row.digest,
            tags: row.tags,
            parents: row.parents,
            pushed_at: row.pushed_at,
            logical_bytes: row.logical_bytes,
            new_bytes: row.new_bytes,
        }
    }
}

impl Store {
    /// A snapshot with its manifest, configuration, page trees and signatures.
    ///
    /// # Errors
    /// [`crate::Error::SnapshotUnknown`], [`crate::Error::Corrupt`].
    #[boxed]
    pub async fn detail(&self, repository: &RepositoryName, digest: &Digest) -> Result<api::SnapshotDetail> {
        let summary = self.snapshot(repository, digest).await?.into();
        let manifest = self.manifest(digest).await?;
        let config = if manifest.is_snapshot() {
            SnapshotConfig::parse(&self.read(&manifest.config.digest).await?, &self.options.limits)?
        } else {
            SnapshotConfig::default()
        };
        let trees = self.trees(&manifest).await?;
        let signatures = self.signatures(repository, digest).await?;
        Ok(api::SnapshotDetail { summary, manifest, config, trees, signatures })
    }

    /// The page trees that a manifest lists.
    pub(crate) async fn trees(&self, manifest: &pfr_schema::snapshot::Manifest) -> Result<Vec<PageTree>> {
        let mut trees = Vec::new();
        for layer in manifest.layers_of(media_type::TREE) {
            match self.container(&layer.digest, Kind::Tree).await? {
                Container::Tree(tree) => trees.push(tree),
                _ => return Err(Error::Internal("a tree parsed as something else".into())),
            }
        }
        Ok(trees)
    }

    async fn run(&self, digest: &Digest) -> Result<Run> {
        match self.container(digest, Kind::Run).await? {
            Container::Run(run) => Ok(run),
            _ => Err(Error::Internal("a run parsed as something else".into())),
        }
    }

    /// The snapshot and its ancestors in the repository, breadth first, at most `limit`.
    ///
    /// # Errors
    /// [`crate::Error::SnapshotUnknown`].
    #[boxed]
    pub async fn lineage(&self, repository: &RepositoryName, digest: &Digest, limit: usize) -> Result<api::Lineage> {
        let (snapshots, truncated) = self.metadata.lineage(repository.clone(), *digest, limit).await?;
        Ok(api::Lineage { snapshots: snapshots.into_iter().map(Into::into).collect(), truncated })
    }

    /// The flat page manifests of a snapshot, one for each tree that has a flat form, with the
    /// tree's group name and rank.
    ///
    /// # Errors
    /// [`crate::Error::SnapshotUnknown`], [`crate::Error::Corrupt`].
    #[boxed]
    pub async fn flat_manifests(&self, manifest: &Digest) -> Result<Vec<(String, u32, FlatManifest)>> {
        let mut flats = Vec::new();
        for tree in self.trees(&self.manifest(manifest).await?).await? {
            if tree.flat_digest.is_none() {
                continue;
            }
            let mut runs = Vec::with_capacity(tree.runs.len());
            for run in &tree.runs {
                runs.push(self.run(&run.digest).await?);
            }
            let flat = tree.to_flat(&runs, &self.options.limits)?;
            flats.push((tree.group.name, tree.rank, flat));
        }
        Ok(flats)
    }

    /// Object rows by id, in batches.
    pub(crate) async fn rows(&self, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>> {
        let mut rows = Vec::with_capacity(ids.len());
        for batch in ids.chunks(ROWS) {
            rows.extend(self.metadata.objects(batch.to_vec()).await?);
        }
        Ok(rows)
    }

    /// One object's row.
    pub(crate) async fn row(&self, digest: &Digest, kind: Kind) -> Result<ObjectRow> {
        let found = self.metadata.find(vec![*digest]).await?.pop().flatten();
        found.filter(|row| row.kind.satisfies(kind)).ok_or(Error::BlobUnknown { digest: *digest, kind })
    }
}
