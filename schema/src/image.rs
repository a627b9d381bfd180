//! Images: manifests and indexes of the OCI API, of any program.
//!
//! A registry keeps them byte for byte. It reads what they list, what they say they are, and skips
//! every other field.

use crate::container::Child;
use crate::digest::Digest;
use crate::error::FormatError;
use crate::flat::too_many;
use crate::kind::Kind;
use crate::limits::Limits;
use crate::snapshot::MAX_BYTES;
use crate::{json, media_type};
use serde::Deserialize;
use std::collections::BTreeMap;

const IMAGE: &str = "OCI manifest";

/// What a manifest or an index says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its media type, also if the document leaves it out.
    pub media_type: String,
    /// `artifactType`; of an image manifest without one, the media type of its configuration.
    pub artifact_type: Option<String>,
    /// The manifest that it refers to, which need not exist.
    pub subject: Option<Digest>,
    /// Labels.
    pub annotations: BTreeMap<String, String>,
    children: Vec<Child>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Fields {
    schema_version: u32,
    media_type: Option<String>,
    artifact_type: Option<String>,
    config: Option<Pointer>,
    layers: Option<Vec<Pointer>>,
    manifests: Option<Vec<Pointer>>,
    subject: Option<Pointer>,
    annotations: Option<BTreeMap<String, String>>,
}

/// The fields of a descriptor that matter here.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pointer {
    media_type: String,
    digest: Digest,
    size: u64,
}

impl Image {
    /// Parses an image that is to be stored as one.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path. The manifest of a snapshot is no image: its pages are
    /// listed by blobs that only [`Kind::Manifest`] follows.
    pub fn parse(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let image = Self::describe(bytes, limits)?;
        if image.is_snapshot() {
            let found = media_type::SNAPSHOT.to_owned();
            return Err(FormatError::field(IMAGE, "$.artifactType", "an image: snapshots are pushed with `pf push`", found));
        }
        Ok(image)
    }

    /// Reads what a manifest or an index says; also the manifest of a snapshot.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path.
    pub fn describe(bytes: &[u8], limits: &Limits) -> Result<Self, FormatError> {
        let fields: Fields = json::parse(IMAGE, bytes, limits.document_bytes.min(MAX_BYTES))?;
        let wrong = |path: &str, expected: &str, found: &str| Err(FormatError::field(IMAGE, path, expected, found));
        if fields.schema_version != 2 {
            return wrong("$.schemaVersion", "2", &fields.schema_version.to_string());
        }
        let is_index = fields.manifests.is_some();
        // Readers that go by different fields would see different images.
        if is_index && (fields.config.is_some() || fields.layers.is_some()) {
            return wrong("$.manifests", "either `manifests`, or `config` and `layers`", "both");
        }
        let of_form = if is_index { media_type::OCI_INDEX } else { media_type::OCI_MANIFEST };
        let media_type = fields.media_type.unwrap_or_else(|| of_form.to_owned());
        // It is sent as a header.
        if media_type.is_empty() || !media_type.bytes().all(|byte| byte.is_ascii_graphic()) {
            return wrong("$.mediaType", "a media type", &format!("{media_type:?}"));
        }
        if is_of_index(&media_type).is_some_and(|says_index| says_index != is_index) {
            return wrong("$.mediaType", of_form, &media_type);
        }
        let pointers: Vec<&Pointer> = match (&fields.manifests, &fields.config) {
            (Some(manifests), _) => manifests.iter().collect(),
            (None, Some(config)) => std::iter::once(config).chain(fields.layers.iter().flatten()).collect(),
            (None, None) => return wrong("$", "`config`, or `manifests`", "neither"),
        };
        // As many as fit: the bytes of the document bound them, and clients expect that 4 MiB are
        // taken. ProcessFork lists a layer for each K and each V of a page.
        let mut children = Vec::with_capacity(pointers.len());
        for pointer in pointers {
            too_many("a blob in bytes", pointer.size, limits.blob_bytes)?;
            // An index of a build cache lists layers.
            let kind = if is_index && is_of_index(&pointer.media_type).is_some() { Kind::Image } else { Kind::Blob };
            let optional = pointer.media_type.contains(NONDISTRIBUTABLE) || pointer.media_type.starts_with(FOREIGN);
            children.push(Child { digest: pointer.digest, kind, size: Some(pointer.size), shape: None, optional });
        }
        let given = fields.artifact_type.filter(|text| !text.is_empty());
        Ok(Self {
            media_type,
            artifact_type: given.or_else(|| fields.config.map(|config| config.media_type)),
            subject: fields.subject.map(|subject| subject.digest),
            annotations: fields.annotations.unwrap_or_default(),
            children,
        })
    }

    /// What it lists, in its own order; a blob listed twice appears twice.
    #[must_use]
    pub fn children(&self) -> &[Child] {
        &self.children
    }

