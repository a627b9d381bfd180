//! Cuts and kills at chosen bytes: of a push, of its last answer, of a pull.

use super::{nothing_published, same_files};
use pfr_tests::{Fate, Pf, Proxy, Registry, Seen, Shape, SnapshotDir, Tamper, front, seed, wait_for};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use std::collections::{BTreeMap, BTreeSet};
use std::process::Child;

const PAGES: u64 = 150;
/// The last requests and answers of a push: nodes, commit.
const TAIL: u64 = 900;

/// What every client can see: where tags point, and every snapshot, tagged or not.
fn visible(pf: &Pf) -> (BTreeMap<String, String>, BTreeSet<String>) {
    let output = pf.run(&["ls", "a", "--json"]);
    if output.code == 5 {
        return Default::default();
    }
    let listed = output.ok().json();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let tags = listed["tags"].as_array().unwrap().iter().map(|t| (text(&t["name"]), text(&t["digest"]))).collect();
    (tags, listed["snapshots"].as_array().unwrap().iter().map(|s| text(&s["digest"])).collect())
}

fn pages_of(round: u64) -> Vec<u64> {
    (0..PAGES).map(|i| if i % 10 < 7 { i } else { 1_000_000 * (round + 1) + i }).collect()
}

/// Bytes on the wire, both ways, of the push of a fork.
fn bytes_of_a_push(registry: &Registry) -> u64 {
    let proxy = Proxy::to(registry.address(), Tamper::Nothing);
    let pf = Pf::new(&proxy.url());
    let dir = SnapshotDir::write(&pf.path("measured"), Shape::SMALL, &pages_of(9999));
    let before = proxy.budget();
    pf.run(&["push", dir.arg(), "a:measured"]).ok();
    u64::try_from(before - proxy.budget()).unwrap()
}

/// Whether the cut came before the child ended.
fn cut_or_end(proxy: &Proxy, cuts: u64, child: &mut Child) -> bool {
    wait_for("the cut or the end", 60, || {
        let cut = proxy.cuts() > cuts;
        (cut || child.try_wait().unwrap().is_some()).then_some(cut)
    })
}

fn pushes_to_a_killed_registry(rounds: u64) {
    let mut random = StdRng::seed_from_u64(seed());
    let mut registry = Registry::start();
    let base = Pf::new(&registry.url());
    let first = SnapshotDir::write(&base.path("dir"), Shape::SMALL, &(0..PAGES).collect::<Vec<_>>());
    base.run(&["push", first.arg(), "a:head"]).ok();
    let whole = bytes_of_a_push(&registry);
    let (mut acknowledged, mut snapshots) = visible(&base);
    let (mut struck, mut unanswered) = (0, 0);
    for round in 0..rounds {
        let proxy = Proxy::to(registry.address(), Tamper::Nothing);
        let mut host = Pf::new(&proxy.url());
        let dir = SnapshotDir::write(&host.path("dir"), Shape::SMALL, &pages_of(round));
        // Half of the kills are around the commit and its answer, where they matter most.
        let at = if round % 2 == 0 { random.random_range(1..whole) } else { whole - random.random_range(0..TAIL) };
        let tag = if random.random_bool(0.5) { "head".to_owned() } else { format!("round-{round}") };
        let reference = format!("a:{tag}");
        proxy.cut_after(at);
        let mut child = host.command(&["push", dir.arg(), &reference]).spawn().unwrap();
        let cut = cut_or_end(&proxy, 0, &mut child);
        registry.kill();
        drop(child.kill());
        let succeeded = child.wait().unwrap().success();
        registry.restart();
        host.talk_to(&registry.url());
        struck += u64::from(cut && !succeeded);

        let (tags, seen) = visible(&host);
        let at_fault = format!("round {round}, cut at byte {at} of {whole}");
        let changed: Vec<&String> = tags.keys().filter(|name| tags.get(*name) != acknowledged.get(*name)).collect();
        assert!(acknowledged.keys().all(|name| tags.contains_key(name)), "{at_fault}: a tag is gone");
        assert!(changed.iter().all(|name| **name == tag), "{at_fault}: {changed:?} changed");
        assert!(!succeeded || changed.len() == 1, "{at_fault}: acknowledged, and not there");
        let new: Vec<&String> = seen.difference(&snapshots).collect();
        assert!(snapshots.is_subset(&seen), "{at_fault}: a snapshot is gone");
        assert_eq!(new.len(), changed.len(), "{at_fault}: {new:?} without its tag, or a tag without its snapshot");
        if changed.len() == 1 {
            unanswered += u32::from(!succeeded);
            assert_eq!(tags[&tag], *new[0], "{at_fault}");
            host.run(&["verify", &reference]).ok();
        }
        let report = host.json(&["push", dir.arg(), &reference]);
        assert!(changed.is_empty() || report["digest"] == tags[&tag], "{at_fault}: what became visible is something else");
        assert!(changed.is_empty() || report["blobs_sent"] == 0, "{at_fault}: visible and not whole: {report}");
        let out = host.path("out");
        host.run(&["pull", &reference, out.to_str().unwrap()]).ok();
        same_files(&out, &dir.path, &at_fault);
        (acknowledged, snapshots) = visible(&host);
    }
    println!("{rounds} rounds, {struck} pushes struck, {unanswered} commits whose answer was lost");
    assert!(struck * 2 >= rounds, "only {struck} of {rounds} kills struck");
    for tag in acknowledged.keys() {
        base.run(&["verify", &format!("a:{tag}")]).ok();
    }
}

