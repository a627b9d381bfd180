//! Push: from directories and stores into a real registry.

use crate::common::sample::{LARGE, SMALL, blob_path, chunks, directory, everything, page, put_blob, write};
use crate::common::{
    Registry, files, is_empty, memory, pull_dir, pull_store, push_dir, remote, repository, same_files, selector, tag, target,
};
use pfr_client::{Error, Progress, PushTarget, Source, push, push_into_store};
use pfr_schema::api::TagState;
use pfr_schema::codec::Compression;
use pfr_schema::{Digest, ErrorCode};
use pfr_testkit::front::{Fate, Front, Seen};
use std::io::Write as _;

fn is_upload(seen: &Seen) -> bool {
    seen.method == "PUT" && seen.path.ends_with("/frames")
}

fn is_question(seen: &Seen) -> bool {
    seen.path.ends_with("/missing")
}

#[tokio::test]
async fn a_directory_with_everything_goes_and_comes_back_byte_for_byte() {
    let registry = Registry::start().await;
    let (remote, source) = (registry.remote(), everything());
    let progress = Progress::default();
    let pushed = push(&Source::Directory(source.path().into()), &remote, target("t"), &progress).await.unwrap();
    assert!(pushed.created);
    assert_eq!(pushed.pages, 200);
    assert_eq!((progress.bytes_done() + progress.bytes_deduplicated(), progress.bytes_total()), (pushed.bytes_raw, pushed.bytes_raw));
    registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();

    let copy = tempfile::tempdir().unwrap();
    let pulled = pull_dir(&remote, "t", copy.path()).await.unwrap();
    assert_eq!((pulled.digest, pulled.pages, pulled.bytes_raw), (pushed.digest, 200, pushed.bytes_raw));
    same_files(source.path(), copy.path());

    let again = push_dir(&remote, copy.path(), "t").await.unwrap();
    assert_eq!((again.digest, again.blobs_sent, again.created), (pushed.digest, 0, false));
}

#[tokio::test]
async fn an_unchanged_directory_is_pushed_again_in_three_round_trips() {
    let registry = Registry::start().await;
    let (remote, source) = (registry.remote(), directory(SMALL, &(0..3000).collect::<Vec<_>>()));
    let first = push_dir(&remote, source.path(), "a").await.unwrap();
    let second = push_dir(&remote, source.path(), "b").await.unwrap();
    assert_eq!(first.digest, second.digest);
    assert_eq!((second.round_trips, second.blobs_sent, second.bytes_sent), (3, 0, 0));
    assert_eq!(second.bytes_deduplicated, second.bytes_raw);
}

#[tokio::test]
async fn pages_of_many_page_chunks_are_asked_about_and_sent_in_parts() {
    let (registry, source, progress) = (Registry::start().await, chunks(130), Progress::default());
    let front = Front::start(&registry.url, |_| Fate::Pass);
    let pushed = push(&Source::Directory(source.path().into()), &remote(&front.url), target("t"), &progress).await.unwrap();
    registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    let seen = front.seen();
    let (uploads, questions) = (seen.iter().filter(|s| is_upload(s)).count(), seen.iter().filter(|s| is_question(s)).count());
    assert_eq!((uploads, questions), (2, 4), "manifest, page chunks, pages of 128 of these, pages of two");
    let first = seen.iter().position(is_upload).unwrap();
    assert!(seen[first..].iter().any(is_question), "the pages of the last page chunks are asked about when the others are sent");
    let moved = (progress.bytes_done(), progress.bytes_deduplicated());
    assert_eq!((moved.0, moved.0 + moved.1, progress.bytes_total()), (pushed.bytes_sent_raw, pushed.bytes_raw, pushed.bytes_raw));
    let again = push_dir(&registry.remote(), source.path(), "u").await.unwrap();
    assert_eq!((again.digest, again.blobs_sent, again.bytes_deduplicated), (pushed.digest, 0, pushed.bytes_raw));
}

#[tokio::test]
async fn many_page_chunks_are_put_into_a_store_in_parts() {
    let (store, source, progress) = (memory().await, chunks(130), Progress::default());
    let origin = Source::Directory(source.path().into());
    let put = async || push_into_store(&origin, &store, &repository(), Some(tag("t")), Compression::default(), &progress).await.unwrap();
    let (committed, moved) = put().await;
    assert_eq!(progress.bytes_total(), moved + progress.bytes_deduplicated());
    store.verify(&committed.digest, &mut |_| {}).await.unwrap();
    let all = progress.bytes_total();
    assert_eq!(put().await.1, 0);
    assert_eq!(progress.bytes_deduplicated(), 2 * all - moved, "all of it was there");
}

