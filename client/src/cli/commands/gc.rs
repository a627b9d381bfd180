//! `pf gc` and `pf pin`: the registry collects garbage, or the local store does; pins are the local
//! store's.

use super::usage::holders;
use crate::cli::args;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, now_ms, number, one_line, until};
use crate::cli::progress::{Status, watch};
use crate::cli::suggest::{Advice, Suggestion};
use parking_lot::Mutex;
use pfr_client::{Remote, Site};
use pfr_schema::api::{GcReport, GcRequest};
use pfr_schema::{Digest, ErrorCode, Reference};
use pfr_store::{GcOptions, GcPart, GcTrigger, Pin, Store};
use serde::Serialize;
use std::time::{Duration, Instant};

/// How often the report of a running collection is fetched.
const POLL: Duration = Duration::from_millis(250);
/// A running collection renews its report every few seconds. If the report stays the same for this
/// long, the process that ran the collection has died.
const STALE: Duration = Duration::from_secs(600);

/// The result of `pf pin`, as JSON.
#[derive(Serialize)]
struct Pinned {
    digest: Digest,
    /// Whether any pin is left: one by hand, or one until the snapshot is pushed.
    pinned: bool,
}

pub async fn run(context: &mut Context, args: args::Gc) -> Result<(), Failure> {
    let seen = Mutex::new(GcReport::default());
    let status = || {
        let report = seen.lock();
        Status { done: report.freed_bytes + report.moved_bytes + report.deleted_bytes, ..Status::of_phase("collecting") }
    };
    let update = |report: &GcReport| seen.lock().clone_from(report);
    if let (Some(size), false) = (args.max_size, args.at.local) {
        let gc = Suggestion::new("gc").local().arg(format!("--max-size={size}"));
        return Err(Failure::usage("--max-size limits the local store, so it needs --local; a registry evicts nothing")
            .hint(gc.then(" evicts what was not used for longest")));
    }
    if args.unfinished && !args.at.local {
        let gc = Suggestion::new("gc").local().arg("--unfinished");
        return Err(Failure::usage(
            "--unfinished is for the local store, so it needs --local; a registry ends the leases of its pushes itself",
        )
        .hint(gc.then(" frees what interrupted pulls left here")));
    }
    let site = context.site(args.at, None).await?;
    let report = match &site {
        Site::Registry(remote) => watch(context.quiet, status, remotely(remote, args.dry_run, STALE, update)).await?,
        Site::Store(store) => {
            // Readers of this store look again when a pack is gone, so nothing needs to linger.
            let options = GcOptions { dry_run: args.dry_run, end_sessions: args.unfinished, grace: Duration::ZERO, ..GcOptions::default() };
            let work = async {
                match args.max_size.or(context.max_store_size()) {
                    Some(most) => store.evict(most.0, &options, &mut |report| update(report)).await,
                    None => store.gc(&options, &mut |report| update(report)).await,
                }
            };
            watch(context.quiet, status, work).await?
        }
    };
    if context.json {
        context.out.json(&report)?;
    } else {
        print(context, &report, args.at.local)?;
    }
    // A failure of the local store has ended the command above. Its report has an error only if the
    // size cannot be reached.
    match &report.error {
        Some(error) if matches!(site, Site::Registry(_)) => {
            // The report comes before the error.
            context.out.flush()?;
            Err(Failure::new(ErrorCode::Unavailable, format!("the collection failed in the registry: {error}"))
                .hint("the registry's log has more; run the same command again, it goes on where it stopped"))
        }
        _ => Ok(()),
    }
}

/// Starts a collection in a registry and waits for its end, unless its report does not change for
/// `stale`.
async fn remotely(remote: &Remote, dry_run: bool, stale: Duration, update: impl Fn(&GcReport)) -> Result<GcReport, Failure> {
    let mut report = remote.start_gc(&GcRequest { dry_run }).await?;
    let mut changed = Instant::now();
    while report.finished_at.is_none() {
        update(&report);
        tokio::time::sleep(POLL).await;
        let now = remote.gc_run(&report.id).await?;
        if now != report {
            changed = Instant::now();
        } else if changed.elapsed() >= stale {
            let message = format!("the report of collection {} has not changed for {} seconds", report.id, stale.as_secs());
            let hint = Advice::from("the process that ran it may have died; ").run(Suggestion::new("gc"));
            return Err(Failure::new(ErrorCode::Unavailable, message).hint(hint.text(" starts another, which goes on where it stopped")));
        }
        report = now;
    }
    Ok(report)
}

fn print(context: &mut Context, r: &GcReport, local: bool) -> Result<(), Failure> {
    let unfinished = context.suggest(&Suggestion::new("gc").local().arg("--unfinished"));
    let out = &mut context.out;
    if r.dry_run {
        out.note("nothing was changed; these numbers say what would be freed")?;
    }
    let lines = words(r, local, now_ms(), &unfinished);
    let (pairs, sentences): (Vec<_>, Vec<_>) = lines.into_iter().partition(|(label, _)| !label.is_empty());
    let freed = pairs.iter().any(|(label, _)| *label == "freed");
    if freed {
        out.pairs(&pairs)?;
    }
    // The hint is about the pairs, so it comes after them.
    let mut sentences = sentences.into_iter().map(|(_, sentence)| sentence);
    if !freed {
        sentences.next().map_or(Ok(()), |nothing| out.line(nothing))?;
        out.pairs(&pairs)?;
    }
    for sentence in sentences {
        out.line(sentence)?;
    }
    r.error.as_ref().map_or(Ok(()), |error| out.line(out.paint.yellow(&one_line(error))))
}

