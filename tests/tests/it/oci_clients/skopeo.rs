//! `skopeo`. podman, buildah and CRI-O use the same library.

use super::{Desk, Done, Layout, is_here, sha256, token};
use pfr_testkit::tls::Authority;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, own_address, skip};
use serde_json::Value;
use std::path::PathBuf;

const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";

struct Skopeo {
    desk: Desk,
    /// Options for TLS, of a source and of a destination.
    tls: [String; 2],
}

impl Skopeo {
    /// One that speaks plain HTTP; none if it is not installed.
    fn here() -> Option<Self> {
        if !is_here("skopeo") {
            skip("skopeo", "there is no skopeo");
            return None;
        }
        Some(Self { desk: Desk::new(), tls: ["src", "dest"].map(|side| format!("--{side}-tls-verify=false")) })
    }

    fn run(&self, args: &[&str]) -> Done {
        // A machine may have no policy about signatures of images.
        self.desk.run("skopeo", &[&["--insecure-policy"][..], args].concat())
    }

    /// Copies from or to a registry, or both.
    fn copy(&self, options: &[&str], from: &str, to: &str) -> Done {
        let sides = [(&self.tls[0], from), (&self.tls[1], to)];
        let tls: Vec<&str> = sides.iter().filter(|(_, place)| place.starts_with("docker:")).map(|(option, _)| option.as_str()).collect();
        self.run(&[&["copy", "--quiet"][..], &tls[..], options, &[from, to][..]].concat())
    }

    /// A command about an image of the registry.
    fn about(&self, command: &[&str], image: &str) -> Done {
        let tls = self.tls[0].replace("--src-", "--");
        self.run(&[command, &[tls.as_str(), image][..]].concat())
    }

    fn raw(&self, image: &str) -> String {
        self.about(&["inspect", "--raw"], image).ok()
    }

    fn tags(&self, repository: &str) -> Vec<String> {
        let listed: Value = serde_json::from_str(&self.about(&["list-tags"], repository).ok()).unwrap();
        listed["Tags"].as_array().unwrap().iter().map(|tag| tag.as_str().unwrap().to_owned()).collect()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.desk.path(name)
    }
}

