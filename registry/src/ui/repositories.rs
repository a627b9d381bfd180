//! The list of repositories.

use super::links::{Links, after};
use super::page::{Page, Place};
use super::words::{ago, bytes, none, number};
use crate::app::App;
use crate::auth::{Access, Caller, Pull, SomeRepositories};
use crate::http::query::{Paging, Query};
use crate::v1::Answer;
use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::ErrorCode;
use pfr_schema::api::{RepositoryInfo, Stats};
use pfr_store::Store;

/// Snapshots whose costs are computed for one list, about: computing those of a thousand takes tens
/// of milliseconds.
const COUNTED: u64 = 2000;

/// A repository, and its sizes if they were computed.
pub(super) type Counted = (RepositoryInfo, Option<Stats>);

/// The page of all repositories that the caller sees.
pub(crate) async fn repositories(
    Access { domain, caller, .. }: Access<Pull, SomeRepositories>,
    State(app): State<App>,
    Query(paging): Query<Paging>,
) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let (from, limit) = paging.checked()?;
    let page = caller.repositories(&domain, from, limit).await?;
    let _place = app.statistics(&domain).await?;
    let rows = counted(&domain.store, page.rows).await?;
    let body = html! {
        section {
            (table(&links, &rows, now, &caller))
            @if let Some(next) = page.next { nav.pages aria-label="More" { a rel="next" href=(after(&links.repositories(), &next)) { "Next repositories" } } }
        }
    };
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Repositories, title: "Repositories", trail: html! {}, body }
        .respond())
}

/// The sizes of as many repositories, in their order, as one page may compute.
pub(super) async fn counted(store: &Store, repositories: Vec<RepositoryInfo>) -> Answer<Vec<Counted>> {
    let (mut rows, mut left) = (Vec::with_capacity(repositories.len()), COUNTED);
    for repository in repositories {
        let stats = match left.checked_sub(repository.snapshots) {
            None => None,
            Some(rest) => match store.stats(Some(&repository.name)).await {
                Ok(stats) => {
                    left = rest;
                    Some(stats)
                }
                // Its last snapshot was deleted since it was listed.
                Err(error) if error.code() == ErrorCode::RepositoryUnknown => continue,
                Err(error) => return Err(error.into()),
            },
        };
        rows.push((repository, stats));
    }
    Ok(rows)
}

pub(super) fn table(links: &Links, rows: &[Counted], now: u64, caller: &Caller) -> Markup {
    if rows.is_empty() && !caller.sees_everything() {
        return html! { p.empty { "There is no repository that your token may pull." } };
    }
    if rows.is_empty() {
        return html! { p.empty { "Nothing has been pushed yet. " code { "pf push ./snapshot team/agent:step-1" } " pushes a snapshot directory." } };
    }
    html! {
        div.scroll role="region" aria-label="List of repositories" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Repository" }
                        th.number scope="col" { "Snapshots" }
                        th.number.wide scope="col" { "Tags" }
                        th.number.wide scope="col" { "Logical" }
                        th.number scope="col" { "Stored" }
                        th scope="col" { "Last push" }
                    }
                }
                tbody {
                    @for (repository, stats) in rows {
                        tr {
                            th scope="row" { a href=(links.repository(&repository.name)) { (repository.name) } }
                            td.number { (number(repository.snapshots)) }
                            td.number.wide { (number(repository.tags)) }
                            td.number.wide { @if let Some(stats) = stats { (bytes(stats.logical)) } @else { (none("large: its page has it")) } }
                            td.number { @if let Some(stats) = stats { (bytes(stats.stored)) } @else { (none("large: its page has it")) } }
                            td { (ago(repository.updated_at, now)) }
                        }
                    }
                }
            }
        }
    }
}
