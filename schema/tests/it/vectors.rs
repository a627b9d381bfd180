//! Test vectors of the canonical value, for other implementations to check against.

use crate::common::digest;
use pfr_schema::Limits;
use pfr_schema::checkpoint::{Dtype, Layout, Tensor, value_hash};
use serde_json::{Value, json};
use std::path::Path;

struct Case {
    name: &'static str,
    kind: &'static str,
    logical: Dtype,
    storage: Dtype,
    shape: &'static [u64],
    layout: Option<(&'static [i64], u64)>,
    payload: Vec<u8>,
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
fn f64s(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
fn u16s(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn cases() -> Vec<Case> {
    use Dtype::*;
    let case = |name, kind, logical, storage, shape, layout, payload| Case { name, kind, logical, storage, shape, layout, payload };
    let six = [0.0, 1.0, -2.5, 3.0, 4.0, 5.5];
    let every_byte: Vec<u8> = (0..=255).collect();
    vec![
        case("row-major", "recurrent", F32, F32, &[2, 3], Some((&[3, 1], 0)), f32s(&six)),
        case("transposed", "recurrent", F32, F32, &[2, 3], Some((&[1, 2], 0)), f32s(&[0.0, 3.0, 1.0, 4.0, -2.5, 5.5])),
        case(
            "rows padded, after a header",
            "recurrent",
            F32,
            F32,
            &[2, 3],
            Some((&[4, 1], 1)),
            f32s(&[9.0, 0.0, 1.0, -2.5, 9.0, 3.0, 4.0, 5.5, 9.0]),
        ),
        case("backwards", "recurrent", F32, F32, &[2, 3], Some((&[-3, -1], 5)), f32s(&[5.5, 4.0, 3.0, -2.5, 1.0, 0.0])),
        case("stored wider", "recurrent", F32, F64, &[2, 3], Some((&[3, 1], 0)), f64s(&six.map(f64::from))),
        case("stored narrower", "recurrent", F32, Bf16, &[2, 3], Some((&[3, 1], 0)), u16s(&six.map(|v| (v.to_bits() >> 16) as u16))),
        case("another kind", "ssm", F32, F32, &[2, 3], Some((&[3, 1], 0)), f32s(&six)),
        case("another shape", "recurrent", F32, F32, &[3, 2], Some((&[2, 1], 0)), f32s(&six)),
        case("broadcast", "conv", I16, I16, &[2, 3], Some((&[0, 1], 0)), u16s(&[1, 2, 0xffff])),
        case("rank 0", "rng", U64, U64, &[], Some((&[], 1)), [[0; 8], 7_u64.to_le_bytes()].concat()),
        case("no elements", "window", F16, F16, &[3, 0, 2], Some((&[2, 2, 1], 0)), vec![]),
        case(
            "every NaN is one, minus zero stays",
            "mtp",
            F32,
            F32,
            &[6],
            Some((&[1], 0)),
            u32s(&[0x7fc0_0000, 0xffc0_0001, 0x7f80_0001, 0x8000_0000, 0, 0xff80_0000]),
        ),
        case("every fp8e4m3", "other:all", Fp8E4m3, Fp8E4m3, &[16, 16], Some((&[16, 1], 0)), every_byte.clone()),
        case("every fp8e4m3 as f16", "other:all", F16, Fp8E4m3, &[16, 16], Some((&[16, 1], 0)), every_byte.clone()),
        case("every fp8e5m2", "other:all", Fp8E5m2, Fp8E5m2, &[16, 16], Some((&[16, 1], 0)), every_byte.clone()),
        case("every fp8e5m2 as bf16", "other:all", Bf16, Fp8E5m2, &[16, 16], Some((&[16, 1], 0)), every_byte),
        case("half subnormals as doubles", "last-hidden", F64, F16, &[4], Some((&[1], 0)), u16s(&[1, 0x8001, 0x03ff, 0x7c00])),
        case("whole floats as integers", "rng", I8, F32, &[3], Some((&[1], 0)), f32s(&[-128.0, 127.0, 0.0])),
        case("booleans", "other:mask", Bool, Bool, &[2, 2], Some((&[2, 1], 0)), vec![1, 0, 0, 1]),
        case("booleans as numbers", "other:mask", F32, Bool, &[2, 2], Some((&[2, 1], 0)), vec![1, 0, 0, 1]),
        case("opaque", "recurrent", F32, F32, &[2, 3], None, vec![1, 2, 3, 4, 5]),
        // Refused.
        case("minus zero is no integer", "rng", I32, F32, &[2], Some((&[1], 0)), f32s(&[0.0, -0.0])),
        case("a fraction is no integer", "rng", I32, F32, &[2, 2], Some((&[2, 1], 0)), f32s(&[0.0, 1.0, 1.5, 2.0])),
        case("NaN is no integer", "rng", U8, F32, &[1], Some((&[1], 0)), f32s(&[f32::NAN])),
        case("infinity is not in fp8e4m3", "conv", Fp8E4m3, F16, &[1], Some((&[1], 0)), u16s(&[0x7c00])),
        case("a third is no half", "conv", F16, F32, &[1], Some((&[1], 0)), f32s(&[1.0 / 3.0])),
        case("65,536 is no half", "conv", F16, I32, &[1], Some((&[1], 0)), u32s(&[65536])),
        case("300 is no byte", "rng", U8, I16, &[1], Some((&[1], 0)), u16s(&[300])),
        case("2 is no boolean", "other:mask", Bool, Bool, &[2], Some((&[1], 0)), vec![1, 2]),
        case("outside of the payload", "rng", U8, U8, &[2, 3], Some((&[3, 1], 1)), vec![0; 6]),
        case("before the payload", "rng", U8, U8, &[2], Some((&[-1], 0)), vec![0; 6]),
        case("a stride for too few", "rng", U8, U8, &[2, 2], Some((&[1], 0)), vec![0; 6]),
        case("too many elements", "rng", U8, U8, &[1 << 40, 1 << 40], Some((&[0, 0], 0)), vec![0]),
    ]
}

/// The vectors' file.
pub fn vectors() -> Vec<u8> {
    let cases: Vec<Value> = cases()
        .into_iter()
        .map(|case| {
            let mut layout = json!({ "tag": case.name });
            if let Some((strides, offset)) = case.layout {
                layout = json!({ "tag": case.name, "strides": strides, "offset": offset });
            }
            let parsed: Layout = serde_json::from_value(layout.clone()).unwrap();
            let expected = match value_hash(case.kind, case.logical, case.shape, case.storage, &parsed, &case.payload) {
                Ok(hash) => json!({ "payload_hash": pfr_schema::Digest::sha256(&case.payload), "value_hash": hash }),
                Err(error) => json!({ "error": error.code() }),
            };
            json!({
                "name": case.name, "kind": case.kind, "shape": case.shape, "logical_dtype": case.logical, "storage_dtype": case.storage,
                "layout": layout, "payload": hex::encode(&case.payload), "expected": expected,
            })
        })
        .collect();
    let mut text = serde_json::to_string_pretty(&json!({ "abi": "pf.checkpoint.v1", "cases": cases })).unwrap();
    text.push('\n');
    text.into_bytes()
}

#[test]
fn the_canonical_form_is_what_the_document_says_byte_by_byte() {
    // The worked example of docs/checkpoint-abi.md.
    let mut bytes = b"pfv1\nrecurrent\nf32\n".to_vec();
    bytes.extend([2, 0, 0, 0]);
    bytes.extend([2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend([0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0, 0, 0, 0, 0x80, 0, 0, 0xc0, 0x7f]);
    let hash = format!("pfv1:{}", pfr_schema::Digest::sha256(&bytes));
    // The same four numbers as bf16, column by column, rows of three.
    let payload = u16s(&[0x3f80, 0x8000, 1, 0xc000, 0x7fff, 1]);
    let layout = Layout { tag: "column".into(), strides: Some(vec![1, 3]), offset: Some(0) };
    let found = value_hash("recurrent", Dtype::F32, &[2, 2], Dtype::Bf16, &layout, &payload).unwrap();
    assert_eq!(found.to_string(), hash);
    let document = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/checkpoint-abi.md")).unwrap();
    assert!(document.contains(&hash), "docs/checkpoint-abi.md does not have {hash}");
    let payload_hash = pfr_schema::Digest::sha256(&payload).to_string();
    assert!(document.contains(&payload_hash), "docs/checkpoint-abi.md does not have {payload_hash}");
    // The bytes of the canonical form, as the page writes them.
    let form = document.split("Canonical form, 55 bytes:").nth(1).and_then(|rest| rest.split("```").nth(1)).unwrap();
    let written: String = form.lines().skip(1).map(|line| line.split("  ").next().unwrap_or_default().replace(' ', "")).collect();
    assert_eq!(written, hex::encode(&bytes));
    assert_eq!(bytes.len(), 55);
}

#[test]
fn vectors_agree_and_differ_where_their_names_say() {
    let document: Value = serde_json::from_slice(&vectors()).unwrap();
    let hash = |name: &str| {
        let case = document["cases"].as_array().unwrap().iter().find(|case| case["name"] == name).unwrap();
        case["expected"]["value_hash"].as_str().unwrap_or_else(|| panic!("{case}")).to_owned()
    };
    for same in ["transposed", "rows padded, after a header", "backwards", "stored wider", "stored narrower"] {
        assert_eq!(hash(same), hash("row-major"), "{same}");
    }
    for other in ["another kind", "another shape", "broadcast", "opaque"] {
        assert_ne!(hash(other), hash("row-major"), "{other}");
    }
    let refused: Vec<_> = document["cases"].as_array().unwrap().iter().filter_map(|c| c["expected"]["error"].as_str()).collect();
    assert_eq!(refused.iter().filter(|code| **code == "inexact_storage").count(), 8);
    assert_eq!(refused.iter().filter(|code| **code == "invalid_document").count(), 3);
    assert_eq!(refused.iter().filter(|code| **code == "too_large").count(), 1);
    assert_eq!(refused.len(), 12);
}

#[test]
fn a_program_that_shares_no_code_finds_the_same_hashes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let run =
        std::process::Command::new("python3").arg(folder.join("check_vectors.py")).arg(folder.join("checkpoint-vectors.json")).output();
    match run {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        // The golden file itself is compared without it.
        Err(error) => pfr_testkit::run::skip("python", &format!("the independent check needs python3 ({error})")),
    }
}

#[test]
fn the_prefix_vector_of_the_document_is_what_the_code_computes() {
    let fingerprint = digest("deployment");
    let tokens: Vec<u32> = (0..20).collect();
    let key = |count: usize| pfr_schema::prefix::key(&fingerprint, "tenant", None, &tokens[..count]);
    let document = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/checkpoint-abi.md")).unwrap();
    let links = [("h₀ = ", key(0).hex()), ("h₁ = ", key(16).hex()), ("h₂ = ", key(20).to_string())];
    for needed in links.map(|(link, key)| format!("{link}{key}")).into_iter().chain([fingerprint.to_string()]) {
        assert!(document.contains(&needed), "docs/checkpoint-abi.md does not have {needed}");
    }
}

#[test]
fn describing_an_opaque_payload_attests_its_bytes_as_a_row_of_u8() {
    let payload = vec![1, 2, 3];
    let layout = Layout { tag: "vendor".into(), strides: None, offset: None };
    let limits = Limits::default();
    let tensor = Tensor::describe("a".into(), "conv".into(), None, vec![9], Dtype::F32, Dtype::F16, layout, &payload, &limits).unwrap();
    let row = value_hash("conv", Dtype::U8, &[3], Dtype::U8, &Layout::row_major(&[3]), &payload).unwrap();
    assert_eq!(tensor.value_hash, row);
}
