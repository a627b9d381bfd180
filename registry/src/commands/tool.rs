//! Parts that the commands for a store share: open it, work, print a report.

use crate::{Config, Error, storage};
use clap::Args;
use pfr_schema::DomainName;
use pfr_store::{Domains, Store};
use serde::Serialize;
use std::io::Write as _;

/// Which store of a registry a tool works on.
#[derive(Args)]
pub(super) struct Which {
    /// The domain whose store is meant.
    #[arg(long, value_name = "NAME", default_value = DomainName::DEFAULT, help_heading = "Store")]
    pub(super) domain: DomainName,
}

/// Opens the store of a domain that the settings name and runs `work` on it.
pub(super) fn on_store<T>(config: &Config, which: &Which, work: impl AsyncFnOnce(Store) -> Result<T, Error>) -> Result<T, Error> {
    on_domains(config, async |domains| work(domains.open(&which.domain).await?).await)
}

/// Opens the domains that the settings name and runs `work` on them.
pub(super) fn on_domains<T>(config: &Config, work: impl AsyncFnOnce(Domains) -> Result<T, Error>) -> Result<T, Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)?;
    runtime.block_on(async { work(storage::open(config).await?).await })
}

/// Prints a report: as JSON, or as text.
pub(super) fn print<T: Serialize>(report: &T, json: bool, text: impl FnOnce(&T) -> String) {
    let text = if json { json_line(report) } else { text(report) };
    let mut stdout = std::io::stdout().lock();
    // A closed standard output does not make the command fail.
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

/// A report as `--json` gives it.
pub(super) fn json_line<T: Serialize>(report: &T) -> String {
    pfr_client::json::document(report).map(|document| document.to_string()).unwrap_or_default() + "\n"
}

/// One line for each.
pub(super) fn lines(heading: &str, items: &[String]) -> String {
    items.iter().map(|item| format!("{heading}  {item}\n")).collect()
}
