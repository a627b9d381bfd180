//! Kill −9 of registry or client at random points: acknowledged pushes are complete, others are
//! invisible, and a second run completes them.

use pfr_schema::media_type;
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, Wire, binary, files, seed, wait_for};
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::TcpStream;
use std::process::{Child, Command};
use std::time::Duration;

const REPOSITORY: &str = "team/agent";

#[derive(Debug)]
enum Victim {
    Client,
    Registry,
    Both,
}

/// Ends a child at once, or waits for it; whether it succeeded.
fn end(mut child: Child, kill: bool) -> bool {
    if kill {
        drop(child.kill());
    }
    child.wait_with_output().unwrap().status.success()
}

fn pushes_survive_kills(rounds: u64) {
    let mut random = StdRng::seed_from_u64(seed());
    let mut registry = Registry::start();
    let pf = Pf::new(&registry.url());
    let base: Vec<u64> = (0..300).collect();
    let mut acknowledged: BTreeMap<String, String> = BTreeMap::new();
    let (mut struck, mut lost_answers) = (0, 0);
    for round in 0..rounds {
        // Every third push is of new pages altogether; the rest are forks.
        let numbers: Vec<u64> = if round % 3 == 0 {
            (0..300).map(|i| 10_000 * (round + 1) + i).collect()
        } else {
            let mut fork = base.clone();
            (0..40).for_each(|_| fork[random.random_range(0..300)] = random.next_u64() >> 8);
            fork
        };
        let dir = SnapshotDir::write(&pf.path("dir"), Shape::SMALL, &numbers);
        let tag = format!("round-{round}");
        let reference = format!("{REPOSITORY}:{tag}");
        let victim = &[Victim::Client, Victim::Registry, Victim::Both][random.random_range(0..3)];
        let child = pf.command(&["push", dir.arg(), &reference, "--quiet"]).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random.random_range(1_000..70_000)));
        let succeeded = match victim {
            Victim::Client => end(child, true),
            Victim::Registry => {
                registry.restart();
                end(child, false)
            }
            Victim::Both => {
                registry.kill();
                let succeeded = end(child, true);
                registry.restart();
                succeeded
            }
        };
        struck += u64::from(!succeeded);
        let tags = pf.tags(REPOSITORY);
        for (name, digest) in &acknowledged {
            assert_eq!(tags.get(name), Some(digest), "round {round}, {victim:?}: {name} was acknowledged");
        }
        for (name, digest) in tags.iter().filter(|(name, _)| !acknowledged.contains_key(*name)) {
            assert_eq!(*name, tag, "round {round}: a tag that was not pushed");
            lost_answers += u64::from(!succeeded);
            pf.run(&["verify", &format!("{REPOSITORY}@{digest}")]).ok();
        }
        assert!(!succeeded || tags.contains_key(&tag), "round {round}, {victim:?}: acknowledged and not there");
        let digest = pf.run(&["push", dir.arg(), &reference]).ok().last_line().to_owned();
        if let Some(visible) = tags.get(&tag) {
            assert_eq!(*visible, digest);
        }
        pf.run(&["verify", &reference]).ok();
        acknowledged.insert(tag, digest);
        std::fs::remove_dir_all(&dir.path).unwrap();
    }
    println!("{rounds} rounds, {struck} pushes cut, {lost_answers} answers lost after the commit");
    assert!(struck > 0, "no kill struck in time: the test tests nothing");
    registry.restart();
    assert_eq!(pf.tags(REPOSITORY), acknowledged);
    for tag in acknowledged.keys() {
        pf.run(&["verify", &format!("{REPOSITORY}:{tag}")]).ok();
    }
    let host = Pf::new(&registry.url());
    let out = host.path("out");
    host.run(&["pull", &format!("{REPOSITORY}:round-0"), out.to_str().unwrap()]).ok();
    assert!(files(&out.join("blobs")).iter().all(|(path, bytes)| path.ends_with(pfr_schema::Digest::sha256(bytes).hex())));
}

#[test]
fn acknowledged_pushes_survive_kills_and_unacknowledged_ones_are_whole_or_invisible() {
    pushes_survive_kills(6);
}

