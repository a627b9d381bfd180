//! System calls that change files, by number.

use nix::libc;
use std::path::PathBuf;

/// Whether a call may change files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effects {
    None,
    Some,
}

/// A call that changes files below the root, as its arguments say before it is made.
#[derive(Debug)]
pub(super) enum Call {
    /// Opens a file, which is made or emptied if need be.
    Open { path: PathBuf, existed: bool, empties: bool },
    /// Writes through a descriptor, at its position or elsewhere.
    Write { descriptor: i32, offset: Option<u64> },
    /// Changes the size of a file.
    Resize { path: PathBuf },
    /// Makes a directory.
    MakeDirectory { path: PathBuf },
    /// Makes a symbolic or a hard link, or another node.
    MakeName { path: PathBuf },
    /// Removes a name.
    Remove { path: PathBuf },
    /// Renames.
    Rename { from: PathBuf, to: PathBuf },
    /// Makes a file or a directory durable.
    Sync { descriptor: i32 },
    /// Makes everything durable.
    SyncAll,
    /// Shares the blocks of another file. Not modelled, unless the file system refuses it.
    Clone,
}

/// What the arguments of a call mean.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// Path, flags.
    Open,
    /// Directory, path, flags.
    OpenAt,
    /// Path: made and emptied.
    Creat,
    /// Descriptor: written at its position.
    Write,
    /// Descriptor; the offset is this argument.
    WriteAt(usize),
    /// Descriptor and address of an offset, or null, are these arguments.
    Copy(usize, Option<usize>),
    /// Path.
    Truncate,
    /// Descriptor.
    FTruncate,
    /// Descriptor, mode.
    Allocate,
    /// Path of a directory.
    MakeDirectory,
    /// Directory, path.
    MakeDirectoryAt,
    /// The new path is this argument, below the directory of the one before if there is one.
    MakeName { directory: Option<usize>, path: usize },
    /// Path.
    Remove,
    /// Directory, path.
    RemoveAt,
    /// Two paths.
    Rename,
    /// Two directories and paths, and flags where there are any.
    RenameAt { flags: bool },
    /// Descriptor.
    Sync,
    /// Descriptor: its whole file system.
    SyncFs,
    /// Nothing: everything.
    SyncAll,
    /// Memory of a file.
    Map,
    /// Descriptor, request.
    Control,
    /// Not modelled.
    Never,
}

pub(super) fn effects(number: u64) -> Effects {
    if shape(number).is_some() { Effects::Some } else { Effects::None }
}

pub(super) fn shape(number: u64) -> Option<Shape> {
    let number = libc::c_long::try_from(number).ok()?;
    Some(match number {
        libc::SYS_openat => Shape::OpenAt,
        libc::SYS_write | libc::SYS_writev => Shape::Write,
        libc::SYS_pwrite64 | libc::SYS_pwritev => Shape::WriteAt(3),
        libc::SYS_copy_file_range | libc::SYS_splice => Shape::Copy(2, Some(3)),
        libc::SYS_sendfile => Shape::Copy(0, None),
        libc::SYS_truncate => Shape::Truncate,
        libc::SYS_ftruncate => Shape::FTruncate,
        libc::SYS_fallocate => Shape::Allocate,
        libc::SYS_mkdirat => Shape::MakeDirectoryAt,
        libc::SYS_linkat => Shape::MakeName { directory: Some(2), path: 3 },
        libc::SYS_symlinkat => Shape::MakeName { directory: Some(1), path: 2 },
        libc::SYS_unlinkat => Shape::RemoveAt,
        libc::SYS_renameat => Shape::RenameAt { flags: false },
        libc::SYS_renameat2 => Shape::RenameAt { flags: true },
        libc::SYS_fsync | libc::SYS_fdatasync => Shape::Sync,
        libc::SYS_syncfs => Shape::SyncFs,
        libc::SYS_sync => Shape::SyncAll,
        libc::SYS_mmap => Shape::Map,
        libc::SYS_ioctl => Shape::Control,
        libc::SYS_openat2 | libc::SYS_pwritev2 | libc::SYS_mknodat | libc::SYS_io_uring_setup | libc::SYS_io_submit => Shape::Never,
        #[cfg(target_arch = "x86_64")]
        other => return older(other),
        #[cfg(not(target_arch = "x86_64"))]
        _ => return None,
    })
}

/// Calls that only older architectures have.
#[cfg(target_arch = "x86_64")]
fn older(number: libc::c_long) -> Option<Shape> {
    Some(match number {
        libc::SYS_open => Shape::Open,
        libc::SYS_creat => Shape::Creat,
        libc::SYS_mkdir => Shape::MakeDirectory,
        libc::SYS_rmdir | libc::SYS_unlink => Shape::Remove,
        libc::SYS_rename => Shape::Rename,
        libc::SYS_link | libc::SYS_symlink => Shape::MakeName { directory: None, path: 1 },
        libc::SYS_mknod => Shape::Never,
        _ => return None,
    })
}