/// Bytes that hardly compress.
fn layer() -> Vec<u8> {
    (0..1_500_000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn media_type(manifest: &str) -> String {
    serde_json::from_str::<Value>(manifest).unwrap()["mediaType"].as_str().unwrap().to_owned()
}

#[test]
fn skopeo_copies_in_and_out_mounts_lists_and_deletes() {
    let Some(skopeo) = Skopeo::here() else { return };
    let registry = Registry::start();
    let at = |name: &str| format!("docker://{}/{name}", registry.address());
    let mut layout = Layout::new(&skopeo.path("images"));
    let blob = layout.blob(ZSTD, &zstd::encode_all(&layer()[..], 1).unwrap());
    let image = layout.put("one", "amd64", &blob);

    skopeo.copy(&["--preserve-digests"], &layout.image("one"), &at("team/app:1")).ok();
    assert_eq!(sha256(skopeo.raw(&at("team/app:1")).as_bytes()), image["digest"].as_str().unwrap());
    skopeo.copy(&["--preserve-digests"], &at("team/app:1"), &at("team/other:1")).ok();
    let mounts = r#"pf_http_requests_total{route="/v2/{repo}/blobs/uploads",method="POST",status="201"}"#;
    assert!(registry.metrics().contains(mounts), "the layer was mounted, and not sent again");
    skopeo.copy(&[], &layout.image("one"), &at("domains/default/team/app:2")).ok();
    assert_eq!(skopeo.tags(&at("team/app")), ["1", "2"]);

    let back = Layout::new(&skopeo.path("back"));
    skopeo.copy(&[], &at("team/other:1"), &back.image("one")).ok();
    let index: Value = serde_json::from_slice(&std::fs::read(back.path.join("index.json")).unwrap()).unwrap();
    assert_eq!(index["manifests"][0]["digest"], image["digest"]);

    // It deletes the manifest that a tag names, and so all its tags. Nothing is in the repository
    // then.
    skopeo.about(&["delete"], &at("team/app:2")).ok();
    skopeo.about(&["list-tags"], &at("team/app")).refused("404");
    skopeo.about(&["inspect"], &at("team/app:1")).refused("team/app has no tag 1");
    assert_eq!(sha256(skopeo.raw(&at("team/other:1")).as_bytes()), image["digest"].as_str().unwrap());
    let metrics = registry.metrics();
    assert!(!metrics.contains(r#"status="cut""#) && !metrics.contains(r#"status="5"#), "{metrics}");
}

#[test]
fn skopeo_copies_indexes_and_converts_manifests() {
    let Some(skopeo) = Skopeo::here() else { return };
    let registry = Registry::start();
    let at = |name: &str| format!("docker://{}/{name}", registry.address());
    let mut layout = Layout::new(&skopeo.path("images"));
    // Skopeo compresses it with gzip when it sends it.
    let blob = layout.blob("application/vnd.oci.image.layer.v1.tar", &layer());
    let (one, two) = (layout.put("one", "amd64", &blob), layout.put("two", "arm64", &blob));
    let index = layout.index("both", &[("amd64", &one), ("arm64", &two)]);

    skopeo.copy(&["--all", "--preserve-digests"], &layout.image("both"), &at("team/multi:1")).ok();
    assert_eq!(sha256(skopeo.raw(&at("team/multi:1")).as_bytes()), index["digest"].as_str().unwrap());
    for architecture in ["amd64", "arm64"] {
        let shown = skopeo.about(&["--override-arch", architecture, "inspect", "--config"], &at("team/multi:1")).ok();
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap()["architecture"], architecture);
    }
    let without = skopeo.copy(&["--multi-arch", "index-only"], &at("team/multi:1"), &at("team/none:1"));
    without.refused("lists 2 blobs that are missing here");

    skopeo.copy(&["--format", "v2s2"], &layout.image("one"), &at("team/docker:1")).ok();
    assert_eq!(media_type(&skopeo.raw(&at("team/docker:1"))), "application/vnd.docker.distribution.manifest.v2+json");
    skopeo.copy(&["--format", "oci"], &at("team/docker:1"), &at("team/docker:oci")).ok();
    let converted: Value = serde_json::from_str(&skopeo.raw(&at("team/docker:oci"))).unwrap();
    assert_eq!(converted["config"]["mediaType"], "application/vnd.oci.image.config.v1+json");
    skopeo.copy(&["--format", "v2s1"], &at("team/docker:1"), &at("team/docker:old")).refused("expected 2, found 1");

    let folder = skopeo.path("synced");
    let args = ["sync", "--all", "--src-tls-verify=false", "--src", "docker", "--dest", "dir"];
    let repository = format!("{}/team/docker", registry.address());
    skopeo.run(&[&args[..], &[repository.as_str(), folder.to_str().unwrap()][..]].concat()).ok();
    assert!(folder.join("docker:1/manifest.json").exists() && folder.join("docker:oci/manifest.json").exists());
}

#[test]
fn skopeo_logs_in_over_tls_and_is_refused_what_its_token_does_not_permit() {
    let Some(mut skopeo) = Skopeo::here() else { return };
    let authority = Authority::new();
    let signed = authority.certificate(&[&own_address().to_string()]);
    let trusted = skopeo.path("trusted");
    std::fs::create_dir(&trusted).unwrap();
    authority.write(trusted.join("ca.crt"));
    let (certificate, key) = (skopeo.path("certificate.pem"), skopeo.path("key.pem"));
    std::fs::write(&certificate, &signed.certificate).unwrap();
    std::fs::write(&key, &signed.key).unwrap();
    let tls = ["--require-tokens", "--tls-cert", certificate.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let registry = Registry::start_with(true, &tls, &[]);
    let at = |name: &str| format!("docker://{}/{name}", registry.address());
    skopeo.tls = ["src", "dest"].map(|side| format!("--{side}-cert-dir={}", trusted.display()));
    let mut layout = Layout::new(&skopeo.path("images"));
    let blob = layout.blob(ZSTD, &zstd::encode_all(&layer()[..], 1).unwrap());
    layout.put("one", "amd64", &blob);
    let image = layout.image("one");

    let writer = token(&registry, "team/*:pull,push");
    let login = |password: &str| {
        let trusted = format!("--cert-dir={}", trusted.display());
        skopeo.run(&["login", &trusted, "--username", "any", "--password", password, registry.address()])
    };
    login("wrong").refused("invalid username/password");
    skopeo.copy(&[], &image, &at("team/app:1")).refused("unauthorized");
    login(&writer).ok();
    skopeo.copy(&[], &image, &at("team/app:1")).ok();
    skopeo.copy(&[], &at("team/app:1"), &at("team/copy:1")).ok();
    skopeo.about(&["delete"], &at("team/app:1")).refused("does not permit the action");

    let reader = format!("any:{}", token(&registry, "team/*:pull"));
    skopeo.copy(&["--src-creds", &reader], &at("team/app:1"), "dir:read").ok();
    skopeo.copy(&["--dest-creds", &reader], &image, &at("team/app:2")).refused("does not permit the action");
    // What a token may not pull does not exist for it.
    let other = format!("any:{}", token(&registry, "other/*:pull,push"));
    skopeo.copy(&["--src-creds", &other], &at("team/app:1"), "dir:hidden").refused("repository team/app does not exist");
    skopeo.copy(&["--dest-creds", &other], &image, &at("team/app:1")).refused("repository team/app does not exist");
    // The blobs that skopeo knows in a repository that this token does not see are sent.
    skopeo.copy(&["--dest-creds", &other], &image, &at("other/app:1")).ok();
    skopeo.run(&["logout", registry.address()]).ok();
    skopeo.about(&["inspect"], &at("team/app:1")).refused("an access token is needed");
}

#[test]
fn an_export_passes_through_skopeo_and_a_snapshot_does_not() {
    let Some(skopeo) = Skopeo::here() else { return };
    let registry = Registry::start();
    let at = |name: &str| format!("docker://{}/{name}", registry.address());
    let pf = Pf::new(&registry.url());
    let pages = SnapshotDir::write(&pf.path("pages"), Shape::TINY, &(0..50).collect::<Vec<_>>());
    let digest = pf.run(&["push", pages.arg(), "team/agent:step"]).ok().last_line().to_owned();

    let export = pf.path("export");
    pf.run(&["export", "team/agent:step", export.to_str().unwrap()]).ok();
    skopeo.copy(&["--preserve-digests"], &format!("oci:{}", export.display()), &at("archive/agent:step")).ok();
    let from = format!("oci://{}/archive/agent:step", registry.address());
    assert_eq!(pf.run(&["import", &from, "team/again:one"]).ok().last_line(), digest);
    let back = Layout::new(&skopeo.path("back"));
    skopeo.copy(&["--preserve-digests"], &at("archive/agent:step"), &back.image("team/agent:step")).ok();
    assert_eq!(pf.run(&["import", back.path.to_str().unwrap(), "team/again:two"]).ok().last_line(), digest);

    // It copies the blobs that a manifest lists, and not the pages that these list.
    skopeo.copy(&[], &at("team/agent:step"), "dir:snapshot").ok();
    skopeo.copy(&[], "dir:snapshot", &at("other/agent:step")).refused("push it there with `pf push`");
    skopeo.copy(&[], &at("team/agent:step"), &at("third/agent:step")).refused("push it there with `pf push`");
}

mod long {
    use super::{Skopeo, ZSTD};
    use crate::oci_clients::Layout;
    use pfr_schema::{Algorithm, Hasher};
    use pfr_tests::Registry;
    use serde_json::json;
    use std::fs::File;
    use std::io::{BufReader, BufWriter, Write as _};

    const SIZE: u64 = 2 << 30;
    const MEMORY: u64 = 256 << 20;

    #[test]
    fn a_layer_of_two_gigabytes_passes_in_256_mib() {
        let Some(skopeo) = Skopeo::here() else { return };
        let registry = Registry::start();
        let mut layout = Layout::new(&skopeo.path("images"));
        let fresh = skopeo.path("fresh");
        let piece: Vec<u8> = super::layer().into_iter().cycle().take(1 << 20).collect();
        let (mut file, mut hasher) = (BufWriter::new(File::create(&fresh).unwrap()), Hasher::new(Algorithm::Sha256));
        for number in 0..SIZE >> 20 {
            let numbered = [&number.to_le_bytes()[..], &piece[8..]].concat();
            file.write_all(&numbered).unwrap();
            hasher.update(&numbered);
        }
        file.into_inner().unwrap().sync_all().unwrap();
        let digest = hasher.finish().to_string();
        let name = digest.trim_start_matches("sha256:");
        std::fs::rename(&fresh, layout.path.join("blobs/sha256").join(name)).unwrap();
        layout.put("large", "amd64", &json!({"mediaType": ZSTD, "digest": digest, "size": SIZE}));

        let at = format!("docker://{}/team/large:1", registry.address());
        skopeo.copy(&["--preserve-digests"], &layout.image("large"), &at).ok();
        // No more than two copies at a time.
        std::fs::remove_dir_all(&layout.path).unwrap();
        skopeo.copy(&["--preserve-digests"], &at, &format!("dir:{}", skopeo.path("out").display())).ok();
        let mut hasher = Hasher::new(Algorithm::Sha256);
        let file = File::open(skopeo.path("out").join(name)).unwrap();
        std::io::copy(&mut BufReader::with_capacity(1 << 20, file), &mut hasher).unwrap();
        assert_eq!(hasher.finish().to_string(), digest);
        let peak = registry.peak_memory();
        println!("registry {} MiB", peak >> 20);
        assert!(peak < MEMORY, "the registry took {} MiB", peak >> 20);
    }
}
