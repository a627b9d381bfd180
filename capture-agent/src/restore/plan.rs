//! All checks that need no page: engine and snapshot must have the same geometry, prefix and ranks,
//! at one boundary. State tensors may have another form in the engine than in the snapshot.

use super::documents::{Documents, field};
use crate::engines::{Engine, Group};
use crate::error::{Error, Result};
use pfr_schema::checkpoint::{Form, Key, Tensor};
use pfr_schema::engine::{GroupLayout, Part, State};
use pfr_schema::tree::{GroupKind, PageTree};
use pfr_schema::{Digest, ErrorCode, FormatError, flat, prefix};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Display};
use std::ops::Range;

/// The blobs of a snapshot by their place in the engine.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub boundary: u64,
    pub key: Key,
    pub tokens: Vec<u32>,
    pub paged: Vec<Paged>,
    pub states: Vec<Stated>,
}

/// The pages of one group of one of the engine's ranks.
#[derive(Clone, Debug)]
pub(super) struct Paged {
    pub rank: u32,
    pub group: String,
    pub columns: Range<u64>,
    /// Column by column, component by component.
    pub digests: Vec<Digest>,
}

/// A state tensor of one of the engine's ranks.
#[derive(Clone, Debug)]
pub(super) struct Stated {
    pub rank: u32,
    pub group: String,
    pub state: State,
    pub tensor: Tensor,
    /// The form of the live slot, if the payload has to be converted to it.
    pub convert: Option<Form>,
}

impl Plan {
    /// Checks a snapshot against an engine.
    pub fn make(engine: &Engine, documents: &Documents) -> Result<Self> {
        fingerprint(engine.deployment(), engine.fingerprint(), documents)?;
        let (boundary, key, tokens) = identity(engine, documents)?;
        ranks(engine, documents)?;
        known(engine, documents)?;
        let mut plan = Self { boundary, key, tokens, paged: Vec::new(), states: Vec::new() };
        for rank in 0..engine.world() {
            for group in engine.groups(rank) {
                // Every rank holds the same bytes, captured from the first.
                let from = if group.layout.replicated { 0 } else { rank };
                match group.layout.kind {
                    GroupKind::Recurrent => plan.add_states(documents, group, rank, from)?,
                    _ => plan.add_pages(documents, group, rank, from)?,
                }
            }
        }
        Ok(plan)
    }

    /// Pages, over all groups and ranks.
    pub fn pages(&self) -> u64 {
        self.paged.iter().map(|paged| paged.columns.end - paged.columns.start).sum()
    }

    fn add_pages(&mut self, documents: &Documents, group: &Group, rank: u32, from: u32) -> Result<()> {
        let name = &group.layout.name;
        let mut trees = documents.trees.iter().filter(|(tree, _)| tree.group.name == *name && tree.rank == from);
        let Some((tree, digests)) = trees.next() else {
            return if group.layout.required { Err(missing_group(name, rank, "snapshot")) } else { Ok(()) };
        };
        if trees.next().is_some() {
            return Err(field("$.layers", format!("one tree of group {name:?} of rank {from}"), "several").into());
        }
        geometry(group, tree)?;
        let columns = group.columns(self.boundary);
        pages(group, tree, rank, &columns, self.boundary)?;
        self.paged.push(Paged { rank, group: name.clone(), columns, digests: digests.clone() });
        Ok(())
    }

    fn add_states(&mut self, documents: &Documents, group: &Group, rank: u32, from: u32) -> Result<()> {
        let tensors = documents.checkpoints.iter().find(|(rank, _)| *rank == from).map_or(&[][..], |(_, c)| &c.tensors[..]);
        let find = |state: &State| tensors.iter().find(|tensor| tensor.name == state.name);
        if !group.layout.required && group.layout.states.iter().all(|state| find(state).is_none()) {
            return Ok(());
        }
        for state in &group.layout.states {
            let tensor = find(state).ok_or_else(|| missing_state(&state.name, rank, "snapshot"))?;
            let convert = slot(state, tensor, rank)?;
            if convert.is_some() {
                alone(&group.layout, state, rank)?;
            }
            self.states.push(Stated { rank, group: group.layout.name.clone(), state: state.clone(), tensor: tensor.clone(), convert });
        }
        Ok(())
    }
}

