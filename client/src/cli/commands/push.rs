//! `pf push`: a directory or a local snapshot, stored in a registry.

use super::signing;
use crate::cli::args::{Expected, Push};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration, now_ms};
use crate::cli::progress::{Status, watch};
use crate::cli::suggest::{Advice, Suggestion};
use pfr_client::{Progress, PushReport, PushTarget, Site, Source, find_signature};
use pfr_schema::api::{NewSignature, Signature};
use pfr_schema::{Digest, ErrorCode, Reference, RepositoryName, Selector, Tag};
use pfr_store::{Pin, PrivateKey};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub async fn run(context: &mut Context, args: Push) -> Result<(), Failure> {
    let tag = target_tag(&args.target)?;
    let remote = context.remote(Some(&args.target))?;
    let parents = parents(context, &args).await?;
    let origin = origin(context, &args.source).await?;
    let repository = args.target.repository.clone();
    let if_tag_is = Expected::state(args.if_tag_is, &Site::Registry(remote.clone()), &repository).await?;
    let compression = context.compression(args.encode.compression);
    let key = args.sign_key.as_deref().map(signing::private_key).transpose()?;
    let signatures = origin.signatures().await?;
    // A policy may let the tag be put only on what is signed, so it comes last.
    let is_signed = key.is_some() || !signatures.is_empty();
    let (first, first_if) = if is_signed { (None, None) } else { (Some(tag.clone()), if_tag_is) };
    let target = PushTarget { repository: repository.clone(), tag: first, if_tag_is: first_if, parents, compression };
    let progress = Progress::default();
    let work = pfr_client::push(&origin.source, &remote, target, &progress);
    let report = watch(context.quiet, || Status::of(&progress), work).await.map_err(|error| refused(error, &repository))?;
    if is_signed {
        let site = Site::Registry(remote.clone());
        sign(&site, &repository, &report.digest, signatures, key.as_ref()).await?;
        site.put_tag(&repository, &tag, &Selector::Digest(report.digest), if_tag_is).await?;
    }
    if let Origin { source: Source::Store { store, snapshot }, repository: Some(repository) } = &origin {
        // The local copy is no longer the only one, so it may be evicted. If this fails it stays,
        // and `pf ls --local --pinned` shows it.
        drop(store.pin(repository, snapshot, Pin::UntilPushed, false).await);
    }
    let summary = format!("{}, {}", brief(&report), duration(Duration::from_secs_f64(report.seconds)));
    context.report(&report, [summary], &report.digest.to_string())
}

