//! Cut connections and registries that lie.

use pfr_tests::{Pf, Proxy, Registry, Shape, SnapshotDir, Tamper, files};

/// Pages × components × bytes.
const PAGES: u64 = 1500;
const WHOLE: u64 = PAGES * 2 * (16 << 10);

fn pushed() -> (Registry, Pf, SnapshotDir) {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..PAGES).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    (registry, pf, dir)
}

#[test]
fn a_pull_that_is_cut_goes_on_where_it_was() {
    let (registry, _source, dir) = pushed();
    for into_directory in [false, true] {
        let proxy = Proxy::to(registry.address(), Tamper::Nothing);
        let host = Pf::new(&proxy.url());
        let out = host.path("out");
        let arguments = if into_directory { vec!["pull", "a:t", out.to_str().unwrap()] } else { vec!["pull", "a:t"] };
        let child = host.command(&arguments).spawn().unwrap();
        for cut in 1..=3 {
            proxy.cut_after(WHOLE / 5);
            pfr_tests::wait_for("the cut", 60, || (proxy.cuts() >= cut).then_some(()));
        }
        proxy.cut_after(i64::MAX as u64);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(
            proxy.from_registry() < WHOLE + WHOLE * 2 / 5,
            "{} bytes for {WHOLE}: what had come was fetched again",
            proxy.from_registry()
        );
        if into_directory {
            assert!(files(&out.join("blobs")) == files(&dir.path.join("blobs")), "the blobs differ");
        } else {
            host.run(&["verify", "--local"]).ok();
        }
    }
}

#[test]
fn a_push_that_is_cut_goes_on_where_it_was() {
    let registry = Registry::start();
    let proxy = Proxy::to(registry.address(), Tamper::Nothing);
    let pf = Pf::new(&proxy.url());
    // More than one request's worth, so that whole requests are acknowledged before the cut.
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINYLLAMA, &(0..600).collect::<Vec<_>>());
    let whole = 600 * 2 * Shape::TINYLLAMA.page_bytes() as u64;
    proxy.cut_after(whole * 4 / 5);
    let child = pf.command(&["push", dir.arg(), "a:t"]).spawn().unwrap();
    pfr_tests::wait_for("the cut", 60, || (proxy.cuts() > 0).then_some(()));
    proxy.cut_after(i64::MAX as u64);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    pf.run(&["verify", "a:t"]).ok();
}

#[test]
fn wrong_bytes_from_a_registry_are_detected_and_nothing_is_published() {
    let (registry, _, _) = pushed();
    let mut refused = 0;
    // Deep in the answers: inside pages, whose bytes nothing but their digest protects.
    for at in [200_000_u64, 700_001, 1_500_002, 3_000_003] {
        for into_directory in [false, true] {
            let proxy = Proxy::to(registry.address(), Tamper::Flip(at));
            let host = Pf::new(&proxy.url());
            let out = host.path("out");
            let arguments = if into_directory { vec!["pull", "a:t", out.to_str().unwrap()] } else { vec!["pull", "a:t"] };
            let output = host.run(&arguments);
            if output.code == 0 {
                // The flip lay beyond what one connection carried.
                continue;
            }
            refused += 1;
            assert_eq!(output.code, 4, "{output:?}");
            assert!(!out.join("page_manifest.json").exists());
            assert_ne!(host.run(&["ls", "a", "--local"]).code, 0, "nothing is published");
        }
    }
    assert!(refused >= 4, "only {refused} flips were met");
}

#[test]
fn damage_on_the_registrys_disk_is_found_by_pull_and_verify_and_not_healed_silently() {
    let (registry, pf, _) = pushed();
    let (path, mut bytes) = files(&registry.data().join("packs")).into_iter().max_by_key(|(_, bytes)| bytes.len()).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(registry.data().join("packs").join(path), bytes).unwrap();
    let output = pf.run(&["verify", "a:t"]);
    assert_eq!(output.code, 4, "{output:?}");
    assert!(output.stderr.contains("sha256:"), "it names the blob: {output:?}");
    let host = Pf::new(&registry.url());
    let output = host.run(&["pull", "a:t"]);
    assert_eq!(output.code, 4, "{output:?}");
    assert_ne!(host.run(&["ls", "a", "--local"]).code, 0);
}

mod long {
    use super::pushed;
    use pfr_tests::{Fate, Pf, Seen, front, wait_for};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    /// Longer than five tries take.
    const AWAY: Duration = Duration::from_secs(9);

    #[test]
    fn a_registry_that_is_away_for_longer_than_a_few_tries_take_does_not_end_a_pull() {
        let (mut registry, _, _) = pushed();
        let (asked, away) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let rule = {
            let (asked, away) = (Arc::clone(&asked), Arc::clone(&away));
            move |_: &Seen| {
                // The first answer comes; the second request finds the registry gone.
                if asked.fetch_add(1, Ordering::SeqCst) > 0 {
                    wait_for("the registry to be killed", 60, || away.load(Ordering::SeqCst).then_some(()));
                }
                Fate::Pass
            }
        };
        let front = front(&registry.url(), rule);
        let host = Pf::new(&front.url);
        let pull = host.command(&["pull", "a:t"]).spawn().unwrap();
        wait_for("the first answer", 60, || (asked.load(Ordering::SeqCst) > 1).then_some(()));
        registry.kill();
        away.store(true, Ordering::SeqCst);
        let since = Instant::now();
        wait_for("the restart", 60, || (since.elapsed() >= AWAY).then_some(()));
        registry.restart();
        let output = pull.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.contains("registry not reachable, retrying ("), "{stderr}");
        host.run(&["verify", "--local", "a:t"]).ok();
    }
}
