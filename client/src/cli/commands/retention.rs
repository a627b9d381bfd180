//! `pf retention`: what a registry deletes by itself.

use super::{prune, read, shown, tasks};
use crate::cli::args::{Retention, RetentionCommand};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{count, now_ms, number};
use crate::cli::output::paint::Style;
use crate::cli::output::table::{Column, Table};
use pfr_schema::api::{KeepLastOf, RetentionPolicies, RetentionPolicy, RetentionReport, RetentionRequest};
use pfr_schema::{Pattern, json};

/// Bytes of a file with policies.
const POLICIES_MAX: u64 = 16 << 20;

pub async fn run(context: &mut Context, args: Retention) -> Result<(), Failure> {
    let remote = context.remote(None)?;
    match args.command {
        None => show(context, &remote.retention().await?),
        Some(RetentionCommand::Set { file }) => {
            let bytes = read(&file, POLICIES_MAX)?;
            let policies = json::parse::<RetentionPolicies>("retention policies", &bytes, POLICIES_MAX);
            let policies = policies.and_then(|policies| policies.check().map(|()| policies));
            let policies = policies.map_err(|error| Failure::usage(error.to_string()).context(&shown(&file)))?;
            show(context, &remote.set_retention(&policies).await?)
        }
        Some(RetentionCommand::Run { dry_run }) => {
            let report = remote.run_retention(&RetentionRequest { dry_run }).await?;
            print(context, &report)
        }
    }
}

fn show(context: &mut Context, policies: &RetentionPolicies) -> Result<(), Failure> {
    if context.json {
        return context.out.json(policies);
    }
    if policies.policies.is_empty() {
        return context.out.line("no policies");
    }
    let mut table = Table::new([
        Column::left("POLICY").style(Style::Bold),
        Column::left("REPOSITORIES"),
        Column::left("DELETES"),
        Column::left("KEEPS").optional(),
        Column::left("IMMUTABLE").optional(),
    ]);
    for policy in &policies.policies {
        let RetentionPolicy { name, repositories, keep_tags, immutable_tags, .. } = policy;
        table.row([name.clone(), repositories.to_string(), deletes(policy), list(keep_tags), list(immutable_tags)]);
    }
    context.out.table(&table)
}

fn list(patterns: &[Pattern]) -> String {
    patterns.iter().map(Pattern::as_str).collect::<Vec<_>>().join(" ")
}

/// What a policy deletes, in words.
fn deletes(policy: &RetentionPolicy) -> String {
    if !policy.deletes() {
        return "nothing".to_owned();
    }
    let tagged = (!policy.tags.is_empty()).then(|| format!("tagged {}", list(&policy.tags)));
    let which = [policy.untagged.then(|| "untagged".to_owned()), tagged].into_iter().flatten().collect::<Vec<_>>().join(" or ");
    let last = policy.keep_last.map(|last| match policy.keep_last_of {
        KeepLastOf::Repository => format!("all but the last {}", number(last)),
        KeepLastOf::Lineage => format!("all but the last {} of each lineage", number(last)),
    });
    let words = [
        Some(which).filter(|which| !which.is_empty()),
        policy.below.as_ref().map(|base| format!("below {base}")),
        policy.max_age_seconds.map(|seconds| format!("older than {}", tasks::every(seconds))),
        last,
    ];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn print(context: &mut Context, report: &RetentionReport) -> Result<(), Failure> {
    if context.json {
        return context.out.json(report);
    }
    prune::list(context, &report.deleted, now_ms())?;
    let (deleted, kept) = (count(report.snapshots, "snapshot"), format!("{} kept", number(report.kept)));
    let freed = match report.freed {
        None if report.dry_run => "; what that would free was not counted".to_owned(),
        freed => prune::would_free(freed).map(|words| format!("; {words}")).unwrap_or_default(),
    };
    let mut words = match (report.dry_run, report.snapshots) {
        (true, _) => format!("nothing was changed: {deleted} would be deleted, {kept}{freed}"),
        (false, 0) => format!("no snapshot is to be deleted, {kept}"),
        (false, _) => format!("{deleted} deleted, {kept}; garbage collection frees what is no longer referred to"),
    };
    if report.snapshots > report.deleted.len() as u64 {
        words += &format!("; the first {} are listed", number(report.deleted.len() as u64));
    }
    if !report.complete {
        words += "; the next run goes on: policies or tags were changed meanwhile, or the registry stops";
    }
    context.out.note(&words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_is_said_in_words() {
        let said = |text: &str| deletes(&serde_json::from_str(&format!("{{\"name\": \"p\", \"repositories\": \"*\"{text}}}")).unwrap());
        assert_eq!(said(""), "nothing");
        assert_eq!(said(r#", "keep_last": 1000"#), "all but the last 1,000");
        assert_eq!(
            said(r#", "keep_last": 2, "keep_last_of": "lineage", "untagged": true"#),
            "untagged, all but the last 2 of each lineage"
        );
        assert_eq!(
            said(r#", "tags": ["a", "b*"], "untagged": true, "below": "base~1", "max_age_seconds": 604800"#),
            "untagged or tagged a b*, below base~1, older than 7 d"
        );
    }
}
