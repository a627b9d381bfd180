//! The protocol between an engine and the capture agent on its host: messages on a Unix stream
//! socket.
//!
//! ```text
//! engine ─ register (memory by file descriptor, layout) ─▶ agent        one connection = one member of one engine
//! agent  ─ pause, table, pin, resume, unpin, oracle ─▶ engine           snapshot
//! agent  ─ allocate … (agent writes pages) … activate | discard ─▶ engine   restore, engines that take a sequence at any time
//! agent  ─ staged ─▶ engine ─ match, fill, abandon, report ─▶ agent     restore, engines that ask when a request comes
//! engine ─ save, resume ─▶ agent ─ sequences, hold, release ─▶ engine   captures without a pause, and what requests ask for
//! ```
//!
//! A message is a `u32` little-endian length and that many bytes, at most [`MAX_MESSAGE`]: JSON,
//! the [`binary`] form of a call that engines make for every request, or JSON with [`packed`]
//! tokens. File descriptors travel as `SCM_RIGHTS` with the message's first byte. Calls carry an id
//! that the answer repeats; each side numbers its own calls. The end of the connection is the end
//! of the member: the agent drops its mappings, and a paused engine resumes.
//!
//! `docs/capture.md` describes the same for authors of connectors.

mod ask;
pub mod binary;
mod hold;
mod outcome;
pub mod packed;

pub use ask::{Abandon, Fill, Filled, MAX_KEYS, Match, MatchKeys, Matched, Tier};
pub use hold::{
    Automatic, Dropped, Find, HoldName, HoldRequest, Released, Resume, Save, Saving, SequenceInfo, SequenceList, SequenceState,
};
pub use outcome::{Outcome, OutcomeRequest, Report, Taking};

use crate::checkpoint::{Dtype, Layout};
use crate::digest::Digest;
use crate::error::ErrorCode;
use crate::geometry::Geometry;
use crate::shards::{AxisShare, GroupShards, LayerShare};
use crate::tree::GroupKind;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// Version of the protocol.
pub const PROTOCOL: u32 = 4;
/// Bytes of one message: 64 MiB. A table of 380 K tokens is about 3 MB.
pub const MAX_MESSAGE: u32 = 64 << 20;
/// File descriptors with one message.
pub const MAX_DESCRIPTORS: usize = 64;

/// One message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Message<C> {
    /// A call.
    Call {
        /// Chosen by the caller, unique among its open calls.
        id: u64,
        /// What is asked for: `"call": name, "args": {…}`.
        #[serde(flatten)]
        call: C,
    },
    /// The answer to a call.
    Ok {
        /// The call's id.
        id: u64,
        /// The call's result; `{}` where there is none.
        ok: Value,
    },
    /// The call failed; nothing has changed.
    Error {
        /// The call's id.
        id: u64,
        /// The reason.
        error: CallError,
    },
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallError {
    /// One of the closed set.
    pub code: ErrorCode,
    /// What happened, for people.
    pub detail: String,
}

/// Calls that an engine makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "call", content = "args", rename_all = "kebab-case")]
pub enum ToAgent {
    /// First message of a connection. Descriptors of memories come with it. Answer: [`Registered`].
    Register(Box<Register>),
    /// A request has come: is there state for it? Answer: [`Matched`].
    Match(Match),
    /// The same question with the keys of prefixes instead of all tokens. Answer: [`Matched`].
    MatchKeys(MatchKeys),
    /// Fill the blocks allocated for a matched request, on this member's rank. Answer: [`Filled`],
    /// when the pages lie in memory and were hashed there; an error means that the blocks must not
    /// be used.
    Fill(Fill),
    /// The matched request went away. Answers `{}` when nothing writes into the blocks of the fill
    /// that it names, and nothing will.
    Abandon(Abandon),
    /// What became of states that lay ready. Answers `{}`.
    Report(Report),
    /// A request has ended and wants its state to be saved, or the engine saves every turn. Answer:
    /// [`Saving`], when the save is queued. The agent then calls `hold` for the sequence.
    Save(Save),
    /// A request wants to resume from this snapshot. Answer: [`Matched`].
    Resume(Resume),
    /// Automatic mode: look for state of a request in the agent's store, and in its registry.
    /// Answer: [`Matched`]; after `later`, call with the name alone.
    Find(Find),
}

