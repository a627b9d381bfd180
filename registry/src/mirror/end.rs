//! One end of a mirror: a registry, or a store. Both answer the same questions about names.

use pfr_client::{Destination, Error, Progress, PushTarget, Remote, Result, Source};
use pfr_schema::api::{SnapshotSummary, TagRequest, TagState};
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::Store;
use std::collections::BTreeMap;

/// Entries in one page of a list.
const PAGE: usize = 1000;
/// Names that a list may have, parents counted too: a gigabyte or so, and more than a registry is made for. What goes on after that has no end.
const NAMES: usize = 5_000_000;

/// One end.
#[derive(Clone, Debug)]
pub enum End {
    /// A store.
    Store(Store),
    /// A registry.
    Remote(Remote),
}

/// What moved.
pub(super) struct Moved {
    pub blobs: u64,
    pub bytes: u64,
}

/// Walks a paged list to its end.
macro_rules! all {
    (|$after:ident| $page:expr, $items:ident as $convert:expr) => {{
        let (mut all, mut walk) = (Vec::new(), Walk::default());
        let mut $after: Option<String> = None;
        loop {
            let page = $page.await?;
            let before = all.len();
            all.extend(page.$items.into_iter().map($convert));
            let names = all[before..].iter().map(Entry::names).sum();
            match page.next {
                Some(next) => $after = Some(walk.on(names, next)?),
                None => break Ok(all),
            }
        }
    }};
}

/// How far a list has been walked. The list is foreign: it may have no end.
#[derive(Default)]
struct Walk {
    names: usize,
    cursor: Option<String>,
}

impl Walk {
    /// The cursor of the next page, after one with so many names.
    fn on(&mut self, names: usize, next: String) -> Result<String> {
        self.names = self.names.saturating_add(names);
        // A page may be short, but it must lead somewhere else.
        if names == 0 || self.names > NAMES || self.cursor.as_ref() == Some(&next) {
            let reason = format!("a list of names does not end: {} names so far, and it goes on at {next:.100?}", self.names);
            return Err(Error::Protocol { url: "one end of the mirror".into(), reason });
        }
        self.cursor = Some(next.clone());
        Ok(next)
    }
}

/// An entry of a list.
trait Entry {
    /// How many names it holds.
    fn names(&self) -> usize {
        1
    }
}

impl Entry for RepositoryName {}
impl Entry for (Tag, Digest) {}
impl Entry for SnapshotSummary {
    fn names(&self) -> usize {
        1 + self.parents.len() + self.tags.len()
    }
}

impl End {
    /// Every repository.
    pub(super) async fn repositories(&self) -> Result<Vec<RepositoryName>> {
        match self {
            Self::Store(store) => all!(|after| store.repositories(after, PAGE), rows as |row| row.name),
            Self::Remote(remote) => all!(|after| remote.repositories(after.as_deref(), PAGE), repositories as |row| row.name),
        }
    }

    /// Every snapshot, newest first; none if the repository does not exist.
    pub(super) async fn snapshots(&self, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>> {
        none_if_unknown(self.all_snapshots(repository).await)
    }

    async fn all_snapshots(&self, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>> {
        match self {
            Self::Store(store) => all!(|after| store.snapshots(repository, after, PAGE), rows as Into::into),
            Self::Remote(remote) => {
                all!(|after| remote.snapshots(repository, after.as_deref(), PAGE), snapshots as std::convert::identity)
            }
        }
    }

    /// Every tag; none if the repository does not exist.
    pub(super) async fn tags(&self, repository: &RepositoryName) -> Result<BTreeMap<Tag, Digest>> {
        Ok(none_if_unknown(self.all_tags(repository).await)?.into_iter().collect())
    }

    async fn all_tags(&self, repository: &RepositoryName) -> Result<Vec<(Tag, Digest)>> {
        match self {
            Self::Store(store) => all!(|after| store.tags(repository, after, PAGE), rows as |row| (row.name, row.digest)),
            Self::Remote(remote) => all!(|after| remote.tags(repository, after.as_deref(), PAGE), tags as |tag| (tag.name, tag.digest)),
        }
    }

    /// Moves a tag, from the state in which it was seen.
    pub(super) async fn put_tag(&self, repository: &RepositoryName, tag: &Tag, to: Digest, seen: TagState) -> Result<()> {
        match self {
            Self::Store(store) => Ok(store.put_tag(repository, tag.clone(), to, Some(seen)).await?),
            Self::Remote(remote) => {
                let request = TagRequest { snapshot: to.to_string(), if_tag_is: Some(seen) };
                remote.put_tag(repository, tag, &request).await.map(|_| ())
            }
        }
    }

    /// Deletes a tag, in the state in which it was seen.
    pub(super) async fn delete_tag(&self, repository: &RepositoryName, tag: &Tag, seen: Digest) -> Result<()> {
        let expected = Some(TagState::At(seen));
        match self {
            Self::Store(store) => Ok(store.delete_tag(repository, tag, expected).await?),
            Self::Remote(remote) => remote.delete_tag(repository, tag, expected).await,
        }
    }

    /// Deletes a snapshot and its tags.
    pub(super) async fn delete_snapshot(&self, repository: &RepositoryName, digest: &Digest) -> Result<()> {
        match self {
            Self::Store(store) => Ok(store.delete_snapshot(repository, digest).await?),
            Self::Remote(remote) => remote.delete_snapshot(repository, digest).await,
        }
    }

    /// Makes `target` hold a snapshot of this end, under the same repository, without a tag.
    pub(super) async fn copy(&self, target: &Self, repository: &RepositoryName, snapshot: Digest, progress: &Progress) -> Result<Moved> {
        let (source, remote) = match (self, target) {
            (Self::Remote(remote), Self::Store(store)) => {
                let destination = Destination::Store { store: store.clone(), repository: repository.clone(), tag: None };
                let pulled = pfr_client::pull(remote, repository, &Selector::Digest(snapshot), &destination, progress).await?;
                return Ok(Moved { blobs: pulled.blobs_received, bytes: pulled.bytes_received });
            }
            (Self::Store(store), Self::Remote(remote)) => (Source::Store { store: store.clone(), snapshot }, remote),
            (Self::Remote(from), Self::Remote(to)) => {
                (Source::Remote { remote: from.clone(), repository: repository.clone(), snapshot }, to)
            }
            (Self::Store(_), Self::Store(_)) => return Err(Error::Internal("both ends of a mirror are stores".into())),
        };
        let to = PushTarget { repository: repository.clone(), tag: None, if_tag_is: None, parents: Vec::new() };
        let pushed = pfr_client::push(&source, remote, to, progress).await?;
        Ok(Moved { blobs: pushed.blobs_sent, bytes: pushed.bytes_sent })
    }
}

fn none_if_unknown<T>(result: Result<Vec<T>>) -> Result<Vec<T>> {
    match result {
        Err(error) if error.code() == pfr_schema::ErrorCode::RepositoryUnknown => Ok(Vec::new()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_without_an_end_is_given_up() {
        let mut walk = Walk::default();
        assert_eq!(walk.on(1, "a".into()).unwrap(), "a");
        assert_eq!(walk.on(PAGE, "b".into()).unwrap(), "b");
        assert!(walk.on(1, "b".into()).unwrap_err().to_string().contains("does not end"), "the same page again");
        assert!(walk.on(0, "c".into()).is_err(), "an empty page that leads on");
        let pages = (0..).take_while(|page| Walk { names: page * PAGE, cursor: None }.on(PAGE, "x".into()).is_ok()).count();
        assert_eq!(pages, NAMES / PAGE);
    }
}
