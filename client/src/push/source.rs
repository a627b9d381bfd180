//! The source of a pushed snapshot: nodes as bytes, blobs as frames.

use super::Source;
use super::relay::Relay;
use crate::directory::{self, Directory};
use crate::encoding::Encoding;
use crate::error::{Error, Result, blocking};
use crate::export::Exported;
use crate::plain::as_blobs;
use crate::plan::{Item, PlanSource, Totals};
use bytes::{Bytes, BytesMut};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::frame::{END_LEN, end_mark};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, FormatError, Kind, Limits};
use pfr_store::{Store, in_codecs};
use std::sync::Arc;

/// A snapshot to be pushed.
#[derive(Clone, Debug)]
pub(crate) enum OpenedSource {
    Directory(Arc<Directory>),
    Store { store: Store, snapshot: Digest },
    Relay(Relay),
    Export(Arc<Exported>),
}

impl OpenedSource {
    /// Reads and checks the source; of a directory at a path, only the documents. Parents are for
    /// such a directory.
    pub async fn open(source: &Source, parents: &[Digest]) -> Result<Self> {
        match source {
            Source::Directory(path) => {
                let (path, parents) = (path.clone(), parents.to_vec());
                let directory = blocking(move || {
                    let directory = Directory::open_documents(&path, &Limits::default())?;
                    if parents.is_empty() { Ok(directory) } else { directory.with_parents(parents) }
                });
                Ok(Self::Directory(Arc::new(directory.await?)))
            }
            Source::Opened(directory) if parents.is_empty() => Ok(Self::Directory(Arc::clone(directory))),
            Source::Opened(directory) => Err(made_already(directory.digest())),
            Source::Store { snapshot, .. } | Source::Remote { snapshot, .. } if !parents.is_empty() => Err(made_already(*snapshot)),
            Source::Export(export) if !parents.is_empty() => Err(made_already(export.snapshot())),
            Source::Store { store, snapshot } => {
                store.manifest(snapshot).await?;
                store.touch_everywhere(snapshot).await;
                Ok(Self::Store { store: store.clone(), snapshot: *snapshot })
            }
            Source::Remote { remote, repository, snapshot } => Ok(Self::Relay(Relay::new(remote, repository, *snapshot))),
            Source::Export(export) => Ok(Self::Export(Arc::clone(export))),
        }
    }

    pub fn limits(&self) -> &Limits {
        match self {
            Self::Directory(directory) => directory.limits(),
            Self::Store { store, .. } => &store.options().limits,
            Self::Relay(relay) => relay.limits(),
            Self::Export(export) => export.limits(),
        }
    }

    /// The manifest.
    pub fn manifest(&self) -> Item {
        let digest = match self {
            Self::Directory(directory) => directory.digest(),
            Self::Store { snapshot, .. } => *snapshot,
            Self::Relay(relay) => relay.snapshot(),
            Self::Export(export) => export.snapshot(),
        };
        Item::manifest(digest)
    }

    pub async fn totals(&self) -> Result<Totals> {
        if let Self::Directory(directory) = self {
            return directory.totals();
        }
        let mut documents = self.documents(&[self.manifest()]).await?;
        let listing = |item: &Item| matches!(item.kind, Kind::Tree | Kind::Checkpoint);
        let below: Vec<Item> = crate::plan::children(&documents[0], self.limits())?.into_iter().filter(listing).collect();
        documents.extend(self.documents(&below).await?);
        Totals::of(&documents, self.limits())
    }

    /// Looks at the files of blobs that are about to be sent, unless that was done, and returns
    /// these blobs.
    pub async fn check(&self, blobs: Vec<Item>) -> Result<Vec<Item>> {
        let Self::Directory(directory) = self else { return Ok(blobs) };
        let directory = Arc::clone(directory);
        blocking(move || directory.check(&blobs).map(|()| blobs)).await
    }

