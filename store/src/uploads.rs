//! Uploads of blobs as the OCI API has them: at once, or in chunks whose digest comes last.
//!
//! ```text
//! at once     body ─▶ one frame ─▶ ingest                                     (the digest comes first)
//! in chunks   body ─▶ pieces, each a blob of its own ─▶ ingest ─▶ rows of upload_parts
//!             then: pieces ─▶ one frame ─▶ ingest                             (the digest comes last)
//! ```
//!
//! An upload is a push session, and what it has received are blobs that the session leases. So any
//! replica continues it, and an unfinished one becomes garbage like any other. A frame begins with
//! its digest, so chunks are copied into one when it is known; the same pass hashes the blob.
//! Decision 53 has the reasons.
//!
//! A session of its own leases a finished blob, and is left to expire: until then a manifest may
//! list the blob.

mod pieces;

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::live::LivePush;
use crate::metadata::{Health, Listing, PushId, UploadPart};
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{Header, end_mark};
use pfr_schema::{Digest, FormatError, Kind, RepositoryName};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of a body as they come from a client.
pub type BodyStream = BoxStream<'static, Result<Bytes>>;

const BUSY: &str = "the registry is busy with other uploads";
/// Parts of an upload read from the tables at a time.
const PARTS: usize = 1000;
/// Parts read ahead of the one that is copied.
const AHEAD: usize = 2;
/// Manifests of which it is noted in one transaction what they list, and names that they may list
/// in all before another one begins.
const MANIFESTS: usize = 100;
const NAMED: usize = 10_000;
/// Repositories that are looked at for one that a caller may mount from.
const PLACES: usize = 100;

