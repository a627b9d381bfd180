//! Upload, look-up, commit, deletion: the promises of the store, through its public interface.

use crate::common::rig::{Backend, Rig};
use crate::common::{Snapshot, blob_frame, page, pieces, push, repository, snapshot, stream, tag};
use futures::TryStreamExt as _;
use pfr_schema::api::TagState;
use pfr_schema::snapshot::Manifest;
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode, Kind, Limits, Selector};
use pfr_store::{Error, Options, Store, document_frame};
use std::collections::HashMap;
use std::time::Duration;

on_every_backend!(
    a_committed_snapshot_comes_back_byte_for_byte,
    frames_come_out_in_the_order_asked_for_and_can_be_ingested_elsewhere,
    a_node_whose_children_are_not_stored_is_refused_and_nothing_of_it_is_kept,
    a_page_of_the_wrong_length_is_refused_with_its_page_chunk,
    a_tree_with_wrong_lengths_of_page_chunks_is_refused,
    a_node_uploaded_as_a_plain_blob_does_not_count_as_a_node,
    twelve_forks_with_one_percent_new_pages_store_what_is_shared_once,
    commit_touches_the_same_few_rows_whatever_the_size_of_the_snapshot,
    a_second_push_of_shared_pages_writes_no_row_for_them,
    a_tag_moves_only_from_where_the_caller_says,
    a_snapshot_is_deleted_only_with_the_tags_that_the_caller_saw,
    forks_are_made_all_or_none,
    a_shortened_digest_means_the_one_snapshot_that_begins_so,
    parents_can_be_walked_and_deleted_ones_end_the_walk,
    sessions_end_with_their_lease_and_nothing_uncommitted_is_visible,
    a_broken_stream_keeps_what_came_whole,
    wrong_bytes_are_named_with_both_digests,
    a_blob_larger_than_a_pack_passes_in_pieces,
);

async fn collect(store: &Store, digests: Vec<Digest>) -> Vec<u8> {
    let pieces: Vec<bytes::Bytes> = store.frames(digests).await.unwrap().try_collect().await.unwrap();
    pieces.concat()
}

async fn a_committed_snapshot_comes_back_byte_for_byte(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&(0..300).collect::<Vec<_>>(), vec![]));
    let store = &rig.store;
    let (ingested, committed) = push(store, &snapshot, "latest").await.unwrap();
    assert!(committed.created);
    assert_eq!(ingested.new, ingested.frames);
    let digest = store.resolve(&repository(), &"latest".parse::<Selector>().unwrap()).await.unwrap();
    assert_eq!(digest, snapshot.manifest.digest);
    for raw in &snapshot.pages {
        assert_eq!(store.read(&Digest::sha256(raw)).await.unwrap(), raw[..]);
    }
    assert_eq!(store.read(&snapshot.tree.digest).await.unwrap(), snapshot.tree.bytes[..]);
    let flats = store.flat_manifests(&digest).await.unwrap();
    assert_eq!(flats[0].2.to_bytes(), snapshot.flat.to_bytes());
    let verified = store.verify(&digest, &mut |_| ()).await.unwrap();
    assert_eq!(verified.blobs, 600 + snapshot.runs.len() as u64 + 3);
}

