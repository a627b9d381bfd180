//! Drain of a host: a job that captures and pushes every sequence, so that the host can be shut
//! down.

use crate::Agent;
use crate::engines::Engine;
use crate::error::{Error, Result};
use crate::jobs::{Handle, check_speed};
use crate::rate::recompute;
use crate::snapshot::Deadline;
use futures::future::join_all;
use pfr_schema::agent::{
    Drain, DrainFailure, DrainItem, DrainRequest, EngineInfo, EngineState, Push, PushState, SnapshotReport, SnapshotRequest,
};
use pfr_schema::engine::{Sequence, SequenceInfo, SequenceState, Verb};
use pfr_schema::tree::GroupKind;
use pfr_schema::{ErrorCode, Reference};
use std::collections::{BTreeSet, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a drain waits for its pushes if nothing else is said.
const WAIT_SECONDS: u64 = 600;
/// How long engines get at least to list their sequences, and again for the captures: one may be in
/// the middle of a long step.
const LEAST_LOOK_SECONDS: u64 = 5;
/// And at most: a day.
const LONGEST_WAIT_SECONDS: u64 = 24 * 60 * 60;

/// How far the captures of a drain are, of all engines.
#[derive(Debug, Default)]
struct Progress {
    /// Bytes of those that are over.
    bytes: AtomicU64,
    /// Those that have begun and are not over.
    under_way: Mutex<BTreeSet<String>>,
}

impl Progress {
    /// Says in the job what is captured now, after `change`.
    fn note(&self, handle: &Handle, change: impl FnOnce(&mut BTreeSet<String>) -> bool) {
        let mut under_way = self.under_way.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut under_way);
        if !under_way.is_empty() {
            let names: Vec<&str> = under_way.iter().map(String::as_str).collect();
            let note = format!("capturing {}", names.join(", "));
            handle.update(|job| job.note = Some(note));
        }
    }
}

impl Agent {
    /// Checks a request before anything is looked at.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a repository that is none.
    pub(crate) fn check_drain(&self, request: &DrainRequest) -> Result<()> {
        let target: Reference = request.repository.parse()?;
        if target.selector.is_some() {
            return Err(Error::Invalid(format!("{:?}: a drain takes a repository, the tags are its own", request.repository)));
        }
        if target.registry.is_none() && self.config().registry.is_none() {
            return Err(Error::Invalid(format!("{:?} names no registry and the agent has none", request.repository)));
        }
        check_speed(request.prefill_tokens_per_second)
    }

    /// What a drain would capture. It lists what cannot be looked at.
    pub(crate) async fn plan_drain(&self, request: &DrainRequest) -> Result<Drain> {
        let target: Reference = request.repository.parse()?;
        let mut failed = Vec::new();
        let seconds = request.wait_seconds.unwrap_or(WAIT_SECONDS).clamp(LEAST_LOOK_SECONDS, LONGEST_WAIT_SECONDS);
        let plan = self.plan(&target, Duration::from_secs(seconds), &mut failed).await;
        let bytes = plan.iter().map(|item| item.bytes).sum();
        let recompute_tokens = plan.iter().map(|item| item.boundary).sum();
        let (eta_seconds, recompute_seconds) = (self.rate().seconds(bytes), recompute(recompute_tokens, request.prefill_tokens_per_second));
        Ok(Drain { plan, done: Vec::new(), failed, bytes, eta_seconds, recompute_tokens, recompute_seconds })
    }

    /// Captures every sequence of every engine and waits until the registry has them, as long as
    /// the request says. The job lists what cannot be captured or pushed in time, and the rest goes
    /// on.
    pub(crate) async fn drain_host(&self, request: &DrainRequest, handle: &Handle) -> Result<()> {
        let begun = Instant::now();
        handle.update(|job| job.note = Some("asking the engines for their sequences".to_owned()));
        let drain = self.plan_drain(request).await?;
        let plan = drain.plan.clone();
        handle.update(|job| {
            job.bytes_total = drain.bytes;
            job.error = drain.failed.first().map(|failure| failure.problem.clone());
            job.drain = Some(drain);
        });
        handle.save().await;
        let seconds = request.wait_seconds.unwrap_or(LONGEST_WAIT_SECONDS).clamp(LEAST_LOOK_SECONDS, LONGEST_WAIT_SECONDS);
        let deadline = (begun + Duration::from_secs(seconds)).max(Instant::now() + Duration::from_secs(LEAST_LOOK_SECONDS));
        let (limit, progress) = (Deadline { at: deadline, seconds }, Progress::default());
        handle.done(0);
        // Engines at the same time: one that hangs takes no time from the others.
        let of_engines = plan.chunk_by(|a, b| a.engine == b.engine).map(|items| self.capture_each(items, limit, &progress, handle));
        let captured: Vec<SnapshotReport> = join_all(of_engines).await.into_iter().flatten().collect();
        // All are safe on this host before the first wait for the network.
        let (since, seconds) = request.wait_seconds.map_or_else(|| (Instant::now(), WAIT_SECONDS), |seconds| (begun, seconds));
        let deadline = since + Duration::from_secs(seconds.min(LONGEST_WAIT_SECONDS));
        let all = captured.len();
        for (number, mut report) in captured.into_iter().enumerate() {
            handle.update(|job| job.note = Some(format!("waiting for {} of {all} pushes", all - number)));
            match self.pushed(&mut report, deadline, seconds).await {
                Ok(()) => handle.update(|job| job.drain.iter_mut().for_each(|drain| drain.done.push(report.clone()))),
                Err(error) => missed(handle, &report.engine, &report.sequence, &error),
            }
            handle.save().await;
        }
        Ok(())
    }

