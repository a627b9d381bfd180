//! `pf ls --local --pinned`: what eviction leaves in the local store.

use super::tags;
use crate::cli::args::{Ls, repository_of};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{age, bytes, count, now_ms};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use pfr_client::Site;
use pfr_schema::api::SnapshotSummary;
use pfr_schema::{Reference, RepositoryName};
use pfr_store::{Pin, PinnedSnapshot};
use serde::Serialize;

/// The pinned snapshots of a store.
#[derive(Serialize)]
struct PinnedSnapshots {
    pinned: Vec<Pinned>,
}

/// A snapshot, where it is, and what keeps it.
#[derive(Serialize)]
struct Pinned {
    repository: RepositoryName,
    pins: Vec<Pin>,
    #[serde(flatten)]
    snapshot: SnapshotSummary,
}

pub async fn list(context: &mut Context, args: Ls) -> Result<(), Failure> {
    let Site::Store(store) = context.site(args.at, args.repository.as_ref()).await? else {
        let ls = Suggestion::new("ls").local().arg("--pinned");
        let ls = match args.repository {
            Some(reference) => ls.arg(Reference { registry: None, ..reference }),
            None => ls,
        };
        return Err(Failure::usage("a registry has no pins, so --pinned needs --local").hint(ls.then(" lists those of the local store")));
    };
    let repository = args.repository.as_ref().map(repository_of).transpose()?;
    if let Some(repository) = &repository {
        // A repository that does not exist is an error, as for every list.
        store.snapshots(repository, None, 1).await?;
    }
    let of_it = |name: &RepositoryName| repository.as_ref().is_none_or(|repository| repository == name);
    let rows = store.pinned().await?.into_iter().filter(|row| of_it(&row.repository));
    let pinned = |row: PinnedSnapshot| Pinned { repository: row.repository, pins: row.pins, snapshot: row.snapshot.into() };
    let pinned: Vec<Pinned> = rows.map(pinned).collect();
    if context.json {
        return context.out.json(&PinnedSnapshots { pinned });
    }
    if pinned.is_empty() {
        return context.out.line("nothing is pinned");
    }
    let now = now_ms();
    let mut table = Table::new([
        Column::left("REPOSITORY").style(Style::Bold),
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("TAGS").style(Style::Cyan),
        Column::left("PINNED"),
        Column::right("LOGICAL"),
        Column::left("PUSHED").optional(),
    ]);
    for Pinned { repository, pins, snapshot } in &pinned {
        table.row([
            repository.to_string(),
            snapshot.digest.short(),
            tags(&snapshot.tags),
            pins.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            bytes(snapshot.logical_bytes),
            age(snapshot.pushed_at, now),
        ]);
    }
    context.out.table(&table)?;
    context.out.note(&format!("{} pinned", count(pinned.len() as u64, "snapshot")))
}
