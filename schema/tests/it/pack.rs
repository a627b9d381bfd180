use crate::common::{Random, cases, mutate};
use pfr_schema::codec::Codec;
use pfr_schema::frame::{Header, encode};
use pfr_schema::pack::{Entry, FOOTER_LEN, Footer, MAGIC, index_and_footer};
use pfr_schema::{Algorithm, Digest, ErrorCode, FormatError, Kind, Limits};
use proptest::prelude::*;

/// A whole pack and what is in it.
fn pack(seed: u64, lengths: &[usize]) -> (Vec<u8>, Vec<Entry>) {
    let mut random = Random(seed);
    let mut bytes = MAGIC.to_vec();
    let mut entries = vec![];
    for (i, length) in lengths.iter().enumerate() {
        let payload = random.bytes(*length);
        let algorithm = Algorithm::ALL[i % 3];
        let header = Header {
            codec: Codec::Raw,
            kind: Kind::Blob,
            digest: Digest::of(algorithm, &payload),
            raw_len: *length as u64,
            stored_len: *length as u64,
        };
        entries.push(Entry { offset: bytes.len() as u64, header });
        bytes.extend_from_slice(&encode(&header, &payload));
    }
    let tail = index_and_footer(&entries, bytes.len() as u64);
    bytes.extend_from_slice(&tail);
    (bytes, entries)
}

/// Reads a pack as a store does: the footer from the end, then the index.
fn read(bytes: &[u8]) -> Result<Vec<Entry>, FormatError> {
    let at = bytes.len().saturating_sub(FOOTER_LEN);
    let footer = Footer::parse(&bytes[at..], bytes.len() as u64)?;
    let start = footer.index_offset as usize;
    footer.parse_index(&bytes[start..start + footer.index_len as usize], &Limits::default())
}

#[test]
fn a_pack_without_frames_has_an_empty_index() {
    let (bytes, _) = pack(0, &[]);
    assert_eq!(bytes.len(), MAGIC.len() + FOOTER_LEN);
    assert_eq!(read(&bytes).unwrap(), []);
}

#[test]
fn a_pack_cut_anywhere_has_no_footer() {
    let (bytes, _) = pack(1, &[10, 0, 300]);
    for at in 0..bytes.len() {
        let error = read(&bytes[..at]).unwrap_err();
        assert_eq!(error.to_string(), "pack: no footer at the end: the pack was never completed, or is cut");
        assert_eq!(error.code(), ErrorCode::CorruptFrame);
    }
}

#[test]
fn any_bit_flipped_in_index_or_footer_is_an_error() {
    let (bytes, entries) = pack(2, &[10, 0, 30]);
    let index = bytes.len() - FOOTER_LEN - entries.iter().map(|e| 8 + Header::len(e.header.digest.algorithm())).sum::<usize>();
    for at in index..bytes.len() {
        for bit in 0..8 {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            assert!(read(&bad).is_err(), "byte {at}, bit {bit}");
        }
    }
}

#[test]
fn a_footer_that_points_outside_of_its_pack_is_refused() {
    let footer = |offset: u64, length: u64| {
        let mut bytes = index_and_footer(&[], offset);
        bytes[8..16].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    let length = (MAGIC.len() + FOOTER_LEN) as u64;
    assert!(Footer::parse(&footer(8, 0), length).is_ok());
    for (offset, index_len) in [(7, 1), (0, 8), (9, 0), (8, 1), (u64::MAX, 0), (8, u64::MAX), (u64::MAX, u64::MAX), (u64::MAX - 31, 40)] {
        let error = Footer::parse(&footer(offset, index_len), length).unwrap_err().to_string();
        assert_eq!(error, format!("pack: the footer places the index at {offset}+{index_len} in a pack of 40 bytes"));
    }
    assert!(Footer::parse(&footer(8, 0)[1..], length).is_err(), "not a whole footer");
}

#[test]
fn an_index_must_list_frames_back_to_back_and_all_of_them() {
    let (bytes, entries) = pack(3, &[10, 20, 30]);
    let end = entries[2].offset + entries[2].header.frame_len();
    let check = |entries: &[Entry], end: u64| {
        let tail = index_and_footer(entries, end);
        let footer = Footer::parse(&tail[tail.len() - FOOTER_LEN..], end + tail.len() as u64).unwrap();
        footer.parse_index(&tail[..tail.len() - FOOTER_LEN], &Limits::default())
    };
    assert_eq!(check(&entries, end).unwrap(), entries);
    let second = entries[1].offset;
    let cases: Vec<(&str, Vec<Entry>, u64, String)> = vec![
        ("first missing", entries[1..].to_vec(), end, format!("pack: entry 0 lies at {second}, expected 8")),
        (
            "last missing",
            entries[..2].to_vec(),
            end,
            format!("pack: the index lists 2 frames that end at {}; the footer says 2 and {end}", entries[2].offset),
        ),
        ("one twice", vec![entries[0], entries[0]], end, format!("pack: entry 1 lies at 8, expected {second}")),
        (
            "overlap",
            vec![entries[0], Entry { offset: second - 1, ..entries[1] }],
            end,
            format!("pack: entry 1 lies at {}, expected {second}", second - 1),
        ),
        (
            "gap at the end",
            entries.clone(),
            end + 1,
            format!("pack: the index lists 3 frames that end at {end}; the footer says 3 and {}", end + 1),
        ),
    ];
    for (what, entries, end, message) in cases {
        assert_eq!(check(&entries, end).unwrap_err().to_string(), message, "{what}");
    }
    assert_eq!(read(&bytes).unwrap(), entries);
}

#[test]
fn a_count_of_frames_that_lies_is_refused() {
    let (mut bytes, _) = pack(4, &[10]);
    let at = bytes.len() - FOOTER_LEN + 16;
    bytes[at] = 2;
    let end = 8 + 60 + 10 + 4;
    assert_eq!(
        read(&bytes).unwrap_err().to_string(),
        format!("pack: the index lists 1 frames that end at {end}; the footer says 2 and {end}")
    );
}

#[test]
fn an_index_with_a_forged_checksum_over_garbage_is_refused_with_the_entry() {
    let garbage = vec![9; 100];
    let mut tail = index_and_footer(&[], 8);
    tail[8..16].copy_from_slice(&100_u64.to_le_bytes());
    tail[20..24].copy_from_slice(&crc32c::crc32c(&garbage).to_le_bytes());
    let footer = Footer::parse(&tail, 8 + 100 + FOOTER_LEN as u64).unwrap();
    let error = footer.parse_index(&garbage, &Limits::default()).unwrap_err().to_string();
    assert_eq!(error, "pack: entry 0 of the index is malformed");
    assert_eq!(
        footer.parse_index(&garbage[1..], &Limits::default()).unwrap_err().to_string(),
        "pack: the index's length or checksum is wrong"
    );
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn a_pack_is_read_back_and_damage_never_panics(seed in any::<u64>(), lengths in prop::collection::vec(0_usize..200, 0..12)) {
        let (bytes, entries) = pack(seed, &lengths);
        prop_assert_eq!(read(&bytes).unwrap(), entries);
        let mut random = Random(seed);
        for _ in 0..20 {
            let _ = read(&mutate(&bytes, &mut random));
        }
    }
}
