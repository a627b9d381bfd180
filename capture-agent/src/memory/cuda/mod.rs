//! GPU memory of another process, through the CUDA driver that is found at run time.
//!
//! ```text
//! open_ipc (ipc) ┐                       hash ─▶ kernel (SHA-256: a page per thread)
//!                ├▶ device: PageMemory ─▶ read / write (transfer) ─▶ pinned ring (pinned, extents), two streams
//! open_vmm (vmm) ┘                       set_aside ─▶ gather kernel ─▶ an allocation of ours
//! driver: library, contexts, kernels · stream: streams, events, buffers, launches
//! plan: every decision that needs no GPU
//! ```
//!
//! Calls come from any thread. Each call makes the device's primary context current while it runs,
//! and drains its streams before it returns, after an error too, so that no memory is freed under a
//! copy. No call uses the default stream.

mod device;
mod driver;
mod extents;
mod ipc;
mod mapped;
mod pinned;
mod plan;
mod stream;
mod transfer;
mod vmm;

pub use device::FreeMemory;
pub use driver::devices;

use super::{MemoryError, PageMemory};
use device::{DeviceMemory, Owner};
use driver::Device;
use pinned::PinnedRing;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Opens an allocation that another process shares by a CUDA IPC handle: `bytes` from `offset` of
/// it, on the GPU with this UUID (`GPU-…` or bare). Pages go through `ring_bytes` of pinned host
/// memory. The mapping is closed when the last memory of this handle is dropped.
///
/// # Errors
/// [`MemoryError::Unsupported`] without a CUDA driver, [`MemoryError::Unreachable`] if the GPU is
/// not there or the handle cannot be opened, [`MemoryError::OutOfBounds`] if the allocation is
/// smaller, [`MemoryError::NoRoom`] if the ring cannot be pinned.
pub fn open_ipc(handle: [u8; 64], offset: u64, bytes: u64, device_uuid: &str, ring_bytes: u64) -> Result<Arc<dyn PageMemory>, MemoryError> {
    let device = Device::open(device_uuid)?;
    let mapping = ipc::Mapping::open(&device, handle)?;
    plan::within(offset, bytes, mapping.size())?;
    let ring = PinnedRing::new(&device, ring_bytes)?;
    let at = mapping.at() + offset;
    Ok(Arc::new(DeviceMemory::new(device, Owner::Ipc(mapping), at, bytes, ring)))
}

/// Opens an allocation of CUDA's virtual memory management that another process exported as a POSIX
/// descriptor: `bytes` from `offset` of it. Otherwise as [`open_ipc`].
///
/// # Errors
/// As [`open_ipc`].
pub fn open_vmm(fd: OwnedFd, offset: u64, bytes: u64, device_uuid: &str, ring_bytes: u64) -> Result<Arc<dyn PageMemory>, MemoryError> {
    let device = Device::open(device_uuid)?;
    let mapping = vmm::Mapping::open(&device, &fd, offset, bytes)?;
    let ring = PinnedRing::new(&device, ring_bytes)?;
    let at = mapping.at() + offset;
    Ok(Arc::new(DeviceMemory::new(device, Owner::Vmm(mapping), at, bytes, ring)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// On a machine with a driver the same calls fail otherwise: no GPU has this UUID.
    fn refused(result: Result<Arc<dyn PageMemory>, MemoryError>) {
        let error = result.unwrap_err();
        if driver::library().is_ok() {
            assert!(matches!(error, MemoryError::Unreachable { .. } | MemoryError::Unsupported { .. }), "{error}");
        } else {
            assert!(
                matches!(&error, MemoryError::Unsupported { what: "GPU memory", reason } if reason.contains("no CUDA driver")),
                "{error}"
            );
        }
    }

    #[test]
    fn without_a_driver_or_the_gpu_it_is_refused_and_nothing_panics() {
        let uuid = "GPU-00000000-0000-0000-0000-000000000000";
        refused(open_ipc([0; 64], 0, 4096, uuid, 1 << 20));
        refused(open_vmm(std::fs::File::open("/dev/null").unwrap().into(), 0, 4096, uuid, 1 << 20));
    }

    #[test]
    fn a_uuid_that_is_none_is_refused_before_the_driver_is_asked() {
        for uuid in ["", "GPU-", "GPU-123", "GPU-zz000000-0000-0000-0000-000000000000", "00000000-0000-0000-0000-0000000000000"] {
            let error = open_ipc([0; 64], 0, 4096, uuid, 1 << 20).unwrap_err();
            assert!(matches!(error, MemoryError::Unreachable { what: "find the GPU", .. }), "{uuid:?}: {error}");
        }
    }
}
