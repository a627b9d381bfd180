//! One reader of the events of a domain: the answer to `GET /v1/events`, piece by piece.
//!
//! ```text
//! table of events ─▶ twice a second: some rows after the position ─▶ may the caller see it? does it want it? ─▶ a piece
//!                         │                                             no: the position moves on, and is sent now and then
//!                         └▶ another log, or rows already forgotten ─▶ `reset`
//! ```
//!
//! A reader holds nothing but its position and one piece: the next rows are read after the last
//! piece was sent. So a slow reader costs no memory. The registry closes the connection of a reader
//! that takes nothing, as it does for every answer. Decision 59 has the reasons.

mod places;

pub(crate) use places::Places;

use crate::auth::{Caller, Standing};
use crate::domains::{Domain, Domains};
use crate::metrics::EVENT_STREAMS;
use crate::problem::ApiError;
use axum::body::Bytes;
use futures::{Stream, stream};
use pfr_schema::api::{self, EventCollection, EventId, EventKind, EventReset, RESET};
use pfr_schema::journal::Record;
use pfr_schema::{DomainName, Pattern, RepositoryName};
use pfr_store::{Event, EventLog, Happening};
use places::Place;
use std::io;
use std::time::{Duration, Instant};

/// How often the table is read.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A comment is sent after this time without an event. It shows proxies and clients that the stream
/// is alive.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Rows that are read at a time. This bounds the memory of a reader.
const PAGE: usize = 64;
/// Milliseconds after which a browser connects again.
const RETRY: u64 = 2000;

/// The events that a reader wants.
pub(crate) struct Filter {
    pub(crate) repository: Option<Pattern>,
    pub(crate) kind: Option<EventKind>,
}

impl Filter {
    fn wants(&self, event: &api::Event) -> bool {
        let repository = event.repository.as_ref();
        self.kind.is_none_or(|kind| kind == event.kind)
            && self.repository.as_ref().is_none_or(|pattern| repository.is_some_and(|name| pattern.matches(name.as_str())))
    }
}

/// A stream that is open: the metric counts it until this is dropped.
struct Open;

impl Open {
    fn new() -> Self {
        metrics::gauge!(EVENT_STREAMS).increment(1.0);
        Self
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        metrics::gauge!(EVENT_STREAMS).decrement(1.0);
    }
}

/// The state of one reader.
pub(crate) struct Follower {
    domains: Domains,
    domain: DomainName,
    standing: Standing,
    filter: Filter,
    /// Whether the answer goes on after the last event, and waits for new ones.
    waits: bool,
    /// All events up to this id were sent, or are not for this reader.
    position: EventId,
    /// The last id that was sent to the reader.
    told: Option<EventId>,
    /// The piece that is sent before anything else.
    first: Option<String>,
    /// When something was sent last.
    sent: Instant,
    is_over: bool,
    _open: Open,
    _place: Place,
}

/// The result of one read of the table.
enum Found {
    /// Text for the reader, which may be empty, and whether there are more rows.
    Text(String, bool),
    /// The domain has another log than before, or the rows after the position were deleted.
    Gap,
}

impl Follower {
    /// Begins after the event `after`, or else with the next event that happens.
    ///
    /// # Errors
    /// Those of the store.
    pub(crate) async fn begin(
        domains: &Domains,
        domain: &Domain,
        standing: Standing,
        filter: Filter,
        after: Option<EventId>,
        waits: bool,
        place: Place,
    ) -> Result<Self, ApiError> {
        let log = domain.store.begin_events().await?;
        let now = EventId { epoch: log.epoch.clone(), number: log.last };
        let mut first = format!("retry: {RETRY}\n");
        let (position, told) = match after {
            Some(after) if goes_on(&after, &log) => {
                // No id is sent: the reader gave it.
                first.push('\n');
                (after.clone(), Some(after))
            }
            Some(_) => {
                first.push_str(&reset(&now)?);
                (now.clone(), Some(now))
            }
            None => {
                // A reader whose connection breaks before the first event sends this id when it
                // connects again.
                first.push_str(&format!("id: {now}\n\n"));
                (now.clone(), Some(now))
            }
        };
        Ok(Self {
            domains: domains.clone(),
            domain: domain.name.clone(),
            standing,
            filter,
            waits,
            position,
            told,
            first: Some(first),
            sent: Instant::now(),
            is_over: false,
            _open: Open::new(),
            _place: place,
        })
    }

