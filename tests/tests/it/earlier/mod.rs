//! Data that programs of earlier versions have made. `README.md` says what it is.

use pfr_schema::Digest;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, binary};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// What lies in a folder of the repository, sorted.
fn names(folder: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

/// The archives, each with the number of its migration.
fn archives() -> Vec<(usize, PathBuf)> {
    let number = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_prefix("migration-")?.strip_suffix(".tar.zst")?;
        name.split('-').next()?.parse().ok()
    };
    names("tests/it/earlier").into_iter().filter_map(|path| Some((number(&path)?, path))).collect()
}

fn unpack(archive: &Path, folder: &Path) {
    let tar = folder.join("all.tar");
    std::fs::write(&tar, zstd::decode_all(&std::fs::read(archive).unwrap()[..]).unwrap()).unwrap();
    let output = Command::new("tar").arg("--extract").arg("--file").arg(&tar).arg("--directory").arg(folder).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// What the list of a repository says that no later version may change.
fn facts(list: &Value) -> Value {
    let of = |one: &Value| json!([one["digest"], one["tags"], one["parents"], one["pushed_at"], one["logical_bytes"]]);
    list["snapshots"].as_array().unwrap().iter().map(of).collect()
}

/// The other domains that archives with the file `pf.key` have. The second one is encrypted.
const DOMAINS: [&str; 2] = ["acme", "vault"];

/// The options that open what the archive has.
fn key(folder: &Path) -> Vec<String> {
    let key = folder.join("pf.key");
    if key.exists() { vec!["--key-file".to_owned(), key.to_str().unwrap().to_owned()] } else { Vec::new() }
}

/// The other domains of an archive.
fn domains(folder: &Path) -> &'static [&'static str] {
    if key(folder).is_empty() { &[] } else { &DOMAINS }
}

/// Finds the snapshots of a file of the archive in a domain, whole.
fn check_snapshots(pf: &Pf, listed: &Path, tags: &[&str]) {
    let listed: Value = serde_json::from_slice(&std::fs::read(listed).unwrap()).unwrap();
    assert_eq!(facts(&pf.json(&["ls", "team/agent"])), facts(&listed));
    for tag in tags {
        pf.run(&["verify", &format!("team/agent:{tag}")]).ok();
    }
}

/// Finds all that the archive has, whole.
fn check(registry: &Registry, folder: &Path) {
    let pf = Pf::new(&registry.url());
    check_snapshots(&pf, &folder.join("agent.json"), &["one", "two", "try-1", "try-2"]);
    for domain in domains(folder) {
        let pf = Pf::new(&format!("{}/domains/{domain}", registry.url()));
        check_snapshots(&pf, &folder.join(format!("{domain}.json")), &["one", "two"]);
    }
    pf.run(&["verify", "team/agent:two", "--key", folder.join("key.pub").to_str().unwrap()]).ok();

    let pulled = pf.path("pulled");
    pf.run(&["pull", "team/agent:two", pulled.to_str().unwrap()]).ok();
    let answer = registry.get("/v2/team/app/manifests/1");
    let (head, image) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{answer}");
    let hashes =
        [image.as_bytes().to_vec(), std::fs::read(pulled.join("page_manifest.json")).unwrap()].map(|bytes| Digest::sha256(&bytes).hex());
    let sums = std::fs::read_to_string(folder.join("sums")).unwrap();
    let sums: Vec<&str> = sums.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(sums, hashes, "of the image and of the page manifest");
    let manifest: Value = serde_json::from_str(image).unwrap();
    let layer = registry.get(&format!("/v2/team/app/blobs/{}", manifest["layers"][0]["digest"].as_str().unwrap()));
    assert!(layer.ends_with("\r\n\r\na layer\n"), "{layer}");
}

