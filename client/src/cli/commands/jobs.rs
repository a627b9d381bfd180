//! `pf warm` and `pf jobs`: work of the capture agent that goes on by itself.

use super::capture::is_unknown;
use crate::cli::args::{JobCommand, JobsArgs, WarmArgs};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{age, bytes, count, duration, now_ms, number, one_line};
use crate::cli::output::paint::Style;
use crate::cli::output::stderr_width;
use crate::cli::output::table::{Column, Table};
use crate::cli::progress::{Status, watch};
use crate::cli::suggest::{Advice, Suggestion};
use parking_lot::Mutex;
use pfr_client::{AgentClient, Error};
use pfr_schema::agent::{Job, JobRequest, JobState, Warm, WarmRequest, WarmState};
use pfr_schema::api::Problem;
use pfr_schema::{ErrorCode, Reference};
use std::time::Duration;
use tokio::time::Instant;

/// How often the agent is asked how far its work is.
const LOOK: Duration = Duration::from_millis(300);
/// The first wait between two questions: small work is over soon.
const SOON: Duration = Duration::from_millis(10);
/// How often a pipe gets a line about it.
pub const TOLD: Duration = Duration::from_secs(30);

/// `pf warm`.
pub async fn warm(context: &mut Context, args: WarmArgs) -> Result<(), Failure> {
    let agent = context.agent(args.at.agent.as_deref())?;
    let request = JobRequest::Warm(WarmRequest {
        references: args.references,
        newest: args.newest,
        plan_only: args.plan,
        engine: args.engine,
        keep_seconds: args.keep.map(|keep| keep.0.as_secs()),
        max_bytes: args.max_size.map(|size| size.0),
        rate: args.rate.map(|rate| rate.0),
        prefill_tokens_per_second: args.prefill_tokens_per_second,
    });
    let waits = args.wait || !(args.detach || args.plan);
    let job = if waits { finished(context, &agent, &request).await? } else { agent.begin(&request).await? };
    if context.json {
        context.out.json(&job)?;
    } else {
        print_warm(context, &job)?;
    }
    ended(&job)
}

/// `pf jobs`.
pub async fn jobs(context: &mut Context, args: JobsArgs) -> Result<(), Failure> {
    if let Some(JobCommand::Cancel { id, at }) = args.command {
        let agent = context.agent(at.agent.or(args.at.agent).as_deref())?;
        let job = agent.cancel(&id).await.map_err(unknown)?;
        if context.json {
            return context.out.json(&job);
        }
        return context.out.line(format!("{} {}", job.id, job.state.name()));
    }
    let answer = context.agent(args.at.agent.as_deref())?.jobs().await?;
    if context.json {
        return context.out.json(&answer);
    }
    if answer.jobs.is_empty() {
        return context.out.line("the agent has no jobs");
    }
    let now = now_ms();
    let mut table = Table::new([
        Column::left("JOB").style(Style::Yellow).fixed(),
        Column::left("KIND").style(Style::Bold),
        Column::left("STATE"),
        Column::right("DONE"),
        Column::right("OF"),
        Column::right("LEFT").optional(),
        Column::left("BEGUN"),
        Column::left("WHAT").optional(),
    ]);
    for job in &answer.jobs {
        table.row([
            one_line(&job.id),
            job.request.kind().to_owned(),
            job.state.name().to_owned(),
            bytes(job.bytes_done),
            bytes(job.bytes_total),
            job.seconds_left.filter(|_| job.state.is_open()).map_or_else(|| "-".to_owned(), seconds),
            age(job.started_at, now),
            what(job),
        ]);
    }
    context.out.table(&table)
}

/// The reason why a job waits, or its first failure, or its request.
fn what(job: &Job) -> String {
    let asked = || match &job.request {
        JobRequest::Warm(request) => request.references.join(" "),
        JobRequest::Drain(request) => request.repository.clone(),
    };
    one_line(&job.note.clone().or_else(|| job.error.as_ref().map(|problem| problem.detail.clone())).unwrap_or_else(asked))
}

