//! What takes up room, now and over time, and the garbage collections.

use super::bars::{Part, key, pair, parts};
use super::chart;
use super::links::{Links, after};
use super::page::{Page, Place};
use super::words::{ago, bytes, count, none, number, until};
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories};
use crate::http::query::{Paging, Query};
use crate::v1::{Answer, gc};
use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use pfr_client::human::duration;
use pfr_schema::api::{GcReport, Quota, Usage};
use std::time::Duration;

/// Runs that the chart covers, unless the list has more.
const CHARTED: usize = 1000;

/// The page of storage and collections.
pub(crate) async fn storage(
    Access { domain, caller, .. }: Access<Admin, AllRepositories>,
    State(app): State<App>,
    Query(paging): Query<Paging>,
) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let (from, limit) = paging.checked()?;
    let _place = app.statistics(&domain).await?;
    let usage = domain.collector.usage().await?;
    let read = async |from, limit| -> Answer<(Vec<GcReport>, Option<String>)> {
        let page = domain.store.metadata().gc_runs(from, limit).await?;
        Ok((page.rows.iter().map(gc::report).collect::<Answer<_>>()?, page.next))
    };
    let (listed, next) = read(from, limit).await?;
    let (all, _) = read(None, CHARTED).await?;
    let mut points: Vec<(u64, u64)> = all.iter().rev().filter_map(|run| Some((run.finished_at?, run.disk_bytes?))).collect();
    points.push((now, usage.disk_bytes));
    let body = html! {
        section {
            h2 id="now" { "Now" }
            (bar(&usage))
            (table(&usage, now))
        }
        @if let Some(quota) = &usage.quota { (limits(quota)) }
        section {
            h2 id="over-time" { "Over time" }
            @if points.len() > 1 { (chart::steps(&points, "bytes of all packs")) }
            @else { p.empty { "The first garbage collection that finds something begins the chart." } }
        }
        section {
            h2 id="collections" { "Garbage collections" }
            p { "A scheduled run that found nothing is not listed." }
            (runs(&listed, now))
            @if let Some(next) = next { nav.pages aria-label="More" { a rel="next" href=(after(&links.storage(), &next)) { "Earlier collections" } } }
        }
    };
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Storage, title: "Storage", trail: html! {}, body }.respond())
}

