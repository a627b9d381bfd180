use crate::common::{Random, cases};
use pfr_schema::codec::{Codec, Decoder, TensorEncoder, ZSTD_WINDOW_LOG, decode, encode_document};
use pfr_schema::{ErrorCode, FormatError};
use proptest::prelude::*;
use std::io::{Read as _, Write as _};
use zstd::stream::raw::CParameter;

fn zstd(raw: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(raw, 3).unwrap()
}

/// The payload of `raw` in each codec. A new codec adds its encoder here.
fn encoded(codec: Codec, raw: &[u8]) -> Vec<u8> {
    match codec {
        Codec::Raw => raw.to_vec(),
        Codec::Zstd => zstd(raw),
        _ => TensorEncoder::new(codec).unwrap().encode_anyway(raw).to_vec(),
    }
}

fn codec() -> impl Strategy<Value = Codec> {
    proptest::sample::select(Codec::ALL)
}

fn encoder(level: i32, parameters: &[CParameter]) -> zstd::Encoder<'static, Vec<u8>> {
    let mut encoder = zstd::Encoder::new(vec![], level).unwrap();
    for parameter in parameters {
        encoder.set_parameter(*parameter).unwrap();
    }
    encoder
}

#[track_caller]
fn assert_codec_error(result: Result<Vec<u8>, FormatError>, reason: &str) {
    let error = result.map(|raw| raw.len()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptFrame);
    assert!(error.to_string().contains(reason), "{error}");
}

#[test]
fn numbers_and_names_of_codecs_never_change() {
    let known: Vec<(u8, &str)> = (0..=255).filter_map(|number| Some((number, Codec::from_number(number)?.name()))).collect();
    let tensors = [(2, "bf16-bitmaps"), (3, "bf16-huffman"), (4, "f16-huffman"), (5, "fp8-huffman")];
    assert_eq!(known, [&[(0, "raw"), (1, "zstd")][..], &tensors].concat());
    for codec in Codec::ALL {
        assert_eq!(serde_json::to_value(codec).unwrap(), codec.name());
    }
}

#[test]
fn a_document_that_does_not_shrink_stays_raw() {
    let noise = Random(1).bytes(1000);
    assert!(matches!(encode_document(&noise), (Codec::Raw, bytes) if *bytes == noise));
    assert_eq!(encode_document(b"").0, Codec::Raw);
    let (codec, stored) = encode_document(&[b'a'; 1000]);
    assert!(codec == Codec::Zstd && stored.len() < 100);
}

#[test]
fn a_large_document_decodes_within_the_window_that_decoders_allow() {
    // 24 MiB that repeat far apart, so that an encoder would like a large window.
    let block = Random(2).bytes(1 << 20);
    let raw = block.repeat(24);
    let (codec, stored) = encode_document(&raw);
    assert_eq!(codec, Codec::Zstd);
    assert!(decode(codec, &stored, raw.len() as u64).unwrap() == raw);
}

#[test]
fn blobs_as_processfork_encodes_them_are_read() {
    let raw = Random(3).bytes(300_000).repeat(2);
    assert!(decode(Codec::Zstd, &zstd::encode_all(&raw[..], 19).unwrap(), raw.len() as u64).unwrap() == raw);
}

#[test]
fn a_gibibyte_of_zeros_that_claims_a_kibibyte_stops_after_one_step() {
    let mut encoder = encoder(3, &[]);
    std::io::copy(&mut std::io::repeat(0).take(1 << 30), &mut encoder).unwrap();
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 200_000);
    assert_codec_error(decode(Codec::Zstd, &bomb, 1024), "zip bomb");
    let mut decoder = Decoder::new(Codec::Zstd, 1024).unwrap();
    let mut produced = 0;
    assert!(decoder.update(&bomb, &mut |bytes| produced += bytes.len()).is_err());
    assert!(produced <= 64 << 10, "{produced} bytes came out");
}

#[test]
fn decoding_stops_at_the_step_after_which_nothing_is_wanted() {
    let raw = vec![0; 8 << 20];
    for codec in Codec::ALL.iter().copied().filter(|codec| *codec != Codec::Raw) {
        let (mut decoder, mut steps) = (Decoder::new(codec, raw.len() as u64).unwrap(), Vec::new());
        let result = decoder.update_while(&encoded(codec, &raw), &mut |bytes| {
            steps.push(bytes.len());
            steps.len() < 3
        });
        assert_eq!(result.unwrap_err().code(), ErrorCode::CorruptFrame);
        assert!(steps.len() == 3 && steps.iter().all(|step| *step <= 1 << 20), "{}: {steps:?}", codec.name());
    }
}