/// Adds the signatures that a snapshot has where it comes from, and one by `key`.
pub async fn sign(
    site: &Site,
    repository: &RepositoryName,
    digest: &Digest,
    mut signatures: Vec<NewSignature>,
    key: Option<&PrivateKey>,
) -> Result<(), Failure> {
    if let Some(key) = key {
        let keys = [key.public()];
        let there = match site.signatures(repository, &Selector::Digest(*digest)).await {
            Ok((_, there)) => there,
            // A token that may push need not be allowed to read.
            Err(error) if matches!(error.code(), ErrorCode::Denied | ErrorCode::RepositoryUnknown) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let here: Vec<Signature> = signatures.iter().cloned().map(Signature::from).collect();
        if find_signature(digest, &there, &keys).is_err() && find_signature(digest, &here, &keys).is_err() {
            signatures.push(key.sign(*digest, repository, now_ms()));
        }
    }
    if signatures.is_empty() {
        return Ok(());
    }
    match site.add_signatures(repository, digest, signatures).await {
        Ok(_) => Ok(()),
        // A registry of an older version keeps no signatures.
        Err(error) if error.code() == ErrorCode::NotFound && key.is_none() => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A push makes its repository. So the registry says only to a token that may not push to a
/// repository, and may not even see it, that there is none.
pub fn refused(error: pfr_client::Error, repository: &RepositoryName) -> Failure {
    let is_hidden = matches!(&error, pfr_client::Error::Registry { problem } if problem.code == ErrorCode::RepositoryUnknown);
    let failure = Failure::from(error);
    if !is_hidden {
        return failure;
    }
    let words = format!(
        "a push makes the repository if there is none, so the token does not permit this push: ask the registry's operator for one with \
         the scope {repository}:push; "
    );
    failure.hint(Advice::from(words).run(Suggestion::new("login")).text(" stores it"))
}

/// What is pushed.
struct Origin {
    source: Source,
    /// The repository of the local store that it is in.
    repository: Option<RepositoryName>,
}

impl Origin {
    /// The signatures that a snapshot of the local store has.
    async fn signatures(&self) -> Result<Vec<NewSignature>, Failure> {
        let Self { source: Source::Store { store, snapshot }, repository: Some(repository) } = self else { return Ok(Vec::new()) };
        Ok(store
            .signatures(repository, snapshot)
            .await?
            .into_iter()
            .map(NewSignature::from)
            .filter(|new| new.check(snapshot).is_ok())
            .collect())
    }
}

/// The source: a directory if there is one or the text looks like a path, otherwise a reference
/// into the local store.
async fn origin(context: &Context, text: &str) -> Result<Origin, Failure> {
    match classify(text, Path::new(text).is_dir())? {
        Place::Directory(path) => Ok(Origin { source: Source::Directory(path), repository: None }),
        Place::Store(reference) => {
            let store = context.existing_store().await.map_err(|f| f.context(&format!("{text} is not a directory")))?;
            let snapshot =
                store.resolve(&reference.repository, &reference.selector_or_latest()).await.map_err(Failure::from).map_err(|f| {
                    f.context(&format!("{text} is not a directory")).hint(
                        Advice::from("SOURCE is a snapshot directory, or a REF in the local store, which ")
                            .run(Suggestion::new("ls").local())
                            .text(" lists"),
                    )
                })?;
            Ok(Origin { source: Source::Store { store, snapshot }, repository: Some(reference.repository) })
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    Directory(PathBuf),
    Store(Reference),
}

fn classify(text: &str, exists: bool) -> Result<Place, Failure> {
    if exists || text.starts_with(['.', '/']) {
        return Ok(Place::Directory(text.into()));
    }
    match text.parse::<Reference>() {
        // Names in the local store have no host: a part that looks like a host belongs to the
        // repository's name.
        Ok(Reference { registry: Some(_), .. }) if !text.contains("://") && format!("/{text}").parse::<Reference>().is_ok() => {
            Ok(Place::Store(format!("/{text}").parse()?))
        }
        Ok(Reference { registry: Some(registry), .. }) => Err(Failure::usage(format!("the source {text} names the registry {registry}"))
            .hint(
                Suggestion::new("pull").both().arg(text).then(" fetches it first; a push starts from a directory or from the local store"),
            )),
        Ok(reference) => Ok(Place::Store(reference)),
        Err(error) => Err(Failure::usage(format!("there is no directory {text}, and it is no reference into the local store: {error}"))),
    }
}

/// The tag that a push moves.
fn target_tag(target: &Reference) -> Result<Tag, Failure> {
    target.selector_or_latest().tag().cloned().ok_or_else(|| {
        Failure::usage(format!("a push goes to a tag, found {target}")).hint(format!("such as {}:step-1", target.repository))
    })
}

/// Parents as digests; those named by tag are looked up in the registry pushed to.
async fn parents(context: &Context, args: &Push) -> Result<Vec<Digest>, Failure> {
    if args.parent.len() > 2 {
        return Err(Failure::usage(format!("a snapshot has at most 2 parents, found {}", args.parent.len())));
    }
    let mut digests = Vec::new();
    for parent in &args.parent {
        let reference = parent.seen_from(&args.target);
        digests.push(match reference.selector_or_latest() {
            Selector::Digest(digest) => digest,
            selector => {
                let site = Site::Registry(context.remote(Some(&reference))?);
                site.snapshot(&reference.repository, &selector).await.map_err(|e| Failure::from(e).context("--parent"))?.digest
            }
        });
    }
    Ok(digests)
}

/// The deduplicated bytes, unless they are too few to mention: every registry has an empty
/// configuration.
pub fn deduplicated(saved: u64, of: u64, what: &str) -> String {
    if saved.saturating_mul(1000) < of { String::new() } else { format!(", {} {what}", bytes(saved)) }
}

/// Bytes of frames, and the raw bytes that they stand for if these are many more.
pub fn stored(raw: u64, stored: u64) -> String {
    if stored >= raw - raw / 100 { bytes(stored) } else { format!("{} raw, {} stored", bytes(raw), bytes(stored)) }
}

/// One line about a push, without its time.
pub fn brief(report: &PushReport) -> String {
    let left_raw = match report.bytes_left_raw {
        0 => String::new(),
        left_raw => format!(", {} left raw for speed", bytes(left_raw)),
    };
    format!(
        "{}, {}: sent {} ({}){left_raw}{}",
        count(report.pages, "page"),
        bytes(report.bytes_raw),
        count(report.blobs_sent, "blob"),
        stored(report.bytes_sent_raw, report.bytes_sent),
        deduplicated(report.bytes_deduplicated, report.bytes_raw, "deduplicated")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_references_are_told_apart() {
        let place = |text: &str, exists| classify(text, exists).unwrap();
        assert_eq!(place("./x", false), Place::Directory("./x".into()));
        assert_eq!(place("/x", false), Place::Directory("/x".into()));
        assert_eq!(place("team/agent", true), Place::Directory("team/agent".into()));
        assert!(matches!(place("team/agent:a", false), Place::Store(_)));
        assert_eq!(classify("http://r/team/agent", false).unwrap_err().exit(), 1);
        assert_eq!(classify("No Such", false).unwrap_err().exit(), 1);
    }

    #[test]
    fn raw_bytes_are_named_where_encoding_made_a_difference() {
        assert_eq!(stored(1_500_000, 1_500_600), "1.43 MiB");
        assert_eq!(stored(1_500_000, 1_490_000), "1.42 MiB");
        assert_eq!(stored(3 << 20, 2 << 20), "3.00 MiB raw, 2.00 MiB stored");
        assert_eq!(stored(0, 0), "0 B");
    }

    #[test]
    fn a_push_goes_to_a_tag() {
        let tag = |text: &str| target_tag(&text.parse().unwrap());
        assert_eq!(tag("a/b").unwrap().as_str(), "latest");
        assert_eq!(tag("a/b:c").unwrap().as_str(), "c");
        assert_eq!(tag("a/b:c~1").unwrap_err().exit(), 1);
        assert_eq!(tag(&format!("a/b@{}", Digest::sha256(b""))).unwrap_err().exit(), 1);
    }
}
