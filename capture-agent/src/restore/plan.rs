//! All checks that need no page: engine and snapshot must have the same geometry, prefix and ranks,
//! at one boundary. State tensors may have another form in the engine than in the snapshot. Of an
//! engine with other ranks, [`reshard`] makes the plan.

use super::cut::{PageCut, StateCut};
use super::documents::{Documents, field};
use super::{overlap, reshard};
use crate::engines::{Engine, Group};
use crate::error::{Error, Result};
use pfr_schema::agent::{Difference, Resharded, TreeOutline};
use pfr_schema::checkpoint::{Form, Key, Tensor};
use pfr_schema::engine::State;
use pfr_schema::resume::Legal;
use pfr_schema::tree::{GroupKind, PageTree};
use pfr_schema::{Digest, ErrorCode, FormatError, flat, prefix};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{Debug, Display};
use std::ops::Range;
use std::sync::Arc;

/// The blobs of a snapshot by their place in the engine.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub boundary: u64,
    /// For requests of this engine.
    pub key: Key,
    pub tokens: Vec<u32>,
    /// Where the snapshot may be resumed.
    pub legal: Legal,
    pub paged: Vec<Paged>,
    pub states: Vec<Stated>,
    /// If the engine has other ranks than the snapshot.
    pub resharded: Option<Resharded>,
}

/// The pages of one group of one of the engine's ranks.
#[derive(Clone, Debug)]
pub(super) struct Paged {
    pub rank: u32,
    pub group: String,
    pub columns: Range<u64>,
    /// Column by column, component by component, and the sources of one that is cut.
    pub digests: Vec<Digest>,
    /// For each component how it is put together, if it is cut. None at all if nothing is.
    pub cuts: Vec<Option<Arc<PageCut>>>,
}

impl Paged {
    /// Blobs that a component is made from.
    pub fn sources(&self, component: usize) -> usize {
        self.cut(component).map_or(1, |cut| cut.sources())
    }

    pub fn cut(&self, component: usize) -> Option<&Arc<PageCut>> {
        self.cuts.get(component)?.as_ref()
    }
}

/// A state tensor of one of the engine's ranks.
#[derive(Clone, Debug)]
pub(super) struct Stated {
    pub rank: u32,
    pub group: String,
    pub state: State,
    pub origin: Origin,
}

/// What a state tensor is made from.
#[derive(Clone, Debug)]
pub(super) enum Origin {
    /// A tensor of the snapshot, and the form of the live slot if the payload has to be converted
    /// to it.
    Tensor { tensor: Box<Tensor>, convert: Option<Form> },
    /// Tensors of several ranks. If ranks hold the same units, `replicas` has those of all.
    Cut { cut: Arc<StateCut>, replicas: Option<Arc<StateCut>> },
}

impl Stated {
    /// The blobs that are read to prove it.
    pub fn blobs(&self) -> Vec<Digest> {
        match &self.origin {
            Origin::Tensor { tensor, .. } => vec![tensor.payload_hash],
            Origin::Cut { cut, replicas } => cut.blobs().chain(replicas.iter().flat_map(|cut| cut.blobs())).collect(),
        }
    }
}

