//! `pf prune`: deletes the snapshots that meet every criterion.

use super::tags;
use crate::cli::args::Prune;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{age, bytes, count, now_ms};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use pfr_client::Site;
use pfr_schema::api::SnapshotSummary;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use serde::Serialize;
use std::collections::HashSet;

/// The result of `pf prune`, as JSON.
#[derive(Serialize)]
struct Report {
    dry_run: bool,
    /// Snapshots that were deleted, or would be.
    deleted: Vec<Deleted>,
    /// Snapshots of these repositories that stay.
    kept: u64,
    /// Of these, snapshots that meet the criteria and are pinned.
    pinned: u64,
}

#[derive(Serialize)]
struct Deleted {
    repository: RepositoryName,
    digest: Digest,
    tags: Vec<Tag>,
    pushed_at: u64,
    logical_bytes: u64,
}

pub async fn run(context: &mut Context, args: Prune) -> Result<(), Failure> {
    let site = context.site(args.at, None).await?;
    let repositories = repositories(context, &site, &args).await?;
    let now = now_ms();
    let pinned = pinned(&site).await?;
    let mut report = Report { dry_run: args.dry_run, deleted: Vec::new(), kept: 0, pinned: 0 };
    let mut result = Ok(());
    for repository in repositories {
        let snapshots = site.snapshots(&repository).await?;
        let (total, chosen) = (snapshots.len() as u64, choose(snapshots, &args, now));
        report.kept += total - chosen.len() as u64;
        for snapshot in chosen {
            if pinned.contains(&(repository.clone(), snapshot.digest)) {
                report.kept += 1;
                report.pinned += 1;
                continue;
            }
            if !args.dry_run {
                match delete(&site, &repository, &snapshot).await {
                    Ok(true) => {}
                    Ok(false) => {
                        report.kept += 1;
                        continue;
                    }
                    Err(failure) => {
                        result = Err(failure);
                        break;
                    }
                }
            }
            let SnapshotSummary { digest, tags, pushed_at, logical_bytes, .. } = snapshot;
            report.deleted.push(Deleted { repository: repository.clone(), digest, tags, pushed_at, logical_bytes });
        }
        if result.is_err() {
            break;
        }
    }
    if context.json {
        context.out.json(&report)?
    } else {
        print(context, &report, now)?
    }
    result
}

/// The repositories that the patterns match. A pattern without a match is an error: it is probably
/// misspelt.
async fn repositories(context: &Context, site: &Site, args: &Prune) -> Result<Vec<RepositoryName>, Failure> {
    let all = site.repositories().await?;
    for pattern in &args.repositories {
        if !all.iter().any(|repository| pattern.matches(repository.name.as_str())) {
            let words = format!("no repository in {} matches {pattern}", site.name());
            return Err(Failure::new(ErrorCode::RepositoryUnknown, words)
                .hint(Suggestion::new("ls").here().then(" lists the repositories there are"))
                .at(&context.flags()));
        }
    }
    let wanted = |name: &RepositoryName| args.repositories.iter().any(|pattern| pattern.matches(name.as_str()));
    Ok(all.into_iter().map(|repository| repository.name).filter(wanted).collect())
}

/// What must stay in a local store: no rule tells whether a person still wants what is pinned, and
/// what waits to be pushed has no other copy.
async fn pinned(site: &Site) -> Result<HashSet<(RepositoryName, Digest)>, Failure> {
    let Site::Store(store) = site else { return Ok(HashSet::new()) };
    Ok(store.pinned().await?.into_iter().map(|pinned| (pinned.repository, pinned.snapshot.digest)).collect())
}

/// The snapshots to delete, of `snapshots` given newest first.
fn choose(snapshots: Vec<SnapshotSummary>, args: &Prune, now: u64) -> Vec<SnapshotSummary> {
    let by_tag = |snapshot: &SnapshotSummary| match snapshot.tags.as_slice() {
        _ if !args.untagged && args.tag.is_empty() => true,
        [] => args.untagged,
        tags => !args.tag.is_empty() && tags.iter().all(|tag| args.tag.iter().any(|pattern| pattern.matches(tag.as_str()))),
    };
    let old = |snapshot: &SnapshotSummary| {
        let age = u128::from(now.saturating_sub(snapshot.pushed_at));
        args.older_than.is_none_or(|least| age > least.0.as_millis())
    };
    snapshots.into_iter().filter(by_tag).skip(args.keep_last.unwrap_or(0)).filter(old).collect()
}

