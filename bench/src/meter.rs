//! One measurement: wall time, processor time of client and server, and the numbers that the
//! programs report themselves.

use crate::Result;
use crate::usage::{Watch, peak_memory};
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
    /// Read it into memory that is used again.
    Get,
    /// The same, and compare each blob with its digest. Those of a cache are hashed four at a time.
    GetVerified,
    /// The same with as many at a time as `pf` hashes, if that is more than four. Only of caches.
    GetVerifiedAsPf,
}

impl Step {
    /// All steps, in the order of the tables.
    pub const ALL: [Self; 8] =
        [Self::Push, Self::PullStore, Self::PullDir, Self::Get, Self::GetVerified, Self::GetVerifiedAsPf, Self::PushFork, Self::Repush];

    /// Whether it moves every byte of the workload.
    pub fn moves_everything(self) -> bool {
        !matches!(self, Self::PushFork | Self::Repush)
    }

    /// Name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Repush => "push, unchanged",
            Self::PushFork => "push, 1 % new",
            Self::PullStore => "pull into a store",
            Self::PullDir => "pull into a directory",
            Self::Get => "get into memory",
            Self::GetVerified => "get into memory, verified",
            Self::GetVerifiedAsPf => "get into memory, hashed as by pf",
        }
    }
}

/// Numbers that the programs of a step report themselves; `None` if they do not.
#[derive(Clone, Debug, Default)]
pub struct Reported {
    /// Bytes of frames or bodies moved over HTTP.
    pub bytes_moved: Option<u64>,
    /// HTTP requests.
    pub round_trips: Option<u64>,
    /// Peak memory of the client process, bytes.
    pub client_memory: Option<u64>,
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
    /// Peak memory of the servers since their start, bytes.
    pub server_memory: Option<u64>,
    /// Bytes that the server keeps after the step.
    pub stored_bytes: Option<u64>,
    /// Numbers that the programs report themselves.
    pub reported: Reported,
}

impl Sample {
    /// Raw bytes for each that the server keeps.
    pub fn raw_of_stored(&self) -> Option<f64> {
        self.stored_bytes.map(|stored| self.raw_bytes as f64 / stored as f64)
    }

    /// Processor seconds for each 10⁹ raw bytes.
    pub fn processor_seconds_per_gb(&self) -> f64 {
        self.processor_seconds * 1e9 / (self.raw_bytes as f64).max(1.0)
    }
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
        let (watch, start) = (Watch::start(servers), Instant::now());
        let reported = work().map_err(|e| format!("{} on {}, {}: {e}", self.contender, self.place, step.name()))?;
        let seconds = start.elapsed().as_secs_f64();
        let used = watch.stop();
        let start = Instant::now();
        settle(dir)?;
        let sync_seconds = start.elapsed().as_secs_f64();
        eprintln!("round {} {:5} {:16} {:25} {seconds:7.2} s {:7.2} CPU-s", self.round, self.place, self.contender, step.name(), used.ours);
        self.samples.push(Sample {
            place: self.place.to_owned(),
            contender: self.contender,
            step,
            round: self.round,
            raw_bytes,
            seconds,
            sync_seconds,
            processor_seconds: used.ours,
            others_seconds: (used.all - used.ours).max(0.0),
            server_memory: servers.iter().filter_map(|pid| peak_memory(*pid)).reduce(|sum, own| sum + own),
            stored_bytes: None,
            reported,
        });
        Ok(())
    }

    /// Notes how many bytes the server keeps after the last step.
    pub fn stored(&mut self, bytes: u64) {
        if let Some(sample) = self.samples.last_mut() {
            sample.stored_bytes = Some(bytes);
        }
    }
}

/// Waits until everything written to the file system of `dir` is on disk.
pub fn settle(dir: &Path) -> Result<()> {
    Ok(rustix::fs::syncfs(std::fs::File::open(dir)?)?)
}
