//! The bytes of blocks: fills, copies and hashes them, and describes them to the agent, with which
//! they are shared.

use super::Blocks;
use crate::cache::{PageMemory, SeqId};
use crate::error::EngineError;
use crate::rng::Rng;
use crate::shared::SharedMemory;
use pfr_schema::engine::{Memory, MemoryKind, Part};
use pfr_schema::{Algorithm, Digest, Hasher};
use std::ops::Range;
use std::os::fd::BorrowedFd;

impl Blocks {
    /// The memories as a registration has them, and their descriptors in the same order.
    #[must_use]
    pub fn memories(&self) -> (Vec<Memory>, Vec<BorrowedFd<'_>>) {
        let described = self.names.iter().zip(&self.memories).map(|(name, memory)| Memory {
            name: name.clone(),
            kind: MemoryKind::PosixShm,
            bytes: memory.bytes().len() as u64,
            offset: 0,
            handle: None,
            device: None,
        });
        (described.collect(), self.memories.iter().map(SharedMemory::descriptor).collect())
    }

    /// The bytes of state tensor `state` of a sequence, in the order of the group's states.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`], also if the group keeps no state for it.
    pub fn state(&mut self, seq: SeqId, group: usize, state: usize) -> Result<&mut [u8], EngineError> {
        let block = self.table(seq)?.columns[group].first().copied().flatten().ok_or(EngineError::NoSequence(seq.0))?;
        let (memory, part) = &self.groups[group].parts[state];
        Ok(&mut self.memories[*memory].bytes_mut()[span(part, block)])
    }

    /// SHA-256 over names, numbers and bytes of all blocks that are held.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::new(Algorithm::Sha256);
        for group in &self.groups {
            hasher.update(group.layout.name.as_bytes());
            for block in group.pool.used() {
                hasher.update(&block.to_le_bytes());
                for (memory, part) in &group.parts {
                    hasher.update(&self.memories[*memory].bytes()[span(part, block)]);
                }
            }
        }
        hasher.finish()
    }

    /// Turns all bits of one byte of a block, counted over its parts in order; `false` if there is
    /// no such byte.
    pub fn poke(&mut self, group: &str, block: u32, byte: u64) -> bool {
        let Some(group) = self.groups.iter().find(|g| g.layout.name == group && block < g.layout.blocks) else { return false };
        let mut left = byte;
        for (memory, part) in &group.parts {
            if left < part.bytes {
                self.memories[*memory].bytes_mut()[span(part, block).start + left as usize] ^= 0xFF;
                return true;
            }
            left -= part.bytes;
        }
        false
    }

    pub(super) fn soil_block(&mut self, group: usize, block: u32) {
        if let Some(mut rng) = self.dirt.take() {
            self.fill(group, block, &mut |bytes| soil(&mut rng, bytes));
            self.dirt = Some(rng);
        }
    }

    pub(super) fn fill(&mut self, group: usize, block: u32, write: &mut dyn FnMut(&mut [u8])) {
        for (memory, part) in &self.groups[group].parts {
            write(&mut self.memories[*memory].bytes_mut()[span(part, block)]);
        }
    }

    pub(super) fn copy(&mut self, group: usize, from: u32, to: u32) {
        for (memory, part) in &self.groups[group].parts {
            self.memories[*memory].bytes_mut().copy_within(span(part, from), span(part, to).start);
        }
    }
}

fn span(part: &Part, block: u32) -> Range<usize> {
    let start = (part.offset + u64::from(block) * part.block_stride) as usize;
    start..start + part.bytes as usize
}

pub(super) fn soil(rng: &mut Rng, bytes: &mut [u8]) {
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&rng.next().to_le_bytes()[..chunk.len()]);
    }
}
