//! What operators see: the log on standard error and the numbers at `/metrics`.

pub(crate) mod metrics;

use crate::config::LogFormat;
use tracing_subscriber::EnvFilter;

/// Starts the process's log.
///
/// # Errors
/// The reason, if the filter does not parse or a log was started before.
pub fn start_log(format: LogFormat, filter: &str) -> Result<(), String> {
    let filter = EnvFilter::try_new(filter).map_err(|e| e.to_string())?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => {
            use std::io::IsTerminal as _;
            builder.with_ansi(std::io::stderr().is_terminal()).try_init()
        }
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(|e| e.to_string())?;
    // A panic is a log line like any other, in the form that was asked for.
    std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panic")));
    Ok(())
}
