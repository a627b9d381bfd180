//! Snapshot directories without a model: pages of seeded noise in a real model's shape, with the
//! tokens and the configuration that an engine would record.
//!
//! The keys and values of a token depend on the seed, the branch and the position alone. So a
//! longer session begins with the pages of a shorter one, and two branches share the pages before
//! the token at which they part, as the sessions of an engine do. Only the numbers mean nothing.

use crate::cache::{KvShape, PAGE_TOKENS};
use crate::dump::{LogicalSeq, Manifest, Page, SnapshotWriter, Written};
use crate::error::EngineError;
use crate::math::bf16;
use crate::rng::Rng;
use pfr_schema::checkpoint::Key;
use pfr_schema::prefix;
use pfr_schema::snapshot::{Exactness, SnapshotConfig};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The shape of SmolLM2-135M: 11,520 bytes of K a token, and as many of V.
pub const SHAPE: KvShape = KvShape { layers: 30, heads: 3, head_dim: 64 };
/// Token ids are below this.
const VOCABULARY: usize = 49_152;

/// A made-up session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Tokens so far.
    pub tokens: usize,
    /// Decides every number.
    pub seed: u64,
    /// Which continuation of the common beginning this is.
    pub branch: u64,
    /// The first token that differs between branches.
    pub branch_at: usize,
}

impl Session {
    fn rng(&self, token: usize, of: u64) -> Rng {
        let branch = if token < self.branch_at { 0 } else { self.branch };
        Rng::from_parts(&[self.seed, branch, token as u64, of])
    }

    /// The token ids.
    #[must_use]
    pub fn ids(&self) -> Vec<u32> {
        (0..self.tokens).map(|token| self.rng(token, 0).below(VOCABULARY) as u32).collect()
    }

    /// The K (`side` is 1) or V (2) bytes of a page; slots without a token are zero.
    fn page(&self, page: usize, side: u64) -> Vec<u8> {
        let mut bytes = vec![0; SHAPE.page_bytes()];
        let first = page * PAGE_TOKENS;
        for token in first..self.tokens.min(first + PAGE_TOKENS) {
            let mut rng = self.rng(token, side);
            for layer in 0..SHAPE.layers {
                let row = (layer * PAGE_TOKENS + token - first) * SHAPE.row_bytes();
                for element in bytes[row..row + SHAPE.row_bytes()].as_chunks_mut::<2>().0 {
                    *element = bf16(rng.unit() * 2.0 - 1.0).to_le_bytes();
                }
            }
        }
        bytes
    }

    /// What an engine would record: an engine configuration that is the same for all sessions, and
    /// the prefix.
    #[must_use]
    pub fn config(&self) -> SnapshotConfig {
        let deployment = BTreeMap::from([
            ("backend".to_owned(), Value::from("none")),
            ("engine".to_owned(), Value::from("synthetic")),
            ("weights".to_owned(), Value::from("none: the numbers are noise")),
        ]);
        let fingerprint = prefix::fingerprint(&deployment);
        let key = Key {
            scheme: prefix::SCHEME.into(),
            prefix: prefix::key(&fingerprint, "", None, &self.ids()),
            tokens: self.tokens as u64,
            alignment: 1,
            salt: String::new(),
            adapter: None,
        };
        SnapshotConfig {
            engine: Some("synthetic".into()),
            deployment,
            fingerprint: Some(fingerprint),
            boundary: Some(self.tokens as u64),
            prefix: Some(key),
            exactness: Some(Exactness::BitExact),
            ..SnapshotConfig::default()
        }
    }
}

/// Writes a session as a snapshot directory with `config.json` and `tokens.bin`.
///
/// # Errors
/// [`EngineError::Snapshot`] if the directory holds a snapshot or the session has no token,
/// [`EngineError::Io`].
pub fn write_synthetic_dir(dir: &Path, session: &Session) -> Result<Written, EngineError> {
    let pages = u32::try_from(session.tokens.div_ceil(PAGE_TOKENS))
        .map_err(|_| EngineError::Snapshot(format!("{} tokens are too many", session.tokens)))?;
    if pages == 0 {
        return Err(EngineError::Snapshot("a session needs at least one token".into()));
    }
    let mut writer = SnapshotWriter::create(dir)?;
    let mut manifest = Manifest::new(SHAPE);
    for ix in 0..pages {
        let page = ix as usize;
        let (k, v) = (writer.blob(&session.page(page, 1))?, writer.blob(&session.page(page, 2))?);
        manifest.pages.push(Page { ix, k, v });
    }
    manifest.logical_seqs.push(LogicalSeq {
        id: "seq-1".into(),
        page_ixs: (0..pages).collect(),
        fill_in_last_page: (session.tokens % PAGE_TOKENS) as u32,
    });
    let ids: Vec<u8> = session.ids().iter().flat_map(|id| id.to_le_bytes()).collect();
    for (name, bytes) in [("tokens.bin", ids), ("config.json", session.config().to_bytes())] {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(EngineError::io("write", &path))?;
    }
    writer.finish(manifest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Session = Session { tokens: 40, seed: 7, branch: 0, branch_at: 0 };

    fn written(session: Session) -> Manifest {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        write_synthetic_dir(&out, &session).unwrap();
        Manifest::read(&out).unwrap()
    }

    #[test]
    fn a_longer_session_begins_with_the_pages_of_a_shorter_one() {
        let (short, long) = (written(BASE), written(Session { tokens: 64, ..BASE }));
        assert_eq!(short.pages[..2], long.pages[..2]);
        assert_ne!(short.pages[2], long.pages[2], "the last page was not full");
        assert_eq!((short.logical_seqs[0].fill_in_last_page, long.logical_seqs[0].fill_in_last_page), (8, 0));
    }

    #[test]
    fn branches_share_the_pages_before_the_token_at_which_they_part() {
        let left = Session { branch: 1, branch_at: 16, ..BASE };
        let (base, left) = (written(Session { branch_at: 16, ..BASE }), written(left));
        assert_eq!(base, written(BASE), "branch 0 is the session itself, wherever others part");
        assert_eq!(base.pages[0], left.pages[0]);
        assert!(base.pages[1].k != left.pages[1].k && base.pages[1].v != left.pages[1].v);
    }

    #[test]
    fn the_recorded_prefix_is_the_one_of_the_tokens() {
        let config = BASE.config();
        let key = config.prefix.unwrap();
        assert_eq!(key.prefix, prefix::key(&config.fingerprint.unwrap(), "", None, &BASE.ids()));
        assert_eq!((config.boundary, key.tokens), (Some(40), 40));
    }

    #[test]
    fn a_session_without_tokens_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let error = write_synthetic_dir(dir.path(), &Session { tokens: 0, ..BASE }).unwrap_err();
        assert_eq!(error.to_string(), "snapshot: a session needs at least one token");
    }
}
