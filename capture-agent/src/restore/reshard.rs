//! The plan for an engine that differs from the snapshot's in its ranks alone: each page and each
//! state tensor is put together from those ranks of the snapshot that have its heads or channels.
//!
//! Only what both engines said of their shares is used. A part that is missing, held twice with
//! other bytes, or impossible to cut is refused by name.

use super::cut::{PageCut, StateCut, Strip};
use super::documents::{Documents, field};
use super::overlap;
use super::plan::{self, Origin, Paged, Plan, Stated, missing_group, missing_state, same};
use crate::engines::{Engine, Group};
use crate::error::{Error, Result};
use pfr_schema::agent::Resharded;
use pfr_schema::checkpoint::{Recut, Tensor};
use pfr_schema::engine::State;
use pfr_schema::shards::{AxisShare, GroupShards, LayerShare, Piece, Shards, Share, union};
use pfr_schema::tree::{GroupKind, PageTree};
use pfr_schema::{Digest, ErrorCode};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Adds all pages and state tensors to a plan.
pub(super) fn add(plan: &mut Plan, engine: &Engine, documents: &Documents, differs: Vec<String>) -> Result<()> {
    let none = || Error::Internal("a snapshot without shards is cut".into());
    let reshard = Reshard { engine, documents, shards: documents.shards.as_ref().ok_or_else(none)? };
    reshard.known()?;
    let mut pages = BTreeMap::new();
    for group in engine.groups(0) {
        if let Some(sources) = reshard.sources(group, plan.boundary)? {
            pages.insert(group.layout.name.as_str(), sources);
        }
    }
    for rank in 0..engine.world() {
        for group in engine.groups(rank) {
            match group.layout.kind {
                GroupKind::Recurrent => reshard.add_states(plan, group, rank)?,
                _ => add_pages(plan, group, pages.get(group.layout.name.as_str()), rank)?,
            }
        }
    }
    for group in engine.groups(0) {
        reshard.complete(group, pages.get(group.layout.name.as_str()))?;
    }
    let cut = |paged: &Paged| if paged.cuts.iter().any(Option::is_some) { paged.columns.end - paged.columns.start } else { 0 };
    let pages = plan.paged.iter().map(cut).sum();
    let states = plan.states.iter().filter(|stated| matches!(stated.origin, Origin::Cut { .. })).count() as u64;
    plan.resharded = Some(Resharded { differs, from: reshard.world(), to: engine.world(), pages, states });
    Ok(())
}

struct Reshard<'a> {
    engine: &'a Engine,
    documents: &'a Documents,
    shards: &'a Shards,
}

/// A tensor of the snapshot: its rank, and its share.
type Found<'a> = (u32, &'a Tensor, &'a AxisShare);

impl<'a> Reshard<'a> {
    /// Ranks of the snapshot.
    fn world(&self) -> u32 {
        let listed = self.shards.groups.iter().map(|group| group.rank.saturating_add(1)).max().unwrap_or(1);
        self.documents.trees.first().map_or(listed, |(tree, _)| tree.world)
    }

    /// Checks that the engine knows each group and state tensor of the snapshot.
    fn known(&self) -> Result<()> {
        let groups = self.engine.groups(0);
        for (tree, _) in &self.documents.trees {
            if !groups.iter().any(|group| group.layout.name == tree.group.name && group.layout.kind != GroupKind::Recurrent) {
                return Err(missing_group(&tree.group.name, tree.rank, "engine"));
            }
        }
        let groups = (0..self.engine.world()).flat_map(|rank| self.engine.groups(rank));
        let states: HashSet<&str> = groups.flat_map(|group| group.layout.states.iter().map(|state| state.name.as_str())).collect();
        for (rank, checkpoint) in &self.documents.checkpoints {
            if let Some(tensor) = checkpoint.tensors.iter().find(|tensor| !states.contains(tensor.name.as_str())) {
                return Err(missing_state(&tensor.name, *rank, "engine"));
            }
        }
        Ok(())
    }

