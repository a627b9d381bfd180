//! Restores for engines that ask: a request's tokens or keys, what lies ready for them, and the
//! blocks to write it into.

use super::{Oracle, is_no};
use crate::digest::Digest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Keys of one call.
pub const MAX_KEYS: usize = 1 << 16;

/// Arguments of [`super::ToAgent::Match`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    /// The request's tokens.
    pub tokens: Vec<u32>,
    /// Tokens whose state the engine has already.
    #[serde(default)]
    pub computed: u64,
    /// Tenant salt of the prefix.
    #[serde(default)]
    pub salt: String,
    /// Adapter in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Only this snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<Digest>,
}

/// Arguments of [`super::ToAgent::MatchKeys`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatchKeys {
    /// Number of the request's tokens.
    pub tokens: u64,
    /// Tokens whose state the engine has already.
    #[serde(default)]
    pub computed: u64,
    /// Tenant salt of the prefix.
    #[serde(default)]
    pub salt: String,
    /// Adapter in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Prefix lengths, ascending, each with the key of that prefix ([`crate::prefix`]): each length
    /// of [`super::StagedStates::boundaries`] below `tokens`, and, so that a reason can say where
    /// two prefixes part, those of [`crate::prefix::ladder`].
    pub keys: Vec<(u64, Digest)>,
}

impl MatchKeys {
    /// Checks that the lengths ascend and are not longer than the request.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), String> {
        if self.keys.len() > MAX_KEYS {
            return Err(format!("{} keys, the limit is {}", self.keys.len(), MAX_KEYS));
        }
        if let Some(pair) = self.keys.windows(2).find(|pair| pair[0].0 >= pair[1].0) {
            return Err(format!("the key of {} tokens follows that of {}", pair[1].0, pair[0].0));
        }
        match self.keys.last() {
            Some((last, _)) if *last > self.tokens => Err(format!("a key of {last} tokens, the request has {}", self.tokens)),
            _ => Ok(()),
        }
    }

    /// The key of the first `tokens` tokens, if it was given.
    #[must_use]
    pub fn key(&self, tokens: u64) -> Option<Digest> {
        self.keys.binary_search_by_key(&tokens, |(at, _)| *at).ok().map(|at| self.keys[at].1)
    }
}

/// Answer to [`super::ToAgent::Match`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "match", rename_all = "kebab-case")]
pub enum Matched {
    /// Everything up to `boundary` lies verified in host memory or in the local store.
    Ready {
        /// T: state for the first T tokens.
        boundary: u64,
        /// The name of this match in `fill` and `abandon`.
        restore: String,
        /// The snapshot.
        digest: Digest,
        /// Whether it is only the beginning of the snapshot. No logits are known there.
        #[serde(default, skip_serializing_if = "is_no")]
        partly: bool,
        /// Where it was, if the agent looked for it ([`super::ToAgent::Find`]).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tier: Option<Tier>,
    },
    /// It is on its way: ask again.
    Later {},
    /// Perhaps the beginning of one can be used. The keys do not tell where the tokens part: call
    /// [`super::ToAgent::Match`].
    Tokens {
        /// For [`Match::of`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<Digest>,
    },
    /// There is none.
    None {
        /// Why: which of the two keys did not hold.
        reason: String,
    },
}

/// Where the agent had a state that it found for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// It was verified and lay ready.
    Memory,
    /// In the agent's own store.
    Store,
    /// In the registry.
    Registry,
}

/// Arguments of [`super::ToAgent::Fill`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    /// The match.
    pub restore: String,
    /// Blocks that the engine allocated, as in [`super::Sequence::blocks`].
    pub blocks: BTreeMap<String, Vec<u32>>,
    /// A CUDA IPC event, 64 bytes in hex: writes wait for it (engines zero fresh blocks on a stream
    /// of their own).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// Tokens that the engine had computed. Blocks that hold only these are compared with the
    /// snapshot and not written: other sequences may share them.
    #[serde(default)]
    pub kept: u64,
    /// Names this fill for [`Abandon::fill`], on every rank; unique in the engine's life, 1 to 64
    /// bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<String>,
}

/// Answer to [`super::ToAgent::Fill`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filled {
    /// The logits of the step at the boundary, if they were recorded: an engine that sees its
    /// logits compares them and reports [`super::Taking::LogitsEqual`] or
    /// [`super::Taking::LogitsDiffer`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oracle: Option<Oracle>,
}

/// Arguments of [`super::ToAgent::Abandon`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abandon {
    /// The match.
    pub restore: String,
    /// The fill to give up, on every rank. A fill of that name that comes later is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fill: Option<String>,
}
