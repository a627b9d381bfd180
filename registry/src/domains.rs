//! The domains of this registry: the store of each, and what runs over it in the background.
//!
//! ```text
//! request ─▶ base path (http::base) ─▶ Access: may the caller? ─▶ Domains::get ─▶ Domain { store, collector, schedule }
//! every few seconds ─▶ catalogue ─▶ new domains begin their background work, deleted ones end it
//! ```

use crate::app::STATISTICS_OF_DOMAIN;
use crate::background::{Collector, Limits, Retention, schedule};
use crate::config::Config;
use crate::metrics::forget;
use crate::problem::ApiError;
use crate::reports::ReportLog;
use parking_lot::Mutex;
use pfr_schema::api::DomainState;
use pfr_schema::{DomainName, ErrorCode};
use pfr_store::{Budget, Result, Schedule, Store};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How often the catalogue is read for domains that other processes made or deleted.
const FOLLOW: Duration = Duration::from_secs(2);

/// A domain that is served.
pub(crate) struct Domain {
    pub(crate) name: DomainName,
    pub(crate) store: Store,
    pub(crate) collector: Collector,
    pub(crate) retention: Retention,
    pub(crate) schedule: Schedule,
    /// What the log has said of reports of agents.
    pub(crate) reports: ReportLog,
    /// Permits to compute its statistics, among those of all domains.
    pub(crate) statistics: Arc<Semaphore>,
    collections: Arc<Semaphore>,
}

impl Domain {
    fn new(name: DomainName, store: Store, limits: &Limits, config: &Config, removes: Option<pfr_store::Domains>) -> Arc<Self> {
        let collector = Collector::new(store.clone(), name.clone(), Duration::from_secs(config.gc_grace_seconds));
        let retention = Retention::new(store.clone(), name.clone());
        let schedule = schedule(&store, &collector, &retention, limits, config, removes);
        let (statistics, collections) = (Arc::new(Semaphore::new(STATISTICS_OF_DOMAIN)), Arc::new(Semaphore::new(1)));
        Arc::new(Self { name, store, collector, retention, schedule, reports: ReportLog::default(), statistics, collections })
    }

    /// A permit to collect on request, at once or not at all: a second collection would find
    /// nothing to do.
    pub(crate) fn collection(&self) -> std::result::Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.collections)
            .try_acquire_owned()
            .map_err(|_| ApiError::new(ErrorCode::Overloaded, "a collection that was asked for is running; GET /v1/gc tells how far it is"))
    }

    /// Where an object of its store lies on the registry's storage.
    pub(crate) fn path_of(&self, path: &str) -> String {
        if self.name.is_default() { path.to_owned() } else { format!("{}/{}/{path}", DomainName::FOLDER, self.name) }
    }

    /// Ends what runs.
    fn stop(&self) {
        // A collection may stop anywhere: the next one continues.
        self.collector.stop();
        self.schedule.stop();
    }
}

/// All domains. Cheap to clone; clones are one.
#[derive(Clone)]
pub(crate) struct Domains(Arc<Inner>);

struct Inner {
    catalogue: pfr_store::Domains,
    default: Arc<Domain>,
    others: Mutex<HashMap<DomainName, Arc<Domain>>>,
    limits: Limits,
    config: Config,
    stopping: Budget,
}

impl Domains {
    pub(crate) fn new(catalogue: pfr_store::Domains, limits: Limits, config: &Config) -> Self {
        let store = catalogue.default_store().clone();
        let default = Domain::new(DomainName::default(), store, &limits, config, Some(catalogue.clone()));
        let (others, stopping) = (Mutex::default(), Budget::default());
        Self(Arc::new(Inner { catalogue, default, others, limits, config: config.clone(), stopping }))
    }

    /// The catalogue of domains.
    pub(crate) fn catalogue(&self) -> &pfr_store::Domains {
        &self.0.catalogue
    }