/// Deletes a snapshot, unless its tags have changed since it was chosen. Returns whether it did.
async fn delete(site: &Site, repository: &RepositoryName, seen: &SnapshotSummary) -> Result<bool, Failure> {
    match site.delete_snapshot_tagged(repository, &seen.digest, &seen.tags).await {
        Ok(()) => Ok(true),
        Err(error) if error.code() == ErrorCode::TagMoved => Ok(false),
        // Another client deleted it, or the whole repository.
        Err(error) if matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn print(context: &mut Context, report: &Report, now: u64) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("REPOSITORY").style(Style::Bold),
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("TAGS").style(Style::Cyan),
        Column::left("PUSHED"),
        Column::right("LOGICAL"),
    ]);
    for d in &report.deleted {
        table.row([d.repository.to_string(), d.digest.short(), tags(&d.tags), age(d.pushed_at, now), bytes(d.logical_bytes)]);
    }
    if !report.deleted.is_empty() {
        context.out.table(&table)?;
    }
    let deleted = count(report.deleted.len() as u64, "snapshot");
    let kept = match report.pinned {
        0 => format!("{} kept", report.kept),
        pinned => {
            let list = context.suggest(&Suggestion::new("ls").local().arg("--pinned"));
            format!("{} kept, {pinned} of them because they are pinned ({list} says why)", report.kept)
        }
    };
    let gc = context.suggest(&Suggestion::new("gc").here());
    let words = match (report.dry_run, report.deleted.is_empty()) {
        (true, _) => format!("nothing was changed: {deleted} would be deleted, {kept}"),
        (false, true) => format!("no snapshot is to be deleted, {kept}"),
        (false, false) => format!("{deleted} deleted, {kept}; garbage collection ({gc}) frees what is no longer referred to"),
    };
    context.out.note(&words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Args;
    use clap::Parser as _;

    const HOUR: u64 = 3_600_000;

    fn snapshot(hours: u64, tags: &[&str]) -> SnapshotSummary {
        SnapshotSummary {
            digest: Digest::sha256(&hours.to_le_bytes()),
            tags: tags.iter().map(|tag| tag.parse().unwrap()).collect(),
            parents: Vec::new(),
            pushed_at: 1000 * HOUR - hours * HOUR,
            logical_bytes: 0,
            new_bytes: 0,
        }
    }

    /// The ages in hours of the snapshots that are deleted.
    fn chosen(options: &[&str]) -> Vec<u64> {
        let all = vec![
            snapshot(1, &["main"]),
            snapshot(2, &[]),
            snapshot(3, &["try-1"]),
            snapshot(4, &["try-2", "main-2"]),
            snapshot(5, &[]),
            snapshot(6, &["try-3", "try-4"]),
        ];
        let line = [&["pf", "prune", "r"], options].concat();
        let crate::cli::args::Command::Prune(args) = Args::try_parse_from(line).unwrap().command else { panic!("prune") };
        choose(all, &args, 1000 * HOUR).into_iter().map(|s| 1000 - s.pushed_at / HOUR).collect()
    }

    #[test]
    fn a_snapshot_is_deleted_if_it_meets_every_criterion() {
        assert_eq!(chosen(&["--keep-last", "2"]), [3, 4, 5, 6]);
        assert_eq!(chosen(&["--older-than", "4h"]), [5, 6]);
        assert_eq!(chosen(&["--untagged"]), [2, 5]);
        assert_eq!(chosen(&["--untagged", "--keep-last", "1"]), [5]);
        assert_eq!(chosen(&["--tag", "try-*"]), [3, 6], "one that has another tag stays");
        assert_eq!(chosen(&["--tag", "try-*", "--tag", "main-*", "--older-than", "3h"]), [4, 6]);
        assert_eq!(chosen(&["--tag", "try-*", "--untagged", "--keep-last", "2"]), [5, 6]);
        assert_eq!(chosen(&["--keep-last", "99"]), [0_u64; 0]);
    }

    #[test]
    fn no_criterion_is_refused() {
        assert!(Args::try_parse_from(["pf", "prune", "r"]).is_err());
        assert!(Args::try_parse_from(["pf", "prune", "--untagged"]).is_err());
    }
}