/// Asks the agent until something is over. One that does not answer once is asked again: its work
/// goes on.
///
/// # Errors
/// Of the agent; of one that does not answer after four times.
pub async fn follow<T>(ask: impl AsyncFn() -> pfr_client::Result<T>, mut is_over: impl FnMut(&T) -> bool) -> pfr_client::Result<T> {
    let (mut silences, mut wait) = (0, SOON);
    loop {
        match ask().await {
            Ok(seen) if is_over(&seen) => return Ok(seen),
            Ok(_) => silences = 0,
            Err(error @ (Error::NoAgent { .. } | Error::AgentGone { .. } | Error::AgentSilent { .. })) => {
                silences += 1;
                if silences > 3 {
                    return Err(error);
                }
            }
            Err(error) => return Err(error),
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LOOK);
    }
}

/// Begins a job and waits for its end; shows meanwhile how far it is.
pub async fn finished(context: &Context, agent: &AgentClient, request: &JobRequest) -> Result<Job, Failure> {
    let begun = agent.begin(request).await?;
    let (terminal, silent) = (stderr_width().is_some(), context.quiet || context.json);
    let cancel = context.suggest(&Suggestion::new("jobs").agent().arg("cancel").arg(&begun.id));
    context.when_interrupted(format!("job {} goes on without this command, and {cancel} ends it", begun.id));
    if !silent {
        eprintln!("job {}; it goes on without this command, and {cancel} ends it", begun.id);
    }
    let status = Mutex::new(Status::of_phase(request.kind()));
    let mut told = Instant::now();
    let is_over = |job: &Job| {
        if job.state.is_open() {
            *status.lock() = status_of(job);
            if !terminal && !silent && told.elapsed() >= TOLD {
                told = Instant::now();
                eprintln!("{}", line(job));
            }
        }
        !job.state.is_open()
    };
    let follow = follow(async || agent.job(&begun.id).await, is_over);
    Ok(watch(context.quiet, || status.lock().clone(), follow).await?)
}

fn status_of(job: &Job) -> Status {
    let kind = job.request.kind();
    let phase = match &job.note {
        Some(note) => format!("{kind}: {}", one_line(note)),
        None if job.bytes_total == 0 => format!("{kind}: looking for what there is to do"),
        None => kind.to_owned(),
    };
    Status { total: job.bytes_total, done: job.bytes_done, ..Status::of_phase(&phase) }
}

/// How far a job is, for a pipe.
fn line(job: &Job) -> String {
    let status = status_of(job);
    match status.total {
        0 => status.phase,
        total => format!("{}, {} of {}", status.phase, bytes(status.met()), bytes(total)),
    }
}

/// The failure of a command whose job did not do everything.
fn ended(job: &Job) -> Result<(), Failure> {
    let again = "run the same command again: it does only what is missing";
    match (job.state, &job.error) {
        (JobState::Planned | JobState::Running | JobState::Done, _) => Ok(()),
        (JobState::Failed, Some(problem)) => {
            let failed = job.warm.iter().flat_map(|warm| &warm.items).filter(|item| item.state == WarmState::Failed).count();
            let message = match failed {
                0 => said(problem),
                failed => format!("{} could not be pulled: {}", count(failed as u64, "snapshot"), said(problem)),
            };
            let hint = if is_unknown(problem.code) { nowhere(job, problem.code) } else { again.into() };
            Err(Failure::new(problem.code, message).hint(hint))
        }
        (state, _) => Err(Failure::new(ErrorCode::Unavailable, format!("the job was {}", state.name())).hint(again)),
    }
}

/// Where the agent looked for what it did not find.
fn nowhere(job: &Job, code: ErrorCode) -> Advice {
    let mut items = job.warm.iter().flat_map(|warm| &warm.items);
    let item = items.find(|item| item.problem.as_ref().is_some_and(|problem| problem.code == code));
    let reference = item.and_then(|item| item.reference.parse::<Reference>().ok());
    let Some(Reference { registry: Some(registry), repository, .. }) = reference else {
        return "the agent looked in its own registry, that of `pf-agent serve --registry`; a reference may begin with the address of another \
                one"
        .into();
    };
    let ls = Suggestion::new("ls");
    match code {
        ErrorCode::RepositoryUnknown => ls.arg("--registry").arg(registry).then(" lists the repositories there are"),
        _ => ls.arg(Reference { registry: Some(registry), repository, selector: None }).then(" lists its tags and snapshots"),
    }
}