async fn frames_come_out_in_the_order_asked_for_and_can_be_ingested_elsewhere(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&(0..100).collect::<Vec<_>>(), vec![]));
    let store = &rig.store;
    push(store, &snapshot, "a").await.unwrap();
    let mut digests: Vec<Digest> = snapshot.pages.iter().map(|p| Digest::sha256(p)).rev().collect();
    digests.extend(snapshot.documents().iter().map(|d| d.digest));
    let bytes = collect(store, digests).await;
    let other = Rig::new(on).await;
    let other = &other.store;
    let session = other.open_push(&repository()).await.unwrap();
    other.ingest(&session.id, pieces(&bytes, 4096)).await.unwrap();
    other.commit(&session.id, snapshot.manifest.digest, Some(tag("b")), None).await.unwrap();
    other.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn a_node_whose_children_are_not_stored_is_refused_and_nothing_of_it_is_kept(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2, 3], vec![]));
    let store = &rig.store;
    let session = store.open_push(&repository()).await.unwrap();
    let only_k = snapshot.pages.iter().step_by(2).map(|p| blob_frame(p)).chain([document_frame(&snapshot.runs[0])]);
    let error = store.ingest(&session.id, pieces(&stream(only_k), 100)).await.unwrap_err();
    assert!(
        matches!(&error, Error::Missing { container, missing } if *container == snapshot.runs[0].digest && missing.len() == 3),
        "{error}"
    );
    assert_eq!(store.missing(&session.id, vec![(snapshot.runs[0].digest, Kind::Run)]).await.unwrap(), vec![0]);
}

async fn a_page_of_the_wrong_length_is_refused_with_its_page_chunk(on: Backend) {
    let (rig, short) = (Rig::new(on).await, vec![7_u8; 64]);
    let store = &rig.store;
    let session = store.open_push(&repository()).await.unwrap();
    let run = pfr_schema::run::Run::new(2, 128, vec![Digest::sha256(&short), Digest::sha256(&short)]).unwrap();
    let run = pfr_schema::tree::Document::new(Kind::Run, run.to_bytes());
    let error = store.ingest(&session.id, pieces(&stream([blob_frame(&short), document_frame(&run)]), 100)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LengthMismatch, "{error}");
    assert!(error.to_string().contains("128 bytes") && error.to_string().contains("64 bytes"), "{error}");
}

async fn a_tree_with_wrong_lengths_of_page_chunks_is_refused(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2, 3], vec![]));
    let store = &rig.store;
    let text = String::from_utf8(snapshot.tree.bytes.clone()).unwrap();
    let lying = text.replace("\"pages\":3", "\"pages\":4").replace("[[0,3]]", "[[0,4]]");
    assert_ne!(lying, text);
    let lying = pfr_schema::tree::Document::new(Kind::Tree, lying.into_bytes());
    let session = store.open_push(&repository()).await.unwrap();
    let frames = snapshot.pages.iter().map(|p| blob_frame(p)).chain([document_frame(&snapshot.runs[0]), document_frame(&lying)]);
    let error = store.ingest(&session.id, pieces(&stream(frames), 100)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LengthMismatch, "{error}");
}

async fn a_node_uploaded_as_a_plain_blob_does_not_count_as_a_node(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&[1, 2, 3], vec![]));
    let store = &rig.store;
    let session = store.open_push(&repository()).await.unwrap();
    let run = &snapshot.runs[0];
    store.ingest(&session.id, pieces(&stream([blob_frame(&run.bytes)]), 100)).await.unwrap();
    assert_eq!(store.missing(&session.id, vec![(run.digest, Kind::Run)]).await.unwrap(), vec![0], "it holds no children");
    assert!(store.missing(&session.id, vec![(run.digest, Kind::Blob)]).await.unwrap().is_empty());
    push(store, &snapshot, "now").await.unwrap();
    assert!(store.missing(&session.id, vec![(run.digest, Kind::Run)]).await.unwrap().is_empty());
    store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
}

async fn twelve_forks_with_one_percent_new_pages_store_what_is_shared_once(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let base: Vec<u64> = (0..2000).collect();
    let first = snapshot(&base, vec![]);
    push(store, &first, "base").await.unwrap();
    let one = store.stats(None).await.unwrap();
    for fork in 1..=12_u64 {
        let mut pages = base.clone();
        for (i, page) in pages.iter_mut().rev().take(20).enumerate() {
            *page = 10_000 * fork + i as u64;
        }
        push(store, &snapshot(&pages, vec![first.manifest.digest]), &format!("fork-{fork}")).await.unwrap();
    }
    let all = store.stats(Some(&repository())).await.unwrap();
    assert_eq!(all.snapshots.len(), 13);
    assert!(all.unique as f64 <= 1.13 * one.unique as f64 + 12.0 * 60_000.0, "{} against {}", all.unique, one.unique);
    // Pages of 128 bytes: their entries in page chunks have as many bytes as the pages.
    assert!(all.dedup_ratio > 7.0, "{}", all.dedup_ratio);
    let sum: u64 = all.snapshots.iter().map(|s| s.new).sum();
    assert_eq!(sum, all.unique);
    for fork in &all.snapshots[1..] {
        assert!(fork.exclusive >= 40 * 128 && fork.exclusive < 40 * 128 + 60_000, "{fork:?}");
        assert!(fork.shared > 200_000, "{fork:?}");
    }
}

