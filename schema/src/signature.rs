//! Signatures of snapshots, in the form of cosign: what is signed, where it is stored, the keys.
//!
//! ```text
//! manifest (OCI), subject: the snapshot, tag sha256-<hex>.sig
//!   layer: the payload, JSON that names the snapshot's digest
//!     annotation dev.cosignproject.cosign/signature: ed25519 over the bytes of the payload, base64
//! ```
//!
//! Nothing here computes a signature: the store does.

mod key;

pub use key::{KEY_FILE_MAX, PublicKey, private_key_der, private_key_pem};

use crate::api::{NewSignature, Signature};
use crate::digest::Digest;
use crate::error::FormatError;
use crate::json;
use crate::limits::Limits;
use crate::media_type::OCI_MANIFEST;
use crate::name::{RepositoryName, Tag};
use crate::snapshot::MAX_BYTES;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The media type of a payload.
pub const PAYLOAD: &str = "application/vnd.dev.cosign.simplesigning.v1+json";
/// The `artifactType` of a manifest of signatures.
pub const ARTIFACT: &str = "application/vnd.dev.cosign.artifact.sig.v1+json";
/// The annotation of a payload that has its signature.
pub const ANNOTATION: &str = "dev.cosignproject.cosign/signature";
/// Bytes of a payload.
pub const PAYLOAD_MAX: u64 = 64 << 10;
/// Signatures of one snapshot.
pub const MOST: usize = 100;

/// Bytes of a signature by any algorithm.
const SIGNATURE_MAX: usize = 8 << 10;
const DOCUMENT: &str = "signed payload";
/// The `type` that cosign gives to a payload, and requires of it.
const TYPE: &str = "cosign container image signature";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// The signed document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Payload {
    /// The snapshot.
    pub snapshot: Digest,
    /// The repository for which it was signed; other programs write their own form of it.
    pub repository: String,
    /// The id of the key, if the signer says it.
    pub key_id: Option<Digest>,
    /// When it was signed, in seconds since 1970, if the signer says it.
    pub signed_at: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct Simple {
    critical: Critical,
    #[serde(default)]
    optional: Option<BTreeMap<String, serde_json::Value>>,
}

#[derive(Serialize, Deserialize)]
struct Critical {
    identity: Identity,
    image: ImageName,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Identity {
    docker_reference: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ImageName {
    docker_manifest_digest: Digest,
}

impl Payload {
    /// The payload for a snapshot.
    #[must_use]
    pub fn new(snapshot: Digest, repository: &RepositoryName, key: &PublicKey, signed_at: u64) -> Self {
        Self { snapshot, repository: repository.to_string(), key_id: Some(key.id()), signed_at: Some(signed_at) }
    }

    /// Its bytes, which are what is signed.
    #[must_use]
    pub fn to_text(&self) -> String {
        let key_id = self.key_id.map(|id| ("key-id".to_owned(), id.to_string().into()));
        let signed_at = self.signed_at.map(|seconds| ("timestamp".to_owned(), seconds.into()));
        let simple = Simple {
            critical: Critical {
                identity: Identity { docker_reference: self.repository.clone() },
                image: ImageName { docker_manifest_digest: self.snapshot },
                kind: TYPE.to_owned(),
            },
            optional: Some(key_id.into_iter().chain(signed_at).collect()),
        };
        String::from_utf8_lossy(&json::bytes(&simple)).into_owned()
    }

    /// Reads a payload. Fields that are not known are skipped.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path.
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        let simple: Simple = json::parse(DOCUMENT, text.as_bytes(), PAYLOAD_MAX)?;
        let Critical { identity, image, kind } = simple.critical;
        if kind != TYPE {
            return Err(FormatError::field(DOCUMENT, "$.critical.type", TYPE, kind));
        }
        let optional = simple.optional.unwrap_or_default();
        Ok(Self {
            snapshot: image.docker_manifest_digest,
            repository: identity.docker_reference,
            key_id: optional.get("key-id").and_then(|id| id.as_str()?.parse().ok()),
            signed_at: optional.get("timestamp").and_then(serde_json::Value::as_u64),
        })
    }
}

/// The bytes of a signature.
///
/// # Errors
/// [`FormatError::Field`].
pub fn decode(signature: &str) -> Result<Vec<u8>, FormatError> {
    let fail = |found: &str| FormatError::field("signature", "$.signature", "base64 of 1 to 8192 bytes", found);
    if signature.len() > SIGNATURE_MAX * 2 {
        return Err(fail("more"));
    }
    let bytes = STANDARD.decode(signature).map_err(|_| fail("other characters, or a wrong length"))?;
    if (1..=SIGNATURE_MAX).contains(&bytes.len()) { Ok(bytes) } else { Err(fail("another number of bytes")) }
}

impl NewSignature {
    /// Makes one of its parts.
    #[must_use]
    pub fn new(payload: String, signature: &[u8]) -> Self {
        Self { payload, signature: STANDARD.encode(signature) }
    }

