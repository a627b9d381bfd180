//! Pull: from a real registry into stores and directories.

use crate::common::agent::{Answer, agent};
use crate::common::sample::{LARGE, SMALL, blob_path, chunks, directory, everything, page, write};
use crate::common::{Registry, files, memory, pf, pull_dir, pull_store, push_dir, remote, repository, same_files, selector, tag, target};
use pfr_client::{Brake, Counted, Destination, Flight, Passage, Progress, Source, Way, look_up, pull, push};
use pfr_schema::api::MatchRequest;
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::run::Run;
use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig, TITLE};
use pfr_schema::tree::{Document, Group, GroupKind, PageTree, RunRef, SCHEMA};
use pfr_schema::{Digest, ErrorCode, Kind, Limits, media_type};
use pfr_store::{GcOptions, Options, Store, document_frame};
use pfr_testkit::front::{Fate, Front, Seen};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[tokio::test]
async fn a_snapshot_is_pulled_into_a_store_once() {
    let (registry, local) = (Registry::start().await, memory().await);
    let (remote, source) = (registry.remote(), everything());
    let pushed = push_dir(&remote, source.path(), "t").await.unwrap();
    let progress = Progress::default();
    let destination = Destination::Store { store: local.clone(), repository: repository(), tag: Some(tag("here")) };
    let first = pull(&remote, &repository(), &selector("t"), &destination, &progress).await.unwrap();
    assert_eq!((first.digest, first.pages, first.bytes_raw, first.blobs_total), (pushed.digest, 200, pushed.bytes_raw, pushed.blobs_total));
    assert_eq!(local.resolve(&repository(), &selector("here")).await.unwrap(), pushed.digest);
    local.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    assert_eq!(progress.bytes_done() + progress.bytes_deduplicated(), progress.bytes_total());

    let second = pull_store(&remote, "t", &local).await.unwrap();
    assert_eq!((second.round_trips, second.blobs_received, second.bytes_received), (1, 0, 0));
    assert_eq!(second.bytes_deduplicated, second.bytes_raw);
    let by_digest = pull_store(&remote, &pushed.digest.to_string(), &local).await.unwrap();
    assert_eq!(by_digest.digest, pushed.digest);
}

#[tokio::test]
async fn a_registry_says_why_tokens_match_nothing() {
    let (registry, source) = (Registry::start().await, directory(SMALL, &[1]));
    let remote = registry.remote();
    let request = MatchRequest { tokens: vec![1, 2], fingerprint: Digest::sha256(b"d"), salt: String::new(), adapter: None };
    let error = remote.match_prefix(&repository(), &request).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::RepositoryUnknown);
    let pushed = push_dir(&remote, source.path(), "t").await.unwrap();
    let response = remote.match_prefix(&repository(), &request).await.unwrap();
    assert_eq!((response.digest, response.boundary, response.rejected[0].digest), (None, 0, pushed.digest));
}

#[tokio::test]
async fn a_fork_costs_what_differs() {
    let (registry, local) = (Registry::start().await, memory().await);
    let mut pages: Vec<u64> = (0..2000).collect();
    let (remote, source) = (registry.remote(), directory(LARGE, &pages));
    push_dir(&remote, source.path(), "a").await.unwrap();
    let first = pull_store(&remote, "a", &local).await.unwrap();
    pages.iter_mut().rev().take(20).for_each(|n| *n += 10_000);
    write(source.path(), "page_manifest.json", LARGE, &pages);
    push_dir(&remote, source.path(), "b").await.unwrap();
    let second = pull_store(&remote, "b", &local).await.unwrap();
    assert!(second.round_trips <= 5, "{} round trips", second.round_trips);
    let new = 40 * 16_384;
    assert!(second.bytes_received <= new * 102 / 100 + (128 << 10), "{} bytes for {new} new", second.bytes_received);
    assert!(first.bytes_received > 50 * second.bytes_received);
    local.verify(&second.digest, &mut |_| {}).await.unwrap();
}