async fn commit_touches_the_same_few_rows_whatever_the_size_of_the_snapshot(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let mut touched = Vec::new();
    for (i, pages) in [100_u64, 1000, 5000].into_iter().enumerate() {
        let snapshot = snapshot(&(0..pages).collect::<Vec<_>>(), vec![]);
        let session = store.open_push(&repository()).await.unwrap();
        store.ingest(&session.id, pieces(&snapshot.stream(), 65536)).await.unwrap();
        let before = store.metadata().rows_written();
        store.commit(&session.id, snapshot.manifest.digest, Some(tag(&format!("t{i}"))), None).await.unwrap();
        touched.push(store.metadata().rows_written() - before);
    }
    assert!(touched.iter().all(|rows| *rows == touched[0] && *rows < 12), "rows written by commits: {touched:?}");
}

async fn a_second_push_of_shared_pages_writes_no_row_for_them(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let base: Vec<u64> = (0..5000).collect();
    push(store, &snapshot(&base, vec![]), "a").await.unwrap();
    let mut changed = base;
    changed.push(99_999);
    let next = snapshot(&changed, vec![]);
    let session = store.open_push(&repository()).await.unwrap();
    let wanted: Vec<_> = next.runs.iter().map(|r| (r.digest, Kind::Run)).collect();
    let before = store.metadata().rows_written();
    let missing = store.missing(&session.id, wanted).await.unwrap();
    assert_eq!(missing.len(), 1, "only the last run is new");
    let run = &next.runs[missing[0]];
    let frames = next.pages[next.pages.len() - 2..].iter().map(|p| blob_frame(p));
    let documents = [run, &next.tree, &next.config, &next.manifest].map(document_frame);
    store.ingest(&session.id, pieces(&stream(frames.chain(documents)), 65536)).await.unwrap();
    store.commit(&session.id, next.manifest.digest, None, None).await.unwrap();
    let rows = store.metadata().rows_written() - before;
    let pages_in_run = 1024 * 2;
    assert!(rows < pages_in_run + 2 * next.runs.len() as u64 + 40, "{rows} rows");
}

async fn a_tag_moves_only_from_where_the_caller_says(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let (a, b) = (snapshot(&[1], vec![]), snapshot(&[2], vec![]));
    push(store, &a, "t").await.unwrap();
    let session = store.open_push(&repository()).await.unwrap();
    store.ingest(&session.id, pieces(&b.stream(), 100)).await.unwrap();
    for stale in [TagState::Absent, TagState::At(b.manifest.digest)] {
        let error = store.commit(&session.id, b.manifest.digest, Some(tag("t")), Some(stale)).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::TagMoved);
    }
    assert_eq!(store.tag(&repository(), &tag("t")).await.unwrap().digest, a.manifest.digest);
    assert_eq!(store.snapshots(&repository(), None, 10).await.unwrap().rows.len(), 1, "a refused commit leaves no snapshot");
    store.commit(&session.id, b.manifest.digest, Some(tag("t")), Some(TagState::At(a.manifest.digest))).await.unwrap();
    assert_eq!(store.tag(&repository(), &tag("t")).await.unwrap().digest, b.manifest.digest);
}

