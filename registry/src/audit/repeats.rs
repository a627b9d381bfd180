//! Refusals and failures that repeat themselves: the first is a record at once, and those like it
//! in the next minute are one more, with their number. So a caller that is refused a thousand times
//! a second can neither fill the log nor wash other records out of it.
//!
//! Nor can one that is refused for another name each time: from a number of different records in a
//! minute on, its records are without names, and so like each other. Those of a caller without a
//! token still say where it comes from, for a number of networks.

use crate::http::address::network;
use lru::LruCache;
use parking_lot::Mutex;
use pfr_schema::DomainName;
use pfr_schema::api::AuditRecord;
use pfr_store::AuditEntry;
use std::collections::HashMap;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::time::Duration;
use tokio::time::Instant;

/// For how long equal records are counted instead of written.
const WINDOW: Duration = Duration::from_secs(60);
/// Different records that are remembered; of more, the latest. The number of one that is forgotten
/// is written.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");
/// Different records of one caller in this time that say what they are about. All callers without a
/// valid token are one here: addresses may be many.
const NAMED: u32 = 60;
/// Networks in this time that records without names name, and such records of each network.
const SOURCES: usize = 60;
const OF_SOURCE: u32 = 10;

/// A record that is to be written, and in the log of which domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) domain: DomainName,
    pub(super) entry: AuditEntry,
}

impl Pending {
    /// The same without what a caller may choose freely. It stays in the log of its domain if the
    /// caller's token is for that one only; otherwise it is about the registry. Without a token
    /// nothing but the source address says who it was.
    fn nameless(self) -> Self {
        let AuditEntry { record, status_if_there, of_registry, overrides } = self.entry;
        let own = record.token_domain.clone().filter(|own| !of_registry && record.domain.as_ref() == Some(own));
        let (domain, of_registry) = (own.clone().unwrap_or_default(), own.is_none());
        let from = record.from.clone().filter(|_| record.token.is_none());
        let record = AuditRecord { from, domain: own, repository: None, tag: None, tags: None, digest: None, subject: None, ..record };
        Self { domain, entry: AuditEntry { record, status_if_there, of_registry, overrides } }
    }
}

/// What makes two records equal: everything but the request's own id, and of an address without a
/// token only the network.
type Key = (DomainName, AuditRecord);

fn key_of(pending: &Pending) -> Key {
    let mut record = AuditRecord { request_id: None, ..pending.entry.record.clone() };
    if record.token.is_none() {
        record.from = network_of(&record).map(|network| network.to_string());
    }
    (pending.domain.clone(), record)
}

fn network_of(record: &AuditRecord) -> Option<IpAddr> {
    record.from.as_deref().and_then(|from| from.parse::<IpAddr>().ok()).map(network)
}

struct Repeat {
    since: Instant,
    /// How many came that are in no record yet.
    more: u64,
    /// The latest of them.
    latest: AuditEntry,
}

/// How many different records a caller has had.
struct Recent {
    since: Instant,
    records: u32,
}

/// Where the callers of records without names came from, and how many records each network has had.
struct Sources {
    since: Instant,
    records: HashMap<IpAddr, u32>,
}

impl Sources {
    /// Counts one more record; whether it may say where it comes from.
    fn may_say(&mut self, record: &AuditRecord, now: Instant) -> bool {
        if now.duration_since(self.since) >= WINDOW {
            *self = Self { since: now, records: HashMap::new() };
        }
        let Some(network) = network_of(record) else { return false };
        if self.records.len() >= SOURCES && !self.records.contains_key(&network) {
            return false;
        }
        let records = self.records.entry(network).or_default();
        *records = records.saturating_add(1);
        *records <= OF_SOURCE
    }
}

/// Records that were written a moment ago.
pub(super) struct Repeats(Mutex<State>);

struct State {
    known: LruCache<Key, Repeat>,
    /// By the id of the token.
    callers: LruCache<Option<String>, Recent>,
    sources: Sources,
}

impl Default for Repeats {
    fn default() -> Self {
        let sources = Sources { since: Instant::now(), records: HashMap::new() };
        Self(Mutex::new(State { known: LruCache::new(REMEMBERED), callers: LruCache::new(REMEMBERED), sources }))
    }
}

