//! State files of llama.cpp.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::llama::{Bytes, Head, parse};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let _ = parse(&mut Head(bytes), &limits);
    let Ok(state) = parse(&mut Bytes(bytes), &limits) else { return };
    if state.sections.is_empty() {
        return;
    }
    // Rows and head cover the file, and the head alone says where all of it lies.
    let head: Vec<u8> = state.gaps().flat_map(|gap| &bytes[gap.start as usize..gap.end as usize]).copied().collect();
    let rows: u64 = state.sections.iter().flat_map(|section| &section.blocks).map(|block| block.bytes).sum();
    assert_eq!(head.len() as u64 + rows, bytes.len() as u64);
    if let Ok(again) = parse(&mut Head(&head), &limits) {
        assert_eq!(again, state);
    }
});
