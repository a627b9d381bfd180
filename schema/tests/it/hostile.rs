//! No parser panics, whatever the bytes.

use crate::checkpoint::checkpoint;
use crate::common::{Random, cases, manifest, mutate};
use bytes::Bytes;
use pfr_schema::codec::{Codec, decode, encode_document};
use pfr_schema::flat::FlatManifest;
use pfr_schema::frame::{Header, Parser, encode, end_mark};
use pfr_schema::pack::{Entry, FOOTER_LEN, Footer, index_and_footer};
use pfr_schema::run::Run;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Container, Digest, Kind, Limits, Reference, media_type};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Gives `bytes` to every parser and uses what comes out.
fn feed(bytes: &[u8]) {
    let limits = Limits::default();
    let _ = FlatManifest::parse(bytes, &limits).map(|flat| {
        let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
        let runs: Vec<_> = runs.iter().map(|r| Run::parse(&r.bytes, &limits).unwrap()).collect();
        assert_eq!(tree.to_flat(&runs, &limits).unwrap().to_bytes(), bytes);
    });
    for kind in Kind::ALL {
        let _ = Container::parse(kind, bytes, &limits).map(|c| c.map(|c| c.children()));
    }
    let _ = PageTree::parse(bytes, &limits).map(|tree| (tree.tokens(), tree.pages()));
    // As a client reads an API response, unchecked.
    let _ = serde_json::from_slice::<PageTree>(bytes).map(|tree| (tree.tokens(), tree.pages(), tree.to_flat(&[], &limits).is_ok()));
    let _ = SnapshotConfig::parse(bytes, &limits);
    let _ = Header::parse_exact(bytes, 0, &limits);
    let mut parser = Parser::new(limits.clone());
    for piece in bytes.chunks(bytes.len() / 3 + 1) {
        parser.push(Bytes::copy_from_slice(piece));
        while parser.next().is_ok_and(|event| event.is_some()) {}
    }
    let _ = parser.finish();
    if let Some(at) = bytes.len().checked_sub(FOOTER_LEN)
        && let Ok(footer) = Footer::parse(&bytes[at..], bytes.len() as u64)
    {
        let _ = footer.parse_index(&bytes[footer.index_offset as usize..at], &limits);
    }
    for length in [0, 100, 5000] {
        for codec in Codec::ALL {
            let _ = decode(*codec, bytes, length).map(|raw| assert_eq!(raw.len() as u64, length));
        }
    }
    let _ = Digest::from_key(bytes);
    let _ = std::str::from_utf8(bytes).map(|text| (text.parse::<Reference>().is_ok(), text.parse::<Digest>().is_ok()));
}

/// One valid document of every format.
fn documents() -> Vec<Vec<u8>> {
    let flat = manifest(5, 6);
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let config = SnapshotConfig { parents: vec![Digest::sha256(b"p")], ..SnapshotConfig::default() };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let snapshot = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree.to_document())], BTreeMap::new());
    let payload = b"payload";
    let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(payload), raw_len: 7, stored_len: 7 };
    let frame = encode(&header, payload);
    let pack = index_and_footer(&[Entry { offset: 8, header }], 8 + header.frame_len());
    vec![
        flat.to_bytes(),
        tree.to_bytes(),
        runs[0].bytes.clone(),
        config.bytes,
        snapshot.to_document().bytes,
        checkpoint().to_bytes(),
        [&frame[..], &end_mark(1)].concat(),
        [b"PFpack\x01\n", &frame[..], &pack].concat(),
        encode_document(&[b'a'; 5000]).1.into_owned(),
        b"http://localhost:8080/team/agent:latest~3".to_vec(),
    ]
}

/// An error is logged and sent back; it must not carry the document.
#[test]
fn errors_of_huge_fields_are_short() {
    let long = "\u{1}é".repeat(1 << 19);
    let limits = Limits::default();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let flat = text(documents()[0].clone());
    let tree = text(documents()[1].clone());
    let json = serde_json::to_string(&long).unwrap();
    let errors = [
        FlatManifest::parse(flat.replacen("{", &format!("{{{json}:1,"), 1).as_bytes(), &limits).unwrap_err(),
        FlatManifest::parse(flat.replace("\"paged-batchinvariant-v1\"", &json).as_bytes(), &limits).unwrap_err(),
        FlatManifest::parse(flat.replace("\"bf16\"", &json).as_bytes(), &limits).unwrap_err(),
        PageTree::parse(tree.replace("\"pf.page-tree.v1\"", &json).as_bytes(), &limits).unwrap_err(),
        PageTree::parse(tree.replace("[\"k\",\"v\"]", &format!("[{json}]")).as_bytes(), &limits).unwrap_err(),
        SnapshotConfig::parse(format!("{{\"deployment\":{{{json}:[}}}}").as_bytes(), &limits).unwrap_err(),
        long.parse::<Digest>().unwrap_err(),
        long.parse::<Reference>().unwrap_err(),
    ];
    for error in errors {
        assert!(error.to_string().len() < 4000, "{} bytes", error.to_string().len());
    }
}

#[test]
fn valid_documents_get_through() {
    documents().iter().for_each(|document| feed(document));
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn random_bytes_panic_nowhere(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        feed(&bytes);
    }

    #[test]
    fn mutated_documents_panic_nowhere(seed in any::<u64>()) {
        let mut random = Random(seed);
        for document in documents() {
            feed(&mutate(&document, &mut random));
        }
    }
}
