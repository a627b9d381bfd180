//! The storage goes away and comes back.

use super::backend::assert_same;
use pfr_testkit::s3;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, wait_for};

fn unavailable(registry: &Registry) -> u64 {
    let metrics = registry.metrics();
    let line = metrics.lines().find(|line| line.starts_with("pf_errors_total{code=\"unavailable\"}"));
    line.and_then(|line| line.rsplit(' ').next()).map_or(0, |value| value.parse().unwrap())
}

/// How the storage goes away.
#[derive(Clone, Copy, Debug)]
enum Outage {
    Stopped,
    Killed,
}

/// Takes the storage away in each of these ways, and brings it back while a pull and a push wait
/// for it.
fn outages(ways: &[Outage]) {
    let mut s3 = s3::Server::start();
    let storage = format!("s3://{}/p", s3.bucket());
    // The registry reports the outage at once, so the clients do the waiting.
    let registry = Registry::start_with(true, &["--storage", &storage, "--storage-retries", "0"], &s3.env());
    let pf = Pf::new(&registry.url());
    let first = SnapshotDir::write(&pf.path("first"), Shape::SMALL, &(0..300).collect::<Vec<_>>());
    pf.run(&["push", first.arg(), "a:first"]).ok();
    for (round, way) in ways.iter().enumerate() {
        match way {
            Outage::Stopped => s3.stop(),
            Outage::Killed => s3.kill9(),
        }
        let before = unavailable(&registry);
        let out = pf.path(&format!("out-{round}"));
        let new = SnapshotDir::write(
            &pf.path(&format!("new-{round}")),
            Shape::SMALL,
            &(0..300).map(|n| 1000 + n + n * round as u64).collect::<Vec<_>>(),
        );
        let tag = format!("a:new-{round}");
        // On a busy machine the server is not back within the seconds that a command waits by
        // itself.
        let pull = pf.command(&["pull", "a:first", out.to_str().unwrap(), "--retries", "60"]).spawn().unwrap();
        let push = pf.command(&["push", new.arg(), &tag, "--retries", "60"]).spawn().unwrap();
        wait_for("both to be told that the bucket is away", 120, || (unavailable(&registry) >= before + 2).then_some(()));
        assert!(pf.run(&["ls", "a"]).ok().stdout.contains("first"), "names do not need the bucket");
        s3.restart();
        for child in [pull, push] {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{way:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        assert_same(&out, &first.path);
        for reference in ["a:first", &tag] {
            pf.run(&["verify", reference]).ok();
        }
    }
    let log = registry.log();
    assert!(log.contains("code=\"unavailable\""), "{log}");
    assert!(!log.contains("code=\"corrupt_store\"") && !log.contains("code=\"internal\""), "an outage is no damage: {log}");
}

#[test]
fn while_the_bucket_is_away_requests_are_unavailable_and_afterwards_they_succeed_without_a_restart() {
    outages(&[Outage::Killed]);
}

mod long {
    use super::{Outage, outages};

    #[test]
    fn while_the_bucket_is_away_again_and_again_requests_are_unavailable_and_afterwards_they_succeed() {
        outages(&[Outage::Stopped, Outage::Killed, Outage::Stopped, Outage::Killed]);
    }
}

#[test]
fn a_bucket_that_was_deleted_is_out_of_reach_and_what_lay_in_it_is_not_taken_for_damaged() {
    let s3 = s3::Server::shared();
    let bucket = s3.bucket();
    let registry = Registry::start_with(true, &["--storage", &format!("s3://{bucket}/p")], &s3.env());
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..100).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    assert_eq!(pf.json(&["scrub", "--remote"])["damaged"], serde_json::json!([]));
    assert!(registry.get("/readyz").starts_with("HTTP/1.1 200"));
    s3.delete_bucket(&bucket);
    for made_anew in [false, true] {
        if made_anew {
            s3.make_bucket(&bucket);
        }
        // Repetitions would only take five seconds each and give the same answer.
        for command in [&["scrub", "--remote", "--retries", "0"][..], &["verify", "a:t", "--retries", "0"]] {
            let output = pf.run(command);
            assert_eq!(output.code, 7, "{output:?}");
            assert!(output.stderr.contains("cannot reach its storage"), "{output:?}");
        }
        assert!(registry.get("/readyz").starts_with("HTTP/1.1 503"));
        assert!(registry.get("/v1/damaged").ends_with("[]"), "nothing is quarantined");
        assert!(pf.run(&["ls", "a"]).ok().stdout.contains('t'), "names do not need the bucket");
    }
    let log = registry.log();
    assert!(log.contains("is it the right bucket"), "the operator is told more: {log}");
    assert!(!log.contains("corrupt_store"), "{log}");
}
