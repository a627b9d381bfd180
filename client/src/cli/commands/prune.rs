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
use pfr_schema::api::{DeletedSnapshot, Freed, SnapshotSummary};
use pfr_schema::{Digest, ErrorCode, RepositoryName};
use pfr_store::{Criteria, KeepLast};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The result of `pf prune`, as JSON.
#[derive(Serialize)]
struct Report {
    dry_run: bool,
    /// Snapshots that were deleted, or would be.
    deleted: Vec<DeletedSnapshot>,
    /// Snapshots of these repositories that stay.
    kept: u64,
    /// Of these, snapshots that meet the criteria and are pinned.
    pinned: u64,
    /// Of a dry run: what the deletions would free together.
    #[serde(skip_serializing_if = "Option::is_none")]
    freed: Option<Freed>,
}

pub async fn run(context: &mut Context, args: Prune) -> Result<(), Failure> {
    if args.keep_last == Some(0) {
        let advice = Suggestion::help("rm").then(" says how to delete snapshots by name; without --keep-last the other criteria decide");
        return Err(Failure::usage("--keep-last 0 would keep no snapshot of a repository; the least is 1").hint(advice));
    }
    let site = context.site_of(args.at, &args.repositories).await?;
    let repositories = repositories(context, &site, &args).await?;
    let now = now_ms();
    let (pinned, criteria) = (pinned(&site).await?, criteria(&args));
    let mut report = Report { dry_run: args.dry_run, deleted: Vec::new(), kept: 0, pinned: 0, freed: None };
    let mut result = Ok(());
    for repository in repositories {
        let snapshots = site.snapshots(&repository).await?;
        let chosen = criteria.choose(&snapshots, now, |_| false);
        report.kept += (snapshots.len() - chosen.len()) as u64;
        for snapshot in chosen {
            if pinned.contains(&(repository.clone(), snapshot.digest)) {
                report.kept += 1;
                report.pinned += 1;
                continue;
            }
            if !args.dry_run {
                match delete(&site, &repository, snapshot).await {
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
            report.deleted.push(DeletedSnapshot {
                repository: repository.clone(),
                digest: snapshot.digest,
                tags: snapshot.tags.clone(),
                pushed_at: snapshot.pushed_at,
                logical_bytes: snapshot.logical_bytes,
                policy: None,
            });
        }
        if result.is_err() {
            break;
        }
    }
    if args.dry_run {
        match freed(&site, report.deleted.iter().map(|deleted| (&deleted.repository, &deleted.digest))).await {
            Ok(freed) => report.freed = freed,
            // What would be deleted is known, and printed.
            Err(failure) => result = Err(failure),
        }
    }
    if context.json {
        context.out.json(&report)?
    } else {
        print(context, &report, now)?
    }
    result
}

/// What a deletion of snapshots, all together, would free; none if the registry cannot say.
pub(super) async fn freed<'a>(
    site: &Site,
    snapshots: impl Iterator<Item = (&'a RepositoryName, &'a Digest)>,
) -> Result<Option<Freed>, Failure> {
    let mut chosen: BTreeMap<RepositoryName, BTreeSet<Digest>> = BTreeMap::new();
    for (repository, digest) in snapshots {
        chosen.entry(repository.clone()).or_default().insert(*digest);
    }
    Ok(site.freed_by(&chosen).await?)
}

/// The same in words, if there is a snapshot to delete.
pub(super) fn would_free(freed: Option<Freed>) -> Option<String> {
    let freed = freed.filter(|freed| freed.snapshots > 0)?;
    Some(format!("garbage collection would then free {}, {} as stored", bytes(freed.bytes), bytes(freed.stored_bytes)))
}

/// The repositories that the patterns match. A pattern without a match is an error: it is probably
/// misspelt.
async fn repositories(context: &Context, site: &Site, args: &Prune) -> Result<Vec<RepositoryName>, Failure> {
    let all = site.repositories().await?;
    let patterns: Vec<_> = args.repositories.iter().map(|repositories| &repositories.pattern).collect();
    for pattern in &patterns {
        if !all.iter().any(|repository| pattern.matches(repository.name.as_str())) {
            let words = format!("no repository in {} matches {pattern}", site.name());
            return Err(Failure::new(ErrorCode::RepositoryUnknown, words)
                .hint(Suggestion::new("ls").here().then(" lists the repositories there are"))
                .at(&context.flags()));
        }
    }
    let wanted = |name: &RepositoryName| patterns.iter().any(|pattern| pattern.matches(name.as_str()));
    Ok(all.into_iter().map(|repository| repository.name).filter(wanted).collect())
}

/// What must stay in a local store: no rule tells whether a person still wants what is pinned, and
/// what waits to be pushed has no other copy.
async fn pinned(site: &Site) -> Result<HashSet<(RepositoryName, Digest)>, Failure> {
    let Site::Store(store) = site else { return Ok(HashSet::new()) };
    Ok(store.pinned().await?.into_iter().map(|pinned| (pinned.repository, pinned.snapshot.digest)).collect())
}

/// What the command line says is to be deleted.
fn criteria(args: &Prune) -> Criteria {
    Criteria {
        tags: args.tag.clone(),
        untagged: args.untagged,
        below: None,
        keep_last: args.keep_last.map(KeepLast::OfRepository),
        older_than: args.older_than.map(|age| age.0),
    }
}

/// Deletes a snapshot, unless its tags have changed since it was chosen, or one is immutable.
/// Returns whether it did.
async fn delete(site: &Site, repository: &RepositoryName, seen: &SnapshotSummary) -> Result<bool, Failure> {
    match site.delete_snapshot_tagged(repository, &seen.digest, &seen.tags).await {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.code(), ErrorCode::TagMoved | ErrorCode::TagImmutable) => Ok(false),
        // Another client deleted it, or the whole repository.
        Err(error) if matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::RepositoryUnknown) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

/// Writes the deleted snapshots, if there are any.
pub(super) fn list(context: &mut Context, deleted: &[DeletedSnapshot], now: u64) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("REPOSITORY").style(Style::Bold),
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("TAGS").style(Style::Cyan),
        Column::left("PUSHED"),
        Column::right("LOGICAL"),
        Column::left("POLICY").optional(),
    ]);
    for d in deleted {
        let policy = d.policy.clone().unwrap_or_default();
        table.row([d.repository.to_string(), d.digest.short(), tags(&d.tags), age(d.pushed_at, now), bytes(d.logical_bytes), policy]);
    }
    if deleted.is_empty() { Ok(()) } else { context.out.table(&table) }
}

