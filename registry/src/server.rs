//! The listener and its connections.
//!
//! hyper is driven by hand for features that `axum::serve` lacks: large read buffers (bodies arrive
//! in pieces of up to 128 KiB instead of 8), time limits on headers and writes, a check of line
//! ends, idle connections that make room for new ones, and a shutdown that cuts requests that do
//! not finish.

use crate::app::App;
use crate::audit::{AuditFile, Auditing};
use crate::config::Config;
use crate::error::Error;
use crate::http::address::Peer;
use crate::http::base;
use crate::http::connections::{Connections, OpenConnection};
use crate::http::stream::Timed;
use crate::lock::DataLock;
use crate::metrics as names;
use crate::pull_through::PullThrough;
use crate::routes;
use crate::storage::Opened;
use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pfr_store::Store;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Most bytes of a body read at once.
const READ_BYTES: usize = 128 << 10;
/// Most bytes of a request's headers.
const HEADER_BYTES: usize = 64 << 10;
/// Connections that may wait for room. More wait in the kernel's queue.
const MAX_WAITING: usize = 64;
/// How often a waiting connection looks for another one to close.
const RETRY: Duration = Duration::from_millis(50);
/// Pause after the system refused to accept, for example because no file handle is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often the metrics recorder aggregates its samples, scraped or not.
const UPKEEP: Duration = Duration::from_secs(5);

/// A registry that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: App,
    pull_through: Option<Arc<PullThrough>>,
    audit_file: Option<AuditFile>,
    config: Config,
    _lock: Option<DataLock>,
}

impl Server {
    /// Opens the store and listens, and keeps other registries from the data directory. Serves
    /// nothing before [`Self::run`].
    ///
    /// # Errors
    /// [`Error`] names the resource that is not available.
    pub async fn bind(config: Config) -> Result<Self, Error> {
        let lock = DataLock::take(&config)?;
        let opened = crate::storage::open_parts(&config).await?;
        opened.domains.default_store().begin_serving().await?;
        Self::bind_opened(opened, config, lock).await
    }

    /// The same over a store that is open already.
    ///
    /// # Errors
    /// [`Error`] names the resource that is not available.
    pub async fn bind_over(store: Store, config: Config) -> Result<Self, Error> {
        Self::bind_opened(Opened { domains: pfr_store::Domains::new(store, None), redirects: None }, config, None).await
    }

