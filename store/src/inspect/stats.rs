//! Statistics: the bytes that snapshots reach, share and cost.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{Costs, Held, ObjectId, ObjectSet};
use crate::retention::with_descendants;
use crate::tasks::Budget;
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::{Digest, RepositoryName, api};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;

/// Names listed in one metadata transaction.
const PAGE: usize = 500;
/// Snapshots listed in statistics, the last.
const LISTED: usize = 10_000;
/// Snapshots, or nodes, looked at in one metadata transaction while references are counted down.
const STEP: usize = 64;
/// Bytes of lists that are read in one metadata transaction while references are counted down: a
/// million objects at most.
const LIST_BYTES: u64 = 1 << 20;
/// Characters of an agent's id that is looked for. A longer one counts as none. So does an empty
/// one, and one with a NUL byte, which PostgreSQL does not keep.
const AGENT: usize = 255;

/// Which snapshots statistics are about: those that meet every condition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatsFilter {
    /// This one and those that descend from it in the same repository.
    pub below: Option<Digest>,
    /// Those of the agent with this id.
    pub agent: Option<String>,
}

/// Whether snapshots are looked for by this id of an agent.
fn is_kept(agent: &str) -> bool {
    (1..=AGENT).contains(&agent.chars().count()) && !agent.contains('\0')
}

/// The agent that a configuration names; empty if it names none that is looked for.
pub(crate) fn agent_of(config: &SnapshotConfig) -> String {
    config.agent.clone().filter(|agent| is_kept(agent)).unwrap_or_default()
}

/// Sums over the snapshots so far.
#[derive(Default)]
struct Sums {
    /// What they reach.
    reached: Arc<ObjectSet>,
    logical: u64,
    unique: u64,
    stored: u64,
    listed: VecDeque<api::SnapshotStats>,
    omitted: u64,
}

/// References that go, counted down until none is left.
#[derive(Default)]
struct CountDown {
    freed: api::Freed,
    /// Nodes without references, whose own ones are to be counted.
    nodes: Vec<ObjectId>,
    /// References that go, of objects that keep some so far.
    gone: HashMap<ObjectId, u64>,
}

impl CountDown {
    fn take(&mut self, held: Held) {
        self.freed.bytes += held.bytes;
        self.freed.stored_bytes += held.stored;
        self.nodes.extend(held.left);
        self.nodes.extend(held.nodes);
        for object in held.shared {
            let gone = self.gone.entry(object.id).or_default();
            *gone += object.seen;
            if *gone < object.refs {
                continue;
            }
            self.gone.remove(&object.id);
            self.freed.bytes += object.size;
            self.freed.stored_bytes += object.frame_len;
            if object.is_node {
                self.nodes.push(object.id);
            }
        }
    }
}

impl Store {
    /// How much snapshots share: of one repository, or of the whole store. Exact, as of each moment
    /// at which some of the snapshots are looked at. Reads the nodes that they reach, each once,
    /// and no rows of pages; memory is a set of row ids.
    ///
    /// # Errors
    /// [`crate::Error::RepositoryUnknown`].
    pub async fn stats(&self, repository: Option<&RepositoryName>) -> Result<api::Stats> {
        self.stats_of(repository, &StatsFilter::default()).await
    }

    /// The same of some snapshots, as if there were no others; but what deleting a snapshot frees
    /// is said as it is. Keeps the summaries of all snapshots of a repository in memory, unless
    /// only an agent is given. With an agent, the first question reads the configurations of
    /// snapshots that an older version committed, or that a rebuild brought back.
    ///
    /// # Errors
    /// [`crate::Error::RepositoryUnknown`].
    #[boxed]
    pub async fn stats_of(&self, repository: Option<&RepositoryName>, filter: &StatsFilter) -> Result<api::Stats> {
        let mut sums = Sums::default();
        match repository {
            Some(name) => self.add_chosen(name, filter, &mut sums).await?,
            None => {
                for name in self.all_repositories().await? {
                    match self.add_chosen(&name, filter, &mut sums).await {
                        // Its last snapshot was deleted since it was listed.
                        Err(Error::RepositoryUnknown(_)) => {}
                        added => added?,
                    }
                }
            }
        }
        self.summed(repository, filter.clone(), sums).await
    }

