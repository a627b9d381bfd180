//! Memory of this process: copies that were set aside, and memory of engines that link the agent.

use super::pages::Bytewise;
use super::{MemoryError, Ring};
use parking_lot::RwLock;
use std::sync::Arc;

/// Tells how many bytes of memory the machine can still give.
#[derive(Clone)]
pub struct Available(Arc<dyn Fn() -> u64 + Send + Sync>);

impl std::fmt::Debug for Available {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Available({})", self.bytes())
    }
}

impl Available {
    /// `MemAvailable` of `/proc/meminfo`; no limit where that cannot be read.
    #[must_use]
    pub fn system() -> Self {
        Self::new(|| {
            let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
            let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
            let kib = line.and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
            kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024))
        })
    }

    /// Any other source.
    pub fn new(bytes: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(bytes))
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.0)()
    }

    /// Whether `needed` bytes can be had.
    ///
    /// # Errors
    /// [`MemoryError::NoRoom`].
    pub fn check(&self, needed: u64) -> Result<(), MemoryError> {
        let free = self.bytes();
        if needed > free {
            return Err(MemoryError::NoRoom { what: "host memory", needed, free });
        }
        Ok(())
    }
}

/// Memory of this process.
pub struct HostMemory {
    bytes: RwLock<Vec<u8>>,
    size: u64,
    ring: Ring,
    available: Available,
}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostMemory({} bytes)", self.size)
    }
}

impl HostMemory {
    /// Memory that holds `bytes`, copied out through `ring`.
    #[must_use]
    pub fn new(bytes: Vec<u8>, ring: Ring, available: Available) -> Self {
        Self { size: bytes.len() as u64, bytes: RwLock::new(bytes), ring, available }
    }
}

impl Bytewise for HostMemory {
    fn size(&self) -> u64 {
        self.size
    }
    fn budget(&self) -> (&Ring, &Available) {
        (&self.ring, &self.available)
    }
    fn reachable(&self) -> Result<(), MemoryError> {
        Ok(())
    }
    fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let at = offset as usize;
        into.copy_from_slice(&self.bytes.read()[at..at + into.len()]);
        Ok(())
    }
    fn store(&self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        let at = offset as usize;
        self.bytes.write()[at..at + from.len()].copy_from_slice(from);
        Ok(())
    }
}
