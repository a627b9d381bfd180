//! `pf export` and `pf import`: snapshots as OCI artifacts in files, buckets and registries.

use super::copy::{copied, tag_of};
use crate::cli::args::{Export, Import};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::cli::output::human::{bytes, count, duration};
use crate::cli::progress::{Status, watch};
use pfr_client::export::{ExportReport, Exporter, Listed, Named, Place, Shelf};
use pfr_client::{Progress, PushTarget, Site, Source, push, push_into_store};
use pfr_schema::{Digest, ErrorCode, Reference, RepositoryName, Tag};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Names in a message at most.
const SHOWN: usize = 10;

/// A snapshot to be exported.
struct Snapshot {
    source: Source,
    repository: RepositoryName,
    tag: Option<Tag>,
}

#[derive(Serialize)]
struct Exports {
    exports: Vec<ExportReport>,
}

/// An imported snapshot.
#[derive(Serialize)]
struct Imported {
    digest: Digest,
    repository: RepositoryName,
    tag: Option<Tag>,
    created: bool,
    bytes_raw: u64,
    bytes_moved: u64,
}

#[derive(Serialize)]
struct Imports {
    imports: Vec<Imported>,
    skipped: usize,
}

pub async fn export(context: &mut Context, args: Export) -> Result<(), Failure> {
    let place = destination(&args.destination)?;
    let local = match args.at.local {
        true => Some(context.site(args.at, args.references.first()).await?),
        false => None,
    };
    let mut snapshots = Vec::new();
    for reference in args.references {
        let site = match &local {
            Some(site) => {
                nowhere_else(&reference)?;
                site.clone()
            }
            None => context.site(args.at, Some(&reference)).await?,
        };
        let selector = reference.selector_or_latest();
        let snapshot = site.snapshot(&reference.repository, &selector).await?.digest;
        let repository = reference.repository.clone();
        let source = match site {
            Site::Store(store) => Source::Store { store, snapshot },
            Site::Registry(remote) => Source::Remote { remote, repository: repository.clone(), snapshot },
        };
        snapshots.push(Snapshot { source, repository, tag: tag_of(&selector) });
    }
    check_tags(&place, &snapshots)?;
    let (progress, options) = (Progress::default(), context.place_options());
    let work = async {
        let mut exporter = Exporter::begin(&place, &options).await?;
        let mut exports = Vec::new();
        for Snapshot { source, repository, tag } in &snapshots {
            exports.push(exporter.add(source, repository, tag.as_ref(), &progress).await?);
        }
        exporter.finish().await.map(|()| exports)
    };
    let exports = watch(context.quiet, || Status::of(&progress), work).await?;
    let lines: Vec<String> = exports.iter().map(written).collect();
    let last = exports.last().map(|report| report.digest.to_string()).unwrap_or_default();
    context.report(&Exports { exports }, lines, &last)
}

/// One line about an export.
fn written(report: &ExportReport) -> String {
    let new = match report.packs_written {
        0 => "all there already".to_owned(),
        packs => format!("wrote {} ({})", count(packs, "pack"), bytes(report.bytes_written)),
    };
    let (pages, raw) = (count(report.pages, "page"), bytes(report.bytes_raw));
    format!("{pages}, {raw}: {}, {new}, {}", count(report.packs, "pack"), duration(Duration::from_secs_f64(report.seconds)))
}

/// Where an export goes to. A directory that looks like a reference was probably meant as one.
fn destination(text: &str) -> Result<Place, Failure> {
    let is_meant = text.starts_with(['.', '/']) || Place::is_address(text) || Path::new(text).exists();
    if !is_meant && text.contains([':', '@']) && text.parse::<Reference>().is_ok() {
        let message = format!("the last argument says where to export to, and {text} looks like a reference");
        return Err(Failure::usage(message)
            .hint(format!("add a directory, a file that ends in .tar or an address; if a directory is meant, write ./{text}")));
    }
    Ok(Place::parse(text)?)
}

/// A registry keeps an export under one tag.
fn check_tags(place: &Place, snapshots: &[Snapshot]) -> Result<(), Failure> {
    let Place::Registry(address) = place else { return Ok(()) };
    match &address.named {
        Some(Named::Digest(_)) => Err(Failure::usage(format!("an export goes to a tag, found {place}"))),
        Some(Named::Tag(_)) if snapshots.len() > 1 => {
            Err(Failure::usage(format!("{} snapshots cannot have one tag", snapshots.len())).hint("without a tag each keeps its own"))
        }
        None if snapshots.iter().any(|snapshot| snapshot.tag.is_none()) => {
            Err(Failure::usage("a snapshot without a tag needs one in that registry").hint(format!("such as {place}:step-1")))
        }
        _ => Ok(()),
    }
}

/// Refuses a registry where the local store is meant.
fn nowhere_else(reference: &Reference) -> Result<(), Failure> {
    match &reference.registry {
        Some(registry) => Err(Failure::usage(format!("--local means the local store, but the reference names the registry {registry}"))),
        None => Ok(()),
    }
}

