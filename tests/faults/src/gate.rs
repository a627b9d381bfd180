//! Gates: where a task can be held, killed or overtaken.
//!
//! Every call of metadata and of the object store passes a gate before and after it. A task stands at its gate until the schedule
//! lets it through, so the order of all transactions and all requests follows from the seed, and "killed between any two steps"
//! is: dropped while it stands at a gate.

use parking_lot::Mutex;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

thread_local! {
    static CURRENT: RefCell<Option<Arc<Gate>>> = const { RefCell::new(None) };
}

/// The gate of one task.
#[derive(Debug, Default)]
pub struct Gate(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// How many may pass.
    open: usize,
    waiting: Vec<Waker>,
    /// How often it was passed.
    steps: u64,
}

impl Gate {
    /// Lets one waiting step through.
    pub fn open(&self) {
        let mut inner = self.0.lock();
        inner.open = 1;
        let waiting = std::mem::take(&mut inner.waiting);
        drop(inner);
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Steps so far.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.0.lock().steps
    }

    fn is_waited_at(&self) -> bool {
        let inner = self.0.lock();
        inner.open == 0 && !inner.waiting.is_empty()
    }
}

/// Waits until the schedule lets this task go on; passes at once outside of a scheduled task.
pub async fn pass() {
    let Some(gate) = CURRENT.with_borrow(Clone::clone) else { return };
    std::future::poll_fn(|cx| {
        let mut inner = gate.0.lock();
        if inner.open > 0 {
            inner.open -= 1;
            inner.steps += 1;
            Poll::Ready(())
        } else {
            inner.waiting.push(cx.waker().clone());
            Poll::Pending
        }
    })
    .await;
}

/// How far a task came.
pub enum Progress<T> {
    /// It stands at its gate.
    AtGate,
    /// It ended.
    Done(T),
}

/// Runs a task until it stands at its gate or ends.
pub async fn run<T>(task: &mut Pin<Box<dyn Future<Output = T> + Send>>, gate: &Arc<Gate>) -> Progress<T> {
    std::future::poll_fn(|cx: &mut Context<'_>| {
        let before = CURRENT.replace(Some(Arc::clone(gate)));
        let polled = task.as_mut().poll(cx);
        CURRENT.set(before);
        match polled {
            Poll::Ready(value) => Poll::Ready(Progress::Done(value)),
            Poll::Pending if gate.is_waited_at() => Poll::Ready(Progress::AtGate),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
