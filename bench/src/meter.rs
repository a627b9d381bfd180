//! One measurement: wall time from outside, processor time of everybody involved, and what the step says of itself.

use crate::Result;
use crate::usage::processor;
use serde::Serialize;
use std::path::Path;
use std::time::Instant;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Everything into an empty store.
    Push,
    /// The same again: nothing is new.
    Repush,
    /// A fork of it, one page of a hundred new.
    PushFork,
    /// Everything into an empty local store.
    PullStore,
    /// Everything into an empty directory.
    PullDir,
}

impl Step {
    /// All, in the order they are shown.
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

/// What a step says of itself.
#[derive(Clone, Debug, Default)]
pub struct Said {
    /// Bytes of frames or bodies moved over HTTP.
    pub bytes_moved: Option<u64>,
    /// Requests.
    pub round_trips: Option<u64>,
    /// Most memory of the client process, bytes.
    pub client_memory: Option<u64>,
    /// Most memory of the server process so far, bytes.
    pub server_memory: Option<u64>,
}

/// One measurement.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Where: `disk` or `tmpfs`.
    pub place: String,
    /// Who.
    pub contender: &'static str,
    /// What.
    pub step: Step,
    /// Round, from 0.
    pub round: usize,
    /// Raw bytes of the snapshot.
    pub raw_bytes: u64,
    /// Wall time.
    pub seconds: f64,
    /// Time of a following `syncfs`: nothing for who syncs by itself.
    pub sync_seconds: f64,
    /// Processor time of client and server.
    pub processor_seconds: f64,
    /// Processor time of everything else on the machine.
    pub others_seconds: f64,
    /// What the step says.
    pub said: Said,
}

/// Takes measurements of one contender in one round.
pub struct Meter<'a> {
    /// Where.
    pub place: &'a str,
    /// Who.
    pub contender: &'static str,
    /// Round.
    pub round: usize,
    /// Where samples go.
    pub samples: &'a mut Vec<Sample>,
}

impl Meter<'_> {
    /// Measures `work`. What was written before is on disk when it starts, so nobody pays for somebody else.
    pub fn measure(&mut self, step: Step, raw_bytes: u64, dir: &Path, servers: &[u32], work: impl FnOnce() -> Result<Said>) -> Result<()> {
        settle(dir)?;
        let (before, start) = (processor(servers), Instant::now());
        let said = work().map_err(|e| format!("{} on {}, {}: {e}", self.contender, self.place, step.name()))?;
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
            said,
        });
        Ok(())
    }
}

/// Waits until everything written to the file system of `dir` is on disk.
fn settle(dir: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(dir)?)?)
}