#[tokio::test]
async fn a_directory_takes_what_the_local_store_has() {
    let (registry, local) = (Registry::start().await, memory().await);
    let (remote, source) = (registry.remote(), everything());
    push_dir(&remote, source.path(), "t").await.unwrap();
    pull_store(&remote, "t", &local).await.unwrap();
    let copy = tempfile::tempdir().unwrap();
    let destination = Destination::Directory { path: copy.path().join("new/dir"), store: Some(local) };
    let progress = Progress::default();
    let pulled = pull(&remote, &repository(), &selector("t"), &destination, &progress).await.unwrap();
    assert_eq!((pulled.round_trips, pulled.blobs_received), (1, 0));
    assert_eq!(progress.bytes_deduplicated(), progress.bytes_total());
    same_files(source.path(), &copy.path().join("new/dir"));
}

#[tokio::test]
async fn a_directory_keeps_the_files_that_are_right_and_replaces_those_that_are_not() {
    let registry = Registry::start().await;
    let numbers: Vec<u64> = (0..100).collect();
    let (remote, source) = (registry.remote(), directory(SMALL, &numbers));
    push_dir(&remote, source.path(), "t").await.unwrap();
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&remote, "t", copy.path()).await.unwrap();
    let path = |n| blob_path(copy.path(), &Digest::sha256(&page(n, 128)));
    std::fs::remove_file(path(1)).unwrap();
    std::fs::write(path(2), page(3, 128)).unwrap();
    std::fs::write(path(3), "short").unwrap();
    // A file as a killed pull leaves it.
    std::fs::write(path(1).with_extension("tmp"), "half").unwrap();
    let pulled = pull_dir(&remote, "t", copy.path()).await.unwrap();
    let runs = SMALL.snapshot(&numbers).build().trees[0].runs.len();
    assert_eq!(pulled.blobs_received as usize, 3 + 3 + runs, "three pages, and config, tree, manifest and runs to know them by");
    same_files(source.path(), copy.path());
}

#[tokio::test]
async fn a_directory_that_a_killed_pull_left_is_completed() {
    let registry = Registry::start().await;
    let numbers: Vec<u64> = (0..100).collect();
    let (remote, source) = (registry.remote(), directory(SMALL, &numbers));
    push_dir(&remote, source.path(), "t").await.unwrap();
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&remote, "t", copy.path()).await.unwrap();
    std::fs::remove_file(copy.path().join("page_manifest.json")).unwrap();
    let path = |n| blob_path(copy.path(), &Digest::sha256(&page(n, 128)));
    std::fs::remove_file(path(1)).unwrap();
    // Parts of files under their own names.
    std::fs::write(path(2), "").unwrap();
    std::fs::write(path(3), &page(3, 128)[..100]).unwrap();
    let pulled = pull_dir(&remote, "t", copy.path()).await.unwrap();
    let runs = SMALL.snapshot(&numbers).build().trees[0].runs.len();
    assert_eq!(pulled.blobs_received as usize, 3 + 3 + runs, "three pages, and config, tree, manifest and runs to know them by");
    same_files(source.path(), copy.path());
}

