//! The log on standard error.

use clap::ValueEnum;
use serde::Deserialize;
use std::io::IsTerminal as _;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object for each line.
    Json,
}

/// Starts the log of this process. A panic becomes a log line, too.
///
/// # Errors
/// The reason, if the filter does not parse or a log was started before.
pub fn start(format: LogFormat, filter: &str) -> Result<(), String> {
    subscribe(format, filter)?;
    std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panic")));
    Ok(())
}

/// Starts the log, and leaves panics to the program.
///
/// # Errors
/// The reason, if the filter does not parse or a log was started before.
pub fn subscribe(format: LogFormat, filter: &str) -> Result<(), String> {
    let filter: Targets = filter.parse().map_err(|e: tracing_subscriber::filter::ParseError| e.to_string())?;
    let builder = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).finish().with(filter).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).finish().with(filter).try_init(),
    }
    .map_err(|e| e.to_string())
}
