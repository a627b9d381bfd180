//! Exports: out of a registry or a store into a layout, and back, and what is refused on the way.

use crate::common::sample::{LARGE, SMALL, directory, everything, page};
use crate::common::{Registry, files, is_empty, memory, pf, pull_dir, push_dir, repository, same_files, tag, target};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use parking_lot::Mutex;
use pfr_client::export::{ExportReport, Exporter, Listed, Place, PlaceOptions, Shelf};
use pfr_client::{Error, Progress, Remote, RemoteOptions, Source, push, push_into_store};
use pfr_schema::codec::Compression;
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_schema::{Digest, ErrorCode, Limits};
use pfr_store::Store;
use pfr_testkit::directory::write_pages;
use pfr_testkit::snapshot::numbers;
use proptest::prelude::any;
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

fn options() -> PlaceOptions {
    let remote = RemoteOptions { retries: 2, retry_for: Duration::ZERO, idle_timeout: Duration::from_secs(20), ..RemoteOptions::default() };
    PlaceOptions { remote, ..PlaceOptions::default() }
}

fn source(remote: &Remote, snapshot: Digest) -> Source {
    Source::Remote { remote: remote.clone(), repository: repository(), snapshot }
}

async fn export(source: &Source, name: &str, place: &Place) -> Result<ExportReport, Error> {
    let mut exporter = Exporter::begin(place, &options()).await?;
    let report = exporter.add(source, &repository(), Some(&tag(name)), &Progress::default()).await?;
    exporter.finish().await.map(|()| report)
}

async fn read(place: &Place) -> Result<(Shelf, Vec<Listed>), Error> {
    let shelf = Shelf::open(place, &options()).await?;
    let listed = shelf.exports().to_vec();
    Ok((shelf, listed))
}

/// Imports the only snapshot of a layout into a registry under `name`.
async fn import(place: &Place, registry: &Registry, name: &str) -> Result<Digest, Error> {
    let (shelf, listed) = read(place).await?;
    let source = Source::Export(Arc::new(shelf.read(&listed[0]).await?));
    Ok(push(&source, &registry.remote(), target(name), &Progress::default()).await?.digest)
}

