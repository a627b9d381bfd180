//! Finds a snapshot from which given tokens can be resumed, by the two-key rule.
//!
//! Both keys must hold at one position: the *page key*, the prefix key of the request's own tokens
//! equals the snapshot's; and the *state key*, the snapshot's checkpoints have that same key. A
//! snapshot can be used at its own token position. If nothing but pages of full attention is in it,
//! it can be used at the end of each page too: [`pfr_schema::resume::Legal`] is the rule, and the
//! tokens are compared one by one.
//!
//! The prefix index finds snapshots whose page key holds at their end, the longest first, and by
//! waypoints some of those that share most tokens with the request. Snapshots that it finds nearby,
//! and the newest, say why they do not fit.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::PrefixPath;
use futures::StreamExt as _;
use pfr_schema::checkpoint::Key;
use pfr_schema::container::Container;
use pfr_schema::snapshot::{Manifest, SnapshotConfig};
use pfr_schema::tree::GroupKind;
use pfr_schema::{Digest, Kind, RepositoryName, api, media_type, prefix};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Why a snapshot is refused in which something is quarantined.
const DAMAGED: &str = "it is damaged";
/// Snapshots from the index that are checked in vain before the answer is that there is no match.
const LOOKS: usize = 256;
/// Look-ups in the index, in all searches of a request. A search makes a few hundred, and one for
/// each length of the snapshots that do not list their tokens.
const LOOK_UPS: usize = 1 << 15;
/// Newest snapshots that are checked besides.
const NEWEST: usize = 8;
/// Maximum number of refusals in an answer.
const REJECTED: usize = 8;
/// Maximum bytes of token lists that are read to find how many tokens agree: first of snapshots
/// that share the deepest waypoint, then of others.
const LISTS: u64 = 16 << 20;
/// Maximum bytes of token lists that are read only to say how many tokens agree: of snapshots that
/// can be used at their end or not at all. A request that matches nothing would else read and hash
/// megabytes for each of the newest snapshots.
const EXPLAINED: u64 = 2 << 20;
/// Waypoints that are looked at, the deepest first, until a snapshot there can be used.
const WAYPOINTS: usize = 8;

/// A snapshot that says which prefix it is of.
struct Candidate {
    digest: Digest,
    manifest: Manifest,
    /// Its list of tokens, and that list's bytes.
    tokens: Option<(Digest, u64)>,
    fingerprint: Option<Digest>,
    key: Key,
}

/// The result of checking a candidate.
enum Verdict {
    Fits,
    /// Another identity, so its tokens do not matter.
    Foreign(String),
    /// It can be used up to here: the same identity, other tokens or not enough of them.
    Partly(u64),
    /// The same, and it cannot be used; how many tokens agree.
    Tokens(u64, String),
    /// The pages' prefix holds, the state's does not.
    State(String),
}

/// A request, and the state of its search.
struct Matching<'a> {
    store: &'a Store,
    request: &'a api::MatchRequest,
    path: &'a PrefixPath,
    /// Leading tokens of lists that agree.
    lists: HashMap<Digest, u64>,
    /// Bytes of lists that may still be read.
    left: u64,
    /// The same, of snapshots that can be used only at their end.
    explained: u64,
    /// The snapshot to resume from, and where.
    found: Option<(Candidate, u64)>,
    rejected: Vec<api::MatchRejected>,
    /// Whether the search of the index ended at a limit.
    truncated: bool,
}

impl Store {
    /// The deepest position at which both keys of a snapshot in the repository hold, and the
    /// nearest snapshots that were refused. The position may be the end of the request.
    ///
    /// # Errors
    /// [`Error::RepositoryUnknown`], [`Error::Corrupt`].
    #[boxed]
    pub async fn match_prefix(&self, repository: &RepositoryName, request: &api::MatchRequest) -> Result<api::MatchResponse> {
        let owned = request.clone();
        let path = pfr_service::task::spawn_blocking(|| PrefixPath::of_request(owned)).await?;
        let path = Arc::new(path);
        let mut matching = Matching {
            store: self,
            request,
            path: &path,
            lists: HashMap::new(),
            left: LISTS,
            explained: EXPLAINED,
            found: None,
            rejected: Vec::new(),
            truncated: false,
        };
        let (mut seen, mut others, mut below, mut look_ups) = (HashSet::new(), Vec::new(), None, LOOK_UPS);
        while matching.found.is_none() {
            if seen.len() >= LOOKS {
                matching.truncated = true;
                break;
            }
            let hits = self.metadata.find_prefixes(repository.clone(), Arc::clone(&path), below, look_ups).await?;
            look_ups = look_ups.saturating_sub(hits.look_ups);
            matching.truncated |= hits.truncated;
            if below.is_none() {
                others = hits.near;
            }
            let Some(first) = hits.deepest.first() else { break };
            below = Some(first.tokens);
            for hit in hits.deepest {
                seen.insert(hit.digest);
                let found = self.candidates(vec![hit.digest], &mut matching.rejected).await?;
                matching.look(found).await?;
                if matching.found.is_some() {
                    break;
                }
            }
        }
        let mut below = None;
        for _ in 0..WAYPOINTS {
            let passing = self.metadata.passing(repository.clone(), Arc::clone(&path), below).await?;
            let Some(passing) = passing.filter(|passing| passing.next > matching.position()) else { break };
            below = Some(passing.tokens);
            let snapshots = passing.snapshots.into_iter().filter(|digest| seen.insert(*digest)).collect();
            let found = self.candidates(snapshots, &mut matching.rejected).await?;
            matching.look(found).await?;
            if matching.position() > 0 {
                break;
            }
        }
        others.extend(self.snapshots(repository, None, NEWEST).await?.rows.into_iter().map(|row| row.digest));
        others.retain(|digest| seen.insert(*digest));
        if matching.found.is_some() {
            // Those that are no longer than the match neither replace it nor are refused: two blobs
            // need not be read of each.
            let lengths = self.prefix_lengths(repository, others.clone()).await?;
            others.retain(|digest| lengths.get(digest).is_none_or(|tokens| *tokens > matching.position()));
        }
        // The newest may not be in the index yet.
        let others = self.candidates(others, &mut matching.rejected).await?;
        matching.look(others).await?;
        Ok(matching.answer())
    }

