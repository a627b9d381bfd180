#![no_main]
//! The manifest of an export and the index of a layout: what parses is read back from its own
//! bytes, and keeps the limits.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::export::{Entry, Export, Index, MANIFESTS};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    if let Ok(Some(export)) = Export::parse(bytes, &limits) {
        assert!(!export.layers.is_empty() && export.layers.len() as u64 <= limits.layers);
        if let Ok(document) = export.to_document(&limits) {
            assert_eq!(Export::parse(&document.bytes, &limits).expect("bytes of ours parse"), Some(export));
        }
    }
    if let Ok(mut index) = Index::parse(bytes) {
        assert!(index.manifests.len() as u64 <= MANIFESTS);
        if let Ok(written) = index.to_bytes() {
            assert_eq!(Index::parse(&written).expect("bytes of ours parse"), index);
        }
        let count = index.manifests.len();
        if let Some(entry) = index.manifests.first().cloned() {
            let _ = (entry.repository(), entry.tag(), Entry::may_be_export(&entry));
            index.add(entry);
            assert!(index.manifests.len() <= count + 1);
        }
    }
});
