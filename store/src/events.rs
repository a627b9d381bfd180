//! The log of events: for those that follow what happens in a store, and in which order.
//!
//! ```text
//! change of names ─▶ its row in `changes` ─▶ journal object, durable ─▶ one transaction: recorded, and an event
//! collection      ─▶ its report in `collections` ─────────────────────▶ an event, when no smaller number is left in `changes`
//! ```

use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::metadata::EventLog;

/// How often the events of collections are tried before they wait for the next change.
const TRIES: usize = 5;

impl Store {
    /// Where the log of events stands. The first call begins it; a store that nothing follows keeps
    /// no events.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`]; [`crate::Error::Full`] if the log cannot begin.
    #[boxed]
    pub async fn begin_events(&self) -> Result<EventLog> {
        // Beginning a log writes, and is refused on a full disk. One that there is can be read.
        if let Some(log) = self.metadata.events(u64::MAX, 0).await?.log {
            return Ok(log);
        }
        self.metadata.begin_events(uuid::Uuid::now_v7().simple().to_string()).await
    }

    /// Lets the event of a collection appear. If changes of names keep coming, it appears with one
    /// of them.
    pub(crate) async fn note_collections(&self) {
        let noting = async {
            for _ in 0..TRIES {
                if self.metadata.note_collections().await? {
                    break;
                }
                self.flush_journal().await?;
            }
            Ok::<_, crate::Error>(())
        };
        if let Err(error) = noting.await {
            tracing::warn!(%error, "the event of a collection appears later, with that of the next change");
        }
    }
}
