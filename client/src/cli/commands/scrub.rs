//! `pf scrub`: checks every stored byte.

use crate::cli::args::Scrub;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, one_line};
use crate::cli::progress::{Status, watch};
use parking_lot::Mutex;
use pfr_client::Site;
use pfr_schema::ErrorCode;
use pfr_schema::api::ScrubReport;
use pfr_store::{ScrubOptions, Store};

pub async fn run(context: &mut Context, args: Scrub) -> Result<(), Failure> {
    let options = ScrubOptions { full: args.full, bytes_per_second: args.rate.map(|rate| rate.0) };
    let report = match context.site(args.at, None).await? {
        Site::Registry(remote) => {
            let status = || Status::of_phase("the registry reads and checks");
            let work = async { Ok::<_, Failure>(remote.scrub(options.full, options.bytes_per_second).await?) };
            watch(context.quiet, status, work).await?
        }
        Site::Store(store) => local(context.quiet, &store, &options).await?,
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
        let message = format!("{} could not be read, so their blobs are unchecked", count(unread, "pack"));
        return Err(Failure::new(ErrorCode::Unavailable, message).hint("look at the storage and run the same command again"));
    }
    let found = format!("{} and {} damaged", count(report.damaged.len() as u64, "blob"), count(report.bad_packs.len() as u64, "pack"));
    let hint = match (report.damaged.iter().any(|blob| !blob.snapshots.is_empty()), args.at.local) {
        (false, _) => "no snapshot is affected; the good blobs of a bad pack were copied into a new pack",
        (true, true) => "pull the snapshots named above again: that heals them",
        (true, false) => "push the snapshots named above again: that heals them",
    };
    Err(Failure::new(ErrorCode::CorruptStore, found).hint(hint))
}

fn show(context: &mut Context, report: &ScrubReport) -> Result<(), Failure> {
    let paint = context.out.paint;
    let how = if report.full { "hashed" } else { "compared with checksums" };
    let (packs, blobs) = (count(report.packs, "pack"), count(report.frames, "blob"));
    context.out.line(format!("{packs}, {blobs}, {} read and {how}", bytes(report.bytes)))?;
    for pack in &report.bad_packs {
        context.out.line(format!("{} {pack}", paint.yellow("pack")))?;
    }
    for frame in &report.dead_frames {
        context.out.note(&format!("damaged, but no blob uses it: {frame}"))?;
    }
    for pack in &report.unread {
        context.out.line(format!("{} {pack}", paint.yellow("unread")))?;
    }
    for blob in &report.damaged {
        context.out.line(format!("{} {}  {}", paint.yellow("blob"), blob.digest, paint.dim(&one_line(&blob.reason))))?;
        for snapshot in &blob.snapshots {
            context.out.line(format!("     in {snapshot}"))?;
        }
    }
    context.out.flush()
}

async fn local(quiet: bool, store: &Store, options: &ScrubOptions) -> Result<ScrubReport, Failure> {
    let total = store.metadata().disk_bytes().await?;
    let seen = Mutex::new(0);
    let status = || Status { phase: "reading and checking".into(), total, done: *seen.lock(), deduplicated: 0 };
    let mut update = |report: &ScrubReport| *seen.lock() = report.bytes;
    Ok(watch(quiet, status, store.scrub(options, &mut update)).await?)
}
