//! `pf rm` of several names and patterns, `pf prune`, and how names are listed.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, pull_store, push_dir, repository, tag, target};
use pfr_client::{Progress, PushTarget, Source, push};
use pfr_schema::RepositoryName;
use pfr_store::{Options, Store};
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
