//! `pf drain`: everything on this host into the registry, with a plan before.

use crate::cli::args::DrainArgs;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration, number, one_line};
use crate::cli::output::paint::Style;
use crate::cli::output::stderr_width;
use crate::cli::output::table::{Column, Table};
use crate::cli::progress::{Standing, watch};
use crate::cli::suggest::Suggestion;
use parking_lot::Mutex;
use pfr_client::AgentClient;
use pfr_schema::agent::{Drain, DrainFailure, DrainRequest, PushJob, PushState};
use pfr_schema::{ErrorCode, Reference, RepositoryName};
use std::time::Duration;

/// How often a terminal shows how far the pushes are.
const SHOWN: Duration = Duration::from_secs(2);
/// How often a pipe gets a line about it.
const TOLD: Duration = Duration::from_secs(30);

pub async fn run(context: &mut Context, args: DrainArgs) -> Result<(), Failure> {
    let agent = context.agent(args.at.agent.as_deref())?;
    let request = DrainRequest { repository: args.repository.to_string(), plan_only: args.plan, wait_seconds: args.wait };
    let drain = drained(context, &agent, &args.repository, &request).await?;
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
                true => failure.hint(Suggestion::new("pushes").agent().then(" shows the pushes, which go on in the background")),
                false => failure.hint("run the same command again: it sends what is missing"),
            })
        }
        None => Ok(()),
    }
}

/// Drains, and shows meanwhile how far the pushes are: a drain may wait for a registry for a long
/// time.
async fn drained(
    context: &Context,
    agent: &AgentClient,
    repository: &RepositoryName,
    request: &DrainRequest,
) -> Result<Drain, pfr_client::Error> {
    let (terminal, silent) = (stderr_width().is_some(), context.quiet || context.json);
    let phase = Mutex::new("draining".to_owned());
    let tell = |text: String| match terminal {
        true => *phase.lock() = text,
        false if silent => {}
        false => eprintln!("{text}"),
    };
    let work = telling(agent.drain(request), agent, repository, if terminal { SHOWN } else { TOLD }, tell);
    watch(context.quiet, || Standing::of_phase(&phase.lock()), work).await
}

/// Waits for a drain, and tells again and again how far the pushes below a repository are.
async fn telling<T>(
    drain: impl Future<Output = T>,
    agent: &AgentClient,
    repository: &RepositoryName,
    every: Duration,
    tell: impl Fn(String),
) -> T {
    tokio::pin!(drain);
    loop {
        tokio::select! {
            done = &mut drain => return done,
            () = tokio::time::sleep(every) => {}
        }
        let pushes = tokio::select! {
            done = &mut drain => return done,
            pushes = agent.pushes() => pushes,
        };
        // The drain itself says what is wrong with an agent that does not answer.
        if let Some(text) = pushes.ok().and_then(|answer| waiting(&answer.pushes, repository)) {
            tell(text);
        }
    }
}

/// How many pushes below a repository have not ended, and why they wait; `None` if all have.
fn waiting(pushes: &[PushJob], repository: &RepositoryName) -> Option<String> {
    let below = format!("{repository}/");
    let is_below = |push: &PushJob| push.reference.parse::<Reference>().is_ok_and(|to| to.repository.as_str().starts_with(&below));
    let is_open = |push: &PushJob| matches!(push.state, PushState::Waiting | PushState::Running);
    let open: Vec<&PushJob> = pushes.iter().filter(|push| is_open(push) && is_below(push)).collect();
    let many = match open.len() {
        0 => return None,
        1 => "1 push has not ended".to_owned(),
        n => format!("{} pushes have not ended", number(n as u64)),
    };
    let reason = open.iter().find_map(|push| push.error.as_deref());
    Some(format!("draining: {many}{}", reason.map_or_else(String::new, |reason| format!(": {}", one_line(reason)))))
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

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use axum::{Json, Router};
    use pfr_schema::Digest;
    use pfr_schema::agent::Pushes;

    fn push(reference: &str, state: PushState, error: Option<&str>) -> PushJob {
        PushJob {
            id: "1".into(),
            digest: Digest::sha256(b"x"),
            reference: reference.into(),
            state,
            attempts: 1,
            error: error.map(Into::into),
            code: None,
            bytes_sent: 0,
        }
    }

    #[test]
    fn pushes_of_the_drain_that_have_not_ended_are_counted_with_the_reason() {
        let said = |pushes: &[PushJob]| waiting(pushes, &"team/x".parse().unwrap());
        let done = push("http://r:1/team/x/e:1", PushState::Done, None);
        let away = push("http://r:1/team/x/e:2", PushState::Waiting, Some("no\nanswer"));
        let sent = push("http://r:1/team/x/e:3", PushState::Running, None);
        let other = push("http://r:1/team/xy/e:1", PushState::Waiting, Some("other"));
        assert_eq!(said(&[done.clone(), other.clone()]), None);
        assert_eq!(said(&[done.clone(), sent.clone(), other]).unwrap(), "draining: 1 push has not ended");
        assert_eq!(said(&[done, sent, away]).unwrap(), "draining: 2 pushes have not ended: no\\u{a}answer");
    }

    #[tokio::test]
    async fn while_a_drain_waits_the_agent_is_asked_and_the_answer_told() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("agent.sock");
        let pushes = Pushes { pushes: vec![push("http://r:1/team/x/e:1", PushState::Waiting, Some("refused"))] };
        let routes = Router::new().route("/v1/pushes", get(async move || Json(pushes)));
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move { axum::serve(listener, routes).await });
        let agent = AgentClient::new(socket).unwrap();
        let (repository, (told, mut heard)) = ("team/x".parse().unwrap(), tokio::sync::mpsc::unbounded_channel());
        // This drain ends when something was told.
        let said = telling(heard.recv(), &agent, &repository, Duration::from_millis(1), |text| drop(told.send(text)));
        let said = tokio::time::timeout(Duration::from_secs(60), said).await.expect("it tells");
        assert_eq!(said.unwrap(), "draining: 1 push has not ended: refused");
    }
}