    /// Refuses one that is none, or that is for another snapshot.
    ///
    /// # Errors
    /// [`FormatError`] with the place.
    pub fn check(&self, snapshot: &Digest) -> Result<(), FormatError> {
        let payload = Payload::parse(&self.payload)?;
        decode(&self.signature)?;
        if payload.snapshot != *snapshot {
            let path = "$.critical.image.docker-manifest-digest";
            return Err(FormatError::field(DOCUMENT, path, snapshot, payload.snapshot));
        }
        Ok(())
    }
}

impl From<NewSignature> for Signature {
    fn from(new: NewSignature) -> Self {
        let payload = Payload::parse(&new.payload).ok();
        Self {
            key_id: payload.as_ref().and_then(|payload| payload.key_id),
            signed_at: payload.and_then(|payload| payload.signed_at).map(|seconds| seconds.saturating_mul(1000)),
            payload: new.payload,
            signature: new.signature,
        }
    }
}

impl From<Signature> for NewSignature {
    fn from(Signature { payload, signature, .. }: Signature) -> Self {
        Self { payload, signature }
    }
}

/// The tag by which cosign finds the signatures of a snapshot.
#[must_use]
pub fn tag_of(snapshot: &Digest) -> Option<Tag> {
    format!("{}.sig", snapshot.to_string().replacen(':', "-", 1)).parse().ok()
}

/// The snapshot whose signatures a tag has.
#[must_use]
pub fn signed_by(tag: &Tag) -> Option<Digest> {
    tag.as_str().strip_suffix(".sig")?.replacen('-', ":", 1).parse().ok()
}

/// Whether a tag belongs to a manifest by its name: signatures and what else is about that manifest
/// get such tags.
#[must_use]
pub fn is_companion(tag: &Tag) -> bool {
    let text = tag.as_str();
    let name = [".sig", ".att", ".sbom"].iter().find_map(|end| text.strip_suffix(end)).unwrap_or(text);
    name.replacen('-', ":", 1).parse::<Digest>().is_ok()
}

/// A layer of a manifest of signatures. Annotations of other programs stay with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Layer {
    /// Its media type.
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Its annotations, the signature among them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Layer {
    /// The layer of a signature.
    #[must_use]
    pub fn of(signature: &NewSignature) -> Self {
        Self {
            media_type: PAYLOAD.to_owned(),
            digest: Digest::sha256(signature.payload.as_bytes()),
            size: signature.payload.len() as u64,
            annotations: BTreeMap::from([(ANNOTATION.to_owned(), signature.signature.clone())]),
        }
    }

    /// The signature, if it has one that can be one.
    #[must_use]
    pub fn signature(&self) -> Option<&str> {
        let is_payload = self.media_type == PAYLOAD && self.size <= PAYLOAD_MAX;
        self.annotations.get(ANNOTATION).map(String::as_str).filter(|text| is_payload && decode(text).is_ok())
    }
}

#[derive(Deserialize)]
struct Layers {
    #[serde(default)]
    layers: Option<Vec<Layer>>,
}

/// The layers of a manifest of signatures.
///
/// # Errors
/// [`FormatError`]; [`FormatError::TooLarge`] for more than [`MOST`].
pub fn layers(bytes: &[u8], limits: &Limits) -> Result<Vec<Layer>, FormatError> {
    let manifest: Layers = json::parse("manifest of signatures", bytes, limits.document_bytes.min(MAX_BYTES))?;
    let layers = manifest.layers.unwrap_or_default();
    crate::flat::too_many("signatures of a snapshot", layers.len() as u64, MOST as u64)?;
    Ok(layers)
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest<'a> {
    schema_version: u32,
    media_type: &'a str,
    artifact_type: &'a str,
    config: Layer,
    layers: &'a [Layer],
    subject: Layer,
}

#[derive(Serialize)]
struct Config<'a> {
    architecture: &'a str,
    os: &'a str,
    rootfs: RootFs,
}

