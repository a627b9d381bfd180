//! `pf tasks`: the background work of a registry.

use crate::cli::args::{TaskCommand, Tasks};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{age, duration, now_ms, one_line, until};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use pfr_client::Error;
use pfr_schema::ErrorCode;
use pfr_schema::api::{PauseRequest, TaskInfo, TaskList, TaskState};
use std::time::Duration;

pub async fn run(context: &mut Context, args: Tasks) -> Result<(), Failure> {
    let remote = context.remote(None)?;
    let task = match args.command {
        None => {
            let list = remote.tasks().await?;
            return print(context, &list);
        }
        Some(TaskCommand::Pause { task, time }) => {
            let request = PauseRequest { seconds: time.0.as_secs() };
            remote.pause_task(&task, &request).await
        }
        Some(TaskCommand::Resume { task }) => remote.resume_task(&task).await,
    };
    let task = task.map_err(unknown)?;
    if context.json {
        return context.out.json(&task);
    }
    context.out.line(said(&task, now_ms()))
}

/// What a pause, or the end of one, made of a task.
fn said(task: &TaskInfo, now: u64) -> String {
    let name = &task.name;
    match task.pause_ends_at {
        Some(end) => format!("{name} is paused until {}", until(end, now)),
        None => format!("{name} is resumed{}", next(task, now).map_or(String::new(), |next| format!("; next run: {next}"))),
    }
}

/// An unknown task gets the command that lists the tasks.
fn unknown(error: Error) -> Failure {
    let is_unknown = error.code() == ErrorCode::NotFound;
    let failure = Failure::from(error);
    match is_unknown {
        true => failure.hint(Suggestion::new("tasks").then(" lists the tasks")),
        false => failure,
    }
}

fn print(context: &mut Context, list: &TaskList) -> Result<(), Failure> {
    if context.json {
        return context.out.json(list);
    }
    let now = now_ms();
    let mut table = Table::new([
        Column::left("TASK").style(Style::Bold),
        Column::left("STATE"),
        Column::right("EVERY"),
        Column::left("SUCCEEDED"),
        Column::right("TOOK").optional(),
        Column::left("NEXT RUN"),
        Column::left("ERROR").style(Style::Yellow).optional(),
    ]);
    for task in &list.tasks {
        table.row(row(task, now));
    }
    context.out.table(&table)
}

fn row(task: &TaskInfo, now: u64) -> [String; 7] {
    [
        task.name.clone(),
        state(task.state).to_owned(),
        every(task.interval_seconds),
        task.succeeded_at.map_or_else(|| "not yet".to_owned(), |at| age(at, now)),
        task.last_seconds.map_or_else(String::new, |seconds| duration(Duration::from_secs_f64(seconds.clamp(0.0, 1e9)))),
        next(task, now).unwrap_or_default(),
        task.error.as_deref().map(one_line).unwrap_or_default(),
    ]
}

/// An interval in the largest unit that divides it.
pub(super) fn every(seconds: u64) -> String {
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    match units.into_iter().find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{} {name}", seconds / unit),
        None => "never".to_owned(),
    }
}

fn state(state: TaskState) -> &'static str {
    match state {
        TaskState::Idle => "idle",
        TaskState::Running => "running",
        TaskState::Paused => "paused",
        TaskState::Off => "off",
    }
}

/// When it runs next.
fn next(task: &TaskInfo, now: u64) -> Option<String> {
    match task.pause_ends_at {
        Some(end) => Some(format!("after {}", until(end, now))),
        None => task.next_run_at.map(|at| if at > now { until(at, now) } else { "now".to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(name: &str, state: TaskState) -> TaskInfo {
        TaskInfo {
            name: name.to_owned(),
            state,
            interval_seconds: 300,
            runs: 3,
            errors: 1,
            busy_seconds: 1.5,
            started_at: Some(940_000),
            succeeded_at: Some(940_000),
            last_seconds: Some(0.5),
            error: None,
            next_run_at: Some(1_060_000),
            pause_ends_at: None,
        }
    }

    #[test]
    fn a_row_says_when_a_task_ran_when_it_runs_and_what_went_wrong() {
        let now = 1_000_000;
        let never =
            TaskInfo { interval_seconds: 0, succeeded_at: None, last_seconds: None, next_run_at: None, ..task("scrub", TaskState::Off) };
        let failed = TaskInfo { error: Some("storage is away\ntry again".into()), ..task("compaction", TaskState::Idle) };
        let paused = TaskInfo { pause_ends_at: Some(1_120_000), ..task("collection", TaskState::Paused) };
        let rows: Vec<String> = [failed, paused, never].iter().map(|task| row(task, now).join(" | ")).collect();
        assert!(rows[0].starts_with("compaction | idle | 5 min") && rows[0].ends_with(&one_line("storage is away\ntry again")), "{rows:?}");
        assert!(rows[1].contains("paused") && rows[1].contains("after 00:18 UTC, in 2 min"), "{rows:?}");
        assert_eq!(rows[2], "scrub | off | never | not yet |  |  | ");
    }

    #[test]
    fn a_task_is_paused_until_or_resumed() {
        let now = 1_000_000;
        let paused = TaskInfo { pause_ends_at: Some(1_120_000), ..task("collection", TaskState::Paused) };
        assert_eq!(said(&paused, now), "collection is paused until 00:18 UTC, in 2 min");
        let due = TaskInfo { next_run_at: Some(now), ..task("collection", TaskState::Idle) };
        assert_eq!(said(&due, now), "collection is resumed; next run: now");
        let off = TaskInfo { next_run_at: None, ..task("scrub", TaskState::Off) };
        assert_eq!(said(&off, now), "scrub is resumed");
    }
}
