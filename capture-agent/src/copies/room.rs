//! Room on disk for what is copied there.

use crate::error::{Error, Result, blocking};
use parking_lot::Mutex;
use pfr_schema::api::GcReport;
use pfr_store::{GcOptions, GcPart, GcTrigger, Store};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a file system that stay free: for metadata of the store, and for other programs.
const RESERVE: u64 = 64 << 20;
/// Least time between two collections for want of room.
const COLLECTIONS: Duration = Duration::from_secs(10);

/// Whether the file system of a folder has room for `needed` bytes more.
pub(crate) fn room(folder: &Path, needed: u64) -> Result<()> {
    enough(free(folder)?, needed)
}

/// The room for a store. Copies that begin at the same time are not granted the same bytes. Where
/// there is too little, the garbage of the store goes first. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub(crate) struct Room(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    folder: PathBuf,
    /// Bytes that were granted and are not written yet.
    granted: Mutex<u64>,
    /// Locked while the file system is asked for one grant. Others wait: a refused one must not
    /// count against them.
    asking: Arc<tokio::sync::Mutex<()>>,
    /// When the last collection for want of room ended, and whether it succeeded. Locked while one
    /// runs: all captures that lack room wait for the same one.
    collected: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

impl Room {
    /// The room for a store, which is in this folder.
    pub fn of(store: Store, folder: PathBuf) -> Self {
        let (granted, asking, collected) = Default::default();
        Self(Arc::new(Inner { store, folder, granted, asking, collected }))
    }

    /// Grants `needed` bytes until they are written, or until the grant is dropped. Collects
    /// garbage first if there are fewer.
    ///
    /// # Errors
    /// [`Error::NoRoom`] if there are still fewer: those that the file system has free, without
    /// those that are granted already.
    pub async fn take(&self, needed: u64) -> Result<Granted> {
        match self.grant(needed).await {
            Err(refusal @ Error::NoRoom { .. }) => {
                if !self.collect().await {
                    return Err(refusal);
                }
            }
            granted => return granted,
        }
        self.grant(needed).await.map_err(|refusal| match refusal {
            Error::NoRoom { what, needed, free, .. } => Error::NoRoom { what, needed, free, collected: true },
            other => other,
        })
    }

    /// Collects garbage, unless a collection ended a moment ago. Returns whether the last one
    /// succeeded. Without garbage it costs a few look-ups.
    async fn collect(&self) -> bool {
        let inner = Arc::clone(&self.0);
        // On a task of its own: it goes on if the capture that lacks room is given up.
        let collecting = pfr_service::task::spawn(async move {
            let mut last = inner.collected.lock().await;
            if let Some((ended, done)) = *last
                && ended.elapsed() < COLLECTIONS
            {
                return done;
            }
            // Readers of a local store look again when a pack is gone, so packs need no grace
            // period. Nothing is compacted: that writes, and a capture waits for this.
            let options =
                GcOptions { trigger: GcTrigger::Schedule, part: GcPart::Collection, grace: Duration::ZERO, ..GcOptions::default() };
            let mut no_progress = |_: &GcReport| ();
            let done = match inner.store.gc(&options, &mut no_progress).await {
                Ok(report) => {
                    tracing::info!(freed_bytes = report.freed_bytes, "garbage collected: the disk had too little room");
                    true
                }
                Err(error) => {
                    tracing::warn!(%error, "garbage collection failed, and the disk has too little room");
                    false
                }
            };
            *last = Some((Instant::now(), done));
            done
        });
        collecting.await.unwrap_or(false)
    }

    /// The file system is asked on a thread that may block, and without the lock of `granted`: if
    /// it hangs, other captures must still be able to let their engines go on.
    async fn grant(&self, needed: u64) -> Result<Granted> {
        let (room, turn) = (self.clone(), Arc::clone(&self.0.asking).lock_owned().await);
        let grant = move || {
            // Before the file system is asked: bytes that are written in between are then counted
            // twice, and not left out.
            let before = *room.0.granted.lock();
            enough(free(&room.0.folder)?.saturating_sub(before), needed)?;
            let granted = room.add(needed);
            drop(turn);
            Ok::<_, Error>(granted)
        };
        blocking("free space", grant).await
    }