    /// What a rank of the snapshot holds of a group.
    fn theirs(&self, rank: u32, name: &str) -> Result<&'a GroupShards> {
        let Some(found) = self.shards.of(rank, name) else {
            return Err(field("shards", format!("group {name:?} of rank {rank}"), "none").into());
        };
        match &found.uncut {
            None => Ok(found),
            Some(reason) => Err(Error::Uncut { what: format!("group {name:?} of the snapshot"), reason: reason.clone() }),
        }
    }

    /// The pages of a group, checked; none if the snapshot has none.
    fn sources(&self, group: &Group, boundary: u64) -> Result<Option<Sources<'a>>> {
        let name = &group.layout.name;
        let mut trees: Vec<&'a (PageTree, Vec<Digest>)> =
            self.documents.trees.iter().filter(|(tree, _)| tree.group.name == *name).collect();
        trees.sort_by_key(|(tree, _)| tree.rank);
        if trees.is_empty() {
            return Ok(None);
        }
        if let Some(pair) = trees.windows(2).find(|pair| pair[0].0.rank == pair[1].0.rank) {
            return Err(field("$.layers", format!("one tree of group {name:?} of rank {}", pair[0].0.rank), "several").into());
        }
        let mut sources = Sources { trees: trees.clone(), shards: Vec::new(), parts: HashMap::new() };
        for (number, (tree, _)) in trees.iter().enumerate() {
            plan::alike(group, &tree.into())?;
            plan::pages(group, tree, tree.rank, &group.columns(boundary), boundary)?;
            sources.add(number, self.theirs(tree.rank, name)?)?;
        }
        sources.replicas(name, !boundary.is_multiple_of(u64::from(group.layout.block_tokens)))?;
        Ok(Some(sources))
    }

    /// Checks that the engine's ranks together take every unit that the snapshot has of a group.
    fn complete(&self, group: &Group, pages: Option<&Sources<'a>>) -> Result<()> {
        let name = &group.layout.name;
        let mut ours = Vec::new();
        for rank in 0..self.engine.world() {
            let groups = self.engine.groups(rank).iter();
            ours.extend(groups.filter(|group| group.layout.name == *name).map(|group| group.layout.shards(rank)));
        }
        let lost = |what: String, of: u64, units: u64| {
            let what = format!("{what}: units that the engine's ranks take");
            if units == of { Ok(()) } else { Err(Error::mismatch(ErrorCode::RankMismatch, what, of, units)) }
        };
        for ((component, layer), found) in pages.iter().flat_map(|pages| &pages.parts) {
            let parts = ours.iter().filter_map(|shards| shards.components.get(*component)).flatten();
            let shares = parts.filter(|part| part.layer == **layer).map(|part| &part.share);
            let of = pages.map_or(0, |pages| pages.part(*component, found[0]).share.of);
            if ours.iter().all(|shards| shards.uncut.is_none()) {
                lost(format!("layer {layer:?} of group {name:?}"), of, union(shares))?;
            }
        }
        let states: BTreeMap<&String, u64> =
            ours.iter().flat_map(|shards| &shards.states).map(|(name, share)| (name, share.share.of)).collect();
        for (state, of) in states {
            lost(format!("state {state:?}"), of, union(ours.iter().filter_map(|shards| Some(&shards.states.get(state)?.share))))?;
        }
        Ok(())
    }

    fn add_states(&self, plan: &mut Plan, group: &Group, rank: u32) -> Result<()> {
        let layout = &group.layout;
        let mut found = Vec::new();
        for state in &layout.states {
            found.push((state, self.tensors(&layout.name, &state.name)?));
        }
        if !layout.required && found.iter().all(|(_, tensors)| tensors.is_empty()) {
            return Ok(());
        }
        let ours = ours(group, rank)?;
        for (state, tensors) in found {
            let (Some(share), false) = (ours.states.get(&state.name), tensors.is_empty()) else {
                return Err(missing_state(&state.name, rank, "snapshot"));
            };
            let origin = origin(group, (state, share), &tensors, rank)?;
            plan.states.push(Stated { rank, group: layout.name.clone(), state: state.clone(), origin });
        }
        Ok(())
    }

    /// The tensors of this name, by rank.
    fn tensors(&self, group: &str, name: &str) -> Result<Vec<Found<'a>>> {
        let mut found = Vec::new();
        for (rank, checkpoint) in &self.documents.checkpoints {
            let Some(tensor) = checkpoint.tensors.iter().find(|tensor| tensor.name == name) else { continue };
            let share = self.theirs(*rank, group)?.states.get(name);
            let fits = |share: &&AxisShare| tensor.shape.get(share.axis as usize) == Some(&share.share.units());
            let Some(listed) = share.filter(fits) else {
                let expected = format!("the share of state {name:?} of rank {rank}, of shape {:?}", tensor.shape);
                return Err(field("shards", expected, format!("{share:?}")).into());
            };
            found.push((*rank, tensor, listed));
        }
        found.sort_by_key(|(rank, ..)| *rank);
        Ok(found)
    }
}

/// The pages of one group, by rank.
struct Sources<'a> {
    trees: Vec<&'a (PageTree, Vec<Digest>)>,
    shards: Vec<&'a GroupShards>,
    parts: HashMap<(usize, &'a str), Vec<Spot>>,
}

/// A part of a layer: its tree, its position among the parts, and where it begins in the page.
type Spot = (usize, usize, u64);

