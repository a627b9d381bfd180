//! `pf copy`: a snapshot from registry to registry.

use super::push::{brief, refused};
use crate::cli::args::{Copy, Expected};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::duration;
use crate::cli::progress::{Standing, watch};
use pfr_client::{Progress, PushTarget, Site, Source};
use pfr_schema::{Reference, Selector, Tag};
use std::time::Duration;

pub async fn run(context: &mut Context, args: Copy) -> Result<(), Failure> {
    let selector = args.source.selector_or_latest();
    let tag = copied(&args.target, selector.tag())?;
    let source = context.remote(Some(&args.source))?;
    let snapshot = Site::Registry(source.clone()).snapshot(&args.source.repository, &selector).await?.digest;
    let remote = context.remote(Some(&args.target))?;
    let repository = args.target.repository.clone();
    let if_tag_is = Expected::state(args.if_tag_is, &Site::Registry(remote.clone()), &repository).await?;
    let compression = context.compression(None);
    let target = PushTarget { repository: repository.clone(), tag: Some(tag), if_tag_is, parents: Vec::new(), compression };
    let source = Source::Remote { remote: source, repository: args.source.repository, snapshot };
    let progress = Progress::default();
    let work = pfr_client::push(&source, &remote, target, &progress);
    let report = watch(context.quiet, || Standing::of(&progress), work).await.map_err(|error| refused(error, &repository))?;
    let summary = format!("{}, {}", brief(&report), duration(Duration::from_secs_f64(report.seconds)));
    context.report(&report, [summary], &report.digest.to_string())
}

/// The tag of a copy: that of the target, else that of the source, else `latest`.
pub fn copied(target: &Reference, source: Option<&Tag>) -> Result<Tag, Failure> {
    match (&target.selector, source) {
        (None, Some(tag)) => Ok(tag.clone()),
        _ => target.selector_or_latest().tag().cloned().ok_or_else(|| {
            Failure::usage(format!("a copy goes to a tag, found {target}")).hint(format!("such as {}:step-1", target.repository))
        }),
    }
}

/// The tag that a selector names, if it names the snapshot of one.
pub fn tag_of(selector: &Selector) -> Option<Tag> {
    selector.tag().cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_keeps_its_tag_unless_it_gets_another_one() {
        let tag = |target: &str, source: Option<&str>| {
            let source: Option<Tag> = source.map(|tag| tag.parse().unwrap());
            copied(&target.parse().unwrap(), source.as_ref()).map(|tag| tag.to_string())
        };
        assert_eq!(tag("a/b", Some("x")).unwrap(), "x");
        assert_eq!(tag("a/b", None).unwrap(), "latest");
        assert_eq!(tag("a/b:c", Some("x")).unwrap(), "c");
        assert_eq!(tag("a/b:c~1", None).unwrap_err().exit(), 1);
    }
}
