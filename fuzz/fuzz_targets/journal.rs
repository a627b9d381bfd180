#![no_main]
//! An object of the journal that parses is written and read back as the same.

use libfuzzer_sys::fuzz_target;
use pfr_schema::journal::Journal;
use pfr_schema::{Digest, Limits};

fuzz_target!(|input: &[u8]| {
    let limits = Limits::default();
    let key = format!("journal/0-{}.json", Digest::sha256(input).hex());
    let Ok(journal) = Journal::parse(&key, input, &limits) else { return };
    let (key, bytes) = journal.to_object();
    assert_eq!(Journal::parse(&key, &bytes, &limits).expect("just written"), journal);
    assert!(journal.first() <= journal.last);
});
