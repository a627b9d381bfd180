//! Blobs in every codec: stored as they came, served to readers that know fewer codecs, and safe
//! through everything that a store does with its packs.

use crate::common::rig::{Backend, Rig};
use crate::common::{blob_frame, pieces, repository, stream, tag};
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::{Codec, Codecs};
use pfr_schema::flat::{FlatManifest, Page};
use pfr_schema::frame::{CHECKSUM, END_LEN, Event, Header, Parser, encode, end_mark};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::media_type;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig};
use pfr_schema::tree::{Document, Group, PageTree};
use pfr_schema::{Digest, ErrorCode, Kind, Limits};
use pfr_store::{Error, GcOptions, Options, Result, Served, Store, document_frame, in_codecs};
use pfr_testkit::frames::{encoded, zstd};
use pfr_testkit::snapshot::{bytes, numbers};
use proptest::prelude::*;
use std::collections::HashSet;
use std::time::Duration;

const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 4, n_heads: 2, head_dim: 64, dtype: Dtype::Bf16 };
const PAGE: usize = 16_384;
const TENSOR: [Codec; 4] = [Codec::Bf16Bitmaps, Codec::Bf16Huffman, Codec::F16Huffman, Codec::Fp8Huffman];

/// A snapshot of pages, each with a frame in some codec.
struct Sample {
    pages: Vec<(Codec, Vec<u8>)>,
    documents: Vec<Document>,
    digest: Digest,
}

fn frame(codec: Codec, raw: &[u8]) -> Bytes {
    match codec {
        Codec::Raw => blob_frame(raw),
        Codec::Zstd => zstd(raw),
        _ => encoded(codec, raw),
    }
}

/// Numbers in each tensor codec, zeros, half a page of zeros, and noise.
fn sample() -> Sample {
    let mut pages: Vec<(Codec, Vec<u8>)> = (0..32).map(|i| (TENSOR[i % 4], numbers(i as u64, PAGE))).collect();
    pages.push((Codec::Bf16Bitmaps, vec![0; PAGE]));
    pages.push((Codec::Fp8Huffman, [numbers(99, PAGE / 2), vec![0; PAGE / 2]].concat()));
    pages.extend((100..104).map(|i| (Codec::Raw, bytes(i, PAGE))));
    let named = |page: &[(Codec, Vec<u8>)], ix| Page { ix, k: Digest::sha256(&page[0].1), v: Digest::sha256(&page[1].1) };
    let listed = pages.chunks(2).zip(0..).map(|(page, ix)| named(page, ix)).collect();
    let flat = FlatManifest::new(GEOMETRY, listed, vec![], &Limits::default()).unwrap();
    let (tree, mut documents) = PageTree::from_flat(&flat, Group::default(), 0, 1).unwrap();
    let (tree, config) = (tree.to_document(), Document::new(Kind::Blob, SnapshotConfig::default().to_bytes()));
    let manifest = Manifest::snapshot(&config, vec![Descriptor::of(media_type::TREE, &tree)], Default::default()).to_document();
    let digest = manifest.digest;
    documents.extend([tree, config, manifest]);
    Sample { pages, documents, digest }
}

impl Sample {
    fn digests(&self) -> Vec<Digest> {
        self.pages.iter().map(|(_, raw)| Digest::sha256(raw)).collect()
    }

    /// Stores and commits it, with other blobs between its pages.
    async fn push(&self, store: &Store, others: &[Bytes]) {
        let session = store.open_push(&repository()).await.unwrap();
        let beside = others.len() / self.pages.len();
        let pages = self.pages.iter().enumerate().flat_map(|(i, (codec, raw))| {
            let others = others[i * beside..(i + 1) * beside].iter().cloned();
            std::iter::once(frame(*codec, raw)).chain(others)
        });
        let all = stream(pages.chain(self.documents.iter().map(document_frame)));
        store.ingest(&session.id, pieces(&all, 10_000)).await.unwrap();
        store.commit(&session.id, self.digest, Some(tag("t")), None).await.unwrap();
    }

