//! One push session: negotiate, send, commit.

use super::PushTarget;
use super::batch::{Batch, Batches, batches, fits};
use super::queue::{Patience, Queue, carried};
use super::source::OpenedSource;
use crate::encoding::Encoding;
use crate::error::{Error, Result};
use crate::meter::{Meter, Tally, Unacknowledged};
use crate::plan::{Above, CHUNKS, Item, Plan, PlanDestination, cut, plan_above, plan_below};
use crate::progress::{Phase, Progress};
use crate::remote::{BoxFrames, Remote};
use bytes::Bytes;
use futures::future::try_join4;
use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use pfr_schema::api::{self, DigestGroup, MissingRequest};
use pfr_schema::frame::end_mark;
use pfr_schema::tree::Document;
use pfr_schema::{ErrorCode, Kind};
use pfr_store::document_frame;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a push asks which blobs the registry lacks before it fails.
const ROUNDS: u32 = 3;

/// What the registry has acknowledged.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sent {
    pub blobs: u64,
    pub raw_bytes: u64,
    pub frame_bytes: u64,
    /// Of the raw bytes, those that were not encoded because the registry took them faster so, or
    /// to find that out.
    pub left_raw: u64,
}

/// What a question claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// Nothing; nor does it ask what others send.
    Nothing,
    /// So many plain blobs, the first that are missing. About nodes it is as [`Self::Nothing`].
    Blobs(usize),
    /// All of it.
    All,
}

/// What became of a question about one blob or node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The registry has it.
    Stored,
    /// It is missing, and to be sent from here.
    Ours,
    /// It is missing, and another client sends it.
    Coming,
    /// It is missing, and no client is known to send it.
    Missing,
}

/// The answer to a question: positions, ascending.
#[derive(Debug, Default)]
pub(super) struct Asked {
    lacking: Vec<usize>,
    coming: Vec<usize>,
    ours: Vec<usize>,
    /// When to ask again about what others send.
    pub wait: Option<Duration>,
}

impl Asked {
    /// What became of the blob at this position of the question.
    pub fn of(&self, at: usize) -> Answer {
        let is_in = |positions: &[usize]| positions.binary_search(&at).is_ok();
        if !is_in(&self.lacking) {
            Answer::Stored
        } else if is_in(&self.coming) {
            Answer::Coming
        } else if is_in(&self.ours) {
            Answer::Ours
        } else {
            Answer::Missing
        }
    }
}

pub(super) struct Session<'a> {
    source: &'a OpenedSource,
    remote: &'a Remote,
    target: &'a PushTarget,
    progress: &'a Progress,
    push: api::Push,
    /// Set when a replica of an older version has refused a claim: another one opened the session.
    claims_refused: AtomicBool,
    encoding: Encoding,
}

