//! Registries that ask an upstream for what they do not have.

use crate::mirror::{damage_since, packs, push};
use pfr_tests::{Pf, Proxy, Registry, Shape, Tamper};
use std::io::{Read as _, Write as _};
use std::time::Duration;
use tempfile::TempDir;

fn edge(dir: &TempDir, upstream: &str, options: &[&str]) -> Registry {
    Registry::over(&dir.path().join("data"), &[&["--upstream", upstream], options].concat())
}

#[test]
fn two_readers_at_once_fetch_a_snapshot_once_and_later_ones_nothing() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    let digest = push(&Pf::new(&origin.url()), "a:t", &(0..1000).collect::<Vec<_>>(), &[]);
    let whole = 1000 * 2 * (16 << 10);
    let proxy = Proxy::to(origin.address(), Tamper::Nothing);
    let edge = edge(&dir, &proxy.url(), &[]);
    let readers = [Pf::new(&edge.url()), Pf::new(&edge.url())];
    let pulls: Vec<_> = readers.iter().map(|pf| pf.command(&["pull", "a:t"]).spawn().unwrap()).collect();
    for pull in pulls {
        let output = pull.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    for pf in &readers {
        pf.run(&["verify", "--local"]).ok();
    }
    let moved = proxy.from_registry();
    assert!(moved > whole && moved < whole * 5 / 4, "{moved} bytes for {whole}");
    assert_eq!(readers[0].tags("a")["t"], digest);
    // Without the upstream, blobs that are here are served. Others are unavailable, not missing.
    drop((proxy, origin));
    Pf::new(&edge.url()).run(&["pull", "a:t"]).ok();
    let output = Pf::new(&edge.url()).run(&["inspect", "a:never", "--retries", "0"]);
    assert_eq!(output.code, 7, "{output:?}");
}

#[test]
fn a_tag_follows_the_upstream_but_not_if_it_was_moved_here() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    let pf = Pf::new(&origin.url());
    let mut edge = edge(&dir, &origin.url(), &["--upstream-ttl-seconds", "0"]);
    let near = Pf::new(&edge.url());
    push(&pf, "a:t", &[1, 2], &[]);
    near.run(&["pull", "a:t"]).ok();
    let second = push(&pf, "a:t", &[1, 3], &[]);
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], second);
    // Also after a restart: that the tag was put for the upstream is in the database.
    edge.restart();
    let near = Pf::new(&edge.url());
    let third = push(&pf, "a:t", &[1, 5], &[]);
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], third);
    let own = push(&near, "a:t", &[9], &[]);
    push(&pf, "a:t", &[1, 4], &[]);
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], own);
    // A snapshot that is pushed here stays here.
    assert_ne!(pf.tags("a")["t"], own);
    assert_eq!(near.run(&["inspect", "a:nowhere"]).code, 5);
}

#[test]
fn signatures_that_were_made_after_a_pull_are_found_near_their_readers() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    let pf = Pf::new(&origin.url());
    let edge = edge(&dir, &origin.url(), &["--upstream-ttl-seconds", "0"]);
    let near = Pf::new(&edge.url());
    let key = pf.path("release.key");
    let (key, public) = (key.to_str().unwrap().to_owned(), format!("{}.pub", key.display()));
    pf.run(&["keygen", &key]).ok();
    push(&pf, "a:t", &[1, 2], &[]);
    near.run(&["pull", "a:t"]).ok();
    assert_ne!(near.run(&["verify", "a:t", "--key", &public]).code, 0, "it is not signed yet");
    // The upstream is asked about a snapshot once a second at most.
    let wait = || std::thread::sleep(Duration::from_millis(1100));
    pf.run(&["sign", "a:t", "--key", &key]).ok();
    wait();
    near.run(&["pull", "a:t", "--verify-key", &public]).ok();
    // A tag that needs a signature here comes with it.
    let policies = near.path("signing.json");
    let policy = serde_json::json!({"name": "v", "repositories": "*", "tags": ["v*"], "keys": [std::fs::read_to_string(&public).unwrap()]});
    std::fs::write(&policies, serde_json::json!({"policies": [policy]}).to_string()).unwrap();
    near.run(&["signing", "set", policies.to_str().unwrap()]).ok();
    push(&pf, "a:v1", &[3], &[]);
    assert_eq!(near.run(&["inspect", "a:v1"]).code, 5);
    pf.run(&["sign", "a:v1", "--key", &key]).ok();
    wait();
    near.run(&["inspect", "a:v1"]).ok();
    // What was fetched is kept.
    drop(origin);
    wait();
    for reference in ["a:t", "a:v1"] {
        near.run(&["verify", reference, "--key", &public]).ok();
    }
}

