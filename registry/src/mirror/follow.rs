//! Names of the upstream: where its tags point, and what lies above a snapshot.

use super::upstream::{Done, Upstream, failure, locked, unknown};
use crate::problem::Failure;
use pfr_client::Remote;
use pfr_schema::api::{Lineage, TagState};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

/// Tags whose freshness is remembered.
const TAGS: usize = 100_000;
/// Snapshots of a lineage that the upstream is asked for at once: the most that a registry gives.
const LINEAGE: usize = 10_000;
/// First parents that are walked at most: `tag~N` with a larger N means nothing here.
const STEPS: u32 = 100_000;

/// What is remembered of a tag.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    /// When it was compared.
    at: Instant,
    /// Where both had it last, or we put it as the upstream had it.
    agreed: Option<Digest>,
    /// Where it was here and at the upstream when it was found to have gone two ways.
    apart: Option<(Digest, Digest)>,
}

impl Upstream {
    /// Looks after a tag at the upstream, if that was not done lately. What is here is good enough if that fails, whatever the reason.
    pub(super) async fn tag(self: &Arc<Self>, remote: &Remote, repository: &RepositoryName, tag: &Tag, via: &str) -> Done {
        let key = (repository.clone(), tag.clone());
        let row = match self.store.tag(repository, tag).await {
            Ok(row) => Some(row),
            Err(error) if matches!(error.code(), ErrorCode::TagUnknown | ErrorCode::RepositoryUnknown) => None,
            Err(error) => return Err(error.into()),
        };
        let here = row.as_ref().map(|row| row.digest);
        let before = locked(&self.tags).get(&key).copied();
        if here.is_some() && before.is_some_and(|seen| seen.at.elapsed() < self.ttl) {
            return Ok(());
        }
        // What was put here for the upstream is where both had it, also by another replica or before a restart.
        let agreed = before.and_then(|b| b.agreed).or(here.filter(|_| row.is_some_and(|row| row.followed)));
        let mut seen = Seen { at: Instant::now(), agreed, apart: before.and_then(|b| b.apart) };
        match self.follow(remote, repository, tag, here, &mut seen, via).await {
            Err(failure) if here.is_some() => {
                let reason = failure.cause.as_ref().unwrap_or(&failure.detail);
                tracing::warn!(%repository, %tag, reason, "what the upstream has under this tag cannot be had; what is here is served");
            }
            result => result?,
        }
        // Not before it was done: who waits for a pull must not let others take what is old for fresh.
        seen.at = Instant::now();
        let mut tags = locked(&self.tags);
        if tags.len() >= TAGS {
            tags.clear();
        }
        tags.insert(key, seen);
        Ok(())
    }

    /// Points a tag where the upstream has it, unless it was moved here.
    async fn follow(
        self: &Arc<Self>,
        remote: &Remote,
        repository: &RepositoryName,
        tag: &Tag,
        here: Option<Digest>,
        seen: &mut Seen,
        via: &str,
    ) -> Done {
        let there = match remote.tag(repository, tag).await {
            Ok(there) => there.digest,
            Err(error) if unknown(&error) => return Ok(()),
            Err(error) => return Err(failure(&error)),
        };
        if here == Some(there) {
            seen.agreed = here;
            return Ok(());
        }
        if let Some(here) = here
            && !self.lags(remote, repository, here, there, seen).await?
        {
            return Ok(());
        }
        self.snapshot(remote, repository, there, via).await?;
        let expected = here.map_or(TagState::Absent, TagState::At);
        match self.store.put_tag(repository, tag.clone(), there, Some(expected)).await {
            Ok(()) => {
                seen.agreed = Some(there);
                self.store.metadata().mark_followed(repository.clone(), tag.clone(), there).await?;
            }
            // Someone was faster; what is there now is theirs.
            Err(error) if error.code() == ErrorCode::TagMoved => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Whether a tag that is `here` only lags behind the upstream, where it is `there`. One that was moved here stays where it was put, and the
    /// upstream may know that place: it may ask us as we ask it.
    async fn lags(
        &self,
        remote: &Remote,
        repository: &RepositoryName,
        here: Digest,
        there: Digest,
        seen: &mut Seen,
    ) -> Result<bool, Failure> {
        if seen.agreed == Some(here) {
            return Ok(true);
        }
        if seen.agreed == Some(there) || seen.apart == Some((here, there)) {
            return Ok(false);
        }
        let lags = match remote.lineage(repository, &Selector::Digest(there), LINEAGE).await {
            Ok(lineage) => lineage.snapshots.iter().any(|above| above.digest == here || above.parents.contains(&here)),
            Err(error) if unknown(&error) => false,
            Err(error) => return Err(failure(&error)),
        };
        if !lags {
            seen.apart = Some((here, there));
        }
        Ok(lags)
    }

    /// The `back`-th first parent, by the names that are here and then by the upstream's; none if they end before. Nothing is pulled.
    pub(super) async fn walk(
        &self,
        remote: &Remote,
        repository: &RepositoryName,
        from: Digest,
        back: u32,
    ) -> Result<Option<Digest>, Failure> {
        let mut above: HashMap<Digest, Option<Digest>> = HashMap::new();
        let (mut at, mut below, mut met) = (from, from, HashSet::from([from]));
        if back > STEPS {
            return Ok(None);
        }
        for step in 0..back {
            let parent = match self.store.snapshot(repository, &at).await {
                Ok(row) => row.parents.first().copied(),
                Err(error) if !matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => {
                    return Err(error.into());
                }
                Err(_) => {
                    if !above.contains_key(&at) {
                        // From the one below, which the upstream surely has: of others it may have to know more than the name first.
                        let most = LINEAGE.min((back - step) as usize + 2);
                        match remote.lineage(repository, &Selector::Digest(below), most).await {
                            Ok(lineage) => above.extend(lineage.snapshots.iter().map(|s| (s.digest, s.parents.first().copied()))),
                            Err(error) if unknown(&error) => return Ok(None),
                            Err(error) => return Err(failure(&error)),
                        }
                    }
                    above.get(&at).copied().flatten()
                }
            };
            // The upstream's word is not verified: it may lead in a circle.
            match parent.filter(|parent| met.insert(*parent)) {
                Some(parent) => (below, at) = (at, parent),
                None => return Ok(None),
            }
        }
        Ok(Some(at))
    }

    /// The lineage of a snapshot where it goes on at the upstream; none if what is here is all there is to know.
    pub(super) async fn lineage(&self, repository: &RepositoryName, selector: &Selector, limit: usize, via: &str) -> Option<Lineage> {
        let remote = self.asked_via(via)?;
        let digest = self.store.resolve(repository, selector).await.ok()?;
        let here = self.store.lineage(repository, &digest, limit).await.ok()?;
        let named: HashSet<Digest> = here.snapshots.iter().map(|snapshot| snapshot.digest).collect();
        if here.truncated || here.snapshots.iter().flat_map(|snapshot| &snapshot.parents).all(|parent| named.contains(parent)) {
            return None;
        }
        let there = match remote.lineage(repository, &Selector::Digest(digest), limit).await {
            Ok(there) => there,
            Err(error) => {
                tracing::debug!(%error, %repository, %digest, "the upstream's lineage cannot be had; what is here is told");
                return None;
            }
        };
        (there.snapshots.len() > here.snapshots.len()).then_some(there)
    }
}
