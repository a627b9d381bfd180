//! The directory of the demo, which is removed at the end unless the user keeps it.

use pfr_client::cli::Failure;
use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum bytes of the directory's path: the path of a Unix socket may have 107.
const LONGEST: usize = 84;

/// How often, and how long apart, the directory is tried to be removed.
const TRIES: u32 = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// The demo's directory.
#[derive(Debug)]
pub struct Stage {
    root: PathBuf,
    keep: bool,
}

impl Stage {
    /// `keep` (made if it is not there; must be empty), or a new temporary directory.
    pub fn new(keep: Option<PathBuf>) -> Result<Self, Failure> {
        let kept = keep.is_some();
        let root = keep.unwrap_or_else(|| std::env::temp_dir().join(format!("pf-demo-{}", uuid::Uuid::now_v7().simple())));
        let fail = |e: std::io::Error| Failure::usage(format!("cannot use {}: {e}", root.display()));
        fs::DirBuilder::new().recursive(kept).mode(0o700).create(&root).map_err(fail)?;
        if fs::read_dir(&root).map_err(fail)?.next().is_some() {
            return Err(Failure::usage(format!("{} is not empty", root.display())).hint("--keep wants a new or an empty directory"));
        }
        let root = root.canonicalize().map_err(fail)?;
        if root.as_os_str().len() > LONGEST {
            return Err(Failure::usage(format!("{} is too long for the sockets in it", root.display()))
                .hint(format!("the path may have {LONGEST} bytes")));
        }
        Ok(Self { root, keep: kept })
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Something in it.
    pub fn at(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// Whether it stays.
    pub fn kept(&self) -> bool {
        self.keep
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // A child that has just been killed may have made a file while others were removed. If
        // removal fails, the rest stays in the system's temporary directory.
        for _ in 0..TRIES {
            if self.keep || fs::remove_dir_all(&self.root).is_ok() {
                return;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_stage_is_gone_afterwards_and_a_kept_one_stays() {
        let stage = Stage::new(None).unwrap();
        let root = stage.root().to_owned();
        fs::write(stage.at("x"), "y").unwrap();
        drop(stage);
        assert!(!root.exists());

        let dir = tempfile::tempdir().unwrap();
        let kept = dir.path().join("demo");
        drop(Stage::new(Some(kept.clone())).unwrap());
        assert!(kept.exists());
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(100));
        assert_eq!(Stage::new(Some(long)).unwrap_err().exit(), 1);
    }

    #[test]
    fn a_directory_with_something_in_it_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("mine"), "").unwrap();
        assert_eq!(Stage::new(Some(dir.path().into())).unwrap_err().exit(), 1);
        assert!(dir.path().join("mine").exists());
    }
}
