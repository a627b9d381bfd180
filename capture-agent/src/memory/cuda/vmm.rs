//! Allocations of CUDA's virtual memory management, imported by descriptor.

use super::super::MemoryError;
use super::driver::{Device, check, log};
use super::plan::within;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// An imported allocation, mapped; unmapped when dropped, which also lets go of the memory.
#[derive(Debug)]
pub(super) struct Mapping {
    addresses: Addresses,
    mapped: bool,
}

/// Reserved addresses.
#[derive(Debug)]
struct Addresses {
    device: Arc<Device>,
    at: u64,
    size: usize,
}

/// An imported handle, released when dropped; a mapping keeps the memory by itself.
struct Handle(sys::CUmemGenericAllocationHandle);

impl Mapping {
    /// Maps the first `offset + bytes` of it, rounded up to what the device maps at a time.
    pub(super) fn open(device: &Arc<Device>, fd: &OwnedFd, offset: u64, bytes: u64) -> Result<Self, MemoryError> {
        within(offset, bytes, usize::MAX as u64 / 2)?;
        let _current = device.enter()?;
        let kind = sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let mut raw = 0;
        // The driver takes the descriptor's number in place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
        // SAFETY: the context is current; the descriptor is open for the call, and the driver
        // checks what it is.
        check("import the engine's memory", unsafe { sys::cuMemImportFromShareableHandle(&raw mut raw, number, kind) })?;
        let handle = Handle(raw);
        let granularity = granularity(device)?;
        let size = ((offset + bytes).max(1) as usize).next_multiple_of(granularity);
        let mut at = 0;
        // SAFETY: the context is current; one address is written. The driver chooses the place.
        check("reserve addresses", unsafe { sys::cuMemAddressReserve(&raw mut at, size, 0, 0, 0) })?;
        let mut this = Self { addresses: Addresses { device: device.clone(), at, size }, mapped: false };
        // SAFETY: the addresses are reserved and not mapped; the driver refuses a size beyond the
        // allocation's.
        check("map the engine's memory", unsafe { sys::cuMemMap(at, size, 0, handle.0, 0) })?;
        this.mapped = true;
        let access =
            sys::CUmemAccessDesc { location: location(device), flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the whole range was just mapped; one descriptor is read.
        check("open the engine's memory", unsafe { sys::cuMemSetAccess(at, size, &raw const access, 1) })?;
        Ok(this)
    }

    /// Where it begins.
    pub(super) fn at(&self) -> u64 {
        self.addresses.at
    }
}

fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: device.number() }
}

/// What the device maps at a time, for memory of the kind that engines allocate.
fn granularity(device: &Device) -> Result<usize, MemoryError> {
    let kind = sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: a plain C structure of integers and a pointer, for which zeros are valid; each
    // enumeration in it has a zero.
    let mut kind_of: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
    kind_of.type_ = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
    kind_of.requestedHandleTypes = kind;
    kind_of.location = location(device);
    let mut granularity = 0;
    let least = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the context is current; one integer is written, one description read.
    let answer = unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const kind_of, least) };
    check("ask for the mapping granularity", answer)?;
    Ok(granularity.max(1))
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: imported once, released once; `open`, where it lives, has the context current.
        log("release imported memory", unsafe { sys::cuMemRelease(self.0) });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.mapped
            && let Ok(_current) = self.addresses.device.enter()
        {
            // SAFETY: mapped once over exactly this range; every call on the memory has drained its
            // streams before it returned.
            log("unmap the engine's memory", unsafe { sys::cuMemUnmap(self.addresses.at, self.addresses.size) });
        }
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: reserved once, and no longer mapped: `Mapping` is dropped before its fields.
            log("free reserved addresses", unsafe { sys::cuMemAddressFree(self.at, self.size) });
        }
    }
}
