//! Writing packs: many frames into one immutable object, in pieces, in bounded memory.
//!
//! A pack may take longer to write than a lease lasts: the leases of its row and of its session are
//! renewed as its bytes come.

use super::files;
use super::paths::path;
use super::pending::Pending;
use super::renewal::Renewal;
use crate::Store;
use crate::error::{Error, Result};
use crate::live::LivePush;
use crate::metadata::{FullPack, Moved, NewContainer, NewFrame, PackId, PackSizes, PackStored, PushId};
use crate::trace::Stage;
use bytes::Bytes;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutPayload, UploadPart};
use pfr_schema::frame::Header;
use pfr_schema::pack;
use pfr_service::task::Task;

/// Bytes of one part of an upload to a bucket; S3 wants at least 5 MiB.
const PART: usize = 5 << 20;
/// Frames and children of nodes after which a pack is full, however few its bytes. Each takes about
/// half a KiB until it is indexed, and indexing is one transaction for which others wait: so 16
/// MiB, and well under a second. Pages of 4 KiB and more fill a pack by bytes.
const ENTRIES: usize = 32 << 10;
/// Bytes of blobs that are left out until those that wait for a part are copied: they came in the
/// same memory, which is free only when none of them needs it.
const LEFT_OUT: u64 = 8 << 20;

impl Store {
    /// What fills a pack that frames are copied into.
    #[must_use]
    pub fn full_pack(&self) -> FullPack {
        FullPack { bytes: self.options.pack_bytes, frames: ENTRIES as u64 }
    }
}

/// A pack being written. Its row exists before its first byte; dropping it leaves debris that
/// collection finds by that row.
pub(crate) struct PackWriter {
    store: Store,
    /// The session that it is written for; none for a copy.
    push: Option<PushId>,
    /// Whether the floor holds for it: it adds to what is stored, or can wait.
    grows: bool,
    id: PackId,
    key: String,
    upload: Box<dyn MultipartUpload>,
    writing: Option<Task<Result<()>>>,
    pending: Pending,
    /// Bytes of blobs that were left out since the pending ones were copied.
    left_out: u64,
    /// Bytes of a part. Parts begin and end at multiples of it.
    part: usize,
    offset: u64,
    frames: Vec<NewFrame>,
    /// Frames and children so far.
    entries: usize,
    renewal: Renewal,
}

impl PackWriter {
    /// Begins a pack, for the session `push` if it is to be finished by [`Self::finish`].
    pub(crate) async fn begin(store: &Store, push: Option<&LivePush>) -> Result<Self> {
        store.mark().await?;
        if push.is_some() {
            // Not after the bytes were sent. The transaction that indexes them decides.
            store.metadata.has_room().await?;
        }
        store.directory_is_there().await?;
        let renewal = push.map_or_else(|| Renewal::done(store), |push| push.renewal.clone());
        // Never reused and never derived from content: a late or repeated delete can only hit bytes
        // that no row names.
        let key = uuid::Uuid::now_v7().to_string();
        let id = store.metadata.begin_pack(key.clone(), store.options.lease).await?;
        let upload = store.packs.put_multipart(&path(&key)).await.map_err(Error::packs)?;
        let mut writer = Self {
            store: store.clone(),
            push: push.map(|push| push.id.clone()),
            grows: push.is_some(),
            id,
            key,
            upload,
            writing: None,
            pending: Pending::default(),
            left_out: 0,
            part: if store.packs_dir.is_some() { files::PART } else { PART },
            offset: 0,
            frames: Vec::new(),
            entries: 0,
            renewal,
        };
        writer.append_few(pack::MAGIC).await?;
        Ok(writer)
    }

    /// Leaves the disk the bytes that are kept for deletions, as a push does.
    pub(crate) fn above_the_floor(self) -> Self {
        Self { grows: true, ..self }
    }

    /// Its row.
    pub(crate) fn id(&self) -> PackId {
        self.id
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.offset
    }

    /// Whether it should be finished after this frame.
    pub(crate) fn is_full(&self) -> bool {
        self.offset >= self.store.options.pack_bytes || self.entries >= ENTRIES
    }

    /// Starts a frame; its payload and [`Self::checksum`] must follow.
    pub(crate) async fn header(&mut self, header: Header, container: Option<NewContainer>) -> Result<()> {
        self.entries += 1 + container.as_ref().map_or(0, |c| c.children.len());
        self.frames.push(NewFrame { header, offset: self.offset, container });
        self.append_few(&header.to_bytes()).await
    }

    pub(crate) async fn checksum(&mut self, checksum: u32) -> Result<()> {
        self.append_few(&checksum.to_le_bytes()).await
    }