/// A small reader of its own: every blob of a layout hashes to its name, and every blob that is
/// listed is there.
fn check(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let all = files(root);
    assert_eq!(all["oci-layout"], br#"{"imageLayoutVersion":"1.0.0"}"#);
    for (name, bytes) in &all {
        if let Some(hex) = name.strip_prefix("blobs/sha256/") {
            assert_eq!(Digest::sha256(bytes).hex(), hex);
        } else {
            assert!(["oci-layout", "index.json"].contains(&name.as_str()), "{name}");
        }
    }
    let parsed = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    let blob = |descriptor: &serde_json::Value| {
        let name = descriptor["digest"].as_str().unwrap().replace("sha256:", "blobs/sha256/");
        assert_eq!(descriptor["size"], all[&name].len() as u64, "{name}");
        all[&name].clone()
    };
    for entry in parsed(&all["index.json"])["manifests"].as_array().unwrap() {
        let manifest = parsed(&blob(entry));
        assert_eq!(manifest["artifactType"], "application/vnd.pf.export.v1+json");
        assert_eq!(blob(&manifest["config"]), b"{}");
        manifest["layers"].as_array().unwrap().iter().for_each(|layer| drop(blob(layer)));
    }
    all
}

fn folder(dir: &tempfile::TempDir) -> (PathBuf, Place) {
    let path = dir.path().join("layout");
    (path.clone(), Place::Folder(path))
}

#[tokio::test]
async fn a_snapshot_with_everything_comes_back_byte_for_byte_from_every_place() {
    let (registry, dir, source_dir) = (Registry::start().await, tempfile::tempdir().unwrap(), everything());
    let pushed = push_dir(&registry.remote(), source_dir.path(), "t").await.unwrap();
    let (path, place) = folder(&dir);
    let address = format!("oci://{}/exports/agent", registry.url.strip_prefix("http://").unwrap());
    for place in [place, Place::Tar(dir.path().join("x.tar")), Place::parse(&address).unwrap()] {
        let report = export(&source(&registry.remote(), pushed.digest), "t", &place).await.unwrap();
        assert_eq!((report.digest, report.pages, report.packs, report.packs_written), (pushed.digest, 200, 2, 2), "{place}");
        let other = Registry::start().await;
        assert_eq!(import(&place, &other, "copy").await.unwrap(), pushed.digest, "{place}");
        other.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
        let copy = tempfile::tempdir().unwrap();
        pull_dir(&other.remote(), "copy", copy.path()).await.unwrap();
        same_files(source_dir.path(), copy.path());
    }
    check(&path);
}

#[tokio::test]
async fn export_and_import_are_the_identity_on_random_snapshots_in_every_encoding() {
    let geometry = Geometry { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 32, dtype: Dtype::Bf16 };
    let len = geometry.page_bytes(&Limits::default()).unwrap() as usize;
    let mut runner = TestRunner::deterministic();
    let pages = proptest::collection::vec((0_u8..4, any::<u64>()), 1..60);
    for compression in [Compression::Hot, Compression::Cold, Compression::Off].into_iter().cycle().take(12) {
        let made: Vec<[Vec<u8>; 2]> = pages
            .new_tree(&mut runner)
            .unwrap()
            .current()
            .into_iter()
            .map(|(kind, seed)| match kind {
                0 => [vec![0; len], vec![0; len]],
                1 => [numbers(seed, len), vec![0; len]],
                // Pages that are there several times.
                2 => [numbers(seed % 3, len), page(seed % 3, len as u64)],
                _ => [page(seed, len as u64), numbers(seed, len)],
            })
            .collect();
        let (dir, source_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_pages(source_dir.path(), "page_manifest.json", geometry, &made);
        let (store, progress) = (memory().await, Progress::default());
        let from = Source::Directory(source_dir.path().into());
        let (pushed, _) = push_into_store(&from, &store, &repository(), None, compression, &progress).await.unwrap();
        for place in [folder(&dir).1, Place::Tar(dir.path().join("x.tar"))] {
            export(&Source::Store { store: store.clone(), snapshot: pushed.digest }, "t", &place).await.unwrap();
            let copy = memory().await;
            assert_eq!(import_here(&place, &copy).await.unwrap(), pushed.digest, "{} pages", made.len());
            copy.verify(&pushed.digest, &mut |_| {}).await.unwrap();
        }
        check(&folder(&dir).0);
    }
}

#[tokio::test]
async fn the_same_snapshot_gives_the_same_bytes_from_a_registry_and_from_a_store() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), everything().path(), "t").await.unwrap();
    let store = memory().await;
    crate::common::pull_store(&registry.remote(), "t", &store).await.unwrap();
    let mut seen = Vec::new();
    for (name, source) in [("a", source(&registry.remote(), pushed.digest)), ("b", Source::Store { store, snapshot: pushed.digest })] {
        let place = Place::Folder(dir.path().join(name));
        export(&source, "t", &place).await.unwrap();
        seen.push(check(&dir.path().join(name)));
        let again = export(&source, "t", &place).await.unwrap();
        assert_eq!((again.packs_written, again.bytes_written), (0, 0));
        assert_eq!(&check(&dir.path().join(name)), seen.last().unwrap(), "a second export changes nothing");
    }
    assert!(seen[0] == seen[1], "{:?} {:?}", seen[0].keys(), seen[1].keys());
}