#[tokio::test]
async fn a_push_looks_only_at_files_of_blobs_that_the_registry_lacks() {
    let registry = Registry::start().await;
    let mut pages: Vec<u64> = (0..2000).collect();
    let (remote, source) = (registry.remote(), directory(SMALL, &pages));
    let first = push_dir(&remote, source.path(), "a").await.unwrap();
    std::fs::rename(source.path().join("blobs"), source.path().join("elsewhere")).unwrap();
    let second = push_dir(&remote, source.path(), "b").await.unwrap();
    assert_eq!((second.digest, second.round_trips, second.blobs_sent), (first.digest, 3, 0));
    // Of one with a new page, only that is looked at and named.
    pages.push(5000);
    write(source.path(), "page_manifest.json", SMALL, &pages);
    std::fs::remove_dir_all(source.path().join("blobs")).unwrap();
    let error = push_dir(&remote, source.path(), "b").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::MissingBlobs, "{error}");
    assert!(error.to_string().contains("$.pages[2000].k"), "{error}");
}

#[tokio::test]
async fn a_push_does_not_read_pages_that_the_registry_has() {
    let registry = Registry::start().await;
    let mut pages: Vec<u64> = (0..200).collect();
    let (remote, source) = (registry.remote(), directory(SMALL, &pages));
    push_dir(&remote, source.path(), "a").await.unwrap();
    pages.extend([500, 501]);
    write(source.path(), "page_manifest.json", SMALL, &pages);
    // Other bytes of the same length in the files of the first push: one that was read would be
    // refused.
    for n in 0..400 {
        let path = blob_path(source.path(), &Digest::sha256(&page(n, 128)));
        assert!(path.exists(), "{}", path.display());
        std::fs::write(path, page(n + 1_000_000, 128)).unwrap();
    }
    let second = push_dir(&remote, source.path(), "b").await.unwrap();
    assert!(second.blobs_sent >= 4, "{second:?}");
    registry.store.verify(&second.digest, &mut |_| {}).await.unwrap();
}

#[tokio::test]
async fn a_push_of_one_percent_new_pages_costs_six_round_trips_and_the_new_pages() {
    let registry = Registry::start().await;
    let mut pages: Vec<u64> = (0..2000).collect();
    let (remote, source) = (registry.remote(), directory(LARGE, &pages));
    let first = push_dir(&remote, source.path(), "a").await.unwrap();
    pages.iter_mut().rev().take(20).for_each(|n| *n += 10_000);
    write(source.path(), "page_manifest.json", LARGE, &pages);
    let second = push_dir(&remote, source.path(), "b").await.unwrap();
    assert!(second.round_trips <= 6, "{} round trips", second.round_trips);
    let new = 40 * 16_384;
    assert!(second.bytes_sent <= new * 102 / 100 + (128 << 10), "{} bytes for {new} new", second.bytes_sent);
    assert!(first.bytes_sent > 50 * second.bytes_sent);
    assert_eq!(second.new_bytes, second.bytes_raw - second.bytes_deduplicated);
}

#[tokio::test]
async fn a_push_that_does_not_fit_in_one_request_takes_several_and_sends_nodes_last() {
    let registry = Registry::start_with(|c| (c.max_frames_bytes, c.max_digests) = (100_000, 300)).await;
    let (remote, source) = (registry.remote(), directory(LARGE, &(0..500).collect::<Vec<_>>()));
    std::fs::create_dir(source.path().join("attachments")).unwrap();
    std::fs::write(source.path().join("attachments/large"), page(1, 20 << 20)).unwrap();
    let progress = Progress::default();
    let pushed = push(&Source::Directory(source.path().into()), &remote, target("t"), &progress).await.unwrap();
    assert!(pushed.round_trips > 100, "{}", pushed.round_trips);
    assert_eq!((progress.bytes_done(), progress.blobs_done()), (pushed.bytes_raw, pushed.blobs_total));
    registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
}

