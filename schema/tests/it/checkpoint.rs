use crate::common::{Random, assert_refused, cases, digest, mutate, small_limits};
use pfr_schema::ErrorCode::{InvalidDocument, TooLarge};
use pfr_schema::checkpoint::{ABI, Checkpoint, Dtype, Key, Layout, Tensor, coherent, rank};
use pfr_schema::snapshot::{Descriptor, RANK, SnapshotConfig};
use pfr_schema::{FormatError, Limits, media_type};
use proptest::prelude::*;

pub fn checkpoint() -> Checkpoint {
    let tensor = |name: &str, kind: &str, layout| Tensor {
        name: name.into(),
        kind: kind.into(),
        layer: Some(3),
        shape: vec![16, 128],
        logical_dtype: Dtype::F32,
        storage_dtype: Dtype::F32,
        layout,
        payload_hash: digest(name),
        payload_bytes: 8192,
        value_hash: format!("pfv1:{}", digest("value")).parse().unwrap(),
    };
    let affine = Layout { tag: "row-major".into(), strides: Some(vec![128, 1]), offset: Some(0) };
    let opaque = Layout { tag: "vendor".into(), strides: None, offset: None };
    Checkpoint {
        abi: ABI.into(),
        key: Key {
            scheme: "pf-prefix-v1".into(),
            prefix: digest("prefix"),
            tokens: 8192,
            alignment: 64,
            salt: "tenant".into(),
            adapter: None,
        },
        tensors: vec![tensor("layers.3.recurrent", "recurrent", affine), tensor("sampler", "other:x", opaque)],
    }
}

fn text() -> String {
    String::from_utf8(checkpoint().to_bytes()).unwrap()
}

fn parse(text: &str) -> Result<Checkpoint, FormatError> {
    Checkpoint::parse(text.as_bytes(), &Limits::default())
}

#[test]
fn a_checkpoint_is_read_back_as_it_was_written() {
    assert_eq!(parse(&text()).unwrap(), checkpoint());
    for kind in ["recurrent", "conv", "ssm", "window", "mtp", "last-hidden", "rng", "other:anything"] {
        assert!(parse(&text().replace("other:x", kind)).is_ok(), "{kind}");
    }
}