async fn a_snapshot_is_deleted_only_with_the_tags_that_the_caller_saw(on: Backend) {
    let rig = Rig::new(on).await;
    let (store, of) = (&rig.store, repository());
    let digest = push(store, &snapshot(&[1], vec![]), "a").await.unwrap().1.digest;
    store.put_tag(&of, tag("set-in-between"), digest, None).await.unwrap();
    for stale in [&[][..], &[tag("a")], &[tag("a"), tag("gone"), tag("set-in-between")]] {
        let error = store.delete_snapshot_tagged(&of, &digest, stale).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::TagMoved, "{stale:?}");
        assert!(error.to_string().contains("are now a, set-in-between"), "{error}");
        assert_eq!(store.tags(&of, None, 10).await.unwrap().rows.len(), 2, "nothing is deleted");
    }
    store.delete_snapshot_tagged(&of, &digest, &[tag("set-in-between"), tag("a")]).await.unwrap();
    assert_eq!(store.snapshot(&of, &digest).await.unwrap_err().code(), ErrorCode::RepositoryUnknown);
}

async fn forks_are_made_all_or_none(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let a = snapshot(&[1], vec![]);
    push(store, &a, "f-3").await.unwrap();
    let error = store.fork(&repository(), a.manifest.digest, "f", 4).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::TagMoved);
    assert_eq!(store.tags(&repository(), None, 10).await.unwrap().rows.len(), 1);
    assert_eq!(store.fork(&repository(), a.manifest.digest, "g", 4).await.unwrap().len(), 4);
    assert!(store.fork(&repository(), a.manifest.digest, "../x", 1).await.is_err());
    assert!(store.fork(&repository(), a.manifest.digest, "h", 0).await.is_err());
}

async fn parents_can_be_walked_and_deleted_ones_end_the_walk(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let mut parents = vec![];
    let mut digests = vec![];
    for i in 0..4 {
        let s = snapshot(&[i], parents);
        push(store, &s, "t").await.unwrap();
        parents = vec![s.manifest.digest];
        digests.push(s.manifest.digest);
    }
    let resolve = async |text: &str| store.resolve(&repository(), &text.parse().unwrap()).await;
    assert_eq!(resolve("t~3").await.unwrap(), digests[0]);
    assert_eq!(resolve("t~4").await.unwrap_err().code(), ErrorCode::SnapshotUnknown);
    assert_eq!(store.lineage(&repository(), &digests[3], 100).await.unwrap().snapshots.len(), 4);
    assert!(store.lineage(&repository(), &digests[3], 2).await.unwrap().truncated);
    store.delete_snapshot(&repository(), &digests[1]).await.unwrap();
    assert_eq!(store.lineage(&repository(), &digests[3], 100).await.unwrap().snapshots.len(), 2);
    assert_eq!(resolve("t~2").await.unwrap_err().code(), ErrorCode::SnapshotUnknown);
}

/// Two manifests of one snapshot whose digests begin alike, and what is common to them.
fn twins(of: &Snapshot) -> (Document, Document, String) {
    let mut seen: HashMap<String, Document> = HashMap::new();
    for n in 0_u32.. {
        let mut manifest = Manifest::parse(&of.manifest.bytes, &Limits::default()).unwrap();
        manifest.annotations.insert("n".into(), n.to_string());
        let document = manifest.to_document();
        let start = document.digest.hex()[..6].to_owned();
        if let Some(other) = seen.insert(start.clone(), document.clone()) {
            return (other, document, start);
        }
    }
    unreachable!("24 bits are used up")
}

