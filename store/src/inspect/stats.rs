//! Statistics: what snapshots reach, share and cost.

use crate::Store;
use crate::boxed;
use crate::error::Result;
use crate::metadata::{ObjectId, ObjectRow, SnapshotRow};
use pfr_schema::{RepositoryName, api};
use std::collections::{HashMap, HashSet};

/// Names listed in one metadata transaction.
const PAGE: usize = 500;

/// Object rows seen so far; a shared container is read once for all snapshots.
#[derive(Default)]
struct Rows(HashMap<ObjectId, ObjectRow>);

impl Rows {
    async fn load(&mut self, store: &Store, ids: impl IntoIterator<Item = ObjectId>) -> Result<()> {
        let unknown: Vec<ObjectId> = ids.into_iter().filter(|id| !self.0.contains_key(id)).collect::<HashSet<_>>().into_iter().collect();
        self.0.extend(store.rows(unknown).await?.into_iter().map(|row| (row.id, row)));
        Ok(())
    }
}

impl Store {
    /// How much snapshots share: of one repository, or of the whole store.
    ///
    /// Reads each container once; what deleting a snapshot would free is found by counting references down in memory.
    ///
    /// # Errors
    /// [`crate::Error::RepositoryUnknown`].
    #[boxed]
    pub async fn stats(&self, repository: Option<&RepositoryName>) -> Result<api::Stats> {
        let repositories = match repository {
            Some(name) => vec![name.clone()],
            None => self.all_repositories().await?,
        };
        let (mut rows, mut seen) = (Rows::default(), HashSet::new());
        let (mut logical, mut unique, mut stored) = (0, 0, 0);
        let mut snapshots = Vec::new();
        for name in &repositories {
            for snapshot in self.all_snapshots(name).await? {
                let (new, new_stored) = self.walk_new(snapshot.object, &mut rows, &mut seen).await?;
                let exclusive = self.exclusive(&snapshot, &mut rows).await?;
                logical += snapshot.logical_bytes;
                unique += new;
                stored += new_stored;
                snapshots.push(api::SnapshotStats {
                    repository: name.clone(),
                    digest: snapshot.digest,
                    tags: snapshot.tags,
                    parents: snapshot.parents,
                    logical: snapshot.logical_bytes,
                    new,
                    shared: snapshot.logical_bytes.saturating_sub(exclusive),
                    exclusive,
                });
            }
        }
        Ok(api::Stats {
            repository: repository.cloned(),
            logical,
            unique,
            stored,
            dedup_ratio: ratio(logical, unique),
            codec_ratio: ratio(unique, stored),
            disk: self.metadata.disk_bytes().await?,
            snapshots,
        })
    }

    /// Raw bytes and frame bytes of what nothing before reached; stops where something did.
    async fn walk_new(&self, root: ObjectId, rows: &mut Rows, seen: &mut HashSet<ObjectId>) -> Result<(u64, u64)> {
        let (mut raw, mut stored, mut level) = (0, 0, vec![root]);
        while !level.is_empty() {
            level.retain(|id| seen.insert(*id));
            rows.load(self, level.iter().copied()).await?;
            let mut next = Vec::new();
            for row in level.iter().filter_map(|id| rows.0.get(id)) {
                raw += row.size;
                stored += row.frame_len;
                next.extend_from_slice(&row.children);
            }
            level = next;
        }
        Ok((raw, stored))
    }

    /// Raw bytes that deleting the snapshot and its tags would free: objects whose last reference goes with it.
    async fn exclusive(&self, snapshot: &SnapshotRow, rows: &mut Rows) -> Result<u64> {
        let mut taken: HashMap<ObjectId, u64> = HashMap::from([(snapshot.object, 1 + snapshot.tags.len() as u64)]);
        let (mut freed, mut candidates) = (0, vec![snapshot.object]);
        while !candidates.is_empty() {
            rows.load(self, candidates.iter().copied()).await?;
            let mut next = Vec::new();
            for row in candidates.iter().filter_map(|id| rows.0.get(id)) {
                if taken.get(&row.id).copied().unwrap_or(0) < row.refs {
                    continue;
                }
                freed += row.size;
                for child in &row.children {
                    *taken.entry(*child).or_default() += 1;
                    next.push(*child);
                }
            }
            // A child of two freed containers is looked at twice, but freed when the last of them lets go.
            next.sort_unstable();
            next.dedup();
            candidates = next;
        }
        Ok(freed)
    }

    pub(crate) async fn all_repositories(&self) -> Result<Vec<RepositoryName>> {
        let (mut names, mut after) = (Vec::new(), None);
        loop {
            let page = self.repositories(after, PAGE).await?;
            names.extend(page.rows.into_iter().map(|row| row.name));
            after = page.next;
            if after.is_none() {
                return Ok(names);
            }
        }
    }

    /// Snapshots of a repository, oldest first.
    pub(crate) async fn all_snapshots(&self, repository: &RepositoryName) -> Result<Vec<SnapshotRow>> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = self.snapshots(repository, after, PAGE).await?;
            all.extend(page.rows);
            after = page.next;
            if after.is_none() {
                all.reverse();
                return Ok(all);
            }
        }
    }
}

fn ratio(numerator: u64, denominator: u64) -> f64 {
    if denominator == 0 { 1.0 } else { numerator as f64 / denominator as f64 }
}
