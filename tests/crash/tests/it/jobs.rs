//! Power cuts of an agent that warms its store: a job that was told to be done is listed so, its
//! snapshot is there and kept for its time, and no pin is without an end.

use crate::agent::{Host, is_kept, no_power_cut_harms, opened, records};
use pfr_crash::check::{REPOSITORY, run};
use pfr_crash::states::Bound;
use pfr_crash::trace::Trace;
use pfr_schema::Digest;
use pfr_schema::agent::{Job, JobState};
use pfr_tests::{Registry, Shape, SnapshotDir};
use std::path::Path;

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
    let registry = Registry::start();
    let host = Host::start(&registry.url())?;
    let dir = SnapshotDir::write(&host.pf.path("dir"), Shape::TINY, &[0, 1, 2]);
    let reference = format!("{REPOSITORY}:x");
    let digest = host.pf.run(&["push", dir.arg(), &reference]).ok().last_line().to_owned();
    let job = host.pf.json(&["warm", &reference, "--keep", "12h"]);
    let (trace, told) = host.kill();
    assert_eq!(job["state"], "done", "{job}");
    Some(Warmed { trace, told, id: job["id"].as_str().unwrap().to_owned(), digest })
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
        let store = opened(data).await?;
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
        is_kept(&store, &self.digest.parse::<Digest>().map_err(|e| e.to_string())?).await
    }
}

fn survives_power_cuts(bound: Bound) {
    let Some(warmed) = recorded() else { return };
    no_power_cut_harms(&warmed.trace, bound, |data, at| run(warmed.check(data, at)));
}

#[test]
fn a_job_that_was_told_to_be_done_and_what_it_keeps_survive_power_cuts() {
    survives_power_cuts(Bound { most: 120, ..Bound::COARSE });
}

mod long {
    use super::{Bound, survives_power_cuts};

    #[test]
    fn a_job_that_was_told_to_be_done_and_what_it_keeps_survive_power_cuts() {
        survives_power_cuts(Bound { most: usize::MAX, ..Bound::MEDIUM });
    }
}
