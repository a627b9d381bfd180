//! Blobs that are opened while they come, and stored without being hashed again.

use crate::common::{blob_frame, pieces, repository, stream};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::codec::Codec;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, ErrorCode, Kind, Limits};
use pfr_store::{Error, Opened, Options, Result, Store, WHOLE_MAX, opened_frames};
use pfr_testkit::frames::{claiming, encoded, zstd};
use pfr_testkit::snapshot::{bytes, numbers};
use proptest::prelude::*;

/// Blobs of several lengths and codecs: more than fit into a batch, runs of one length that are no
/// multiple of four, an empty one.
fn sample() -> Vec<(Vec<u8>, Bytes)> {
    let mut sample = Vec::new();
    for number in 0..70 {
        let raw = numbers(number, 64 << 10);
        let frame = match number % 3 {
            0 => encoded(Codec::Bf16Bitmaps, &raw),
            1 => encoded(Codec::Bf16Huffman, &raw),
            _ => blob_frame(&raw),
        };
        sample.push((raw, frame));
    }
    sample.extend([vec![], bytes(1, 100), bytes(2, 100), bytes(3, 5000)].map(|raw| (raw.clone(), blob_frame(&raw))));
    sample.push((vec![7; 9000], zstd(&[7; 9000])));
    sample
}

fn opened(all: &[u8], size: usize, largest: u64) -> impl futures::Stream<Item = Result<Opened>> + Send + use<> {
    opened_frames(pieces(all, size).map_err(|error| Error::Input(error.to_string())), Limits::default(), largest)
}

#[tokio::test]
async fn blobs_come_in_order_however_the_stream_is_cut_up() {
    let sample = sample();
    let all = stream(sample.iter().map(|(_, frame)| frame));
    for size in [50, 4000, 65_537, 1 << 20, usize::MAX] {
        let found: Vec<Opened> = opened(&all, size.min(all.len()), 64 << 10).try_collect().await.unwrap();
        assert_eq!(found.len(), sample.len());
        for (found, (raw, _)) in found.iter().zip(&sample) {
            assert_eq!((found.digest(), &found.raw()[..]), (Digest::sha256(raw), &raw[..]), "pieces of {size}");
        }
    }
}

#[tokio::test]
async fn a_wrong_blob_ends_the_stream_behind_those_before_it() {
    let raws: Vec<Vec<u8>> = (0..9).map(|number| bytes(number, 300 << 10)).collect();
    let frames: Vec<Bytes> = raws.iter().map(|raw| blob_frame(raw)).collect();
    let with = |frame: Bytes| {
        let mut frames = frames.clone();
        frames[6] = frame;
        stream(frames)
    };
    let mut flipped = frames[6].to_vec();
    flipped[1000] ^= 1;
    let false_digest = claiming(Kind::Blob, Digest::sha256(&raws[6]), &raws[7]);
    for (what, all) in [
        ("a flipped bit", with(flipped.into())),
        ("another blob under this digest", with(false_digest)),
        ("a blob that is larger than asked for", with(blob_frame(&bytes(1, (300 << 10) + 1)))),
        ("the end", stream(&frames)[..6 * frames[0].len() + 1000].to_vec()),
    ] {
        let mut blobs = Box::pin(opened(&all, 10_000, 300 << 10));
        let mut found = Vec::new();
        let error = loop {
            match blobs.next().await.unwrap_or_else(|| panic!("{what}: no error")) {
                Ok(opened) => found.push(opened.digest()),
                Err(error) => break error,
            }
        };
        let before: Vec<Digest> = raws[..6].iter().map(|raw| Digest::sha256(raw)).collect();
        assert_eq!(found, before, "{what}: {error}");
        assert!(blobs.next().await.is_none(), "{what}");
    }
}

#[tokio::test]
async fn a_false_length_takes_no_memory() {
    // More than any machine has. It is refused when the bytes end.
    let raw_len = 1 << 44;
    let header = Header { codec: Codec::Raw, kind: Kind::Blob, digest: Digest::sha256(b"x"), raw_len, stored_len: raw_len };
    let (good, limits) = (bytes(1, 100), Limits { blob_bytes: u64::MAX, ..Limits::default() });
    let all = [blob_frame(&good).to_vec(), header.to_bytes(), vec![0; 100_000]].concat();
    let source = pieces(&all, 9000).map_err(|error| Error::Input(error.to_string()));
    let found: Vec<Result<Opened>> = opened_frames(source, limits, u64::MAX).collect().await;
    let [Ok(opened), Err(error)] = &found[..] else { panic!("{found:?}") };
    assert_eq!(opened.raw()[..], good);
    assert_eq!(error.code(), ErrorCode::Truncated, "{error}");
}

#[tokio::test]
async fn opened_blobs_are_stored_as_they_came() {
    let store = Store::open_in_memory(Options::default()).await.unwrap();
    let session = store.open_push(&repository()).await.unwrap();
    let large = bytes(5, WHOLE_MAX as usize + 1);
    let mut sample = sample();
    sample.insert(3, (large.clone(), blob_frame(&large)));
    // Twice in one stream.
    sample.push(sample[0].clone());
    let found: Vec<Opened> = opened(&stream(sample.iter().map(|(_, frame)| frame)), 1 << 20, 8 << 20).try_collect().await.unwrap();
    let done = store.ingest_opened(&session.id, &mut futures::stream::iter(found)).await.unwrap();
    assert_eq!((done.frames, done.new), (sample.len() as u64, sample.len() as u64 - 1));
    let wanted: Vec<(Digest, Kind)> = sample.iter().map(|(raw, _)| (Digest::sha256(raw), Kind::Blob)).collect();
    assert_eq!(store.missing(&session.id, wanted).await.unwrap(), Vec::<usize>::new());
    for (raw, frame) in &sample {
        assert_eq!(store.read(&Digest::sha256(raw)).await.unwrap(), raw);
        let served: Vec<Bytes> = store.frames(vec![Digest::sha256(raw)]).await.unwrap().try_collect().await.unwrap();
        assert_eq!(served.concat(), stream([frame]), "the payload was not encoded again");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_opener_panic(noise in proptest::collection::vec(any::<u8>(), 0..2000), at in 0_usize..4000, size in 1_usize..500) {
        let mut all = stream((0..5).map(|number| blob_frame(&bytes(number, 600))));
        let at = at.min(all.len());
        all.splice(at.., noise);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found: Vec<Result<Opened>> = runtime.block_on(opened(&all, size, 600).collect());
        for opened in found.iter().flatten() {
            prop_assert_eq!(Digest::sha256(opened.raw()), opened.digest());
        }
    }
}