impl Store {
    /// Bytes that an upload has received: whole chunks.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn upload_received(&self, upload: &PushId) -> Result<u64> {
        self.metadata.upload_received(upload.clone()).await
    }

    /// Takes in the next chunk of an upload, at byte `begin_at` or wherever the upload is. Returns
    /// the bytes that it has received then. Nothing of a chunk that fails counts.
    ///
    /// # Errors
    /// [`Error::UploadMoved`] if the chunk is not the next one, [`Error::PushUnknown`], and those
    /// of [`Store::ingest`].
    #[boxed]
    pub async fn append_upload(&self, upload: &LivePush, begin_at: Option<u64>, body: BodyStream) -> Result<u64> {
        let received = self.upload_received(upload).await?;
        if let Some(begin_at) = begin_at.filter(|begin_at| *begin_at != received) {
            return Err(Error::UploadMoved { begin_at, received });
        }
        let parts: Arc<Mutex<Vec<UploadPart>>> = Arc::default();
        let mut frames = pieces::frames(self, body, received, Arc::clone(&parts));
        self.ingest_stream(upload, &mut frames).await?;
        let parts = std::mem::take(&mut *parts.lock());
        self.metadata.append_upload(upload.id.clone(), received, parts, self.options.lease).await
    }

    /// Makes a blob of `repository` of all that an upload has received, and ends the upload.
    ///
    /// # Errors
    /// [`Error::Frame`] if the bytes do not have this digest: the upload goes on.
    /// [`Error::PushUnknown`], [`Error::Overloaded`], and those of [`Store::ingest`].
    #[boxed]
    pub async fn finish_upload(&self, repository: &RepositoryName, upload: &LivePush, digest: Digest) -> Result<()> {
        let turn = tokio::time::timeout(self.options.queue, self.finishing.acquire()).await;
        let _turn = turn.map_err(|_| Error::Overloaded(BUSY))??;
        let received = self.upload_received(upload).await?;
        let parts = Parts { store: self.clone(), upload: upload.clone(), from: 0, read: VecDeque::new() };
        let parts = stream::try_unfold(parts, |mut parts| async move { Ok::<_, Error>(parts.next().await?.map(|part| (part, parts))) });
        let store = self.clone();
        let read = move |part: UploadPart| {
            let store = store.clone();
            async move { store.read(&part.digest).await }
        };
        match self.put_blob(repository, digest, received, parts.map_ok(read).try_buffered(AHEAD).boxed()).await {
            Ok(()) => self.abort(upload).await,
            // If it was cancelled meanwhile, its parts were gone, and the failure only says that.
            Err(error) => Err(match self.live_push(repository, upload).await {
                Err(gone @ Error::PushUnknown(_)) => gone,
                _ => error,
            }),
        }
    }

    /// [`Store::append_upload`] and [`Store::finish_upload`]. If the second fails, nothing of this
    /// chunk counts.
    ///
    /// # Errors
    /// Those of both.
    #[boxed]
    pub async fn finish_upload_with(
        &self,
        repository: &RepositoryName,
        upload: &LivePush,
        digest: Digest,
        begin_at: u64,
        body: BodyStream,
    ) -> Result<()> {
        let received = self.append_upload(upload, Some(begin_at), body).await?;
        let done = self.finish_upload(repository, upload, digest).await;
        if done.is_err() {
            // Best effort: the client is told why the upload failed.
            if let Err(error) = self.metadata.cut_upload(upload.id.clone(), begin_at, received, self.options.lease).await {
                tracing::debug!(%error, upload = %upload.id, "taking the last chunk of an upload back failed");
            }
        }
        done
    }

    /// Stores a blob of `size` bytes in `repository`.
    ///
    /// # Errors
    /// [`Error::Frame`] if the bytes do not have this digest, and those of [`Store::ingest`].
    #[boxed]
    pub async fn put_blob(&self, repository: &RepositoryName, digest: Digest, size: u64, body: BodyStream) -> Result<()> {
        let limit = self.options.limits.blob_bytes;
        if size > limit {
            return Err(FormatError::TooLarge { what: "a blob in bytes", found: size, limit }.into());
        }
        let session = self.open_push(repository).await?.id;
        let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest, raw_len: size, stored_len: size };
        let stored = match self.ingest_stream(&session, &mut in_one_frame(header, body)).await {
            Ok(_) => self.metadata.link_blob(session.id.clone(), digest).await,
            Err(error) => Err(error),
        };
        if stored.is_err() {
            self.give_up(&session).await;
        }
        stored
    }

    /// Puts a stored blob into `repository` too, if one of these repositories has it. Returns
    /// whether one has.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`].
    #[boxed]
    pub async fn mount_blob(&self, repository: &RepositoryName, digest: Digest, from: &[RepositoryName]) -> Result<bool> {
        let mut found = false;
        for place in from {
            found = found || self.blob(place, &digest).await?.is_some();
        }
        if !found {
            return Ok(false);
        }
        let session = self.open_push(repository).await?.id;
        // It may be gone, or damaged.
        let linked = match self.missing(&session, vec![(digest, Kind::Blob)]).await?.is_empty() {
            true => self.metadata.link_blob(session.id.clone(), digest).await,
            false => Err(Error::BlobUnknown { digest, kind: Kind::Blob }),
        };
        if linked.is_err() {
            self.give_up(&session).await;
        }
        match linked {
            Ok(()) => Ok(true),
            Err(Error::BlobUnknown { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Some of the repositories that have a blob: of those, a caller may mount it from the ones
    /// that it sees.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn blob_places(&self, digest: Digest) -> Result<Vec<RepositoryName>> {
        self.metadata.blob_places(digest, PLACES).await
    }

    /// The size of a blob, if the repository has it: it was uploaded or mounted there, or one of
    /// its manifests lists it. Garbage is not there any more, even before a collection.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn blob(&self, repository: &RepositoryName, digest: &Digest) -> Result<Option<u64>> {
        if let Some(size) = self.metadata.blob(repository.clone(), *digest).await? {
            return Ok(Some(size));
        }
        // A snapshot may list it.
        if !self.link_manifests(repository).await? {
            return Ok(None);
        }
        self.metadata.blob(repository.clone(), *digest).await
    }

    /// Whether a blob is known to be damaged: its upload would heal it.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn is_damaged(&self, digest: &Digest) -> Result<bool> {
        let locations = self.metadata.locate(vec![*digest]).await?;
        Ok(locations.iter().flatten().any(|location| location.health == Health::Damaged))
    }

    /// Takes a blob out of a repository. Manifests that list it still hold it.
    ///
    /// # Errors
    /// [`Error::BlobUnknown`] if the repository does not have it; [`Error::NeededByTag`] if an
    /// immutable tag needs it.
    #[boxed]
    pub async fn delete_blob(&self, repository: &RepositoryName, digest: &Digest) -> Result<()> {
        self.link_manifests(repository).await?;
        self.journaled(self.metadata.unlink_blob(repository.clone(), *digest, self.audit_entry()).await).await
    }

    /// Notes what the manifests of a repository list; returns whether there was anything to note.
    /// Of an image its bytes say which blobs its repository must have had when it came. A layer
    /// that it may lack is held if any repository had it, so it does not belong to this one; a
    /// manifest is there by itself.
    pub(crate) async fn link_manifests(&self, repository: &RepositoryName) -> Result<bool> {
        let (mut any, mut after) = (false, 0);
        loop {
            // Looked at first: almost always there is nothing, and a look needs no room on the
            // disk.
            let unlinked = self.metadata.unlinked_manifests(repository.clone(), after, MANIFESTS).await?;
            let Some(last) = unlinked.last() else { return Ok(any) };
            after = last.id;
            let (mut listings, mut named) = (Vec::with_capacity(unlinked.len()), 0);
            for manifest in unlinked {
                let needs: Option<Vec<Digest>> = match manifest.image {
                    None => None,
                    Some(digest) => match self.read_image(&digest).await {
                        Ok((_, image)) => {
                            let needs = image.children().iter().filter(|child| !child.optional && child.kind == Kind::Blob);
                            Some(needs.map(|child| child.digest).collect())
                        }
                        // It may be pushed again, which heals it.
                        Err(Error::Corrupt { .. } | Error::BlobUnknown { .. } | Error::Format(_)) => continue,
                        Err(error) => return Err(error),
                    },
                };
                named += needs.as_ref().map_or(0, Vec::len);
                listings.push(Listing { manifest: manifest.id, needs });
                if named > NAMED {
                    self.metadata.link_manifests(repository.clone(), std::mem::take(&mut listings)).await?;
                    (any, named) = (true, 0);
                }
            }
            if !listings.is_empty() {
                self.metadata.link_manifests(repository.clone(), listings).await?;
                any = true;
            }
        }
    }

    /// Ends a session whose work has failed. Best effort: its lease ends by itself.
    pub(crate) async fn give_up(&self, session: &LivePush) {
        if let Err(error) = self.abort(session).await {
            tracing::debug!(%error, session = %session.id, "ending a failed push session failed");
        }
    }
}

