//! Snapshot directories, and the same as frames for raw requests.

use pfr_schema::{Digest, Kind};
use pfr_testkit::directory::{self, blob_path, put_blob};
use pfr_testkit::frames;
pub use pfr_testkit::snapshot::Shape;
use std::path::{Path, PathBuf};

/// A snapshot directory on disk.
#[derive(Clone, Debug)]
pub struct SnapshotDir {
    /// Where it is.
    pub path: PathBuf,
    shape: Shape,
}

impl SnapshotDir {
    /// Writes a directory whose page `i` has K number `2n` and V number `2n+1` for n =
    /// `numbers[i]`.
    #[must_use]
    pub fn write(path: &Path, shape: Shape, numbers: &[u64]) -> Self {
        directory::write(path, "page_manifest.json", shape, numbers);
        Self { path: path.to_owned(), shape }
    }

    /// Path of the page manifest.
    #[must_use]
    pub fn manifest(&self) -> PathBuf {
        self.path.join("page_manifest.json")
    }

    /// Replaces text in the page manifest.
    pub fn edit(&self, from: &str, to: &str) {
        let text = std::fs::read_to_string(self.manifest()).unwrap();
        assert!(text.contains(from), "{from:?} is not in {text}");
        std::fs::write(self.manifest(), text.replacen(from, to, 1)).unwrap();
    }

    /// Stores a blob.
    pub fn put(&self, bytes: &[u8]) -> Digest {
        put_blob(&self.path, bytes)
    }

    /// The path of a blob.
    #[must_use]
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        blob_path(&self.path, digest)
    }

    /// The blob of page component `number`.
    #[must_use]
    pub fn page_file(&self, number: u64) -> PathBuf {
        self.blob(&Digest::sha256(&self.shape.page(number)))
    }

    /// As an argument.
    #[must_use]
    pub fn arg(&self) -> &str {
        self.path.to_str().unwrap()
    }
}

/// Frames by hand, for raw requests.
pub struct Wire;

impl Wire {
    /// A raw frame of a plain blob.
    #[must_use]
    pub fn blob(raw: &[u8]) -> Vec<u8> {
        frames::blob(raw).into()
    }

    /// A raw frame with any claims in its header.
    #[must_use]
    pub fn frame(kind: Kind, digest: Digest, raw: &[u8]) -> Vec<u8> {
        frames::claiming(kind, digest, raw).into()
    }

    /// Frames and an end mark.
    #[must_use]
    pub fn stream(frames: &[Vec<u8>]) -> Vec<u8> {
        frames::stream(frames)
    }
}
