//! Progress bars on stderr, for what lasts more than a second on a terminal.

use super::output::{human, stderr_width};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use pfr_client::{OnRetry, Progress, Retrying};
use std::time::Duration;
use tokio::time::{Instant, interval};

/// An operation that takes less time gets no bar.
const SHOWN_AFTER: Duration = Duration::from_secs(1);
const REDRAW: Duration = Duration::from_millis(100);
/// The rate is averaged over about this long.
const AVERAGED: Duration = Duration::from_secs(3);
/// Narrower terminals show less.
const ROOMY: usize = 90;
/// Columns of a bar at most.
const WIDEST: usize = 60;
/// Spaces between the parts, and one behind them: a line that wraps could not be cleared.
const MARGIN: usize = 3;

/// What stderr shows of a registry that cannot be reached. A process has one terminal, and so one
/// notice.
static NOTICE: Mutex<Notice> = Mutex::new(Notice { text: None, bar: false, written: false, asked: false });

struct Notice {
    /// A bar shows this instead of the phase.
    text: Option<String>,
    /// Whether a bar is drawn: then nothing else may be written.
    bar: bool,
    /// Whether a line with the notice was written.
    written: bool,
    /// Whether a line said that the registry asks this caller to wait. It does so again and again
    /// in a transfer at its limit, so this is said once.
    asked: bool,
}

/// Reports that requests are retried: in the bar if one is drawn, otherwise in one line, and in
/// another when the registry answers again. To wait because of a limit on requests is no failure:
/// it gets one line.
pub fn on_retry(quiet: bool) -> OnRetry {
    OnRetry::new(move |retrying| {
        let mut notice = NOTICE.lock();
        match retrying {
            Some(Retrying { asked: Some(wait), error, .. }) => {
                let text = format!("the registry asks to wait {} s", wait.as_secs().max(1));
                if !quiet && !notice.bar && !std::mem::replace(&mut notice.asked, true) {
                    eprintln!("{text} ({})", human::printable(error));
                }
                notice.text = Some(text);
            }
            Some(retrying) => {
                let state = if retrying.answered { "busy or unavailable" } else { "not reachable" };
                let text = format!("registry {state}, retrying ({}) …", retrying.attempt);
                // A single failure is over before a user has read the line.
                if !quiet && !notice.bar && !notice.written && retrying.attempt > 1 {
                    eprintln!("{text} ({})", human::printable(&retrying.error));
                    notice.written = true;
                }
                notice.text = Some(text);
            }
            None => {
                if std::mem::take(&mut notice.written) && !notice.bar {
                    eprintln!("the registry answers again");
                }
                notice.text = None;
            }
        }
    })
}

/// How far an operation is. Bytes are raw bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The current step.
    pub phase: String,
    /// All bytes; 0 if not known yet.
    pub total: u64,
    /// Bytes moved or read.
    pub done: u64,
    /// Bytes that need not move.
    pub deduplicated: u64,
}

impl Status {
    /// An operation that counts no bytes.
    pub fn of_phase(phase: &str) -> Self {
        Self { phase: phase.into(), ..Self::default() }
    }

    /// The status of a push or pull.
    pub fn of(progress: &Progress) -> Self {
        Self {
            phase: progress.phase().to_string(),
            total: progress.bytes_total(),
            done: progress.bytes_done(),
            deduplicated: progress.bytes_deduplicated(),
        }
    }

    /// Bytes that are moved or need not move: at most all. Bytes that are moved again, because a
    /// stream was cut or the registry has lost them, do not count a second time.
    pub fn met(&self) -> u64 {
        let met = self.done.saturating_add(self.deduplicated);
        if self.total == 0 { met } else { met.min(self.total) }
    }

    /// The words beside the bar, at `rate` bytes a second.
    fn words(&self, rate: f64, width: usize) -> String {
        let met = self.met();
        let left = self.total.saturating_sub(met);
        let mut parts = Vec::new();
        if self.total > 0 {
            parts.push(format!("{} of {}", human::bytes(met), human::bytes(self.total)));
        }
        if rate >= 1.0 {
            parts.push(format!("{}/s", human::bytes(rate as u64)));
            if left > 0 {
                parts.push(format!("{} left", human::duration(Duration::from_secs_f64((left as f64 / rate).min(1e9)))));
            }
        }
        if self.deduplicated.saturating_mul(1000) > self.total && width >= ROOMY {
            parts.push(format!("{} deduplicated", human::bytes(self.deduplicated)));
        }
        parts.join(", ")
    }
}

