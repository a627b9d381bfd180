//! One end of a mirror: a registry, or a store. Both answer the same questions about names.

use pfr_client::{Destination, Error, PageOf, Progress, PushTarget, Remote, Result, Source, all_pages};
use pfr_schema::api::{RepositoryInfo, SnapshotSummary, TagInfo, TagRequest, TagState};
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::{RepositoryRow, Store, TagRow};
use std::collections::BTreeMap;

/// Entries in one page of a list.
const PAGE: usize = 1000;

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

impl End {
    /// Where it is, for errors about what it answers.
    fn place(&self) -> &str {
        match self {
            Self::Store(_) => "the store of this mirror",
            Self::Remote(remote) => remote.url(),
        }
    }

    /// Every repository.
    pub(super) async fn repositories(&self) -> Result<Vec<RepositoryName>> {
        let all = all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok::<PageOf<RepositoryInfo>, Error>(match self {
                Self::Store(store) => {
                    let page = store.repositories(after, PAGE).await?;
                    let info = |RepositoryRow { name, snapshots, tags, updated_at }| RepositoryInfo { name, snapshots, tags, updated_at };
                    (page.rows.into_iter().map(info).collect(), page.next)
                }
                Self::Remote(remote) => {
                    let page = remote.repositories(after.as_deref(), PAGE).await?;
                    (page.repositories, page.next)
                }
            })
        });
        Ok(all.await?.into_iter().map(|row| row.name).collect())
    }

    /// Every snapshot, newest first; none if the repository does not exist.
    pub(super) async fn snapshots(&self, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>> {
        let all = all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok::<PageOf<SnapshotSummary>, Error>(match self {
                Self::Store(store) => {
                    let page = store.snapshots(repository, after, PAGE).await?;
                    (page.rows.into_iter().map(Into::into).collect(), page.next)
                }
                Self::Remote(remote) => {
                    let page = remote.snapshots(repository, after.as_deref(), PAGE).await?;
                    (page.snapshots, page.next)
                }
            })
        });
        none_if_unknown(all.await)
    }

    /// Every tag; none if the repository does not exist.
    pub(super) async fn tags(&self, repository: &RepositoryName) -> Result<BTreeMap<Tag, Digest>> {
        let all = all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok::<PageOf<TagInfo>, Error>(match self {
                Self::Store(store) => {
                    let page = store.tags(repository, after, PAGE).await?;
                    let info = |TagRow { name, digest, updated_at, .. }| TagInfo { name, digest, updated_at };
                    (page.rows.into_iter().map(info).collect(), page.next)
                }
                Self::Remote(remote) => {
                    let page = remote.tags(repository, after.as_deref(), PAGE).await?;
                    (page.tags, page.next)
                }
            })
        });
        Ok(none_if_unknown(all.await)?.into_iter().map(|tag| (tag.name, tag.digest)).collect())
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