#[tokio::test]
async fn pages_of_many_page_chunks_come_into_a_directory_in_parts() {
    let (registry, source, copy) = (Registry::start().await, chunks(130), tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    let pull_it = async |into: &Path, store: Option<Store>| {
        let (front, progress) = (Front::start(&registry.url, |_| Fate::Pass), Progress::default());
        let destination = Destination::Directory { path: into.into(), store };
        let pulled = pull(&remote(&front.url), &repository(), &selector("t"), &destination, &progress).await.unwrap();
        assert_eq!(progress.bytes_done() + progress.bytes_deduplicated(), progress.bytes_total());
        let asked = front.seen().iter().filter(|seen| seen.asked().is_some()).count();
        (pulled, progress, asked)
    };
    let out = copy.path().join("out");
    let (pulled, _, asked) = pull_it(out.as_path(), None).await;
    assert_eq!(asked, 6, "manifest, tree, page chunks, config, pages of 128 page chunks, pages of two");
    // Each page chunk lists a page of its own and two that are in all of them.
    assert_eq!(pulled.blobs_received, 3 + 130 + 130 + 2, "no page is fetched twice");
    same_files(source.path(), &out);
    // All of it is there.
    let (again, progress, asked) = pull_it(out.as_path(), None).await;
    assert_eq!((again.digest, asked), (pulled.digest, 4), "only nodes are asked for");
    assert_eq!(progress.bytes_done(), again.bytes_received_raw);
    let local = memory().await;
    pull_store(&registry.remote(), "t", &local).await.unwrap();
    let other = copy.path().join("other");
    let (from_store, progress, asked) = pull_it(other.as_path(), Some(local)).await;
    assert_eq!((from_store.digest, asked, progress.bytes_done()), (pulled.digest, 0, 0));
    same_files(source.path(), &other);
}

#[tokio::test]
async fn a_directory_of_another_snapshot_is_left_as_it_is() {
    let registry = Registry::start().await;
    let (remote, source) = (registry.remote(), everything());
    push_dir(&remote, source.path(), "t").await.unwrap();
    let stranger = |name: &'static str, content: &'static str| (name, content);
    for (name, content) in [
        stranger("page_manifest.json", "{}"),
        stranger("page_manifest.main.0.json", "{}"),
        stranger("config.json", "{}"),
        stranger("checkpoint.json", "{}"),
        stranger("snapshot.json", "{}"),
        stranger("attachments/other", ""),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        let error = pull_dir(&remote, "t", dir.path()).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidRequest, "{name}: {error}");
        assert!(error.to_string().contains(name), "{name}: {error}");
        assert_eq!(files(dir.path()).len(), 1, "{name}: something was written");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("unrelated.txt"), "stays").unwrap();
    pull_dir(&remote, "t", dir.path()).await.unwrap();
}

#[tokio::test]
async fn several_page_manifests_come_back_as_they_were() {
    let registry = Registry::start().await;
    let (remote, source) = (registry.remote(), tempfile::tempdir().unwrap());
    for (name, pages) in [("page_manifest.main.0.json", 1..80), ("page_manifest.main.1.json", 40..90), ("page_manifest.s%2fw.0.json", 7..9)]
    {
        write(source.path(), name, SMALL, &pages.collect::<Vec<_>>());
    }
    let pushed = push_dir(&remote, source.path(), "t").await.unwrap();
    let trees = remote.snapshot(&repository(), &selector("t")).await.unwrap().trees;
    let shards: Vec<_> = trees.iter().map(|t| (t.group.name.as_str(), t.rank, t.world)).collect();
    assert_eq!(shards, [("main", 0, 2), ("main", 1, 2), ("s/w", 0, 1)]);
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&remote, "t", copy.path()).await.unwrap();
    same_files(source.path(), copy.path());
    assert_eq!(push_dir(&remote, copy.path(), "t").await.unwrap().digest, pushed.digest);
}

/// Stores a snapshot whose layers are `layers`, with what they reach in `documents` and `blobs`,
/// and tags it `t`.
async fn store_snapshot(store: &Store, layers: Vec<Descriptor>, documents: Vec<Document>, blobs: &[Vec<u8>]) -> Digest {
    let config = Document::new(Kind::Blob, SnapshotConfig { agent: Some("x".into()), ..SnapshotConfig::default() }.to_bytes());
    let labels = BTreeMap::from([("team".to_owned(), "red".to_owned())]);
    let manifest = Manifest::snapshot(&config, layers, labels).to_document();
    let digest = manifest.digest;
    let blobs = blobs.iter().map(|b| Document::new(Kind::Blob, b.clone())).chain([config]);
    let frames: Vec<_> = blobs.chain(documents).chain([manifest]).map(|d| document_frame(&d)).collect();
    let end = pfr_schema::frame::end_mark(frames.len() as u64).into();
    let session = store.open_push(&repository()).await.unwrap();
    let stream = futures::stream::iter(frames.into_iter().chain([end]).map(Ok::<_, std::io::Error>));
    store.ingest(&session.id, stream).await.unwrap();
    store.commit(&session.id, digest, Some(tag("t")), None).await.unwrap();
    digest
}