    /// Appends bytes, which are written when a part is full.
    ///
    /// # Errors
    /// [`Error::PackLost`], [`Error::PushUnknown`] as soon as it is clear that it cannot be
    /// finished.
    pub(crate) async fn append(&mut self, bytes: Bytes) -> Result<()> {
        self.renew().await?;
        self.offset += bytes.len() as u64;
        self.pending.push(bytes);
        self.write_full_parts().await
    }

    /// Pieces that wait for a part.
    #[cfg(test)]
    pub(crate) fn pieces(&self) -> usize {
        self.pending.pieces()
    }

    /// Bytes of blobs that are not written came in the same memory.
    pub(crate) fn leave_out(&mut self, bytes: u64) {
        self.left_out = self.left_out.saturating_add(bytes);
        if self.left_out > LEFT_OUT {
            self.left_out = 0;
            self.pending.copy_out();
        }
    }

    async fn append_few(&mut self, bytes: &[u8]) -> Result<()> {
        self.offset += bytes.len() as u64;
        self.pending.copy(bytes);
        self.write_full_parts().await
    }

    async fn write_full_parts(&mut self) -> Result<()> {
        loop {
            let begin = self.offset - self.pending.bytes() as u64;
            let part = self.part - (begin % self.part as u64) as usize;
            if self.pending.bytes() < part {
                return Ok(());
            }
            self.write_part(part).await?;
        }
    }

    /// Hands that many pending bytes to the object store; one part is in flight while the next
    /// fills.
    async fn write_part(&mut self, bytes: usize) -> Result<()> {
        self.wait().await?;
        // Compaction frees more than it takes, and has looked whether it fits.
        let disk = self.store.packs_disk.clone().filter(|_| self.grows);
        let stage = Stage::storage("put part", &self.key, bytes as u64);
        let part: UploadPart = self.upload.put_part(PutPayload::from_iter(self.pending.take(bytes)));
        self.writing = Some(pfr_service::task::spawn(async move {
            let coming = match disk {
                // On a mount that hangs, it would keep this thread from other tasks.
                Some(disk) => {
                    let take = pfr_service::task::spawn_blocking(move || disk.take(bytes as u64));
                    Some(take.await??)
                }
                None => None,
            };
            let written = part.await.map_err(Error::packs);
            drop((coming, stage));
            written
        }));
        Ok(())
    }

    async fn wait(&mut self) -> Result<()> {
        match self.writing.take() {
            Some(task) => task.await?,
            None => Ok(()),
        }
    }

    /// Frames and children of nodes so far.
    pub(crate) fn entries(&self) -> usize {
        self.entries
    }

    /// Waits for what is being written, and writes the rest where parts may be small; gives the
    /// bytes that are still held.
    pub(crate) async fn rest(&mut self) -> Result<u64> {
        // A part of a file may have any size; one in a bucket has 5 MiB or more.
        if self.store.packs_dir.is_some() {
            self.write_pending().await?;
        }
        self.wait().await?;
        Ok(self.pending.bytes() as u64)
    }

    /// Renews the leases of the pack and its session in time.
    pub(crate) async fn renew(&mut self) -> Result<()> {
        let Some(now) = self.renewal.due(&self.store) else { return Ok(()) };
        let renewed = self.store.metadata.renew_pack(self.push.clone(), self.id, self.store.options.lease).await;
        self.renewal.note(&self.store, now, renewed)
    }

    /// Completes the pack, durably, then indexes it.
    pub(crate) async fn finish(mut self) -> Result<PackStored> {
        let push = self.push.take().ok_or_else(|| Error::Internal("a pack without a session".into()))?;
        let sizes = self.complete().await?;
        let frames = std::mem::take(&mut self.frames);
        let stored = self.store.metadata.finish_pack(push, self.id, sizes, frames, self.store.options.lease).await;
        if let Err(
            Error::Full(_)
            | Error::QuotaExceeded { .. }
            | Error::PushUnknown(_)
            | Error::Missing { .. }
            | Error::WrongShape { .. }
            | Error::Invalid(_),
        ) = stored
            && self.discard().await
        {
            return stored;
        }
        self.remove_if_lost(stored).await
    }

    /// Completes the pack, durably, then points what was copied into it to it.
    pub(crate) async fn finish_compaction(mut self, moved: Vec<Moved>) -> Result<()> {
        let sizes = self.complete().await?;
        let done = self.store.metadata.finish_compaction(self.id, sizes, moved).await;
        self.remove_if_lost(done).await
    }

