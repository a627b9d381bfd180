//! Disks that can be full, read-only or broken.

use crate::run::skip;
use crate::wait_for;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A small file system of its own, if this process may mount one.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts one at `path`. Where that is not allowed it says so and returns `None`; see [`skip`].
    #[must_use]
    pub fn mount(path: &Path, megabytes: u32) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let options = format!("size={megabytes}m");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(path).status();
        if mounted.is_ok_and(|s| s.success()) {
            return Some(Self(path.to_owned()));
        }
        skip("mounts", "this process may not mount a tmpfs");
        None
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Makes it read-only (`ro`) or writable again (`rw`). Waits until no file is open for writing,
    /// as the system requires.
    pub fn remount(&self, how: &str) {
        let options = format!("remount,{how}");
        let remount = || Command::new("mount").args(["-o", &options]).arg(&self.0).stderr(Stdio::null()).status().unwrap();
        wait_for("the disk to be remounted", 60, || remount().success().then_some(()));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.0).status());
    }
}

/// A file system on a device of its own that turns itself read-only at its first error, even while
/// files on it are open.
pub struct LoopDisk {
    image: PathBuf,
    at: PathBuf,
}

impl LoopDisk {
    /// Makes and mounts one in `folder`. Where that is not allowed it says so and returns `None`;
    /// see [`skip`].
    #[must_use]
    pub fn mount(folder: &Path, megabytes: u64) -> Option<Self> {
        let disk = Self { image: folder.join("image"), at: folder.join("disk") };
        std::fs::create_dir(&disk.at).unwrap();
        std::fs::File::create(&disk.image).unwrap().set_len(megabytes << 20).unwrap();
        let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext4"]).arg(&disk.image).status();
        if made.is_ok_and(|s| s.success()) && disk.mounted() && disk.switch().is_some_and(|s| s.exists()) {
            return Some(disk);
        }
        skip("loop-devices", "this process may not mount ext4 over a loop device, or the kernel cannot make it fail");
        None
    }

    fn mounted(&self) -> bool {
        let mount = Command::new("mount").args(["-t", "ext4", "-o", "loop,errors=remount-ro"]).args([&self.image, &self.at]).status();
        mount.is_ok_and(|s| s.success())
    }

    /// The file that makes the kernel report an error of this file system.
    fn switch(&self) -> Option<PathBuf> {
        let mounts = std::fs::read_to_string("/proc/mounts").ok()?;
        let device = mounts.lines().filter_map(|l| l.split_once(' ')).find(|(_, rest)| rest.split(' ').next() == self.at.to_str())?.0;
        Some(Path::new("/sys/fs/ext4").join(Path::new(device).file_name()?).join("trigger_fs_error"))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// The kernel finds an error and refuses further writes.
    pub fn fail(&self) {
        std::fs::write(self.switch().unwrap(), "1").unwrap();
    }

    /// Unmounts it, repairs it and mounts it again. No process may use it meanwhile.
    pub fn repair(&self) {
        wait_for("the end of all uses of the disk", 60, || Command::new("umount").arg(&self.at).status().unwrap().success().then_some(()));
        // 1: errors were corrected.
        let repaired = Command::new("e2fsck").args(["-f", "-y"]).arg(&self.image).stdout(Stdio::null()).status().unwrap();
        assert!(repaired.code().is_some_and(|code| code <= 1), "{repaired}");
        assert!(self.mounted());
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        drop(Command::new("umount").arg("-l").arg(&self.at).stderr(Stdio::null()).status());
    }
}
