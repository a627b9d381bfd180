//! `pf log`: a lineage, drawn.

use super::tags;
use crate::cli::args::Log;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::Out;
use crate::cli::output::graph::{Line, Node, draw};
use crate::cli::output::human::{age, bytes, clip, columns, now_ms, pad};
use pfr_schema::Digest;
use pfr_schema::api::{Lineage, SnapshotSummary};
use std::collections::HashSet;

pub async fn run(context: &mut Context, args: Log) -> Result<(), Failure> {
    let site = context.site(args.at, Some(&args.reference)).await?;
    let limit = args.limit as usize;
    let lineage = match &args.reference.selector {
        Some(selector) => site.lineage(&args.reference.repository, selector, limit).await?,
        None => {
            let mut snapshots = site.newest_snapshots(&args.reference.repository, limit + 1).await?;
            let truncated = snapshots.len() > limit;
            snapshots.truncate(limit);
            Lineage { snapshots, truncated }
        }
    };
    if context.json {
        return context.out.json(&lineage);
    }
    print(&mut context.out, &lineage)
}

/// Draws a lineage.
pub fn print(out: &mut Out, lineage: &Lineage) -> Result<(), Failure> {
    let snapshots = &lineage.snapshots;
    let known: HashSet<Digest> = snapshots.iter().map(|s| s.digest).collect();
    let nodes: Vec<Node> = snapshots.iter().map(|s| Node { digest: s.digest, parents: s.parents.clone() }).collect();
    let lines = draw(&nodes);
    let now = now_ms();
    let lanes = lines.iter().map(|l| columns(&l.lanes)).max().unwrap_or(0).min(40);
    for Line { lanes: drawing, node } in lines {
        let Some(node) = node else {
            out.line(drawing)?;
            continue;
        };
        let text = entry(out, &snapshots[node], now, lanes, &pad(&drawing, lanes));
        out.line(text)?;
        for parent in snapshots[node].parents.iter().filter(|p| !known.contains(p)) {
            let why = if lineage.truncated { "not shown" } else { "not in this repository" };
            out.line(format!("{}  {}", pad("", lanes), out.paint.dim(&format!("parent {}: {why}", parent.short()))))?;
        }
    }
    if lineage.truncated {
        out.note("… and more: -n N shows them")?;
    }
    Ok(())
}

fn entry(out: &Out, s: &SnapshotSummary, now: u64, lanes: usize, drawing: &str) -> String {
    let names = tags(&s.tags);
    let size = format!("+{} of {}", bytes(s.new_bytes), bytes(s.logical_bytes));
    let when = age(s.pushed_at, now);
    let room = out.width.map_or(usize::MAX, |w| w.saturating_sub(lanes + 2 + 12));
    let names = clip(&names, room.saturating_sub(2).max(8));
    let mut left = room.saturating_sub(if names.is_empty() { 0 } else { columns(&names) + 2 });
    let mut text = format!("{drawing}  {}", out.paint.yellow(&s.digest.short()));
    if !names.is_empty() {
        text.push_str(&format!("  {}", out.paint.cyan(&names)));
    }
    for detail in [size, when] {
        if left >= columns(&detail) + 2 {
            left -= columns(&detail) + 2;
            text.push_str(&format!("  {}", out.paint.dim(&detail)));
        }
    }
    text
}