/// An unknown job gets the command that lists the jobs.
fn unknown(error: Error) -> Failure {
    let is_unknown = error.code() == ErrorCode::NotFound;
    let failure = Failure::from(error);
    match is_unknown {
        true => failure.hint(Suggestion::new("jobs").agent().then(" lists the jobs")),
        false => failure,
    }
}

/// A refusal in a cell: each field that differs has a line of its own in it.
fn said(problem: &Problem) -> String {
    one_line(&problem.detail.replace("\n  ", "; "))
}

fn seconds(seconds: f64) -> String {
    duration(Duration::from_secs_f64(seconds.clamp(0.0, 1e9)))
}

/// The times of a plan: of the work itself, and of computing the tokens again.
pub fn times(eta: Option<f64>, tokens: u64, recompute: Option<f64>) -> String {
    let eta = eta.map_or_else(|| "time unknown".to_owned(), |eta| format!("about {}", seconds(eta)));
    let recompute = recompute.map_or_else(|| "time unknown".to_owned(), |time| format!("about {}", seconds(time)));
    format!("{eta}; otherwise {} to compute again, {recompute}", count(tokens, "token"))
}

fn print_warm(context: &mut Context, job: &Job) -> Result<(), Failure> {
    let empty = Warm::default();
    let warm = job.warm.as_ref().unwrap_or(&empty);
    if job.state.is_open() {
        return context.out.line(&job.id);
    }
    let mut table = Table::new([
        Column::left("SNAPSHOT").style(Style::Cyan),
        Column::right("TOKENS"),
        Column::right("TO FETCH"),
        Column::right("OF"),
        Column::left("RESULT"),
    ]);
    for item in &warm.items {
        let result = match (item.state, &item.problem) {
            (WarmState::Skipped, Some(problem)) => format!("left out: {}", said(problem)),
            (_, Some(problem)) => said(problem),
            (WarmState::Planned, None) if item.bytes == 0 => "here".to_owned(),
            (WarmState::Planned, None) => "planned".to_owned(),
            (WarmState::Done, None) => format!("here, {} received", bytes(item.bytes_received)),
            (WarmState::Running | WarmState::Skipped | WarmState::Failed, None) => "not finished".to_owned(),
        };
        let tokens = item.boundary.map_or_else(|| "-".to_owned(), number);
        table.row([one_line(&item.reference), tokens, bytes(item.bytes), bytes(item.bytes_total), result]);
    }
    context.out.table(&table)?;
    if context.quiet {
        return Ok(());
    }
    let times = times(warm.eta_seconds, warm.recompute_tokens, warm.recompute_seconds);
    match job.state {
        JobState::Planned => {
            context.out.note(&format!("{} to fetch, {times}", bytes(warm.bytes)))?;
            context.out.note("run it without --plan to do this")
        }
        _ => context.out.note(&format!("{} fetched", bytes(job.bytes_done))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job(state: &str) -> Job {
        serde_json::from_value(json!({
            "id": "1", "request": {"kind": "warm", "references": ["team/*"]}, "state": state, "started_at": 1,
            "bytes_done": 1 << 20, "bytes_total": 4 << 20, "note": "no\nanswer",
        }))
        .unwrap()
    }

    #[test]
    fn a_line_says_how_far_a_job_is_and_what_it_waits_for() {
        assert_eq!(line(&job("running")), "warm: no\\u{a}answer, 1.00 MiB of 4.00 MiB");
        let unknown = Job { bytes_total: 0, note: None, ..job("running") };
        assert_eq!(line(&unknown), "warm: looking for what there is to do");
        assert_eq!(what(&unknown), "team/*");
    }

    #[test]
    fn a_time_that_is_not_known_is_not_made_up() {
        assert_eq!(times(None, 7, None), "time unknown; otherwise 7 tokens to compute again, time unknown");
        assert_eq!(times(Some(2.0), 1, Some(30.0)), "about 2.00 s; otherwise 1 token to compute again, about 30.0 s");
    }

    #[test]
    fn a_job_that_did_not_do_everything_is_a_failure() {
        assert!(ended(&job("done")).is_ok() && ended(&job("running")).is_ok());
        assert_eq!(ended(&job("interrupted")).unwrap_err().exit(), 7);
        assert_eq!(ended(&job("cancelled")).unwrap_err().exit(), 7);
    }
}
