//! The log of events, as a reader follows it: every change is in it once, in its order, when it is
//! durable.
//!
//! The model applies each event to the state before it. So an event that is missing, comes twice or
//! comes at another place leads to a state that stores do not show, or cannot be applied.

use crate::names::Names;
use pfr_schema::journal::Record;
use pfr_store::{Event, EventPage, Happening, Store};
use rand::RngExt as _;
use rand::rngs::StdRng;
use std::time::Duration;

/// Events of a history, at most.
pub const MOST: usize = 100_000;
/// Events that stay when the log is trimmed.
const KEPT: u64 = 20;
/// Longer than any history.
const AGES: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A reader that follows a store.
#[derive(Debug, Default)]
pub struct Follower {
    epoch: String,
    /// What was read and is still kept.
    read: Vec<Event>,
    /// The state after the last event.
    names: Names,
    /// Changes whose events have not come.
    pending: Vec<Record>,
    /// What readers found while operations ran.
    pages: Vec<EventPage>,
}

impl Follower {
    /// Begins to follow a store that shows `names`.
    ///
    /// # Errors
    /// In words: those of the store.
    pub async fn new(store: &Store, names: &Names) -> Result<Self, String> {
        // Changes that wait for the journal would become events, and are in `names` already.
        store.flush_journal().await.map_err(|e| e.to_string())?;
        let log = store.begin_events().await.map_err(|e| format!("beginning the log of events: {e}"))?;
        Ok(Self { epoch: log.epoch, names: names.clone(), ..Self::default() })
    }

    /// Remembers what a reader found in the middle of a wave.
    pub fn found(&mut self, page: EventPage) {
        self.pages.push(page);
    }

    /// Reads on, when no operation runs; returns the number of new events.
    ///
    /// # Errors
    /// In words: what is lost, repeated, out of order, or came too early.
    pub async fn check(&mut self, store: &Store, seen: &Names, random: &mut StdRng) -> Result<u64, String> {
        let page = store.metadata().events(0, MOST).await.map_err(|e| e.to_string())?;
        let (events, forgotten) = self.of_this_log(page)?;
        for early in std::mem::take(&mut self.pages) {
            let (early, _) = self.of_this_log(early)?;
            let early: Vec<Event> = early.into_iter().filter(|event| event.number > forgotten).collect();
            if !events.starts_with(&early) {
                return Err(format!("EVENTS: a reader found {early:#?}\nwhere the log has {events:#?}"));
            }
        }
        self.read.retain(|event| event.number > forgotten);
        if !events.starts_with(&self.read) {
            return Err(format!("EVENTS: behind what was read something changed: {:#?}\nis now {events:#?}", self.read));
        }
        let new = &events[self.read.len()..];
        for Event { number, what, .. } in new {
            if let Happening::Names(record) = what {
                apply(&mut self.names, record).map_err(|why| format!("EVENTS: event {number} {why}: {record:?}"))?;
            }
        }
        let count = new.len() as u64;
        let rows = store.metadata().unjournaled(MOST).await.map_err(|e| e.to_string())?;
        self.pending = rows.into_iter().map(|row| row.record).collect();
        let mut all = self.names.clone();
        for record in &self.pending {
            apply(&mut all, record).map_err(|why| format!("EVENTS: a change that waits for the journal {why}: {record:?}"))?;
        }
        if all != *seen {
            return Err(format!("EVENTS: {all:#?}\nfollows from them and from {:?}, and stores show {seen:#?}", self.pending));
        }
        self.read = events;
        if random.random_bool(0.1) {
            self.trim(store).await?;
        }
        Ok(count)
    }

    /// Compares what a rebuild brought back: everything that an event told.
    ///
    /// # Errors
    /// In words.
    pub fn survived(&self, seen: &Names) -> Result<(), String> {
        let mut possible = vec![self.names.clone()];
        for record in &self.pending {
            let with: Vec<Names> = possible.iter().filter_map(|names| with(names, record)).collect();
            possible.extend(with);
        }
        match possible.contains(seen) {
            true => Ok(()),
            false => Err(format!("EVENTS: {:#?}\nwas told, and after the rebuild there is {seen:#?}", self.names)),
        }
    }

