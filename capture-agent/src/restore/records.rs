//! The last restores into each engine, and what became of the states that lay ready for it: what
//! `pf restores` lists. They are kept in memory only, also those of engines that have left: a crash
//! is what an operator asks about.

use super::staged::{Offer, position_of};
use super::write::Written;
use crate::error::{Error, Result};
use lru::LruCache;
use parking_lot::Mutex;
use pfr_schema::agent::{RestoreOutcome, RestoreRecord, RestoreReport};
use pfr_schema::engine::{Fill, Outcome, Taking};
use std::cmp::Reverse;
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::time::Instant;

/// Records of one engine; the oldest goes first.
const RECORDS: usize = 256;
/// Engines with records, also engines that have left; the one without news for longest goes first.
const ENGINES: NonZeroUsize = NonZeroUsize::new(64).expect("not zero");
/// Bytes of a text: engines choose their names, and errors may repeat them. All records together
/// have six texts each: 56 MB if every engine and every text is as long as it may be.
const TEXT: usize = 512;

/// The records of all engines.
#[derive(Debug)]
pub struct Records(Mutex<LruCache<String, VecDeque<Entry>>>);

#[derive(Clone, Debug)]
struct Entry {
    record: RestoreRecord,
    /// The engine's name of the fill.
    fill: Option<String>,
    /// Whether the engine has yet to say what became of the fill.
    is_open: bool,
}

/// A fill of one rank.
pub(super) struct Filling<'a> {
    pub rank: u32,
    pub fill: &'a Fill,
    /// The state, as it lay ready before the fill: one that fails ends that.
    pub offer: Option<Offer>,
    pub begun: Instant,
}

impl Default for Records {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(ENGINES)))
    }
}

impl Records {
    /// The last records of an engine, `limit` at most, newest first; `None` if there was never one.
    #[must_use]
    pub fn list(&self, engine: &str, limit: usize) -> Option<Vec<RestoreRecord>> {
        let records = self.0.lock();
        let of = records.peek(engine)?;
        Some(of.iter().rev().take(limit).map(|entry| entry.record.clone()).collect())
    }

    /// The last records of all engines, also of those that have left: `limit` at most, newest
    /// first.
    #[must_use]
    pub fn newest(&self, limit: usize) -> Vec<RestoreRecord> {
        let records = self.0.lock();
        let of_each = records.iter().flat_map(|(_, of)| of.iter().rev().take(limit));
        let mut newest: Vec<&RestoreRecord> = of_each.map(|entry| &entry.record).collect();
        // Those of one engine stay in the order in which they were noted.
        newest.sort_by_key(|record| Reverse(record.noted_at));
        newest.into_iter().take(limit).cloned().collect()
    }

    /// Notes a restore that has ended at `now`, in milliseconds since 1970.
    pub(super) fn ended(&self, now: u64, engine: &str, reference: &str, seconds: f64, result: Result<&RestoreReport, &Error>) {
        // An engine that was never here is a mistake in a request, and any name may be one.
        if matches!(result, Err(Error::EngineUnknown { .. })) && !self.0.lock().contains(engine) {
            return;
        }
        let mut entry = Entry::new(now, engine, RestoreOutcome::Failed);
        let record = &mut entry.record;
        record.reference = Some(short(reference));
        match result {
            Ok(report) => {
                record.outcome = match (&report.sequence, report.partly) {
                    (None, _) => RestoreOutcome::Ready,
                    (Some(_), true) => RestoreOutcome::Partly,
                    (Some(_), false) => RestoreOutcome::Restored,
                };
                // A snapshot that lies ready fills no block yet.
                record.pages_filled = if report.sequence.is_some() { report.pages } else { 0 };
                record.sequence = report.sequence.as_deref().map(short);
                (record.digest, record.position) = (Some(report.digest), Some(report.boundary));
                (record.bytes_written, record.bytes_pulled) = (report.bytes_written, report.bytes_pulled);
                record.seconds = Some(report.total_seconds);
            }
            Err(error) => {
                record.seconds = Some(seconds);
                entry.fails(error);
            }
        }
        self.change(engine, |of| of.push_back(entry));
    }