impl Plan {
    /// Checks a snapshot against an engine.
    pub fn make(engine: &Engine, documents: &Documents) -> Result<Self> {
        let differs = fingerprint(engine.deployment(), engine.parallel(), engine.fingerprint(), documents)?;
        let (boundary, key, tokens) = identity(engine, documents)?;
        let legal = Legal::of_trees(boundary, documents.trees.iter().map(|(tree, _)| tree), !documents.checkpoints.is_empty());
        let mut plan = Self { boundary, key, tokens, legal, paged: Vec::new(), states: Vec::new(), resharded: None };
        if !differs.is_empty() {
            reshard::add(&mut plan, engine, documents, differs)?;
            return Ok(plan);
        }
        let trees: Vec<TreeOutline> = documents.trees.iter().map(|(tree, _)| tree.into()).collect();
        ranks(engine, &trees, &documents.checkpoints.iter().map(|(rank, _)| *rank).collect())?;
        known_groups(engine, &trees)?;
        known_states(engine, documents)?;
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

    /// The part of a plan for a resume at this token position. All pages of the part are full:
    /// their digests prove the state of its tokens, and of no others.
    pub fn upto(mut self, engine: &Engine, position: u64) -> Result<Self> {
        if position == self.boundary {
            return Ok(self);
        }
        if !self.legal.is_legal(position) || !self.states.is_empty() {
            return Err(Error::Position { found: position, end: self.boundary, step: self.legal.first() });
        }
        let computed = usize::try_from(position).unwrap_or(usize::MAX);
        // The next token is chosen, and computed after the restore.
        self.tokens.truncate(computed.saturating_add(1));
        let tokens = self.tokens.get(..computed).ok_or_else(|| Error::Internal("a legal position beyond the tokens".into()))?;
        self.key.prefix = prefix::key(&engine.fingerprint(), &self.key.salt, self.key.adapter.as_deref(), tokens);
        (self.key.tokens, self.boundary) = (position, position);
        for paged in &mut self.paged {
            let group = engine.groups(paged.rank).iter().find(|group| group.layout.name == paged.group);
            let columns = group.map(|group| group.columns(position)).filter(|columns| columns.start == 0 && paged.columns.start == 0);
            let columns = columns.ok_or_else(|| Error::Internal(format!("group {:?} is cut at {position} tokens", paged.group)))?;
            let each = paged.digests.len() / usize::try_from(paged.columns.end).unwrap_or(usize::MAX).max(1);
            paged.digests.truncate(each * usize::try_from(columns.end).unwrap_or(usize::MAX));
            paged.columns = columns;
        }
        Ok(self)
    }

    /// Whether it resumes at the end of the snapshot.
    pub fn is_end(&self) -> bool {
        self.boundary == self.legal.end()
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
        geometry(group, &tree.into())?;
        let columns = group.columns(self.boundary);
        pages(group, tree, rank, &columns, self.boundary)?;
        self.paged.push(Paged { rank, group: name.clone(), columns, digests: digests.clone(), cuts: Vec::new() });
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
            let origin = as_it_is(group, state, tensor, rank)?;
            self.states.push(Stated { rank, group: group.layout.name.clone(), state: state.clone(), origin });
        }
        Ok(())
    }
}

/// Compares the engine configurations. Returns the keys that differ, if the state may be cut anew
/// for them; `parallel` are those that the engine says are about ranks alone.
pub(super) fn fingerprint(
    ours: &BTreeMap<String, Value>,
    parallel: &[String],
    fingerprint: Digest,
    documents: &Documents,
) -> Result<Vec<String>> {
    let config = &documents.config;
    let shared = |key: &str| documents.shards.iter().flat_map(|shards| &shards.parallel).any(|theirs| theirs == key);
    let theirs =
        Recorded { deployment: &config.deployment, fingerprint: config.fingerprint, parallel: &shared, reshard: documents.reshard };
    theirs.compare(ours, parallel, fingerprint)
}

/// The engine configuration that a snapshot says it was captured from.
pub(super) struct Recorded<'a> {
    pub deployment: &'a BTreeMap<String, Value>,
    pub fingerprint: Option<Digest>,
    /// Whether a key is about ranks alone.
    pub parallel: &'a dyn Fn(&str) -> bool,
    /// Whether the state may be cut anew.
    pub reshard: bool,
}

impl Recorded<'_> {
    /// As [`fingerprint`].
    pub fn compare(&self, ours: &BTreeMap<String, Value>, parallel: &[String], fingerprint: Digest) -> Result<Vec<String>> {
        let recorded = self.fingerprint;
        if recorded == Some(fingerprint) && ours == self.deployment {
            return Ok(Vec::new());
        }
        let differs = Difference::all(ours, self.deployment);
        if differs.is_empty() {
            // The deployments are equal, but the recorded digest belongs to another one.
            let snapshot = recorded.map_or_else(|| "none".to_owned(), |digest| digest.to_string());
            return Err(Error::FingerprintAlone { engine: fingerprint, snapshot });
        }
        // Both sides must say that a key is about ranks alone.
        let is_parallel = |difference: &Difference| {
            let key = &difference.field;
            parallel.contains(key) && (self.parallel)(key)
        };
        let ranks_only = recorded == Some(prefix::fingerprint(self.deployment)) && differs.iter().all(is_parallel);
        if ranks_only && self.reshard {
            return Ok(differs.into_iter().map(|difference| difference.field).collect());
        }
        let advice = ranks_only.then_some("nothing else differs: with --reshard the state is cut anew for these ranks");
        Err(Error::Fingerprint { differs, advice })
    }
}