/// Checks that a snapshot is of an engine with this configuration.
pub(super) fn fingerprint(ours: &BTreeMap<String, Value>, fingerprint: Digest, documents: &Documents) -> Result<()> {
    let theirs = &documents.config.deployment;
    if documents.config.fingerprint == Some(fingerprint) && ours == theirs {
        return Ok(());
    }
    let keys: BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    let differs: Vec<&str> = keys.into_iter().filter(|key| ours.get(*key) != theirs.get(*key)).map(String::as_str).collect();
    let differs = match &differs[..] {
        // The deployments are equal, but the recorded digest belongs to another one.
        [] => format!("fingerprint: {fingerprint} in the engine, {:?} in the snapshot", documents.config.fingerprint),
        keys => keys.join(", "),
    };
    let json = |deployment| serde_json::to_string(deployment).map_err(|e| Error::Internal(e.to_string()));
    Err(Error::Fingerprint { engine: json(ours)?, snapshot: json(theirs)?, differs })
}

/// Checks that tokens, key and checkpoints name one boundary of one prefix.
fn identity(engine: &Engine, documents: &Documents) -> Result<(u64, Key, Vec<u32>)> {
    let config = &documents.config;
    let lacks = |what: &str| field(&format!("config.{what}"), "a value, as in every snapshot of an engine", "none");
    let boundary = config.boundary.filter(|boundary| *boundary > 0).ok_or_else(|| lacks("boundary"))?;
    let key = config.prefix.clone().ok_or_else(|| lacks("prefix"))?;
    let tokens = documents.tokens.clone().ok_or_else(|| field("$.layers", "a layer with the tokens", "none"))?;
    let at = |what: &str, found: u64| Error::mismatch(ErrorCode::BoundaryMismatch, format!("prefix length of {what}"), boundary, found);
    let prefix_mismatch = |what: &str, expected: &dyn Display, found: &dyn Display| {
        Error::mismatch(ErrorCode::PrefixMismatch, format!("prefix: {what}"), expected, found)
    };
    if key.tokens != boundary {
        return Err(at("the prefix key", key.tokens));
    }
    let computed = usize::try_from(boundary).ok().and_then(|boundary| tokens.get(..boundary));
    let computed = computed.ok_or_else(|| at("the tokens", tokens.len() as u64))?;
    if key.scheme != prefix::SCHEME {
        return Err(prefix_mismatch("scheme", &prefix::SCHEME, &key.scheme));
    }
    let found = prefix::key(&engine.fingerprint(), &key.salt, key.adapter.as_deref(), computed);
    if found != key.prefix {
        let found = format!("{found}, of the snapshot's tokens, salt and adapter");
        return Err(prefix_mismatch("the key of the state", &key.prefix, &found));
    }
    for (rank, checkpoint) in &documents.checkpoints {
        if checkpoint.key.tokens != boundary {
            return Err(at(&format!("the checkpoint of rank {rank}"), checkpoint.key.tokens));
        }
        if checkpoint.key != key {
            return Err(prefix_mismatch("the checkpoint's key", &format!("{key:?}"), &format!("{:?}", checkpoint.key)));
        }
    }
    Ok((boundary, key, tokens))
}

/// Checks that the snapshot has the ranks of the engine.
fn ranks(engine: &Engine, documents: &Documents) -> Result<()> {
    let world = u64::from(engine.world());
    let other = |what, found: u64| Err(Error::mismatch(ErrorCode::RankMismatch, what, world, found));
    if let Some((tree, _)) = documents.trees.iter().find(|(tree, _)| tree.world != engine.world()) {
        return other("ranks", u64::from(tree.world));
    }
    let here: BTreeSet<u32> =
        documents.trees.iter().map(|(tree, _)| tree.rank).chain(documents.checkpoints.iter().map(|(r, _)| *r)).collect();
    if let Some(beyond) = here.iter().find(|rank| **rank >= engine.world()) {
        return other("ranks", u64::from(*beyond) + 1);
    }
    // A rank without state of its own is not in a snapshot.
    let own = |rank: &u32| engine.groups(*rank).iter().any(|group| (*rank == 0 || !group.layout.replicated) && group.layout.required);
    let missing = (0..engine.world()).filter(own).filter(|rank| !here.contains(rank)).count() as u64;
    if missing > 0 && !here.is_empty() { other("ranks with state", world - missing) } else { Ok(()) }
}

