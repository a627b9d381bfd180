//! Compression: what is stored under each setting, what old and restricted registries get, and that
//! the same bytes come back on every way.

use crate::common::sample::{page, put_blob};
use crate::common::{Registry, files, memory, pf, pull_dir, pull_store, push_dir, remote, repository, same_files, tag, target};
use futures::TryStreamExt as _;
use pfr_client::directory::Directory;
use pfr_client::{Progress, PushReport, PushTarget, Remote, Source, push, push_into_store};
use pfr_registry::config::StoredCodecs;
use pfr_schema::codec::{CODECS_HEADER, Codec, Codecs, Compression};
use pfr_schema::frame::{Event, Parser};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Digest, Limits};
use pfr_store::{Options, Store};
use pfr_testkit::directory::write_pages;
use pfr_testkit::front::{Fate, Front, Seen, first};
use pfr_testkit::snapshot::numbers;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// 16 KiB a page, or half of that for FP8.
fn geometry(dtype: Dtype) -> Geometry {
    Geometry { page_size_tokens: 16, n_layers: 2, n_heads: 4, head_dim: 64, dtype }
}

/// A directory of pages with numbers, one with zeros, one that is mostly zeros, and one with noise;
/// a checkpoint with a tensor of this type; attachments, one of which is large if the type is BF16.
fn sample(dtype: Dtype) -> TempDir {
    let large = if dtype == Dtype::Bf16 { [numbers(4, 17 << 20), vec![0; 1 << 20]].concat() } else { numbers(4, 200_000) };
    sample_with(dtype, &large)
}

