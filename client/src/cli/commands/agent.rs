//! `pf engines`, `pf sequences`, `pf restores` and `pf pushes`: what the capture agent of this host
//! has in hand, and what it did.

use crate::cli::args::{AgentAt, EnginesArgs, RestoresArgs, SequencesArgs};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::Out;
use crate::cli::output::human::{age, bytes, clip, count, duration, now_ms, number, one_line};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use crate::cli::usage::has_flag;
use pfr_client::Error;
use pfr_schema::agent::{EngineState, Engines, PushState, RestoreOutcome, RestoreRecord, Restores, SaveState, Sequences};
use pfr_schema::api::{AgentEngine, AgentEngineState, AgentInfo, AgentList};
use pfr_schema::engine::{SequenceState, Taking};
use pfr_schema::{AgentName, ErrorCode};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Duration;

/// Columns of the error of a restore.
const ERROR: usize = 100;

/// `pf engines`.
pub async fn engines(context: &mut Context, args: EnginesArgs) -> Result<(), Failure> {
    if args.fleet {
        // Not for clap: there a socket in the environment would be refused, too.
        if args.at.agent.is_some() && has_flag(std::env::args_os(), "--agent") {
            let message = "--agent cannot be used with --fleet: the registry is asked, and no agent";
            return Err(Failure::usage(message).hint("leave out --agent; --registry says which registry"));
        }
        return match &args.forget[..] {
            [] => fleet(context).await,
            agents => forget(context, agents).await,
        };
    }
    let answer = context.agent(args.at.agent.as_deref())?.engines().await?;
    if context.json {
        return context.out.json(&answer);
    }
    if answer.engines.is_empty() {
        return context.out.line("no engine is registered with the agent now");
    }
    print_engines(&mut context.out, &answer)
}

/// `pf engines --fleet`: what the agents of all hosts reported last.
async fn fleet(context: &mut Context) -> Result<(), Failure> {
    let agents = context.remote(None)?.all_agents().await?;
    if context.json {
        return context.out.json(&AgentList { agents, next: None });
    }
    if agents.is_empty() {
        return context.out.line("no agent has reported to the registry within a day");
    }
    let mut table = Table::new([
        Column::left("HOST").style(Style::Bold),
        Column::left("ENGINE"),
        Column::left("STATE"),
        Column::left("MODEL").optional(),
        Column::right("SNAPSHOTS"),
        Column::right("RESTORES"),
        Column::left("SEEN"),
    ]);
    let now = now_ms();
    for agent in &agents {
        if agent.report.engines.is_empty() {
            table.row(reported(agent, None, now));
        }
        for engine in &agent.report.engines {
            table.row(reported(agent, Some(engine), now));
        }
    }
    context.out.table(&table)
}

/// `pf engines --fleet --forget`: deletes the last reports of agents, and reports each at once.
/// After a failure the rest is left.
async fn forget(context: &mut Context, agents: &[AgentName]) -> Result<(), Failure> {
    let remote = context.remote(None)?;
    let (mut forgotten, mut result) = (Vec::new(), Ok(()));
    for name in agents {
        result = remote.forget_agent(name).await.map_err(unknown);
        if result.is_err() {
            break;
        }
        forgotten.push(name);
        if !context.json {
            context.out.line(format!("forgot {name}"))?;
        }
    }
    if context.json {
        context.out.json(&json!({"forgotten": forgotten}))?;
    }
    result.map_err(|failure| match forgotten.len() {
        0 => failure,
        done => failure.context(&format!("{} forgotten, then", count(done as u64, "agent"))),
    })
}

/// An unknown agent gets the command that lists the agents.
fn unknown(error: Error) -> Failure {
    let is_unknown = error.code() == ErrorCode::NotFound;
    let failure = Failure::from(error);
    match is_unknown {
        true => failure.hint(Suggestion::new("engines").arg("--fleet").then(" lists the hosts of the agents")),
        false => failure,
    }
}

