//! Snapshot directories and stored snapshots.

use pfr_schema::Digest;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::run::MIN_PAGES;
use pfr_testkit::directory::write_pages;
pub use pfr_testkit::directory::{blob_path, put_blob, write};
use pfr_testkit::snapshot::{Shape, bytes};
use std::path::Path;
use tempfile::TempDir;

/// 128 bytes a page.
pub const SMALL: Shape = Shape::TINY;
/// 2 layers × 16 tokens × 4 heads × 64 elements of bf16: 16 KiB a page.
pub const LARGE: Shape = Shape::of(Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 4, head_dim: 64, dtype: Dtype::Bf16 });

/// Bytes that differ from number to number and cannot be compressed.
pub fn page(number: u64, len: u64) -> Vec<u8> {
    bytes(number, len as usize)
}

/// A directory with a page manifest and its blobs.
pub fn directory(shape: Shape, numbers: &[u64]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "page_manifest.json", shape, numbers);
    dir
}

/// A directory of so many page chunks, each of the least pages, with few different pages.
pub fn chunks(count: u64) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    // A page chunk may end after such a page.
    let is_mark = |page: &Vec<u8>| Digest::sha256(page).as_bytes().last() == Some(&0);
    let mark = (0..).map(|number| SMALL.page(number)).find(is_mark).unwrap();
    let page = |at: u64| {
        let is_first = at.is_multiple_of(MIN_PAGES as u64);
        [mark.clone(), SMALL.page(if is_first { 1_000_000 + at } else { 2_000_000 })]
    };
    let pages: Vec<[Vec<u8>; 2]> = (0..count * MIN_PAGES as u64).map(page).collect();
    write_pages(dir.path(), "page_manifest.json", SMALL.geometry, &pages);
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
