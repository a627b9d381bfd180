#![no_main]
//! Each ProcessFork image or page manifest that the parser accepts is within all limits, and each
//! layer name in it is a valid file name.

use libfuzzer_sys::fuzz_target;
use pfr_import_processfork::cache::Cache;
use pfr_import_processfork::image::{Image, MAX_LAYERS};
use pfr_import_processfork::order::order;
use pfr_schema::flat::FlatManifest;
use pfr_schema::{Digest, Limits};
use std::collections::HashSet;

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    if let Ok(image) = Image::parse(bytes) {
        assert_eq!(image.digest, Digest::sha256(bytes));
        assert!(image.parents.len() <= 2 && image.layers.len() <= MAX_LAYERS);
        let names: HashSet<&str> = image.layers.iter().map(|layer| layer.name.as_str()).collect();
        assert_eq!(names.len(), image.layers.len());
        for name in names {
            assert!(name.len() <= 255 && !name.starts_with('.') && !name.contains(|c: char| c == '/' || c == '\\' || c.is_control()));
        }
        assert_eq!(order(&[(image.digest, image.parents)]), [0]);
    }
    if let Ok(Cache::Pages { manifest, verbatim }) = Cache::parse(bytes, &limits) {
        let canonical = manifest.to_bytes();
        assert_eq!(canonical == bytes, verbatim);
        assert_eq!(FlatManifest::parse(&canonical, &limits).expect("the parser accepts what we write"), manifest);
    }
});