    /// Writes index and footer; all bytes are durable when it returns.
    async fn complete(&mut self) -> Result<PackSizes> {
        let frame_bytes = self.offset - pack::MAGIC.len() as u64;
        if let Err(error) = self.write_rest().await {
            self.remove_unfinished().await;
            return Err(error);
        }
        let stage = Stage::storage("complete pack", &self.key, self.offset);
        let completed = stage.end(self.upload.complete().await.map_err(Error::packs));
        let completed = match completed {
            Ok(_) => self.store.settle(&path(&self.key)).await,
            Err(error) => Err(error),
        };
        // An answer may be lost after the object was made.
        self.remove_if_lost(completed).await?;
        Ok(PackSizes { bytes: self.offset, frame_bytes })
    }

    async fn write_rest(&mut self) -> Result<()> {
        let entries: Vec<pack::Entry> = self.frames.iter().map(|f| pack::Entry { offset: f.offset, header: f.header }).collect();
        self.append(pack::index_and_footer(&entries, self.offset).into()).await?;
        self.write_pending().await?;
        self.wait().await
    }

    /// Hands on what is left of a part.
    async fn write_pending(&mut self) -> Result<()> {
        match self.pending.bytes() {
            0 => Ok(()),
            bytes => self.write_part(bytes).await,
        }
    }

    /// Deletes the bytes and the row of a pack whose frames were refused: they would take up room
    /// until its lease ends, and a retry sends them again. Best effort: collection finds it by its
    /// row when its lease ends. Returns whether the bytes are gone.
    async fn discard(&mut self) -> bool {
        // Only a later transaction that finds it unfinished proves that the failed one did not take
        // place.
        if let Err(error) = self.store.metadata.renew_pack(None, self.id, self.store.options.lease).await {
            tracing::debug!(%error, pack = self.key, "a pack was refused, leaving its bytes to collection");
            return false;
        }
        match self.store.packs.delete(&path(&self.key)).await {
            Ok(()) => {
                self.forget().await;
                true
            }
            Err(error) => {
                tracing::debug!(%error, pack = self.key, "deleting the bytes of a refused pack failed");
                false
            }
        }
    }

    /// Deletes the row; no bytes are left.
    async fn forget(&mut self) {
        if let Err(error) = self.store.metadata.forget_unfinished_pack(self.id).await {
            tracing::debug!(%error, pack = self.key, "a pack was given up: its row stays until its lease ends");
        }
    }

    /// Gives the pack up. Best effort: collection finds debris that stays behind by the pack's row.
    pub(crate) async fn abandon(mut self) {
        self.remove_unfinished().await;
    }

    async fn remove_unfinished(&mut self) {
        drop(self.wait().await);
        match self.upload.abort().await {
            Ok(()) => self.forget().await,
            Err(error) => tracing::debug!(%error, pack = self.id, "could not remove an unfinished pack"),
        }
    }

    /// A pack that was given up during its upload may have lost its row. Then only its writer knows
    /// of its bytes, and deletes them.
    async fn remove_if_lost<T>(&mut self, result: Result<T>) -> Result<T> {
        let lost = match &result {
            Ok(_) => false,
            Err(Error::PackLost(_)) => true,
            // The answer may be lost and the pack live, or a collection may still delete it: only a
            // pack without a row has no other owner.
            Err(_) => self.is_forgotten().await,
        };
        if lost && let Err(error) = self.store.packs.delete(&path(&self.key)).await {
            tracing::debug!(%error, pack = self.key, "removing an abandoned pack failed");
        }
        result
    }

    /// Whether it is known to have no row.
    async fn is_forgotten(&mut self) -> bool {
        match self.store.metadata.packs(Some(self.id - 1), 1).await {
            Ok(rows) => rows.first().is_none_or(|row| row.id != self.id),
            Err(error) => {
                tracing::debug!(%error, pack = self.key, "checking whether a pack was abandoned failed");
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use futures::FutureExt as _;

    #[test]
    fn a_disk_that_hangs_holds_up_no_async_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().expect("a runtime");
        runtime.block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            // Nothing fits above the floor.
            let options = Options { min_free: Some(u64::MAX), ..Options::default() };
            let store = Store::open_in_memory(options).await.expect("a store").with_packs_dir(dir.path());
            let mut writer = PackWriter::begin(&store, None).await.expect("a pack").above_the_floor();
            // As if a call hung: the only blocking thread is busy.
            let (hung, goes_on) = std::sync::mpsc::channel::<()>();
            let busy = pfr_service::task::spawn_blocking(move || goes_on.recv());
            let mut writing = Box::pin(writer.append(Bytes::from(vec![7_u8; 2 * files::PART])));
            for _ in 0..10 {
                assert!(writing.as_mut().now_or_never().is_none(), "an async thread asked the disk");
                tokio::task::yield_now().await;
            }
            drop(hung);
            let refused = writing.await;
            assert!(matches!(refused, Err(Error::Full(_))), "{refused:?}");
            assert!(busy.await.expect("it ended").is_err());
        });
    }
}