    /// Snapshots as candidates, those with the most tokens first. A snapshot without a prefix key
    /// is refused.
    async fn candidates(&self, digests: Vec<Digest>, rejected: &mut Vec<api::MatchRejected>) -> Result<Vec<Candidate>> {
        let mut loads =
            futures::stream::iter(digests).map(|digest| async move { (digest, self.candidate(&digest).await) }).buffered(NEWEST);
        let mut candidates = Vec::new();
        while let Some((digest, loaded)) = loads.next().await {
            match loaded {
                Ok(Some(candidate)) => candidates.push(candidate),
                Ok(None) => rejected.push(refuse(digest, 0, "it does not say which prefix its state belongs to".into())),
                // Deleted since it was found.
                Err(Error::BlobUnknown { .. }) => {}
                Err(Error::Corrupt { .. }) => rejected.push(refuse(digest, 0, DAMAGED.into())),
                Err(error) => return Err(error),
            }
        }
        // The sort keeps the order among equals.
        candidates.sort_by_key(|candidate| Reverse(candidate.key.tokens));
        Ok(candidates)
    }

    async fn candidate(&self, digest: &Digest) -> Result<Option<Candidate>> {
        let manifest = self.manifest(digest).await?;
        if !manifest.is_snapshot() {
            return Ok(None);
        }
        let config = SnapshotConfig::parse(&self.read(&manifest.config.digest).await?, &self.options.limits)?;
        let SnapshotConfig { fingerprint, prefix, .. } = config;
        let tokens = manifest.layers_of(media_type::TOKENS).next().map(|layer| (layer.digest, layer.size));
        Ok(prefix.map(|key| Candidate { digest: *digest, manifest, tokens, fingerprint, key }))
    }
}

impl Candidate {
    /// Whether it is clear from the manifest that no position before the end is legal.
    fn is_used_at_its_end_only(&self) -> bool {
        let has = |layer| self.manifest.layers_of(layer).next().is_some();
        has(media_type::CHECKPOINT) || !has(media_type::TREE)
    }
}

