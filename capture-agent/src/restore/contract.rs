//! The compatibility contract: whether a snapshot fits an engine, by what a registry says of it.
//! No frame is asked for. The plan checks all of it again, by documents whose bytes were verified.

use super::plan::{self, Recorded};
use crate::Agent;
use crate::engines::Engine;
use crate::error::Result;
use pfr_schema::Digest;
use pfr_schema::agent::{Fits, Outline};
use pfr_schema::tree::GroupKind;
use serde_json::Value;
use std::collections::BTreeMap;

impl Agent {
    /// Checks what is said of a snapshot against an engine: engine configuration, ranks, groups,
    /// geometry and numbers of pages.
    ///
    /// # Errors
    /// [`crate::Error::EngineUnknown`], [`crate::Error::Fingerprint`] with both values of each
    /// field, [`crate::Error::Mismatch`], [`crate::Error::Missing`].
    pub fn check(&self, name: &str, outline: &Outline) -> Result<Fits> {
        match self.llamas().get(name) {
            Some(llama) => {
                let (deployment, fingerprint) = llama.deployment();
                // A server that was not reached yet has none: the restore itself asks it.
                if !deployment.is_empty() {
                    configurations(&deployment, &[], fingerprint, outline)?;
                }
            }
            None => fits(&self.engines().get(name)?, outline)?,
        }
        Ok(Fits { engine: name.to_owned(), boundary: outline.boundary.unwrap_or_default() })
    }
}

fn configurations(ours: &BTreeMap<String, Value>, parallel: &[String], fingerprint: Digest, outline: &Outline) -> Result<Vec<String>> {
    // Which keys are about ranks alone is in a layer that was not read.
    let Outline { deployment, fingerprint: recorded, shards, reshard, .. } = outline;
    let theirs = Recorded { deployment, fingerprint: *recorded, parallel: &|_| *shards, reshard: *reshard };
    theirs.compare(ours, parallel, fingerprint)
}

fn fits(engine: &Engine, outline: &Outline) -> Result<()> {
    let differs = configurations(engine.deployment(), engine.parallel(), engine.fingerprint(), outline)?;
    let (boundary, _) = plan::key_of(outline.boundary, outline.prefix.as_ref())?;
    if !differs.is_empty() {
        // How the state is cut for other ranks is in a layer that was not read.
        return Ok(());
    }
    plan::ranks(engine, &outline.trees, &outline.states)?;
    plan::known_groups(engine, &outline.trees)?;
    for rank in 0..engine.world() {
        for group in engine.groups(rank).iter().filter(|group| group.layout.kind != GroupKind::Recurrent) {
            let name = &group.layout.name;
            // Every rank holds the same bytes, captured from the first.
            let from = if group.layout.replicated { 0 } else { rank };
            let Some(tree) = outline.trees.iter().find(|tree| tree.group.name == *name && tree.rank == from) else {
                if group.layout.required {
                    return Err(plan::missing_group(name, rank, "snapshot"));
                }
                continue;
            };
            plan::geometry(group, tree)?;
            let columns = group.columns(boundary);
            let expected = columns.end - columns.start;
            if tree.pages != expected {
                return Err(plan::other_count(group, rank, expected, tree.pages));
            }
        }
    }
    Ok(())
}