#[test]
fn every_refusal_of_a_checkpoint_names_the_path() {
    let at = |path: &str, expected: &str, found: &str| format!("checkpoint: at {path}: expected {expected}, found {found}");
    let kinds = "recurrent, conv, ssm, window, mtp, last-hidden, rng or other:<name>";
    let table = [
        ("abi", "pf.checkpoint.v1", "pf.checkpoint.v2", at("$.abi", r#""pf.checkpoint.v1""#, r#""pf.checkpoint.v2""#)),
        (
            "alignment",
            r#""alignment":64"#,
            r#""alignment":0"#,
            at("$.key.tokens", "a multiple of a positive alignment", "8192 tokens, alignment 0"),
        ),
        (
            "boundary",
            r#""tokens":8192"#,
            r#""tokens":8191"#,
            at("$.key.tokens", "a multiple of a positive alignment", "8191 tokens, alignment 64"),
        ),
        ("name twice", "sampler", "layers.3.recurrent", at("$.tensors[1].name", "every name once", r#""layers.3.recurrent" again"#)),
        ("kind", "other:x", "others", at("$.tensors[1].kind", kinds, r#""others""#)),
        ("kind without a name", "other:x", "other:", at("$.tensors[1].kind", kinds, r#""other:""#)),
        ("strides", "[128,1]", "[128]", at("$.tensors[0].layout.strides", "one stride for each dimension", "[128]")),
        ("no offset", r#","offset":0"#, "", at("$.tensors[0].layout.offset", "an offset, since there are strides", "none")),
        ("only an offset", r#""strides":[128,1],"#, "", at("$.tensors[0].layout.offset", "no offset, since there are no strides", "0")),
        (
            "an element too far",
            r#""offset":0"#,
            r#""offset":1"#,
            at("$.tensors[0].layout", "elements within the payload's 2048", "elements 1 to 2048"),
        ),
        (
            "an element before the payload",
            "[128,1]",
            "[128,-1]",
            at("$.tensors[0].layout", "elements within the payload's 2048", "elements -127 to 1920"),
        ),
        (
            "wider elements",
            r#""storage_dtype":"f32""#,
            r#""storage_dtype":"f64""#,
            at("$.tensors[0].layout", "elements within the payload's 1024", "elements 0 to 2047"),
        ),
        (
            "a stride too few",
            r#""shape":[16,128]"#,
            r#""shape":[16,0,128]"#,
            at("$.tensors[0].layout.strides", "one stride for each dimension", "[128, 1]"),
        ),
        ("no name", "sampler", "", at("$.tensors[1].name", "1 to 200 bytes without control characters", r#""""#)),
        (
            "a kind of two lines",
            "other:x",
            r"other:\n",
            at("$.tensors[1].kind", "1 to 200 bytes without control characters", r#""other:\n""#),
        ),
    ];
    for (what, from, to, message) in table {
        assert!(text().contains(from), "{what}");
        assert_refused(what, parse(&text().replacen(from, to, 1)), &message, InvalidDocument);
    }
    let huge = text().replacen(r#""payload_bytes":8192"#, r#""payload_bytes":18446744073709551615"#, 1);
    assert_refused(
        "payload",
        parse(&huge),
        "a tensor payload in bytes is too large: 18446744073709551615, the limit is 68719476736",
        TooLarge,
    );
    for (from, to, message) in [
        (r#""salt""#, r#""pepper":1,"salt""#, "checkpoint: at $.key.pepper: unknown field"),
        ("pfv1:", "pfv2:", "checkpoint: at $.tensors[0].value_hash: invalid digest"),
        ("pfv1:sha256", "pfv1:blake3", "checkpoint: at $.tensors[0].value_hash: invalid digest"),
        (r#""logical_dtype":"f32""#, r#""logical_dtype":"F32""#, "checkpoint: at $.tensors[0].logical_dtype"),
        (r#""shape":[16,128]"#, r#""shape":[16,-1]"#, "checkpoint: at $.tensors[0].shape[1]: invalid value"),
        (r#""prefix":"sha256"#, r#""prefix":"SHA256"#, "checkpoint: at $.key.prefix: invalid digest"),
    ] {
        let error = parse(&text().replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
}

#[test]
fn a_checkpoint_has_at_most_as_many_tensors_as_the_limit() {
    let mut checkpoint = checkpoint();
    let mut third = checkpoint.tensors[0].clone();
    third.name = "third".into();
    checkpoint.tensors.push(third);
    let limits = Limits { document_bytes: 1 << 20, ..small_limits() };
    assert_refused(
        "tensors",
        Checkpoint::parse(&checkpoint.to_bytes(), &limits),
        "tensors in a checkpoint is too large: 3, the limit is 2",
        TooLarge,
    );
}

#[test]
fn the_limits_of_the_page_are_the_defaults() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/checkpoint-abi.md")).unwrap();
    let table = page.split("\n## Limits\n").nth(1).unwrap();
    let limits = Limits::default();
    for (row, limit) in [
        ("| tensors | 65,536 |", limits.tensors == 65_536),
        ("| document | 64 MiB |", limits.document_bytes == 64 << 20),
        ("| dimensions | 32 |", pfr_schema::checkpoint::MAX_RANK == 32),
        ("| payload | 64 GiB |", limits.blob_bytes == 64 << 30),
        ("(transposed, backwards, broadcast) | 256 MiB |", pfr_schema::checkpoint::GATHER_BYTES == 256 << 20),
        ("of a tensor that a restore converts | 256 MiB each |", pfr_schema::checkpoint::GATHER_BYTES == 256 << 20),
    ] {
        assert!(table.contains(row) && limit, "{row}");
    }
}

#[test]
fn few_bytes_may_not_stand_for_more_than_a_blob_may_have() {
    let parse = |shape: &str, strides: &str| {
        parse(&text().replacen("[16,128]", shape, 1).replacen("[128,1]", strides, 1)).map_err(|error| error.to_string())
    };
    assert!(parse("[1048576,128]", "[0,1]").is_ok());
    let error = parse("[1073741824,128]", "[0,1]").unwrap_err();
    assert_eq!(
        error,
        "checkpoint: a tensor's logical value in bytes is too large: 549755813888, the limit is 68719476736"
            .trim_start_matches("checkpoint: ")
    );
    assert!(parse("[18446744073709551615,18446744073709551615]", "[0,0]").unwrap_err().contains("too large"));
    assert!(parse("[18446744073709551615,18446744073709551615,0]", "[0,0,0]").is_ok());
    assert!(parse("[18446744073709551615]", "[9223372036854775807]").is_err());
    // Many of them together neither.
    let mut many = checkpoint();
    let mut tensor = many.tensors[0].clone();
    (tensor.shape, tensor.layout.strides) = (vec![1 << 26, 128], Some(vec![0, 1]));
    many.tensors = (0..3).map(|i| Tensor { name: i.to_string(), ..tensor.clone() }).collect();
    let error = Checkpoint::parse(&many.to_bytes(), &Limits::default()).unwrap_err();
    assert_eq!(error.to_string(), "the logical values of a checkpoint in bytes is too large: 103079215104, the limit is 68719476736");
}

#[test]
fn a_large_payload_lies_in_order_or_is_refused() {
    let parse = |shape: &str, strides: &str| {
        let text = text().replacen("[16,128]", shape, 1).replacen("[128,1]", strides, 1);
        parse(&text.replacen(r#""payload_bytes":8192"#, r#""payload_bytes":268435460"#, 1)).map_err(|error| error.code())
    };
    assert_eq!(parse("[4,16777216]", "[16777216,1]").map(|_| ()), Ok(()));
    assert_eq!(parse("[4,16777216]", "[1,4]").map(|_| ()), Err(TooLarge));
}

fn key(tokens: u64) -> Key {
    Key { tokens, alignment: 1, ..checkpoint().key }
}

#[test]
fn a_snapshot_is_about_one_boundary_of_one_prefix() {
    let config = |boundary, prefix: Option<u64>| SnapshotConfig { boundary, prefix: prefix.map(key), ..SnapshotConfig::default() };
    let (here, there) = (key(64), key(65));
    for (config, checkpoints) in [
        (config(None, None), vec![]),
        (config(None, None), vec![(0, &here), (1, &here)]),
        (config(Some(64), Some(64)), vec![(3, &here)]),
        (config(Some(64), None), vec![(0, &here)]),
        (config(None, Some(64)), vec![(0, &here)]),
    ] {
        coherent(&config, &checkpoints).unwrap();
    }
    for (config, checkpoints, path) in [
        (config(Some(64), Some(65)), vec![], "snapshot: at config.boundary: expected 65, as config.prefix.tokens, found 64"),
        (config(Some(64), None), vec![(0, &there)], "snapshot: at checkpoint.key.tokens: expected 64, as config.boundary, found 65"),
        (config(None, Some(64)), vec![(0, &there)], "snapshot: at checkpoint.key: expected pf-prefix-v1"),
        (config(None, None), vec![(0, &here), (1, &there)], "snapshot: at checkpoint.key: expected pf-prefix-v1"),
        (
            config(None, None),
            vec![(1, &here), (1, &here)],
            "snapshot: at layers: expected one checkpoint for each rank, found a second one for rank 1",
        ),
    ] {
        let error = coherent(&config, &checkpoints).unwrap_err();
        assert!(error.to_string().starts_with(path), "{error}");
        assert_eq!(error.code(), InvalidDocument);
    }
}

#[test]
fn a_layer_of_no_rank_is_of_rank_0_and_a_rank_has_one_spelling() {
    let layer = |rank: Option<&str>| Descriptor {
        media_type: media_type::CHECKPOINT.into(),
        digest: digest("x"),
        size: 1,
        annotations: rank.map(|rank| (RANK.to_owned(), rank.to_owned())).into_iter().collect(),
    };
    for (text, expected) in [(None, 0), (Some("0"), 0), (Some("17"), 17), (Some("4294967295"), u32::MAX)] {
        assert_eq!(rank(&layer(text)).unwrap(), expected);
    }
    for text in ["", "+1", "01", "-1", "4294967296", "one"] {
        assert_eq!(rank(&layer(Some(text))).unwrap_err().code(), InvalidDocument, "{text}");
    }
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn what_parses_is_read_back_from_its_own_bytes(seed in any::<u64>()) {
        let mut random = Random(seed);
        for _ in 0..50 {
            if let Ok(checkpoint) = Checkpoint::parse(&mutate(text().as_bytes(), &mut random), &Limits::default()) {
                prop_assert_eq!(Checkpoint::parse(&checkpoint.to_bytes(), &Limits::default()).unwrap(), checkpoint);
            }
        }
    }
}
