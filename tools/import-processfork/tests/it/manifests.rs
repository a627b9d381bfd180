//! Interchange with the crates of ProcessFork itself: their writer, our reader, and back.

use pf_cache::{CacheMeta, CachePager as _, Dtype, LogicalSeq, PageManifest, SyntheticCachePager, capture_cache, restore_cache};
use pf_core::cas::{BlobStore as _, FsBlobStore};
use pf_core::digest::Digest256;
use pfr_schema::codec::{Codec, decode};
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::run::Run;
use pfr_schema::tree::{Group, PageTree};
use pfr_schema::{Digest, Limits, geometry};
use proptest::prelude::*;

// Captures here have few pages, because ProcessFork's store syncs every blob to disk. Longer lists
// of pages are compared without a store, in `both_writers_write_the_same_bytes`.
fn meta(dtype: Dtype) -> CacheMeta {
    CacheMeta { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 8, dtype }
}

/// Checks everything that must hold of a manifest that ProcessFork wrote, and returns it as we read
/// it.
fn check(store: &FsBlobStore, digest: &Digest256) -> FlatManifest {
    let limits = Limits::default();
    let theirs = store.get(digest).unwrap();
    let flat = FlatManifest::parse(&theirs, &limits).unwrap();
    assert_eq!(flat.to_bytes(), theirs);
    assert_eq!(Digest::sha256(&flat.to_bytes()).to_string(), digest.as_str());

    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let tree = PageTree::parse(&tree.to_bytes(), &limits).unwrap();
    let runs: Vec<_> = runs.iter().map(|r| Run::parse(&r.bytes, &limits).unwrap()).collect();
    assert_eq!(tree.to_flat(&runs, &limits).unwrap().to_bytes(), theirs);
    assert_eq!(tree.flat_digest.unwrap().to_string(), digest.as_str());

    let read: PageManifest = serde_json::from_slice(&flat.to_bytes()).unwrap();
    let meta = read.meta;
    assert_eq!(meta.page_bytes() as u64, flat.page_bytes());
    assert_eq!(serde_json::to_vec(&read).unwrap(), theirs);
    for (ours, their_page) in flat.pages().iter().zip(&read.pages) {
        assert_eq!((ours.ix, ours.k.to_string(), ours.v.to_string()), (their_page.ix, their_page.k.to_string(), their_page.v.to_string()));
    }
    assert_eq!(flat.pages().len(), read.pages.len());
    flat
}

/// Checks that our decoder reads the file of a blob as ProcessFork's store wrote it.
fn check_blob(store: &FsBlobStore, digest: &Digest, length: u64) {
    let hex = digest.hex();
    let file = store.root().join("blobs/sha256").join(&hex[..2]).join(format!("{hex}.zst"));
    let raw = decode(Codec::Zstd, &std::fs::read(file).unwrap(), length).unwrap();
    assert_eq!(Digest::sha256(&raw), *digest);
}

#[test]
fn captures_of_every_dtype_are_read_and_given_back_byte_for_byte() {
    for (dtype, ours) in [
        (Dtype::Bf16, geometry::Dtype::Bf16),
        (Dtype::F16, geometry::Dtype::F16),
        (Dtype::F32, geometry::Dtype::F32),
        (Dtype::Fp8E4m3, geometry::Dtype::Fp8E4m3),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let store = FsBlobStore::open(folder.path()).unwrap();
        let mut pager = SyntheticCachePager::new(meta(dtype));
        pager.populate_synthetic(3, 42).unwrap();
        let flat = check(&store, &capture_cache(&mut pager, &store).unwrap());
        assert_eq!(flat.geometry().dtype, ours);
        assert_eq!(flat.pages().len(), 3);
        assert_eq!(flat.sequences()[0].tokens(4), 2 * 4 + 2);
        for page in flat.pages() {
            check_blob(&store, &page.k, flat.page_bytes());
            check_blob(&store, &page.v, flat.page_bytes());
        }
    }
}