impl Matching<'_> {
    /// Checks candidates, the longest first, until one fits that is longer than the match so far.
    async fn look(&mut self, candidates: Vec<Candidate>) -> Result<()> {
        for candidate in candidates {
            if self.found.is_some() && self.position() >= candidate.key.tokens {
                break;
            }
            let verdict = match self.judge(&candidate).await {
                Err(Error::BlobUnknown { .. }) => continue,
                Err(Error::Corrupt { .. }) => {
                    self.rejected.push(refuse(candidate.digest, 0, DAMAGED.into()));
                    continue;
                }
                verdict => verdict?,
            };
            let (common, reason) = match verdict {
                Verdict::Fits => {
                    let position = candidate.key.tokens;
                    self.found = Some((candidate, position));
                    break;
                }
                Verdict::Foreign(reason) => (0, reason),
                Verdict::State(reason) => (candidate.key.tokens, reason),
                Verdict::Partly(position) => {
                    if position > self.position() {
                        self.found = Some((candidate, position));
                    }
                    continue;
                }
                Verdict::Tokens(common, reason) => (common, reason),
            };
            self.rejected.push(refuse(candidate.digest, common, reason));
        }
        Ok(())
    }

    fn answer(mut self) -> api::MatchResponse {
        self.rejected.sort_by_key(|one| Reverse(one.common));
        self.rejected.truncate(REJECTED);
        let position = self.position();
        let found = self.found.map(|(candidate, _)| candidate);
        let (digest, tokens) = (found.as_ref().map(|found| found.digest), found.map_or(0, |found| found.key.tokens));
        api::MatchResponse { digest, boundary: position, tokens, rejected: self.rejected, truncated: self.truncated }
    }

    /// Tokens that need not be computed, as far as known.
    fn position(&self) -> u64 {
        self.found.as_ref().map_or(0, |(_, position)| *position)
    }

    /// Of a snapshot that has other tokens than the request, or goes further.
    async fn partly(&mut self, candidate: &Candidate) -> Result<Verdict> {
        let (common, reason) = self.tokens_differ(candidate).await?;
        // Equal tokens with another key are not to be trusted.
        if common > 0
            && common < candidate.key.tokens
            && let Some(position) = self.store.legal(&candidate.manifest, candidate.key.tokens).await?.deepest(common)
        {
            if position > self.position() && !self.lists_its_prefix(candidate).await? {
                return Ok(Verdict::Tokens(0, "its list of tokens is not of its prefix key".into()));
            }
            return Ok(Verdict::Partly(position));
        }
        Ok(Verdict::Tokens(common, reason))
    }

    async fn judge(&mut self, candidate: &Candidate) -> Result<Verdict> {
        let (key, request) = (&candidate.key, self.request);
        let foreign = |what: &str, theirs: String, ours: String| Ok(Verdict::Foreign(format!("another {what}: {theirs}, not {ours}")));
        if key.scheme != prefix::SCHEME {
            return foreign("prefix scheme", format!("{:?}", key.scheme), format!("{:?}", prefix::SCHEME));
        }
        if candidate.fingerprint != Some(request.fingerprint) {
            let theirs = candidate.fingerprint.map_or_else(|| "none".into(), |fingerprint| fingerprint.to_string());
            return foreign("engine configuration", theirs, request.fingerprint.to_string());
        }
        if key.salt != request.salt {
            // A salt separates tenants, so the answer does not contain it.
            return Ok(Verdict::Foreign("another salt".into()));
        }
        if key.adapter != request.adapter {
            return foreign("adapter", format!("{:?}", key.adapter), format!("{:?}", request.adapter));
        }
        if self.path.key(key.tokens) != Some(key.prefix) {
            return self.partly(candidate).await;
        }
        let manifest = &candidate.manifest;
        let mut checkpoints = 0;
        for layer in manifest.layers_of(media_type::CHECKPOINT) {
            checkpoints += 1;
            if let Container::Checkpoint(checkpoint) = self.store.container(&layer.digest, Kind::Checkpoint).await?
                && checkpoint.key != *key
            {
                let at = checkpoint.key.tokens;
                let reason = if at == key.tokens { "under another key".into() } else { format!("at {at} tokens") };
                return Ok(Verdict::State(format!("no checkpoint at the boundary {}: there is one {reason}", key.tokens)));
            }
        }
        if checkpoints == 0
            && let Some(tree) = self.store.trees(manifest).await?.into_iter().find(|tree| tree.group.kind == GroupKind::Recurrent)
        {
            let reason = format!("no checkpoint at the boundary {}: group {:?} is recurrent", key.tokens, tree.group.name);
            return Ok(Verdict::State(reason));
        }
        Ok(Verdict::Fits)
    }

    /// Whether the tokens that a snapshot lists are those of its prefix key. Some snapshots are not
    /// in the index yet, where this was checked.
    async fn lists_its_prefix(&self, candidate: &Candidate) -> Result<bool> {
        let Some((list, _)) = candidate.tokens else { return Ok(false) };
        let (bytes, key, fingerprint) = (self.store.read(&list).await?, candidate.key.clone(), self.request.fingerprint);
        let is_its_prefix = move || {
            let tokens = bytes.as_chunks::<4>().0.iter().map(|token| u32::from_le_bytes(*token));
            let tokens: Vec<u32> = tokens.take(usize::try_from(key.tokens).unwrap_or(usize::MAX)).collect();
            tokens.len() as u64 == key.tokens && prefix::key(&fingerprint, &key.salt, key.adapter.as_deref(), &tokens) == key.prefix
        };
        pfr_service::task::spawn_blocking(is_its_prefix).await.map_err(Error::from)
    }

    /// How many tokens agree, and why that is not enough.
    async fn tokens_differ(&mut self, candidate: &Candidate) -> Result<(u64, String)> {
        let (position, tokens) = (candidate.key.tokens, &self.request.tokens);
        let Some((list, size)) = candidate.tokens else {
            return Ok((0, format!("the tokens before {position} have another prefix key; the snapshot does not list them")));
        };
        if !self.lists.contains_key(&list) {
            let left = if candidate.is_used_at_its_end_only() { &mut self.explained } else { &mut self.left };
            let Some(rest) = left.checked_sub(size) else {
                return Ok((0, format!("the tokens before {position} have another prefix key; too many to compare them all")));
            };
            *left = rest;
            let common = match self.store.read(&list).await {
                Ok(bytes) => alike(&bytes, tokens),
                Err(Error::BlobUnknown { .. } | Error::Format(_) | Error::Corrupt { .. }) => 0,
                Err(error) => return Err(error),
            };
            self.lists.insert(list, common);
        }
        let common = self.lists.get(&list).map_or(0, |common| position.min(*common));
        let reason = if common == position {
            format!("all {position} tokens agree, and the prefix key does not")
        } else if common == tokens.len() as u64 {
            format!("this snapshot is for exactly {position} tokens; the request has {common}, so it cannot be used")
        } else {
            format!("this snapshot is for exactly {position} tokens; they differ from the request's from position {common}")
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