#[tokio::test]
async fn a_fork_takes_the_packs_of_its_parent_that_the_place_has() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let remote = registry.remote();
    let parent = directory(SMALL, &(0..300).collect::<Vec<_>>());
    let a = push_dir(&remote, parent.path(), "a").await.unwrap();
    // The same pages, and another configuration.
    std::fs::write(parent.path().join("config.json"), r#"{"agent":"b","parents":[]}"#).unwrap();
    let b = push_dir(&remote, parent.path(), "b").await.unwrap();
    assert_ne!(a.digest, b.digest);
    let (path, place) = folder(&dir);
    assert_eq!(export(&source(&remote, a.digest), "a", &place).await.unwrap().packs_written, 2);
    let fork = export(&source(&remote, b.digest), "b", &place).await.unwrap();
    assert_eq!((fork.packs, fork.packs_written), (2, 1), "only its documents are new");
    check(&path);
    let other = Registry::start().await;
    let (shelf, listed) = read(&place).await.unwrap();
    assert_eq!(listed.iter().map(ToString::to_string).collect::<Vec<_>>(), ["team/agent:a", "team/agent:b"]);
    let store = memory().await;
    for (listed, digest) in listed.iter().zip([a.digest, b.digest]) {
        let export = Source::Export(Arc::new(shelf.read(listed).await.unwrap()));
        let (done, _) =
            push_into_store(&export, &store, &repository(), listed.tag.clone(), Compression::Off, &Progress::default()).await.unwrap();
        assert_eq!(done.digest, digest);
        store.verify(&digest, &mut |_| {}).await.unwrap();
        push(&export, &other.remote(), target("x"), &Progress::default()).await.unwrap();
    }
}

#[tokio::test]
async fn a_pack_whose_index_is_not_what_its_name_says_is_written_again() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "a").await.unwrap();
    let (path, place) = folder(&dir);
    export(&source(&registry.remote(), pushed.digest), "a", &place).await.unwrap();
    let before = check(&path);
    let manifest =
        before.iter().find(|(_, bytes)| bytes.starts_with(b"{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest"));
    let manifest: serde_json::Value = serde_json::from_slice(manifest.unwrap().1).unwrap();
    let pack = path.join(manifest["layers"][1]["digest"].as_str().unwrap().replace("sha256:", "blobs/sha256/"));
    let mut bytes = std::fs::read(&pack).unwrap();
    let last = bytes.len() - 40;
    bytes[last] ^= 1;
    std::fs::write(&pack, &bytes).unwrap();
    // It is there under its name, so it is no new one; it is healed.
    export(&source(&registry.remote(), pushed.digest), "a", &place).await.unwrap();
    assert!(check(&path) == before);
}

#[tokio::test]
async fn damage_is_found_and_nothing_of_it_becomes_visible() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), directory(SMALL, &(0..50).collect::<Vec<_>>()).path(), "a").await.unwrap();
    let (path, place) = folder(&dir);
    export(&source(&registry.remote(), pushed.digest), "a", &place).await.unwrap();
    let whole = check(&path);
    for (name, bytes) in whole.iter().filter(|(name, bytes)| name.starts_with("blobs/") && bytes.len() > 2) {
        let file = path.join(name);
        let mut changed = bytes.clone();
        changed[bytes.len() / 2] ^= 1;
        let another = whole.values().find(|other| other.len() > 2 && *other != bytes).unwrap().clone();
        for wrong in [None, Some(bytes[..bytes.len() - 1].to_vec()), Some(changed), Some(another)] {
            match &wrong {
                Some(wrong) => std::fs::write(&file, wrong).unwrap(),
                None => std::fs::remove_file(&file).unwrap(),
            }
            let store = memory().await;
            let error = import_here(&place, &store).await.unwrap_err();
            assert_ne!(error.code(), ErrorCode::Internal, "{name}: {error}");
            assert!(is_empty(&store).await, "{name}: {error}");
            std::fs::write(&file, bytes).unwrap();
        }
    }
    assert_eq!(import_here(&place, &memory().await).await.unwrap(), pushed.digest);
}

/// Imports the first snapshot of a layout into a store.
async fn import_here(place: &Place, store: &Store) -> Result<Digest, Error> {
    let (shelf, listed) = read(place).await?;
    let first = listed.first().ok_or_else(|| Error::Internal("the layout lists nothing".into()))?;
    let source = Source::Export(Arc::new(shelf.read(first).await?));
    let done = push_into_store(&source, store, &repository(), None, Compression::Off, &Progress::default()).await?;
    Ok(done.0.digest)
}