impl<'a> Session<'a> {
    pub async fn open(source: &'a OpenedSource, remote: &'a Remote, target: &'a PushTarget, progress: &'a Progress) -> Result<Self> {
        let push = remote.open_push(&target.repository).await?;
        let encoding = Encoding::new(target.compression, push.codecs);
        Ok(Self { source, remote, target, progress, push, claims_refused: AtomicBool::new(false), encoding })
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

    /// Uploads what the registry lacks of the manifest and of all that it reaches: of some page
    /// chunks at a time the pages and then the page chunks, and at the end what lists them.
    async fn upload_missing(&self, total_bytes: u64, sent: &mut Sent) -> Result<()> {
        let claimed = Mutex::new(Vec::new());
        let destination = Lacking { session: self, claimed: Some(&claimed) };
        let (source, limits) = (self.source, self.source.limits());
        let Above { plan: mut above, chunks } = plan_above(source.manifest(), source, &destination, limits).await?;
        let above_bytes = above.bytes();
        let mut parts = chunks.chunks(CHUNKS).peekable();
        let first = plan_below(parts.next().unwrap_or_default(), &above.blobs, source, &destination, limits).await?;
        let in_parts = parts.peek().is_some();
        // After another try, what that one sent would count as deduplicated.
        let is_first_try = self.progress.bytes_deduplicated() == 0 && sent.blobs == 0;
        let upload = async {
            let mut below = first;
            loop {
                if is_first_try {
                    let listed = if in_parts { below.listed } else { total_bytes.saturating_sub(above_bytes) };
                    self.progress.add_bytes_deduplicated(listed.saturating_sub(below.plan.bytes()));
                }
                let mut plan = Plan { blobs: std::mem::take(&mut above.blobs), containers: below.plan.containers };
                plan.blobs.extend(below.plan.blobs);
                if parts.peek().is_none() {
                    plan.containers.append(&mut above.containers);
                }
                // A look at many files on a slow file system takes long, too.
                plan.blobs = source.check(plan.blobs).await?;
                self.progress.enter(Phase::Sending);
                let ours = std::mem::take(&mut *claimed.lock());
                let is_complete = self.send_plan(plan, ours, sent).await?;
                let Some(part) = parts.next().filter(|_| !is_complete) else { return Ok::<_, Error>(()) };
                below = plan_below(part, &[], source, &destination, limits).await?;
            }
        };
        tokio::select! {
            error = self.keep_leases() => return Err(error),
            done = upload => done?,
        }
        // Page chunks that the registry has, what others sent, and what it had before another try.
        let known = sent.raw_bytes.saturating_add(self.progress.bytes_deduplicated());
        self.progress.add_bytes_deduplicated(total_bytes.saturating_sub(known));
        Ok(())
    }

    /// Sends a plan. `claimed` says of each of its blobs whether it is claimed. Returns whether the
    /// registry has the complete snapshot by now, because another client has sent it.
    async fn send_plan(&self, plan: Plan, claimed: Vec<bool>, sent: &mut Sent) -> Result<bool> {
        let limit = self.request_bytes();
        let is_ours = claimed.iter().all(|is_ours| *is_ours);
        if self.claim_seconds() == 0 || (is_ours && fits(&plan, limit)) {
            let Batches { together, in_order } = batches(plan, limit);
            self.send_together(Queue::of(self, together), sent).await?;
            for batch in in_order {
                sent.add(self.send(batch).await?);
            }
            return Ok(false);
        }
        let Plan { blobs, containers } = plan;
        let queue = self.send_together(Queue::new(self, blobs, &claimed), sent).await?;
        if queue.is_complete() {
            containers.iter().for_each(|document| self.stored_elsewhere(document.bytes.len() as u64));
            return Ok(true);
        }
        self.send_nodes(containers, sent).await?;
        Ok(false)
    }

    /// Sends blobs, four requests at a time.
    async fn send_together<'q>(&self, queue: Queue<'q>, sent: &mut Sent) -> Result<Queue<'q>> {
        let (queue, sent) = (tokio::sync::Mutex::new(queue), Mutex::new(sent));
        let work = || self.send_of(&queue, &sent);
        try_join4(work(), work(), work(), work()).await?;
        Ok(queue.into_inner())
    }

    /// Sends requests of the queue, one after the other, until it is empty.
    async fn send_of(&self, queue: &tokio::sync::Mutex<Queue<'_>>, sent: &Mutex<&mut Sent>) -> Result<()> {
        loop {
            let next = queue.lock().await.next().await?;
            let Some(batch) = next else { return Ok(()) };
            let one = self.send(batch).await?;
            sent.lock().add(one);
        }
    }

    /// Sends nodes, children before what lists them, but for those that other clients send.
    async fn send_nodes(&self, nodes: Vec<Document>, sent: &mut Sent) -> Result<()> {
        let mut patience = Patience::new(self.claim_seconds());
        let mut left = nodes;
        while !left.is_empty() {
            let asked = self.ask(&left.iter().map(item_of).collect::<Vec<_>>(), Claim::All).await?;
            let insists = patience.is_over();
            // A node may list nodes of lower kinds, and is sent after those that others send.
            let coming = |at: usize| !insists && asked.of(at) == Answer::Coming;
            let lowest = (0..left.len()).find(|at| coming(*at)).map(|at| left[at].kind);
            let (mut now, mut later) = (Vec::new(), Vec::new());
            let before = left.len();
            for (at, document) in left.into_iter().enumerate() {
                if asked.of(at) == Answer::Stored {
                    self.stored_elsewhere(document.bytes.len() as u64);
                } else if coming(at) || lowest.is_some_and(|lowest| document.kind > lowest) {
                    later.push(document);
                } else {
                    now.push(document);
                }
            }
            left = later;
            for documents in cut(now, |document| document.bytes.len() as u64, self.request_bytes()) {
                sent.add(self.send(Batch { containers: documents.into(), ..Batch::default() }).await?);
            }
            if left.len() < before {
                patience.restore();
            }
            if !left.is_empty() {
                patience.wait(asked.wait).await;
            }
        }
        Ok(())
    }

    /// The manifest of the snapshot.
    pub fn manifest(&self) -> Item {
        self.source.manifest()
    }

    /// Bytes of frames that one request should carry at most.
    pub fn request_bytes(&self) -> u64 {
        self.push.max_frames_bytes
    }

    /// Seconds after which a claim ends at the latest; 0 if the registry, or a replica of it, knows
    /// none.
    pub fn claim_seconds(&self) -> u64 {
        if self.claims_refused.load(Ordering::Relaxed) { 0 } else { self.push.claim_seconds }
    }

    /// Counts raw bytes that another client has sent meanwhile.
    pub fn stored_elsewhere(&self, bytes: u64) {
        self.progress.add_bytes_deduplicated(bytes);
    }

    /// Renews the leases while the push runs: the registry leases each blob that the client asks
    /// about. Returns only with an error.
    async fn keep_leases(&self) -> Error {
        let every = Duration::from_millis((self.push.lease_seconds.saturating_mul(1000) / 3).max(100));
        loop {
            tokio::time::sleep(every).await;
            if let Err(error) = self.ask_again().await {
                return error;
            }
        }
    }

    /// Asks about everything that is not below a node that the registry has, and claims nothing.
    async fn ask_again(&self) -> Result<()> {
        let destination = Lacking { session: self, claimed: None };
        let (source, limits) = (self.source, self.source.limits());
        let chunks = plan_above(source.manifest(), source, &destination, limits).await?.chunks;
        for part in chunks.chunks(CHUNKS) {
            plan_below(part, &[], source, &destination, limits).await?;
        }
        Ok(())
    }

    pub async fn abort(&self) -> Result<()> {
        self.remote.abort(&self.target.repository, &self.push.id).await
    }

    async fn send(&self, batch: Batch) -> Result<Sent> {
        let tally = Tally::new(self.progress);
        // Dropped, too, when another request of the same session fails.
        let unacknowledged = Unacknowledged::new(&tally);
        let (source, limits, encoding) = (self.source.clone(), self.source.limits().clone(), self.encoding.clone());
        let last = Arc::new(Mutex::new(encoding.clone()));
        let frames = {
            let (tally, last) = (Arc::clone(&tally), Arc::clone(&last));
            move || {
                tally.reset();
                // The thread of a try before may still count.
                let encoding = encoding.with_own_count();
                *last.lock() = encoding.clone();
                let mut meter = Meter::new(&limits, Arc::clone(&tally));
                body(&source, &batch, &encoding).and_then(move |piece| futures::future::ready(meter.look(&piece).map(|()| piece))).boxed()
            }
        };
        self.remote.put_frames(&self.target.repository, &self.push.id, frames).await?;
        unacknowledged.acknowledged();
        let left_raw = last.lock().left_raw();
        Ok(Sent { blobs: tally.blobs(), raw_bytes: tally.raw(), frame_bytes: tally.frame_bytes(), left_raw })
    }
}

