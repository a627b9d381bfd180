//! One pass: make the target hold what the source holds.

use super::report::{Conflict, Failed, Report};
use super::{End, Error};
use pfr_client::{Progress, Result};
use pfr_schema::api::{SnapshotSummary, TagState};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

/// How often a long copy says how far it is.
const TELL: Duration = Duration::from_secs(5);

/// What to copy.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Repositories: names, in which `*` stands for anything. None: all.
    pub repositories: Vec<String>,
    /// Delete at the target what the source does not have, and take the source's tags whatever they were at the target.
    pub delete: bool,
}

impl Options {
    fn wants(&self, repository: &RepositoryName) -> bool {
        self.repositories.is_empty() || self.repositories.iter().any(|pattern| matches(pattern, repository.as_str()))
    }
}

/// Whether `*`s in a pattern can be filled in so that it is the text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(text) = text.strip_prefix(head) else { return false };
    (0..=text.len()).filter(|at| text.is_char_boundary(*at)).any(|at| matches(rest, &text[at..]))
}

/// Copies what the target lacks: snapshots, parents first, then tags. What fails for one snapshot is noted and the others go on.
///
/// # Errors
/// [`Error::Client`] once an end cannot be reached or is full: then the rest is not tried. `report` has what was done in any case.
pub async fn mirror(source: &End, target: &End, options: &Options, report: &mut Report) -> std::result::Result<(), Error> {
    if matches!((source, target), (End::Store(_), End::Store(_))) {
        return Err(Error::Ends("both ends are this registry's own store; name the other registry with --from or --to"));
    }
    let start = Instant::now();
    let mut pass = Pass { source, target, options, report };
    let result = pass.run().await;
    pass.report.seconds = start.elapsed().as_secs_f64();
    Ok(result?)
}

struct Pass<'a> {
    source: &'a End,
    target: &'a End,
    options: &'a Options,
    report: &'a mut Report,
}

/// What an end has under a repository.
struct Names {
    snapshots: Vec<SnapshotSummary>,
    tags: BTreeMap<Tag, Digest>,
}