#[tokio::test]
async fn images_of_other_programs_stay_in_the_index_and_are_skipped() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let (path, place) = folder(&dir);
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    let absent = Digest::sha256(b"absent");
    let image =
        format!(r#"{{"mediaType":"application/vnd.oci.image.manifest.v1+json","digest":"{absent}","size":7,"platform":{{"os":"linux"}}}}"#);
    let index =
        r#"{"mediaType":"application/vnd.oci.image.index.v1+json","digest":"DIGEST","size":7}"#.replace("DIGEST", &absent.to_string());
    std::fs::write(path.join("index.json"), format!(r#"{{"schemaVersion":2,"manifests":[{image},{index}]}}"#)).unwrap();
    export(&source(&registry.remote(), pushed.digest), "a", &place).await.unwrap();
    let (shelf, listed) = read(&place).await.unwrap();
    assert_eq!((shelf.skipped(), listed.len(), listed[0].snapshot), (2, 1, pushed.digest));
    assert!(std::fs::read_to_string(path.join("index.json")).unwrap().contains(r#""platform":{"os":"linux"}"#));
}

#[tokio::test]
async fn what_is_no_place_for_an_export_is_left_as_it_is() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let source = source(&registry.remote(), pushed.digest);
    let (full, linked, tar) = (dir.path().join("full"), dir.path().join("linked"), dir.path().join("x.tar"));
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("mine"), "x").unwrap();
    std::fs::create_dir(&linked).unwrap();
    std::fs::write(linked.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
    std::os::unix::fs::symlink(&full, linked.join("blobs")).unwrap();
    std::fs::write(&tar, "x").unwrap();
    for place in [Place::Folder(full.clone()), Place::Folder(linked), Place::Tar(tar.clone())] {
        let error = export(&source, "a", &place).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");
    }
    assert_eq!(files(&full).len(), 1);
    assert_eq!(std::fs::read(&tar).unwrap(), b"x");
    for place in [Place::Folder(dir.path().join("absent")), Place::Folder(full)] {
        assert_eq!(read(&place).await.unwrap_err().code(), ErrorCode::NotFound);
    }
    assert!(read(&Place::Tar(tar)).await.is_err());
}

#[tokio::test]
async fn an_export_that_is_dropped_leaves_no_tar_file_and_an_index_as_it_was() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let source = source(&registry.remote(), pushed.digest);
    let tar = Place::Tar(dir.path().join("x.tar"));
    let mut exporter = Exporter::begin(&tar, &options()).await.unwrap();
    exporter.add(&source, &repository(), None, &Progress::default()).await.unwrap();
    drop(exporter);
    assert!(files(dir.path()).is_empty(), "{:?}", files(dir.path()).keys());
    let (path, place) = folder(&dir);
    drop(Exporter::begin(&place, &options()).await.unwrap());
    assert!(!path.join("index.json").exists());
    // A killed process leaves its unfinished file, which the next export overwrites.
    std::fs::write(path.join(".pf-unfinished"), "half of a pack").unwrap();
    export(&source, "a", &place).await.unwrap();
    check(&path);
}

#[tokio::test]
async fn two_exports_into_one_directory_list_both() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let remote = registry.remote();
    let a = push_dir(&remote, directory(SMALL, &[1, 2]).path(), "a").await.unwrap();
    let b = push_dir(&remote, directory(SMALL, &[2, 3]).path(), "b").await.unwrap();
    let (path, place) = folder(&dir);
    let (a, b) = (source(&remote, a.digest), source(&remote, b.digest));
    let (first, second) = futures::future::join(export(&a, "a", &place), export(&b, "b", &place)).await;
    first.unwrap();
    second.unwrap();
    check(&path);
    assert_eq!(read(&place).await.unwrap().1.len(), 2);
}

#[tokio::test]
async fn a_pack_that_fails_is_gone_before_the_next_one_is_begun() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let pushed = push_dir(&registry.remote(), directory(LARGE, &(0..100).collect::<Vec<_>>()).path(), "a").await.unwrap();
    let good = source(&registry.remote(), pushed.digest);
    let from = dir.path().join("from");
    export(&good, "a", &Place::Folder(from.clone())).await.unwrap();
    let (shelf, listed) = read(&Place::Folder(from.clone())).await.unwrap();
    let damaged = Source::Export(Arc::new(shelf.read(&listed[0]).await.unwrap()));
    let (name, mut bytes) = check(&from).into_iter().max_by_key(|(_, bytes)| bytes.len()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(from.join(name), bytes).unwrap();
    let (path, place) = folder(&dir);
    let mut exporter = Exporter::begin(&place, &options()).await.unwrap();
    for _ in 0..2 {
        let error = exporter.add(&damaged, &repository(), None, &Progress::default()).await.unwrap_err();
        assert_ne!(error.code(), ErrorCode::Internal, "{error}");
        assert!(!path.join(".pf-unfinished").exists(), "a thread may still write to it");
    }
    exporter.add(&good, &repository(), None, &Progress::default()).await.unwrap();
    check(&path);
}

#[tokio::test]
async fn of_two_exports_into_one_tar_file_the_first_stays_and_the_other_is_refused() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let remote = registry.remote();
    let a = push_dir(&remote, directory(SMALL, &[1, 2]).path(), "a").await.unwrap();
    let b = push_dir(&remote, directory(SMALL, &[3, 4, 5]).path(), "b").await.unwrap();
    let place = Place::Tar(dir.path().join("x.tar"));
    let mut first = Exporter::begin(&place, &options()).await.unwrap();
    let mut second = Exporter::begin(&place, &options()).await.unwrap();
    first.add(&source(&remote, a.digest), &repository(), None, &Progress::default()).await.unwrap();
    second.add(&source(&remote, b.digest), &repository(), None, &Progress::default()).await.unwrap();
    first.finish().await.unwrap();
    let error = second.finish().await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");
    assert_eq!(files(dir.path()).len(), 1, "nothing hidden is left");
    assert_eq!(import_here(&place, &memory().await).await.unwrap(), a.digest);
}

