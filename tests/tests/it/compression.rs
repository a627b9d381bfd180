//! Each setting of `--compression` on every way that a snapshot can take, through the real
//! programs: what comes out is what went in, and it is stored as small as the setting says.

use crate::mirror::mirror;
use crate::replicas::backend::{Backend, Database, Packs, assert_same};
use pfr_schema::geometry::{Dtype, Geometry};
use pfr_testkit::directory::write_pages;
use pfr_testkit::snapshot::{bytes, numbers};
use pfr_tests::{Pf, Registry, binary};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// TinyLlama's pages.
const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 22, n_heads: 4, head_dim: 64, dtype: Dtype::Bf16 };
const PAGE: usize = 180_224;

/// Pages of numbers, a page of zeros, one that is mostly zeros, one of noise, and an attachment.
fn write(dir: &Path) {
    let mut pages: Vec<[Vec<u8>; 2]> = (0..10).map(|i| [numbers(2 * i, PAGE), numbers(2 * i + 1, PAGE)]).collect();
    pages.push([vec![0; PAGE], [numbers(99, PAGE / 8), vec![0; PAGE - PAGE / 8]].concat()]);
    pages.push([bytes(1, PAGE), bytes(2, PAGE)]);
    write_pages(dir, "page_manifest.json", GEOMETRY, &pages);
    std::fs::create_dir(dir.join("attachments")).unwrap();
    std::fs::write(dir.join("attachments/numbers"), numbers(3, 100_000)).unwrap();
}

/// The snapshot is complete here, and comes back byte for byte, into a directory and through a
/// local store.
fn comes_back(url: &str, reference: &str, expected: &Path) {
    let pf = Pf::new(url);
    pf.run(&["verify", reference]).ok();
    let direct = pf.path("direct");
    pf.run(&["pull", reference, direct.to_str().unwrap()]).ok();
    assert_same(&direct, expected);
    pf.run(&["pull", reference]).ok();
    pf.run(&["verify", "--local", reference]).ok();
}

fn stored_of(pf: &Pf) -> f64 {
    let stats = pf.json(&["stats"]);
    stats["unique_bytes"].as_f64().unwrap() / stats["stored_bytes"].as_f64().unwrap()
}

/// A setting, and how many times fewer bytes are stored, at least and at most.
type Setting = (&'static str, f64, f64);

const COLD: Setting = ("cold", 1.44, 1.58);
const ALL: [Setting; 3] = [("hot", 1.38, 1.50), COLD, ("off", 1.06, 1.10)];

fn every_way(database: Database, packs: Packs, settings: &[Setting]) {
    let dirs = TempDir::new().unwrap();
    let source = dirs.path().join("source");
    std::fs::create_dir(&source).unwrap();
    write(&source);
    let mut digests = Vec::new();
    for &(compression, least, most) in settings {
        let backend = Backend::new(database, packs);
        let mut registry = backend.registry(&[]);
        let pf = Pf::new(&registry.url());
        let pushed = pf.json(&["push", source.to_str().unwrap(), "team/agent:t", "--compression", compression]);
        digests.push(pushed["digest"].as_str().unwrap().to_owned());
        let ratio = stored_of(&pf);
        assert!((least..most).contains(&ratio), "{compression}: {ratio}");
        registry.restart();
        comes_back(&registry.url(), "team/agent:t", &source);

        // From a local store to another registry, from registry to registry, and through one.
        pf.run(&["pull", "team/agent:t"]).ok();
        let (other, mirrored) = (Registry::start(), Registry::start());
        pf.run(&["push", "team/agent:t", &format!("{}/team/agent:t", other.url())]).ok();
        mirror(&["--from", &other.url(), "--to", &mirrored.url()]).ok();
        let edge_dir = TempDir::new().unwrap();
        let edge = Registry::over(&edge_dir.path().join("data"), &["--upstream", &mirrored.url()]);
        for far in [&other, &mirrored, &edge] {
            comes_back(&far.url(), "team/agent:t", &source);
            assert!((stored_of(&Pf::new(&far.url())) - ratio).abs() < 0.01, "{compression}: stored as it came");
        }
        // To registries that take fewer codecs.
        let plain = Registry::start_with(true, &["--codecs", "none"], &[]);
        mirror(&["--from", &registry.url(), "--to", &plain.url()]).ok();
        comes_back(&plain.url(), "team/agent:t", &source);
        assert!(stored_of(&Pf::new(&plain.url())) < 1.05);

        let scrub = pf.json(&["scrub", "--full"]);
        assert_eq!((scrub["damaged"].as_array().unwrap().len(), scrub["bad_packs"].as_array().unwrap().len()), (0, 0), "{scrub}");
        let data = edge_dir.path().join("data");
        drop(edge);
        for tool in ["fsck", "scrub"] {
            let ran = Command::new(binary("pf-registry")).args([tool, "--json", "--data"]).arg(&data).output().unwrap();
            assert!(ran.status.success(), "{tool}: {}", String::from_utf8_lossy(&ran.stderr));
        }
        // The database is lost: everything is in the packs.
        for name in ["metadata.sqlite", "metadata.sqlite-wal", "metadata.sqlite-shm", "metadata.sqlite-reserve"] {
            drop(std::fs::remove_file(data.join(name)));
        }
        let ran = Command::new(binary("pf-registry")).args(["rebuild", "--data"]).arg(&data).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let rebuilt = Registry::over(&data, &[]);
        comes_back(&rebuilt.url(), "team/agent:t", &source);
        assert!((stored_of(&Pf::new(&rebuilt.url())) - ratio).abs() < 0.01, "{compression}: as before");
    }
    assert!(digests.iter().all(|digest| *digest == digests[0]), "{digests:?}");
}

#[test]
fn sqlite_and_a_directory() {
    every_way(Database::Sqlite, Packs::Directory, &ALL);
}

#[test]
fn postgres_and_a_bucket() {
    every_way(Database::Postgres, Packs::Bucket, &[COLD]);
}

mod long {
    use super::{ALL, Database, Packs, every_way};

    #[test]
    fn postgres_and_a_bucket() {
        every_way(Database::Postgres, Packs::Bucket, &ALL);
    }
}
