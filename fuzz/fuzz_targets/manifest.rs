#![no_main]
//! A manifest that parses stays the same when it is written and parsed again. It never lists a
//! manifest.

use libfuzzer_sys::fuzz_target;
use pfr_schema::snapshot::Manifest;
use pfr_schema::{Container, Kind, Limits};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(manifest) = Manifest::parse(bytes, &limits) else { return };
    let document = manifest.to_document();
    assert_eq!(Manifest::parse(&document.bytes, &limits).expect("a written manifest parses"), manifest);
    let children = Container::Manifest(manifest).children();
    assert!(children.iter().all(|c| c.kind != Kind::Manifest && c.size.is_some_and(|s| s <= limits.blob_bytes)));
});
