//! Other domains, beside the one of the history: made, filled and deleted, with steps that die
//! anywhere.
//!
//! Steps come one after the other, between the waves of the history, so that the model has few
//! states.

use crate::check;
use crate::operations::{self, Manner};
use crate::snapshots::Snapshot;
use crate::world::World;
use pfr_schema::api::DomainState;
use pfr_schema::{Digest, DomainName, ErrorCode};
use pfr_store::{Budget, Domains, Error, GcOptions};
use rand::RngExt as _;
use rand::rngs::StdRng;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What is done with a domain.
#[derive(Clone, Debug)]
pub enum Step {
    /// It is made.
    Make(DomainName),
    /// A snapshot is pushed to it.
    Push(DomainName, Arc<Snapshot>),
    /// It is collected.
    Collect(DomainName),
    /// It is deleted.
    Delete(DomainName),
    /// The task that removes deleted domains runs.
    Remove,
}

/// Snapshots by domain.
type Contents = BTreeMap<DomainName, BTreeSet<Digest>>;

/// What is known of the domains.
#[derive(Clone, Debug, Default)]
pub struct Tenants {
    /// Those that exist.
    live: Contents,
    /// What must survive the loss of the databases: what was acknowledged.
    durable: Contents,
    /// Those that were deleted. They come back if the catalogue is lost before their bytes are
    /// gone.
    deleted: BTreeMap<DomainName, Vec<BTreeSet<Digest>>>,
}

impl Step {
    /// Draws a step.
    pub fn draw(random: &mut StdRng) -> Self {
        let name: DomainName = ["acme", "b-2"][random.random_range(0..2)].parse().unwrap_or_else(|_| unreachable!());
        match random.random_range(0..10) {
            0..3 => Self::Make(name),
            3..6 => {
                let first = random.random_range(0..6);
                Self::Push(name, Arc::new(Snapshot::new(&[(first..first + 3).collect()], Vec::new())))
            }
            6 => Self::Collect(name),
            7 => Self::Delete(name),
            _ => Self::Remove,
        }
    }

    /// Takes it.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn run(self, domains: Domains) -> Result<(), Error> {
        match self {
            Self::Make(name) => domains.create(&name).await.map(|_| ()),
            Self::Push(name, snapshot) => {
                let (store, repository) = (domains.open(&name).await?, "team/a".parse().unwrap_or_else(|_| unreachable!()));
                operations::push(&store, &repository, &snapshot, None, Manner::Complete).await.0
            }
            Self::Collect(name) => domains.open(&name).await?.gc(&GcOptions::default(), &mut |_| ()).await.map(|_| ()),
            Self::Delete(name) => domains.delete(&name).await.map(|_| ()),
            Self::Remove => domains.remove_deleted(&Budget::default()).await.map(|_| ()),
        }
    }

    /// What there is after it, if it had its effect.
    fn apply(&self, contents: &mut Contents) {
        match self {
            Self::Make(name) => drop(contents.entry(name.clone()).or_default()),
            Self::Push(name, snapshot) => contents.get_mut(name).into_iter().for_each(|found| found.extend([snapshot.digest])),
            Self::Delete(name) => drop(contents.remove(name)),
            Self::Collect(_) | Self::Remove => {}
        }
    }

    fn name(&self) -> Option<&DomainName> {
        match self {
            Self::Make(name) | Self::Push(name, _) | Self::Collect(name) | Self::Delete(name) => Some(name),
            Self::Remove => None,
        }
    }
}

impl Tenants {
    /// Compares what there is after a step with what there may be. Without an answer the step died.
    /// `faults` says whether calls failed at random.
    ///
    /// # Errors
    /// In words: what is lost, or has no explanation.
    pub fn explain(&mut self, step: &Step, answer: Option<&Result<(), Error>>, faults: bool, seen: Contents) -> Result<(), String> {
        let existed = step.name().is_some_and(|name| self.live.contains_key(name));
        if let Some(Err(error)) = answer {
            let is_excused = match error.code() {
                ErrorCode::Internal | ErrorCode::CorruptStore => false,
                ErrorCode::DomainUnknown | ErrorCode::DomainBusy => !existed,
                _ => faults,
            };
            if !is_excused {
                return Err(format!("{step:?} of {self:?}: {:?}: {error}", error.code()));
            }
        }
        let mut after = self.live.clone();
        step.apply(&mut after);
        let may_be_as_before = !matches!(answer, Some(Ok(())));
        if seen != after && !(may_be_as_before && seen == self.live) {
            return Err(format!("after {step:?} ({answer:?}) of {:?}, found {seen:?}", self.live));
        }
        if !may_be_as_before {
            // An acknowledged push to a domain is durable only with the domain.
            if let Step::Push(name, _) = step {
                self.durable.entry(name.clone()).or_default();
            }
            step.apply(&mut self.durable);
        }
        if let Step::Delete(name) = step
            && let Some(contents) = self.live.get(name).filter(|_| !seen.contains_key(name))
        {
            // Commits that were not acknowledged need not be in the journal.
            let least = self.durable.remove(name).unwrap_or_default();
            self.deleted.entry(name.clone()).or_default().extend([contents.clone(), least]);
        }
        self.live = seen;
        Ok(())
    }

