//! Downloads straight from the bucket.

use super::backend::{Backend, Database, Packs, assert_same};
use pfr_testkit::s3;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, wait_for};
use serde_json::Value;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

/// 60 MB of pages that do not compress.
const PAGES: u64 = 170;

fn pages() -> Vec<u64> {
    (0..PAGES).collect()
}

fn bytes() -> f64 {
    (PAGES * 2 * Shape::TINYLLAMA.page_bytes() as u64) as f64
}

fn pushed(registry: &Registry) -> (Pf, SnapshotDir) {
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINYLLAMA, &pages());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    (pf, dir)
}

#[test]
fn large_downloads_come_from_the_bucket_byte_for_byte_and_small_ones_from_the_registry() {
    let backend = Backend::new(Database::Sqlite, Packs::Bucket);
    let registry = backend.registry(&["--redirect-downloads"]);
    let (_pf, dir) = pushed(&registry);
    let into_directory = Pf::new(&registry.url());
    into_directory.run(&["pull", "a:t", into_directory.path("out").to_str().unwrap()]).ok();
    assert_same(&into_directory.path("out"), &dir.path);
    let into_store = Pf::new(&registry.url());
    into_store.run(&["pull", "a:t"]).ok();
    into_store.run(&["verify", "a:t"]).ok();
    let (sent, redirected) = (registry.metric("pf_frames_sent_bytes_total"), registry.metric("pf_frames_redirected_bytes_total"));
    assert!(redirected >= 2.0 * bytes(), "{redirected} of {} bytes came from the bucket", 2.0 * bytes());
    assert!(sent > 0.0 && sent < 0.01 * bytes(), "the registry itself sent {sent} bytes");
}

#[test]
fn a_client_that_cannot_reach_the_bucket_gets_everything_from_the_registry() {
    let s3 = s3::Server::shared();
    // The registry reaches the bucket by a proxy that the client does not have.
    let mut environment = s3.env_with("http://127.0.0.1:1");
    environment.push(("AWS_PROXY_URL".to_owned(), s3.endpoint()));
    let storage = format!("s3://{}", s3.bucket());
    let registry = Registry::start_with(true, &["--redirect-downloads", "--storage", &storage], &environment);
    let (_pf, dir) = pushed(&registry);
    let far = Pf::new(&registry.url());
    far.run(&["pull", "a:t", far.path("out").to_str().unwrap()]).ok();
    assert_same(&far.path("out"), &dir.path);
    assert!(registry.metric("pf_frames_redirected_bytes_total") > 0.0, "no client was sent to the bucket");
    assert!(registry.metric("pf_frames_sent_bytes_total") >= bytes());
}

#[test]
fn locations_are_given_on_request_and_expire() {
    // Two replicas over one store: the URLs of one outlast this test, those of the other end at
    // once.
    let backend = Backend::new(Database::Postgres, Packs::Bucket);
    let registry = backend.registry(&["--redirect-downloads"]);
    let brief = backend.registry(&["--redirect-downloads", "--redirect-seconds", "1"]);
    let (_pf, dir) = pushed(&registry);
    let digests: Vec<String> = (0..60).map(|n| pfr_schema::Digest::sha256(&Shape::TINYLLAMA.page(n)).to_string()).collect();
    let body = serde_json::json!({ "digests": digests }).to_string();
    let ask = |registry: &Registry, accept: &str| {
        let headers = format!("Accept: {accept}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        request(registry.address(), &format!("POST /v1/repositories/a/frames HTTP/1.1\r\n{headers}"), &body)
    };
    let locations = |registry: &Registry| -> Value {
        let (head, answer) = ask(registry, "application/vnd.pf.frame-locations.v1+json");
        assert!(head.contains("content-type: application/vnd.pf.frame-locations.v1+json"), "{head}");
        serde_json::from_slice(&answer).unwrap()
    };
    let get = |extent: &Value| {
        let (offset, length) = (extent["offset"].as_u64().unwrap(), extent["length"].as_u64().unwrap());
        let (host, path) = extent["url"].as_str().unwrap().strip_prefix("http://").unwrap().split_once('/').unwrap();
        request(host, &format!("GET /{path} HTTP/1.1\r\nRange: bytes={offset}-{}\r\n", offset + length - 1), "")
    };
    let (head, _) = ask(&registry, "application/vnd.pf.frames.v1");
    assert!(head.contains("content-type: application/vnd.pf.frames.v1"), "{head}");
    let locations_here = locations(&registry);
    assert_eq!(locations_here["expires_seconds"], 900);
    let extents = locations_here["extents"].as_array().unwrap();
    let named: Vec<&str> = extents.iter().flat_map(|e| e["digests"].as_array().unwrap()).map(|d| d.as_str().unwrap()).collect();
    assert_eq!(named, digests, "in the asked order");
    let (head, frames) = get(&extents[0]);
    assert!(head.starts_with("HTTP/1.1 206"), "{head}");
    assert_eq!(frames.len() as u64, extents[0]["length"].as_u64().unwrap());
    let page = std::fs::read(dir.page_file(0)).unwrap();
    assert!(frames.windows(page.len()).next_back().is_some() && frames[60..].starts_with(&page), "the frame holds the page as it is");
    let brief_locations = locations(&brief);
    assert_eq!(brief_locations["expires_seconds"], 1);
    wait_for("the URL to expire", 60, || get(&brief_locations["extents"][0]).0.starts_with("HTTP/1.1 403").then_some(()));
    assert!(!registry.log().contains("X-Amz-Signature"), "signed URLs are in the log");
}

#[test]
fn a_pull_outlives_its_urls() {
    // Every URL has expired by the time it is looked at a second time, some before the first.
    let backend = Backend::new(Database::Sqlite, Packs::Bucket);
    let registry = backend.registry(&["--redirect-downloads", "--redirect-seconds", "1"]);
    let (_pf, dir) = pushed(&registry);
    let pf = Pf::new(&registry.url());
    pf.run(&["pull", "a:t", pf.path("out").to_str().unwrap()]).ok();
    assert_same(&pf.path("out"), &dir.path);
}

fn request(address: &str, head: &str, body: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "{head}Host: {address}\r\nConnection: close\r\n\r\n{body}").unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("{:?}", String::from_utf8_lossy(&all)));
    (String::from_utf8_lossy(&all[..end]).into_owned(), all.split_off(end + 4))
}