fn opaque_tree(group: &str, pages: &[Vec<u8>]) -> (Document, Document) {
    let run = Run::new(1, 128, pages.iter().map(|p| Digest::sha256(p)).collect()).unwrap();
    let run = Document::new(Kind::Run, run.to_bytes());
    let tree = PageTree {
        schema: SCHEMA.into(),
        layout: "opaque/engine-x".into(),
        page_size_tokens: 4,
        page_bytes: 128,
        geometry: None,
        components: vec!["latent".into()],
        group: Group { name: group.into(), kind: GroupKind::Mla },
        rank: 0,
        world: 1,
        runs: vec![RunRef { digest: run.digest, pages: pages.len() as u32 }],
        ix: (0..pages.len() as u32).collect(),
        sequences: vec![],
        flat_digest: None,
    };
    (tree.to_document(), run)
}

#[tokio::test]
async fn what_files_cannot_say_is_said_by_the_manifest_itself() {
    let registry = Registry::start().await;
    let remote = registry.remote();
    let pages: Vec<Vec<u8>> = (0..10).map(|n| page(n, 128)).collect();
    let (opaque, run) = opaque_tree("latent", &pages);
    let flat = crate::common::sample::SMALL.flat(&[1, 2]);
    let group = Group { name: "win".into(), kind: GroupKind::SlidingWindow };
    let (windowed, runs) = PageTree::from_flat(&flat, group, 1, 4).unwrap();
    let windowed = windowed.to_document();
    let nameless = page(50, 300);
    let titled = |title: &str, bytes: &[u8]| Descriptor {
        media_type: "application/x-thing".into(),
        digest: Digest::sha256(bytes),
        size: bytes.len() as u64,
        annotations: BTreeMap::from([(TITLE.to_owned(), title.to_owned())]),
    };
    let layers = vec![
        titled("z.bin", &pages[9]),
        Descriptor::of(media_type::TREE, &windowed),
        Descriptor { annotations: BTreeMap::new(), ..titled("", &nameless) },
        Descriptor::of(media_type::TREE, &opaque),
        titled("a.bin", &pages[8]),
        titled("a.bin", &pages[7]),
    ];
    let documents = [vec![run, opaque, windowed], runs].concat();
    let documents = {
        let mut d = documents;
        d.sort_by_key(|d| d.kind);
        d
    };
    let blobs = [pages.clone(), vec![nameless]].concat();
    let digest = store_snapshot(&registry.store, layers, documents, &blobs).await;

    let copy = tempfile::tempdir().unwrap();
    let pulled = pull_dir(&remote, "t", copy.path()).await.unwrap();
    assert_eq!((pulled.digest, pulled.pages), (digest, 12));
    let names = files(copy.path());
    for name in ["snapshot.json", "page_manifest.win.1.json", "attachments/z.bin", "attachments/a.bin", "config.json"] {
        assert!(names.contains_key(name), "{name} is not in {:?}", names.keys());
    }
    let other = Registry::start().await;
    let pushed = push_dir(&other.remote(), copy.path(), "t").await.unwrap();
    assert_eq!(pushed.digest, digest);
    other.store.verify(&digest, &mut |_| {}).await.unwrap();
    assert_eq!(pull_dir(&remote, "t", copy.path()).await.unwrap().blobs_received, 6, "the documents only");

    for (name, message) in [("attachments/z.bin", "remove snapshot.json"), ("page_manifest.win.1.json", "remove snapshot.json")] {
        let path = copy.path().join(name);
        let good = std::fs::read(&path).unwrap();
        std::fs::write(&path, "changed").unwrap();
        let error = push_dir(&other.remote(), copy.path(), "t").await.unwrap_err();
        assert!(error.to_string().contains(message) && error.to_string().contains(name), "{name}: {error}");
        std::fs::write(&path, good).unwrap();
    }
    // The file of a page is looked at only where the page is lacking.
    std::fs::remove_file(blob_path(copy.path(), &Digest::sha256(&pages[6]))).unwrap();
    assert_eq!(push_dir(&other.remote(), copy.path(), "t").await.unwrap().blobs_sent, 0);
    let error = push_dir(&Registry::start().await.remote(), copy.path(), "t").await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::MissingBlobs, "{error}");
    assert!(error.to_string().contains("page 6, component 0"), "{error}");
}

