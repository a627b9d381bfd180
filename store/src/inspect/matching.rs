//! Is there a snapshot that given tokens can be resumed from? The two-key rule.
//!
//! Both keys must hold at one boundary: the *page key*, the prefix key of the request's own tokens equals the snapshot's; and the
//! *state key*, the snapshot's checkpoints carry that same key. A snapshot is legal at its own boundary and nowhere else: recurrent
//! state cannot be cut back, and what a shorter prefix would need is not in it.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use pfr_schema::checkpoint::Key;
use pfr_schema::container::Container;
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::tree::GroupKind;
use pfr_schema::{Digest, Kind, RepositoryName, api, media_type, prefix};
use std::cmp::Reverse;
use std::collections::HashMap;

/// Snapshots looked at, the newest.
const SNAPSHOTS: usize = 1000;
/// Refusals told.
const REJECTED: usize = 8;
/// Token lists read to say how far a snapshot that does not match agrees.
const TOKEN_LISTS: usize = 32;

/// A snapshot that says which prefix it is of.
struct Candidate {
    digest: Digest,
    /// Its list of tokens.
    tokens: Option<Digest>,
    fingerprint: Option<Digest>,
    key: Key,
}

/// What became of a look at a candidate.
enum Verdict {
    Fits,
    /// Another identity: no token of it says anything.
    Foreign(String),
    /// The same identity, other tokens or not enough of them.
    Tokens,
    /// The pages' prefix holds, the state's does not.
    State(String),
}

