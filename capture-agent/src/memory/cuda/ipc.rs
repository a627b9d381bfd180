//! Allocations of another process, opened by IPC handle: once each, however many memories lie in
//! them.

use super::super::MemoryError;
use super::driver::{Device, check, log};
use cudarc::driver::sys;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// What is open, by GPU and handle: address and how many use it. Opening and closing happen under
/// the lock, so that a handle is never opened while it is being closed.
static OPEN: Mutex<Option<HashMap<Key, (u64, usize)>>> = Mutex::new(None);

type Key = (sys::CUdevice, [u8; 64]);

/// An opened allocation; closed when the last one of its handle is dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    device: Arc<Device>,
    handle: [u8; 64],
    at: u64,
    size: u64,
}

impl Mapping {
    /// Opens it, or takes part in it.
    pub(super) fn open(device: &Arc<Device>, handle: [u8; 64]) -> Result<Self, MemoryError> {
        let _current = device.enter()?;
        let mut guard = OPEN.lock();
        let open = guard.get_or_insert_default();
        let key = (device.number(), handle);
        let at = match open.get_mut(&key) {
            Some((at, users)) => {
                *users += 1;
                *at
            }
            None => {
                let raw = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
                let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let mut at = 0;
                // SAFETY: the context is current; the driver checks the handle, which is passed by
                // value.
                check("open the engine's IPC handle", unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut at, raw, flags) })?;
                open.insert(key, (at, 1));
                at
            }
        };
        drop(guard);
        let (mut begin, mut size) = (0, 0);
        // SAFETY: the context is current and the address mapped; two integers are written.
        let answer = unsafe { sys::cuMemGetAddressRange_v2(&raw mut begin, &raw mut size, at) };
        // A driver that does not say leaves the engine's own word for it.
        let size = if answer == sys::CUresult::CUDA_SUCCESS { (size as u64).saturating_sub(at - at.min(begin)) } else { u64::MAX - at };
        log("measure the engine's memory", answer);
        Ok(Self { device: device.clone(), handle, at, size })
    }

    /// Where it begins.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Bytes from there on.
    pub(super) fn size(&self) -> u64 {
        self.size
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_current) = self.device.enter() else { return };
        let mut guard = OPEN.lock();
        let open = guard.get_or_insert_default();
        let key = (self.device.number(), self.handle);
        let Some((_, users)) = open.get_mut(&key) else { return };
        *users -= 1;
        if *users == 0 {
            open.remove(&key);
            // SAFETY: opened once by this table, closed once; every call on the memory has drained
            // its streams before it returned.
            log("close the engine's IPC handle", unsafe { sys::cuIpcCloseMemHandle(self.at) });
        }
    }
}
