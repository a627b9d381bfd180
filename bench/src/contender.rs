//! The programs that are measured.

pub mod docker;
pub mod floor;
pub mod pf;

use crate::Result;
use crate::meter::Meter;
use crate::workload::Workload;
use std::path::{Path, PathBuf};

/// A program that can store a workload and give it back.
pub trait Contender {
    /// Name in tables.
    fn name(&self) -> &'static str;

    /// One round in `dir`, which is empty and goes away afterwards.
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()>;
}

/// A program that lies beside this one.
pub fn sibling(name: &str) -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// A free port on loopback.
fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