/// The position and the key that a snapshot says its state belongs to.
pub(super) fn key_of(boundary: Option<u64>, key: Option<&Key>) -> Result<(u64, Key)> {
    let lacks = |what: &str| field(&format!("config.{what}"), "a value, as in every snapshot of an engine", "none");
    let boundary = boundary.filter(|boundary| *boundary > 0).ok_or_else(|| lacks("boundary"))?;
    let key = key.cloned().ok_or_else(|| lacks("prefix"))?;
    if key.tokens != boundary {
        return Err(off_boundary("the prefix key", boundary, key.tokens));
    }
    if key.scheme != prefix::SCHEME {
        return Err(Error::mismatch(ErrorCode::PrefixMismatch, "prefix: scheme", prefix::SCHEME, &key.scheme));
    }
    Ok((boundary, key))
}

fn off_boundary(what: &str, boundary: u64, found: u64) -> Error {
    Error::mismatch(ErrorCode::BoundaryMismatch, format!("prefix length of {what}"), boundary, found)
}

/// Checks that tokens, key and checkpoints name one boundary of one prefix.
fn identity(engine: &Engine, documents: &Documents) -> Result<(u64, Key, Vec<u32>)> {
    let config = &documents.config;
    let (boundary, key) = key_of(config.boundary, config.prefix.as_ref())?;
    let tokens = documents.tokens.clone().ok_or_else(|| field("$.layers", "a layer with the tokens", "none"))?;
    let at = |what: &str, found: u64| off_boundary(what, boundary, found);
    let prefix_mismatch = |what: &str, expected: &dyn Display, found: &dyn Display| {
        Error::mismatch(ErrorCode::PrefixMismatch, format!("prefix: {what}"), expected, found)
    };
    let computed = usize::try_from(boundary).ok().and_then(|boundary| tokens.get(..boundary));
    let computed = computed.ok_or_else(|| at("the tokens", tokens.len() as u64))?;
    let of = |fingerprint: &Digest| prefix::key(fingerprint, &key.salt, key.adapter.as_deref(), computed);
    let ours = engine.fingerprint();
    let theirs = config.fingerprint.unwrap_or(ours);
    let found = of(&theirs);
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
    // Requests of this engine name the prefix under its own configuration.
    let prefix = if theirs == ours { found } else { of(&ours) };
    let key = Key { prefix, ..key };
    Ok((boundary, key, tokens))
}

/// Checks that the snapshot has the ranks of the engine. `states` are the ranks that have state
/// tensors.
pub(super) fn ranks(engine: &Engine, trees: &[TreeOutline], states: &BTreeSet<u32>) -> Result<()> {
    let world = u64::from(engine.world());
    let other = |what, found: u64| Err(Error::mismatch(ErrorCode::RankMismatch, what, world, found));
    if let Some(tree) = trees.iter().find(|tree| tree.world != engine.world()) {
        return other("ranks", u64::from(tree.world));
    }
    let here: BTreeSet<u32> = trees.iter().map(|tree| tree.rank).chain(states.iter().copied()).collect();
    if let Some(beyond) = here.iter().find(|rank| **rank >= engine.world()) {
        return other("ranks", u64::from(*beyond) + 1);
    }
    // A rank without state of its own is not in a snapshot.
    let own = |rank: &u32| engine.groups(*rank).iter().any(|group| (*rank == 0 || !group.layout.replicated) && group.layout.required);
    let missing = (0..engine.world()).filter(own).filter(|rank| !here.contains(rank)).count() as u64;
    if missing > 0 && !here.is_empty() { other("ranks with state", world - missing) } else { Ok(()) }
}

/// The groups of a rank that a snapshot has of this rank: of a replicated group, rank 0 has it.
fn own(engine: &Engine, rank: u32) -> impl Iterator<Item = &Group> {
    engine.groups(rank).iter().filter(move |group| rank == 0 || !group.layout.replicated)
}

/// Checks that the engine has a group for each page tree. The ranks were checked.
pub(super) fn known_groups(engine: &Engine, trees: &[TreeOutline]) -> Result<()> {
    let unknown = trees.iter().find(|tree| !own(engine, tree.rank).any(|group| group.layout.name == tree.group.name));
    unknown.map_or(Ok(()), |tree| Err(missing_group(&tree.group.name, tree.rank, "engine")))
}

/// Checks that the engine has a place for each state tensor.
fn known_states(engine: &Engine, documents: &Documents) -> Result<()> {
    for (rank, checkpoint) in &documents.checkpoints {
        for tensor in &checkpoint.tensors {
            if !own(engine, *rank).any(|group| group.layout.states.iter().any(|state| state.name == tensor.name)) {
                return Err(missing_state(&tensor.name, *rank, "engine"));
            }
        }
    }
    Ok(())
}

