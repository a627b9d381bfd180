//! ProcessFork's image manifest (`.pfimg`), schema version 1: the blobs that it names. Their
//! meaning for the agent is not read.

use pfr_schema::{Algorithm, Digest, FormatError};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// The only media type of an image.
pub const MEDIA_TYPE: &str = "application/vnd.processfork.image.v1+json";
/// Bytes of an image manifest: 1 MiB; ProcessFork's own have about one KiB.
pub const MAX_BYTES: u64 = 1 << 20;
/// Maximum bytes of a text about the agent or the time.
pub const MAX_TEXT: usize = 1024;
/// Layers besides the cache.
pub const MAX_LAYERS: usize = 256;

/// The name that the manifest itself gets among the layers.
pub(super) const OWN_NAME: &str = "image.json";

const DOCUMENT: &str = "ProcessFork image";

/// The agent that was captured.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Agent {
    /// Such as `claude-code`.
    pub kind: String,
    /// Its version.
    pub version: String,
    /// Its build, or a name that its user gave.
    pub fingerprint: String,
}

/// A blob that an image names besides its cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// `section.field`, a name that a file may have, no two alike.
    pub name: String,
    /// The blob.
    pub digest: Digest,
}

/// An image manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Digest of the manifest's bytes: the image's name.
    pub digest: Digest,
    /// The agent that was captured.
    pub agent: Agent,
    /// The time of the capture, as the image gives it.
    pub created: String,
    /// Images that it continues: none, one, or two for a merge.
    pub parents: Vec<Digest>,
    /// The page manifest.
    pub cache: Digest,
    /// Every other blob, by name.
    pub layers: Vec<Layer>,
}

#[derive(Deserialize)]
struct Wire {
    schema_version: u32,
    media_type: String,
    agent: Agent,
    cache: Cache,
    created_at: String,
    #[serde(default)]
    parents: Vec<Digest>,
    /// Sections, of this version and of later ones.
    #[serde(flatten)]
    sections: Map<String, Value>,
}

#[derive(Deserialize)]
struct Cache {
    manifest: Digest,
}

impl Image {
    /// Parses and checks an image manifest.
    ///
    /// # Errors
    /// [`FormatError`] with the JSON path, or the line, of the first thing wrong.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        at_most("a ProcessFork image, in bytes", bytes.len() as u64, MAX_BYTES)?;
        let json = |e: serde_json::Error| FormatError::Json { document: DOCUMENT, path: "$".into(), reason: clip(&e.to_string()) };
        let wire: Wire = serde_json::from_slice(bytes).map_err(json)?;
        if wire.schema_version != 1 {
            return Err(field("$.schema_version", "1", &wire.schema_version.to_string()));
        }
        if wire.media_type != MEDIA_TYPE {
            return Err(field("$.media_type", MEDIA_TYPE, &wire.media_type));
        }
        for text in [&wire.agent.kind, &wire.agent.version, &wire.agent.fingerprint, &wire.created_at] {
            at_most("a text in a ProcessFork image, in bytes", text.len() as u64, MAX_TEXT as u64)?;
        }
        let mut parents = wire.parents;
        let mut seen = HashSet::new();
        parents.retain(|parent| seen.insert(*parent));
        if parents.len() > 2 {
            return Err(field("$.parents", "at most 2 parents", &parents.len().to_string()));
        }
        for digest in parents.iter().chain([&wire.cache.manifest]) {
            sha256("$", digest)?;
        }
        let digest = Digest::sha256(bytes);
        Ok(Self {
            digest,
            agent: wire.agent,
            created: wire.created_at,
            parents,
            cache: wire.cache.manifest,
            layers: layers(&wire.sections)?,
        })
    }
}

/// Finds the digests in all sections. Unknown sections are searched in the same way, so their
/// layers are imported too.
fn layers(sections: &Map<String, Value>) -> Result<Vec<Layer>, FormatError> {
    let mut layers = Vec::new();
    let mut taken = HashSet::from([OWN_NAME.to_owned()]);
    for (section, value) in sections {
        for (key, value) in value.as_object().into_iter().flatten() {
            let Some(text) = value.as_str().filter(|text| text.starts_with("sha256:")) else { continue };
            let path = format!("$.{}.{}", clip(section), clip(key));
            let digest: Digest = text.parse().map_err(|_| field(&path, "a digest", text))?;
            at_most("layers in a ProcessFork image", layers.len() as u64 + 1, MAX_LAYERS as u64)?;
            let wanted = format!("{}.{}", plain(section), plain(key));
            let name = std::iter::once(wanted.clone()).chain((2..).map(|n| format!("{wanted}.{n}"))).find(|name| !taken.contains(name));
            let Some(name) = name else { continue };
            taken.insert(name.clone());
            layers.push(Layer { name, digest });
        }
    }
    layers.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(layers)
}

fn sha256(path: &str, digest: &Digest) -> Result<(), FormatError> {
    if digest.algorithm() == Algorithm::Sha256 { Ok(()) } else { Err(field(path, "sha256 digests", &digest.to_string())) }
}

/// The characters of a name that are valid in a file name.
fn plain(name: &str) -> String {
    let text: String = name.chars().take(64).map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
    if text.is_empty() { "_".into() } else { text }
}

fn at_most(what: &'static str, found: u64, limit: u64) -> Result<(), FormatError> {
    if found > limit { Err(FormatError::TooLarge { what, found, limit }) } else { Ok(()) }
}

fn field(path: &str, expected: &str, found: &str) -> FormatError {
    FormatError::Field { document: DOCUMENT, path: path.into(), expected: expected.into(), found: clip(found) }
}

fn clip(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests;