    /// Adds the snapshots of a repository that meet a filter.
    async fn add_chosen(&self, repository: &RepositoryName, filter: &StatsFilter, sums: &mut Sums) -> Result<()> {
        if *filter == StatsFilter::default() {
            return self.add_costs(repository, None, sums).await;
        }
        for some in self.chosen(repository, filter).await?.chunks(STEP) {
            self.add_costs(repository, Some(some.to_vec()), sums).await?;
        }
        Ok(())
    }

    /// The snapshots that meet a filter, the oldest first.
    async fn chosen(&self, repository: &RepositoryName, filter: &StatsFilter) -> Result<Vec<Digest>> {
        // Refuses a repository that there is not.
        self.tags(repository, None, 1).await?;
        let of_agent = match &filter.agent {
            Some(agent) => Some(self.of_agent(repository, agent).await?),
            None => None,
        };
        let of_agent: Option<HashSet<Digest>> = match (of_agent, filter.below) {
            (Some(snapshots), None) => return Ok(snapshots),
            (snapshots, _) => snapshots.map(|snapshots| snapshots.into_iter().collect()),
        };
        let mut snapshots = self.every_snapshot(repository).await?;
        snapshots.reverse();
        let below = filter.below.map(|root| with_descendants(&snapshots, root));
        let is_in = |set: &Option<HashSet<Digest>>, digest: &Digest| set.as_ref().is_none_or(|set| set.contains(digest));
        let digests = snapshots.iter().map(|snapshot| snapshot.digest);
        Ok(digests.filter(|digest| is_in(&of_agent, digest) && is_in(&below, digest)).collect())
    }

    /// The snapshots of an agent. Reads the configurations of those whose agent is not in the
    /// tables yet; one that is damaged is left out.
    async fn of_agent(&self, repository: &RepositoryName, agent: &str) -> Result<Vec<Digest>> {
        let mut after = 0;
        loop {
            let found = self.metadata.unread_agents(repository.clone(), after, STEP).await?;
            let Some(last) = found.last() else { break };
            after = last.0;
            let mut agents = Vec::with_capacity(found.len());
            for (id, digest) in found {
                match self.prefix_documents(&digest).await {
                    Ok(documents) => agents.push((id, documents.map(|(_, config)| agent_of(&config)).unwrap_or_default())),
                    Err(Error::Format(_)) => agents.push((id, String::new())),
                    // Deleted since it was listed.
                    Err(Error::BlobUnknown { .. }) => {}
                    // It would be missing in this answer, and not in the next one.
                    Err(error) if error.code().retryable() => return Err(error),
                    Err(error) => tracing::warn!(%error, %digest, "reading the agent of a snapshot failed"),
                }
            }
            self.metadata.note_agents(agents).await?;
        }
        match is_kept(agent) {
            true => self.metadata.snapshots_of_agent(repository.clone(), agent.to_owned()).await,
            false => Ok(Vec::new()),
        }
    }

    async fn summed(&self, repository: Option<&RepositoryName>, filter: StatsFilter, sums: Sums) -> Result<api::Stats> {
        let StatsFilter { below, agent } = filter;
        let Sums { logical, unique, stored, listed, omitted, .. } = sums;
        Ok(api::Stats {
            repository: repository.cloned(),
            below,
            agent,
            logical,
            unique,
            stored,
            dedup_ratio: ratio(logical, unique),
            codec_ratio: ratio(unique, stored),
            disk: self.metadata.disk_bytes().await?,
            omitted,
            snapshots: listed.into(),
        })
    }

