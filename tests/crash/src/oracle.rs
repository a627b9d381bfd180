//! What a client was told, and when. From this follows which tags and snapshots a power cut may
//! leave.

use std::collections::{BTreeMap, BTreeSet};

/// The visible tags and snapshots of the recorded repository.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Digests of snapshots.
    pub snapshots: BTreeSet<String>,
    /// Digest of each tag.
    pub tags: BTreeMap<String, String>,
    /// The other domains, and what is visible of each.
    pub domains: BTreeMap<String, View>,
}

/// A change of tags, snapshots or domains.
#[derive(Clone, Debug)]
pub enum Change {
    /// A snapshot, and a tag on it.
    Commit(String, String),
    /// A tag on a snapshot.
    Tag(String, String),
    /// A tag is deleted.
    Untag(String),
    /// A snapshot is deleted, with its tags.
    Remove(String),
    /// A domain is made.
    MakeDomain(String),
    /// A domain is deleted, with everything in it.
    DeleteDomain(String),
    /// A change in a domain.
    In(String, Box<Change>),
}

/// Changes in order, each with the number of operations when it was requested and when it was
/// acknowledged.
#[derive(Clone, Debug, Default)]
pub struct History(Vec<(usize, usize, Change)>);

impl History {
    /// Adds a change that was requested after `begun` operations and acknowledged after `told`
    /// operations.
    pub fn note(&mut self, begun: usize, told: usize, change: Change) {
        self.0.push((begun, told, change));
    }

    /// What may be visible if the power fails after `at` operations: all acknowledged changes, with
    /// or without the one that was requested then.
    #[must_use]
    pub fn allowed(&self, at: usize) -> Vec<View> {
        self.views(at, |_| false)
    }

    /// The same if the databases are lost too. The catalogue of domains is in one of them, so a
    /// deleted domain comes back if its bytes are still there.
    #[must_use]
    pub fn allowed_without_databases(&self, at: usize) -> Vec<View> {
        self.views(at, |change| matches!(change, Change::DeleteDomain(_)))
    }

    fn views(&self, at: usize, may_be_undone: impl Fn(&Change) -> bool) -> Vec<View> {
        let mut views = vec![View::default()];
        for (begun, told, change) in &self.0 {
            if *told <= at && !may_be_undone(change) {
                views.iter_mut().for_each(|view| change.make(view));
            } else if *begun < at {
                let mut with = views.clone();
                with.iter_mut().for_each(|view| change.make(view));
                views.extend(with);
            }
        }
        views
    }
}

impl Change {
    fn make(&self, view: &mut View) {
        match self {
            Self::Commit(snapshot, tag) => {
                view.snapshots.insert(snapshot.clone());
                view.tags.insert(tag.clone(), snapshot.clone());
            }
            Self::Tag(tag, snapshot) => drop(view.tags.insert(tag.clone(), snapshot.clone())),
            Self::Untag(tag) => drop(view.tags.remove(tag)),
            Self::Remove(snapshot) => {
                view.snapshots.remove(snapshot);
                view.tags.retain(|_, at| at != snapshot);
            }
            Self::MakeDomain(name) => drop(view.domains.entry(name.clone()).or_default()),
            Self::DeleteDomain(name) => drop(view.domains.remove(name)),
            Self::In(name, change) => view.domains.get_mut(name).into_iter().for_each(|view| change.make(view)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledged_changes_are_visible_and_a_requested_one_may_be() {
        let mut history = History::default();
        history.note(0, 10, Change::Commit("a".into(), "t".into()));
        history.note(10, 20, Change::Remove("a".into()));
        let snapshots = |at: usize| -> Vec<usize> { history.allowed(at).iter().map(|view| view.snapshots.len()).collect() };
        assert_eq!(
            (snapshots(0), snapshots(5), snapshots(10), snapshots(15), snapshots(20)),
            (vec![0], vec![0, 1], vec![1], vec![1, 0], vec![0])
        );
    }

    #[test]
    fn a_deleted_domain_comes_back_only_if_the_databases_are_lost() {
        let mut history = History::default();
        history.note(0, 10, Change::MakeDomain("d".into()));
        history.note(10, 20, Change::In("d".into(), Box::new(Change::Commit("a".into(), "t".into()))));
        history.note(20, 30, Change::DeleteDomain("d".into()));
        let snapshots =
            |views: Vec<View>| -> Vec<usize> { views.iter().flat_map(|view| view.domains.values()).map(|d| d.snapshots.len()).collect() };
        assert_eq!((snapshots(history.allowed(10)), snapshots(history.allowed(20))), (vec![0], vec![1]));
        assert_eq!((history.allowed(30), snapshots(history.allowed_without_databases(30))), (vec![View::default()], vec![1]));
    }
}