    async fn bind_opened(opened: Opened, config: Config, lock: Option<DataLock>) -> Result<Self, Error> {
        let metrics = names::recorder().map_err(Error::Metrics)?;
        let fail = |source| Error::Listen { address: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let pull_through = PullThrough::of(&config, opened.domains.default_store()).map_err(crate::mirror::Error::from)?;
        if config.require_tokens {
            warn_about_tokens(&opened.domains, address).await?;
        }
        let app = App::new(opened, metrics, routes::openapi(), &config);
        let audit_file = match config.audit_log.as_path() {
            path if path.as_os_str().is_empty() => None,
            path => {
                let fail = |source| Error::AuditFile { path: path.to_owned(), source };
                Some(AuditFile::open(path, app.domains.clone(), Arc::clone(&app.audit)).map_err(fail)?)
            }
        };
        Ok(Self { listener, address, app, pull_through, audit_file, config, _lock: lock })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// The store of its default domain.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.app.domains.default_domain().store
    }

    /// Serves until `shutdown` completes. Then it accepts no more connections, gives requests in
    /// flight the grace period to finish, and cuts the rest.
    ///
    /// # Errors
    /// None today: an error of a connection ends only that connection.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let (stop, stopping) = watch::channel(false);
        let slots = Arc::new(ConnectionSlots {
            permits: Arc::new(Semaphore::new(self.config.max_connections)),
            connections: Arc::default(),
            limit: Duration::from_secs(self.config.queue_seconds),
        });
        let waiting = Arc::new(Semaphore::new(MAX_WAITING));
        let mut connections = JoinSet::new();
        let mut upkeep = tokio::time::interval(UPKEEP);
        let mut shutdown = std::pin::pin!(shutdown);
        let (domains, recorder) = (self.app.domains.clone(), self.app.metrics.clone());
        let auditing = Auditing::begin(Arc::clone(&self.app.audit), domains.clone(), self.audit_file);
        let service = routes::service(self.app, self.pull_through);
        let served = domains.clone();
        let tasks = tokio::spawn(async move { served.run().await });
        let (data, database, storage) = (self.config.data.display(), &self.config.database, &self.config.storage);
        tracing::info!(address = %self.address, %data, %database, %storage, "serving");
        loop {
            let accepted = tokio::select! {
                () = &mut shutdown => break,
                _ = upkeep.tick() => {
                    recorder.run_upkeep();
                    continue;
                }
                Some(ended) = connections.join_next() => {
                    report(ended);
                    continue;
                }
                accepted = accept(&self.listener, &waiting) => accepted,
            };
            match accepted {
                Ok((stream, entering)) => {
                    let (service, config, slots) = (service.clone(), self.config.clone(), Arc::clone(&slots));
                    let stopping = stopping.clone();
                    connections.spawn(async move {
                        let Some(permit) = slots.enter().await else {
                            return tracing::warn!("connection refused: too many connections, and none of them is idle");
                        };
                        drop(entering);
                        connection(stream, service, config, slots.connections.open(), stopping).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.listener);
        let grace = Duration::from_secs(self.config.shutdown_grace);
        tracing::info!(connections = connections.len(), grace_seconds = self.config.shutdown_grace, "stopping");
        // An error means that there is no connection.
        let _ = stop.send(true);
        domains.stop();
        let finished = tokio::time::timeout(grace, async {
            while let Some(ended) = connections.join_next().await {
                report(ended);
            }
        });
        if finished.await.is_err() {
            tracing::warn!(connections = connections.len(), "shutdown: the grace period is over, requests in flight are cut");
            connections.shutdown().await;
        }
        // A stopped collection has only its row to write, and no connection that waits for it.
        let _ = tokio::time::timeout(grace, async {
            if let Err(error) = tasks.await {
                tracing::error!(%error, "background tasks failed");
            }
            domains.ended().await;
            auditing.end().await;
        })
        .await;
        tracing::info!("registry stopped");
        Ok(())
    }
}

/// Says at start what would be found out by refused requests only, or too late.
async fn warn_about_tokens(domains: &pfr_store::Domains, address: SocketAddr) -> Result<(), Error> {
    if domains.access_tokens().list(None, 1).await?.rows.is_empty() {
        tracing::warn!("tokens are required and there is none: `pf-registry token create` makes one");
    }
    if !address.ip().is_loopback() {
        tracing::warn!(%address, "tokens and snapshots cross the network in plain HTTP: put a proxy with TLS in front");
    }
    Ok(())
}

/// The open connections, and how many there may be.
struct ConnectionSlots {
    permits: Arc<Semaphore>,
    connections: Arc<Connections>,
    /// How long a new connection waits.
    limit: Duration,
}

impl ConnectionSlots {
    /// Admits a new connection. If there are too many, the connection that is needed least is
    /// closed.
    async fn enter(&self) -> Option<OwnedSemaphorePermit> {
        let permits = || Arc::clone(&self.permits);
        if let Ok(permit) = permits().try_acquire_owned() {
            return Some(permit);
        }
        let entering = permits().acquire_owned();
        let closing = async {
            loop {
                self.connections.make_room();
                tokio::time::sleep(RETRY).await;
            }
        };
        tokio::select! {
            biased;
            permit = entering => permit.ok(),
            never = closing => never,
            () = tokio::time::sleep(self.limit) => None,
        }
    }
}

async fn accept(listener: &TcpListener, waiting: &Arc<Semaphore>) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(waiting).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

async fn connection(stream: TcpStream, service: Router, config: Config, open: OpenConnection, mut stopping: watch::Receiver<bool>) {
    let _open = OpenGauge::new();
    let state = Arc::clone(&open.connection);
    let peer = stream.peer_addr().ok().map(|address| Peer(address.ip()));
    // Small answers must not wait for an acknowledgement of the client. Without this option they
    // do, which is only slower.
    let _ = stream.set_nodelay(true);
    let stream = Timed::new(stream, config.pace(), Arc::clone(&state));
    let service = TowerToHyperService::new(service);
    let requests = Arc::clone(&state);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        requests.request();
        base::take_off(&mut request);
        request.extensions_mut().insert(Arc::clone(&requests));
        if let Some(peer) = peer {
            request.extensions_mut().insert(peer);
        }
        service.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(config.header_seconds))
        .max_header_size(HEADER_BYTES)
        .max_buf_size(READ_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let stop = async {
        let _ = stopping.wait_for(|stop| *stop).await;
    };
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = state.closed() => return tracing::debug!("connection closed to make room for another"),
        () = stop => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // Requests have their own log line. This one is for debugging a network.
        tracing::debug!(%error, "connection ended");
    }
}

/// Counts an open connection.
struct OpenGauge;

impl OpenGauge {
    fn new() -> Self {
        metrics::gauge!(names::CONNECTIONS).increment(1.0);
        Self
    }
}

impl Drop for OpenGauge {
    fn drop(&mut self) {
        metrics::gauge!(names::CONNECTIONS).decrement(1.0);
    }
}

fn report(ended: Result<(), tokio::task::JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        tracing::error!(%error, "connection panicked");
    }
}
