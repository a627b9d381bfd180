//! `pf gc` and `pf pin`: what the local store takes up, and what stays in it. `pf gc --remote` asks a registry.

use crate::cli::args;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count};
use crate::cli::progress::{Standing, watch};
use pfr_client::Remote;
use pfr_schema::Digest;
use pfr_schema::api::{GcReport, GcRequest};
use pfr_store::{GcOptions, Pin, Store};
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often a registry is asked how far it is.
const ASK: Duration = Duration::from_millis(250);

/// What a pin did, as JSON.
#[derive(Serialize)]
struct Pinned {
    digest: Digest,
    /// Whether anything keeps it now: by hand, or until it is pushed.
    pinned: bool,
}

pub async fn run(context: &mut Context, args: args::Gc) -> Result<(), Failure> {
    let seen = Arc::new(Mutex::new(GcReport::default()));
    let standing = || {
        let report = seen.lock().unwrap_or_else(PoisonError::into_inner);
        Standing { phase: "collecting".into(), done: report.freed_bytes + report.moved_bytes + report.deleted_bytes, ..Standing::default() }
    };
    let update = |report: &GcReport| seen.lock().unwrap_or_else(PoisonError::into_inner).clone_from(report);
    let report = if args.remote {
        let remote = context.remote(None)?;
        watch(context.quiet, standing, remotely(&remote, args.dry_run, update)).await?
    } else {
        let (store, most) = (context.existing_store().await?, args.max_size.or(context.max_store_size()));
        // Readers of this store look again when a pack is gone, so nothing needs to linger.
        let options = GcOptions { dry_run: args.dry_run, horizon: Duration::ZERO, ..GcOptions::default() };
        let work = async {
            match most {
                Some(most) => store.evict(most.0, &options, &mut |report| update(report)).await,
                None => store.gc(&options, &mut |report| update(report)).await,
            }
        };
        watch(context.quiet, standing, work).await?
    };
    if context.json {
        return context.out.json(&report);
    }
    print(context, &report)
}

/// Starts a collection in a registry and waits for its end.
async fn remotely(remote: &Remote, dry_run: bool, update: impl Fn(&GcReport)) -> Result<GcReport, Failure> {
    let mut report = remote.start_gc(&GcRequest { dry_run }).await?;
    while report.finished_at.is_none() {
        update(&report);
        tokio::time::sleep(ASK).await;
        report = remote.gc_run(&report.id).await?;
    }
    Ok(report)
}

fn print(context: &mut Context, r: &GcReport) -> Result<(), Failure> {
    let some = |n: u64, text: String| if n == 0 { String::new() } else { text };
    let objects = r.released + r.unclaimed;
    let out = &mut context.out;
    if r.dry_run {
        out.line(out.paint.dim("nothing was changed; this is what would go"))?;
    }
    let held = out.paint.dim(&format!("{} no longer held, {} never committed", r.released, r.unclaimed));
    let pairs = [
        ("evicted", some(r.evicted, count(r.evicted, "snapshot"))),
        ("freed", format!("{}, {}  {held}", count(objects, "object"), bytes(r.freed_bytes))),
        ("compacted", some(r.packs_compacted, format!("{}, {} moved", count(r.packs_compacted, "pack"), bytes(r.moved_bytes)))),
        ("deleted", format!("{}, {} on disk", count(r.packs_deleted, "pack"), bytes(r.deleted_bytes))),
        ("parked", some(r.parked, format!("{} of unknown content, kept for a day", count(r.parked, "container")))),
        ("draining", some(r.draining_bytes, format!("{} wait for their readers", bytes(r.draining_bytes)))),
    ];
    out.pairs(&pairs)?;
    r.error.as_ref().map_or(Ok(()), |error| out.line(out.paint.yellow(error)))
}

pub async fn pin(context: &mut Context, args: args::Pin) -> Result<(), Failure> {
    if let Some(registry) = &args.reference.registry {
        return Err(Failure::usage(format!("a pin is for the local store, but the reference names the registry {registry}")));
    }
    let store = context.existing_store().await?;
    let repository = &args.reference.repository;
    let digest = store.resolve(repository, &args.reference.selector_or_latest()).await?;
    let pinned = store.pin(repository, &digest, Pin::ByHand, !args.remove).await?;
    if context.json {
        return context.out.json(&Pinned { digest, pinned });
    }
    let word = match (args.remove, pinned) {
        (false, _) => "pinned",
        (true, false) => "no longer pinned",
        (true, true) => "no longer pinned by hand, but until it is pushed:",
    };
    context.out.line(format!("{word} {repository} {}", context.out.paint.yellow(&digest.short())))
}

/// Makes room in the local store after something came into it, if its size is limited. That it cannot is no failure of what came.
pub async fn make_room(context: &Context, store: &Store) {
    let Some(most) = context.max_store_size() else { return };
    let options = GcOptions { horizon: Duration::ZERO, ..GcOptions::default() };
    let words = match store.evict(most.0, &options, &mut |_| ()).await {
        Ok(report) => report.error,
        Err(error) => Some(error.to_string()),
    };
    if let Some(words) = words.filter(|_| !context.quiet) {
        eprintln!("note: the local store stays larger than max-store-size: {words}");
    }
}
