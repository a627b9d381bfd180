//! Many clients push the same snapshot at once: its bytes come about once, also if the client that
//! began with them hangs or dies.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, wait_for};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const RECEIVED: &str = "pf_frames_received_bytes_total";

/// Longer than a client that hangs keeps others waiting, on any machine.
const FOR_LONG: Duration = Duration::from_secs(25);

fn finish(child: Child) {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Pushes a snapshot of so many pages from 16 clients. Returns by how much more bytes came than it
/// has.
fn herd(shape: Shape, pages: u64) -> f64 {
    let registry = Registry::start();
    let hosts: Vec<Pf> = (0..16).map(|_| Pf::new(&registry.url())).collect();
    let dir = SnapshotDir::write(&hosts[0].path("dir"), shape, &(0..pages).collect::<Vec<_>>());
    let push = |(n, host): (usize, &Pf)| host.command(&["push", dir.arg(), &format!("team/agent:t{n}")]).spawn().unwrap();
    let clients: Vec<Child> = hosts.iter().enumerate().map(push).collect();
    clients.into_iter().for_each(finish);
    hosts[0].run(&["verify", "team/agent:t0"]).ok();
    assert_eq!(hosts[0].tags("team/agent").len(), 16);
    let (received, raw) = (registry.metric(RECEIVED), (pages * 2) as f64 * shape.page_bytes() as f64);
    println!("{:.2} × the bytes came, {} answers that a blob is coming", received / raw, registry.metric("pf_coming_blobs_total"));
    received / raw
}

#[test]
fn sixteen_clients_that_push_the_same_snapshot_send_it_about_once() {
    let times = herd(Shape::SMALL, 700);
    assert!(times < 2.0, "its bytes came {times:.2} times");
}

/// A client in the middle of its upload, the registry, and another client that has the same.
struct Begun {
    registry: Registry,
    client: Child,
    other: Pf,
    dir: SnapshotDir,
    raw: f64,
    _host: Pf,
}

fn begin() -> Begun {
    let registry = Registry::start();
    let (host, other) = (Pf::new(&registry.url()), Pf::new(&registry.url()));
    // All of it in one request.
    let pages = 1600;
    let dir = SnapshotDir::write(&host.path("dir"), Shape::SMALL, &(0..pages).collect::<Vec<_>>());
    let client = host.command(&["push", dir.arg(), "a:first"]).spawn().unwrap();
    wait_for("the first bytes", 60, || (registry.metric(RECEIVED) > 0.0).then_some(()));
    let raw = (pages * 2) as f64 * Shape::SMALL.page_bytes() as f64;
    Begun { registry, client, other, dir, raw, _host: host }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_client_that_is_stopped_in_its_upload_keeps_another_one_waiting_for_seconds_only() {
    let Begun { registry, client, other, dir, raw, _host } = begin();
    signal(&client, "-STOP");
    assert!(other.tags("a").is_empty(), "it was stopped too late: the test tests nothing");
    let begun = Instant::now();
    other.run(&["push", dir.arg(), "a:second"]).ok();
    assert!(begun.elapsed() < FOR_LONG, "{:?}", begun.elapsed());
    signal(&client, "-CONT");
    finish(client);
    for tag in ["a:first", "a:second"] {
        other.run(&["verify", tag]).ok();
    }
    let times = registry.metric(RECEIVED) / raw;
    assert!(times < 3.0, "its bytes came {times:.2} times");
}

#[test]
fn a_client_that_is_killed_in_its_upload_leaves_the_rest_to_another_one() {
    let Begun { registry, mut client, other, dir, raw, _host } = begin();
    client.kill().unwrap();
    client.wait().unwrap();
    assert!(other.tags("a").is_empty(), "it was killed too late: the test tests nothing");
    other.run(&["push", dir.arg(), "a:second"]).ok();
    other.run(&["verify", "a:second"]).ok();
    let times = registry.metric(RECEIVED) / raw;
    assert!(times < 2.0, "its bytes came {times:.2} times");
}

mod long {
    use super::{Shape, herd};

    #[test]
    fn sixteen_clients_share_400_megabytes() {
        let times = herd(Shape::TINYLLAMA, 1110);
        assert!(times < 1.3, "its bytes came {times:.2} times");
    }
}
