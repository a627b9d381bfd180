use crate::common::{Random, assert_refused, cases, digest, mutate, small_limits};
use pfr_schema::ErrorCode::{InvalidDocument, TooLarge};
use pfr_schema::snapshot::{Descriptor, Exactness, MAX_BYTES, Manifest, SnapshotConfig, TITLE};
use pfr_schema::tree::Document;
use pfr_schema::{FormatError, Kind, Limits, media_type};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn config() -> SnapshotConfig {
    SnapshotConfig {
        agent: Some("a-1".into()),
        engine: Some("vllm 0.11".into()),
        deployment: BTreeMap::from([("tp".into(), 8.into()), ("quantization".into(), serde_json::Value::Null)]),
        fingerprint: Some(digest("deployment")),
        boundary: Some(8192),
        parents: vec![digest("parent")],
        exactness: Some(Exactness::BitExact),
        created: Some("2026-01-02T03:04:05Z".into()),
        ..SnapshotConfig::default()
    }
}

fn manifest() -> Manifest {
    let config = Document::new(Kind::Blob, config().to_bytes());
    let layer = |media_type: &str, name: &str| Descriptor {
        media_type: media_type.into(),
        digest: digest(name),
        size: name.len() as u64,
        annotations: BTreeMap::new(),
    };
    let mut attachment = layer(media_type::OCTETS, "notes");
    attachment.annotations.insert(TITLE.into(), "notes.txt".into());
    let layers = vec![layer(media_type::TREE, "tree"), layer(media_type::CHECKPOINT, "checkpoint"), attachment];
    Manifest::snapshot(&config, layers, BTreeMap::from([("label".into(), "value".into())]))
}

fn text() -> String {
    String::from_utf8(manifest().to_document().bytes).unwrap()
}

fn parse(text: &str) -> Result<Manifest, FormatError> {
    Manifest::parse(text.as_bytes(), &Limits::default())
}

#[test]
fn a_snapshot_is_read_back_as_it_was_written() {
    let manifest = manifest();
    let document = manifest.to_document();
    assert_eq!(document.kind, Kind::Manifest);
    let read = Manifest::parse(&document.bytes, &Limits::default()).unwrap();
    assert_eq!(read, manifest);
    assert!(read.is_snapshot());
    assert_eq!(read.layers_of(media_type::TREE).count(), 1);
    assert_eq!(SnapshotConfig::parse(&config().to_bytes(), &Limits::default()).unwrap(), config());
}