fn print(context: &mut Context, report: &Report, now: u64) -> Result<(), Failure> {
    list(context, &report.deleted, now)?;
    let deleted = count(report.deleted.len() as u64, "snapshot");
    let kept = match report.pinned {
        0 => format!("{} kept", report.kept),
        pinned => {
            let list = context.suggest(&Suggestion::new("ls").local().arg("--pinned"));
            format!("{} kept, {pinned} of them because they are pinned ({list} says why)", report.kept)
        }
    };
    let gc = context.suggest(&Suggestion::new("gc").here());
    let freed = would_free(report.freed).map(|words| format!("; {words}")).unwrap_or_default();
    let words = match (report.dry_run, report.deleted.is_empty()) {
        (true, _) => format!("nothing was changed: {deleted} would be deleted, {kept}{freed}"),
        (false, true) => format!("no snapshot is to be deleted, {kept}"),
        (false, false) => format!("{deleted} deleted, {kept}; garbage collection ({gc}) frees what is no longer referred to"),
    };
    context.out.note(&words)
}

#[cfg(test)]
mod tests {
    use crate::cli::args::Args;
    use clap::Parser as _;

    #[test]
    fn no_criterion_is_refused() {
        assert!(Args::try_parse_from(["pf", "prune", "r"]).is_err());
        assert!(Args::try_parse_from(["pf", "prune", "--untagged"]).is_err());
    }
}
