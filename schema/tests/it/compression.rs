//! Which codec a writer uses: by its setting, the type of the elements and what the reader knows.

use crate::common::{Random, cases};
use crate::tensor::page;
use pfr_schema::checkpoint::Dtype;
use pfr_schema::codec::{BlobEncoder, Codec, Codecs, Compression, Kernel, decode};
use pfr_schema::{api, geometry};
use pfr_testkit::snapshot::numbers;
use proptest::prelude::*;

/// The codec of a blob, after a check that it decodes to the same bytes.
fn stored_as(compression: Compression, codecs: Codecs, raw: &[u8], elements: Option<Dtype>) -> (Codec, usize) {
    let mut encoder = BlobEncoder::new(compression, codecs);
    match encoder.encode(raw, elements) {
        None => (Codec::Raw, raw.len()),
        Some((codec, payload)) => {
            assert!(codecs.contains(codec) && payload.len() < raw.len(), "{codec:?}");
            assert!(decode(codec, &payload, raw.len() as u64).unwrap() == raw, "{codec:?}");
            (codec, payload.len())
        }
    }
}

#[test]
fn the_codec_follows_from_the_setting_and_the_type_alone() {
    let raw = numbers(1, 100_000);
    for dtype in Dtype::ALL.iter().copied() {
        let hot = if dtype == Dtype::Bf16 { Codec::Bf16Bitmaps } else { Codec::Raw };
        let cold = match dtype {
            Dtype::Bf16 => Codec::Bf16Huffman,
            Dtype::F16 => Codec::F16Huffman,
            Dtype::Fp8E4m3 => Codec::Fp8Huffman,
            _ => Codec::Raw,
        };
        for (compression, expected) in [(Compression::Hot, hot), (Compression::Cold, cold), (Compression::Off, Codec::Raw)] {
            assert_eq!(stored_as(compression, Codecs::ALL, &raw, Some(dtype)).0, expected, "{compression} {dtype}");
        }
    }
    for compression in Compression::ALL {
        assert_eq!(stored_as(compression, Codecs::ALL, &raw, None).0, Codec::Raw, "the type is not guessed from the content");
    }
}

#[test]
fn what_does_not_become_smaller_stays_raw() {
    let noise = Random(3).bytes(100_000);
    for compression in Compression::ALL {
        for elements in [None, Some(Dtype::Bf16), Some(Dtype::F16), Some(Dtype::Fp8E4m3), Some(Dtype::F32)] {
            for raw in [&noise[..], &noise[..7], b""] {
                assert_eq!(stored_as(compression, Codecs::ALL, raw, elements).0, Codec::Raw);
            }
        }
    }
}

#[test]
fn zeros_are_never_stored_whatever_the_setting_the_type_and_the_reader() {
    let mut sparse = vec![0; 180_224];
    sparse[..20_000].copy_from_slice(&Random(4).bytes(20_000));
    for (raw, most) in [(vec![0; 180_224], 64), (sparse, 21_000)] {
        for compression in Compression::ALL {
            for elements in [None, Some(Dtype::F32), Some(Dtype::Bf16), Some(Dtype::Fp8E4m3)] {
                for codecs in [Codecs::LEAST, Codecs::ALL, Codecs::LEAST.with(Codec::Bf16Bitmaps), Codecs::LEAST.with(Codec::Bf16Huffman)] {
                    let (codec, stored) = stored_as(compression, codecs, &raw, elements);
                    assert!(stored <= most, "{compression} {elements:?} {codecs}: {stored} bytes in {codec:?}");
                }
            }
        }
    }
}

#[test]
fn a_reader_that_does_not_know_the_codec_gets_raw_numbers() {
    let raw = numbers(5, 50_000);
    for (compression, codec) in [(Compression::Hot, Codec::Bf16Bitmaps), (Compression::Cold, Codec::Bf16Huffman)] {
        assert_eq!(stored_as(compression, Codecs::LEAST, &raw, Some(Dtype::Bf16)).0, Codec::Raw);
        assert_eq!(stored_as(compression, Codecs::LEAST.with(codec), &raw, Some(Dtype::Bf16)).0, codec);
    }
}

#[test]
fn a_few_zeros_are_not_worth_a_decoder() {
    let mut raw = Random(6).bytes(100_000);
    raw[40_000..41_000].fill(0);
    assert_eq!(stored_as(Compression::Off, Codecs::ALL, &raw, None).0, Codec::Raw);
    raw[40_000..60_000].fill(0);
    assert_eq!(stored_as(Compression::Off, Codecs::ALL, &raw, None).0, Codec::Bf16Bitmaps);
}

#[test]
fn settings_have_the_names_of_the_documentation() {
    for (compression, name) in [(Compression::Hot, "hot"), (Compression::Cold, "cold"), (Compression::Off, "off")] {
        assert_eq!((compression.to_string().as_str(), name.parse::<Compression>().unwrap()), (name, compression));
        assert_eq!(serde_json::to_value(compression).unwrap(), name);
    }
    for text in ["", "HOT", "on", "hot "] {
        assert!(text.parse::<Compression>().unwrap_err().to_string().contains("known are hot, cold and off"));
    }
    let vectorized = Kernel::detect() != Kernel::PORTABLE;
    assert_eq!(Compression::default(), if vectorized { Compression::Hot } else { Compression::Off });
}

#[test]
fn a_registry_that_does_not_say_what_it_takes_takes_raw_and_zstd() {
    let old = r#"{"id":"x","lease_seconds":1,"max_digests":1,"max_frames_bytes":1}"#;
    assert_eq!(serde_json::from_str::<api::Push>(old).unwrap().codecs, Codecs::LEAST);
    let newer = r#"{"id":"x","lease_seconds":1,"max_digests":1,"max_frames_bytes":1,"codecs":["zstd","f16-huffman","of-tomorrow"]}"#;
    assert_eq!(serde_json::from_str::<api::Push>(newer).unwrap().codecs, Codecs::LEAST.with(Codec::F16Huffman));
}

#[test]
fn every_type_of_a_page_is_a_type_of_a_tensor() {
    use geometry::Dtype::{Bf16, F16, F32, Fp8E4m3};
    for dtype in [Bf16, F16, F32, Fp8E4m3] {
        let as_tensor = Dtype::from(dtype);
        assert_eq!(serde_json::to_value(dtype).unwrap(), as_tensor.name());
        assert_eq!(dtype.bytes(), as_tensor.bytes() as u64);
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn pages_survive_one_after_the_other_in_one_encoder(
        seed in any::<u64>(), lengths in proptest::collection::vec(0_usize..100_000, 1..5), set in 0_u8..16,
        compression in proptest::sample::select(&Compression::ALL[..]), elements in proptest::option::of(proptest::sample::select(Dtype::ALL))
    ) {
        let tensors = Codec::ALL.iter().skip(2).enumerate();
        let codecs = tensors.filter(|(bit, _)| set >> bit & 1 == 1).fold(Codecs::LEAST, |codecs, (_, codec)| codecs.with(*codec));
        let mut encoder = BlobEncoder::new(compression, codecs);
        for (turn, length) in lengths.into_iter().enumerate() {
            let raw = page(seed.wrapping_add(turn as u64), length);
            if let Some((codec, payload)) = encoder.encode(&raw, elements) {
                prop_assert!(codecs.contains(codec) && payload.len() < raw.len());
                prop_assert!(decode(codec, &payload, raw.len() as u64).unwrap() == raw);
            }
        }
    }
}
