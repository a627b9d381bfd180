//! Power cuts of an agent that captures a snapshot and promises to push it: if the capture was
//! acknowledged, snapshot and push survive.

use nix::sys::signal::Signal;
use pfr_crash::check::{REPOSITORY, each, folder, run, sound};
use pfr_crash::record::{Recorder, is_possible};
use pfr_crash::states::{Bound, States};
use pfr_crash::trace::Trace;
use pfr_schema::agent::PushJob;
use pfr_store::{GcOptions, Options, Store};
use pfr_tests::{Engine, Model, Pf, binary, seed, skip, wait_for};
use std::fs::File;
use std::path::Path;
use std::process::Command;

/// A registry that never answers.
const NOBODY: &str = "http://127.0.0.1:9";
/// The agent's data folder below the root: most of its parents are not there at first.
const DATA: &str = "share/pf/agent";

/// A capture that was recorded.
struct Captured {
    trace: Trace,
    /// Operations when it was told.
    told: usize,
    /// The push that was promised.
    job: PushJob,
}

/// None where this process may not trace others.
fn recorded() -> Option<Captured> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let home = folder();
    let pf = Pf::new(NOBODY);
    let engines = pf.path("engines.sock");
    let log = File::create(pf.path("agent.log")).unwrap();
    let mut command = Command::new(binary("pf-agent"));
    command
        .args(["serve", "--registry", NOBODY, "--data"])
        .arg(home.path().join(DATA))
        .args([Path::new("--socket"), &pf.path("agent.sock")])
        .args([Path::new("--engine-socket"), &engines])
        .env_clear()
        .env("HOME", pf.path("."))
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    let recorder = Recorder::new(home.path());
    let agent = recorder.start(command).unwrap();
    wait_for("the agent to answer", 60, || (pf.run(&["engines"]).code == 0).then_some(()));
    let mut engine = Engine::start(&engines, "e", Model::Hybrid, &[]);
    wait_for("the engine to be ready", 60, || {
        pf.json(&["engines"])["engines"].as_array().unwrap().iter().any(|e| e["state"]["state"] == "ready").then_some(())
    });
    let sequence = engine.open(&Model::Hybrid.prompt(20));
    let report = pf.json(&["snapshot", "e", &format!("{REPOSITORY}:x"), "--sequence", &sequence, "--push", "background"]);
    let told = recorder.position();
    agent.signal(Signal::SIGKILL);
    agent.wait().unwrap();
    let job = serde_json::from_value(report["push"].clone()).unwrap();
    Some(Captured { trace: recorder.finish().unwrap(), told, job })
}

impl Captured {
    async fn check(&self, data: &Path, at: usize) -> Result<(), String> {
        let mut jobs = Vec::new();
        for (path, bytes) in
            pfr_tests::files(&data.join("pushes")).into_iter().filter(|(path, _)| path.extension().is_some_and(|e| e == "json"))
        {
            jobs.push(serde_json::from_slice::<PushJob>(&bytes).map_err(|e| format!("CORRUPT: {}: {e}", path.display()))?);
        }
        let store = Store::open(&data.join("store"), Options::default()).await.map_err(|e| format!("REFUSED: {e}"))?;
        sound(&store).await?;
        if at < self.told {
            return Ok(());
        }
        if !jobs.iter().any(|job| job.id == self.job.id && job.digest == self.job.digest) {
            return Err(format!("LOST: the promised push; there are {jobs:?}"));
        }
        let there = async || store.snapshot(&REPOSITORY.parse().unwrap(), &self.job.digest).await;
        there().await.map_err(|e| format!("LOST: the snapshot: {e}"))?;
        store.evict(0, &GcOptions::default(), &mut |_| ()).await.map_err(|e| e.to_string())?;
        there().await.map(|_| ()).map_err(|e| format!("LOST: the snapshot is not pinned until it is pushed: {e}"))
    }
}

fn no_power_cut_harms(bound: Bound) {
    let Some(captured) = recorded() else { return };
    let states = States::of(&captured.trace, bound, seed(), |_| true);
    let wrong = each(&states, |_| true, 4, |dir, at| run(captured.check(&dir.join(DATA), at)));
    println!("{} operations, {} states, {} opened", captured.trace.ops.len(), states.enumerated, states.states.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn a_capture_that_was_told_and_its_push_survive_power_cuts() {
    no_power_cut_harms(Bound::COARSE);
}

mod long {
    use super::{Bound, no_power_cut_harms};

    #[test]
    fn a_capture_that_was_told_and_its_push_survive_power_cuts() {
        no_power_cut_harms(Bound::NORMAL);
    }
}