/// The upload that a killed registry did not finish takes up room for the length of a lease. Both
/// reports say so: a full disk is not freed without it.
#[test]
fn a_collection_after_a_kill_says_what_an_upload_that_was_cut_off_keeps_and_until_when() {
    let mut registry = Registry::start();
    let base = "/v1/repositories/team%2Fagent/pushes";
    let body = |answer: String| serde_json::from_str::<Value>(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    let opened = body(registry.ask("POST", base));
    let put = format!(
        "PUT {base}/{}/frames HTTP/1.1\r\nHost: {}\r\nContent-Type: {}\r\nContent-Length: {}\r\n\r\n",
        opened["id"].as_str().unwrap(),
        registry.address(),
        media_type::FRAMES,
        16 << 20
    );
    let mut upload = TcpStream::connect(registry.address()).unwrap();
    upload.write_all(put.as_bytes()).unwrap();
    // A large blob is written as it comes.
    upload.write_all(&Wire::blob(&vec![1; 8 << 20])[..6 << 20]).unwrap();
    let unfinished = |report: &str| serde_json::from_str::<Value>(report).unwrap()["unfinished"].clone();
    let written = wait_for("bytes on the disk", 30, || {
        let unfinished = body(registry.get("/v1/usage"))["unfinished"].clone();
        (unfinished["bytes"].as_u64().unwrap() > 0).then_some(unfinished["packs"].clone())
    });
    assert_eq!(written, 1);
    registry.kill();
    let gc = |options: &[&str]| {
        let data = registry.data().to_str().unwrap();
        let output = Command::new(binary("pf-registry")).args(["gc", "--grace", "0", "--data", data]).args(options).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let (planned, done) = (unfinished(&gc(&["--json", "--dry-run"])), unfinished(&gc(&["--json"])));
    assert_eq!(planned, done);
    assert!(done["packs"] == 1 && done["bytes"].as_u64().unwrap() > 0 && done["expires_at"].is_string(), "{done}");
    let text = gc(&[]);
    let line = text.lines().find(|line| line.starts_with("unfinished ")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains(" of 1 upload (running or cut off)") && line.contains(", until "), "{line}");
    registry.restart();
    let shown = Pf::new(&registry.url()).run(&["gc"]).ok().stdout;
    assert!(shown.contains(" of 1 upload, kept until "), "{shown}");
}

fn pulls_survive_kills(rounds: u32) {
    let mut random = StdRng::seed_from_u64(seed());
    let registry = Registry::start();
    let source = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&source.path("dir"), Shape::SMALL, &(0..600).collect::<Vec<_>>());
    source.run(&["push", dir.arg(), "a:t"]).ok();
    let mut struck = 0;
    for round in 0..rounds {
        let host = Pf::new(&registry.url());
        let out = host.path("out");
        let arguments = if round % 2 == 0 { vec!["pull", "a:t"] } else { vec!["pull", "a:t", out.to_str().unwrap()] };
        let child = host.command(&arguments).spawn().unwrap();
        std::thread::sleep(Duration::from_micros(random.random_range(2_000..150_000)));
        let succeeded = end(child, true);
        struck += u64::from(!succeeded);
        if round % 2 == 0 {
            let local = host.run(&["ls", "a", "--local", "--json"]);
            if local.code == 0 {
                host.run(&["verify", "a:t", "--local"]).ok();
            } else {
                assert!(!succeeded, "{local:?}");
            }
        } else if out.join("page_manifest.json").exists() {
            // The manifest is published last: if it is there, everything is.
            assert_eq!(files(&out.join("blobs")).iter().filter(|(p, _)| p.extension().is_none()).count(), 1200);
        }
        host.run(&arguments).ok();
        if round % 2 == 0 {
            host.run(&["verify", "a:t", "--local"]).ok();
        } else {
            assert_eq!(files(&out.join("blobs")), files(&dir.path.join("blobs")), "debris or missing files");
            assert_eq!(std::fs::read(out.join("page_manifest.json")).unwrap(), std::fs::read(dir.manifest()).unwrap());
        }
    }
    println!("{struck} of {rounds} pulls cut");
}

#[test]
fn a_killed_pull_publishes_nothing_and_a_second_one_completes() {
    pulls_survive_kills(6);
}

/// The same with ten times the kills.
mod long {
    use super::{pulls_survive_kills, pushes_survive_kills};

    #[test]
    fn acknowledged_pushes_survive_kills_and_unacknowledged_ones_are_whole_or_invisible() {
        pushes_survive_kills(100);
    }

    #[test]
    fn a_killed_pull_publishes_nothing_and_a_second_one_completes() {
        pulls_survive_kills(60);
    }
}