/// The same with these bytes as the attachment that may be large.
fn sample_with(dtype: Dtype, large: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let bytes = geometry(dtype).page_bytes(&Limits::default()).unwrap() as usize;
    let mut pages: Vec<[Vec<u8>; 2]> = (0..20).map(|i| [numbers(2 * i, bytes), numbers(2 * i + 1, bytes)]).collect();
    pages.push([vec![0; bytes], [numbers(99, bytes / 8), vec![0; bytes - bytes / 8]].concat()]);
    pages.push([page(1, bytes as u64), page(2, bytes as u64)]);
    write_pages(root, "page_manifest.json", geometry(dtype), &pages);
    let payload = numbers(1000, 50_000);
    let name = serde_json::to_value(dtype).unwrap();
    let (hash, shape, name) = (put_blob(root, &payload), 50_000 / dtype.bytes(), name.as_str().unwrap());
    let tensor = format!(
        r#"{{"name":"t","kind":"recurrent","shape":[{shape}],"logical_dtype":"{name}","storage_dtype":"{name}","layout":{{"tag":"x"}},"payload_hash":"{hash}","payload_bytes":50000,"value_hash":"pfv1:sha256:{}"}}"#,
        Digest::sha256(b"attested").hex()
    );
    let key =
        format!(r#"{{"scheme":"pf-prefix-v1","prefix":"{}","tokens":64,"alignment":16,"salt":"","adapter":null}}"#, Digest::sha256(b"p"));
    std::fs::write(root.join("checkpoint.json"), format!(r#"{{"abi":"pf.checkpoint.v1","key":{key},"tensors":[{tensor}]}}"#)).unwrap();
    std::fs::create_dir(root.join("attachments")).unwrap();
    std::fs::write(root.join("attachments/numbers"), numbers(3, 100_000)).unwrap();
    std::fs::write(root.join("attachments/large"), large).unwrap();
    dir
}

async fn push_as(compression: Compression, remote: &Remote, path: &Path, name: &str) -> PushReport {
    let to = PushTarget { compression, ..target(name) };
    push(&Source::Directory(path.into()), remote, to, &Progress::default()).await.unwrap()
}

/// How many blobs of a directory a store has in each codec.
async fn codecs_in(store: &Store, root: &Path) -> BTreeMap<&'static str, u64> {
    let is_blob = |name: &String| name.starts_with("blobs/") || name.starts_with("attachments/");
    let digests: Vec<Digest> = files(root).iter().filter(|(name, _)| is_blob(name)).map(|(_, bytes)| Digest::sha256(bytes)).collect();
    let pieces: Vec<bytes::Bytes> = store.frames(digests).await.unwrap().try_collect().await.unwrap();
    let mut parser = Parser::new(Limits::default());
    pieces.into_iter().for_each(|piece| parser.push(piece));
    let mut found = BTreeMap::new();
    while let Some(event) = parser.next().unwrap() {
        if let Event::Begin(header) = event {
            *found.entry(header.codec.name()).or_default() += 1;
        }
    }
    found
}

fn counts(some: &[(Codec, u64)]) -> BTreeMap<&'static str, u64> {
    some.iter().map(|(codec, count)| (codec.name(), *count)).collect()
}

#[tokio::test]
async fn the_codec_of_each_blob_follows_from_its_type_and_everything_comes_back() {
    use Codec::{Bf16Bitmaps, Bf16Huffman, F16Huffman, Fp8Huffman, Raw};
    // 40 pages of numbers and a tensor; two pages with zeros; two of noise and two attachments.
    for (dtype, hot, cold) in [
        (Dtype::Bf16, counts(&[(Raw, 4), (Bf16Bitmaps, 43)]), counts(&[(Raw, 4), (Bf16Huffman, 43)])),
        (Dtype::F16, counts(&[(Raw, 45), (Bf16Bitmaps, 2)]), counts(&[(Raw, 4), (F16Huffman, 43)])),
        (Dtype::Fp8E4m3, counts(&[(Raw, 45), (Bf16Bitmaps, 2)]), counts(&[(Raw, 4), (Fp8Huffman, 43)])),
        (Dtype::F32, counts(&[(Raw, 45), (Bf16Bitmaps, 2)]), counts(&[(Raw, 45), (Bf16Bitmaps, 2)])),
    ] {
        let source = sample(dtype);
        let off = counts(&[(Raw, 45), (Bf16Bitmaps, 2)]);
        let mut digests = Vec::new();
        for (compression, expected) in [(Compression::Hot, hot), (Compression::Cold, cold), (Compression::Off, off)] {
            let registry = Registry::start().await;
            let pushed = push_as(compression, &registry.remote(), source.path(), "t").await;
            assert_eq!(codecs_in(&registry.store, source.path()).await, expected, "{dtype:?} {compression}");
            let verified = registry.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
            assert_eq!((pushed.bytes_sent_raw, pushed.bytes_sent), (verified.bytes, verified.stored_bytes));
            let copy = tempfile::tempdir().unwrap();
            let pulled = pull_dir(&registry.remote(), "t", copy.path()).await.unwrap();
            same_files(source.path(), copy.path());
            assert_eq!((pulled.bytes_received_raw, pulled.bytes_received), (pushed.bytes_sent_raw, pushed.bytes_sent));
            digests.push(pushed.digest);
        }
        assert!(digests.iter().all(|digest| *digest == digests[0]), "the encoding is no part of the identity");
    }
}

#[tokio::test]
async fn a_second_push_with_another_setting_sends_nothing() {
    let (registry, source) = (Registry::start().await, sample(Dtype::Bf16));
    let cold = push_as(Compression::Cold, &registry.remote(), source.path(), "t").await;
    let before = codecs_in(&registry.store, source.path()).await;
    for compression in Compression::ALL {
        let again = push_as(compression, &registry.remote(), source.path(), "t").await;
        assert_eq!((again.digest, again.blobs_sent, again.created), (cold.digest, 0, false));
    }
    assert_eq!(codecs_in(&registry.store, source.path()).await, before);
}

/// Leaves out what registries of an older version do not say.
fn without_codecs(answer: Vec<u8>) -> Vec<u8> {
    let mut answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
    assert!(answer.as_object_mut().unwrap().remove("codecs").is_some(), "{answer}");
    serde_json::to_vec(&answer).unwrap()
}

#[tokio::test]
async fn an_old_registry_gets_raw_and_zstd_frames_from_every_source() {
    let (full, source) = (Registry::start().await, sample(Dtype::Bf16));
    let pushed = push_as(Compression::Cold, &full.remote(), source.path(), "t").await;
    let local = memory().await;
    pull_store(&full.remote(), "t", &local).await.unwrap();
    let relayed = Source::Remote { remote: full.remote(), repository: repository(), snapshot: pushed.digest };
    for source_of in [Source::Directory(source.path().into()), Source::Store { store: local.clone(), snapshot: pushed.digest }, relayed] {
        // It would refuse other frames, as a version that does not know them.
        let old = Registry::start_with(|config| config.codecs = StoredCodecs(Codecs::LEAST)).await;
        let front =
            Front::start(&old.url, |seen: &Seen| if seen.path.ends_with("/pushes") { Fate::change(without_codecs) } else { Fate::Pass });
        let to = PushTarget { compression: Compression::Hot, ..target("t") };
        let sent = push(&source_of, &remote(&front.url), to, &Progress::default()).await.unwrap();
        assert_eq!(sent.digest, pushed.digest);
        let found = codecs_in(&old.store, source.path()).await;
        assert!(found.keys().all(|codec| ["raw", "zstd"].contains(codec)), "{found:?}");
        if matches!(source_of, Source::Directory(_)) {
            assert_eq!(found["zstd"], 2, "zeros are left out even so");
        }
        old.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
        let copy = tempfile::tempdir().unwrap();
        pull_dir(&old.remote(), "t", copy.path()).await.unwrap();
        same_files(source.path(), copy.path());
    }
}

#[tokio::test]
async fn stored_frames_pass_from_store_to_store_as_they_are() {
    let (one, two, three, local) = (Registry::start().await, Registry::start().await, Registry::start().await, memory().await);
    let source = sample(Dtype::Bf16);
    let pushed = push_as(Compression::Cold, &one.remote(), source.path(), "t").await;
    let codecs = codecs_in(&one.store, source.path()).await;
    pull_store(&one.remote(), "t", &local).await.unwrap();
    // The setting is for what is read from directories.
    let to = || PushTarget { compression: Compression::Off, ..target("t") };
    let from_store = Source::Store { store: local.clone(), snapshot: pushed.digest };
    let sent = push(&from_store, &two.remote(), to(), &Progress::default()).await.unwrap();
    assert_eq!((sent.bytes_sent_raw, sent.bytes_sent), (pushed.bytes_sent_raw, pushed.bytes_sent));
    let relayed = Source::Remote { remote: two.remote(), repository: repository(), snapshot: pushed.digest };
    push(&relayed, &three.remote(), to(), &Progress::default()).await.unwrap();
    for store in [&local, &two.store, &three.store] {
        assert_eq!(codecs_in(store, source.path()).await, codecs);
        store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    }
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&three.remote(), "t", copy.path()).await.unwrap();
    same_files(source.path(), copy.path());
}