#[tokio::test]
async fn titles_that_leave_the_directory_are_refused_before_anything_is_written() {
    for title in ["../up", "/etc/x", "a/b", "", ".", "..", "a\\b", "new\nline"] {
        let registry = Registry::start().await;
        let bytes = page(1, 100);
        let layer = Descriptor {
            media_type: media_type::OCTETS.into(),
            digest: Digest::sha256(&bytes),
            size: 100,
            annotations: BTreeMap::from([(TITLE.to_owned(), title.to_owned())]),
        };
        store_snapshot(&registry.store, vec![layer], vec![], &[bytes]).await;
        let parent = tempfile::tempdir().unwrap();
        let error = pull_dir(&registry.remote(), "t", &parent.path().join("dir")).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidDocument, "{title:?}: {error}");
        assert!(files(parent.path()).is_empty(), "{title:?}");
        // A store has no file names to be hurt by.
        pull_store(&registry.remote(), "t", &memory().await).await.unwrap();
    }
}

#[tokio::test]
async fn a_directory_whose_folders_are_links_is_refused_and_nothing_is_written_through_them() {
    let registry = Registry::start().await;
    let source = everything();
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    let parent = tempfile::tempdir().unwrap();
    let elsewhere = parent.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    // The first page lies in it.
    let folder = blob_path(Path::new(""), &Digest::sha256(&page(0, 128)));
    let folder = folder.parent().unwrap().to_str().unwrap();
    for link in ["blobs", "blobs/sha256", folder, "attachments"] {
        let out = parent.path().join(link.replace('/', "-"));
        std::fs::create_dir_all(out.join(link).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&elsewhere, out.join(link)).unwrap();
        let error = pull_dir(&registry.remote(), "t", &out).await.unwrap_err();
        assert!(matches!(&error, pfr_client::Error::Refused { path, .. } if *path == out.join(link)), "{link}: {error}");
        assert!(error.to_string().contains("is a link") && files(&elsewhere).is_empty(), "{link}: {error}");
        assert!(!out.join("page_manifest.json").exists(), "{link}");
    }
    // The directory itself may be reached by a link: that is where it was asked for.
    std::os::unix::fs::symlink(&elsewhere, parent.path().join("named")).unwrap();
    pull_dir(&registry.remote(), "t", &parent.path().join("named")).await.unwrap();
    same_files(source.path(), &elsewhere);
}

#[tokio::test]
async fn a_shortened_digest_is_enough_and_a_registry_must_not_tell_of_another() {
    let registry = Registry::start().await;
    let digest = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "t").await.unwrap().digest;
    let store = memory().await;
    assert_eq!(pull_store(&registry.remote(), &format!("@{}", digest.short()), &store).await.unwrap().digest, digest);
    let other = push_dir(&registry.remote(), directory(SMALL, &[2]).path(), "u").await.unwrap().digest;
    let lie = move |seen: &Seen| {
        let other = other.to_string();
        let lies = seen.path.contains("/snapshots/");
        if lies { Fate::Redirect(format!("/v1/repositories/team%2Fagent/snapshots/{other}")) } else { Fate::Pass }
    };
    let front = Front::start(&registry.url, lie);
    let error = pull_store(&remote(&front.url), &format!("@{}", digest.short()), &memory().await).await.unwrap_err();
    assert!(error.to_string().contains("the request names"), "{error}");
}

