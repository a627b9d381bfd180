//! Interchange with the real ProcessFork crates: images that they wrote are pushed and pulled, and
//! they read them again.

use pf_cache::{CacheMeta, CachePager as _, Dtype, SyntheticCachePager, capture_cache, restore_cache};
use pf_core::cas::{BlobStore as _, FsBlobStore};
use pf_core::digest::Digest256;
use pf_core::fixture::{FixtureEffectsCapture, FixtureModelCapture, FixtureSpec, FixtureTraceCapture, FixtureWorldCapture};
use pf_core::manifest::{AgentInfo, CacheLayer};
use pf_core::snapshot::{LayerCapture, LayerDescriptor, LayerKind, Snapshotter};
use pf_core::store::PfStore;
use pfr_tests::{Pf, Registry, files};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const META: CacheMeta = CacheMeta { page_size_tokens: 4, n_layers: 2, n_heads: 2, head_dim: 4, dtype: Dtype::Bf16 };

#[test]
fn a_snapshot_captured_by_processfork_comes_back_byte_for_byte_and_restores_there() {
    let registry = Registry::start();
    let host = Pf::new(&registry.url());
    let mut pager = SyntheticCachePager::new(META);
    pager.populate_synthetic(8, 42).unwrap();
    let source = host.path("processfork");
    let blobs = FsBlobStore::open(&source).unwrap();
    let digest = capture_cache(&mut pager, &blobs).unwrap();
    let manifest = blobs.get(&digest).unwrap();
    std::fs::write(source.join("page_manifest.json"), &manifest).unwrap();

    host.run(&["push", source.to_str().unwrap(), "team/agent:captured"]).ok();
    let other = Pf::new(&registry.url());
    let out = other.path("out");
    other.run(&["pull", "team/agent:captured", out.to_str().unwrap()]).ok();
    assert_eq!(std::fs::read(out.join("page_manifest.json")).unwrap(), manifest);
    for (path, bytes) in files(&out.join("blobs/sha256")) {
        let name = Digest256::parse(&format!("sha256:{}", path.file_name().unwrap().to_str().unwrap())).unwrap();
        assert_eq!(blobs.get(&name).unwrap(), bytes, "{name}");
    }
    // Through a local store, too: pull, push from the store elsewhere, same digest.
    other.run(&["pull", "team/agent:captured"]).ok();
    let again = other.json(&["push", "team/agent:captured", "team/copy:x"]);
    assert_eq!(host.tags("team/agent")["captured"], again["digest"]);

    // ProcessFork restores what was pulled: its store keeps zstd files, so the blobs are put into
    // one.
    let theirs = FsBlobStore::open(other.path("theirs")).unwrap();
    for (_, bytes) in files(&out.join("blobs")) {
        theirs.put(&bytes).unwrap();
    }
    assert_eq!(theirs.put(&manifest).unwrap(), digest);
    let mut restored = SyntheticCachePager::new(META);
    restore_cache(&mut restored, &theirs, &digest).unwrap();
    let mut pages: Vec<_> = restored.occupied_pages().into_iter().map(|ix| restored.read_page(ix).unwrap()).map(|p| (p.k, p.v)).collect();
    let mut expected: Vec<_> = pager.occupied_pages().into_iter().map(|ix| pager.read_page(ix).unwrap()).map(|p| (p.k, p.v)).collect();
    pages.sort();
    expected.sort();
    assert_eq!(pages, expected);
}

/// A cache layer that was captured already.
struct Captured(CacheLayer);

impl LayerCapture for Captured {
    fn kind(&self) -> LayerKind {
        LayerKind::Cache
    }

    fn capture(&self, _: &PfStore) -> pf_core::Result<LayerDescriptor> {
        Ok(LayerDescriptor::Cache(self.0.clone()))
    }
}

/// Seals an image with `pages` real pages and small layers of every other kind.
fn seal(store: &PfStore, kind: &str, seed: u64, pages: u32, parents: &[&Digest256]) -> Digest256 {
    let mut pager = SyntheticCachePager::new(META);
    pager.populate_synthetic(pages, seed).unwrap();
    let manifest = capture_cache(&mut pager, store.blobs()).unwrap();
    let agent = AgentInfo { kind: kind.into(), version: "1.2".into(), fingerprint: format!("fork-{seed}") };
    let spec = FixtureSpec { world_files: 3, world_file_bytes: 100, model_diff_bytes: 64, seed, ..FixtureSpec::default() };
    let cache = Captured(CacheLayer { layout: "paged-batchinvariant-v1".into(), manifest });
    let (model, world) = (FixtureModelCapture(spec.clone()), FixtureWorldCapture(spec.clone()));
    let (effects, trace) = (FixtureEffectsCapture(spec.clone()), FixtureTraceCapture(spec));
    Snapshotter::new(agent, Arc::new(model), Arc::new(cache), Arc::new(world), Arc::new(effects), Arc::new(trace))
        .snapshot(store, parents.iter().map(|parent| (*parent).clone()).collect())
        .unwrap()
}

