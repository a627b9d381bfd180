//! The journal of changes of tags and snapshots, beside the packs. It is written before a change is
//! acknowledged, so that the loss of the database loses no acknowledged change.
//!
//! A change and its row in `changes` are one transaction. [`Store::flush_journal`] copies rows into
//! an object and only then records it, so a row is gone only when its object is durable. If a
//! process is killed in between, the row stays and the next flush writes it again. The same happens
//! if the host goes down soon after: the acknowledgement does not wait until the disk has what was
//! recorded. So a record may be in several objects; its number identifies it.
//!
//! How it is kept short is in `summary`.

mod summary;

pub(crate) use summary::Newest;

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{JournalRow, Unjournaled};
use crate::trace::Stage;
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};
use pfr_schema::FormatError;
use pfr_schema::journal::{Journal, Key, Numbered, PREFIX};

/// Changes in one object.
const BATCH: usize = 1000;

impl Store {
    /// Copies all changes that are not in the journal yet into it, durably. A change is
    /// acknowledged only after that.
    ///
    /// # Errors
    /// [`Error::Unavailable`], also if the storage is another store's, [`Error::Full`]: the changes
    /// stay noted, and the next call writes them.
    #[boxed]
    pub async fn flush_journal(&self) -> Result<()> {
        // A caller that waits here usually finds that the flush before has written its change too.
        let waiting = Stage::wait("wait for the journal");
        let _one_at_a_time = self.journaling.lock().await;
        drop(waiting);
        loop {
            let changes = self.metadata.unjournaled(BATCH).await?;
            let more = changes.len() == BATCH;
            for journal in without_gaps(changes, self.options.limits.journal_bytes) {
                let row = self.put_journal(journal).await?;
                self.metadata.journaled(vec![row]).await?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Writes an object; returns its row, which is to be recorded now that it is durable.
    async fn put_journal(&self, journal: Journal) -> Result<JournalRow> {
        let (row, bytes) = pfr_service::task::spawn_blocking(move || {
            let (key, bytes) = journal.to_object();
            (row_of(&key, &journal), bytes)
        })
        .await?;
        let (found, limit) = (bytes.len() as u64, self.options.limits.journal_bytes);
        if found > limit {
            // A reader would refuse it.
            return Err(FormatError::TooLarge { what: "journal", found, limit }.into());
        }
        // A bucket that is another store's takes the object all the same.
        self.mark().await?;
        let path = Path::from(row.key.as_str());
        let stage = Stage::storage("put journal", &row.key, found);
        stage.end(self.packs.put(&path, PutPayload::from(bytes)).await.map_err(Error::packs))?;
        self.settle(&path).await?;
        Ok(row)
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
        let failed = |error| match Error::packs(error) {
            Error::Altered { byte, found, .. } => {
                let (expected, found) = ("what was encrypted there".to_owned(), found.to_owned());
                Error::from(FormatError::Field { document: "journal", path: format!("byte {byte}"), expected, found })
            }
            error => error,
        };
        let found = match self.packs.get(&Path::from(key)).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        if found.meta.size > limits.journal_bytes {
            return Err(FormatError::TooLarge { what: "journal", found: found.meta.size, limit: limits.journal_bytes }.into());
        }
        let bytes = found.bytes().await.map_err(failed)?;
        let key = key.to_owned();
        let parsed = pfr_service::task::spawn_blocking(move || Journal::parse(&key, &bytes, &limits)).await;
        Ok(Some(parsed??))
    }
}

/// The row of an object.
pub(crate) fn row_of(key: &str, journal: &Journal) -> JournalRow {
    JournalRow {
        key: key.to_owned(),
        first: journal.first(),
        last: journal.last,
        summary: journal.summary.is_some(),
        records: journal.records.len() as u64,
    }
}

/// The beginning of the keys of all parts of the summary that the part at `key` belongs to.
pub(crate) fn summary_of(key: &str) -> Result<String> {
    let prefix = Key::parse(key)?.set_prefix();
    prefix.ok_or_else(|| Error::Internal(format!("the tables say that {key} is a part of a journal summary; run fsck")))
}

/// One journal for each sequence of numbers without a gap, of at most `limit` bytes: recording it
/// then speaks of no change that is not in it.
fn without_gaps(changes: Vec<Unjournaled>, limit: u64) -> Vec<Journal> {
    let mut sequences: Vec<Vec<Numbered>> = Vec::new();
    let mut bytes = 0;
    for Unjournaled { seq, record } in changes {
        let numbered = Numbered { seq, change: record };
        let more = numbered.bytes();
        match sequences.last_mut() {
            Some(sequence) if sequence.last().is_some_and(|before| before.seq + 1 == seq) && Journal::ENVELOPE + bytes + more <= limit => {
                sequence.push(numbered);
                bytes += more;
            }
            _ => {
                sequences.push(vec![numbered]);
                bytes = more;
            }
        }
    }
    sequences.into_iter().map(Journal::changes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::journal::Record;

    fn change(seq: u64) -> Unjournaled {
        Unjournaled { seq, record: Record::Untag { repository: "a/b".parse().expect("a name"), tag: "t".parse().expect("a tag") } }
    }

    #[test]
    fn a_gap_in_the_numbers_begins_another_object() {
        let journals = without_gaps([3, 4, 6, 9, 10].map(change).into(), 1 << 20);
        let spans: Vec<(u64, u64, usize)> = journals.iter().map(|j| (j.first(), j.last, j.records.len())).collect();
        assert_eq!(spans, [(3, 4, 2), (6, 6, 1), (9, 10, 2)]);
    }

    #[test]
    fn no_object_is_larger_than_can_be_read() {
        let limit = 600;
        let journals = without_gaps((1..=100).map(change).collect(), limit);
        assert!(journals.len() > 10 && journals.len() < 100, "{}", journals.len());
        assert!(journals.iter().all(|journal| journal.to_object().1.len() as u64 <= limit));
        let numbers: Vec<u64> = journals.iter().flat_map(|j| j.records.iter().map(|r| r.seq)).collect();
        assert_eq!(numbers, (1..=100).collect::<Vec<_>>());
    }
}
