//! `pf-registry serve`: serves a store over HTTP.

use crate::config::Config;
use crate::{Error, Server};
use futures::FutureExt as _;
use pfr_service::signals;
use std::io::Write as _;
use std::time::Duration;

pub(super) fn run(config: Config) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)?;
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
        let mut stdout = std::io::stdout().lock();
        // A closed standard output is no reason not to serve.
        let _ = writeln!(stdout, "listening on {}", server.url()).and_then(|()| stdout.flush());
        drop(stdout);
        server.run(signal.map(drop)).await
    });
    // Blocking work that outlived the grace period was not acknowledged; the store removes its
    // remains.
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
}