impl<'a> Sources<'a> {
    fn add(&mut self, number: usize, theirs: &'a GroupShards) -> Result<()> {
        let pair: &'a (PageTree, Vec<Digest>) = self.trees[number];
        let (tree, digests) = pair;
        let of = format!("group {:?} of rank {}", tree.group.name, tree.rank);
        let components = tree.components.len();
        if theirs.components.len() != components || digests.len() as u64 != tree.pages() * components as u64 {
            return Err(field("shards", format!("{components} components of {of}"), theirs.components.len().to_string()).into());
        }
        for (component, layers) in theirs.components.iter().enumerate() {
            let mut at = 0;
            for (position, part) in layers.iter().enumerate() {
                self.parts.entry((component, part.layer.as_str())).or_default().push((number, position, at));
                at += bytes(part);
            }
            if at != tree.page_bytes {
                return Err(field("shards", format!("{} bytes in a page of {of}", tree.page_bytes), at.to_string()).into());
            }
        }
        self.shards.push(theirs);
        Ok(())
    }

    fn part(&self, component: usize, (tree, position, _): Spot) -> &'a LayerShare {
        let shards: &'a GroupShards = self.shards[tree];
        &shards.components[component][position]
    }

    /// How a component is put together, and from which trees.
    fn cut(&self, group: &str, component: usize, parts: &[LayerShare]) -> Result<(PageCut, Vec<usize>)> {
        let (mut strips, mut trees, mut begin) = (Vec::new(), Vec::new(), 0);
        for part in parts {
            let what = format!("layer {:?} of group {group:?}", part.layer);
            let spots = self.parts.get(&(component, part.layer.as_str())).map_or(&[][..], Vec::as_slice);
            let theirs: Vec<&LayerShare> = spots.iter().map(|spot| self.part(component, *spot)).collect();
            for theirs in &theirs {
                same(&what, "repetitions, and bytes of a unit", &(part.outer, part.cell), &(theirs.outer, theirs.cell))?;
                same(&what, "units over all ranks", &part.share.of, &theirs.share.of)?;
            }
            let shares: Vec<&Share> = theirs.iter().map(|theirs| &theirs.share).collect();
            for Piece { source, from, to, count } in part.share.pieces(&shares).map_err(|unit| lacks(&what, unit))? {
                let (tree, _, start) = spots[source];
                let from_stride = shares[source].units() * part.cell;
                let source = trees.iter().position(|known| *known == tree).unwrap_or_else(|| {
                    trees.push(tree);
                    trees.len() - 1
                });
                let (from, to, to_stride) = (start + from * part.cell, begin + to * part.cell, part.share.units() * part.cell);
                strips.push(Strip { source, from, from_stride, to, to_stride, bytes: count * part.cell, times: part.outer });
            }
            begin += bytes(part);
        }
        let sources = trees.iter().map(|tree| self.trees[*tree].0.page_bytes).collect();
        Ok((PageCut { sources, bytes: begin, strips }, trees))
    }

    /// Checks ranks that hold the same: equal pages have equal digests. The last page may be partly
    /// filled, and have anything behind its last token.
    fn replicas(&self, group: &str, partly_filled: bool) -> Result<()> {
        let mut first: HashMap<&[Vec<LayerShare>], usize> = HashMap::new();
        for (number, shards) in self.shards.iter().enumerate() {
            let one = *first.entry(&shards.components[..]).or_insert(number);
            let ((tree, digests), (other, others)) = (self.trees[one], self.trees[number]);
            let components = tree.components.len();
            let sealed = digests.len().saturating_sub(if partly_filled { components } else { 0 });
            if let Some(at) = (0..sealed).find(|at| digests[*at] != others[*at]) {
                let what = format!("page {} of group {group:?}, which ranks {} and {} hold", at / components, tree.rank, other.rank);
                return Err(Error::mismatch(ErrorCode::RankMismatch, what, digests[at], others[at]));
            }
        }
        for ((component, layer), spots) in &self.parts {
            let shares: HashSet<&Share> = spots.iter().map(|spot| &self.part(*component, *spot).share).collect();
            if union(shares.iter().copied()) != shares.iter().map(|share| share.units()).sum::<u64>() {
                let what = format!("layer {layer:?} of group {group:?}");
                return Err(Error::Uncut { what, reason: "ranks share some of their units and not others".into() });
            }
        }
        Ok(())
    }
}

