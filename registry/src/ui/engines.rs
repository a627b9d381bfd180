//! Engines and drains of the fleet, as the agents of its hosts reported them last.

use super::links::{Links, after};
use super::page::{Page, Place};
use super::words::{ago, bytes, interval, none, number, short};
use crate::auth::{Access, Admin, AllRepositories};
use crate::http::query::{Paging, Query};
use crate::v1::{Answer, agents};
use axum::response::Response;
use maud::{Markup, html};
use pfr_schema::api::{AgentEngine, AgentEngineState, AgentInfo, AgentJob, AgentJobKind};

/// The page of hosts, their engines, drains and warms.
pub(crate) async fn engines(
    Access { domain, caller, .. }: Access<Admin, AllRepositories>,
    Query(paging): Query<Paging>,
) -> Answer<Response> {
    let (links, now) = (Links::of(&domain.name), domain.store.options().clock.now());
    let (from, limit) = paging.checked()?;
    let page = agents::seen(&domain, &caller, from, limit).await?;
    let body = html! {
        p { "Agents report to this registry. For an agent that has stopped, or is not seen any more, the page shows its last report." }
        section {
            h2 id="hosts" { "Hosts" }
            (hosts(&page.rows, now))
            @if let Some(next) = page.next { nav.pages aria-label="More" { a rel="next" href=(after(&links.engines(), &next)) { "Next hosts" } } }
        }
        section {
            h2 id="engines" { "Engines" }
            (table_of_engines(&page.rows))
        }
        section {
            h2 id="jobs" { "Drains and warms" }
            (table_of_jobs(&page.rows, now))
        }
    };
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Engines, title: "Engines", trail: html! {}, body }.respond())
}

fn hosts(agents: &[AgentInfo], now: u64) -> Markup {
    if agents.is_empty() {
        return html! { p.empty { "No agent has reported within a day. An agent reports to its setting " code { "registry" } "." } };
    }
    html! {
        div.scroll role="region" aria-labelledby="hosts" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Host" }
                        th scope="col" { "Seen" }
                        th.number.wide scope="col" { "Engines" }
                        th.number.wide scope="col" { "Every" }
                        th.wide scope="col" { "Agent" }
                        th.wide scope="col" { "Token" }
                    }
                }
                tbody {
                    @for agent in agents {
                        tr {
                            th scope="row" { (agent.name) }
                            td { (seen(agent, now)) }
                            td.number.wide { (number(agent.report.engines.len() as u64)) }
                            td.number.wide { (interval(agent.report.interval_seconds)) }
                            td.wide { "pf-agent " (agent.report.version) }
                            td.wide { @if let Some(label) = &agent.label { (label) } @else { (none("it needed no token")) } }
                        }
                    }
                }
            }
        }
    }
}

/// When an agent was seen last, and whether that was its end.
fn seen(agent: &AgentInfo, now: u64) -> Markup {
    let seen = ago(agent.seen_at, now);
    match (agent.report.stopped, agent.silent) {
        (true, _) => html! { "stopped " (seen) },
        (false, true) => html! { p.bad { "not seen since " (seen) } },
        (false, false) => seen,
    }
}

fn table_of_engines(agents: &[AgentInfo]) -> Markup {
    let all: Vec<(&AgentInfo, &AgentEngine)> =
        agents.iter().flat_map(|agent| agent.report.engines.iter().map(move |engine| (agent, engine))).collect();
    if all.is_empty() {
        return html! { p.empty { "No engine is known." } };
    }
    html! {
        div.scroll role="region" aria-labelledby="engines" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Engine" }
                        th scope="col" { "Host" }
                        th scope="col" { "State" }
                        th.wide scope="col" { "Model" }
                        th.wide scope="col" { "Fingerprint" }
                        th.number.wide scope="col" { "Snapshots" }
                        th.number.wide scope="col" { "Restores" }
                        th.number.wide scope="col" { "Ready for requests" }
                    }
                }
                tbody {
                    @for (agent, engine) in all {
                        tr {
                            th scope="row" { (engine.engine) }
                            td { (agent.name) }
                            td {
                                @if agent.is_gone() { "not known" } @else { (state(engine.state)) @if let Some(note) = &engine.note { ": " (note) } }
                            }
                            td.wide { @if let Some(model) = &engine.model { (model) } @else { (none("its engine configuration does not say it")) } }
                            td.wide { (short(&engine.fingerprint)) }
                            td.number.wide { (number(engine.snapshots)) }
                            td.number.wide { (number(engine.restores)) }
                            td.number.wide { (number(engine.staged)) }
                        }
                    }
                }
            }
        }
    }
}

fn state(state: AgentEngineState) -> &'static str {
    match state {
        AgentEngineState::Ready => "ready",
        AgentEngineState::Busy => "busy",
        AgentEngineState::Incomplete => "incomplete",
    }
}

fn table_of_jobs(agents: &[AgentInfo], now: u64) -> Markup {
    let all: Vec<(&AgentInfo, &AgentJob)> = agents.iter().flat_map(|agent| agent.report.jobs.iter().map(move |job| (agent, job))).collect();
    if all.is_empty() {
        return html! { p.empty { "No drain and no warm is under way, and none has ended within an hour." } };
    }
    html! {
        div.scroll role="region" aria-labelledby="jobs" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Job" }
                        th scope="col" { "Host" }
                        th scope="col" { "State" }
                        th scope="col" { "Done" }
                        th.wide scope="col" { "Begun" }
                        th.wide scope="col" { "Left" }
                    }
                }
                tbody {
                    @for (agent, job) in all {
                        tr {
                            th scope="row" { (kind(job.kind)) @if let Some(about) = &job.about { " " (about) } }
                            td { (agent.name) }
                            td {
                                @if agent.is_gone() && job.state.is_open() { "not known" } @else { (job.state.name()) }
                                @if let Some(note) = &job.note { p { (note) } }
                            }
                            td { (bytes(job.bytes_done)) @if job.bytes_total > 0 { " of " (bytes(job.bytes_total)) } }
                            td.wide { (ago(job.started_at, now)) }
                            td.wide { @if let Some(seconds) = job.seconds_left { (interval(seconds)) } @else { (none("not known")) } }
                        }
                    }
                }
            }
        }
    }
}

/// What a job does, and the word before its reference.
fn kind(kind: AgentJobKind) -> &'static str {
    match kind {
        AgentJobKind::Warm => "warm",
        AgentJobKind::Drain => "drain",
    }
}
