//! `/`: what there is, what takes up room, and what goes on.

use super::links::Links;
use super::page::{Page, Place};
use super::words::{ago, until};
use super::{repositories, storage, tasks};
use crate::app::App;
use crate::auth::{Access, Admin, AllRepositories};
use crate::v1::{Answer, gc};
use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::api::{self, DomainState};
use pfr_store::Unfinished;

/// Rows of each list; the pages of their own have the rest.
const REPOSITORIES: usize = 20;
const PUSHES: usize = 20;
const RUNS: usize = 5;
const DOMAINS: usize = 100;

/// The page of everything, for operators.
pub(crate) async fn overview(Access { domain, .. }: Access<Admin, AllRepositories>, State(app): State<App>) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let _permit = app.documents().await?;
    let usage = domain.collector.usage().await?;
    let page = domain.store.repositories(None, REPOSITORIES).await?;
    let repositories = repositories::counted(&domain.store, page.rows).await?;
    let pushes = domain.store.metadata().unfinished(PUSHES + 1).await?;
    let runs = domain.store.metadata().gc_runs(None, RUNS).await?;
    let runs: Vec<api::GcReport> = runs.rows.iter().map(gc::report).collect::<Answer<_>>()?;
    let tasks = domain.schedule.list().await?;
    // The catalogue is for operators of the registry, and not for those of one domain.
    let domains = match domain.name.is_default() {
        true => app.domains.catalogue().list(None, DOMAINS).await?.rows,
        false => Vec::new(),
    };
    let body = html! {
        section {
            h2 id="storage" { "Storage" }
            (storage::bar(&usage))
            (storage::table(&usage, now))
        }
        section {
            h2 id="repositories" { "Repositories" }
            (repositories::table(&links, &repositories, now))
            @if page.next.is_some() { p { a href=(links.repositories()) { "All repositories" } } }
        }
        section {
            h2 id="pushes" { "Running pushes" }
            (running(&links, &pushes, now))
        }
        section {
            h2 id="collections" { "Last garbage collections" }
            (storage::runs(&runs, now))
            p { a href=(links.storage()) { "Storage over time" } }
        }
        section {
            h2 id="tasks" { "Background tasks" }
            (tasks::table(&tasks, now))
        }
        @if domains.len() > 1 {
            section {
                h2 id="domains" { "Domains" }
                (domains_table(&domains, now))
            }
        }
    };
    Ok(Page { domain: &domain.name, place: Place::Overview, title: "Overview", trail: html! {}, body }.respond())
}

/// Push sessions that are neither committed nor over.
fn running(links: &Links, pushes: &[Unfinished], now: u64) -> Markup {
    if pushes.is_empty() {
        return html! { p.empty { "No push is under way." } };
    }
    html! {
        div.scroll role="region" aria-labelledby="pushes" tabindex="0" {
            table {
                thead { tr { th scope="col" { "Repository" } th scope="col" { "Lease ends, unless it is used" } } }
                tbody {
                    @for push in pushes.iter().take(PUSHES) {
                        // A repository of which nothing was committed yet has no page.
                        tr { th scope="row" { (push.repository) } td { (until(push.until, now)) } }
                    }
                }
            }
        }
        @if pushes.len() > PUSHES { p { "There are more: these are the oldest." } }
        p { a href=(links.storage()) { "What they lease" } }
    }
}

fn domains_table(domains: &[api::DomainInfo], now: u64) -> Markup {
    html! {
        div.scroll role="region" aria-labelledby="domains" tabindex="0" {
            table {
                thead { tr { th scope="col" { "Domain" } th scope="col" { "State" } th scope="col" { "Made" } } }
                tbody {
                    @for domain in domains {
                        tr {
                            th scope="row" {
                                @if domain.state == DomainState::Live { a href=(Links::of(&domain.name).overview()) { (domain.name) } }
                                @else { (domain.name) }
                            }
                            td {
                                @match (domain.state, domain.deleting_since) {
                                    (DomainState::Live, _) => { "live" }
                                    (DomainState::Deleting, Some(since)) => { "being deleted since " (ago(since, now)) }
                                    (DomainState::Deleting, None) => { "being deleted" }
                                }
                            }
                            td { @if let Some(at) = domain.created_at { (ago(at, now)) } @else { "at the first start" } }
                        }
                    }
                }
            }
        }
    }
}
