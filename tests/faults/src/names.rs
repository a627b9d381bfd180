//! The oracle of tags and snapshots: which state concurrent changes may lead to, and what must
//! survive the loss of the database.

use pfr_schema::api::TagState;
use pfr_schema::{Digest, RepositoryName, Tag};
use std::collections::BTreeMap;

/// One repository.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repository {
    /// Snapshots and their parents.
    pub snapshots: BTreeMap<Digest, Vec<Digest>>,
    /// Tags.
    pub tags: BTreeMap<Tag, Digest>,
}

/// All tags and snapshots, by repository. A repository without snapshots is not in it.
pub type Names = BTreeMap<RepositoryName, Repository>;

/// A change of tags or snapshots.
#[derive(Clone, Debug)]
pub enum Change {
    /// A commit of a snapshot, with or without a tag.
    Commit {
        /// The repository.
        repository: RepositoryName,
        /// The snapshot.
        snapshot: Digest,
        /// Its parents.
        parents: Vec<Digest>,
        /// The tag, and the state that it must have before.
        tag: Option<(Tag, Option<TagState>)>,
    },
    /// Tags move to a snapshot.
    Tags {
        /// The repository.
        repository: RepositoryName,
        /// The snapshot.
        snapshot: Digest,
        /// The tags, and the states that they must have before.
        moves: Vec<(Tag, Option<TagState>)>,
    },
    /// A tag is deleted.
    Untag {
        /// The repository.
        repository: RepositoryName,
        /// The tag.
        tag: Tag,
        /// The state that it must have before.
        expected: Option<TagState>,
    },
    /// A snapshot is deleted, with its tags.
    Delete {
        /// The repository.
        repository: RepositoryName,
        /// The snapshot.
        snapshot: Digest,
    },
}

/// How a change ended, as its caller saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged.
    Done,
    /// Refused because of the state of tags and snapshots.
    Refused,
    /// It may have happened.
    Unknown,
}

fn at(found: Option<&Digest>, expected: Option<TagState>) -> bool {
    expected.is_none_or(|expected| expected == found.map_or(TagState::Absent, |digest| TagState::At(*digest)))
}

impl Change {
    /// The state after the change; `None` if the store must refuse it.
    #[must_use]
    pub fn apply(&self, names: &Names) -> Option<Names> {
        let mut after = names.clone();
        match self {
            Self::Commit { repository, snapshot, parents, tag } => {
                let repository = after.entry(repository.clone()).or_default();
                repository.snapshots.entry(*snapshot).or_insert_with(|| parents.clone());
                if let Some((tag, expected)) = tag {
                    if !at(repository.tags.get(tag), *expected) {
                        return None;
                    }
                    repository.tags.insert(tag.clone(), *snapshot);
                }
            }
            Self::Tags { repository, snapshot, moves } => {
                let repository = after.get_mut(repository).filter(|r| r.snapshots.contains_key(snapshot))?;
                for (tag, expected) in moves {
                    if !at(repository.tags.get(tag), *expected) {
                        return None;
                    }
                    repository.tags.insert(tag.clone(), *snapshot);
                }
            }
            Self::Untag { repository, tag, expected } => {
                let repository = after.get_mut(repository)?;
                if !at(repository.tags.get(tag), *expected) {
                    return None;
                }
                repository.tags.remove(tag)?;
            }
            Self::Delete { repository: name, snapshot } => {
                let repository = after.get_mut(name)?;
                repository.snapshots.remove(snapshot)?;
                repository.tags.retain(|_, digest| digest != snapshot);
                if repository.snapshots.is_empty() {
                    after.remove(name);
                }
            }
        }
        Some(after)
    }
}

/// What the oracle knows about tags and snapshots.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// The state that stores show now.
    pub names: Names,
    /// The state after the last acknowledged change, which must survive the loss of the database.
    durable: Names,
    /// Unacknowledged changes since then. A rebuild may lose any number of the last ones.
    tail: Vec<Change>,
}

impl Oracle {
    /// Records the outcomes of concurrent `changes`, and the state that stores show now.
    ///
    /// # Errors
    /// In words, if no order of the changes explains what is seen.
    pub fn explain(&mut self, changes: &[(Change, Outcome)], seen: &Names) -> Result<(), String> {
        let mut best: Option<Vec<(Change, bool)>> = None;
        let mut used = vec![false; changes.len()];
        search(&self.names, changes, seen, &mut used, &mut Vec::new(), &mut best);
        let Some(order) = best else {
            return Err(format!("no order of {changes:#?}\non {:#?}\nexplains {seen:#?}", self.names));
        };
        for (change, acknowledged) in order {
            self.tail.push(change);
            if acknowledged {
                self.settle();
            }
        }
        self.names = seen.clone();
        Ok(())
    }

