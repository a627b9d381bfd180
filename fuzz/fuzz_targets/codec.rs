#![no_main]
//! A payload decodes the same in pieces in every codec and with every kernel, never to more than
//! was promised, and what we encode decodes. Every kernel encodes to the same bytes. Decoding some
//! bytes at a time gives the same, and never much more than was asked for. Every setting of a
//! writer gives a payload that decodes.
//!
//! The first byte says how long the pieces are, the next four the promised length.

use libfuzzer_sys::fuzz_target;
use pfr_schema::checkpoint::Dtype;
use pfr_schema::codec::{BlobEncoder, Codec, Codecs, Compression, Decoder, Kernel, TensorEncoder, decode, encode_document};

fn in_pieces(codec: Codec, stored: &[u8], raw_len: u64, kernel: Kernel, piece: usize) -> Option<Vec<u8>> {
    let mut decoder = Decoder::with_kernel(codec, raw_len, kernel).expect("a decoder");
    let mut out = vec![];
    for piece in stored.chunks(piece) {
        let result = decoder.update(piece, &mut |bytes| out.extend_from_slice(bytes));
        assert!(out.len() as u64 <= raw_len, "more came out than was promised");
        result.ok()?;
    }
    decoder.finish().ok()?;
    Some(out)
}

fn some_at_a_time(codec: Codec, stored: &[u8], raw_len: u64, most: usize) -> Option<Vec<u8>> {
    let mut decoder = Decoder::new(codec, raw_len).expect("a decoder");
    let (mut out, mut rest) = (vec![], stored);
    loop {
        let before = out.len();
        rest = &rest[decoder.update_some(rest, most, &mut out).ok()?..];
        let came = out.len() - before;
        assert!(codec == Codec::Zstd || came <= most + stored.len().max(64 << 10), "much more came out than was asked for");
        if came == 0 {
            break;
        }
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
        for kernel in Kernel::available() {
            let pieces = in_pieces(codec, stored, raw_len, kernel, usize::from(head[0]) + 1);
            assert_eq!(pieces, whole, "{} {}", codec.name(), kernel.name());
        }
        assert_eq!(some_at_a_time(codec, stored, raw_len, usize::from(head[0]) * 100 + 1), whole, "{}", codec.name());
        if let Ok(mut encoder) = TensorEncoder::with_kernel(codec, Kernel::PORTABLE) {
            let encoded = encoder.encode_anyway(stored);
            assert_eq!(decode(codec, encoded, stored.len() as u64).expect("what we encode decodes"), stored);
            for kernel in Kernel::available() {
                let mut other = TensorEncoder::with_kernel(codec, kernel).expect("an encoder");
                assert_eq!(other.encode_anyway(stored), encoded, "{} {}", codec.name(), kernel.name());
            }
        }
    }
    let names = Codecs::named(std::str::from_utf8(stored).unwrap_or_default().split(','));
    for compression in Compression::ALL {
        for codecs in [Codecs::ALL, Codecs::LEAST, names] {
            let mut encoder = BlobEncoder::new(compression, codecs);
            for elements in [None, Some(Dtype::Bf16), Some(Dtype::F16), Some(Dtype::Fp8E4m3)] {
                if let Some((codec, encoded)) = encoder.encode(stored, elements) {
                    assert!(codecs.contains(codec) && encoded.len() < stored.len());
                    assert_eq!(decode(codec, &encoded, stored.len() as u64).expect("what we encode decodes"), stored);
                }
            }
        }
    }
    let (codec, encoded) = encode_document(stored);
    assert_eq!(decode(codec, &encoded, stored.len() as u64).expect("what we encode decodes"), stored);
});
