//! State that handlers share: the domains, and the limits that keep the process within its memory.

use crate::audit::Audit;
use crate::auth::Gate;
use crate::background::Limits;
use crate::claims::Claims;
use crate::config::Config;
use crate::domains::{Domain, Domains};
use crate::events::Places;
use crate::http::arrivals::Arrivals;
use crate::http::host::Hosts;
use crate::http::permit::{RequestPermit, wait_for};
use crate::http::timeout::Pace;
use crate::jwt::Issuers;
use crate::problem::ApiError;
use crate::rates::Rates;
use crate::redirect::Redirects;
use crate::storage::Opened;
use metrics_exporter_prometheus::PrometheusHandle;
use pfr_schema::ErrorCode;
use pfr_schema::snapshot::MAX_BYTES;
use pfr_service::Shared;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Requests that hold a large document or a large JSON body at once. Others wait.
const LARGE: usize = 4;
/// Statistics that are computed at once. Others wait.
const STATISTICS: usize = 3;
/// The same of one domain: those of a large one leave a place to other domains.
pub(crate) const STATISTICS_OF_DOMAIN: usize = STATISTICS - 1;
/// Bytes that small JSON bodies may hold while they arrive. Large ones may hold as much as four of
/// the largest size.
const ARRIVING: usize = 32 << 20;
/// KiB that all large OCI manifests may hold together while they are sent.
const SENT_KIB: usize = 64 << 10;
/// Verifications at once, each of which reads a complete snapshot. Others are refused with
/// `Retry-After`.
const VERIFICATIONS: usize = 2;

/// Shared state. Cheap to clone.
#[derive(Clone)]
pub(crate) struct App(Shared<Inner>);

impl Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}

/// What [`App`] shares.
pub(crate) struct Inner {
    pub(crate) domains: Domains,
    /// What checks tokens; none if every caller may do everything.
    pub(crate) gate: Option<Arc<Gate>>,
    /// Whether requests are steps of their callers' traces.
    pub(crate) continues_traces: bool,
    /// Whether every caller may read the metrics.
    pub(crate) open_metrics: bool,
    /// The audit log.
    pub(crate) audit: Arc<Audit>,
    /// Which push sends which blob.
    pub(crate) claims: Arc<Claims>,
    /// Limits on what one caller, or one domain, may ask.
    pub(crate) rates: Arc<Rates>,
    /// Proxies in front, which say where requests come from.
    pub(crate) proxies: usize,
    /// Whether it speaks https.
    pub(crate) has_tls: bool,
    /// Hosts that requests may name.
    pub(crate) hosts: Hosts,
    pub(crate) redirects: Option<Arc<Redirects>>,
    pub(crate) metrics: PrometheusHandle,
    /// Permits for requests that are worked on at once.
    pub(crate) request_permits: Arc<Semaphore>,
    /// The same for streams of frames.
    pub(crate) stream_permits: Arc<Semaphore>,
    /// Places for clients that follow events. These hold them for hours.
    pub(crate) event_streams: Arc<Places>,
    /// How slow a client may be.
    pub(crate) pace: Pace,
    /// How long a request waits for a permit.
    pub(crate) queue: Duration,
    /// How long a client may take for a JSON body.
    pub(crate) json_time: Duration,
    /// Memory of JSON bodies while they arrive.
    pub(crate) arrivals: Arrivals,
    pub(crate) max_json_bytes: usize,
    pub(crate) max_digests: usize,
    pub(crate) max_frames_bytes: u64,
    bodies: Arc<Semaphore>,
    documents: Arc<Semaphore>,
    /// KiB of manifests that their clients are taking.
    manifests: Arc<Semaphore>,
    statistics: Arc<Semaphore>,
    verifications: Arc<Semaphore>,
    scrubs: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(opened: Opened, metrics: PrometheusHandle, issuers: Option<Arc<Issuers>>, config: &Config) -> Self {
        let Opened { domains, redirects } = opened;
        let limits = Limits::default();
        let scrubs = Arc::clone(&limits.scrubs);
        let rates = Rates::new(config);
        let gate = config.require_tokens.then(|| {
            let clock = domains.default_store().options().clock.clone();
            Arc::new(Gate::new(domains.access_tokens(), clock, issuers, Arc::clone(&rates)))
        });
        Self(Shared::new(Inner {
            gate,
            audit: Audit::new(config),
            claims: Arc::new(Claims::new()),
            proxies: config.proxies,
            has_tls: config.has_tls(),
            hosts: Hosts::of(config),
            continues_traces: config.continues_traces(),
            open_metrics: config.open_metrics,
            domains: Domains::new(domains, limits, config),
            redirects: redirects.map(Arc::new),
            rates,
            metrics,
            request_permits: Arc::new(Semaphore::new(config.max_requests)),
            stream_permits: Arc::new(Semaphore::new(config.max_requests)),
            event_streams: Places::new(config),
            pace: config.pace(),
            queue: Duration::from_secs(config.queue_seconds),
            json_time: Duration::from_secs(config.json_body_seconds),
            arrivals: Arrivals::new(ARRIVING, config.max_json_bytes.max(MAX_BYTES as usize).saturating_mul(LARGE)),
            max_json_bytes: config.max_json_bytes,
            max_digests: config.max_digests,
            max_frames_bytes: config.max_frames_bytes,
            bodies: Arc::new(Semaphore::new(LARGE)),
            documents: Arc::new(Semaphore::new(LARGE)),
            manifests: Arc::new(Semaphore::new(SENT_KIB)),
            statistics: Arc::new(Semaphore::new(STATISTICS)),
            verifications: Arc::new(Semaphore::new(VERIFICATIONS)),
            scrubs,
        }))
    }
}