/// Checks that the engine has a place for each part of the snapshot.
fn known(engine: &Engine, documents: &Documents) -> Result<()> {
    let own = |rank: u32| engine.groups(rank).iter().filter(move |group| rank == 0 || !group.layout.replicated);
    for (tree, _) in &documents.trees {
        if !own(tree.rank).any(|group| group.layout.name == tree.group.name) {
            return Err(missing_group(&tree.group.name, tree.rank, "engine"));
        }
    }
    for (rank, checkpoint) in &documents.checkpoints {
        for tensor in &checkpoint.tensors {
            if !own(*rank).any(|group| group.layout.states.iter().any(|state| state.name == tensor.name)) {
                return Err(missing_state(&tensor.name, *rank, "engine"));
            }
        }
    }
    Ok(())
}

fn missing_group(group: &str, rank: u32, side: &'static str) -> Error {
    Error::Missing { code: ErrorCode::MissingGroup, what: format!("group {group:?}"), rank, side }
}

fn missing_state(tensor: &str, rank: u32, side: &'static str) -> Error {
    Error::Missing { code: ErrorCode::MissingState, what: format!("state {tensor:?}"), rank, side }
}

fn same<T: PartialEq + Debug>(of: &str, what: &str, engine: &T, snapshot: &T) -> Result<()> {
    if engine == snapshot {
        return Ok(());
    }
    let (expected, found) = (format!("{engine:?}"), format!("{snapshot:?}"));
    Err(Error::mismatch(ErrorCode::GeometryMismatch, format!("{of}: {what}"), expected, found))
}

fn geometry(group: &Group, tree: &PageTree) -> Result<()> {
    let layout = &group.layout;
    let of = format!("group {:?} of rank {}", layout.name, tree.rank);
    same(&of, "kind", &layout.kind, &tree.group.kind)?;
    // Opaque bytes can only be read by the same deployment under the same tag.
    same(&of, "layout", &layout.layout, &tree.layout)?;
    same(&of, "geometry", &layout.geometry.filter(|_| layout.layout == flat::LAYOUT), &tree.geometry)?;
    same(&of, "tokens in a page", &layout.block_tokens, &tree.page_size_tokens)?;
    same(&of, "bytes of a page", &group.page_bytes(), &tree.page_bytes)?;
    let components: Vec<&str> = layout.components.iter().map(|component| component.name.as_str()).collect();
    same(&of, "components", &components, &tree.components.iter().map(String::as_str).collect())?;
    same(&of, "sequences", &1, &tree.sequences.len())
}

/// Checks that the tree has exactly the columns that the boundary needs.
fn pages(group: &Group, tree: &PageTree, rank: u32, columns: &Range<u64>, boundary: u64) -> Result<()> {
    let name = &group.layout.name;
    let expected = columns.end - columns.start;
    let Some(sequence) = tree.sequences.first().filter(|sequence| tree.pages() == expected && sequence.ix.len() == expected) else {
        let what = format!("pages of group {name:?} of rank {rank}");
        return Err(Error::mismatch(ErrorCode::PageCountMismatch, what, expected, tree.pages()));
    };
    let misplaced = |what: &str, expected: u64, found: u32| {
        Err(Error::mismatch(ErrorCode::BoundaryMismatch, format!("{what} of group {name:?} of rank {rank}"), expected, found))
    };
    let mut off = columns.clone().zip(tree.ix.iter().zip(sequence.ix.iter()));
    let off = off.find(|(column, (ix, listed))| (u64::from(*ix), u64::from(*listed)) != (*column, *column));
    if let Some((column, (ix, listed))) = off {
        let found = if u64::from(ix) == column { listed } else { ix };
        return misplaced("a column", column, found);
    }
    let fill = if expected == 0 { 0 } else { boundary % u64::from(group.layout.block_tokens) };
    if fill != u64::from(sequence.fill) {
        return misplaced("tokens in the last page", fill, sequence.fill);
    }
    Ok(())
}

