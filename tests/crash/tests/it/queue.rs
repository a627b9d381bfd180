//! Power cuts of an agent that captures a snapshot and promises to push it: if the capture was
//! acknowledged, snapshot and push survive.

use crate::agent::{Host, is_kept, no_power_cut_harms, opened, records};
use pfr_crash::check::{REPOSITORY, run};
use pfr_crash::states::Bound;
use pfr_crash::trace::Trace;
use pfr_schema::agent::PushJob;
use pfr_tests::{Engine, Model, wait_for};
use std::path::Path;

/// A registry that never answers.
const NOBODY: &str = "http://127.0.0.1:9";

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
    let host = Host::start(NOBODY)?;
    let pf = &host.pf;
    let mut engine = Engine::start(&Host::engines(pf), "e", Model::Hybrid, &[]);
    wait_for("the engine to be ready", 60, || {
        pf.json(&["engines"])["engines"].as_array().unwrap().iter().any(|e| e["state"]["state"] == "ready").then_some(())
    });
    let sequence = engine.open(&Model::Hybrid.prompt(20));
    let report = pf.json(&["snapshot", "e", &format!("{REPOSITORY}:x"), "--sequence", &sequence, "--push", "background"]);
    let (trace, told) = host.kill();
    Some(Captured { trace, told, job: serde_json::from_value(report["push"].clone()).unwrap() })
}

impl Captured {
    async fn check(&self, data: &Path, at: usize) -> Result<(), String> {
        let mut jobs = Vec::new();
        for bytes in records(&data.join("pushes")) {
            jobs.push(serde_json::from_slice::<PushJob>(&bytes).map_err(|e| format!("CORRUPT: the file of a push: {e}"))?);
        }
        let store = opened(data).await?;
        if at < self.told {
            return Ok(());
        }
        if !jobs.iter().any(|job| job.id == self.job.id && job.digest == self.job.digest) {
            return Err(format!("LOST: the promised push; there are {jobs:?}"));
        }
        is_kept(&store, &self.job.digest).await
    }
}

fn survives_power_cuts(bound: Bound) {
    let Some(captured) = recorded() else { return };
    no_power_cut_harms(&captured.trace, bound, |data, at| run(captured.check(data, at)));
}

#[test]
fn a_capture_that_was_told_and_its_push_survive_power_cuts() {
    survives_power_cuts(Bound { most: 60, ..Bound::COARSE });
}

mod long {
    use super::{Bound, survives_power_cuts};

    #[test]
    fn a_capture_that_was_told_and_its_push_survive_power_cuts() {
        survives_power_cuts(Bound { most: 600, ..Bound::MEDIUM });
    }
}
