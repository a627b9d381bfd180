//! Names from the journal.

use super::Rebuild;
use crate::error::{Error, Result};
use crate::journal::row_of;
use pfr_schema::journal::{Journal, Record};
use std::collections::BTreeMap;

/// Repositories asked for at a time.
const PAGE: usize = 1000;

impl Rebuild<'_> {
    /// Replays the newest checkpoint and what came after it.
    pub(super) async fn names(&mut self) -> Result<()> {
        let store = self.store;
        let (mut rows, mut last) = (Vec::new(), 0);
        let mut checkpoint: Option<(String, Journal)> = None;
        let mut changes: BTreeMap<u64, Vec<Record>> = BTreeMap::new();
        for key in store.journal_keys().await? {
            let journal = match store.read_journal(&key).await {
                Ok(Some(journal)) => journal,
                Ok(None) => continue,
                Err(Error::Format(reason)) => {
                    // Its first number is in its name: it must not be given out again.
                    last = last.max(first_of(&key));
                    self.report.refused.push(format!("{key}: {reason}"));
                    continue;
                }
                Err(error) => return Err(error),
            };
            self.report.journal += 1;
            last = last.max(journal.last);
            rows.push(row_of(&key, &journal));
            if !journal.checkpoint {
                for numbered in journal.records {
                    // A record that was written twice is in several objects.
                    let same = changes.entry(numbered.seq).or_default();
                    if !same.contains(&numbered.change) {
                        same.push(numbered.change);
                    }
                }
            } else if checkpoint.as_ref().is_none_or(|(known, best)| (best.last, known) < (journal.last, &key)) {
                checkpoint = Some((key, journal));
            }
        }
        let (covered, mut records) = match checkpoint {
            Some((_, journal)) => (journal.last, journal.records.into_iter().map(|numbered| numbered.change).collect()),
            None => (0, Vec::new()),
        };
        records.extend(changes.into_iter().filter(|(seq, _)| *seq > covered).flat_map(|(_, records)| records));
        for record in store.metadata.restore_names(records, last).await? {
            if let Record::Snapshot { repository, manifest, .. } = record {
                self.report.lost.push(format!(
                    "{repository}@{manifest}: its manifest, or something that it reaches, is not in any pack, or cannot be read there"
                ));
            }
        }
        for row in rows {
            store.metadata.journaled(row).await?;
        }
        let mut after = None;
        loop {
            let page = store.metadata.repositories(after, PAGE).await?;
            self.report.snapshots += page.rows.iter().map(|row| row.snapshots).sum::<u64>();
            self.report.tags += page.rows.iter().map(|row| row.tags).sum::<u64>();
            after = page.next;
            if after.is_none() {
                return Ok(());
            }
        }
    }
}

/// The first number in an object, by its key.
fn first_of(key: &str) -> u64 {
    let name = key.rsplit('/').next().unwrap_or(key);
    name.split('-').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}
