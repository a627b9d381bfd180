use crate::common::{Random, assert_refused, cases, digest, mutate, small_limits};
use pfr_schema::ErrorCode::{InvalidDocument, TooLarge};
use pfr_schema::checkpoint::{ABI, Checkpoint, Key, Layout, Tensor};
use pfr_schema::{FormatError, Limits};
use proptest::prelude::*;

pub fn checkpoint() -> Checkpoint {
    let tensor = |name: &str, kind: &str, layout| Tensor {
        name: name.into(),
        kind: kind.into(),
        layer: Some(3),
        shape: vec![16, 128],
        logical_dtype: "f32".into(),
        storage_dtype: "f32".into(),
        layout,
        payload_hash: digest(name),
        payload_bytes: 8192,
        value_hash: format!("pfv1:{}", digest("value")),
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
        (
            "value hash",
            "pfv1:",
            "pfv2:",
            at("$.tensors[0].value_hash", "pfv1:<digest>", &format!("{:?}", format!("pfv2:{}", digest("value")))),
        ),
        ("strides", "[128,1]", "[128]", at("$.tensors[0].layout.strides", "one stride for each dimension", "Some([128])")),
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
