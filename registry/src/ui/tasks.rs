//! Background tasks: what each does, and when it runs next.

use super::page::{Page, Place};
use super::words::{ago, interval, none, number, until};
use crate::auth::{Access, Admin, AllRepositories};
use crate::v1::Answer;
use axum::response::Response;
use maud::{Markup, html};
use pfr_client::human::duration;
use pfr_schema::api::{TaskInfo, TaskState};
use std::time::Duration;

/// The page of background tasks.
pub(crate) async fn tasks(Access { domain, caller, .. }: Access<Admin, AllRepositories>) -> Answer<Response> {
    let now = domain.store.options().clock.now();
    let list = domain.schedule.list().await?;
    let body = html! {
        p { "Runs and times are those of the replica that answers. Pauses hold in all replicas." }
        section { (table(&list, now)) }
        section {
            h2 id="pausing" { "To pause a task" }
            p { code.command { "pf tasks pause compaction --for 1h" } }
            p { code.command { "pf tasks resume compaction" } }
        }
    };
    Ok(Page { domain: &domain.name, caller: Some(&caller), place: Place::Tasks, title: "Background tasks", trail: html! {}, body }
        .respond())
}

pub(super) fn table(tasks: &[TaskInfo], now: u64) -> Markup {
    html! {
        div.scroll role="region" aria-label="List of background tasks" tabindex="0" {
            table {
                thead {
                    tr {
                        th scope="col" { "Task" }
                        th scope="col" { "State" }
                        th.wide scope="col" { "Last run" }
                        th scope="col" { "Next run" }
                        th.number.wide scope="col" { "Every" }
                        th.number.wide scope="col" { "Runs" }
                        th.number.wide scope="col" { "Failed" }
                        th.number.wide scope="col" { "Took" }
                    }
                }
                tbody {
                    @for task in tasks {
                        tr {
                            th scope="row" { (task.name) }
                            td {
                                (state(task, now))
                                @if let Some(error) = &task.error { p.bad { "Last run failed: " (error) } }
                            }
                            td.wide { @if let Some(at) = task.started_at { (ago(at, now)) } @else { (none("it has not run yet")) } }
                            td { @if let Some(at) = task.next_run_at { (until(at, now)) } @else { (none("not planned")) } }
                            td.number.wide { @if task.interval_seconds > 0 { (interval(task.interval_seconds)) } @else { (none("never by itself")) } }
                            td.number.wide { (number(task.runs)) }
                            td.number.wide { (number(task.errors)) }
                            td.number.wide { @if let Some(seconds) = task.last_seconds { (duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())) } @else { (none("it has not run yet")) } }
                        }
                    }
                }
            }
        }
    }
}

fn state(task: &TaskInfo, now: u64) -> Markup {
    html! {
        @match task.state {
            TaskState::Idle => { "idle" }
            TaskState::Running => { strong { "running" } }
            TaskState::Off => { "off" }
            TaskState::Paused => { "paused" @if let Some(end) = task.pause_ends_at { " until " (until(end, now)) } }
        }
    }
}