    /// Waits until the registry has what was captured.
    async fn pushed(&self, report: &mut SnapshotReport, deadline: Instant, seconds: u64) -> Result<()> {
        let (snapshot, Some(job)) = (report.digest, &mut report.push) else { return Ok(()) };
        let wait = async {
            loop {
                match self.pushes().wait(&job.id).await {
                    Some(ended) => return Ok::<_, Error>(ended),
                    // The job was removed from the list of finished jobs. A new push of the same
                    // snapshot sends nothing and tells the outcome.
                    None => *job = self.pushes().add(snapshot, &job.reference).await?,
                }
            }
        };
        match tokio::time::timeout_at(deadline.into(), wait).await {
            Ok(ended) => *job = ended?,
            Err(_) => {
                let now = self.pushes().list().into_iter().find(|other| other.id == job.id);
                let last = now.and_then(|job| job.error).map(|error| format!(" ({error})")).unwrap_or_default();
                let what = format!("{snapshot} is in this host's store and push {} goes on; the registry did not have it{last}", job.id);
                return Err(Error::Timeout { what, seconds });
            }
        }
        match job.state {
            PushState::Failed => {
                let (reason, code) = (job.error.clone().unwrap_or_default(), job.code.unwrap_or(ErrorCode::InvalidRequest));
                Err(Error::PushRefused { snapshot, reason, code })
            }
            _ => Ok(()),
        }
    }

    async fn plan(&self, target: &Reference, limit: Duration, failed: &mut Vec<DrainFailure>) -> Vec<DrainItem> {
        let mut plan = Vec::new();
        let mut references = HashSet::new();
        let engines: Vec<EngineInfo> = self.engines().list().into_iter().chain(self.llamas().list()).collect();
        // At the same time: those that hang are waited for once.
        let looked = join_all(engines.iter().map(|info| self.look_within(info, limit))).await;
        for (info, looked) in engines.iter().zip(looked) {
            match looked {
                Ok(sequences) => {
                    for (sequence, bytes) in sequences {
                        let reference = name(target, &info.engine, &sequence.id, &mut references);
                        let (engine, boundary) = (info.engine.clone(), sequence.boundary);
                        plan.push(DrainItem { engine, sequence: sequence.id, reference, boundary, bytes });
                    }
                }
                Err(error) => failed.push(failure(&info.engine, "", &error)),
            }
        }
        plan
    }

    /// [`Self::look`], if the engine is complete and answers in time.
    async fn look_within(&self, info: &EngineInfo, limit: Duration) -> Result<Vec<(SequenceInfo, u64)>> {
        if let EngineState::Incomplete { missing } = &info.state {
            return Err(Error::Incomplete { engine: info.engine.clone(), missing: missing.clone() });
        }
        let silent = |_| Error::Timeout { what: format!("{} did not list its sequences", info.engine), seconds: limit.as_secs() };
        tokio::time::timeout(limit, self.look(&info.engine)).await.map_err(silent)?
    }

    /// The sequences of an engine that have state, and the bytes of it.
    async fn look(&self, engine: &str) -> Result<Vec<(SequenceInfo, u64)>> {
        if let Some(llama) = self.llamas().get(engine) {
            let slot = |(slot, boundary, bytes)| (of_slot(slot, boundary), bytes);
            return Ok(llama.with_state().await?.into_iter().map(slot).collect());
        }
        let found = self.sequences(engine).await?;
        let engine = self.engines().get(engine)?;
        Ok(found.into_iter().filter(|s| s.boundary > 0).map(|s| (bytes(&engine, &s), s)).map(|(bytes, s)| (s, bytes)).collect())
    }

    /// The sequences of an engine that can be captured now. An engine that holds no blocks for a
    /// capture is paused meanwhile.
    ///
    /// # Errors
    /// [`Error::EngineUnknown`], [`Error::Incomplete`], [`Error::Lost`], [`Error::Refused`],
    /// [`Error::Protocol`].
    pub async fn sequences(&self, engine: &str) -> Result<Vec<SequenceInfo>> {
        if let Some(llama) = self.llamas().get(engine) {
            return Ok(llama.with_state().await?.into_iter().map(|(slot, boundary, _)| of_slot(slot, boundary)).collect());
        }
        let engine = self.engines().get(engine)?;
        if engine.serves(Verb::Hold) {
            return engine.sequences().await;
        }
        if !engine.serves(Verb::Pause) {
            // It only takes state.
            return Ok(Vec::new());
        }
        let pause = engine.pause().await?;
        let sequences = pause.sequences().await;
        pause.resume().await?;
        let running = |s: Sequence| SequenceInfo {
            name: None,
            state: SequenceState::Running,
            tokens: s.tokens.len() as u64,
            boundary: s.boundary,
            id: s.id,
            kept_seconds: None,
        };
        Ok(sequences?.into_iter().map(running).collect())
    }

