//! Writing packs: many frames into one immutable object, in pieces, in constant memory.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Moved, NewContainer, NewFrame, PackId, PackSizes, PackStored, PushId};
use bytes::Bytes;
use object_store::path::Path;
use object_store::{MultipartUpload, ObjectStoreExt as _, PutPayload, UploadPart};
use pfr_schema::frame::Header;
use pfr_schema::pack;
use tokio::task::JoinHandle;

/// Bytes of one part of an upload; S3 wants at least 5 MiB.
const PART: usize = 5 << 20;

/// A pack being written. Its row exists before its first byte; dropping it leaves debris that collection finds by that row.
pub(crate) struct PackWriter {
    id: PackId,
    key: String,
    upload: Box<dyn MultipartUpload>,
    writing: Option<JoinHandle<object_store::Result<()>>>,
    pending: Vec<Bytes>,
    pending_bytes: usize,
    offset: u64,
    frames: Vec<NewFrame>,
}

impl PackWriter {
    pub(crate) async fn begin(store: &Store) -> Result<Self> {
        store.mark().await?;
        // Never reused and never derived from content: a late or repeated delete can only hit bytes that no row names.
        let key = uuid::Uuid::now_v7().to_string();
        let id = store.metadata.begin_pack(key.clone(), store.options.lease).await?;
        let upload = store.packs.put_multipart(&path(&key)).await.map_err(Error::packs)?;
        let mut writer = Self { id, key, upload, writing: None, pending: Vec::new(), pending_bytes: 0, offset: 0, frames: Vec::new() };
        writer.append(Bytes::from_static(pack::MAGIC)).await?;
        Ok(writer)
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.offset
    }

    /// Starts a frame; its payload and [`Self::checksum`] must follow.
    pub(crate) async fn header(&mut self, header: Header, container: Option<NewContainer>) -> Result<()> {
        self.frames.push(NewFrame { header, offset: self.offset, container });
        self.append(header.to_bytes().into()).await
    }

    pub(crate) async fn checksum(&mut self, checksum: u32) -> Result<()> {
        self.append(Bytes::copy_from_slice(&checksum.to_le_bytes())).await
    }

    /// Appends bytes, which are written when a part is full.
    pub(crate) async fn append(&mut self, bytes: Bytes) -> Result<()> {
        self.offset += bytes.len() as u64;
        self.pending_bytes += bytes.len();
        self.pending.push(bytes);
        if self.pending_bytes >= PART { self.write_part().await } else { Ok(()) }
    }

    /// Hands the pending bytes to the object store; one part is in flight while the next fills.
    async fn write_part(&mut self) -> Result<()> {
        self.wait().await?;
        self.pending_bytes = 0;
        let part: UploadPart = self.upload.put_part(PutPayload::from_iter(std::mem::take(&mut self.pending)));
        self.writing = Some(tokio::spawn(part));
        Ok(())
    }

    async fn wait(&mut self) -> Result<()> {
        match self.writing.take() {
            Some(task) => task.await.map_err(|e| Error::Internal(e.to_string()))?.map_err(Error::packs),
            None => Ok(()),
        }
    }

    /// Completes the pack, durably, then indexes it.
    pub(crate) async fn finish(mut self, store: &Store, push: &PushId) -> Result<PackStored> {
        let sizes = self.complete().await?;
        let stored = store.metadata.finish_pack(push.clone(), self.id, sizes, self.frames, store.options.lease).await;
        remove_if_lost(store, &self.key, stored).await
    }

    /// Completes the pack, durably, then points what was copied into it to it.
    pub(crate) async fn finish_compaction(mut self, store: &Store, moved: Vec<Moved>) -> Result<()> {
        let sizes = self.complete().await?;
        let done = store.metadata.finish_compaction(self.id, sizes, moved, store.options.lease).await;
        remove_if_lost(store, &self.key, done).await
    }

    /// Writes index and footer; all bytes are durable when it returns.
    async fn complete(&mut self) -> Result<PackSizes> {
        let frame_bytes = self.offset - pack::MAGIC.len() as u64;
        let entries: Vec<pack::Entry> = self.frames.iter().map(|f| pack::Entry { offset: f.offset, header: f.header }).collect();
        self.append(pack::index_and_footer(&entries, self.offset).into()).await?;
        if !self.pending.is_empty() {
            self.write_part().await?;
        }
        self.wait().await?;
        self.upload.complete().await.map_err(Error::packs)?;
        Ok(PackSizes { bytes: self.offset, frame_bytes })
    }

    /// Gives the pack up. Best effort: what stays behind is debris that collection knows by the pack's row.
    pub(crate) async fn abandon(mut self) {
        drop(self.wait().await);
        if let Err(error) = self.upload.abort().await {
            tracing::debug!(%error, pack = self.id, "could not remove an unfinished pack");
        }
    }
}

/// A pack that was given up while it was written may have no row any more: then nobody but its writer knows of its bytes.
async fn remove_if_lost<T>(store: &Store, key: &str, result: Result<T>) -> Result<T> {
    if let Err(Error::PackLost(_)) = &result
        && let Err(error) = store.packs.delete(&path(key)).await
    {
        tracing::debug!(%error, pack = key, "could not remove a pack that was given up");
    }
    result
}

/// Folder of what a probe of the storage writes; without permission to delete, it stays there.
pub(crate) const PROBES: &str = "probe";

/// Where a pack lies. Two hex digits of the random end of its key spread packs over 256 folders.
pub(crate) fn path(key: &str) -> Path {
    let shard = key.get(key.len().saturating_sub(2)..).unwrap_or("00");
    Path::from(format!("{shard}/{key}.pfpack"))
}
