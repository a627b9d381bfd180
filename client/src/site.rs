//! A local store or a registry behind one interface, for commands, mirrors and tests.
//!
//! Each method fails with the errors of the store or of the registry. All lists are read page by
//! page to their end. The guard in [`all_pages`] ends a list that has none.

use crate::error::{Error, Result};
use crate::pull::look_up;
use crate::remote::{PageOf, Remote, all_pages};
use pfr_schema::api::{
    Diff, ForkRequest, Forked, Freed, FreedRequest, Lineage, MatchRequest, MatchResponse, NewSignature, RepositoryInfo, SignRequest,
    Signature, SignatureManifest, SnapshotDetail, SnapshotSummary, SnapshotsOf, Stats, TagInfo, TagRequest, TagState, Usage, Verified,
};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::{Budget, Page, StatsFilter, Store};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Entries in one page of a list.
const PAGE: usize = 1000;

/// A local store or a registry.
#[derive(Clone, Debug)]
pub enum Site {
    /// A store that this process has open.
    Store(Store),
    /// A registry.
    Registry(Remote),
}

impl Site {
    /// Its address, for errors about what it answers.
    fn place(&self) -> &str {
        match self {
            Self::Store(_) => self.name(),
            Self::Registry(remote) => remote.url(),
        }
    }

