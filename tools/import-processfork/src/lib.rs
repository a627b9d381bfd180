//! `pf import processfork`: the images of ProcessFork stores as snapshots, with their lineage.
//!
//! ```text
//! ProcessFork store ─▶ images, parents first ─▶ each one a directory over the store's own blobs ─▶ push, or into a local store
//! ```
//!
//! Nothing is copied: ProcessFork stores blobs as a snapshot directory does, so the import sends an
//! image's pages from where they are. The snapshot that an image becomes is a function of the image
//! and its parents; importing it again makes nothing new.

pub mod cache;
pub mod command;
pub mod image;
pub mod order;

mod convert;
mod library;
mod report;

pub use report::{ImageReport, Outcome, Refusal};

use convert::{Converted, Sizes, convert};
use image::Image;
use library::{Found, Library, Place};
use pfr_client::error::blocking;
use pfr_client::{Directory, Error, Progress, PushTarget, Remote, Result, Source, push, push_into_store};
use pfr_schema::codec::Compression;
use pfr_schema::{Digest, Limits, RepositoryName, Tag};
use pfr_store::Store;
use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

/// Hexadecimal digits of an image's digest in its tag.
const TAG_DIGITS: usize = 16;
/// Bytes of an agent's kind in a repository's name.
const KIND_BYTES: usize = 64;

/// Where images go to.
#[derive(Clone, Debug)]
pub enum Target {
    /// A registry.
    Registry(Remote),
    /// A local store.
    Store(Store),
    /// Nowhere: everything is read and checked but the contents of pages.
    Nowhere,
}

/// Images to import, parents first.
#[derive(Debug)]
pub struct Import {
    waiting: VecDeque<Step>,
    prefix: RepositoryName,
    compression: Compression,
    sizes: Sizes,
    done: HashMap<Digest, Done>,
}

#[derive(Debug)]
struct Step {
    library: Arc<Library>,
    place: Place,
    image: Result<Image>,
}

#[derive(Clone, Debug)]
struct Done {
    snapshot: Digest,
    repository: RepositoryName,
}

impl Import {
    /// Finds the images of ProcessFork stores, and of single files within or beside one; ancestors
    /// come along. They go to repositories below `prefix`, one for each kind of agent; what
    /// continues an image goes where that one went. Raw pages are encoded as `compression` says.
    ///
    /// # Errors
    /// [`Error::Refused`] for a path that is no store and is in none, or for a store with too many
    /// images; [`Error::Io`].
    pub async fn open(paths: Vec<PathBuf>, prefix: RepositoryName, compression: Compression) -> Result<Self> {
        let find = move || {
            let mut waiting = VecDeque::new();
            for path in &paths {
                waiting.extend(steps(path)?);
            }
            Ok(waiting)
        };
        let waiting = blocking(find).await?;
        Ok(Self { waiting, prefix, compression, sizes: Sizes::new(), done: HashMap::new() })
    }

    /// Images still to come.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Imports the next image; `None` after the last.
    ///
    /// # Errors
    /// Whatever is wrong with the target, such as [`Error::Unreachable`]. Faults of an image are in
    /// its report.
    pub async fn next(&mut self, target: &Target, progress: &Progress) -> Result<Option<ImageReport>> {
        while let Some(Step { library, place, image }) = self.waiting.pop_front() {
            let image = match image {
                Ok(image) if self.done.contains_key(&image.digest) => continue,
                Ok(image) => image,
                Err(error) => return ImageReport::new(library.path_of(&place).display().to_string()).failed(error).map(Some),
            };
            return self.one(library, place, image, target, progress).await.map(Some);
        }
        Ok(None)
    }

