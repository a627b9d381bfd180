//! Refusals and failures that repeat themselves: the first is a record at once, and those like it
//! in the next minute are one more, with their number. So a caller that is refused a thousand times
//! a second can neither fill the log nor wash other records out of it.

use crate::http::address::network;
use lru::LruCache;
use parking_lot::Mutex;
use pfr_schema::DomainName;
use pfr_schema::api::AuditRecord;
use pfr_store::AuditEntry;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::time::Duration;
use tokio::time::Instant;

/// For how long equal records are counted instead of written.
const WINDOW: Duration = Duration::from_secs(60);
/// Different records that are remembered; of more, the latest. The number of one that is forgotten
/// is written.
const REMEMBERED: NonZeroUsize = NonZeroUsize::new(4096).expect("not zero");

/// A record that is to be written, and in the log of which domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) domain: DomainName,
    pub(super) entry: AuditEntry,
}

/// What makes two records equal: everything but the request's own id, and of an address without a
/// token only the network.
type Key = (DomainName, AuditRecord);

fn key(domain: DomainName, record: &AuditRecord) -> Key {
    let mut record = AuditRecord { request_id: None, ..record.clone() };
    if record.token.is_none() {
        let address = record.from.as_deref().and_then(|from| from.parse::<IpAddr>().ok());
        record.from = address.map(|address| network(address).to_string());
    }
    (domain, record)
}

struct Repeat {
    since: Instant,
    /// How many came that are in no record yet.
    more: u64,
    /// The latest of them.
    latest: AuditEntry,
}

/// Records that were written a moment ago.
pub(super) struct Repeats(Mutex<LruCache<Key, Repeat>>);

impl Default for Repeats {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(REMEMBERED)))
    }
}

impl Repeats {
    /// Takes a record in. Returns what is to be written now.
    pub(super) fn take(&self, pending: Pending) -> Vec<Pending> {
        let Pending { domain, entry } = pending;
        let key = key(domain, &entry.record);
        let now = Instant::now();
        let mut known = self.0.lock();
        if let Some(repeat) = known.get_mut(&key) {
            repeat.more += 1;
            repeat.latest = entry;
            return if now.duration_since(repeat.since) < WINDOW { Vec::new() } else { repeat.write(&key.0, now).into_iter().collect() };
        }
        let mut write = vec![Pending { domain: key.0.clone(), entry: entry.clone() }];
        let forgotten = known.push(key, Repeat { since: now, more: 0, latest: entry });
        write.extend(forgotten.and_then(|((domain, _), mut repeat)| repeat.write(&domain, now)));
        write
    }

    /// What was counted for a minute, or everything that was counted. Forgets what is over.
    pub(super) fn due(&self, everything: bool) -> Vec<Pending> {
        let now = Instant::now();
        let mut known = self.0.lock();
        let is_over = |repeat: &Repeat| everything || now.duration_since(repeat.since) >= WINDOW;
        let over: Vec<Key> = known.iter().filter(|(_, repeat)| is_over(repeat)).map(|(key, _)| key.clone()).collect();
        over.into_iter().filter_map(|key| known.pop(&key)?.write(&key.0, now)).collect()
    }
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
        let record = AuditRecord {
            operation: "put_tag".into(),
            code: Some("denied".into()),
            repository: Some(repository.parse().unwrap()),
            request_id: Some(id.to_string()),
            ..AuditRecord::default()
        };
        Pending { domain: DomainName::default(), entry: AuditEntry { record, status_if_there: None, of_registry: false, overrides: false } }
    }

    /// Repositories and numbers of what is to be written.
    fn said(pending: Vec<Pending>) -> Vec<(String, Option<u64>)> {
        pending.into_iter().map(|p| (p.entry.record.repository.unwrap().to_string(), p.entry.record.times)).collect()
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
        // Nobody asked meanwhile what is due.
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
            written.extend(said(repeats.take(refused(&format!("r{n}"), 0))));
        }
        assert!(written.contains(&("first".to_owned(), Some(2))), "what was counted is written when it is forgotten");
        assert_eq!(repeats.0.lock().len(), REMEMBERED.get());
    }
}
