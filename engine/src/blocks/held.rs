//! Pins, and the list of all blocks that sequences or pins hold.

use super::Blocks;
use crate::cache::SeqId;
use crate::error::EngineError;

/// Blocks that are not handed out again until the pin goes back to [`Blocks::unpin`].
#[derive(Debug)]
#[must_use]
pub struct Pin(Vec<(usize, u32)>);

/// Blocks of one group that are held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Used {
    /// Name of the group.
    pub group: String,
    /// The blocks, ascending.
    pub blocks: Vec<u32>,
    /// How many blocks are free.
    pub free: usize,
}

impl Blocks {
    /// Keeps a sequence's blocks from being handed out again, whatever becomes of the sequence.
    ///
    /// # Errors
    /// [`EngineError::NoSequence`].
    pub fn pin(&mut self, seq: SeqId) -> Result<Pin, EngineError> {
        let columns = self.table(seq)?.columns.iter().enumerate();
        let held: Vec<_> = columns.flat_map(|(group, columns)| columns.iter().flatten().map(move |block| (group, *block))).collect();
        for (group, block) in &held {
            self.groups[*group].pool.pin(*block);
        }
        Ok(Pin(held))
    }

    /// Gives a pin back.
    pub fn unpin(&mut self, pin: Pin) {
        for (group, block) in pin.0 {
            if self.groups[group].pool.unpin(block) {
                self.soil_block(group, block);
            }
        }
    }

    /// Blocks that sequences and pins hold.
    #[must_use]
    pub fn used(&self) -> Vec<Used> {
        let used = self.groups.iter().map(|group| Used {
            group: group.layout.name.clone(),
            blocks: group.pool.used().collect(),
            free: group.pool.free(),
        });
        used.collect()
    }
}
