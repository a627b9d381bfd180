use crate::common::{Random, cases};
use bytes::Bytes;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{CHECKSUM, END_LEN, Event, Header, Parser, encode, end_mark};
use pfr_schema::{Algorithm, Digest, ErrorCode, FormatError, Kind, Limits};
use proptest::prelude::*;

/// An event with its payload joined: how a stream is split must not be seen in these.
#[derive(Debug, PartialEq)]
enum Seen {
    Frame { header: Header, payload: Vec<u8>, checksum: u32 },
    End,
}

fn parse_pieces<'a>(pieces: impl IntoIterator<Item = &'a [u8]>, limits: &Limits) -> Result<Vec<Seen>, FormatError> {
    let mut parser = Parser::new(limits.clone());
    let mut seen = Vec::new();
    let mut current: Option<(Header, Vec<u8>)> = None;
    for piece in pieces {
        parser.push(Bytes::copy_from_slice(piece));
        while let Some(event) = parser.next()? {
            match event {
                Event::Begin(header) => assert!(current.replace((header, vec![])).is_none()),
                Event::Payload(bytes) => {
                    assert!(!bytes.is_empty());
                    current.as_mut().unwrap().1.extend_from_slice(&bytes);
                }
                Event::Finish { checksum } => {
                    let (header, payload) = current.take().unwrap();
                    assert_eq!(payload.len() as u64, header.stored_len);
                    seen.push(Seen::Frame { header, payload, checksum });
                }
                Event::End => seen.push(Seen::End),
            }
        }
    }
    parser.finish()?;
    assert_eq!(seen.last(), Some(&Seen::End));
    Ok(seen)
}

fn parse(bytes: &[u8]) -> Result<Vec<Seen>, FormatError> {
    parse_pieces([bytes], &Limits::default())
}

fn header(algorithm: Algorithm, kind: Kind, payload: &[u8]) -> Header {
    let length = payload.len() as u64;
    Header { codec: Codec::Raw, kind, digest: Digest::of(algorithm, payload), raw_len: length, stored_len: length }
}

/// Frames of every algorithm, with payloads of these lengths.
fn stream(seed: u64, lengths: &[usize]) -> (Vec<u8>, Vec<Seen>) {
    let mut random = Random(seed);
    let (mut bytes, mut seen) = (vec![], vec![]);
    for (i, length) in lengths.iter().enumerate() {
        let payload = random.bytes(*length);
        let header = header(Algorithm::ALL[i % 3], Kind::ALL[i % 6], &payload);
        let frame = encode(&header, &payload);
        assert_eq!(frame.len() as u64, header.frame_len());
        bytes.extend_from_slice(&frame);
        seen.push(Seen::Frame { header, checksum: crc32c::crc32c(&payload), payload });
    }
    bytes.extend_from_slice(&end_mark(lengths.len() as u64));
    seen.push(Seen::End);
    (bytes, seen)
}

/// A header with fields changed and its checksum made right again.
fn forged(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = header(Algorithm::Sha256, Kind::Blob, b"payload").to_bytes();
    bytes.truncate(bytes.len() - CHECKSUM);
    change(&mut bytes);
    let checksum = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn a_stream_without_frames_is_an_end_mark() {
    assert_eq!(parse(&end_mark(0)).unwrap(), [Seen::End]);
    assert_eq!(parse(b"").unwrap_err().to_string(), "frame stream ends early at byte 0: no end mark");
}

#[test]
fn a_stream_in_single_bytes_is_the_stream() {
    let (bytes, seen) = stream(1, &[0, 1, 23, 24, 60, 92, 500]);
    assert_eq!(parse(&bytes).unwrap(), seen);
    assert_eq!(parse_pieces(bytes.chunks(1), &Limits::default()).unwrap(), seen);
}

#[test]
fn pieces_of_no_bytes_change_nothing() {
    let (bytes, seen) = stream(2, &[3, 0, 70]);
    let pieces = bytes.chunks(1).flat_map(|b| [&[][..], b, &[]]);
    assert_eq!(parse_pieces(pieces, &Limits::default()).unwrap(), seen);
}

#[test]
fn a_stream_cut_anywhere_is_truncated_at_the_cut() {
    let (bytes, _) = stream(3, &[5, 0, 100]);
    for at in 0..bytes.len() {
        match parse(&bytes[..at]) {
            Err(FormatError::Truncated { position, .. }) => assert_eq!(position, at as u64),
            other => panic!("cut at {at}: {other:?}"),
        }
    }
}

#[test]
fn what_is_missing_is_said() {
    let (bytes, _) = stream(3, &[5]);
    let header = Header::len(Algorithm::Sha256);
    for (at, reason) in [
        (3, "inside a header"),
        (header - 1, "inside a header"),
        (header, "inside a payload"),
        (header + 4, "inside a payload"),
        (header + 5, "inside a checksum"),
        (header + 8, "inside a checksum"),
        (header + 9, "no end mark"),
        (header + 12, "inside a header"),
    ] {
        assert_eq!(parse(&bytes[..at]).unwrap_err().to_string(), format!("frame stream ends early at byte {at}: {reason}"));
        assert_eq!(parse(&bytes[..at]).unwrap_err().code(), ErrorCode::Truncated);
    }
}

#[test]
fn any_bit_flipped_in_a_header_or_end_mark_is_an_error_and_in_a_payload_a_wrong_checksum() {
    let (bytes, seen) = stream(4, &[9, 9, 9]);
    let mut at = 0;
    let mut payload = vec![false; bytes.len()];
    for frame in &seen {
        if let Seen::Frame { header, .. } = frame {
            let start = at + Header::len(header.digest.algorithm());
            at += header.frame_len() as usize;
            payload[start..at].fill(true);
        }
    }
    assert_eq!(at + END_LEN, bytes.len());
    for at in 0..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            let result = parse(&bad);
            if payload[at] {
                let wrong = result
                    .unwrap()
                    .iter()
                    .any(|f| matches!(f, Seen::Frame { payload, checksum, .. } if crc32c::crc32c(payload) != *checksum));
                assert!(wrong, "byte {at}");
            } else {
                assert!(result.is_err(), "byte {at}, bit {bit}");
            }
        }
    }
}