    /// The answer, piece by piece. For a reader that does not wait, the regular end of the answer
    /// means that there are no more events. So an answer that ends earlier ends with an error,
    /// which breaks the connection.
    pub(crate) fn pieces(self) -> impl Stream<Item = io::Result<Bytes>> + Send {
        stream::unfold(self, |mut follower| async move {
            let piece = match follower.next().await {
                Some(piece) => Ok(Bytes::from(piece)),
                None if follower.waits || follower.is_over => return None,
                None => {
                    follower.is_over = true;
                    Err(io::Error::other("the events end before the last one"))
                }
            };
            Some((piece, follower))
        })
    }

    /// The next piece; `None` at the end. An error ends the answer: the client connects again, and
    /// the answer to that request says what is wrong.
    async fn next(&mut self) -> Option<String> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        loop {
            if self.is_over || self.domains.stopping().is_used_up() {
                return None;
            }
            let found = match self.look().await {
                Ok(found) => found,
                Err(error) => {
                    tracing::debug!(domain = %self.domain, code = error.code.name(), cause = error.cause.as_deref(), "a stream of events ends");
                    return None;
                }
            };
            let (mut text, has_more) = match found {
                Found::Text(text, has_more) => (text, has_more),
                Found::Gap => (self.start_again().await?, false),
            };
            self.is_over = !self.waits && !has_more;
            let is_silent = text.is_empty() && (self.is_over || self.sent.elapsed() >= HEARTBEAT);
            if is_silent {
                // A comment keeps the connection open. The id is sent too, because events may have
                // been left out since the last one: a reader that connects again need not begin
                // before them.
                text.push_str(":\n");
                self.tell(&mut text);
                text.push('\n');
            }
            if !text.is_empty() {
                self.sent = Instant::now();
                return Some(text);
            }
            if !has_more {
                tokio::select! {
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                    () = self.domains.stopping().used_up() => return None,
                }
            }
        }
    }

    /// Adds the position to `text`, if the reader does not have it.
    fn tell(&mut self, text: &mut String) {
        if self.told.as_ref() != Some(&self.position) {
            text.push_str(&format!("id: {}\n", self.position));
            self.told = Some(self.position.clone());
        }
    }

    /// Reads some rows after the position.
    async fn look(&mut self) -> Result<Found, ApiError> {
        // Each read checks the token and the domain again: a token may have been revoked, and a
        // domain may have been deleted.
        let caller = self.standing.pulls(&self.domain).await?;
        let domain = self.domains.get(&self.domain).await?;
        let page = domain.store.metadata().events(self.position.number, PAGE).await?;
        if !page.log.is_some_and(|log| goes_on(&self.position, &log)) {
            return Ok(Found::Gap);
        }
        let (has_more, mut text) = (page.events.len() == PAGE, String::new());
        for event in page.events {
            self.position.number = event.number;
            let event = described(event, &self.position);
            if self.filter.wants(&event) && self.may_see(&caller, event.repository.as_ref()) {
                let data = serde_json::to_string(&event).map_err(|e| ApiError::internal(e.to_string()))?;
                text.push_str(&format!("id: {}\nevent: {}\ndata: {data}\n\n", event.id, event.kind.name()));
                self.told = Some(self.position.clone());
            }
        }
        Ok(Found::Text(text, has_more))
    }

    /// Events about no repository are for operators of the domain, like the list of collections.
    fn may_see(&self, caller: &Caller, repository: Option<&RepositoryName>) -> bool {
        match repository {
            Some(repository) => caller.sees(repository),
            None => caller.operates(&self.domain),
        }
    }

    /// Moves the position to the end of the log, and returns the event that says so. `None` if the
    /// domain or its database does not answer.
    async fn start_again(&mut self) -> Option<String> {
        let begun = async {
            let domain = self.domains.get(&self.domain).await?;
            domain.store.begin_events().await
        };
        let log = begun.await.ok()?;
        self.position = EventId { epoch: log.epoch, number: log.last };
        self.told = Some(self.position.clone());
        reset(&self.position).ok()
    }
}

