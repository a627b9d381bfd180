//! Converts an image into a snapshot.
//!
//! | there | here |
//! |---|---|
//! | the cache layer | the page tree of group `main` |
//! | the agent, the time | the configuration |
//! | parents | parents, by the digests that they have here |
//! | every other layer | an attachment, `section.field` |
//! | files of the world layer | attachments, `world.fs.<hex>` |
//! | the manifest itself | the attachment `image.json` |

use super::cache::Cache;
use super::image::{Image, OWN_NAME};
use super::library::{Library, Place};
use pfr_client::Directory;
use pfr_client::directory::blobs::{self, Described};
use pfr_client::directory::{Opaque, layout};
use pfr_client::{Error, Result};
use pfr_schema::snapshot::{SnapshotConfig, is_time};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, Kind, Limits};
use serde::Deserialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;

const CACHE: &str = "cache.manifest";
const FILES: &str = "world.fs";
/// The kind of a list of files in a world layer.
const FILES_KIND: &str = "fs.tree.v1";

/// A list of files: only the fields that name blobs.
#[derive(Deserialize)]
struct Files {
    kind: String,
    entries: Vec<File>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    blob: Option<Digest>,
}

/// The lengths of blobs that images share, so that weights are read only once.
pub(super) type Sizes = HashMap<Digest, u64>;

/// A snapshot, and remarks about it.
#[derive(Debug)]
pub(super) struct Converted {
    pub directory: Directory,
    pub attachments: u64,
    pub notes: Vec<String>,
}

/// Reads everything of an image but its pages, of which it only checks that they are there. Blocks.
pub(super) fn convert(
    library: &Library,
    place: &Place,
    image: &Image,
    parents: Vec<Digest>,
    sizes: &mut Sizes,
    limits: &Limits,
) -> Result<Converted> {
    let own = library.path_of(place);
    let mut blobs = Blobs { library, sizes, limits, own: own.clone() };
    let mut notes = Vec::new();
    let bytes = library.bytes(place)?.filter(|bytes| Digest::sha256(bytes) == image.digest);
    let bytes = bytes.ok_or_else(|| Error::Changed { path: own, reason: "it is another image now".into() })?;
    let manifest = Document::new(Kind::Blob, bytes);
    let mut attachments = vec![Opaque { name: OWN_NAME.into(), digest: manifest.digest, size: manifest.bytes.len() as u64 }];

    let path = library.blob_path(&image.cache);
    let cache = blobs.read("$.cache.manifest", &image.cache)?;
    let pages = match Cache::parse(&cache, limits).map_err(Error::document(&path))? {
        Cache::Pages { manifest, verbatim: true } => Some((manifest, path)),
        Cache::Pages { manifest, verbatim: false } => {
            attachments.push(blobs.attachment(CACHE.into(), "$.cache.manifest", &image.cache)?);
            Some((manifest, path))
        }
        Cache::Empty => {
            notes.push("its cache layer is empty: no pages".into());
            attachments.push(blobs.attachment(CACHE.into(), "$.cache.manifest", &image.cache)?);
            None
        }
    };
    let mut files = BTreeSet::new();
    for layer in &image.layers {
        attachments.push(blobs.attachment(layer.name.clone(), &format!("$.{}", layer.name), &layer.digest)?);
        if layer.name == FILES {
            files = blobs.files(&layer.digest)?;
        }
    }
    if (attachments.len() + files.len()) as u64 >= limits.layers {
        notes.push(format!("the contents of its {} files stay in ProcessFork's store: more than a snapshot can list", files.len()));
    } else {
        for file in &files {
            attachments.push(blobs.attachment(format!("{FILES}.{}", file.hex()), "$.world.fs", file)?);
        }
    }
    let count = attachments.len() as u64;
    let described = Described { config: config(image, parents), pages, attachments, inline: vec![manifest] };
    let directory = Directory::described(library.blobs()?, limits, described)?;
    Ok(Converted { directory, attachments: count, notes })
}

fn config(image: &Image, parents: Vec<Digest>) -> SnapshotConfig {
    let from = json!({ "image": image.digest, "agent_version": image.agent.version, "agent_fingerprint": image.agent.fingerprint });
    SnapshotConfig {
        agent: Some(image.agent.kind.clone()),
        // Kept as it is in `image.json`, whatever it is.
        created: Some(image.created.clone()).filter(|created| is_time(created)),
        deployment: BTreeMap::from([("processfork".to_owned(), from)]),
        parents,
        ..SnapshotConfig::default()
    }
}

struct Blobs<'a> {
    library: &'a Library,
    sizes: &'a mut Sizes,
    limits: &'a Limits,
    own: PathBuf,
}

impl Blobs<'_> {
    fn read(&self, at: &str, digest: &Digest) -> Result<Vec<u8>> {
        let found = blobs::read(self.library.root(), digest, self.limits.document_bytes)?;
        found.ok_or_else(|| self.missing(at, digest))
    }

    fn attachment(&mut self, name: String, at: &str, digest: &Digest) -> Result<Opaque> {
        let size = match self.sizes.get(digest) {
            Some(size) => *size,
            None => {
                let size = blobs::measure(self.library.root(), digest, self.limits.blob_bytes)?;
                size.ok_or_else(|| self.missing(at, digest))?
            }
        };
        self.sizes.insert(*digest, size);
        Ok(Opaque { name, digest: *digest, size })
    }

    /// Contents of the files that a world layer lists; `None` if the format is unknown.
    fn files(&self, digest: &Digest) -> Result<BTreeSet<Digest>> {
        if self.sizes.get(digest).is_some_and(|size| *size > self.limits.document_bytes) {
            return Ok(BTreeSet::new());
        }
        let bytes = self.read("$.world.fs", digest)?;
        let files = serde_json::from_slice::<Files>(&bytes).ok().filter(|files| files.kind == FILES_KIND);
        Ok(files.into_iter().flat_map(|files| files.entries).filter_map(|file| file.blob).collect())
    }

    fn missing(&self, at: &str, digest: &Digest) -> Error {
        let path = self.library.root().path().join(layout::blob(digest));
        Error::MissingBlob { document: self.own.clone(), at: at.to_owned(), digest: *digest, path }
    }
}