/// The row of an engine, or of a host without any.
fn reported(agent: &AgentInfo, engine: Option<&AgentEngine>, now: u64) -> [String; 7] {
    let seen = age(agent.seen_at, now);
    let seen = if agent.report.stopped { format!("stopped {seen}") } else { seen };
    let host = one_line(agent.name.as_str());
    let none = || "-".to_owned();
    let Some(engine) = engine else { return [host, none(), none(), String::new(), none(), none(), seen] };
    let state = match engine.state {
        // The report says what was.
        _ if agent.is_gone() => "not known",
        AgentEngineState::Ready => "ready",
        AgentEngineState::Busy => "busy",
        AgentEngineState::Incomplete => "incomplete",
    };
    let state = match engine.note.as_deref().filter(|_| !agent.is_gone()) {
        Some(note) => one_line(&format!("{state}: {note}")),
        None => state.to_owned(),
    };
    let model = one_line(engine.model.as_deref().unwrap_or_default());
    [host, one_line(&engine.engine), state, model, number(engine.snapshots), number(engine.restores), seen]
}

/// Writes the table of engines, and what lies ready for those whose requests take it.
pub fn print_engines(out: &mut Out, answer: &Engines) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("ENGINE").style(Style::Bold),
        Column::left("STATE"),
        Column::right("RANKS"),
        Column::left("CACHE GROUPS").optional(),
        Column::right("KV MEMORY"),
        Column::right("SNAPSHOTS"),
        Column::right("RESTORES"),
    ]);
    for e in &answer.engines {
        let state = match &e.state {
            EngineState::Ready {} => "ready".to_owned(),
            EngineState::Busy { with } => format!("busy: {with}"),
            EngineState::Incomplete { missing } => format!("incomplete: {missing}"),
        };
        table.row([
            one_line(&e.engine),
            one_line(&state),
            number(e.world.into()),
            one_line(&e.groups.join(", ")),
            bytes(e.mapped_bytes),
            number(e.snapshots),
            number(e.restores),
        ]);
    }
    out.table(&table)?;
    print_staged(out, answer)?;
    print_turns(out, answer)
}

/// Writes what became of turns: what automatic mode did, and refused saves.
fn print_turns(out: &mut Out, answer: &Engines) -> Result<(), Failure> {
    for e in &answer.engines {
        let mut counts: BTreeMap<Taking, u64> = BTreeMap::new();
        for (what, count) in e.staged.iter().flat_map(|ready| &ready.outcomes).chain(&e.outcomes) {
            if what.is_automatic() {
                *counts.entry(*what).or_default() += count;
            }
        }
        if !counts.is_empty() {
            let counts: Vec<String> = counts.iter().map(|(what, count)| format!("{} {}", number(*count), what.name())).collect();
            out.line(format!("turns of {}: {}", one_line(&e.engine), counts.join(", ")))?;
        }
    }
    Ok(())
}

/// Writes which snapshots lie ready, how many requests took each, and why others did not.
fn print_staged(out: &mut Out, answer: &Engines) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("ENGINE").style(Style::Bold),
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::right("TOKENS"),
        Column::left("STATE"),
        Column::right("TAKEN"),
        Column::left("NOT TAKEN"),
    ]);
    let mut any = false;
    for e in &answer.engines {
        for ready in &e.staged {
            any = true;
            let state = if ready.ready { "ready" } else { "being verified" };
            let (taken, not) = outcomes(&ready.outcomes);
            table.row([one_line(&e.engine), ready.digest.short(), number(ready.boundary), state.to_owned(), number(taken), not]);
        }
        if e.outcomes.keys().any(|what| !what.is_automatic()) {
            any = true;
            let (taken, not) = outcomes(&e.outcomes);
            table.row([one_line(&e.engine), "-".to_owned(), "-".to_owned(), "not matched".to_owned(), number(taken), not]);
        }
    }
    if !any {
        return Ok(());
    }
    out.line("")?;
    out.table(&table)
}

/// The number of requests that took a state, and the others by reason.
fn outcomes(counts: &BTreeMap<Taking, u64>) -> (u64, String) {
    let taken = counts.iter().filter(|(what, _)| what.is_taken()).map(|(_, count)| count).sum();
    let not: Vec<String> =
        counts.iter().filter(|(what, _)| what.is_notable()).map(|(what, count)| format!("{} {}", number(*count), what.name())).collect();
    (taken, if not.is_empty() { "-".to_owned() } else { not.join(", ") })
}

