//! Reads complete, verified blobs one after another: those of the local store, and those that come
//! from a registry meanwhile. The largest blob bounds the memory of the former, and the budget for
//! bytes in flight that of the latter.

use crate::error::{Error, Result};
use bytes::{Bytes, BytesMut};
use futures::{Stream, TryStreamExt as _, stream};
use pfr_client::{Arrivals, Passage};
use pfr_schema::Digest;
use pfr_schema::codec::{self, Codec};
use pfr_schema::frame::Header;
use pfr_store::{Incoming, Store, verified_frames};
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Blobs in the order asked for.
pub(super) struct Blobs {
    frames: Pin<Box<dyn Stream<Item = pfr_store::Result<Incoming>> + Send>>,
    /// Those that the local store lacks.
    passing: Option<(Passage, Arrivals)>,
}

impl Blobs {
    pub async fn open(store: &Store, digests: Vec<Digest>) -> Result<Self> {
        let stream = store.frames(digests).await?;
        let frames = verified_frames(stream, store.options().limits.clone(), Arc::new(Semaphore::new(1)));
        Ok(Self { frames: Box::pin(frames), passing: None })
    }

    /// Of a snapshot that is on its way: the local store has what the passage does not lack.
    pub async fn passing(store: &Store, passage: &Passage, digests: Vec<Digest>) -> Result<Self> {
        let here: Vec<Digest> = digests.iter().filter(|digest| !passage.lacks(digest)).copied().collect();
        // A reader of the store may wait for others to end. It must not hold bytes in flight then.
        let local =
            if here.is_empty() { Self { frames: Box::pin(stream::empty()), passing: None } } else { Self::open(store, here).await? };
        Ok(Self { passing: Some((passage.clone(), passage.arrivals(&digests))), ..local })
    }

    /// The next blob, which must be `digest`.
    pub async fn next(&mut self, digest: &Digest) -> Result<Bytes> {
        if let Some((passage, arrivals)) = &mut self.passing
            && passage.lacks(digest)
        {
            return Ok(arrivals.next(digest).await?);
        }
        let (found, bytes) = self.frame().await?;
        // The store returns the requested blob, unless it is damaged.
        if found.digest == *digest { Ok(bytes) } else { Err(damaged(*digest, format!("{} lies in its place", found.digest))) }
    }

    async fn frame(&mut self) -> Result<(Header, Bytes)> {
        match self.incoming().await? {
            Incoming::Whole(whole) => match (whole.header.codec, &whole.payload[..]) {
                (Codec::Raw, [one]) => Ok((whole.header, one.clone())),
                _ => Ok((whole.header, whole.raw()?.into_owned().into())),
            },
            Incoming::Begin(header) => {
                let mut encoded = BytesMut::new();
                loop {
                    match self.incoming().await? {
                        Incoming::Piece(piece) => encoded.extend_from_slice(&piece),
                        Incoming::Finish { .. } => break,
                        Incoming::Whole(_) | Incoming::Begin(_) => return Err(Error::Internal("a frame within a frame".into())),
                    }
                }
                match header.codec {
                    Codec::Raw => Ok((header, encoded.freeze())),
                    codec => Ok((header, codec::decode(codec, &encoded, header.raw_len)?.into())),
                }
            }
            Incoming::Piece(_) | Incoming::Finish { .. } => Err(Error::Internal("a frame without a beginning".into())),
        }
    }

    async fn incoming(&mut self) -> Result<Incoming> {
        match self.frames.try_next().await {
            Ok(Some(incoming)) => Ok(incoming),
            Ok(None) => Err(Error::Internal("fewer blobs than were asked for".into())),
            // It was verified when it came into the store.
            Err(pfr_store::Error::Frame { digest, source, .. }) => Err(damaged(digest, source.to_string())),
            Err(pfr_store::Error::Format(source)) => Err(Error::Format(source)),
            Err(error) => Err(error.into()),
        }
    }
}

fn damaged(digest: Digest, reason: String) -> Error {
    pfr_store::Error::Corrupt { digest, reason }.into()
}