    /// Counts bytes as granted.
    fn add(&self, bytes: u64) -> Granted {
        let mut granted = self.0.granted.lock();
        let before = *granted;
        *granted = before.saturating_add(bytes);
        let left = *granted - before;
        drop(granted);
        Granted { room: self.clone(), left }
    }
}

/// Bytes that may be written.
#[derive(Debug)]
pub(crate) struct Granted {
    room: Room,
    left: u64,
}

impl Granted {
    /// Takes back what was written: the file system no longer counts it as free.
    pub fn written(&mut self, bytes: u64) {
        let bytes = bytes.min(self.left);
        self.left -= bytes;
        *self.room.0.granted.lock() -= bytes;
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        self.written(self.left);
    }
}

/// Free bytes of the file system of a folder.
fn free(folder: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(folder).map_err(|e| Error::io(format!("free space of {}", folder.display()))(e.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn enough(free: u64, needed: u64) -> Result<()> {
    let needed = needed.saturating_add(RESERVE);
    if needed > free { Err(Error::NoRoom { what: "disk", needed, free, collected: false }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use pfr_testkit::disk::SmallDisk;
    use pfr_testkit::frames;
    use std::convert::Infallible;

    async fn open(folder: &Path) -> (Store, Room) {
        let store = Store::open(folder, pfr_store::Options::default()).await.unwrap();
        (store.clone(), Room::of(store, folder.to_owned()))
    }

    #[tokio::test]
    async fn granted_bytes_are_not_granted_again_before_they_are_written_or_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let (_store, room) = open(dir.path()).await;
        // Other programs write to this file system too, so leave a margin.
        let most = free(dir.path()).unwrap() / 3 * 2;
        let mut granted = room.take(most).await.unwrap();
        assert!(matches!(room.take(most).await, Err(Error::NoRoom { what: "disk", .. })), "the file system has them once");
        granted.written(most);
        let again = room.take(most).await.expect("the file system counts what is written");
        drop(granted);
        assert!(room.take(most).await.is_err(), "a grant gives back no more than what was left of it");
        drop(again);
        room.take(most).await.expect("given back");
    }

    /// Leaves 32 MiB in a store that nothing holds, as a capture that failed does.
    async fn leave_garbage(store: &Store) {
        let session = store.open_push(&"team/agent".parse().unwrap()).await.unwrap();
        let blobs = (1..=4).map(|seed: u8| frames::blob(&vec![seed; 8 << 20]));
        let stream = Bytes::from(frames::stream(blobs));
        store.ingest(&session.id, futures::stream::iter([Ok::<_, Infallible>(stream)])).await.unwrap();
        store.abort(&session.id).await.unwrap();
    }

    #[tokio::test]
    async fn garbage_is_collected_before_a_capture_is_refused_and_not_each_time() {
        const NEEDED: u64 = 40 << 20;
        let dir = tempfile::tempdir().unwrap();
        // With the reserve, the garbage and what is needed, it is full.
        let Some(disk) = SmallDisk::mount(&dir.path().join("store"), 128) else { return };
        let (store, room) = open(disk.path()).await;
        leave_garbage(&store).await;
        let garbage = async || store.usage(Duration::ZERO).await.unwrap().garbage_bytes;
        let just_now = Instant::now() + Duration::from_secs(3600);

        *room.0.collected.lock().await = Some((just_now, true));
        let refused = room.take(NEEDED).await.unwrap_err();
        assert!(refused.to_string().contains("free after a collection of garbage"), "{refused}");
        assert!(garbage().await > 0, "a collection has just ended");
        *room.0.collected.lock().await = Some((just_now, false));
        let refused = room.take(NEEDED).await.unwrap_err();
        assert!(matches!(refused, Error::NoRoom { collected: false, .. }), "{refused}");

        *room.0.collected.lock().await = None;
        room.take(NEEDED).await.expect("its garbage goes first");
        assert_eq!(garbage().await, 0);
        assert!(room.0.collected.lock().await.is_some_and(|(_, done)| done), "the next one comes later");
    }
}
