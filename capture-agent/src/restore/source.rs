//! Where a restore takes a snapshot from: the local store if the request says so or names a digest
//! that is there, else the registry. Blobs of a registry pass through the local store, or, if the
//! engine takes a sequence at once, by it. What does not fit the engine is refused before.

use super::blobs::Blobs;
use crate::Agent;
use crate::error::{Error, Result};
use crate::priority::First;
use bytes::Bytes;
use parking_lot::Mutex;
use pfr_client::{Destination, Passage, Progress, Way};
use pfr_schema::agent::{Outline, RestoreRequest, RestoringInfo, Stored};
use pfr_schema::{Digest, Limits, Reference, Selector};
use pfr_store::Store;
use std::time::Duration;
use tokio::sync::watch;

/// How long a restore waits for those before it to be complete in the local store. Then it goes on,
/// and fetches what it does not find there.
const SETTLE: Duration = Duration::from_secs(10);

/// Where the documents and blobs of a snapshot are read from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    /// It is complete in the local store.
    Store(Store),
    /// What the local store lacks comes from the registry meanwhile.
    Registry { passage: Passage, store: Store },
}

impl Source {
    pub fn limits(&self) -> &Limits {
        let (Self::Store(store) | Self::Registry { store, .. }) = self;
        &store.options().limits
    }

    /// A document, verified.
    pub async fn read(&self, digest: &Digest) -> Result<Bytes> {
        match self {
            Self::Store(store) => Ok(store.read(digest).await?),
            Self::Registry { passage, .. } => Ok(passage.read(digest).await?),
        }
    }

    /// Blobs in this order.
    pub async fn blobs(&self, digests: Vec<Digest>) -> Result<Blobs> {
        match self {
            Self::Store(store) => Blobs::open(store, digests).await,
            Self::Registry { passage, store } => Blobs::passing(store, passage, digests).await,
        }
    }

    /// Whether its blobs are read only once: they are proven as they are written.
    pub fn passes(&self) -> bool {
        matches!(self, Self::Registry { .. })
    }
}

/// The snapshot of a restore.
#[derive(Debug)]
pub(super) struct Found {
    pub digest: Digest,
    pub source: Source,
    /// Bytes of frames that a pull has fetched.
    pulled: u64,
    /// Pulls in the background give way while blobs pass.
    _first: Option<First>,
}

impl Found {
    fn here(agent: &Agent, digest: Digest, pulled: u64) -> Self {
        Self { digest, source: Source::Store(agent.store().clone()), pulled, _first: None }
    }

    /// Bytes of frames fetched from the registry so far.
    pub fn bytes_pulled(&self) -> u64 {
        match &self.source {
            Source::Store(_) => self.pulled,
            Source::Registry { passage, .. } => passage.bytes_received(),
        }
    }

    /// Where the snapshot lies after a restore that succeeded.
    pub fn stored(&self) -> Stored {
        match &self.source {
            Source::Store(_) => Stored::Here,
            Source::Registry { passage, .. } if passage.keeps() => Stored::Behind,
            Source::Registry { .. } => Stored::Not,
        }
    }

    /// Ends a part of the restore. If it failed, the local store keeps what was verified by now.
    pub async fn or_close<T>(&self, result: Result<T>) -> Result<T> {
        if result.is_err()
            && let Source::Registry { passage, .. } = &self.source
        {
            passage.close().await;
        }
        result
    }

    /// Completes the snapshot in the local store, in the background. A restore that begins later
    /// waits for it, and finds it there.
    pub async fn complete(&self, agent: &Agent) {
        let Source::Registry { passage, .. } = &self.source else { return };
        if !passage.keeps() {
            passage.close().await;
            return;
        }
        let (passage, agent) = (passage.clone(), agent.clone());
        // Before the report: a restore that begins after it finds this.
        let under_way = agent.passages().behind.subscribe();
        pfr_service::task::spawn(async move {
            match passage.finish().await {
                Ok(()) => agent.tidy(),
                Err(error) => {
                    let digest = passage.digest();
                    tracing::warn!(%digest, %error, "the snapshot was restored, but is not complete in this host's store");
                }
            }
            drop(under_way);
        });
    }
}

/// Restores whose blobs come from a registry.
#[derive(Debug, Default)]
pub struct Passages {
    /// Each receiver is a snapshot that is completed in the local store.
    behind: watch::Sender<()>,
    under_way: Mutex<Vec<UnderWay>>,
}

#[derive(Debug)]
struct UnderWay {
    engine: String,
    reference: String,
    passage: Passage,
}

impl Passages {
    /// Waits until snapshots that were restored are complete in the local store.
    async fn settled(&self) {
        if tokio::time::timeout(SETTLE, self.behind.closed()).await.is_err() {
            tracing::info!("a snapshot that was restored is not complete in this host's store yet");
        }
    }