pub(super) fn missing_group(group: &str, rank: u32, side: &'static str) -> Error {
    Error::Missing { code: ErrorCode::MissingGroup, what: format!("group {group:?}"), rank, side }
}

pub(super) fn missing_state(tensor: &str, rank: u32, side: &'static str) -> Error {
    Error::Missing { code: ErrorCode::MissingState, what: format!("state {tensor:?}"), rank, side }
}

pub(super) fn same<T: PartialEq + Debug>(of: &str, what: &str, engine: &T, snapshot: &T) -> Result<()> {
    if engine == snapshot {
        return Ok(());
    }
    let (expected, found) = (format!("{engine:?}"), format!("{snapshot:?}"));
    Err(Error::mismatch(ErrorCode::GeometryMismatch, format!("{of}: {what}"), expected, found))
}

pub(super) fn geometry(group: &Group, tree: &TreeOutline) -> Result<()> {
    alike(group, tree)?;
    let of = described(group, tree);
    let layout = &group.layout;
    same(&of, "geometry", &layout.geometry.filter(|_| layout.layout == flat::LAYOUT), &tree.geometry)?;
    same(&of, "bytes of a page", &group.page_bytes(), &tree.page_bytes)
}

fn described(group: &Group, tree: &TreeOutline) -> String {
    format!("group {:?} of rank {}", group.layout.name, tree.rank)
}

/// Compares what is the same on any rank.
pub(super) fn alike(group: &Group, tree: &TreeOutline) -> Result<()> {
    let layout = &group.layout;
    let of = described(group, tree);
    same(&of, "kind", &layout.kind, &tree.group.kind)?;
    // Opaque bytes can only be read by the same deployment under the same tag.
    same(&of, "layout", &layout.layout, &tree.layout)?;
    same(&of, "tokens in a page", &layout.block_tokens, &tree.page_size_tokens)?;
    let components: Vec<&str> = layout.components.iter().map(|component| component.name.as_str()).collect();
    same(&of, "components", &components, &tree.components.iter().map(String::as_str).collect())?;
    same(&of, "sequences", &1, &tree.sequences)
}

/// A group has more or fewer pages than the boundary needs.
pub(super) fn other_count(group: &Group, rank: u32, expected: u64, found: u64) -> Error {
    let what = format!("pages of group {:?} of rank {rank}", group.layout.name);
    Error::mismatch(ErrorCode::PageCountMismatch, what, expected, found)
}

/// Checks that the tree has exactly the columns that the boundary needs.
pub(super) fn pages(group: &Group, tree: &PageTree, rank: u32, columns: &Range<u64>, boundary: u64) -> Result<()> {
    let name = &group.layout.name;
    let expected = columns.end - columns.start;
    let Some(sequence) = tree.sequences.first().filter(|sequence| tree.pages() == expected && sequence.ix.len() == expected) else {
        return Err(other_count(group, rank, expected, tree.pages()));
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

/// A tensor as it is, or converted.
pub(super) fn as_it_is(group: &Group, state: &State, tensor: &Tensor, rank: u32) -> Result<Origin> {
    let convert = slot(state, tensor, rank)?;
    if convert.is_some() {
        overlap::alone(group, state, rank)?;
    }
    Ok(Origin::Tensor { tensor: Box::new(tensor.clone()), convert })
}

/// The form of a live slot.
pub(super) fn form(state: &State) -> Result<Form> {
    Ok(Form { storage_dtype: state.storage_dtype.parse()?, layout: state.layout.clone(), bytes: state.part.bytes })
}

/// Compares a state of the engine with a tensor. Returns the form of the live slot if the tensor's
/// bytes do not have their value in it, and can be converted.
fn slot(state: &State, tensor: &Tensor, rank: u32) -> Result<Option<Form>> {
    let of = format!("state {:?} of rank {rank}", state.name);
    same(&of, "kind", &state.kind, &tensor.kind)?;
    same(&of, "layer", &state.layer, &tensor.layer)?;
    same(&of, "shape", &state.shape, &tensor.shape)?;
    same(&of, "logical dtype", &state.logical_dtype, &tensor.logical_dtype.to_string())?;
    let form = form(state)?;
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
        Err(error) => Err(misfit(rank, error)),
    }
}

/// The slot of this rank does not fit.
pub(super) fn misfit(rank: u32, error: FormatError) -> Error {
    match error {
        FormatError::Field { path, expected, found, .. } => {
            let what = format!("rank {rank}, the engine's state {path}");
            Error::mismatch(ErrorCode::GeometryMismatch, what, expected, found)
        }
        error => error.into(),
    }
}
