//! What happens between the waves of a history: steps with other domains, retention, the loss of
//! the database, bit rot, and the end.

use super::{History, STUCK};
use crate::check;
use crate::domains::{self, Step};
use crate::events::Follower;
use crate::gate::{self, Gate, Progress, Task};
use crate::names::{Change, Outcome};
use crate::operations::{self, Manner};
use crate::retention::Rule;
use crate::world::HOUR;
use pfr_schema::{Digest, ErrorCode, RepositoryName};
use pfr_store::Error;
use rand::RngExt as _;
use std::collections::BTreeSet;
use std::sync::Arc;

impl History {
    // ---- other domains

    /// A step with another domain. Its replica may die at any point of it.
    pub(super) async fn domain(&mut self) -> Result<(), String> {
        let (step, faults) = (Step::draw(&mut self.random, &mut self.focus), self.chance(0.3));
        let cut_at = self.chance(0.3).then(|| self.random.random_range(0..60_u64));
        if self.chance(0.3) {
            self.world.jump(i64::try_from(2 * HOUR).unwrap_or(0));
        }
        self.log.push(format!("domains: {step:?}, faults {faults}, dies at {cut_at:?}"));
        self.world.set_faults(0.0, false);
        self.world.start(0).await.map_err(|e| e.to_string())?;
        if matches!(step, Step::Rewrap) {
            self.world.keyring.turn().map_err(|e| e.to_string())?;
        }
        let Some(domains) = self.world.domains_of(0).await.map_err(|e| e.to_string())? else { return Ok(()) };
        let task: Task<Result<(), Error>> = Box::pin(step.clone().run(domains));
        let answer = self.alone(task, faults, cut_at).await;
        let is_rewrapped = matches!((&step, &answer), (Step::Rewrap, Some(Ok(()))));
        if is_rewrapped {
            domains::rewrapped(&self.world).await?;
        }
        let seen = domains::seen(&self.world, self.tenants.was_lost).await;
        let seen = seen.map_err(|what| format!("after {step:?} ({answer:?}): {what}"))?;
        self.tenants.explain(&step, answer.as_ref(), faults, seen)?;
        if is_rewrapped { domains::settle(&mut self.world).await } else { Ok(()) }
    }

    /// Runs something on the first replica while nothing else runs; no answer if it died.
    async fn alone<T>(&mut self, mut task: Task<Result<T, Error>>, faults: bool, cut_at: Option<u64>) -> Option<Result<T, Error>> {
        self.counts.rounds += 1;
        self.world.set_faults(if faults { 0.03 } else { 0.0 }, false);
        let gate: Arc<Gate> = Arc::default();
        let mut answer = None;
        while cut_at.is_none_or(|steps| gate.steps() < steps) {
            gate.open();
            if let Progress::Done(ended) = gate::run(&mut task, &gate, STUCK).await {
                answer = Some(ended);
                break;
            }
        }
        drop(task);
        match &answer {
            None => {
                self.counts.cut += 1;
                self.counts.crashes += u64::from(self.world.replicas[0].store.take().is_some());
            }
            Some(answer) => self.counts.acknowledged += u64::from(answer.is_ok()),
        }
        self.world.set_faults(0.0, false);
        answer
    }

    // ---- retention

