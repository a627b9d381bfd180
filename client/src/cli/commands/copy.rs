//! `pf copy`: a snapshot from registry to registry.

use super::push::{brief, refused, sign};
use crate::cli::args::{Copy, Expected};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::duration;
use crate::cli::progress::{Status, watch};
use pfr_client::{Progress, PushTarget, Site, Source};
use pfr_schema::api::NewSignature;
use pfr_schema::signature::MOST;
use pfr_schema::{Reference, Selector, Tag};
use std::time::Duration;

pub async fn run(context: &mut Context, args: Copy) -> Result<(), Failure> {
    let selector = args.source.selector_or_latest();
    let tag = copied(&args.target, selector.tag())?;
    let source = context.remote(Some(&args.source))?;
    let (snapshot, found) = Site::Registry(source.clone()).signatures(&args.source.repository, &selector).await?;
    let signatures: Vec<NewSignature> =
        found.into_iter().map(NewSignature::from).filter(|new| new.check(&snapshot).is_ok()).take(MOST).collect();
    let remote = context.remote(Some(&args.target))?;
    let repository = args.target.repository.clone();
    let if_tag_is = Expected::state(args.if_tag_is, &Site::Registry(remote.clone()), &repository).await?;
    let compression = context.compression(None);
    // As in a push: a policy may let the tag be put only on what is signed, so it comes last.
    let is_signed = !signatures.is_empty();
    let (first, first_if) = if is_signed { (None, None) } else { (Some(tag.clone()), if_tag_is) };
    let target = PushTarget { repository: repository.clone(), tag: first, if_tag_is: first_if, parents: Vec::new(), compression };
    let source = Source::Remote { remote: source, repository: args.source.repository, snapshot };
    let progress = Progress::default();
    let work = pfr_client::push(&source, &remote, target, &progress);
    let report = watch(context.quiet, || Status::of(&progress), work).await.map_err(|error| refused(error, &repository))?;
    if is_signed {
        let site = Site::Registry(remote.clone());
        sign(&site, &repository, &report.digest, signatures, None).await?;
        site.put_tag(&repository, &tag, &Selector::Digest(report.digest), if_tag_is).await?;
    }
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
