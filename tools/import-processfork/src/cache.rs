//! The page manifest of an image's cache layer.

use pfr_schema::FormatError;
use pfr_schema::Limits;
use pfr_schema::flat::{FlatManifest, LAYOUT, Page, Sequence};
use pfr_schema::geometry::{Dtype, Geometry};
use serde::Deserialize;

/// What a cache layer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cache {
    /// Pages.
    Pages {
        /// Their manifest.
        manifest: FlatManifest,
        /// Whether the manifest's own bytes are the ones read, so that nothing of them is lost.
        verbatim: bool,
    },
    /// No pages: the agent ran on an engine that was not captured.
    Empty,
}

/// The same document that [`FlatManifest`] reads, with any formatting and with unknown fields.
#[derive(Deserialize)]
struct Loose {
    layout: String,
    pages: Vec<Page>,
    logical_seqs: Vec<Sequence>,
    page_size_tokens: u32,
    n_layers: u32,
    n_heads: u32,
    head_dim: u32,
    dtype: Dtype,
}

impl Cache {
    /// Parses a page manifest.
    ///
    /// # Errors
    /// [`FormatError`] of the strict parser, or of the manifest's contents where only its spelling
    /// is another.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let strict = match FlatManifest::parse(bytes, limits) {
            Ok(manifest) => return Ok(Self::Pages { manifest, verbatim: true }),
            Err(error) => error,
        };
        if bytes.len() as u64 > limits.document_bytes {
            return Err(strict);
        }
        let loose = match serde_json::from_slice::<Loose>(bytes) {
            Ok(loose) if loose.layout == LAYOUT => loose,
            _ => return Err(strict),
        };
        if loose.pages.is_empty() {
            return Ok(Self::Empty);
        }
        let Loose { pages, logical_seqs, page_size_tokens, n_layers, n_heads, head_dim, dtype, .. } = loose;
        let geometry = Geometry { page_size_tokens, n_layers, n_heads, head_dim, dtype };
        let manifest = FlatManifest::new(geometry, pages, logical_seqs, limits)?;
        Ok(Self::Pages { manifest, verbatim: false })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;
    use proptest::prelude::*;

    fn sample() -> FlatManifest {
        let geometry = Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };
        let page = |ix| Page { ix, k: Digest::sha256(&[1, ix as u8]), v: Digest::sha256(&[2, ix as u8]) };
        let sequence = Sequence { id: "a".into(), page_ixs: vec![0, 1], fill_in_last_page: 1 };
        FlatManifest::new(geometry, vec![page(0), page(1)], vec![sequence], &Limits::default()).unwrap()
    }

    fn parse(bytes: &[u8]) -> Result<Cache, FormatError> {
        Cache::parse(bytes, &Limits::default())
    }

    #[test]
    fn the_canonical_spelling_any_other_and_none() {
        let bytes = sample().to_bytes();
        assert_eq!(parse(&bytes).unwrap(), Cache::Pages { manifest: sample(), verbatim: true });
        let mut value: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
        value["note"] = "x".into();
        value["pages"].as_array_mut().unwrap().reverse();
        let spelled = serde_json::to_vec_pretty(&value).unwrap();
        assert_eq!(parse(&spelled).unwrap(), Cache::Pages { manifest: sample(), verbatim: false });
        value["pages"][0]["ix"] = 0.into();
        assert!(parse(&serde_json::to_vec(&value).unwrap()).is_err(), "one page twice");
        let none = serde_json::json!({ "layout": LAYOUT, "page_size_tokens": 16, "n_layers": 0, "n_heads": 0, "head_dim": 0,
            "dtype": "bf16", "pages": [], "logical_seqs": [], "note": "nothing was captured" });
        assert_eq!(parse(&serde_json::to_vec(&none).unwrap()).unwrap(), Cache::Empty);
        assert!(parse(b"{\"layout\":\"paged-batchinvariant-v1\",\"pages\":[]}").is_err());
    }

    #[test]
    fn the_limits_hold_for_any_spelling() {
        let mut bytes = sample().to_bytes();
        bytes.push(b' ');
        let limits = |document_bytes, pages| Limits { document_bytes, pages, ..Limits::default() };
        assert!(matches!(Cache::parse(&bytes, &limits(100, 10)), Err(FormatError::TooLarge { .. })));
        assert!(matches!(Cache::parse(&bytes, &limits(10_000, 1)), Err(FormatError::TooLarge { .. })));
    }

    proptest! {
        #[test]
        fn any_damage_ends_in_a_cache_or_an_error(at in any::<prop::sample::Index>(), byte in any::<u8>(), blank in any::<bool>()) {
            let mut bytes = sample().to_bytes();
            if blank {
                bytes.insert(0, b' ');
            }
            let at = at.index(bytes.len());
            bytes[at] = byte;
            if let Ok(Cache::Pages { manifest, verbatim }) = parse(&bytes) {
                prop_assert_eq!(FlatManifest::parse(&manifest.to_bytes(), &Limits::default()).unwrap(), manifest.clone());
                prop_assert_eq!(verbatim, manifest.to_bytes() == bytes);
            }
        }
    }
}
