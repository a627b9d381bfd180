//! A snapshot whose blobs are files, but whose configuration and lists come from the caller. An
//! import uses it to read the store of another program that has the same layout of blobs.

use super::build::{self, Opaque, Parts};
use super::files::{Root, STEP};
use super::{Directory, Look, layout, zstd_frame};
use crate::error::{Error, Result};
use pfr_schema::flat::FlatManifest;
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::tree::{Document, Group};
use pfr_schema::{Digest, ErrorCode, FormatError, Hasher, Kind, Limits};
use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::path::PathBuf;

/// A snapshot as the caller describes it. Its blobs are files in `blobs/`.
#[derive(Debug, Default)]
pub struct Described {
    /// The snapshot's configuration.
    pub config: SnapshotConfig,
    /// The page manifest, and the path that errors about its pages give as its origin.
    pub pages: Option<(FlatManifest, PathBuf)>,
    /// Attachments that are files in `blobs/`.
    pub attachments: Vec<Opaque>,
    /// Attachments that are in memory rather than in `blobs/`.
    pub inline: Vec<Document>,
}

impl Directory {
    /// The snapshot that `described` describes, with its blobs below `root`. It has the same digest
    /// as a snapshot directory with the same content.
    ///
    /// # Errors
    /// [`Error::Document`] for a configuration that does not parse, [`Error::MissingBlob`] and
    /// [`Error::WrongLength`] for pages.
    pub fn described(root: Root, limits: &Limits, mut described: Described) -> Result<Self> {
        let config = Document::new(Kind::Blob, described.config.to_bytes());
        SnapshotConfig::parse(&config.bytes, limits).map_err(Error::document(root.path()))?;
        let mut parts = Parts::default();
        let mut directory = Self {
            root,
            limits: limits.clone(),
            look: Look::All,
            manifest: config.clone(),
            documents: HashMap::new(),
            named: HashMap::new(),
        };
        if let Some((flat, from)) = &described.pages {
            directory.check_pages(from, flat, &mut HashSet::new())?;
            let (tree, runs) = build::tree(flat, (Group::default(), 0, 1)).map_err(Error::document(from))?;
            runs.into_iter().for_each(|run| directory.add(run));
            directory.add(tree.clone());
            parts.trees.push(tree);
        }
        described.attachments.sort_by(|a, b| a.name.cmp(&b.name));
        parts.attachments = described.attachments;
        described.inline.into_iter().for_each(|document| directory.add(document));
        directory.set_manifest(build::manifest(&config, &parts));
        directory.add(config);
        directory.manifest().map(|_| directory)
    }
}

/// Reads and verifies a blob of at most `limit` bytes; `None` if it is not there.
///
/// # Errors
/// [`Error::WrongBytes`] if the file does not decode or does not have this digest,
/// [`Error::Document`] if the blob is longer than `limit`, [`Error::Io`].
pub fn read(root: &Root, digest: &Digest, limit: u64) -> Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    let found = walk(root, digest, limit, &mut |piece| bytes.extend_from_slice(piece))?;
    Ok(found.map(|_| bytes))
}

/// Verifies a blob of at most `limit` bytes, and returns its length; `None` if it is not there.
///
/// # Errors
/// Those of [`read`].
pub fn measure(root: &Root, digest: &Digest, limit: u64) -> Result<Option<u64>> {
    walk(root, digest, limit, &mut |_| ())
}

/// Reads a blob piece by piece, verifies it, and returns its length; `None` if it is not there.
/// `take` gets the pieces before they are verified.
fn walk(root: &Root, digest: &Digest, limit: u64, take: &mut dyn FnMut(&[u8])) -> Result<Option<u64>> {
    let raw = layout::blob(digest);
    let encoded = layout::encoded(&raw);
    let (relative, is_encoded) = if root.exists(&raw)? {
        (raw, false)
    } else if root.exists(&encoded)? {
        (encoded, true)
    } else {
        return Ok(None);
    };
    let path = root.path().join(&relative);
    let (file, _) = root.file(&relative)?;
    let mut reader: Box<dyn Read> =
        if is_encoded { Box::new(zstd_frame::decoder(file).map_err(Error::io("decode", &path))?) } else { Box::new(file) };
    let (mut hasher, mut buffer, mut length) = (Hasher::new(digest.algorithm()), vec![0; STEP], 0_u64);
    loop {
        let read = match reader.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) if error.raw_os_error().is_some() => return Err(Error::io("read", &path)(error)),
            Err(error) => {
                let reason = format!("it does not decode: {error}");
                return Err(Error::WrongBytes { path, digest: *digest, code: ErrorCode::CorruptFrame, reason });
            }
        };
        length += read as u64;
        if length > limit {
            let source = FormatError::TooLarge { what: "a blob in bytes (or more)", found: length, limit };
            return Err(Error::Document { path, source });
        }
        hasher.update(&buffer[..read]);
        take(&buffer[..read]);
    }
    let found = hasher.finish();
    if found != *digest {
        let reason = format!("they hash to {found}");
        return Err(Error::WrongBytes { path, digest: *digest, code: ErrorCode::DigestMismatch, reason });
    }
    Ok(Some(length))
}
