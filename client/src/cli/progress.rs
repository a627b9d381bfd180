//! Progress bars on stderr, for what lasts more than a second on a terminal.

use super::output::human;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use pfr_client::Progress;
use std::io::IsTerminal as _;
use std::time::Duration;
use tokio::time::{Instant, interval};

/// What takes less is not worth a bar.
const PATIENCE: Duration = Duration::from_secs(1);
const REDRAW: Duration = Duration::from_millis(100);

/// Where an operation stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What it is doing.
    pub phase: String,
    /// Bytes in all, if known yet.
    pub total: u64,
    /// Bytes moved or read.
    pub done: u64,
    /// Bytes that need not move.
    pub deduplicated: u64,
}

impl Standing {
    /// Of a push or pull.
    pub fn of(progress: &Progress) -> Self {
        Self {
            phase: progress.phase().to_string(),
            total: progress.bytes_total(),
            done: progress.bytes_done(),
            deduplicated: progress.bytes_deduplicated(),
        }
    }
}

/// Runs `work` and draws a bar of `standing` beside it, if anybody sees it and it takes long enough.
pub async fn watch<T>(quiet: bool, standing: impl Fn() -> Standing, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    if quiet || !std::io::stderr().is_terminal() {
        return work.await;
    }
    let start = Instant::now();
    let mut ticks = interval(REDRAW);
    let mut bar: Option<Bar> = None;
    loop {
        tokio::select! {
            result = &mut work => return result,
            _ = ticks.tick() => {
                if start.elapsed() >= PATIENCE {
                    bar.get_or_insert_with(|| Bar::new(start)).show(&standing());
                }
            }
        }
    }
}

/// A drawn bar. It vanishes when it is dropped: on success, failure and Ctrl-C alike.
struct Bar(ProgressBar);

impl Bar {
    fn new(start: Instant) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        Self(bar.with_elapsed(start.elapsed()))
    }

    fn show(&self, standing: &Standing) {
        let bar = &self.0;
        bar.set_style(style(standing.total > 0));
        bar.set_length(standing.total);
        bar.set_position(standing.done + standing.deduplicated);
        bar.set_prefix(standing.phase.clone());
        bar.set_message(match standing.deduplicated {
            0 => String::new(),
            n => format!("{} deduplicated", human::bytes(n)),
        });
        bar.tick();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn style(total_known: bool) -> ProgressStyle {
    let template = if total_known {
        "{prefix:.bold} {wide_bar:.cyan/dim} {position}/{length} {rate} {left} {msg:.dim}"
    } else {
        "{prefix:.bold} {spinner} {position} {rate}"
    };
    // The templates are constants; one that does not parse shows indicatif's own.
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸─")
        .with_key("position", |s: &ProgressState, w: &mut dyn std::fmt::Write| write(w, &human::bytes(s.pos())))
        .with_key("length", |s: &ProgressState, w: &mut dyn std::fmt::Write| write(w, &human::bytes(s.len().unwrap_or(0))))
        .with_key("rate", |s: &ProgressState, w: &mut dyn std::fmt::Write| write(w, &format!("{}/s", human::bytes(s.per_sec() as u64))))
        .with_key("left", |s: &ProgressState, w: &mut dyn std::fmt::Write| write(w, &format!("{} left", human::duration(s.eta()))))
}

fn write(target: &mut dyn std::fmt::Write, text: &str) {
    // Writing to the bar's own string does not fail.
    let _ = target.write_str(text);
}