    /// The events of a page, and the number before which none is kept.
    fn of_this_log(&self, EventPage { log, events }: EventPage) -> Result<(Vec<Event>, u64), String> {
        let log = log.ok_or("EVENTS: the log is gone")?;
        if log.epoch != self.epoch {
            return Err(format!("EVENTS: the log began anew, without a rebuild: {log:?} after {}", self.epoch));
        }
        let is_ordered = events.windows(2).all(|pair| pair[0].number < pair[1].number);
        let ends =
            events.first().is_none_or(|first| first.number > log.forgotten) && events.last().is_none_or(|last| last.number <= log.last);
        if is_ordered && ends { Ok((events, log.forgotten)) } else { Err(format!("EVENTS: {log:?} does not fit {events:#?}")) }
    }

    /// Forgets old events: the newest ones stay.
    async fn trim(&mut self, store: &Store) -> Result<(), String> {
        while store.metadata().trim_events(AGES, KEPT, 7).await.map_err(|e| e.to_string())? > 0 {}
        let page = store.metadata().events(0, MOST).await.map_err(|e| e.to_string())?;
        let (events, forgotten) = self.of_this_log(page)?;
        let last = self.read.last().map_or(0, |event| event.number);
        self.read.retain(|event| event.number > forgotten);
        if events != self.read || forgotten > last.saturating_sub(KEPT) {
            return Err(format!(
                "EVENTS: of those up to {last}, {events:#?}\nis left after trimming, and {forgotten} is said to be forgotten"
            ));
        }
        Ok(())
    }
}

fn with(names: &Names, record: &Record) -> Option<Names> {
    let mut names = names.clone();
    apply(&mut names, record).ok().map(|()| names)
}

/// Makes the change that a record tells, or says why it is none.
fn apply(names: &mut Names, record: &Record) -> Result<(), &'static str> {
    match record {
        Record::Snapshot { repository, manifest, parents, .. } => {
            let before = names.entry(repository.clone()).or_default().snapshots.insert(*manifest, parents.clone());
            before.map_or(Ok(()), |_| Err("brings a snapshot that is there"))
        }
        Record::Tag { repository, tag, manifest, .. } => {
            let repository = names.get_mut(repository).filter(|found| found.snapshots.contains_key(manifest));
            let repository = repository.ok_or("puts a tag on a snapshot that is not there")?;
            match repository.tags.insert(tag.clone(), *manifest) {
                Some(before) if before == *manifest => Err("puts a tag where it is"),
                _ => Ok(()),
            }
        }
        Record::Untag { repository, tag } => {
            let removed = names.get_mut(repository).and_then(|found| found.tags.remove(tag));
            removed.map(drop).ok_or("deletes a tag that is not there")
        }
        Record::Delete { repository: name, manifest } => {
            let repository = names.get_mut(name).ok_or("deletes from a repository that is not there")?;
            repository.snapshots.remove(manifest).ok_or("deletes a snapshot that is not there")?;
            repository.tags.retain(|_, digest| digest != manifest);
            if repository.snapshots.is_empty() {
                names.remove(name);
            }
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;

    fn tag(number: u8) -> Record {
        let (repository, tag) = ("a".parse().expect("a name"), "t".parse().expect("a tag"));
        Record::Tag { repository, tag, manifest: Digest::sha256(&[number]), at: 0 }
    }

    fn snapshot(number: u8) -> Record {
        let repository = "a".parse().expect("a name");
        Record::Snapshot {
            repository,
            manifest: Digest::sha256(&[number]),
            parents: vec![],
            artifact_type: None,
            subject: None,
            at: 0,
            new_bytes: 0,
        }
    }

    #[test]
    fn an_event_that_comes_twice_or_too_early_is_found() {
        let mut names = Names::new();
        assert!(apply(&mut names, &tag(1)).is_err(), "before its snapshot");
        for (record, once) in
            [(snapshot(1), true), (snapshot(1), false), (tag(1), true), (tag(1), false), (snapshot(2), true), (tag(2), true)]
        {
            assert_eq!(apply(&mut names, &record).is_ok(), once, "{record:?}");
        }
    }

    #[test]
    fn a_rebuild_may_lose_what_no_event_told_and_nothing_else() {
        let mut told = Names::new();
        [snapshot(1), tag(1)].iter().for_each(|record| apply(&mut told, record).expect("applies"));
        let follower = Follower { names: told.clone(), pending: vec![snapshot(2), tag(2)], ..Follower::default() };
        assert!(follower.survived(&told).is_ok());
        let with_one = with(&told, &snapshot(2)).expect("applies");
        assert!(follower.survived(&with_one).is_ok());
        assert!(follower.survived(&with(&with_one, &tag(2)).expect("applies")).is_ok());
        assert!(follower.survived(&Names::new()).is_err());
    }
}