#[test]
fn a_frame_that_states_the_right_length_and_holds_more_is_refused() {
    // A content size of 1,000 in the frame header, and blocks with more: zstd itself must notice,
    // or the count does.
    let mut frame = zstd(&[7; 1000]);
    let more = zstd(&[7; 5000]);
    assert_eq!(frame[4] & 0xC0, 0x40, "a two-byte content size");
    frame.splice(7.., more[7..].iter().copied());
    assert!(decode(Codec::Zstd, &frame, 1000).is_err());
    // No content size at all: only the count can tell.
    let mut unsized_frame = encoder(3, &[]);
    unsized_frame.write_all(&[7; 5000]).unwrap();
    let unsized_frame = unsized_frame.finish().unwrap();
    assert_codec_error(decode(Codec::Zstd, &unsized_frame, 1000), "more bytes than the raw length");
    assert_codec_error(decode(Codec::Zstd, &unsized_frame, 4999), "more bytes than the raw length");
    assert_codec_error(decode(Codec::Zstd, &unsized_frame, 5001), "1 bytes fewer than the raw length");
}

#[test]
fn a_lying_raw_length_is_refused_both_ways_and_costs_no_memory() {
    let raw = Random(4).bytes(100);
    for codec in Codec::ALL.iter().copied() {
        let stored = encoded(codec, &raw);
        assert_eq!(decode(codec, &stored, 100).unwrap(), raw);
        assert_codec_error(decode(codec, &stored, 99), "more bytes");
        assert_codec_error(decode(codec, &stored, 0), "more bytes");
        assert_codec_error(decode(codec, &stored, 101), "1 bytes fewer");
        assert_codec_error(decode(codec, &stored, u64::MAX), "fewer");
    }
}

#[test]
fn a_zstd_frame_cut_anywhere_is_truncated() {
    let raw = Random(5).bytes(300).repeat(3);
    let stored = zstd(&raw);
    for at in 0..stored.len() {
        assert_codec_error(decode(Codec::Zstd, &stored[..at], raw.len() as u64), "codec zstd: ");
    }
}

#[test]
fn bytes_after_the_zstd_frame_are_refused() {
    let raw = [1; 500];
    let stored = zstd(&raw);
    for more in [&b"x"[..], &stored, &zstd(b""), b"\x50\x2a\x4d\x18\x00\x00\x00\x00"] {
        assert_codec_error(decode(Codec::Zstd, &[&stored, more].concat(), 500), "bytes after the end of the frame");
        let mut decoder = Decoder::new(Codec::Zstd, 500).unwrap();
        decoder.update(&stored, &mut |_| ()).unwrap();
        assert!(decoder.update(more, &mut |_| ()).is_err());
    }
}

#[test]
fn a_window_over_8_mib_is_refused_and_8_mib_is_not() {
    let raw = Random(6).bytes(9 << 20);
    for (log, accepted) in [(ZSTD_WINDOW_LOG, true), (ZSTD_WINDOW_LOG + 1, false), (27, false)] {
        let mut encoder = encoder(1, &[CParameter::WindowLog(log)]);
        encoder.write_all(&raw).unwrap();
        let stored = encoder.finish().unwrap();
        let result = decode(Codec::Zstd, &stored, raw.len() as u64);
        if accepted {
            assert!(result.unwrap() == raw);
        } else {
            assert_codec_error(result, "Frame requires too much memory");
        }
    }
}

#[test]
fn a_single_segment_over_8_mib_is_refused_although_it_states_no_window() {
    let raw = vec![0; (8 << 20) + 1];
    let stored = zstd::bulk::Compressor::new(1)
        .and_then(|mut c| {
            c.set_parameter(CParameter::WindowLog(24))?;
            c.compress(&raw)
        })
        .unwrap();
    assert_eq!(stored[4] & 0x20, 0x20, "a single segment");
    assert_codec_error(decode(Codec::Zstd, &stored, raw.len() as u64), "Frame requires too much memory");
}

/// Found by fuzzing: zstd itself takes these in pieces and refuses them as a whole.
#[test]
fn a_frame_that_states_another_content_size_is_refused_in_pieces_as_it_is_whole() {
    let empty = b"\x28\xb5\x2f\xfd\x20\x05\x01\x00\x00";
    let three = b"\x28\xb5\x2f\xfd\x20\x05\x18\x00\x00abc\x01\x00\x00";
    for (stored, raw_len) in [(&empty[..], 0), (&three[..], 3)] {
        assert_codec_error(decode(Codec::Zstd, stored, raw_len), "the frame states 5 bytes");
        let mut decoder = Decoder::new(Codec::Zstd, raw_len).unwrap();
        for byte in stored.chunks(1) {
            decoder.update(byte, &mut |_| ()).unwrap();
        }
        assert_codec_error(decoder.finish().map(|()| vec![]), "the frame states 5 bytes");
    }
}

/// Found by fuzzing, likewise: an empty compressed block, then five raw bytes.
#[test]
fn an_odd_frame_decodes_in_pieces_as_it_does_whole() {
    let odd = b"\x28\xb5\x2f\xfd\x20\x05\x04\x00\x00\x29\x00\x00hello";
    assert_eq!(decode(Codec::Zstd, odd, 5).unwrap(), b"hello");
    for piece in 1..odd.len() {
        let mut decoder = Decoder::new(Codec::Zstd, 5).unwrap();
        let mut out = vec![];
        for piece in odd.chunks(piece) {
            decoder.update(piece, &mut |bytes| out.extend_from_slice(bytes)).unwrap();
        }
        decoder.finish().unwrap();
        assert_eq!(out, b"hello");
    }
}

