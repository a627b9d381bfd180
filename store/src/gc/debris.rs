//! What the object store over a directory does not do: it keeps unfinished uploads out of sight, and does not sync deletions.

use crate::Store;
use crate::error::{Error, Result};
use crate::pack_writer::path;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

impl Store {
    /// Removes the files of unfinished uploads of a pack: they lie beside it as `<file>#<number>`, numbered from 1 without gaps.
    pub(super) async fn remove_unfinished(&self, key: &str) -> Result<()> {
        let Some(file) = self.file(key) else { return Ok(()) };
        blocking(move || {
            for number in 1_u32.. {
                let mut name = file.clone().into_os_string();
                name.push(format!("#{number}"));
                match std::fs::remove_file(&name) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
        .await
    }

    /// Makes the deletion of packs durable.
    pub(super) async fn sync_deletions(&self, keys: impl Iterator<Item = &str>) -> Result<()> {
        let dirs: BTreeSet<PathBuf> = keys.filter_map(|key| Some(self.file(key)?.parent()?.to_owned())).collect();
        blocking(move || dirs.iter().try_for_each(|dir| sync_dir(dir))).await
    }

    fn file(&self, key: &str) -> Option<PathBuf> {
        Some(self.packs_dir.as_ref()?.join(path(key).as_ref()))
    }
}

/// A directory that was never made has nothing to come back.
fn sync_dir(dir: &Path) -> io::Result<()> {
    match std::fs::File::open(dir) {
        Ok(dir) => dir.sync_all(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

async fn blocking(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> Result<()> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| Error::Internal(e.to_string()))?
        .map_err(|e| Error::Unavailable { what: "packs", reason: e.to_string() })
}
