//! Snapshot directories on disk.

use crate::snapshot::Shape;
use pfr_schema::Digest;
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

/// Writes pages with these numbers, and a page manifest of this name.
pub fn write(root: &Path, name: &str, shape: Shape, numbers: &[u64]) {
    for number in numbers.iter().flat_map(|n| [2 * n, 2 * n + 1]) {
        put_blob(root, &shape.page(number));
    }
    std::fs::write(root.join(name), shape.flat(numbers).to_bytes()).unwrap();
}