    /// Retention policies run over a repository, and may die at any point.
    pub(super) async fn retain(&mut self) -> Result<(), String> {
        let repository: RepositoryName = ["team/a", "team/b"][self.random.random_range(0..2)].parse().unwrap_or_else(|_| unreachable!());
        let Some(found) = self.oracle.names.get(&repository) else { return Ok(()) };
        let rows = self.world.observer.snapshots(&repository, None, 10_000).await.map_err(|e| e.to_string())?.rows;
        let newest_first: Vec<Digest> = rows.iter().map(|row| row.digest).collect();
        let Some(rule) = Rule::draw(&mut self.random, repository, found, &newest_first) else { return Ok(()) };
        let (faults, cut_at) = (self.chance(0.3), self.chance(0.3).then(|| self.random.random_range(0..20_u64)));
        self.log.push(format!("retention: {rule:?}, faults {faults}, dies at {cut_at:?}"));
        let dry = rule.begin(&self.world.observer).await.map_err(|e| format!("a dry run of {rule:?}: {e}"))?;
        if dry != rule.doomed {
            return Err(format!("WRONG: {rule:?}, and a dry run would delete {dry:?}"));
        }
        self.world.start(0).await.map_err(|e| e.to_string())?;
        let Some(store) = self.world.replicas[0].store.clone() else { return Ok(()) };
        let task: Task<Result<BTreeSet<Digest>, Error>> = Box::pin(Rule::run(store));
        let answer = self.alone(task, faults, cut_at).await;
        rule.end(&self.world.observer).await.map_err(|e| e.to_string())?;
        let now = check::names(&self.world.observer).await.map_err(|e| e.to_string())?;
        let left = now.get(&rule.repository);
        let gone = |digest: &&Digest| left.is_none_or(|left| !left.snapshots.contains_key(*digest));
        let gone: BTreeSet<Digest> = newest_first.iter().filter(gone).copied().collect();
        let outcome = match &answer {
            Some(Ok(_)) => Outcome::Done,
            Some(Err(error)) if !faults || matches!(error.code(), ErrorCode::Internal | ErrorCode::CorruptStore) => {
                return Err(format!("{rule:?}: {:?}: {error}", error.code()));
            }
            _ => Outcome::Unknown,
        };
        if !gone.is_subset(&rule.doomed) || (outcome == Outcome::Done && gone != rule.doomed) {
            return Err(format!("WRONG: {rule:?} ({answer:?}), and {gone:?} is gone"));
        }
        if let Some(Ok(told)) = &answer
            && *told != gone
        {
            return Err(format!("WRONG: {rule:?} told {told:?}, and {gone:?} is gone"));
        }
        self.counts.expired += gone.len() as u64;
        let deletion = |snapshot| (Change::Delete { repository: rule.repository.clone(), snapshot }, outcome);
        let changes: Vec<_> = gone.into_iter().map(deletion).collect();
        self.compare(&changes).await
    }

    // ---- the loss of the database

    /// All replicas die and the database is gone: packs and journal bring back what was
    /// acknowledged, even if the first rebuild is killed.
    pub(super) async fn rebuild(&mut self) -> Result<(), String> {
        let cut_at = self.chance(0.5).then(|| self.random.random_range(0..300_u64));
        self.log.push(format!("the database is lost; rebuild, a first attempt dies at {cut_at:?}"));
        let power = self.chance(0.5);
        self.counts.crashes += self.world.replicas.iter_mut().map(|r| u64::from(r.store.take().is_some())).sum::<u64>();
        if power {
            self.world.disk.power_loss();
        }
        self.world.set_faults(0.0, false);
        self.world.lose_database().await.map_err(|e| e.to_string())?;
        if let Some(cut_at) = cut_at {
            self.world.start(0).await.map_err(|e| e.to_string())?;
            let store = self.world.replicas[0].store.clone();
            let gate: Arc<Gate> = Arc::default();
            let mut task: Task<()> = Box::pin(async move {
                if let Some(store) = store {
                    drop(store.rebuild(&mut |_| ()).await);
                }
            });
            while gate.steps() < cut_at {
                gate.open();
                if matches!(gate::run(&mut task, &gate, STUCK).await, Progress::Done(())) {
                    break;
                }
            }
            drop(task);
            self.counts.cut += 1;
            self.world.lose_database().await.map_err(|e| e.to_string())?;
        }
        let report = self.world.observer.rebuild(&mut |_| ()).await.map_err(|e| format!("rebuild: {e}"))?;
        // A deletion that failed before it was journaled may have freed bytes already: the oracle
        // knows whether anything acknowledged is lost.
        self.log.push(format!("rebuilt, lost: {:?}", report.lost));
        let debris = report.refused.iter().filter_map(|words| words.split(": ").next()).filter(|key| !key.contains(' '));
        self.debris.extend(debris.map(|key| if key.contains('/') { key.to_owned() } else { check::path(key).to_string() }));
        let seen = check::names(&self.world.observer).await.map_err(|e| e.to_string())?;
        self.oracle.rebuilt(&seen)?;
        self.follower.survived(&seen)?;
        self.follower = Follower::new(&self.world.observer, &seen).await?;
        let left = domains::rebuild(&self.world).await?;
        self.tenants.rebuilt(domains::seen(&self.world, true).await?, left)?;
        if self.counts.flipped > 0 {
            // The database knew what is in quarantine; packs do not.
            self.scrub_and_heal().await?;
        }
        self.counts.compared_bytes += check::complete(&self.world, &seen, &self.library).await?;
        self.matches(&seen).await?;
        self.counts.rebuilds += 1;
        check::verified(&self.world.observer, &seen).await
    }

