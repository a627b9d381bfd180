//! One push session: negotiate, send, commit.

use super::PushTarget;
use super::batch::{Batch, batches};
use super::source::OpenedSource;
use crate::encoding::Encoding;
use crate::error::{Error, Result};
use crate::meter::{Meter, Tally};
use crate::plan::{Item, Plan, PlanDestination, plan};
use crate::progress::{Phase, Progress};
use crate::remote::{BoxFrames, Remote};
use bytes::Bytes;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use pfr_schema::api::{self, DigestGroup, MissingRequest};
use pfr_schema::frame::end_mark;
use pfr_schema::{ErrorCode, Kind};
use pfr_store::document_frame;
use std::sync::Arc;
use std::time::Duration;

/// Uploads in flight at a time.
const IN_FLIGHT: usize = 4;

/// How often a push asks which blobs the registry lacks before it fails.
const ROUNDS: u32 = 3;

/// What the registry has acknowledged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub blobs: u64,
    pub raw_bytes: u64,
    pub frame_bytes: u64,
}

pub(super) struct Session<'a> {
    source: &'a OpenedSource,
    remote: &'a Remote,
    target: &'a PushTarget,
    progress: &'a Progress,
    push: api::Push,
    encoding: Encoding,
}

impl<'a> Session<'a> {
    pub async fn open(source: &'a OpenedSource, remote: &'a Remote, target: &'a PushTarget, progress: &'a Progress) -> Result<Self> {
        let push = remote.open_push(&target.repository).await?;
        let encoding = Encoding::new(target.compression, push.codecs);
        Ok(Self { source, remote, target, progress, push, encoding })
    }

    /// Uploads what the registry lacks, then commits.
    pub async fn run(&self, total_bytes: u64, sent: &mut Sent) -> Result<api::Committed> {
        let manifest = self.source.manifest();
        let mut rounds = 1;
        while let Err(error) = self.upload_missing(total_bytes, sent).await {
            // A collection deleted blobs after the registry had reported them as present: ask
            // again.
            if error.code() != ErrorCode::MissingBlobs || rounds >= ROUNDS {
                return Err(error);
            }
            rounds += 1;
        }
        self.progress.enter(Phase::Committing);
        let request = api::CommitRequest { manifest: manifest.digest, tag: self.target.tag.clone(), if_tag_is: self.target.if_tag_is };
        let committed = self.remote.commit(&self.target.repository, &self.push.id, &request).await?;
        if committed.digest != manifest.digest {
            return Err(self
                .remote
                .protocol(format!("the request was to commit {}, the answer says {}", manifest.digest, committed.digest)));
        }
        Ok(committed)
    }

    /// Uploads what the registry lacks of the manifest and of all that it reaches.
    async fn upload_missing(&self, total_bytes: u64, sent: &mut Sent) -> Result<()> {
        let mut plan = self.plan().await?;
        if self.progress.bytes_deduplicated() == 0 {
            self.progress.add_bytes_deduplicated(total_bytes.saturating_sub(plan.bytes()));
        }
        plan.blobs = self.source.check(plan.blobs).await?;
        self.progress.enter(Phase::Sending);
        let batches = batches(plan, self.push.max_frames_bytes);
        let mut leases = std::pin::pin!(self.keep_leases());
        {
            let mut acknowledged = stream::iter(batches.together).map(|batch| self.send(batch)).buffer_unordered(IN_FLIGHT);
            loop {
                tokio::select! {
                    error = &mut leases => return Err(error),
                    one = acknowledged.try_next() => match one? {
                        Some(one) => sent.add(one),
                        None => break,
                    },
                }
            }
        }
        for batch in batches.in_order {
            tokio::select! {
                error = &mut leases => return Err(error),
                one = self.send(batch) => sent.add(one?),
            }
        }
        Ok(())
    }

    async fn plan(&self) -> Result<Plan> {
        plan(self.source.manifest(), self.source, self, self.source.limits()).await
    }

    /// Renews the leases while the push runs: the registry leases each blob that the client asks
    /// about. Returns only with an error.
    async fn keep_leases(&self) -> Error {
        let every = Duration::from_millis((self.push.lease_seconds.saturating_mul(1000) / 3).max(100));
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.plan().await {
                return error;
            }
        }
    }

    /// Raw bytes that were left raw because the registry took them faster so.
    pub fn left_raw(&self) -> u64 {
        self.encoding.left_raw()
    }

    pub async fn abort(&self) -> Result<()> {
        self.remote.abort(&self.target.repository, &self.push.id).await
    }

    async fn send(&self, batch: Batch) -> Result<Sent> {
        let tally = Tally::new(self.progress);
        let (source, limits, encoding) = (self.source.clone(), self.source.limits().clone(), self.encoding.clone());
        let frames = {
            let tally = Arc::clone(&tally);
            move || {
                tally.reset();
                let mut meter = Meter::new(&limits, Arc::clone(&tally));
                body(&source, &batch, &encoding).and_then(move |piece| futures::future::ready(meter.look(&piece).map(|()| piece))).boxed()
            }
        };
        self.remote.put_frames(&self.target.repository, &self.push.id, frames).await?;
        Ok(Sent { blobs: tally.blobs(), raw_bytes: tally.raw(), frame_bytes: tally.frame_bytes() })
    }
}

impl Sent {
    fn add(&mut self, other: Self) {
        self.blobs += other.blobs;
        self.raw_bytes += other.raw_bytes;
        self.frame_bytes += other.frame_bytes;
    }
}

/// The body of an upload. Each node is encoded only when the connection takes it, to save memory.
fn body(source: &OpenedSource, batch: &Batch, encoding: &Encoding) -> BoxFrames {
    let containers = Arc::clone(&batch.containers);
    let documents = stream::iter(0..containers.len()).map(move |i| Ok::<Bytes, Error>(document_frame(&containers[i])));
    let end = Bytes::from(end_mark(batch.frames()));
    let blobs = if batch.blobs.is_empty() { stream::empty().boxed() } else { source.blob_frames(Arc::clone(&batch.blobs), encoding) };
    blobs.chain(documents).chain(stream::once(async move { Ok(end) })).boxed()
}

impl PlanDestination for Session<'_> {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        let most = usize::try_from(self.push.max_digests).unwrap_or(usize::MAX).max(1);
        let mut lacking = Vec::new();
        for (part, items) in items.chunks(most).enumerate() {
            // The request groups digests by kind; `order` maps its positions back to `items`.
            let mut order = Vec::with_capacity(items.len());
            let mut groups = Vec::new();
            for kind in Kind::ALL {
                let of_kind: Vec<usize> = (0..items.len()).filter(|i| items[*i].kind == kind).collect();
                if !of_kind.is_empty() {
                    groups.push(DigestGroup { kind, digests: of_kind.iter().map(|i| items[*i].digest).collect(), claim: None });
                    order.extend(of_kind);
                }
            }
            let missing = self.remote.missing(&self.target.repository, &self.push.id, &MissingRequest { groups }).await?;
            lacking.extend(missing.into_iter().map(|position| part * most + order[position]));
        }
        lacking.sort_unstable();
        Ok(lacking)
    }
}
