//! A snapshot that is in another registry: its frames pass through, verified, and nothing is kept.

use crate::error::Result;
use crate::meter::{Meter, Tally};
use crate::plan::{Item, PlanSource as _};
use crate::progress::Progress;
use crate::pull::fetch::{Fetcher, Watched, watch};
use crate::remote::Remote;
use bytes::Bytes;
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::Codecs;
use pfr_schema::frame::Header;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, Limits, RepositoryName};
use pfr_store::{Incoming, verified_frames};
use std::sync::Arc;
use tokio::sync::Semaphore;

/// Digests in one request to the source.
const DIGESTS: usize = 16 << 10;

/// A snapshot in a registry.
#[derive(Clone, Debug)]
pub(crate) struct Relay {
    remote: Remote,
    repository: RepositoryName,
    snapshot: Digest,
    limits: Limits,
    /// Lets large blobs into memory one at a time.
    large: Arc<Semaphore>,
}

impl Relay {
    pub fn new(remote: &Remote, repository: &RepositoryName, snapshot: Digest) -> Self {
        let (remote, repository) = (remote.clone(), repository.clone());
        Self { remote, repository, snapshot, limits: Limits::default(), large: Arc::new(Semaphore::new(1)) }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub fn snapshot(&self) -> Digest {
        self.snapshot
    }

    pub async fn documents(&self, items: &[Item]) -> Result<Vec<Document>> {
        let unseen = Progress::default();
        Fetcher::new(&self.remote, &self.repository, &unseen).documents(items).await
    }

    /// Frames of plain blobs in these codecs, in order, without an end mark.
    pub fn blob_frames(&self, items: &[Item], codecs: Codecs) -> BoxStream<'static, Result<Bytes>> {
        let parts: Vec<Arc<[Item]>> = items.chunks(DIGESTS).map(Arc::from).collect();
        let relay = self.clone();
        let part = move |part| {
            let relay = relay.clone();
            async move { relay.part(part, codecs).await }
        };
        stream::iter(parts).then(part).try_flatten().boxed()
    }

    async fn part(&self, items: Arc<[Item]>, codecs: Codecs) -> Result<BoxStream<'static, Result<Bytes>>> {
        let frames = self.remote.frames(&self.repository, items.iter().map(|item| item.digest).collect(), codecs).await?;
        let Watched { frames, slot } = watch(frames, Meter::expecting(&self.limits, Tally::new(&Progress::default()), items));
        let remote = self.remote.clone();
        let verified = verified_frames(frames, self.limits.clone(), Arc::clone(&self.large));
        let pieces = verified.map_ok(|incoming| stream::iter(pieces(incoming).into_iter().map(Ok)));
        Ok(pieces.map_err(move |error| remote.received(&slot, error)).try_flatten().boxed())
    }
}

/// A frame that came, as a plain blob. Pieces of a large frame pass before it is verified. If it is
/// damaged, the stream ends and the receiver never gets the complete frame.
fn pieces(incoming: Incoming) -> Vec<Bytes> {
    match incoming {
        Incoming::Whole(mut whole) => {
            let mut pieces = vec![plain(whole.header)];
            pieces.append(&mut whole.payload);
            pieces.push(Bytes::copy_from_slice(&whole.checksum.to_le_bytes()));
            pieces
        }
        Incoming::Begin(header) => vec![plain(header)],
        Incoming::Piece(piece) => vec![piece],
        Incoming::Finish { checksum } => vec![Bytes::copy_from_slice(&checksum.to_le_bytes())],
    }
}

/// A node of the source may be an attachment of this snapshot.
fn plain(header: Header) -> Bytes {
    Header { kind: Kind::Blob, ..header }.to_bytes().into()
}
