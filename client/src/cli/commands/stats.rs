//! `pf stats`: how much snapshots share, and what each costs.

use super::tags;
use crate::cli::args::{Inside, Stats as StatsArgs, repository_of};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::Out;
use crate::cli::output::bar::stacked;
use crate::cli::output::human::{bytes, count, ratio};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use pfr_client::Site;
use pfr_schema::api::Stats;
use pfr_schema::{Reference, Selector};

pub async fn run(context: &mut Context, args: StatsArgs) -> Result<(), Failure> {
    let site = context.site(args.at, args.repository.as_ref()).await?;
    let repository = args.repository.as_ref().map(repository_of).transpose()?;
    let below = match (&args.repository, &args.below) {
        (Some(of), Some(Inside(below))) => Some(selected(context, of, below.seen_from(of), &site)?),
        _ => None,
    };
    let is_of_some = below.is_some() || args.agent.is_some();
    let stats = match is_of_some {
        true => site.stats_of(repository.as_ref(), below.as_ref(), args.agent.as_deref()).await?,
        false => site.stats(repository.as_ref()).await?,
    };
    if context.json {
        return context.out.json(&stats);
    }
    if stats.snapshots.is_empty() && is_of_some {
        return context.out.line("no snapshot is of that agent there");
    }
    if stats.snapshots.is_empty() {
        return context.out.line(format!("{} holds no snapshots yet", site.name()));
    }
    print(&mut context.out, &stats)
}

/// Which snapshot of the repository `of` a complete reference means. Refuses one to another
/// repository or registry: statistics are of one.
fn selected(context: &Context, of: &Reference, below: Reference, site: &Site) -> Result<Selector, Failure> {
    let (is_same_site, place) = match site {
        Site::Registry(remote) => (context.is_same_registry(of, &below), remote.url()),
        Site::Store(_) => (below.registry.is_none(), site.name()),
    };
    if is_same_site && below.repository == of.repository {
        return Ok(below.selector_or_latest());
    }
    let message = format!("--below needs a snapshot of {} in {place}, found {below}", of.repository);
    Err(Failure::usage(message).hint("name it by its tag or digest alone, or name its own repository and registry before it"))
}

/// Writes the table and the totals.
pub fn print(out: &mut Out, stats: &Stats) -> Result<(), Failure> {
    let mut columns = vec![
        Column::left("SNAPSHOT").style(Style::Yellow).fixed(),
        Column::left("TAGS").style(Style::Cyan),
        Column::right("LOGICAL"),
        Column::right("NEW"),
        Column::right("SHARED").optional(),
        Column::right("EXCLUSIVE"),
        Column::left("█ EXCLUSIVE ░ SHARED").optional(),
    ];
    let everything = stats.repository.is_none();
    if everything {
        columns.insert(0, Column::left("REPOSITORY").style(Style::Bold));
    }
    let mut table = Table::new(columns);
    let scale = stats.snapshots.iter().map(|s| s.logical).max().unwrap_or(0);
    for s in &stats.snapshots {
        let mut row = vec![
            s.digest.short(),
            tags(&s.tags),
            bytes(s.logical),
            bytes(s.new),
            bytes(s.shared),
            bytes(s.exclusive),
            stacked(s.exclusive, s.shared, scale, 20),
        ];
        if everything {
            row.insert(0, s.repository.to_string());
        }
        table.row(row);
    }
    out.table(&table)?;
    if stats.omitted > 0 {
        out.line(out.paint.dim(&format!("{} before these are counted, and not shown", count(stats.omitted, "snapshot"))))?;
    }
    out.line("")?;
    let packs = if stats.repository.is_some() { "packs on disk, of everything the store holds" } else { "packs on disk" };
    out.pairs(&[
        (
            "logical",
            format!(
                "{}  {}",
                bytes(stats.logical),
                out.paint.dim(&format!("in {}", count(stats.snapshots.len() as u64 + stats.omitted, "snapshot")))
            ),
        ),
        ("unique", format!("{}  {}", bytes(stats.unique), out.paint.dim("each blob once"))),
        ("stored", format!("{}  {}", bytes(stats.stored), out.paint.dim("after compression, with headers"))),
        ("disk", format!("{}  {}", bytes(stats.disk), out.paint.dim(packs))),
        ("dedup ratio", out.paint.green(&ratio(stats.dedup_ratio))),
        ("compression", ratio(stats.codec_ratio)),
    ])
}
