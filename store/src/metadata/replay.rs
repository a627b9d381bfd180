//! What a sequence of journal records comes to: the names that exist after the last of them.

use pfr_schema::journal::Record;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::collections::{BTreeMap, HashMap};

/// Names, replayed. A snapshot that was deleted on the way is not in it, so nobody misses what it held.
#[derive(Debug, Default)]
pub(crate) struct Names<'a> {
    /// Records of snapshots by the position at which they came: lists are in this order.
    snapshots: BTreeMap<usize, &'a Record>,
    positions: HashMap<(&'a RepositoryName, Digest), usize>,
    /// Where each tag points, since when, and the position at which it was put there.
    tags: BTreeMap<(&'a RepositoryName, &'a Tag), (Digest, u64, usize)>,
}

impl<'a> Names<'a> {
    /// Replays records, oldest first.
    pub(crate) fn replay(records: &'a [Record]) -> Self {
        let mut names = Self::default();
        for (position, record) in records.iter().enumerate() {
            match record {
                Record::Snapshot { repository, manifest, .. } => {
                    // It may lie in a checkpoint and behind it: the first place counts.
                    let first = *names.positions.entry((repository, *manifest)).or_insert(position);
                    names.snapshots.entry(first).or_insert(record);
                }
                Record::Tag { repository, tag, manifest, at } => {
                    names.tags.insert((repository, tag), (*manifest, *at, position));
                }
                Record::Untag { repository, tag } => {
                    names.tags.remove(&(repository, tag));
                }
                Record::Delete { repository, manifest } => {
                    if let Some(position) = names.positions.remove(&(repository, *manifest)) {
                        names.snapshots.remove(&position);
                    }
                }
            }
        }
        names
    }

    /// Records of the snapshots that exist, oldest first.
    pub(crate) fn snapshots(&self) -> impl Iterator<Item = &'a Record> + '_ {
        self.snapshots.values().copied()
    }

    /// Repository, tag, snapshot and time of the tags that exist. A tag that was put before its snapshot came went with the snapshot's predecessor.
    pub(crate) fn tags(&self) -> impl Iterator<Item = (&'a RepositoryName, &'a Tag, Digest, u64)> + '_ {
        let holds = |repository, (manifest, _, put): (Digest, u64, usize)| {
            self.positions.get(&(repository, manifest)).is_some_and(|came| *came < put)
        };
        self.tags
            .iter()
            .filter(move |((repository, _), target)| holds(*repository, **target))
            .map(|((repository, tag), (manifest, at, _))| (*repository, *tag, *manifest, *at))
    }
}
