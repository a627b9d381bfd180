use crate::common::{GEOMETRY, assert_refused, cases, manifest, mutate, parts, small_limits};
use crate::common::{Random, digest};
use pfr_schema::ErrorCode::{InvalidDocument, TooLarge};
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Algorithm, Digest, Limits};
use proptest::prelude::*;

fn hex(digit: char) -> String {
    digit.to_string().repeat(64)
}

fn valid() -> String {
    let (a, b, c, d) = (hex('a'), hex('b'), hex('c'), hex('d'));
    r#"{"layout":"paged-batchinvariant-v1","page_size_tokens":16,"n_layers":2,"n_heads":2,"head_dim":4,"dtype":"bf16","#.to_owned()
        + &format!(r#""pages":[{{"ix":3,"k":"sha256:{a}","v":"sha256:{b}"}},{{"ix":7,"k":"sha256:{c}","v":"sha256:{d}"}}],"#)
        + r#""logical_seqs":[{"id":"x","page_ixs":[3,7,3],"fill_in_last_page":5},{"id":"y","page_ixs":[],"fill_in_last_page":0}]}"#
}

fn parse(text: &str) -> Result<FlatManifest, pfr_schema::FormatError> {
    FlatManifest::parse(text.as_bytes(), &Limits::default())
}

#[test]
fn a_valid_manifest_is_read_as_written() {
    let flat = parse(&valid()).unwrap();
    assert_eq!(flat.geometry(), &GEOMETRY);
    assert_eq!(flat.page_bytes(), 2 * 16 * 2 * 4 * 2);
    assert_eq!(flat.pages().iter().map(|p| p.ix).collect::<Vec<_>>(), [3, 7]);
    assert_eq!(flat.sequences()[0].page_ixs, [3, 7, 3]);
    assert_eq!(flat.sequences()[0].tokens(16), 37);
    assert_eq!(flat.sequences()[1].tokens(16), 0);
    assert_eq!(flat.to_bytes(), valid().as_bytes());
}

#[test]
fn every_refusal_names_the_path_what_was_expected_and_what_was_found() {
    let (a, b) = (hex('a'), hex('b'));
    let upper = hex('A');
    // (what is wrong, text to replace, replacement, message)
    let table: &[(&str, &str, &str, &str)] = &[
        (
            "unknown layout",
            "paged-batchinvariant-v1",
            "paged-batchinvariant-v2",
            r#"page manifest: at $.layout: expected "paged-batchinvariant-v1", found "paged-batchinvariant-v2""#,
        ),
        (
            "unknown dtype",
            "bf16",
            "fp4",
            "page manifest: at $.dtype: unknown variant `fp4`, expected one of `bf16`, `f16`, `f32`, `fp8e4m3`",
        ),
        (
            "dtype in upper case",
            "bf16",
            "BF16",
            "page manifest: at $.dtype: unknown variant `BF16`, expected one of `bf16`, `f16`, `f32`, `fp8e4m3`",
        ),
        ("duplicate ix", r#""ix":7"#, r#""ix":3"#, "page manifest: at $.pages[1].ix: expected every ix once, found 3 again"),
        ("unsorted pages", r#""ix":7"#, r#""ix":2"#, "page manifest: at $.pages[1].ix: expected pages sorted by ix, found 2 after 3"),
        (
            "duplicate id",
            r#""id":"y""#,
            r#""id":"x""#,
            r#"page manifest: at $.logical_seqs[1].id: expected every id once, found "x" again"#,
        ),
        (
            "unsorted sequences",
            r#""id":"y""#,
            r#""id":"a""#,
            r#"page manifest: at $.logical_seqs[1].id: expected sequences sorted by id, found "a" after "x""#,
        ),
        (
            "a sequence naming a missing page",
            "[3,7,3]",
            "[3,7,4]",
            "page manifest: at $.logical_seqs[0].page_ixs[2]: expected the ix of a page in $.pages, found 4",
        ),
        (
            "fill of a whole page",
            r#""fill_in_last_page":5"#,
            r#""fill_in_last_page":16"#,
            "page manifest: at $.logical_seqs[0].fill_in_last_page: expected less than the page size 16 (0 = full), found 16",
        ),
        (
            "fill without a page",
            r#""fill_in_last_page":0"#,
            r#""fill_in_last_page":1"#,
            "page manifest: at $.logical_seqs[1].fill_in_last_page: expected 0 for a sequence without pages, found 1",
        ),
        (
            "zero page size",
            r#""page_size_tokens":16"#,
            r#""page_size_tokens":0"#,
            "page geometry: at $.page_size_tokens: expected a positive number, found 0",
        ),
        ("zero layers", r#""n_layers":2"#, r#""n_layers":0"#, "page geometry: at $.n_layers: expected a positive number, found 0"),
        ("zero heads", r#""n_heads":2"#, r#""n_heads":0"#, "page geometry: at $.n_heads: expected a positive number, found 0"),
        ("zero dim", r#""head_dim":4"#, r#""head_dim":0"#, "page geometry: at $.head_dim: expected a positive number, found 0"),
        (
            "a negative number",
            r#""n_layers":2"#,
            r#""n_layers":-2"#,
            "page manifest: at $.n_layers: invalid value: integer `-2`, expected u32",
        ),
        (
            "more than 32 bits",
            r#""ix":7"#,
            r#""ix":4294967296"#,
            "page manifest: at $.pages[1].ix: invalid value: integer `4294967296`, expected u32",
        ),
        (
            "upper-case digest",
            &format!("sha256:{a}"),
            &format!("sha256:{upper}"),
            &format!(r#"page manifest: at $.pages[0].k: invalid digest "sha256:{upper}": expected lower-case hex digits"#),
        ),
        (
            "unknown algorithm",
            &format!("sha256:{a}"),
            &format!("sha999:{a}"),
            &format!(r#"page manifest: at $.pages[0].k: invalid digest "sha999:{a}": unknown algorithm; known are sha256, blake3, sha512"#),
        ),
        (
            "mixed algorithms in a page",
            &format!("sha256:{b}"),
            &format!("blake3:{b}"),
            &format!("page manifest: at $.pages[0].v: expected sha256 like the pages before, found blake3:{b}"),
        ),
        (
            "unknown field",
            r#""n_layers""#,
            r#""n_chairs":1,"n_layers""#,
            "page manifest: at $.n_chairs: unknown field `n_chairs`, expected one of `layout`, `page_size_tokens`, `n_layers`, `n_heads`, `head_dim`, `dtype`, `pages`, `logical_seqs`",
        ),
        (
            "unknown field of a page",
            r#"{"ix":7"#,
            r#"{"ixx":7,"ix":7"#,
            "page manifest: at $.pages[1].ixx: unknown field `ixx`, expected one of `ix`, `k`, `v`",
        ),
        ("missing field", r#""dtype":"bf16","#, "", "page manifest: at $: missing field `dtype`"),
        ("a field twice", r#""n_layers":2"#, r#""n_layers":2,"n_layers":2"#, "page manifest: at $: duplicate field `n_layers`"),
        (
            "white space",
            r#""n_layers":2"#,
            r#""n_layers": 2"#,
            "page manifest: at byte 69: expected the canonical bytes (compact JSON in the documented field order), found another spelling of the same document",
        ),
        (
            "fields in another order",
            r#""n_layers":2,"n_heads":2"#,
            r#""n_heads":2,"n_layers":2"#,
            "page manifest: at byte 61: expected the canonical bytes (compact JSON in the documented field order), found another spelling of the same document",
        ),
        (
            "an escape that is not needed",
            r#""id":"y""#,
            r#""id":"\u0079""#,
            "page manifest: at byte 526: expected the canonical bytes (compact JSON in the documented field order), found another spelling of the same document",
        ),
        ("cut", r#"}]}"#, r#"}]"#, "page manifest: at $: EOF while parsing an object"),
        ("trailing bytes", r#"}]}"#, r#"}]}x"#, "page manifest: at $: trailing characters"),
        (
            "a trailing line break",
            r#"}]}"#,
            "}]}\n",
            "page manifest: at byte 567: expected the canonical bytes (compact JSON in the documented field order), found another spelling of the same document",
        ),
    ];
    for &(what, from, to, message) in table {
        let text = valid();
        assert!(text.contains(from), "{what}");
        let error = parse(&text.replacen(from, to, 1)).unwrap_err();
        assert_eq!(error.code(), InvalidDocument, "{what}");
        // The JSON parser adds a position of its own.
        assert_eq!(error.to_string().split(" at line ").next().unwrap(), message, "{what}");
    }
}

#[test]
fn a_manifest_in_pretty_print_is_another_spelling() {
    let value: serde_json::Value = serde_json::from_str(&valid()).unwrap();
    let error = parse(&serde_json::to_string_pretty(&value).unwrap()).unwrap_err().to_string();
    assert!(error.contains("at byte 1: expected the canonical bytes"), "{error}");
}

#[test]
fn another_spelling_is_found_anywhere_in_a_long_manifest() {
    let text = String::from_utf8(manifest(1, 300).to_bytes()).unwrap();
    assert!(text.len() > 40_000, "{} bytes are compared at once", text.len());
    let spellings = text.match_indices(':').filter(|(at, _)| text.as_bytes()[at - 1] == b'"').step_by(7);
    let at = |error: String, at: usize| assert!(error.contains(&format!("at byte {at}: expected the canonical bytes")), "{at}: {error}");
    for (colon, _) in spellings {
        at(parse(&format!("{}: {}", &text[..colon], &text[colon + 1..])).unwrap_err().to_string(), colon + 1);
    }
    at(parse(&format!("{text}\n")).unwrap_err().to_string(), text.len());
}

#[test]
fn a_page_whose_size_overflows_64_bits_is_too_large() {
    let huge = u32::MAX.to_string();
    let mut text = valid();
    for field in ["page_size_tokens\":16", "n_layers\":2", "n_heads\":2", "head_dim\":4"] {
        let name = field.split('"').next().unwrap();
        text = text.replace(&format!("\"{field}"), &format!("\"{name}\":{huge}"));
    }
    let message =
        "a page in bytes (layers × tokens × heads × head_dim × element) is too large: 18446744073709551615, the limit is 268435456";
    assert_refused("overflow", parse(&text), message, TooLarge);
}

#[test]
fn the_largest_page_allowed_is_allowed_and_one_element_more_is_not() {
    let limits = Limits::default();
    let geometry = |n_layers| Geometry { page_size_tokens: 1 << 10, n_layers, n_heads: 1 << 5, head_dim: 1 << 6, dtype: Dtype::Bf16 };
    assert_eq!(geometry(64).page_bytes(&limits).unwrap(), 256 << 20);
    assert_eq!(geometry(65).page_bytes(&limits).unwrap_err().code(), TooLarge);
}

#[test]
fn dtypes_are_spelled_and_sized_as_processfork_has_them() {
    let table = [(Dtype::Bf16, "bf16", 2), (Dtype::F16, "f16", 2), (Dtype::F32, "f32", 4), (Dtype::Fp8E4m3, "fp8e4m3", 1)];
    for (dtype, name, bytes) in table {
        assert_eq!(serde_json::to_value(dtype).unwrap(), name);
        assert_eq!(dtype.bytes(), bytes);
    }
}

#[test]
fn limits_are_enforced_at_the_limit_plus_one() {
    let limits = small_limits();
    let page = |ix| Page { ix, k: digest("k"), v: digest("v") };
    let sequence = |id: &str, pages: usize| Sequence { id: id.into(), page_ixs: vec![0; pages], fill_in_last_page: 0 };
    let new = |pages: u32, sequences: Vec<Sequence>| FlatManifest::new(GEOMETRY, (0..pages).map(page).collect(), sequences, &limits);
    assert!(new(3, vec![sequence("a", 4), sequence("b", 4)]).is_ok());
    assert_refused("pages", new(4, vec![]), "pages in a manifest is too large: 4, the limit is 3", TooLarge);
    let three = vec![sequence("a", 1), sequence("b", 1), sequence("c", 1)];
    assert_refused("sequences", new(1, three), "sequences in a manifest is too large: 3, the limit is 2", TooLarge);
    let nine = vec![sequence("a", 5), sequence("b", 4)];
    assert_refused("listed", new(1, nine), "page indices in sequences is too large: 9, the limit is 8", TooLarge);
    let text = valid();
    assert!(FlatManifest::parse(text.as_bytes(), &Limits { document_bytes: text.len() as u64, ..Limits::default() }).is_ok());
    let tight = Limits { document_bytes: text.len() as u64 - 1, ..Limits::default() };
    assert_refused(
        "document",
        FlatManifest::parse(text.as_bytes(), &tight),
        &format!("page manifest is too large: {}, the limit is {}", text.len(), text.len() - 1),
        TooLarge,
    );
}

#[test]
fn mixed_algorithms_across_pages_are_refused() {
    let blake = |text: &str| Digest::of(Algorithm::Blake3, text.as_bytes());
    let pages = vec![Page { ix: 0, k: digest("a"), v: digest("b") }, Page { ix: 1, k: blake("c"), v: blake("d") }];
    let message = format!("page manifest: at $.pages[1].k: expected sha256 like the pages before, found {}", blake("c"));
    assert_refused("mixed", FlatManifest::new(GEOMETRY, pages.clone(), vec![], &Limits::default()), &message, InvalidDocument);
    assert!(FlatManifest::new(GEOMETRY, pages[1..].to_vec(), vec![], &Limits::default()).is_ok(), "blake3 throughout is fine");
}

#[test]
fn a_manifest_without_pages_is_valid() {
    let empty = FlatManifest::new(GEOMETRY, vec![], vec![], &Limits::default()).unwrap();
    assert_eq!(FlatManifest::parse(&empty.to_bytes(), &Limits::default()).unwrap(), empty);
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn what_is_written_is_read_back_and_the_order_of_parts_does_not_matter(seed in any::<u64>(), pages in 0_usize..60) {
        let (mut list, mut sequences) = parts(seed, pages);
        let flat = manifest(seed, pages);
        let bytes = flat.to_bytes();
        prop_assert_eq!(&FlatManifest::parse(&bytes, &Limits::default()).unwrap(), &flat);
        prop_assert_eq!(flat.digest(), Digest::sha256(&bytes));
        list.reverse();
        sequences.reverse();
        let again = FlatManifest::new(GEOMETRY, list, sequences, &Limits::default()).unwrap();
        prop_assert_eq!(again.to_bytes(), bytes);
    }

    #[test]
    fn bytes_that_parse_are_the_bytes_that_would_be_written(seed in any::<u64>(), pages in 0_usize..4) {
        let bytes = manifest(seed, pages).to_bytes();
        let mut random = Random(seed);
        for _ in 0..50 {
            let bytes = mutate(&bytes, &mut random);
            if let Ok(flat) = FlatManifest::parse(&bytes, &Limits::default()) {
                prop_assert_eq!(flat.to_bytes(), bytes);
            }
        }
    }
}
