//! Codecs 2 to 5. What holds of every codec is tested in `codec.rs`.

use crate::common::{Random, cases};
use pfr_schema::ErrorCode;
use pfr_schema::codec::{Codec, Decoder, Kernel, TensorEncoder, decode, encode_tensor};
use proptest::prelude::*;

pub const TENSOR: [Codec; 4] = [Codec::Bf16Bitmaps, Codec::Bf16Huffman, Codec::F16Huffman, Codec::Fp8Huffman];

/// About `bytes` of what pages have: numbers around zero, runs of zeros, any bits, infinities
/// and NaNs, in turns of random lengths.
pub fn page(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut raw = Vec::with_capacity(bytes + 8192);
    while raw.len() < bytes {
        let turn = 1 + random.below(4000);
        match random.below(8) {
            0 => raw.extend(random.bytes(turn)),
            1 | 2 => raw.resize(raw.len() + turn, 0),
            3 => raw.extend([0x7F80_u16, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8000, 0x0080].iter().flat_map(|w| w.to_le_bytes())),
            _ => raw.extend((0..turn).flat_map(|_| number(&mut random).to_le_bytes())),
        }
    }
    raw.truncate(bytes);
    raw
}

/// A `bf16` number: the sum of uniform ones is nearly normal.
fn number(random: &mut Random) -> u16 {
    let sum: f32 = (0..4).map(|_| random.below(1 << 16) as f32 / 65_536.0 - 0.5).sum();
    (sum.to_bits() >> 16) as u16
}

/// Numbers as in a page of `bf16`.
fn numbers(seed: u64, count: usize) -> Vec<u8> {
    let mut random = Random(seed);
    (0..count).flat_map(|_| number(&mut random).to_le_bytes()).collect()
}

fn encoded(codec: Codec, raw: &[u8]) -> Vec<u8> {
    TensorEncoder::new(codec).unwrap().encode_anyway(raw).to_vec()
}

fn in_pieces(codec: Codec, stored: &[u8], raw_len: usize, kernel: Kernel, piece: usize) -> Vec<u8> {
    let mut decoder = Decoder::with_kernel(codec, raw_len as u64, kernel).unwrap();
    let mut out = vec![];
    for piece in stored.chunks(piece) {
        decoder.update(piece, &mut |bytes| out.extend_from_slice(bytes)).unwrap();
    }
    decoder.finish().unwrap();
    out
}

