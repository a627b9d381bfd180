//! Durable directories: a new entry is on disk only when its parent was synced.

use std::fs::File;
use std::io;
use std::path::Path;

/// Creates a directory and its parents; every new entry is on disk when it returns.
///
/// # Errors
/// Those of the file system.
pub(crate) fn create_dir_all(path: &Path) -> io::Result<()> {
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

/// Makes the entry of `path` in its directory durable.
///
/// # Errors
/// Those of the file system.
fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_made_with_their_parents_and_again() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let deep = dir.path().join("a/b/c");
        create_dir_all(&deep).expect("created");
        create_dir_all(&deep).expect("created again");
        assert!(deep.is_dir());
        std::fs::write(dir.path().join("file"), b"").expect("written");
        assert!(create_dir_all(&dir.path().join("file/below")).is_err());
    }
}