    /// Everything is there, and each page in the codec in which it came.
    async fn is_whole_in(&self, store: &Store) {
        let verified = store.verify(&self.digest, &mut |_| ()).await.unwrap();
        assert!(verified.stored_bytes * 100 < verified.bytes * 80, "{verified:?}");
        let came = frames_of(store.frames(self.digests()).await.unwrap()).await;
        assert!(came == self.pages, "{:?}", came.iter().map(|(codec, raw)| (codec, raw.len())).collect::<Vec<_>>());
    }
}

/// Codec and decoded bytes of each frame.
async fn frames_of(frames: BoxStream<'static, Result<Bytes>>) -> Vec<(Codec, Vec<u8>)> {
    let whole: Vec<Bytes> = frames.try_collect().await.unwrap();
    parsed(&whole.concat())
}

fn parsed(stream: &[u8]) -> Vec<(Codec, Vec<u8>)> {
    let mut parser = Parser::new(Limits::default());
    parser.push(Bytes::copy_from_slice(stream));
    let mut found = Vec::new();
    let mut current: Option<(Header, Vec<u8>)> = None;
    while let Some(event) = parser.next().unwrap() {
        match event {
            Event::Begin(header) => current = Some((header, Vec::new())),
            Event::Payload(piece) => current.as_mut().unwrap().1.extend_from_slice(&piece),
            Event::Finish { checksum } => {
                let (header, payload) = current.take().unwrap();
                assert_eq!(crc32c::crc32c(&payload), checksum);
                let raw = pfr_schema::codec::decode(header.codec, &payload, header.raw_len).unwrap();
                assert_eq!(Digest::sha256(&raw), header.digest);
                found.push((header.codec, raw));
            }
            Event::End => {}
        }
    }
    parser.finish().unwrap();
    found
}

on_every_backend!(frames_keep_their_codecs_through_collection_scrub_fsck_and_rebuild);

async fn frames_keep_their_codecs_through_collection_scrub_fsck_and_rebuild(on: Backend) {
    let rig = Rig::still(on, Options { pack_bytes: 128 << 10, lease: Duration::from_secs(60), ..Options::default() }).await;
    let (store, sample) = (&rig.store, sample());
    let others: Vec<Bytes> = (200..400).map(|i| frame(TENSOR[i as usize % 4], &numbers(i, PAGE))).collect();
    sample.push(store, &others).await;
    sample.is_whole_in(store).await;
    let stats = store.stats(None).await.unwrap();
    assert!(stats.codec_ratio > 1.2 && stats.stored < stats.unique, "{stats:?}");

    // Most of each pack dies: compaction moves the rest.
    let packs = async || {
        let located = rig.metadata.locate(sample.digests()).await.unwrap();
        located.into_iter().map(|location| location.unwrap().pack).collect::<HashSet<String>>()
    };
    let before = packs().await;
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    for _ in 0..4 {
        rig.wait(Duration::from_secs(48 * 3600));
        store.gc(&options, &mut |_| ()).await.unwrap();
    }
    assert!(packs().await.is_disjoint(&before), "every page was moved");
    sample.is_whole_in(store).await;

    let report = store.scrub(&pfr_store::ScrubOptions { full: true, ..Default::default() }, &mut |_| ()).await.unwrap();
    assert!(report.damaged.is_empty() && report.bad_packs.is_empty(), "{report:?}");
    assert_eq!(rig.metadata.audit(false).await.unwrap().discrepancies, []);
    let new = rig.over_memory(rig.fork().await).await;
    let rebuilt = new.store.rebuild(&mut |_| ()).await.unwrap();
    assert!(rebuilt.lost.is_empty() && rebuilt.refused.is_empty(), "{rebuilt:?}");
    sample.is_whole_in(&new.store).await;
}

#[tokio::test]
async fn the_first_stored_encoding_stays_and_the_blob_is_stored_once() {
    let rig = Rig::new(Backend::Memory).await;
    let raw = numbers(1, PAGE);
    let digest = Digest::sha256(&raw);
    for (turn, codec) in [Codec::Bf16Huffman, Codec::Raw, Codec::Bf16Bitmaps, Codec::Bf16Huffman].into_iter().enumerate() {
        let session = rig.store.open_push(&repository()).await.unwrap();
        let done = rig.store.ingest(&session.id, pieces(&stream([frame(codec, &raw)]), 1000)).await.unwrap();
        assert_eq!((done.new, done.raw_bytes), (u64::from(turn == 0), PAGE as u64));
        let kept = frames_of(rig.store.frames(vec![digest]).await.unwrap()).await;
        assert!(kept == [(Codec::Bf16Huffman, raw.clone())], "{codec:?}");
    }
}

