//! Restores tags and snapshots from the journal.

use super::Rebuild;
use crate::error::{Error, Result};
use crate::journal::row_of;
use crate::metadata::JournalRow;
use pfr_schema::Digest;
use pfr_schema::RepositoryName;
use pfr_schema::journal::{Journal, Key, Record};
use std::collections::{BTreeMap, BTreeSet};

/// Repositories asked for at a time.
const PAGE: usize = 1000;
/// Records restored, and rows written, in one transaction.
const BATCH: usize = 5000;

/// The state of the replay.
#[derive(Default)]
struct Replay {
    /// The last number seen, so that no number is used twice.
    last: u64,
    rows: Vec<JournalRow>,
    /// Snapshots that should exist and whose manifest is not stored.
    lost: BTreeSet<(RepositoryName, Digest)>,
    /// Changes read and not restored yet. A record that was written twice is in several objects.
    changes: BTreeMap<u64, Vec<Record>>,
}

impl Rebuild<'_> {
    /// Replays the newest complete summary, and what came after it. Objects are read one at a time.
    pub(super) async fn names(&mut self) -> Result<()> {
        let mut replay = Replay::default();
        let mut changes = Vec::new();
        // Parts by summary: its number, its name, the part's number.
        let mut summaries: BTreeMap<(u64, String), BTreeMap<u32, String>> = BTreeMap::new();
        for key in self.store.journal_keys().await? {
            match Key::parse(&key) {
                Ok(Key { number, part, .. }) => {
                    replay.last = replay.last.max(number);
                    match part {
                        Some((set, part)) => drop(summaries.entry((number, set)).or_default().insert(part, key)),
                        None => changes.push((number, key)),
                    }
                }
                Err(reason) => self.report.refused.push(format!("{key}: {reason}")),
            }
        }
        let mut covered = 0;
        for ((last, set), parts) in summaries.into_iter().rev() {
            if let Some(rows) = self.complete(&set, &parts).await? {
                self.summary(&mut replay, &rows).await?;
                replay.rows.extend(rows);
                covered = last;
                break;
            }
        }
        for (first, key) in changes {
            // Keys are in order: all changes below this one's first number have been read.
            let rest = replay.changes.split_off(&first);
            let before = std::mem::replace(&mut replay.changes, rest);
            self.changes(&mut replay, before).await?;
            let Some(journal) = self.object(&key).await? else { continue };
            replay.last = replay.last.max(journal.last);
            replay.rows.push(row_of(&key, &journal));
            for numbered in journal.records.into_iter().filter(|numbered| numbered.seq > covered) {
                let same = replay.changes.entry(numbered.seq).or_default();
                if !same.contains(&numbered.change) {
                    same.push(numbered.change);
                }
            }
        }
        let rest = std::mem::take(&mut replay.changes);
        self.changes(&mut replay, rest).await?;
        for (repository, manifest) in &replay.lost {
            self.report.lost.push(format!(
                "{repository}@{manifest}: its manifest, or something that it reaches, is not in any pack, or cannot be read there"
            ));
        }
        for rows in replay.rows.chunks(BATCH) {
            self.store.metadata.journaled(rows.to_vec()).await?;
        }
        // Numbers continue after the last one. This is written last: a database without a number
        // was not rebuilt completely, and is not used.
        self.store.metadata.restore_names(Vec::new(), replay.last).await?;
        self.count().await
    }

    /// Rows of the parts of a summary, if all of them are there and good. If its writer was killed,
    /// the last part is missing, which is no damage.
    async fn complete(&mut self, set: &str, parts: &BTreeMap<u32, String>) -> Result<Option<Vec<JournalRow>>> {
        let (mut rows, mut complete, mut ended) = (Vec::new(), true, false);
        for (number, key) in (0..).zip(parts) {
            let Some(journal) = self.object(key.1).await? else {
                complete = false;
                continue;
            };
            complete &= number == *key.0;
            rows.push(row_of(key.1, &journal));
            ended = journal.summary.is_some_and(|part| part.end);
        }
        if ended && !complete {
            self.report.refused.push(format!("journal summary {set}: it has {} parts that are well, and needs others", rows.len()));
        }
        Ok((complete && ended).then_some(rows))
    }

    async fn summary(&mut self, replay: &mut Replay, rows: &[JournalRow]) -> Result<()> {
        for row in rows {
            let Some(journal) = self.store.read_journal(&row.key).await? else {
                return Err(Error::Unavailable { what: "packs", reason: format!("{} vanished while it was read", row.key) });
            };
            let mut records = journal.records.into_iter().map(|numbered| numbered.change).peekable();
            while records.peek().is_some() {
                let batch = records.by_ref().take(BATCH).collect();
                self.restore(replay, batch).await?;
            }
        }
        Ok(())
    }

    async fn changes(&mut self, replay: &mut Replay, changes: BTreeMap<u64, Vec<Record>>) -> Result<()> {
        let records: Vec<Record> = changes.into_values().flatten().collect();
        if records.is_empty() { Ok(()) } else { self.restore(replay, records).await }
    }

    async fn restore(&mut self, replay: &mut Replay, records: Vec<Record>) -> Result<()> {
        for record in &records {
            if let Record::Delete { repository, manifest } = record {
                replay.lost.remove(&(repository.clone(), *manifest));
            }
        }
        for record in self.store.metadata.restore_names(records, 0).await? {
            if let Record::Snapshot { repository, manifest, .. } = record {
                replay.lost.insert((repository, manifest));
            }
        }
        Ok(())
    }

    /// An object of the journal, if it is there and good.
    async fn object(&mut self, key: &str) -> Result<Option<Journal>> {
        match self.store.read_journal(key).await {
            Ok(found) => {
                self.report.journal += u64::from(found.is_some());
                Ok(found)
            }
            Err(Error::Format(reason)) => {
                self.report.refused.push(format!("{key}: {reason}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn count(&mut self) -> Result<()> {
        let mut after = None;
        loop {
            let page = self.store.metadata.repositories(after, PAGE).await?;
            self.report.snapshots += page.rows.iter().map(|row| row.snapshots).sum::<u64>();
            self.report.tags += page.rows.iter().map(|row| row.tags).sum::<u64>();
            after = page.next;
            if after.is_none() {
                return Ok(());
            }
        }
    }
}