#[test]
fn a_registry_killed_at_any_byte_of_a_push_has_all_of_it_or_nothing() {
    pushes_to_a_killed_registry(6);
}

#[test]
fn a_push_whose_commit_was_done_but_not_answered_succeeds_by_itself_and_is_no_conflict() {
    let registry = Registry::start();
    let direct = Pf::new(&registry.url());
    // The answer is lost as a whole, or comes in part.
    for (i, (expected, whole)) in [(None, true), (Some("absent"), true), (None, false), (Some("absent"), false)].into_iter().enumerate() {
        let mut commits = 0;
        let liar = front(&registry.url(), move |seen: &Seen| {
            let commit = seen.path.ends_with("/commit");
            commits += u32::from(commit);
            match (commit && commits == 1, whole) {
                (true, true) => Fate::LoseAnswer,
                (true, false) => Fate::Cut(7),
                (false, _) => Fate::Pass,
            }
        });
        let host = Pf::new(&liar.url);
        let dir = SnapshotDir::write(&host.path("dir"), Shape::TINY, &[1, 2, 3 + i as u64]);
        let tag = format!("t{i}");
        let reference = format!("a:{tag}");
        let mut arguments = vec!["push", dir.arg(), &reference];
        arguments.extend(expected.iter().flat_map(|state| ["--if-tag-is", state]));
        let output = host.run(&arguments);
        assert_eq!(output.code, 0, "{expected:?}, answer lost as a whole: {whole}: {output:?}");
        assert_eq!(liar.struck(), 1);
        assert_eq!(direct.tags("a")[&tag], output.last_line());
        direct.run(&["verify", &reference]).ok();
    }
}

#[test]
fn any_answer_of_a_command_that_changes_something_may_be_lost_or_come_in_part() {
    let registry = Registry::start();
    let direct = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&direct.path("dir"), Shape::TINY, &[1, 2, 3]);
    direct.run(&["push", dir.arg(), "a:t"]).ok();
    for lose in [true, false] {
        for nth in 0..6 {
            let liar = |skip: u32| {
                let mut count = 0;
                front(&registry.url(), move |_: &Seen| {
                    count += 1;
                    match (count == skip + 1, lose) {
                        (true, true) => Fate::LoseAnswer,
                        (true, false) => Fate::Cut(5),
                        (false, _) => Fate::Pass,
                    }
                })
            };
            let what = format!("answer {nth}, lost as a whole: {lose}");
            let next = SnapshotDir::write(&direct.path(&format!("d{lose}-{nth}")), Shape::TINY, &[1, 1000 + nth + 100 * u64::from(lose)]);
            let tag = format!("a:x-{lose}-{nth}");
            for arguments in [
                &["push", next.arg(), &tag, "--if-tag-is", "absent"][..],
                &["tag", "a:t", &format!("y-{lose}-{nth}"), "--if-tag-is", "absent"],
                &["fork", "a:t", "-n", "3", "--prefix", &format!("z-{lose}-{nth}")],
                &["rm", &tag],
            ] {
                let output = Pf::new(&liar(nth as u32).url).run(arguments);
                assert_eq!(output.code, 0, "{what}, {arguments:?}: {output:?}");
            }
        }
    }
    let tags = direct.tags("a");
    assert_eq!(tags.len(), 1 + 12 + 36, "{tags:?}");
    assert!(tags.values().all(|digest| *digest == tags["t"]), "{tags:?}");
}