    /// Whether it is the manifest of a snapshot.
    #[must_use]
    pub fn is_snapshot(&self) -> bool {
        self.media_type == media_type::OCI_MANIFEST && self.artifact_type.as_deref() == Some(media_type::SNAPSHOT)
    }
}

/// A part of the media types of layers that a registry need not have.
const NONDISTRIBUTABLE: &str = ".layer.nondistributable.";
/// What Docker's media types of such layers begin with.
const FOREIGN: &str = "application/vnd.docker.image.rootfs.foreign.";

/// Whether a media type is that of an index, or that of a manifest; none if it is neither.
fn is_of_index(text: &str) -> Option<bool> {
    match text {
        media_type::OCI_INDEX | media_type::DOCKER_LIST => Some(true),
        media_type::OCI_MANIFEST | media_type::DOCKER_MANIFEST => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pointer(media_type: &str, name: &[u8]) -> serde_json::Value {
        json!({"mediaType": media_type, "digest": Digest::sha256(name), "size": name.len(), "platform": {"os": "linux"}, "data": "AA=="})
    }

    fn parsed(document: &serde_json::Value) -> Result<Image, FormatError> {
        Image::parse(&serde_json::to_vec(document).unwrap(), &Limits::default())
    }

    #[test]
    fn a_manifest_lists_its_configuration_and_layers_and_may_lack_foreign_ones() {
        let foreign = "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip";
        let docker = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip";
        let layers = [pointer("x/layer", b"a"), pointer(foreign, b"b"), pointer(docker, b"c")];
        let image = parsed(&json!({
            "schemaVersion": 2, "mediaType": media_type::DOCKER_MANIFEST, "config": pointer("x/config", b"{}"), "layers": layers,
            "subject": pointer(media_type::OCI_MANIFEST, b"subject"), "annotations": {"k": "v"}, "unknown": [1]
        }))
        .unwrap();
        let optional: Vec<bool> = image.children().iter().map(|child| child.optional).collect();
        assert_eq!(optional, [false, false, true, true]);
        assert!(image.children().iter().all(|child| child.kind == Kind::Blob));
        assert_eq!((image.media_type.as_str(), image.artifact_type.as_deref()), (media_type::DOCKER_MANIFEST, Some("x/config")));
        assert_eq!((image.subject, image.annotations.len()), (Some(Digest::sha256(b"subject")), 1));
    }

    #[test]
    fn a_manifest_lists_as_many_layers_as_fit_into_its_bytes() {
        let layer = |number: usize| {
            let digest = Digest::sha256(&number.to_le_bytes());
            json!({"mediaType": "application/vnd.processfork.layer.v1+zstd", "digest": digest, "size": 8})
        };
        let of = |count: usize| {
            let layers: Vec<_> = (0..count).map(layer).collect();
            json!({"schemaVersion": 2, "config": pointer("x/config", b"{}"), "layers": layers})
        };
        assert_eq!(parsed(&of(20_000)).unwrap().children().len(), 20_001);
        assert!(matches!(parsed(&of(40_000)), Err(FormatError::TooLarge { .. })));
    }

    #[test]
    fn an_index_lists_manifests_and_may_list_blobs() {
        let manifests = [pointer(media_type::OCI_MANIFEST, b"a"), pointer(media_type::OCI_INDEX, b"b"), pointer("x/layer", b"c")];
        let image = parsed(&json!({"schemaVersion": 2, "manifests": manifests})).unwrap();
        let kinds: Vec<Kind> = image.children().iter().map(|child| child.kind).collect();
        assert_eq!(kinds, [Kind::Image, Kind::Image, Kind::Blob]);
        assert_eq!((image.media_type.as_str(), image.artifact_type), (media_type::OCI_INDEX, None));
    }

    #[test]
    fn what_two_readers_could_read_in_two_ways_is_refused() {
        let config = pointer("x/config", b"{}");
        let cases = [
            json!({"schemaVersion": 1, "config": config, "layers": []}),
            json!({"schemaVersion": 2}),
            json!({"schemaVersion": 2, "config": config, "layers": [], "manifests": []}),
            json!({"schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "manifests": []}),
            json!({"schemaVersion": 2, "mediaType": media_type::OCI_INDEX, "config": config, "layers": []}),
            json!({"schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "artifactType": media_type::SNAPSHOT, "config": config}),
            json!({"schemaVersion": 2, "mediaType": "a/b\nX: y", "config": config}),
            json!({"schemaVersion": 2, "mediaType": "a/é", "config": config}),
            json!({"schemaVersion": 2, "mediaType": "", "config": config}),
        ];
        for case in cases {
            assert!(parsed(&case).is_err(), "{case}");
        }
        for layers in [json!(null), json!([])] {
            assert_eq!(parsed(&json!({"schemaVersion": 2, "config": config, "layers": layers})).unwrap().children().len(), 1);
        }
    }
}
