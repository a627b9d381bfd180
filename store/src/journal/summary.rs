//! Keeps the journal short: writes summaries, and deletes the objects that they make superfluous.
//!
//! A summary at number L is a walk over all tags and snapshots that began at L. They may change
//! during the walk, so a page may have changes after L. The journal has all these changes before
//! the last part of the summary is durable, so a replay of the changes after L over the summary
//! gives the right state. Until that last part is durable, the previous summary counts; the rows of
//! all parts are then written together.
//!
//! The keys of a summary's parts identify the remains of a killed process. Only objects that the
//! newest summary does not need are deleted, so any number of processes may do this at the same
//! time.

use super::{Store, row_of, without_gaps};
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{JournalRow, JournalState};
use futures::StreamExt as _;
use object_store::ObjectStoreExt as _;
use object_store::path::Path;
use pfr_schema::Digest;
use pfr_schema::journal::{Journal, Key, Numbered, Part, Record};
use std::collections::HashSet;

/// Minimum number of objects for which a summary is written.
const FEW: usize = 256;
/// Bytes of a part. Making one takes some times as much memory.
const PART: u64 = 16 << 20;
/// Names asked for at a time, and bytes that one has at least about.
const PAGE: usize = 5000;
const NAME: u64 = 256;
/// Objects deleted before their rows go, and deletions in flight.
const BATCH: usize = 1000;
const AT_ONCE: usize = 16;

impl Store {
    /// Writes a summary if there are enough objects, and returns whether it did.
    /// [`Self::trim_journal`] deletes what it makes superfluous.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]: the summary before still counts.
    #[boxed]
    pub async fn summarize_journal(&self) -> Result<bool> {
        let pays = pays(&self.metadata.journal_state(FEW + 1).await?);
        if pays {
            self.write_summary().await?;
        }
        Ok(pays)
    }

    /// How many objects a collection would delete now: [`Self::flush_journal`],
    /// [`Self::summarize_journal`] and [`Self::trim_journal`] with this `limit`, after `more`
    /// changes that have an object each.
    pub(crate) async fn superfluous_journal(&self, more: u64, limit: usize) -> Result<u64> {
        // There are some only after a process was killed, or while others make changes.
        let waiting = without_gaps(self.metadata.unjournaled(super::BATCH).await?, self.options.limits.journal_bytes).len() as u64;
        let mut state = self.metadata.journal_state(FEW + 1).await?;
        (state.objects, state.last) = (state.objects + waiting + more, state.last + more);
        let (rows, pays) = (self.metadata.journal().await?, pays(&state));
        let newest = if pays { Some(Newest::begun(state.last)) } else { Newest::of(&rows)? };
        let Some(newest) = newest else { return Ok(0) };
        let recorded = rows.iter().filter(|row| newest.covers(row)).count() as u64 + if pays { waiting + more } else { 0 };
        let limit = limit as u64;
        if recorded == 0 || recorded >= limit {
            return Ok(recorded.min(limit));
        }
        Ok(recorded + self.unrecorded(&newest, &rows).await?.len() as u64)
    }

    pub(crate) async fn write_summary(&self) -> Result<()> {
        let (last, cursor) = self.metadata.begin_names().await?;
        let limit = self.options.limits.journal_bytes.min(PART);
        let page = usize::try_from(limit / NAME).unwrap_or(PAGE).clamp(1, PAGE);
        let set = uuid::Uuid::now_v7().simple().to_string();
        let mut parts = Parts { store: self, last, set, limit, records: Vec::new(), bytes: Journal::ENVELOPE, rows: Vec::new() };
        let mut next = Some(cursor);
        while let Some(cursor) = next {
            let (records, after) = self.metadata.names(cursor, page).await?;
            for record in records {
                parts.push(record).await?;
            }
            next = after;
        }
        // Pages may have changes that are not in the journal yet.
        self.flush_journal().await?;
        parts.write(true).await?;
        self.metadata.journaled(parts.rows).await
    }

    /// Deletes at most `limit` objects that the newest summary makes superfluous, and, when there
    /// are no more, those that no row names; returns how many.
    ///
    /// # Errors
    /// [`Error::Unavailable`], also if the storage is another store's, [`Error::Full`]: the next
    /// call deletes the rest.
    #[boxed]
    pub async fn trim_journal(&self, limit: usize) -> Result<u64> {
        let mut deleted = 0;
        while deleted < limit {
            let keys = self.metadata.superfluous_journal(BATCH.min(limit - deleted)).await?;
            if keys.is_empty() {
                break;
            }
            if deleted == 0 {
                // No row names the objects of another store: a sweep of its storage would take them
                // for remains.
                self.storage_is_there().await?;
            }
            deleted += keys.len();
            self.delete_journal(keys).await?;
        }
        if deleted > 0 && deleted < limit {
            deleted += self.sweep_journal().await?;
        }
        Ok(deleted as u64)
    }

