//! `pf tag` and `pf fork`: tags only, no bytes move.

use crate::cli::args::{Expected, Fork, TagArgs};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::count;
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use serde::Serialize;

/// The result of `pf tag`, as JSON.
#[derive(Serialize)]
struct Tagged {
    repository: RepositoryName,
    tag: Tag,
    digest: Digest,
}

pub async fn tag(context: &mut Context, args: TagArgs) -> Result<(), Failure> {
    let site = context.site(args.at, Some(&args.reference)).await?;
    let repository = args.reference.repository.clone();
    let expected = Expected::state(args.if_tag_is, &site, &repository).await?;
    let digest = site.put_tag(&repository, &args.tag, &args.reference.selector_or_latest(), expected).await?;
    if context.json {
        return context.out.json(&Tagged { repository, tag: args.tag, digest });
    }
    let paint = context.out.paint;
    context.out.line(format!("{repository}:{} is now {}", paint.cyan(args.tag.as_str()), paint.yellow(&digest.short())))
}

pub async fn fork(context: &mut Context, args: Fork) -> Result<(), Failure> {
    let site = context.site(args.at, Some(&args.reference)).await?;
    let selector = args.reference.selector_or_latest();
    let prefix = match (args.prefix, &selector) {
        (Some(prefix), _) => prefix,
        (None, Selector::Tag { tag, .. }) => format!("{tag}-fork"),
        (None, Selector::Digest(digest)) => format!("{}-fork", digest.short()),
        (None, Selector::Prefix(prefix)) => format!("{}-fork", prefix.hex().chars().take(12).collect::<String>()),
    };
    let forked = site.fork(&args.reference.repository, &selector, args.count, &prefix).await;
    let forked = forked.map_err(|error| match Failure::from(error) {
        failure if failure.exit() == 3 => {
            failure.context("a tag of these forks exists").hint("no fork was made; --prefix gives the new forks other tags")
        }
        failure => failure,
    })?;
    if context.json {
        return context.out.json(&forked);
    }
    let repository = &args.reference.repository;
    let paint = context.out.paint;
    for tag in &forked.tags {
        context.out.line(format!("{repository}:{}", paint.cyan(tag.as_str())))?;
    }
    let summary = format!("{} of {}, no bytes moved", count(forked.tags.len() as u64, "fork"), forked.digest.short());
    context.out.note(&summary)
}
