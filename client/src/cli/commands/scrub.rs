//! `pf scrub`: every byte that is stored against its checksums.

use crate::cli::args::Scrub;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count};
use crate::cli::progress::{Standing, watch};
use pfr_schema::ErrorCode;
use pfr_schema::api::ScrubReport;
use pfr_store::{ScrubOptions, Store};
use std::sync::{Arc, Mutex, PoisonError};

pub async fn run(context: &mut Context, args: Scrub) -> Result<(), Failure> {
    let report = if args.remote {
        let remote = context.remote(None)?;
        let standing = || Standing { phase: "the registry reads and checks".into(), ..Standing::default() };
        watch(context.quiet, standing, async { Ok::<_, Failure>(remote.scrub(args.full).await?) }).await?
    } else {
        local(context.quiet, &context.existing_store().await?, args.full).await?
    };
    if context.json {
        context.out.json(&report)?;
    } else {
        show(context, &report)?;
    }
    if report.damaged.is_empty() && report.bad_packs.is_empty() {
        let unread = report.unread.len() as u64;
        if unread == 0 {
            return Ok(());
        }
        let words = format!("{} could not be read: nothing is known of what lies there", count(unread, "pack"));
        return Err(Failure::of_code(ErrorCode::Unavailable, words).hint("look at the storage and run the same command again"));
    }
    let found = format!("{} and {} damaged", count(report.damaged.len() as u64, "blob"), count(report.bad_packs.len() as u64, "pack"));
    let hint = match report.damaged.iter().any(|blob| !blob.snapshots.is_empty()) {
        true => "push or pull the snapshots named above again: that heals them",
        false => "no snapshot is affected; what was good in a bad pack lies in a new one",
    };
    Err(Failure::of_code(ErrorCode::CorruptStore, found).hint(hint))
}

fn show(context: &mut Context, report: &ScrubReport) -> Result<(), Failure> {
    let paint = context.out.paint;
    let how = if report.full { "hashed" } else { "compared with checksums" };
    let (packs, frames) = (count(report.packs, "pack"), count(report.frames, "frame"));
    context.out.line(format!("{packs}, {frames}, {} read and {how}", bytes(report.bytes)))?;
    for pack in &report.bad_packs {
        context.out.line(format!("{} {pack}", paint.yellow("pack")))?;
    }
    for pack in &report.dead_frames {
        context.out.line(paint.dim(&format!("no blob lost: {pack}")))?;
    }
    for pack in &report.unread {
        context.out.line(format!("{} {pack}", paint.yellow("unread")))?;
    }
    for blob in &report.damaged {
        context.out.line(format!("{} {}  {}", paint.yellow("blob"), blob.digest, paint.dim(&blob.reason)))?;
        for snapshot in &blob.snapshots {
            context.out.line(format!("     in {snapshot}"))?;
        }
    }
    context.out.flush()
}

async fn local(quiet: bool, store: &Store, full: bool) -> Result<ScrubReport, Failure> {
    let total = store.metadata().disk_bytes().await?;
    let seen = Arc::new(Mutex::new(0));
    let standing = || {
        let done = *seen.lock().unwrap_or_else(PoisonError::into_inner);
        Standing { phase: "reading and checking".into(), total, done, deduplicated: 0 }
    };
    let update = seen.clone();
    let mut on_progress = move |report: &ScrubReport| *update.lock().unwrap_or_else(PoisonError::into_inner) = report.bytes;
    let work = async { store.scrub(&ScrubOptions { full, bytes_per_second: None }, &mut on_progress).await };
    Ok(watch(quiet, standing, work).await?)
}
