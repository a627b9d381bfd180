#![no_main]
//! A checkpoint that parses is read back from its own bytes.

use libfuzzer_sys::fuzz_target;
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::{Container, Limits};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(checkpoint) = Checkpoint::parse(bytes, &limits) else { return };
    assert_eq!(Checkpoint::parse(&checkpoint.to_bytes(), &limits).expect("bytes of ours parse"), checkpoint);
    let tensors = checkpoint.tensors.len();
    assert_eq!(Container::Checkpoint(checkpoint).children().len(), tensors);
});
