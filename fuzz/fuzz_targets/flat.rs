#![no_main]
//! A flat manifest that parses is its own canonical bytes, and survives the tree.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::flat::FlatManifest;
use pfr_schema::run::Run;
use pfr_schema::tree::{Group, PageTree};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(flat) = FlatManifest::parse(bytes, &limits) else { return };
    assert_eq!(flat.to_bytes(), bytes);
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).expect("a valid manifest has a tree");
    let tree = PageTree::parse(&tree.to_bytes(), &limits).expect("a tree of ours parses");
    let runs: Vec<_> = runs.iter().map(|r| Run::parse(&r.bytes, &limits).expect("a run of ours parses")).collect();
    assert_eq!(tree.to_flat(&runs, &limits).expect("a tree of ours has a flat form").to_bytes(), bytes);
});
