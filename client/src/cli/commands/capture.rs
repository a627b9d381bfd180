//! `pf snapshot` and `pf restore`: what the capture agent does for one sequence.

use super::jobs::{TOLD, follow};
use crate::cli::args::{Restore, Snapshot, WhenToPush};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration, number, one_line};
use crate::cli::output::stderr_width;
use crate::cli::progress::{Status, watch};
use crate::cli::suggest::Suggestion;
use parking_lot::Mutex;
use pfr_client::{AgentClient, Error};
use pfr_schema::agent::{
    Push, PushJob, PushState, Pushes, Resharded, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, Stored,
};
use pfr_schema::{ErrorCode, Selector};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// `pf snapshot`.
pub async fn snapshot(context: &mut Context, args: Snapshot) -> Result<(), Failure> {
    let agent = context.agent(args.at.agent.as_deref())?;
    let request = SnapshotRequest {
        sequence: args.sequence,
        reference: args.target.map_or_else(|| format!("engines/{}", args.engine.to_ascii_lowercase()), |target| target.to_string()),
        agent: args.agent_id,
        labels: args.label.into_iter().map(|label| (label.0, label.1)).collect(),
        exact: args.exact,
        push: match args.push {
            // The answer comes when the snapshot is made. Its push is waited for below, where the
            // user sees what keeps it.
            WhenToPush::Background | WhenToPush::Wait => Push::Background,
            WhenToPush::Never => Push::Never,
        },
        oracle: args.logits,
        parent: args.parent,
    };
    let status = || Status::of_phase("capturing");
    let mut report = watch(context.quiet, status, agent.snapshot(&args.engine, &request)).await.map_err(not_captured)?;
    if !context.json && !context.quiet {
        for line in describe_snapshot(&report) {
            context.out.note(&line)?;
        }
        context.out.flush()?;
    }
    let waits = args.push == WhenToPush::Wait;
    if waits && let Some(begun) = report.push.take() {
        report.push = Some(pushed(context, &agent, &report, begun).await?);
    }
    let failed = report.push.as_ref().filter(|push| waits && push.state != PushState::Done);
    let failure = failed.map(|push| {
        let reason = push.error.as_deref().unwrap_or("no reason was given");
        let message = format!("{} is in the agent's store, but was not pushed: {}", report.reference, one_line(reason));
        Failure::new(push.code.unwrap_or(ErrorCode::Unavailable), message).hint(pushes().then(" shows whether a later attempt succeeds"))
    });
    context.report(&report, report.push.as_ref().map(describe_push), &report.digest.to_string())?;
    failure.map_or(Ok(()), Err)
}

/// The command that lists the pushes of the agent.
fn pushes() -> Suggestion {
    Suggestion::new("pushes").agent()
}

/// Waits until the push of a snapshot has ended, or needs a user. Shows meanwhile what keeps it: in
/// the bar, and in a pipe when that is known and every 30 seconds.
async fn pushed(context: &Context, agent: &AgentClient, report: &SnapshotReport, begun: PushJob) -> Result<PushJob, Failure> {
    let is_over = |push: &PushJob| push.is_finished() || push.needs_user();
    if is_over(&begun) {
        return Ok(begun);
    }
    let here = format!("{} is in the agent's store as {}", report.reference, report.digest);
    let pushes = context.suggest(&pushes());
    context.when_interrupted(format!("{here}, and its push goes on without this command: {pushes} shows it"));
    let (terminal, silent) = (stderr_width().is_some(), context.quiet || context.json);
    let status = Mutex::new(Status::of_phase("pushing"));
    let (mut seen, mut told) = (begun.clone(), None::<Instant>);
    let follow = follow(
        async || agent.pushes().await,
        |answer: &Pushes| {
            // A push that is not listed any more has ended long ago, or was dropped.
            let Some(push) = answer.pushes.iter().find(|push| push.id == begun.id) else { return true };
            seen.clone_from(push);
            if let Some(error) = push.error.as_deref().filter(|_| !is_over(push)) {
                let keeps = format!("the push is queued, and tried again: {}", one_line(error));
                *status.lock() = Status::of_phase(&keeps);
                if !terminal && !silent && told.is_none_or(|told| told.elapsed() >= TOLD) {
                    told = Some(Instant::now());
                    eprintln!("{here}; {pushes} shows its push; {keeps}");
                }
            }
            is_over(push)
        },
    );
    watch(context.quiet, || status.lock().clone(), follow).await?;
    Ok(seen)
}

