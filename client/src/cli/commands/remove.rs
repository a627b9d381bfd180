//! `pf rm`: deletes tags, or snapshots with their tags. Everything named is looked up before
//! anything is deleted.

use super::{prune, tags};
use crate::cli::args::{Rm, Target};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{count, natural};
use crate::cli::suggest::{Advice, Suggestion};
use pfr_client::Site;
use pfr_schema::api::{Freed, SnapshotSummary};
use pfr_schema::{Digest, ErrorCode, Reference, RepositoryName, Selector, Tag};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};

/// The result of `pf rm`, as JSON.
#[derive(Debug, Default, Serialize)]
struct Removed {
    /// Whether nothing was deleted, and this is what would be.
    dry_run: bool,
    tags: Vec<RemovedTag>,
    snapshots: Vec<RemovedSnapshot>,
    /// Snapshots that lost a tag and are still there.
    remaining: Vec<Remaining>,
    /// Of a dry run: what the deletions would free together. Tags free nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    freed: Option<Freed>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
struct RemovedTag {
    repository: RepositoryName,
    tag: Tag,
    digest: Digest,
}

#[derive(Clone, Debug, Serialize)]
struct RemovedSnapshot {
    repository: RepositoryName,
    digest: Digest,
    /// The tags that went with it.
    tags: Vec<Tag>,
}

#[derive(Clone, Debug, Serialize)]
struct Remaining {
    repository: RepositoryName,
    digest: Digest,
    tags: Vec<Tag>,
}

/// The deletions in one registry, or in the local store.
struct Plan {
    site: Site,
    /// A reference into it, for commands in messages.
    at: Reference,
    tags: Vec<RemovedTag>,
    snapshots: Vec<RemovedSnapshot>,
    /// Every tag of a snapshot that loses one.
    tags_of: BTreeMap<(RepositoryName, Digest), Vec<Tag>>,
}

pub async fn run(context: &mut Context, args: Rm) -> Result<(), Failure> {
    let mut plans: BTreeMap<Option<String>, Plan> = BTreeMap::new();
    for target in &args.targets {
        let reference = target.reference();
        let site = context.site(args.at, Some(reference)).await?;
        let plan = plans.entry(reference.registry.clone()).or_insert_with(|| Plan {
            site,
            at: reference.clone(),
            tags: Vec::new(),
            snapshots: Vec::new(),
            tags_of: BTreeMap::new(),
        });
        plan.add(target).await?;
    }
    let mut removed = Removed { dry_run: args.dry_run, freed: args.dry_run.then(Freed::default), ..Removed::default() };
    let mut result = Ok(());
    for plan in plans.values_mut() {
        plan.drop_repeated();
        result = carry_out(context, plan, &mut removed).await;
        if result.is_err() {
            break;
        }
    }
    match (context.json, args.dry_run) {
        (true, _) => context.out.json(&removed)?,
        (false, true) => context.out.note("nothing was changed")?,
        (false, false) => {}
    }
    let done = removed.tags.len() + removed.snapshots.len();
    result.map_err(|failure: Failure| match done {
        0 => failure,
        _ if args.dry_run => failure,
        done => failure.context(&format!("{} deleted, then", count(done as u64, "name"))),
    })
}

impl Plan {
    async fn add(&mut self, target: &Target) -> Result<(), Failure> {
        match target {
            Target::One(reference) => self.one(reference).await,
            Target::Tags { repository: Reference { repository, .. }, pattern } => {
                let all = self.site.tags(repository).await?;
                let matching: Vec<_> = all.iter().filter(|tag| pattern.matches(tag.name.as_str())).collect();
                if matching.is_empty() {
                    return Err(Failure::new(ErrorCode::TagUnknown, format!("{repository} has no tag that matches {pattern}"))
                        .hint(Suggestion::new("ls").here().repository().then(" lists its tags and snapshots")));
                }
                let touched: HashSet<Digest> = matching.iter().map(|tag| tag.digest).collect();
                for tag in all.iter().filter(|tag| touched.contains(&tag.digest)) {
                    self.tags_of.entry((repository.clone(), tag.digest)).or_default().push(tag.name.clone());
                }
                self.tags.extend(matching.into_iter().map(|tag| RemovedTag {
                    repository: repository.clone(),
                    tag: tag.name.clone(),
                    digest: tag.digest,
                }));
                Ok(())
            }
        }
    }

    async fn one(&mut self, reference: &Reference) -> Result<(), Failure> {
        let repository = &reference.repository;
        let selector = match &reference.selector {
            None => {
                let hint = Suggestion::new("ls").here().arg(reference).then(" lists its tags and snapshots");
                return Err(Failure::usage(format!("{reference} is a whole repository; name a tag or a digest in it")).hint(hint));
            }
            Some(Selector::Tag { back, .. }) if *back > 0 => {
                let hint = Suggestion::new("inspect").here().arg(reference).then(" shows its digest");
                let message = format!("{reference} names a snapshot by its position; name a tag or a digest to delete");
                return Err(Failure::usage(message).hint(hint));
            }
            Some(selector) => selector,
        };
        let SnapshotSummary { digest, tags, .. } = self.site.snapshot(repository, selector).await?;
        match selector {
            Selector::Tag { tag, .. } => {
                self.tags.push(RemovedTag { repository: repository.clone(), tag: tag.clone(), digest });
                self.tags_of.insert((repository.clone(), digest), tags);
            }
            _ => self.snapshots.push(RemovedSnapshot { repository: repository.clone(), digest, tags }),
        }
        Ok(())
    }