#[tokio::test]
async fn what_is_not_there_is_named() {
    let registry = Registry::start().await;
    let (remote, source) = (registry.remote(), directory(SMALL, &[1]));
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(pull_dir(&remote, "t", dir.path()).await.unwrap_err().code(), ErrorCode::RepositoryUnknown);
    push_dir(&remote, source.path(), "t").await.unwrap();
    let cases = [("u", ErrorCode::TagUnknown), ("t~1", ErrorCode::SnapshotUnknown)];
    for (what, code) in cases {
        let error = pull_dir(&remote, what, dir.path()).await.unwrap_err();
        assert_eq!((error.code(), error.code().exit_code()), (code, 5), "{what}: {error}");
    }
    let stranger = Digest::sha256(b"nothing").to_string();
    assert_eq!(pull_dir(&remote, &stranger, dir.path()).await.unwrap_err().code(), ErrorCode::SnapshotUnknown);
}

#[tokio::test]
async fn two_pulls_into_one_directory_do_not_mix() {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::start().await;
    let source = directory(SMALL, &[1]);
    push_dir(&registry.remote(), source.path(), "t").await.unwrap();
    let held = std::fs::File::open(dir.path()).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let error = pull_dir(&registry.remote(), "t", dir.path()).await.unwrap_err();
    assert!(error.to_string().contains("another pull"), "{error}");
    drop(held);
    pull_dir(&registry.remote(), "t", dir.path()).await.unwrap();
}

#[tokio::test]
async fn a_checkpoint_without_pages_has_a_directory_too() {
    let registry = Registry::start().await;
    let made = tempfile::tempdir().unwrap();
    crate::common::sample::write_checkpoint(made.path());
    let bytes = std::fs::read(made.path().join("checkpoint.json")).unwrap();
    let parsed = Checkpoint::parse(&bytes, &Limits::default()).unwrap();
    let payloads: Vec<Vec<u8>> = parsed.tensors.iter().map(|t| std::fs::read(blob_path(made.path(), &t.payload_hash)).unwrap()).collect();
    let checkpoint = Document::new(Kind::Checkpoint, bytes);
    let layer = Descriptor::of(media_type::CHECKPOINT, &checkpoint);
    let digest = store_snapshot(&registry.store, vec![layer], vec![checkpoint], &payloads).await;
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&registry.remote(), "t", copy.path()).await.unwrap();
    assert!(Path::exists(&copy.path().join("snapshot.json")));
    let target = pfr_client::PushTarget { repository: "other".parse().unwrap(), ..target("t") };
    let pushed = push(&Source::Directory(copy.path().into()), &registry.remote(), target, &Progress::default()).await.unwrap();
    assert_eq!((pushed.digest, pushed.blobs_sent, pushed.created), (digest, 0, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_for_an_engine_that_it_does_not_fit_asks_for_no_frame() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "t").await.unwrap();
    let front = Front::start(&registry.url, |_| Fate::Pass);
    let socket = dir.path().join("agent.sock");
    agent(&socket, |request| match request {
        "POST /v1/engines/fits/checks" => Answer::Json(serde_json::json!({"engine": "fits", "boundary": 3})),
        _ => Answer::Problem(409, "fingerprint_mismatch", "weights: 1 in the engine, 2 in the snapshot"),
    });
    let pull = |engine: &str| {
        let socket = socket.to_str().unwrap();
        pf(dir.path(), &["pull", "team/agent:t", "--registry", &front.url, "--for", engine, "--agent", socket])
    };
    let asked = || front.seen().iter().any(|seen: &Seen| seen.asked().is_some());
    let (code, stdout, stderr) = pull("other");
    assert!(code == 4 && stdout.is_empty() && stderr.contains("weights: 1 in the engine, 2 in the snapshot"), "{code} {stdout}{stderr}");
    assert!(!asked() && !front.seen().is_empty());
    let (code, _, stderr) = pull("fits");
    assert!(code == 0 && asked(), "{stderr}");
}