#[tokio::test]
async fn zstd_files_go_as_they_are_and_odd_ones_decoded() {
    let registry = Registry::start().await;
    let dir = tempfile::tempdir().unwrap();
    let bytes = 16_384_u64;
    let numbers = [1_u64, 2, 3];
    let manifest = {
        let raw = |n: u64| vec![n as u8; bytes as usize];
        let pages = numbers.iter().enumerate().map(|(ix, n)| pfr_schema::flat::Page {
            ix: ix as u32,
            k: put_blob(dir.path(), &raw(2 * n)),
            v: put_blob(dir.path(), &raw(2 * n + 1)),
        });
        pfr_schema::flat::FlatManifest::new(LARGE.geometry, pages.collect(), vec![], &pfr_schema::Limits::default()).unwrap()
    };
    std::fs::write(dir.path().join("page_manifest.json"), manifest.to_bytes()).unwrap();
    let digests: Vec<Digest> = manifest.pages().iter().flat_map(|p| [p.k, p.v]).collect();
    let encode = |i: usize, raw: &[u8]| -> Vec<u8> {
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 19).unwrap();
        match i {
            // Several frames in one file.
            1 => return [zstd::bulk::compress(&raw[..100], 1).unwrap(), zstd::bulk::compress(&raw[100..], 1).unwrap()].concat(),
            // A window wider than registries decode.
            2 => encoder.window_log(24).unwrap(),
            // Hardly compressed: larger than raw.
            3 => {
                let frames: Vec<Vec<u8>> = raw.chunks(64).map(|c| zstd::bulk::compress(c, 1).unwrap()).collect();
                return frames.concat();
            }
            _ => {}
        }
        encoder.write_all(raw).unwrap();
        encoder.finish().unwrap()
    };
    for (i, digest) in digests.iter().enumerate().take(5) {
        let path = blob_path(dir.path(), digest);
        let raw = std::fs::read(&path).unwrap();
        std::fs::write(path.with_extension("zst"), encode(i, &raw)).unwrap();
        std::fs::remove_file(path).unwrap();
    }
    // The registry stores raw frames raw.
    let target = PushTarget { compression: Compression::Off, ..target("t") };
    let pushed = push(&Source::Directory(dir.path().into()), &registry.remote(), target, &Progress::default()).await.unwrap();
    registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    let at = registry.store.metadata().locate(digests).await.unwrap();
    let encoded: Vec<bool> = at.iter().map(|l| l.as_ref().unwrap().frame_len < bytes).collect();
    assert_eq!(encoded, [true, false, false, false, true, false]);
}

#[tokio::test]
async fn a_file_with_wrong_bytes_is_named_and_nothing_becomes_visible() {
    let registry = Registry::start().await;
    let source = directory(SMALL, &(0..100).collect::<Vec<_>>());
    let digest = Digest::sha256(&page(77, 128));
    std::fs::write(blob_path(source.path(), &digest), page(78_000, 128)).unwrap();
    let error = push_dir(&registry.remote(), source.path(), "t").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::DigestMismatch, "{error}");
    assert_eq!(error.code().exit_code(), 4);
    assert!(error.to_string().contains(&digest.hex()) && error.to_string().contains(&source.path().display().to_string()), "{error}");
    assert!(is_empty(&registry.store).await);
    // The good copy brings only what is missing.
    std::fs::write(blob_path(source.path(), &digest), page(77, 128)).unwrap();
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
}

#[tokio::test]
async fn a_zstd_file_of_something_else_is_named() {
    let registry = Registry::start().await;
    let source = directory(SMALL, &[1]);
    let path = blob_path(source.path(), &Digest::sha256(&page(2, 128)));
    std::fs::remove_file(&path).unwrap();
    let zst = path.with_extension("zst");
    for (content, code) in [
        (zstd::bulk::compress(&page(5, 128), 1).unwrap(), ErrorCode::DigestMismatch),
        (zstd::bulk::compress(&page(2, 129), 1).unwrap(), ErrorCode::LengthMismatch),
        (b"not zstd at all".to_vec(), ErrorCode::CorruptFrame),
        (
            [zstd::bulk::compress(&page(2, 64), 1).unwrap(), zstd::bulk::compress(&page(2, 63), 1).unwrap()].concat(),
            ErrorCode::LengthMismatch,
        ),
        (
            [zstd::bulk::compress(&page(2, 64), 1).unwrap(), zstd::bulk::compress(&page(2, 65), 1).unwrap()].concat(),
            ErrorCode::LengthMismatch,
        ),
    ] {
        std::fs::write(&zst, content).unwrap();
        let error = push_dir(&registry.remote(), source.path(), "t").await.unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.to_string().contains(".zst"), "{error}");
    }
}