/// The report on one image.
fn of<'a>(report: &'a Value, image: &str) -> &'a Value {
    let images = report["images"].as_array().unwrap();
    images.iter().find(|i| i["image"].as_str().unwrap().ends_with(image)).unwrap_or_else(|| panic!("{image} is not in {report}"))
}

fn blob_path(store: &Path, digest: &str) -> PathBuf {
    let hex = digest.strip_prefix("sha256:").unwrap();
    store.join("blobs/sha256").join(&hex[..2]).join(format!("{hex}.zst"))
}

#[test]
fn images_of_processfork_become_snapshots_with_their_lineage_and_only_once() {
    let registry = Registry::start();
    let host = Pf::new(&registry.url());
    let path = host.path("theirs");
    let at = path.to_str().unwrap();
    let store = PfStore::open(&path).unwrap();
    let first = seal(&store, "Claude Code", 1, 3, &[]);
    let second = seal(&store, "Claude Code", 2, 4, &[&first]);
    let merge = seal(&store, "merger", 3, 2, &[&second, &first]);

    let plan = host.json(&["import", "processfork", at, "--dry-run"]);
    assert_eq!((&plan["planned"], host.tags("processfork/claude-code").len()), (&3.into(), 0), "{plan}");
    let report = host.json(&["import", "processfork", at]);
    assert_eq!((&report["imported"], &report["failed"]), (&3.into(), &0.into()), "{report}");
    let snapshot = |image: &Digest256| of(&report, image.as_str())["digest"].as_str().unwrap().to_owned();
    for image in [&first, &second, &merge] {
        assert_eq!(of(&plan, image.as_str())["digest"], of(&report, image.as_str())["digest"]);
        // A merge by another kind of agent stays with what it merges.
        assert_eq!(host.tags("processfork/claude-code")[&image.hex()[..16]], snapshot(image));
    }
    let reference = |image: &Digest256| format!("processfork/claude-code:{}", &image.hex()[..16]);
    let log = host.json(&["log", &reference(&merge)]);
    let parents: BTreeMap<&str, Vec<&str>> = log["snapshots"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| (s["digest"].as_str().unwrap(), s["parents"].as_array().unwrap().iter().map(|p| p.as_str().unwrap()).collect()))
        .collect();
    let (a, b, c) = (snapshot(&first), snapshot(&second), snapshot(&merge));
    assert_eq!(parents, BTreeMap::from([(&*a, vec![]), (&*b, vec![&*a]), (&*c, vec![&*b, &*a])]));

    let out = host.path("out");
    host.run(&["pull", &reference(&second), out.to_str().unwrap()]).ok();
    let image = store.get_manifest(&second).unwrap();
    assert_eq!(std::fs::read(out.join("page_manifest.json")).unwrap(), store.blobs().get(&image.cache.manifest).unwrap());
    let mut restored = SyntheticCachePager::new(META);
    restore_cache(&mut restored, store.blobs(), &image.cache.manifest).unwrap();
    let pulled = files(&out.join("blobs"));
    assert_eq!(pulled.len(), 8, "two for each of four pages");
    for (path, bytes) in pulled {
        let name = Digest256::parse(&format!("sha256:{}", path.file_name().unwrap().to_str().unwrap())).unwrap();
        assert_eq!(store.blobs().get(&name).unwrap(), bytes, "{name}");
    }
    let attachment = |name: &str| std::fs::read(out.join("attachments").join(name)).unwrap();
    assert_eq!(Digest256::of(&attachment("image.json")), second);
    for (name, digest) in [
        ("model.base", &image.model.base),
        ("model.diff", &image.model.diff),
        ("world.fs", &image.world.fs),
        ("world.env", &image.world.env),
        ("world.procs", &image.world.procs),
        ("effects.ledger", &image.effects.ledger),
        ("trace.messages", &image.trace.messages),
    ] {
        assert_eq!(attachment(name), store.blobs().get(digest).unwrap(), "{name}");
    }
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!((&config["agent"], &config["deployment"]["processfork"]["image"]), (&"Claude Code".into(), &second.as_str().into()));

    // Again, and through a single image whose ancestors come along: nothing is made, nothing is
    // sent.
    let marker = path.join("images").join(format!("{}.json", merge.hex()));
    let named = path.join("mine.pfimg");
    std::fs::copy(&marker, &named).unwrap();
    for from in [at, marker.to_str().unwrap(), named.to_str().unwrap()] {
        let again = host.json(&["import", "processfork", from]);
        assert_eq!((&again["imported"], &again["unchanged"]), (&0.into(), &3.into()), "{from}: {again}");
        for image in [&first, &second, &merge] {
            let (one, before) = (of(&again, image.as_str()), of(&report, image.as_str()));
            assert_eq!((&one["digest"], &one["created"], &one["new_bytes"]), (&before["digest"], &false.into(), &0.into()));
        }
    }
    // The local store gets the very same snapshots.
    for expected in ["imported", "unchanged"] {
        let local = host.json(&["import", "processfork", at, "--local", "--repository", "team/old"]);
        assert_eq!(local[expected], 3, "{local}");
        assert_eq!(of(&local, merge.as_str())["digest"], c.as_str());
    }
    host.run(&["verify", "--local", &format!("team/old/claude-code@{c}")]).ok();
    let shown = host.run(&["import", "processfork", at]).ok();
    assert!(shown.last_line().contains("3 images: 3 there already"), "{shown:?}");
}

