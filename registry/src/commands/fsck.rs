//! `pf-registry fsck`: compares the tables with what the stored nodes say.

use super::Settings;
use super::tool::{Which, lines, on_store, print};
use crate::Error;
use clap::Args;
use pfr_client::human::{count, number};
use pfr_schema::api::FsckReport;

/// Arguments of `fsck`.
#[derive(Args)]
pub(crate) struct Fsck {
    /// Correct counts, and rows of the prefix index, that are wrong. Pushes and deletions wait
    /// meanwhile, and may get 503.
    #[arg(long)]
    repair: bool,
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    settings: Settings,
}

pub(super) fn run(args: Fsck) -> Result<(), Error> {
    let config = args.settings.load()?;
    let report = on_store(&config, &args.which, async |store| store.fsck(args.repair, &mut |_| ()).await.map_err(Error::Work))?;
    print(&report, args.json, text);
    if report.wrong == 0 || report.repaired {
        return Ok(());
    }
    Err(Error::Found(format!("{} between the tables and what they should say", count(report.wrong, "difference"))))
}

fn text(r: &FsckReport) -> String {
    let repaired = if r.repaired { ", corrected" } else { "" };
    let named = r.discrepancies.len() as u64;
    let more = if r.wrong > named { format!("wrong  and {} more\n", number(r.wrong - named)) } else { String::new() };
    let (objects, nodes, packs) = (count(r.objects, "object"), count(r.containers, "node"), count(r.packs, "pack"));
    format!("checked  {objects}, {nodes}, {packs}: {} wrong{repaired}\n", number(r.wrong)) + &lines("wrong", &r.discrepancies) + &more
}
