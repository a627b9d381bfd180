//! `pf-registry serve`: serves a store over HTTP.

use super::Settings;
use super::tool::{print, runtime};
use crate::{Error, Server};
use clap::Args;
use futures::FutureExt as _;
use pfr_service::signals;
use serde::Serialize;
use std::time::Duration;

/// Arguments of `serve`.
#[derive(Args)]
pub(crate) struct Serve {
    /// Print the address as JSON when ready; an error is one JSON object on standard error.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// What is printed when it is ready.
#[derive(Serialize)]
struct Listening {
    url: String,
}

pub(super) fn run(args: Serve) -> Result<(), Error> {
    let config = args.settings.load()?;
    let runtime = runtime()?;
    let served = runtime.block_on(async {
        let server = Server::bind(config).await?;
        // Before the address is printed: a signal must not arrive before it is handled.
        let signal = signals::of_server().map_err(Error::Runtime)?;
        if let Some(reloader) = server.reloader() {
            let mut hangups = signals::hangups().map_err(Error::Runtime)?;
            pfr_service::task::spawn(async move {
                while hangups.recv().await.is_some() {
                    reloader.reload();
                }
            });
        }
        print(&Listening { url: server.url() }, args.json, |listening| format!("listening on {}\n", listening.url));
        server.run(signal.map(drop)).await
    });
    // Blocking work that outlived the grace period was not acknowledged; the store removes its
    // remains.
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
}
