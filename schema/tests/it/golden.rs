//! Golden files: the formats may not change by accident.
//!
//! Every file under `tests/golden` is made here from fixed inputs and compared byte for byte. After
//! a change that is meant, rewrite them with `PF_BLESS=1 cargo test -p pfr-schema golden` and say
//! in the change what reads the old ones.

use crate::checkpoint::checkpoint;
use crate::common::{GEOMETRY, digest};
use crate::vectors::vectors;
use pfr_schema::checkpoint::Key;
use pfr_schema::codec::{Codec, TensorEncoder, decode};
use pfr_schema::flat::{FlatManifest, Page, Sequence};
use pfr_schema::frame::{Header, encode, end_mark};
use pfr_schema::pack::{Entry, MAGIC, index_and_footer};
use pfr_schema::snapshot::{Descriptor, Exactness, Manifest, SnapshotConfig, TITLE};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Algorithm, Container, Digest, Kind, Limits, media_type};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Once;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn flat() -> FlatManifest {
    let page = |ix: u32| Page { ix, k: digest(&format!("k{ix}")), v: digest(&format!("v{ix}")) };
    let sequence = |id: &str, ixs: &[u32], fill| Sequence { id: id.into(), page_ixs: ixs.to_vec(), fill_in_last_page: fill };
    let sequences = vec![sequence("seq-1", &[0, 1, 2, 7], 5), sequence("seq-2 é\"\n", &[7, 0], 0)];
    FlatManifest::new(GEOMETRY, [0, 1, 2, 7].map(page).to_vec(), sequences, &Limits::default()).unwrap()
}

fn files() -> Vec<(&'static str, Vec<u8>)> {
    let flat = flat();
    let (tree, runs) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let tree = tree.to_document();
    let checkpoint = Document::new(Kind::Checkpoint, checkpoint().to_bytes());
    let tokens = Document::new(Kind::Blob, (0..53_u32).flat_map(u32::to_le_bytes).collect());
    let config = SnapshotConfig {
        agent: Some("agent-1".into()),
        engine: Some("engine 1.0".into()),
        deployment: BTreeMap::from([("tp".into(), 1.into()), ("weights".into(), digest("weights").to_string().into())]),
        fingerprint: Some(digest("deployment")),
        boundary: Some(53),
        prefix: Some(Key {
            scheme: "pf-prefix-v1".into(),
            prefix: digest("prefix"),
            tokens: 53,
            alignment: 1,
            salt: "tenant".into(),
            adapter: Some("adapter-1".into()),
        }),
        sampling: BTreeMap::from([("seed".into(), 7.into()), ("temperature".into(), 0.into())]),
        unrecorded: vec!["grammar".into()],
        parents: vec![digest("parent")],
        exactness: Some(Exactness::NearExact),
        created: Some("2026-01-02T03:04:05Z".into()),
    };
    let config = Document::new(Kind::Blob, config.to_bytes());
    let mut attachment = Descriptor::of(media_type::OCTETS, &Document::new(Kind::Blob, b"notes".to_vec()));
    attachment.annotations.insert(TITLE.into(), "notes.txt".into());
    let layers = vec![
        Descriptor::of(media_type::TREE, &tree),
        Descriptor::of(media_type::CHECKPOINT, &checkpoint),
        Descriptor::of(media_type::TOKENS, &tokens),
        attachment,
    ];
    let snapshot = Manifest::snapshot(&config, layers, BTreeMap::from([("run".into(), "7".into())])).to_document();

    // Frames are golden with raw payloads and one fixed zstd frame: the output of an encoder
    // may change with its version.
    let zstd = b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello".to_vec();
    let frame = |codec, kind, algorithm, raw: &[u8], stored: &[u8]| {
        let digest = Digest::of(algorithm, raw);
        let header = Header { codec, kind, digest, raw_len: raw.len() as u64, stored_len: stored.len() as u64 };
        (header, encode(&header, stored))
    };
    let frames = [
        frame(Codec::Raw, Kind::Run, Algorithm::Sha256, &runs[0].bytes, &runs[0].bytes),
        frame(Codec::Zstd, Kind::Blob, Algorithm::Blake3, b"hello", &zstd),
        frame(Codec::Raw, Kind::Blob, Algorithm::Sha512, b"", b""),
    ];
    let mut stream = vec![];
    let mut offset = MAGIC.len() as u64;
    let mut entries = vec![];
    for (header, bytes) in &frames {
        stream.extend_from_slice(bytes);
        entries.push(Entry { offset, header: *header });
        offset += header.frame_len();
    }
    stream.extend_from_slice(&end_mark(frames.len() as u64));

    let tensor = crate::tensor::page(13, 12_001);
    vec![
        ("page-manifest.json", flat.to_bytes()),
        ("page-run.bin", runs[0].bytes.clone()),
        ("page-tree.json", tree.bytes),
        ("checkpoint.json", checkpoint.bytes),
        ("checkpoint-vectors.json", vectors()),
        ("snapshot-config.json", config.bytes),
        ("snapshot-manifest.json", snapshot.bytes),
        ("frame-stream.bin", stream),
        ("pack-index.bin", index_and_footer(&entries, offset)),
        ("tensor-bf16-bitmaps.bin", TensorEncoder::new(Codec::Bf16Bitmaps).unwrap().encode(&tensor).unwrap().to_vec()),
        ("tensor-bf16-huffman.bin", huffman(Codec::Bf16Huffman, &tensor)),
        ("tensor-f16-huffman.bin", huffman(Codec::F16Huffman, &tensor)),
        ("tensor-fp8-huffman.bin", huffman(Codec::Fp8Huffman, &tensor)),
        ("tensor.bin", tensor),
    ]
}

