//! Two restores never write into the same block.

use crate::memory::Location;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::sync::Arc;

/// Where restores write: the beginnings of blocks on this machine. An engine that connects again,
/// or describes one memory twice, has two mappings of the same bytes: two mappings of a block have
/// one location.
#[derive(Debug, Default)]
pub(crate) struct Claims(Mutex<HashSet<Location>>);

impl Claims {
    /// Reserves blocks until the claim is dropped.
    ///
    /// # Errors
    /// The position of the first that is reserved.
    pub fn claim(self: &Arc<Self>, blocks: Vec<Location>) -> Result<Claim, usize> {
        let mut taken = self.0.lock();
        if let Some(at) = blocks.iter().position(|block| taken.contains(block)) {
            return Err(at);
        }
        taken.extend(&blocks);
        drop(taken);
        Ok(Claim { claims: Arc::clone(self), blocks })
    }
}

/// Blocks of one restore.
#[derive(Debug)]
pub(crate) struct Claim {
    claims: Arc<Claims>,
    blocks: Vec<Location>,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut taken = self.claims.0.lock();
        for block in &self.blocks {
            taken.remove(block);
        }
    }
}
