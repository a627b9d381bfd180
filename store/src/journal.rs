//! The journal of names beside the packs: written before a change is acknowledged, so that a lost database loses nothing that was.
//!
//! A change and its row in `changes` are one transaction. [`Store::flush_journal`] copies rows into an object and only then records it, so a row
//! is gone only when its object is durable; who is killed in between leaves the row, and the next one writes it again. A record may therefore lie
//! in several objects: numbers tell.
//!
//! A checkpoint holds all names, from nothing. Everything up to its last number may go, and nothing else: whoever deletes an object has written
//! a checkpoint that covers it, and that checkpoint in turn goes only for a greater one. So any number of processes may do it at once.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{JournalRow, Unjournaled};
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};
use pfr_schema::FormatError;
use pfr_schema::journal::{Journal, Numbered, PREFIX};
use std::collections::HashSet;

/// Changes in one object.
const BATCH: usize = 1000;
/// Objects below which a checkpoint is not worth its while.
const FEW: usize = 256;
/// Repositories asked for at a time.
const PAGE: usize = 1000;

impl Store {
    /// Copies changes of names that are not in the journal yet into it, durably. Every change is, before it is acknowledged.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]: the changes stay noted, and the next call writes them.
    pub async fn flush_journal(&self) -> Result<()> {
        // Who waits here finds that the one before has written its change too.
        let _one_at_a_time = self.journaling.lock().await;
        loop {
            let changes = self.metadata.unjournaled(BATCH).await?;
            let more = changes.len() == BATCH;
            for journal in without_gaps(changes) {
                let (key, bytes) = journal.to_object();
                self.put_journal(row_of(&key, &journal), bytes).await?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Replaces the journal's objects by one that holds all names, if there are so many that it pays; returns how many objects were deleted.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]: what was not deleted yet is the next one's to delete.
    pub async fn checkpoint_journal(&self) -> Result<u64> {
        let rows = self.metadata.journal().await?;
        let checkpoint = rows.iter().filter(|row| row.checkpoint).map(|row| row.last).max().unwrap_or(0);
        let since = rows.iter().filter(|row| !row.checkpoint && row.last > checkpoint).count();
        // A checkpoint costs as much as there are names: it is paid for by the changes since the last one.
        if since <= FEW || since as u64 <= self.count_names().await? / 4 {
            return Ok(0);
        }
        self.replace_journal().await
    }

    /// Writes a checkpoint and deletes what it covers.
    pub(crate) async fn replace_journal(&self) -> Result<u64> {
        self.flush_journal().await?;
        let (last, names) = self.metadata.names().await?;
        let journal = Journal::checkpoint(last, names);
        let limit = self.options.limits.journal_bytes;
        let (key, bytes) = journal.to_object();
        if bytes.len() as u64 > limit {
            // It could not be read back.
            tracing::warn!(bytes = bytes.len(), limit, "there are too many names for one checkpoint of the journal: it is not written");
            return Ok(0);
        }
        self.put_journal(row_of(&key, &journal), bytes).await?;
        self.delete_journal_before(last, &key).await
    }

    async fn count_names(&self) -> Result<u64> {
        let (mut count, mut after) = (0, None);
        loop {
            let page = self.metadata.repositories(after, PAGE).await?;
            count += page.rows.iter().map(|row| row.snapshots + row.tags).sum::<u64>();
            after = page.next;
            if after.is_none() {
                return Ok(count);
            }
        }
    }

    /// Writes an object and then, when it is durable, its row.
    async fn put_journal(&self, row: JournalRow, bytes: Vec<u8>) -> Result<()> {
        self.packs.put(&Path::from(row.key.as_str()), PutPayload::from(bytes)).await.map_err(Error::packs)?;
        self.metadata.journaled(row).await
    }

    /// Deletes what the checkpoint at `key`, with everything up to `last`, covers: bytes first, then rows.
    async fn delete_journal_before(&self, last: u64, key: &str) -> Result<u64> {
        let rows = self.metadata.journal().await?;
        let covered = |row: &JournalRow| if row.checkpoint { (row.last, row.key.as_str()) < (last, key) } else { row.last <= last };
        let mut delete: Vec<String> = rows.iter().filter(|row| covered(row)).map(|row| row.key.clone()).collect();
        let recorded: HashSet<&str> = rows.iter().map(|row| row.key.as_str()).collect();
        // Who was killed between object and row left an object that no row names.
        for found in self.journal_keys().await? {
            if recorded.contains(found.as_str()) {
                continue;
            }
            match self.read_journal(&found).await {
                Ok(Some(journal)) if covered(&row_of(&found, &journal)) => delete.push(found),
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, key = found, "an object of the journal cannot be read; it is left as it lies"),
            }
        }
        for key in &delete {
            match self.packs.delete(&Path::from(key.as_str())).await {
                // Another process was faster.
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(Error::packs(error)),
            }
        }
        let deleted = delete.len() as u64;
        self.metadata.forget_journal(delete).await?;
        Ok(deleted)
    }

    /// Keys of the journal's objects on storage, in order.
    pub(crate) async fn journal_keys(&self) -> Result<Vec<String>> {
        let mut keys: Vec<String> = self
            .packs
            .list(Some(&Path::from(PREFIX)))
            .map_ok(|object| object.location.as_ref().to_owned())
            .try_collect()
            .await
            .map_err(Error::packs)?;
        keys.sort_unstable();
        Ok(keys)
    }

    /// An object of the journal, verified; `None` if it is gone.
    ///
    /// # Errors
    /// [`Error::Format`] if it is not what its key says.
    pub(crate) async fn read_journal(&self, key: &str) -> Result<Option<Journal>> {
        let limits = self.options.limits.clone();
        let found = match self.packs.get(&Path::from(key)).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(Error::packs(error)),
        };
        if found.meta.size > limits.journal_bytes {
            return Err(FormatError::TooLarge { what: "journal", found: found.meta.size, limit: limits.journal_bytes }.into());
        }
        let bytes = found.bytes().await.map_err(Error::packs)?;
        let key = key.to_owned();
        let parsed = tokio::task::spawn_blocking(move || Journal::parse(&key, &bytes, &limits)).await;
        Ok(Some(parsed.map_err(|e| Error::Internal(e.to_string()))??))
    }
}

/// The row of an object.
pub(crate) fn row_of(key: &str, journal: &Journal) -> JournalRow {
    JournalRow { key: key.to_owned(), first: journal.first(), last: journal.last, checkpoint: journal.checkpoint }
}

/// One journal for each sequence of numbers without a gap: recording it then speaks of no change that is not in it.
fn without_gaps(changes: Vec<Unjournaled>) -> Vec<Journal> {
    let mut sequences: Vec<Vec<Numbered>> = Vec::new();
    for Unjournaled { seq, record } in changes {
        let numbered = Numbered { seq, change: record };
        match sequences.last_mut() {
            Some(sequence) if sequence.last().is_some_and(|before| before.seq + 1 == seq) => sequence.push(numbered),
            _ => sequences.push(vec![numbered]),
        }
    }
    sequences.into_iter().map(Journal::changes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::journal::Record;

    #[test]
    fn a_gap_in_the_numbers_begins_another_object() {
        let change = |seq| Unjournaled {
            seq,
            record: Record::Untag { repository: "a/b".parse().expect("a name"), tag: "t".parse().expect("a tag") },
        };
        let journals = without_gaps([3, 4, 6, 9, 10].map(change).into());
        let spans: Vec<(u64, u64, usize)> = journals.iter().map(|j| (j.first(), j.last, j.records.len())).collect();
        assert_eq!(spans, [(3, 4, 2), (6, 6, 1), (9, 10, 2)]);
    }
}