/// Describes the result of a run line by line: a label, or an empty one, and the text.
fn words(r: &GcReport, local: bool, now: u64, unfinished: &str) -> Vec<(&'static str, String)> {
    let objects = r.released + r.unclaimed;
    let mut lines = Vec::new();
    let protected = r.protected.as_ref().filter(|p| p.bytes > 0).map(|p| {
        let end = p.expires_at.map_or(String::new(), |end| format!(" until {}", until(end, now)));
        format!("{} unreferenced, protected by {}{end}", bytes(p.bytes), holders(p, local))
    });
    if objects + r.packs_deleted + r.packs_compacted + r.packs_merged + r.evicted == 0 {
        let nothing = if r.dry_run { "nothing would be freed" } else { "nothing freed" };
        lines.push(("", format!("{nothing}{}", protected.map_or(String::new(), |words| format!(": {words}")))));
    } else {
        if r.evicted > 0 {
            lines.push(("evicted", count(r.evicted, "snapshot")));
        }
        let of_it = format!("{} of deleted snapshots, {} never committed", number(r.released), number(r.unclaimed));
        lines.push(("freed", format!("{}, {}  ({of_it})", count(objects, "object"), bytes(r.freed_bytes))));
        if r.packs_compacted + r.packs_merged > 0 {
            let packs = format!("{} compacted, {} merged", count(r.packs_compacted, "pack"), number(r.packs_merged));
            lines.push(("copied", format!("{}  ({packs})", bytes(r.moved_bytes))));
        }
        lines.push(("deleted", format!("{}, {} on disk", count(r.packs_deleted, "pack"), bytes(r.deleted_bytes))));
        lines.extend(protected.map(|words| ("protected", words)));
    }
    let uploads = r.unfinished.as_ref().filter(|u| u.packs > 0);
    lines.extend(uploads.map(|u| {
        let end = u.expires_at.map_or(String::new(), |end| format!(", kept until {}", until(end, now)));
        ("unfinished", format!("{} of {}{end}", bytes(u.bytes), count(u.packs, "upload")))
    }));
    if local && (uploads.is_some() || r.protected.as_ref().is_some_and(|p| !p.sessions.is_empty())) {
        lines.push(("", format!("{unfinished} frees it now; the interrupted command again resumes it instead")));
    }
    if r.deferred > 0 {
        lines.push(("deferred", format!("{} of unknown content, kept for a day", count(r.deferred, "list"))));
    }
    if r.draining_bytes > 0 {
        let end = r.draining_ends_at.map_or(String::new(), |end| format!(" until {}", until(end, now)));
        lines.push(("kept", format!("{} deleted, on storage for the grace period{end}", bytes(r.draining_bytes))));
    }
    lines
}