impl Store {
    /// The deepest boundary of the newest 1,000 snapshots of a repository at which both keys hold, and the nearest that were refused.
    /// A boundary may be as long as the request.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::Corrupt`].
    #[boxed]
    pub async fn match_prefix(&self, repository: &RepositoryName, request: &api::MatchRequest) -> Result<api::MatchResponse> {
        let mut candidates = Vec::new();
        let mut rejected = Vec::new();
        for row in self.snapshots(repository, None, SNAPSHOTS).await?.rows {
            match self.candidate(&row.digest).await {
                Ok(Some(candidate)) => candidates.push(candidate),
                Ok(None) => rejected.push(refuse(row.digest, 0, "it does not say which prefix its state belongs to".into())),
                // Deleted since the list was made.
                Err(Error::BlobUnknown { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        // The sort keeps the newest first among equals.
        candidates.sort_by_key(|candidate| Reverse(candidate.key.tokens));
        let proofs = Proofs::of(request).await?;
        let (mut found, mut lists) = (None, HashMap::new());
        for candidate in candidates {
            let verdict = match self.judge(&candidate, request, &proofs).await {
                Err(Error::BlobUnknown { .. }) => continue,
                verdict => verdict?,
            };
            let (common, reason) = match verdict {
                Verdict::Fits => {
                    found = Some(candidate);
                    break;
                }
                Verdict::Foreign(reason) => (0, reason),
                Verdict::State(reason) => (candidate.key.tokens, reason),
                Verdict::Tokens => self.tokens_differ(&candidate, request, &mut lists).await?,
            };
            rejected.push(refuse(candidate.digest, common, reason));
        }
        rejected.sort_by_key(|one| Reverse(one.common));
        rejected.truncate(REJECTED);
        let boundary = found.as_ref().map_or(0, |candidate| candidate.key.tokens);
        Ok(api::MatchResponse { digest: found.map(|candidate| candidate.digest), boundary, rejected })
    }

    async fn candidate(&self, digest: &Digest) -> Result<Option<Candidate>> {
        let manifest = self.manifest(digest).await?;
        if !manifest.is_snapshot() {
            return Ok(None);
        }
        let config = SnapshotConfig::parse(&self.read(&manifest.config.digest).await?, &self.options.limits)?;
        let SnapshotConfig { fingerprint, prefix, .. } = config;
        let tokens = manifest.layers_of(media_type::TOKENS).next().map(|layer| layer.digest);
        Ok(prefix.map(|key| Candidate { digest: *digest, tokens, fingerprint, key }))
    }

    async fn judge(&self, candidate: &Candidate, request: &api::MatchRequest, proofs: &Proofs) -> Result<Verdict> {
        let key = &candidate.key;
        let foreign = |what: &str, theirs: String, ours: String| Ok(Verdict::Foreign(format!("another {what}: {theirs}, not {ours}")));
        if key.scheme != prefix::SCHEME {
            return foreign("prefix scheme", format!("{:?}", key.scheme), format!("{:?}", prefix::SCHEME));
        }
        if candidate.fingerprint != Some(request.fingerprint) {
            let theirs = candidate.fingerprint.map_or_else(|| "none".into(), |fingerprint| fingerprint.to_string());
            return foreign("deployment fingerprint", theirs, request.fingerprint.to_string());
        }
        if key.salt != request.salt {
            // A salt separates tenants: it is not told.
            return Ok(Verdict::Foreign("another salt".into()));
        }
        if key.adapter != request.adapter {
            return foreign("adapter", format!("{:?}", key.adapter), format!("{:?}", request.adapter));
        }
        if proofs.prefix(request, key.tokens) != Some(key.prefix) {
            return Ok(Verdict::Tokens);
        }
        let manifest = self.manifest(&candidate.digest).await?;
        let mut checkpoints = 0;
        for layer in manifest.layers_of(media_type::CHECKPOINT) {
            checkpoints += 1;
            if let Container::Checkpoint(checkpoint) = self.container(&layer.digest, Kind::Checkpoint).await?
                && checkpoint.key != *key
            {
                let at = checkpoint.key.tokens;
                let reason = if at == key.tokens { "under another key".into() } else { format!("at {at} tokens") };
                return Ok(Verdict::State(format!("no checkpoint at the boundary {}: there is one {reason}", key.tokens)));
            }
        }
        if checkpoints == 0
            && let Some(tree) = self.trees(&manifest).await?.into_iter().find(|tree| tree.group.kind == GroupKind::Recurrent)
        {
            let reason = format!("no checkpoint at the boundary {}: group {:?} is recurrent", key.tokens, tree.group.name);
            return Ok(Verdict::State(reason));
        }
        Ok(Verdict::Fits)
    }

    /// How many tokens agree, and why that is not enough.
    async fn tokens_differ(
        &self,
        candidate: &Candidate,
        request: &api::MatchRequest,
        lists: &mut HashMap<Digest, u64>,
    ) -> Result<(u64, String)> {
        let boundary = candidate.key.tokens;
        let Some(list) = candidate.tokens else {
            return Ok((0, format!("the tokens before {boundary} have another prefix key; the snapshot does not list them")));
        };
        if !lists.contains_key(&list) {
            if lists.len() == TOKEN_LISTS {
                return Ok((0, format!("the tokens before {boundary} have another prefix key; too many lists to compare them all")));
            }
            let common = match self.read(&list).await {
                Ok(bytes) => alike(&bytes, &request.tokens),
                Err(Error::BlobUnknown { .. } | Error::Format(_)) => 0,
                Err(error) => return Err(error),
            };
            lists.insert(list, common);
        }
        let common = lists.get(&list).map_or(0, |common| boundary.min(*common));
        let reason = if common == boundary {
            format!("all {boundary} tokens agree, and the prefix key does not")
        } else if common == request.tokens.len() as u64 {
            format!("this snapshot is for exactly {boundary} tokens; the request has {common}, so it cannot be used")
        } else {
            format!("this snapshot is for exactly {boundary} tokens; they differ from the request's from position {common}")
        };
        Ok((common, reason))
    }
}

/// Leading tokens of a list that are those of the request.
fn alike(list: &[u8], tokens: &[u32]) -> u64 {
    list.as_chunks::<4>().0.iter().zip(tokens).take_while(|(a, b)| u32::from_le_bytes(**a) == **b).count() as u64
}

fn refuse(digest: Digest, common: u64, reason: String) -> api::MatchRejected {
    api::MatchRejected { digest, common, reason }
}

/// Prefix keys of the request: those at ends of blocks are computed once, others are a step from there.
struct Proofs {
    keys: Vec<Digest>,
}

impl Proofs {
    async fn of(request: &api::MatchRequest) -> Result<Self> {
        let api::MatchRequest { tokens, fingerprint, salt, adapter } = request.clone();
        // Millions of tokens are tens of milliseconds of hashing.
        let keys = tokio::task::spawn_blocking(move || prefix::keys(&fingerprint, &salt, adapter.as_deref(), &tokens)).await;
        Ok(Self { keys: keys.map_err(|e| Error::Internal(e.to_string()))? })
    }

    /// The key of the request's first `boundary` tokens; none if there are fewer.
    fn prefix(&self, request: &api::MatchRequest, boundary: u64) -> Option<Digest> {
        let api::MatchRequest { tokens, fingerprint, salt, adapter } = request;
        let tokens = tokens.get(..usize::try_from(boundary).ok()?)?;
        let (blocks, rest) = tokens.split_at(tokens.len() / prefix::BLOCK * prefix::BLOCK);
        let link = match (blocks.len() / prefix::BLOCK).checked_sub(1) {
            Some(last) => *self.keys.get(last)?,
            None => prefix::key(fingerprint, salt, adapter.as_deref(), &[]),
        };
        Some(if rest.is_empty() { link } else { prefix::next(&link, rest) })
    }
}
