//! Gates: the points where the schedule can hold or kill a task, or let others go first.
//!
//! Every call of metadata and of the object store passes a gate before and after it. A task stands
//! at its gate until the schedule lets it through, so the order of all transactions and all
//! requests follows from the seed, and "killed between any two steps" is: dropped while it stands
//! at a gate.

use parking_lot::Mutex;
use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

thread_local! {
    static CURRENT: RefCell<Option<Arc<Gate>>> = const { RefCell::new(None) };
}

/// The gate of one task.
#[derive(Debug, Default)]
pub struct Gate(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// Steps that may still pass.
    open: usize,
    waiting: Vec<Waker>,
    /// Steps that have passed.
    steps: u64,
    /// Calls of metadata under way.
    calls: u64,
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

/// The state of a task after it ran.
#[derive(Debug)]
pub enum Progress<T> {
    /// It stands at its gate.
    AtGate,
    /// It waits for something else, such as a lock of another task.
    Blocked,
    /// It ended.
    Done(T),
}

/// A task as the schedule runs it.
pub type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;

fn poll<T>(task: &mut Task<T>, gate: &Arc<Gate>, cx: &mut Context<'_>) -> Progress<T> {
    let before = CURRENT.replace(Some(Arc::clone(gate)));
    let polled = task.as_mut().poll(cx);
    CURRENT.set(before);
    match polled {
        Poll::Ready(value) => Progress::Done(value),
        Poll::Pending if gate.is_waited_at() => Progress::AtGate,
        Poll::Pending => Progress::Blocked,
    }
}

/// Checks whether a task can go on, without waiting.
pub async fn glance<T>(task: &mut Task<T>, gate: &Arc<Gate>) -> Progress<T> {
    std::future::poll_fn(|cx| Poll::Ready(poll(task, gate, cx))).await
}

/// Runs a task until it stands at its gate or ends. One that does neither, and is in no call, for
/// `timeout` is blocked by another.
pub async fn run<T>(task: &mut Task<T>, gate: &Arc<Gate>, timeout: Duration) -> Progress<T> {
    let going = std::future::poll_fn(|cx| match poll(task, gate, cx) {
        Progress::Blocked => Poll::Pending,
        progress => Poll::Ready(progress),
    });
    let mut going = std::pin::pin!(going);
    loop {
        match tokio::time::timeout(timeout, &mut going).await {
            Ok(progress) => return progress,
            Err(_) if gate.0.lock().calls > 0 => {}
            Err(_) => return Progress::Blocked,
        }
    }
}

/// Counts a call as running until it is dropped. A task that waits for its end is not blocked by
/// another task.
pub struct Call(Option<Arc<Gate>>);

impl Call {
    /// A call begins.
    #[must_use]
    pub fn begin() -> Self {
        let gate = CURRENT.with_borrow(Clone::clone);
        if let Some(gate) = &gate {
            gate.0.lock().calls += 1;
        }
        Self(gate)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(gate) = &self.0 {
            gate.0.lock().calls -= 1;
        }
    }
}
