//! `pf pull`: a snapshot from a registry, into the local store or a directory.

use crate::cli::args::Pull;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration};
use crate::cli::progress::{Standing, watch};
use pfr_client::{Destination, Progress, PullReport};
use pfr_schema::{Digest, Selector};
use serde::Serialize;

/// What a pull did.
#[derive(Clone, Debug, Serialize)]
struct PullSummary {
    digest: Digest,
    repository: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    directory: Option<String>,
    pages: u64,
    blobs_total: u64,
    blobs_received: u64,
    bytes_raw: u64,
    bytes_received: u64,
    bytes_deduplicated: u64,
    round_trips: u64,
    seconds: f64,
}

pub async fn run(context: &mut Context, args: Pull) -> Result<(), Failure> {
    let remote = context.remote(Some(&args.reference))?;
    let selector = args.reference.selector_or_latest();
    let repository = args.reference.repository.clone();
    let destination = match &args.dir {
        Some(path) => Destination::Directory { path: path.clone(), store: None },
        None => {
            let tag = match &selector {
                Selector::Tag { tag, back: 0 } => Some(tag.clone()),
                Selector::Tag { .. } | Selector::Digest(_) => None,
            };
            Destination::Store { store: context.store().await?, repository: repository.clone(), tag }
        }
    };
    let progress = Progress::default();
    let work = pfr_client::pull(&remote, &repository, &selector, &destination, &progress);
    let report = watch(context.quiet, || Standing::of(&progress), work).await?;
    if context.json {
        return context.out.json(&PullSummary {
            digest: report.digest,
            repository: repository.to_string(),
            directory: args.dir.map(|d| d.display().to_string()),
            pages: report.pages,
            blobs_total: report.blobs_total,
            blobs_received: report.blobs_received,
            bytes_raw: report.bytes_raw,
            bytes_received: report.bytes_received,
            bytes_deduplicated: report.bytes_deduplicated,
            round_trips: report.round_trips,
            seconds: report.elapsed.as_secs_f64(),
        });
    }
    if !context.quiet {
        let summary = describe(&report);
        context.out.line(context.out.paint.dim(&summary))?;
    }
    context.out.line(report.digest.to_string())
}

/// One line about a pull.
pub fn describe(report: &PullReport) -> String {
    format!(
        "{}, {} raw: received {} in {}, {} already here, {}, {}",
        count(report.pages, "page"),
        bytes(report.bytes_raw),
        count(report.blobs_received, "frame"),
        bytes(report.bytes_received),
        bytes(report.bytes_deduplicated),
        count(report.round_trips, "round trip"),
        duration(report.elapsed)
    )
}
