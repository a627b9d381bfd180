//! Reports to the registry: the engines of this host, its drains and warms, for the pages of the
//! fleet. Nothing depends on a report. Nothing waits for one, but for the end of the agent, which
//! waits a second for the last one.

use crate::agent::Agent;
use crate::config::Config;
use crate::error::Result;
use pfr_schema::AgentName;
use pfr_schema::agent::{EngineInfo, EngineState, Job, JobRequest};
use pfr_schema::api::{AgentEngine, AgentEngineState, AgentJob, AgentJobKind, AgentReport};
use pfr_service::Backoff;
use pfr_service::backoff::jitter;
use serde_json::Value;
use std::ops::Range;
use std::time::Duration;
use tokio::time::Instant;

/// Time that a report may take.
const LIMIT: Duration = Duration::from_secs(10);
/// Time that the last report may take: the end of the agent waits for it.
const LAST: Duration = Duration::from_secs(1);
/// When the next report is due, in intervals. Agents that were started together do not go on
/// reporting together.
const DUE: Range<f64> = 0.8..1.0;
/// Time between two looks for a change, which is reported at once.
const LOOK: Duration = Duration::from_secs(5);
/// Longest wait after reports that failed, unless the interval is longer.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// Milliseconds for which a job that ended is reported.
const RECENT: u64 = 3_600_000;

/// Reports to the agent's registry until it is dropped. Ends at once if the agent has none, or if
/// its settings say that it does not report.
pub async fn run(agent: Agent) {
    let config = agent.config();
    let interval = config.report_interval;
    let Some(registry) = registry_of(config) else { return };
    let Some(name) = name_of(config) else {
        tracing::warn!("the registry learns nothing of this host: its name is no agent name; set report-name");
        return;
    };
    let waits = Backoff::new(interval, LONGEST_WAIT.max(interval));
    let mut failures = 0_u32;
    loop {
        let report = report_of(&agent);
        let Err(error) = within(LIMIT, send(config, registry, &name, &report)).await else {
            if failures > 0 {
                tracing::info!(registry, "the registry takes reports again");
            }
            failures = 0;
            until_due(&agent, &report, interval.mul_f64(jitter(DUE))).await;
            continue;
        };
        failures = failures.saturating_add(1);
        let again_in = waits.wait(failures);
        if failures == 1 {
            tracing::warn!(registry, error, ?again_in, "the registry did not take a report; report-interval = 0 sends none");
        } else {
            tracing::debug!(registry, error, ?again_in, "the registry did not take a report");
        }
        tokio::time::sleep(again_in).await;
    }
}

/// The last report of an agent that ends in order. Made before its engines are let go: it names
/// those that the host has.
#[must_use]
pub fn last(agent: &Agent) -> AgentReport {
    AgentReport { stopped: true, ..report_of(agent) }
}

/// Tells the agent's registry, if it reports to one, that the agent ends in order. Tries it once
/// and takes a second at most, so that a registry that hangs does not hold up the end.
pub async fn stopped(agent: &Agent, report: AgentReport) {
    let config = agent.config();
    let Some((registry, name)) = registry_of(config).zip(name_of(config)) else { return };
    if let Err(error) = within(LAST, send(config, registry, &name, &report)).await {
        tracing::info!(registry, error, "the registry was not told that this agent has stopped");
    }
}

/// The registry that gets reports, if there is one.
fn registry_of(config: &Config) -> Option<&str> {
    config.registry.as_deref().filter(|_| !config.report_interval.is_zero())
}

/// The name under which the agent reports: the configured one, or else that of this host.
fn name_of(config: &Config) -> Option<AgentName> {
    config.report_name.clone().or_else(host_name)
}

/// The name of this host, if it can be the name of an agent.
fn host_name() -> Option<AgentName> {
    std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?.trim().parse().ok()
}

async fn send(config: &Config, registry: &str, name: &AgentName, report: &AgentReport) -> Result<()> {
    Ok(config.remote(registry)?.report_agent(name, report).await?)
}

