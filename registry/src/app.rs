//! What handlers share: the store and the budgets that keep the process within its memory.

use crate::background::Collector;
use crate::config::Config;
use crate::problem::Failure;
use crate::redirect::Redirects;
use metrics_exporter_prometheus::PrometheusHandle;
use pfr_schema::ErrorCode;
use pfr_store::Store;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Requests that hold a large document or a large JSON body at once; others wait their turn.
const LARGE: usize = 4;
/// Proofs at once: each reads a whole snapshot. Others are told to come back.
const PROOFS: usize = 2;

/// Shared state. Cheap to clone.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) store: Store,
    pub(crate) redirects: Option<Arc<Redirects>>,
    pub(crate) collector: Collector,
    pub(crate) metrics: PrometheusHandle,
    pub(crate) openapi: axum::body::Bytes,
    /// Places among the requests served at once.
    pub(crate) places: Arc<Semaphore>,
    pub(crate) body_idle: Duration,
    pub(crate) max_json_bytes: usize,
    pub(crate) max_digests: usize,
    pub(crate) max_frames_bytes: u64,
    bodies: Arc<Semaphore>,
    documents: Arc<Semaphore>,
    proofs: Arc<Semaphore>,
    collections: Arc<Semaphore>,
}

impl App {
    pub(crate) fn new(store: Store, redirects: Option<Redirects>, metrics: PrometheusHandle, openapi: String, config: &Config) -> Self {
        Self {
            collector: Collector::new(store.clone(), Duration::from_secs(config.gc_horizon_seconds)),
            store,
            redirects: redirects.map(Arc::new),
            metrics,
            openapi: openapi.into(),
            places: Arc::new(Semaphore::new(config.max_requests)),
            body_idle: Duration::from_secs(config.body_idle_seconds),
            max_json_bytes: config.max_json_bytes,
            max_digests: config.max_digests,
            max_frames_bytes: config.max_frames_bytes,
            bodies: Arc::new(Semaphore::new(LARGE)),
            documents: Arc::new(Semaphore::new(LARGE)),
            proofs: Arc::new(Semaphore::new(PROOFS)),
            collections: Arc::new(Semaphore::new(1)),
        }
    }

    /// A turn to hold a large JSON body.
    pub(crate) async fn large_body(&self) -> Result<OwnedSemaphorePermit, Failure> {
        turn(&self.bodies).await
    }

    /// A turn to hold a snapshot's documents.
    pub(crate) async fn documents(&self) -> Result<OwnedSemaphorePermit, Failure> {
        turn(&self.documents).await
    }

    /// A turn to prove a snapshot, now or not at all: waiting would take minutes.
    pub(crate) fn proof(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Arc::clone(&self.proofs)
            .try_acquire_owned()
            .map_err(|_| Failure::new(ErrorCode::Overloaded, format!("{PROOFS} snapshots are being verified; try again when one is done")))
    }

    /// A turn to collect on request, now or not at all: a second one would find nothing to do.
    pub(crate) fn collection(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Arc::clone(&self.collections)
            .try_acquire_owned()
            .map_err(|_| Failure::new(ErrorCode::Overloaded, "a collection that was asked for is running; GET /v1/gc tells how far it is"))
    }
}

async fn turn(semaphore: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Failure> {
    Arc::clone(semaphore).acquire_owned().await.map_err(|e| Failure::internal(e.to_string()))
}
