//! The listener and its connections.
//!
//! hyper is driven by hand for features that `axum::serve` lacks: TLS, large read buffers (bodies
//! arrive in pieces of up to 128 KiB instead of 8), time limits on headers and writes, a check of
//! line ends, idle connections that make room for new ones, and a shutdown that cuts requests that
//! do not finish.

use crate::app::App;
use crate::audit::{AuditFile, Auditing};
use crate::config::Config;
use crate::error::Error;
use crate::http::address::Peer;
use crate::http::base;
use crate::http::connections::{Connections, NoPlace, Place, Places};
use crate::http::handshake::Handshakes;
use crate::http::request::is_exempt;
use crate::http::stream::{Lines, Timed, Transport};
use crate::http::tls::Tls;
use crate::jwt::Issuers;
use crate::lock::DataLock;
use crate::metrics as names;
use crate::pull_through::PullThrough;
use crate::reload::{Reload, Reloader};
use crate::routes;
use crate::storage::Opened;
use axum::Router;
use axum::http::HeaderValue;
use axum::http::header::CONNECTION;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use pfr_store::Store;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Most bytes of a body read at once.
const READ_BYTES: usize = 128 << 10;
/// Most bytes of a request's headers.
const HEADER_BYTES: usize = 64 << 10;
/// Connections that may wait for room. More wait in the kernel's queue.
const MAX_WAITING: usize = 64;
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
    tls: Option<Arc<Tls>>,
    issuers: Option<Arc<Issuers>>,
    reloader: Reloader,
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
        if !config.data.exists() {
            // A first start that cannot listen leaves no empty store behind. The address is taken
            // for good when the store is open: until then connections are refused, and do not wait.
            drop(listen(&config).await?);
        }
        let lock = DataLock::take(&config).await?;
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
        let tls = Tls::of(&config)?.map(Arc::new);
        let issuers = Issuers::of(&config)?.map(Arc::new);
        let listener = listen(&config).await?;
        let address = listener.local_addr().map_err(|source| Error::Listen { address: config.listen, source })?;
        let pull_through = PullThrough::of(&config, opened.domains.default_store()).map_err(crate::mirror::Error::from)?;
        if config.require_tokens {
            let is_plain = tls.is_none() && !config.behind_proxy && !address.ip().is_loopback();
            warn_about_tokens(&opened.domains, issuers.is_some(), is_plain.then_some(address)).await?;
        }
        let app = App::new(opened, metrics, issuers.clone(), &config);
        let audit_file = match config.audit_log.as_path() {
            path if path.as_os_str().is_empty() => None,
            path => {
                let fail = |source| Error::AuditFile { path: path.to_owned(), source };
                Some(AuditFile::open(path, app.domains.clone(), Arc::clone(&app.audit)).map_err(fail)?)
            }
        };
        let reloader = Reloader::default();
        Ok(Self { listener, address, app, pull_through, audit_file, tls, issuers, reloader, config, _lock: lock })
    }

    /// The address that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Its base URL, with the address that it listens on.
    #[must_use]
    pub fn url(&self) -> String {
        format!("{}://{}", if self.tls.is_some() { "https" } else { "http" }, self.address)
    }

    /// What has its certificate, token issuers and keys read again, and its audit file opened
    /// again; none if it has none of these.
    #[must_use]
    pub fn reloader(&self) -> Option<Reloader> {
        let has_files = self.tls.is_some() || self.issuers.is_some() || self.audit_file.is_some();
        has_files.then(|| self.reloader.clone())
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
        let reloading = self.reloader().map(|reloader| {
            let tls = self.tls.clone().map(|tls| tls as Arc<dyn Reload>);
            let issuers = self.issuers.clone().map(|issuers| issuers as Arc<dyn Reload>);
            let audit_file = self.audit_file.as_ref().map(|_| Arc::clone(&self.app.audit) as Arc<dyn Reload>);
            pfr_service::task::spawn(reloader.run(tls.into_iter().chain(issuers).chain(audit_file).collect()))
        });
        let waiting = Arc::new(Semaphore::new(MAX_WAITING));
        let mut connections = JoinSet::new();
        let mut upkeep = tokio::time::interval(UPKEEP);
        let mut shutdown = std::pin::pin!(shutdown);
        let (domains, recorder) = (self.app.domains.clone(), self.app.metrics.clone());
        let auditing = Auditing::begin(Arc::clone(&self.app.audit), domains.clone(), self.audit_file);
        let queue = Duration::from_secs(self.config.queue_seconds);
        let handshake_limit = Duration::from_secs(self.config.tls_handshake_seconds);
        let serving = Arc::new(Serving {
            service: routes::service(self.app, self.pull_through),
            places: Arc::new(Places::new(self.config.max_connections, queue)),
            handshakes: self.tls.map(|tls| Handshakes::new(tls, handshake_limit, queue, self.config.pace())),
            config: self.config.clone(),
        });
        let served = domains.clone();
        let tasks = pfr_service::task::spawn(async move { served.run().await });
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
                    let (serving, stopping) = (Arc::clone(&serving), stopping.clone());
                    pfr_service::task::spawn_in(&mut connections, async move { serving.connection(stream, entering, stopping).await });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(self.listener);
        if let Some(reloading) = reloading {
            reloading.abort();
        }
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

async fn listen(config: &Config) -> Result<TcpListener, Error> {
    TcpListener::bind(config.listen).await.map_err(|source| Error::Listen { address: config.listen, source })
}

/// Says at start what would be found out by refused requests only, or too late.
async fn warn_about_tokens(domains: &pfr_store::Domains, has_issuers: bool, plain: Option<SocketAddr>) -> Result<(), Error> {
    if !has_issuers && domains.access_tokens().list(None, 1).await?.rows.is_empty() {
        tracing::warn!("tokens are required and there is none: `pf-registry token create` makes one");
    }
    if let Some(address) = plain {
        tracing::warn!(%address, "tokens and snapshots cross the network in plain HTTP: give --tls-cert and --tls-key");
    }
    Ok(())
}

async fn accept(listener: &TcpListener, waiting: &Arc<Semaphore>) -> std::io::Result<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(waiting).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

/// What all connections share.
struct Serving {
    service: Router,
    places: Arc<Places>,
    /// None: plain HTTP.
    handshakes: Option<Handshakes>,
    config: Config,
}

impl Serving {
    /// Serves a connection from its beginning to its end.
    async fn connection(&self, stream: TcpStream, entering: OwnedSemaphorePermit, mut stopping: watch::Receiver<bool>) {
        // Small answers must not wait for an acknowledgement of the client. Without this option
        // they do, which is only slower.
        let _ = stream.set_nodelay(true);
        let peer = stream.peer_addr().ok().map(|address| Peer(address.ip()));
        let admitted = tokio::select! {
            biased;
            admitted = self.admit(stream, entering) => admitted,
            // Nothing has been asked yet.
            _ = stopping.wait_for(|stop| *stop) => None,
        };
        if let Some((transport, place)) = admitted {
            self.requests(transport, peer, place, stopping).await;
        }
    }

    /// Finds a place for a connection, after its handshake if there is TLS.
    async fn admit(&self, stream: TcpStream, entering: OwnedSemaphorePermit) -> Option<(Transport, Place)> {
        if let Some(handshakes) = &self.handshakes {
            return handshakes.take(stream, entering, &self.places).await;
        }
        let place = self.places.enter(Connections::open).await?;
        drop(entering);
        let stream = Timed::new(stream, self.config.pace(), Arc::clone(place.connection()));
        Some((Transport::Plain(stream), place))
    }

    async fn requests(&self, transport: Transport, peer: Option<Peer>, place: Place, mut stopping: watch::Receiver<bool>) {
        let _open = OpenGauge::new();
        let state = Arc::clone(place.connection());
        let stream = Lines::new(transport, Arc::clone(&state));
        let service = TowerToHyperService::new(self.service.clone());
        let requests = Arc::clone(&state);
        // One request after another takes it.
        let (places, place) = (Arc::clone(&self.places), Arc::new(Mutex::new(place)));
        let stops = stopping.clone();
        let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
            requests.request();
            base::take_off(&mut request);
            request.extensions_mut().insert(Arc::clone(&requests));
            if let Some(peer) = peer {
                request.extensions_mut().insert(peer);
            }
            let (service, places, place, mut stops) = (service.clone(), Arc::clone(&places), Arc::clone(&place), stops.clone());
            async move {
                let mut place = place.lock().await;
                if !is_exempt(request.uri().path()) {
                    let admitted = tokio::select! {
                        biased;
                        admitted = places.admit(&mut place) => admitted,
                        // What has waited until now is not begun any more.
                        _ = stops.wait_for(|stop| *stop) => false,
                    };
                    if !admitted {
                        request.extensions_mut().insert(NoPlace);
                    }
                }
                let mut answer = service.call(request).await?;
                if place.is_reserve() {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                Ok::<_, Infallible>(answer)
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs(self.config.header_seconds))
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
