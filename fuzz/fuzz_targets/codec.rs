#![no_main]
//! A payload decodes the same in pieces in every codec, never to more than was promised, and what
//! we encode decodes.
//!
//! The first byte says how long the pieces are, the next four the promised length.

use libfuzzer_sys::fuzz_target;
use pfr_schema::codec::{Codec, Decoder, decode, encode_document};

fn in_pieces(codec: Codec, stored: &[u8], raw_len: u64, piece: usize) -> Option<Vec<u8>> {
    let mut decoder = Decoder::new(codec, raw_len).expect("a decoder");
    let mut out = vec![];
    for piece in stored.chunks(piece) {
        let result = decoder.update(piece, &mut |bytes| out.extend_from_slice(bytes));
        assert!(out.len() as u64 <= raw_len, "more came out than was promised");
        result.ok()?;
    }
    decoder.finish().ok()?;
    Some(out)
}

fuzz_target!(|input: &[u8]| {
    let Some((head, stored)) = input.split_first_chunk::<5>() else { return };
    let raw_len = u64::from(u32::from_le_bytes([head[1], head[2], head[3], 0]));
    for codec in Codec::ALL.iter().copied() {
        let whole = decode(codec, stored, raw_len).ok();
        assert!(whole.as_ref().is_none_or(|raw| raw.len() as u64 == raw_len));
        assert_eq!(in_pieces(codec, stored, raw_len, usize::from(head[0]) + 1), whole, "{}", codec.name());
    }
    let (codec, encoded) = encode_document(stored);
    assert_eq!(decode(codec, &encoded, stored.len() as u64).expect("what we encode decodes"), stored);
});
