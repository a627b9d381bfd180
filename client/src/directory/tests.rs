use super::*;
use crate::encoding::Encoding;
use crate::error::Error;
use futures::TryStreamExt as _;
use pfr_schema::codec::{Codecs, Compression};
use pfr_schema::flat::{FlatManifest, Page};
use pfr_schema::geometry::{Dtype, Geometry};
use std::sync::Arc;

/// A directory of one page whose K and V are the same `len` bytes, and where they lie.
fn one_page(len: u32) -> (tempfile::TempDir, PathBuf, Item) {
    page_of(7, len)
}

/// Likewise, where each byte is this one.
fn page_of(byte: u8, len: u32) -> (tempfile::TempDir, PathBuf, Item) {
    let dir = tempfile::tempdir().unwrap();
    let bytes = vec![byte; len as usize];
    let digest = Digest::sha256(&bytes);
    let path = dir.path().join(layout::blob(&digest));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, bytes).unwrap();
    let geometry = Geometry { page_size_tokens: 1, n_layers: 1, n_heads: 1, head_dim: len / 4, dtype: Dtype::F32 };
    let page = Page { ix: 0, k: digest, v: digest };
    let flat = FlatManifest::new(geometry, vec![page], vec![], &Limits::default()).unwrap();
    std::fs::write(dir.path().join(layout::PAGE_MANIFEST), flat.to_bytes()).unwrap();
    (dir, path, Item { digest, kind: Kind::Blob, size: Some(u64::from(len)), elements: None })
}

fn encoding() -> Encoding {
    Encoding::new(Compression::Hot, Codecs::ALL)
}

async fn read(directory: Directory, items: &[Item]) -> Result<Vec<u8>> {
    let pieces: Vec<bytes::Bytes> = frames::frames(Arc::new(directory), items.into(), encoding()).try_collect().await?;
    Ok(pieces.concat())
}

#[tokio::test]
async fn frames_are_what_files_hold_at_every_size_around_a_piece() {
    for len in [4_u32, 400, (1 << 20) - 600, (1 << 20) - 92, 1 << 20, (1 << 20) + 4, 5 << 20] {
        let (dir, path, item) = one_page(len);
        let directory = Directory::open(dir.path(), &Limits::default()).unwrap();
        let stream = read(directory, &[item, item]).await.unwrap();
        let raw = std::fs::read(&path).unwrap();
        let length = u64::from(len);
        let codec = pfr_schema::codec::Codec::Raw;
        let header = pfr_schema::frame::Header { codec, kind: Kind::Blob, digest: item.digest, raw_len: length, stored_len: length };
        let frame = pfr_schema::frame::encode(&header, &raw);
        assert!(stream == [&frame[..], &frame].concat(), "{len} bytes");
    }
}

#[tokio::test]
async fn a_small_frame_of_a_large_blob_holds_no_more_memory_than_its_bytes() {
    let (dir, _, item) = page_of(0, 4 << 20);
    let directory = Arc::new(Directory::open(dir.path(), &Limits::default()).unwrap());
    let stream = frames::frames(directory, vec![item; 3].into(), encoding());
    let pieces: Vec<bytes::Bytes> = stream.try_collect().await.unwrap();
    assert_eq!(pieces.len(), 3, "a blob needs the room of the raw one, and gets a piece of its own");
    for piece in pieces {
        let (len, held) = (piece.len(), piece.try_into_mut().unwrap().capacity());
        assert!(len < 1024 && held < 4096, "{len} bytes hold {held}");
    }
}

#[tokio::test]
async fn a_file_that_changes_after_it_was_checked_is_an_error_that_names_it() {
    type Change = fn(&Path);
    let changes: [(&str, Change); 3] = [
        ("shorter", |path| std::fs::write(path, "x").unwrap()),
        ("longer", |path| std::fs::write(path, vec![7; 401]).unwrap()),
        ("gone", |path| std::fs::remove_file(path).unwrap()),
    ];
    for (name, change) in changes {
        let (dir, path, item) = one_page(400);
        let directory = Directory::open(dir.path(), &Limits::default()).unwrap();
        change(&path);
        let error = read(directory, &[item]).await.unwrap_err();
        assert!(matches!(error, Error::Changed { .. } | Error::Io { .. }), "{name}: {error}");
        assert!(error.to_string().contains(&path.display().to_string()), "{name}: {error}");
    }
}

#[test]
fn a_directory_that_became_another_snapshot_is_an_error_at_its_first_file() {
    let (dir, path, item) = one_page(400);
    let directory = Directory::open_documents(dir.path(), &Limits::default()).unwrap();
    directory.check(&[item]).unwrap();
    let (other, _, _) = page_of(8, 400);
    std::fs::remove_dir_all(dir.path().join("blobs")).unwrap();
    let error = directory.check(&[item]).unwrap_err();
    assert!(matches!(error, Error::MissingBlob { .. }), "{error}");
    for name in [layout::PAGE_MANIFEST, "blobs"] {
        drop(std::fs::remove_file(dir.path().join(name)));
        std::fs::rename(other.path().join(name), dir.path().join(name)).unwrap();
    }
    let error = directory.check(&[item]).unwrap_err();
    assert!(matches!(&error, Error::Refused { path: named, .. } if *named == path), "{error}");
    assert!(error.to_string().ends_with("it changed while it was being pushed: push again"), "{error}");
}

#[tokio::test]
async fn a_dropped_stream_ends_its_reader() {
    let (dir, _, item) = one_page(4 << 20);
    let directory = Arc::new(Directory::open(dir.path(), &Limits::default()).unwrap());
    let mut stream = frames::frames(Arc::clone(&directory), vec![item; 50].into(), encoding());
    stream.try_next().await.unwrap();
    drop(stream);
    // The reader holds the directory until it has noticed.
    while Arc::strong_count(&directory) > 1 {
        tokio::task::yield_now().await;
    }
}

#[test]
fn an_unchanged_directory_is_always_the_same_snapshot() {
    let (dir, _, _) = one_page(400);
    let digest = |parents: Vec<Digest>| {
        let directory = Directory::open(dir.path(), &Limits::default()).unwrap();
        directory.with_parents(parents).unwrap().digest()
    };
    let parent = Digest::sha256(b"parent");
    assert_eq!(digest(vec![]), Directory::open(dir.path(), &Limits::default()).unwrap().digest());
    assert_eq!(digest(vec![parent]), digest(vec![parent]));
    assert_ne!(digest(vec![]), digest(vec![parent]));
    let three = Directory::open(dir.path(), &Limits::default()).unwrap().with_parents(vec![parent; 3]);
    assert!(three.is_err());
}