impl Inner {
    /// A permit to work on a large JSON body, within `left`.
    pub(crate) async fn large_body(&self, left: Duration) -> Result<OwnedSemaphorePermit, ApiError> {
        wait_for(&self.bodies, left, "the registry reads as many large requests as it may; try again in a moment").await
    }

    /// A permit to hold the documents of a snapshot.
    pub(crate) async fn documents(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.documents_within(self.queue).await
    }

    /// The same, within `left`.
    async fn documents_within(&self, left: Duration) -> Result<OwnedSemaphorePermit, ApiError> {
        wait_for(&self.documents, left, "the registry reads as many documents as it may; try again in a moment").await
    }

    /// The permits to read a manifest of this many bytes, and to send it to its client, which may
    /// take it slowly. The request waits for both together at most for `queue`. While it waits for
    /// other clients, it gives its `own` permit back.
    pub(crate) async fn sent_manifest(&self, own: &RequestPermit, bytes: u64) -> Result<[OwnedSemaphorePermit; 2], ApiError> {
        let begun = Instant::now();
        let room = async { Ok::<_, ApiError>((self.room_to_send(bytes).await?, begun.elapsed())) };
        let (to_send, waited) = own.without(room).await?;
        Ok([self.documents_within(self.queue.saturating_sub(waited)).await?, to_send])
    }

