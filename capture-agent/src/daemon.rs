//! The daemon: serves both sockets until a signal, then finishes open requests and saves within a
//! grace period, resumes engines, and ends their connections when nothing writes into their memory.

use crate::control::{Control, serve_metrics};
use crate::error::{Error, Result};
use crate::{Agent, Config, report};
use pfr_service::signals;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::task::Poll;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How often the recorder folds up what it has collected.
const UPKEEP: Duration = Duration::from_secs(5);
/// Time for guards to resume engines after open requests were cancelled.
const RESUME_GRACE: Duration = Duration::from_secs(2);
/// Time for copies in flight. One is 64 MiB, or one larger page: longer means a device that hangs.
const SETTLE: Duration = Duration::from_secs(10);

/// Opens the agent and serves until SIGTERM or SIGINT; a second signal ends the process at once.
/// `listening` is called when both sockets are there.
///
/// # Errors
/// [`Error::Io`], [`Error::Store`], [`Error::Invalid`] if another agent has the data folder.
/// [`Error::Unsettled`]: end the process at once, and nothing before it.
pub async fn serve(config: Config, listening: impl FnOnce(&Config)) -> Result<()> {
    // Install signal handlers before reporting readiness.
    let stop = signals::of_server().map_err(Error::io("signals"))?;
    let recorder = crate::metrics::recorder().map_err(Error::Internal)?;
    let agent = Agent::open(config.clone()).await?;
    let control = Control::bind(agent.clone())?;

    let mut engines = JoinSet::new();
    let (serving, socket) = (agent.clone(), config.engine_socket.clone());
    let mut serve = Box::pin(async move { serving.engines().serve(serving.clone(), &socket).await });
    // It listens after the first poll: report readiness only then.
    match futures::poll!(&mut serve) {
        Poll::Ready(ended) => return Err(unasked(Ok(ended))),
        Poll::Pending => drop(pfr_service::task::spawn_in(&mut engines, serve)),
    }
    if let Some(address) = config.metrics_listen {
        pfr_service::task::spawn_in(&mut engines, serve_metrics(address));
    }
    // It ends when this function does. Its failure is in the log, and stops nothing.
    let mut reports = JoinSet::new();
    pfr_service::task::spawn_in(&mut reports, report::run(agent.clone()));
    let (stopping, mut stopped) = watch::channel(false);
    let mut controls = JoinSet::new();
    pfr_service::task::spawn_in(&mut controls, control.run(async move { drop(stopped.wait_for(|stop| *stop).await) }));

    listening(&config);
    tell_manager("READY=1");
    let mut upkeep = tokio::time::interval(UPKEEP);
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            _ = &mut stop => break,
            _ = upkeep.tick() => recorder.run_upkeep(),
            Some(ended) = engines.join_next() => return Err(unasked(ended)),
            Some(ended) = controls.join_next() => return Err(unasked(ended)),
        }
    }
    tell_manager("STOPPING=1");
    // No other report may follow the last one below.
    reports.shutdown().await;
    stopping.send_replace(true);
    // Saves that begin from now on are not waited for: an engine may ask for one after each turn.
    let saves = agent.saves().under_way();
    let finished = async {
        drop(controls.join_next().await);
        agent.saves().wait(&saves).await;
    };
    if tokio::time::timeout(config.shutdown_grace, finished).await.is_err() {
        let saves = agent.saves().left(&saves);
        tracing::warn!(saves, "grace period over, cancelling open requests and saves");
        controls.shutdown().await;
        tokio::time::sleep(RESUME_GRACE).await;
    }
    // They are listed as interrupted at the next start.
    agent.jobs().stop().await;
    if !agent.engines().settle(SETTLE).await {
        std::mem::forget(engines);
        return Err(Error::Unsettled { seconds: SETTLE.as_secs() });
    }
    let last = report::last(&agent);
    // Connections end with their sessions. An engine whose connection ended is not paused, and
    // takes back its blocks.
    engines.shutdown().await;
    report::stopped(&agent, last).await;
    tracing::info!("agent stopped");
    Ok(())
}

fn unasked(ended: std::result::Result<Result<()>, tokio::task::JoinError>) -> Error {
    match ended {
        Ok(Ok(())) => Error::Internal("a listener ended".into()),
        Ok(Err(error)) => error,
        Err(panic) => Error::Internal(format!("a listener: {panic}")),
    }
}

/// One datagram to the service manager, if there is one.
fn tell_manager(state: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) else { return };
    let address = match path.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&path),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, state, "cannot notify the service manager");
    }
}
