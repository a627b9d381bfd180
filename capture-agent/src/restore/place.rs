//! Where each blob of a snapshot goes in an engine's memory.

use super::cut::{PageCut, StateCut};
use super::plan::{Origin, Paged, Plan, Stated};
use crate::copies::{Claims, Gate};
use crate::engines::{Engine, Group};
use crate::error::{Error, Result};
use crate::memory::{Location, Page, PageMemory};
use pfr_schema::Digest;
use pfr_schema::checkpoint::{Form, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// One blob and its place.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// What lies there in the end: the blob or, once they were made, the mirror or the cut page.
    pub digest: Digest,
    pub memory: Arc<dyn PageMemory>,
    pub page: Page,
    rank: u32,
    of: Of,
    /// Tokens of the prefix at the end of its column; none for a state, which has no column.
    ends: Option<u64>,
    /// When the engine needs it: the position of its group in the registration, and its layer.
    need: (usize, u32),
}

#[derive(Clone, Debug)]
enum Of {
    Page { group: Arc<str>, column: u64, component: usize, cut: Option<PageRecipe> },
    State { tensor: Box<Tensor>, convert: Option<Form> },
    CutState(Arc<StateCut>),
}

type PageRecipe = (Arc<PageCut>, Vec<Digest>);

/// How the bytes of a place are made.
#[derive(Clone, Debug)]
pub(super) enum Recipe {
    /// They are those of the blob.
    AsIs,
    /// Of the blob, which is this tensor, in another form.
    Mirror(Box<Tensor>, Form),
    /// Of pages of other ranks, by their digests.
    Page(Arc<PageCut>, Vec<Digest>),
    /// Of tensors of other ranks.
    State(Arc<StateCut>),
}

impl Place {
    /// Of a component of a page: group, column, component.
    pub fn page(digest: Digest, memory: Arc<dyn PageMemory>, page: Page, rank: u32, of: (Arc<str>, u64, usize)) -> Self {
        let (group, column, component) = of;
        Self { digest, memory, page, rank, of: Of::Page { group, column, component, cut: None }, ends: None, need: (0, 0) }
    }

    /// The blobs that its bytes are made from, in order.
    pub fn blobs(&self) -> Vec<Digest> {
        match &self.of {
            Of::Page { cut: Some((_, sources)), .. } => sources.clone(),
            Of::CutState(cut) => cut.blobs().collect(),
            Of::Page { .. } | Of::State { .. } => vec![self.digest],
        }
    }

    /// Whether it is a page that is a blob as it is.
    pub fn is_plain_page(&self) -> bool {
        matches!(self.of, Of::Page { cut: None, .. })
    }

    /// Whether it is a page that is cut.
    pub fn is_cut_page(&self) -> bool {
        matches!(self.of, Of::Page { cut: Some(_), .. })
    }

    /// The tensor, if it is one.
    pub fn tensor(&self) -> Option<&Tensor> {
        match &self.of {
            Of::State { tensor, .. } => Some(tensor),
            Of::Page { .. } | Of::CutState(_) => None,
        }
    }

    pub fn recipe(&self) -> Recipe {
        match &self.of {
            Of::Page { cut: Some((cut, sources)), .. } => Recipe::Page(Arc::clone(cut), sources.clone()),
            Of::State { tensor, convert: Some(form) } => Recipe::Mirror(tensor.clone(), form.clone()),
            Of::CutState(cut) => Recipe::State(Arc::clone(cut)),
            Of::Page { .. } | Of::State { .. } => Recipe::AsIs,
        }
    }

    /// From now on this tensor belongs here, and not the blobs that it was made from.
    pub fn takes(&mut self, tensor: Tensor) {
        self.digest = tensor.payload_hash;
        self.of = Of::State { tensor: Box::new(tensor), convert: None };
    }

    /// The same for a page.
    pub fn takes_page(&mut self, digest: Digest) {
        self.digest = digest;
        if let Of::Page { cut, .. } = &mut self.of {
            *cut = None;
        }
    }

    /// Where it begins on this machine.
    fn location(&self) -> Location {
        let begin = self.page.spans.first().map_or(0, |span| span.offset);
        let Location { object, offset } = self.memory.location();
        Location { object, offset: offset.saturating_add(begin) }
    }