pub async fn pin(context: &mut Context, args: args::Pin) -> Result<(), Failure> {
    let Site::Store(store) = context.site(args.at, Some(&args.reference)).await? else {
        let pin = Suggestion::new("pin").local().arg(Reference { registry: None, ..args.reference });
        let pin = if args.remove { pin.arg("--remove") } else { pin };
        return Err(Failure::usage("a registry has no pins: a pin keeps a snapshot in the local store").hint(pin.then(if args.remove {
            " removes the pin there"
        } else {
            " pins it there"
        })));
    };
    let repository = &args.reference.repository;
    let found = store.resolve(repository, &args.reference.selector_or_latest()).await;
    let absent = |error: &pfr_store::Error| {
        matches!(error.code(), ErrorCode::RepositoryUnknown | ErrorCode::TagUnknown | ErrorCode::SnapshotUnknown)
    };
    let digest = match found {
        Err(error) if !args.remove && absent(&error) => {
            let pull = Suggestion::new("pull").both().arg(&args.reference);
            return Err(Failure::from(error).hint(pull.then(" fetches it into the local store, if the registry has it")));
        }
        found => found?,
    };
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

/// Tidies the local store after a push or pull into it: merges small packs if that is due or, if
/// its size is limited, evicts snapshots. A failure is only a note: the push or pull is done.
pub async fn tidy(context: &Context, store: &Store) {
    let options = GcOptions { grace: Duration::ZERO, merges: 1, ..GcOptions::default() };
    let Some(most) = context.max_store_size() else {
        let options = GcOptions { trigger: GcTrigger::Schedule, part: GcPart::Merging, ..options };
        if let Err(error) = store.gc(&options, &mut |_| ()).await {
            tracing::debug!(%error, "small packs of the local store were not merged");
        }
        return;
    };
    let reason = match store.evict(most.0, &options, &mut |_| ()).await {
        Ok(report) => report.error,
        Err(error) => Some(error.to_string()),
    };
    if let Some(reason) = reason.filter(|_| !context.quiet) {
        eprintln!("note: the local store stays larger than max-store-size: {reason}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::suggest::Flags;
    use axum::routing::{get, post};
    use axum::{Json, Router};
    use pfr_schema::api::{OpenSession, Protected, UnfinishedPacks};

    async fn registry(run: GcReport) -> Remote {
        let begun = GcReport { id: "run".into(), ..GcReport::default() };
        let routes = Router::new().route("/v1/gc", post(async move || Json(begun))).route("/v1/gc/{run}", get(async move || Json(run)));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        pfr_service::task::spawn(async move { axum::serve(listener, routes).await });
        Remote::new(&url, pfr_client::RemoteOptions::default()).unwrap()
    }

    #[test]
    fn a_run_that_frees_nothing_says_what_protects_the_rest_and_until_when() {
        let now = 1_709_251_199_000;
        let session = OpenSession { repository: "team/agent".parse().unwrap(), expires_at: now + 3_540_000 };
        let protected = Protected { objects: 3, bytes: 28 << 20, expires_at: Some(now + 3_540_000), sessions: vec![session] };
        let text = |report: &GcReport, local| {
            words(report, local, now, "`pf gc --unfinished`").into_iter().map(|(label, text)| format!("{label}|{text}")).collect::<Vec<_>>()
        };
        let report = GcReport { protected: Some(protected), ..GcReport::default() };
        assert_eq!(
            text(&report, false),
            ["|nothing freed: 28.0 MiB unreferenced, protected by an unfinished push to team/agent until 2024-03-01 00:58 UTC, in 59 min"]
        );
        assert_eq!(text(&report, true)[1], "|`pf gc --unfinished` frees it now; the interrupted command again resumes it instead");
        assert_eq!(text(&GcReport::default(), true), ["|nothing freed"]);
        assert_eq!(text(&GcReport { dry_run: true, ..GcReport::default() }, true), ["|nothing would be freed"]);
        let freed = GcReport { released: 2, unclaimed: 1, freed_bytes: 2048, packs_deleted: 1, deleted_bytes: 4096, ..report };
        let lines = text(&freed, false);
        assert_eq!(lines[0], "freed|3 objects, 2.00 KiB  (2 of deleted snapshots, 1 never committed)");
        assert!(lines[2].starts_with("protected|28.0 MiB unreferenced"), "{lines:?}");
        let uploads = UnfinishedPacks { packs: 2, bytes: 8 << 20, expires_at: Some(now + 3_540_000) };
        let cut_off = GcReport { unfinished: Some(uploads), ..GcReport::default() };
        assert_eq!(
            text(&cut_off, false),
            ["|nothing freed", "unfinished|8.00 MiB of 2 uploads, kept until 2024-03-01 00:58 UTC, in 59 min"]
        );
        assert_eq!(text(&cut_off, true)[2], "|`pf gc --unfinished` frees it now; the interrupted command again resumes it instead");
        let kept = GcReport { draining_bytes: 4096, draining_ends_at: Some(now + 60_000), ..GcReport::default() };
        assert_eq!(text(&kept, false)[1], "kept|4.00 KiB deleted, on storage for the grace period until 2024-03-01 00:00:59 UTC, in 60 s");
    }

    #[tokio::test]
    async fn waiting_for_a_collection_that_died_ends() {
        let remote = registry(GcReport { id: "run".into(), ..GcReport::default() }).await;
        let failure = tokio::time::timeout(Duration::from_secs(60), remotely(&remote, false, Duration::from_millis(300), |_| ())).await;
        assert_eq!(failure.expect("it gives up").unwrap_err().exit(), 7);
    }

    /// The only command of a message that no test can make `pf` print: it comes after ten minutes.
    #[tokio::test]
    async fn the_command_after_a_collection_that_died_collects_in_the_same_registry() {
        use crate::cli::Program as _;
        use clap::Parser as _;
        let dead = registry(GcReport { id: "run".into(), ..GcReport::default() }).await;
        let failure = remotely(&dead, false, Duration::from_millis(300), |_| ()).await.unwrap_err();
        let ended = registry(GcReport { id: "run".into(), finished_at: Some(1), ..GcReport::default() }).await;
        let flags = Flags { registry: Some(ended.url().to_owned()), ..Flags::default() };
        let hint = failure.at(&flags).document().hint.unwrap();
        let command = hint.split('`').nth(1).unwrap();
        assert_eq!(command, format!("pf gc --registry {}", ended.url()));
        let program = args::Args::try_parse_from(command.split(' ')).unwrap();
        let mut context = Context::new(program.global().clone()).unwrap();
        program.run(&mut context).await.unwrap();
    }

    #[tokio::test]
    async fn the_report_of_a_collection_that_ended_is_complete() {
        let ended = GcReport { id: "run".into(), finished_at: Some(1), error: Some("no room".into()), ..GcReport::default() };
        let remote = registry(ended.clone()).await;
        assert_eq!(remotely(&remote, false, STALE, |_| ()).await.unwrap(), ended);
    }
}
