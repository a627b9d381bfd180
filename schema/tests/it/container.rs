use crate::checkpoint::checkpoint;
use crate::common::{digest, manifest};
use pfr_schema::container::Child;
use pfr_schema::run::{Run, Shape};
use pfr_schema::snapshot::{Descriptor, Manifest};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Container, Kind, Limits, media_type};
use std::collections::BTreeMap;

fn children(kind: Kind, bytes: &[u8]) -> Vec<Child> {
    Container::parse(kind, bytes, &Limits::default()).unwrap().unwrap().children()
}

fn blob(name: &str, size: u64) -> Child {
    Child { digest: digest(name), kind: Kind::Blob, size: Some(size), shape: None, optional: false }
}

#[test]
fn a_blob_is_no_node_whatever_its_bytes_are() {
    let (tree, _) = PageTree::from_flat(&manifest(1, 3), Group::default(), 0, 1).unwrap();
    assert_eq!(Container::parse(Kind::Blob, &tree.to_bytes(), &Limits::default()).unwrap(), None);
}

#[test]
fn a_run_lists_every_component_of_every_page_in_order_and_twice_what_is_there_twice() {
    let run = Run::new(2, 77, ["a", "b", "a", "c"].map(digest).to_vec()).unwrap();
    assert_eq!(children(Kind::Run, &run.to_bytes()), ["a", "b", "a", "c"].map(|n| blob(n, 77)));
    let container = Container::parse(Kind::Run, &run.to_bytes(), &Limits::default()).unwrap().unwrap();
    assert_eq!(container.shape(), Some(Shape { pages: 2, components: 2, page_bytes: 77 }));
}

#[test]
fn a_tree_lists_its_runs_and_what_shape_they_must_have() {
    let flat = manifest(2, 2500);
    let (tree, documents) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let children = children(Kind::Tree, &tree.to_bytes());
    assert_eq!(children.len(), documents.len());
    assert!(children.len() > 1);
    for (child, document) in children.iter().zip(&documents) {
        let run = Container::parse(Kind::Run, &document.bytes, &Limits::default()).unwrap().unwrap();
        let expected = Child { digest: document.digest, kind: Kind::Run, size: None, shape: run.shape(), optional: false };
        assert_eq!(*child, expected);
    }
}

#[test]
fn a_checkpoint_lists_its_payloads() {
    assert_eq!(children(Kind::Checkpoint, &checkpoint().to_bytes()), [blob("layers.3.recurrent", 8192), blob("sampler", 8192)]);
}

#[test]
fn a_manifest_lists_its_configuration_then_its_layers_and_not_its_subject() {
    let layer = |media_type: &str, name: &str| Descriptor {
        media_type: media_type.into(),
        digest: digest(name),
        size: 9,
        annotations: BTreeMap::new(),
    };
    let config = Document::new(Kind::Blob, b"{}".to_vec());
    let types = [media_type::TREE, media_type::CHECKPOINT, media_type::RUN, media_type::TOKENS, media_type::OCTETS, "x/y"];
    let mut manifest = Manifest::snapshot(&config, types.map(|t| layer(t, t)).to_vec(), BTreeMap::new());
    manifest.subject = Some(layer(media_type::OCI_MANIFEST, "subject"));
    let children = children(Kind::Manifest, &manifest.to_document().bytes);
    assert_eq!(children[0], Child { digest: config.digest, kind: Kind::Blob, size: Some(2), shape: None, optional: false });
    let kinds = [Kind::Tree, Kind::Checkpoint, Kind::Run, Kind::Blob, Kind::Blob, Kind::Blob];
    let expected: Vec<_> = types.iter().zip(kinds).map(|(t, kind)| Child { kind, ..blob(t, 9) }).collect();
    assert_eq!(children[1..], expected);
}

#[test]
fn numbers_and_names_of_kinds_never_change() {
    let table: Vec<_> = Kind::ALL.iter().map(|k| (*k as u8, serde_json::to_value(k).unwrap())).collect();
    let names = ["blob", "run", "tree", "checkpoint", "manifest", "image"];
    assert_eq!(table, (0..).zip(names.map(Into::into)).collect::<Vec<_>>());
    for number in 0..=255 {
        assert_eq!(Kind::from_number(number).map(|k| k as u8), (number < 6).then_some(number));
    }
    for kind in Kind::ALL {
        assert!(kind.satisfies(kind) && kind.satisfies(Kind::Blob));
        assert_eq!(Kind::Blob.satisfies(kind), kind == Kind::Blob);
        assert_eq!(kind.is_container(), kind != Kind::Blob);
    }
}

#[test]
fn no_document_parses_as_two_kinds() {
    let (tree, runs) = PageTree::from_flat(&manifest(3, 10), Group::default(), 0, 1).unwrap();
    let manifest = Manifest::snapshot(&Document::new(Kind::Blob, vec![]), vec![], BTreeMap::new());
    let documents = [
        (Kind::Run, runs[0].bytes.clone()),
        (Kind::Tree, tree.to_bytes()),
        (Kind::Checkpoint, checkpoint().to_bytes()),
        (Kind::Manifest, manifest.to_document().bytes),
        (Kind::Image, br#"{"schemaVersion":2,"manifests":[]}"#.to_vec()),
    ];
    for (kind, bytes) in &documents {
        for other in Kind::ALL.into_iter().filter(|k| k.is_container()) {
            assert_eq!(Container::parse(other, bytes, &Limits::default()).is_ok(), other == *kind, "{kind:?} as {other:?}");
        }
    }
}