impl Pass<'_> {
    async fn run(&mut self) -> Result<()> {
        // The target first: what it has and the source, asked later, has not, is gone there and not yet to come.
        let mut repositories: BTreeSet<RepositoryName> = BTreeSet::new();
        if self.options.delete {
            repositories.extend(self.target.repositories().await?);
        }
        repositories.extend(self.source.repositories().await?);
        for repository in repositories.into_iter().filter(|name| self.options.wants(name)) {
            self.report.repositories += 1;
            if let Err(error) = self.repository(&repository).await {
                self.note(&repository, None, error)?;
            }
        }
        Ok(())
    }

    async fn repository(&mut self, repository: &RepositoryName) -> Result<()> {
        let there = Names { snapshots: self.target.snapshots(repository).await?, tags: self.target.tags(repository).await? };
        // Tags before snapshots: what a tag points at is then in the list, unless it was deleted.
        let tags = self.source.tags(repository).await?;
        let here = Names { tags, snapshots: self.source.snapshots(repository).await? };
        let mut held: HashSet<Digest> = there.snapshots.iter().map(|snapshot| snapshot.digest).collect();
        let lacking = parents_first(&here.snapshots, &held);
        self.report.snapshots_present += (here.snapshots.len() - lacking.len()) as u64;
        for (number, snapshot) in lacking.iter().enumerate() {
            match self.copy(repository, *snapshot, (number + 1, lacking.len())).await {
                Ok(()) => {
                    held.insert(*snapshot);
                }
                Err(error) if gone(&error) && !self.still_there(repository, snapshot).await? => self.report.snapshots_skipped += 1,
                Err(error) => self.note(repository, Some(*snapshot), error)?,
            }
        }
        let lineage = Lineage::new(&here, &there);
        for (tag, to) in here.tags.iter().filter(|(_, to)| held.contains(*to)) {
            let seen = there.tags.get(tag).copied();
            if seen != Some(*to) {
                self.tag(repository, tag, *to, seen, &lineage).await?;
            }
        }
        if self.options.delete { self.delete(repository, &here, &there).await } else { Ok(()) }
    }

    async fn copy(&mut self, repository: &RepositoryName, snapshot: Digest, (number, of): (usize, usize)) -> Result<()> {
        let progress = Progress::new();
        let tell = async {
            loop {
                tokio::time::sleep(TELL).await;
                let (bytes, total) = (progress.bytes_done() + progress.bytes_deduplicated(), progress.bytes_total());
                tracing::info!(%repository, %snapshot, number, of, phase = %progress.phase(), bytes, total, "copying");
            }
        };
        let moved = tokio::select! {
            moved = self.source.copy(self.target, repository, snapshot, &progress) => moved?,
            () = tell => return Ok(()),
        };
        tracing::info!(%repository, %snapshot, number, of, blobs = moved.blobs, bytes = moved.bytes, "copied");
        self.report.snapshots_copied += 1;
        self.report.blobs += moved.blobs;
        self.report.bytes += moved.bytes;
        Ok(())
    }

    async fn still_there(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<bool> {
        Ok(self.source.snapshots(repository).await?.iter().any(|there| there.digest == *snapshot))
    }

    async fn tag(&mut self, repository: &RepositoryName, tag: &Tag, to: Digest, seen: Option<Digest>, lineage: &Lineage<'_>) -> Result<()> {
        let conflict = Conflict { repository: repository.clone(), tag: tag.clone(), source: to, target: seen };
        if seen.is_some_and(|seen| !self.options.delete && !lineage.leads(seen, to)) {
            self.report.conflicts.push(conflict);
            return Ok(());
        }
        match self.target.put_tag(repository, tag, to, seen.map_or(TagState::Absent, TagState::At)).await {
            Ok(()) => self.report.tags_moved += 1,
            Err(error) if error.code() == ErrorCode::TagMoved => self.report.conflicts.push(conflict),
            Err(error) => self.note(repository, Some(to), error)?,
        }
        Ok(())
    }

    async fn delete(&mut self, repository: &RepositoryName, here: &Names, there: &Names) -> Result<()> {
        for (tag, seen) in there.tags.iter().filter(|(tag, _)| !here.tags.contains_key(*tag)) {
            match self.target.delete_tag(repository, tag, *seen).await {
                Ok(()) => self.report.tags_deleted += 1,
                // Somebody was faster, or uses it.
                Err(error) if matches!(error.code(), ErrorCode::TagMoved | ErrorCode::TagUnknown) => {}
                Err(error) => self.note(repository, Some(*seen), error)?,
            }
        }
        let wanted: HashSet<Digest> = here.snapshots.iter().map(|snapshot| snapshot.digest).collect();
        for snapshot in there.snapshots.iter().filter(|snapshot| !wanted.contains(&snapshot.digest)) {
            match self.target.delete_snapshot(repository, &snapshot.digest).await {
                Ok(()) => self.report.snapshots_deleted += 1,
                Err(error) if gone(&error) => {}
                Err(error) => self.note(repository, Some(snapshot.digest), error)?,
            }
        }
        Ok(())
    }

    /// Notes what concerns one snapshot; what would meet the next as well ends the pass.
    fn note(&mut self, repository: &RepositoryName, snapshot: Option<Digest>, error: pfr_client::Error) -> Result<()> {
        let code = error.code();
        let hopeless = [ErrorCode::Unavailable, ErrorCode::StorageFull, ErrorCode::Unauthorized, ErrorCode::Internal];
        if hopeless.contains(&code) {
            return Err(error);
        }
        let about = snapshot.map(|digest| format!("{digest}: ")).unwrap_or_default();
        let reason = format!("{about}{error}");
        tracing::error!(%repository, code = code.name(), reason, "not copied");
        self.report.failures.push(Failed { repository: repository.clone(), snapshot, code, reason });
        Ok(())
    }
}

fn gone(error: &pfr_client::Error) -> bool {
    matches!(error.code(), ErrorCode::SnapshotUnknown | ErrorCode::BlobUnknown | ErrorCode::RepositoryUnknown)
}

