//! `pf drain`: everything on this host into the registry, with a plan before.

use crate::cli::args::DrainArgs;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration, number, one_line};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::progress::{Standing, watch};
use pfr_schema::agent::{Drain, DrainFailure, DrainRequest};
use std::time::Duration;

pub async fn run(context: &mut Context, args: DrainArgs) -> Result<(), Failure> {
    let agent = context.agent(args.at.agent.as_deref())?;
    let request = DrainRequest { repository: args.repository.to_string(), plan_only: args.plan, wait_seconds: args.wait };
    let standing = || Standing::of_phase("draining");
    let drain = watch(context.quiet, standing, agent.drain(&request)).await?;
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
            Err(failure.hint("run the same command again: nothing is sent twice"))
        }
        None => Ok(()),
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
    let eta = drain.eta_seconds.map(|s| format!(", about {}", duration(Duration::from_secs_f64(s.max(0.0))))).unwrap_or_default();
    let cost = format!(
        "{}, {} at most{eta}; otherwise {} to compute again",
        count(drain.plan.len() as u64, "sequence"),
        bytes(drain.bytes),
        count(drain.recompute_tokens, "token")
    );
    context.out.note(&cost)?;
    if plan_only { context.out.note("run it without --plan to do this") } else { Ok(()) }
}