async fn a_shortened_digest_means_the_one_snapshot_that_begins_so(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let mut snapshot = snapshot(&[1, 2], vec![]);
    let (one, other, start) = twins(&snapshot);
    let resolve = async |text: &str| store.resolve(&repository(), &text.parse().unwrap()).await;
    assert_eq!(resolve(&format!("@{start}")).await.unwrap_err().code(), ErrorCode::RepositoryUnknown);
    snapshot.manifest = one.clone();
    push(store, &snapshot, "one").await.unwrap();
    for text in [format!("@{start}"), format!("sha256:{start}"), format!("@{}", one.digest.hex())] {
        assert_eq!(resolve(&text).await.unwrap(), one.digest, "{text}");
    }
    // A blob with such a digest is no snapshot, nor is a snapshot of another repository, or by
    // another algorithm.
    let page = Digest::sha256(&snapshot.pages[0]);
    assert_eq!(resolve(&format!("@{}", page.short())).await.unwrap_err().code(), ErrorCode::SnapshotUnknown);
    assert_eq!(resolve(&format!("blake3:{start}")).await.unwrap_err().code(), ErrorCode::SnapshotUnknown);
    let elsewhere = store.open_push(&"other".parse().unwrap()).await.unwrap();
    snapshot.manifest = other.clone();
    store.ingest(&elsewhere.id, pieces(&snapshot.stream(), 777)).await.unwrap();
    store.commit(&elsewhere.id, other.digest, None, None).await.unwrap();
    assert_eq!(resolve(&format!("@{start}")).await.unwrap(), one.digest);

    push(store, &snapshot, "other").await.unwrap();
    let error = resolve(&format!("@{start}")).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::AmbiguousDigest);
    let words = error.to_string();
    assert!(words.contains(&one.digest.to_string()) && words.contains(&other.digest.to_string()), "{words}");
    for document in [&one, &other] {
        assert_eq!(resolve(&format!("@{}", document.digest.short())).await.unwrap(), document.digest);
    }
    store.delete_snapshot(&repository(), &one.digest).await.unwrap();
    assert_eq!(resolve(&format!("@{start}")).await.unwrap(), other.digest);
}

async fn sessions_end_with_their_lease_and_nothing_uncommitted_is_visible(on: Backend) {
    let rig = Rig::still(on, Options { lease: Duration::from_secs(60), ..Options::default() }).await;
    let store = &rig.store;
    let a = snapshot(&[1], vec![]);
    let session = store.open_push(&repository()).await.unwrap();
    store.ingest(&session.id, pieces(&a.stream(), 100)).await.unwrap();
    assert_eq!(store.snapshots(&repository(), None, 10).await.unwrap_err().code(), ErrorCode::RepositoryUnknown);
    assert!(store.repositories(None, 10).await.unwrap().rows.is_empty());
    rig.seconds(61);
    let error = store.commit(&session.id, a.manifest.digest, None, None).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::PushUnknown);
    assert_eq!(store.ingest(&session.id, pieces(&a.stream(), 100)).await.unwrap_err().code(), ErrorCode::PushUnknown);
}

async fn a_broken_stream_keeps_what_came_whole(on: Backend) {
    let (rig, snapshot) = (Rig::new(on).await, snapshot(&(0..50).collect::<Vec<_>>(), vec![]));
    let store = &rig.store;
    let session = store.open_push(&repository()).await.unwrap();
    let bytes = snapshot.stream();
    let frame = blob_frame(&page(0)).len();
    let error = store.ingest(&session.id, pieces(&bytes[..frame * 40 + 17], 333)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Truncated, "{error}");
    let wanted: Vec<_> = snapshot.pages.iter().map(|p| (Digest::sha256(p), Kind::Blob)).collect();
    assert_eq!(store.missing(&session.id, wanted).await.unwrap(), (40..100).collect::<Vec<_>>());
}

async fn wrong_bytes_are_named_with_both_digests(on: Backend) {
    let rig = Rig::new(on).await;
    let store = &rig.store;
    let session = store.open_push(&repository()).await.unwrap();
    let mut lying = blob_frame(&page(1)).to_vec();
    let payload = lying.len() - 4 - 128;
    lying[payload] ^= 1;
    let checksum = crc32c::crc32c(&lying[payload..payload + 128]).to_le_bytes();
    let at = lying.len() - 4;
    lying[at..].copy_from_slice(&checksum);
    let error = store.ingest(&session.id, pieces(&stream([&lying]), 50)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::DigestMismatch);
    assert!(error.to_string().contains(&Digest::sha256(&page(1)).to_string()), "{error}");
    lying[at] ^= 1;
    let error = store.ingest(&session.id, pieces(&stream([&lying]), 50)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptFrame, "{error}");
}

