//! Taking in frames: verify, append to a pack, make it durable, index it, and only then say so.

use crate::error::{Error, Result};
use crate::metadata::{NewContainer, PushId};
use crate::pack_writer::PackWriter;
use crate::store::{Ingested, Store};
use crate::verify::{Incoming, Whole, verified_frames};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::{Container, Digest, Kind, Limits};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

pub(crate) async fn ingest<S>(store: &Store, push: &PushId, stream: S) -> Result<Ingested>
where
    S: Stream<Item = Result<Bytes>> + Send + Unpin,
{
    // Ended sessions are refused before their bytes are read.
    store.metadata.renew_push(push.clone(), store.options.lease).await?;
    let _permit = store.ingests.acquire().await.map_err(|e| Error::Internal(e.to_string()))?;
    let mut frames = Box::pin(verified_frames(stream, store.options.limits.clone(), Arc::clone(&store.large_documents)));
    let mut ingest = Ingest { store, push, pack: None, done: Ingested::default() };
    loop {
        match frames.next().await {
            None => {
                ingest.close_pack().await?;
                return Ok(ingest.done);
            }
            Some(Ok(item)) => {
                if let Err(error) = ingest.take(item).await {
                    ingest.abandon().await;
                    return Err(error);
                }
            }
            Some(Err(error)) => {
                // What came whole is worth keeping: a retry then sends only the rest.
                ingest.keep_what_came().await;
                return Err(error);
            }
        }
    }
}

struct Ingest<'a> {
    store: &'a Store,
    push: &'a PushId,
    pack: Option<Open>,
    done: Ingested,
}

struct Open {
    writer: PackWriter,
    /// A large frame is half written: the pack must not be completed.
    inside_frame: bool,
    /// What lies in it whole. The same again would take up space and memory for nothing.
    holds: HashSet<(Digest, Kind)>,
}

impl Ingest<'_> {
    async fn take(&mut self, item: Incoming) -> Result<()> {
        match item {
            Incoming::Whole(whole) => {
                self.count(&whole.header);
                let name = (whole.header.digest, whole.header.kind);
                if self.pack.as_ref().is_some_and(|open| open.holds.contains(&name)) {
                    return Ok(());
                }
                let container = references(&whole, &self.store.options.limits)?;
                self.begin_frame(whole.header, container).await?;
                self.open()?.holds.insert(name);
                for piece in whole.payload {
                    self.open()?.writer.append(piece).await?;
                }
                self.end_frame(whole.checksum).await
            }
            Incoming::Begin(header) => {
                // A blob larger than a pack gets one of its own.
                self.count(&header);
                self.close_pack().await?;
                self.begin_frame(header, None).await?;
                self.open()?.inside_frame = true;
                Ok(())
            }
            Incoming::Piece(piece) => self.open()?.writer.append(piece).await,
            Incoming::Finish { checksum } => {
                self.open()?.inside_frame = false;
                self.end_frame(checksum).await
            }
        }
    }

    fn open(&mut self) -> Result<&mut Open> {
        self.pack.as_mut().ok_or_else(|| Error::Internal("no pack is open".into()))
    }

    fn count(&mut self, header: &Header) {
        self.done.frames += 1;
        self.done.stored_bytes += header.stored_len;
        self.done.raw_bytes += header.raw_len;
    }

    async fn begin_frame(&mut self, header: Header, container: Option<NewContainer>) -> Result<()> {
        if self.pack.is_none() {
            self.pack =
                Some(Open { writer: PackWriter::begin(self.store, Some(self.push)).await?, inside_frame: false, holds: HashSet::new() });
        }
        self.open()?.writer.header(header, container).await
    }

    async fn end_frame(&mut self, checksum: u32) -> Result<()> {
        self.open()?.writer.checksum(checksum).await?;
        if self.open()?.writer.is_full() { self.close_pack().await } else { Ok(()) }
    }

    async fn close_pack(&mut self) -> Result<()> {
        if let Some(open) = self.pack.take() {
            self.done.new += open.writer.finish().await?.new;
        }
        Ok(())
    }

    async fn keep_what_came(mut self) {
        if self.pack.as_ref().is_some_and(|open| open.inside_frame) {
            return self.abandon().await;
        }
        if let Err(error) = self.close_pack().await {
            tracing::debug!(%error, "what came of a broken stream could not be kept");
        }
    }

    async fn abandon(self) {
        if let Some(open) = self.pack {
            open.writer.abandon().await;
        }
    }
}

/// What a verified frame lists, if it is a container.
fn references(whole: &Whole, limits: &Limits) -> Result<Option<NewContainer>> {
    let header = &whole.header;
    if !header.kind.is_container() {
        return Ok(None);
    }
    let error = |source| Error::Frame { position: whole.position, digest: header.digest, source };
    let raw = whole.raw().map_err(error)?;
    let container = Container::parse(header.kind, &raw, limits).map_err(error)?;
    Ok(container.map(|c| NewContainer { children: each_once(c.children()), shape: c.shape() }))
}

/// Children without those that say the same of a blob as its first mention: a run may list one page thousands of times, in few bytes.
fn each_once(mut children: Vec<Child>) -> Vec<Child> {
    let mut first: HashMap<Digest, Child> = HashMap::new();
    children.retain(|child| match first.entry(child.digest) {
        Entry::Vacant(entry) => {
            entry.insert(child.clone());
            true
        }
        // Who contradicts itself is refused when it is indexed.
        Entry::Occupied(entry) => entry.get() != child,
    });
    children.shrink_to_fit();
    children
}
