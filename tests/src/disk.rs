//! A disk that can be full.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A small file system of its own, where this process may make one.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts one at `path`; `None` where that is not allowed.
    #[must_use]
    pub fn mount(path: &Path, megabytes: u32) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let options = format!("size={megabytes}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(path).status();
        mounted.is_ok_and(|s| s.success()).then(|| Self(path.to_owned()))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.0).status());
    }
}
