//! A range of GPU memory, and the ring that its pages go through.

use super::driver::Device;
use super::pinned::PinnedRing;
use std::sync::Arc;

/// `size` bytes at `at`. The owner of this value keeps them mapped.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) device: Arc<Device>,
    pub(super) ring: Arc<PinnedRing>,
    pub(super) at: u64,
    pub(super) size: u64,
}
