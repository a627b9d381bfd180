#![no_main]
//! A tree that parses is read back from its own bytes; one that was not checked does no harm.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::tree::PageTree;

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    // As a client reads an API response.
    if let Ok(tree) = serde_json::from_slice::<PageTree>(bytes) {
        let _ = (tree.tokens(), tree.pages(), tree.to_flat(&[], &limits));
    }
    let Ok(tree) = PageTree::parse(bytes, &limits) else { return };
    let again = PageTree::parse(&tree.to_bytes(), &limits).expect("bytes of ours parse");
    assert_eq!(again, tree);
    assert_eq!(again.to_bytes(), tree.to_bytes());
    assert_eq!(tree.run_shapes().map(|(_, shape)| u64::from(shape.pages)).sum::<u64>(), tree.pages());
    // The check works on ranges; here is what it means, index by index.
    if tree.pages() < 100_000 && tree.sequences.iter().map(|s| s.ix.len()).sum::<u64>() < 100_000 {
        let known: Vec<u32> = tree.ix.iter().collect();
        assert!(known.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(tree.sequences.iter().flat_map(|s| s.ix.iter()).all(|ix| known.binary_search(&ix).is_ok()));
    }
});
