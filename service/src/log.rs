//! The log on standard error, and what else sees the spans and events of a process.

use crate::traces::Traces;
use clap::ValueEnum;
use serde::Deserialize;
use std::io::IsTerminal as _;
use tracing::Metadata;
use tracing::subscriber::Interest;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::{Context, Filter, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer, Registry};

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

/// Starts the log of this process, and the export of its spans if there is one. A panic becomes a
/// log line, too.
///
/// # Errors
/// The reason, if the filter does not parse or a log was started before.
pub fn start(format: LogFormat, filter: &str, traces: Option<Traces>) -> Result<(), String> {
    subscribe(Some((format, filter)), traces)?;
    std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "panic")));
    Ok(())
}

/// Starts the log, if there is to be one, and the export of spans, and leaves panics to the
/// program.
///
/// # Errors
/// The reason, if the filter does not parse or a log was started before.
pub fn subscribe(log: Option<(LogFormat, &str)>, traces: Option<Traces>) -> Result<(), String> {
    let log = log.map(|(format, filter)| layer(format, filter)).transpose()?;
    let layers: Vec<_> = log.into_iter().chain(traces.map(Traces::layer)).collect();
    if layers.is_empty() {
        return Ok(());
    }
    tracing_subscriber::registry().with(layers).try_init().map_err(|e| e.to_string())
}

fn layer(format: LogFormat, filter: &str) -> Result<Box<dyn Layer<Registry> + Send + Sync>, String> {
    let filter: Targets = filter.parse().map_err(|e: tracing_subscriber::filter::ParseError| e.to_string())?;
    let events = Only::events(filter);
    let layer = tracing_subscriber::fmt::layer::<Registry>().with_writer(std::io::stderr);
    Ok(match format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).with_filter(events).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).with_filter(events).boxed(),
    })
}

/// Lets either spans or events of some modules and levels pass: spans are for traces, events for
/// the log. Without an export no span is made at all.
#[derive(Debug)]
pub(crate) struct Only {
    are_spans: bool,
    of: Targets,
}

impl Only {
    fn events(of: Targets) -> Self {
        Self { are_spans: false, of }
    }

    pub(crate) fn spans(of: Targets) -> Self {
        Self { are_spans: true, of }
    }
}

impl<S> Filter<S> for Only {
    fn enabled(&self, metadata: &Metadata<'_>, context: &Context<'_, S>) -> bool {
        metadata.is_span() == self.are_spans && Filter::<S>::enabled(&self.of, metadata, context)
    }

    fn callsite_enabled(&self, metadata: &'static Metadata<'static>) -> Interest {
        if metadata.is_span() == self.are_spans { Filter::<S>::callsite_enabled(&self.of, metadata) } else { Interest::never() }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Filter::<S>::max_level_hint(&self.of)
    }
}