/// A registry of another program: it asks for a token, keeps blobs and manifests in memory, and
/// gets in the way.
#[derive(Clone, Default)]
struct Foreign(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    blobs: BTreeMap<String, Vec<u8>>,
    manifests: BTreeMap<String, Vec<u8>>,
    uploads: Vec<Vec<u8>>,
    /// Method, path with query, and credentials of each request.
    seen: Vec<(String, String, Option<String>)>,
    /// Answers 503 or 429 to so many uploads first.
    refuse: usize,
    /// Answers 503 to so many requests for a token first.
    busy: usize,
    /// Where reads of blobs are redirected to.
    elsewhere: Option<String>,
    /// Sends other bytes than it stores.
    lies: bool,
    /// Ends each answer after the first byte of a blob.
    drips: bool,
}

const REALM_PATH: &str = "/token";

impl Foreign {
    async fn start(&self) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = listener.local_addr().unwrap().to_string();
        let app = Router::new().fallback(answer).with_state((self.clone(), url.clone()));
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        url
    }
}

async fn answer(State((foreign, host)): State<(Foreign, String)>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default().to_vec();
    let (method, path) = (parts.method.as_str().to_owned(), parts.uri.path().to_owned());
    let query = parts.uri.query().unwrap_or_default().to_owned();
    let credentials = parts.headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap().to_owned());
    let mut inner = foreign.0.lock();
    inner.seen.push((method.clone(), parts.uri.to_string(), credentials.clone()));
    let basic = "Basic bWU6aHVzaA=="; // me:hush
    if path == REALM_PATH {
        if inner.busy > 0 {
            inner.busy -= 1;
            return StatusCode::SERVICE_UNAVAILABLE.into_response();
        }
        let is_known = credentials.as_deref() == Some(basic);
        return if is_known { r#"{"token":"issued"}"#.into_response() } else { StatusCode::UNAUTHORIZED.into_response() };
    }
    let name = path.rsplit('/').next().unwrap_or_default().to_owned();
    if path.starts_with("/blobs/") {
        return range(&parts.headers, inner.blobs.get(&name));
    }
    if credentials.as_deref() != Some("Bearer issued") {
        let challenge = format!(r#"Bearer realm="http://{host}{REALM_PATH}",service="x""#);
        return (StatusCode::UNAUTHORIZED, [(header::WWW_AUTHENTICATE, challenge)]).into_response();
    }
    if path.ends_with("/tags/list") {
        let last = query.split('&').find_map(|pair| pair.strip_prefix("last=")).unwrap_or_default();
        let rest: Vec<&String> = inner.manifests.keys().filter(|name| !name.contains(':') && name.as_str() > last).collect();
        let page = serde_json::json!({"name": "team/agent", "tags": &rest[..rest.len().min(70)]}).to_string();
        return if rest.len() > 70 { ([(header::LINK, "<next>; rel=\"next\"")], page).into_response() } else { page.into_response() };
    }
    if method == "POST" {
        inner.uploads.push(Vec::new());
        let location = format!("/v2/team/agent/blobs/uploads/{}", inner.uploads.len() - 1);
        return (StatusCode::ACCEPTED, [(header::LOCATION, location)]).into_response();
    }
    if path.contains("/blobs/uploads/") {
        if method == "GET" {
            return StatusCode::NOT_FOUND.into_response();
        }
        if inner.refuse > 0 {
            inner.refuse -= 1;
            let status = if inner.refuse % 2 == 0 { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::SERVICE_UNAVAILABLE };
            return status.into_response();
        }
        let digest = query.strip_prefix("digest=").unwrap_or_default().replace("%3A", ":");
        assert_eq!(digest, Digest::sha256(&body).to_string());
        inner.blobs.insert(digest, body);
        return StatusCode::CREATED.into_response();
    }
    if path.contains("/manifests/") {
        if method == "PUT" {
            let digest = Digest::sha256(&body).to_string();
            inner.manifests.insert(name, body.clone());
            inner.manifests.insert(digest.clone(), body);
            return (StatusCode::CREATED, [("docker-content-digest", digest)]).into_response();
        }
        let found = inner.manifests.get(&name).cloned();
        return found.map_or_else(|| StatusCode::NOT_FOUND.into_response(), |bytes| Body::from(bytes).into_response());
    }
    if method == "GET"
        && let Some(elsewhere) = inner.elsewhere.clone()
    {
        return (StatusCode::TEMPORARY_REDIRECT, [(header::LOCATION, format!("http://{elsewhere}/blobs/{name}"))]).into_response();
    }
    let found = inner.blobs.get(&name).map(|bytes| {
        let mut bytes = bytes.clone();
        if inner.lies && method == "GET" {
            bytes.iter_mut().for_each(|byte| *byte ^= 1);
        }
        bytes
    });
    if inner.drips && method == "GET" {
        return (StatusCode::PARTIAL_CONTENT, vec![b'x']).into_response();
    }
    range(&parts.headers, found.as_ref())
}

fn range(headers: &axum::http::HeaderMap, bytes: Option<&Vec<u8>>) -> Response {
    let Some(bytes) = bytes else { return StatusCode::NOT_FOUND.into_response() };
    let asked = headers.get(header::RANGE).and_then(|value| value.to_str().ok()?.strip_prefix("bytes=")?.split_once('-'));
    match asked {
        Some((from, to)) => {
            let (from, to): (usize, usize) = (from.parse().unwrap(), to.parse().unwrap());
            (StatusCode::PARTIAL_CONTENT, bytes[from..(to + 1).min(bytes.len())].to_vec()).into_response()
        }
        None => bytes.clone().into_response(),
    }
}

fn logged_in() -> PlaceOptions {
    PlaceOptions { login: Some(("me".into(), pfr_service::Secret::new("hush"))), ..options() }
}

async fn export_to(address: &str, source: &Source) -> Result<ExportReport, Error> {
    let mut exporter = Exporter::begin(&Place::parse(address).unwrap(), &logged_in()).await?;
    exporter.add(source, &repository(), None, &Progress::default()).await
}

#[tokio::test]
async fn a_registry_of_another_program_takes_a_token_and_each_blob_once() {
    let (registry, foreign) = (Registry::start().await, Foreign::default());
    let host = foreign.start().await;
    let pushed = push_dir(&registry.remote(), directory(SMALL, &(0..40).collect::<Vec<_>>()).path(), "a").await.unwrap();
    let source = source(&registry.remote(), pushed.digest);
    let address = format!("oci://{host}/team/agent:a");
    let error = Exporter::begin(&Place::parse(&address).unwrap(), &options()).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unauthorized, "{error}");
    foreign.0.lock().refuse = 2;
    assert_eq!(export_to(&address, &source).await.unwrap().packs_written, 2);
    let stored = foreign.0.lock().blobs.len();
    assert_eq!(stored, 3, "two packs and the empty configuration");
    foreign.0.lock().seen.clear();
    assert_eq!(export_to(&address, &source).await.unwrap().packs_written, 0);
    assert!(!foreign.0.lock().seen.iter().any(|(method, ..)| method == "POST" || method == "PATCH"), "{:?}", foreign.0.lock().seen);

    let shelf = Shelf::open(&Place::parse(&address).unwrap(), &logged_in()).await.unwrap();
    let export = Source::Export(Arc::new(shelf.read(&shelf.exports()[0]).await.unwrap()));
    let other = Registry::start().await;
    let done = push(&export, &other.remote(), target("copy"), &Progress::default()).await.unwrap();
    assert_eq!(done.digest, pushed.digest);
    other.store.verify(&pushed.digest, &mut |_| {}).await.unwrap();
}

