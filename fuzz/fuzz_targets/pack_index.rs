#![no_main]
//! A pack's tail that parses is its own bytes.
//!
//! The input is an index and a footer; the pack before them is as long as the footer says. The
//! index gets a right checksum and length, so that mutation reaches the entries.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::pack::{FOOTER_LEN, Footer, index_and_footer};

fuzz_target!(|input: &[u8]| {
    let limits = Limits::default();
    let Some(index_len) = input.len().checked_sub(FOOTER_LEN) else { return };
    let mut bytes = input.to_vec();
    let (index, footer) = bytes.split_at_mut(index_len);
    let _ = Footer::parse(footer, input.len() as u64);
    footer[8..16].copy_from_slice(&(index_len as u64).to_le_bytes());
    footer[20..24].copy_from_slice(&crc32c::crc32c(index).to_le_bytes());
    let mut offset = [0; 8];
    offset.copy_from_slice(&footer[..8]);
    let Some(pack_len) = u64::from_le_bytes(offset).checked_add(input.len() as u64) else { return };
    let Ok(footer) = Footer::parse(footer, pack_len) else { return };
    let Ok(entries) = footer.parse_index(index, &limits) else { return };
    assert_eq!(entries.len(), footer.frames as usize);
    assert_eq!(index_and_footer(&entries, footer.index_offset), bytes);
});
