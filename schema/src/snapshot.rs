//! Snapshots: OCI image manifests with `artifactType` = snapshot, and their configuration.

use crate::digest::Digest;
use crate::document::Document;
use crate::error::FormatError;
use crate::flat::too_many;
use crate::kind::Kind;
use crate::limits::Limits;
use crate::{json, media_type};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const MANIFEST: &str = "snapshot manifest";
const CONFIG: &str = "snapshot configuration";

/// Bytes of a manifest or a configuration: 4 MiB, as registries commonly allow. Free-form JSON
/// takes up to sixteen times its size once parsed, so these two do not get the whole of
/// [`Limits::document_bytes`].
pub const MAX_BYTES: u64 = 4 << 20;

/// How faithful a restore of this snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Exactness {
    /// Continuation is equal bit by bit.
    BitExact,
    /// Continuation may differ in low-order bits.
    NearExact,
}

/// What is known about a snapshot besides its bytes. Every field but `parents` is optional: a
/// directory that says nothing gets a configuration that says nothing, so that pushing it twice
/// gives one digest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotConfig {
    /// Agent id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Engine kind and version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Free description of the deployment (weights, quantization, kernels, parallelism …).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub deployment: BTreeMap<String, serde_json::Value>,
    /// Deployment fingerprint: what must match for a restore.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Digest>,
    /// Token boundary at which the state was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boundary: Option<u64>,
    /// Which prefix the state belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<crate::checkpoint::Key>,
    /// Settings that decide the next tokens and are not in memory: temperature, seed, penalties …
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sampling: BTreeMap<String, serde_json::Value>,
    /// What could change the next token and was not recorded; empty if exact.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unrecorded: Vec<String>,
    /// Digests of the parents: none, one, or two for a merge.
    #[serde(default)]
    pub parents: Vec<Digest>,
    /// How faithful a restore is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exactness: Option<Exactness>,
    /// RFC 3339 time of the capture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
}

impl SnapshotConfig {
    /// Parses and checks a configuration.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let config: Self = json::parse(CONFIG, bytes, limits.document_bytes.min(MAX_BYTES))?;
        if config.parents.len() > 2 {
            return Err(FormatError::field(CONFIG, "$.parents", "at most 2 parents", config.parents.len()));
        }
        if let Some(created) = &config.created
            && !is_time(created)
        {
            return Err(FormatError::field(CONFIG, "$.created", "an RFC 3339 time such as 2026-01-31T12:00:00Z", created));
        }
        Ok(config)
    }

    /// Compact JSON.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        json::bytes(self)
    }
}

/// Whether a text is an RFC 3339 time.
#[must_use]
pub fn is_time(text: &str) -> bool {
    chrono::DateTime::parse_from_rfc3339(text).is_ok()
}

/// A pointer to a blob: OCI's descriptor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What the blob is.
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its raw bytes.
    pub size: u64,
    /// Labels; `org.opencontainers.image.title` is an attachment's file name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// Annotation that carries an attachment's file name.
pub const TITLE: &str = "org.opencontainers.image.title";
/// Annotation of a checkpoint layer: the rank it belongs to, decimal; 0 if it is not there.
pub const RANK: &str = "org.pf.rank";

impl Descriptor {
    /// Points at `document`.
    #[must_use]
    pub fn of(media_type: &str, document: &Document) -> Self {
        Self { media_type: media_type.into(), digest: document.digest, size: document.bytes.len() as u64, annotations: BTreeMap::new() }
    }

    /// Whether the blob lists other blobs, and how.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::of_media_type(&self.media_type)
    }
}

/// An OCI image manifest; a snapshot if [`Self::artifact_type`] says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// [`media_type::OCI_MANIFEST`].
    pub media_type: String,
    /// [`media_type::SNAPSHOT`] for a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub artifact_type: Option<String>,
    /// The configuration.
    pub config: Descriptor,
    /// Page trees, checkpoint, token ids, attachments.
    pub layers: Vec<Descriptor>,
    /// The manifest this one refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subject: Option<Descriptor>,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Manifest {
    /// A snapshot of `config` and `layers`.
    #[must_use]
    pub fn snapshot(config: &Document, layers: Vec<Descriptor>, annotations: BTreeMap<String, String>) -> Self {
        Self {
            schema_version: 2,
            media_type: media_type::OCI_MANIFEST.into(),
            artifact_type: Some(media_type::SNAPSHOT.into()),
            config: Descriptor::of(media_type::CONFIG, config),
            layers,
            subject: None,
            annotations,
        }
    }

    /// Parses and checks a manifest.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let manifest: Self = json::parse(MANIFEST, bytes, limits.document_bytes.min(MAX_BYTES))?;
        let field = |path: &str, expected: &str, found: String| Err(FormatError::field(MANIFEST, path, expected, found));
        if manifest.schema_version != 2 {
            return field("$.schemaVersion", "2", manifest.schema_version.to_string());
        }
        if manifest.media_type != media_type::OCI_MANIFEST {
            return field("$.mediaType", media_type::OCI_MANIFEST, manifest.media_type);
        }
        too_many("layers in a manifest", manifest.layers.len() as u64, limits.layers)?;
        // A manifest below a manifest could nest without end.
        if manifest.config.kind() == Kind::Manifest {
            return field("$.config.mediaType", "a configuration, not a manifest", manifest.config.media_type);
        }
        for (i, layer) in manifest.layers.iter().enumerate() {
            if layer.kind() == Kind::Manifest {
                return field(&format!("$.layers[{i}].mediaType"), "a layer, not a manifest", layer.media_type.clone());
            }
        }
        for descriptor in std::iter::once(&manifest.config).chain(&manifest.layers) {
            too_many("a blob in bytes", descriptor.size, limits.blob_bytes)?;
        }
        let listed = manifest.layers.iter().filter(|layer| layer.kind().is_container()).map(|layer| layer.size);
        too_many("bytes of nodes in a manifest", listed.fold(0, u64::saturating_add), limits.listed_bytes)?;
        if manifest.is_snapshot() && manifest.config.media_type != media_type::CONFIG {
            return field("$.config.mediaType", media_type::CONFIG, manifest.config.media_type);
        }
        Ok(manifest)
    }

    /// Whether it is a snapshot of ours.
    #[must_use]
    pub fn is_snapshot(&self) -> bool {
        self.artifact_type.as_deref() == Some(media_type::SNAPSHOT)
    }

    /// Layers of this media type.
    pub fn layers_of<'a>(&'a self, media_type: &'a str) -> impl Iterator<Item = &'a Descriptor> + 'a {
        self.layers.iter().filter(move |l| l.media_type == media_type)
    }

    /// The manifest as a named node: compact JSON.
    #[must_use]
    pub fn to_document(&self) -> Document {
        Document::new(Kind::Manifest, json::bytes(self))
    }
}
