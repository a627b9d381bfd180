//! Unix sockets that only this user can open, from the first moment on.

use crate::error::{Error, Result};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use tokio::net::UnixListener;

/// Removes the socket's file when dropped.
#[derive(Debug)]
pub(crate) struct Unlink(PathBuf);

impl Drop for Unlink {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
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
        std::fs::rename(&fresh, path)?;
        Ok((listener, Unlink(path.into())))
    };
    bind().map_err(Error::io(what()))
}
