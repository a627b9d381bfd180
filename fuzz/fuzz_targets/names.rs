#![no_main]
//! A name or reference that parses means what it prints.

use libfuzzer_sys::fuzz_target;
use pfr_schema::api::TagState;
use pfr_schema::{Digest, Reference, RepositoryName, Selector, Tag};

fuzz_target!(|text: &str| {
    if let Ok(reference) = text.parse::<Reference>() {
        assert_eq!(reference.to_string().parse::<Reference>().expect("prints what parses"), reference);
        assert!(reference.registry.is_none_or(|r| !r.contains(['@', '?', '#', '\\', '%', ' '])));
    }
    if let Ok(selector) = text.parse::<Selector>() {
        assert_eq!(selector.to_string().parse::<Selector>().expect("prints what parses"), selector);
    }
    if let Ok(name) = text.parse::<RepositoryName>() {
        assert_eq!(name.as_str(), text);
        assert!(text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._-/".contains(&b)));
        assert!(
            text.split('/').all(|c| c.starts_with(|c: char| c.is_ascii_alphanumeric()) && c.ends_with(|c: char| c.is_ascii_alphanumeric()))
        );
    }
    if let Ok(tag) = text.parse::<Tag>() {
        assert_eq!(tag.as_str(), text);
        assert!(!text.contains(['/', ':', '@', '~']) && !text.starts_with('.'));
    }
    if let Ok(digest) = text.parse::<Digest>() {
        assert_eq!(digest.to_string(), text);
        assert_eq!(Digest::from_key(&digest.to_key()).expect("a key of ours"), digest);
    }
    if let Ok(state) = text.parse::<TagState>() {
        assert_eq!(state.to_string(), text);
    }
});
