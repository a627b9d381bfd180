//! The description of a snapshot before any of its pages is read: enough to tell whether it fits an
//! engine.

use crate::api::SnapshotDetail;
use crate::checkpoint::{self, Key};
use crate::digest::Digest;
use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::media_type;
use crate::tree::{Group, PageTree};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Body of `POST /v1/engines/{engine}/checks`. A registry says it without proof, so a refusal is
/// only early: the same is checked again by the bytes of the documents.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outline {
    /// The engine configuration that it was captured from.
    #[serde(default)]
    pub deployment: BTreeMap<String, Value>,
    /// Digest of the engine configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Digest>,
    /// Tokens with state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary: Option<u64>,
    /// Which prefix the state belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<Key>,
    /// One for each group and rank that has pages.
    #[serde(default)]
    pub trees: Vec<TreeOutline>,
    /// Ranks that have state tensors.
    #[serde(default)]
    pub states: BTreeSet<u32>,
    /// Whether it says how its ranks share the state.
    #[serde(default)]
    pub shards: bool,
    /// Whether it may be cut anew for an engine that differs only in its ranks.
    #[serde(default)]
    pub reshard: bool,
}

/// The shape of a page tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeOutline {
    /// The group of layers.
    pub group: Group,
    /// The rank that it belongs to.
    pub rank: u32,
    /// How many ranks there are.
    pub world: u32,
    /// How the bytes of a page are laid out.
    pub layout: String,
    /// Tokens in a page.
    pub page_size_tokens: u32,
    /// Bytes of one component of one page.
    pub page_bytes: u64,
    /// Shape of a page, if the layout has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geometry: Option<Geometry>,
    /// Names of the blobs that make up a page.
    pub components: Vec<String>,
    /// Number of pages.
    pub pages: u64,
    /// Number of sequences.
    pub sequences: usize,
}

impl From<&PageTree> for TreeOutline {
    fn from(tree: &PageTree) -> Self {
        Self {
            group: tree.group.clone(),
            rank: tree.rank,
            world: tree.world,
            layout: tree.layout.clone(),
            page_size_tokens: tree.page_size_tokens,
            page_bytes: tree.page_bytes,
            geometry: tree.geometry,
            components: tree.components.clone(),
            pages: tree.pages(),
            sequences: tree.sequences.len(),
        }
    }
}

impl Outline {
    /// The outline of what a registry says of a snapshot.
    ///
    /// # Errors
    /// [`FormatError::Field`] for an image, and for a layer whose rank is no number.
    pub fn of(detail: &SnapshotDetail, reshard: bool) -> Result<Self, FormatError> {
        let (manifest, config) = (&detail.manifest, &detail.config);
        if !manifest.is_snapshot() {
            return Err(FormatError::field("snapshot", "$.artifactType", media_type::SNAPSHOT, format!("{:?}", manifest.artifact_type)));
        }
        Ok(Self {
            deployment: config.deployment.clone(),
            fingerprint: config.fingerprint,
            boundary: config.boundary,
            prefix: config.prefix.clone(),
            trees: detail.trees.iter().map(TreeOutline::from).collect(),
            states: manifest.layers_of(media_type::CHECKPOINT).map(checkpoint::rank).collect::<Result<_, _>>()?,
            shards: manifest.layers_of(media_type::SHARDS).next().is_some(),
            reshard,
        })
    }
}

/// Answer to `POST /v1/engines/{engine}/checks`, if it fits. If not, the answer is a problem that
/// says what differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fits {
    /// The engine.
    pub engine: String,
    /// Tokens with state that the snapshot has.
    pub boundary: u64,
}

/// Characters of a value that a [`Difference`] shows.
const SHOWN: usize = 120;

/// A field in which two engine configurations differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// Its name.
    pub field: String,
    /// Its value in the engine; absent if the engine does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Value>,
    /// Its value in the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Value>,
}

impl Difference {
    /// All fields in which they differ, by name.
    #[must_use]
    pub fn all(engine: &BTreeMap<String, Value>, snapshot: &BTreeMap<String, Value>) -> Vec<Self> {
        let fields: BTreeSet<&String> = engine.keys().chain(snapshot.keys()).collect();
        let value = |of: &BTreeMap<String, Value>, field: &String| of.get(field).cloned();
        let differs = fields.into_iter().filter(|field| engine.get(*field) != snapshot.get(*field));
        differs.map(|field| Self { field: field.clone(), engine: value(engine, field), snapshot: value(snapshot, field) }).collect()
    }
}

/// The name and both values, as JSON without line ends: a snapshot is foreign.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let clip = |text: String| match text.char_indices().nth(SHOWN) {
            Some((end, _)) => format!("{}…", &text[..end]),
            None => text,
        };
        let shown = |value: &Option<Value>| value.as_ref().map_or_else(|| "none".to_owned(), |value| clip(value.to_string()));
        // A name with quotes or line ends in it is shown as JSON too.
        let is_plain = !self.field.is_empty() && self.field.chars().all(|c| c.is_ascii_alphanumeric() || "_.-/".contains(c));
        let field = if is_plain { self.field.clone() } else { Value::from(self.field.as_str()).to_string() };
        write!(f, "{}: {} in the engine, {} in the snapshot", clip(field), shown(&self.engine), shown(&self.snapshot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn deployment(value: Value) -> BTreeMap<String, Value> {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn only_fields_that_differ_are_shown_each_with_both_values() {
        let engine = deployment(json!({"weights": "sha256:a", "tp": 1, "engine": "e 1"}));
        let snapshot = deployment(json!({"weights": "sha256:b", "engine": "e 1", "a\nb": "x".repeat(500)}));
        let said: Vec<String> = Difference::all(&engine, &snapshot).iter().map(ToString::to_string).collect();
        assert_eq!(said.len(), 3);
        assert!(said[0].starts_with(r#""a\nb": none in the engine, "xxx"#) && said[0].len() < 250, "{}", said[0]);
        assert_eq!(said[1], "tp: 1 in the engine, none in the snapshot");
        assert_eq!(said[2], r#"weights: "sha256:a" in the engine, "sha256:b" in the snapshot"#);
        assert!(Difference::all(&engine, &engine).is_empty());
    }

    proptest! {
        #[test]
        fn a_difference_is_one_line_whatever_a_snapshot_says(chars in proptest::collection::vec(any::<char>(), 0..300)) {
            let text: String = chars.into_iter().collect();
            let difference = Difference { field: text.clone(), engine: None, snapshot: Some(json!([text])) };
            prop_assert!(!difference.to_string().contains(['\n', '\r']));
        }

        #[test]
        fn no_bytes_make_the_reader_of_an_outline_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let read: Result<Outline, _> = serde_json::from_slice(&bytes);
            prop_assert!(read.is_err());
        }
    }
}
