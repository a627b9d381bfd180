//! One measurement: wall time, processor time of client and server, and the numbers that the
//! programs report themselves.

use crate::Result;
use crate::usage::processor;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// A step that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Push the workload into an empty registry.
    Push,
    /// Push it again: nothing is new.
    Repush,
    /// Push a fork of it, in which one page in a hundred is new.
    PushFork,
    /// Pull it into an empty local store.
    PullStore,
    /// Pull it into an empty directory.
    PullDir,
}

impl Step {
    /// All steps, in the order of the tables.
    pub const ALL: [Self; 5] = [Self::Push, Self::PullStore, Self::PullDir, Self::PushFork, Self::Repush];

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Repush => "push, unchanged",
            Self::PushFork => "push, 1 % new",
            Self::PullStore => "pull into a store",
            Self::PullDir => "pull into a directory",
        }
    }
}

/// Numbers that the programs of a step report themselves; `None` if they do not.
#[derive(Clone, Debug, Default)]
pub struct Reported {
    /// Bytes of frames or bodies moved over HTTP.
    pub bytes_moved: Option<u64>,
    /// Bytes in which the registry then holds the snapshot.
    pub stored_bytes: Option<u64>,
    /// HTTP requests.
    pub round_trips: Option<u64>,
    /// Peak memory of the client process, bytes.
    pub client_memory: Option<u64>,
    /// Peak memory of the server process since its start, bytes.
    pub server_memory: Option<u64>,
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Sample {
    /// `disk` or `tmpfs`.
    pub place: String,
    /// Name of the contender.
    pub contender: &'static str,
    /// The step.
    pub step: Step,
    /// Round, from 0.
    pub round: usize,
    /// Raw bytes of the snapshot.
    pub raw_bytes: u64,
    /// Wall time.
    pub seconds: f64,
    /// Time of a `syncfs` after the step: near zero for a program that syncs what it writes.
    pub sync_seconds: f64,
    /// Processor time of client and server.
    pub processor_seconds: f64,
    /// Processor time of everything else on the machine.
    pub others_seconds: f64,
    /// Numbers that the programs report themselves.
    pub reported: Reported,
}

/// Takes measurements of one contender in one round.
pub struct Meter<'a> {
    /// `disk` or `tmpfs`.
    pub place: &'a str,
    /// Name of the contender.
    pub contender: &'static str,
    /// Round, from 0.
    pub round: usize,
    /// The samples of the whole run.
    pub samples: &'a mut Vec<Sample>,
}

impl Meter<'_> {
    /// Adds what the last step led to.
    pub fn stored(&mut self, bytes: u64) {
        if let Some(sample) = self.samples.last_mut() {
            sample.reported.stored_bytes = Some(bytes);
        }
    }

    /// Measures `work`. Syncs the file system first, so that the step does not wait for writes of
    /// an earlier one.
    pub fn measure(
        &mut self,
        step: Step,
        raw_bytes: u64,
        dir: &Path,
        servers: &[u32],
        work: impl FnOnce() -> Result<Reported>,
    ) -> Result<()> {
        settle(dir)?;
        let (before, start) = (processor(servers), Instant::now());
        let reported = work().map_err(|e| format!("{} on {}, {}: {e}", self.contender, self.place, step.name()))?;
        let seconds = start.elapsed().as_secs_f64();
        let after = processor(servers);
        let start = Instant::now();
        settle(dir)?;
        let sync_seconds = start.elapsed().as_secs_f64();
        let (ours, all) = (after.ours - before.ours, after.all - before.all);
        eprintln!("round {} {:5} {:16} {:21} {seconds:7.2} s", self.round, self.place, self.contender, step.name());
        self.samples.push(Sample {
            place: self.place.to_owned(),
            contender: self.contender,
            step,
            round: self.round,
            raw_bytes,
            seconds,
            sync_seconds,
            processor_seconds: ours,
            others_seconds: (all - ours).max(0.0),
            reported,
        });
        Ok(())
    }
}

/// Waits until everything written to the file system of `dir` is on disk.
fn settle(dir: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(dir)?)?)
}
