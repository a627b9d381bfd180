//! The same questions, asked of a registry or of the local store. Commands do not know which of them answers.

use super::args::Expected;
use super::failure::Failure;
use pfr_client::{PageOf, Remote, all_pages};
use pfr_schema::api::{
    Diff, ForkRequest, Forked, Lineage, MatchRequest, MatchResponse, RepositoryInfo, SnapshotDetail, SnapshotSummary, Stats, TagInfo,
    TagRequest, TagState, Usage, Verified,
};
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::{Page, RepositoryRow, Store, TagRow};
use std::time::Duration;

/// Entries in one page of a list.
const PAGE: usize = 1000;

/// Who answers.
pub enum Side {
    /// The local store.
    Local(Store),
    /// A registry.
    Remote(Remote),
}

impl Side {
    /// Where it is, for errors about what it answers.
    fn place(&self) -> &str {
        match self {
            Self::Local(_) => self.name(),
            Self::Remote(remote) => remote.url(),
        }
    }

    /// The state in which a tag should be, its digest in full.
    pub async fn expected(&self, repository: &RepositoryName, expected: Option<Expected>) -> Result<Option<TagState>, Failure> {
        Ok(match expected {
            None => None,
            Some(Expected::State(state)) => Some(state),
            Some(Expected::Prefix(prefix)) => {
                let snapshot = self.snapshot(repository, &Selector::Prefix(prefix)).await.map_err(|f| f.context("--if-tag-is"))?;
                Some(TagState::At(snapshot.digest))
            }
        })
    }

