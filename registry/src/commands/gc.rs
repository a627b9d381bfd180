//! `pf-registry gc`: collects garbage once.

use super::Settings;
use super::tool::{NAMED, Which, on_store, print};
use crate::Error;
use clap::Args;
use pfr_client::human::{bytes, count, number, until};
use pfr_schema::api::GcReport;
use pfr_service::few;
use pfr_store::{GcOptions, GcTrigger};
use std::collections::BTreeSet;
use std::time::Duration;

/// Arguments of `gc`.
#[derive(Args)]
pub(crate) struct Gc {
    /// Change nothing, only report what would be freed.
    #[arg(long)]
    dry_run: bool,
    /// Seconds for which packs that nothing points to stay on storage, instead of
    /// `gc-grace-seconds`.
    #[arg(long, value_name = "SECONDS")]
    grace: Option<u64>,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    settings: Settings,
}

pub(super) fn run(args: Gc) -> Result<(), Error> {
    let config = args.settings.load()?;
    let grace = Duration::from_secs(args.grace.unwrap_or(config.gc_grace_seconds));
    let options = GcOptions { trigger: GcTrigger::Command, dry_run: args.dry_run, grace, ..GcOptions::default() };
    on_store(&config, &args.which, async |store| {
        let mut last = None;
        let done = store.gc(&options, &mut |report| last = Some(report.clone())).await;
        // The report is printed even if a step failed, but not without a first step.
        if let Some(last) = last {
            print(&last, args.json, text);
        }
        done.map(|_| ()).map_err(Error::Work)
    })
}

fn text(r: &GcReport) -> String {
    let would = if r.dry_run { "would be " } else { "" };
    let deferred = match r.deferred {
        0 => String::new(),
        deferred => format!("deferred         {} whose content is not known, for a day: run fsck\n", count(deferred, "node")),
    };
    let now = r.finished_at.unwrap_or(r.started_at);
    let until = |then: Option<u64>| then.map_or(String::new(), |then| format!(", until {}", until(then, now)));
    let protected = match &r.protected {
        Some(p) if p.bytes > 0 => {
            let sessions: BTreeSet<&str> = p.sessions.iter().map(|s| s.repository.as_str()).collect();
            let whose = match sessions.is_empty() {
                true => "a lease".to_owned(),
                false => format!("unfinished pushes to {}", few(sessions, NAMED)),
            };
            let (objects, size) = (count(p.objects, "object"), bytes(p.bytes));
            format!("protected        {objects}, {size}: unreferenced, leased by {whose}{}\n", until(p.expires_at))
        }
        _ => String::new(),
    };
    let unfinished = match &r.unfinished {
        Some(u) if u.packs > 0 => {
            let (uploads, written) = (count(u.packs, "upload"), bytes(u.bytes));
            format!("unfinished       {written} of {uploads} (running or cut off){}\n", until(u.expires_at))
        }
        _ => String::new(),
    };
    format!(
        "objects {would}freed   {} ({} of deleted snapshots, {} never committed), {}\n\
         packs {would}deleted   {}, {}\n\
         packs compacted  {}, and {} merged: {} copied\n\
         in grace period  {}{}\n{protected}{unfinished}{deferred}",
        number(r.released + r.unclaimed),
        number(r.released),
        number(r.unclaimed),
        bytes(r.freed_bytes),
        number(r.packs_deleted),
        bytes(r.deleted_bytes),
        number(r.packs_compacted),
        number(r.packs_merged),
        bytes(r.moved_bytes),
        bytes(r.draining_bytes),
        until(r.draining_ends_at),
    )
}
