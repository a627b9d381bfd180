//! `pf inspect`: all of one snapshot.

use crate::cli::args::Inspect;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::Out;
use crate::cli::output::human::{age, bytes, count, now_ms, number, one_line, utc};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use pfr_schema::api::SnapshotDetail;
use pfr_schema::snapshot::{Exactness, TITLE};
use pfr_schema::tree::{GroupKind, PageTree, TreeSequence};
use serde::Serialize;

/// Sequences listed for one group; further ones are counted.
const SEQUENCES_SHOWN: usize = 16;

pub async fn run(context: &mut Context, args: Inspect) -> Result<(), Failure> {
    let site = context.site(args.at, Some(&args.reference)).await?;
    let detail = site.detail(&args.reference.repository, &args.reference.selector_or_latest()).await?;
    if context.json {
        return context.out.json(&detail);
    }
    let out = &mut context.out;
    head(out, &detail)?;
    groups(out, &detail.trees)?;
    sequences(out, &detail.trees)?;
    layers(out, &detail)
}

fn head(out: &mut Out, detail: &SnapshotDetail) -> Result<(), Failure> {
    let (s, config) = (&detail.summary, &detail.config);
    let paint = out.paint;
    let text = |t: &Option<String>| t.as_deref().map(one_line).unwrap_or_default();
    let parents: Vec<String> = s.parents.iter().map(ToString::to_string).collect();
    let pages: u64 = detail.trees.iter().map(PageTree::pages).sum();
    let page_bytes: u64 = detail.trees.iter().map(|t| t.pages() * t.components.len() as u64 * t.page_bytes).sum();
    let exactness = match config.exactness {
        None => "",
        Some(Exactness::BitExact) => "bit-exact",
        Some(Exactness::NearExact) => "near-exact",
    };
    out.pairs(&[
        ("snapshot", paint.yellow(&s.digest.to_string())),
        ("tags", paint.cyan(&super::tags(&s.tags))),
        ("parents", parents.join("  ")),
        ("pushed", format!("{}, {}", utc(s.pushed_at), age(s.pushed_at, now_ms()))),
        ("tokens", number(detail.trees.iter().map(PageTree::tokens).max().unwrap_or(0))),
        ("pages", format!("{}, {}", number(pages), bytes(page_bytes))),
        ("logical", format!("{}, of which {} were new", bytes(s.logical_bytes), bytes(s.new_bytes))),
        ("agent", text(&config.agent)),
        ("engine", text(&config.engine)),
        ("prefix length", config.boundary.map(|tokens| count(tokens, "token")).unwrap_or_default()),
        ("prefix", config.prefix.as_ref().map(|key| format!("{} {}", one_line(&key.scheme), key.prefix)).unwrap_or_default()),
        ("exactness", exactness.to_owned()),
        ("unrecorded", one_line(&config.unrecorded.join(", "))),
        ("fingerprint", config.fingerprint.map(|d| d.to_string()).unwrap_or_default()),
        ("created", text(&config.created)),
    ])?;
    for signature in &detail.signatures {
        let key = signature.key_id.map_or_else(|| "a key that is not named".to_owned(), |id| format!("key {id}"));
        let time = signature.signed_at.map(|at| format!(", {}, {}", utc(at), age(at, now_ms()))).unwrap_or_default();
        out.pairs(&[("signature", format!("{key}{time}"))])?;
    }
    let named = |what: &'static str| move |(key, value): (&String, &serde_json::Value)| (format!("{what} {key}"), value.clone());
    let more: Vec<(String, String)> = (config.deployment.iter().map(named("configuration")))
        .chain(config.sampling.iter().map(named("sampling")))
        .map(|(key, value)| (key, value.as_str().map_or_else(|| value.to_string(), str::to_owned)))
        .chain(detail.manifest.annotations.iter().map(|(key, value)| (key.clone(), value.clone())))
        .map(|(key, value)| (one_line(&key), one_line(&value)))
        .collect();
    out.pairs(&more.iter().map(|(key, value)| (key.as_str(), value.clone())).collect::<Vec<_>>())
}

