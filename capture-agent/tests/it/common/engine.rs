//! A synthetic engine in this process: state that is a function of the tokens alone, in blocks
//! placed anywhere.

use super::layout::{Group, Spec};
use super::memory::{Event, Fault, TestMemory, Watch};
use parking_lot::Mutex;
use pfr_agent::Agent;
use pfr_agent::engines::{Attached, Link};
use pfr_agent::memory::{PageMemory, Ring, Span};
use pfr_schema::engine::{
    Allocate, Allocated, CallError, GroupLayout, HoldRequest, Oracle, Part, Pinned, Register, Released, Resumed, Sequence, SequenceInfo,
    SequenceList, SequenceState, StagedStates, Table, ToEngine,
};
use pfr_schema::tree::GroupKind;
use pfr_schema::{Algorithm, Digest, ErrorCode};
use pfr_testkit::snapshot::numbers;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// A synthetic engine, attached to an agent until it is dropped.
#[derive(Debug)]
pub struct Synthetic {
    pub core: Arc<Core>,
    attached: Vec<Attached>,
}

#[derive(Debug)]
pub struct Core {
    pub spec: Spec,
    pub watch: Arc<Watch>,
    pub memories: Vec<Arc<TestMemory>>,
    registers: Vec<Register>,
    state: Mutex<State>,
    /// What the agent said lies ready.
    pub told: Mutex<Vec<StagedStates>>,
}

#[derive(Debug, Default)]
struct State {
    /// The name of the pause.
    paused: Option<String>,
    /// The last pause that was ended by a call.
    held: Option<String>,
    sequences: BTreeMap<String, Running>,
    free: BTreeMap<String, Vec<u32>>,
    pins: BTreeSet<u64>,
    /// Blocks aside, by group.
    holds: BTreeMap<String, Vec<(&'static str, u32)>>,
    next: u64,
}

#[derive(Clone, Debug)]
struct Running {
    sequence: Sequence,
    /// Whether it runs; an allocated one waits.
    active: bool,
}

impl Synthetic {
    pub fn start(agent: &Agent, spec: Spec) -> Self {
        let core = Core::new(agent, spec);
        let attach = |rank: usize| {
            let memory: Arc<dyn PageMemory> = Arc::clone(&core.memories[rank]) as _;
            let link: Arc<dyn Link> = Arc::new(CoreLink(Arc::clone(&core)));
            agent.engines().attach(core.registers[rank].clone(), vec![memory], link).unwrap()
        };
        let attached = (0..core.spec.world as usize).map(attach).collect();
        Self { core, attached }
    }

    /// The members leave.
    pub fn leave(&mut self) {
        self.attached.clear();
    }
}

impl std::ops::Deref for Synthetic {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

/// Bytes that depend on all parts of what they are of.
fn fill(out: &mut Vec<u8>, bytes: u64, of: &str) {
    let end = out.len() + bytes as usize;
    let mut block = Digest::of(Algorithm::Blake3, of.as_bytes());
    while out.len() < end {
        let take = (end - out.len()).min(32);
        out.extend_from_slice(&block.as_bytes()[..take]);
        block = Digest::of(Algorithm::Blake3, block.as_bytes());
    }
}

fn prefix(tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    Digest::of(Algorithm::Blake3, &bytes).hex()
}

/// What the state says comes next, highest first.
fn logits(tokens: &[u32], top: u32) -> Vec<(u32, u32)> {
    let seed = Digest::of(Algorithm::Blake3, prefix(tokens).as_bytes());
    (0..top).map(|i| (u32::from(seed.as_bytes()[i as usize % 32]) + i * 256, (8.0 - i as f32).to_bits())).collect()
}

impl Core {
    /// An engine that is not attached.
    pub fn new(agent: &Agent, spec: Spec) -> Arc<Self> {
        let watch = Arc::new(Watch::default());
        let registers: Vec<Register> = (0..spec.world).map(|rank| spec.register(rank)).collect();
        let shared = agent.engines().ring();
        let ring = if spec.own_ring { Ring::new(shared.total()) } else { shared.clone() };
        let memory = |register: &Register| TestMemory::new(register.memories[0].bytes, ring.clone(), Arc::clone(&watch));
        let memories = registers.iter().map(memory).collect();
        let mut state = State::default();
        for group in &spec.groups {
            // Any order will do, as long as another placement gives another.
            let mut blocks: Vec<u32> = (1..group.blocks).collect();
            blocks.sort_by_key(|block| Digest::of(Algorithm::Blake3, format!("{} {block}", spec.placement).as_bytes()));
            state.free.insert(group.name.into(), blocks);
        }
        Arc::new(Self { spec, watch, memories, registers, state: Mutex::new(state), told: Mutex::default() })
    }

