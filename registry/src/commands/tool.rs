//! Parts that the commands for a store share: open it, work, print a report.

use crate::{Config, Error, storage};
use clap::Args;
use pfr_client::text::printable;
use pfr_schema::DomainName;
use pfr_store::{Domains, Store};
use serde::Serialize;
use std::io::Write as _;

/// Names that one line of a report lists; `--json` has all.
pub(super) const NAMED: usize = 3;

/// In the data directory of a registry: its tables, unless they are in PostgreSQL, and its packs,
/// unless they are in a storage.
const TABLES: &str = "metadata.sqlite";
pub(super) const PACKS: &str = "packs";

/// Which store of a registry a tool works on.
#[derive(Args)]
pub(super) struct Which {
    /// The domain whose store is meant.
    #[arg(long, value_name = "NAME", default_value = DomainName::DEFAULT, help_heading = "Store")]
    pub(super) domain: DomainName,
}

/// Refuses a data directory without the file or folder that every store has there: a mistyped name
/// must not pass for a store that holds nothing.
fn there_is(config: &Config, missing: &str) -> Result<(), Error> {
    let data = &config.data;
    match data.join(missing).try_exists() {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::NoStore { data: data.clone(), missing: missing.to_owned(), has_packs: data.join(PACKS).is_dir() }),
        Err(error) => Err(Error::Store(pfr_store::Error::of_dir(data, &error))),
    }
}

/// Refuses a store whose packs would be in a directory that is not there: the one that `--storage`
/// names, or else `packs` in the data directory. Buckets pass: nothing makes one by mistake.
pub(super) fn there_are_packs(config: &Config, packs: &str) -> Result<(), Error> {
    if config.storage.is_empty() {
        return there_is(config, packs);
    }
    let Some(dir) = storage::directory(config) else { return Ok(()) };
    match dir.try_exists() {
        Ok(true) => Ok(()),
        Ok(false) => Err(Error::NoStorage(dir)),
        Err(error) => Err(Error::Store(pfr_store::Error::of_dir(&dir, &error))),
    }
}

/// Opens the default domain of a store that there is. Its tables are not lost.
pub(super) async fn open_existing(config: &Config) -> Result<Domains, Error> {
    if config.database.is_empty() {
        there_is(config, TABLES)?;
    }
    there_are_packs(config, PACKS)?;
    let domains = storage::open(config).await?;
    domains.default_store().names_are_known().await?;
    Ok(domains)
}

/// Opens the store of a domain that the settings name and runs `work` on it.
pub(super) fn on_store<T>(config: &Config, which: &Which, work: impl AsyncFnOnce(Store) -> Result<T, Error>) -> Result<T, Error> {
    runtime()?.block_on(async { work(open_existing(config).await?.open(&which.domain).await?).await })
}

/// Opens the catalogue of domains that the settings name and runs `work` on it.
pub(super) fn on_catalogue<T>(config: &Config, work: impl AsyncFnOnce(Domains) -> Result<T, Error>) -> Result<T, Error> {
    runtime()?.block_on(async { work(open_existing(config).await?).await })
}

/// Opens the domains that the settings name and runs `work` on them, whether or not there are
/// tables.
pub(super) fn on_packs<T>(config: &Config, work: impl AsyncFnOnce(Domains) -> Result<T, Error>) -> Result<T, Error> {
    runtime()?.block_on(async { work(storage::open(config).await?).await })
}

/// The threads of a command.
pub(super) fn runtime() -> Result<tokio::runtime::Runtime, Error> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Error::Runtime)
}

/// Prints a report: as JSON, or as text, in which labels of users hide nothing.
pub(super) fn print<T: Serialize>(report: &T, json: bool, text: impl FnOnce(&T) -> String) {
    let text = if json { json_line(report) } else { printable(&text(report)) };
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
