//! The contenders `floor` (see [`crate::floor`]) and `write-only`, which writes the same bytes
//! without hashing them.

use super::{Contender, Found, Programs};
use crate::Result;
use crate::floor::{Plan, copy};
use crate::meter::{Meter, Reported, Step};
use crate::pack::Piece;
use crate::workload::{Workload, warm_dir};
use std::path::Path;

struct Floor {
    /// Without hashing it measures the disk alone.
    hash: bool,
}

/// The floor.
pub fn floor(_: &Programs) -> Found {
    Ok(Box::new(Floor { hash: true }))
}

/// The floor without hashing.
pub fn write_only(_: &Programs) -> Found {
    Ok(Box::new(Floor { hash: false }))
}

impl Contender for Floor {
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let plan = Plan { hash: self.hash, ..Plan::on(meter.place == "disk") };
        let pieces: Vec<Piece> = workload.base.blobs.iter().map(Piece::of).collect();
        let raw = workload.base.bytes();
        let mut packed = Vec::new();
        workload.base.warm()?;
        meter.measure(Step::Push, raw, dir, &[], || {
            packed = copy(&pieces, &dir.join("pushed"), plan)?;
            Ok(Reported::default())
        })?;
        if self.hash {
            warm_dir(&dir.join("pushed"))?;
            meter.measure(Step::PullStore, raw, dir, &[], || {
                copy(&packed, &dir.join("pulled"), plan)?;
                Ok(Reported::default())
            })?;
        }
        Ok(())
    }
}