    /// Compares what there is after the databases were lost and rebuilt.
    ///
    /// # Errors
    /// In words: what is lost, or has no explanation.
    pub fn rebuilt(&mut self, seen: Contents) -> Result<(), String> {
        let empty = BTreeSet::new();
        for name in self.live.keys().chain(self.durable.keys()).chain(seen.keys()) {
            let (live, durable, deleted) = (self.live.get(name), self.durable.get(name), self.deleted.get(name));
            let is_allowed = match seen.get(name) {
                None => durable.is_none(),
                Some(found) => {
                    let between = |least: &BTreeSet<Digest>, most: &BTreeSet<Digest>| found.is_superset(least) && found.is_subset(most);
                    live.is_some_and(|live| between(durable.unwrap_or(&empty), live))
                        || (durable.is_none() && deleted.into_iter().flatten().any(|most| between(&empty, most)))
                }
            };
            if !is_allowed {
                return Err(format!("LOST: domain {name} after the rebuild: found {:?}, of {self:?}", seen.get(name)));
            }
        }
        (self.live, self.durable) = (seen.clone(), seen);
        self.deleted.clear();
        Ok(())
    }
}

/// All domains but that of the history, with their snapshots. Everything in them is verified, and
/// nothing lies where there is no domain.
///
/// # Errors
/// In words: what is corrupt, or left over.
pub async fn seen(world: &World) -> Result<Contents, String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    let rows = domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows;
    let mut seen = Contents::new();
    for row in rows.iter().filter(|row| !row.name.is_default() && row.state == DomainState::Live) {
        let store = domains.open(&row.name).await.map_err(|e| format!("domain {} is not opened: {e}", row.name))?;
        let names = check::names(&store).await.map_err(|e| e.to_string())?;
        check::verified(&store, &names).await?;
        seen.insert(row.name.clone(), names.values().flat_map(|repository| repository.snapshots.keys().copied()).collect());
    }
    let of_none = |key: &String| {
        let name = key.strip_prefix(DomainName::FOLDER).and_then(|rest| rest.split('/').nth(1));
        name.is_some_and(|name| rows.iter().all(|row| row.name.as_str() != name))
    };
    match world.disk.keys().into_keys().find(of_none) {
        Some(key) => Err(format!("LEAKED: {key} is in no domain")),
        None => Ok(seen),
    }
}

/// Builds the tables of all domains anew, as an operator does after the default domain's.
///
/// # Errors
/// In words: those of the store.
pub async fn rebuild(world: &World) -> Result<(), String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    for name in domains.find().await.map_err(|e| e.to_string())? {
        let store = domains.adopt(&name).await.map_err(|e| format!("domain {name}: {e}"))?;
        store.rebuild(&mut |_| ()).await.map_err(|e| format!("rebuild of domain {name}: {e}"))?;
    }
    Ok(())
}

/// Deletes all domains to the last byte.
///
/// # Errors
/// In words: what is left.
pub async fn delete_all(world: &World) -> Result<(), String> {
    let domains = world.domains().await.map_err(|e| e.to_string())?;
    for row in domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows.iter().filter(|row| !row.name.is_default()) {
        domains.delete(&row.name).await.map_err(|e| e.to_string())?;
    }
    for _ in 0..6 {
        // More than a lease after what an operation did before the clock went back a day.
        world.jump(i64::try_from(crate::world::HOUR).unwrap_or(0) * 26);
        domains.remove_deleted(&Budget::default()).await.map_err(|e| e.to_string())?;
    }
    let left = domains.list(None, 1000).await.map_err(|e| e.to_string())?.rows;
    if left.len() > 1 {
        return Err(format!("LEAKED: deleted domains do not go: {left:?}"));
    }
    seen(world).await.map(|_| ())
}
