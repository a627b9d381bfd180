//! The blocks of one group: which are free, which sequences hold the others, and which are pinned.

use crate::error::EngineError;
use crate::rng::Rng;

/// A pool of numbered blocks.
///
/// The users of a block are sequences. A block with several users is copied before it is written. A
/// pin only keeps a block from being handed out again: its owner may go on writing the slots that
/// are still empty, as real engines do.
#[derive(Clone, Debug)]
pub struct Pool {
    users: Vec<u32>,
    pins: Vec<u32>,
    /// Free blocks, the next one last.
    free: Vec<u32>,
}

impl Pool {
    /// Blocks `first..blocks`; those before `first` are never handed out. A seed shuffles the
    /// order.
    #[must_use]
    pub fn new(first: u32, blocks: u32, placement: Option<u64>) -> Self {
        let mut free: Vec<u32> = (first..blocks).rev().collect();
        if let Some(seed) = placement {
            Rng::new(seed).shuffle(&mut free);
        }
        Self { users: vec![0; blocks as usize], pins: vec![0; blocks as usize], free }
    }

    /// How many blocks have neither user nor pin.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that a sequence or a pin holds, ascending.
    pub fn used(&self) -> impl Iterator<Item = u32> {
        (0_u32..).zip(self.users.iter().zip(&self.pins)).filter(|(_, (users, pins))| **users + **pins > 0).map(|(block, _)| block)
    }

    /// Whether several sequences hold a block.
    #[must_use]
    pub fn shared(&self, block: u32) -> bool {
        self.users[block as usize] > 1
    }

    /// Fails unless `count` blocks are free.
    ///
    /// # Errors
    /// [`EngineError::PoolFull`].
    pub fn require(&self, count: usize, block_tokens: usize) -> Result<(), EngineError> {
        if count > self.free.len() {
            return Err(EngineError::PoolFull { blocks: self.users.len(), page_tokens: block_tokens });
        }
        Ok(())
    }

    /// A free block, now with one user; `None` if there is none.
    pub fn take(&mut self) -> Option<u32> {
        let block = self.free.pop()?;
        self.users[block as usize] = 1;
        Some(block)
    }

    /// Adds a user.
    pub fn share(&mut self, block: u32) {
        self.users[block as usize] += 1;
    }

    /// Takes a user away. Returns whether the block has become free.
    pub fn release(&mut self, block: u32) -> bool {
        self.users[block as usize] -= 1;
        self.free_if_unused(block)
    }

    /// Adds a pin.
    pub fn pin(&mut self, block: u32) {
        self.pins[block as usize] += 1;
    }

    /// Takes a pin away. Returns whether the block has become free.
    pub fn unpin(&mut self, block: u32) -> bool {
        self.pins[block as usize] -= 1;
        self.free_if_unused(block)
    }

    fn free_if_unused(&mut self, block: u32) -> bool {
        let idle = self.users[block as usize] + self.pins[block as usize] == 0;
        if idle {
            self.free.push(block);
        }
        idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_free_when_neither_user_nor_pin_holds_it() {
        let mut pool = Pool::new(1, 4, None);
        assert_eq!((pool.take(), pool.take(), pool.free()), (Some(1), Some(2), 1));
        pool.share(1);
        pool.pin(1);
        assert!(pool.shared(1) && !pool.shared(2));
        assert!(!pool.release(1) && !pool.shared(1) && !pool.release(1));
        assert_eq!(pool.used().collect::<Vec<_>>(), [1, 2]);
        assert!(pool.unpin(1) && pool.release(2));
        assert_eq!((pool.free(), pool.used().count()), (3, 0));
        assert!(pool.require(3, 16).is_ok() && pool.require(4, 16).is_err());
    }
}
