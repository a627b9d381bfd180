//! The differences between two snapshots.

use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::metadata::ObjectId;
use pfr_schema::container::Container;
use pfr_schema::snapshot::Manifest;
use pfr_schema::tree::PageTree;
use pfr_schema::{Digest, Kind, api, media_type};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

impl Store {
    /// The differences between two snapshots. Page lists are compared by their page chunks: only
    /// chunks that differ are read.
    ///
    /// # Errors
    /// [`crate::Error::BlobUnknown`], [`crate::Error::Corrupt`].
    #[boxed]
    pub async fn diff(&self, a: &Digest, b: &Digest) -> Result<api::Diff> {
        let (manifest_a, manifest_b) = (self.manifest(a).await?, self.manifest(b).await?);
        let (trees_a, trees_b) = (self.trees_by_group(&manifest_a).await?, self.trees_by_group(&manifest_b).await?);
        let keys: BTreeSet<&(String, u32)> = trees_a.keys().chain(trees_b.keys()).collect();
        let mut groups = Vec::new();
        for key in keys {
            groups.push(self.diff_trees(key, trees_a.get(key), trees_b.get(key)).await?);
        }
        let (others_a, others_b) = (self.other_blobs(&manifest_a).await?, self.other_blobs(&manifest_b).await?);
        let only = |one: &HashMap<Digest, u64>, other: &HashMap<Digest, u64>| {
            one.iter().filter(|(d, _)| !other.contains_key(*d)).map(|(_, size)| size).sum()
        };
        Ok(api::Diff { a: *a, b: *b, groups, other_bytes_only: (only(&others_a, &others_b), only(&others_b, &others_a)) })
    }

    async fn trees_by_group(&self, manifest: &Manifest) -> Result<BTreeMap<(String, u32), PageTree>> {
        Ok(self.trees(manifest).await?.into_iter().map(|tree| ((tree.group.name.clone(), tree.rank), tree)).collect())
    }

    async fn diff_trees(&self, key: &(String, u32), a: Option<&PageTree>, b: Option<&PageTree>) -> Result<api::GroupDiff> {
        let (runs_a, runs_b) = (runs(a), runs(b));
        let common: u64 = runs_a.iter().filter(|(digest, _)| runs_b.contains_key(*digest)).map(|(_, pages)| pages).sum();
        let (pages_a, pages_b) = (self.pages(&runs_a, &runs_b).await?, self.pages(&runs_b, &runs_a).await?);
        let (blobs_a, blobs_b) = (self.page_blobs(&runs_a).await?, self.page_blobs(&runs_b).await?);
        // All pages of a tree have one size, so counting is enough.
        let size = |tree: Option<&PageTree>| tree.map_or(0, |t| t.page_bytes);
        Ok(api::GroupDiff {
            group: key.0.clone(),
            rank: key.1,
            tokens: (a.map_or(0, PageTree::tokens), b.map_or(0, PageTree::tokens)),
            pages: (a.map_or(0, PageTree::pages), b.map_or(0, PageTree::pages)),
            pages_shared: common + pages_a.intersection(&pages_b).count() as u64,
            bytes_only: (blobs_a.difference(&blobs_b).count() as u64 * size(a), blobs_b.difference(&blobs_a).count() as u64 * size(b)),
            bytes_shared: blobs_a.intersection(&blobs_b).count() as u64 * size(a),
        })
    }

    /// Pages (all their components) of the runs that only `runs` has.
    async fn pages(&self, runs: &HashMap<Digest, u64>, other: &HashMap<Digest, u64>) -> Result<HashSet<Vec<Digest>>> {
        let mut pages = HashSet::new();
        for digest in runs.keys().filter(|digest| !other.contains_key(*digest)) {
            let run = self.run(digest).await?;
            pages.extend(run.digests().chunks(usize::from(run.shape().components)).map(<[Digest]>::to_vec));
        }
        Ok(pages)
    }

    /// Objects that the runs list.
    async fn page_blobs(&self, runs: &HashMap<Digest, u64>) -> Result<HashSet<ObjectId>> {
        let rows = self.metadata.find(runs.keys().copied().collect()).await?;
        Ok(rows.into_iter().flatten().flat_map(|row| row.children).collect())
    }

    /// Blobs outside of page trees and their sizes: the other layers, and the tensors of
    /// checkpoints.
    async fn other_blobs(&self, manifest: &Manifest) -> Result<HashMap<Digest, u64>> {
        let mut blobs = HashMap::new();
        for layer in manifest.layers.iter().filter(|l| l.media_type != media_type::TREE) {
            blobs.insert(layer.digest, layer.size);
            if layer.kind() == Kind::Checkpoint
                && let Container::Checkpoint(checkpoint) = self.container(&layer.digest, Kind::Checkpoint).await?
            {
                blobs.extend(checkpoint.tensors.iter().map(|t| (t.payload_hash, t.payload_bytes)));
            }
        }
        Ok(blobs)
    }
}

/// Page chunks of a tree and how many pages each has (in all its places).
fn runs(tree: Option<&PageTree>) -> HashMap<Digest, u64> {
    let mut runs = HashMap::new();
    for run in tree.into_iter().flat_map(|t| &t.runs) {
        *runs.entry(run.digest).or_default() += u64::from(run.pages);
    }
    runs
}