/// Runs `work`, and draws a bar of `status` if stderr is a terminal and the work takes long
/// enough.
pub async fn watch<T>(quiet: bool, status: impl Fn() -> Status, work: impl Future<Output = T>) -> T {
    tokio::pin!(work);
    if quiet || stderr_width().is_none() {
        return work.await;
    }
    let start = Instant::now();
    let mut ticks = interval(REDRAW);
    let mut rate = Rate::new(start);
    let mut bar: Option<Bar> = None;
    loop {
        tokio::select! {
            result = &mut work => return result,
            now = ticks.tick() => {
                let mut status = status();
                let rate = rate.after(status.done, now);
                if start.elapsed() >= SHOWN_AFTER {
                    if let Some(text) = NOTICE.lock().text.clone() {
                        status.phase = text;
                    }
                    // The terminal may have been resized.
                    bar.get_or_insert_with(Bar::new).show(&status, rate, stderr_width().unwrap_or(ROOMY));
                }
            }
        }
    }
}

/// Bytes a second, the last seconds counting most.
struct Rate {
    seen: u64,
    at: Instant,
    average: f64,
}

impl Rate {
    fn new(start: Instant) -> Self {
        Self { seen: 0, at: start, average: 0.0 }
    }

    /// The rate once `done` bytes are done at `now`.
    fn after(&mut self, done: u64, now: Instant) -> f64 {
        let passed = now.duration_since(self.at).as_secs_f64();
        if passed > 0.0 {
            let current = done.saturating_sub(self.seen) as f64 / passed;
            let weight = if self.average == 0.0 { 1.0 } else { (passed / AVERAGED.as_secs_f64()).min(1.0) };
            self.average += (current - self.average) * weight;
            (self.seen, self.at) = (done, now);
        }
        self.average
    }
}

/// A drawn bar. It vanishes when it is dropped: on success, failure and Ctrl-C alike.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Self {
        NOTICE.lock().bar = true;
        Self(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10)))
    }

    fn show(&self, status: &Status, rate: f64, width: usize) {
        let words = status.words(rate, width);
        let phase = human::clip(&status.phase, width.saturating_sub(MARGIN + 1));
        let bar = width.saturating_sub(human::columns(&phase) + human::columns(&words) + MARGIN).min(WIDEST);
        let template = match (status.total, bar) {
            (0, _) => "{spinner:.cyan} {prefix} {msg}",
            (_, 0..4) => "{prefix} {msg}",
            _ => &format!("{{prefix}} {{bar:{bar}.cyan/dim}} {{msg}}"),
        };
        // A template that does not parse shows indicatif's own; these do.
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        self.0.set_style(style.progress_chars("━╸─"));
        self.0.set_length(status.total);
        self.0.set_position(status.met());
        self.0.set_prefix(phase);
        self.0.set_message(words);
        self.0.tick();
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        NOTICE.lock().bar = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_say_what_is_known_and_fit() {
        let status = Status { phase: "sending".into(), total: 100 << 20, done: 20 << 20, deduplicated: 30 << 20 };
        assert_eq!(status.words(10.0 * f64::from(1 << 20), 120), "50.0 MiB of 100 MiB, 10.0 MiB/s, 5.00 s left, 30.0 MiB deduplicated");
        assert!(status.words(1e6, 60).chars().count() < 48);
        assert_eq!(Status::default().words(0.0, 80), "");
        // An empty configuration is in every registry, and no news.
        let first = Status { deduplicated: 14, ..status.clone() };
        assert!(!first.words(1e6, 120).contains("deduplicated"), "{}", first.words(1e6, 120));
        let small = Status { total: 100, done: 0, ..first };
        assert!(small.words(0.0, 120).ends_with("14 B deduplicated"), "{}", small.words(0.0, 120));
    }

    #[test]
    fn no_more_than_all_is_done_although_some_is_moved_twice() {
        let status = Status { total: 100 << 20, done: 90 << 20, deduplicated: 30 << 20, ..Status::default() };
        assert_eq!((status.words(0.0, 60), status.met()), ("100 MiB of 100 MiB".to_owned(), status.total));
        assert_eq!(Status { total: 0, ..status }.met(), 120 << 20, "how much there is, is not known yet");
    }

    #[test]
    fn the_rate_follows_the_last_seconds() {
        let start = Instant::now();
        let mut rate = Rate::new(start);
        assert!((rate.after(1000, start + Duration::from_secs(1)) - 1000.0).abs() < 1.0);
        let steady = (2..=20).fold(0.0, |_, i| rate.after(1000 * i, start + Duration::from_secs(i)));
        assert!((steady - 1000.0).abs() < 1.0);
        let stalled = (21..=60).fold(0.0, |_, i| rate.after(20_000, start + Duration::from_secs(i)));
        assert!(stalled < 1.0, "{stalled}");
    }
}