    /// For people.
    pub fn describe(&self) -> String {
        match &self.of {
            Of::Page { group, column, component, .. } => {
                format!("page {column} (component {component}) of group {group:?} of rank {}", self.rank)
            }
            Of::State { tensor, .. } => format!("state {:?} of rank {}", tensor.name, self.rank),
            Of::CutState(cut) => format!("state {:?} of rank {}", cut.recut.name, self.rank),
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
        for paged in plan.paged.iter().filter(|paged| ranks.contains(&paged.rank)) {
            if let Some((group, blocks)) = find(paged.rank, &paged.group) {
                places.add_pages(group, paged, blocks);
            }
        }
        for Stated { rank, group: name, state, origin } in plan.states.iter().filter(|stated| ranks.contains(&stated.rank)) {
            let Some((group, blocks)) = find(*rank, name) else { continue };
            let (memory, page) = group.state(state, blocks[0]);
            let (digest, of) = match origin {
                Origin::Tensor { tensor, convert } => (tensor.payload_hash, Of::State { tensor: tensor.clone(), convert: convert.clone() }),
                // The digest is known when it is made.
                Origin::Cut { cut, .. } => (Digest::sha256(b""), Of::CutState(Arc::clone(cut))),
            };
            let need = (group.place, state.layer.unwrap_or(0));
            places.0.push(Place { digest, memory, page, rank: *rank, of, ends: None, need });
        }
        places
    }

    fn add_pages(&mut self, group: &Group, paged: &Paged, blocks: &[u32]) {
        let (name, components): (Arc<str>, usize) = (paged.group.as_str().into(), group.layout.components.len());
        let mut digests = &paged.digests[..];
        for column in paged.columns.clone() {
            for component in 0..components {
                let (sources, rest) = digests.split_at(paged.sources(component));
                digests = rest;
                let (memory, page) = group.page(component, blocks[column as usize]);
                let mut place = Place::page(sources[0], memory, page, paged.rank, (Arc::clone(&name), column, component));
                place.need = (group.place, 0);
                place.ends = Some((column + 1) * u64::from(group.layout.block_tokens));
                // The digest of a page that is cut is known when it is made.
                if let (Some(recipe), Of::Page { cut, .. }) = (paged.cut(component), &mut place.of) {
                    *cut = Some((Arc::clone(recipe), sources.to_vec()));
                }
                self.0.push(place);
            }
        }
    }

    /// Sorts them by when the engine needs them: groups as the engine lists them, in a group of
    /// states by layer, in others by column. Places of one page come one after another, so that it
    /// is read once.
    pub fn in_order_of_need(&mut self) {
        self.0.sort_by_key(|place| place.need);
        let mut first = HashMap::new();
        let first = |(at, place): (usize, Place)| {
            let at = if place.is_plain_page() { *first.entry(place.digest).or_insert(at) } else { at };
            (at, place)
        };
        let mut places: Vec<(usize, Place)> = std::mem::take(&mut self.0).into_iter().enumerate().map(first).collect();
        places.sort_by_key(|(at, _)| *at);
        self.0 = places.into_iter().map(|(_, place)| place).collect();
    }

    /// The blobs that they are made from, in order. A page that lies in several places, one after
    /// another, is there once.
    pub fn blobs(&self) -> Vec<Digest> {
        let (mut blobs, mut before) = (Vec::with_capacity(self.0.len()), None);
        for place in &self.0 {
            let blob = place.is_plain_page().then_some(place.digest);
            if blob.is_none() || blob != before {
                blobs.extend(place.blobs());
            }
            before = blob;
        }
        blobs
    }

    /// Pages, over all groups and ranks, however many components a page has.
    pub fn pages(&self) -> u64 {
        self.0.iter().filter(|place| matches!(place.of, Of::Page { component: 0, .. })).count() as u64
    }

    /// The places to write, and those that hold only the first `kept` tokens.
    pub fn split(self, kept: u64) -> (Self, Self) {
        let (shared, own) = self.0.into_iter().partition(|place| place.ends.is_some_and(|ends| ends <= kept));
        (Self(own), Self(shared))
    }

    /// Reserves them for the restore with this gate until its guard is dropped.
    ///
    /// # Errors
    /// [`Error::Invalid`] if another restore writes into one of them.
    pub fn claim<T>(&self, gate: &Gate<T>, claims: &Arc<Claims>) -> Result<()> {
        gate.claim(claims, self.0.iter().map(Place::location).collect()).map_err(|taken| {
            let place = self.0.get(taken).map_or_else(String::new, Place::describe);
            Error::Invalid(format!("{place}: another restore is writing into this block"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Available, Ring, ShmMemory, Span};
    use std::os::fd::OwnedFd;

    /// A place at `offset` of a memory.
    fn place(memory: &Arc<dyn PageMemory>, offset: u64) -> Places {
        let page = Page { spans: vec![Span { offset, bytes: 16 }] };
        Places(vec![Place::page(Digest::sha256(b""), Arc::clone(memory), page, 0, ("main".into(), 0, 0))])
    }

    #[test]
    fn two_restores_do_not_write_into_one_block_through_two_mappings_of_it() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("its length");
        let map = |offset| {
            let fd: OwnedFd = file.try_clone().expect("a descriptor").into();
            ShmMemory::map(fd, offset, 1024, Ring::new(4096), Available::system()).expect("a mapping")
        };
        let (one, two, later) = (map(0), map(0), map(512));
        let claims = Arc::new(Claims::default());
        let claim = |memory, offset| {
            let gate = Gate::new(());
            place(memory, offset).claim(&gate, &claims).map(|()| gate)
        };
        let first = claim(&one, 512).expect("free");
        let refused = claim(&two, 512).expect_err("the same block through a second mapping").to_string();
        assert!(refused.starts_with("page 0 (component 0) of group \"main\" of rank 0: another restore"), "{refused}");
        assert!(claim(&later, 0).is_err(), "the same block through a mapping that begins later");
        assert!(claim(&two, 0).is_ok(), "another block");
        drop(first);
        assert!(claim(&later, 0).is_ok(), "free again");
    }
}
