//! The list of runs of collection.

use super::arguments::{cursor, one_more, paged};
use super::sql::values;
use super::tx::{Outcome, Tx};
use super::{GC_RUNS, GcRun, GcTrigger, Page, events};
use pfr_schema::api::GcReport;

fn trigger_word(trigger: GcTrigger) -> &'static str {
    match trigger {
        GcTrigger::Schedule => "schedule",
        GcTrigger::Command => "command",
        GcTrigger::Request => "request",
    }
}

pub(super) async fn record(tx: &mut dyn Tx, run: &GcRun) -> Outcome<()> {
    let insert = "INSERT INTO gc_runs (id, cause, started_at, finished_at, report) VALUES ($1, $2, $3, $4, $5)
                  ON CONFLICT (id) DO UPDATE SET finished_at = excluded.finished_at, report = excluded.report";
    tx.execute(insert, values![&run.id, trigger_word(run.trigger), run.started_at, run.finished_at, &run.report]).await?;
    let forget = "DELETE FROM gc_runs WHERE id <= (SELECT id FROM gc_runs ORDER BY id DESC LIMIT 1 OFFSET $1)";
    tx.execute(forget, values![GC_RUNS as u64]).await?;
    if let Some(report) = run.finished_at.and_then(|_| serde_json::from_str::<GcReport>(&run.report).ok()).filter(did_something) {
        events::note_collection(tx, &report).await?;
    }
    Ok(())
}

/// Whether a run is an event for those that follow what the registry holds.
fn did_something(report: &GcReport) -> bool {
    report.released + report.unclaimed + report.packs_deleted > 0
}

pub(super) async fn list(tx: &mut dyn Tx, after: Option<&str>, limit: usize) -> Outcome<Page<GcRun>> {
    // Ids are UUIDv7: in order of time.
    let find = "SELECT id, cause, started_at, finished_at, report FROM gc_runs WHERE id < $1 ORDER BY id DESC LIMIT $2";
    let rows: Vec<(String, String, u64, Option<u64>, String)> = tx.query(find, values![cursor(after, "~")?, one_more(limit)]).await?;
    let run = |(id, cause, started_at, finished_at, report): (String, String, _, _, _)| {
        let trigger = match cause.as_str() {
            "schedule" => GcTrigger::Schedule,
            "command" => GcTrigger::Command,
            _ => GcTrigger::Request,
        };
        GcRun { id, trigger, started_at, finished_at, report }
    };
    Ok(paged(rows.into_iter().map(run).collect(), limit, |run| run.id.clone()))
}