/// `pf sequences`.
pub async fn sequences(context: &mut Context, args: SequencesArgs) -> Result<(), Failure> {
    let answer = context.agent(args.at.agent.as_deref())?.sequences(&args.engine).await?;
    if context.json {
        return context.out.json(&answer);
    }
    if answer.sequences.is_empty() && answer.saves.is_empty() {
        return context.out.line("the engine has no sequence to capture now");
    }
    print_sequences(&mut context.out, &answer)
}

/// Writes the table of sequences, and the saves that requests asked for.
pub fn print_sequences(out: &mut Out, answer: &Sequences) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("SEQUENCE").style(Style::Bold),
        Column::left("NAME"),
        Column::left("STATE"),
        Column::right("TOKENS"),
        Column::right("WITH STATE"),
    ]);
    for s in &answer.sequences {
        let state = match (s.state, s.kept_seconds) {
            (SequenceState::Running, _) => "running".to_owned(),
            (SequenceState::Ended, None) => "ended".to_owned(),
            (SequenceState::Ended, Some(left)) => format!("ended, kept for {}", duration(Duration::from_secs_f64(left.clamp(0.0, 1e9)))),
        };
        let name = one_line(s.name.as_deref().unwrap_or("-"));
        table.row([one_line(&s.id), name, state, number(s.tokens), number(s.boundary)]);
    }
    if !answer.sequences.is_empty() {
        out.table(&table)?;
    }
    if answer.saves.is_empty() {
        return Ok(());
    }
    let mut table = Table::new([
        Column::left("SAVED AS").style(Style::Cyan),
        Column::left("SEQUENCE"),
        Column::left("STATE"),
        Column::right("TOKENS"),
        Column::left("SNAPSHOT").style(Style::Yellow),
        Column::left("ERROR").optional(),
    ]);
    for s in &answer.saves {
        let state = match s.state {
            SaveState::Pending => "pending",
            SaveState::Saved => "saved",
            SaveState::Failed => "failed",
        };
        let (tokens, digest) = (s.boundary.map_or_else(|| "-".to_owned(), number), s.digest.map_or_else(|| "-".to_owned(), |d| d.short()));
        let error = one_line(s.error.as_deref().unwrap_or_default());
        table.row([one_line(&s.reference), one_line(&s.sequence), state.to_owned(), tokens, digest, error]);
    }
    out.line("")?;
    out.table(&table)
}

/// `pf restores`.
pub async fn restores(context: &mut Context, args: RestoresArgs) -> Result<(), Failure> {
    let answer = context.agent(args.at.agent.as_deref())?.restores(args.engine.as_deref(), args.limit).await?;
    if context.json {
        return context.out.json(&answer);
    }
    if answer.restores.is_empty() {
        return context.out.line("the agent remembers no restore");
    }
    print_restores(&mut context.out, &answer)
}

/// Writes the table of restores, the newest last.
fn print_restores(out: &mut Out, answer: &Restores) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("WHEN"),
        Column::left("ENGINE").style(Style::Bold),
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("OUTCOME"),
        Column::left("FOR").optional(),
        Column::right("TOKENS").optional(),
        Column::right("KEPT").optional(),
        Column::right("FILLED").optional(),
        Column::right("WRITTEN").optional(),
        Column::right("TIME").optional(),
        Column::left("REFERENCE").style(Style::Cyan).optional(),
    ]);
    let now = now_ms();
    let unless_none = |count: u64, text: fn(u64) -> String| if count == 0 { String::new() } else { text(count) };
    for record in answer.restores.iter().rev() {
        table.row([
            age(record.noted_at, now),
            engine_of(record),
            record.digest.map_or_else(|| "-".to_owned(), |digest| digest.short()),
            one_line(&outcome(record)),
            one_line(&taker(record)),
            record.position.map_or_else(String::new, number),
            unless_none(record.pages_kept, number),
            unless_none(record.pages_filled, number),
            unless_none(record.bytes_written, bytes),
            record.seconds.map_or_else(String::new, |seconds| duration(Duration::from_secs_f64(seconds.clamp(0.0, 1e9)))),
            one_line(record.reference.as_deref().unwrap_or_default()),
        ]);
    }
    out.table(&table)
}

