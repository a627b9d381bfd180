//! `pf drain`: everything on this host into the registry, with a plan before.

use super::jobs::{finished, times};
use crate::cli::args::DrainArgs;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, number, one_line};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use pfr_schema::ErrorCode;
use pfr_schema::agent::{Drain, DrainFailure, DrainRequest, Job, JobRequest, JobState};

pub async fn run(context: &mut Context, args: DrainArgs) -> Result<(), Failure> {
    let agent = context.agent(args.at.agent.as_deref())?;
    let request = JobRequest::Drain(DrainRequest {
        repository: args.repository.to_string(),
        plan_only: args.plan,
        wait_seconds: args.wait,
        prefill_tokens_per_second: args.prefill_tokens_per_second,
    });
    let job = if args.plan { agent.begin(&request).await? } else { finished(context, &agent, &request).await? };
    let drain = result(job)?;
    if context.json {
        context.out.json(&drain)?;
    } else {
        print(context, &drain, args.plan)?;
    }
    match drain.failed.first() {
        Some(first) => {
            let engines = drain.failed.iter().filter(|failure| !is_planned(&drain, failure)).count();
            let (sequences, all) = (drain.failed.len() - engines, drain.plan.len());
            let sequences = (sequences > 0).then(|| format!("{sequences} of {all} sequences are still only on this host"));
            let engines = (engines > 0).then(|| format!("{} could not be asked for sequences", count(engines as u64, "engine")));
            let said: Vec<String> = sequences.into_iter().chain(engines).collect();
            let failure = Failure::new(first.problem.code, said.join(", and "));
            Err(match drain.failed.iter().any(|failure| failure.problem.code == ErrorCode::Timeout) {
                true => failure.hint(
                    Suggestion::new("pushes")
                        .agent()
                        .then(" shows the pushes, which go on in the background; the same command again captures what is not captured yet"),
                ),
                false => failure.hint("run the same command again: it sends what is missing"),
            })
        }
        None => Ok(()),
    }
}

/// What a job has done, if it came to its end.
fn result(job: Job) -> Result<Drain, Failure> {
    let again = "run the same command again: it sends what is missing";
    match (job.state, job.drain, job.error) {
        (JobState::Planned | JobState::Done | JobState::Failed, Some(drain), _) => Ok(drain),
        (_, _, Some(problem)) => Err(Failure::new(problem.code, one_line(&problem.detail)).hint(again)),
        (state, ..) => Err(Failure::new(ErrorCode::Unavailable, format!("the drain was {}", state.name())).hint(again)),
    }
}

/// Whether a sequence failed, and not an engine that could not be asked.
fn is_planned(drain: &Drain, failure: &DrainFailure) -> bool {
    drain.plan.iter().any(|item| item.engine == failure.engine && item.sequence == failure.sequence)
}

fn print(context: &mut Context, drain: &Drain, plan_only: bool) -> Result<(), Failure> {
    for failure in drain.failed.iter().filter(|failure| !is_planned(drain, failure)) {
        context.out.line(format!("{}: {}", one_line(&failure.engine), one_line(&failure.problem.detail)))?;
    }
    match (drain.plan.is_empty(), drain.failed.is_empty()) {
        (true, true) => return context.out.line("there is nothing on this host to drain"),
        (true, false) => return Ok(()),
        (false, _) => {}
    }
    let mut table = Table::new([
        Column::left("ENGINE").style(Style::Bold),
        Column::left("SEQUENCE"),
        Column::right("TOKENS"),
        Column::right("BYTES"),
        Column::left("TO").style(Style::Cyan),
        Column::left("RESULT"),
    ]);
    for item in &drain.plan {
        let done = drain.done.iter().find(|r| r.engine == item.engine && r.sequence == item.sequence);
        let failed = drain.failed.iter().find(|f| f.engine == item.engine && f.sequence == item.sequence);
        let result = match (done, failed) {
            (_, Some(failure)) => one_line(&failure.problem.detail),
            (Some(report), _) => format!("pushed, {} moved", bytes(report.bytes_moved)),
            _ => "planned".to_owned(),
        };
        table.row([
            one_line(&item.engine),
            one_line(&item.sequence),
            number(item.boundary),
            bytes(item.bytes),
            one_line(&item.reference),
            result,
        ]);
    }
    context.out.table(&table)?;
    let cost = format!(
        "{}, {} at most, {}",
        count(drain.plan.len() as u64, "sequence"),
        bytes(drain.bytes),
        times(drain.eta_seconds, drain.recompute_tokens, drain.recompute_seconds)
    );
    context.out.note(&cost)?;
    if plan_only { context.out.note("run it without --plan to do this") } else { Ok(()) }
}
