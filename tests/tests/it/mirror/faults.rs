//! Mirrors that are killed, ends that are down, bytes that are damaged.

use super::{command, damage_since, end, mirror, names, packs, populate, push};
use pfr_tests::{Pf, Proxy, Registry, Tamper, wait_for};

#[test]
fn a_killed_mirror_leaves_whole_snapshots_and_the_next_run_goes_on() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    push(&pf, "a:big", &(0..1500).collect::<Vec<_>>(), &[]);
    let whole = 1500 * 2 * (16 << 10);
    for kills in 1..=3 {
        let proxy = Proxy::to(a.address(), Tamper::Nothing);
        let mut child = command(&["--from", &proxy.url(), "--to", &b.url()]).spawn().unwrap();
        wait_for("a third to pass", 120, || (proxy.from_registry() > whole / 3).then_some(()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Pf::new(&b.url()).tags("a").is_empty(), "a snapshot is seen after kill {kills}");
    }
    let moved = mirror(&["--from", &a.url(), "--to", &b.url()]).ok().number("bytes");
    println!("{moved} of {whole} bytes were left");
    assert!(moved < whole * 19 / 20, "{moved} of {whole} bytes: what had come was moved again");
    assert_eq!(Pf::new(&b.url()).tags("a"), pf.tags("a"));
    Pf::new(&b.url()).run(&["verify", "a:big"]).ok();
}

#[test]
fn an_end_that_is_down_is_unreachable_and_not_empty() {
    let (a, b) = (Registry::start(), Registry::start());
    populate(&Pf::new(&a.url()));
    mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    let before = names(&b);
    let url = a.url();
    drop(a);
    let output = mirror(&["--from", &url, "--to", &b.url(), "--delete"]);
    assert_eq!(output.code, 7, "{output:?}");
    assert_eq!(names(&b), before);
}

#[test]
fn a_damaged_blob_is_named_and_the_others_go_on() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    push(&pf, "bad:t", &(0..50).collect::<Vec<_>>(), &[]);
    let packs: Vec<_> = std::fs::read_dir(a.data().join("packs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    push(&pf, "good:t", &[1000], &[]);
    let pack = packs.iter().flat_map(|path| {
        if path.is_dir() { std::fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).collect() } else { vec![path.clone()] }
    });
    for path in pack {
        let mut bytes = std::fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }
    let output = mirror(&["--from", &a.url(), "--to", &b.url()]);
    assert_eq!(output.code, 4, "{output:?}");
    let failed = &output.json()["failures"][0];
    assert_eq!(failed["repository"], "bad");
    assert!(failed["reason"].as_str().unwrap().matches("sha256:").count() >= 2, "{failed}");
    let there = Pf::new(&b.url());
    assert_eq!(there.tags("good"), pf.tags("good"));
    assert!(there.tags("bad").is_empty());
}

#[test]
fn what_cannot_be_copied_does_not_cost_the_target_its_last_good_state() {
    let (a, b) = (Registry::start(), Registry::start());
    let (here, there) = (Pf::new(&a.url()), Pf::new(&b.url()));
    let old = push(&here, "a:main", &(0..50).collect::<Vec<_>>(), &[]);
    push(&here, "gone:t", &[7], &[]);
    mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    let before = packs(&a);
    push(&here, "a:main", &(2000..2050).collect::<Vec<_>>(), &[]);
    damage_since(&a, &before);
    here.run(&["rm", &format!("a@{old}")]).ok();
    here.run(&["rm", "gone:t"]).ok();
    let output = mirror(&["--from", &a.url(), "--to", &b.url(), "--delete"]);
    assert_eq!((output.code, output.number("snapshots_deleted")), (4, 0), "{output:?}");
    assert_eq!(there.tags("a")["main"], old);
    there.run(&["verify", "a:main"]).ok();
    // After a pass that copied everything, the tag that is gone there is deleted here.
    assert!(!there.tags("gone").contains_key("t"));
}

#[test]
fn a_pass_that_is_told_to_end_says_what_it_did() {
    let (a, b) = (Registry::start(), Registry::start());
    let pf = Pf::new(&a.url());
    push(&pf, "a:first", &[1], &[]);
    push(&pf, "b:big", &(0..1500).collect::<Vec<_>>(), &[]);
    let proxy = Proxy::to(a.address(), Tamper::Nothing);
    let child = command(&["--from", &proxy.url(), "--to", &b.url()]).spawn().unwrap();
    wait_for("some of it to pass", 120, || (proxy.from_registry() > 4 << 20).then_some(()));
    let sent = std::process::Command::new("sh").args(["-c", &format!("kill -TERM {}", child.id())]).status().unwrap();
    assert!(sent.success());
    let output = end(child);
    assert_eq!(output.code, 143, "{output:?}");
    assert_eq!((output.number("repositories"), output.number("snapshots_copied")), (2, 1), "{output:?}");
    assert!(output.stderr.contains("interrupted"), "{output:?}");
}

#[test]
fn memory_is_bounded() {
    let (a, b) = (Registry::start(), Registry::start());
    push(&Pf::new(&a.url()), "a:big", &(0..4000).collect::<Vec<_>>(), &[]);
    let output = mirror(&["--from", &a.url(), "--to", &b.url()]).ok();
    println!("{} bytes through {} MiB", output.number("bytes"), output.peak_memory >> 20);
    assert!(output.peak_memory > 1 << 20 && output.peak_memory < 96 << 20, "{} MiB", output.peak_memory >> 20);
}
