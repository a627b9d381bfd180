//! Reads the state of a stopped thread from `/proc`.

use nix::unistd::Pid;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Longest path that the kernel takes.
const PATH: usize = 4096;

/// The file behind a descriptor, as something to open.
pub(super) fn descriptor(thread: Pid, number: i32) -> PathBuf {
    format!("/proc/{thread}/fd/{number}").into()
}

/// The path of a descriptor's file; `None` if it has no name.
pub(super) fn place(thread: Pid, number: i32) -> Option<PathBuf> {
    let place = std::fs::read_link(descriptor(thread, number)).ok()?;
    (place.is_absolute() && !place.as_os_str().as_encoded_bytes().ends_with(b" (deleted)")).then_some(place)
}

/// The position of a descriptor in its file.
pub(super) fn position(thread: Pid, number: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{thread}/fdinfo/{number}")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("pos:"))?.trim().parse().ok()
}

/// A number in the thread's memory.
pub(super) fn number(thread: Pid, address: u64) -> Option<u64> {
    let mut bytes = [0; 8];
    memory(thread)?.read_exact_at(&mut bytes, address).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

/// A path as a call was given it, with its directory resolved: its last component is not followed.
/// None if its directory is not there.
pub(super) fn path(thread: Pid, directory: i32, address: u64) -> Option<PathBuf> {
    let mut bytes = vec![0; PATH];
    let memory = memory(thread)?;
    // The page after the text may not be there.
    let most = PATH - (address as usize % PATH);
    let mut count = memory.read_at(&mut bytes[..most], address).ok()?;
    if !bytes[..count].contains(&0) {
        count += memory.read_at(&mut bytes[count..], address + count as u64).ok()?;
    }
    bytes.truncate(bytes[..count].iter().position(|byte| *byte == 0)?);
    let given = PathBuf::from(OsString::from_vec(bytes));
    let from = match directory {
        nix::libc::AT_FDCWD => std::fs::read_link(format!("/proc/{thread}/cwd")).ok()?,
        number => place(thread, number).unwrap_or_default(),
    };
    let whole = from.join(&given);
    Some(std::fs::canonicalize(whole.parent().unwrap_or(Path::new("/"))).ok()?.join(whole.file_name()?))
}

fn memory(thread: Pid) -> Option<File> {
    File::open(format!("/proc/{thread}/mem")).ok()
}
