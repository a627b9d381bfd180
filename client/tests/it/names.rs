//! `pf rm` of several names and patterns, `pf prune`, and how names are listed.

use crate::common::agent::{Answer, agent, captured};
use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, pull_store, push_dir, repository, tag, target};
use pfr_client::{Progress, PushTarget, Source, push};
use pfr_schema::{ErrorCode, RepositoryName};
use pfr_store::{Options, Store};
use pfr_testkit::front::{Fate, Front, Seen};
use serde_json::Value;
use std::collections::BTreeSet;

/// Tags of a repository.
async fn tags(store: &Store, repository: &RepositoryName) -> BTreeSet<String> {
    let rows = store.tags(repository, None, 20_000).await.map(|page| page.rows).unwrap_or_default();
    rows.into_iter().map(|row| row.name.to_string()).collect()
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn json(dir: &std::path::Path, args: &[&str]) -> Value {
    let (code, stdout, stderr) = pf(dir, &[args, &["--json"]].concat());
    assert_eq!(code, 0, "{args:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn rm_takes_several_names_and_patterns_or_deletes_nothing() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let (remote, url) = (registry.remote(), registry.url.as_str());
    let one = push_dir(&remote, directory(SMALL, &[1]).path(), "a").await.unwrap().digest;
    let two = push_dir(&remote, directory(SMALL, &[2]).path(), "b").await.unwrap().digest;
    registry.store.fork(&repository(), one, "agent", 12).await.unwrap();
    let run = |args: &[&str]| pf(dir.path(), &[&["rm", "--registry", url], args].concat());
    let before = tags(&registry.store, &repository()).await;
    for wrong in [
        &["team/agent:a", "team/agent:absent"][..],
        &["team/agent:a", "team/agent:no-*"],
        &["team/agent:a", "no/such:b"],
        &["team/agent:a", "team/agent"],
        &["team/agent:a", "team/*:b"],
    ] {
        let (code, stdout, stderr) = run(wrong);
        assert!(code != 0 && !stdout.contains("deleted"), "{wrong:?}: {stdout}{stderr}");
        assert_eq!(tags(&registry.store, &repository()).await, before, "{wrong:?}: nothing is deleted");
    }
    let snapshot = format!("team/agent@{two}");
    let all = ["team/agent:agent-*", "team/agent:a", snapshot.as_str(), "--dry-run"];
    let (code, stdout, stderr) = run(&all);
    assert_eq!((code, stdout.matches("would delete tag").count()), (0, 13), "{stdout}{stderr}");
    assert!(stdout.contains("would stay without a tag\n") && stdout.contains("would delete snapshot"), "{stdout}");
    assert!(stdout.ends_with("nothing was changed\n") && !stdout.contains('`'), "{stdout}");
    let planned = json(dir.path(), &[&["rm", "--registry", url], &all[..]].concat());
    assert_eq!((planned["dry_run"].as_bool(), planned["tags"].as_array().unwrap().len()), (Some(true), 13), "{planned}");
    let freed = |document: &Value| {
        let of = |name: &str| document["freed"][name].as_u64().unwrap_or_else(|| panic!("{name}: {document}"));
        (of("snapshots"), of("bytes"))
    };
    let exclusive = registry.store.snapshot_stats(&repository(), &two).await.unwrap().exclusive;
    assert_eq!(freed(&planned), (1, exclusive), "tags free nothing");
    assert!(stdout.contains("would then free"), "{stdout}");
    // Together they free what each holds alone and what only they hold.
    let both = json(dir.path(), &["rm", "--registry", url, &snapshot, &format!("team/agent@{one}"), "--dry-run"]);
    let unique = registry.store.stats(Some(&repository())).await.unwrap().unique;
    assert_eq!(freed(&both), (2, unique), "nothing else is in the registry");
    assert_eq!(tags(&registry.store, &repository()).await, before, "a dry run deletes nothing");
    assert!(registry.store.snapshot(&repository(), &two).await.is_ok());
    // Named twice, by name and by pattern.
    let (code, stdout, stderr) = run(&["team/agent:agent-*", "team/agent:agent-3", "team/agent:a"]);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(stdout.matches("deleted tag").count(), 13, "{stdout}");
    let position = |name: &str| stdout.find(&format!("{name}\n")).unwrap();
    assert!(position("agent-2") < position("agent-10"), "in the order of numbers: {stdout}");
    assert!(stdout.contains("stays without a tag"), "{stdout}");
    assert_eq!(tags(&registry.store, &repository()).await, set(&["b"]));
    assert!(registry.store.snapshot(&repository(), &one).await.is_ok());
    // A tag goes with its snapshot.
    let (code, stdout, stderr) = run(&[&format!("team/agent@{two}"), "team/agent:b", &format!("team/agent@{one}"), "--json"]);
    assert_eq!(code, 0, "{stderr}");
    let removed: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((removed["tags"].as_array().unwrap().len(), removed["snapshots"].as_array().unwrap().len()), (0, 2), "{removed}");
    assert_eq!(removed["snapshots"][0]["tags"], serde_json::json!(["b"]));
    assert!(registry.store.snapshot(&repository(), &one).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_with_very_many_tags_is_told_in_a_line() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let digest = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap().digest;
    registry.store.fork(&repository(), digest, "fork", 3000).await.unwrap();
    for args in [&["inspect", "team/agent:a"][..], &["ls", "team/agent"], &["log", "team/agent"], &["rm", "team/agent:fork-3"]] {
        let (code, stdout, stderr) = pf(dir.path(), &[args, &["--registry", &registry.url]].concat());
        assert_eq!(code, 0, "{stderr}");
        assert!(stdout.lines().all(|line| line.len() < 200) && stdout.contains("+2,99"), "{args:?}: {stdout}");
        assert!(stdout.contains("a, fork-1, fork-2 +"), "in the order of numbers: {stdout}");
    }
    let all = json(dir.path(), &["inspect", "team/agent:a", "--registry", &registry.url]);
    assert_eq!(all["summary"]["tags"].as_array().unwrap().len(), 3000, "--json has all of them");
}

/// A registry, and a local store with the same: five snapshots in order of age, some without a tag.
async fn five(registry: &Registry, store: &Store) {
    for (i, name) in ["one", "two", "three", "four", "five"].into_iter().enumerate() {
        let source = directory(SMALL, &[i as u64]);
        push_dir(&registry.remote(), source.path(), name).await.unwrap();
        let digest = pull_store(&registry.remote(), name, store).await.unwrap().digest;
        store.put_tag(&repository(), tag(name), digest, None).await.unwrap();
        // The order of a list is that of the clock.
        tokio::time::sleep(std::time::Duration::from_millis(3)).await;
    }
    store.delete_tag(&repository(), &tag("here"), None).await.unwrap();
    for (store, name) in [(store, "two"), (&registry.store, "two"), (store, "four"), (&registry.store, "four")] {
        store.delete_tag(&repository(), &tag(name), None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_deletes_what_meets_every_criterion_in_the_registry_or_locally() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    five(&registry, &store).await;
    let elsewhere = PushTarget { repository: "other/place".parse().unwrap(), ..target("t") };
    push(&Source::Directory(directory(SMALL, &[9]).path().into()), &registry.remote(), elsewhere, &Progress::default()).await.unwrap();
    for side in [vec!["--registry", registry.url.as_str()], vec!["--local"]] {
        let (here, there) = if side[0] == "--local" { (&store, None) } else { (&registry.store, Some(&store)) };
        let prune = |args: &[&str]| json(dir.path(), &[&["prune"], args, &side[..]].concat());
        let count = async |store: &Store| store.snapshots(&repository(), None, 10).await.unwrap().rows.len();
        let dry = prune(&["team/*", "--untagged", "--dry-run"]);
        assert_eq!((dry["deleted"].as_array().unwrap().len(), dry["kept"].as_u64(), dry["dry_run"].as_bool()), (2, Some(3), Some(true)));
        assert!(dry["freed"]["snapshots"] == 2 && dry["freed"]["bytes"].as_u64() > Some(0), "{dry}");
        assert!(dry["deleted"][0]["pushed_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{dry}");
        assert_eq!(count(here).await, 5);
        assert_eq!(prune(&["team/agent", "--older-than", "1h"])["deleted"], serde_json::json!([]));
        let done = prune(&["team/*", "--untagged"]);
        assert_eq!(done["deleted"], dry["deleted"], "the run does what the dry run says");
        assert_eq!(count(here).await, 3);
        if let Some(other) = there {
            assert_eq!(count(other).await, 5, "the local store is as it was");
        }
        // `one` and `three` go: the newest stays, whatever it is called.
        let (code, stdout, stderr) =
            pf(dir.path(), &[&["prune", "team/agent", "--keep-last", "1", "--older-than", "0s"], &side[..]].concat());
        assert!(code == 0 && stdout.contains("2 snapshots deleted, 1 kept"), "{stdout}{stderr}");
        assert_eq!(tags(here, &repository()).await, set(&["five"]));
        let (code, _, stderr) = pf(dir.path(), &[&["prune", "nosuch/*", "--untagged"], &side[..]].concat());
        assert!(code == 5 && stderr.contains("matches nosuch/*"), "{stderr}");
    }
    assert_eq!(tags(&registry.store, &"other/place".parse().unwrap()).await, set(&["t"]), "other repositories stay");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_lists_what_it_found_although_nobody_says_what_that_would_free() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let digest = push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap().digest;
    let front = Front::start(&registry.url, |seen: &Seen| match seen.path.as_str() {
        "/v1/freed" => Fate::Refuse(ErrorCode::Denied),
        _ => Fate::Pass,
    });
    let snapshot = format!("team/agent@{digest}");
    for args in [&["rm", snapshot.as_str(), "--dry-run"][..], &["prune", "*", "--tag", "a", "--dry-run"]] {
        let args = [args, &["--registry", &front.url]].concat();
        let (code, stdout, stderr) = pf(dir.path(), &args);
        assert_eq!(code, 6, "{args:?}: {stderr}");
        assert!(stdout.contains(&digest.short()) && !stderr.contains("deleted"), "{args:?}: {stdout}{stderr}");
        let (code, stdout, stderr) = pf(dir.path(), &[&args[..], &["--json"]].concat());
        let document: Value = serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{args:?}: {error}: {stdout}{stderr}"));
        assert_eq!((code, document.get("freed")), (6, None), "{document}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_leaves_a_snapshot_that_got_a_tag_after_it_was_listed() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    five(&registry, &store).await;
    // Another client gives `two` a tag, just before the deletion of it arrives.
    let rows = registry.store.snapshots(&repository(), None, 10).await.unwrap().rows;
    let two = rows[3].digest;
    let (handle, tagged) = (tokio::runtime::Handle::current(), registry.store.clone());
    let front = Front::start(&registry.url, move |seen: &Seen| {
        if seen.method == "DELETE" && seen.path.ends_with(&two.hex()) {
            let (handle, tagged) = (handle.clone(), tagged.clone());
            let set = move || handle.block_on(tagged.put_tag(&repository(), tag("kept"), two, None)).unwrap();
            std::thread::spawn(set).join().unwrap();
        }
        Fate::Pass
    });
    let done = json(dir.path(), &["prune", "team/agent", "--untagged", "--registry", &front.url]);
    assert_eq!((done["deleted"].as_array().unwrap().len(), done["kept"].as_u64()), (1, Some(4)), "{done}");
    assert_eq!(done["deleted"][0]["digest"], serde_json::json!(rows[1].digest), "{done}");
    assert_eq!(tags(&registry.store, &repository()).await, set(&["one", "three", "five", "kept"]));
    assert_eq!(registry.store.tag(&repository(), &tag("kept")).await.unwrap().digest, two);
    // The local store has no other client. Without one, both go.
    assert_eq!(json(dir.path(), &["prune", "team/agent", "--untagged", "--local"])["deleted"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_by_tag_deletes_what_has_no_other_tags() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    five(&registry, &store).await;
    for (store, side) in [(&registry.store, vec!["--registry", registry.url.as_str()]), (&store, vec!["--local"])] {
        let digest = async |name: &str| store.tag(&repository(), &tag(name)).await.unwrap().digest;
        let (one, three) = (digest("one").await, digest("three").await);
        // `one` and `three` are matched, `five` has another tag as well, and two have none.
        for (name, at) in [("try-1", one), ("try-2", three), ("try-3", digest("five").await)] {
            store.put_tag(&repository(), tag(name), at, None).await.unwrap();
        }
        for name in ["one", "three"] {
            store.delete_tag(&repository(), &tag(name), None).await.unwrap();
        }
        let prune = |args: &[&str]| json(dir.path(), &[&["prune", "team/agent"], args, &side[..]].concat());
        let digests = |done: &Value| {
            let deleted = done["deleted"].as_array().unwrap().iter();
            deleted.map(|d| d["digest"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(digests(&prune(&["--tag", "no-*"])), [""; 0]);
        assert_eq!(digests(&prune(&["--tag", "try-1"])), [one.to_string()]);
        assert_eq!(digests(&prune(&["--tag", "try-*"])), [three.to_string()]);
        assert_eq!(tags(store, &repository()).await, set(&["five", "try-3"]));
        assert_eq!(prune(&["--tag", "try-*", "--tag", "fi*", "--untagged"])["kept"].as_u64(), Some(0));
        assert_eq!(tags(store, &repository()).await, set(&[]));
    }
}

/// Every command that takes a reference, with `{R}` for the repository. `{X}` and `{BASE}` are the
/// digests of two snapshots, cut short. Each row ends with the stores that it is for.
const REFERENCES: [(&str, &str); 37] = [
    ("inspect {R}:x", "registry local"),
    ("inspect {R}@{X}", "registry local"),
    ("inspect {R}@sha256:{X}", "registry local"),
    ("log {R}:x", "registry local"),
    ("log {R}@{X}", "registry local"),
    ("ls {R}", "registry local"),
    ("stats {R}", "registry local"),
    ("stats {R} --below @{X}", "registry local"),
    ("events {R} --once", "registry"),
    ("prune {R} --untagged --dry-run", "registry local"),
    ("diff {R}:x :base", "registry local"),
    ("diff {R}@{X} @{BASE}", "registry local"),
    ("diff {R}@{X} sha256:{BASE}", "registry local"),
    ("diff {R}@{X} {R}@{BASE}", "registry local"),
    ("verify {R}:x", "registry local"),
    ("verify {R}@{X}", "registry local"),
    ("tag {R}:x moved", "registry local"),
    ("tag {R}@{BASE} moved --if-tag-is {X}", "registry local"),
    ("tag {R}@{X} moved --if-tag-is @{BASE}", "registry local"),
    ("fork {R}:x -n 1", "registry local"),
    ("fork {R}@{X} -n 1", "registry local"),
    ("pin {R}@{X}", "local"),
    ("pin {R}:x --remove", "local"),
    ("pull {R}:x", "registry"),
    ("pull {R}@{X}", "registry"),
    ("pull {R}@{X} {DIR}", "registry"),
    ("push {SOURCE} {R}:pushed --parent :x --parent @{BASE}", "registry"),
    ("push {SOURCE} {R}:pushed-2 --parent {R}@{X}", "registry"),
    ("push {SOURCE} {R}:moved --if-tag-is {X}", "registry"),
    ("push team/agent@{X} {R}:from-the-store", "registry"),
    ("match {R} --tokens {TOKENS} --fingerprint {FULL}", "registry local"),
    ("copy {R}@{X} {R}-copy:x", "registry"),
    ("export {R}@{X} {EXPORT}", "registry local"),
    ("sign {R}@{X} --key {KEY}", "registry local"),
    ("restore {R}@{X} e", "agent"),
    ("snapshot e {R}:taken --parent team/agent@{X}", "agent"),
    ("rm {R}:x {R}@{BASE}", "registry local"),
];

#[tokio::test(flavor = "multi_thread")]
async fn every_command_takes_a_host_without_a_scheme_and_a_digest_cut_short() {
    let dir = tempfile::tempdir().unwrap();
    let (base, next) = (directory(SMALL, &[1]), directory(SMALL, &[1, 2]));
    let (path, asked) = (|name: &str| dir.path().join(name).display().to_string(), std::sync::Arc::new(std::sync::Mutex::new(Vec::new())));
    let seen = asked.clone();
    agent(&dir.path().join("agent.sock"), move |request| {
        seen.lock().unwrap().push(request.to_owned());
        Answer::Json(match request.ends_with("/restores") {
            true => serde_json::json!({
                "digest": pfr_schema::Digest::sha256(b"x"), "engine": "e", "boundary": 3, "tokens": 4, "pages": 1, "bytes_pulled": 1,
                "bytes_written": 1, "values_computed": 0, "values_attested": 0, "oracle": false, "total_seconds": 0.1,
            }),
            false => captured("done"),
        })
    });
    std::fs::write(path("tokens.json"), "[1, 2, 3]").unwrap();
    assert_eq!(pf(dir.path(), &["keygen", &path("a.key")]).0, 0);
    for (side, by_host) in [("registry", true), ("registry", false), ("local", false)] {
        let registry = Registry::start().await;
        let remote = registry.remote();
        let parent = push_dir(&remote, base.path(), "base").await.unwrap().digest;
        let onto = PushTarget { parents: vec![parent], ..target("x") };
        let x = push(&Source::Directory(next.path().into()), &remote, onto, &Progress::default()).await.unwrap().digest;
        for name in ["base", "x"] {
            let (code, _, stderr) = pf(dir.path(), &["pull", &format!("team/agent:{name}"), "--registry", &registry.url]);
            assert_eq!(code, 0, "{stderr}");
        }
        let host = registry.url.strip_prefix("http://").unwrap();
        let repository = if by_host { format!("{host}/team/agent") } else { "team/agent".to_owned() };
        for (line, sides) in REFERENCES {
            // The agent gets the reference as it is, so the local round adds nothing there.
            let for_agent = sides == "agent";
            let applies = sides.contains(side) || (for_agent && side == "registry");
            if !applies {
                continue;
            }
            let short = |digest: &pfr_schema::Digest| digest.hex()[..12].to_owned();
            let words: Vec<String> = line
                .split(' ')
                .map(|word| {
                    let full = pfr_schema::Digest::sha256(b"f").to_string();
                    let word = word.replace("{R}", &repository).replace("{X}", &short(&x)).replace("{BASE}", &short(&parent));
                    let word = word.replace("{DIR}", &path(&format!("out-{by_host}"))).replace("{TOKENS}", &path("tokens.json"));
                    let word = word.replace("{EXPORT}", &path(&format!("export-{side}-{by_host}"))).replace("{KEY}", &path("a.key"));
                    word.replace("{SOURCE}", next.path().to_str().unwrap()).replace("{FULL}", &full)
                })
                .collect();
            let mut args: Vec<&str> = words.iter().map(String::as_str).collect();
            let socket = path("agent.sock");
            match (for_agent, side) {
                (true, _) => args.extend(["--agent", &socket]),
                (false, "local") => args.push("--local"),
                (false, _) if by_host => {}
                (false, _) => args.extend(["--registry", registry.url.as_str()]),
            }
            let (code, stdout, stderr) = pf(dir.path(), &args);
            // No snapshot here has tokens.
            let expected = if args[0] == "match" { 5 } else { 0 };
            assert_eq!(code, expected, "{side}, by host {by_host}: {args:?}: {stdout}{stderr}");
            assert!(args[0] != "match" || stderr.contains("no snapshot in team/agent"), "{stderr}");
            let named =
                format!("verified team/agent{}", args.get(1).map_or("", |reference| reference.rsplit_once("agent").map_or("", |r| r.1)));
            assert!(args[0] != "verify" || stdout.starts_with(&format!("{named}  ")), "{stdout}");
        }
        let local = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
        let left = tags(if side == "local" { &local } else { &registry.store }, &crate::common::repository()).await;
        assert!(!left.contains("x") && !left.contains("base") && left.contains("moved"), "{side}: {left:?}");
    }
    assert_eq!(asked.lock().unwrap().len(), 4, "the agent was asked");
}

#[tokio::test(flavor = "multi_thread")]
async fn forks_are_in_natural_order_in_json_too() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "x").await.unwrap();
    let at = ["--registry", registry.url.as_str()];
    let forks: Vec<String> = (1..=11).map(|n| format!("forks-{n}")).collect();
    let forked = json(dir.path(), &[&["fork", "team/agent:x", "-n", "11", "--prefix", "forks"][..], &at].concat());
    assert_eq!(forked["tags"], serde_json::json!(forks));
    let all: Vec<&str> = forks.iter().map(String::as_str).chain(["x"]).collect();
    let listed = json(dir.path(), &[&["ls", "team/agent"][..], &at].concat());
    let names: Vec<&str> = listed["tags"].as_array().unwrap().iter().map(|tag| tag["name"].as_str().unwrap()).collect();
    assert_eq!(names, all);
    assert_eq!(listed["snapshots"][0]["tags"], serde_json::json!(all));
    for args in [&["log", "team/agent"][..], &["stats", "team/agent"], &["prune", "team/agent", "--tag", "*", "--dry-run"]] {
        let document = json(dir.path(), &[args, &at].concat());
        let of = if args[0] == "prune" { &document["deleted"] } else { &document["snapshots"] };
        assert_eq!(of[0]["tags"], serde_json::json!(all), "{args:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn patterns_with_and_without_the_address_of_the_configured_registry_name_one() {
    let (registry, other, dir) = (Registry::start().await, Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1]).path(), "x").await.unwrap();
    let address = registry.url.strip_prefix("http://").unwrap();
    // Without a scheme, as in a reference.
    let prune = |pattern: &str| {
        let args = ["prune", "team/agent", pattern, "--tag", "*", "--dry-run", "--registry", address];
        pf(dir.path(), &args)
    };
    for same in [format!("{}/team/*", registry.url), format!("{address}/team/agent")] {
        let (code, stdout, stderr) = prune(&same);
        assert!(code == 0 && stdout.contains("1 snapshot would be deleted"), "{same}: {stdout}{stderr}");
    }
    let (code, _, stderr) = prune(&format!("{}/team/*", other.url));
    assert!(code == 1 && stderr.contains("several registries"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prune_leaves_what_a_policy_of_the_registry_makes_immutable_and_a_wrong_policy_is_not_sent() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    for (name, pages) in [("v1", [1]), ("wip", [2])] {
        push_dir(&registry.remote(), directory(SMALL, &pages).path(), name).await.unwrap();
    }
    let file = dir.path().join("policies.json");
    let set = |policy: &str| {
        std::fs::write(&file, format!("{{\"policies\": [{{\"name\": \"p\", \"repositories\": \"*\", {policy}}}]}}")).unwrap();
        pf(dir.path(), &["retention", "set", file.to_str().unwrap(), "--registry", &registry.url])
    };
    let (code, _, stderr) = set("\"untagged\": true");
    assert!(code == 1 && stderr.contains("policies.json") && stderr.contains("$.policies[0].keep_last"), "{stderr}");
    assert!(stderr.contains("found neither: other criteria only narrow these"), "{stderr}");
    let (code, _, stderr) = pf(dir.path(), &["retention", "set", "-", "--registry", &registry.url]);
    assert!(code == 1 && stderr.starts_with("error: stdin: "), "{stderr}");
    assert_eq!(registry.store.metadata().retention().await.unwrap().version, 0);
    let (code, stdout, stderr) = set("\"immutable_tags\": [\"v*\"]");
    assert!(code == 0 && stdout.contains("IMMUTABLE") && stdout.contains("v*"), "{stdout}{stderr}");
    let pruned = json(dir.path(), &["prune", "team/agent", "--tag", "*", "--registry", &registry.url]);
    assert_eq!((pruned["deleted"][0]["tags"].clone(), pruned["kept"].as_u64()), (serde_json::json!(["wip"]), Some(1)), "{pruned}");
    assert_eq!(tags(&registry.store, &repository()).await, self::set(&["v1"]));
    let (code, _, stderr) = pf(dir.path(), &["rm", "team/agent:v1", "--registry", &registry.url]);
    assert!(code == 6 && stderr.contains("immutable"), "{code}: {stderr}");
}
