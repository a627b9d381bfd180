//! Shared pages are stored and moved once, and statistics say so.

use pfr_tests::{Pf, Registry, Shape, SnapshotDir, files};

fn fork_of(base: &[u64], fork: u64, changed: usize) -> Vec<u64> {
    let mut pages = base.to_vec();
    for (i, page) in pages.iter_mut().rev().take(changed).enumerate() {
        *page = 1_000_000 * fork + i as u64;
    }
    pages
}

#[test]
fn twelve_forks_with_one_percent_new_pages_occupy_little_more_than_one() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let base: Vec<u64> = (0..400).collect();
    let first = SnapshotDir::write(&pf.path("base"), Shape::SMALL, &base);
    let parent = pf.run(&["push", first.arg(), "team/agent:base"]).ok().last_line().to_owned();
    // The journal and the store's marker lie beside the packs.
    let on_disk = |registry: &Registry| {
        let packs = files(&registry.data().join("packs")).into_iter().filter(|(path, _)| path.extension().is_some_and(|e| e == "pfpack"));
        packs.map(|(_, bytes)| bytes.len() as u64).sum::<u64>()
    };
    let one = on_disk(&registry);
    for fork in 1..=12 {
        let dir = SnapshotDir::write(&pf.path("fork"), Shape::SMALL, &fork_of(&base, fork, 4));
        let reference = format!("team/agent:fork-{fork}");
        let report = pf.json(&["push", dir.arg(), &reference, "--parent", "team/agent:base"]);
        assert!(report["round_trips"].as_u64().unwrap() <= 6, "{report}");
        let new = 8 * Shape::SMALL.page_bytes() as u64;
        let sent = report["sent_bytes"].as_u64().unwrap();
        assert!(sent <= new * 102 / 100 + (128 << 10), "{report}");
    }
    let all = on_disk(&registry);
    assert!(all * 100 <= one * 113, "13 snapshots take {all} bytes, one takes {one}");

    let stats = pf.json(&["stats", "team/agent"]);
    let number = |field: &str| stats[field].as_u64().unwrap();
    assert_eq!(number("disk_bytes"), all, "disk is what lies on the disk");
    assert!(number("stored_bytes") <= all && number("stored_bytes") * 100 > all * 97, "{} of {all}", number("stored_bytes"));
    let page = 2 * Shape::SMALL.page_bytes() as u64;
    let pages = (400 + 12 * 4) * page;
    assert!(number("unique_bytes") >= pages && number("unique_bytes") < pages + (1 << 20), "{} against {pages}", number("unique_bytes"));
    assert!(number("logical_bytes") >= 13 * 400 * page, "{stats}");
    let snapshots = stats["snapshots"].as_array().unwrap();
    assert_eq!(snapshots.len(), 13);
    assert_eq!(snapshots.iter().map(|s| s["new_bytes"].as_u64().unwrap()).sum::<u64>(), number("unique_bytes"));
    for fork in &snapshots[1..] {
        assert_eq!(fork["parents"][0], parent);
        let exclusive = fork["exclusive_bytes"].as_u64().unwrap();
        assert!((4 * page..4 * page + (64 << 10)).contains(&exclusive), "{fork}");
    }
}

#[test]
fn an_unchanged_push_sends_nothing_in_three_round_trips() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("d"), Shape::TINY, &(0..3000).collect::<Vec<_>>());
    let first = pf.json(&["push", dir.arg(), "a:one"]);
    let again = pf.json(&["push", dir.arg(), "a:one"]);
    assert_eq!(again["blobs_sent"], 0);
    assert_eq!(again["sent_bytes"], 0);
    assert!(again["round_trips"].as_u64().unwrap() <= 3, "{again}");
    assert_eq!(again["digest"], first["digest"]);
    // Another host with the same bytes: the same.
    let other = Pf::new(&registry.url());
    let copy = SnapshotDir::write(&other.path("copy"), Shape::TINY, &(0..3000).collect::<Vec<_>>());
    let again = other.json(&["push", copy.arg(), "b:two"]);
    assert_eq!((&again["blobs_sent"], &again["digest"]), (&serde_json::json!(0), &first["digest"]));
}

#[test]
fn rows_written_by_a_fork_do_not_grow_with_what_it_shares() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let mut rows = Vec::new();
    for (round, pages) in [600_u64, 6000].into_iter().enumerate() {
        let base: Vec<u64> = (0..pages).map(|n| n + 100_000 * round as u64).collect();
        let dir = SnapshotDir::write(&pf.path(&format!("base-{round}")), Shape::TINY, &base);
        pf.run(&["push", dir.arg(), &format!("a:base-{round}")]).ok();
        let fork = SnapshotDir::write(&pf.path(&format!("fork-{round}")), Shape::TINY, &fork_of(&base, 7 + round as u64, 4));
        let before = registry.metric("pf_store_rows_written_total");
        pf.run(&["push", fork.arg(), &format!("a:fork-{round}")]).ok();
        rows.push(registry.metric("pf_store_rows_written_total") - before);
    }
    // A run holds up to 1,024 pages; re-writing the last one is what a fork costs, whatever the
    // snapshot's size.
    assert!(rows.iter().all(|r| *r < 2.0 * 1024.0 + 150.0), "{rows:?}");
}

#[test]
fn different_snapshots_in_different_repositories_share_pages() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let a = SnapshotDir::write(&pf.path("a"), Shape::SMALL, &(0..100).collect::<Vec<_>>());
    let b = SnapshotDir::write(&pf.path("b"), Shape::SMALL, &(50..150).collect::<Vec<_>>());
    pf.run(&["push", a.arg(), "team/a:x"]).ok();
    let report = pf.json(&["push", b.arg(), "team/b:x"]);
    let sent = report["sent_bytes"].as_u64().unwrap();
    assert!(sent < 51 * 2 * Shape::SMALL.page_bytes() as u64, "{report}");
    let stats = pf.json(&["stats"]);
    assert!(stats["unique_bytes"].as_u64().unwrap() < 151 * 2 * Shape::SMALL.page_bytes() as u64, "{stats}");
}