    pub fn journal(&self) -> Vec<Event> {
        self.watch.journal.lock().clone()
    }

    pub fn forget_journal(&self) {
        self.watch.journal.lock().clear();
    }

    pub fn set(&self, fault: Fault) {
        self.watch.faults.lock().insert(fault);
    }

    pub fn heal(&self) {
        self.watch.faults.lock().clear();
    }

    pub fn is_paused(&self) -> bool {
        self.state.lock().paused.is_some()
    }

    /// As after a pause or a hold that lasted too long.
    pub fn goes_on_by_itself(&self) {
        self.state.lock().holds.clear();
        self.go_on(None);
    }

    pub fn holds(&self) -> usize {
        self.state.lock().holds.len()
    }

    /// Copies what the next step overwrites to blocks that stay as they are, and goes on.
    fn hold(&self, request: HoldRequest) -> Result<Value, CallError> {
        let mut state = self.state.lock();
        let running = state.sequences.get(&request.sequence).filter(|s| s.active);
        let unknown = || CallError { code: ErrorCode::SequenceUnknown, detail: request.sequence.clone() };
        let mut held = running.ok_or_else(unknown)?.sequence.clone();
        let mut taken = Vec::new();
        for (at_group, group) in self.spec.groups.iter().enumerate() {
            if group.kind != GroupKind::Recurrent && held.boundary.is_multiple_of(u64::from(group.block_tokens)) {
                continue;
            }
            let aside = state.free.get_mut(group.name).unwrap().pop().expect("blocks are left");
            let last = held.blocks.get_mut(group.name).unwrap().last_mut().unwrap();
            for (register, memory) in self.registers.iter().zip(&self.memories) {
                let layout = &register.groups[at_group];
                let parts = layout.components.iter().flat_map(|c| &c.parts).chain(layout.states.iter().map(|s| &s.part));
                for part in parts {
                    memory.put(at(part, aside), memory.get(Span { offset: at(part, *last), bytes: part.bytes }));
                }
            }
            *last = aside;
            taken.push((group.name, aside));
        }
        state.holds.insert(request.hold, taken);
        self.step_all(&mut state);
        Ok(json!(held))
    }

    fn list(&self) -> SequenceList {
        let info = |s: &Sequence| SequenceInfo {
            id: s.id.clone(),
            name: None,
            state: SequenceState::Running,
            tokens: s.tokens.len() as u64,
            boundary: s.boundary,
            kept_seconds: None,
        };
        let state = self.state.lock();
        SequenceList { sequences: state.sequences.values().filter(|s| s.active).map(|s| info(&s.sequence)).collect() }
    }

    pub fn pins(&self) -> usize {
        self.state.lock().pins.len()
    }

    /// Sequences that run.
    pub fn sequences(&self) -> Vec<String> {
        self.state.lock().sequences.iter().filter(|(_, s)| s.active).map(|(name, _)| name.clone()).collect()
    }

    /// Sequences that were allocated and neither activated nor discarded.
    pub fn waiting(&self) -> Vec<String> {
        self.state.lock().sequences.iter().filter(|(_, s)| !s.active).map(|(name, _)| name.clone()).collect()
    }

    pub fn sequence(&self, name: &str) -> Sequence {
        self.state.lock().sequences[name].sequence.clone()
    }

    pub fn free_blocks(&self, group: &str) -> usize {
        self.state.lock().free[group].len()
    }

    /// Adds a sequence with `tokens`, all but the last computed.
    pub fn add(&self, name: &str, tokens: &[u32]) {
        self.add_with(name, tokens, |_| {});
    }

    pub fn add_with(&self, name: &str, tokens: &[u32], change: impl FnOnce(&mut Sequence)) {
        let boundary = tokens.len() as u64 - 1;
        let mut state = self.state.lock();
        let blocks = self.take_blocks(&mut state, boundary);
        let mut sequence = Sequence { id: name.into(), tokens: tokens.to_vec(), boundary, blocks, ..Sequence::default() };
        change(&mut sequence);
        self.compute(&sequence, 0);
        state.sequences.insert(name.into(), Running { sequence, active: true });
    }