/// Calls that the agent makes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "call", content = "args", rename_all = "kebab-case")]
pub enum ToEngine {
    /// Finish the current step, and start no other. Answers `{}` when memory is at rest. The engine
    /// goes on by itself when the limit is over.
    Pause(PauseRequest),
    /// Go on. Answer: [`Resumed`]. Allowed when not paused.
    Resume(ResumeRequest),
    /// Which sequences are there, and where do they lie? Answer: [`Table`]. While paused.
    Table(TableRequest),
    /// Pin the sealed blocks of a sequence, even if the sequence ends. Answer: [`Pinned`]. While
    /// paused.
    Pin(PinRequest),
    /// Blocks of this pin may be reused. Answers `{}`.
    Unpin(Pinned),
    /// The logits of the step that computes the token at the boundary. May be answered once that
    /// step was done. Answer: [`Oracle`].
    Oracle(OracleRequest),
    /// Take blocks for a sequence to be restored; it does not run. Answer: [`Allocated`].
    Allocate(Box<Allocate>),
    /// The blocks are filled and proven: the sequence may run. Answers `{}`.
    Activate(SequenceName),
    /// The restore was given up: free the blocks, forget the sequence. Answers `{}`.
    Discard(SequenceName),
    /// Which states lie ready. Comes to members that serve [`Verb::Request`] when they register and
    /// at each change. Answers `{}`.
    Staged(StagedStates),
    /// Which sequences can be held? Answer: [`SequenceList`].
    Sequences {},
    /// Keep the state of a sequence at one token position in blocks that nothing writes, until
    /// [`Self::Release`], or until the engine's own limit is over. The engine goes on, and first
    /// copies the bytes that its next step would overwrite to other blocks. Answers the
    /// [`Sequence`] when memory is at rest.
    Hold(HoldRequest),
    /// Blocks of this hold may be reused. Answer: [`Released`].
    Release(HoldName),
}

impl ToEngine {
    /// The name of the call, as on the wire.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pause(_) => "pause",
            Self::Resume(_) => "resume",
            Self::Table(_) => "table",
            Self::Pin(_) => "pin",
            Self::Unpin(_) => "unpin",
            Self::Oracle(_) => "oracle",
            Self::Allocate(_) => "allocate",
            Self::Activate(_) => "activate",
            Self::Discard(_) => "discard",
            Self::Staged(_) => "staged",
            Self::Sequences {} => "sequences",
            Self::Hold(_) => "hold",
            Self::Release(_) => "release",
        }
    }
}

/// What a member of an engine serves. An engine is ready when its members together serve
/// [`Verb::Pause`] and [`Verb::Table`] (or neither, if they serve [`Verb::Hold`], or it only
/// restores) and every rank's memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// `pause`, `resume`.
    Pause,
    /// `table`.
    Table,
    /// `pin`, `unpin`. Without it an engine stays paused until its bytes have left.
    Pin,
    /// `oracle`.
    Oracle,
    /// `allocate`, `activate`, `discard`.
    Allocate,
    /// Takes `staged`; calls `match`, `resume`, `fill`, `abandon`, `report` itself.
    Request,
    /// `sequences`, `hold`, `release`: captures without a pause. Calls `save` itself.
    Hold,
}

/// A member of an engine introduces itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Register {
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// The engine's name on this host: letters, digits, `.`, `_`, `-`; at most 64. Members with one
    /// name are one engine.
    pub engine: String,
    /// The member's name, unique in the engine: `scheduler`, `worker-0` …
    pub member: String,
    /// What it serves.
    pub verbs: Vec<Verb>,
    /// This member's rank; matters where it has memory.
    #[serde(default)]
    pub rank: u32,
    /// Ranks of the engine, 1 or more.
    pub world: u32,
    /// What must be equal for a restore: at least `weights` (digest), `engine` (kind and version),
    /// `backend` (kernels), and whatever else changes a bit of the result: `quantization`,
    /// `deterministic`, `graph_buckets`, `tp`, `pp`. Values are strings, integers, booleans or
    /// lists of them. The same for every member.
    pub deployment: BTreeMap<String, Value>,
    /// Keys of the deployment that say only how ranks share the state, such as `tp`: numbers. A
    /// snapshot of an engine that differs in nothing else can be cut anew. Of a member with memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parallel: Vec<String>,
    /// Memory that holds pages, in the order of the descriptors sent with this message.
    #[serde(default)]
    pub memories: Vec<Memory>,
    /// Where the pages lie. Empty for a member without memory.
    #[serde(default)]
    pub groups: Vec<GroupLayout>,
}

