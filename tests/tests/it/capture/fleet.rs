//! What operators do with captured state: find it by its tokens, empty a host.

use pfr_tests::{Host, Model, Registry, wait_for};

fn tokens_file(host: &Host, name: &str, tokens: &[u32]) -> String {
    let path = host.pf.path(name);
    std::fs::write(&path, serde_json::to_vec(tokens).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn given_tokens_find_the_deepest_snapshot_under_both_keys_or_the_reason_why_not() {
    let registry = Registry::start();
    let host = Host::new(&registry.url());
    let mut engine = host.engine("e", Model::Hybrid, &[]);
    let sequence = engine.open(&Model::Hybrid.prompt(40));
    let shallow = host.snapshot("e", "team/agent:a", &["--sequence", &sequence]);
    engine.generate(&sequence, 10);
    let deep = host.snapshot("e", "team/agent:b", &["--sequence", &sequence]);
    engine.say(&serde_json::json!({"tokens": {"sequence": sequence}}));
    let listed = engine.expect("tokens");
    let all: Vec<u32> = listed["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    assert_eq!(all.len(), 51);
    let find = |tokens: &[u32], more: &[&str]| {
        let file = tokens_file(&host, "tokens.json", tokens);
        host.pf.run(&[&["match", "team/agent", "--tokens", &file, "--engine", "e", "--json"], more].concat())
    };
    let found = find(&all, &[]).ok().json();
    assert_eq!((&found["digest"], &found["boundary"]), (&deep["digest"], &50.into()), "{found}");
    // Recurrent state is for its own token position only: 49 tokens get the snapshot at 40.
    let found = find(&all[..49], &[]).ok().json();
    assert_eq!((&found["digest"], &found["boundary"]), (&shallow["digest"], &40.into()), "{found}");
    for (tokens, more, reason) in
        [(&all[..39], &[][..], "token"), (&all[..], &["--salt", "other"][..], "salt"), (&all[..], &["--adapter", "lora"][..], "adapter")]
    {
        let output = find(tokens, more);
        assert_eq!(output.code, 5, "{output:?}");
        assert_eq!(output.json()["digest"], serde_json::Value::Null);
        assert!(output.stdout.contains(reason), "{reason}: {output:?}");
    }
    let file = tokens_file(&host, "tokens.json", &all);
    let other = format!("sha256:{}", "0".repeat(64));
    let output = host.pf.run(&["match", "team/agent", "--tokens", &file, "--fingerprint", &other, "--json"]);
    assert!(output.code == 5 && output.stdout.contains("another engine configuration"), "{output:?}");
    let own = host.pf.json(&["inspect", "team/agent:a"])["config"]["fingerprint"].as_str().unwrap().to_owned();
    let short = |fingerprint: &str| host.pf.run(&["match", "team/agent", "--tokens", &file, "--fingerprint", fingerprint, "--json"]);
    for prefix in [&own[.."sha256:".len() + 6], &own["sha256:".len()..][..12]] {
        let found = short(prefix).ok().json();
        assert_eq!(found["digest"], deep["digest"], "{prefix}: {found}");
    }
    let output = short(&other[..20]);
    assert!(output.code == 5 && output.stderr.contains("none of the snapshots of team/agent has a fingerprint"), "{output:?}");
}

#[test]
fn a_host_is_emptied_and_another_takes_over() {
    let registry = Registry::start();
    let (a, b) = (Host::new(&registry.url()), Host::new(&registry.url()));
    let mut one = a.engine("one", Model::Hybrid, &[]);
    let mut two = a.engine("two", Model::Hybrid, &["--placement", "3"]);
    let first = one.open(&Model::Hybrid.prompt(20));
    let second = one.open(&Model::Hybrid.prompt(33));
    let third = two.open(&Model::Hybrid.prompt(50));
    let output = a.pf.run(&["snapshot", "one", "team/agent:x"]);
    assert_eq!(output.code, 1, "there are two, and none was named: {output:?}");
    assert!(output.stderr.contains(&first) && output.stderr.contains(&second), "{output:?}");

    let plan = a.pf.json(&["drain", "team/evacuated", "--plan"]);
    assert_eq!(plan["plan"].as_array().unwrap().len(), 3, "{plan}");
    assert_eq!(plan["recompute_tokens"], 20 + 33 + 50);
    assert!(plan["done"].as_array().unwrap().is_empty() && a.pf.tags("team/evacuated/one").is_empty());

    let drained = a.pf.json(&["drain", "team/evacuated"]);
    assert_eq!(drained["done"].as_array().unwrap().len(), 3, "{drained}");
    let ways = [one.generate(&first, 9), one.generate(&second, 9), two.generate(&third, 9)];
    let mut there = b.engine("there", Model::Hybrid, &["--dirty", "1"]);
    for (item, way) in plan["plan"].as_array().unwrap().iter().zip(ways) {
        let reference = item["reference"].as_str().unwrap();
        let reference = reference.rsplit_once("team/").map_or(reference, |(_, rest)| rest);
        let report = b.restore(&format!("team/{reference}"), "there");
        assert_eq!(there.generate(report["sequence"].as_str().unwrap(), 9), way, "{item}");
    }
}

#[test]
fn the_registry_shows_the_engines_and_drains_of_each_host() {
    let registry = Registry::start();
    let host = |name: &str| Host::with(&registry.url(), &["--report-interval", "1", "--report-name", name]);
    let (a, mut b) = (host("gpu-a"), host("gpu-b"));
    let mut engine = a.engine("one", Model::Hybrid, &[]);
    engine.open(&Model::Hybrid.prompt(20));
    drop(a.pf.json(&["drain", "team/evacuated"]));
    let answer = wait_for("both reports", 60, || {
        let answer = registry.get("/v1/agents");
        ["\"state\":\"done\"", "\"gpu-b\""].iter().all(|words| answer.contains(words)).then_some(answer)
    });
    let list: serde_json::Value = serde_json::from_str(&answer[answer.find('{').unwrap()..]).unwrap();
    let [one, two] = &list["agents"].as_array().unwrap()[..] else { panic!("two agents in {list}") };
    assert_eq!((&one["name"], &two["name"]), (&"gpu-a".into(), &"gpu-b".into()));
    let (engine, job) = (&one["report"]["engines"][0], &one["report"]["jobs"][0]);
    assert_eq!((&engine["engine"], &engine["state"], &engine["snapshots"]), (&"one".into(), &"ready".into(), &1.into()), "{list}");
    assert!(job["kind"] == "drain" && job["about"].as_str().unwrap().ends_with("team/evacuated"), "{list}");
    assert_eq!(two["report"]["engines"], serde_json::json!([]), "{list}");
    let page = registry.get("/ui/-/engines");
    assert!(["gpu-a", "gpu-b", ">one<", "team/evacuated"].iter().all(|words| page.contains(words)), "{page}");

    // The registry has the last report when the agent has ended.
    b.stop_agent();
    let fleet = a.pf.json(&["engines", "--fleet"]);
    let stopped: Vec<bool> = fleet["agents"].as_array().unwrap().iter().map(|agent| agent["report"]["stopped"] == true).collect();
    assert_eq!(stopped, [false, true], "{fleet}");
    a.pf.run(&["engines", "--fleet", "--forget", "gpu-b"]).ok();
    let fleet = a.pf.json(&["engines", "--fleet"]);
    assert_eq!(fleet["agents"].as_array().unwrap().len(), 1, "{fleet}");
}
