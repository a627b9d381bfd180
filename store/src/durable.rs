//! Durable files: the idioms that a call site must not forget, in one place.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

/// Creates a directory and its parents; every new entry is on disk when it returns.
///
/// # Errors
/// Those of the file system.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        create_dir_all(parent)?;
    }
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
        other => other?,
    }
    sync_parent(path)
}

/// Puts a file in place of `path`, whole or not at all: temporary file beside it, fsync, rename, fsync of the directory.
///
/// # Errors
/// Those of the file system; the temporary file is then removed.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let name = path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "a file needs a name"))?;
    let temporary = path.with_file_name(format!(".{}.{}.tmp", name.to_string_lossy(), uuid::Uuid::now_v7()));
    let result = (|| {
        let mut file = File::create_new(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)
    })();
    if result.is_err() {
        drop(std::fs::remove_file(&temporary));
    }
    result?;
    sync_parent(path)
}

/// Makes the entry of `path` in its directory durable.
///
/// # Errors
/// Those of the file system.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

/// Makes everything written to the file system of `path` durable: one call for thousands of files.
///
/// # Errors
/// Those of the file system.
pub fn sync_file_system(path: &Path) -> io::Result<()> {
    rustix::fs::syncfs(File::open(path)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_no_temporary_stays() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let deep = dir.path().join("a/b/c");
        create_dir_all(&deep).expect("created");
        create_dir_all(&deep).expect("created again");
        let path = deep.join("file");
        write(&path, b"one").expect("written");
        write(&path, b"two").expect("replaced");
        assert_eq!(std::fs::read(&path).expect("read"), b"two");
        assert_eq!(std::fs::read_dir(&deep).expect("listed").count(), 1);
        assert!(write(&deep.join("missing/file"), b"x").is_err());
        sync_file_system(&deep).expect("synced");
    }
}
