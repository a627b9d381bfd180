//! `pf-registry rebuild`: builds a new database from packs and journal.

use super::Settings;
use super::tool::{PACKS, Which, lines, on_packs, print, runtime, there_are_packs};
use crate::{DataLock, Error};
use clap::Args;
use pfr_client::human::count;
use pfr_schema::DomainName;
use pfr_schema::api::RebuildReport;

/// Arguments of `rebuild`.
#[derive(Args)]
pub(crate) struct Rebuild {
    /// Print the report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    settings: Settings,
}

pub(super) fn run(args: Rebuild) -> Result<(), Error> {
    let config = args.settings.load()?;
    let name = &args.which.domain;
    let packs = if name.is_default() { PACKS.to_owned() } else { format!("{}/{name}/{PACKS}", DomainName::FOLDER) };
    there_are_packs(&config, &packs)?;
    let _lock = runtime()?.block_on(DataLock::take(&config))?;
    let report = on_packs(&config, async |domains| {
        let mut report = domains.adopt(name).await?.rebuild(&mut |_| ()).await.map_err(Error::Work)?;
        if name.is_default() {
            report.domains = domains.find().await.map_err(Error::Work)?;
            match domains.left().await {
                Ok(left) => report.left = left,
                // The rebuild is done, and its report must not be lost.
                Err(error) => tracing::warn!(%error, "whether something is left of deleted domains is not known"),
            }
        }
        Ok(report)
    })?;
    print(&report, args.json, text);
    if report.lost.is_empty() && report.refused.is_empty() {
        return Ok(());
    }
    let found = [(report.lost.len(), "lost snapshot"), (report.refused.len(), "unreadable object")];
    let found: Vec<String> = found.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| count(n as u64, what)).collect();
    Err(Error::Found(format!("rebuilt with {}", found.join(" and "))))
}

fn text(r: &RebuildReport) -> String {
    format!(
        "rebuilt  {} and {} from {}; {} and {} from {}\n",
        count(r.snapshots, "snapshot"),
        count(r.tags, "tag"),
        count(r.journal, "journal object"),
        count(r.objects, "blob"),
        count(r.containers, "node"),
        count(r.packs, "pack"),
    ) + &lines("refused", &r.refused)
        + &lines("lost   ", &r.lost)
        + &lines("domain ", &r.domains.iter().map(found).collect::<Vec<_>>())
        + &lines("left   ", &r.left.iter().map(left).collect::<Vec<_>>())
}

fn found(domain: &DomainName) -> String {
    format!("{domain}: found on the storage; if its tables are lost too, run rebuild again with --domain {domain}")
}

fn left(domain: &DomainName) -> String {
    format!(
        "{domain}: packs or tables of it are there, and its marker is not. Is its storage mounted and complete? If the domain was being \
         deleted, DELETE /v1/domains/{domain} removes the rest; if not, run rebuild again with --domain {domain}"
    )
}
