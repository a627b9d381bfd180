//! `pf-registry rebuild`.

use super::Settings;
use super::tool::{lines, on_store, print};
use crate::{DataLock, server};
use clap::Args;
use pfr_schema::api::RebuildReport;

/// Arguments of `rebuild`.
#[derive(Args)]
pub(crate) struct Rebuild {
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

pub(super) fn run(args: Rebuild) -> Result<(), server::Error> {
    let config = args.settings.load()?;
    let _lock = DataLock::take(&config)?;
    let report = on_store(&config, async |store| store.rebuild(&mut |_| ()).await.map_err(server::Error::Work))?;
    print(&report, args.json, words);
    if report.lost.is_empty() && report.refused.is_empty() {
        return Ok(());
    }
    Err(server::Error::Found(format!(
        "{} snapshots are lost, {} objects on storage could not be read",
        report.lost.len(),
        report.refused.len()
    )))
}

fn words(r: &RebuildReport) -> String {
    format!(
        "rebuilt  {} snapshots and {} tags from {} journal objects; {} blobs and {} containers from {} packs\n",
        r.snapshots, r.tags, r.journal, r.objects, r.containers, r.packs
    ) + &lines("refused", &r.refused)
        + &lines("lost   ", &r.lost)
}