#[test]
fn registries_that_are_each_others_upstream_do_not_hang() {
    let (one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let listener = std::net::TcpListener::bind((pfr_tests::own_address(), 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let first = edge(&one, &format!("http://{address}"), &[]);
    drop(listener);
    let second = Registry::at(&two.path().join("data"), &address, &["--upstream", &first.url()]);
    let children: Vec<_> = [&first, &second].map(|registry| Pf::new(&registry.url())).into_iter().collect();
    for pf in &children {
        assert_eq!(pf.run(&["inspect", "a:t"]).code, 5);
    }
    push(&children[1], "a:t", &[1], &[]);
    children[0].run(&["pull", "a:t"]).ok();
}

/// Two registries over directories, each the upstream of the other.
fn mutual(one: &TempDir, two: &TempDir, ttl: [&str; 2]) -> (Registry, Registry) {
    let listener = std::net::TcpListener::bind((pfr_tests::own_address(), 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let first = edge(one, &format!("http://{address}"), &["--upstream-ttl-seconds", ttl[0]]);
    drop(listener);
    let second = Registry::at(&two.path().join("data"), &address, &["--upstream", &first.url(), "--upstream-ttl-seconds", ttl[1]]);
    (first, second)
}

#[test]
fn what_is_here_is_served_if_the_upstreams_newer_state_cannot_be_had() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    let pf = Pf::new(&origin.url());
    let proxy = Proxy::to(origin.address(), Tamper::Nothing);
    let mut edge = edge(&dir, &proxy.url(), &[]);
    let old = push(&pf, "a:t", &[1, 2], &[]);
    Pf::new(&edge.url()).run(&["pull", "a:t"]).ok();
    let before = packs(&origin);
    push(&pf, "a:t", &(100..150).collect::<Vec<_>>(), &["--parent", "a:t"]);
    damage_since(&origin, &before);
    // After a restart the edge does not know when it last asked the upstream.
    edge.restart();
    let near = Pf::new(&edge.url());
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], old);
    let asked = proxy.from_registry();
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], old);
    assert_eq!(proxy.from_registry(), asked, "what cannot be had is not asked for by every reader");
}

#[test]
fn a_tag_that_lags_behind_is_followed_and_an_acknowledged_move_is_not_taken_back() {
    let (one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (mut a, b) = mutual(&one, &two, ["60", "3600"]);
    let (at_a, at_b) = (Pf::new(&a.url()), Pf::new(&b.url()));
    let first = push(&at_a, "a:main", &[1], &[]);
    at_b.run(&["pull", "a:main"]).ok();
    let second = push(&at_a, "a:main", &[1, 2], &["--parent", "a:main"]);
    at_b.run(&["pull", &format!("a@{second}")]).ok();
    assert_eq!(at_b.tags("a")["main"], first);
    a.restart();
    // B knows the snapshot, but its tag is still where it was.
    assert_eq!(at_a.json(&["inspect", "a:main"])["summary"]["digest"], second);
    assert_eq!(at_a.tags("a")["main"], second);
    // In the other direction, B's tag lags behind A's. B follows it after a restart too.
    drop(b);
    let b = edge(&two, &a.url(), &[]);
    assert_eq!(Pf::new(&b.url()).json(&["inspect", "a:main"])["summary"]["digest"], second);
}

#[test]
fn a_tag_that_was_moved_back_here_stays_there() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    let pf = Pf::new(&origin.url());
    let edge = edge(&dir, &origin.url(), &["--upstream-ttl-seconds", "0"]);
    let near = Pf::new(&edge.url());
    let first = push(&pf, "a:t", &[1], &[]);
    near.run(&["pull", "a:t"]).ok();
    let second = push(&pf, "a:t", &[1, 2], &["--parent", "a:t"]);
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], second);
    near.run(&["tag", &format!("a@{first}"), "t"]).ok();
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], first);
}

