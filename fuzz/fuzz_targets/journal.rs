#![no_main]
//! An object of the journal that parses is written and read back as the same, and its key says what
//! it is. A key that parses prints as itself.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::journal::{Journal, Key};

fuzz_target!(|input: &[u8]| {
    let limits = Limits::default();
    if let Ok(text) = std::str::from_utf8(input)
        && let Ok(key) = Key::parse(text)
    {
        assert_eq!(key.to_string(), text);
    }
    let Ok(journal) = Journal::from_bytes(input, &limits) else { return };
    let (key, bytes) = journal.to_object();
    assert_eq!(Journal::parse(&key, &bytes, &limits).expect("just written"), journal);
    assert!(journal.first() <= journal.last);
    let key = Key::parse(&key).expect("just written");
    assert_eq!(key.part, journal.summary.as_ref().map(|part| (part.set.clone(), part.number)));
    assert_eq!(key.set_prefix().is_some(), journal.summary.is_some());
    let bound = Journal::ENVELOPE + journal.records.iter().map(|record| record.bytes()).sum::<u64>();
    assert!(bytes.len() as u64 <= bound);
});
