//! Tags that follow the upstream, unless they were moved here.

use super::pulls::Pulls;
use super::signatures::Signatures;
use super::upstream::{Via, failure, is_unknown};
use crate::problem::ApiError;
use lru::LruCache;
use pfr_client::Remote;
use pfr_schema::api::TagState;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::Store;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Tags that are remembered; of more, those that were read last.
const TAGS: NonZeroUsize = NonZeroUsize::new(100_000).expect("not zero");
/// Snapshots of a lineage that the upstream is asked for at once: the most that a registry gives.
const LINEAGE: usize = 10_000;

/// What is remembered of a tag.
#[derive(Clone, Copy)]
struct Seen {
    /// When it was compared.
    at: Instant,
    /// Where both registries last had it.
    agreed: Option<Digest>,
    /// Where it was here and at the upstream when they were found to have diverged.
    diverged: Option<(Digest, Digest)>,
}

/// The tags of one registry.
pub(super) struct Tags {
    store: Store,
    pulls: Arc<Pulls>,
    signatures: Arc<Signatures>,
    /// How long a tag is served before it is compared again.
    ttl: Duration,
    seen: Mutex<LruCache<(RepositoryName, Tag), Seen>>,
}

impl Tags {
    pub(super) fn new(store: Store, pulls: Arc<Pulls>, signatures: Arc<Signatures>, ttl: Duration) -> Self {
        Self { store, pulls, signatures, ttl, seen: Mutex::new(LruCache::new(TAGS)) }
    }

    /// Compares a tag with the upstream's, unless that was done less than the TTL ago. If the
    /// comparison fails for any reason, the tag that is here is served.
    pub(super) async fn refresh(&self, remote: &Remote, repository: &RepositoryName, tag: &Tag, via: &Via) -> Result<(), ApiError> {
        let key = (repository.clone(), tag.clone());
        let row = match self.store.tag(repository, tag).await {
            Ok(row) => Some(row),
            Err(error) if matches!(error.code(), ErrorCode::TagUnknown | ErrorCode::RepositoryUnknown) => None,
            Err(error) => return Err(error.into()),
        };
        let here = row.as_ref().map(|row| row.digest);
        let before = self.seen().get(&key).copied();
        if here.is_some() && before.is_some_and(|seen| seen.at.elapsed() < self.ttl) {
            return Ok(());
        }
        // The database remembers a tag that was put here for the upstream, also by another replica
        // or before a restart.
        let agreed = before.and_then(|b| b.agreed).or(here.filter(|_| row.is_some_and(|row| row.followed)));
        let mut seen = Seen { at: Instant::now(), agreed, diverged: before.and_then(|b| b.diverged) };
        match self.follow(remote, repository, tag, here, &mut seen, via).await {
            Err(failure) if here.is_some() => {
                let reason = failure.cause.as_ref().unwrap_or(&failure.detail);
                tracing::warn!(%repository, %tag, reason, "pull-through: tag refresh failed, the local tag is served");
            }
            result => result?,
        }
        // After the pull, not before: other readers must not take the old tag for a fresh one
        // meanwhile.
        seen.at = Instant::now();
        self.seen().put(key, seen);
        Ok(())
    }

    /// Points a tag where the upstream has it, unless it was moved here.
    async fn follow(
        &self,
        remote: &Remote,
        repository: &RepositoryName,
        tag: &Tag,
        here: Option<Digest>,
        seen: &mut Seen,
        via: &Via,
    ) -> Result<(), ApiError> {
        let there = match remote.tag(repository, tag).await {
            Ok(there) => there.digest,
            Err(error) if is_unknown(&error) => return Ok(()),
            Err(error) => return Err(failure(&error)),
        };
        if here == Some(there) {
            seen.agreed = here;
            return Ok(());
        }
        if let Some(here) = here
            && !lags_behind(remote, repository, here, there, seen).await?
        {
            return Ok(());
        }
        self.pulls.snapshot(remote, repository, there, via).await?;
        let expected = here.map_or(TagState::Absent, TagState::At);
        let mut put = self.store.put_tag(repository, tag.clone(), there, Some(expected)).await;
        if let Err(pfr_store::Error::SignatureRequired { .. }) = &put {
            // It may have been signed since it was pulled.
            self.signatures.refresh(remote, repository, there).await;
            put = self.store.put_tag(repository, tag.clone(), there, Some(expected)).await;
        }
        match put {
            Ok(()) => {
                seen.agreed = Some(there);
                self.store.metadata().mark_followed(repository.clone(), tag.clone(), there).await?;
            }
            // Another request moved the tag first. Its move stays. Or the tag is immutable here, or
            // nothing that it needs a signature of has signed what the upstream has.
            Err(error) if matches!(error.code(), ErrorCode::TagMoved | ErrorCode::TagImmutable | ErrorCode::SignatureRequired) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    fn seen(&self) -> MutexGuard<'_, LruCache<(RepositoryName, Tag), Seen>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the tag, which is `here`, only lags behind the upstream's, which is `there`. A tag that
/// was moved here stays where it was put. The upstream may know that snapshot nevertheless: it may
/// ask this registry as this registry asks it.
async fn lags_behind(remote: &Remote, repository: &RepositoryName, here: Digest, there: Digest, seen: &mut Seen) -> Result<bool, ApiError> {
    if seen.agreed == Some(here) {
        return Ok(true);
    }
    if seen.agreed == Some(there) || seen.diverged == Some((here, there)) {
        return Ok(false);
    }
    let lags = match remote.lineage(repository, &Selector::Digest(there), LINEAGE).await {
        Ok(lineage) => lineage.snapshots.iter().any(|above| above.digest == here || above.parents.contains(&here)),
        Err(error) if is_unknown(&error) => false,
        Err(error) => return Err(failure(&error)),
    };
    if !lags {
        seen.diverged = Some((here, there));
    }
    Ok(lags)
}
