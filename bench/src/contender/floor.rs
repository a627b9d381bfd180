//! The contenders `floor` (see [`crate::floor`]) and `write-only`, which writes the same bytes
//! without hashing them.

use super::Contender;
use crate::Result;
use crate::floor::{Piece, Plan, copy};
use crate::meter::{Meter, Reported, Step};
use crate::workload::{Workload, warm_dir};
use std::path::Path;

/// The floor; without hashing, `write-only`, which measures the disk alone.
pub struct Floor {
    /// Threads, buffers, and whether it hashes.
    pub plan: Plan,
}

impl Contender for Floor {
    fn name(&self) -> &'static str {
        if self.plan.hash { "floor" } else { "write-only" }
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let pieces: Vec<Piece> = workload.base.blobs.iter().map(Piece::of).collect();
        let raw = workload.base.bytes();
        let mut packed = Vec::new();
        workload.base.warm()?;
        meter.measure(Step::Push, raw, dir, &[], || {
            packed = copy(&pieces, &dir.join("pushed"), self.plan)?;
            Ok(Reported::default())
        })?;
        if self.plan.hash {
            warm_dir(&dir.join("pushed"))?;
            meter.measure(Step::PullStore, raw, dir, &[], || {
                copy(&packed, &dir.join("pulled"), self.plan)?;
                Ok(Reported::default())
            })?;
        }
        Ok(())
    }
}