    /// Removes duplicates, and tags of snapshots that are deleted too.
    fn drop_repeated(&mut self) {
        let mut seen = HashSet::new();
        self.snapshots.retain(|snapshot| seen.insert((snapshot.repository.clone(), snapshot.digest)));
        self.tags.retain(|tag| !seen.contains(&(tag.repository.clone(), tag.digest)));
        let mut tags = HashSet::new();
        self.tags.retain(|tag| tags.insert(tag.clone()));
        self.tags.sort_by(|a, b| a.repository.cmp(&b.repository).then_with(|| natural(a.tag.as_str(), b.tag.as_str())));
        self.tags_of.retain(|key, _| !seen.contains(key));
        for ((repository, digest), left) in &mut self.tags_of {
            left.sort_by(|a, b| natural(a.as_str(), b.as_str()));
            left.dedup();
            let gone = |tag: &Tag| tags.contains(&RemovedTag { repository: repository.clone(), tag: tag.clone(), digest: *digest });
            left.retain(|tag| !gone(tag));
        }
    }
}

/// Deletes, and reports each deletion at once; or reports what would be deleted.
async fn carry_out(context: &mut Context, plan: &Plan, removed: &mut Removed) -> Result<(), Failure> {
    let dry_run = removed.dry_run;
    let deleted = if dry_run { "would delete" } else { "deleted" };
    for tag in &plan.tags {
        if !dry_run {
            plan.site.delete_tag(&tag.repository, &tag.tag, tag.digest).await?;
        }
        removed.tags.push(tag.clone());
        say(context, || format!("{deleted} tag {}:{}", tag.repository, tag.tag))?;
    }
    for ((repository, digest), left) in &plan.tags_of {
        removed.remaining.push(Remaining { repository: repository.clone(), digest: *digest, tags: left.clone() });
        let advice = remains(&plan.at, repository, digest, left, dry_run);
        let text = advice.render(&context.flags());
        say(context, || text)?;
    }
    for snapshot in &plan.snapshots {
        if !dry_run {
            plan.site.delete_snapshot(&snapshot.repository, &snapshot.digest).await?;
        }
        removed.snapshots.push(snapshot.clone());
        say(context, || {
            let with = match snapshot.tags.len() {
                0 => String::new(),
                n => format!(" and {} ({})", count(n as u64, "tag"), tags(&snapshot.tags)),
            };
            format!("{deleted} snapshot {} of {}{with}", snapshot.digest.short(), snapshot.repository)
        })?;
    }
    if !plan.snapshots.is_empty() && dry_run {
        // Without an answer the sum over all registries is not known.
        let sum = removed.freed.take();
        let freed = prune::freed(&plan.site, plan.snapshots.iter().map(|snapshot| (&snapshot.repository, &snapshot.digest))).await?;
        // Registries hold nothing together.
        removed.freed = sum.zip(freed).map(|(sum, add)| Freed {
            snapshots: sum.snapshots + add.snapshots,
            bytes: sum.bytes + add.bytes,
            stored_bytes: sum.stored_bytes + add.stored_bytes,
        });
        if let Some(words) = prune::would_free(freed) {
            say(context, || words)?;
        }
    }
    if !plan.snapshots.is_empty() && !dry_run {
        let command = context.suggest(&Suggestion::new("gc").here());
        say(context, || format!("descendants stay complete; garbage collection ({command}) frees what is no longer referred to"))?;
    }
    Ok(())
}

fn say(context: &mut Context, line: impl FnOnce() -> String) -> Result<(), Failure> {
    if context.json { Ok(()) } else { context.out.line(line()) }
}

/// Describes a snapshot that lost tags, or would lose them.
fn remains(at: &Reference, repository: &RepositoryName, digest: &Digest, left: &[Tag], dry_run: bool) -> Advice {
    let (short, stays) = (digest.short(), if dry_run { "would stay" } else { "stays" });
    if !left.is_empty() {
        return format!("snapshot {short} {stays}, tagged {}", tags(left)).into();
    }
    let untagged = Advice::from(format!("snapshot {short} {stays} without a tag"));
    if dry_run {
        return untagged;
    }
    let reference = Reference { registry: at.registry.clone(), repository: repository.clone(), selector: Some(Selector::Digest(*digest)) };
    let delete = Suggestion::new("rm").here().arg(reference);
    untagged.text("; ").run(delete).text(" deletes it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::suggest::Flags;

    #[test]
    fn removal_says_what_remains_and_where() {
        let (digest, repository) = (Digest::sha256(b"x"), "r".parse::<RepositoryName>().unwrap());
        let local = Flags { local: true, store: Some("/s".into()), ..Flags::default() };
        let said = |at: &str, left: &[Tag], flags: &Flags| remains(&at.parse().unwrap(), &repository, &digest, left, false).render(flags);
        assert!(said("r:a", &["b".parse().unwrap()], &local).ends_with("stays, tagged b"));
        assert!(said("r:a", &[], &local).contains(&format!("`pf rm r@{digest} --local --store /s` deletes")));
        assert!(said("http://h/r:a", &[], &Flags::default()).contains(&format!("`pf rm http://h/r@{digest}` deletes")));
        let dry = remains(&"r:a".parse().unwrap(), &repository, &digest, &[], true).render(&local);
        assert_eq!(dry, format!("snapshot {} would stay without a tag", digest.short()));
        let many: Vec<Tag> = (0..10_000).map(|i| format!("fork-{i}").parse().unwrap()).collect();
        assert!(said("r:a", &many, &local).len() < 200);
    }
}
