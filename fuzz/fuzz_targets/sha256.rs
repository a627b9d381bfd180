#![no_main]
//! SHA-256 side by side: of any messages, with every kernel of this machine, in one go and in
//! pieces, the same digests as of each message alone.

use libfuzzer_sys::fuzz_target;
use pfr_kernels::sha256::{BLOCK, Hasher, Kernel, of_each};
use pfr_schema::Digest;

fuzz_target!(|input: &[u8]| {
    let [count, cut, bytes @ ..] = input else { return };
    let count = 1 + usize::from(*count) % 40;
    // Neighbours overlap, so that short inputs are long messages, too.
    let shift = bytes.len() / (4 * count);
    let len = bytes.len() - shift * (count - 1);
    let messages: Vec<&[u8]> = (0..count).map(|message| &bytes[message * shift..][..len]).collect();
    let alone: Vec<[u8; 32]> = messages.iter().map(|message| *Digest::sha256(message).as_bytes().first_chunk().unwrap()).collect();
    assert_eq!(of_each(&messages), alone);
    let middle = (usize::from(*cut) * BLOCK).min(len / BLOCK * BLOCK);
    for kernel in Kernel::available() {
        let mut hasher = Hasher::with_kernel(*kernel, count);
        hasher.update(&messages.iter().map(|message| &message[..middle]).collect::<Vec<_>>());
        let found = hasher.finish(&messages.iter().map(|message| &message[middle..]).collect::<Vec<_>>());
        assert_eq!(found, alone, "{}", kernel.name());
    }
});