/// Whether a tag of the target lags behind the source, or went its own way.
struct Lineage<'a> {
    at_source: HashSet<Digest>,
    parents: HashMap<Digest, &'a [Digest]>,
}

impl<'a> Lineage<'a> {
    fn new(here: &'a Names, there: &'a Names) -> Self {
        let all = here.snapshots.iter().chain(&there.snapshots);
        Self {
            at_source: here.snapshots.iter().map(|snapshot| snapshot.digest).collect(),
            parents: all.map(|snapshot| (snapshot.digest, &*snapshot.parents)).collect(),
        }
    }

    /// `seen` is known at the source, or — deleted there since — an ancestor of what the tag moves to.
    fn leads(&self, seen: Digest, to: Digest) -> bool {
        let (mut queue, mut met) = (vec![to], HashSet::from([to]));
        while let Some(next) = queue.pop().filter(|next| *next != seen && !self.at_source.contains(&seen)) {
            let parents = self.parents.get(&next).copied().unwrap_or_default();
            queue.extend(parents.iter().copied().filter(|parent| met.insert(*parent)));
        }
        met.contains(&seen) || self.at_source.contains(&seen)
    }
}

/// What of `snapshots` (newest first) is not held: oldest first, but parents before their children whatever the times say.
fn parents_first(snapshots: &[SnapshotSummary], held: &HashSet<Digest>) -> Vec<Digest> {
    let lacking: HashMap<Digest, &SnapshotSummary> =
        snapshots.iter().filter(|snapshot| !held.contains(&snapshot.digest)).map(|snapshot| (snapshot.digest, snapshot)).collect();
    let (mut order, mut placed) = (Vec::with_capacity(lacking.len()), HashSet::new());
    for snapshot in snapshots.iter().rev().filter(|snapshot| lacking.contains_key(&snapshot.digest)) {
        // Each entry is looked at twice: before its parents are placed, and after.
        let mut stack = vec![(snapshot.digest, false)];
        while let Some((next, ready)) = stack.pop() {
            if ready {
                if placed.insert(next) {
                    order.push(next);
                }
            } else if let Some(found) = lacking.get(&next).filter(|_| !placed.contains(&next)) {
                stack.push((next, true));
                stack.extend(found.parents.iter().map(|parent| (*parent, false)));
            }
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(name: &str) -> Digest {
        Digest::sha256(name.as_bytes())
    }

    fn snapshot(name: &str, parents: &[&str]) -> SnapshotSummary {
        let parents = parents.iter().map(|parent| digest(parent)).collect();
        SnapshotSummary { digest: digest(name), tags: vec![], parents, pushed_at: 0, logical_bytes: 0, new_bytes: 0 }
    }

    #[test]
    fn parents_come_first_whatever_the_order_of_the_list() {
        // Newest first: "a" is said to be newer than its children.
        let list = [snapshot("a", &["gone"]), snapshot("c", &["b", "a"]), snapshot("b", &["a"]), snapshot("held", &[])];
        let order = parents_first(&list, &HashSet::from([digest("held")]));
        assert_eq!(order, ["a", "b", "c"].map(digest));
    }

    #[test]
    fn a_tag_lags_if_the_source_knows_where_it_is_or_it_is_an_ancestor() {
        let here = Names { snapshots: vec![snapshot("c", &["b"]), snapshot("x", &[])], tags: BTreeMap::new() };
        let there = Names { snapshots: vec![snapshot("b", &["a"]), snapshot("a", &[]), snapshot("own", &["a"])], tags: BTreeMap::new() };
        let lineage = Lineage::new(&here, &there);
        for (seen, leads) in [("c", true), ("x", true), ("b", true), ("a", true), ("own", false)] {
            assert_eq!(lineage.leads(digest(seen), digest("c")), leads, "{seen}");
        }
    }

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, text, fits) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("*", "team/agent", true),
            ("team/*", "team/agent", true),
            ("team/*", "teams/agent", false),
            ("*/agent", "team/agent", true),
            ("t*m/*t", "team/agent", true),
            ("t*x", "team", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
    }
}