    /// Records that the whole state is durable.
    pub fn settle(&mut self) {
        for change in self.tail.drain(..) {
            if let Some(after) = change.apply(&self.durable) {
                self.durable = after;
            }
        }
    }

    /// Records the state after the database was lost and rebuilt.
    ///
    /// # Errors
    /// In words, if something acknowledged is lost or something else appeared.
    pub fn rebuilt(&mut self, seen: &Names) -> Result<(), String> {
        // Any of the unacknowledged changes may be in the journal.
        let mut possible = vec![self.durable.clone()];
        for change in &self.tail {
            let with: Vec<Names> = possible.iter().filter_map(|names| change.apply(names)).collect();
            possible.extend(with.into_iter().filter(|names| !possible.contains(names)).collect::<Vec<_>>());
        }
        if !possible.contains(seen) {
            return Err(format!("after the rebuild, expected one of {possible:#?}\nfound {seen:#?}"));
        }
        (self.names, self.durable) = (seen.clone(), seen.clone());
        self.tail.clear();
        Ok(())
    }
}

/// How many changes at the end of an order are unacknowledged.
fn untold(order: &[(Change, bool)]) -> usize {
    order.iter().rev().take_while(|(_, acknowledged)| !acknowledged).count()
}

/// Finds an order that explains `seen`; of several, the one with the most unacknowledged changes at
/// its end, so that a correct store never fails.
fn search(
    names: &Names,
    changes: &[(Change, Outcome)],
    seen: &Names,
    used: &mut [bool],
    order: &mut Vec<(Change, bool)>,
    best: &mut Option<Vec<(Change, bool)>>,
) {
    if used.iter().zip(changes).all(|(used, (_, outcome))| *used || *outcome == Outcome::Unknown)
        && names == seen
        && best.as_ref().is_none_or(|best| untold(order) > untold(best))
    {
        *best = Some(order.clone());
    }
    for (i, (change, outcome)) in changes.iter().enumerate() {
        if used[i] {
            continue;
        }
        let after = change.apply(names);
        let next = match (outcome, after) {
            (Outcome::Done, Some(after)) | (Outcome::Unknown, Some(after)) => Some(after),
            (Outcome::Refused, None) => None,
            _ => continue,
        };
        used[i] = true;
        match next {
            Some(after) => {
                order.push((change.clone(), *outcome == Outcome::Done));
                search(&after, changes, seen, used, order, best);
                order.pop();
            }
            None => search(names, changes, seen, used, order, best),
        }
        used[i] = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(number: u8, tag: &str, expected: Option<TagState>) -> Change {
        let snapshot = Digest::sha256(&[number]);
        let tag = Some((tag.parse().expect("a tag"), expected));
        Change::Commit { repository: "a".parse().expect("a name"), snapshot, parents: vec![], tag }
    }

    #[test]
    fn two_winners_of_one_compare_and_swap_are_not_explained() {
        let changes = [1, 2].map(|n| (commit(n, "t", Some(TagState::Absent)), Outcome::Done));
        let both = changes[1].0.apply(&Names::new()).expect("applies");
        let mut seen = both.clone();
        seen.values_mut().for_each(|r| drop(r.snapshots.insert(Digest::sha256(&[1]), vec![])));
        assert!(Oracle::default().explain(&changes, &seen).is_err());
        let one = [(changes[0].0.clone(), Outcome::Refused), (changes[1].0.clone(), Outcome::Done)];
        assert!(Oracle::default().explain(&one, &both).is_ok());
    }

    #[test]
    fn an_acknowledged_change_that_is_not_seen_is_not_explained_and_a_cut_one_is() {
        for (outcome, explained) in [(Outcome::Done, false), (Outcome::Unknown, true)] {
            let changes = [(commit(1, "t", None), outcome)];
            assert_eq!(Oracle::default().explain(&changes, &Names::new()).is_ok(), explained, "{outcome:?}");
        }
    }

    #[test]
    fn a_rebuild_may_lose_only_unacknowledged_changes() {
        let (told, untold) = (commit(1, "a", None), commit(2, "b", None));
        let first = told.apply(&Names::new()).expect("applies");
        let both = untold.apply(&first).expect("applies");
        let mut oracle = Oracle::default();
        oracle.explain(&[(told, Outcome::Done), (untold, Outcome::Unknown)], &both).expect("explained");
        assert!(oracle.clone().rebuilt(&both).is_ok());
        assert!(oracle.clone().rebuilt(&first).is_ok());
        assert!(oracle.rebuilt(&Names::new()).is_err());
    }
}
