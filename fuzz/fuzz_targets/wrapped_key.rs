#![no_main]
//! A wrapped key that parses is kept as it was.

use libfuzzer_sys::fuzz_target;
use pfr_store::WrappedKey;

fuzz_target!(|text: &str| {
    if let Ok(wrapped) = WrappedKey::parse(text) {
        let kept = wrapped.to_string();
        assert!(kept.len() <= WrappedKey::LONGEST);
        assert_eq!(WrappedKey::parse(&kept).expect("what is kept parses"), wrapped);
    }
});