    /// Frames of plain blobs, in order, without an end mark. A directory's are encoded as told;
    /// those that are stored somewhere stay as they are, if the receiver takes their codecs.
    pub fn blob_frames(&self, items: Arc<[Item]>, encoding: &Encoding) -> BoxStream<'static, Result<Bytes>> {
        match self {
            Self::Directory(directory) => directory::frames::frames(Arc::clone(directory), items, encoding.clone()),
            Self::Store { store, .. } => {
                let (store, count, limits, codecs) = (store.clone(), items.len() as u64, self.limits().clone(), encoding.codecs());
                let digests = items.iter().map(|item| item.digest).collect();
                let open = async move {
                    let frames = in_codecs(as_blobs(store.frames(digests).await?, &limits), codecs, &limits);
                    Ok::<_, Error>(without_end(frames.map_err(Error::from).boxed(), count))
                };
                stream::once(open).try_flatten().boxed()
            }
            Self::Relay(relay) => relay.blob_frames(&items, encoding.codecs()),
            Self::Export(export) => {
                let (count, limits, codecs) = (items.len() as u64, self.limits(), encoding.codecs());
                let frames = export.frames(items.iter().map(|item| item.digest).collect());
                without_end(in_codecs(as_blobs(frames, limits), codecs, limits), count)
            }
        }
    }

    /// Names the file whose bytes the registry refused.
    pub fn explain(&self, error: Error) -> Error {
        let (Self::Directory(directory), Error::Registry { problem }) = (self, &error) else { return error };
        let about_bytes = [ErrorCode::DigestMismatch, ErrorCode::CorruptFrame, ErrorCode::LengthMismatch];
        if !about_bytes.contains(&problem.code) {
            return error;
        }
        let words = problem.detail.split(|c: char| !c.is_ascii_alphanumeric() && c != ':');
        let named = words.filter_map(|word| word.trim_end_matches(':').parse::<Digest>().ok());
        let file = named.filter_map(|digest| Some((digest, directory.path_for_people(&digest)?))).next();
        match file {
            Some((digest, path)) => Error::WrongBytes { path, digest, code: problem.code, reason: problem.detail.clone() },
            None => error,
        }
    }
}

impl PlanSource for OpenedSource {
    const NEAR: bool = true;

    async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        match self {
            Self::Directory(directory) => directory.documents(items).await,
            Self::Store { store, .. } => {
                let mut documents = Vec::with_capacity(items.len());
                for item in items {
                    let bytes = store.read(&item.digest).await?.to_vec();
                    documents.push(Document { digest: item.digest, kind: item.kind, bytes });
                }
                Ok(documents)
            }
            Self::Relay(relay) => relay.documents(items).await,
            Self::Export(export) => export.documents(items).await,
        }
    }
}

fn made_already(digest: Digest) -> Error {
    let reason = "parents are part of a snapshot, and this one is made already; give them when pushing a directory".into();
    Error::Unsuitable { digest, reason }
}

/// A stream of `count` frames without its end mark, so that more can follow. The last bytes seen
/// are held back.
fn without_end(frames: BoxStream<'static, Result<Bytes>>, count: u64) -> BoxStream<'static, Result<Bytes>> {
    let pieces = stream::try_unfold((frames, BytesMut::new()), move |(mut frames, mut held)| async move {
        let Some(mut piece) = frames.try_next().await? else {
            // A cut stream must not look complete.
            let cut = FormatError::Truncated { position: 0, reason: "inside the frames of the source" };
            return if held == end_mark(count) { Ok(None) } else { Err(Error::from(pfr_store::Error::from(cut))) };
        };
        let mut ready = Vec::with_capacity(2);
        if piece.len() >= END_LEN {
            ready.push(held.split().freeze());
            held.extend_from_slice(&piece.split_off(piece.len() - END_LEN));
            ready.push(piece);
        } else {
            held.extend_from_slice(&piece);
            ready.push(held.split_to(held.len().saturating_sub(END_LEN)).freeze());
        }
        let ready = ready.into_iter().filter(|piece| !piece.is_empty()).map(Ok);
        Ok(Some((stream::iter(ready.collect::<Vec<_>>()), (frames, held))))
    });
    pieces.try_flatten().boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_end_mark_is_cut_off_however_the_stream_is_cut_up() {
        let whole = [&[7; 100][..], &end_mark(3)].concat();
        for size in [1, 2, 15, 16, 17, 50, 116, 200] {
            let pieces: Vec<Result<Bytes>> = whole.chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
            let out: Vec<Bytes> = without_end(stream::iter(pieces).boxed(), 3).try_collect().await.unwrap();
            assert_eq!(out.concat(), whole[..100], "pieces of {size}");
        }
    }

    #[tokio::test]
    async fn a_stream_without_its_end_mark_is_an_error() {
        for bytes in [&[7; 100][..], &end_mark(2), b""] {
            let pieces = stream::iter([Ok(Bytes::copy_from_slice(bytes))]).boxed();
            assert!(without_end(pieces, 3).try_collect::<Vec<_>>().await.is_err());
        }
    }
}