#[tokio::test]
async fn a_store_that_takes_fewer_codecs_pulls_raw_frames_also_from_a_registry_that_ignores_its_wish() {
    let (registry, source) = (Registry::start().await, sample(Dtype::Bf16));
    let pushed = push_as(Compression::Hot, &registry.remote(), source.path(), "t").await;
    let ignorant = Front::start(&registry.url, |seen: &Seen| {
        // Asked by a client that names all codecs, as a registry that does not look at the header.
        if seen.asked().is_some() { Fate::With(CODECS_HEADER, "bf16-bitmaps, bf16-huffman") } else { Fate::Pass }
    });
    for url in [&registry.url, &ignorant.url] {
        let store = Store::open_in_memory(Options { codecs: Codecs::LEAST, ..Options::default() }).await.unwrap();
        pull_store(&remote(url), "t", &store).await.unwrap();
        let found = codecs_in(&store, source.path()).await;
        assert!(found.keys().all(|codec| ["raw", "zstd"].contains(codec)), "{found:?}");
        store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
    }
    assert!(ignorant.struck() > 0);
}

#[tokio::test]
async fn a_directory_goes_into_a_local_store_encoded_too() {
    let (store, source) = (memory().await, sample(Dtype::Bf16));
    let directory = Arc::new(Directory::open(source.path(), &Limits::default()).unwrap());
    let (repository, progress) = (repository(), Progress::default());
    let source_of = Source::Opened(directory);
    let done = push_into_store(&source_of, &store, &repository, Some(tag("t")), Compression::Cold, &progress);
    let (committed, _) = done.await.unwrap();
    store.verify(&committed.digest, &mut |_| {}).await.unwrap();
    assert_eq!(codecs_in(&store, source.path()).await["bf16-huffman"], 43);
}