#[test]
fn broken_images_are_named_and_the_others_imported() {
    let registry = Registry::start();
    let host = Pf::new(&registry.url());
    let path = host.path("theirs");
    let at = path.to_str().unwrap();
    let store = PfStore::open(&path).unwrap();
    let good = seal(&store, "a", 1, 3, &[]);
    let lost = seal(&store, "a", 200, 3, &[]);
    let swapped = seal(&store, "a", 300, 3, &[]);
    let escaping = seal(&store, "a", 400, 3, &[]);
    let child = seal(&store, "a", 500, 3, &[&lost, &good]);
    let page = |image: &Digest256| {
        let manifest = store.blobs().get(&store.get_manifest(image).unwrap().cache.manifest).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        blob_path(&path, manifest["pages"][1]["k"].as_str().unwrap())
    };
    std::fs::remove_file(page(&lost)).unwrap();
    std::fs::write(page(&swapped), zstd::encode_all(&[7_u8; 128][..], 3).unwrap()).unwrap();
    let outside = host.path("secret");
    std::fs::write(&outside, "secret").unwrap();
    let trace = blob_path(&path, store.get_manifest(&escaping).unwrap().trace.messages.as_str());
    std::fs::remove_file(&trace).unwrap();
    std::os::unix::fs::symlink(&outside, &trace).unwrap();
    std::fs::write(path.join("images/garbage.json"), b"{\"schema_version\":").unwrap();
    std::fs::write(
        path.join("images").join(format!("{}.json", "0".repeat(64))),
        store.blobs().get(&Digest256::parse(good.as_str()).unwrap()).unwrap(),
    )
    .unwrap();
    std::fs::write(path.join("huge.pfimg"), vec![b' '; 2 << 20]).unwrap();

    for local in [&["--local"][..], &[]] {
        let out = host.run(&[&["import", "processfork", at, "--json"], local].concat());
        assert_eq!(out.code, 1, "{out:?}");
        assert!(out.stderr.contains("6 of 8 images could not be imported"), "{out:?}");
        let report = out.json();
        assert_eq!((&report["imported"], &report["failed"], &report["not_tried"]), (&2.into(), &6.into(), &0.into()), "{report}");
        assert_eq!(of(&report, good.as_str())["outcome"], "imported");
        for (image, code) in [
            (lost.as_str(), "missing_blobs"),
            (swapped.as_str(), "digest_mismatch"),
            (escaping.as_str(), "invalid_request"),
            ("garbage.json", "invalid_document"),
            ("0000.json", "digest_mismatch"),
            ("huge.pfimg", "too_large"),
        ] {
            let one = of(&report, image);
            assert_eq!(one["error"]["code"], code, "{one}");
            assert!(!one["error"]["message"].as_str().unwrap().is_empty());
        }
        // An image that continues a broken one is imported without that parent, and its report says
        // so.
        let one = of(&report, child.as_str());
        assert_eq!(
            (&one["parents_missing"][0], &one["parents"][0]),
            (&lost.as_str().into(), &of(&report, good.as_str())["digest"]),
            "{one}"
        );
    }
    let text = host.run(&["import", "processfork", at]);
    assert!(text.stdout.contains("without its parent") && !text.stdout.contains("secret\n"), "{text:?}");
    for (path, reason) in [("nowhere", "nowhere"), ("secret", "no ProcessFork store")] {
        let refused = host.run(&["import", "processfork", host.path(path).to_str().unwrap()]);
        assert!(refused.code != 0 && refused.stderr.contains(reason), "{refused:?}");
    }
    // An unreachable registry is no image's fault.
    let alone = Pf::new("http://127.0.0.1:9");
    let out = alone.run(&["import", "processfork", at, "--json"]);
    assert_eq!((out.code, out.json()["imported"].as_u64()), (7, Some(0)), "{out:?}");
    assert!(out.json()["not_tried"].as_u64().unwrap() >= 4, "{out:?}");
}