/// Waits for a report that is sent, but no longer than `limit`.
///
/// # Errors
/// Why the registry may not have it, for the log.
async fn within(limit: Duration, sending: impl Future<Output = Result<()>>) -> Result<(), String> {
    match tokio::time::timeout(limit, sending).await {
        Ok(sent) => sent.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", limit.as_secs())),
    }
}

/// Waits until the next report is due, or until something has changed.
async fn until_due(agent: &Agent, last: &AgentReport, wait: Duration) {
    let due = Instant::now() + wait;
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(LOOK.min(left)).await;
        if has_changed(last, &report_of(agent)) {
            return;
        }
    }
}

/// Whether engines have come or gone, or jobs have begun or ended. The rest changes all the time.
fn has_changed(last: &AgentReport, now: &AgentReport) -> bool {
    let of_engine = |engine: &AgentEngine| (engine.engine.clone(), engine.state == AgentEngineState::Incomplete);
    let of_job = |job: &AgentJob| (job.id.clone(), job.state);
    let same_engines = last.engines.iter().map(of_engine).eq(now.engines.iter().map(of_engine));
    let same_jobs = last.jobs.iter().map(of_job).eq(now.jobs.iter().map(of_job));
    !(same_engines && same_jobs)
}

fn report_of(agent: &Agent) -> AgentReport {
    let mut jobs = agent.jobs().recent(agent.store().options().clock.now().saturating_sub(RECENT));
    // Those under way come first, and then the newest: the rest may be more than a report holds.
    jobs.reverse();
    jobs.sort_by_key(|job| !job.state.is_open());
    AgentReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        interval_seconds: agent.config().report_interval.as_secs(),
        engines: agent.all_engines().iter().take(AgentReport::ENGINES).map(engine).collect(),
        jobs: jobs.iter().take(AgentReport::JOBS).map(job).collect(),
        stopped: false,
    }
}

fn engine(info: &EngineInfo) -> AgentEngine {
    let (state, note) = match &info.state {
        EngineState::Ready {} => (AgentEngineState::Ready, None),
        EngineState::Busy { with } => (AgentEngineState::Busy, Some(with)),
        EngineState::Incomplete { missing } => (AgentEngineState::Incomplete, Some(missing)),
    };
    AgentEngine {
        engine: clipped(&info.engine),
        model: info.deployment.get("model").and_then(Value::as_str).map(clipped),
        fingerprint: info.fingerprint,
        state,
        note: note.map(|note| clipped(note)),
        snapshots: info.snapshots,
        restores: info.restores,
        staged: info.staged.len() as u64,
    }
}

fn job(job: &Job) -> AgentJob {
    let (kind, about) = match &job.request {
        JobRequest::Warm(request) => (AgentJobKind::Warm, request.references.first()),
        JobRequest::Drain(request) => (AgentJobKind::Drain, Some(&request.repository)),
    };
    let note = job.note.as_ref().or(job.error.as_ref().map(|problem| &problem.detail));
    AgentJob {
        id: clipped(&job.id),
        kind,
        about: about.map(|about| clipped(about)),
        state: job.state,
        started_at: job.started_at,
        finished_at: job.finished_at,
        bytes_done: job.bytes_done,
        bytes_total: job.bytes_total,
        seconds_left: job.seconds_left.map(|seconds| (seconds as u64).min(AgentReport::MOST)),
        note: note.map(|note| clipped(note)),
    }
}

/// As much of a text as a report takes.
fn clipped(text: &str) -> String {
    text.chars().take(AgentReport::TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_due_within_the_interval_that_they_name_and_not_together() {
        let waits: Vec<f64> = (0..100).map(|_| jitter(DUE)).collect();
        assert!(waits.iter().all(|wait| (0.8..=1.0).contains(wait)), "{waits:?}");
        assert!(waits.iter().any(|wait| (wait - waits[0]).abs() > 0.01), "{waits:?}");
    }
}
