//! Room on disk for what is copied there.

use crate::error::{Error, Result};
use std::path::Path;

/// Bytes of a file system that stay free: for metadata of the store, and for other programs.
const RESERVE: u64 = 64 << 20;

/// Whether the file system of a folder, such as the local store, has room for `needed` bytes more.
pub(crate) fn room(folder: &Path, needed: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(folder).map_err(|e| Error::io(format!("free space of {}", folder.display()))(e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let needed = needed.saturating_add(RESERVE);
    if needed > free {
        return Err(Error::NoRoom { what: "disk", needed, free });
    }
    Ok(())
}