/// Answer to [`ToAgent::Register`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registered {
    /// The agent's version.
    pub agent: String,
    /// Digest of the deployment.
    pub fingerprint: Digest,
}

/// How memory is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryKind {
    /// A descriptor of POSIX shared memory (or a memfd).
    PosixShm,
    /// A CUDA IPC handle of an allocation.
    CudaIpc,
    /// A descriptor exported from CUDA's virtual memory management.
    CudaVmm,
}

/// One piece of shared memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Its name within the member.
    pub name: String,
    /// How it is shared.
    pub kind: MemoryKind,
    /// Bytes, from `offset`.
    pub bytes: u64,
    /// Where it begins in the allocation that handle or descriptor stands for.
    #[serde(default)]
    pub offset: u64,
    /// The 64 bytes of a CUDA IPC handle, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handle: Option<String>,
    /// UUID of the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// Block `b` of a part is the `bytes` bytes at `offset + b · block_stride` of its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Name of the memory.
    pub memory: String,
    /// Where block 0 lies.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes of one block.
    pub bytes: u64,
    /// Which part of a layer it is, if ranks share the layer by heads or channels. Only of a part
    /// of a component.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<LayerShare>,
}

/// One of the blobs that make up a page: the bytes of its parts (one for each layer, as a rule),
/// one after another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Component {
    /// `k` and `v`, or `kv`, or `latent`.
    pub name: String,
    /// Its parts.
    pub parts: Vec<Part>,
}

/// A tensor of recurrent state: one block of its part for each sequence, overwritten in every step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Name, unique in the engine's rank: `layers.3.recurrent`.
    pub name: String,
    /// As in [`crate::checkpoint::Tensor`].
    pub kind: String,
    /// Layer, if it belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// Logical dimensions.
    pub shape: Vec<u64>,
    /// Element type of the logical value.
    pub logical_dtype: String,
    /// Element type in memory.
    pub storage_dtype: String,
    /// Where each element lies in the block; without strides the bytes are the engine's own.
    pub layout: Layout,
    /// Where the blocks lie.
    pub part: Part,
    /// Which part of the tensor it is, if ranks share it along one dimension.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<AxisShare>,
}

/// A group of layers that share a block table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupLayout {
    /// Name, unique in the engine.
    pub name: String,
    /// What its blocks hold. [`GroupKind::Recurrent`] has `states`, the others `components`.
    pub kind: GroupKind,
    /// Tokens in a block; for recurrent groups 1.
    pub block_tokens: u32,
    /// Blocks in memory.
    pub blocks: u32,
    /// The block that stands in a table where the sequence has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub null_block: Option<u32>,
    /// Tokens that a sliding window looks back on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
    /// Whether a snapshot without it is refused.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub required: bool,
    /// Whether every rank holds the same bytes: then rank 0's are taken.
    #[serde(default, skip_serializing_if = "is_no")]
    pub replicated: bool,
    /// Why its parts and states have no share, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uncut: Option<String>,
    /// [`crate::flat::LAYOUT`] if pages are just that, else `opaque/<engine>/<backend>/…`: bytes
    /// that only the same deployment reads.
    pub layout: String,
    /// Shape of a page; given exactly when the layout is [`crate::flat::LAYOUT`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geometry: Option<Geometry>,
    /// Type of the elements of a page without a geometry, if all or nearly all are of one type. It
    /// decides how pages are encoded in the agent's store, and is not part of the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Blobs of a page.
    #[serde(default)]
    pub components: Vec<Component>,
    /// State tensors.
    #[serde(default)]
    pub states: Vec<State>,
}

impl GroupLayout {
    /// Type of the elements of a page, if the engine says it.
    #[must_use]
    pub fn elements(&self) -> Option<Dtype> {
        self.geometry.map(|geometry| geometry.dtype.into()).or(self.dtype)
    }

    /// What the rank with this layout holds of each layer and state tensor.
    #[must_use]
    pub fn shards(&self, rank: u32) -> GroupShards {
        let group = self.name.clone();
        let parts = |component: &Component| component.parts.iter().map(|part| part.share.clone()).collect();
        let components: Option<Vec<Vec<LayerShare>>> = self.components.iter().map(parts).collect();
        let states: Option<BTreeMap<String, AxisShare>> =
            self.states.iter().map(|state| Some((state.name.clone(), state.share.clone()?))).collect();
        if let (Some(components), Some(states)) = (components, states) {
            return GroupShards { rank, group, uncut: None, components, states };
        }
        let unknown = || "the engine does not say how its ranks share it".to_owned();
        GroupShards { rank, group, uncut: Some(self.uncut.clone().unwrap_or_else(unknown)), ..GroupShards::default() }
    }
}

