//! Unix sockets that only this user can open, from the first moment on.

use crate::error::{Error, Result};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// Removes the socket's file when dropped, unless another agent has replaced it: an agent that is
/// stopping does not listen while it answers open requests, so the next agent takes the place.
#[derive(Debug)]
pub(crate) struct Unlink {
    path: PathBuf,
    /// Device and inode.
    made: (u64, u64),
}

impl Drop for Unlink {
    fn drop(&mut self) {
        if inode(&self.path).is_ok_and(|found| found == self.made) {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

fn inode(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

/// Makes the folder of a socket.
fn folder(path: &Path) -> Result<()> {
    let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.exists()) else { return Ok(()) };
    pfr_service::durable::create_private_dir_all(parent).map_err(Error::io(format!("folder {}", parent.display())))
}

/// Listens. A dead agent's socket is replaced, a live one's is not.
pub(crate) fn bind(path: &Path) -> Result<(UnixListener, Unlink)> {
    let what = || format!("listen on {}", path.display());
    folder(path)?;
    if std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(Error::Io { what: what(), source: std::io::Error::new(std::io::ErrorKind::AddrInUse, "another agent listens here") });
    }
    let bind = || {
        let fresh = path.with_extension("new");
        match std::fs::remove_file(&fresh) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&fresh)?;
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(0o600))?;
        let unlink = Unlink { path: path.into(), made: inode(&fresh)? };
        std::fs::rename(&fresh, path)?;
        Ok((listener, unlink))
    };
    bind().map_err(Error::io(what()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_of_an_agent_leaves_the_socket_of_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent.sock");
        let (listener, unlink) = bind(&path).unwrap();
        // It answers open requests, and accepts no others.
        drop(listener);
        let (_next, of_next) = bind(&path).unwrap();
        drop(unlink);
        assert!(path.exists(), "the next agent cannot be reached");
        drop(of_next);
        assert!(!path.exists());
    }
}
