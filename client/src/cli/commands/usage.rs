//! `pf df`: what takes up room, and until when.

use crate::cli::args::Df;
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, now_ms, number, until};
use crate::cli::output::table::{Column, Table};
use crate::cli::suggest::{Flags, Suggestion};
use pfr_client::Site;
use pfr_schema::api::{Protected, Quota, Usage};
use pfr_service::few;
use std::collections::BTreeSet;

/// Repositories named in a sentence.
const NAMED: usize = 3;

pub async fn run(context: &mut Context, args: Df) -> Result<(), Failure> {
    let site = context.site(args.at, None).await?;
    let usage = site.usage().await?;
    if context.json {
        return context.out.json(&usage);
    }
    let mut table = Table::new([Column::left("WHAT"), Column::right("BYTES"), Column::left("NOTE").optional()]);
    for [what, size, note] in rows(&usage, matches!(site, Site::Store(_)), now_ms(), &context.flags()) {
        table.row([what, size, note]);
    }
    context.out.table(&table)
}

fn rows(usage: &Usage, local: bool, now: u64, flags: &Flags) -> Vec<[String; 3]> {
    let Usage { leased, .. } = usage;
    let pinned = if usage.pinned > 0 { format!(", {} pinned", usage.pinned) } else { String::new() };
    let collect = format!("by `{}`", Suggestion::new("gc").local().render(flags));
    let gc = if local { collect } else { "by garbage collection".to_owned() };
    let end = |bytes: u64, end: Option<u64>| if bytes == 0 { String::new() } else { ends(end, now) };
    let mut rows = vec![("snapshots", usage.live_bytes, format!("{}{pinned}", count(usage.snapshots, "snapshot")))];
    if leased.bytes > 0 {
        rows.push(("leased", leased.bytes, format!("{}, {}", end(leased.bytes, leased.expires_at), holders(leased, local))));
    }
    rows.push(("garbage", usage.garbage_bytes, if usage.garbage_bytes > 0 { gc } else { String::new() }));
    rows.push(("dead", usage.dead_bytes, if usage.dead_bytes > 0 { "by compaction".into() } else { String::new() }));
    rows.push(("deleted", usage.draining_bytes, end(usage.draining_bytes, usage.draining_ends_at)));
    if usage.unfinished.packs > 0 {
        let note = format!("{}, {}", ends(usage.unfinished.expires_at, now), count(usage.unfinished.packs, "upload"));
        rows.push(("unfinished", usage.unfinished.bytes, note));
    }
    rows.push(("total", usage.disk_bytes, String::new()));
    let rows = rows.into_iter().map(|(what, size, note)| [what.to_owned(), bytes(size), note]);
    rows.chain(usage.quota.as_ref().map(quota)).collect()
}

/// The quota of the domain: garbage and leased blobs count, dead space does not.
fn quota(quota: &Quota) -> [String; 3] {
    let limits = &quota.limits;
    let of = |used: u64, limit: Option<u64>, noun: &str| limit.map(|limit| format!("{} of {}", number(used), count(limit, noun)));
    let used = limits.bytes.map(|_| format!("{} used", bytes(quota.used_bytes)));
    let objects = of(quota.used_objects, limits.objects, "blob");
    let notes: Vec<String> = [used, objects, of(quota.used_snapshots, limits.snapshots, "snapshot")].into_iter().flatten().collect();
    ["quota".to_owned(), limits.bytes.map(bytes).unwrap_or_default(), notes.join(", ")]
}

fn ends(end: Option<u64>, now: u64) -> String {
    match end {
        Some(end) if end > now => format!("after {}", until(end, now)),
        _ => "by the next garbage collection".into(),
    }
}

/// The holders of the leases that protect something: `an unfinished pull into team/agent`.
pub fn holders(protected: &Protected, local: bool) -> String {
    let repositories: BTreeSet<String> = protected.sessions.iter().map(|session| session.repository.to_string()).collect();
    if repositories.is_empty() {
        return "a lease".into();
    }
    let what = match (local, protected.sessions.len()) {
        (true, 1) => "an unfinished pull, import or capture into",
        (true, _) => "unfinished pulls, imports or captures into",
        (false, 1) => "an unfinished push to",
        (false, _) => "unfinished pushes to",
    };
    format!("{what} {}", few(repositories, NAMED))
}