/// Compares a state of the engine with a tensor. Returns the form of the live slot if the tensor's
/// bytes do not have their value in it, and can be converted.
fn slot(state: &State, tensor: &Tensor, rank: u32) -> Result<Option<Form>> {
    let of = format!("state {:?} of rank {rank}", state.name);
    same(&of, "kind", &state.kind, &tensor.kind)?;
    same(&of, "layer", &state.layer, &tensor.layer)?;
    same(&of, "shape", &state.shape, &tensor.shape)?;
    same(&of, "logical dtype", &state.logical_dtype, &tensor.logical_dtype.to_string())?;
    let form = Form { storage_dtype: state.storage_dtype.parse()?, layout: state.layout.clone(), bytes: state.part.bytes };
    let stored = tensor.form();
    if form.reads_as(&stored) {
        return Ok(None);
    }
    // Only their backend can read opaque bytes: they fit as they are, or not at all.
    if form.layout.is_opaque() || stored.layout.is_opaque() {
        same(&of, "storage dtype", &state.storage_dtype, &stored.storage_dtype.to_string())?;
        same(&of, "layout", &form.layout, &stored.layout)?;
        same(&of, "bytes", &form.bytes, &stored.bytes)?;
    }
    match tensor.check_form(&form) {
        Ok(()) => Ok(Some(form)),
        Err(FormatError::Field { path, expected, found, .. }) => {
            let what = format!("rank {rank}, the engine's state {path}");
            Err(Error::mismatch(ErrorCode::GeometryMismatch, what, expected, found))
        }
        Err(error) => Err(error.into()),
    }
}

/// A mirror has zeros between its elements, so no other state of the group may have bytes there.
fn alone(group: &GroupLayout, state: &State, rank: u32) -> Result<()> {
    let Some(other) = group.states.iter().find(|other| other.name != state.name && shares(&state.part, &other.part, group.blocks)) else {
        return Ok(());
    };
    let what = format!("state {:?} of rank {rank}: layout", state.name);
    let expected = format!("that of the snapshot, because it shares bytes with state {:?},", other.name);
    Err(Error::mismatch(ErrorCode::GeometryMismatch, what, expected, "another one"))
}

/// Whether any block of one part has bytes in common with any block of the other: blocks belong to
/// different sequences. Parts of different strides count as sharing if the ranges of all their blocks
/// meet.
fn shares(one: &Part, two: &Part, blocks: u32) -> bool {
    let (last, distance) = (i128::from(blocks.saturating_sub(1)), i128::from(two.offset) - i128::from(one.offset));
    let (one_bytes, two_bytes) = (i128::from(one.bytes), i128::from(two.bytes));
    let (one_stride, two_stride) = (i128::from(one.block_stride), i128::from(two.block_stride));
    if one.memory != two.memory {
        return false;
    }
    if one_stride != two_stride || one_stride == 0 {
        return distance < last * one_stride + one_bytes && -distance < last * two_stride + two_bytes;
    }
    // Blocks k apart meet if -two_bytes < distance + k * stride < one_bytes.
    let least = (-two_bytes - distance).div_euclid(one_stride) + 1;
    let most = (one_bytes - distance - 1).div_euclid(one_stride);
    least.max(-last) <= most.min(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_share_bytes_if_any_of_their_blocks_do() {
        let part = |offset, block_stride, bytes| Part { memory: "kv".into(), offset, block_stride, bytes };
        let conv = part(0, 200, 100);
        assert!(!shares(&conv, &part(100, 200, 100), 8), "beside it, in each block");
        assert!(shares(&conv, &part(99, 200, 1), 8) && shares(&part(99, 200, 1), &conv, 8), "its last byte");
        assert!(!shares(&conv, &part(1600, 200, 100), 8), "behind all of its blocks");
        assert!(shares(&part(0, 200, 180), &part(350, 200, 30), 8), "the second block of one, the first of the other");
        assert!(!shares(&part(0, 200, 180), &part(350, 200, 30), 1), "there is no second block");
        assert!(!shares(&part(0, 200, 150), &part(350, 200, 50), 8), "in the gaps");
        assert!(shares(&conv, &part(150, 100, 50), 2), "in the second block");
        assert!(!shares(&conv, &part(150, 100, 50), 1), "there is no second block");
        assert!(!shares(&conv, &Part { memory: "other".into(), ..conv.clone() }, 8));
    }
}