    // ---- bit rot

    /// A byte of a pack changes. A scrub finds it, and a second push of the snapshots that it hit
    /// heals it.
    pub(super) async fn rot(&mut self) -> Result<(), String> {
        let mut packs: Vec<(String, u64)> = self
            .world
            .disk
            .keys()
            .into_iter()
            .filter(|(key, bytes)| key.ends_with(".pfpack") && *bytes > 0 && !check::is_of_domain(key))
            .collect();
        if packs.is_empty() {
            return Ok(());
        }
        // By name, that is by time: folders are random.
        packs.sort_by(|a, b| a.0.rsplit('/').next().cmp(&b.0.rsplit('/').next()));
        let (key, len) = &packs[self.random.random_range(0..packs.len())];
        let path = object_store::path::Path::from(key.as_str());
        let (at, bit) = (self.random.random_range(0..usize::try_from(*len).unwrap_or(1)), self.random.random_range(0..8));
        let Some(bytes) = self.world.disk.bytes(&path) else { return Ok(()) };
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 1 << bit;
        self.world.disk.plant(&path, bytes);
        self.log.push(format!("bit {bit} of byte {at} of {key} flips"));
        self.counts.flipped += 1;
        self.scrub_and_heal().await?;
        self.compare(&[]).await?;
        check::verified(&self.world.observer, &self.oracle.names).await
    }

    /// Does what an operator does about damage: finds it by a scrub and pushes the snapshots again.
    async fn scrub_and_heal(&mut self) -> Result<(), String> {
        let options = pfr_store::ScrubOptions { full: true, bytes_per_second: None };
        let report = self.world.observer.scrub(&options, &mut |_| ()).await.map_err(|e| format!("scrub: {e}"))?;
        self.log.push(format!("scrub: {} damaged, bad packs {:?}", report.damaged.len(), report.bad_packs));
        for (name, repository) in self.oracle.names.clone() {
            for digest in repository.snapshots.keys() {
                let Some(snapshot) = self.library.get(digest) else { continue };
                let (answer, _) = operations::push(&self.world.observer, &name, snapshot, None, Manner::Complete).await;
                answer.map_err(|e| format!("pushing {name}@{digest} again: {e}"))?;
            }
        }
        Ok(())
    }

    // ---- the end

    pub(super) async fn end(&mut self) -> Result<(), String> {
        self.world.set_faults(0.0, false);
        self.world.replicas.iter_mut().for_each(|replica| replica.store = None);
        self.world.disk.power_loss();
        self.compare(&[]).await?;
        domains::delete_all(&self.world, self.tenants.was_lost).await?;
        check::verified(&self.world.observer, &self.oracle.names).await?;
        check::swept(&self.world, &self.oracle.names, &self.library, &self.debris).await?;
        check::verified(&self.world.observer, &self.oracle.names).await?;
        self.counts.snapshots = self.oracle.names.values().map(|r| r.snapshots.len() as u64).sum();
        self.counts.faults = self.world.replicas.iter().map(|r| r.faults.injected()).sum();
        // Nothing named, nothing left.
        for (name, repository) in std::mem::take(&mut self.oracle.names) {
            for digest in repository.snapshots.keys() {
                self.world.observer.delete_snapshot(&name, digest).await.map_err(|e| e.to_string())?;
            }
        }
        check::swept(&self.world, &self.oracle.names, &self.library, &self.debris).await.map_err(|e| format!("with all names deleted: {e}"))
    }
}