#[test]
fn ancestors_are_found_by_name_and_only_the_one_that_is_asked_for_is_pulled() {
    const GENERATIONS: usize = 30;
    let (origin, near, far) = (Registry::start(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let pf = Pf::new(&origin.url());
    let mut digests = vec![push(&pf, "a:main", &[0], &[])];
    for generation in 1..GENERATIONS as u64 {
        digests.push(push(&pf, "a:main", &[generation], &["--parent", "a:main"]));
    }
    let middle = edge(&near, &origin.url(), &[]);
    let outer = edge(&far, &middle.url(), &[]);
    let visible = |pf: &Pf| pf.json(&["ls", "a"])["snapshots"].as_array().unwrap().len();
    // Neither registry has it, so the list is that of the origin.
    assert_eq!(visible(&Pf::new(&outer.url())), GENERATIONS);
    for registry in [&outer, &middle] {
        let reader = Pf::new(&registry.url());
        let found = reader.json(&["inspect", "a:main~25"]);
        assert_eq!(found["summary"]["digest"], digests[GENERATIONS - 1 - 25].as_str());
        assert_eq!(visible(&reader), 2, "the tag's and the one that was asked for");
        assert_eq!(reader.run(&["inspect", "a:main~30"]).code, 5);
        let lineage = reader.json(&["log", "a:main"]);
        assert_eq!(lineage["snapshots"].as_array().unwrap().len(), GENERATIONS, "{lineage}");
        assert_eq!(visible(&reader), 2);
    }
    // Without the upstream, what is here.
    drop((origin, middle));
    let alone = Pf::new(&outer.url());
    assert_eq!(alone.json(&["log", "a:main"])["snapshots"].as_array().unwrap().len(), 1);
    assert_eq!(alone.run(&["inspect", "a:main~3", "--retries", "0"]).code, 7, "not here is not unknown");
}

/// Asks a registry for pages as frames; what came of the body.
fn frames(registry: &Registry, pages: std::ops::Range<u64>) -> Vec<u8> {
    let digests: Vec<String> = pages.map(|n| pfr_schema::Digest::sha256(&Shape::SMALL.page(2 * n)).to_string()).collect();
    let body = serde_json::json!({ "digests": digests }).to_string();
    let mut stream = std::net::TcpStream::connect(registry.address()).unwrap();
    let head = format!(
        "POST /v1/repositories/a/frames HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    let mut answer = Vec::new();
    // A cut is an end, too.
    drop(stream.read_to_end(&mut answer));
    answer
}

#[test]
fn frames_that_are_passed_on_are_counted_and_a_cut_is_no_bug() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    push(&Pf::new(&origin.url()), "a:t", &(0..500).collect::<Vec<_>>(), &[]);
    let proxy = Proxy::to(origin.address(), Tamper::Nothing);
    let edge = edge(&dir, &proxy.url(), &[]);
    let whole = 500 * (16 << 10);
    assert!(frames(&edge, 0..500).len() > whole);
    assert!(edge.metric("pf_frames_sent_bytes_total") > whole as f64);
    // More than may pass at once, one after the other: each gives its turn back.
    for _ in 0..10 {
        assert!(frames(&edge, 0..2).len() > 2 * (16 << 10));
    }
    proxy.cut_after(whole as u64 / 2);
    assert!(frames(&edge, 0..500).len() < whole);
    assert_eq!(proxy.cuts(), 1);
    let metrics = edge.metrics();
    assert!(metrics.contains("pf_errors_total{code=\"unavailable\"} 1"), "{metrics}");
    assert!(!metrics.contains("code=\"internal\""), "{metrics}");
}
