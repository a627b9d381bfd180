//! Traces: spans of this process, exported over OTLP/HTTP to a collector that the environment or
//! the settings name. Without one nothing is installed, and no span is made.
//!
//! ```text
//! span ends ─▶ queue (a full one drops the span, and counts it) ─▶ a thread of its own ─▶ batch ─▶ POST /v1/traces
//! ```
//!
//! Nothing waits for the collector but the end of the program, and that for a bounded time. The
//! thread has a runtime of its own: a program that ends its runtime still sends its last spans.

mod collector;
mod context;
mod queue;
mod settings;

pub use context::{adopt, inject};
pub use settings::{TraceError, TraceSettings};

use crate::log::Only;
use collector::Collector;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use queue::{Entrance, Queue};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::{Layer, Registry};

/// How long a command waits at its end for the collector to take the last spans.
pub const COMMAND_END: Duration = Duration::from_secs(1);
/// The same of a server.
pub const SERVER_END: Duration = Duration::from_secs(3);

/// The export of this process: a process has one log, and so one export.
static RUNNING: OnceLock<Running> = OnceLock::new();

struct Running {
    queue: Arc<Queue>,
    /// The spans' tracers work as long as it lives.
    _provider: SdkTracerProvider,
}

/// Spans on their way to a collector; [`crate::log`] installs it.
#[derive(Debug)]
pub struct Traces {
    tracer: SdkTracer,
    filter: Targets,
}

impl Traces {
    /// The part of the subscriber that sees spans.
    pub(crate) fn layer(self) -> Box<dyn Layer<Registry> + Send + Sync> {
        let layer = tracing_opentelemetry::layer::<Registry>()
            .with_tracer(self.tracer)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_context_activation(false);
        layer.with_filter(Only::spans(self.filter)).boxed()
    }
}

/// What came of the settings.
#[derive(Debug, Default)]
pub struct Opened {
    /// Spans, if a collector is named.
    pub traces: Option<Traces>,
    /// Which standard variable is wrong, so that no spans are exported: the program says it once.
    pub refused: Option<TraceError>,
}

/// Begins the export of spans of `program`, if a collector is named. Nothing is sent yet. The
/// standard variables may be meant for other programs, and ask for what is not spoken here: then
/// nothing is exported, and the program goes on.
///
/// # Errors
/// [`TraceError`] names the setting of ours, and says what was expected. It never quotes a value:
/// that may hold a password. A process that exports spans already.
pub fn open(program: &'static str, given: &TraceSettings) -> Result<Opened, TraceError> {
    match export(program, given) {
        Ok(traces) => Ok(Opened { traces, refused: None }),
        Err(error) if error.is_standard() => Ok(Opened { traces: None, refused: Some(error) }),
        Err(error) => Err(error),
    }
}

fn export(program: &'static str, given: &TraceSettings) -> Result<Option<Traces>, TraceError> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let Some(settings) = settings::read(program, given, &variable)? else { return Ok(None) };
    let resource = settings.resource();
    let collector = Collector::new(&settings, &resource)?;
    let queue = Arc::new(Queue::default());
    let provider = SdkTracerProvider::builder()
        .with_resource(resource)
        .with_sampler(settings.sampler)
        .with_span_processor(Entrance(Arc::clone(&queue)))
        .build();
    let tracer = provider.tracer("pf");
    let running = Running { queue: Arc::clone(&queue), _provider: provider };
    if RUNNING.set(running).is_err() {
        return Err(TraceError::new("traces", "this process exports spans already"));
    }
    let started = std::thread::Builder::new().name("traces".into()).spawn(move || collector.run(&queue));
    started.map_err(|error| TraceError::new("traces", format!("no thread for them: {error}")))?;
    Ok(Some(Traces { tracer, filter: settings.filter }))
}

/// Spans that ended and never reached the collector, since the start of the process.
#[must_use]
pub fn dropped() -> u64 {
    RUNNING.get().map_or(0, |running| running.queue.dropped())
}

/// Sends the spans that have ended, and waits for that at most `limit`: the end of a program.
pub fn finish(limit: Duration) {
    let Some(running) = RUNNING.get() else { return };
    let left = running.queue.close(limit);
    if left > 0 {
        tracing::warn!(spans = left, "traces: the collector did not take the last spans in time");
    }
}
