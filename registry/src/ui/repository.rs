//! A repository's fork tree, and what each fork costs.

use super::bars::{self, Cost};
use super::chart;
use super::links::Links;
use super::page::{Page, Place};
use super::tree::{self, Joint, Row};
use super::words::{ago, bytes, count, none, number, ratio, short};
use crate::app::App;
use crate::auth::{Access, Pull};
use crate::http::query::Query;
use crate::problem::ApiError;
use crate::v1::Answer;
use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::api::{SnapshotStats, Stats};
use pfr_schema::{Digest, RepositoryName, Tag};
use serde::Deserialize;
use std::collections::HashMap;

/// Snapshots of one page.
const ROWS: usize = 100;
/// Tags of a snapshot that its row names.
const TAGS: usize = 6;

/// Which page of the tree.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PageNumber {
    page: Option<usize>,
}

/// The page of a repository.
pub(crate) async fn repository(
    Access { to: repository, domain, caller, .. }: Access<Pull>,
    State(app): State<App>,
    Query(number): Query<PageNumber>,
) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let _place = app.statistics(&domain).await?;
    let stats = domain.store.stats(Some(&repository)).await?;
    let (rows, pages) = (tree::rows(&stats.snapshots), stats.snapshots.len().div_ceil(ROWS).max(1));
    let page = number.page.unwrap_or(1);
    if !(1..=pages).contains(&page) {
        return Err(ApiError::invalid(format!("this repository has pages 1 to {pages}, found {page}")));
    }
    let shown = &rows[(page - 1) * ROWS..rows.len().min(page * ROWS)];
    let digests = shown.iter().map(|row| stats.snapshots[row.snapshot].digest).collect();
    let tokens = domain.store.prefix_lengths(&repository, digests).await?;
    let drawing = Drawing { links: &links, repository: &repository, snapshots: &stats.snapshots, tokens: &tokens, now };
    let body = html! {
        (summary(&stats, now))
        section {
            h2 id="tree" { "Fork tree" }
            @if stats.omitted > 0 { p { (count(stats.omitted, "older snapshot")) " " @if stats.omitted == 1 { "is" } @else { "are" } " counted above, and not drawn." } }
            (costs_key())
            (drawing.table(shown))
            (paging(&links.repository(&repository), page, pages))
        }
    };
    let trail = html! { nav.trail aria-label="Path" { a href=(links.repositories()) { "Repositories" } } };
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Elsewhere, title: repository.as_str(), trail, body }.respond())
}

/// What the colours of a cost mean.
pub(super) fn costs_key() -> Markup {
    bars::key(&[
        ("exclusive", "exclusive", "is freed by deleting this snapshot"),
        ("shared", "shared", "is held by something else as well"),
        ("new", "new", "was added when it was pushed"),
    ])
}

/// The cost of a snapshot.
pub(super) fn cost(stats: &SnapshotStats) -> Cost {
    Cost { new: stats.new, shared: stats.shared, exclusive: stats.exclusive }
}

fn summary(stats: &Stats, now: u64) -> Markup {
    let snapshots = stats.omitted + stats.snapshots.len() as u64;
    let mut growth: Vec<(u64, u64)> = stats.snapshots.iter().map(|snapshot| (snapshot.pushed_at, snapshot.new)).collect();
    growth.sort_unstable();
    // What is not listed was there before.
    let mut sum = stats.unique.saturating_sub(growth.iter().map(|point| point.1).sum());
    for point in &mut growth {
        sum += point.1;
        point.1 = sum;
    }
    growth.push((now, sum));
    html! {
        section {
            dl.facts {
                div { dt { "Snapshots" } dd { (number(snapshots)) } }
                div { dt { "Logical" } dd { (bytes(stats.logical)) } }
                div { dt { "Unique" } dd { (bytes(stats.unique)) } }
                div { dt { "Stored" } dd { (bytes(stats.stored)) } }
                div { dt { "Deduplication" } dd { (ratio(stats.dedup_ratio)) } }
            }
            p { "Logical: as if each snapshot were stored alone. Unique: each blob once. Stored: as encoded in packs." }
            (chart::steps(&growth, "unique bytes of today's snapshots"))
        }
    }
}

/// Links to the other pages.
fn paging(list: &str, page: usize, pages: usize) -> Markup {
    let link = |page: usize| format!("{list}?page={page}");
    html! {
        @if pages > 1 {
            nav.pages aria-label="Pages of the tree" {
                @if page > 1 { a rel="prev" href=(link(page - 1)) { "Previous" } }
                span { "Page " (page) " of " (pages) }
                @if page < pages { a rel="next" href=(link(page + 1)) { "Next" } }
            }
        }
    }
}

struct Drawing<'a> {
    links: &'a Links,
    repository: &'a RepositoryName,
    snapshots: &'a [SnapshotStats],
    tokens: &'a HashMap<Digest, u64>,
    now: u64,
}

impl Drawing<'_> {
    fn table(&self, rows: &[Row]) -> Markup {
        let most = self.snapshots.iter().map(|snapshot| snapshot.logical).max().unwrap_or(0);
        html! {
            div.scroll role="region" aria-labelledby="tree" tabindex="0" {
                table.tree {
                    thead {
                        tr {
                            th scope="col" { "Snapshot" }
                            th scope="col" { "Cost" }
                            th.number scope="col" { "Exclusive" }
                            th.number.wide scope="col" { "Shared" }
                            th.number.wide scope="col" { "New" }
                            th.number.wide scope="col" { "Tokens" }
                            th.wide scope="col" { "Pushed" }
                        }
                    }
                    tbody { @for row in rows { (self.row(row, most)) } }
                }
            }
        }
    }

    fn row(&self, row: &Row, most: u64) -> Markup {
        let snapshot = &self.snapshots[row.snapshot];
        html! {
            tr {
                th.(tree::indent(row)) scope="row" {
                    (tree::lines(row))
                    a href=(self.links.snapshot(self.repository, &snapshot.digest)) { (short(&snapshot.digest)) }
                    span.hidden { (self.place(row, snapshot)) }
                    (tags(&snapshot.tags))
                }
                td.bars { (bars::cost(cost(snapshot), most)) }
                td.number { (bytes(snapshot.exclusive)) }
                td.number.wide { (bytes(snapshot.shared)) }
                td.number.wide { (bytes(snapshot.new)) }
                td.number.wide { @if let Some(tokens) = self.tokens.get(&snapshot.digest) { (number(*tokens)) } @else { (none("it does not say")) } }
                td.wide { (ago(snapshot.pushed_at, self.now)) }
            }
        }
    }

    /// What the lines show, in words.
    fn place(&self, row: &Row, snapshot: &SnapshotStats) -> String {
        let name = |at: usize| self.snapshots[at].digest.short();
        match row.joint {
            Joint::Root if snapshot.parents.is_empty() => ", begins a lineage".into(),
            Joint::Root => ", its parent is not listed".into(),
            Joint::Continues(parent) => format!(", continues {}", name(parent)),
            Joint::Branches { parent, .. } => format!(", branches off {}, level {}", name(parent), row.column),
        }
    }
}

/// The first tags of a snapshot.
fn tags(tags: &[Tag]) -> Markup {
    html! {
        @if !tags.is_empty() {
            ul.tags {
                @for tag in tags.iter().take(TAGS) { li { (tag) } }
                @if tags.len() > TAGS { li.more { (number((tags.len() - TAGS) as u64)) " more" } }
            }
        }
    }
}
