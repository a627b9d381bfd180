#![no_main]
//! A stream of frames parses alike however it is split, and its frames encode to the same bytes
//! again.
//!
//! The first byte of the input is the length of the pieces. Mutated input would hardly ever have
//! right checksums, so `mend` writes these into headers and the end mark first.

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use pfr_schema::frame::{Event, Header, Parser, encode, end_mark};
use pfr_schema::{Algorithm, FormatError, Limits};

type Frames = Vec<(Header, Vec<u8>, u32)>;

fn parse(bytes: &[u8], piece: usize, limits: &Limits) -> Result<Frames, FormatError> {
    let mut parser = Parser::new(limits.clone());
    let mut frames: Frames = vec![];
    for piece in bytes.chunks(piece) {
        parser.push(Bytes::copy_from_slice(piece));
        while let Some(event) = parser.next()? {
            match event {
                Event::Begin(header) => frames.push((header, vec![], 0)),
                Event::Payload(bytes) => frames.last_mut().expect("a frame has begun").1.extend_from_slice(&bytes),
                Event::Finish { checksum } => frames.last_mut().expect("a frame has begun").2 = checksum,
                Event::End => {}
            }
        }
    }
    parser.finish()?;
    Ok(frames)
}

fn mend(bytes: &mut [u8]) {
    let mut at = 0;
    let mut frames = 0_u64;
    while let Some(rest) = bytes.get_mut(at..) {
        if rest.len() >= 16 && rest.starts_with(b"PFen") {
            rest[..16].copy_from_slice(&end_mark(frames));
            return;
        }
        let Some(len) = rest.get(7).copied().and_then(Algorithm::from_number).map(Header::len) else { return };
        if rest.len() < len {
            return;
        }
        let checksum = crc32c::crc32c(&rest[..len - 4]);
        rest[len - 4..len].copy_from_slice(&checksum.to_le_bytes());
        let mut stored = [0; 8];
        stored.copy_from_slice(&rest[16..24]);
        let Ok(stored) = usize::try_from(u64::from_le_bytes(stored)) else { return };
        at = at.saturating_add(len).saturating_add(stored).saturating_add(4);
        frames += 1;
    }
}

fuzz_target!(|input: &[u8]| {
    let limits = Limits { blob_bytes: 1 << 16, document_bytes: 1 << 16, ..Limits::default() };
    let Some((piece, bytes)) = input.split_first() else { return };
    let mut bytes = bytes.to_vec();
    mend(&mut bytes);
    let whole = parse(&bytes, bytes.len().max(1), &limits);
    let pieces = parse(&bytes, usize::from(*piece) + 1, &limits);
    match (&whole, &pieces) {
        (Ok(a), Ok(b)) => assert_eq!(a, b),
        (Err(a), Err(b)) => assert_eq!(a.to_string(), b.to_string()),
        _ => panic!("{whole:?} as a whole, {pieces:?} in pieces"),
    }
    if let Ok(frames) = whole {
        let mut again = vec![];
        for (header, payload, checksum) in &frames {
            let mut frame = encode(header, payload);
            assert_eq!(frame.len() as u64, header.frame_len());
            let end = frame.len() - 4;
            frame[end..].copy_from_slice(&checksum.to_le_bytes());
            again.extend_from_slice(&frame);
        }
        again.extend_from_slice(&end_mark(frames.len() as u64));
        assert_eq!(again, bytes);
    }
});