impl Repeats {
    /// Takes a record in. Returns what is to be written now.
    pub(super) fn take(&self, mut pending: Pending) -> Vec<Pending> {
        let now = Instant::now();
        let mut state = self.0.lock();
        let State { known, callers, sources } = &mut *state;
        let mut key = key_of(&pending);
        if !known.contains(&key) && !may_name(callers, &pending.entry.record.token, now) {
            pending = pending.nameless();
            key = key_of(&pending);
            if !known.contains(&key) && !sources.may_say(&pending.entry.record, now) {
                pending.entry.record.from = None;
                key = key_of(&pending);
            }
        }
        if let Some(repeat) = known.get_mut(&key) {
            repeat.more += 1;
            repeat.latest = pending.entry;
            return if now.duration_since(repeat.since) < WINDOW { Vec::new() } else { repeat.write(&key.0, now).into_iter().collect() };
        }
        let latest = pending.entry.clone();
        let mut write = vec![pending];
        let forgotten = known.push(key, Repeat { since: now, more: 0, latest });
        write.extend(forgotten.and_then(|((domain, _), mut repeat)| repeat.write(&domain, now)));
        write
    }

    /// What was counted for a minute, or everything that was counted. Forgets what is over.
    pub(super) fn due(&self, everything: bool) -> Vec<Pending> {
        let now = Instant::now();
        let known = &mut self.0.lock().known;
        let is_over = |repeat: &Repeat| everything || now.duration_since(repeat.since) >= WINDOW;
        let over: Vec<Key> = known.iter().filter(|(_, repeat)| is_over(repeat)).map(|(key, _)| key.clone()).collect();
        over.into_iter().filter_map(|key| known.pop(&key)?.write(&key.0, now)).collect()
    }
}

/// Counts one more record of a caller; whether it may say what it is about.
fn may_name(callers: &mut LruCache<Option<String>, Recent>, token: &Option<String>, now: Instant) -> bool {
    let recent = callers.get_or_insert_mut(token.clone(), || Recent { since: now, records: 0 });
    if now.duration_since(recent.since) >= WINDOW {
        *recent = Recent { since: now, records: 0 };
    }
    recent.records = recent.records.saturating_add(1);
    recent.records <= NAMED
}