#[test]
fn a_configuration_that_says_nothing_is_two_words() {
    assert_eq!(SnapshotConfig::default().to_bytes(), br#"{"parents":[]}"#);
    assert_eq!(SnapshotConfig::parse(b"{}", &Limits::default()).unwrap(), SnapshotConfig::default());
}

#[test]
fn every_refusal_of_a_manifest_names_the_path() {
    let at = |path: &str, expected: &str, found: &str| format!("snapshot manifest: at {path}: expected {expected}, found {found}");
    let table = [
        ("version", r#""schemaVersion":2"#, r#""schemaVersion":1"#, at("$.schemaVersion", "2", "1")),
        (
            "an index",
            r#"2,"mediaType":"application/vnd.oci.image.manifest.v1+json""#,
            r#"2,"mediaType":"application/vnd.oci.image.index.v1+json""#,
            at("$.mediaType", media_type::OCI_MANIFEST, "application/vnd.oci.image.index.v1+json"),
        ),
        ("config of a snapshot", media_type::CONFIG, media_type::OCTETS, at("$.config.mediaType", media_type::CONFIG, media_type::OCTETS)),
        (
            "a manifest as layer",
            media_type::TREE,
            media_type::OCI_MANIFEST,
            at("$.layers[0].mediaType", "a layer, not a manifest", media_type::OCI_MANIFEST),
        ),
        (
            "a manifest as config",
            media_type::CONFIG,
            media_type::OCI_MANIFEST,
            at("$.config.mediaType", "a configuration, not a manifest", media_type::OCI_MANIFEST),
        ),
    ];
    for (what, from, to, message) in table {
        assert!(text().contains(from), "{what}");
        assert_refused(what, parse(&text().replacen(from, to, 1)), &message, InvalidDocument);
    }
    let huge = text().replace(r#""size":4"#, r#""size":18446744073709551615"#);
    assert_refused("size", parse(&huge), "a blob in bytes is too large: 18446744073709551615, the limit is 68719476736", TooLarge);
    let error = parse(&text().replace("sha256:", "SHA256:")).unwrap_err().to_string();
    assert!(error.starts_with("snapshot manifest: at $.config.digest: invalid digest"), "{error}");
}

#[test]
fn a_manifest_that_is_no_snapshot_of_ours_is_still_a_manifest() {
    // Signatures and other artifacts of OCI tools, with fields that we do not know.
    let foreign = text()
        .replace(media_type::SNAPSHOT, "application/vnd.example")
        .replace(media_type::CONFIG, "application/vnd.oci.empty.v1+json")
        .replacen(r#""size""#, r#""data":"e30=","urls":[],"platform":{"os":"x"},"size""#, 1)
        .replacen('{', r#"{"x-unknown":[1,{"a":null}],"#, 1);
    let manifest = parse(&foreign).unwrap();
    assert!(!manifest.is_snapshot());
    assert_eq!(manifest.layers.len(), 3);
}

#[test]
fn limits_of_manifests_and_configurations_are_enforced() {
    let mut many = manifest();
    many.layers.push(many.layers[0].clone());
    let limits = Limits { document_bytes: 1 << 20, ..small_limits() };
    assert_refused(
        "layers",
        Manifest::parse(&many.to_document().bytes, &limits),
        "layers in a manifest is too large: 4, the limit is 3",
        TooLarge,
    );
    let mut large = manifest();
    large.layers.iter_mut().for_each(|layer| layer.size = 800);
    // A tree and a checkpoint. A reader of a snapshot does not load attachments, so they do not
    // count.
    assert_refused(
        "containers",
        Manifest::parse(&large.to_document().bytes, &limits),
        "bytes of nodes in a manifest is too large: 1600, the limit is 1500",
        TooLarge,
    );
    let spaces = vec![b' '; MAX_BYTES as usize + 1];
    for result in [Manifest::parse(&spaces, &Limits::default()).map(drop), SnapshotConfig::parse(&spaces, &Limits::default()).map(drop)] {
        assert_eq!(result.unwrap_err().code(), TooLarge);
    }
}

#[test]
fn configurations_have_at_most_two_parents_and_no_unknown_fields() {
    let parse = |text: &str| SnapshotConfig::parse(text.as_bytes(), &Limits::default());
    let parents = |count: usize| format!(r#"{{"parents":[{}]}}"#, vec![format!("{:?}", digest("p")); count].join(","));
    // `Debug` of a digest has no quotes.
    let parents = |count| parents(count).replace("sha256", "\"sha256").replace(",\"", "\",\"").replace("]}", "\"]}");
    assert_eq!(parse(&parents(2)).unwrap().parents.len(), 2);
    assert_refused(
        "three",
        parse(&parents(3)),
        "snapshot configuration: at $.parents: expected at most 2 parents, found 3",
        InvalidDocument,
    );
    for (text, path) in [
        (r#"{"agents":1}"#, "$.agents"),
        (r#"{"boundary":-1}"#, "$.boundary"),
        (r#"{"exactness":"close"}"#, "$.exactness"),
        (r#"{"deployment":{"a":1e999}}"#, "$.deployment.a"),
        (r#"{} x"#, "$"),
        (r#"[1]"#, "$"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("snapshot configuration: at {path}")), "{text}: {error}");
    }
}

#[test]
fn deep_nesting_is_an_error_and_not_a_stack_overflow() {
    for depth in [200, 1_000_000] {
        let deep = format!(r#"{{"deployment":{{"a":{}"#, "[".repeat(depth));
        let error = SnapshotConfig::parse(deep.as_bytes(), &Limits::default()).unwrap_err().to_string();
        assert!(error.contains("recursion limit exceeded"), "{error}");
        let unknown = text().replacen('{', &format!(r#"{{"x":{}"#, "[".repeat(depth)), 1);
        assert!(Manifest::parse(unknown.as_bytes(), &Limits::default()).is_err());
    }
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn what_parses_is_read_back_from_its_own_bytes(seed in any::<u64>()) {
        let mut random = Random(seed);
        for _ in 0..50 {
            if let Ok(manifest) = Manifest::parse(&mutate(text().as_bytes(), &mut random), &Limits::default()) {
                prop_assert_eq!(Manifest::parse(&manifest.to_document().bytes, &Limits::default()).unwrap(), manifest);
            }
            if let Ok(config) = SnapshotConfig::parse(&mutate(&config().to_bytes(), &mut random), &Limits::default()) {
                prop_assert_eq!(SnapshotConfig::parse(&config.to_bytes(), &Limits::default()).unwrap(), config);
            }
        }
    }
}
