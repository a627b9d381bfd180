//! Snapshot directories, and the same as frames for raw requests.

use pfr_schema::Digest;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{self, Header};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Kind, flat::FlatManifest, flat::Page, flat::Sequence};
use rand::{Rng as _, SeedableRng as _};
use std::path::{Path, PathBuf};

/// Geometries to test with.
#[derive(Clone, Copy, Debug)]
pub struct Shape(pub Geometry);

impl Shape {
    /// 128 bytes a page.
    pub const TINY: Self = Self(Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 });
    /// 16 KiB a page.
    pub const SMALL: Self = Self(Geometry { page_size_tokens: 16, n_layers: 4, n_heads: 2, head_dim: 64, dtype: Dtype::Bf16 });
    /// 180,224 bytes a page: TinyLlama.
    pub const TINYLLAMA: Self = Self(Geometry { page_size_tokens: 16, n_layers: 22, n_heads: 4, head_dim: 64, dtype: Dtype::Bf16 });

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(self) -> usize {
        usize::try_from(self.0.page_bytes(&Default::default()).unwrap()).unwrap()
    }

    /// The bytes of page component `number`: incompressible, different for each number.
    #[must_use]
    pub fn page(self, number: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.page_bytes()];
        rand::rngs::StdRng::seed_from_u64(number).fill_bytes(&mut bytes);
        bytes
    }
}

/// A snapshot directory on disk.
#[derive(Clone, Debug)]
pub struct SnapshotDir {
    /// Where it is.
    pub path: PathBuf,
    shape: Shape,
}

impl SnapshotDir {
    /// Writes a directory whose page `i` has K number `2n` and V number `2n+1` for n = `numbers[i]`.
    #[must_use]
    pub fn write(path: &Path, shape: Shape, numbers: &[u64]) -> Self {
        let dir = Self { path: path.to_owned(), shape };
        let mut pages = Vec::new();
        for (ix, number) in numbers.iter().enumerate() {
            let [k, v] = [2 * number, 2 * number + 1].map(|n| dir.put(&shape.page(n)));
            pages.push(Page { ix: ix as u32, k, v });
        }
        let sequence = Sequence { id: "seq".into(), page_ixs: (0..numbers.len() as u32).collect(), fill_in_last_page: 1 };
        let manifest = FlatManifest::new(shape.0, pages, vec![sequence], &Default::default()).unwrap();
        std::fs::write(dir.manifest(), manifest.to_bytes()).unwrap();
        dir
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
        let digest = Digest::sha256(bytes);
        let path = self.blob(&digest);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
        digest
    }

    /// Where a blob lies.
    #[must_use]
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        let hex = digest.hex();
        self.path.join("blobs").join(digest.algorithm().name()).join(&hex[..2]).join(&hex)
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
        Self::frame(Kind::Blob, Digest::sha256(raw), raw)
    }

    /// A raw frame that claims anything.
    #[must_use]
    pub fn frame(kind: Kind, digest: Digest, raw: &[u8]) -> Vec<u8> {
        let len = raw.len() as u64;
        frame::encode(&Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len }, raw)
    }

    /// Frames and an end mark.
    #[must_use]
    pub fn stream(frames: &[Vec<u8>]) -> Vec<u8> {
        [frames.concat(), frame::end_mark(frames.len() as u64)].concat()
    }
}