#[tokio::test]
async fn a_reader_gets_frames_in_the_codecs_that_it_knows_and_raw_ones_for_the_others() {
    let (rig, sample) = (Rig::new(Backend::Memory).await, sample());
    let text = [b'x'; 5000];
    sample.push(&rig.store, &vec![frame(Codec::Zstd, &text); sample.pages.len()]).await;
    let known = [Codecs::LEAST, Codecs::LEAST.with(Codec::Bf16Bitmaps), Codecs::LEAST.with(Codec::F16Huffman).with(Codec::Fp8Huffman)];
    for codecs in known {
        let Served { bytes, pieces } = rig.store.serve(sample.digests(), codecs).await.unwrap();
        assert_eq!(bytes, None, "the length is found out on the way");
        let as_codec = |(codec, raw): &(Codec, Vec<u8>)| (if codecs.contains(*codec) { *codec } else { Codec::Raw }, raw.clone());
        let expected: Vec<(Codec, Vec<u8>)> = sample.pages.iter().map(as_codec).collect();
        assert!(frames_of(pieces).await == expected, "{codecs}");
        assert_eq!(rig.store.ranges(&sample.digests(), codecs).await.unwrap(), None, "nobody decodes on the way from a bucket");
    }
    let all = rig.store.serve(sample.digests(), Codecs::ALL).await.unwrap();
    assert!(all.bytes.is_some() && frames_of(all.pieces).await == sample.pages);
    assert!(rig.store.ranges(&sample.digests(), Codecs::ALL).await.unwrap().is_some());
    // Every reader knows raw and zstd: it gets such frames as they lie, and may fetch them itself.
    let raw = sample.pages.iter().filter(|(codec, _)| *codec == Codec::Raw).map(|(_, raw)| Digest::sha256(raw));
    let least: Vec<Digest> = raw.chain([Digest::sha256(&text)]).collect();
    assert!(rig.store.serve(least.clone(), Codecs::LEAST).await.unwrap().bytes.is_some());
    assert!(rig.store.ranges(&least, Codecs::LEAST).await.unwrap().is_some());
}

#[tokio::test]
async fn a_codec_that_a_store_does_not_take_is_refused_and_what_came_before_is_kept() {
    let codecs = Codecs::LEAST.with(Codec::Bf16Bitmaps);
    let store = Store::open_in_memory(Options { codecs, ..Options::default() }).await.unwrap();
    let session = store.open_push(&repository()).await.unwrap();
    let (first, second) = (numbers(1, PAGE), numbers(2, PAGE));
    let frames = stream([frame(Codec::Bf16Bitmaps, &first), frame(Codec::Bf16Huffman, &second)]);
    let error = store.ingest(&session.id, pieces(&frames, 1000)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptFrame);
    let words = "codec bf16-huffman: not taken here, only raw, zstd, bf16-bitmaps";
    assert!(error.to_string().contains(words) && error.to_string().contains(&Digest::sha256(&second).hex()), "{error}");
    let missing = store.missing(&session.id, [&first, &second].map(|raw| (Digest::sha256(raw), Kind::Blob)).to_vec()).await.unwrap();
    assert_eq!(missing, [1]);
}

#[tokio::test]
async fn a_frame_in_a_codec_of_a_newer_version_is_refused_and_is_no_damage() {
    let rig = Rig::new(Backend::SqliteDisk).await;
    let session = rig.store.open_push(&repository()).await.unwrap();
    rig.store.ingest(&session.id, pieces(&stream([blob_frame(b"x")]), 1000)).await.unwrap();
    rig.sql("UPDATE objects SET codec = 99");
    let error = rig.store.ranges(&[Digest::sha256(b"x")], Codecs::ALL).await.unwrap_err();
    assert!(error.code() == ErrorCode::Internal && error.to_string().contains("unknown codec 99"), "{error}");
    assert!(rig.store.damaged().await.unwrap().is_empty());
}

/// The stream in the codecs that every reader knows, in pieces.
async fn least(stream: &[u8], size: usize) -> Result<Vec<Bytes>> {
    let frames = pieces(stream, size).map_err(|e| Error::Input(e.to_string())).boxed();
    in_codecs(frames, Codecs::LEAST, &Limits::default()).try_collect().await
}