#[derive(Serialize)]
struct RootFs {
    #[serde(rename = "type")]
    kind: &'static str,
    diff_ids: Vec<Digest>,
}

/// The manifest of these layers, and its configuration: an ordinary one, since cosign reads it when
/// it adds a signature. `size` is that of the snapshot's manifest. Equal layers give equal bytes.
#[must_use]
pub fn manifest(snapshot: Digest, size: u64, layers: &[Layer]) -> (Vec<u8>, Vec<u8>) {
    let plain = |media_type: &str, digest, size| Layer { media_type: media_type.to_owned(), digest, size, annotations: BTreeMap::new() };
    let rootfs = RootFs { kind: "layers", diff_ids: layers.iter().map(|layer| layer.digest).collect() };
    let config = json::bytes(&Config { architecture: "", os: "", rootfs });
    let manifest = Manifest {
        schema_version: 2,
        media_type: OCI_MANIFEST,
        artifact_type: ARTIFACT,
        config: plain(CONFIG, Digest::sha256(&config), config.len() as u64),
        layers,
        subject: plain(OCI_MANIFEST, snapshot, size),
    };
    (json::bytes(&manifest), config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Algorithm;
    use crate::image::Image;
    use proptest::prelude::*;
    use serde_json::json;

    fn key() -> PublicKey {
        PublicKey::new([7; 32])
    }

    #[test]
    fn a_payload_is_what_cosign_writes_and_says_key_and_time() {
        let snapshot = Digest::sha256(b"manifest");
        let payload = Payload::new(snapshot, &"team/agent".parse().unwrap(), &key(), 1_700_000_000);
        let text = payload.to_text();
        let expected = json!({
            "critical": {
                "identity": {"docker-reference": "team/agent"},
                "image": {"docker-manifest-digest": snapshot},
                "type": "cosign container image signature",
            },
            "optional": {"key-id": key().id(), "timestamp": 1_700_000_000},
        });
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), expected);
        assert_eq!(Payload::parse(&text), Ok(payload));
        // Without options, or with `null` for them, as cosign writes it.
        for optional in [json!(null), json!({}), json!({"creator": "cosign", "timestamp": "soon", "key-id": 1})] {
            let text = json!({"critical": expected["critical"], "optional": optional}).to_string();
            let found = Payload::parse(&text).unwrap();
            assert_eq!((found.snapshot, found.key_id, found.signed_at), (snapshot, None, None));
        }
        let other = text.replace("cosign container", "atomic container");
        assert!(Payload::parse(&other).unwrap_err().to_string().contains("$.critical.type"));
        assert!(Payload::parse(&format!("{text} {}", " ".repeat(PAYLOAD_MAX as usize))).is_err());
    }

    #[test]
    fn a_signature_is_for_the_snapshot_that_its_payload_names() {
        let snapshot = Digest::sha256(b"manifest");
        let payload = Payload::new(snapshot, &"a".parse().unwrap(), &key(), 1);
        let new = NewSignature::new(payload.to_text(), &[1; 64]);
        assert_eq!(new.check(&snapshot), Ok(()));
        assert!(new.check(&Digest::sha256(b"other")).unwrap_err().to_string().contains("docker-manifest-digest"));
        for wrong in ["", "%", "AAA", "A".repeat(20_000).as_str()] {
            assert!(NewSignature { signature: wrong.into(), ..new.clone() }.check(&snapshot).is_err(), "{wrong}");
        }
        let shown = Signature::from(new.clone());
        assert_eq!((shown.key_id, shown.signed_at), (Some(key().id()), Some(1000)));
        assert_eq!(NewSignature::from(shown), new);
    }

    #[test]
    fn a_manifest_refers_to_the_snapshot_and_keeps_what_others_wrote() {
        let (snapshot, limits) = (Digest::sha256(b"manifest"), Limits::default());
        let ours = Layer::of(&NewSignature::new("{}".into(), &[1; 64]));
        let mut theirs = Layer::of(&NewSignature::new("{ }".into(), &[2; 64]));
        theirs.annotations.insert("dev.sigstore.cosign/certificate".into(), "PEM".into());
        let both = [theirs, ours];
        let (bytes, config) = manifest(snapshot, 8, &both);
        let image = Image::parse(&bytes, &limits).unwrap();
        assert_eq!((image.subject, image.artifact_type.as_deref()), (Some(snapshot), Some(ARTIFACT)));
        assert_eq!(image.children().len(), 3);
        assert_eq!(image.children()[0].digest, Digest::sha256(&config));
        assert_eq!(layers(&bytes, &limits).unwrap(), both);
        assert_eq!(manifest(snapshot, 8, &both).0, bytes);
        let many = vec![both[0].clone(); MOST + 1];
        assert!(layers(&manifest(snapshot, 8, &many).0, &limits).is_err());
        assert_eq!(layers(br#"{"layers": null}"#, &limits), Ok(vec![]));
    }

    #[test]
    fn a_layer_without_a_signature_has_none() {
        let layer = Layer::of(&NewSignature::new("{}".into(), &[1; 64]));
        assert!(layer.signature().is_some());
        assert_eq!(Layer { media_type: "text/plain".into(), ..layer.clone() }.signature(), None);
        assert_eq!(Layer { size: PAYLOAD_MAX + 1, ..layer.clone() }.signature(), None);
        assert_eq!(Layer { annotations: BTreeMap::new(), ..layer }.signature(), None);
    }

    #[test]
    fn a_tag_of_signatures_names_its_snapshot() {
        let snapshot = Digest::sha256(b"manifest");
        let tag = tag_of(&snapshot).unwrap();
        assert_eq!(tag.as_str(), format!("sha256-{}.sig", snapshot.hex()));
        assert_eq!((signed_by(&tag), is_companion(&tag)), (Some(snapshot), true));
        // A tag has 128 characters at most.
        assert_eq!(tag_of(&Digest::of(Algorithm::Sha512, b"")), None);
        for other in ["sha256-abc.sig", "v1.sig", "latest"] {
            let other: Tag = other.parse().unwrap();
            assert_eq!((signed_by(&other), is_companion(&other)), (None, false), "{other}");
        }
        let bare: Tag = format!("sha256-{}", snapshot.hex()).parse().unwrap();
        assert_eq!((signed_by(&bare), is_companion(&bare)), (None, true));
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_means_what_it_prints(text in ".{0,300}") {
            if let Ok(payload) = Payload::parse(&text) {
                prop_assert_eq!(Payload::parse(&payload.to_text()), Ok(payload));
            }
            let _ = (layers(text.as_bytes(), &Limits::default()), decode(&text), PublicKey::parse_all(&text), private_key_der(&text));
        }

        #[test]
        fn a_payload_survives_whatever_it_says(
            name in any::<String>(), named in any::<Option<[u8; 4]>>(), signed_at in any::<Option<u64>>(), cut in any::<prop::sample::Index>()
        ) {
            let key_id = named.map(|bytes| Digest::sha256(&bytes));
            let payload = Payload { snapshot: Digest::sha256(name.as_bytes()), repository: name, key_id, signed_at };
            let text = payload.to_text();
            prop_assert_eq!(Payload::parse(&text), Ok(payload));
            let at = cut.index(text.len());
            if text.is_char_boundary(at) {
                prop_assert!(Payload::parse(&text[..at]).is_err());
            }
        }
    }
}