    /// Computes `steps` tokens more.
    pub fn step(&self, name: &str, steps: u32) {
        let mut state = self.state.lock();
        self.step_locked(&mut state, name, steps);
    }

    fn step_locked(&self, state: &mut State, name: &str, steps: u32) {
        for _ in 0..steps {
            let mut running = state.sequences[name].clone();
            let sequence = &mut running.sequence;
            let from = sequence.boundary;
            sequence.boundary += 1;
            let next = logits(&sequence.tokens[..sequence.boundary as usize], 1)[0].0;
            if sequence.boundary == sequence.tokens.len() as u64 {
                sequence.tokens.push(next);
            }
            for group in &self.spec.groups {
                if group.kind != GroupKind::Recurrent && from.is_multiple_of(u64::from(group.block_tokens)) {
                    let block = state.free.get_mut(group.name).unwrap().pop().expect("blocks are left");
                    sequence.blocks.get_mut(group.name).unwrap().push(block);
                }
            }
            self.forget_window(state, sequence);
            self.compute(sequence, from);
            state.sequences.insert(name.into(), running);
        }
    }

    fn take_blocks(&self, state: &mut State, boundary: u64) -> BTreeMap<String, Vec<u32>> {
        let mut blocks = BTreeMap::new();
        for group in &self.spec.groups {
            let count = if group.kind == GroupKind::Recurrent { 1 } else { boundary.div_ceil(u64::from(group.block_tokens)) };
            let free = state.free.get_mut(group.name).unwrap();
            let first = first_column(group, boundary);
            let taken = (0..count).map(|column| if column < first { 0 } else { free.pop().expect("blocks are left") }).collect();
            blocks.insert(group.name.to_owned(), taken);
        }
        blocks
    }

    fn forget_window(&self, state: &mut State, sequence: &mut Sequence) {
        for group in &self.spec.groups {
            let first = first_column(group, sequence.boundary) as usize;
            for block in sequence.blocks.get_mut(group.name).unwrap().iter_mut().take(first) {
                let block = std::mem::take(block);
                if block != 0 {
                    state.free.get_mut(group.name).unwrap().insert(0, block);
                }
            }
        }
    }

    /// Writes the state of tokens `from..T` into the sequence's blocks.
    fn compute(&self, sequence: &Sequence, from: u64) {
        for (rank, (register, memory)) in self.registers.iter().zip(&self.memories).enumerate() {
            for (group, layout) in self.spec.groups.iter().zip(&register.groups) {
                let rank = if group.replicated { 0 } else { rank };
                let blocks = &sequence.blocks[group.name];
                if group.kind == GroupKind::Recurrent {
                    let computed = prefix(&sequence.tokens[..sequence.boundary as usize]);
                    for state in &layout.states {
                        let mut bytes = Vec::new();
                        fill(&mut bytes, state.part.bytes, &format!("{rank} {} {computed}", state.name));
                        // Finite numbers only.
                        bytes.iter_mut().skip(3).step_by(4).for_each(|byte| *byte = 0x3f);
                        memory.put(at(&state.part, blocks[0]), bytes);
                    }
                    continue;
                }
                let first = (from / u64::from(group.block_tokens)).max(first_column(group, sequence.boundary));
                for column in first..blocks.len() as u64 {
                    self.compute_page(sequence, rank, group, layout, memory, column);
                }
            }
        }
    }

    fn compute_page(&self, sequence: &Sequence, rank: usize, group: &Group, layout: &GroupLayout, memory: &TestMemory, column: u64) {
        let tokens = u64::from(group.block_tokens);
        for (component, parts) in layout.components.iter().map(|component| (&component.name, &component.parts)) {
            for (layer, part) in parts.iter().enumerate() {
                let mut bytes = Vec::new();
                for token in column * tokens..(column + 1) * tokens {
                    if token < sequence.boundary {
                        let computed = prefix(&sequence.tokens[..=token as usize]);
                        let of = format!("{} {rank} {component} {layer} {computed}", group.name);
                        match group.elements {
                            None => fill(&mut bytes, group.token_bytes, &of),
                            Some(_) => {
                                let number = u64::from_le_bytes(*Digest::sha256(of.as_bytes()).as_bytes().first_chunk().unwrap());
                                bytes.extend(numbers(number, group.token_bytes as usize));
                            }
                        }
                    } else if group.flat {
                        fill(&mut bytes, group.token_bytes, &format!("garbage {}", self.spec.placement));
                    } else {
                        bytes.resize(bytes.len() + group.token_bytes as usize, 0);
                    }
                }
                memory.put(at(part, sequence.blocks[group.name][column as usize]), bytes);
            }
        }
    }