/// The golden payload if it decodes to `raw`, and else a new one: what zstd writes may change with
/// its version, what is read must not.
fn huffman(codec: Codec, raw: &[u8]) -> Vec<u8> {
    let golden = std::fs::read(folder().join(format!("tensor-{}.bin", codec.name()))).unwrap_or_default();
    match decode(codec, &golden, raw.len() as u64) {
        Ok(decoded) if decoded == raw => golden,
        _ => TensorEncoder::new(codec).unwrap().encode(raw).unwrap().to_vec(),
    }
}

/// One golden file. The first call rewrites them all, if that was asked for.
fn golden(name: &str) -> Vec<u8> {
    static BLESS: Once = Once::new();
    BLESS.call_once(|| {
        if std::env::var_os("PF_BLESS").is_some_and(|value| value == "1") {
            for (name, bytes) in files() {
                std::fs::write(folder().join(name), bytes).unwrap();
            }
        }
    });
    std::fs::read(folder().join(name)).unwrap_or_else(|e| panic!("{name}: {e}; see the head of this file"))
}

#[test]
fn golden_files_are_what_the_code_writes() {
    for (name, bytes) in files() {
        let golden = golden(name);
        assert!(golden == bytes, "{name} has changed; written now:\n{}", String::from_utf8_lossy(&bytes));
    }
}

#[test]
fn golden_files_are_all_the_files_there_are() {
    golden("page-run.bin");
    let mut known: Vec<_> = files().into_iter().map(|(name, _)| name.to_owned()).chain(["check_vectors.py".into()]).collect();
    let mut found: Vec<_> = std::fs::read_dir(folder()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    known.sort();
    found.sort();
    assert_eq!(found, known);
}

#[test]
fn golden_files_are_read_by_the_code() {
    let limits = Limits::default();
    assert_eq!(FlatManifest::parse(&golden("page-manifest.json"), &limits).unwrap(), flat());
    for (name, kind) in [
        ("page-run.bin", Kind::Run),
        ("page-tree.json", Kind::Tree),
        ("checkpoint.json", Kind::Checkpoint),
        ("snapshot-manifest.json", Kind::Manifest),
    ] {
        Container::parse(kind, &golden(name), &limits).unwrap().unwrap();
    }
    SnapshotConfig::parse(&golden("snapshot-config.json"), &limits).unwrap();
    let raw = decode(Codec::Zstd, b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello", 5).unwrap();
    assert_eq!(raw, b"hello");
    let tensor = golden("tensor.bin");
    for codec in crate::tensor::TENSOR {
        let stored = golden(&format!("tensor-{}.bin", codec.name()));
        assert!(decode(codec, &stored, tensor.len() as u64).unwrap() == tensor, "{}", codec.name());
    }
}
