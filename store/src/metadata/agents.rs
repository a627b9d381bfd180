//! What capture agents report: the last report of each, until it is a day old.

use super::arguments::{can_be_kept, cursor, one_more, paged};
use super::sessions::millis;
use super::sql::values;
use super::tx::{Fail, Outcome, Tx};
use super::{AgentInfo, AgentName, AgentReport, AuditEntry, Page, audit_log};
use pfr_schema::FormatError;
use std::time::Duration;

/// Agents of a domain. Every caller with `push` may report under any name, and must not fill the
/// disk.
const AGENTS: u64 = 1000;
/// Age from which a last report makes room for that of a new agent. Its agent is silent by then,
/// whatever its interval.
const STALE: Duration = Duration::from_secs(AgentReport::LONGEST_PATIENCE);

pub(super) async fn report(tx: &mut dyn Tx, name: &AgentName, label: Option<&str>, report: &AgentReport) -> Outcome<()> {
    let now = tx.now().await?;
    let document = serde_json::to_string(report).map_err(|e| Fail::internal(e.to_string()))?;
    let label = label.filter(|label| can_be_kept(label));
    // An agent that is known reports on, however many others there are.
    let renew = "UPDATE agents SET seen_at = $2, label = $3, report = $4 WHERE name = $1";
    if tx.execute(renew, values![name, now, label, &document]).await? > 0 {
        return Ok(());
    }
    make_room(tx, now).await?;
    let add = "INSERT INTO agents (name, seen_at, label, report) VALUES ($1, $2, $3, $4)
               ON CONFLICT (name) DO UPDATE SET seen_at = excluded.seen_at, label = excluded.label, report = excluded.report";
    tx.execute(add, values![name, now, label, document]).await.map(drop)
}

/// Makes room for one more agent: those that reported least recently go, if they are stale.
async fn make_room(tx: &mut dyn Tx, now: u64) -> Outcome<()> {
    // Two new agents at once may both be the last one: the limit need not be exact.
    let agents: u64 = tx.one("SELECT count(*) FROM agents", &[]).await?;
    if agents < AGENTS {
        return Ok(());
    }
    let stale = now.saturating_sub(millis(STALE));
    let forget = "DELETE FROM agents WHERE seen_at < $1
                  AND name = ANY(ARRAY(SELECT name FROM agents WHERE seen_at < $1 ORDER BY seen_at, name LIMIT $2))";
    // Of two new agents that choose the same stale one, one is refused. It reports again soon.
    match tx.execute(forget, values![stale, agents - AGENTS + 1]).await? {
        0 => Err(FormatError::TooLarge { what: "number of agents in this domain", found: agents + 1, limit: AGENTS }.into()),
        _ => Ok(()),
    }
}

pub(super) async fn list(tx: &mut dyn Tx, after: Option<&str>, limit: usize) -> Outcome<Page<AgentInfo>> {
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

/// Forgets an agent; returns whether it was known.
pub(super) async fn forget(tx: &mut dyn Tx, name: &AgentName, audit: Option<&AuditEntry>) -> Outcome<bool> {
    let is_known = tx.execute("DELETE FROM agents WHERE name = $1", values![name]).await? > 0;
    audit_log::note(tx, audit.filter(|_| is_known), true, |record| record.subject = Some(name.to_string())).await?;
    Ok(is_known)
}

pub(super) async fn forget_old(tx: &mut dyn Tx, kept: Duration) -> Outcome<u64> {
    let now = tx.now().await?;
    tx.execute("DELETE FROM agents WHERE seen_at < $1", values![now.saturating_sub(millis(kept))]).await
}