/// A stream of one frame: its payload is the body, as it comes.
fn in_one_frame(header: Header, body: BodyStream) -> BodyStream {
    let checksum = Arc::new(Mutex::new(0_u32));
    let sum = Arc::clone(&checksum);
    let body = body.inspect_ok(move |piece| {
        let mut sum = sum.lock();
        *sum = crc32c::crc32c_append(*sum, piece);
    });
    // Asked for when the body has passed.
    let end = stream::once(async move {
        let mut end = checksum.lock().to_le_bytes().to_vec();
        end.extend(end_mark(1));
        Ok::<_, Error>(Bytes::from(end))
    });
    stream::once(async move { Ok::<_, Error>(Bytes::from(header.to_bytes())) }).chain(body).chain(end).boxed()
}

/// The parts of an upload in order.
struct Parts {
    store: Store,
    upload: LivePush,
    from: u64,
    read: VecDeque<UploadPart>,
}

impl Parts {
    async fn next(&mut self) -> Result<Option<UploadPart>> {
        // A large blob may take longer than the lease.
        if let Some(now) = self.upload.renewal.due(&self.store) {
            let renewed = self.store.metadata.renew_push(self.upload.id.clone(), self.store.options.lease).await;
            self.upload.renewal.note(&self.store, now, renewed.map(drop))?;
        }
        if self.read.is_empty() {
            self.read = self.store.metadata.upload_parts(self.upload.id.clone(), self.from, PARTS).await?.into();
        }
        let part = self.read.pop_front();
        if let Some(part) = part {
            self.from = part.begin_at + part.size;
        }
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Options;
    use std::time::Duration;

    #[tokio::test]
    async fn uploads_that_are_put_together_wait_for_their_turn_and_have_nothing_in_memory_before() {
        let store = Store::open_in_memory(Options { queue: Duration::from_millis(10), ..Options::default() }).await.unwrap();
        let (team, digest) = ("team".parse().unwrap(), Digest::sha256(b"hello"));
        let upload = store.open_push(&team).await.unwrap().id;
        let body = stream::iter([Ok(Bytes::from_static(b"hello"))]).boxed();
        store.append_upload(&upload, None, body).await.unwrap();
        let turns = u32::try_from(store.finishing.available_permits()).unwrap();
        let others = Arc::clone(&store.finishing).acquire_many_owned(turns).await.unwrap();
        assert!(matches!(store.finish_upload(&team, &upload, digest).await, Err(Error::Overloaded(_))));
        assert_eq!(store.upload_received(&upload).await.unwrap(), 5, "it is tried again");
        drop(others);
        store.finish_upload(&team, &upload, digest).await.unwrap();
        assert_eq!(store.blob(&team, &digest).await.unwrap(), Some(5));
    }
}