#[test]
fn a_skippable_frame_is_no_payload() {
    assert_codec_error(decode(Codec::Zstd, b"\x50\x2a\x4d\x18\x02\x00\x00\x00hi", 0), "a skippable frame");
}

#[test]
fn a_frame_that_needs_a_dictionary_is_refused() {
    let mut compressor = zstd::bulk::Compressor::with_dictionary(3, &Random(7).bytes(1000)).unwrap();
    let stored = compressor.compress(&Random(7).bytes(1000)).unwrap();
    assert!(decode(Codec::Zstd, &stored, 1000).is_err());
}

#[test]
fn a_frame_with_a_wrong_content_checksum_is_refused() {
    let mut encoder = encoder(3, &[CParameter::ChecksumFlag(true)]);
    encoder.write_all(&[1; 500]).unwrap();
    let mut stored = encoder.finish().unwrap();
    assert_eq!(decode(Codec::Zstd, &stored, 500).unwrap(), [1; 500]);
    *stored.last_mut().unwrap() ^= 1;
    assert!(decode(Codec::Zstd, &stored, 500).is_err());
}

#[test]
fn pieces_of_no_bytes_are_not_an_endless_loop() {
    let raw = Random(8).bytes(1000);
    let stored = zstd(&raw);
    let mut decoder = Decoder::new(Codec::Zstd, 1000).unwrap();
    let mut out = vec![];
    for byte in stored.chunks(1) {
        for _ in 0..100 {
            decoder.update(&[], &mut |bytes| out.extend_from_slice(bytes)).unwrap();
        }
        decoder.update(byte, &mut |bytes| out.extend_from_slice(bytes)).unwrap();
    }
    decoder.update(&[], &mut |bytes| out.extend_from_slice(bytes)).unwrap();
    decoder.finish().unwrap();
    assert_eq!(out, raw);
}

#[test]
fn an_output_of_whole_steps_is_decoded_to_its_end() {
    for length in [0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 128 << 10, 1 << 20] {
        let raw = vec![5; length];
        assert!(decode(Codec::Zstd, &zstd(&raw), length as u64).unwrap() == raw, "{length}");
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn documents_survive_their_encoding(seed in any::<u64>(), length in 0_usize..5000, repeat in 1_usize..4) {
        let raw = Random(seed).bytes(length).repeat(repeat);
        let (codec, stored) = encode_document(&raw);
        prop_assert!(stored.len() <= raw.len());
        prop_assert_eq!(decode(codec, &stored, raw.len() as u64).unwrap(), raw);
    }

    #[test]
    fn decoding_in_pieces_is_decoding_the_whole(
        seed in any::<u64>(), length in 0_usize..200_000, piece in prop_oneof![1_usize..20, 1_usize..100_000], codec in codec()
    ) {
        let raw = Random(seed).bytes(length / 3 + 1).repeat(3);
        let stored = encoded(codec, &raw);
        // Many tiny pieces of a long payload only take time.
        let piece = piece.max(stored.len() / 1000 + 1);
        let mut decoder = Decoder::new(codec, raw.len() as u64).unwrap();
        let mut out = vec![];
        for piece in stored.chunks(piece) {
            decoder.update(piece, &mut |bytes| out.extend_from_slice(bytes)).unwrap();
        }
        decoder.finish().unwrap();
        prop_assert!(out == raw);
    }

    #[test]
    fn decoding_some_at_a_time_is_decoding_the_whole_and_gives_no_more_than_asked_for(
        seed in any::<u64>(), length in 0_usize..100_000, piece in 1_usize..50_000, most in 1_usize..100_000, codec in codec()
    ) {
        let raw = [Random(seed).bytes(length), vec![0; 3 * length]].concat();
        let stored = encoded(codec, &raw);
        let piece = piece.max(stored.len() / 100 + 1);
        let mut decoder = Decoder::new(codec, raw.len() as u64).unwrap();
        let mut out = vec![];
        for mut piece in stored.chunks(piece) {
            loop {
                let (before, given) = (out.len(), piece.len());
                let used = decoder.update_some(piece, most, &mut out).unwrap();
                piece = &piece[used..];
                let came = out.len() - before;
                // A block more, or a piece of raw bytes.
                prop_assert!(codec == Codec::Zstd || came <= most + given.max(64 << 10), "{came} bytes, {most} wanted");
                if came == 0 {
                    prop_assert!(piece.is_empty());
                    break;
                }
            }
        }
        decoder.finish().unwrap();
        prop_assert!(out == raw);
    }

    #[test]
    fn damage_never_decodes_to_more_than_was_promised(seed in any::<u64>(), length in 1_usize..3000, codec in codec()) {
        let mut random = Random(seed);
        let raw = random.bytes(length / 2 + 1).repeat(2);
        let mut stored = encoded(codec, &raw);
        for _ in 0..20 {
            let at = random.below(stored.len());
            stored[at] ^= 1 << random.below(8);
            if let Ok(out) = decode(codec, &stored, raw.len() as u64) {
                prop_assert_eq!(out.len(), raw.len());
            }
        }
    }
}
