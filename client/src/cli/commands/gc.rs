//! `pf gc` and `pf pin`: what the local store takes up, and what stays in it. `pf gc --remote` asks a registry.

use crate::cli::args;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count};
use crate::cli::progress::{Standing, watch};
use pfr_client::Remote;
use pfr_schema::api::{GcReport, GcRequest};
use pfr_schema::{Digest, ErrorCode};
use pfr_store::{GcOptions, Pin, Store};
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a registry is asked how far it is.
const ASK: Duration = Duration::from_millis(250);
/// A collection that says the same for this long has died with its process: one that runs renews its report every few seconds.
const SILENCE: Duration = Duration::from_secs(600);

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
        watch(context.quiet, standing, remotely(&remote, args.dry_run, SILENCE, update)).await?
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
        context.out.json(&report)?;
    } else {
        print(context, &report)?;
    }
    // The local store's own failure has ended the command above; what is left is said of a size that cannot be reached.
    match &report.error {
        Some(error) if args.remote => {
            // What was done is told before what was not.
            context.out.flush()?;
            Err(Failure::of_code(ErrorCode::Unavailable, format!("the collection failed in the registry: {error}"))
                .hint("the registry's log has more; run the same command again, it goes on where it stopped"))
        }
        _ => Ok(()),
    }
}

/// Starts a collection in a registry and waits for its end, as long as it says something new.
async fn remotely(remote: &Remote, dry_run: bool, silence: Duration, update: impl Fn(&GcReport)) -> Result<GcReport, Failure> {
    let mut report = remote.start_gc(&GcRequest { dry_run }).await?;
    let mut news = Instant::now();
    while report.finished_at.is_none() {
        update(&report);
        tokio::time::sleep(ASK).await;
        let now = remote.gc_run(&report.id).await?;
        if now != report {
            news = Instant::now();
        } else if news.elapsed() >= silence {
            let words = format!("collection {} has said nothing new for {} seconds", report.id, silence.as_secs());
            return Err(Failure::of_code(ErrorCode::Unavailable, words)
                .hint("the process that ran it may have died; `pf gc --remote` starts another, which goes on where it stopped"));
        }
        report = now;
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

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::{get, post};
    use axum::{Json, Router};

    async fn registry(run: GcReport) -> Remote {
        let begun = GcReport { id: "run".into(), ..GcReport::default() };
        let routes = Router::new().route("/v1/gc", post(async move || Json(begun))).route("/v1/gc/{run}", get(async move || Json(run)));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        Remote::new(&url, pfr_client::RemoteOptions::default()).unwrap()
    }

    #[tokio::test]
    async fn a_collection_that_died_is_not_waited_for_for_ever() {
        let remote = registry(GcReport { id: "run".into(), ..GcReport::default() }).await;
        let failure = tokio::time::timeout(Duration::from_secs(60), remotely(&remote, false, Duration::from_millis(300), |_| ())).await;
        assert_eq!(failure.expect("it gives up").unwrap_err().exit(), 7);
    }

    #[tokio::test]
    async fn one_that_ended_is_told_whole() {
        let ended = GcReport { id: "run".into(), finished_at: Some(1), error: Some("no room".into()), ..GcReport::default() };
        let remote = registry(ended.clone()).await;
        assert_eq!(remotely(&remote, false, SILENCE, |_| ()).await.unwrap(), ended);
    }
}
