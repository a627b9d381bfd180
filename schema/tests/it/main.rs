//! Tests of the formats, in one binary so that they link once. Each module tests the module of its
//! name.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod checkpoint;
mod codec;
mod common;
mod compression;
mod container;
mod digest;
mod errors;
mod flat;
mod frame;
mod golden;
mod hostile;
mod json;
mod llama;
mod names;
mod pack;
mod ranges;
mod run;
mod snapshot;
mod tensor;
mod tree;
mod values;
mod vectors;
