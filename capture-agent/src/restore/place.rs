//! Where each blob of a snapshot goes in an engine's memory.

use super::plan::{Paged, Plan, Stated};
use crate::engines::Engine;
use crate::memory::{Page, PageMemory};
use pfr_schema::Digest;
use pfr_schema::checkpoint::{Form, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// One blob and its place.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// What lies there in the end: the blob or, once it was made, the mirror.
    pub digest: Digest,
    pub memory: Arc<dyn PageMemory>,
    pub page: Page,
    rank: u32,
    of: Of,
    /// Tokens of the prefix at the end of its column; none for a state, which has no column.
    ends: Option<u64>,
}

#[derive(Clone, Debug)]
enum Of {
    Page { group: Arc<str>, column: u64, component: usize },
    State { tensor: Box<Tensor>, convert: Option<Form> },
}

impl Place {
    /// Of a component of a page: group, column, component.
    pub fn page(digest: Digest, memory: Arc<dyn PageMemory>, page: Page, rank: u32, of: (Arc<str>, u64, usize)) -> Self {
        let (group, column, component) = of;
        Self { digest, memory, page, rank, of: Of::Page { group, column, component }, ends: None }
    }

    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.of {
            Of::State { tensor, .. } => Some(tensor),
            Of::Page { .. } => None,
        }
    }

    /// The tensor with the form of its slot, if the blob has to be converted to it.
    pub fn conversion(&self) -> Option<(&Tensor, &Form)> {
        match &self.of {
            Of::State { tensor, convert: Some(form) } => Some((tensor, form)),
            Of::State { .. } | Of::Page { .. } => None,
        }
    }

    /// From now on a mirror belongs here, and not the blob that it was made from.
    pub fn takes(&mut self, mirror: Tensor) {
        self.digest = mirror.payload_hash;
        self.of = Of::State { tensor: Box::new(mirror), convert: None };
    }

    /// For people.
    pub fn describe(&self) -> String {
        match &self.of {
            Of::Page { group, column, component } => {
                format!("page {column} (component {component}) of group {group:?} of rank {}", self.rank)
            }
            Of::State { tensor, .. } => format!("state {:?} of rank {}", tensor.name, self.rank),
        }
    }
}

/// The places of a restore.
#[derive(Clone, Debug, Default)]
pub(super) struct Places(pub Vec<Place>);

impl Places {
    /// The places of these ranks, in blocks that were checked. A group that may be missing has none
    /// if the engine gave it no blocks.
    pub fn of(engine: &Engine, plan: &Plan, ranks: Range<u32>, blocks: &BTreeMap<String, Vec<u32>>) -> Self {
        let mut places = Self::default();
        let find = |rank, name: &str| Some((engine.groups(rank).iter().find(|g| g.layout.name == name)?, blocks.get(name)?));
        for Paged { rank, group: name, columns, digests } in plan.paged.iter().filter(|paged| ranks.contains(&paged.rank)) {
            let Some((group, blocks)) = find(*rank, name) else { continue };
            let (components, name): (usize, Arc<str>) = (group.layout.components.len(), name.as_str().into());
            for (column, digests) in columns.clone().zip(digests.chunks_exact(components)) {
                for (component, digest) in digests.iter().enumerate() {
                    let (memory, page) = group.page(component, blocks[column as usize]);
                    let ends = Some((column + 1) * u64::from(group.layout.block_tokens));
                    let place = Place::page(*digest, memory, page, *rank, (Arc::clone(&name), column, component));
                    places.0.push(Place { ends, ..place });
                }
            }
        }
        for Stated { rank, group: name, state, tensor, convert } in plan.states.iter().filter(|stated| ranks.contains(&stated.rank)) {
            let Some((group, blocks)) = find(*rank, name) else { continue };
            let (memory, page) = group.state(state, blocks[0]);
            let of = Of::State { tensor: Box::new(tensor.clone()), convert: convert.clone() };
            places.0.push(Place { digest: tensor.payload_hash, memory, page, rank: *rank, of, ends: None });
        }
        places
    }

    /// The places to write, and those that hold only the first `kept` tokens.
    pub fn split(self, kept: u64) -> (Self, Self) {
        let (shared, own) = self.0.into_iter().partition(|place| place.ends.is_some_and(|ends| ends <= kept));
        (Self(own), Self(shared))
    }
}
