//! `pf ls`: repositories, or a repository's snapshots and tags.

use super::tags;
use super::usage::unfinished;
use crate::cli::args::{Ls, repository_of};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{age, bytes, count, now_ms, number};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::Suggestion;
use pfr_client::Site;
use pfr_schema::api::{RepositoryList, SnapshotSummary, TagInfo};
use pfr_schema::{DomainName, ErrorCode, Reference, RepositoryName};
use serde::Serialize;

/// The contents of a repository.
#[derive(Serialize)]
struct Contents {
    repository: RepositoryName,
    tags: Vec<TagInfo>,
    snapshots: Vec<SnapshotSummary>,
}

pub async fn run(context: &mut Context, args: Ls) -> Result<(), Failure> {
    let site = context.site(args.at, args.repository.as_ref()).await?;
    match args.repository {
        None => repositories(context, &site).await,
        Some(reference) => contents(context, &site, repository_of(&reference)?).await.map_err(|failure| advise(failure, &reference)),
    }
}

/// Adds a hint to a failure if the user gave the address of a domain, which is not a reference to a
/// repository. The hint is the command that lists the domain.
fn advise(failure: Failure, reference: &Reference) -> Failure {
    let is_unknown = matches!(&failure, Failure::Error { code: ErrorCode::RepositoryUnknown, .. });
    let name = reference.repository.as_str().split_once('/').filter(|(folder, _)| *folder == DomainName::FOLDER);
    match (&reference.registry, name) {
        (Some(registry), Some((_, name))) if is_unknown && name.parse::<DomainName>().is_ok() => {
            let ls = Suggestion::new("ls").arg("--registry").arg(format!("{registry}/{}", reference.repository));
            failure.hint(ls.then(&format!(" lists the domain {name}")))
        }
        _ => failure,
    }
}

async fn repositories(context: &mut Context, site: &Site) -> Result<(), Failure> {
    let repositories = site.repositories().await?;
    if context.json {
        return context.out.json(&RepositoryList { repositories, next: None });
    }
    let now = now_ms();
    let unfinished = match site {
        Site::Store(_) => unfinished(&site.usage().await?, now, &context.flags()),
        Site::Registry(_) => None,
    };
    if repositories.is_empty() {
        let words = match unfinished {
            Some(words) => format!("{} holds no snapshot yet, but {words}", site.name()),
            None => format!("{} holds nothing yet", site.name()),
        };
        return context.out.line(words);
    }
    let mut table = Table::new([
        Column::left("REPOSITORY").style(Style::Bold),
        Column::right("SNAPSHOTS"),
        Column::right("TAGS"),
        Column::left("UPDATED").optional(),
    ]);
    for r in repositories {
        table.row([r.name.to_string(), number(r.snapshots), number(r.tags), age(r.updated_at, now)]);
    }
    context.out.table(&table)?;
    match unfinished {
        Some(words) => context.out.note(&words),
        None => Ok(()),
    }
}

async fn contents(context: &mut Context, site: &Site, repository: RepositoryName) -> Result<(), Failure> {
    let contents = Contents { tags: site.tags(&repository).await?, snapshots: site.snapshots(&repository).await?, repository };
    if context.json {
        return context.out.json(&contents);
    }
    let now = now_ms();
    let mut table = Table::new([
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("TAGS").style(Style::Cyan),
        Column::left("PUSHED").optional(),
        Column::right("LOGICAL"),
        Column::right("NEW"),
        Column::left("PARENT").style(Style::Dim).optional(),
    ]);
    for s in &contents.snapshots {
        table.row([
            s.digest.short(),
            tags(&s.tags),
            age(s.pushed_at, now),
            bytes(s.logical_bytes),
            bytes(s.new_bytes),
            s.parents.iter().map(pfr_schema::Digest::short).collect::<Vec<_>>().join(" "),
        ]);
    }
    context.out.table(&table)?;
    let (snapshots, tags) = (contents.snapshots.len() as u64, contents.tags.len() as u64);
    let mut summary = format!("{}, {}", count(snapshots, "snapshot"), count(tags, "tag"));
    if snapshots == 0 {
        // An empty repository does not exist, so this one holds images.
        summary.push_str("; it holds images, which OCI clients list (docs/oci.md)");
    }
    context.out.note(&summary)
}