/// `pf restore`.
pub async fn restore(context: &mut Context, args: Restore) -> Result<(), Failure> {
    let agent = context.agent(args.at.agent.as_deref())?;
    let Restore { local, no_store, sequence, reshard, position, .. } = args;
    let request = RestoreRequest { reference: args.reference.to_string(), local, no_store, sequence, reshard, position };
    let by_digest = matches!(args.reference.selector, Some(Selector::Digest(_) | Selector::Prefix(_)));
    let status = || Status::of_phase("restoring");
    let restored = watch(context.quiet, status, agent.restore(&args.engine, &request)).await;
    let report = restored.map_err(|error| not_restored(error, &request, by_digest))?;
    let last = report.sequence.clone().unwrap_or_else(|| report.digest.to_string());
    context.report(&report, describe_restore(&report), &last)
}

pub fn is_unknown(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::RepositoryUnknown | ErrorCode::SnapshotUnknown | ErrorCode::TagUnknown)
}

/// The failure of a capture. Of what a request names, only the parent must exist.
fn not_captured(error: Error) -> Failure {
    match error.code() {
        code if is_unknown(code) => Failure::from(error).hint("--parent takes a digest, or a reference in the agent's store"),
        _ => error.into(),
    }
}

/// The failure of a restore, with the places where the agent looked.
fn not_restored(error: Error, request: &RestoreRequest, by_digest: bool) -> Failure {
    let code = error.code();
    let failure = Failure::from(error);
    match request.position {
        Some(position) if code == ErrorCode::BoundaryMismatch => {
            failure.context(&format!("the snapshot cannot be resumed at --position {position}"))
        }
        _ if is_unknown(code) => failure.hint(match (request.local, by_digest) {
            (true, _) => "with --local the agent looks in its own store only",
            (false, true) => "the agent looked in its own store and in the registry",
            (false, false) => "the agent looked in the registry only; restore it with --local if it is only in the agent's store",
        }),
        _ => failure,
    }
}

/// Below a second in milliseconds: an engine pauses for that long.
fn seconds(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.1} ms", seconds.max(0.0) * 1e3) } else { duration(Duration::from_secs_f64(seconds)) }
}

/// Lines for users about a capture, without its push.
pub fn describe_snapshot(report: &SnapshotReport) -> Vec<String> {
    let exact = match (report.exactness, report.oracle) {
        (pfr_schema::snapshot::Exactness::BitExact, true) => "bit-exact, with the logits of the next step".to_owned(),
        (pfr_schema::snapshot::Exactness::BitExact, false) => "bit-exact".to_owned(),
        (pfr_schema::snapshot::Exactness::NearExact, _) if report.unrecorded.is_empty() => "near-exact".to_owned(),
        (pfr_schema::snapshot::Exactness::NearExact, _) => format!("near-exact, not recorded: {}", one_line(&report.unrecorded.join(", "))),
    };
    let mut new = format!("{} new", bytes(report.bytes_new));
    // An agent of an older version does not say how many bytes it stored.
    if (1..report.bytes_new - report.bytes_new / 100).contains(&report.bytes_stored) {
        new += &format!(", {} stored", bytes(report.bytes_stored));
    }
    vec![
        format!("{} of {} at token {}, {exact}", report.reference, one_line(&report.sequence), number(report.boundary)),
        format!(
            "{}, {} resident: {} copied from the engine, {new}",
            count(report.pages, "page"),
            bytes(report.bytes_resident),
            bytes(report.bytes_moved)
        ),
        match report.pause_seconds {
            0.0 => format!("the engine was not paused, {} in all", seconds(report.total_seconds)),
            paused => format!("the engine paused for {}, {} in all", seconds(paused), seconds(report.total_seconds)),
        },
    ]
}

/// A line for users about the push of a capture.
fn describe_push(push: &PushJob) -> String {
    match push.state {
        PushState::Done => format!("pushed, {} sent", bytes(push.bytes_sent)),
        PushState::Waiting | PushState::Running => "the push runs in the background".to_owned(),
        PushState::Failed => "the push was refused".to_owned(),
    }
}