/// Describes the remains of an interrupted pull in the local store, and how to go on; `None`
/// without remains.
pub fn unfinished(usage: &Usage, now: u64, flags: &Flags) -> Option<String> {
    let gc = Suggestion::new("gc").local();
    let end = gc.clone().arg("--unfinished").render(flags);
    let (leased, garbage) = (&usage.leased, usage.garbage_bytes + usage.unfinished.bytes);
    let go_on = "the same command again resumes it";
    if leased.bytes > 0 {
        let kept = leased.expires_at.map_or(String::new(), |end| format!(", kept until {}", until(end, now)));
        return Some(format!("{} of {}{kept}: {go_on}, `{end}` frees it", bytes(leased.bytes + garbage), holders(leased, true)));
    }
    let command = if usage.unfinished.bytes > 0 { end } else { gc.render(flags) };
    (garbage > 0).then(|| format!("{} that no snapshot holds: `{command}` frees it", bytes(garbage)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::api::{OpenSession, QuotaLimits};

    #[test]
    fn a_quota_shows_its_limits_and_what_is_used_of_them() {
        let shown = |limits| super::quota(&Quota { limits, used_bytes: 2048, used_objects: 1, used_snapshots: 12_345 }).join(" | ");
        let all = QuotaLimits { bytes: Some(4096), objects: Some(1), snapshots: Some(20_000) };
        assert_eq!(shown(all), "quota | 4.00 KiB | 2.00 KiB used, 1 of 1 blob, 12,345 of 20,000 snapshots");
        let snapshots = QuotaLimits { snapshots: Some(1), ..QuotaLimits::default() };
        assert_eq!(shown(snapshots), "quota |  | 12,345 of 1 snapshot");
    }

    #[test]
    fn each_row_says_what_frees_it_and_when() {
        let now = 1_709_251_199_000;
        let session = OpenSession { repository: "team/agent".parse().unwrap(), expires_at: now + 3_540_000 };
        let leased = Protected { objects: 3, bytes: 2048, expires_at: Some(now + 3_540_000), sessions: vec![session] };
        let usage = Usage {
            disk_bytes: 8192,
            live_bytes: 4096,
            leased,
            garbage_bytes: 1024,
            dead_bytes: 512,
            draining_bytes: 512,
            draining_ends_at: Some(now + 60_000),
            snapshots: 2,
            pinned: 1,
            ..Usage::default()
        };
        let rows = rows(&usage, true, now, &Flags::default());
        let text: Vec<String> = rows.iter().map(|row| row.join(" | ")).collect();
        assert_eq!(
            text,
            [
                "snapshots | 4.00 KiB | 2 snapshots, 1 pinned",
                "leased | 2.00 KiB | after 2024-03-01 00:58 UTC, in 59 min, an unfinished pull, import or capture into team/agent",
                "garbage | 1.00 KiB | by `pf gc --local`",
                "dead | 512 B | by compaction",
                "deleted | 512 B | after 2024-03-01 00:00:59 UTC, in 60 s",
                "total | 8.00 KiB | ",
            ]
        );
        assert_eq!(
            unfinished(&usage, now, &Flags::default()).unwrap(),
            "3.00 KiB of an unfinished pull, import or capture into team/agent, kept until 2024-03-01 00:58 UTC, in 59 min: \
             the same command again resumes it, `pf gc --unfinished --local` frees it"
        );
        assert_eq!(
            unfinished(&Usage { garbage_bytes: 1024, ..Usage::default() }, now, &Flags::default()).unwrap(),
            "1.00 KiB that no snapshot holds: `pf gc --local` frees it"
        );
        assert_eq!(unfinished(&Usage::default(), now, &Flags::default()), None);
    }
}