    /// The bytes of a sequence's state, wherever they lie: equal state, equal bytes.
    pub fn content(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        let sequence = self.sequence(name);
        let mut content = Vec::new();
        for (rank, (register, memory)) in self.registers.iter().zip(&self.memories).enumerate() {
            for (group, layout) in self.spec.groups.iter().zip(&register.groups) {
                let blocks = &sequence.blocks[group.name];
                for state in &layout.states {
                    let span = Span { offset: at(&state.part, blocks[0]), bytes: state.part.bytes };
                    content.push((format!("{rank} {}", state.name), memory.get(span)));
                }
                for column in first_column(group, sequence.boundary)..blocks.len() as u64 {
                    if group.kind == GroupKind::Recurrent {
                        continue;
                    }
                    let used = (sequence.boundary - column * u64::from(group.block_tokens)).min(u64::from(group.block_tokens));
                    for (component, part) in layout.components.iter().flat_map(|c| c.parts.iter().map(|part| (&c.name, part))) {
                        let span = Span { offset: at(part, blocks[column as usize]), bytes: used * group.token_bytes };
                        content.push((format!("{rank} {} {column} {component}", group.name), memory.get(span)));
                    }
                }
            }
        }
        content
    }

    /// Where rank 0 has a state of a sequence.
    pub fn state_span(&self, sequence: &str, state: &str) -> Span {
        let blocks = self.sequence(sequence).blocks;
        let mut states = self.registers[0].groups.iter().flat_map(|group| group.states.iter().map(move |state| (&group.name, state)));
        let (group, state) = states.find(|(_, found)| found.name == state).expect("a state of this engine");
        Span { offset: at(&state.part, blocks[group][0]), bytes: state.part.bytes }
    }

    fn table(&self, only: Option<&str>) -> Table {
        let state = self.state.lock();
        let running = state.sequences.values().filter(|s| s.active && only.is_none_or(|only| s.sequence.id == only));
        let mut sequences: Vec<Sequence> = running.map(|s| s.sequence.clone()).collect();
        let (first, blocks) = (&self.spec.groups[0], self.spec.groups[0].blocks);
        for list in sequences.iter_mut().filter_map(|sequence| sequence.blocks.get_mut(first.name)) {
            self.spoil(list, blocks);
        }
        Table { sequences }
    }

    fn spoil(&self, list: &mut Vec<u32>, blocks: u32) {
        if self.watch.has(Fault::BlockTooMany) {
            list.push(blocks - 1);
        }
        if self.watch.has(Fault::BlockTooFew) {
            list.pop();
        }
        if self.watch.has(Fault::BlockOutOfRange) {
            list[0] = blocks;
        }
        if self.watch.has(Fault::NullBlock) {
            list[0] = 0;
        }
    }

    fn allocate(&self, what: Allocate) -> Value {
        let mut state = self.state.lock();
        let mut blocks = self.take_blocks(&mut state, what.boundary);
        state.next += 1;
        let name = format!("restored-{}", state.next);
        let Allocate { tokens, boundary, salt, adapter, sampling } = what;
        let sequence =
            Sequence { id: name.clone(), tokens, boundary, blocks: blocks.clone(), salt, adapter, sampling, unrecorded: Vec::new() };
        state.sequences.insert(name.clone(), Running { sequence, active: false });
        self.spoil(blocks.get_mut(self.spec.groups[0].name).unwrap(), self.spec.groups[0].blocks);
        json!(Allocated { sequence: name, blocks })
    }

    /// Ends the pause of this name, or any; returns whether it held until now.
    fn go_on(&self, name: Option<&str>) -> bool {
        let mut state = self.state.lock();
        let ended = state.paused.take_if(|paused| name.is_none_or(|name| paused == name)).is_some();
        if ended {
            state.held = name.map(Into::into);
            self.step_all(&mut state);
        }
        name.is_some() && state.held.as_deref() == name
    }

