//! Snapshot directories on disk.

use crate::snapshot::Shape;
use pfr_schema::flat::{FlatManifest, Page};
use pfr_schema::geometry::Geometry;
use pfr_schema::{Digest, Limits};
use std::path::{Path, PathBuf};

/// The path of a blob in a directory.
#[must_use]
pub fn blob_path(root: &Path, digest: &Digest) -> PathBuf {
    let hex = digest.hex();
    root.join("blobs").join(digest.algorithm().name()).join(&hex[..2]).join(hex)
}

/// Writes a blob.
pub fn put_blob(root: &Path, bytes: &[u8]) -> Digest {
    let digest = Digest::sha256(bytes);
    let path = blob_path(root, &digest);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
    digest
}

/// Writes K and V of pages of this geometry, and a page manifest of this name.
pub fn write_pages(root: &Path, name: &str, geometry: Geometry, pages: &[[Vec<u8>; 2]]) {
    let pages = pages.iter().zip(0..).map(|([k, v], ix)| Page { ix, k: put_blob(root, k), v: put_blob(root, v) }).collect();
    let flat = FlatManifest::new(geometry, pages, vec![], &Limits::default()).unwrap();
    std::fs::write(root.join(name), flat.to_bytes()).unwrap();
}

/// Writes pages with these numbers, and a page manifest of this name.
pub fn write(root: &Path, name: &str, shape: Shape, numbers: &[u64]) {
    for number in numbers.iter().flat_map(|n| [2 * n, 2 * n + 1]) {
        put_blob(root, &shape.page(number));
    }
    std::fs::write(root.join(name), shape.flat(numbers).to_bytes()).unwrap();
}