fn groups(out: &mut Out, trees: &[PageTree]) -> Result<(), Failure> {
    if trees.is_empty() {
        return Ok(());
    }
    let mut table = Table::new([
        Column::left("GROUP").style(Style::Bold),
        Column::left("KIND"),
        Column::left("SHAPE"),
        Column::right("PAGES"),
        Column::right("PAGE"),
        Column::right("CHUNKS").optional(),
        Column::left("RANK").optional(),
        Column::left("LAYOUT").style(Style::Dim).optional(),
    ]);
    for tree in trees {
        let shape = tree.geometry.map_or_else(
            || format!("{} tokens", tree.page_size_tokens),
            |g| format!("{}L × {}t × {}h × {}d {}", g.n_layers, g.page_size_tokens, g.n_heads, g.head_dim, word(&g.dtype)),
        );
        table.row([
            one_line(&tree.group.name),
            kind(tree.group.kind).into(),
            shape,
            number(tree.pages()),
            format!("{} × {}", tree.components.len(), bytes(tree.page_bytes)),
            number(tree.runs.len() as u64),
            if tree.world > 1 { format!("{} of {}", tree.rank, tree.world) } else { String::new() },
            one_line(&tree.layout),
        ]);
    }
    out.line("")?;
    out.table(&table)
}

fn sequences(out: &mut Out, trees: &[PageTree]) -> Result<(), Failure> {
    if trees.iter().all(|t| t.sequences.is_empty()) {
        return Ok(());
    }
    let mut table = Table::new([
        Column::left("SEQUENCE").style(Style::Bold),
        Column::left("GROUP"),
        Column::right("TOKENS"),
        Column::right("PAGES"),
        Column::left("LAST PAGE").optional(),
    ]);
    let mut hidden = 0;
    for tree in trees {
        hidden += tree.sequences.len().saturating_sub(SEQUENCES_SHOWN);
        for s in tree.sequences.iter().take(SEQUENCES_SHOWN) {
            let fill = if s.fill == 0 { "full".into() } else { format!("{} of {}", s.fill, tree.page_size_tokens) };
            table.row([one_line(&s.id), one_line(&tree.group.name), number(tokens(s, tree)), number(s.ix.len()), fill]);
        }
    }
    out.line("")?;
    out.table(&table)?;
    if hidden > 0 {
        out.note(&format!("and {} more; --json has all", count(hidden as u64, "sequence")))?;
    }
    Ok(())
}

fn tokens(sequence: &TreeSequence, tree: &PageTree) -> u64 {
    let unused = if sequence.fill == 0 { 0 } else { tree.page_size_tokens - sequence.fill };
    sequence.ix.len() * u64::from(tree.page_size_tokens) - u64::from(unused)
}

fn layers(out: &mut Out, detail: &SnapshotDetail) -> Result<(), Failure> {
    let mut table = Table::new([
        Column::left("LAYER").style(Style::Yellow).fixed(),
        Column::right("SIZE"),
        Column::left("TITLE").optional(),
        Column::left("MEDIA TYPE").style(Style::Dim).optional(),
    ]);
    for layer in std::iter::once(&detail.manifest.config).chain(&detail.manifest.layers) {
        let title = layer.annotations.get(TITLE).map(|t| one_line(t)).unwrap_or_default();
        table.row([layer.digest.short(), bytes(layer.size), title, one_line(&layer.media_type)]);
    }
    out.line("")?;
    out.table(&table)
}

fn kind(kind: GroupKind) -> &'static str {
    match kind {
        GroupKind::FullAttention => "full-attention",
        GroupKind::SlidingWindow => "sliding-window",
        GroupKind::Mla => "mla",
        GroupKind::Recurrent => "recurrent",
    }
}

/// A unit variant as it is written on the wire.
fn word<T: Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}
