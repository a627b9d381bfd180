//! What capture agents report: the last report of each, until it is a day old.

use super::arguments::{can_be_kept, cursor, one_more, paged};
use super::sessions::millis;
use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{AgentInfo, AgentName, AgentReport, Page};
use pfr_schema::FormatError;
use std::time::Duration;

/// Agents of a domain. Every caller with `push` may report under any name, and must not fill the
/// disk.
const AGENTS: u64 = 1000;

pub(super) async fn report<T: Tx>(tx: &mut T, name: &AgentName, label: Option<&str>, report: &AgentReport) -> Outcome<()> {
    // Two new agents at once may both be the last one: the limit need not be exact.
    let others: u64 = tx.one("SELECT count(*) FROM agents WHERE name <> $1", values![name]).await?;
    if others >= AGENTS {
        return Err(FormatError::TooLarge { what: "number of agents in this domain", found: others + 1, limit: AGENTS }.into());
    }
    let now = tx.now().await?;
    let document = serde_json::to_string(report).map_err(|e| Fail::internal(e.to_string()))?;
    let put = "INSERT INTO agents (name, seen_at, label, report) VALUES ($1, $2, $3, $4)
               ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, label = excluded.label, report = excluded.report";
    tx.execute(put, values![name, now, label.filter(|label| can_be_kept(label)), document]).await.map(drop)
}

pub(super) async fn list<T: Tx>(tx: &mut T, after: Option<&str>, limit: usize) -> Outcome<Page<AgentInfo>> {
    let now = tx.now().await?;
    let find = "SELECT name, seen_at, label, report FROM agents WHERE name > $1 ORDER BY name LIMIT $2";
    let rows: Vec<(AgentName, u64, Option<String>, String)> = tx.query(find, values![cursor(after, "")?, one_more(limit)]).await?;
    let page = paged(rows, limit, |row| row.0.to_string());
    let info = |(name, seen_at, label, document): (AgentName, u64, Option<String>, String)| {
        // A replica of a newer version may have taken a report of which this one does not know all.
        let report: AgentReport = serde_json::from_str(&document).ok()?;
        Some(AgentInfo { silent: report.is_silent(seen_at, now), name, seen_at, label, report })
    };
    Ok(Page { rows: page.rows.into_iter().filter_map(info).collect(), next: page.next })
}

pub(super) async fn forget<T: Tx>(tx: &mut T, kept: Duration) -> Outcome<u64> {
    let now = tx.now().await?;
    tx.execute("DELETE FROM agents WHERE seen_at < $1", values![now.saturating_sub(millis(kept))]).await
}
