//! Power cuts of an agent that warms its store: a job that was told to be done is listed so, its
//! snapshot is there and kept for its time, and no pin is without an end.

use nix::sys::signal::Signal;
use pfr_crash::check::{REPOSITORY, each, folder, run, sound};
use pfr_crash::record::{Recorder, is_possible};
use pfr_crash::states::{Bound, States};
use pfr_crash::trace::Trace;
use pfr_schema::Digest;
use pfr_schema::agent::{Job, JobState};
use pfr_store::{GcOptions, Options, Store};
use pfr_tests::{Pf, Registry, Shape, SnapshotDir, binary, seed, skip, wait_for};
use std::fs::File;
use std::path::Path;
use std::process::Command;

/// The agent's data folder below the root.
const DATA: &str = "share/pf/agent";

/// A warm that was recorded.
struct Warmed {
    trace: Trace,
    /// Operations when it was told to be done.
    told: usize,
    id: String,
    digest: String,
}

/// None where this process may not trace others.
fn recorded() -> Option<Warmed> {
    if !is_possible() {
        skip("ptrace", "this process may not trace its children");
        return None;
    }
    let (home, registry) = (folder(), Registry::start());
    let pf = Pf::new(&registry.url());
    let dir = SnapshotDir::write(&pf.path("dir"), Shape::TINY, &[0, 1, 2]);
    let reference = format!("{REPOSITORY}:x");
    let digest = pf.run(&["push", dir.arg(), &reference]).ok().last_line().to_owned();
    let log = File::create(pf.path("agent.log")).unwrap();
    let mut command = Command::new(binary("pf-agent"));
    command
        .args(["serve", "--registry", &registry.url(), "--data"])
        .arg(home.path().join(DATA))
        .args([Path::new("--socket"), &pf.path("agent.sock")])
        .args([Path::new("--engine-socket"), &pf.path("engines.sock")])
        .env_clear()
        .env("HOME", pf.path("."))
        .stdout(log.try_clone().unwrap())
        .stderr(log);
    let recorder = Recorder::new(home.path());
    let agent = recorder.start(command).unwrap();
    wait_for("the agent to answer", 60, || (pf.run(&["engines"]).code == 0).then_some(()));
    let job = pf.json(&["warm", &reference, "--keep", "12h"]);
    let told = recorder.position();
    agent.signal(Signal::SIGKILL);
    agent.wait().unwrap();
    assert_eq!(job["state"], "done", "{job}");
    Some(Warmed { trace: recorder.finish().unwrap(), told, id: job["id"].as_str().unwrap().to_owned(), digest })
}

/// The bytes of all records in a folder.
fn records(dir: &Path) -> Vec<Vec<u8>> {
    let is_record = |path: &Path| path.extension().is_some_and(|extension| extension == "json");
    pfr_tests::files(dir).into_iter().filter(|(path, _)| is_record(path)).map(|(_, bytes)| bytes).collect()
}

impl Warmed {
    async fn check(&self, data: &Path, at: usize) -> Result<(), String> {
        let mut jobs = Vec::new();
        for bytes in records(&data.join("jobs")) {
            jobs.push(serde_json::from_slice::<Job>(&bytes).map_err(|e| format!("CORRUPT: the file of a job: {e}"))?);
        }
        let mut kept = Vec::new();
        for bytes in records(&data.join("kept")) {
            let keep: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| format!("CORRUPT: the file of a pin: {e}"))?;
            kept.push(keep["digest"].as_str().unwrap_or_default().to_owned());
        }
        let store = Store::open(&data.join("store"), Options::default()).await.map_err(|e| format!("REFUSED: {e}"))?;
        sound(&store).await?;
        for row in store.pinned().await.map_err(|e| e.to_string())? {
            let digest = row.snapshot.digest.to_string();
            if !kept.contains(&digest) {
                return Err(format!("LEAKED: the pin of {digest} has no end, there are {kept:?}"));
            }
        }
        if at < self.told {
            return Ok(());
        }
        if !jobs.iter().any(|job| job.id == self.id && job.state == JobState::Done) {
            return Err(format!("LOST: the job that was told to be done; there are {jobs:?}"));
        }
        let digest = self.digest.parse::<Digest>().map_err(|e| e.to_string())?;
        let there = async || store.snapshot(&REPOSITORY.parse().unwrap(), &digest).await;
        there().await.map_err(|e| format!("LOST: the snapshot: {e}"))?;
        store.evict(0, &GcOptions::default(), &mut |_| ()).await.map_err(|e| e.to_string())?;
        there().await.map(|_| ()).map_err(|e| format!("LOST: the snapshot is not kept for its time: {e}"))
    }
}

fn no_power_cut_harms(bound: Bound) {
    let Some(warmed) = recorded() else { return };
    let states = States::of(&warmed.trace, bound, seed(), |_| true);
    let wrong = each(&states, |_| true, 4, |dir, at| run(warmed.check(&dir.join(DATA), at)));
    println!("{} operations, {} states, {} opened", warmed.trace.ops.len(), states.enumerated, states.states.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn a_job_that_was_told_to_be_done_and_what_it_keeps_survive_power_cuts() {
    no_power_cut_harms(Bound { most: 120, ..Bound::COARSE });
}

mod long {
    use super::{Bound, no_power_cut_harms};

    #[test]
    fn a_job_that_was_told_to_be_done_and_what_it_keeps_survive_power_cuts() {
        no_power_cut_harms(Bound { most: usize::MAX, ..Bound::NORMAL });
    }
}
