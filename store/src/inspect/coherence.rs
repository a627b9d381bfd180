//! Checks before a commit that the documents of a manifest agree, so that no tag ever points at a
//! contradiction.

use crate::Store;
use crate::error::{Error, Result};
use pfr_schema::container::Container;
use pfr_schema::snapshot::{Manifest, SnapshotConfig};
use pfr_schema::{Kind, checkpoint, media_type};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

impl Store {
    /// The configuration of a snapshot whose parts agree on one token position of one prefix;
    /// `None` for a manifest that is not a snapshot. Costs a read of each checkpoint's document,
    /// not of its payloads.
    pub(crate) async fn coherent_config(&self, manifest: &Manifest) -> Result<Option<SnapshotConfig>> {
        if !manifest.is_snapshot() {
            return Ok(None);
        }
        let config = SnapshotConfig::parse(&self.read(&manifest.config.digest).await?, &self.options.limits)?;
        // Of each only the key is kept, and one that is listed again is not read again: documents
        // are up to 64 MiB, and a manifest lists thousands.
        let (mut checkpoints, mut keys) = (Vec::new(), HashMap::new());
        for layer in manifest.layers_of(media_type::CHECKPOINT) {
            checkpoints.push((checkpoint::rank(layer)?, layer.digest));
            if let Entry::Vacant(unknown) = keys.entry(layer.digest) {
                match self.container(&layer.digest, Kind::Checkpoint).await? {
                    Container::Checkpoint(parsed) => drop(unknown.insert(parsed.key)),
                    _ => return Err(Error::Internal("a checkpoint parsed as something else".into())),
                }
            }
        }
        let checkpoints: Vec<_> = checkpoints.iter().filter_map(|(rank, digest)| Some((*rank, keys.get(digest)?))).collect();
        checkpoint::coherent(&config, &checkpoints)?;
        Ok(Some(config))
    }
}