#[test]
fn an_empty_pager_is_a_valid_capture() {
    let folder = tempfile::tempdir().unwrap();
    let store = FsBlobStore::open(folder.path()).unwrap();
    let mut pager = SyntheticCachePager::new(meta(Dtype::Bf16));
    assert_eq!(check(&store, &capture_cache(&mut pager, &store).unwrap()).pages().len(), 0);
}

#[test]
fn forks_share_the_pages_that_they_did_not_write() {
    let folder = tempfile::tempdir().unwrap();
    let store = FsBlobStore::open(folder.path()).unwrap();
    let mut pager = SyntheticCachePager::new(meta(Dtype::F16));
    pager.populate_synthetic(5, 1).unwrap();
    let base_name = capture_cache(&mut pager, &store).unwrap();
    let base = check(&store, &base_name);
    for fork in 0..3_u8 {
        let mut pager = SyntheticCachePager::new(meta(Dtype::F16));
        restore_cache(&mut pager, &store, &base_name).unwrap();
        // The fork changes its last page and adds a page with a distant number. It also gets a
        // second sequence on the shared prefix.
        let mut page = pager.read_page(4).unwrap();
        page.v[0] ^= fork + 1;
        pager.write_page(4, &page).unwrap();
        page.k[1] ^= fork + 1;
        pager.write_page(5000 + u32::from(fork), &page).unwrap();
        let mut sequences = pager.logical_seqs();
        let mut page_ixs: Vec<u32> = (0..4).rev().collect();
        page_ixs.push(5000 + u32::from(fork));
        sequences.insert(0, LogicalSeq { id: format!("second \"request\" {fork} 🦀\u{1}"), page_ixs, fill_in_last_page: 3 });
        pager.install_logical_seqs(&sequences).unwrap();
        let flat = check(&store, &capture_cache(&mut pager, &store).unwrap());
        assert_eq!(flat.pages()[..4], base.pages()[..4]);
        assert_eq!(flat.pages()[4].k, base.pages()[4].k);
        assert_ne!(flat.pages()[4].v, base.pages()[4].v);
        assert_eq!(flat.sequences().len(), 2);
    }
}

proptest! {
    // Nothing is written next to the sources: a failure prints its smallest input.
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// The two writers agree on every id of a sequence, also one that must be escaped, and on every
    /// order of pages and sequences.
    #[test]
    fn both_writers_write_the_same_bytes(
        ids in prop::collection::btree_set(any::<String>(), 0..5),
        ixs in prop::collection::hash_set(any::<u32>(), 1..20),
        fill in 0_u32..4,
    ) {
        let ixs: Vec<u32> = ixs.into_iter().collect();
        let mut theirs = PageManifest::new(meta(Dtype::Fp8E4m3));
        let (mut pages, mut sequences) = (vec![], vec![]);
        for ix in &ixs {
            let (k, v) = (ix.to_le_bytes(), ix.to_be_bytes());
            theirs.pages.push(pf_cache::Page { ix: *ix, k: Digest256::of(&k), v: Digest256::of(&v) });
            pages.push(Page { ix: *ix, k: Digest::sha256(&k), v: Digest::sha256(&v) });
        }
        for id in ids.iter().rev() {
            theirs.logical_seqs.push(LogicalSeq { id: id.clone(), page_ixs: ixs.clone(), fill_in_last_page: fill });
            sequences.push(Sequence { id: id.clone(), page_ixs: ixs.clone(), fill_in_last_page: fill });
        }
        theirs.canonicalize();
        let shape = geometry::Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 8, dtype: geometry::Dtype::Fp8E4m3 };
        let ours = FlatManifest::new(shape, pages, sequences, &Limits::default()).unwrap();
        prop_assert_eq!(ours.to_bytes(), serde_json::to_vec(&theirs).unwrap());
        prop_assert_eq!(serde_json::from_slice::<PageManifest>(&ours.to_bytes()).unwrap(), theirs);
    }
}
