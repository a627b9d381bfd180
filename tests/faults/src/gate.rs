//! Gates: the points where the schedule can hold or kill a task, or let others go first.
//!
//! Every call of metadata and of the object store passes a gate before and after it. A task waits
//! at its gate until the schedule lets it through, so the order of all transactions and all
//! requests follows from the seed. To kill a task between two steps, the schedule drops it while it
//! waits at its gate.

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

    /// Whether the task waits here, and for nothing else: a call that it makes beside this one must
    /// end first, for it has a connection that other tasks may need.
    fn is_waited_at(&self) -> bool {
        let inner = self.0.lock();
        inner.open == 0 && !inner.waiting.is_empty() && inner.calls == 0
    }
}

/// Waits until the schedule lets this task continue. Outside of a scheduled task, returns at once.
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
    /// The task waits at its gate.
    AtGate,
    /// The task waits for something else, such as a lock of another task.
    Blocked,
    /// The task ended.
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

/// Polls a task once.
pub async fn poll_once<T>(task: &mut Task<T>, gate: &Arc<Gate>) -> Progress<T> {
    std::future::poll_fn(|cx| Poll::Ready(poll(task, gate, cx))).await
}

/// Runs a task until it waits at its gate or ends. If it does neither within `timeout` and no call
/// of it is running, another task blocks it.
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

/// A running call of metadata, until this is dropped. While a task waits for the end of its call,
/// no other task blocks it.
pub struct Call(Option<Arc<Gate>>);

impl Call {
    /// Counts a call of the current task as running.
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