pub async fn import(context: &mut Context, args: Import) -> Result<(), Failure> {
    let place = Place::parse(args.source.as_deref().unwrap_or_default())?;
    if let Some(target) = args.target.as_ref().filter(|_| args.at.local) {
        nowhere_else(target)?;
    }
    let options = context.place_options();
    let opening = Status::of_phase("reading");
    let shelf = watch(context.quiet, || opening.clone(), Shelf::open(&place, &options)).await?;
    let chosen = chosen(&shelf, args.target.as_ref(), args.from.as_deref())?;
    let site = match args.at.local {
        true => Site::Store(context.store().await?),
        false => Site::Registry(context.remote(args.target.as_ref())?),
    };
    let (progress, compression) = (Progress::default(), context.compression(None));
    let work = async {
        let mut imports = Vec::new();
        for (listed, repository, tag) in chosen {
            let source = Source::Export(Arc::new(shelf.read(listed).await?));
            let (digest, created, bytes_raw, bytes_moved) = match &site {
                Site::Store(store) => {
                    let (done, moved) = push_into_store(&source, store, &repository, tag.clone(), compression, &progress).await?;
                    (done.digest, done.created, done.logical_bytes, moved)
                }
                Site::Registry(remote) => {
                    let target =
                        PushTarget { repository: repository.clone(), tag: tag.clone(), if_tag_is: None, parents: Vec::new(), compression };
                    let done = push(&source, remote, target, &progress).await?;
                    (done.digest, done.created, done.bytes_raw, done.bytes_raw.saturating_sub(done.bytes_deduplicated))
                }
            };
            imports.push(Imported { digest, repository, tag, created, bytes_raw, bytes_moved });
        }
        Ok::<_, pfr_client::Error>(imports)
    };
    let imports = watch(context.quiet, || Status::of(&progress), work).await?;
    if let Site::Store(store) = &site {
        super::gc::tidy(context, store).await;
    }
    let mut lines: Vec<String> = imports.iter().map(taken).collect();
    if shelf.skipped() > 0 {
        lines.push(format!("skipped {} of other programs", count(shelf.skipped() as u64, "image")));
    }
    let last = imports.last().map(|import| import.digest.to_string()).unwrap_or_default();
    context.report(&Imports { imports, skipped: shelf.skipped() }, lines, &last)
}

/// One line about an import.
fn taken(import: &Imported) -> String {
    let name = import.tag.as_ref().map_or_else(|| format!("@{}", import.digest.short()), |tag| format!(":{tag}"));
    let moved = if import.bytes_moved == 0 { "all there already".to_owned() } else { format!("{} moved", bytes(import.bytes_moved)) };
    format!("{}{name}: {}, {moved}", import.repository, bytes(import.bytes_raw))
}

type Chosen<'a> = Vec<(&'a Listed, RepositoryName, Option<Tag>)>;

/// The snapshots to be imported, and their names.
fn chosen<'a>(shelf: &'a Shelf, target: Option<&Reference>, from: Option<&str>) -> Result<Chosen<'a>, Failure> {
    let found: Vec<&Listed> = shelf.exports().iter().filter(|listed| from.is_none_or(|from| is_named(listed, from))).collect();
    let Some(first) = found.first().copied() else {
        let what = from.map_or("no snapshot".to_owned(), |from| format!("no snapshot {from:?}"));
        let failure = Failure::new(ErrorCode::NotFound, format!("{} has {what}", shelf.name()));
        return Err(match shelf.exports() {
            [] => failure,
            all => failure.hint(format!("it has {}", names(all.iter()))),
        });
    };
    match target {
        Some(target) if found.iter().all(|listed| listed.snapshot == first.snapshot) => {
            Ok(vec![(first, target.repository.clone(), Some(copied(target, first.tag.as_ref())?))])
        }
        Some(_) => {
            let message = format!("{} has {} snapshots, and one reference names one", shelf.name(), found.len());
            Err(Failure::usage(message).hint(format!("--from takes one of {}", names(found.into_iter()))))
        }
        None => {
            let named = |listed: &'a Listed| {
                let repository = listed.repository.clone().ok_or_else(|| {
                    Failure::usage(format!("{} does not say to which repository {} belongs", shelf.name(), listed.snapshot.short()))
                        .hint("give a REF for it")
                })?;
                Ok::<_, Failure>((listed, repository, listed.tag.clone()))
            };
            found.into_iter().map(named).collect()
        }
    }
}

/// Whether a snapshot is meant by a tag, by `REPOSITORY:TAG`, or by the beginning of a digest.
fn is_named(listed: &Listed, name: &str) -> bool {
    let digest = name.strip_prefix("sha256:").unwrap_or(name);
    listed.tag.as_ref().is_some_and(|tag| tag.as_str() == name)
        || listed.to_string() == name
        || (digest.len() >= 6 && listed.snapshot.hex().starts_with(digest))
}

fn names<'a>(listed: impl ExactSizeIterator<Item = &'a Listed>) -> String {
    let more = listed.len().saturating_sub(SHOWN);
    let mut text = listed.take(SHOWN).map(Listed::to_string).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reference_is_no_destination_unless_it_is_written_as_a_path() {
        for reference in ["team/agent:x", "agent:x", "http://h/agent:x"] {
            assert_eq!(destination(reference).unwrap_err().exit(), 1, "{reference}");
        }
        for (text, place) in [("./agent:x", Place::Folder("./agent:x".into())), ("backup", Place::Folder("backup".into()))] {
            assert_eq!(destination(text).unwrap(), place);
        }
    }
}