#[tokio::test]
async fn an_interrupted_push_goes_on_and_ends_with_the_same_snapshot() {
    let (registry, source) = (Registry::start_with(|c| c.max_frames_bytes = 100_000).await, sample(Dtype::Bf16));
    let front = Front::start(&registry.url, first(2, |seen| seen.method == "PUT", || Fate::LoseAnswer));
    let pushed = push_as(Compression::Hot, &remote(&front.url), source.path(), "t").await;
    assert_eq!(front.struck(), 2);
    let copy = tempfile::tempdir().unwrap();
    pull_dir(&registry.remote(), "t", copy.path()).await.unwrap();
    same_files(source.path(), copy.path());
    assert_eq!(push_dir(&registry.remote(), copy.path(), "u").await.unwrap().digest, pushed.digest);
}

#[tokio::test(flavor = "multi_thread")]
async fn flag_and_file_set_it_and_the_summary_says_what_it_brought() {
    let (source, home) = (sample_with(Dtype::Bf16, &numbers(4, 1 << 20)), tempfile::tempdir().unwrap());
    std::fs::create_dir_all(home.path().join(".config/pf")).unwrap();
    let file = home.path().join(".config/pf/config.toml");
    let path = source.path().to_str().unwrap();
    for (in_file, flag, codec) in
        [(None, Some("cold"), "bf16-huffman"), (Some("cold"), None, "bf16-huffman"), (Some("cold"), Some("hot"), "bf16-bitmaps")]
    {
        let registry = Registry::start().await;
        std::fs::write(&file, in_file.map(|value| format!("compression = {value:?}\n")).unwrap_or_default()).unwrap();
        let flag: Vec<&str> = flag.into_iter().flat_map(|value| ["--compression", value]).collect();
        let (code, stdout, stderr) = pf(home.path(), &[&["push", path, "team/agent:t", "--registry", &registry.url], &flag[..]].concat());
        assert_eq!(code, 0, "{stderr}");
        assert_eq!(codecs_in(&registry.store, source.path()).await[codec], 43);
        let summary = stdout.lines().next().unwrap();
        assert!(summary.contains(" MiB raw, ") && summary.contains(" MiB stored)"), "{summary}");
        let (_, stdout, _) = pf(home.path(), &["verify", "team/agent:t", "--registry", &registry.url]);
        assert!(stdout.contains(" MiB stored) read and hashed"), "{stdout}");
        let (_, stdout, _) = pf(home.path(), &["pull", "team/agent:t", "--registry", &registry.url, "--json"]);
        let pulled: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert!(pulled["received_raw_bytes"].as_u64() > pulled["received_bytes"].as_u64(), "{pulled}");
        std::fs::remove_dir_all(home.path().join("store")).unwrap();
    }
    let (code, _, stderr) = pf(home.path(), &["push", path, "team/agent:t", "--compression", "warm"]);
    assert!(code == 1 && stderr.contains("known are hot, cold and off"), "{stderr}");
    std::fs::write(&file, "compression = \"warm\"\n").unwrap();
    let (code, _, stderr) = pf(home.path(), &["push", path, "team/agent:t"]);
    assert!(code == 1 && stderr.contains("line 1") && stderr.contains("warm"), "{stderr}");
}
