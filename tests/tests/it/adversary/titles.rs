//! Names in a snapshot become names of files only where that is harmless.

use pfr_schema::snapshot::{Descriptor, Manifest, SnapshotConfig, TITLE};
use pfr_schema::tree::{Document, Group, GroupKind, PageTree};
use pfr_schema::{Digest, Kind, flat::FlatManifest, media_type};
use pfr_tests::{Pf, Registry, Shape, Wire, files};
use serde_json::{Value, json};
use std::collections::BTreeMap;

async fn json(request: reqwest::RequestBuilder) -> Value {
    let response = request.send().await.unwrap();
    let (status, text) = (response.status(), response.text().await.unwrap());
    assert!(status.is_success(), "{status}: {text}");
    serde_json::from_str(&text).unwrap_or_default()
}

/// Stores a snapshot with one page tree of `group` and an attachment for each title. No directory
/// could have these.
async fn push(registry: &Registry, tag: &str, group: &str, titles: &[&str]) -> Digest {
    drop(rustls::crypto::ring::default_provider().install_default());
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let page = Shape::TINY.page(1);
    let entry = pfr_schema::flat::Page { ix: 0, k: Digest::sha256(&page), v: Digest::sha256(&page) };
    let flat = FlatManifest::new(Shape::TINY.geometry, vec![entry], vec![], &Default::default()).unwrap();
    let (tree, runs) = PageTree::from_flat(&flat, Group { name: group.into(), kind: GroupKind::FullAttention }, 0, 1).unwrap();
    let (tree, config) = (tree.to_document(), Document::new(Kind::Blob, SnapshotConfig::default().to_bytes()));
    let mut layers = vec![Descriptor::of(media_type::TREE, &tree)];
    layers.extend(titles.iter().map(|title| Descriptor {
        media_type: media_type::OCTETS.into(),
        digest: Digest::sha256(b"evil"),
        size: 4,
        annotations: BTreeMap::from([(TITLE.to_owned(), (*title).to_owned())]),
    }));
    let manifest = Manifest::snapshot(&config, layers, BTreeMap::new()).to_document();
    let mut frames = vec![Wire::blob(&page), Wire::blob(b"evil")];
    frames.extend(runs.iter().chain([&tree, &config, &manifest]).map(|d| Wire::frame(d.kind, d.digest, &d.bytes)));
    let pushes = format!("{}/v1/repositories/a/pushes", registry.url());
    let session = format!("{pushes}/{}", json(client.post(&pushes)).await["id"].as_str().unwrap());
    let upload = client.put(format!("{session}/frames")).header("content-type", media_type::FRAMES).body(Wire::stream(&frames));
    json(upload).await;
    json(client.post(format!("{session}/commit")).json(&json!({"manifest": manifest.digest, "tag": tag}))).await;
    manifest.digest
}

#[tokio::test]
async fn a_title_that_leaves_the_directory_is_refused_before_anything_is_written() {
    let registry = Registry::start();
    for (i, title) in ["../evil", "../../evil", "/tmp/pf-evil", "a/b", "..", ".", "", "a\\b", "x\0y", "line\nbreak"].into_iter().enumerate()
    {
        let tag = format!("t{i}");
        push(&registry, &tag, "main", &["fine", title]).await;
        let host = Pf::new(&registry.url());
        let out = host.path("inner/out");
        std::fs::create_dir_all(&out).unwrap();
        let output = host.run(&["pull", &format!("a:{tag}"), out.to_str().unwrap()]);
        assert_eq!(output.code, 1, "{title:?}: {output:?}");
        assert!(output.stderr.contains("title"), "{title:?}: {output:?}");
        assert_eq!(files(&host.path("inner")), [], "{title:?} wrote something");
        assert!(!host.path("evil").exists() && !std::path::Path::new("/tmp/pf-evil").exists(), "{title:?} got out");
        // A store has no files to name.
        host.run(&["pull", &format!("a:{tag}")]).ok();
    }
}

#[tokio::test]
async fn titles_that_are_names_of_ours_or_taken_twice_come_back_as_the_same_snapshot() {
    let registry = Registry::start();
    let long = "x".repeat(255);
    for (i, titles) in [
        vec!["page_manifest.json", "snapshot.json", "config.json"],
        vec!["same", "same"],
        vec![".hidden", "...", "ü", "a b", "-rf", "%00"],
        vec!["x", "x.tmp"],
        vec![long.as_str()],
    ]
    .into_iter()
    .enumerate()
    {
        let tag = format!("t{i}");
        let digest = push(&registry, &tag, "main", &titles).await;
        comes_back(&registry, &tag, digest, &format!("{titles:?}"));
    }
}

#[tokio::test]
async fn groups_with_names_of_paths_stay_in_the_directory() {
    let registry = Registry::start();
    for (i, group) in ["../../../evil", "/etc/passwd", "a/b", ".", "%2e%2e", "ä ö"].into_iter().enumerate() {
        let tag = format!("t{i}");
        let digest = push(&registry, &tag, group, &[]).await;
        comes_back(&registry, &tag, digest, group);
    }
}

/// Asserts that a snapshot is the same after a pull into a directory and a push from it, and that
/// the pull writes nothing beside the directory.
fn comes_back(registry: &Registry, tag: &str, digest: Digest, what: &str) {
    let host = Pf::new(&registry.url());
    let out = host.path("inner/out");
    std::fs::create_dir_all(host.path("inner")).unwrap();
    let output = host.run(&["pull", &format!("a:{tag}"), out.to_str().unwrap()]);
    assert_eq!(output.code, 0, "{what}: {output:?}");
    assert!(files(&host.path("inner")).iter().all(|(path, _)| path.starts_with("out")), "{what} wrote beside");
    let again = host.json(&["push", out.to_str().unwrap(), &format!("a:{tag}-again")]);
    assert_eq!((&again["digest"], &again["blobs_sent"]), (&json!(digest), &json!(0)), "{what}: {again}");
}
