#![no_main]
//! A checkpoint that parses is read back from its own bytes; checking payloads against it ends in a
//! proof or a refusal.

use libfuzzer_sys::fuzz_target;
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::{Container, Limits};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(checkpoint) = Checkpoint::parse(bytes, &limits) else { return };
    assert_eq!(Checkpoint::parse(&checkpoint.to_bytes(), &limits).expect("bytes of ours parse"), checkpoint);
    for tensor in &checkpoint.tensors {
        let elements = tensor.shape.iter().fold(1_u64, |product, dimension| product.saturating_mul(*dimension));
        if tensor.payload_bytes < 1 << 16 && elements < 1 << 16 {
            let _ = tensor.check_value(&vec![0; tensor.payload_bytes as usize]);
        }
        tensor.value_hasher().expect("what parses holds together");
    }
    let tensors = checkpoint.tensors.len();
    assert_eq!(Container::Checkpoint(checkpoint).children().len(), tensors);
});