#[tokio::test]
async fn frames_become_raw_however_the_stream_is_cut_up() {
    let (numbers, noise) = (numbers(1, 6000), bytes(2, 1000));
    let all = stream(TENSOR.iter().map(|codec| frame(*codec, &numbers)).chain([
        blob_frame(&noise),
        blob_frame(b""),
        frame(Codec::Zstd, &[7; 3000]),
        frame(Codec::Bf16Bitmaps, &[0; 5000]),
    ]));
    let raw = stream(TENSOR.iter().map(|_| blob_frame(&numbers)).chain([
        blob_frame(&noise),
        blob_frame(b""),
        frame(Codec::Zstd, &[7; 3000]),
        blob_frame(&[0; 5000]),
    ]));
    for size in (1..200).chain([1000, 5000, 100_000]) {
        assert!(least(&all, size).await.unwrap().concat() == raw, "pieces of {size}");
    }
    // A cut stream stays cut.
    for at in (0..all.len()).step_by(97).chain(all.len() - 40..all.len()) {
        let out = least(&all[..at], 700).await.unwrap().concat();
        assert!(out.len() < raw.len() && raw.starts_with(&out), "cut at {at}");
    }
}

#[tokio::test]
async fn a_damaged_frame_ends_the_stream_that_decodes_it() {
    let raw = numbers(1, 5000);
    let whole = stream([frame(Codec::Bf16Huffman, &raw)]);
    let (payload, end) = (Header::len(pfr_schema::Algorithm::Sha256), whole.len() - END_LEN);
    for at in (payload..end).step_by(37).chain(end - CHECKSUM..end) {
        let mut bad = whole.clone();
        bad[at] ^= 1;
        let error = least(&bad, 1000).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::CorruptFrame, "byte {at}: {error}");
        assert!(error.to_string().contains(&Digest::sha256(&raw).hex()), "{error}");
    }
}

#[tokio::test]
async fn a_small_frame_that_stands_for_many_zeros_is_decoded_piece_by_piece() {
    // As a hostile client stores it: the digest is of something else, which the reader finds out.
    let raw_len = 1_u64 << 30;
    // Blocks of zeros, 8 MiB each.
    let payload = ((8_u32 << 20) | 1 << 24).to_le_bytes().repeat(128);
    let header =
        Header { codec: Codec::Bf16Bitmaps, kind: Kind::Blob, digest: Digest::sha256(b"x"), raw_len, stored_len: payload.len() as u64 };
    let bomb = [encode(&header, &payload), end_mark(1)].concat();
    let frames = pieces(&bomb, bomb.len()).map_err(|e| Error::Input(e.to_string())).boxed();
    let mut raw = in_codecs(frames, Codecs::LEAST, &Limits::default());
    let mut all = 0;
    while let Some(piece) = raw.try_next().await.unwrap() {
        assert!(piece.len() <= 512 << 10, "{} bytes at once", piece.len());
        all += piece.len() as u64;
    }
    assert!(all > raw_len, "{all}");
}

#[tokio::test]
async fn any_frames_become_raw_in_any_pieces() {
    let some = (any::<u64>(), 1_usize..20_000, 0_usize..5);
    property_of(proptest::collection::vec(some, 0..6), 1_usize..30_000).await;
}

async fn property_of(blobs: impl Strategy<Value = Vec<(u64, usize, usize)>> + Send + 'static, size: std::ops::Range<usize>) {
    crate::common::property(64, (blobs, size), |(blobs, size)| async move {
        let made: Vec<(Codec, Vec<u8>)> = blobs
            .into_iter()
            .map(|(seed, length, codec)| match codec {
                // Short ones do not become smaller.
                1..5 if length > 6000 => (TENSOR[codec - 1], numbers(seed, length & !1)),
                _ => (Codec::Raw, bytes(seed, length)),
            })
            .collect();
        let given = stream(made.iter().map(|(codec, raw)| frame(*codec, raw)));
        let expected = stream(made.iter().map(|(_, raw)| blob_frame(raw)));
        assert!(least(&given, size).await.unwrap().concat() == expected);
    })
    .await;
}