#[track_caller]
fn refused(codec: Codec, stored: &[u8], raw_len: u64, reason: &str) {
    let error = decode(codec, stored, raw_len).map(|raw| raw.len()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptFrame);
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn every_bit_pattern_survives_in_every_codec_and_kernel() {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let scattered: Vec<u8> = (0..=u16::MAX).flat_map(|i| i.wrapping_mul(40_503).to_le_bytes()).collect();
    for raw in [all, scattered] {
        for codec in TENSOR {
            let stored = encoded(codec, &raw);
            for kernel in Kernel::available() {
                let mut encoder = TensorEncoder::with_kernel(codec, kernel).unwrap();
                assert!(encoder.encode_anyway(&raw) == stored, "{} {}", codec.name(), kernel.name());
                assert!(in_pieces(codec, &stored, raw.len(), kernel, stored.len()) == raw, "{} {}", codec.name(), kernel.name());
            }
        }
    }
}

#[test]
fn every_length_survives_up_to_several_blocks() {
    let raw = numbers(1, 100_000);
    let lengths = (0..600).chain([8190, 8191, 8192, 8193, 8194, 16_384, 65_535, 65_536, 65_537, 65_538, 131_073, 200_000]);
    for length in lengths {
        for codec in TENSOR {
            let raw = &raw[..length];
            assert!(decode(codec, &encoded(codec, raw), length as u64).unwrap() == raw, "{} {length}", codec.name());
        }
    }
}

#[test]
fn numbers_around_zero_become_smaller_by_what_their_exponents_leave() {
    let raw = numbers(2, 200_000);
    for (codec, ratio) in [(Codec::Bf16Bitmaps, 1.37), (Codec::Bf16Huffman, 1.45)] {
        let (used, stored) = encode_tensor(codec, &raw);
        assert_eq!(used, codec);
        assert!(raw.len() as f64 / stored.len() as f64 > ratio, "{} {}", codec.name(), stored.len());
    }
}

#[test]
fn zeros_become_almost_nothing() {
    for length in [1, 2, 127, 128, 180_224, 100 << 20] {
        let raw = vec![0; length];
        for codec in TENSOR {
            let stored = encoded(codec, &raw);
            assert!(stored.len() <= 4 * (length / (16 << 20) + 1), "{} bytes", stored.len());
            assert!(decode(codec, &stored, length as u64).unwrap() == raw);
        }
    }
}

#[test]
fn a_few_bytes_that_stand_for_many_zeros_are_decoded_some_at_a_time() {
    let length = 100 << 20;
    let stored = encoded(Codec::Bf16Bitmaps, &vec![0; length]);
    let mut decoder = Decoder::new(Codec::Bf16Bitmaps, length as u64).unwrap();
    let (mut rest, mut all, mut steps) = (&stored[..], 0, 0);
    loop {
        let mut raw = Vec::new();
        let used = decoder.update_some(rest, 100_000, &mut raw).unwrap();
        rest = &rest[used..];
        let came = raw.len();
        if came == 0 {
            break;
        }
        assert!(came <= 100_000 + (64 << 10), "{came}");
        (all, steps) = (all + came, steps + 1);
    }
    decoder.finish().unwrap();
    assert!(all == length && steps > 500, "{all} bytes in {steps} steps");
    let mut early = Decoder::new(Codec::Bf16Bitmaps, length as u64).unwrap();
    early.update_some(&stored, 1, &mut Vec::new()).unwrap();
    assert!(early.finish().is_err(), "what was not handed out is missing");
}

#[test]
fn of_a_page_that_is_mostly_zeros_only_the_rest_is_stored() {
    // Two of sixteen tokens are there, in each of 22 layers.
    let token = 4 * 64 * 2;
    let mut raw = vec![0; 22 * 16 * token];
    for (layer, page) in raw.chunks_mut(16 * token).enumerate() {
        page[..2 * token].copy_from_slice(&numbers(layer as u64, token));
    }
    let there = raw.len() / 8;
    for codec in [Codec::Bf16Bitmaps, Codec::Bf16Huffman] {
        let (used, stored) = encode_tensor(codec, &raw);
        assert_eq!(used, codec);
        assert!(stored.len() < there * 4 / 5, "{} {} of {there}", codec.name(), stored.len());
        assert!(decode(codec, &stored, raw.len() as u64).unwrap() == raw);
    }
}

#[test]
fn noise_stays_raw() {
    let noise = Random(3).bytes(300_000);
    for codec in TENSOR {
        assert_eq!(encode_tensor(codec, &noise).0, Codec::Raw);
        assert_eq!(encode_tensor(codec, b"").0, Codec::Raw);
        let stored = encoded(codec, &noise);
        assert!(stored.len() <= noise.len() + noise.len() / 1000, "{}", stored.len());
    }
}

#[test]
fn an_encoder_is_used_again() {
    let mut encoder = TensorEncoder::new(Codec::Bf16Huffman).unwrap();
    for (seed, length) in [(1, 300_000), (2, 10), (3, 70_001), (4, 0), (5, 400_000)] {
        let raw = page(seed, length);
        assert!(encoder.encode_anyway(&raw) == encoded(Codec::Bf16Huffman, &raw));
    }
}

#[test]
fn codecs_that_are_not_for_tensors_have_no_encoder_of_tensors() {
    for codec in [Codec::Raw, Codec::Zstd] {
        assert!(TensorEncoder::new(codec).is_err());
        assert_eq!(encode_tensor(codec, b"aaaaaaaaaaaaaaaa").0, Codec::Raw);
    }
}

#[test]
fn malformed_blocks_are_refused() {
    for codec in TENSOR {
        refused(codec, &[0, 0, 0, 0], 0, "an empty block");
        refused(codec, &[0, 0, 0, 1], 0, "an empty block");
        refused(codec, &[2, 0, 0, 3, 0, 0, 0], 2, "unknown form 3");
        refused(codec, &[3, 0, 0, 2, 0, 0, 0], 3, "a coded block of 3 bytes");
        refused(codec, &[2, 0, 1, 2, 0, 0, 0], 65_538, "a coded block of 65538 bytes");
        refused(codec, &[0xFF, 0xFF, 0xFF, 1], 1000, "zip bomb");
        refused(codec, &[5, 0, 0, 0, 1, 2, 3, 4], 5, "the last block does not end");
        refused(codec, &[5, 0, 0], 5, "the last block does not end");
        refused(codec, &[2, 0, 0, 2, 0], 2, "the last block does not end");
    }
    refused(Codec::Bf16Bitmaps, &[2, 32, 0, 2, 0, 0, 0], 8194, "a coded block of 8194 bytes");
    // One value whose code is an escape, and none is announced; then a bit beyond it.
    let one = |escapes: u8, bits: u8| {
        let mut block = vec![2, 0, 0, 2, 100, escapes, 0];
        (0..3).for_each(|_| block.extend([bits, 0, 0, 0, 0, 0, 0, 0]));
        block.push(9);
        block.extend(vec![50; usize::from(escapes)]);
        block
    };
    assert_eq!(decode(Codec::Bf16Bitmaps, &one(1, 1), 2).unwrap(), [0x04, 0x99]);
    refused(Codec::Bf16Bitmaps, &one(0, 1), 2, "another number of escapes");
    refused(Codec::Bf16Bitmaps, &one(2, 1), 2, "another number of escapes");
    refused(Codec::Bf16Bitmaps, &one(1, 2), 2, "bits beyond the last value");
}

#[test]
fn a_frame_of_exponents_is_one_frame_of_the_right_length() {
    let frame = zstd::bulk::compress(&[120; 1000], 1).unwrap();
    let block = |frame: &[u8]| {
        let mut block = vec![0xD0, 7, 0, 2, frame.len() as u8, (frame.len() >> 8) as u8, 0];
        block.extend([7; 1000]);
        block.extend(frame);
        block
    };
    for codec in [Codec::Bf16Huffman, Codec::F16Huffman, Codec::Fp8Huffman] {
        assert_eq!(decode(codec, &block(&frame), 2000).unwrap().len(), 2000);
        for length in [0, 999, 1001, 100_000] {
            let other = zstd::bulk::compress(&vec![120; length], 1).unwrap();
            assert!(decode(codec, &block(&other), 2000).is_err(), "{length}");
        }
        let skippable = b"\x50\x2a\x4d\x18\x02\x00\x00\x00hi";
        for more in [&frame[..], skippable, b"x"] {
            refused(codec, &block(&[&frame[..], more].concat()), 2000, "not one zstd frame");
        }
        refused(codec, &block(skippable), 2000, "not one zstd frame");
        refused(codec, &block(&[0; 1000]), 2000, "a frame that is not smaller");
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn pages_survive_in_every_codec_kernel_and_piece(
        seed in any::<u64>(), length in prop_oneof![0_usize..1000, 0_usize..200_000], piece in prop_oneof![1_usize..200, 1_usize..100_000]
    ) {
        let raw = page(seed, length);
        for codec in TENSOR {
            let stored = encoded(codec, &raw);
            for kernel in Kernel::available() {
                prop_assert!(TensorEncoder::with_kernel(codec, kernel).unwrap().encode_anyway(&raw) == stored);
                let piece = piece.max(stored.len() / 1000 + 1);
                prop_assert!(in_pieces(codec, &stored, length, kernel, piece) == raw, "{} {}", codec.name(), kernel.name());
            }
            match TensorEncoder::new(codec).unwrap().encode(&raw) {
                Some(smaller) => prop_assert!(smaller == stored && stored.len() < raw.len()),
                None => prop_assert!(stored.len() >= raw.len()),
            }
        }
    }

    #[test]
    fn damage_decodes_alike_in_every_kernel_and_piece(seed in any::<u64>(), length in 1_usize..30_000, at in 0_usize..100, piece in 1_usize..9000) {
        let mut random = Random(seed);
        let raw = page(seed, length);
        for codec in TENSOR {
            let mut stored = encoded(codec, &raw);
            // Half of the damage is at the start, where lengths are.
            let at = if at.is_multiple_of(2) { at % stored.len() } else { random.below(stored.len()) };
            stored[at] ^= 1 << random.below(8);
            let whole = decode(codec, &stored, length as u64).ok();
            for kernel in Kernel::available() {
                let mut decoder = Decoder::with_kernel(codec, length as u64, kernel).unwrap();
                let mut out = vec![];
                let all = stored.chunks(piece).try_for_each(|piece| decoder.update(piece, &mut |bytes| out.extend_from_slice(bytes)));
                prop_assert!(out.len() <= length);
                let out = all.and_then(|()| decoder.finish()).ok().map(|()| out);
                prop_assert!(out == whole, "{} {}", codec.name(), kernel.name());
            }
        }
    }
}

#[test]
fn a_malformed_last_block_is_missing_at_the_end() {
    let raw = numbers(1, 1000);
    let mut stored = encoded(Codec::Bf16Bitmaps, &raw);
    // One coded block: its raw length, and its form.
    assert_eq!(stored[..4], [raw.len() as u8, (raw.len() >> 8) as u8, 0, 2]);
    // An escape more than the bitmaps have.
    stored[5] += 1;
    stored.push(0);
    let mut decoder = Decoder::new(Codec::Bf16Bitmaps, raw.len() as u64).unwrap();
    assert!(decoder.update(&stored, &mut |_| ()).is_err());
    assert!(decoder.finish().is_err());
}
