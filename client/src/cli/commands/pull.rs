//! `pf pull`: a snapshot from a registry, into the local store or a directory.

use super::push::deduplicated;
use crate::cli::args::Pull;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration};
use crate::cli::progress::{Standing, watch};
use pfr_client::{Destination, Progress, PullReport};

use std::time::Duration;

pub async fn run(context: &mut Context, args: Pull) -> Result<(), Failure> {
    let remote = context.remote(Some(&args.reference))?;
    let selector = args.reference.selector_or_latest();
    let repository = args.reference.repository.clone();
    let destination = match &args.dir {
        // A local store only saves requests here; one that is not there, or cannot be opened, does
        // not matter.
        Some(path) => Destination::Directory { path: path.clone(), store: context.existing_store().await.ok() },
        None => Destination::Store { store: context.store().await?, repository: repository.clone(), tag: selector.tag().cloned() },
    };
    let progress = Progress::default();
    let work = pfr_client::pull(&remote, &repository, &selector, &destination, &progress);
    let report = watch(context.quiet, || Standing::of(&progress), work).await?;
    if let Destination::Store { store, .. } = &destination {
        super::gc::tidy(context, store).await;
    }
    let summary = format!("{}, {}", brief(&report), duration(Duration::from_secs_f64(report.seconds)));
    context.report(&report, [summary], &report.digest.to_string())
}

/// One line about a pull, without its time.
pub fn brief(report: &PullReport) -> String {
    format!(
        "{}, {}: received {} ({}){}",
        count(report.pages, "page"),
        bytes(report.bytes_raw),
        count(report.blobs_received, "blob"),
        bytes(report.bytes_received),
        deduplicated(report.bytes_deduplicated, report.bytes_raw, "already here")
    )
}
