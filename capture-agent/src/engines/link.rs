//! Calls to a member over its connection.

use super::{Link, wire};
use parking_lot::Mutex;
use pfr_schema::ErrorCode;
use pfr_schema::engine::{CallError, Message, ToEngine};
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::OwnedWriteHalf;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

/// Messages that wait to be sent; more wait at their senders.
const QUEUE: usize = 64;

type Answer = std::result::Result<Value, CallError>;

/// The sending side of a connection.
#[derive(Debug)]
pub(super) struct SocketLink {
    next: AtomicU64,
    /// `None` once the connection has ended.
    open: Mutex<Option<Open>>,
}

#[derive(Debug)]
struct Open {
    outgoing: mpsc::Sender<Vec<u8>>,
    /// Calls without an answer.
    calls: HashMap<u64, oneshot::Sender<Answer>>,
}

fn lost(detail: &str) -> CallError {
    CallError { code: ErrorCode::EngineLost, detail: detail.into() }
}

impl SocketLink {
    /// A link, and the task that writes its messages. The task ends after [`Self::close`], or when
    /// it is dropped. A message of a cancelled call is still written completely.
    pub fn new(mut writer: OwnedWriteHalf) -> (Arc<Self>, JoinSet<()>) {
        let (outgoing, mut queue) = mpsc::channel::<Vec<u8>>(QUEUE);
        let mut writing = JoinSet::new();
        pfr_service::task::spawn_in(&mut writing, async move {
            while let Some(message) = queue.recv().await {
                if let Err(error) = writer.write_all(&message).await {
                    // The reading side notices the end of the connection.
                    return tracing::debug!(%error, "cannot send a message to an engine");
                }
            }
        });
        let open = Open { outgoing, calls: HashMap::new() };
        (Arc::new(Self { next: AtomicU64::new(1), open: Mutex::new(Some(open)) }), writing)
    }

    /// Answers a call of the member.
    pub async fn answer(&self, id: u64, answer: Answer) {
        let message: Message<ToEngine> = match answer {
            Ok(ok) => Message::Ok { id, ok },
            Err(error) => Message::Error { id, error },
        };
        match wire::encode(&message) {
            // A member that is gone needs no answer.
            Ok(bytes) => drop(self.send(bytes).await),
            Err(error) => tracing::error!(%error, "cannot encode an answer to an engine"),
        }
    }

    async fn send(&self, message: Vec<u8>) -> std::result::Result<(), CallError> {
        let outgoing = self.open.lock().as_ref().map(|open| open.outgoing.clone());
        match outgoing {
            Some(outgoing) => outgoing.send(message).await.map_err(|_| lost("its connection has ended")),
            None => Err(lost("its connection has ended")),
        }
    }

    /// Hands an answer of the member to its waiting call.
    pub fn take_answer(&self, message: Message<ToEngine>) {
        let (id, answer) = match message {
            Message::Ok { id, ok } => (id, Ok(ok)),
            Message::Error { id, error } => (id, Err(error)),
            Message::Call { .. } => return,
        };
        let waiting = self.open.lock().as_mut().and_then(|open| open.calls.remove(&id));
        match waiting {
            Some(waiting) => drop(waiting.send(answer)),
            None => tracing::debug!(id, "engine answered a call that was given up"),
        }
    }

    /// The connection has ended: no call gets an answer any more. Queued messages are still sent.
    pub fn close(&self) {
        drop(self.open.lock().take());
    }
}

/// Removes a cancelled call.
struct Waiting<'a> {
    link: &'a SocketLink,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(open) = self.link.open.lock().as_mut() {
            open.calls.remove(&self.id);
        }
    }
}

#[async_trait::async_trait]
impl Link for SocketLink {
    async fn call(&self, call: ToEngine) -> Answer {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = oneshot::channel();
        match self.open.lock().as_mut() {
            Some(open) => drop(open.calls.insert(id, tell)),
            None => return Err(lost("its connection has ended")),
        }
        let _waiting = Waiting { link: self, id };
        let message = wire::encode(&Message::Call { id, call });
        let message = message.map_err(|e| CallError { code: ErrorCode::TooLarge, detail: e.to_string() })?;
        self.send(message).await?;
        told.await.unwrap_or_else(|_| Err(lost("its connection ended before it answered")))
    }
}