    async fn one(
        &mut self,
        library: Arc<Library>,
        place: Place,
        image: Image,
        target: &Target,
        progress: &Progress,
    ) -> Result<ImageReport> {
        let (known, missing): (Vec<Digest>, Vec<Digest>) = image.parents.iter().partition(|parent| self.done.contains_key(parent));
        let parents: Vec<Done> = known.iter().filter_map(|parent| self.done.get(parent)).cloned().collect();
        let repository =
            parents.first().map_or_else(|| repository(&self.prefix, &image.agent.kind), |first| Ok(first.repository.clone()))?;
        let tag: Tag = image.digest.hex()[..TAG_DIGITS].parse().map_err(|_| Error::Internal("a digest is no tag".into()))?;
        let digest = image.digest;
        let mut report = ImageReport::new(digest.to_string());
        report.agent = Some(image.agent.kind.clone());
        report.parents = parents.iter().map(|parent| parent.snapshot).collect();
        report.parents_missing = missing;

        let (snapshots, mut sizes) = (report.parents.clone(), std::mem::take(&mut self.sizes));
        let work = move || {
            let converted = convert(&library, &place, &image, snapshots, &mut sizes, &Limits::default());
            Ok((converted, sizes))
        };
        let (converted, sizes) = blocking(work).await?;
        self.sizes = sizes;
        let Converted { directory, attachments, notes } = match converted {
            Ok(converted) => converted,
            Err(error) => return report.failed(error),
        };
        let (totals, snapshot) = (directory.totals()?, directory.digest());
        (report.pages, report.bytes_raw, report.attachments, report.notes) = (totals.pages, totals.bytes, attachments, notes);
        let moved = send(Arc::new(directory), target, (&repository, &tag), self.compression, progress).await;
        match moved {
            Err(error) => return report.failed(error),
            Ok(Moved { created, bytes }) => {
                report.outcome = match (target, created) {
                    (Target::Nowhere, _) => Outcome::Planned,
                    (_, true) => Outcome::Imported,
                    (_, false) => Outcome::Unchanged,
                };
                (report.created, report.bytes_new) = (created, bytes);
            }
        }
        (report.digest, report.repository, report.tag) = (Some(snapshot), Some(repository.clone()), Some(tag));
        self.done.insert(digest, Done { snapshot, repository });
        Ok(report)
    }
}

struct Moved {
    created: bool,
    bytes: u64,
}

async fn send(
    directory: Arc<Directory>,
    target: &Target,
    (repository, tag): (&RepositoryName, &Tag),
    compression: Compression,
    progress: &Progress,
) -> Result<Moved> {
    match target {
        Target::Nowhere => Ok(Moved { created: false, bytes: 0 }),
        Target::Store(store) => {
            let (committed, bytes) =
                push_into_store(&Source::Opened(directory), store, repository, Some(tag.clone()), compression, progress).await?;
            Ok(Moved { created: committed.created, bytes })
        }
        Target::Registry(remote) => {
            let (repository, tag) = (repository.clone(), Some(tag.clone()));
            let to = PushTarget { repository, tag, if_tag_is: None, parents: Vec::new(), compression };
            let report = push(&Source::Opened(directory), remote, to, progress).await?;
            Ok(Moved { created: report.created, bytes: report.bytes_raw.saturating_sub(report.bytes_deduplicated) })
        }
    }
}

/// The images at `path`, oldest first where lineage leaves a choice; those that are none come last.
fn steps(path: &std::path::Path) -> Result<Vec<Step>> {
    let (library, mut found) = Library::open(path)?;
    let age = |found: &Found| found.image.as_ref().map(|i| (i.created.clone(), i.digest)).map_err(|_| ());
    found.sort_by_cached_key(|found| (age(found).is_err(), age(found).ok()));
    let (images, broken): (Vec<Found>, Vec<Found>) = found.into_iter().partition(|found| found.image.is_ok());
    let lineage: Vec<(Digest, Vec<Digest>)> =
        images.iter().filter_map(|found| found.image.as_ref().ok()).map(|image| (image.digest, image.parents.clone())).collect();
    let library = Arc::new(library);
    let mut images: Vec<Option<Found>> = images.into_iter().map(Some).collect();
    let ordered = order::order(&lineage).into_iter().filter_map(|i| images.get_mut(i).and_then(Option::take)).collect::<Vec<_>>();
    let step = |Found { place, image }| Step { library: Arc::clone(&library), place, image };
    Ok(ordered.into_iter().chain(broken).map(step).collect())
}

/// The prefix and what of an agent's kind may be part of a repository's name.
fn repository(prefix: &RepositoryName, kind: &str) -> Result<RepositoryName> {
    let mut name = String::new();
    for c in kind.chars() {
        match c.to_ascii_lowercase() {
            c if c.is_ascii_lowercase() || c.is_ascii_digit() => name.push(c),
            _ if name.ends_with('-') || name.is_empty() => {}
            _ => name.push('-'),
        }
        if name.len() >= KIND_BYTES {
            break;
        }
    }
    let name = name.trim_end_matches('-');
    let name = if name.is_empty() { "agent" } else { name };
    let text = format!("{prefix}/{name}");
    text.parse().map_err(|source| Error::Document { path: text.into(), source })
}

#[cfg(test)]
mod tests;