    fn step_all(&self, state: &mut State) {
        let running: Vec<String> = state.sequences.iter().filter(|(_, s)| s.active).map(|(name, _)| name.clone()).collect();
        for name in running {
            self.step_locked(state, &name, self.spec.steps_on_resume);
        }
    }

    /// Does what it is told.
    pub fn answer(&self, call: ToEngine) -> Result<Value, CallError> {
        let refuse = |detail: &str| CallError { code: ErrorCode::EngineRefused, detail: detail.into() };
        let paused = self.is_paused();
        Ok(match call {
            ToEngine::Pause(request) => {
                self.state.lock().paused = Some(request.pause);
                json!({})
            }
            ToEngine::Resume(request) => json!(Resumed { held: self.go_on(Some(&request.pause)) }),
            ToEngine::Staged(states) => {
                self.told.lock().push(states);
                json!({})
            }
            ToEngine::Sequences {} => json!(self.list()),
            ToEngine::Hold(request) => self.hold(request)?,
            ToEngine::Release(hold) => {
                let mut state = self.state.lock();
                let taken = state.holds.remove(&hold.hold);
                for (group, block) in taken.iter().flatten() {
                    state.free.get_mut(*group).unwrap().insert(0, *block);
                }
                json!(Released { held: taken.is_some() })
            }
            ToEngine::Table(_) | ToEngine::Pin(_) if !paused => return Err(refuse("not paused")),
            ToEngine::Table(request) => json!(self.table(request.sequence.as_deref())),
            ToEngine::Pin(_) => {
                let mut state = self.state.lock();
                state.next += 1;
                let pin = state.next;
                state.pins.insert(pin);
                json!(Pinned { pin })
            }
            ToEngine::Unpin(pinned) => {
                self.state.lock().pins.remove(&pinned.pin);
                json!({})
            }
            ToEngine::Oracle(request) => {
                let sequence = self.sequence(&request.sequence);
                let end = (request.boundary as usize + 1).min(sequence.tokens.len());
                let mut top = logits(&sequence.tokens[..end], request.top);
                if self.watch.has(Fault::OtherLogits) {
                    top[0].0 += 1;
                }
                json!(Oracle { boundary: request.boundary, top })
            }
            ToEngine::Allocate(what) => self.allocate(*what),
            ToEngine::Activate(name) => {
                self.state.lock().sequences.get_mut(&name.sequence).ok_or_else(|| refuse("no such sequence"))?.active = true;
                json!({})
            }
            ToEngine::Discard(name) => {
                let mut state = self.state.lock();
                let running = state.sequences.remove(&name.sequence).ok_or_else(|| refuse("no such sequence"))?;
                for (group, blocks) in running.sequence.blocks {
                    state.free.get_mut(&group).unwrap().extend(blocks.into_iter().filter(|block| *block != 0));
                }
                json!({})
            }
        })
    }
}

fn first_column(group: &Group, boundary: u64) -> u64 {
    (boundary + 1).saturating_sub(group.window.unwrap_or(u64::MAX)) / u64::from(group.block_tokens)
}

fn at(part: &Part, block: u32) -> u64 {
    part.offset + u64::from(block) * part.block_stride
}

#[derive(Debug)]
struct CoreLink(Arc<Core>);

#[async_trait::async_trait]
impl Link for CoreLink {
    async fn call(&self, call: ToEngine) -> Result<Value, CallError> {
        let name = call.name();
        let harmful = name == "discard" && self.0.watch.is_writing();
        // The agent tells at any time what lies ready: nothing changes.
        if name != "staged" {
            self.0.watch.note(Event::Call(if harmful { "discard under a copy" } else { name }));
        }
        if self.0.watch.has(Fault::Silent(name)) {
            std::future::pending::<()>().await;
        }
        if self.0.watch.has(Fault::Leaves(name)) {
            return Err(CallError { code: ErrorCode::EngineLost, detail: format!("left at {name}") });
        }
        if self.0.watch.has(Fault::Refuses(name)) {
            return Err(CallError { code: ErrorCode::EngineRefused, detail: format!("refuses {name}") });
        }
        let answer = self.0.answer(call);
        if self.0.watch.has(Fault::GoesOnAfter(name)) {
            self.0.goes_on_by_itself();
        }
        answer
    }
}
