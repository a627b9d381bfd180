//! Snapshot directories and stored snapshots.

use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Digest, Limits};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// 2 layers × 4 tokens × 2 heads × 4 elements of bf16: 128 bytes a page.
pub const SMALL: Geometry = Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };
/// 2 layers × 16 tokens × 4 heads × 64 elements of bf16: 16 KiB a page.
pub const LARGE: Geometry = Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 4, head_dim: 64, dtype: Dtype::Bf16 };

/// One page's bytes, different for each number and not compressible.
pub fn page(number: u64, bytes: u64) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = vec![0; bytes as usize];
    for word in page.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
    page
}

/// Where a blob lies in a directory.
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

/// A flat manifest whose page `i` has K bytes `page(2n)` and V bytes `page(2n+1)` for n = `numbers[i]`.
pub fn flat(geometry: Geometry, numbers: &[u64]) -> FlatManifest {
    let bytes = geometry.page_bytes(&Limits::default()).unwrap();
    let digest = |n: u64| Digest::sha256(&page(n, bytes));
    let pages = numbers.iter().enumerate().map(|(ix, n)| Page { ix: ix as u32, k: digest(2 * n), v: digest(2 * n + 1) }).collect();
    let sequence = Sequence { id: "seq".into(), page_ixs: (0..numbers.len() as u32).collect(), fill_in_last_page: 1 };
    FlatManifest::new(geometry, pages, vec![sequence], &Limits::default()).unwrap()
}

/// Writes pages and a page manifest.
pub fn write(root: &Path, name: &str, geometry: Geometry, numbers: &[u64]) {
    let manifest = flat(geometry, numbers);
    for n in numbers {
        for half in [2 * n, 2 * n + 1] {
            put_blob(root, &page(half, manifest.page_bytes()));
        }
    }
    std::fs::write(root.join(name), manifest.to_bytes()).unwrap();
}

/// A directory with a page manifest and its blobs.
pub fn directory(geometry: Geometry, numbers: &[u64]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "page_manifest.json", geometry, numbers);
    dir
}

/// A checkpoint of two tensors, its payloads in `blobs/`.
pub fn write_checkpoint(root: &Path) {
    let tensors: Vec<String> = [100_u64, 5000]
        .iter()
        .map(|len| {
            let hash = put_blob(root, &page(7_000_000 + len, *len));
            let shape = format!(r#""shape":[{len}],"logical_dtype":"u8","storage_dtype":"u8","layout":{{"tag":"x"}}"#);
            format!(r#"{{"name":"t{len}","kind":"rng",{shape},"payload_hash":"{hash}","payload_bytes":{len},"value_hash":"pfv1:{hash}"}}"#)
        })
        .collect();
    let prefix = Digest::sha256(b"prefix");
    let key = format!(r#"{{"scheme":"pf-prefix-v1","prefix":"{prefix}","tokens":64,"alignment":64,"salt":"","adapter":null}}"#);
    // Not our own spelling: documents are kept byte for byte.
    let text = format!("{{ \"abi\":\"pf.checkpoint.v1\",\"key\":{key},\n\"tensors\":[{}]}}\n", tensors.join(","));
    std::fs::write(root.join("checkpoint.json"), text).unwrap();
}

/// A directory with everything that may be in one.
pub fn everything() -> TempDir {
    let dir = directory(SMALL, &(0..200).collect::<Vec<_>>());
    let root = dir.path();
    write_checkpoint(root);
    std::fs::write(root.join("config.json"), r#"{"agent":"a-1", "parents":[],"boundary":64}"#).unwrap();
    std::fs::write(root.join("tokens.bin"), page(99, 800)).unwrap();
    std::fs::create_dir(root.join("attachments")).unwrap();
    std::fs::write(root.join("attachments/notes.txt"), "notes").unwrap();
    std::fs::write(root.join("attachments/alike.txt"), "notes").unwrap();
    std::fs::write(root.join("attachments/empty"), "").unwrap();
    // An attachment may happen to be a page.
    std::fs::write(root.join("attachments/page"), page(4, 128)).unwrap();
    std::fs::write(root.join("attachments/large"), page(5, 9 << 20)).unwrap();
    dir
}
