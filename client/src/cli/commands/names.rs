//! `pf tag`, `pf rm`, `pf fork`: names only, no bytes move.

use crate::cli::args::{Fork, Rm, TagArgs};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::count;
use pfr_schema::api::SnapshotSummary;
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use serde::Serialize;

/// What `pf tag` did.
#[derive(Serialize)]
struct Tagged {
    repository: RepositoryName,
    tag: Tag,
    digest: Digest,
}

/// What `pf rm` did, and what is left.
#[derive(Serialize)]
struct Removed {
    repository: RepositoryName,
    #[serde(skip_serializing_if = "Option::is_none")]
    tag: Option<Tag>,
    digest: Digest,
    snapshot_deleted: bool,
    tags_deleted: Vec<Tag>,
    tags_remaining: Vec<Tag>,
}

pub async fn tag(context: &mut Context, args: TagArgs) -> Result<(), Failure> {
    let side = context.side(args.at, Some(&args.reference)).await?;
    let repository = args.reference.repository.clone();
    let expected = side.expected(&repository, args.if_tag_is).await?;
    let digest = side.put_tag(&repository, &args.tag, &args.reference.selector_or_latest(), expected).await?;
    if context.json {
        return context.out.json(&Tagged { repository, tag: args.tag, digest });
    }
    let paint = context.out.paint;
    context.out.line(format!("{repository}:{} is now {}", paint.cyan(args.tag.as_str()), paint.yellow(&digest.short())))
}

pub async fn remove(context: &mut Context, args: Rm) -> Result<(), Failure> {
    let side = context.side(args.at, Some(&args.reference)).await?;
    let repository = args.reference.repository.clone();
    let selector = match &args.reference.selector {
        Some(selector @ (Selector::Digest(_) | Selector::Prefix(_) | Selector::Tag { back: 0, .. })) => selector.clone(),
        None => {
            return Err(Failure::usage(format!("{repository} is a whole repository; name a tag or a digest in it"))
                .hint(format!("`pf rm {repository}:TAG` or `pf rm {repository}@DIGEST`")));
        }
        Some(Selector::Tag { .. }) => {
            return Err(Failure::usage(format!(
                "{} names a snapshot by its position; what to delete is named by tag or digest",
                args.reference
            ))
            .hint(format!("`pf inspect {}` shows its digest", args.reference)));
        }
    };
    let before = side.snapshot(&repository, &selector).await?;
    let removed = match selector {
        Selector::Tag { tag, .. } => {
            side.delete_tag(&repository, &tag, before.digest).await?;
            let remaining = before.tags.iter().filter(|t| **t != tag).cloned().collect();
            Removed {
                repository,
                digest: before.digest,
                snapshot_deleted: false,
                tags_deleted: vec![tag.clone()],
                tags_remaining: remaining,
                tag: Some(tag),
            }
        }
        Selector::Digest(_) | Selector::Prefix(_) => {
            let digest = before.digest;
            side.delete_snapshot(&repository, &digest).await?;
            Removed { repository, tag: None, digest, snapshot_deleted: true, tags_deleted: before.tags.clone(), tags_remaining: Vec::new() }
        }
    };
    if context.json {
        return context.out.json(&removed);
    }
    for line in describe(&removed, &before) {
        context.out.line(line)?;
    }
    Ok(())
}

/// What happened, and what remains.
fn describe(removed: &Removed, before: &SnapshotSummary) -> Vec<String> {
    let Removed { repository, digest, .. } = removed;
    let list = |tags: &[Tag]| tags.iter().map(Tag::as_str).collect::<Vec<_>>().join(", ");
    match &removed.tag {
        Some(tag) => {
            let remains = match removed.tags_remaining.len() {
                0 => format!("its snapshot stays without a tag; `pf rm {repository}@{digest}` deletes it"),
                _ => format!("its snapshot {} stays, tagged {}", digest.short(), list(&removed.tags_remaining)),
            };
            vec![format!("deleted tag {repository}:{tag}"), remains]
        }
        None => {
            let with = match before.tags.len() {
                0 => String::new(),
                n => format!(" and {} ({})", count(n as u64, "tag"), list(&before.tags)),
            };
            vec![
                format!("deleted snapshot {} of {repository}{with}", digest.short()),
                "its descendants stay whole; what only it held is freed by the next garbage collection".into(),
            ]
        }
    }
}

pub async fn fork(context: &mut Context, args: Fork) -> Result<(), Failure> {
    let side = context.side(args.at, Some(&args.reference)).await?;
    let selector = args.reference.selector_or_latest();
    let prefix = match (args.prefix, &selector) {
        (Some(prefix), _) => prefix,
        (None, Selector::Tag { tag, .. }) => format!("{tag}-fork"),
        (None, Selector::Digest(digest)) => format!("{}-fork", digest.short()),
        (None, Selector::Prefix(prefix)) => format!("{}-fork", prefix.hex().chars().take(12).collect::<String>()),
    };
    let forked = side.fork(&args.reference.repository, &selector, args.count, &prefix).await;
    let forked = forked.map_err(|f| if f.exit() == 3 { f.hint("no fork was made; choose another --prefix") } else { f })?;
    if context.json {
        return context.out.json(&forked);
    }
    let repository = &args.reference.repository;
    let paint = context.out.paint;
    for tag in &forked.tags {
        context.out.line(format!("{repository}:{}", paint.cyan(tag.as_str())))?;
    }
    let summary = format!("{} of {}, no bytes moved", count(forked.tags.len() as u64, "fork"), forked.digest.short());
    context.out.line(paint.dim(&summary))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removal_says_what_remains() {
        let digest = Digest::sha256(b"x");
        let tag = |t: &str| t.parse::<Tag>().unwrap();
        let before =
            SnapshotSummary { digest, tags: vec![tag("a"), tag("b")], parents: vec![], pushed_at: 0, logical_bytes: 0, new_bytes: 0 };
        let mut removed = Removed {
            repository: "r".parse().unwrap(),
            tag: Some(tag("a")),
            digest,
            snapshot_deleted: false,
            tags_deleted: vec![tag("a")],
            tags_remaining: vec![tag("b")],
        };
        assert!(describe(&removed, &before)[1].ends_with("stays, tagged b"));
        removed.tags_remaining.clear();
        assert!(describe(&removed, &before)[1].contains("pf rm r@sha256:"));
        removed.tag = None;
        assert!(describe(&removed, &before)[0].contains("2 tags (a, b)"));
    }
}