impl Repeat {
    /// The record of those that were counted; none if there were none.
    fn write(&mut self, domain: &DomainName, now: Instant) -> Option<Pending> {
        self.since = now;
        let more = std::mem::take(&mut self.more);
        let mut entry = self.latest.clone();
        entry.record.times = Some(more).filter(|more| *more > 1);
        (more > 0).then(|| Pending { domain: domain.clone(), entry })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(repository: &str, id: u64) -> Pending {
        refused_as(None, repository, id)
    }

    fn refused_as(token: Option<&str>, repository: &str, id: u64) -> Pending {
        let record = AuditRecord {
            operation: "put_tag".into(),
            code: Some("denied".into()),
            token: token.map(str::to_owned),
            domain: Some(DomainName::default()),
            repository: Some(repository.parse().unwrap()),
            request_id: Some(id.to_string()),
            ..AuditRecord::default()
        };
        Pending { domain: DomainName::default(), entry: AuditEntry { record, status_if_there: None, of_registry: false, overrides: false } }
    }

    /// Repositories and numbers of what is to be written.
    fn said(pending: Vec<Pending>) -> Vec<(String, Option<u64>)> {
        let repository = |record: &AuditRecord| record.repository.as_ref().map(ToString::to_string).unwrap_or_default();
        pending.into_iter().map(|p| (repository(&p.entry.record), p.entry.record.times)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_is_written_at_once_and_those_like_it_once_a_minute() {
        let repeats = Repeats::default();
        assert_eq!(said(repeats.take(refused("a", 0))), [("a".to_owned(), None)]);
        for id in 1..=1000 {
            assert_eq!(repeats.take(refused("a", id)), []);
        }
        assert_eq!(said(repeats.take(refused("b", 0))), [("b".to_owned(), None)], "another one is not hidden by them");
        assert_eq!(repeats.due(false), []);
        tokio::time::advance(WINDOW).await;
        assert_eq!(said(repeats.due(false)), [("a".to_owned(), Some(1000))]);
        assert_eq!(said(repeats.take(refused("a", 0))), [("a".to_owned(), None)]);
        repeats.take(refused("a", 1));
        tokio::time::advance(WINDOW).await;
        // Meanwhile no caller asked what is due.
        assert_eq!(said(repeats.take(refused("a", 2))), [("a".to_owned(), Some(2))]);
        repeats.take(refused("a", 3));
        assert_eq!(said(repeats.due(true)), [("a".to_owned(), None)], "a single one has no number");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_lost_when_too_many_differ() {
        let repeats = Repeats::default();
        repeats.take(refused("first", 0));
        repeats.take(refused("first", 1));
        repeats.take(refused("first", 2));
        let mut written = Vec::new();
        for n in 0..REMEMBERED.get() {
            // Each is another caller's.
            let name = format!("r{n}");
            written.extend(said(repeats.take(refused_as(Some(&name), &name, 0))));
        }
        assert!(written.contains(&("first".to_owned(), Some(2))), "what was counted is written when it is forgotten");
        assert_eq!(repeats.0.lock().known.len(), REMEMBERED.get());
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_makes_names_up_fills_nothing_and_hides_no_other() {
        let (repeats, named) = (Repeats::default(), NAMED as usize);
        let ask = |token: Option<&str>| -> Vec<(String, Option<u64>)> {
            (0..1000).flat_map(|n| said(repeats.take(refused_as(token, &format!("made-up-{n}"), n)))).collect()
        };
        for token in [Some("0123456789abcdef"), None] {
            let written = ask(token);
            assert_eq!(written.len(), named + 1, "{written:?}");
            assert_eq!(written[named], (String::new(), None), "from now on without names");
        }
        assert_eq!(said(repeats.take(refused_as(Some("another"), "made-up-7", 0))), [("made-up-7".to_owned(), None)]);
        // What has no name is about the registry: nothing in it says which domain it belongs to.
        tokio::time::advance(WINDOW).await;
        let mut counted = repeats.due(false);
        counted.retain(|pending| pending.entry.record.times.is_some());
        assert!(counted.iter().all(|pending| pending.entry.of_registry && pending.entry.record.domain.is_none()), "{counted:?}");
        assert_eq!(said(counted), vec![(String::new(), Some(1000 - NAMED as u64 - 1)); 2]);
        assert_eq!(ask(None).len(), named + 1, "another minute");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stranger_in_a_flood_of_others_is_named_by_its_address() {
        let repeats = Repeats::default();
        let from = |address: &str, operation: &str| -> Vec<Option<String>> {
            let mut pending = refused("a", 0);
            (pending.entry.record.from, pending.entry.record.operation) = (Some(address.to_owned()), operation.to_owned());
            repeats.take(pending).into_iter().map(|pending| pending.entry.record.from).collect()
        };
        // So many addresses that records have no names any more.
        for n in 0..NAMED {
            assert_eq!(from(&format!("10.0.1.{n}"), "put_tag").len(), 1);
        }
        assert_eq!(from("2001:db8::7", "put_tag"), [Some("2001:db8::7".to_owned())]);
        assert_eq!(from("2001:db8::8", "put_tag"), [] as [Option<String>; 0], "the same network is one source");
        // One source makes many different requests: it cannot fill the log either.
        let many: Vec<_> = (0..1000).flat_map(|n| from("10.0.2.1", &format!("operation-{n}"))).collect();
        assert_eq!(many.iter().filter(|from| from.is_some()).count(), OF_SOURCE as usize);
        // Two sources are known already, and for more than the rest there is no room.
        let others: Vec<_> = (0..200).flat_map(|n| from(&format!("10.0.3.{n}"), "put_tag")).collect();
        assert_eq!(others.iter().filter(|from| from.is_some()).count(), SOURCES - 2);
        assert_eq!(others.len(), SOURCES - 1, "the others are one record without an address");
        tokio::time::advance(WINDOW).await;
        repeats.due(true);
        for n in 0..NAMED {
            from(&format!("10.0.4.{n}"), "put_tag");
        }
        assert_eq!(from("10.0.3.199", "put_tag"), [Some("10.0.3.199".to_owned())], "another minute");
    }

    #[test]
    fn what_a_token_of_one_domain_was_refused_stays_in_the_log_of_that_domain() {
        let acme: DomainName = "acme".parse().unwrap();
        let mut pending = Pending { domain: acme.clone(), ..refused_as(Some("x"), "secret", 0) };
        (pending.entry.record.token_domain, pending.entry.record.domain) = (Some(acme.clone()), Some(acme.clone()));
        let own = pending.clone().nameless();
        assert_eq!((own.domain, own.entry.of_registry, own.entry.record.repository), (acme, false, None));
        // Another domain is none of its business.
        pending.entry.record.domain = Some(DomainName::default());
        let other = pending.nameless();
        assert_eq!((other.domain, other.entry.of_registry, other.entry.record.domain), (DomainName::default(), true, None));
    }
}
