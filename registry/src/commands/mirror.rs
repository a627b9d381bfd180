//! `pf-registry mirror`: copies snapshots and tags between registries.

use super::Settings;
use super::tool::{json_line, open_existing};
use crate::Config;
use crate::mirror::{Error, Options, Report, check, mirror};
use crate::storage;
use clap::Args;
use pfr_client::{Remote, RemoteOptions, Site};
use pfr_service::{Secret, signals};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Args)]
pub(crate) struct Mirror {
    #[command(flatten)]
    settings: Settings,
    /// Registry to copy from; without it, this store. PF_REGISTRY_FROM_TOKEN is its token.
    #[arg(long, value_name = "URL", required_unless_present = "to")]
    from: Option<String>,
    /// Registry to copy to; without it, this store. PF_REGISTRY_TO_TOKEN is its token.
    #[arg(long, value_name = "URL")]
    to: Option<String>,
    /// Repositories to copy, all if none is named; `*` stands for anything, as in `team/*`.
    #[arg(long, value_name = "PATTERN", num_args = 1..)]
    repository: Vec<String>,
    /// Do it again this many seconds after each pass, until a signal.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    interval: Option<u64>,
    /// Do it once (the default).
    #[arg(long, conflicts_with = "interval")]
    once: bool,
    /// Delete at the target what the source does not have, and take the source's tags even where
    /// the target's diverged.
    #[arg(long)]
    delete: bool,
    /// Print reports as JSON, one a line.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(mut arguments: Mirror) -> Result<(), crate::Error> {
    if arguments.from.is_some() && arguments.to.is_some() {
        // Neither site is a store, so the data directory is not used.
        arguments.settings.overrides.data.get_or_insert_with(|| PathBuf::from("."));
    }
    let Mirror { settings, from, to, repository, interval, delete, json, .. } = arguments;
    let config = settings.load()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(crate::Error::Runtime)?;
    runtime.block_on(async {
        let domains = match (&from, &to) {
            (None, _) => Some(open_existing(&config).await?),
            (Some(_), None) => Some(storage::open(&config).await?),
            (Some(_), Some(_)) => None,
        };
        let store = domains.map(|domains| domains.default_store().clone());
        let source = site(from, "PF_REGISTRY_FROM_TOKEN", &config, store.as_ref())?;
        let destination = site(to, "PF_REGISTRY_TO_TOKEN", &config, store.as_ref())?;
        // Before a report: nothing was done.
        check(&source, &destination)?;
        let options = Options { repositories: repository, delete };
        let mut stop = std::pin::pin!(signals::of_server().map_err(crate::Error::Runtime)?);
        loop {
            let (mut report, start) = (Report::default(), Instant::now());
            let result = tokio::select! {
                result = mirror(&source, &destination, &options, &mut report) => Ok(result),
                signal = &mut stop => Err(signal),
            };
            report.seconds = start.elapsed().as_secs_f64();
            tell(&report, json);
            let result = match (result, interval) {
                (Ok(result), _) => result.and(report.incomplete().map_or(Ok(()), Err)),
                // Snapshots that arrived are not copied again. A mirror with an interval runs until
                // a signal, so a signal is its normal end.
                (Err(_), Some(_)) => return Ok(()),
                (Err(signal), None) => {
                    let what = "not everything was copied; run the same command again, it goes on";
                    return Err(crate::Error::Interrupted { what, exit: signal.exit_code() });
                }
            };
            let Some(seconds) = interval else { return Ok(result?) };
            if let Err(error) = result {
                tracing::warn!(%error, "mirror: pass not complete, the next one continues");
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(seconds)) => {}
                _ = &mut stop => return Ok(()),
            }
        }
    })
}

fn site(url: Option<String>, token: &str, config: &Config, store: Option<&pfr_store::Store>) -> Result<Site, Error> {
    match (url, store) {
        (Some(url), _) => {
            let token = Secret::from_env(token);
            let (token_over_http, extra_roots) = (config.token_over_http, config.extra_roots());
            let options = RemoteOptions { token, token_over_http, extra_roots, ..RemoteOptions::default() };
            Ok(Site::Registry(Remote::new(&url, options)?))
        }
        (None, Some(store)) => Ok(Site::Store(store.clone())),
        (None, None) => Err(Error::Sites("give --from or --to")),
    }
}

fn tell(report: &Report, json: bool) {
    let text = match json {
        true => json_line(report),
        false => format!("{report}\n"),
    };
    // The reader of a closed standard output has read enough.
    let _ = write!(std::io::stdout(), "{text}");
}