#[test]
fn each_wrong_field_is_refused_with_the_position_of_its_frame() {
    let digest = Digest::sha256(b"payload");
    let limits = Limits::default();
    let u64_at = |at: usize, value: u64| move |b: &mut Vec<u8>| b[at..at + 8].copy_from_slice(&value.to_le_bytes());
    let table: Vec<(&str, Vec<u8>, String)> = vec![
        ("magic", forged(|b| b[0] = b'Q'), "expected the magic PFfr, found [51, 46, 66, 72]".into()),
        ("version", forged(|b| b[4] = 2), "expected version 1, found 2".into()),
        ("codec", forged(|b| b[5] = 6), "unknown codec 6".into()),
        ("kind", forged(|b| b[6] = 6), "unknown kind 6".into()),
        ("no algorithm", forged(|b| b[7] = 0), "unknown digest algorithm 0".into()),
        ("algorithm", forged(|b| b[7] = 4), "unknown digest algorithm 4".into()),
        ("raw length", forged(u64_at(8, 8)), format!("{digest} says 7 stored bytes for 8 raw ones (raw)")),
        ("stored length", forged(u64_at(16, 6)), format!("{digest} says 6 stored bytes for 7 raw ones (raw)")),
        ("huge", forged(u64_at(8, u64::MAX)), format!("{digest} says it has {} bytes, the limit is {}", u64::MAX, limits.blob_bytes)),
        (
            "huge node",
            forged(|b| {
                b[6] = Kind::Tree as u8;
                u64_at(8, limits.document_bytes + 1)(b);
            }),
            format!("{digest} says it has {} bytes, the limit is {}", limits.document_bytes + 1, limits.document_bytes),
        ),
        (
            "stored longer than raw",
            forged(|b| {
                b[5] = Codec::Zstd as u8;
                u64_at(16, 7 + 1024 + 1)(b);
            }),
            format!("{digest} says 1032 stored bytes for 7 raw ones (zstd)"),
        ),
        (
            "a tensor that is not smaller",
            forged(|b| b[5] = Codec::Bf16Bitmaps as u8),
            format!("{digest} says 7 stored bytes for 7 raw ones (bf16-bitmaps)"),
        ),
        (
            "checksum",
            {
                let mut b = forged(|_| ());
                *b.last_mut().unwrap() ^= 1;
                b
            },
            "the header's checksum is wrong".into(),
        ),
    ];
    let (first, _) = stream(5, &[10]);
    let first = &first[..first.len() - END_LEN];
    for (what, bad, reason) in table {
        let error = parse(&[first, &bad, &[0; 64]].concat()).unwrap_err();
        assert_eq!(error.to_string(), format!("frame stream, byte {}: {reason}", first.len()), "{what}");
        assert_eq!(error.code(), ErrorCode::CorruptFrame);
    }
}