    /// Captures sequences of one engine, one after another. The job lists those that are not
    /// captured.
    async fn capture_each(&self, items: &[DrainItem], limit: Deadline, progress: &Progress, handle: &Handle) -> Vec<SnapshotReport> {
        let mut captured = Vec::new();
        for item in items {
            let name = format!("{} of {}", item.sequence, item.engine);
            progress.note(handle, |under_way| under_way.insert(name.clone()));
            match self.capture(item, limit).await {
                Ok(report) => captured.push(report),
                Err(error) => missed(handle, &item.engine, &item.sequence, &error),
            }
            progress.note(handle, |under_way| under_way.remove(&name));
            handle.done(progress.bytes.fetch_add(item.bytes, Ordering::Relaxed) + item.bytes);
            handle.save().await;
        }
        captured
    }

    async fn capture(&self, item: &DrainItem, limit: Deadline) -> Result<SnapshotReport> {
        if Instant::now() >= limit.at {
            return Err(limit.missed(&item.engine, &item.sequence, None));
        }
        let (sequence, reference) = (Some(item.sequence.clone()), item.reference.clone());
        let request = SnapshotRequest { sequence, reference, push: Push::Background, ..SnapshotRequest::default() };
        let report = self.snapshot_in_turn(limit, &item.engine, request).await?;
        self.rate().note(report.bytes_moved, report.total_seconds);
        Ok(report)
    }
}

/// Lists a sequence that was not captured or pushed.
fn missed(handle: &Handle, engine: &str, sequence: &str, error: &Error) {
    let failure = failure(engine, sequence, error);
    handle.update(|job| {
        job.error.get_or_insert_with(|| failure.problem.clone());
        job.drain.iter_mut().for_each(|drain| drain.failed.push(failure.clone()));
    });
}

fn failure(engine: &str, sequence: &str, error: &Error) -> DrainFailure {
    DrainFailure { engine: engine.into(), sequence: sequence.into(), problem: error.problem() }
}

/// A slot of a `llama-server`. It keeps its state until another request takes the slot.
fn of_slot(slot: u32, boundary: u64) -> SequenceInfo {
    SequenceInfo { id: slot.to_string(), name: None, state: SequenceState::Ended, tokens: boundary, boundary, kept_seconds: None }
}

/// Raw bytes of a sequence's pages and state, those of optional groups included.
fn bytes(engine: &Engine, sequence: &SequenceInfo) -> u64 {
    let groups = (0..engine.world()).flat_map(|rank| engine.groups(rank).iter().filter(move |g| rank == 0 || !g.layout.replicated));
    groups
        .map(|group| match group.layout.kind {
            GroupKind::Recurrent => group.layout.states.iter().map(|state| state.part.bytes).sum(),
            _ => {
                let columns = group.columns(sequence.boundary);
                (columns.end - columns.start) * group.layout.components.len() as u64 * group.page_bytes()
            }
        })
        .sum()
}

/// `<repository>/<engine>:<sequence>` in characters that names may have, each reference once.
fn name(target: &Reference, engine: &str, sequence: &str, taken: &mut HashSet<String>) -> String {
    let engine: String =
        engine.to_lowercase().chars().map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '-' }).collect();
    let engine = match engine.split('-').filter(|part| !part.is_empty()).collect::<Vec<_>>().join("-") {
        empty if empty.is_empty() => "engine".to_owned(),
        engine => engine,
    };
    let tag: String = sequence.chars().map(|c| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '-' }).take(100).collect();
    let tag = match tag.trim_start_matches(['.', '-']) {
        "" => "sequence".to_owned(),
        tag => tag.to_owned(),
    };
    let under = format!("{}/{engine}", target.repository);
    let prefix = target.registry.as_ref().map_or_else(String::new, |registry| format!("{registry}/"));
    let mut reference = format!("{prefix}{under}:{tag}");
    let mut n = 2;
    while !taken.insert(reference.clone()) {
        reference = format!("{prefix}{under}:{tag}-{n}");
        n += 1;
    }
    reference
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_valid_and_each_once() {
        let target: Reference = "http://r:1/team/evacuated".parse().unwrap();
        let mut taken = HashSet::new();
        for (engine, sequence, expected) in [
            ("vllm-0", "seq-1", "http://r:1/team/evacuated/vllm-0:seq-1"),
            ("vllm-0", "seq 1", "http://r:1/team/evacuated/vllm-0:seq-1-2"),
            ("A_b.", "…", "http://r:1/team/evacuated/a-b:sequence"),
            ("__", "..x", "http://r:1/team/evacuated/engine:x"),
        ] {
            let name = name(&target, engine, sequence, &mut taken);
            assert_eq!(name, expected);
            name.parse::<Reference>().unwrap();
        }
    }
}