#[tokio::test]
async fn an_import_asks_for_a_token_to_read_waits_for_it_and_looks_at_all_tags() {
    let (registry, foreign) = (Registry::start().await, Foreign::default());
    let host = foreign.start().await;
    let pushed = push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "a").await.unwrap();
    export_to(&format!("oci://{host}/team/agent:z"), &source(&registry.remote(), pushed.digest)).await.unwrap();
    {
        let mut inner = foreign.0.lock();
        let manifest = inner.manifests["z"].clone();
        inner.manifests.extend((0..200).map(|n| (format!("t{n:03}"), manifest.clone())));
        inner.busy = 1;
        inner.seen.clear();
    }
    let shelf = Shelf::open(&Place::parse(&format!("oci://{host}/team/agent")).unwrap(), &logged_in()).await.unwrap();
    assert_eq!(shelf.exports().len(), 201);
    assert_eq!(shelf.exports().last().unwrap().tag, Some(tag("z")));
    let inner = foreign.0.lock();
    let tokens: Vec<&String> = inner.seen.iter().map(|(_, path, _)| path).filter(|path| path.starts_with(REALM_PATH)).collect();
    assert!(tokens.len() >= 2 && tokens.iter().all(|path| path.contains("pull") && !path.contains("push")), "{tokens:?}");
}

