//! One reader of the events of a domain, as the pieces of its answer.
//!
//! ```text
//! table of events ─▶ twice a second: some rows after the position ─▶ may the caller see it? does it want it? ─▶ a piece
//!                         │                                             no: the position moves on, and is told now and then
//!                         └▶ not this log, or forgotten ─▶ `reset`
//! ```
//!
//! A reader holds nothing but its position and one piece: the next rows are read when the last
//! piece was sent. So a slow reader costs no memory, and one that takes nothing is cut as every
//! client is that does not take its answer. Decision 59 has the reasons.

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
const LOOK: Duration = Duration::from_millis(500);
/// After so much silence there is a comment: proxies and clients see that the stream lives.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Rows read at a time: what bounds memory.
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

/// Counts a stream.
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

/// A reader.
pub(crate) struct Follower {
    domains: Domains,
    domain: DomainName,
    standing: Standing,
    filter: Filter,
    /// Whether it waits for more when it has read everything.
    waits: bool,
    /// All events up to here were sent, or are not for this reader.
    position: EventId,
    /// The last id that the reader was told.
    told: Option<EventId>,
    /// Sent before anything else.
    first: Option<String>,
    /// When something was sent last.
    sent: Instant,
    is_over: bool,
    _open: Open,
    _place: Place,
}

/// The result of a look at the table.
enum Found {
    /// Text for the reader, which may be empty, and whether there are more rows.
    Text(String, bool),
    /// The log is another one, or has forgotten what comes next.
    Gap,
}

impl Follower {
    /// Begins at the event `after`, or now.
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
                // No id: the reader has it.
                first.push('\n');
                (after.clone(), Some(after))
            }
            Some(_) => {
                first.push_str(&reset(&now)?);
                (now.clone(), Some(now))
            }
            None => {
                // A reader that is cut before the first event comes back to here.
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

    /// The answer, piece by piece. A reader that does not wait takes the end of it for the last
    /// event that there is, so an answer that ends before is cut.
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

    /// The next piece; none at the end. An error ends the answer: the client connects again, and is
    /// told what is wrong.
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
                // A comment keeps the connection. The id, where others were left out: a reader that
                // comes back need not have them looked at again, until they are forgotten.
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
                    () = tokio::time::sleep(LOOK) => {}
                    () = self.domains.stopping().used_up() => return None,
                }
            }
        }
    }

    /// Adds the position, if the reader does not have it.
    fn tell(&mut self, text: &mut String) {
        if self.told.as_ref() != Some(&self.position) {
            text.push_str(&format!("id: {}\n", self.position));
            self.told = Some(self.position.clone());
        }
    }

    /// Reads some rows after the position.
    async fn look(&mut self) -> Result<Found, ApiError> {
        // Each time anew: a token may have been revoked, and a domain deleted.
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

    /// Goes on from now, and says so; none if that is not possible.
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

/// Whether all events after an id are in the log, or still to come.
fn goes_on(after: &EventId, log: &EventLog) -> bool {
    after.epoch == log.epoch && (log.forgotten..=log.last).contains(&after.number)
}

/// The event that says that others are lost.
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
    fn an_id_goes_on_in_its_log_from_what_is_kept_to_what_there_is() {
        let at = |epoch: &str, number| EventId { epoch: epoch.into(), number };
        for (id, expected) in [
            (at("e1", 10), true),
            (at("e1", 20), true),
            // Of an older database, put back from a backup.
            (at("e1", 21), false),
            (at("e1", 9), false),
            (at("e2", 15), false),
        ] {
            assert_eq!(goes_on(&id, &log(10, 20)), expected, "{id}");
        }
        assert!(goes_on(&at("e1", 0), &log(0, 0)));
    }

    #[test]
    fn a_filter_for_repositories_leaves_out_what_is_about_none() {
        let report = pfr_schema::api::GcReport { id: "run".into(), released: 2, ..Default::default() };
        let event = Event { number: 7, at: 5, what: Happening::Collection(report) };
        let event = described(event, &EventId { epoch: "e1".into(), number: 7 });
        let wants = |repository: Option<&str>, kind| Filter { repository: repository.map(|p| p.parse().unwrap()), kind }.wants(&event);
        assert!(wants(None, None) && wants(None, Some(EventKind::Collected)));
        assert!(!wants(Some("*"), None) && !wants(None, Some(EventKind::Pushed)));
        assert_eq!((event.id.as_str(), event.collection.unwrap().objects), ("e1-7", 2));
    }
}
