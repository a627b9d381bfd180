//! What operators see: the log on standard error and the numbers at `/metrics`.

pub(crate) mod metrics;

use crate::config::LogFormat;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Starts the process's log.
///
/// # Errors
/// The reason, if the filter does not parse or a log was started before.
pub fn start_log(format: LogFormat, filter: &str) -> Result<(), String> {
    let filter: Targets = filter.parse().map_err(|e: tracing_subscriber::filter::ParseError| e.to_string())?;
    let builder = tracing_subscriber::fmt().with_max_level(LevelFilter::TRACE).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => {
            use std::io::IsTerminal as _;
            builder.with_ansi(std::io::stderr().is_terminal()).finish().with(filter).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).finish().with(filter).try_init(),
    }
    .map_err(|e| e.to_string())?;
    // A panic is a log line like any other, in the form that was asked for.
    std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panic")));
    Ok(())
}
