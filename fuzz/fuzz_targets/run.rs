#![no_main]
//! A run that parses is its own bytes.

use libfuzzer_sys::fuzz_target;
use pfr_schema::run::{MAX_PAGES, MIN_PAGES, Run, cut};
use pfr_schema::{Container, Kind, Limits};

fuzz_target!(|bytes: &[u8]| {
    let limits = Limits::default();
    let Ok(run) = Run::parse(bytes, &limits) else { return };
    assert_eq!(run.to_bytes(), bytes);
    let shape = run.shape();
    assert_eq!(run.digests().len(), shape.pages as usize * usize::from(shape.components));
    let lengths = cut(run.digests());
    assert_eq!(lengths.iter().sum::<usize>(), run.digests().len());
    assert!(lengths.iter().rev().skip(1).all(|l| (MIN_PAGES..=MAX_PAGES).contains(l)));
    let children = Container::parse(Kind::Run, bytes, &limits).ok().flatten().expect("the same parser").children();
    assert!(children.iter().all(|c| c.size == Some(shape.page_bytes)));
});