#[tokio::test]
async fn a_brake_is_asked_before_every_byte_of_frames_and_what_is_lacking_is_known_before() {
    let (registry, local) = (Registry::start().await, memory().await);
    let (remote, source) = (registry.remote(), everything());
    let pushed = push_dir(&remote, source.path(), "t").await.unwrap();
    let nothing = Counted::default();
    let (lacking, counted) = pfr_client::lacking(&remote, &repository(), pushed.digest, &local, &nothing).await.unwrap();
    let (again, _) = pfr_client::lacking(&remote, &repository(), pushed.digest, &local, &counted).await.unwrap();
    assert_eq!((again.blobs, again.bytes, again.bytes_total), (0, 0, lacking.bytes_total), "all of it is counted");
    assert_eq!((lacking.bytes_total, local.resolve(&repository(), &selector("t")).await.is_err()), (pushed.bytes_raw, true));
    let passed = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&passed);
    let braked = remote.braked(Brake::new(move |bytes| {
        counted.fetch_add(bytes, Ordering::Relaxed);
        Box::pin(tokio::task::yield_now())
    }));
    let report = pull_store(&braked, "t", &local).await.unwrap();
    assert_eq!(report.digest, pushed.digest);
    // A stream has an end mark besides its frames.
    let passed = passed.load(Ordering::Relaxed);
    assert!(passed >= report.bytes_received && report.bytes_received > 0, "{passed} of {}", report.bytes_received);
    assert_eq!(report.blobs_received, lacking.blobs);
    assert_eq!(pfr_client::lacking(&remote, &repository(), pushed.digest, &local, &nothing).await.unwrap().0.bytes, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_passage_found_here_stays_longer_than_a_lease() {
    let (registry, lease) = (Registry::start().await, Duration::from_secs(2));
    let local = Store::open_in_memory(Options { lease, ..Options::default() }).await.unwrap();
    let (remote, first, second) = (registry.remote(), directory(SMALL, &[1, 2, 3]), directory(SMALL, &[1, 2, 3, 4]));
    let pushed = push_dir(&remote, first.path(), "a").await.unwrap();
    push_dir(&remote, second.path(), "b").await.unwrap();
    pull_store(&remote, "a", &local).await.unwrap();
    let found = look_up(&remote, &repository(), &selector("b")).await.unwrap();
    let passage = Passage::open(&remote, &repository(), &found, &local, Way::Pass, &Flight::new(1 << 20)).await.unwrap();
    // Only the lease holds what both have from here on.
    local.delete_snapshot_tagged(&repository(), &pushed.digest, &[tag("here")]).await.unwrap();
    let both = files(first.path());
    let both: Vec<Digest> = both.keys().filter_map(|path| path.strip_prefix("blobs/sha256/")?.rsplit('/').next()).map(of_hex).collect();
    assert!(!both.is_empty() && both.iter().all(|digest| !passage.lacks(digest)));
    let are_here = async || {
        let at_once = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
        local.gc(&at_once, &mut |_| ()).await.unwrap();
        local.frames(both.clone()).await.is_ok()
    };
    tokio::time::sleep(lease * 2).await;
    assert!(are_here().await, "the lease has ended");
    drop(passage);
    let gone = async {
        while are_here().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("nothing holds it");
}

fn of_hex(hex: &str) -> Digest {
    format!("sha256:{hex}").parse().unwrap()
}