    /// Notes a fill that has ended. Ranks of one fill are one record, if the engine names its
    /// fills; otherwise only rank 0 is noted, and what fails.
    pub(super) fn filled(&self, now: u64, engine: &str, filling: &Filling<'_>, result: Result<&Written, &Error>) {
        let Filling { rank, fill, offer, begun } = filling;
        let name = fill.fill.as_deref().map(short);
        self.change(engine, |of| {
            let known = name.as_deref().and_then(|name| fill_of(of, name));
            if known.is_none() && name.is_none() && *rank > 0 && result.is_ok() {
                return;
            }
            let at = known.unwrap_or_else(|| {
                of.push_back(Entry { is_open: true, fill: name.clone(), ..Entry::new(now, engine, RestoreOutcome::Filled) });
                of.len() - 1
            });
            let entry = &mut of[at];
            entry.concerns(&fill.restore, offer.as_ref());
            let record = &mut entry.record;
            record.seconds = Some(record.seconds.unwrap_or_default().max(begun.elapsed().as_secs_f64()));
            match result {
                Ok(written) => {
                    record.pages_kept += written.pages_kept;
                    record.pages_filled += written.pages;
                    record.bytes_written += written.bytes;
                }
                Err(error) => entry.fails(error),
            }
        });
    }

    /// Notes what an engine says of requests for which a state lay ready. `offer` is that state, if
    /// it still does.
    pub(super) fn told(&self, now: u64, engine: &str, outcome: &Outcome, offer: Option<&Offer>) {
        let what = outcome.what;
        if what.is_automatic() || what == Taking::LogitsEqual {
            return;
        }
        self.change(engine, |of| {
            let new = |fill| {
                let mut entry = Entry { fill, ..Entry::new(now, engine, RestoreOutcome::NotTaken) };
                if let Some(restore) = &outcome.restore {
                    entry.concerns(restore, offer);
                }
                entry
            };
            let mut left = outcome.count;
            for named in outcome.requests.iter().take(RECORDS) {
                let Some(less) = left.checked_sub(1) else { break };
                left = less;
                let fill = named.fill.as_deref().map(short);
                let at = fill.as_deref().and_then(|name| fill_of(of, name)).unwrap_or_else(|| {
                    of.push_back(new(fill));
                    of.len() - 1
                });
                of[at].record.request = Some(short(&named.request));
                of[at].ends(what, 1);
            }
            // Of requests without names, fills are taken in their order.
            while left > 0
                && let Some(entry) = of.iter_mut().find(|entry| entry.waits_for(outcome))
            {
                entry.ends(what, 1);
                left -= 1;
            }
            if left > 0 {
                let mut entry = new(None);
                entry.ends(what, left);
                of.push_back(entry);
            }
        });
    }

    fn change(&self, engine: &str, change: impl FnOnce(&mut VecDeque<Entry>)) {
        let mut records = self.0.lock();
        let of = records.get_or_insert_mut(engine.to_owned(), VecDeque::new);
        change(of);
        while of.len() > RECORDS {
            of.pop_front();
        }
    }
}

/// The place of a fill among the records of its engine.
fn fill_of(of: &VecDeque<Entry>, name: &str) -> Option<usize> {
    of.iter().rposition(|entry| entry.fill.as_deref() == Some(name))
}

impl Entry {
    fn new(now: u64, engine: &str, outcome: RestoreOutcome) -> Self {
        let record = RestoreRecord {
            engine: engine.to_owned(),
            // It is known when the record is listed.
            gone: false,
            noted_at: now,
            outcome,
            reason: None,
            error: None,
            code: None,
            reference: None,
            digest: None,
            restore: None,
            sequence: None,
            request: None,
            requests: 0,
            position: None,
            pages_kept: 0,
            pages_filled: 0,
            bytes_written: 0,
            bytes_pulled: 0,
            seconds: None,
        };
        Self { record, fill: None, is_open: false }
    }

    /// It is about this state. What is known of it already stays: after a fill that failed, the
    /// state lies ready no longer.
    fn concerns(&mut self, restore: &str, offer: Option<&Offer>) {
        let record = &mut self.record;
        record.restore = Some(short(restore));
        record.position = record.position.or_else(|| offer.map(|offer| offer.position)).or_else(|| position_of(restore));
        if let Some(offer) = offer {
            record.digest = Some(offer.digest);
            record.reference = Some(short(&offer.reference));
        }
    }

    /// The first failure of several ranks counts.
    fn fails(&mut self, error: &Error) {
        if self.is_open {
            self.record.outcome = RestoreOutcome::Failed;
        }
        if self.record.error.is_none() {
            (self.record.error, self.record.code) = (Some(short(&error.to_string())), Some(error.code()));
        }
    }

