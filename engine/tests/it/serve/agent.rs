//! The other end of the protocol: just enough of an agent to copy state by hand.

use pfr_engine::attach::{receive, receive_with_descriptors, send};
use pfr_engine::cache::PageMemory;
use pfr_engine::shared::SharedMemory;
use pfr_schema::engine::{
    CallError, GroupLayout, Message, Oracle, OracleRequest, Part, PauseRequest, Register, Registered, ResumeRequest, Resumed, Sequence,
    SequenceName, Table, TableRequest, ToAgent, ToEngine,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// A socket that engines connect to.
pub struct Agent {
    listener: UnixListener,
    pub socket: PathBuf,
}

impl Agent {
    pub fn listen(dir: &Path) -> Self {
        let socket = dir.join("agent.sock");
        Self { listener: UnixListener::bind(&socket).unwrap(), socket }
    }

    /// Waits for an engine and accepts its registration.
    pub fn accept(&self) -> Member {
        let (stream, register, memories) = self.knock();
        let fingerprint = pfr_schema::prefix::fingerprint(&register.deployment);
        let ok = serde_json::to_value(Registered { agent: "test".into(), fingerprint }).unwrap();
        send::<ToEngine>(&stream, &Message::Ok { id: 1, ok }, &[]).unwrap();
        Member { stream, register, memories, next: 1 }
    }

    /// Waits for an engine and refuses it.
    pub fn refuse(&self, failure: CallError) {
        let (stream, ..) = self.knock();
        send::<ToEngine>(&stream, &Message::Error { id: 1, error: failure }, &[]).unwrap();
    }

    fn knock(&self) -> (UnixStream, Register, Vec<SharedMemory>) {
        let (stream, _) = self.listener.accept().unwrap();
        let (message, descriptors) = receive_with_descriptors::<ToAgent>(&stream).unwrap();
        let Message::Call { id: 1, call: ToAgent::Register(register) } = message else { panic!("{message:?}") };
        assert_eq!(descriptors.len(), register.memories.len());
        let memories = descriptors.into_iter().map(|descriptor| SharedMemory::map(descriptor).unwrap()).collect();
        (stream, *register, memories)
    }
}

/// A registered engine.
pub struct Member {
    stream: UnixStream,
    pub register: Register,
    memories: Vec<SharedMemory>,
    next: u64,
}

/// All bytes of a sequence and what belongs to them.
#[derive(Clone, PartialEq)]
pub struct Captured {
    pub tokens: Vec<u32>,
    pub boundary: u64,
    /// Bytes by group, column and part.
    pub bytes: BTreeMap<(String, usize, usize), Vec<u8>>,
}

impl Member {
    /// Sends a call without waiting for its answer.
    pub fn begin(&mut self, call: ToEngine) -> u64 {
        self.next += 1;
        send(&self.stream, &Message::Call { id: self.next, call }, &[]).unwrap();
        self.next
    }

    /// The next answer; it must be that of `id`.
    pub fn end<T: DeserializeOwned>(&mut self, id: u64) -> Result<T, CallError> {
        match receive::<ToAgent>(&mut &self.stream).unwrap() {
            Message::Ok { id: found, ok } if found == id => Ok(serde_json::from_value(ok).unwrap()),
            Message::Error { id: found, error } if found == id => Err(error),
            other => panic!("expected the answer to {id}, found {other:?}"),
        }
    }

    pub fn try_call<T: DeserializeOwned>(&mut self, call: ToEngine) -> Result<T, CallError> {
        let id = self.begin(call);
        self.end(id)
    }

    pub fn call<T: DeserializeOwned>(&mut self, call: ToEngine) -> T {
        self.try_call(call).unwrap_or_else(|failure| panic!("{failure:?}"))
    }

    /// A call whose answer is empty.
    pub fn tell(&mut self, call: ToEngine) {
        assert_eq!(self.call::<Value>(call), json!({}));
    }

    /// Pauses the engine without a limit.
    pub fn pause(&mut self) {
        self.tell(ToEngine::Pause(PauseRequest::default()));
    }

    /// Ends a pause without a name. Returns whether it held.
    pub fn resume(&mut self) -> bool {
        self.call::<Resumed>(ToEngine::Resume(ResumeRequest::default())).held
    }

    pub fn oracle(&mut self, sequence: &str, boundary: u64) -> Oracle {
        self.call(oracle(sequence, boundary))
    }

    pub fn group(&self, name: &str) -> &GroupLayout {
        self.register.groups.iter().find(|group| group.name == name).unwrap()
    }

    pub fn table(&mut self, sequence: &str) -> Sequence {
        let table: Table = self.call(ToEngine::Table(TableRequest { sequence: Some(sequence.into()) }));
        assert_eq!(table.sequences.len(), 1);
        table.sequences.into_iter().next().unwrap()
    }

    /// Copies a sequence out. The engine must be paused.
    pub fn capture(&mut self, sequence: &str) -> Captured {
        let Sequence { tokens, boundary, blocks, .. } = self.table(sequence);
        Captured { tokens, boundary, bytes: self.bytes(&blocks) }
    }

    /// The bytes of blocks; null blocks are left out.
    pub fn bytes(&self, blocks: &BTreeMap<String, Vec<u32>>) -> BTreeMap<(String, usize, usize), Vec<u8>> {
        let mut bytes = BTreeMap::new();
        self.each(blocks, |key, memory, range| {
            bytes.insert(key, self.memories[memory].bytes()[range].to_vec());
        });
        bytes
    }

    /// Writes captured bytes into allocated blocks.
    pub fn fill(&mut self, blocks: &BTreeMap<String, Vec<u32>>, captured: &Captured) {
        let mut places = Vec::new();
        self.each(blocks, |key, memory, range| places.push((key, memory, range)));
        assert_eq!(places.len(), captured.bytes.len(), "as many pages as were captured");
        for (key, memory, range) in places {
            self.memories[memory].bytes_mut()[range].copy_from_slice(&captured.bytes[&key]);
        }
    }

    fn each(&self, blocks: &BTreeMap<String, Vec<u32>>, mut take: impl FnMut((String, usize, usize), usize, std::ops::Range<usize>)) {
        for group in &self.register.groups {
            for (column, block) in blocks[&group.name].iter().enumerate().filter(|(_, block)| Some(**block) != group.null_block) {
                assert!(*block < group.blocks);
                for (i, part) in parts(group).enumerate() {
                    let memory = self.register.memories.iter().position(|memory| memory.name == part.memory).unwrap();
                    let start = (part.offset + u64::from(*block) * part.block_stride) as usize;
                    take((group.name.clone(), column, i), memory, start..start + part.bytes as usize);
                }
            }
        }
    }
}

/// All parts of a group's blocks.
pub fn parts(group: &GroupLayout) -> impl Iterator<Item = &Part> {
    group.components.iter().flat_map(|c| &c.parts).chain(group.states.iter().map(|s| &s.part))
}

pub fn oracle(sequence: &str, boundary: u64) -> ToEngine {
    ToEngine::Oracle(OracleRequest { sequence: sequence.into(), boundary, top: 8 })
}

pub fn named(sequence: &str) -> SequenceName {
    SequenceName { sequence: sequence.into() }
}