    /// Deletes objects, then the rows of those that are gone; returns the first error.
    async fn delete_journal(&self, keys: Vec<String>) -> Result<()> {
        let mut deletions = futures::stream::iter(keys)
            .map(|key| async move {
                let deleted = self.packs.delete(&Path::from(key.as_str())).await;
                (key, deleted)
            })
            .buffer_unordered(AT_ONCE);
        let (mut gone, mut failed) = (Vec::new(), Ok(()));
        while let Some((key, deleted)) = deletions.next().await {
            match deleted {
                // Another process may have been faster.
                Ok(()) | Err(object_store::Error::NotFound { .. }) => gone.push(key),
                Err(error) => failed = failed.and(Err(Error::packs(error))),
            }
        }
        self.metadata.forget_journal(gone).await?;
        failed
    }

    /// Deletes superfluous objects that no row names.
    async fn sweep_journal(&self) -> Result<usize> {
        let rows = self.metadata.journal().await?;
        let Some(newest) = Newest::of(&rows)? else { return Ok(0) };
        let delete = self.unrecorded(&newest, &rows).await?;
        let deleted = delete.len();
        self.delete_journal(delete).await?;
        Ok(deleted)
    }

    /// Objects that this summary makes superfluous, and that no row names: a process that was
    /// killed between object and row left them.
    async fn unrecorded(&self, newest: &Newest, rows: &[JournalRow]) -> Result<Vec<String>> {
        let keys = self.journal_keys().await?;
        let recorded: HashSet<&str> = rows.iter().map(|row| row.key.as_str()).collect();
        let mut delete = Vec::new();
        for key in keys.into_iter().filter(|key| !recorded.contains(key.as_str())) {
            let superfluous = match Key::parse(&key) {
                Ok(parsed) if parsed.part.is_some() => Ok(key < newest.prefix),
                Ok(parsed) if parsed.number > newest.last => Ok(false),
                Ok(_) => self.read_journal(&key).await.map(|journal| journal.is_some_and(|j| newest.covers(&row_of(&key, &j)))),
                Err(error) => Err(error.into()),
            };
            match superfluous {
                Ok(true) => delete.push(key),
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, key, "journal: an object cannot be read, it is left as it is"),
            }
        }
        Ok(delete)
    }
}

/// Whether a summary is to be written. It costs as much as there are tags and snapshots, so it is
/// written only after about as many changes.
fn pays(state: &JournalState) -> bool {
    state.objects > FEW as u64 && state.last.saturating_sub(state.summary) > state.names / 4
}

/// The newest summary.
pub(crate) struct Newest {
    last: u64,
    prefix: String,
}

impl Newest {
    /// One that begins now, at this number.
    fn begun(last: u64) -> Self {
        let set = uuid::Uuid::now_v7().simple().to_string();
        let key = Key { number: last, part: Some((set, 0)), digest: Digest::sha256(b"") };
        Self { last, prefix: key.set_prefix().unwrap_or_default() }
    }

    pub(crate) fn of(rows: &[JournalRow]) -> Result<Option<Self>> {
        let newest = rows.iter().filter(|row| row.summary).max_by_key(|row| (row.last, &row.key));
        newest.map(|row| Ok(Self { last: row.last, prefix: super::summary_of(&row.key)? })).transpose()
    }

    /// Whether it makes an object superfluous.
    pub(crate) fn covers(&self, row: &JournalRow) -> bool {
        if row.summary { row.key < self.prefix } else { row.last <= self.last }
    }
}

/// The parts of a summary on their way to storage.
struct Parts<'a> {
    store: &'a Store,
    last: u64,
    set: String,
    limit: u64,
    records: Vec<Record>,
    bytes: u64,
    rows: Vec<JournalRow>,
}

impl Parts<'_> {
    async fn push(&mut self, record: Record) -> Result<()> {
        let numbered = Numbered { seq: self.last, change: record };
        let bytes = numbered.bytes();
        if self.bytes + bytes > self.limit && !self.records.is_empty() {
            self.write(false).await?;
        }
        self.bytes += bytes;
        self.records.push(numbered.change);
        Ok(())
    }

    async fn write(&mut self, end: bool) -> Result<()> {
        let part = Part { set: self.set.clone(), number: self.rows.len() as u32, end };
        let records = std::mem::take(&mut self.records);
        self.bytes = Journal::ENVELOPE;
        self.rows.push(self.store.put_journal(Journal::part(self.last, part, records)).await?);
        Ok(())
    }
}
