//! `/`: what there is, what takes up room, and what goes on.

use super::links::Links;
use super::page::{Page, Place};
use super::words::{ago, until};
use super::{repositories, storage, tasks};
use crate::app::App;
use crate::auth::{Access, Caller, Pull, SomeRepositories};
use crate::domains::Domain;
use crate::v1::{Answer, gc};
use axum::extract::State;
use axum::response::{Redirect, Response};
use maud::{Markup, html};
use pfr_schema::api::{DomainInfo, DomainState, GcReport, TaskInfo, Usage};
use pfr_store::Unfinished;

/// Rows of each list; the pages of their own have the rest.
const REPOSITORIES: usize = 20;
const PUSHES: usize = 20;
const RUNS: usize = 5;
const DOMAINS: usize = 100;

/// What only operators of the domain see.
struct Work {
    usage: Usage,
    /// Those of repositories that the caller sees, and whether there are others.
    pushes: Vec<Unfinished>,
    hides_pushes: bool,
    runs: Vec<GcReport>,
    tasks: Vec<TaskInfo>,
}

impl Work {
    async fn of(domain: &Domain, caller: &Caller) -> Answer<Self> {
        let mut pushes = domain.store.metadata().unfinished(PUSHES + 1).await?;
        let all = pushes.len();
        pushes.retain(|push| caller.sees(&push.repository));
        let runs = domain.store.metadata().gc_runs(None, RUNS).await?;
        Ok(Self {
            usage: domain.collector.usage().await?,
            hides_pushes: pushes.len() < all,
            pushes,
            runs: runs.rows.iter().map(gc::report).collect::<Answer<_>>()?,
            tasks: domain.schedule.list().await?,
        })
    }
}

/// `/ui`: leads to the first page.
pub(crate) async fn start(Access { domain, .. }: Access<Pull, SomeRepositories>) -> Redirect {
    Redirect::to(&Links::of(&domain.name).overview())
}

/// The page of everything that the caller may see.
pub(crate) async fn overview(Access { domain, caller, .. }: Access<Pull, SomeRepositories>, State(app): State<App>) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let _place = app.statistics(&domain).await?;
    let page = caller.repositories(&domain, None, REPOSITORIES).await?;
    let work = async {
        match caller.operates(&domain.name) {
            true => Work::of(&domain, &caller).await.map(Some),
            false => Ok(None),
        }
    };
    // Both look at very many rows.
    let (repositories, work) = tokio::try_join!(repositories::counted(&domain.store, page.rows), work)?;
    // The catalogue is for operators of the registry, and not for those of one domain.
    let domains = match domain.name.is_default() && caller.operates_registry() {
        true => app.domains.catalogue().list(None, DOMAINS).await?.rows,
        false => Vec::new(),
    };
    let body = html! {
        @if let Some(work) = &work {
            section {
                h2 id="storage" { "Storage" }
                (storage::bar(&work.usage))
                (storage::table(&work.usage, now))
            }
        }
        section {
            h2 id="repositories" { "Repositories" }
            (repositories::table(&links, &repositories, now, &caller))
            @if page.next.is_some() { p { a href=(links.repositories()) { "All repositories" } } }
        }
        @if let Some(work) = &work {
            section {
                h2 id="pushes" { "Running pushes" }
                (running(&links, work, now))
            }
            section {
                h2 id="collections" { "Last garbage collections" }
                (storage::runs(&work.runs, now))
                p { a href=(links.storage()) { "Storage over time" } }
            }
            section {
                h2 id="tasks" { "Background tasks" }
                (tasks::table(&work.tasks, now))
            }
        } @else {
            p { "Storage, running pushes and background tasks are shown to operators: to a token with " code { "*:admin" } "." }
        }
        @if domains.len() > 1 {
            section {
                h2 id="domains" { "Domains" }
                (domains_table(&domains, now))
            }
        }
    };
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Overview, title: "Overview", trail: html! {}, body }.respond())
}

/// Push sessions that are neither committed nor over.
fn running(links: &Links, work: &Work, now: u64) -> Markup {
    let Work { pushes, hides_pushes, .. } = work;
    if pushes.is_empty() && !hides_pushes {
        return html! { p.empty { "No push is under way." } };
    }
    html! {
        @if !pushes.is_empty() { (pushes_table(pushes, now)) }
        @if *hides_pushes { p { "Pushes to repositories that your token may not pull are not listed." } }
        @if pushes.len() > PUSHES { p { "There are more: these are the oldest." } }
        p { a href=(links.storage()) { "What they lease" } }
    }
}

fn pushes_table(pushes: &[Unfinished], now: u64) -> Markup {
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
    }
}

fn domains_table(domains: &[DomainInfo], now: u64) -> Markup {
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
