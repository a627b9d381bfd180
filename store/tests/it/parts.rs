//! Packs are handed to their storage in parts of one length, as that storage writes them best.

use crate::common::{page, pieces, repository, stream};
use bytes::Bytes;
use object_store::{Error, Result};
use pfr_schema::Digest;
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use pfr_testkit::frames::blob;
use pfr_testkit::storage::{Call, Hooks, Moment, hooked};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Bytes of each part of each upload, and the number of its pieces.
#[derive(Debug, Default)]
struct Seen(Mutex<BTreeMap<u64, Vec<(usize, usize)>>>);

#[async_trait::async_trait]
impl Hooks for Seen {
    async fn before(&self, call: &Call) -> Result<Option<Error>> {
        if call.moment == Moment::Part {
            let bytes = call.bytes.iter().map(Bytes::len).sum();
            self.0.lock().unwrap().entry(call.upload).or_default().push((bytes, call.bytes.len()));
        }
        Ok(None)
    }
}

/// A blob of this length that no codec makes smaller.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    (seed << 32..).flat_map(page).take(length).collect()
}

/// Takes in these blobs and reads them back. Returns the parts of each pack.
async fn parts_of(in_files: bool, blobs: &[Vec<u8>]) -> Vec<Vec<(usize, usize)>> {
    let dir = tempfile::tempdir().unwrap();
    let seen = Arc::new(Seen::default());
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.unwrap();
    let (files, _) = pfr_store::storage::open_dir(dir.path()).unwrap();
    let store = Store::new(hooked(files, seen.clone()), metadata, Options { pack_bytes: 16 << 20, ..Options::default() });
    let store = if in_files { store.with_packs_dir(dir.path()) } else { store };
    let session = store.open_push(&repository()).await.unwrap();
    let frames = stream(blobs.iter().map(|raw| blob(raw)));
    store.ingest(&session.id, pieces(&frames, 300_000)).await.unwrap();
    for raw in blobs {
        assert_eq!(store.read(&Digest::sha256(raw)).await.unwrap(), raw[..]);
    }
    seen.0.lock().unwrap().values().cloned().collect()
}

#[tokio::test]
async fn all_parts_of_a_pack_but_the_last_have_one_length_wherever_frames_end() {
    // Pages, a few bytes, a blob that is longer than two parts and comes in one piece of memory,
    // and one that comes in pieces, in a pack of its own.
    let mut blobs: Vec<Vec<u8>> = (0..60).map(|seed| noise(seed, 180_224)).collect();
    blobs.push(b"few".to_vec());
    blobs.push(noise(100, 4_100_000));
    blobs.push(noise(101, 9_000_000));
    for (in_files, part) in [(true, 2 << 20), (false, 5 << 20)] {
        let packs = parts_of(in_files, &blobs).await;
        assert_eq!(packs.len(), 2, "{packs:?}");
        for parts in packs {
            let (last, full) = parts.split_last().unwrap();
            assert!(!full.is_empty() && last.0 <= part, "{parts:?}");
            assert!(full.iter().all(|(bytes, _)| *bytes == part), "{parts:?}");
        }
    }
}

#[tokio::test]
async fn a_page_is_two_pieces_of_a_part() {
    let blobs: Vec<Vec<u8>> = (0..2000).map(|seed| noise(seed, 4096)).collect();
    let packs = parts_of(true, &blobs).await;
    let (bytes, pieces) = packs[0][0];
    // The header and the checksum before it are one piece, the payload is the other.
    let frames = bytes / (4096 + 64);
    assert!(pieces <= 2 * frames + 8, "{pieces} pieces for {frames} frames");
}