    /// The domain that exists from the first start.
    pub(crate) fn default_domain(&self) -> &Arc<Domain> {
        &self.0.default
    }

    /// A domain.
    ///
    /// # Errors
    /// [`pfr_store::Error::DomainUnknown`].
    pub(crate) async fn get(&self, name: &DomainName) -> Result<Arc<Domain>> {
        if name.is_default() {
            return Ok(Arc::clone(&self.0.default));
        }
        let store = self.0.catalogue.open(name).await;
        if let Err(pfr_store::Error::DomainUnknown(_)) = &store {
            self.close(name);
        }
        Ok(self.serve(name, store?))
    }

    /// The domain over this store, which begins its background work.
    pub(crate) fn serve(&self, name: &DomainName, store: Store) -> Arc<Domain> {
        let mut others = self.0.others.lock();
        if let Some(domain) = others.get(name).filter(|domain| domain.store.is_same(&store)) {
            return Arc::clone(domain);
        }
        let domain = Domain::new(name.clone(), store, &self.0.limits, &self.0.config, None);
        if !self.0.stopping.is_used_up() {
            let schedule = domain.schedule.clone();
            pfr_service::task::spawn(async move { schedule.run().await });
        }
        if let Some(before) = others.insert(name.clone(), Arc::clone(&domain)) {
            before.stop();
        }
        domain
    }

    /// Ends what runs over a domain that is gone.
    fn close(&self, name: &DomainName) {
        if let Some(domain) = self.0.others.lock().remove(name) {
            domain.stop();
            forget(name);
        }
    }

    /// The domains that are open, the default one first.
    pub(crate) fn all(&self) -> Vec<Arc<Domain>> {
        let mut others: Vec<Arc<Domain>> = self.0.others.lock().values().cloned().collect();
        others.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        std::iter::once(Arc::clone(&self.0.default)).chain(others).collect()
    }

    /// Runs the background work of all domains until [`Self::stop`].
    pub(crate) async fn run(&self) {
        let default = self.0.default.schedule.clone();
        let default = pfr_service::task::spawn(async move { default.run().await });
        while !self.0.stopping.is_used_up() {
            if let Err(error) = self.follow().await {
                tracing::warn!(%error, "reading the domain catalogue failed");
            }
            tokio::select! {
                () = tokio::time::sleep(FOLLOW) => {}
                () = self.0.stopping.used_up() => {}
            }
        }
        if let Err(error) = default.await {
            tracing::error!(%error, "background tasks failed");
        }
    }

    /// Begins the work of domains that are new, and ends that of domains that are gone.
    async fn follow(&self) -> Result<()> {
        let stores = tokio::select! {
            stores = self.0.catalogue.open_all() => stores?,
            () = self.0.stopping.used_up() => return Ok(()),
        };
        let gone: Vec<DomainName> = {
            let others = self.0.others.lock();
            others.keys().filter(|name| !stores.iter().any(|(live, _)| live == *name)).cloned().collect()
        };
        for (name, store) in stores {
            self.serve(&name, store);
        }
        for name in gone {
            // Or it was made a moment ago, or opens slowly, or could not be read.
            match self.0.catalogue.get(&name).await {
                Ok(info) if info.state == DomainState::Live => {}
                Ok(_) | Err(pfr_store::Error::DomainUnknown(_)) => self.close(&name),
                Err(error) => tracing::debug!(%error, domain = %name, "a domain cannot be looked up"),
            }
        }
        Ok(())
    }

    /// Used up when the process stops.
    pub(crate) fn stopping(&self) -> &Budget {
        &self.0.stopping
    }

    /// Ends all background work.
    pub(crate) fn stop(&self) {
        self.0.stopping.end();
        self.all().iter().for_each(|domain| domain.stop());
    }

    /// Waits until nothing runs: a stopped collection has noted that it stopped.
    pub(crate) async fn ended(&self) {
        for domain in self.all() {
            domain.schedule.ended().await;
            domain.collector.ended().await;
        }
    }
}