#[tokio::test]
async fn a_fork_under_another_tag_reads_no_page_of_the_packs_of_its_parent() {
    let (registry, foreign) = (Registry::start().await, Foreign::default());
    let (remote, host) = (registry.remote(), foreign.start().await);
    let parent = directory(SMALL, &(0..300).collect::<Vec<_>>());
    let a = push_dir(&remote, parent.path(), "a").await.unwrap();
    std::fs::write(parent.path().join("config.json"), r#"{"agent":"b","parents":[]}"#).unwrap();
    let b = push_dir(&remote, parent.path(), "b").await.unwrap();
    export_to(&format!("oci://{host}/team/agent:a"), &source(&remote, a.digest)).await.unwrap();
    let place = Place::parse(&format!("oci://{host}/team/agent:b")).unwrap();
    let (mut exporter, progress) = (Exporter::begin(&place, &logged_in()).await.unwrap(), Progress::default());
    let report = exporter.add(&source(&remote, b.digest), &repository(), None, &progress).await.unwrap();
    assert_eq!((report.packs, report.packs_written), (2, 1), "only its documents are new");
    assert!(progress.bytes_deduplicated() > 0, "the pages were read again");
}

#[tokio::test]
async fn a_redirect_to_another_host_is_followed_without_credentials_and_lies_are_found() {
    let (registry, foreign, storage) = (Registry::start().await, Foreign::default(), Foreign::default());
    let (host, storage_host) = (foreign.start().await, storage.start().await);
    let pushed = push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "a").await.unwrap();
    let address = format!("oci://{host}/team/agent:a");
    export_to(&address, &source(&registry.remote(), pushed.digest)).await.unwrap();
    let place = Place::parse(&address).unwrap();
    {
        let (mut foreign, mut storage) = (foreign.0.lock(), storage.0.lock());
        storage.blobs = foreign.blobs.clone();
        foreign.elsewhere = Some(storage_host);
    }
    let shelf = Shelf::open(&place, &logged_in()).await.unwrap();
    shelf.read(&shelf.exports()[0]).await.unwrap();
    {
        let storage = storage.0.lock();
        assert!(!storage.seen.is_empty() && storage.seen.iter().all(|(_, _, credentials)| credentials.is_none()), "{:?}", storage.seen);
    }
    {
        let mut foreign = foreign.0.lock();
        (foreign.elsewhere, foreign.lies) = (None, true);
    }
    let error = shelf.read(&shelf.exports()[0]).await.unwrap_err();
    assert_eq!(error.code().exit_code(), 4, "{error}");
    foreign.0.lock().drips = true;
    let read = tokio::time::timeout(Duration::from_secs(60), shelf.read(&shelf.exports()[0]));
    let error = read.await.expect("a byte for each answer goes on for ever").unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pf_exports_imports_and_copies() {
    let (registry, other, dir) = (Registry::start().await, Registry::start().await, tempfile::tempdir().unwrap());
    let remote = registry.remote();
    let a = push_dir(&remote, directory(SMALL, &[1, 2]).path(), "a").await.unwrap().digest.to_string();
    let b = push_dir(&remote, directory(SMALL, &[2, 3]).path(), "b").await.unwrap().digest.to_string();
    let (url, layout, tar) = (registry.url.as_str(), dir.path().join("layout"), dir.path().join("x.tar"));
    let (layout, tar) = (layout.to_str().unwrap(), tar.to_str().unwrap());
    let run = |args: &[&str], exit: i32| {
        let (code, stdout, stderr) = pf(dir.path(), args);
        assert_eq!(code, exit, "{args:?}: {stdout}{stderr}");
        (stdout.lines().last().unwrap_or_default().to_owned(), stderr)
    };
    assert_eq!(run(&["export", "team/agent:a", "team/agent:b", layout, "--registry", url], 0).0, b);
    let (_, text) = run(&["import", layout, "team/agent:x", "--registry", &other.url], 1);
    assert!(text.contains("team/agent:a") && text.contains("--from"), "{text}");
    assert_eq!(run(&["import", layout, "team/agent:x", "--from", "a", "--registry", &other.url], 0).0, a);
    assert_eq!(run(&["import", layout, "--local"], 0).0, b);
    assert_eq!(run(&["export", "team/agent:a", tar, "--local"], 0).0, a);
    run(&["export", "team/agent:a", tar, "--local"], 1);
    assert_eq!(run(&["import", tar, "team/again", "--registry", &other.url], 0).0, a);
    run(&["import", layout, "x/y", "--from", "nothing"], 5);
    run(&["export", "team/agent:a", "team/agent:b", "--registry", url], 1);
    let (from, to) = (format!("{url}/team/agent:b"), format!("{}/archive/agent", other.url));
    assert_eq!(run(&["copy", &from, &to], 0).0, b);
    let archived = other.store.resolve(&"archive/agent".parse().unwrap(), &"b".parse().unwrap()).await.unwrap();
    assert_eq!(archived.to_string(), b, "the copy has the tag of its source");
    run(&["copy", &from, &to, "--if-tag-is", "absent"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_without_credentials_is_refused_with_the_words_of_a_registry() {
    let registry = Registry::start().await;
    push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "t").await.unwrap();
    let home = tempfile::tempdir().unwrap();
    for args in [["export", "team/agent:t", "s3://bucket/x"], ["import", "s3://bucket/x", "team/agent:u"]] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pf"));
        command.env_clear().env("HOME", home.path()).env("PF_REGISTRY", &registry.url).args(args);
        // No metadata service of a cloud answers there.
        let output = command.env("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains("s3://bucket/x needs credentials and there are none: set AWS_ACCESS_KEY_ID"), "{args:?}: {stderr}");
        assert!(!stderr.contains("Generic S3 error") && !stderr.contains("in a while"), "{args:?}: {stderr}");
    }
}
