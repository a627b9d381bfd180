//! Following what happens in a registry.

use super::Remote;
use super::backoff::WAITS;
use crate::boxed;
use crate::error::Result;
pub use pfr_schema::api::Followed;
use pfr_schema::api::{EventId, EventKind, RESET};
use pfr_schema::sse::{Block, Blocks};
use pfr_schema::{Pattern, json};
use reqwest::header::ACCEPT;
use reqwest::{Response, Url};
use std::time::{Duration, Instant};

/// A stream that is silent for so long is given up. The registry says something every 15 seconds.
const SILENCE: Duration = Duration::from_secs(60);
/// A stream that lived for so long was no failure.
const HEALTHY: Duration = Duration::from_secs(10);

/// Which events, and from where on.
#[derive(Clone, Debug, Default)]
pub struct EventFilter {
    /// Only events of repositories that match.
    pub repository: Option<Pattern>,
    /// Only events of this kind.
    pub kind: Option<EventKind>,
    /// Those after this one; without it, those from now on.
    pub after: Option<EventId>,
    /// End with the last event that there is, instead of waiting for more.
    pub once: bool,
}

/// The events of a registry, each once and in order. A stream that is cut is asked for again, after
/// the last event that was read.
#[derive(Debug)]
pub struct Events {
    remote: Remote,
    url: Url,
    once: bool,
    /// The last id.
    last: Option<String>,
    stream: Option<Stream>,
    /// Streams in a row that ended soon and said nothing new.
    failures: u32,
}

#[derive(Debug)]
struct Stream {
    response: Response,
    blocks: Blocks,
    begun: Instant,
}

impl Remote {
    /// Follows what happens in the registry. Nothing is sent yet.
    #[must_use]
    pub fn events(&self, filter: &EventFilter) -> Events {
        let EventFilter { repository, kind, after, once } = filter;
        let mut url = self.path(&["events"]);
        {
            let mut query = url.query_pairs_mut();
            if let Some(repository) = repository {
                query.append_pair("repository", repository.as_str());
            }
            if let Some(kind) = kind {
                query.append_pair("kind", kind.name());
            }
            query.append_pair("follow", if *once { "false" } else { "true" });
        }
        let last = after.as_ref().map(ToString::to_string);
        Events { remote: self.clone(), url, once: *once, last, stream: None, failures: 0 }
    }
}

impl Events {
    /// The id to go on after, once there is one.
    #[must_use]
    pub fn last(&self) -> Option<&str> {
        self.last.as_deref()
    }

    /// The next event; none at the end, if it is to end.
    ///
    /// # Errors
    /// [`crate::Error::Registry`]; [`crate::Error::Unreachable`] after the retries of the remote. A
    /// registry of an older version has no events: `not_found`.
    #[boxed]
    pub async fn next(&mut self) -> Result<Option<Followed>> {
        loop {
            let stream = match self.stream.take() {
                Some(stream) => self.stream.insert(stream),
                None => {
                    let stream = self.connect().await?;
                    self.stream.insert(stream)
                }
            };
            let popped = stream.blocks.pop().map_err(|error| self.remote.protocol(format!("its events: {error}")));
            if let Some(block) = popped? {
                if let Some(followed) = self.read(block)? {
                    self.failures = 0;
                    return Ok(Some(followed));
                }
                continue;
            }
            let piece = tokio::time::timeout(SILENCE, stream.response.chunk()).await;
            match piece {
                Ok(Ok(Some(bytes))) => stream.blocks.push(&bytes),
                Ok(Ok(None)) if self.once => return Ok(None),
                // It ended, was cut or fell silent.
                _ => self.pause().await,
            }
        }
    }

    async fn connect(&self) -> Result<Stream> {
        let request = || {
            let request = self.remote.client.get(self.url.clone()).header(ACCEPT, "text/event-stream");
            match &self.last {
                Some(id) => request.header("last-event-id", id),
                None => request,
            }
        };
        let response = self.remote.request(request).await?;
        Ok(Stream { response, blocks: Blocks::default(), begun: Instant::now() })
    }

    /// Waits until the next stream, longer each time that one ends at once.
    async fn pause(&mut self) {
        let lived = self.stream.take().is_some_and(|stream| stream.begun.elapsed() >= HEALTHY);
        self.failures = if lived { 1 } else { self.failures.saturating_add(1) };
        tokio::time::sleep(WAITS.wait(self.failures)).await;
    }

    /// The message of a block, if it has one.
    fn read(&mut self, block: Block) -> Result<Option<Followed>> {
        let Block { id, event, data } = block;
        // The id is sent back in a header.
        if let Some(id) = id.filter(|id| id.parse::<EventId>().is_ok()) {
            self.last = Some(id);
        }
        let malformed = |error| self.remote.protocol(format!("its event does not parse: {error}"));
        if event == RESET {
            let reset = json::parse("event", data.as_bytes(), data.len() as u64).map_err(malformed)?;
            return Ok(Some(Followed::Reset(reset)));
        }
        // A newer registry may have kinds that are not known here.
        if event.parse::<EventKind>().is_err() {
            return Ok(None);
        }
        let event = json::parse("event", data.as_bytes(), data.len() as u64).map_err(malformed)?;
        Ok(Some(Followed::Event(Box::new(event))))
    }
}
