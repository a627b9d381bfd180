//! The folder that a server was started with as `--slot-save-path`. Every file that this agent has
//! there begins with the agent's own prefix, and lives for one capture or restore: servers write
//! late files when they were stopped meanwhile, and agents are killed, so what is in no use is
//! removed whenever it is seen. Two agents may use one folder.

use crate::error::{Error, Result};
use parking_lot::Mutex;
use rustix::fs::OFlags;
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the id of an agent lies in its data folder.
const ID: &str = "llama-id";

/// Names in use in all folders of this agent: two servers may share a folder.
pub(super) type Used = Arc<Mutex<HashSet<String>>>;

/// The folder.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    prefix: String,
    used: Used,
}

/// A name for a file. Dropping it deletes the file, if there is one.
#[derive(Debug)]
pub(super) struct Name {
    folder: Arc<Folder>,
    name: String,
}

/// The id of the agent with this data folder, which no other agent has.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn agent_id(data: &Path) -> Result<String> {
    let path = data.join(ID);
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    if known.len() == 12 && known.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(known);
    }
    let id = uuid::Uuid::now_v7().simple().to_string().split_off(20);
    pfr_service::durable::replace(&path, id.as_bytes()).map_err(Error::io(format!("id of this agent in {}", path.display())))?;
    Ok(id)
}

impl Folder {
    pub fn new(path: &Path, agent: &str, used: &Used) -> Self {
        Self { path: path.into(), prefix: format!("pf-{agent}-"), used: Arc::clone(used) }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A name that no file has.
    pub fn name(self: &Arc<Self>) -> Name {
        let name = format!("{}{}.bin", self.prefix, uuid::Uuid::now_v7().simple());
        self.used.lock().insert(name.clone());
        Name { folder: Arc::clone(self), name }
    }

    /// Removes files of this agent that are in no use.
    pub fn sweep(&self) {
        // Without the folder there are no files.
        let Ok(entries) = std::fs::read_dir(&self.path) else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if !name.starts_with(&self.prefix) {
                continue;
            }
            let used = self.used.lock();
            if !used.contains(&name) && std::fs::remove_file(entry.path()).is_ok() {
                tracing::info!(file = %entry.path().display(), "state file of an earlier capture or restore removed");
            }
        }
    }
}

impl Name {
    pub fn as_str(&self) -> &str {
        &self.name
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path.join(&self.name)
    }

    /// Bytes of the file; 0 if there is none yet.
    pub fn bytes(&self) -> u64 {
        std::fs::symlink_metadata(self.path()).map_or(0, |stat| stat.len())
    }

    /// Opens the file to read it. Links are not followed.
    pub fn open(&self) -> std::io::Result<File> {
        let flags = OFlags::NOFOLLOW.bits().cast_signed();
        OpenOptions::new().read(true).custom_flags(flags).open(self.path())
    }

    /// Creates the file, for this user alone, to be written and read back.
    pub fn create(&self) -> std::io::Result<File> {
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(self.path())
    }
}

impl Drop for Name {
    fn drop(&mut self) {
        match std::fs::remove_file(self.path()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(file = %self.path().display(), %error, "state file not removed");
            }
            _ => {}
        }
        self.folder.used.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_removes_its_own_unused_files_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (agent_id(&dir.path().join(".")).unwrap(), "0123456789ab");
        assert_eq!(agent_id(dir.path()).unwrap(), one, "the id lasts");
        let names = Used::default();
        let folder = |agent: &str, names: &Used| Arc::new(Folder::new(dir.path(), agent, names));
        // Two servers of one agent, and another agent.
        let (one, same, two) = (folder(&one, &names), folder(&one, &names), folder(two, &Used::default()));
        let (used, also, lost, others) = (one.name(), same.name(), one.name(), two.name());
        for name in [&used, &also, &lost, &others] {
            std::fs::write(name.path(), "x").unwrap();
        }
        std::fs::write(dir.path().join("user.bin"), "x").unwrap();
        // As after a kill: the name is in no use, the file is there.
        one.used.lock().remove(lost.as_str());
        one.sweep();
        assert!(
            used.path().exists()
                && also.path().exists()
                && !lost.path().exists()
                && others.path().exists()
                && dir.path().join("user.bin").exists()
        );
        let path = used.path();
        drop(used);
        assert!(!path.exists());
    }

    #[test]
    fn links_are_not_followed_and_files_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Arc::new(Folder::new(dir.path(), "0123456789ab", &Used::default()));
        let name = folder.name();
        std::os::unix::fs::symlink("/etc/hostname", name.path()).unwrap();
        assert!(name.open().is_err() && name.create().is_err());
    }
}