/// The engine of a restore, and whether it has left.
fn engine_of(record: &RestoreRecord) -> String {
    let engine = one_line(&record.engine);
    if record.gone { format!("{engine} (gone)") } else { engine }
}

/// What became of a restore, and why.
fn outcome(record: &RestoreRecord) -> String {
    let mut said = match record.outcome {
        RestoreOutcome::Ready => "ready",
        RestoreOutcome::Filled => "filled",
        RestoreOutcome::Restored => "restored",
        RestoreOutcome::Partly => "taken in part",
        RestoreOutcome::NotTaken => "not taken",
        RestoreOutcome::Failed => "failed",
    }
    .to_owned();
    if let Some(reason) = record.reason {
        said += &format!(": {}", reason.name());
    }
    if let Some(error) = &record.error {
        // Some have several lines: what differs, and what was expected. `--json` has more of them.
        said += &format!(": {}", clip(error.lines().next().unwrap_or_default(), ERROR));
    }
    said
}

/// The sequence or the request that a restore was for.
fn taker(record: &RestoreRecord) -> String {
    match (record.request.as_ref().or(record.sequence.as_ref()), record.requests) {
        (Some(name), _) => name.clone(),
        (None, 0) => String::new(),
        (None, requests) => count(requests, "request"),
    }
}

/// `pf pushes`.
pub async fn pushes(context: &mut Context, at: AgentAt) -> Result<(), Failure> {
    let answer = context.agent(at.agent.as_deref())?.pushes().await?;
    if context.json {
        return context.out.json(&answer);
    }
    if answer.pushes.is_empty() {
        return context.out.line("the agent has nothing to push");
    }
    let mut table = Table::new([
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("TO").style(Style::Cyan),
        Column::left("STATE"),
        Column::right("TRIES"),
        Column::right("SENT"),
        Column::left("ERROR").optional(),
    ]);
    for p in &answer.pushes {
        let state = match p.state {
            PushState::Waiting => "waiting",
            PushState::Running => "running",
            PushState::Done => "done",
            PushState::Failed => "failed",
        };
        let error = one_line(p.error.as_deref().unwrap_or_default());
        table.row([p.digest.short(), one_line(&p.reference), state.to_owned(), number(p.attempts.into()), bytes(p.bytes_sent), error]);
    }
    context.out.table(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restore_says_what_became_of_it_for_whom_and_why() {
        let record = |fields: serde_json::Value| {
            let mut record = serde_json::json!({"engine": "e", "noted_at": 1, "outcome": "restored"});
            record.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let record: RestoreRecord = serde_json::from_value(record).unwrap();
            assert_eq!(engine_of(&record), if record.gone { "e (gone)" } else { "e" });
            (outcome(&record), taker(&record))
        };
        for (fields, said, who) in [
            (serde_json::json!({"sequence": "seq-1"}), "restored", "seq-1"),
            (serde_json::json!({"gone": true}), "restored", ""),
            (serde_json::json!({"outcome": "partly", "request": "r-1", "requests": 1}), "taken in part", "r-1"),
            (serde_json::json!({"outcome": "not-taken", "reason": "fill-late", "requests": 2}), "not taken: fill-late", "2 requests"),
            (
                serde_json::json!({"outcome": "not-taken", "reason": "fill-failed", "error": "no", "request": "r-2"}),
                "not taken: fill-failed: no",
                "r-2",
            ),
            (serde_json::json!({"outcome": "failed", "error": "no such tag", "code": "tag_unknown"}), "failed: no such tag", ""),
        ] {
            assert_eq!(record(fields), (said.to_owned(), who.to_owned()));
        }
    }

    #[test]
    fn requests_that_took_nothing_are_listed_by_reason() {
        let counts =
            [(Taking::Taken, 2), (Taking::TakenOnKept, 9), (Taking::FillLate, 1), (Taking::AgentSilent, 1200), (Taking::LogitsEqual, 11)];
        assert_eq!(outcomes(&counts.into()), (11, "1,200 agent-silent, 1 fill-late".to_owned()));
        assert_eq!(outcomes(&BTreeMap::new()), (0, "-".to_owned()));
    }
}