/// Whether a reader can continue after the id: all events after it are in the log, or have not
/// happened yet.
fn goes_on(after: &EventId, log: &EventLog) -> bool {
    after.epoch == log.epoch && (log.forgotten..=log.last).contains(&after.number)
}

/// The event that tells a reader that it has missed events.
fn reset(now: &EventId) -> Result<String, ApiError> {
    let reason = "the registry does not know any more what happened after the id that was sent; read the lists again".to_owned();
    let data = serde_json::to_string(&EventReset { id: now.to_string(), reason }).map_err(|e| ApiError::internal(e.to_string()))?;
    Ok(format!("id: {now}\nevent: {RESET}\ndata: {data}\n\n"))
}

/// An event as clients read it.
fn described(event: Event, id: &EventId) -> api::Event {
    let of = |kind, repository| api::Event {
        id: id.to_string(),
        at: event.at,
        kind,
        repository,
        tag: None,
        digest: None,
        parents: Vec::new(),
        artifact_type: None,
        new_bytes: None,
        collection: None,
    };
    match event.what {
        Happening::Names(Record::Snapshot { repository, manifest, parents, artifact_type, new_bytes, .. }) => api::Event {
            digest: Some(manifest),
            parents,
            artifact_type,
            new_bytes: Some(new_bytes),
            ..of(EventKind::Pushed, Some(repository))
        },
        Happening::Names(Record::Tag { repository, tag, manifest, .. }) => {
            api::Event { tag: Some(tag), digest: Some(manifest), ..of(EventKind::Tagged, Some(repository)) }
        }
        Happening::Names(Record::Untag { repository, tag }) => api::Event { tag: Some(tag), ..of(EventKind::Deleted, Some(repository)) },
        Happening::Names(Record::Delete { repository, manifest }) => {
            api::Event { digest: Some(manifest), ..of(EventKind::Deleted, Some(repository)) }
        }
        Happening::Collection(report) => {
            let collection = EventCollection {
                run: report.id,
                objects: report.released + report.unclaimed,
                freed_bytes: report.freed_bytes,
                deleted_bytes: report.deleted_bytes,
            };
            api::Event { collection: Some(collection), ..of(EventKind::Collected, None) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(forgotten: u64, last: u64) -> EventLog {
        EventLog { epoch: "e1".into(), forgotten, last }
    }

    #[test]
    fn a_reader_continues_only_in_the_same_log_and_only_if_no_event_is_missed() {
        let at = |epoch: &str, number| EventId { epoch: epoch.into(), number };
        for (id, expected) in [
            (at("e1", 10), true),
            (at("e1", 20), true),
            // The log ends before this id: the database was restored from a backup.
            (at("e1", 21), false),
            (at("e1", 9), false),
            (at("e2", 15), false),
        ] {
            assert_eq!(goes_on(&id, &log(10, 20)), expected, "{id}");
        }
        assert!(goes_on(&at("e1", 0), &log(0, 0)));
    }

    #[test]
    fn a_filter_for_repositories_leaves_out_events_about_no_repository() {
        let report = pfr_schema::api::GcReport { id: "run".into(), released: 2, ..Default::default() };
        let event = Event { number: 7, at: 5, what: Happening::Collection(report) };
        let event = described(event, &EventId { epoch: "e1".into(), number: 7 });
        let wants = |repository: Option<&str>, kind| Filter { repository: repository.map(|p| p.parse().unwrap()), kind }.wants(&event);
        assert!(wants(None, None) && wants(None, Some(EventKind::Collected)));
        assert!(!wants(Some("*"), None) && !wants(None, Some(EventKind::Pushed)));
        assert_eq!((event.id.as_str(), event.collection.unwrap().objects), ("e1-7", 2));
    }
}