/// Lines for users about a restore.
pub fn describe_restore(report: &RestoreReport) -> Vec<String> {
    let outcome = report.sequence.as_ref().map_or_else(
        || "proven and ready: the next request with these tokens resumes".to_owned(),
        |sequence| format!("runs as {}", one_line(sequence)),
    );
    let proofs = match (report.values_computed + report.values_attested, report.oracle) {
        (0, true) => "every page hashed in the engine's memory, the logits of the next step equal".to_owned(),
        (0, false) => "every page hashed".to_owned(),
        (n, oracle) => {
            format!("every page and {} hashed{}", count(n, "state tensor"), if oracle { ", the logits of the next step equal" } else { "" })
        }
    };
    let mut lines = vec![
        format!("{} at token {}: {outcome}", report.digest, number(report.boundary)),
        format!(
            "{}, {} pulled, {} written; {proofs}",
            count(report.pages, "page"),
            bytes(report.bytes_pulled),
            bytes(report.bytes_written)
        ),
    ];
    lines.extend(describe_conversions(report));
    lines.extend(report.resharded.as_ref().map(|Resharded { differs, from, to, pages, states }| {
        let (differs, pages, states) = (one_line(&differs.join(", ")), count(*pages, "page"), count(*states, "state tensor"));
        format!("cut anew from {from} to {to} ranks ({differs}): {pages}, {states}; values equal, the next logits not compared")
    }));
    lines.extend(match report.in_store {
        Stored::Here => None,
        Stored::Behind => Some("the agent's store takes the snapshot in the background".to_owned()),
        Stored::Not => Some("nothing was added to the agent's store".to_owned()),
    });
    lines.push(format!("{} in all", seconds(report.total_seconds)));
    lines
}

/// A line for each pair of forms.
fn describe_conversions(report: &RestoreReport) -> impl Iterator<Item = String> {
    let mut pairs: BTreeMap<(String, String), u64> = BTreeMap::new();
    for converted in &report.converted {
        *pairs.entry((converted.from.to_string(), converted.to.to_string())).or_default() += 1;
    }
    pairs.into_iter().map(|((from, to), tensors)| {
        one_line(&format!("{} converted from {from} to {to}, value hash equal", count(tensors, "state tensor")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_restore_names_the_forms_that_it_converted_between() {
        let form = |tag: &str, dtype: &str, strides: [i64; 2], bytes: u64| json!({"storage_dtype": dtype, "layout": {"tag": tag, "strides": strides, "offset": 0}, "bytes": bytes});
        let converted = |state: &str| json!({"state": state, "rank": 0, "from": form("row-major", "f32", [3, 1], 24), "to": form("col\nmajor", "bf16", [1, 2], 12)});
        let report = json!({
            "digest": format!("sha256:{}", "ab".repeat(32)), "engine": "e", "boundary": 7, "tokens": 8, "pages": 1, "bytes_pulled": 0,
            "bytes_written": 24, "values_computed": 2, "values_attested": 0, "oracle": false, "total_seconds": 0.5,
        });
        let plain: RestoreReport = serde_json::from_value(report.clone()).unwrap();
        assert_eq!(describe_restore(&plain).len(), 3);
        let mut report = report;
        report["resharded"] = json!({"differs": ["tp"], "from": 2, "to": 1, "pages": 1, "states": 2});
        let lines = describe_restore(&serde_json::from_value(report.clone()).unwrap());
        let said = "cut anew from 2 to 1 ranks (tp): 1 page, 2 state tensors; values equal, the next logits not compared";
        assert_eq!((lines.len(), lines[2].as_str()), (4, said));
        report["resharded"] = json!(null);
        report["converted"] = json!([converted("a"), converted("b")]);
        let lines = describe_restore(&serde_json::from_value(report).unwrap());
        let said = "2 state tensors converted from row-major f32 (strides [3, 1], offset 0, 24 bytes) \
                    to col\\u{a}major bf16 (strides [1, 2], offset 0, 12 bytes), value hash equal";
        assert_eq!((lines.len(), lines[2].as_str()), (4, said));
    }
}