/// What takes up room: class, name, bytes, meaning.
fn rows(usage: &Usage) -> [(&'static str, &'static str, u64, &'static str); 6] {
    [
        ("live", "Live", usage.live_bytes, "held by snapshots"),
        ("leased", "Leased", usage.leased.bytes, "held by pushes and pulls under way"),
        ("garbage", "Garbage", usage.garbage_bytes, "freed by the next garbage collection"),
        ("dead", "Dead space", usage.dead_bytes, "room in packs that no blob uses: indexes, and what compaction gives back"),
        ("emptied", "Emptied", usage.draining_bytes, "packs that wait for the end of their grace period"),
        ("unfinished", "Unfinished", usage.unfinished.bytes, "uploads that are running or were cut off"),
    ]
}

/// All that takes up room, as one bar.
pub(super) fn bar(usage: &Usage) -> Markup {
    let rows = rows(usage);
    let used: Vec<Part<'_>> = rows.iter().map(|(class, _, bytes, _)| (*class, *bytes)).collect();
    let words: Vec<String> = rows.iter().filter(|row| row.2 > 0).map(|(_, name, size, _)| format!("{name} {}", bytes(*size))).collect();
    let words = if words.is_empty() { "Nothing is stored".to_owned() } else { words.join(", ") };
    parts(&used, usage.disk_bytes, &words)
}

/// The same as a table.
pub(super) fn table(usage: &Usage, now: u64) -> Markup {
    let end = |class: &str| match class {
        "leased" if usage.leased.bytes > 0 => usage.leased.expires_at,
        "emptied" => usage.draining_ends_at,
        "unfinished" => usage.unfinished.expires_at,
        _ => None,
    };
    html! {
        div.scroll role="region" aria-label="What takes up room" tabindex="0" {
            table.usage {
                thead { tr { th scope="col" { "Part" } th.number scope="col" { "Bytes" } th scope="col" { "Meaning" } } }
                tbody {
                    @for (class, name, size, meaning) in rows(usage) {
                        tr {
                            th scope="row" { (swatch(class)) (name) }
                            td.number { (bytes(size)) }
                            td {
                                (meaning)
                                @if class == "live" { ": " (count(usage.snapshots, "snapshot")) }
                                @if let Some(end) = end(class) { "; until " (until(end, now)) }
                            }
                        }
                    }
                }
                tfoot { tr { th scope="row" { "Total" } td.number { (bytes(usage.disk_bytes)) } td { "all packs on storage" } } }
            }
        }
    }
}

/// The limits of the domain, and what is used of them.
fn limits(quota: &Quota) -> Markup {
    let limits = &quota.limits;
    let rows = [
        ("Bytes", limits.bytes.map(|limit| [bytes(quota.used_bytes), bytes(limit)])),
        ("Blobs", limits.objects.map(|limit| [number(quota.used_objects), number(limit)])),
        ("Snapshots", limits.snapshots.map(|limit| [number(quota.used_snapshots), number(limit)])),
    ];
    html! {
        section {
            h2 id="quota" { "Quota" }
            p { "A push beyond a limit is refused. Blobs count until a garbage collection has freed them." }
            div.scroll role="region" aria-label="Quota" tabindex="0" {
                table {
                    thead { tr { th scope="col" { "Of" } th.number scope="col" { "Used" } th.number scope="col" { "Limit" } } }
                    tbody {
                        @for (name, row) in rows {
                            @if let Some([used, limit]) = row {
                                tr { th scope="row" { (name) } td.number { (used) } td.number { (limit) } }
                            }
                        }
                    }
                }
            }
        }
    }
}

fn swatch(class: &str) -> Markup {
    html! { svg.swatch viewBox="0 0 10 10" aria-hidden="true" { rect.(class) width="10" height="10" {} } " " }
}

/// Runs of collection.
pub(super) fn runs(runs: &[GcReport], now: u64) -> Markup {
    if runs.is_empty() {
        return html! { p.empty { "No garbage collection has found anything yet." } };
    }
    let most = runs.iter().map(|run| run.freed_bytes.max(run.deleted_bytes)).max().unwrap_or(0);
    html! {
        (key(&[("freed", "freed", "blobs that nothing holds any more"), ("deleted", "deleted", "packs that left the storage")]))
        div.scroll role="region" aria-label="List of garbage collections" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Started" }
                        th.wide scope="col" { "By" }
                        th.number.wide scope="col" { "Took" }
                        th.number.wide scope="col" { "Blobs freed" }
                        th.number scope="col" { "Freed" }
                        th.number scope="col" { "Deleted" }
                        th.wide scope="col" { "Share" }
                        th.number.wide scope="col" { "Packs copied" }
                        th.number scope="col" { "Storage after" }
                    }
                }
                tbody {
                    @for run in runs {
                        tr {
                            th scope="row" {
                                (ago(run.started_at, now))
                                @if let Some(error) = &run.error { p.bad { "ended early: " (error) } }
                            }
                            td.wide { (run.trigger) }
                            td.number.wide {
                                @match run.finished_at {
                                    Some(end) => { (duration(Duration::from_millis(end.saturating_sub(run.started_at)))) }
                                    None => { "not ended" }
                                }
                            }
                            td.number.wide { (number(run.released + run.unclaimed)) }
                            td.number { (bytes(run.freed_bytes)) }
                            td.number { (bytes(run.deleted_bytes)) }
                            td.wide { (pair([("freed", run.freed_bytes), ("deleted", run.deleted_bytes)], most)) }
                            td.number.wide { (number(run.packs_compacted + run.packs_merged)) }
                            td.number { @if let Some(disk) = run.disk_bytes { (bytes(disk)) } @else { (none("not recorded")) } }
                        }
                    }
                }
            }
        }
    }
}
