#![no_main]
//! Shards that parse are read back from their own bytes; their units are counted once, and a share
//! finds all of its units in itself.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::shards::{Shards, union};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(shards) = Shards::parse(bytes, &limits) else { return };
    assert_eq!(Shards::parse(&shards.to_bytes(), &limits).expect("bytes of ours parse"), shards);
    for group in &shards.groups {
        let layers = group.components.iter().flatten().map(|part| &part.share);
        for share in layers.chain(group.states.values().map(|state| &state.share)) {
            assert_eq!(union([share]), share.units());
            let pieces = share.pieces(&[share]).expect("a share has its own units");
            assert!(pieces.iter().all(|piece| piece.from == piece.to));
            assert_eq!(pieces.iter().map(|piece| piece.count).sum::<u64>(), share.units());
        }
    }
});