impl Sent {
    fn add(&mut self, other: Self) {
        self.blobs += other.blobs;
        self.raw_bytes += other.raw_bytes;
        self.frame_bytes += other.frame_bytes;
        self.left_raw += other.left_raw;
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

/// A node, to be asked about.
fn item_of(document: &Document) -> Item {
    Item { digest: document.digest, kind: document.kind, size: Some(document.bytes.len() as u64), elements: None }
}

/// The destination of a plan: what the registry lacks. The first blobs that are missing are
/// claimed.
struct Lacking<'a> {
    session: &'a Session<'a>,
    /// Gets an entry for each blob of the plan: whether it is claimed. None claims nothing.
    claimed: Option<&'a Mutex<Vec<bool>>>,
}

impl PlanDestination for Lacking<'_> {
    async fn lacks(&self, items: &[Item]) -> Result<Vec<usize>> {
        let claim = match self.claimed {
            Some(_) => Claim::Blobs(carried(items, self.session.request_bytes())),
            None => Claim::Nothing,
        };
        let asked = self.session.ask(items, claim).await?;
        if let Some(claimed) = self.claimed {
            let blobs = asked.lacking.iter().filter(|at| items[**at].kind == Kind::Blob);
            let mut ours = asked.ours.iter().peekable();
            claimed.lock().extend(blobs.map(|at| ours.next_if_eq(&at).is_some()));
        }
        Ok(asked.lacking)
    }
}

