//! One pass: copies to the target what it lacks of the source.

use super::Error;
use super::names::Names;
use super::order::{Lineage, parents_first};
use super::report::{Conflict, NotCopied, Report};
use pfr_client::{Destination, Progress, PushTarget, Result, Site, Source, same_registry};
use pfr_schema::api::{NewSignature, SignatureManifest, SnapshotSummary, TagState};
use pfr_schema::codec::Compression;
use pfr_schema::pattern::matches;
use pfr_schema::{Digest, ErrorCode, RepositoryName, Selector, Tag};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::{Duration, Instant};

/// How often a long copy reports its progress.
const REPORT_EVERY: Duration = Duration::from_secs(5);

/// What to copy.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Repositories: names, in which `*` stands for anything. None: all.
    pub repositories: Vec<String>,
    /// Delete at the target what the source does not have, and move tags to where the source has
    /// them, whatever they were at the target.
    pub delete: bool,
}

impl Options {
    fn wants(&self, repository: &RepositoryName) -> bool {
        self.repositories.is_empty() || self.repositories.iter().any(|pattern| matches(pattern, repository.as_str()))
    }
}

/// Checks that the sites are two.
///
/// # Errors
/// [`Error::Sites`].
pub fn check(source: &Site, destination: &Site) -> std::result::Result<(), Error> {
    match (source, destination) {
        (Site::Store(_), Site::Store(_)) => {
            Err(Error::Sites("both sites are this registry's own store; name the other registry with --from or --to"))
        }
        (Site::Registry(from), Site::Registry(to)) if same_registry(from.url(), to.url()) => {
            Err(Error::Sites("--from and --to name the same registry: there is nothing to copy"))
        }
        _ => Ok(()),
    }
}

/// Copies what the target lacks: snapshots, parents first, then tags. A failure for one snapshot is
/// noted, and the others go on.
///
/// # Errors
/// [`Error::Client`] once a site cannot be reached or is full: the rest is not tried. `report` says
/// what was done in any case.
pub async fn mirror(source: &Site, destination: &Site, options: &Options, report: &mut Report) -> std::result::Result<(), Error> {
    check(source, destination)?;
    let start = Instant::now();
    let mut pass = Pass { source, destination, options, report };
    let result = pass.run().await;
    pass.report.seconds = start.elapsed().as_secs_f64();
    result
}

struct Pass<'a> {
    source: &'a Site,
    destination: &'a Site,
    options: &'a Options,
    report: &'a mut Report,
}

