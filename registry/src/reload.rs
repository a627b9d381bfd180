//! Files that are read again while the registry serves: when they change, and when the operator
//! asks (SIGHUP).
//!
//! A change is noticed by a look at the files every two seconds, because a watch of the system
//! misses what happens behind links and on network file systems. Renewed certificates come in
//! several files, one after the other: they are read when nothing has changed for one look.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// How often files are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// Something that is made of files.
pub(crate) trait Reload: Send + Sync {
    /// Reads the files again if they have changed, or in any case if `at_once`. What they had
    /// before stays in force if they cannot be used. May block.
    fn reload(&self, at_once: bool);
}

/// Asks for all files to be read again. Cheap to clone; clones ask the same registry.
#[derive(Clone, Debug, Default)]
pub struct Reloader(Arc<Notify>);

impl Reloader {
    /// Has the files read soon, whether or not they have changed.
    pub fn reload(&self) {
        self.0.notify_one();
    }

    /// Looks after these, for ever.
    pub(crate) async fn run(self, parts: Vec<Arc<dyn Reload>>) {
        loop {
            let at_once = tokio::select! {
                () = tokio::time::sleep(LOOK) => false,
                () = self.0.notified() => true,
            };
            let parts = parts.clone();
            // A file system that hangs must not hold an async thread.
            let looked = pfr_service::task::spawn_blocking(move || parts.iter().for_each(|part| part.reload(at_once)));
            if let Err(error) = looked.await {
                tracing::error!(%error, "reading changed files failed");
            }
        }
    }
}

/// What tells one state of a file from another, without its bytes; none if it cannot be seen.
type Stamp = Option<(u64, u64, u64, [i64; 4])>;

/// Files whose changes matter.
#[derive(Debug)]
pub(crate) struct Watched {
    paths: Vec<PathBuf>,
    /// At the last look.
    seen: Vec<Stamp>,
    /// When they were last read, or tried to be.
    read: Vec<Stamp>,
}

impl Watched {
    /// These files, which are about to be read: a later change is one from now on.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        let now = stamps(&paths);
        Self { paths, seen: now.clone(), read: now }
    }

    /// These, too, which are about to be read.
    pub(crate) fn add(&mut self, paths: impl IntoIterator<Item = PathBuf>) {
        let paths: Vec<PathBuf> = paths.into_iter().collect();
        let now = stamps(&paths);
        self.paths.extend(paths);
        self.seen.extend_from_slice(&now);
        self.read.extend(now);
    }

    /// Whether to read them now. If so, they count as read.
    pub(crate) fn is_due(&mut self, at_once: bool) -> bool {
        let now = stamps(&self.paths);
        let is_settled = now == self.seen;
        self.seen.clone_from(&now);
        let is_due = at_once || (is_settled && now != self.read);
        if is_due {
            self.read = now;
        }
        is_due
    }
}

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let file = std::fs::metadata(path).ok()?;
        // The time of the last change of its properties, too: permissions may have been mended.
        Some((file.dev(), file.ino(), file.size(), [file.mtime(), file.mtime_nsec(), file.ctime(), file.ctime_nsec()]))
    };
    paths.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_due_once_after_each_change_and_not_while_it_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, "a").unwrap();
        let mut watched = Watched::new(vec![path.clone(), dir.path().join("absent")]);
        let mut looks = |count: usize| (0..count).map(|_| watched.is_due(false)).collect::<Vec<_>>();
        assert_eq!(looks(2), [false, false]);
        std::fs::write(&path, "ab").unwrap();
        assert_eq!(looks(1), [false], "it may still be written");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(looks(3), [false, true, false]);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(looks(3), [false, true, false]);
        // The same bytes in another file, as a renewal by rename leaves them.
        std::fs::write(dir.path().join("y"), "abc").unwrap();
        std::fs::rename(dir.path().join("y"), &path).unwrap();
        assert_eq!(looks(3), [false, true, false]);
        assert!(watched.is_due(true) && watched.is_due(true), "asked for");
    }
}