fn yes() -> bool {
    true
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_yes(value: &bool) -> bool {
    *value
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn is_no(value: &bool) -> bool {
    !*value
}

/// Arguments of [`ToEngine::Pause`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseRequest {
    /// Names this pause. No other pause of the engine has this name.
    #[serde(default)]
    pub pause: String,
    /// Milliseconds after which the engine goes on by itself, counted from this call; 0 for never.
    /// An engine may have a shorter limit of its own.
    #[serde(default)]
    pub limit_ms: u64,
}

/// Arguments of [`ToEngine::Resume`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeRequest {
    /// The pause to end. A pause with another name is not ended.
    #[serde(default)]
    pub pause: String,
}

/// Answer to [`ToEngine::Resume`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resumed {
    /// Whether the engine was paused from the answer to [`ToEngine::Pause`] until it was told to
    /// resume. If not, it went on by itself, and bytes read meanwhile may be of several steps.
    /// The answer to a repeated call is that of the first.
    pub held: bool,
}

/// Arguments of [`ToEngine::Staged`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagedStates {
    /// Grows with each change; an engine ignores a lower one.
    pub version: u64,
    /// Prefix lengths of the states, ascending. Nothing has to be asked while there are none.
    pub boundaries: Vec<u64>,
    /// Whether a state is on its way whose tokens are not known yet: any request may match.
    pub expected: bool,
    /// The shortest prefix at which a state can be resumed before its end, if any can.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shortest: Option<u64>,
}

/// Arguments of [`ToEngine::Table`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableRequest {
    /// Only this sequence; all that run, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequence: Option<String>,
}

/// Answer to [`ToEngine::Table`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// The sequences.
    pub sequences: Vec<Sequence>,
}

/// One sequence at rest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sequence {
    /// The engine's name for it.
    pub id: String,
    /// Token ids: the computed ones, then those chosen and not yet computed (as a rule one).
    pub tokens: Vec<u32>,
    /// T: tokens whose state is in memory. At most `tokens`.
    pub boundary: u64,
    /// For each group its blocks by column: ⌈T / block_tokens⌉ of them, the null block for columns
    /// that fell out of a window. For a recurrent group the one block that holds the state at T.
    pub blocks: BTreeMap<String, Vec<u32>>,
    /// Tenant salt of the prefix.
    #[serde(default)]
    pub salt: String,
    /// Adapter (LoRA) in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Settings that decide the next tokens and are not in memory: temperature, seed, penalties …
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sampling: BTreeMap<String, Value>,
    /// What could change the next token and is neither in memory nor in `sampling`: `rng`,
    /// `grammar`, `speculation` … A snapshot with any of these is not exact.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrecorded: Vec<String>,
}

/// Arguments of [`ToEngine::Pin`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinRequest {
    /// The sequence.
    pub sequence: String,
}

/// A pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// Its number.
    pub pin: u64,
}

/// Names a sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceName {
    /// The engine's name for it.
    pub sequence: String,
}

/// Arguments of [`ToEngine::Oracle`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OracleRequest {
    /// The sequence.
    pub sequence: String,
    /// T: the step that computes `tokens[T]`.
    pub boundary: u64,
    /// How many of the highest logits are wanted.
    pub top: u32,
}

/// The highest logits of one step. Equal logits after a restore prove the resume end to end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Oracle {
    /// T.
    pub boundary: u64,
    /// Token id and the bits of its logit as `f32`, highest first; ties by lower id. Empty if the
    /// step will not come.
    pub top: Vec<(u32, u32)>,
}

/// Arguments of [`ToEngine::Allocate`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Allocate {
    /// As in [`Sequence`].
    pub tokens: Vec<u32>,
    /// T.
    pub boundary: u64,
    /// Tenant salt of the prefix.
    #[serde(default)]
    pub salt: String,
    /// Adapter in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// As in [`Sequence`].
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sampling: BTreeMap<String, Value>,
}

/// Answer to [`ToEngine::Allocate`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocated {
    /// The new sequence.
    pub sequence: String,
    /// Its blocks, as in [`Sequence::blocks`].
    pub blocks: BTreeMap<String, Vec<u32>>,
}