    /// Its name in a sentence.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Store(_) => "the local store",
            Self::Registry(_) => "the registry",
        }
    }

    /// Every repository.
    pub async fn repositories(&self) -> Result<Vec<RepositoryInfo>> {
        all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok(match self {
                Self::Store(store) => listed(store.repositories(after, PAGE).await?),
                Self::Registry(remote) => {
                    let page = remote.repositories(after.as_deref(), PAGE).await?;
                    (page.repositories, page.next)
                }
            })
        })
        .await
    }

    /// Every snapshot, newest first.
    pub async fn snapshots(&self, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>> {
        self.newest_snapshots(repository, usize::MAX).await
    }

    /// The newest snapshots.
    pub async fn newest_snapshots(&self, repository: &RepositoryName, most: usize) -> Result<Vec<SnapshotSummary>> {
        all_pages(self.place(), most, move |after: Option<String>| async move {
            Ok(match self {
                Self::Store(store) => listed(store.snapshots(repository, after, PAGE).await?),
                Self::Registry(remote) => {
                    let page = remote.snapshots(repository, after.as_deref(), PAGE).await?;
                    (page.snapshots, page.next)
                }
            })
        })
        .await
    }

    /// Every tag, by name.
    pub async fn tags(&self, repository: &RepositoryName) -> Result<Vec<TagInfo>> {
        all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok(match self {
                Self::Store(store) => listed(store.tags(repository, after, PAGE).await?),
                Self::Registry(remote) => {
                    let page = remote.tags(repository, after.as_deref(), PAGE).await?;
                    (page.tags, page.next)
                }
            })
        })
        .await
    }

    /// The deepest snapshot that tokens can be resumed from.
    pub async fn match_prefix(&self, repository: &RepositoryName, request: &MatchRequest) -> Result<MatchResponse> {
        match self {
            Self::Store(store) => {
                // A registry has a background task for this. A local store has none.
                if let Err(error) = store.index_prefixes(&Budget::default()).await {
                    tracing::warn!(%error, "older snapshots are not in the prefix index: only the newest are searched");
                }
                Ok(store.match_prefix(repository, request).await?)
            }
            Self::Registry(remote) => remote.match_prefix(repository, request).await,
        }
    }

    /// The summary of a snapshot.
    pub async fn snapshot(&self, repository: &RepositoryName, selector: &Selector) -> Result<SnapshotSummary> {
        match self {
            Self::Store(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(store.snapshot(repository, &digest).await?.into())
            }
            Self::Registry(_) => Ok(self.detail(repository, selector).await?.summary),
        }
    }

    /// All of a snapshot but its blobs.
    pub async fn detail(&self, repository: &RepositoryName, selector: &Selector) -> Result<SnapshotDetail> {
        match self {
            Self::Store(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(store.detail(repository, &digest).await?)
            }
            Self::Registry(remote) => remote.snapshot(repository, selector).await,
        }
    }

    /// A snapshot and its ancestors.
    pub async fn lineage(&self, repository: &RepositoryName, selector: &Selector, limit: usize) -> Result<Lineage> {
        match self {
            Self::Store(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(store.lineage(repository, &digest, limit).await?)
            }
            Self::Registry(remote) => remote.lineage(repository, selector, limit).await,
        }
    }

    /// The difference of two snapshots. A registry compares snapshots of one repository: the first
    /// one's.
    pub async fn diff(&self, a: (&RepositoryName, &Selector), b: (&RepositoryName, &Selector)) -> Result<Diff> {
        match self {
            Self::Store(store) => Ok(store.diff(&store.resolve(a.0, a.1).await?, &store.resolve(b.0, b.1).await?).await?),
            Self::Registry(remote) => remote.diff(a.0, a.1, b.1).await,
        }
    }

    /// How much snapshots share.
    pub async fn stats(&self, repository: Option<&RepositoryName>) -> Result<Stats> {
        match self {
            Self::Store(store) => Ok(store.stats(repository).await?),
            Self::Registry(remote) => remote.stats(repository).await,
        }
    }

    /// The same of some snapshots: those of an agent, or, of a repository, one and those that
    /// descend from it, or those that meet both. Without a repository `below` does not count.
    pub async fn stats_of(&self, repository: Option<&RepositoryName>, below: Option<&Selector>, agent: Option<&str>) -> Result<Stats> {
        match self {
            Self::Store(store) => {
                let below = match repository.zip(below) {
                    Some((repository, selector)) => Some(store.resolve(repository, selector).await?),
                    None => None,
                };
                Ok(store.stats_of(repository, &StatsFilter { below, agent: agent.map(str::to_owned) }).await?)
            }
            Self::Registry(remote) => remote.stats_of(repository, below, agent).await,
        }
    }

    /// What a deletion of snapshots, all together, would free. None if the registry cannot say: its
    /// version is older, or these are more snapshots than it takes in a request.
    pub async fn freed_by(&self, snapshots: &BTreeMap<RepositoryName, BTreeSet<Digest>>) -> Result<Option<Freed>> {
        match self {
            Self::Store(store) => Ok(store.freed_by(snapshots, &Budget::default()).await?),
            Self::Registry(remote) => {
                let of = |(repository, snapshots): (&RepositoryName, &BTreeSet<Digest>)| SnapshotsOf {
                    repository: repository.clone(),
                    snapshots: snapshots.iter().copied().collect(),
                };
                match remote.freed(&FreedRequest { repositories: snapshots.iter().map(of).collect() }).await {
                    Err(error) if matches!(error.code(), ErrorCode::NotFound | ErrorCode::TooLarge) => Ok(None),
                    freed => freed.map(Some),
                }
            }
        }
    }

    /// What takes up room, and until when. Collections of the local store have no grace period.
    pub async fn usage(&self) -> Result<Usage> {
        match self {
            Self::Store(store) => Ok(store.usage(Duration::ZERO).await?),
            Self::Registry(remote) => remote.usage().await,
        }
    }

    /// Points a tag at a snapshot, and returns that snapshot.
    pub async fn put_tag(&self, repository: &RepositoryName, tag: &Tag, selector: &Selector, expected: Option<TagState>) -> Result<Digest> {
        match self {
            Self::Store(store) => {
                let digest = store.resolve(repository, selector).await?;
                store.put_tag(repository, tag.clone(), digest, expected).await?;
                Ok(digest)
            }
            Self::Registry(remote) => {
                let request = TagRequest { snapshot: selector.to_string(), if_tag_is: expected };
                Ok(remote.put_tag(repository, tag, &request).await?.digest)
            }
        }
    }

    /// Deletes a tag, if it still points at `seen`.
    pub async fn delete_tag(&self, repository: &RepositoryName, tag: &Tag, seen: Digest) -> Result<()> {
        let expected = Some(TagState::At(seen));
        match self {
            Self::Store(store) => Ok(store.delete_tag(repository, tag, expected).await?),
            Self::Registry(remote) => remote.delete_tag(repository, tag, expected).await,
        }
    }

    /// Deletes a snapshot and its tags.
    pub async fn delete_snapshot(&self, repository: &RepositoryName, digest: &Digest) -> Result<()> {
        match self {
            Self::Store(store) => Ok(store.delete_snapshot(repository, digest).await?),
            Self::Registry(remote) => remote.delete_snapshot(repository, digest).await,
        }
    }

    /// Deletes a snapshot and its tags, if exactly these tags point at it.
    pub async fn delete_snapshot_tagged(&self, repository: &RepositoryName, digest: &Digest, tags: &[Tag]) -> Result<()> {
        match self {
            Self::Store(store) => Ok(store.delete_snapshot_tagged(repository, digest, tags).await?),
            Self::Registry(remote) => remote.delete_snapshot_tagged(repository, digest, tags).await,
        }
    }

    /// Makes tags of one snapshot.
    pub async fn fork(&self, repository: &RepositoryName, selector: &Selector, count: u32, prefix: &str) -> Result<Forked> {
        match self {
            Self::Store(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok(Forked { digest, tags: store.fork(repository, digest, prefix, count).await? })
            }
            Self::Registry(remote) => {
                let request = ForkRequest { snapshot: selector.to_string(), count, prefix: prefix.to_owned() };
                remote.fork(repository, &request).await
            }
        }
    }

    /// A snapshot and its signatures, which are not checked. It is the one that a digest names: a
    /// signature of another one would say nothing of it.
    pub async fn signatures(&self, repository: &RepositoryName, selector: &Selector) -> Result<(Digest, Vec<Signature>)> {
        match self {
            Self::Store(store) => {
                let digest = store.resolve(repository, selector).await?;
                Ok((digest, store.signatures(repository, &digest).await?))
            }
            Self::Registry(remote) => {
                let detail = look_up(remote, repository, selector).await?;
                Ok((detail.summary.digest, detail.signatures))
            }
        }
    }

    /// Adds signatures to a snapshot, and returns all that it has then.
    pub async fn add_signatures(&self, repository: &RepositoryName, digest: &Digest, new: Vec<NewSignature>) -> Result<Vec<Signature>> {
        match self {
            Self::Store(store) => Ok(store.add_signatures(repository, digest, &new).await?),
            Self::Registry(remote) => Ok(remote.sign(repository, digest, &SignRequest { signatures: new }).await?.signatures),
        }
    }

    /// Every manifest with signatures, oldest first; none in a registry of a version that knows
    /// none.
    pub async fn signature_list(&self, repository: &RepositoryName) -> Result<Vec<SignatureManifest>> {
        let all = all_pages(self.place(), usize::MAX, move |after: Option<String>| async move {
            Ok::<_, Error>(match self {
                Self::Store(store) => listed(store.signature_list(repository, after, PAGE).await?),
                Self::Registry(remote) => {
                    let page = remote.signature_list(repository, after.as_deref(), PAGE).await?;
                    (page.signatures, page.next)
                }
            })
        });
        match all.await {
            Err(error) if error.code() == ErrorCode::NotFound => Ok(Vec::new()),
            other => other,
        }
    }

    /// Reads and hashes everything that a snapshot reaches.
    pub async fn verify(&self, repository: &RepositoryName, digest: Digest) -> Result<Verified> {
        match self {
            Self::Store(store) => Ok(store.verify(&digest, &mut |_| ()).await?),
            Self::Registry(remote) => remote.verify(repository, &digest).await,
        }
    }
}

/// A page of rows of the local store.
fn listed<R: Into<T>, T>(page: Page<R>) -> PageOf<T> {
    (page.rows.into_iter().map(Into::into).collect(), page.next)
}