    /// The engine says what became of it.
    fn ends(&mut self, what: Taking, requests: u64) {
        let is_partly = self.record.restore.as_deref().and_then(position_of).is_some();
        self.record.outcome = match what {
            Taking::LogitsDiffer => RestoreOutcome::Failed,
            _ if !what.is_taken() => RestoreOutcome::NotTaken,
            _ if is_partly => RestoreOutcome::Partly,
            _ => RestoreOutcome::Restored,
        };
        self.record.reason = Some(what).filter(|what| !what.is_taken());
        self.record.requests = requests;
        self.is_open = false;
    }

    /// Whether an outcome without a name may be that of this fill.
    fn waits_for(&self, outcome: &Outcome) -> bool {
        let fits = match outcome.what {
            Taking::Taken | Taking::TakenOnKept => self.record.outcome == RestoreOutcome::Filled,
            Taking::FillFailed | Taking::KeptDiffers => self.record.outcome == RestoreOutcome::Failed,
            Taking::FillLate => true,
            // These come to no fill, or after it.
            _ => false,
        };
        self.is_open && fits && self.record.restore == outcome.restore.as_deref().map(short)
    }
}

/// The text; a longer one is cut, and ends in an ellipsis.
fn short(text: &str) -> String {
    if text.len() <= TEXT {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(TEXT - '…'.len_utf8())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;
    use pfr_schema::engine::OutcomeRequest;
    use std::collections::BTreeMap;

    fn offer() -> Option<Offer> {
        Some(Offer { reference: "team/agent:now".into(), digest: Digest::sha256(b"snapshot"), position: 61 })
    }

    /// A fill of one rank, by its name.
    fn fill(name: Option<&str>) -> Fill {
        Fill { restore: "r".into(), blocks: BTreeMap::new(), after: None, kept: 0, fill: name.map(Into::into) }
    }

    fn fills(records: &Records, rank: u32, name: Option<&str>, result: Result<&Written, &Error>) {
        records.filled(5, "e", &Filling { rank, fill: &fill(name), offer: offer(), begun: Instant::now() }, result);
    }

    fn written() -> Written {
        Written { bytes: 100, pages: 3, pages_kept: 2, ..Written::default() }
    }

    fn outcome(what: Taking, count: u64, requests: &[(&str, Option<&str>)]) -> Outcome {
        let named = |(request, fill): &(&str, Option<&str>)| OutcomeRequest { request: (*request).into(), fill: fill.map(Into::into) };
        Outcome { restore: Some("r".into()), what, count, requests: requests.iter().map(named).collect() }
    }

    /// Outcome, reason and request of each record, newest first.
    fn listed(records: &Records) -> Vec<(RestoreOutcome, Option<Taking>, Option<String>)> {
        let records = records.list("e", usize::MAX).unwrap_or_default();
        records.into_iter().map(|record| (record.outcome, record.reason, record.request)).collect()
    }

    #[test]
    fn ranks_of_one_fill_are_one_record_and_the_engine_says_what_became_of_it() {
        let records = Records::default();
        for name in ["a-1", "a-2"] {
            fills(&records, 0, Some(name), Ok(&written()));
            fills(&records, 1, Some(name), Ok(&written()));
        }
        let filled = (RestoreOutcome::Filled, None, None);
        assert_eq!(listed(&records), [filled.clone(), filled]);
        let record = records.list("e", 1).unwrap().remove(0);
        assert_eq!((record.pages_kept, record.pages_filled, record.bytes_written), (4, 6, 200));
        assert_eq!((record.noted_at, record.position, record.requests), (5, Some(61), 0));
        assert_eq!((record.reference.as_deref(), record.digest), (Some("team/agent:now"), Some(Digest::sha256(b"snapshot"))));

        // The first of the two, although the other is newer; then one that came to no fill.
        records.told(6, "e", &outcome(Taking::Taken, 1, &[("one", Some("a-1"))]), None);
        records.told(6, "e", &outcome(Taking::EngineHasMore, 1, &[("two", None)]), offer().as_ref());
        let more = (RestoreOutcome::NotTaken, Some(Taking::EngineHasMore), Some("two".to_owned()));
        let one = (RestoreOutcome::Restored, None, Some("one".to_owned()));
        assert_eq!(listed(&records), [more, (RestoreOutcome::Filled, None, None), one]);
        // A report that comes before the end of its fill.
        records.told(7, "e", &outcome(Taking::FillLate, 1, &[("three", Some("a-3"))]), offer().as_ref());
        fills(&records, 0, Some("a-3"), Err(&Error::Ended));
        let late = records.list("e", 1).unwrap().remove(0);
        assert_eq!((late.outcome, late.reason), (RestoreOutcome::NotTaken, Some(Taking::FillLate)));
        assert_eq!((late.code, late.error), (Some(Error::Ended.code()), Some(Error::Ended.to_string())));
    }

    #[test]
    fn an_engine_that_names_neither_fills_nor_requests_is_understood_by_their_order() {
        let records = Records::default();
        fills(&records, 0, None, Ok(&written()));
        fills(&records, 1, None, Ok(&written()));
        fills(&records, 0, None, Err(&Error::Ended));
        fills(&records, 0, None, Ok(&written()));
        assert_eq!(listed(&records).len(), 3, "rank 1 was noted");
        records.told(6, "e", &outcome(Taking::FillFailed, 1, &[]), None);
        records.told(6, "e", &outcome(Taking::Taken, 5, &[]), offer().as_ref());
        let taken = (RestoreOutcome::Restored, None, None);
        let failed = (RestoreOutcome::NotTaken, Some(Taking::FillFailed), None);
        assert_eq!(listed(&records), [taken.clone(), taken.clone(), failed, taken]);
        let rest = records.list("e", 1).unwrap().remove(0);
        assert_eq!((rest.requests, rest.pages_filled, rest.digest), (3, 0, Some(Digest::sha256(b"snapshot"))));
    }

    #[test]
    fn the_beginning_of_a_snapshot_is_taken_in_part_and_what_automatic_mode_counts_is_left_out() {
        let records = Records::default();
        let of = |what, count| Outcome { restore: Some("r@40".into()), ..outcome(what, count, &[]) };
        records.told(6, "e", &of(Taking::Taken, 1), None);
        for what in [Taking::LogitsEqual, Taking::HitMemory, Taking::Miss, Taking::SaveDroppedRate] {
            records.told(6, "e", &of(what, 1), None);
        }
        records.told(6, "e", &of(Taking::LogitsDiffer, 1), None);
        records.told(6, "e", &of(Taking::Taken, 0), None);
        let differ = (RestoreOutcome::Failed, Some(Taking::LogitsDiffer), None);
        assert_eq!(listed(&records), [differ, (RestoreOutcome::Partly, None, None)]);
        assert_eq!(records.list("e", 1).unwrap()[0].position, Some(40));
    }

    #[test]
    fn the_records_of_all_engines_are_listed_together_newest_first() {
        let records = Records::default();
        for (now, engine, reference) in [(1, "a", "x"), (2, "b", "x"), (3, "a", "x"), (3, "a", "y"), (4, "b", "x")] {
            records.ended(now, engine, reference, 0.5, Err(&Error::Ended));
        }
        let newest = |limit| {
            let of = |record: RestoreRecord| (record.noted_at, record.engine, record.reference.unwrap());
            records.newest(limit).into_iter().map(of).collect::<Vec<_>>()
        };
        let all = [(4, "b", "x"), (3, "a", "y"), (3, "a", "x"), (2, "b", "x"), (1, "a", "x")];
        let all = all.map(|(now, engine, reference)| (now, engine.to_owned(), reference.to_owned()));
        assert_eq!((newest(usize::MAX), newest(2)), (all.to_vec(), all[..2].to_vec()));
        assert_eq!(Records::default().newest(9), []);
    }

    #[test]
    fn records_are_bounded_in_number_and_in_length() {
        let records = Records::default();
        assert_eq!(records.list("e", 9), None);
        let unknown = Error::EngineUnknown { engine: "e".into(), known: String::new() };
        records.ended(1, "e", "team/agent:x", 0.5, Err(&unknown));
        assert_eq!(records.list("e", 9), None, "a name that no engine had");
        let long = "ö".repeat(2 * TEXT);
        for at in 0..2 * RECORDS as u64 {
            records.ended(at, "e", &long, 0.5, Err(&Error::Invalid(long.clone())));
        }
        records.ended(9999, "e", "team/agent:x", 0.5, Err(&unknown));
        let list = records.list("e", usize::MAX).unwrap();
        assert_eq!((list.len(), list[0].noted_at, list[1].noted_at), (RECORDS, 9999, 2 * RECORDS as u64 - 1));
        assert_eq!((list[0].seconds, list[0].code), (Some(0.5), Some(unknown.code())));
        for text in [&list[1].reference, &list[1].error] {
            let text = text.as_ref().unwrap();
            assert!((TEXT - 1..=TEXT).contains(&text.len()) && text.ends_with("ö…"), "{text}");
        }
        for engine in 0..2 * ENGINES.get() {
            records.ended(1, &engine.to_string(), "x", 0.0, Err(&Error::Ended));
        }
        assert_eq!((records.list("e", 1), records.0.lock().len()), (None, ENGINES.get()));
    }
}
