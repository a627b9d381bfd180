//! The driver library, found at run time; devices with their primary context and kernels.

use super::super::MemoryError;
use cudarc::driver::sys;
use parking_lot::Mutex;
use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::sync::{Arc, Weak};

/// The kernels as PTX text, built from `kernels/pages.cu` and compressed by `kernels/build-ptx`.
const PTX: &[u8] = include_bytes!("../../../kernels/pages.ptx.zst");

/// Devices in use.
static DEVICES: Mutex<Vec<([u8; 16], Weak<Device>)>> = Mutex::new(Vec::new());

/// Whether the driver's library is there. Every other call of the driver comes after this one has
/// said yes: without the library they panic.
pub(super) fn library() -> Result<(), MemoryError> {
    // SAFETY: it only tries to open the library by name; the driver's initialisers are meant to be
    // run so.
    if unsafe { sys::is_culib_present() } {
        return Ok(());
    }
    Err(MemoryError::Unsupported { what: "GPU memory", reason: "there is no CUDA driver (libcuda.so) on this machine".into() })
}

/// The driver's answer as a result.
pub(super) fn check(what: &'static str, answer: sys::CUresult) -> Result<(), MemoryError> {
    if answer == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(MemoryError::Unreachable { what, reason: describe(answer) })
}

fn describe(answer: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded (it answered); it stores a pointer to a static string, or null
    // for a code it does not know.
    let known = unsafe { sys::cuGetErrorString(answer, &raw mut text) };
    if known != sys::CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{answer:?}");
    }
    // SAFETY: a static, NUL-terminated string of the driver.
    format!("{answer:?}: {}", unsafe { CStr::from_ptr(text) }.to_string_lossy())
}

/// Logs what cannot be returned because it went wrong in a destructor.
pub(super) fn log(what: &'static str, answer: sys::CUresult) {
    if answer != sys::CUresult::CUDA_SUCCESS {
        tracing::error!(reason = describe(answer), "{what}");
    }
}

/// The text of the kernels; the driver wants a NUL at the end.
fn image() -> Result<CString, MemoryError> {
    let reason = |e: &dyn std::fmt::Display| MemoryError::Unreachable { what: "unpack the kernels", reason: e.to_string() };
    let text = zstd::decode_all(PTX).map_err(|e| reason(&e))?;
    CString::new(text).map_err(|e| reason(&e))
}

fn start() -> Result<(), MemoryError> {
    library()?;
    // SAFETY: the library is there; the call may be made any number of times, from any thread.
    let answer = unsafe { sys::cuInit(0) };
    if answer != sys::CUresult::CUDA_SUCCESS {
        return Err(MemoryError::Unsupported { what: "GPU memory", reason: describe(answer) });
    }
    Ok(())
}

/// UUIDs of the GPUs that this process sees, in the order of their numbers.
///
/// # Errors
/// [`MemoryError::Unsupported`] without a driver, [`MemoryError::Unreachable`] if it does not
/// answer.
pub fn devices() -> Result<Vec<String>, MemoryError> {
    start()?;
    Ok(list()?.into_iter().map(|(_, uuid)| format!("GPU-{}", uuid::Uuid::from_bytes(uuid))).collect())
}

fn list() -> Result<Vec<(sys::CUdevice, [u8; 16])>, MemoryError> {
    let what = "list GPUs";
    let mut count = 0;
    // SAFETY: the driver was started; `count` is written once.
    check(what, unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    let mut out = Vec::new();
    for number in 0..count {
        let (mut device, mut uuid) = (0, sys::CUuuid { bytes: [0; 16] });
        // SAFETY: `number` is below the count.
        check(what, unsafe { sys::cuDeviceGet(&raw mut device, number) })?;
        // SAFETY: `device` was just given by the driver; `uuid` has the 16 bytes it writes.
        check(what, unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) })?;
        out.push((device, uuid.bytes.map(|byte| byte as u8)));
    }
    Ok(out)
}

/// The 16 bytes of `GPU-…`, `MIG-…` or a bare UUID.
fn parse(uuid: &str) -> Result<[u8; 16], MemoryError> {
    let bare = uuid.strip_prefix("GPU-").or_else(|| uuid.strip_prefix("MIG-")).unwrap_or(uuid);
    let parsed = uuid::Uuid::try_parse(bare);
    let unreachable = |e| MemoryError::Unreachable { what: "find the GPU", reason: format!("{uuid:?} is no UUID: {e}") };
    Ok(parsed.map_err(unreachable)?.into_bytes())
}