impl Session<'_> {
    /// Asks which of these blobs and nodes the registry lacks. From the first claim that a replica
    /// does not know, nothing is claimed any more.
    pub async fn ask(&self, items: &[Item], claim: Claim) -> Result<Asked> {
        let claim = if self.claim_seconds() == 0 { Claim::Nothing } else { claim };
        match self.ask_with(items, claim).await {
            Err(Error::Registry { problem }) if problem.code == ErrorCode::InvalidRequest && claim != Claim::Nothing => {
                tracing::debug!(refusal = problem.detail, "claim refused, asking without claims");
                self.claims_refused.store(true, Ordering::Relaxed);
                self.ask_with(items, Claim::Nothing).await
            }
            answer => answer,
        }
    }

    async fn ask_with(&self, items: &[Item], claim: Claim) -> Result<Asked> {
        let most = usize::try_from(self.push.max_digests).unwrap_or(usize::MAX).max(1);
        let mut all = Asked::default();
        for (part, items) in items.chunks(most).enumerate() {
            // How many blobs of a kind may still be claimed.
            let may = |kind: Kind, claimed: usize| match claim {
                Claim::Nothing => None,
                Claim::Blobs(most) => (kind == Kind::Blob).then(|| most.saturating_sub(claimed)),
                Claim::All => Some(usize::MAX),
            };
            // The request groups digests by kind; `order` maps its positions back to `items`.
            let mut order = Vec::with_capacity(items.len());
            let mut groups = Vec::new();
            for kind in Kind::ALL {
                let of_kind: Vec<usize> = (0..items.len()).filter(|i| items[*i].kind == kind).collect();
                if !of_kind.is_empty() {
                    let claim = may(kind, all.ours.len()).map(|most| most.min(of_kind.len()) as u64);
                    groups.push(DigestGroup { kind, digests: of_kind.iter().map(|i| items[*i].digest).collect(), claim });
                    order.extend(of_kind);
                }
            }
            let missing = self.remote.missing(&self.target.repository, &self.push.id, &MissingRequest { groups }).await?;
            for position in missing.lacking {
                let at = order[position];
                if missing.coming.binary_search(&position).is_ok() {
                    all.coming.push(part * most + at);
                } else if may(items[at].kind, all.ours.len()).is_some_and(|most| most > 0) {
                    // The registry claims the first that are missing too.
                    all.ours.push(part * most + at);
                }
                all.lacking.push(part * most + at);
            }
            all.wait = missing.wait.or(all.wait);
        }
        for positions in [&mut all.lacking, &mut all.coming, &mut all.ours] {
            positions.sort_unstable();
        }
        Ok(all)
    }
}