fn add_pages(plan: &mut Plan, group: &Group, sources: Option<&Sources<'_>>, rank: u32) -> Result<()> {
    let name = &group.layout.name;
    let Some(sources) = sources else {
        return if group.layout.required { Err(missing_group(name, rank, "snapshot")) } else { Ok(()) };
    };
    let ours = ours(group, rank)?;
    let made = ours.components.iter().enumerate().map(|(component, parts)| sources.cut(name, component, parts));
    let made: Vec<(PageCut, Vec<usize>)> = made.collect::<Result<_>>()?;
    let (columns, mut digests) = (group.columns(plan.boundary), Vec::new());
    for column in 0..(columns.end - columns.start) as usize {
        for (component, (_, trees)) in made.iter().enumerate() {
            digests.extend(trees.iter().map(|tree| sources.trees[*tree].1[column * made.len() + component]));
        }
    }
    let cuts = made.into_iter().map(|(cut, _)| (!cut.is_whole()).then(|| Arc::new(cut))).collect();
    plan.paged.push(Paged { rank, group: name.clone(), columns, digests, cuts });
    Ok(())
}

/// What a rank of the engine holds of a group.
fn ours(group: &Group, rank: u32) -> Result<GroupShards> {
    let ours = group.layout.shards(rank);
    match ours.uncut {
        None => Ok(ours),
        Some(reason) => Err(Error::Uncut { what: format!("group {:?} of the engine", ours.group), reason }),
    }
}

/// What a state tensor of the engine is made from.
fn origin(group: &Group, (state, share): (&State, &AxisShare), found: &[Found<'_>], rank: u32) -> Result<Origin> {
    let what = format!("state {:?}", state.name);
    for (number, (there, tensor, theirs)) in found.iter().enumerate() {
        same(&what, "dimension that ranks share", &share.axis, &theirs.axis)?;
        same(&what, "units over all ranks", &share.share.of, &theirs.share.of)?;
        let before = found[..number].iter().find(|(_, _, before)| before.share == theirs.share);
        if let Some((other, replica, _)) = before.filter(|(_, replica, _)| replica.value_hash != tensor.value_hash) {
            let what = format!("{what}, which ranks {other} and {there} hold");
            return Err(Error::mismatch(ErrorCode::RankMismatch, what, replica.value_hash, tensor.value_hash));
        }
    }
    // It fits as it is, even if it is opaque.
    if let Some((_, tensor, _)) = found.iter().find(|(_, _, theirs)| theirs.share == share.share) {
        return plan::as_it_is(group, state, tensor, rank);
    }
    let (name, kind, shape, form) = (state.name.clone(), state.kind.clone(), state.shape.clone(), plan::form(state)?);
    let (layer, logical_dtype, axis) = (state.layer, state.logical_dtype.parse()?, share.axis as usize);
    let recut = Recut { name, kind, layer, shape, logical_dtype, form, axis };
    for (_, tensor, _) in found {
        recut.check(tensor).map_err(|error| plan::misfit(rank, error))?;
    }
    overlap::alone(group, state, rank)?;
    let shares: Vec<&Share> = found.iter().map(|(_, _, theirs)| &theirs.share).collect();
    let cut = |pieces: Vec<Piece>| {
        let of = |number: usize| pieces.iter().filter(|piece| piece.source == number).copied().collect::<Vec<_>>();
        let sources = found.iter().enumerate().map(|(number, (_, tensor, _))| ((*tensor).clone(), of(number)));
        StateCut { recut: recut.clone(), sources: sources.filter(|(_, pieces)| !pieces.is_empty()).collect() }
    };
    let pieces = share.share.pieces(&shares).map_err(|unit| lacks(&what, unit))?;
    let all: Vec<Piece> = shares.iter().enumerate().flat_map(|(source, theirs)| common(&share.share, source, theirs)).collect();
    let is_replicated = all.iter().map(|piece| piece.count).sum::<u64>() > share.share.units();
    let replicas = is_replicated.then(|| Arc::new(cut(all)));
    Ok(Origin::Cut { cut: Arc::new(cut(pieces)), replicas })
}

/// All units that a rank of the snapshot has in common with one of the engine.
fn common(ours: &Share, source: usize, theirs: &Share) -> Vec<Piece> {
    let (mut pieces, mut to) = (Vec::new(), 0);
    for [first, behind] in &ours.held {
        let mut from = 0;
        for [start, end] in &theirs.held {
            let (begin, stop) = ((*first).max(*start), (*behind).min(*end));
            if begin < stop {
                pieces.push(Piece { source, from: from + begin - start, to: to + begin - first, count: stop - begin });
            }
            from += end - start;
        }
        to += behind - first;
    }
    pieces
}

fn lacks(what: &str, unit: u64) -> Error {
    Error::mismatch(ErrorCode::RankMismatch, format!("ranks of the snapshot that hold unit {unit} of {what}"), "one", "none")
}

/// Bytes of a part. Its share was checked.
fn bytes(part: &LayerShare) -> u64 {
    part.outer * part.share.units() * part.cell
}
