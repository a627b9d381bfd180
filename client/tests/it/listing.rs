//! Lists that span repositories say which repository each line is of.

use crate::common::sample::{SMALL, directory};
use crate::common::{Registry, pf, pull_store, push_dir, repository, target};
use pfr_client::{Progress, PushTarget, Source, push};
use pfr_schema::Digest;
use pfr_schema::api::{AgentEngine, AgentEngineState, AgentReport};
use pfr_store::{Options, Pin, Store};
use pfr_testkit::front::{Fate, Front, Seen};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn statistics_of_everything_name_the_repository_of_each_snapshot() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let source = directory(SMALL, &[1, 2, 3]);
    let digest = push_dir(&registry.remote(), source.path(), "a").await.unwrap().digest;
    let target = PushTarget { repository: "other/agent".parse().unwrap(), tag: None, ..target("a") };
    // The same snapshot in two repositories: only the repository tells the two lines apart.
    let again = push(&Source::Directory(source.path().into()), &registry.remote(), target, &Progress::default()).await.unwrap().digest;
    assert_eq!(again, digest);
    let (code, stdout, stderr) = pf(dir.path(), &["stats", "--registry", &registry.url]);
    assert_eq!(code, 0, "{stderr}");
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines[0].starts_with("REPOSITORY ") && lines[1].starts_with("other/agent ") && lines[2].starts_with("team/agent "), "{stdout}");
    let (_, stdout, _) = pf(dir.path(), &["stats", "--json", "--registry", &registry.url]);
    let all: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((&all["snapshots"][0]["repository"], &all["snapshots"][1]["repository"]), (&"other/agent".into(), &"team/agent".into()));
    let (_, stdout, _) = pf(dir.path(), &["stats", "team/agent", "--registry", &registry.url]);
    assert!(stdout.starts_with("SNAPSHOT "), "of one repository every line would say the same: {stdout}");
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_below_a_snapshot_take_any_reference_to_it_and_none_to_another_place() {
    let (registry, other, dir) = (Registry::start().await, Registry::start().await, tempfile::tempdir().unwrap());
    let digest = push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "a").await.unwrap().digest;
    push_dir(&registry.remote(), directory(SMALL, &[1, 2, 4]).path(), "b").await.unwrap();
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    pull_store(&registry.remote(), "a", &store).await.unwrap();
    drop(store);
    let (url, address) = (registry.url.as_str(), registry.url.strip_prefix("http://").unwrap());
    let stats = |below: &str, at: &[&str]| pf(dir.path(), &[&["stats", "team/agent", "--below", below, "--json"][..], at].concat());
    let same = [
        "a".to_owned(),
        ":a".to_owned(),
        digest.to_string(),
        format!("@{}", digest.short()),
        "team/agent:a".to_owned(),
        format!("team/agent@{digest}"),
        format!("team/agent@{}", digest.short()),
        format!("{address}/team/agent:a"),
        format!("{url}/domains/default/team/agent@{digest}"),
    ];
    for below in &same {
        let (code, stdout, stderr) = stats(below, &["--registry", url]);
        assert_eq!(code, 0, "{below}: {stderr}");
        let found: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!((&found["below"], found["snapshots"].as_array().unwrap().len()), (&json!(digest), 1), "{below}");
    }
    // A pull into a store sets no tag there.
    let (code, _, stderr) = stats(&format!("team/agent@{digest}"), &["--local"]);
    assert_eq!(code, 0, "{stderr}");
    for (below, at) in [
        ("team/other:a".to_owned(), &["--registry", url][..]),
        (format!("{}/team/agent:a", other.url), &["--registry", url][..]),
        (format!("{url}/domains/acme/team/agent:a"), &["--registry", url][..]),
        ("team/other:a".to_owned(), &["--local"][..]),
        (format!("{url}/team/agent:a"), &["--local"][..]),
    ] {
        let (code, _, stderr) = stats(&below, at);
        let place = if at == ["--local"] { "the local store" } else { url };
        let said = format!("--below needs a snapshot of team/agent in {place}, found ");
        assert!(code == 1 && stderr.contains(&said), "{below}: {stderr}");
    }
    let (code, _, stderr) = stats("team/agent:none", &["--registry", url]);
    assert_eq!(code, 5, "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn statistics_of_a_registry_that_ignores_the_selection_are_refused() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    push_dir(&registry.remote(), directory(SMALL, &[1, 2, 3]).path(), "a").await.unwrap();
    let older = Front::start(&registry.url, |seen: &Seen| match seen.path.contains("/stats") {
        true => Fate::Redirect("/v1/repositories/team%2Fagent/stats".to_owned()),
        false => Fate::Pass,
    });
    for (selection, ignored) in [(["--below", "a"], "`below`"), (["--agent", "x"], "`agent`")] {
        let ask = |url: &str| pf(dir.path(), &[&["stats", "team/agent", "--registry", url][..], &selection].concat());
        assert_eq!(ask(&registry.url).0, 0);
        let (code, stdout, stderr) = ask(&older.url);
        assert!(code == 1 && stdout.is_empty() && stderr.contains("older version") && stderr.contains(ignored), "{stdout}{stderr}");
    }
    assert_eq!(pf(dir.path(), &["stats", "team/agent", "--registry", &older.url]).0, 0, "the whole repository");
    let of_agent = |url: &str| pf(dir.path(), &["stats", "--agent", "x", "--registry", url]);
    let (code, stdout, _) = of_agent(&registry.url);
    assert!(code == 0 && stdout.contains("no snapshot is of that agent"), "{stdout}");
    let (code, stdout, stderr) = of_agent(&older.url);
    assert!(code == 1 && stdout.is_empty() && stderr.contains("for all repositories"), "{stdout}{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_are_listed_and_snapshots_without_one_are_not() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    let mut digests = Vec::new();
    for (name, pages) in [("a", [1]), ("b", [2]), ("c", [3])] {
        push_dir(&registry.remote(), directory(SMALL, &pages).path(), name).await.unwrap();
        digests.push(pull_store(&registry.remote(), name, &store).await.unwrap().digest);
    }
    let pinned = || {
        let (code, stdout, stderr) = pf(dir.path(), &["ls", "--local", "--pinned", "--json"]);
        assert_eq!(code, 0, "{stderr}");
        let list: Value = serde_json::from_str(&stdout).unwrap();
        let row = |row: &Value| format!("{}@{} {}", row["repository"].as_str().unwrap(), row["digest"].as_str().unwrap(), row["pins"]);
        list["pinned"].as_array().unwrap().iter().map(row).collect::<Vec<_>>()
    };
    assert_eq!(pinned(), [""; 0]);
    assert!(pf(dir.path(), &["ls", "--local", "--pinned"]).1.contains("nothing is pinned"));
    // By hand, and because it waits to be pushed: both keep it.
    assert_eq!(pf(dir.path(), &["pin", "--local", &format!("team/agent@{}", digests[0])]).0, 0);
    store.pin(&repository(), &digests[2], Pin::UntilPushed, true).await.unwrap();
    let newest_first = [format!("team/agent@{} [\"until_pushed\"]", digests[2]), format!("team/agent@{} [\"by_hand\"]", digests[0])];
    assert_eq!(pinned(), newest_first);
    store.pin(&repository(), &digests[0], Pin::UntilPushed, true).await.unwrap();
    let (_, stdout, _) = pf(dir.path(), &["ls", "team/agent", "--local", "--pinned"]);
    let line = |digest: &Digest| stdout.lines().find(|line| line.contains(&digest.short())).unwrap_or_default();
    assert!(line(&digests[0]).contains(" by hand, until it is pushed "), "{stdout}");
    assert!(line(&digests[2]).contains(" until it is pushed ") && !line(&digests[2]).contains("by hand"), "{stdout}");
    assert_eq!(line(&digests[1]), "", "{stdout}");
    assert!(stdout.contains("2 snapshots pinned"), "{stdout}");
    let (code, _, stderr) = pf(dir.path(), &["ls", "no/such", "--local", "--pinned"]);
    assert_eq!(code, 5, "{stderr}");
    let (code, _, stderr) = pf(dir.path(), &["ls", "--pinned", "--registry", &registry.url]);
    assert!(code == 1 && stderr.contains("pf ls --pinned --local"), "{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_from_the_local_store_takes_back_the_pin_of_an_only_copy_and_no_other() {
    let (from, to, dir) = (Registry::start().await, Registry::start().await, tempfile::tempdir().unwrap());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    push_dir(&from.remote(), directory(SMALL, &[1]).path(), "a").await.unwrap();
    let digest = pull_store(&from.remote(), "a", &store).await.unwrap().digest;
    for pin in [Pin::ByHand, Pin::UntilPushed] {
        store.pin(&repository(), &digest, pin, true).await.unwrap();
    }
    let pins = async || store.pinned().await.unwrap().into_iter().flat_map(|row| row.pins).collect::<Vec<_>>();
    let push = |registry: &str| pf(dir.path(), &["push", "team/agent:here", "team/agent:a", "--registry", registry, "--retries", "0"]);
    let (code, _, stderr) = push("http://127.0.0.1:1");
    assert_ne!(code, 0, "{stderr}");
    assert_eq!(pins().await, [Pin::ByHand, Pin::UntilPushed], "no registry has it");
    let (code, _, stderr) = push(&to.url);
    assert_eq!(code, 0, "{stderr}");
    assert_eq!(pins().await, [Pin::ByHand]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engines_of_a_fleet_are_those_that_agents_reported() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let fleet = |more: &[&str]| {
        let (code, stdout, stderr) = pf(dir.path(), &[&["engines", "--fleet", "--registry", registry.url.as_str()][..], more].concat());
        assert_eq!(code, 0, "{stderr}");
        stdout
    };
    assert!(fleet(&[]).contains("no agent has reported"));
    let engine = |name: &str, state: AgentEngineState, note: Option<&str>| AgentEngine {
        engine: name.to_owned(),
        model: Some("Qwen3".to_owned()),
        fingerprint: Digest::sha256(b"f"),
        state,
        note: note.map(str::to_owned),
        snapshots: 3,
        restores: 1,
        staged: 0,
    };
    let engines = vec![engine("vllm-0", AgentEngineState::Ready, None), engine("vllm-1", AgentEngineState::Busy, Some("a snapshot"))];
    for (host, engines) in [("gpu-2", vec![]), ("gpu-3", engines.clone()), ("gpu-1", engines)] {
        let report = AgentReport { version: "0.1.0".to_owned(), interval_seconds: 60, engines, jobs: vec![], stopped: host == "gpu-3" };
        registry.remote().report_agent(&host.parse().unwrap(), &report).await.unwrap();
    }
    let table = fleet(&[]);
    let rows: Vec<String> = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for (number, row) in [
        (1, "gpu-1 vllm-0 ready Qwen3 3 1"),
        (2, "gpu-1 vllm-1 busy: a snapshot Qwen3 3 1"),
        (3, "gpu-2 - - - -"),
        (5, "gpu-3 vllm-1 not known Qwen3 3 1 stopped"),
    ] {
        assert!(rows.get(number).is_some_and(|found| found.starts_with(row)), "{row}: {table}");
    }
    let document: Value = serde_json::from_str(&fleet(&["--json"])).unwrap();
    assert_eq!((&document["agents"][0]["name"], &document["agents"][1]["report"]["engines"]), (&json!("gpu-1"), &json!([])));

    assert_eq!(fleet(&["--forget", "gpu-1", "gpu-2"]), "forgot gpu-1\nforgot gpu-2\n");
    let document: Value = serde_json::from_str(&fleet(&["--json", "--forget", "gpu-3"])).unwrap();
    assert_eq!(document, json!({"forgotten": ["gpu-3"]}));
    assert!(fleet(&[]).contains("no agent has reported"));
    // What was done before a failure is in the document, and the rest is left.
    for host in ["gpu-1", "gpu-2"] {
        let report = AgentReport { version: "0.1.0".to_owned(), interval_seconds: 60, engines: vec![], jobs: vec![], stopped: false };
        registry.remote().report_agent(&host.parse().unwrap(), &report).await.unwrap();
    }
    let args = ["engines", "--fleet", "--registry", registry.url.as_str(), "--json", "--forget", "gpu-1", "gpu-9", "gpu-2"];
    let (code, stdout, stderr) = pf(dir.path(), &args);
    assert_eq!((code, serde_json::from_str::<Value>(&stdout).unwrap()), (5, json!({"forgotten": ["gpu-1"]})), "{stderr}");
    assert!(stderr.contains("1 agent forgotten, then") && stderr.contains("gpu-9"), "{stderr}");
    assert_eq!(fleet(&["--forget", "gpu-2"]), "forgot gpu-2\n");
    for (args, exit, words) in [
        (&["engines", "--fleet", "--forget", "gpu-1", "--registry", &registry.url][..], 5, "gpu-1"),
        (&["engines", "--fleet", "--forget", "a/b", "--registry", &registry.url], 1, "agent name"),
        (&["engines", "--forget", "gpu-1", "--registry", &registry.url], 1, "--fleet"),
    ] {
        let (code, _, stderr) = pf(dir.path(), args);
        assert!(code == exit && stderr.contains(words), "{args:?}: {code}: {stderr}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fleet_is_no_agents_and_a_socket_on_the_command_line_is_refused() {
    let (registry, dir) = (Registry::start().await, tempfile::tempdir().unwrap());
    let args = ["engines", "--fleet", "--registry", registry.url.as_str()];
    for agent in [&["--agent", "/a"][..], &["--agent=/a"]] {
        let (code, _, stderr) = pf(dir.path(), &[&args[..], agent].concat());
        assert!(code == 1 && stderr.contains("--agent cannot be used with --fleet"), "{code}: {stderr}");
    }
    // One in the environment is for all the other commands.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pf"));
    let output = command.env_clear().env("HOME", dir.path()).env("PF_AGENT_SOCKET", "/a").args(args).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}