    /// For sentences.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Local(_) => "the local store",
            Self::Remote(_) => "the registry",
        }
    }

    /// Every repository.
    pub async fn repositories(&self) -> Result<Vec<RepositoryInfo>, Failure> {
        all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok(match self {
                Self::Local(store) => listed(store.repositories(after, PAGE).await?, repository_info),
                Self::Remote(remote) => {
                    let page = remote.repositories(after.as_deref(), PAGE).await?;
                    (page.repositories, page.next)
                }
            })
        })
        .await
    }

    /// Every snapshot, newest first.
    pub async fn snapshots(&self, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>, Failure> {
        self.newest_snapshots(repository, usize::MAX).await
    }

    /// The newest snapshots.
    pub async fn newest_snapshots(&self, repository: &RepositoryName, most: usize) -> Result<Vec<SnapshotSummary>, Failure> {
        all_pages(self.place(), most, move |after: Option<String>| async move {
            Ok(match self {
                Self::Local(store) => listed(store.snapshots(repository, after, PAGE).await?, Into::into),
                Self::Remote(remote) => {
                    let page = remote.snapshots(repository, after.as_deref(), PAGE).await?;
                    (page.snapshots, page.next)
                }
            })
        })
        .await
    }

    /// Every tag, by name.
    pub async fn tags(&self, repository: &RepositoryName) -> Result<Vec<TagInfo>, Failure> {
        all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok(match self {
                Self::Local(store) => listed(store.tags(repository, after, PAGE).await?, tag_info),
                Self::Remote(remote) => {
                    let page = remote.tags(repository, after.as_deref(), PAGE).await?;
                    (page.tags, page.next)
                }
            })
        })
        .await
    }

    /// The deepest snapshot that tokens can be resumed from.
    pub async fn match_prefix(&self, repository: &RepositoryName, request: &MatchRequest) -> Result<MatchResponse, Failure> {
        match self {
            Self::Local(store) => Ok(store.match_prefix(repository, request).await?),
            Self::Remote(remote) => Ok(remote.match_prefix(repository, request).await?),
        }
    }

    /// One snapshot, in short.
    pub async fn snapshot(&self, repository: &RepositoryName, selector: &Selector) -> Result<SnapshotSummary, Failure> {
        match self {
            Self::Local(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(store.snapshot(repository, &digest).await?.into())
            }
            Self::Remote(_) => Ok(self.detail(repository, selector).await?.summary),
        }
    }

    /// One snapshot, whole.
    pub async fn detail(&self, repository: &RepositoryName, selector: &Selector) -> Result<SnapshotDetail, Failure> {
        match self {
            Self::Local(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(store.detail(repository, &digest).await?)
            }
            Self::Remote(remote) => Ok(remote.snapshot(repository, selector).await?),
        }
    }

    /// A snapshot and its ancestors.
    pub async fn lineage(&self, repository: &RepositoryName, selector: &Selector, limit: usize) -> Result<Lineage, Failure> {
        match self {
            Self::Local(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(store.lineage(repository, &digest, limit).await?)
            }
            Self::Remote(remote) => Ok(remote.lineage(repository, selector, limit).await?),
        }
    }

    /// What differs. A registry compares snapshots of one repository: the first one's.
    pub async fn diff(&self, a: (&RepositoryName, &Selector), b: (&RepositoryName, &Selector)) -> Result<Diff, Failure> {
        match self {
            Self::Local(store) => Ok(store.diff(&store.resolve(a.0, a.1).await?, &store.resolve(b.0, b.1).await?).await?),
            Self::Remote(remote) => Ok(remote.diff(a.0, a.1, b.1).await?),
        }
    }

    /// How much snapshots share.
    pub async fn stats(&self, repository: Option<&RepositoryName>) -> Result<Stats, Failure> {
        match self {
            Self::Local(store) => Ok(store.stats(repository).await?),
            Self::Remote(remote) => Ok(remote.stats(repository).await?),
        }
    }

    /// What takes up room, and until when. Collections of the local store have no grace period.
    pub async fn usage(&self) -> Result<Usage, Failure> {
        match self {
            Self::Local(store) => Ok(store.usage(Duration::ZERO).await?),
            Self::Remote(remote) => Ok(remote.usage().await?),
        }
    }

    /// Points a tag at a snapshot; which one it was.
    pub async fn put_tag(
        &self,
        repository: &RepositoryName,
        tag: &Tag,
        selector: &Selector,
        expected: Option<TagState>,
    ) -> Result<Digest, Failure> {
        match self {
            Self::Local(store) => {
                let digest = store.resolve(repository, selector).await?;
                store.put_tag(repository, tag.clone(), digest, expected).await?;
                Ok(digest)
            }
            Self::Remote(remote) => {
                let request = TagRequest { snapshot: selector.to_string(), if_tag_is: expected };
                Ok(remote.put_tag(repository, tag, &request).await?.digest)
            }
        }
    }

    /// Deletes a tag, if it still points at `seen`.
    pub async fn delete_tag(&self, repository: &RepositoryName, tag: &Tag, seen: Digest) -> Result<(), Failure> {
        let expected = Some(TagState::At(seen));
        match self {
            Self::Local(store) => Ok(store.delete_tag(repository, tag, expected).await?),
            Self::Remote(remote) => Ok(remote.delete_tag(repository, tag, expected).await?),
        }
    }

    /// Deletes a snapshot and its tags.
    pub async fn delete_snapshot(&self, repository: &RepositoryName, digest: &Digest) -> Result<(), Failure> {
        match self {
            Self::Local(store) => Ok(store.delete_snapshot(repository, digest).await?),
            Self::Remote(remote) => Ok(remote.delete_snapshot(repository, digest).await?),
        }
    }

    /// Makes tags of one snapshot.
    pub async fn fork(&self, repository: &RepositoryName, selector: &Selector, count: u32, prefix: &str) -> Result<Forked, Failure> {
        match self {
            Self::Local(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(Forked { digest, tags: store.fork(repository, digest, prefix, count).await? })
            }
            Self::Remote(remote) => {
                let request = ForkRequest { snapshot: selector.to_string(), count, prefix: prefix.to_owned() };
                Ok(remote.fork(repository, &request).await?)
            }
        }
    }

    /// Has the registry read and hash everything a snapshot reaches. The local store is asked directly, for its progress.
    pub async fn verify_remotely(&self, repository: &RepositoryName, digest: Digest) -> Result<Verified, Failure> {
        match self {
            Self::Local(store) => Ok(store.verify(&digest, &mut |_| ()).await?),
            Self::Remote(remote) => Ok(remote.verify(repository, &digest).await?),
        }
    }
}

/// A page of rows of the local store.
fn listed<R, T>(page: Page<R>, convert: impl Fn(R) -> T) -> PageOf<T> {
    (page.rows.into_iter().map(convert).collect(), page.next)
}

fn repository_info(row: RepositoryRow) -> RepositoryInfo {
    let RepositoryRow { name, snapshots, tags, updated_at } = row;
    RepositoryInfo { name, snapshots, tags, updated_at }
}

fn tag_info(row: TagRow) -> TagInfo {
    let TagRow { name, digest, updated_at, .. } = row;
    TagInfo { name, digest, updated_at }
}
