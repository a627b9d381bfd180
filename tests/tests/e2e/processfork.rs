//! Interchange with the real ProcessFork crates: what they wrote is pushed, pulled, and is theirs again.

use pf_cache::{CacheMeta, CachePager as _, Dtype, SyntheticCachePager, capture_cache, restore_cache};
use pf_core::cas::{BlobStore as _, FsBlobStore};
use pf_core::digest::Digest256;
use pfr_tests::{Pf, Registry, files};

const META: CacheMeta = CacheMeta { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };

#[test]
fn a_snapshot_captured_by_processfork_comes_back_byte_for_byte_and_restores_there() {
    let registry = Registry::start();
    let host = Pf::new(&registry.url());
    let mut pager = SyntheticCachePager::new(META);
    pager.populate_synthetic(24, 42).unwrap();
    let source = host.path("processfork");
    let blobs = FsBlobStore::open(&source).unwrap();
    let digest = capture_cache(&mut pager, &blobs).unwrap();
    let manifest = blobs.get(&digest).unwrap();
    std::fs::write(source.join("page_manifest.json"), &manifest).unwrap();

    host.run(&["push", source.to_str().unwrap(), "team/agent:captured"]).ok();
    let other = Pf::new(&registry.url());
    let out = other.path("out");
    other.run(&["pull", "team/agent:captured", out.to_str().unwrap()]).ok();
    assert_eq!(std::fs::read(out.join("page_manifest.json")).unwrap(), manifest);
    for (path, bytes) in files(&out.join("blobs/sha256")) {
        let name = Digest256::parse(&format!("sha256:{}", path.file_name().unwrap().to_str().unwrap())).unwrap();
        assert_eq!(blobs.get(&name).unwrap(), bytes, "{name}");
    }
    // Through a local store, too: pull, push from the store elsewhere, same digest.
    other.run(&["pull", "team/agent:captured"]).ok();
    let again = other.json(&["push", "team/agent:captured", "team/copy:x"]);
    assert_eq!(host.tags("team/agent")["captured"], again["digest"]);

    // ProcessFork restores what was pulled: its store keeps zstd files, so the blobs are put into one.
    let theirs = FsBlobStore::open(other.path("theirs")).unwrap();
    for (_, bytes) in files(&out.join("blobs")) {
        theirs.put(&bytes).unwrap();
    }
    assert_eq!(theirs.put(&manifest).unwrap(), digest);
    let mut restored = SyntheticCachePager::new(META);
    restore_cache(&mut restored, &theirs, &digest).unwrap();
    let mut pages: Vec<_> = restored.occupied_pages().into_iter().map(|ix| restored.read_page(ix).unwrap()).map(|p| (p.k, p.v)).collect();
    let mut expected: Vec<_> = pager.occupied_pages().into_iter().map(|ix| pager.read_page(ix).unwrap()).map(|p| (p.k, p.v)).collect();
    pages.sort();
    expected.sort();
    assert_eq!(pages, expected);
}