async fn a_blob_larger_than_a_pack_passes_in_pieces(on: Backend) {
    let rig = Rig::still(on, Options { pack_bytes: 1 << 20, ..Options::default() }).await;
    let store = &rig.store;
    let large: Vec<u8> = (0..20_u32 << 20).map(|i| (i ^ (i >> 8)) as u8).collect();
    let session = store.open_push(&repository()).await.unwrap();
    let frames = [blob_frame(&page(1)), blob_frame(&large), blob_frame(&page(2))];
    let done = store.ingest(&session.id, pieces(&stream(frames), 1 << 20)).await.unwrap();
    assert_eq!(done.new, 3);
    assert_eq!(store.read(&Digest::sha256(&large)).await.unwrap(), large[..]);
    let bytes = collect(store, vec![Digest::sha256(&page(2)), Digest::sha256(&large)]).await;
    assert!(bytes.ends_with(&pfr_schema::frame::end_mark(2)));
    // A large blob with one wrong byte is refused after its last piece and leaves nothing.
    let mut wrong = blob_frame(&large).to_vec();
    wrong[200] ^= 1;
    let other = Rig::new(on).await;
    let other = &other.store;
    let session = other.open_push(&repository()).await.unwrap();
    assert!(other.ingest(&session.id, pieces(&stream([&wrong]), 1 << 20)).await.is_err());
    assert_eq!(other.missing(&session.id, vec![(Digest::sha256(&large), Kind::Blob)]).await.unwrap(), vec![0]);
}

#[tokio::test]
async fn a_store_on_disk_survives_being_reopened_and_two_handles_see_one_store() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = snapshot(&(0..200).collect::<Vec<_>>(), vec![]);
    {
        let store = Store::open(dir.path(), Options::default()).await.unwrap();
        push(&store, &snapshot, "kept").await.unwrap();
        let other = Store::open(dir.path(), Options::default()).await.unwrap();
        other.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    }
    let store = Store::open(dir.path(), Options::default()).await.unwrap();
    store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap();
    // Damage is found and named.
    let pack = walk(&dir.path().join("packs")).pop().unwrap();
    let mut bytes = std::fs::read(&pack).unwrap();
    bytes[8 + 60 + 50] ^= 1;
    std::fs::write(&pack, bytes).unwrap();
    let error = store.verify(&snapshot.manifest.digest, &mut |_| ()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::CorruptStore, "{error}");
    assert!(error.to_string().contains(&Digest::sha256(&snapshot.pages[0]).to_string()), "{error}");
}

#[tokio::test]
async fn a_pack_on_disk_can_be_read_from_its_index_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), Options::default()).await.unwrap();
    let snapshot = snapshot(&(0..20).collect::<Vec<_>>(), vec![]);
    push(&store, &snapshot, "t").await.unwrap();
    let bytes = std::fs::read(walk(&dir.path().join("packs")).pop().unwrap()).unwrap();
    let footer_at = bytes.len() - pfr_schema::pack::FOOTER_LEN;
    let footer = pfr_schema::pack::Footer::parse(&bytes[footer_at..], bytes.len() as u64).unwrap();
    let index = &bytes[footer.index_offset as usize..footer_at];
    let entries = footer.parse_index(index, &Default::default()).unwrap();
    let names: Vec<Digest> = entries.iter().map(|e| e.header.digest).collect();
    let expected: Vec<Digest> =
        snapshot.pages.iter().map(|p| Digest::sha256(p)).chain(snapshot.documents().iter().map(|d| d.digest)).collect();
    assert_eq!(names, expected);
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        if entry.path().is_dir() { files.extend(walk(&entry.path())) } else { files.push(entry.path()) }
    }
    // Not the journal, which lies beside the packs.
    files.retain(|file| file.extension().is_some_and(|e| e == "pfpack"));
    files
}