#[test]
fn a_conflict_whose_answer_was_lost_is_still_a_conflict() {
    let registry = Registry::start();
    let direct = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&direct.path("dir"), Shape::TINY, &[1, 2, 3]);
    let next = SnapshotDir::write(&direct.path("next"), Shape::TINY, &[4]);
    let digest = direct.run(&["push", dir.arg(), "a:t"]).ok().last_line().to_owned();
    direct.run(&["tag", "a:t", "z-2"]).ok();
    let before = direct.tags("a");
    for (end, arguments) in [
        ("/forks", &["fork", "a:t", "-n", "3", "--prefix", "z"][..]),
        ("/tags/new", &["tag", "a:t", "new", "--if-tag-is", &digest]),
        ("/commit", &["push", next.arg(), "a:new", "--if-tag-is", &digest]),
        ("/commit", &["push", next.arg(), "a:t", "--if-tag-is", "absent"]),
    ] {
        let mut lost = false;
        let liar = front(&registry.url(), move |seen: &Seen| {
            let meant = seen.path.ends_with(end) && seen.method != "GET";
            if meant && !std::mem::replace(&mut lost, true) { Fate::LoseAnswer } else { Fate::Pass }
        });
        let output = Pf::new(&liar.url).run(arguments);
        assert_eq!(liar.struck(), 1, "{arguments:?}");
        assert_eq!(output.code, 3, "{arguments:?}: {output:?}");
        assert_eq!(direct.tags("a"), before, "{arguments:?}");
    }
}

#[test]
fn a_pull_cut_again_and_again_ends_whole_and_fetches_little_twice() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..600).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    let whole = 1200 * Shape::SMALL.page_bytes() as u64;
    for into_directory in [false, true] {
        let proxy = Proxy::to(registry.address(), Tamper::Nothing);
        let host = Pf::new(&proxy.url());
        let out = host.path("out");
        let arguments = if into_directory { vec!["pull", "a:t", out.to_str().unwrap()] } else { vec!["pull", "a:t"] };
        // One run, cut each time that another sixth has passed.
        proxy.cut_after(whole / 6);
        let mut child = host.command(&arguments).spawn().unwrap();
        let mut cuts = 0;
        while cut_or_end(&proxy, cuts, &mut child) {
            cuts = proxy.cuts();
            proxy.cut_after(whole / 6);
        }
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(cuts >= 5, "{cuts} cuts");
        assert!(proxy.from_registry() < whole * 3 / 2, "{} bytes came for {whole}, with {cuts} cuts", proxy.from_registry());
        if into_directory {
            same_files(&out, &dir.path, "after cuts");
        } else {
            host.run(&["verify", "--local", "a:t"]).ok();
        }
    }
}

#[test]
fn a_pull_that_cannot_go_on_publishes_nothing_and_says_that_the_answer_broke_off() {
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINYLLAMA, &(0..20).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    // Too short for one frame: no try brings anything.
    let liar = front(&registry.url(), |seen: &Seen| if seen.asks_for_pages() { Fate::Cut(150_000) } else { Fate::Pass });
    let host = Pf::new(&liar.url);
    let out = host.path("out");
    let output = host.run(&["pull", "a:t", out.to_str().unwrap(), "--retries", "2"]);
    assert_eq!(output.code, 7, "{output:?}");
    assert!(output.stderr.contains("broke off"), "{output:?}");
    nothing_published(&host, &out, "cut inside the first frame each time");
}

fn killed_pulls(rounds: u64) {
    let mut random = StdRng::seed_from_u64(seed());
    let registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &(0..PAGES).collect::<Vec<_>>());
    pf.run(&["push", dir.arg(), "a:t"]).ok();
    let whole = 2 * PAGES * Shape::SMALL.page_bytes() as u64;
    for round in 0..rounds {
        let proxy = Proxy::to(registry.address(), Tamper::Nothing);
        let mut host = Pf::new(&proxy.url());
        let out = host.path("out");
        let into_directory = round % 2 == 0;
        let arguments = if into_directory { vec!["pull", "a:t", out.to_str().unwrap()] } else { vec!["pull", "a:t"] };
        let at = random.random_range(1..whole);
        proxy.cut_after(at);
        let mut child = host.command(&arguments).spawn().unwrap();
        assert!(cut_or_end(&proxy, 0, &mut child), "round {round}: it ended before byte {at} of {whole}");
        child.kill().unwrap();
        child.wait().unwrap();
        nothing_published(&host, &out, &format!("round {round}, killed at byte {at}"));
        host.talk_to(&registry.url());
        host.run(&arguments).ok();
        if into_directory {
            same_files(&out, &dir.path, &format!("round {round}"));
        } else {
            host.run(&["verify", "--local", "a:t"]).ok();
        }
    }
}

#[test]
fn a_pull_killed_at_any_byte_publishes_nothing_and_the_next_one_completes() {
    killed_pulls(6);
}

mod long {
    use super::{killed_pulls, pushes_to_a_killed_registry};

    #[test]
    fn a_registry_killed_at_any_byte_of_a_push_has_all_of_it_or_nothing() {
        pushes_to_a_killed_registry(100);
    }

    #[test]
    fn a_pull_killed_at_any_byte_publishes_nothing_and_the_next_one_completes() {
        killed_pulls(60);
    }
}
