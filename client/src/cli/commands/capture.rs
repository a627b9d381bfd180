//! `pf snapshot` and `pf restore`: what the capture agent does for one sequence.

use crate::cli::args::{Restore, Snapshot, WhenToPush};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration, number, one_line};
use crate::cli::progress::{Status, watch};
use crate::cli::suggest::Suggestion;
use pfr_client::Error;
use pfr_schema::agent::{Push, PushState, Resharded, RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest, Stored};
use pfr_schema::{ErrorCode, Selector};
use std::collections::BTreeMap;
use std::time::Duration;

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
            WhenToPush::Background => Push::Background,
            WhenToPush::Wait => Push::Wait,
            WhenToPush::Never => Push::Never,
        },
        oracle: args.logits,
        parent: args.parent,
    };
    let status = || Status::of_phase("capturing");
    let report = watch(context.quiet, status, agent.snapshot(&args.engine, &request)).await.map_err(not_captured)?;
    let failed = report.push.as_ref().filter(|push| request.push == Push::Wait && push.state != PushState::Done);
    let failure = failed.map(|push| {
        let reason = push.error.as_deref().unwrap_or("no reason was given");
        let message = format!("{} is in the agent's store, but was not pushed: {}", report.reference, one_line(reason));
        Failure::new(push.code.unwrap_or(ErrorCode::Unavailable), message)
            .hint(Suggestion::new("pushes").agent().then(" shows whether a later attempt succeeds"))
    });
    context.report(&report, describe_snapshot(&report), &report.digest.to_string())?;
    failure.map_or(Ok(()), Err)
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

fn is_unknown(code: ErrorCode) -> bool {
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

/// Lines for users about a capture.
pub fn describe_snapshot(report: &SnapshotReport) -> Vec<String> {
    let exact = match (report.exactness, report.oracle) {
        (pfr_schema::snapshot::Exactness::BitExact, true) => "bit-exact, with the logits of the next step".to_owned(),
        (pfr_schema::snapshot::Exactness::BitExact, false) => "bit-exact".to_owned(),
        (pfr_schema::snapshot::Exactness::NearExact, _) if report.unrecorded.is_empty() => "near-exact".to_owned(),
        (pfr_schema::snapshot::Exactness::NearExact, _) => format!("near-exact, not recorded: {}", one_line(&report.unrecorded.join(", "))),
    };
    let push = report.push.as_ref().map(|push| match push.state {
        PushState::Done => format!("pushed, {} sent", bytes(push.bytes_sent)),
        PushState::Waiting | PushState::Running => "the push runs in the background".to_owned(),
        PushState::Failed => "the push was refused".to_owned(),
    });
    let mut new = format!("{} new", bytes(report.bytes_new));
    // An agent of an older version does not say how many bytes it stored.
    if (1..report.bytes_new - report.bytes_new / 100).contains(&report.bytes_stored) {
        new += &format!(", {} stored", bytes(report.bytes_stored));
    }
    let mut lines = vec![
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
    ];
    lines.extend(push);
    lines
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