    async fn room_to_send(&self, bytes: u64) -> Result<OwnedSemaphorePermit, ApiError> {
        let kib = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX).min(SENT_KIB as u32);
        match tokio::time::timeout(self.queue, Arc::clone(&self.manifests).acquire_many_owned(kib)).await {
            Ok(permit) => permit.map_err(|e| ApiError::internal(e.to_string())),
            Err(_) => {
                let detail = "as many large manifests are being sent as may be in memory; try again in a moment";
                Err(ApiError::new(ErrorCode::Overloaded, detail))
            }
        }
    }

    /// The permits to compute statistics of a domain, of which those of a large store take minutes:
    /// one among those of the domain, and one among all. They are separate from that to hold
    /// documents, for which every reader of a snapshot waits.
    pub(crate) async fn statistics(&self, domain: &Domain) -> Result<[OwnedSemaphorePermit; 2], ApiError> {
        let begun = Instant::now();
        // The domain's first: a request that waits for it takes no place from other domains.
        let of_domain = "the registry computes as many statistics of this domain as it may; try again in a moment";
        let of_domain = wait_for(&domain.statistics, self.queue, of_domain).await?;
        let left = self.queue.saturating_sub(begun.elapsed());
        let of_all = "the registry computes as many statistics as it may; try again in a moment";
        Ok([of_domain, wait_for(&self.statistics, left, of_all).await?])
    }

    /// A permit to verify a snapshot, at once or not at all: waiting would take minutes.
    pub(crate) fn verification(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.verifications).try_acquire_owned().map_err(|_| {
            ApiError::new(ErrorCode::Overloaded, format!("{VERIFICATIONS} snapshots are being verified; try again when one is done"))
        })
    }

    /// The permit to scrub, at once or not at all. It is separate from verifications because a
    /// scrub may take hours.
    pub(crate) fn scrub(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.scrubs)
            .try_acquire_owned()
            .map_err(|_| ApiError::new(ErrorCode::Overloaded, "a scrub is running; try again when it is done"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{metrics, storage};
    use pfr_schema::DomainName;

    #[tokio::test]
    async fn statistics_of_one_domain_leave_a_place_to_those_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data: dir.path().into(), queue_seconds: 0, ..Config::default() };
        let opened = storage::open_parts(&config).await.unwrap();
        let acme: DomainName = "acme".parse().unwrap();
        opened.domains.create(&acme).await.unwrap();
        let app = App::new(opened, metrics::recorder().unwrap(), None, &config);
        let (large, other) = (Arc::clone(app.domains.default_domain()), app.domains.get(&acme).await.unwrap());
        let refused = async |domain: &Arc<Domain>| {
            let error = app.statistics(domain).await.err().unwrap();
            assert_eq!(error.code, ErrorCode::Overloaded);
            error.detail.contains("of this domain")
        };
        let mut held = Vec::new();
        for _ in 0..STATISTICS_OF_DOMAIN {
            held.push(app.statistics(&large).await.unwrap());
        }
        assert!(refused(&large).await, "it has as many as it may");
        held.push(app.statistics(&other).await.unwrap());
        for _ in 0..STATISTICS_OF_DOMAIN {
            assert!(!refused(&other).await, "all are taken, and it has not as many as it may");
        }
        drop(held);
        assert!(app.statistics(&large).await.is_ok(), "they are given back");
        app.domains.stop();
    }

    #[tokio::test]
    async fn a_large_manifest_waits_for_two_permits_as_long_as_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { data: dir.path().into(), queue_seconds: 30, ..Config::default() };
        let app = App::new(storage::open_parts(&config).await.unwrap(), metrics::recorder().unwrap(), None, &config);
        let own = RequestPermit::new(None, None);
        let large = (SENT_KIB as u64) << 10;
        let [reading, sending] = app.sent_manifest(&own, large).await.unwrap();
        let mut documents = vec![reading];
        for _ in 1..LARGE {
            documents.push(app.documents().await.unwrap());
        }
        tokio::time::pause();
        let begun = Instant::now();
        let free = async {
            tokio::time::sleep(Duration::from_secs(20)).await;
            drop(sending);
            // Nothing frees the other one.
            std::future::pending::<()>().await;
        };
        let refused = tokio::select! {
            refused = app.sent_manifest(&own, large) => refused.err().unwrap(),
            () = free => unreachable!(),
        };
        assert_eq!(refused.code, ErrorCode::Overloaded);
        let waited = begun.elapsed();
        assert!((30..32).contains(&waited.as_secs()), "{waited:?}");
        app.domains.stop();
    }
}
