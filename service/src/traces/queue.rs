//! Spans that have ended and wait for the collector. Nothing that makes spans ever waits here.

use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanProcessor};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Spans that wait at most: about 4 MiB.
const MOST: usize = 4096;
/// Spans of one request to the collector at most.
const BATCH: usize = 512;
/// How long the first span of a smaller batch waits for others.
const DELAY: Duration = Duration::from_secs(1);

/// The queue between spans and the thread that sends them.
#[derive(Debug, Default)]
pub(super) struct Queue {
    inner: Mutex<Inner>,
    /// There is a first span, or a batch, or the end.
    changed: Condvar,
    ended: Condvar,
    dropped: AtomicU64,
}

#[derive(Debug, Default)]
struct Inner {
    spans: VecDeque<SpanData>,
    /// Spans that the thread is sending.
    sending: usize,
    /// The program ends.
    is_closing: bool,
    /// The thread has sent what it could.
    is_ended: bool,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, span: SpanData) {
        let mut inner = self.lock();
        if inner.spans.len() >= MOST || inner.is_ended {
            drop(inner);
            self.lose(1);
            return;
        }
        inner.spans.push_back(span);
        let is_news = inner.spans.len() == 1 || inner.spans.len() == BATCH;
        drop(inner);
        if is_news {
            self.changed.notify_one();
        }
    }

    /// The next batch; none when the program ends and all are sent. Waits for it.
    pub(super) fn next(&self) -> Option<Vec<SpanData>> {
        let mut inner = self.lock();
        inner.sending = 0;
        loop {
            let waiting = inner.spans.len();
            if waiting >= BATCH || (inner.is_closing && waiting > 0) {
                return Some(take(&mut inner));
            }
            if inner.is_closing {
                return None;
            }
            if waiting == 0 {
                inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (after, time) = self.changed.wait_timeout(inner, DELAY).unwrap_or_else(PoisonError::into_inner);
            inner = after;
            if time.timed_out() && !inner.spans.is_empty() {
                return Some(take(&mut inner));
            }
        }
    }

    /// Waits before another try. Returns whether there should be one: not when the program ends.
    pub(super) fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut inner = self.lock();
        while !inner.is_closing {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }

    /// The thread sends no more.
    pub(super) fn end(&self) {
        let mut inner = self.lock();
        (inner.is_ended, inner.sending) = (true, 0);
        let left = std::mem::take(&mut inner.spans).len();
        drop(inner);
        self.lose(left as u64);
        self.ended.notify_all();
    }

    /// The program ends: waits until the thread has sent what it can, at most `limit`. Returns how
    /// many spans were not sent by then.
    pub(super) fn close(&self, limit: Duration) -> usize {
        let mut inner = self.lock();
        inner.is_closing = true;
        self.changed.notify_all();
        let going_on = |inner: &mut Inner| !inner.is_ended;
        let (inner, _) = self.ended.wait_timeout_while(inner, limit, going_on).unwrap_or_else(PoisonError::into_inner);
        if inner.is_ended { 0 } else { inner.spans.len() + inner.sending }
    }

    /// Counts spans that do not reach the collector.
    pub(super) fn lose(&self, spans: u64) {
        self.dropped.fetch_add(spans, Ordering::Relaxed);
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

fn take(inner: &mut Inner) -> Vec<SpanData> {
    let count = inner.spans.len().min(BATCH);
    inner.sending = count;
    inner.spans.drain(..count).collect()
}

/// Where spans enter the queue.
#[derive(Debug)]
pub(super) struct Entrance(pub(super) std::sync::Arc<Queue>);

impl SpanProcessor for Entrance {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if span.span_context.is_sampled() {
            self.0.add(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    /// [`Queue::close`] ends it, with a limit of its own.
    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use opentelemetry::InstrumentationScope;
    use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
    use opentelemetry_sdk::trace::{SpanEvents, SpanLinks};
    use std::sync::Arc;
    use std::time::UNIX_EPOCH;

    fn span(flags: TraceFlags) -> SpanData {
        let context = SpanContext::new(TraceId::from_bytes([1; 16]), SpanId::from_bytes([2; 8]), flags, false, TraceState::default());
        SpanData {
            span_context: context,
            parent_span_id: SpanId::INVALID,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: "a".into(),
            start_time: UNIX_EPOCH,
            end_time: UNIX_EPOCH,
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: InstrumentationScope::builder("test").build(),
        }
    }

    #[test]
    fn a_full_queue_drops_and_counts_and_what_is_not_sampled_does_not_enter() {
        let queue = Arc::new(Queue::default());
        let entrance = Entrance(Arc::clone(&queue));
        entrance.on_end(span(TraceFlags::default()));
        for _ in 0..MOST + 3 {
            entrance.on_end(span(TraceFlags::SAMPLED));
        }
        assert_eq!((queue.lock().spans.len(), queue.dropped()), (MOST, 3));
        assert_eq!(queue.next().unwrap().len(), BATCH);
        // Nothing takes what is left.
        assert_eq!(queue.close(Duration::from_millis(20)), MOST);
    }

    #[test]
    fn the_end_sends_what_waits_and_ends_the_pause_between_tries() {
        let queue = Arc::new(Queue::default());
        queue.add(span(TraceFlags::SAMPLED));
        let sending = {
            let queue = Arc::clone(&queue);
            std::thread::spawn(move || {
                let batch = queue.next().unwrap().len();
                let is_worth_another = queue.pause(Duration::from_secs(600));
                let more = queue.next().is_some();
                queue.end();
                (batch, is_worth_another, more)
            })
        };
        assert_eq!(queue.close(Duration::from_secs(60)), 0);
        assert_eq!(sending.join().unwrap(), (1, false, false));
        queue.add(span(TraceFlags::SAMPLED));
        assert_eq!(queue.dropped(), 1, "a span after the end is counted");
    }
}