    /// What one snapshot costs. Reads what it reaches, and nothing of the rest of its repository.
    /// Its new bytes are those that it was the first to hold when it was pushed.
    ///
    /// # Errors
    /// [`crate::Error::RepositoryUnknown`], [`crate::Error::SnapshotUnknown`].
    #[boxed]
    pub async fn snapshot_stats(&self, repository: &RepositoryName, snapshot: &Digest) -> Result<api::SnapshotStats> {
        let costs = self.metadata.cost(repository.clone(), *snapshot).await?;
        let new = costs.snapshot.new_bytes;
        Ok(listed(repository, Costs { new, ..costs }))
    }

    /// What a deletion of snapshots, all together and with their tags and signatures, would free.
    /// Those that are not there are left out. Exact, unless something is changed meanwhile. Reads
    /// the nodes that would be freed, each once, and what they list. Memory is an entry for each
    /// node that waits to be read, and for each object of which some references would go. `None`:
    /// `budget` was used up first.
    ///
    /// # Errors
    /// [`crate::Error::Unavailable`].
    #[boxed]
    pub async fn freed_by(&self, snapshots: &BTreeMap<RepositoryName, BTreeSet<Digest>>, budget: &Budget) -> Result<Option<api::Freed>> {
        let mut count = CountDown::default();
        let mut roots: Vec<(ObjectId, u64)> = Vec::new();
        for (repository, digests) in snapshots {
            let digests: Vec<Digest> = digests.iter().copied().collect();
            for some in digests.chunks(STEP) {
                if budget.is_used_up() {
                    return Ok(None);
                }
                let (found, references) = self.metadata.deletion(repository.clone(), some.to_vec()).await?;
                count.freed.snapshots += found;
                roots.extend(references);
            }
        }
        for some in roots.chunks(STEP) {
            if budget.is_used_up() {
                return Ok(None);
            }
            count.take(self.metadata.held(Vec::new(), some.to_vec(), LIST_BYTES).await?);
        }
        while !count.nodes.is_empty() {
            if budget.is_used_up() {
                return Ok(None);
            }
            let some = count.nodes.split_off(count.nodes.len().saturating_sub(STEP));
            count.take(self.metadata.held(some, Vec::new(), LIST_BYTES).await?);
        }
        Ok(Some(count.freed))
    }

    /// The oldest snapshots of a repository that name `parent` as a parent, at most `limit`.
    ///
    /// # Errors
    /// [`crate::Error::RepositoryUnknown`].
    #[boxed]
    pub async fn continuations(&self, repository: &RepositoryName, parent: &Digest, limit: usize) -> Result<Vec<api::SnapshotSummary>> {
        let rows = self.metadata.continuations(repository.clone(), *parent, limit).await?;
        Ok(rows.into_iter().map(Into::into).collect())
    }

    async fn add_costs(&self, name: &RepositoryName, only: Option<Vec<Digest>>, sums: &mut Sums) -> Result<()> {
        let mut after = Some(0);
        while let Some(from) = after {
            let page = self.metadata.costs(name.clone(), from, only.clone(), Arc::clone(&sums.reached)).await?;
            *Arc::make_mut(&mut sums.reached) |= page.reached;
            sums.stored += page.stored;
            for costs in page.costs {
                sums.logical += costs.snapshot.logical_bytes;
                sums.unique += costs.new;
                sums.listed.push_back(listed(name, costs));
                if sums.listed.len() > LISTED {
                    sums.listed.pop_front();
                    sums.omitted += 1;
                }
            }
            after = page.next;
        }
        Ok(())
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
}

fn listed(repository: &RepositoryName, Costs { snapshot, new, exclusive }: Costs) -> api::SnapshotStats {
    api::SnapshotStats {
        repository: repository.clone(),
        digest: snapshot.digest,
        tags: snapshot.tags,
        parents: snapshot.parents,
        pushed_at: snapshot.pushed_at,
        logical: snapshot.logical_bytes,
        new,
        shared: snapshot.logical_bytes.saturating_sub(exclusive),
        exclusive,
    }
}

fn ratio(numerator: u64, denominator: u64) -> f64 {
    if denominator == 0 { 1.0 } else { numerator as f64 / denominator as f64 }
}