/// The report of a command of the registry.
fn report(command: &[&str], folder: &Path) -> Value {
    let mut program = Command::new(binary("pf-registry"));
    let output = program.args(command).args(["--json", "--data"]).arg(folder.join("data")).args(key(folder)).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Loses the tables of a domain, whose directory this is.
fn lose_tables(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        if entry.file_name().to_str().unwrap().starts_with("metadata.sqlite") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

/// The id that the storage of a domain has in its marker.
fn storage_id(directory: &Path) -> String {
    let marker = std::fs::read_to_string(directory.join("packs/pf-store")).unwrap();
    marker.lines().find_map(|line| line.strip_prefix("id ")).unwrap_or_else(|| panic!("no id: {marker}")).to_owned()
}

/// The tables of a domain are right, and are made again from its packs. Its storage has got an id,
/// and keeps it.
fn rebuild(domain: &str, folder: &Path) {
    let data = folder.join("data");
    let directory = if domain == "default" { data } else { data.join("domains").join(domain) };
    let id = storage_id(&directory);
    assert_eq!(report(&["fsck", "--domain", domain], folder)["discrepancies"], json!([]), "{domain}");
    lose_tables(&directory);
    let rebuilt = report(&["rebuild", "--domain", domain], folder);
    assert_eq!((&rebuilt["lost"], &rebuilt["refused"]), (&json!([]), &json!([])), "{domain}: {rebuilt}");
    assert_eq!(storage_id(&directory), id, "{domain}");
}

#[test]
fn data_of_earlier_versions_is_served_collected_and_rebuilt() {
    for (_, archive) in archives() {
        println!("{}", archive.display());
        let folder = TempDir::new().unwrap();
        unpack(&archive, folder.path());
        let data = folder.path().join("data");
        let key = key(folder.path());
        let mut options = vec!["--gc-interval-seconds", "0", "--gc-grace-seconds", "0"];
        options.extend(key.iter().map(String::as_str));
        let mut registry = Registry::over(&data, &options);
        check(&registry, folder.path());
        assert!(report(&["token", "list"], folder.path()).to_string().contains("reader"));
        if !domains(folder.path()).is_empty() {
            for (path, kept) in [
                ("/domains/acme/v1/retention", r#""immutable_tags":["v*"]"#),
                ("/domains/acme/v1/signing", r#""name":"signed""#),
                ("/v1/domains/acme/quota", r#""limits":{"snapshots":10}"#),
                ("/v1/domains/vault", r#""encrypted":true"#),
            ] {
                let answer = registry.get(path);
                assert!(answer.contains(kept), "{path}: {answer}");
            }
        }

        let host = Pf::new(&registry.url());
        std::fs::rename(folder.path().join("store"), host.path("store")).unwrap();
        host.run(&["verify", "team/agent:two", "--local"]).ok();
        let pages = SnapshotDir::write(&host.path("pages"), Shape::TINY, &[1, 2, 3]);
        host.run(&["push", pages.arg(), "team/later:one"]).ok();

        let collected = host.json(&["gc"]);
        assert!(collected["freed_bytes"].as_u64() > Some(0), "the deleted snapshot: {collected}");
        host.run(&["scrub", "--full"]).ok();
        check(&registry, folder.path());

        for domain in domains(folder.path()) {
            let pf = Pf::new(&format!("{}/domains/{domain}", registry.url()));
            pf.run(&["gc"]).ok();
            pf.run(&["scrub", "--full"]).ok();
        }

        registry.kill();
        // The catalogue of domains is in the tables of the first one.
        rebuild("default", folder.path());
        for domain in domains(folder.path()) {
            rebuild(domain, folder.path());
        }
        registry.restart();
        check(&registry, folder.path());
        host.run(&["verify", "team/later:one"]).ok();
    }
}

#[test]
fn data_of_the_newest_migration_or_of_the_one_before_is_kept() {
    let migrations = names("../migrations/sqlite").len();
    let newest = archives().iter().map(|(number, _)| *number).max();
    assert!(newest >= Some(migrations - 1), "{newest:?} of {migrations}: see tests/tests/it/earlier/README.md");
}
