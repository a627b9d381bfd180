//! Files that are whole or not there: written aside, synced, renamed, and the folder synced.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// How a file is called while it is written.
pub(crate) const UNFINISHED: &str = "new";

/// Makes a folder that only this user may look into, with its parents.
pub(crate) fn private_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).map_or(Ok(()), sync_dir)
}

/// Writes a file, or replaces it; after a power cut it is the old one or the new one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let aside = path.with_extension(UNFINISHED);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&aside, path)?;
    path.parent().map_or(Ok(()), sync_dir)
}

fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
