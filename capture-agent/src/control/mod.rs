//! The control interface: HTTP with JSON over a Unix socket that only this user can open.
//! `docs/capture.md` lists the paths.

mod body;
mod handlers;
mod observe;

use crate::error::{Error, Result};
use crate::{Agent, socket};
use axum::Router;
use axum::routing::{get, post};
use metrics_exporter_prometheus::PrometheusHandle;
use pfr_schema::ErrorCode;
use pfr_service::problem::ApiError;
use std::net::SocketAddr;
use tokio::net::{TcpListener, UnixListener};

/// The control interface, listening. Nothing is answered before [`Control::run`].
#[derive(Debug)]
pub struct Control {
    listener: UnixListener,
    unlink: socket::Unlink,
    agent: Agent,
}

impl Control {
    /// Listens on the configuration's socket.
    ///
    /// # Errors
    /// [`Error::Io`]; also if another agent listens there.
    pub fn bind(agent: Agent) -> Result<Self> {
        let (listener, unlink) = socket::bind(&agent.config().socket)?;
        Ok(Self { listener, unlink, agent })
    }

    /// Serves until `stop` completes. Then it accepts no more connections, and returns when all
    /// open requests are answered.
    ///
    /// # Errors
    /// [`Error::Io`] of the listener.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let served = axum::serve(self.listener, router(self.agent)?).with_graceful_shutdown(stop);
        let served = served.await.map_err(Error::io("control socket"));
        drop(self.unlink);
        served
    }
}

fn router(agent: Agent) -> Result<Router> {
    let recorder = crate::metrics::recorder().map_err(Error::Internal)?;
    Ok(Router::new()
        .route("/v1/engines", get(handlers::engines))
        .route("/v1/engines/{engine}", get(handlers::engine))
        .route("/v1/engines/{engine}/snapshots", post(handlers::snapshot))
        .route("/v1/engines/{engine}/restores", get(handlers::restores).post(handlers::restore))
        .route("/v1/restores", get(handlers::all_restores))
        .route("/v1/engines/{engine}/checks", post(handlers::check))
        .route("/v1/engines/{engine}/sequences", get(handlers::sequences))
        .route("/v1/saves/{ticket}", get(handlers::save))
        .route("/v1/pushes", get(handlers::pushes))
        .route("/v1/jobs", get(handlers::jobs).post(handlers::begin))
        .route("/v1/jobs/{id}", get(handlers::job).delete(handlers::cancel))
        .route("/v1/drain", post(handlers::drain))
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(handlers::ready))
        .merge(metrics_router(recorder))
        .fallback(async || ApiError::new(ErrorCode::NotFound, "no such page; see docs/capture.md for those there are"))
        .layer(axum::middleware::from_fn(body::middleware))
        .layer(axum::middleware::from_fn(observe::middleware))
        .with_state(agent))
}

fn metrics_router<S: Clone + Send + Sync + 'static>(recorder: PrometheusHandle) -> Router<S> {
    let metrics = async move || {
        metrics::counter!(crate::metrics::TRACES_DROPPED).absolute(pfr_service::traces::dropped());
        ([("content-type", "text/plain; version=0.0.4")], recorder.render())
    };
    Router::new().route("/metrics", get(metrics))
}

/// Answers `/metrics` on a loopback address until the future is dropped.
///
/// # Errors
/// [`Error::Io`].
pub async fn serve_metrics(address: SocketAddr) -> Result<()> {
    let what = format!("metrics on {address}");
    let recorder = crate::metrics::recorder().map_err(Error::Internal)?;
    let listener = TcpListener::bind(address).await.map_err(Error::io(what.clone()))?;
    axum::serve(listener, metrics_router::<()>(recorder)).await.map_err(Error::io(what))
}