    /// Shows the restore while the guard lives.
    fn show<'a>(&'a self, engine: &str, reference: &str, passage: &Passage) -> Shown<'a> {
        let shown = UnderWay { engine: engine.into(), reference: reference.into(), passage: passage.clone() };
        self.under_way.lock().push(shown);
        Shown { passages: self, digest: passage.digest(), engine: engine.into() }
    }

    /// The restores of an engine that are under way.
    #[must_use]
    pub fn info(&self, engine: &str) -> Vec<RestoringInfo> {
        let under_way = self.under_way.lock();
        let of = under_way.iter().filter(|restore| restore.engine == engine);
        let info = |restore: &UnderWay| {
            let (bytes_total, bytes_verified) = restore.passage.bytes_wanted_and_verified();
            RestoringInfo { reference: restore.reference.clone(), digest: restore.passage.digest(), bytes_total, bytes_verified }
        };
        of.map(info).collect()
    }
}

/// A restore that [`Passages::info`] shows.
pub(super) struct Shown<'a> {
    passages: &'a Passages,
    engine: String,
    digest: Digest,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        let mut under_way = self.passages.under_way.lock();
        let is_this = |restore: &UnderWay| restore.engine == self.engine && restore.passage.digest() == self.digest;
        if let Some(at) = under_way.iter().position(is_this) {
            under_way.swap_remove(at);
        }
    }
}

/// Shows a restore while its blobs come.
pub(super) fn show<'a>(agent: &'a Agent, engine: &str, reference: &str, source: &Source) -> Option<Shown<'a>> {
    let Source::Registry { passage, .. } = source else { return None };
    Some(agent.passages().show(engine, reference, passage))
}

/// What is asked of the local store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Through {
    /// The snapshot is complete there before anything else is done.
    Store,
    /// It is filled behind the engine, or not at all if the request says so.
    Engine,
}

/// Finds the snapshot of a request for an engine. What does not fit the engine is refused before
/// any page is asked for.
pub(super) async fn find(agent: &Agent, engine: &str, request: &RestoreRequest, through: Through) -> Result<Found> {
    agent.passages().settled().await;
    let reference: Reference = request.reference.parse()?;
    let (repository, selector) = (&reference.repository, reference.selector_or_latest());
    if request.local {
        let digest = agent.store().resolve(repository, &selector).await?;
        // A digest finds a snapshot in any repository, but it must be in this one.
        agent.store().snapshot(repository, &digest).await?;
        agent.store().touch(repository, &digest).await?;
        return Ok(Found::here(agent, digest, 0));
    }
    // A tag may have moved in the registry; a digest names the same snapshot for ever.
    if matches!(selector, Selector::Digest(_) | Selector::Prefix(_))
        && let Ok(digest) = agent.store().resolve(repository, &selector).await
    {
        agent.store().touch(repository, &digest).await?;
        return Ok(Found::here(agent, digest, 0));
    }
    let registry = reference.registry.as_deref().or(agent.config().registry.as_deref());
    let registry = registry.ok_or_else(|| {
        Error::Invalid("the reference names no registry and the agent has none; name one, or restore from the local store (--local)".into())
    })?;
    let remote = agent.config().remote_to_pull_from(registry)?;
    let (store, tag) = (agent.store().clone(), selector.tag().cloned());
    // Pulls in the background give way.
    let first = agent.priority().restore();
    let found = async {
        let said = pfr_client::look_up(&remote, repository, &selector).await?;
        agent.check(engine, &Outline::of(&said, request.reshard)?)?;
        match through {
            Through::Store => {
                let destination = Destination::Store { store, repository: repository.clone(), tag };
                let report = pfr_client::pull_found(&remote, repository, &said, &destination, &Progress::default()).await?;
                agent.pull_rate().note(report.bytes_received_raw, report.seconds);
                Ok(Found::here(agent, report.digest, report.bytes_received))
            }
            Through::Engine => {
                let way = if request.no_store { Way::Pass } else { Way::Keep(tag) };
                let passage = Passage::open(&remote, repository, &said, &store, way, agent.flight()).await?;
                Ok(here_or_passing(agent, passage, first).await?)
            }
        }
    };
    match found.await {
        Err(Error::Client(pfr_client::Error::Unreachable { url, reason, attempts })) => {
            // The tag may have moved in the registry, so the local one is not used without `local`.
            let here = agent.store().resolve(repository, &selector).await.is_ok();
            let hint = if here { "; this host has a snapshot of that name: restore it with --local" } else { "" };
            Err(pfr_client::Error::Unreachable { url, reason: format!("{reason}{hint}"), attempts }.into())
        }
        other => other,
    }
}

/// A snapshot of which nothing has to pass is completed in the local store first.
async fn here_or_passing(agent: &Agent, passage: Passage, first: First) -> pfr_client::Result<Found> {
    let digest = passage.digest();
    if passage.keeps() && passage.is_here() {
        passage.finish().await?;
        return Ok(Found::here(agent, digest, passage.bytes_received()));
    }
    Ok(Found { digest, source: Source::Registry { passage, store: agent.store().clone() }, pulled: 0, _first: Some(first) })
}