impl Pass<'_> {
    async fn run(&mut self) -> std::result::Result<(), Error> {
        // The target first: a repository that the target has and the source, asked later, lacks was
        // deleted there and is not about to arrive.
        let mut repositories: BTreeSet<RepositoryName> = BTreeSet::new();
        if self.options.delete {
            repositories.extend(self.destination.repositories().await?.into_iter().map(|row| row.name));
        }
        let here = self.source.repositories().await?;
        // More often a wrong source than one that was emptied.
        if here.is_empty() && !repositories.is_empty() {
            return Err(Error::Sites("the source holds nothing, and --delete would empty the target: is it the right source?"));
        }
        repositories.extend(here.into_iter().map(|row| row.name));
        let unmatched = |pattern: &&String| !repositories.iter().any(|name| matches(pattern, name.as_str()));
        self.report.unmatched = self.options.repositories.iter().filter(unmatched).cloned().collect();
        for repository in repositories.into_iter().filter(|name| self.options.wants(name)) {
            self.report.repositories += 1;
            if let Err(error) = self.repository(&repository).await {
                self.note(&repository, None, error)?;
            }
        }
        Ok(())
    }

    async fn repository(&mut self, repository: &RepositoryName) -> Result<()> {
        let failures = self.report.failures.len();
        let there = Names { snapshots: snapshots(self.destination, repository).await?, tags: tags(self.destination, repository).await? };
        // Tags before snapshots: the snapshot of a tag is then in the list, unless it was deleted.
        let tags_here = tags(self.source, repository).await?;
        let here = Names { tags: tags_here, snapshots: snapshots(self.source, repository).await? };
        let mut held: HashSet<Digest> = there.snapshots.iter().map(|snapshot| snapshot.digest).collect();
        let missing = parents_first(&here.snapshots, &held);
        self.report.snapshots_present += (here.snapshots.len() - missing.len()) as u64;
        for (number, snapshot) in missing.iter().enumerate() {
            match self.copy(repository, *snapshot, (number + 1, missing.len())).await {
                Ok(()) => {
                    held.insert(*snapshot);
                }
                Err(error) if is_gone(&error) && !self.still_there(repository, snapshot).await? => self.report.snapshots_skipped += 1,
                Err(error) => self.note(repository, Some(*snapshot), error)?,
            }
        }
        // Before tags, which the target may put only on what is signed.
        self.signatures(repository, &held).await?;
        let lineage = Lineage::new(&here, &there);
        for (tag, to) in here.tags.iter().filter(|(_, to)| held.contains(*to)) {
            let seen = there.tags.get(tag).copied();
            if seen != Some(*to) {
                self.tag(repository, tag, *to, seen, &lineage).await?;
            }
        }
        if !self.options.delete {
            return Ok(());
        }
        if self.report.failures.len() > failures {
            // The remaining snapshots may be the last good state of those that did not arrive.
            tracing::warn!(%repository, "mirror: repository not copied completely, nothing of it is deleted");
            return Ok(());
        }
        self.delete(repository, &here, &there).await
    }

    async fn copy(&mut self, repository: &RepositoryName, snapshot: Digest, (number, of): (usize, usize)) -> Result<()> {
        let progress = Progress::default();
        let report_progress = async {
            loop {
                tokio::time::sleep(REPORT_EVERY).await;
                let (bytes, total) = (progress.bytes_done() + progress.bytes_deduplicated(), progress.bytes_total());
                tracing::info!(%repository, %snapshot, number, of, phase = %progress.phase(), bytes, total, "mirror: copying snapshot");
            }
        };
        let moved = tokio::select! {
            moved = copy(self.source, self.destination, repository, snapshot, &progress) => moved?,
            () = report_progress => return Ok(()),
        };
        tracing::info!(%repository, %snapshot, number, of, blobs = moved.blobs, bytes = moved.bytes, "mirror: snapshot copied");
        self.report.snapshots_copied += 1;
        self.report.blobs += moved.blobs;
        self.report.bytes += moved.bytes;
        Ok(())
    }

    /// Copies the signatures that the target lacks of snapshots that it holds: those that came
    /// later, and those of a snapshot that was pushed and not pulled.
    async fn signatures(&mut self, repository: &RepositoryName, held: &HashSet<Digest>) -> Result<()> {
        let here = none_if_unknown(self.source.signature_list(repository).await)?;
        if here.is_empty() {
            return Ok(());
        }
        let there: HashSet<SignatureManifest> = none_if_unknown(self.destination.signature_list(repository).await)?.into_iter().collect();
        let lacking = here.iter().filter(|row| held.contains(&row.snapshot) && !there.contains(*row));
        let lacking: BTreeSet<Digest> = lacking.map(|row| row.snapshot).collect();
        for snapshot in lacking {
            match self.copy_signatures(repository, &snapshot).await {
                Ok(copied) => self.report.signatures_copied += copied,
                Err(error) if is_gone(&error) => {}
                // A target of an older version keeps none.
                Err(error) if error.code() == ErrorCode::NotFound => {
                    tracing::warn!(%repository, %snapshot, "mirror: signatures not copied, the target is of an older version");
                }
                Err(error) => self.note(repository, Some(snapshot), error)?,
            }
        }
        Ok(())
    }

    async fn copy_signatures(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<u64> {
        let selector = Selector::Digest(*snapshot);
        let (_, here) = self.source.signatures(repository, &selector).await?;
        let (_, there) = self.destination.signatures(repository, &selector).await?;
        let new = here.into_iter().filter(|signature| !there.contains(signature)).map(NewSignature::from);
        // Any image may be at the tag of signatures, and say anything.
        let new: Vec<NewSignature> = new.filter(|new| new.check(snapshot).is_ok()).collect();
        let count = new.len() as u64;
        if count > 0 {
            self.destination.add_signatures(repository, snapshot, new).await?;
        }
        Ok(count)
    }

    async fn still_there(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<bool> {
        Ok(snapshots(self.source, repository).await?.iter().any(|there| there.digest == *snapshot))
    }

    async fn tag(&mut self, repository: &RepositoryName, tag: &Tag, to: Digest, seen: Option<Digest>, lineage: &Lineage<'_>) -> Result<()> {
        let conflict = Conflict { repository: repository.clone(), tag: tag.clone(), source: to, target: seen };
        if seen.is_some_and(|seen| !self.options.delete && !lineage.leads(seen, to)) {
            self.report.conflicts.push(conflict);
            return Ok(());
        }
        match self.destination.put_tag(repository, tag, &Selector::Digest(to), Some(seen.map_or(TagState::Absent, TagState::At))).await {
            Ok(_) => self.report.tags_moved += 1,
            Err(error) if matches!(error.code(), ErrorCode::TagMoved | ErrorCode::TagImmutable) => self.report.conflicts.push(conflict),
            Err(error) => self.note(repository, Some(to), error)?,
        }
        Ok(())
    }

    async fn delete(&mut self, repository: &RepositoryName, here: &Names, there: &Names) -> Result<()> {
        for (tag, seen) in there.tags.iter().filter(|(tag, _)| !here.tags.contains_key(*tag)) {
            match self.destination.delete_tag(repository, tag, *seen).await {
                Ok(()) => self.report.tags_deleted += 1,
                // Another client deleted or moved it first, or the target keeps it.
                Err(error) if matches!(error.code(), ErrorCode::TagMoved | ErrorCode::TagUnknown | ErrorCode::TagImmutable) => {}
                Err(error) => self.note(repository, Some(*seen), error)?,
            }
        }
        // Deleting a snapshot deletes its tags, so a snapshot with a tag at the target is kept. The
        // tag may not have been moved, because the source deleted its snapshot meanwhile, or
        // another client may have made it since.
        let tagged: HashSet<Digest> = tags(self.destination, repository).await?.into_values().collect();
        let wanted: HashSet<Digest> = here.snapshots.iter().map(|snapshot| snapshot.digest).collect();
        for snapshot in there.snapshots.iter().filter(|snapshot| !wanted.contains(&snapshot.digest)) {
            if tagged.contains(&snapshot.digest) {
                tracing::warn!(%repository, snapshot = %snapshot.digest, "mirror: snapshot deleted at the source, kept because a tag of the target points at it");
                continue;
            }
            match self.destination.delete_snapshot_tagged(repository, &snapshot.digest, &[]).await {
                Ok(()) => self.report.snapshots_deleted += 1,
                // Another client has given it a tag since the look.
                Err(error) if error.code() == ErrorCode::TagMoved => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => self.note(repository, Some(snapshot.digest), error)?,
            }
        }
        Ok(())
    }

    /// Notes a failure of one snapshot. A failure that the next snapshot would meet too ends the
    /// pass.
    fn note(&mut self, repository: &RepositoryName, snapshot: Option<Digest>, error: pfr_client::Error) -> Result<()> {
        let code = error.code();
        if ends_pass(&error) {
            return Err(error);
        }
        let about = snapshot.map(|digest| format!("{digest}: ")).unwrap_or_default();
        let reason = format!("{about}{error}");
        tracing::error!(%repository, code = code.name(), reason, "mirror: snapshot not copied");
        self.report.failures.push(NotCopied { repository: repository.clone(), snapshot, code, reason });
        Ok(())
    }
}

/// Whether the next snapshot would fail as well. A bug of one site, or a 500 of a proxy, may
/// concern this one only.
fn ends_pass(error: &pfr_client::Error) -> bool {
    match error {
        pfr_client::Error::Foreign { .. } => error.retryable() || error.code() == ErrorCode::Unauthorized,
        error => matches!(
            error.code(),
            ErrorCode::Unavailable | ErrorCode::StorageFull | ErrorCode::QuotaExceeded | ErrorCode::RateLimited | ErrorCode::Unauthorized
        ),
    }
}

fn is_gone(error: &pfr_client::Error) -> bool {
    matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::BlobUnknown | ErrorCode::RepositoryUnknown)
}

