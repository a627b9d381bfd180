//! Registries that ask an upstream for what they do not have.

use crate::push;
use pfr_tests::{Pf, Proxy, Registry, Tamper};
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
    // Without the upstream, what is here is served, and what is not is unavailable, not missing.
    drop((proxy, origin));
    Pf::new(&edge.url()).run(&["pull", "a:t"]).ok();
    let output = Pf::new(&edge.url()).run(&["inspect", "a:never"]);
    assert_eq!(output.code, 7, "{output:?}");
}

#[test]
fn a_tag_follows_the_upstream_but_not_if_it_was_moved_here() {
    let (origin, dir) = (Registry::start(), TempDir::new().unwrap());
    let pf = Pf::new(&origin.url());
    let edge = edge(&dir, &origin.url(), &["--upstream-ttl-seconds", "0"]);
    let near = Pf::new(&edge.url());
    push(&pf, "a:t", &[1, 2], &[]);
    near.run(&["pull", "a:t"]).ok();
    let second = push(&pf, "a:t", &[1, 3], &[]);
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], second);
    let own = push(&near, "a:t", &[9], &[]);
    push(&pf, "a:t", &[1, 4], &[]);
    assert_eq!(near.json(&["inspect", "a:t"])["summary"]["digest"], own);
    // What is pushed here stays here.
    assert_ne!(pf.tags("a")["t"], own);
    assert_eq!(near.run(&["inspect", "a:nowhere"]).code, 5);
}

#[test]
fn registries_that_are_each_others_upstream_do_not_hang() {
    let (one, two) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
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
