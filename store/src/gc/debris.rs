//! Work that the object store over a directory leaves to us: it hides unfinished uploads, and does
//! not sync deletions.

use crate::Store;
use crate::encryption;
use crate::error::{Error, Result};
use crate::marker;
use crate::packs::path;
use crate::tasks::notes;
use pfr_schema::journal::PREFIX;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

impl Store {
    /// Removes the files of unfinished uploads of a pack: they lie beside it as `<file>#<number>`,
    /// numbered from 1 without gaps.
    pub(super) async fn remove_unfinished(&self, key: &str) -> Result<()> {
        let Some(file) = self.file(key) else { return Ok(()) };
        blocking(move || {
            for number in 1_u32.. {
                match std::fs::remove_file(staged(&file, number)) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
        .await
    }

    /// Bytes that an unfinished upload of a pack has written; 0 on a storage that does not show
    /// them.
    pub(super) async fn unfinished_bytes(&self, key: &str) -> Result<u64> {
        let Some(file) = self.file(key) else { return Ok(0) };
        blocking(move || {
            let size = |file: &Path| match file.metadata() {
                Ok(metadata) => Ok(Some(metadata.len())),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            };
            let mut bytes = size(&file)?.unwrap_or(0);
            for number in 1_u32.. {
                match size(&staged(&file, number))? {
                    Some(more) => bytes += more,
                    None => break,
                }
            }
            Ok(bytes)
        })
        .await
    }

    /// Removes the files of unfinished uploads of journal objects, of the tasks' notes, of the
    /// marker and of the wrapped key that are older than a lease: their writers are done long
    /// before.
    pub(super) async fn remove_unfinished_objects(&self) -> Result<()> {
        let Some(dir) = self.packs_dir.clone() else { return Ok(()) };
        let lease = self.options.lease;
        blocking(move || {
            remove_unfinished_in(&dir, lease, |object| object == marker::KEY || object == encryption::KEY)?;
            remove_unfinished_in(&dir.join(notes::PREFIX), lease, |_| true)?;
            remove_unfinished_in(&dir.join(PREFIX), lease, |object| object.ends_with(".json"))
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

/// The file of an unfinished upload.
fn staged(file: &Path, number: u32) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!("#{number}"));
    name.into()
}

/// Their age is by the file system's clock, which all processes share.
fn remove_unfinished_in(dir: &Path, lease: Duration, is_ours: fn(&str) -> bool) -> io::Result<()> {
    let files = match std::fs::read_dir(dir) {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for file in files {
        let file = file?;
        let unfinished = file
            .file_name()
            .to_str()
            .and_then(|name| name.rsplit_once('#'))
            .is_some_and(|(object, number)| is_ours(object) && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()));
        if !unfinished {
            continue;
        }
        let removed = file.metadata().and_then(|metadata| metadata.modified()).and_then(|modified| {
            // Ignore files dated in the future.
            if modified.elapsed().is_ok_and(|age| age >= lease) { std::fs::remove_file(file.path()) } else { Ok(()) }
        });
        match removed {
            // It was finished, or another process was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
    }
    Ok(())
}

/// A folder that was never created has no entry to lose.
fn sync_dir(dir: &Path) -> io::Result<()> {
    match pfr_service::durable::sync_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        synced => synced,
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T> {
    pfr_service::task::spawn_blocking(work).await?.map_err(|e| Error::Unavailable { what: "packs", reason: e.to_string() })
}