/// Every snapshot, newest first; none if the repository does not exist.
async fn snapshots(site: &Site, repository: &RepositoryName) -> Result<Vec<SnapshotSummary>> {
    none_if_unknown(site.snapshots(repository).await)
}

/// Every tag; none if the repository does not exist.
async fn tags(site: &Site, repository: &RepositoryName) -> Result<BTreeMap<Tag, Digest>> {
    Ok(none_if_unknown(site.tags(repository).await)?.into_iter().map(|tag| (tag.name, tag.digest)).collect())
}

fn none_if_unknown<T>(result: Result<Vec<T>>) -> Result<Vec<T>> {
    match result {
        Err(error) if error.code() == ErrorCode::RepositoryUnknown => Ok(Vec::new()),
        other => other,
    }
}

/// What moved.
struct Moved {
    blobs: u64,
    bytes: u64,
}

/// Makes `to` hold a snapshot of `from`, under the same repository, without a tag.
async fn copy(from: &Site, to: &Site, repository: &RepositoryName, snapshot: Digest, progress: &Progress) -> Result<Moved> {
    let repository = repository.clone();
    let (source, to) = match (from, to) {
        (Site::Registry(remote), Site::Store(store)) => {
            let destination = Destination::Store { store: store.clone(), repository: repository.clone(), tag: None };
            let pulled = pfr_client::pull(remote, &repository, &Selector::Digest(snapshot), &destination, progress).await?;
            return Ok(Moved { blobs: pulled.blobs_received, bytes: pulled.bytes_received });
        }
        (Site::Store(store), Site::Registry(to)) => (Source::Store { store: store.clone(), snapshot }, to),
        (Site::Registry(from), Site::Registry(to)) => {
            (Source::Remote { remote: from.clone(), repository: repository.clone(), snapshot }, to)
        }
        (Site::Store(_), Site::Store(_)) => return Err(pfr_client::Error::Internal("both sites of a mirror are stores".into())),
    };
    // Stored frames stay as they are.
    let target = PushTarget { repository, tag: None, if_tag_is: None, parents: Vec::new(), compression: Compression::Off };
    let pushed = pfr_client::push(&source, to, target, progress).await?;
    Ok(Moved { blobs: pushed.blobs_sent, bytes: pushed.bytes_sent })
}
