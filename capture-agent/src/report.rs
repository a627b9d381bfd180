//! Reports to the registry: the engines of this host, its drains and warms, for the pages of the
//! fleet. Nothing waits for a report, and nothing depends on one.

use crate::agent::Agent;
use crate::config::Config;
use crate::error::Result;
use pfr_schema::AgentName;
use pfr_schema::agent::{EngineInfo, EngineState, Job, JobRequest};
use pfr_schema::api::{AgentEngine, AgentEngineState, AgentJob, AgentJobKind, AgentReport};
use pfr_service::Backoff;
use serde_json::Value;
use std::time::Duration;
use tokio::time::Instant;

/// Time that a report may take.
const LIMIT: Duration = Duration::from_secs(10);
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
    let Some(registry) = config.registry.as_deref().filter(|_| !interval.is_zero()) else { return };
    let Some(name) = config.report_name.clone().or_else(host_name) else {
        tracing::warn!("the registry learns nothing of this host: its name is no agent name; set report-name");
        return;
    };
    let waits = Backoff::new(interval, LONGEST_WAIT.max(interval));
    let mut failures = 0_u32;
    loop {
        let report = report_of(&agent);
        let failed = match tokio::time::timeout(LIMIT, send(config, registry, &name, &report)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some(format!("no answer within {} seconds", LIMIT.as_secs())),
        };
        let Some(error) = failed else {
            if failures > 0 {
                tracing::info!(registry, "the registry takes reports again");
            }
            failures = 0;
            until_due(&agent, &report, interval).await;
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

/// The name of this host, if it can be the name of an agent.
fn host_name() -> Option<AgentName> {
    std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?.trim().parse().ok()
}

async fn send(config: &Config, registry: &str, name: &AgentName, report: &AgentReport) -> Result<()> {
    Ok(config.remote(registry)?.report_agent(name, report).await?)
}

/// Waits for the time of the next report: for the interval, or until something has changed.
async fn until_due(agent: &Agent, last: &AgentReport, interval: Duration) {
    let due = Instant::now() + interval;
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
        begun_at: job.begun_at,
        ended_at: job.ended_at,
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