/// A GPU: its primary context, held, and the kernels, loaded. All calls of the driver for it happen
/// inside [`Device::enter`].
pub(super) struct Device {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    /// The kernels.
    pub(super) kernels: Kernels,
    /// Multiprocessors.
    pub(super) multiprocessors: u32,
}

/// The kernels of `pages.cu`.
pub(super) struct Kernels {
    pub(super) sha256: sys::CUfunction,
    pub(super) gather: sys::CUfunction,
    pub(super) scatter: sys::CUfunction,
}

// SAFETY: the handles are names of driver objects, which the driver lets any thread use while the
// context is current there (`enter`); they are created once and freed once, in `drop`.
unsafe impl Send for Device {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Device {}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({})", self.device)
    }
}

/// The context is current on this thread while this lives.
pub(super) struct Current<'a>(PhantomData<(&'a Device, *const ())>);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: made only by `enter`, which pushed; it cannot leave its thread, so this pops what
        // was pushed.
        log("leave the GPU's context", unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) });
    }
}

impl Device {
    /// The GPU with this UUID. All users of it share one object.
    pub(super) fn open(uuid: &str) -> Result<Arc<Self>, MemoryError> {
        let bytes = parse(uuid)?;
        start()?;
        let mut devices = DEVICES.lock();
        devices.retain(|(_, device)| device.strong_count() > 0);
        if let Some(device) = devices.iter().find(|(of, _)| *of == bytes).and_then(|(_, device)| device.upgrade()) {
            return Ok(device);
        }
        let found = list()?.into_iter().find(|(_, of)| *of == bytes);
        let reason = || format!("{uuid} is not among the GPUs this process sees (CUDA_VISIBLE_DEVICES?)");
        let (device, _) = found.ok_or_else(|| MemoryError::Unreachable { what: "find the GPU", reason: reason() })?;
        let device = Arc::new(Self::load(device)?);
        devices.push((bytes, Arc::downgrade(&device)));
        Ok(device)
    }

    fn load(device: sys::CUdevice) -> Result<Self, MemoryError> {
        let mut multiprocessors = 0;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        // SAFETY: `device` is the driver's; one integer is written.
        check("describe the GPU", unsafe { sys::cuDeviceGetAttribute(&raw mut multiprocessors, count, device) })?;
        let mut context = std::ptr::null_mut();
        // SAFETY: as above; `drop` releases the context that is retained here.
        check("open the GPU's context", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        let none: *mut c_void = std::ptr::null_mut();
        // From here on dropping it releases the context, also if something below fails.
        let mut this = Self {
            device,
            context,
            module: none.cast(),
            kernels: Kernels { sha256: none.cast(), gather: none.cast(), scatter: none.cast() },
            multiprocessors: u32::try_from(multiprocessors).unwrap_or(1).max(1),
        };
        let image = image()?;
        let current = this.enter()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the context is current; the image is NUL-terminated text, which the driver
        // compiles before it returns.
        check("load the kernels", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast::<c_void>()) })?;
        let function = |name: &CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: the module was just loaded; the name is NUL-terminated.
            check("find a kernel", unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) })?;
            Ok(function)
        };
        let kernels = (|| {
            Ok::<_, MemoryError>(Kernels {
                sha256: function(c"pf_sha256_pages")?,
                gather: function(c"pf_gather")?,
                scatter: function(c"pf_scatter")?,
            })
        })();
        drop(current);
        this.module = module;
        this.kernels = kernels?;
        Ok(this)
    }

    /// Makes the context current on this thread.
    pub(super) fn enter(&self) -> Result<Current<'_>, MemoryError> {
        // SAFETY: the context is held for as long as `self` lives, which the result does not
        // outlive.
        check("enter the GPU's context", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Current(PhantomData))
    }

    /// Bytes of device memory that can be allocated.
    pub(super) fn free(&self) -> Result<u64, MemoryError> {
        let _current = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current; two integers are written.
        check("ask for free GPU memory", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// The device's number, as the driver wants it in descriptions of memory.
    pub(super) fn number(&self) -> sys::CUdevice {
        self.device
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if !self.module.is_null()
            && let Ok(_current) = self.enter()
        {
            // SAFETY: loaded in this context, and no call of ours runs: each holds the device while
            // it does.
            log("unload the kernels", unsafe { sys::cuModuleUnload(self.module) });
        }
        // SAFETY: retained once, in `load`; everything made in the context holds the device, so
        // nothing of it is left.
        log("release the GPU's context", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_kernels_unpack_and_are_those_that_are_looked_for() {
        let image = image().unwrap();
        let text = image.to_str().unwrap();
        let entries: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(".visible .entry ")).collect();
        assert_eq!(entries, ["pf_sha256_pages(", "pf_gather(", "pf_scatter("]);
    }
}