#[test]
fn the_longest_lengths_allowed_are_allowed() {
    let limits = Limits::default();
    let digest = Digest::sha256(b"");
    for (codec, kind, raw_len, stored_len) in [
        (Codec::Raw, Kind::Blob, limits.blob_bytes, limits.blob_bytes),
        (Codec::Zstd, Kind::Blob, limits.blob_bytes, 0),
        (Codec::Zstd, Kind::Run, limits.document_bytes, limits.document_bytes + limits.document_bytes / 128 + 1024),
        (Codec::Zstd, Kind::Blob, 0, 1024),
        (Codec::Bf16Bitmaps, Kind::Blob, limits.blob_bytes, limits.blob_bytes - 1),
        (Codec::Fp8Huffman, Kind::Blob, 1, 0),
    ] {
        let header = Header { codec, kind, digest, raw_len, stored_len };
        assert_eq!(Header::parse_exact(&header.to_bytes(), 0, &limits).unwrap(), header);
    }
}

#[test]
fn a_promised_length_costs_nothing_before_the_bytes_come() {
    let huge = Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(b""), raw_len: 64 << 30, stored_len: 64 << 30 };
    let error = parse(&[huge.to_bytes(), vec![0; 10]].concat()).unwrap_err();
    assert!(matches!(error, FormatError::Truncated { reason: "inside a payload", .. }), "{error}");
}

#[test]
fn a_header_alone_is_exactly_a_header() {
    let bytes = header(Algorithm::Sha512, Kind::Run, b"x").to_bytes();
    let limits = Limits::default();
    assert!(Header::parse_exact(&bytes, 0, &limits).is_ok());
    for bad in [&bytes[..bytes.len() - 1], &[&bytes[..], &[0]].concat(), &[], &bytes[..24], &bytes[..3]] {
        assert!(matches!(Header::parse_exact(bad, 77, &limits), Err(FormatError::Frame { position: 77, .. })));
    }
}

#[test]
fn an_end_mark_counts_the_frames_and_nothing_follows_it() {
    let (bytes, _) = stream(6, &[4, 4]);
    let frames = &bytes[..bytes.len() - END_LEN];
    for count in [0, 1, 3, u64::MAX] {
        let error = parse(&[frames, &end_mark(count)].concat()).unwrap_err().to_string();
        assert_eq!(error, format!("frame stream, byte {}: the end mark does not say 2 frames", frames.len()));
    }
    for more in [&b"x"[..], &end_mark(2), frames] {
        let error = parse(&[&bytes[..], more].concat()).unwrap_err().to_string();
        assert_eq!(error, format!("frame stream, byte {}: bytes after the end mark", bytes.len()));
    }
}

#[test]
fn an_error_stays_an_error() {
    let (bytes, _) = stream(7, &[4]);
    for bad in [forged(|b| b[4] = 2), forged(|b| b[0] = 0), end_mark(5), [&bytes[..], b"xyz"].concat()] {
        let mut parser = Parser::new(Limits::default());
        parser.push(Bytes::from(bad));
        while parser.next().is_ok_and(|event| event.is_some()) {}
        for _ in 0..3 {
            assert!(parser.next().is_err());
            parser.push(Bytes::copy_from_slice(&bytes));
        }
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn a_stream_split_anywhere_is_the_same_stream(
        seed in any::<u64>(),
        lengths in prop::collection::vec(prop_oneof![0_usize..5, 0_usize..300], 0..8),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let (bytes, seen) = stream(seed, &lengths);
        let mut cuts: Vec<_> = cuts.iter().map(|c| c.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|w| &bytes[w[0]..w[1]]);
        prop_assert_eq!(parse_pieces(pieces, &Limits::default()).unwrap(), seen);
    }

    #[test]
    fn bytes_pushed_before_the_others_are_taken_are_not_lost(seed in any::<u64>(), piece in 1_usize..40) {
        let (bytes, seen) = stream(seed, &[17, 0, 33]);
        let mut parser = Parser::new(Limits::default());
        for piece in bytes.chunks(piece) {
            parser.push(Bytes::copy_from_slice(piece));
        }
        let mut frames = 0;
        while let Some(event) = parser.next().unwrap() {
            frames += usize::from(matches!(event, Event::Finish { .. }));
        }
        prop_assert!(parser.finish().is_ok());
        prop_assert_eq!(parser.position(), bytes.len() as u64);
        prop_assert_eq!(frames + 1, seen.len());
    }

    #[test]
    fn a_header_is_read_back(raw in any::<[u8; 64]>(), which in 0_usize..3, kind in 0_usize..6, raw_len in 0_u64..64 << 20, zstd: bool) {
        let algorithm = Algorithm::ALL[which];
        let digest = Digest::from_bytes(algorithm, &raw[..algorithm.len()]).unwrap();
        let (codec, stored_len) = if zstd { (Codec::Zstd, raw_len / 2) } else { (Codec::Raw, raw_len) };
        let header = Header { codec, kind: Kind::ALL[kind], digest, raw_len, stored_len };
        prop_assert_eq!(header.to_bytes().len(), Header::len(algorithm));
        prop_assert_eq!(Header::parse_exact(&header.to_bytes(), 0, &Limits::default()).unwrap(), header);
    }
}