#[tokio::test]
async fn a_snapshot_goes_from_store_to_store_through_registries() {
    let (one, two, local) = (Registry::start().await, Registry::start().await, memory().await);
    let source = everything();
    let pushed = push_dir(&one.remote(), source.path(), "t").await.unwrap();
    pull_store(&one.remote(), "t", &local).await.unwrap();
    let origin = Source::Store { store: local.clone(), snapshot: pushed.digest };
    let sent = push(&origin, &two.remote(), target("t"), &Progress::default()).await.unwrap();
    assert_eq!((sent.digest, sent.pages, sent.bytes_raw, sent.blobs_total), (pushed.digest, 200, pushed.bytes_raw, pushed.blobs_total));
    two.store.verify(&sent.digest, &mut |_| {}).await.unwrap();
    let again = push(&origin, &two.remote(), target("u"), &Progress::default()).await.unwrap();
    assert_eq!((again.round_trips, again.blobs_sent), (3, 0));
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&two.remote(), "t", copy.path()).await.unwrap();
    assert_eq!(files(source.path()), files(copy.path()));
    let parents = pfr_client::PushTarget { parents: vec![pushed.digest], ..target("t") };
    assert_eq!(push(&origin, &two.remote(), parents, &Progress::default()).await.unwrap_err().code(), ErrorCode::InvalidDocument);
}

#[tokio::test]
async fn parents_are_recorded_and_change_the_snapshot_only_if_they_are_new() {
    let registry = Registry::start().await;
    let (remote, source) = (registry.remote(), everything());
    let first = push_dir(&remote, source.path(), "a").await.unwrap();
    let with = |parents| pfr_client::PushTarget { parents, ..target("b") };
    let origin = Source::Directory(source.path().into());
    let second = push(&origin, &remote, with(vec![first.digest]), &Progress::default()).await.unwrap();
    assert_ne!(first.digest, second.digest);
    let detail = remote.snapshot(&repository(), &selector("b")).await.unwrap();
    assert_eq!((detail.config.parents, detail.config.agent.as_deref()), (vec![first.digest], Some("a-1")));
    assert_eq!(remote.snapshot(&repository(), &selector("b~1")).await.unwrap().summary.digest, first.digest);
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&remote, "b", copy.path()).await.unwrap();
    let same = push(&Source::Directory(copy.path().into()), &remote, with(vec![first.digest]), &Progress::default()).await.unwrap();
    assert_eq!(same.digest, second.digest);
}

#[tokio::test]
async fn a_tag_moves_only_from_where_it_was_said_to_be() {
    let registry = Registry::start().await;
    let (remote, a, b) = (registry.remote(), directory(SMALL, &[1]), directory(SMALL, &[2]));
    let first = push_dir(&remote, a.path(), "t").await.unwrap();
    let origin = Source::Directory(b.path().into());
    let from = |state| pfr_client::PushTarget { if_tag_is: Some(state), ..target("t") };
    for stale in [TagState::Absent, TagState::At(Digest::sha256(b"x"))] {
        let error = push(&origin, &remote, from(stale), &Progress::default()).await.unwrap_err();
        assert_eq!((error.code(), error.code().exit_code()), (ErrorCode::TagMoved, 3), "{error}");
    }
    assert_eq!(remote.tag(&repository(), &tag("t")).await.unwrap().digest, first.digest);
    let moved = push(&origin, &remote, from(TagState::At(first.digest)), &Progress::default()).await.unwrap();
    assert_eq!(remote.tag(&repository(), &tag("t")).await.unwrap().digest, moved.digest);
}

#[tokio::test]
async fn nobody_there_is_unreachable_after_retries() {
    let closed = remote("http://127.0.0.1:1");
    let source = directory(SMALL, &[1]);
    let error = push_dir(&closed, source.path(), "t").await.unwrap_err();
    assert!(matches!(&error, Error::Unreachable { attempts: 3, .. }), "{error}");
    assert_eq!(error.code().exit_code(), 7);
    assert_eq!(closed.round_trips(), 3);
}
