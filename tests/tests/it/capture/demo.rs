//! `pf demo` plays to its end, keeps what it promises to keep, and leaves nothing behind.

use pfr_tests::{Pf, Registry, binary, wait_for};
use serde_json::Value;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

const ACTS: usize = 8;

/// The demo, as a user with an empty home would run it.
fn demo(pf: &Pf, args: &[&str]) -> Command {
    // A unique folder, by which its processes are found.
    let mut command = pf.command(&[&["demo", "--model", "hybrid"], args].concat());
    command.env("TMPDIR", pf.path("."));
    command
}

/// Command lines of all processes that work somewhere below `pf`'s home.
fn running(pf: &Pf) -> Vec<String> {
    let home = pf.path(".").canonicalize().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let here = processes.filter(|p| std::fs::read_link(p.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(&home)));
    here.filter_map(|p| std::fs::read_to_string(p.path().join("cmdline")).ok()).filter(|line| !line.is_empty()).collect()
}

#[test]
fn the_demo_keeps_its_promises_and_says_so_in_json() {
    drop((binary("pf-agent"), binary("pf-kv"), binary("pf-registry")));
    let pf = Pf::new("http://127.0.0.1:1");
    let keep = pf.path("kept");
    let output = pf.run(&["demo", "--model", "hybrid", "--json", "--keep", keep.to_str().unwrap()]).ok();
    let summary = output.json();
    assert_eq!(summary["ok"], true);
    let steps = summary["steps"].as_array().unwrap();
    assert_eq!(steps.len(), ACTS, "{summary}");
    assert!(steps.iter().all(|step| step["seconds"].as_f64().unwrap() > 0.0));
    let results = |step: &Value| step["results"].as_array().unwrap().iter().map(|r| r.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    // After a restore, a host generates the same words as the first host.
    for step in [5, 6] {
        let told = results(&steps[step]);
        let verdict = told.iter().position(|line| line.starts_with("equal: ")).unwrap_or_else(|| panic!("{told:?}"));
        let [original, here] = &told[verdict - 2..verdict] else { panic!("{told:?}") };
        assert_eq!(original, here);
        assert!(original.split(' ').count() > 10, "{told:?}");
    }
    // It says what the restore has saved: the prefill, measured on the host that restored.
    let cost = results(&steps[5]).into_iter().next_back().unwrap();
    assert!(cost.contains(" tokens again (prefill). Measured here: "), "{cost}");
    // It uses the field's terms, and explains those of the table.
    let all: String = steps.iter().flat_map(results).collect();
    assert!(all.contains("logits equal") && !all.contains("scores"), "{all}");
    assert!(all.contains("the model is not split over GPUs"), "{all}");
    assert!(results(&steps[7]).iter().any(|r| r.starts_with("error: ")), "{summary}");
    assert!(running(&pf).is_empty(), "{:?}", running(&pf));

    // The kept folder has a registry with the four snapshots, complete.
    let registry = Registry::over(&keep.join("registry"), &[]);
    let pf = Pf::new(&registry.url());
    for tag in ["sentence", "fork-1", "fork-2", "fork-3"] {
        pf.run(&["verify", &format!("agent/main:{tag}")]).ok();
    }
}

#[test]
fn an_interrupted_demo_leaves_no_process_and_no_folder() {
    let pf = Pf::new("http://127.0.0.1:1");
    let mut child = demo(&pf, &[]).process_group(0).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for("an engine to run", 60, || running(&pf).iter().any(|line| line.contains("pf-kv")).then_some(()));
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_for("everything to end", 30, || running(&pf).is_empty().then_some(()));
    let left: Vec<_> = std::fs::read_dir(pf.path(".")).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().starts_with("pf-demo-")), "{left:?}");
}
