//! One random history, from a seed: waves of concurrent operations, crashes, jumps of the clock,
//! the loss of the database.
//!
//! A wave runs up to five operations at once on all replicas; a schedule drawn from the seed
//! decides at every step which of them goes on, and which client or replica is killed. After each
//! wave, the tags and snapshots of the stores are compared with the oracle, and everything
//! acknowledged is read from the disk and compared byte for byte. At the end the store verifies
//! itself, and a collection shows whether anything is left over.

mod between;
mod counts;

pub use counts::{Counterexample, Counts};

use crate::check::{self, Library};
use crate::domains::{Focus, Tenants};
use crate::events::Follower;
use crate::gate::{self, Gate, Progress, Task};
use crate::names::{Change, Names, Oracle, Outcome};
use crate::operations::{Ended, Excuses, Manner, Operation};
use crate::prefixes;
use crate::snapshots::Snapshot;
use crate::world::{Database, HOUR, Plant, Setup, World};
use pfr_schema::api::TagState;
use pfr_schema::{Digest, RepositoryName, Tag};
use pfr_store::{GcOptions, GcPart};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the schedule waits for a task that is in no call before other tasks go on.
const TIMEOUT: Duration = Duration::from_millis(10);
/// How long operations may all wait before that is called a deadlock. A busy disk keeps a sync
/// waiting for many seconds.
const STUCK: Duration = Duration::from_secs(300);

/// Plays `waves` waves of the history `seed`.
///
/// # Errors
/// [`Counterexample`] if something acknowledged is lost or corrupt, something leaked, or an answer
/// has no explanation.
pub async fn play(database: Database, seed: u64, waves: u64, plant: Option<Plant>) -> Result<Counts, Counterexample> {
    let mut random = StdRng::seed_from_u64(seed);
    let setup = Setup {
        replicas: random.random_range(1..=3),
        pack_bytes: [1 << 10, 4 << 10, 64 << 10][random.random_range(0..3)],
        tears: random.random_bool(0.5),
        plant,
        database,
        key_command: random.random_bool(0.25),
    };
    let mut log = vec![format!("{setup:?}")];
    let begun = match World::new(seed, setup).await {
        Err(error) => Err(error.to_string()),
        Ok(world) => Follower::new(&world.observer, &Names::new()).await.map(|follower| (world, follower)),
    };
    let played = match begun {
        Err(what) => Err((0, what)),
        Ok((world, follower)) => {
            let mut history = History {
                random,
                world,
                oracle: Oracle::default(),
                follower,
                tenants: Tenants::default(),
                focus: None,
                library: Library::new(),
                debris: BTreeSet::new(),
                unjournaled: 0,
                counts: Counts::default(),
                log: Vec::new(),
                plant,
            };
            let played = history.play(waves).await;
            log.append(&mut history.log);
            played.map(|()| history.counts)
        }
    };
    played.map_err(|(waves, what)| Counterexample { seed, waves, what, log })
}

/// Finds the shortest beginning of a failing history that fails too.
pub async fn shrink(database: Database, failure: Counterexample, plant: Option<Plant>) -> Counterexample {
    for waves in 1..=failure.waves {
        if let Err(shorter) = play(database, failure.seed, waves, plant).await {
            return shorter;
        }
    }
    failure
}

struct History {
    random: StdRng,
    world: World,
    oracle: Oracle,
    follower: Follower,
    tenants: Tenants,
    /// The domain and the snapshot that the last step with another domain drew.
    focus: Option<Focus>,
    library: Library,
    /// Torn objects that a rebuild found and named.
    debris: BTreeSet<String>,
    /// The newest change that was not in the journal after a wave, by its number.
    unjournaled: u64,
    counts: Counts,
    log: Vec<String>,
    plant: Option<Plant>,
}

/// An operation under way.
struct Running {
    replica: usize,
    gate: Arc<Gate>,
    task: Option<Task<Ended>>,
    blocked: bool,
    /// Steps after which its client dies.
    cut_at: Option<u64>,
    change: Option<Change>,
    line: usize,
}

impl History {
    async fn play(&mut self, waves: u64) -> Result<(), (u64, String)> {
        for wave in 1..=waves {
            self.wave().await.map_err(|what| (wave, what))?;
        }
        self.end().await.map_err(|what| (waves, format!("at the end: {what}")))
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.random.random_bool(probability)
    }

    async fn wave(&mut self) -> Result<(), String> {
        for replica in 0..self.world.replicas.len() {
            if self.world.replicas[replica].store.is_none() && (replica == 0 || self.chance(0.7)) {
                self.world.start(replica).await.map_err(|e| format!("a replica does not start: {e}"))?;
            }
        }
        let faulty = self.chance(0.5);
        let full = self.chance(0.05);
        self.world.set_faults(if faulty { 0.03 } else { 0.0 }, full);
        let jump = if self.chance(0.3) { [90, 3 * 60, 30 * 60, -24 * 60][self.random.random_range(0..4)] * 60_000 } else { 0 };
        let jump_at = self.chance(0.3).then(|| self.random.random_range(0..60_u64));
        if jump != 0 && jump_at.is_none() {
            self.log.push(format!("clock {:+} min", jump / 60_000));
            self.world.jump(jump);
        }
        let no_grace = self.chance(0.2);
        let excuses = Excuses {
            faults: faulty || full,
            time: (jump != 0 && jump_at.is_some()) || no_grace,
            torn: !self.debris.is_empty() || self.counts.flipped > 0,
        };
        self.log.push(format!("-- wave: faults {faulty} full {full} no grace {no_grace} jump {jump} at {jump_at:?}"));
        let mut running = self.draw(excuses, no_grace);
        let crash_at = self.chance(0.25).then(|| self.random.random_range(0..120_u64));
        let power = self.chance(0.3);
        let changes = self.schedule(&mut running, crash_at, power, jump, jump_at).await?;
        drop(running);
        if self.plant != Some(Plant::NoFsync) && self.chance(0.03) {
            self.compare(&changes).await?;
            return self.rebuild().await;
        }
        self.compare(&changes).await?;
        if self.chance(0.3) {
            self.domain().await?;
        }
        if self.chance(0.08) {
            self.retain().await?;
        }
        if self.chance(0.04) { self.rot().await } else { Ok(()) }
    }

    async fn compare(&mut self, changes: &[(Change, Outcome)]) -> Result<(), String> {
        self.journaled(changes).await?;
        let seen = check::names(&self.world.observer).await.map_err(|e| e.to_string())?;
        self.oracle.explain(changes, &seen)?;
        self.counts.events += self.follower.check(&self.world.observer, &seen, &mut self.random).await?;
        self.counts.compared_bytes += check::complete(&self.world, &seen, &self.library).await?;
        self.matches(&seen).await
    }

    /// A change is acknowledged only when the journal has it. Those without an answer may be
    /// missing there, so a wave that had one says nothing.
    async fn journaled(&mut self, changes: &[(Change, Outcome)]) -> Result<(), String> {
        let rows = self.world.observer.metadata().unjournaled(1000).await.map_err(|e| e.to_string())?;
        let known = self.unjournaled;
        self.unjournaled = rows.iter().map(|row| row.seq).max().unwrap_or(0).max(known);
        let all_answered = changes.iter().all(|(_, outcome)| *outcome != Outcome::Unknown);
        match rows.into_iter().find(|row| row.seq > known) {
            Some(row) if all_answered => Err(format!("WRONG: an acknowledged change is not in the journal: {row:?}")),
            _ => Ok(()),
        }
    }

    async fn matches(&mut self, names: &Names) -> Result<(), String> {
        let ends_only = self.counts.flipped > 0 || !self.debris.is_empty();
        prefixes::found(&self.world.observer, names, &self.library, &mut self.random, ends_only).await
    }

    // ---- what is done

    fn draw(&mut self, excuses: Excuses, no_grace: bool) -> Vec<Running> {
        let alive: Vec<usize> = (0..self.world.replicas.len()).filter(|i| self.world.replicas[*i].store.is_some()).collect();
        let count = self.random.random_range(1..=5);
        let mut operations: Vec<Operation> = (0..count).map(|_| self.operation(no_grace)).collect();
        let deleted: Vec<Digest> = operations
            .iter()
            .filter_map(|o| if let Operation::Change(Change::Delete { snapshot, .. }) = o { Some(*snapshot) } else { None })
            .collect();
        for operation in &mut operations {
            // A push beside it may commit a snapshot that was made after the search was chosen.
            if let Operation::Match { library, .. } = operation {
                library.clone_from(&self.library);
            }
            if let Operation::Read { snapshot, acknowledged } = operation {
                // The grace period is for readers of snapshots that are being deleted.
                if let Some(other) = deleted.first().and_then(|digest| self.library.get(digest)).filter(|_| self.random.random_bool(0.7)) {
                    *snapshot = Arc::clone(other);
                }
                *acknowledged &= !deleted.contains(&snapshot.digest);
            }
        }
        let mut running = Vec::new();
        for operation in operations {
            let replica = alive[self.random.random_range(0..alive.len())];
            let Some(store) = self.world.replicas[replica].store.clone() else { continue };
            let cut_at = self.chance(0.12).then(|| self.random.random_range(0..40));
            let (change, line) = (operation.change(), self.log.len());
            self.log.push(format!(
                "replica {replica}: {}{}",
                words(&operation),
                cut_at.map_or(String::new(), |n| format!(", dies at {n}"))
            ));
            self.counts.rounds += 1;
            let task: Task<Ended> = Box::pin(operation.run(store, excuses));
            running.push(Running { replica, gate: Arc::default(), task: Some(task), blocked: false, cut_at, change, line });
        }
        running
    }

    fn operation(&mut self, no_grace: bool) -> Operation {
        let repository: RepositoryName = ["team/a", "team/b"][self.random.random_range(0..2)].parse().unwrap_or_else(|_| unreachable!());
        let known: Vec<Digest> = self.oracle.names.get(&repository).map(|r| r.snapshots.keys().copied().collect()).unwrap_or_default();
        let pick = |random: &mut StdRng| (!known.is_empty()).then(|| known[random.random_range(0..known.len())]);
        // More snapshots than this make every check slower and find nothing more.
        let crowded = known.len() > 12;
        loop {
            match self.random.random_range(0..100) {
                0..40 if !crowded => return self.push(repository, &known),
                40..52 => {
                    let Some(snapshot) = pick(&mut self.random) else { continue };
                    let tag = self.tag();
                    let expected = self.expected(&repository, &tag);
                    return Operation::Change(Change::Tags { repository, snapshot, moves: vec![(tag, expected)] });
                }
                52..57 => {
                    let Some(snapshot) = pick(&mut self.random) else { continue };
                    let prefix = format!("fork{}", self.random.random_range(0..40));
                    let moves = (1..=self.random.random_range(1..4)).filter_map(|i| format!("{prefix}-{i}").parse().ok());
                    let moves = moves.map(|tag: Tag| (tag, Some(TagState::Absent))).collect();
                    return Operation::Change(Change::Tags { repository, snapshot, moves });
                }
                57..64 => {
                    let tag = self.tag();
                    let expected = self.expected(&repository, &tag);
                    return Operation::Change(Change::Untag { repository, tag, expected });
                }
                64..74 => {
                    let Some(snapshot) = pick(&mut self.random) else { continue };
                    return Operation::Change(Change::Delete { repository, snapshot });
                }
                74..88 => {
                    let grace = Duration::from_millis(if no_grace { 0 } else { HOUR });
                    let batch = [1, 3, 20, 2000][self.random.random_range(0..4)];
                    let (compact, dry_run) = (self.chance(0.8), self.chance(0.1));
                    let part = if self.chance(0.3) { GcPart::Merging } else { GcPart::All };
                    return Operation::Gc(GcOptions { part, grace, batch, compact, dry_run, ..GcOptions::default() });
                }
                88..91 => {
                    let tokens = prefixes::tokens(&mut self.random, &self.library);
                    return Operation::Match { repository, tokens, library: Library::new() };
                }
                91..95 => {
                    let Some(snapshot) = pick(&mut self.random).and_then(|digest| self.library.get(&digest)) else { continue };
                    return Operation::Read { snapshot: Arc::clone(snapshot), acknowledged: true };
                }
                95..97 => return Operation::Follow,
                97..99 => return Operation::Audit,
                99 => return Operation::Scrub(self.chance(0.5)),
                _ => {}
            }
        }
    }

    fn push(&mut self, repository: RepositoryName, known: &[Digest]) -> Operation {
        // State is sent again: while it is stored, while it is deleted, and after that.
        let again = self.chance(0.15).then(|| self.random.random_range(0..self.library.len().max(1)));
        let again = again.and_then(|at| self.library.values().nth(at).cloned());
        let snapshot = again.unwrap_or_else(|| self.snapshot(known));
        let tag = self.chance(0.8).then(|| self.tag());
        let tag = tag.map(|tag| (tag.clone(), self.expected(&repository, &tag)));
        let manner = match self.random.random_range(0..10) {
            0 => Manner::Partial,
            1 => Manner::Aborted,
            2 => Manner::Broken,
            _ => Manner::Complete,
        };
        Operation::Push { repository, snapshot, tag, manner }
    }

    fn snapshot(&mut self, known: &[Digest]) -> Arc<Snapshot> {
        let trees = (0..self.random.random_range(1..=2)).map(|_| {
            // Bases overlap, so that page chunks, trees and pages are shared.
            let base = self.random.random_range(0..3_u64) * 10;
            let len = self.random.random_range(1..8_u64);
            let mut numbers: Vec<u64> = (base..base + len).collect();
            if self.random.random_bool(0.6) {
                numbers.push(self.random.random_range(0..60));
            }
            numbers
        });
        let trees: Vec<Vec<u64>> = trees.collect();
        let parents = if known.is_empty() || self.chance(0.4) { vec![] } else { vec![known[self.random.random_range(0..known.len())]] };
        let snapshot = Arc::new(Snapshot::new(&trees, parents));
        self.library.insert(snapshot.digest, Arc::clone(&snapshot));
        snapshot
    }

    fn tag(&mut self) -> Tag {
        let tags = ["main", "next", "old", "keep", "best"];
        tags[self.random.random_range(0..tags.len())].parse().unwrap_or_else(|_| unreachable!())
    }

    fn expected(&mut self, repository: &RepositoryName, tag: &Tag) -> Option<TagState> {
        let now = self.oracle.names.get(repository).and_then(|r| r.tags.get(tag));
        let now = now.map_or(TagState::Absent, |digest| TagState::At(*digest));
        match self.random.random_range(0..10) {
            0..5 => None,
            5..9 => Some(now),
            _ => Some(TagState::Absent),
        }
    }

    // ---- in which order

    /// Runs the operations to their ends, step by step; returns what they may have changed.
    async fn schedule(
        &mut self,
        running: &mut [Running],
        crash_at: Option<u64>,
        power: bool,
        jump: i64,
        jump_at: Option<u64>,
    ) -> Result<Vec<(Change, Outcome)>, String> {
        let mut changes = Vec::new();
        for step in 0_u64.. {
            if jump != 0 && jump_at == Some(step) {
                self.world.jump(jump);
            }
            if crash_at == Some(step) {
                self.crash(running, power, &mut changes);
            }
            let going: Vec<usize> = (0..running.len()).filter(|i| running[*i].task.is_some() && !running[*i].blocked).collect();
            let waiting = running.iter().filter(|r| r.task.is_some()).count();
            if waiting == 0 {
                break;
            }
            if going.is_empty() {
                self.unblock(running, &mut changes, true).await?;
                continue;
            }
            let chosen = going[self.random.random_range(0..going.len())];
            let one = &mut running[chosen];
            if one.cut_at.is_some_and(|steps| one.gate.steps() >= steps) {
                self.counts.cut += 1;
                cut(one, &mut changes);
                self.unblock(running, &mut changes, false).await?;
                continue;
            }
            one.gate.open();
            let Some(task) = &mut one.task else { continue };
            match gate::run(task, &one.gate, TIMEOUT).await {
                Progress::AtGate => {}
                Progress::Blocked => one.blocked = true,
                Progress::Done(ended) => self.ended(&mut running[chosen], ended, &mut changes)?,
            }
            self.unblock(running, &mut changes, false).await?;
        }
        Ok(changes)
    }

    /// Checks whether blocked tasks can go on. Waits for one of them if no other task can go on.
    async fn unblock(&mut self, running: &mut [Running], changes: &mut Vec<(Change, Outcome)>, wait: bool) -> Result<(), String> {
        let mut freed = false;
        for one in running.iter_mut() {
            let Some(task) = one.task.as_mut().filter(|_| one.blocked) else { continue };
            match gate::poll_once(task, &one.gate).await {
                Progress::Blocked => {}
                Progress::AtGate => (one.blocked, freed) = (false, true),
                Progress::Done(ended) => {
                    freed = true;
                    self.ended(one, ended, changes)?;
                }
            }
        }
        if wait && !freed {
            let Some(one) = running.iter_mut().find(|r| r.task.is_some()) else { return Ok(()) };
            let Some(task) = &mut one.task else { return Ok(()) };
            let begun = Instant::now();
            let progress = gate::run(task, &one.gate, STUCK).await;
            self.counts.longest_wait_ms = self.counts.longest_wait_ms.max(begun.elapsed().as_millis() as u64);
            match progress {
                Progress::AtGate => one.blocked = false,
                Progress::Blocked => return Err(format!("a deadlock: {} waits, and no other operation can go on", self.log[one.line])),
                Progress::Done(ended) => self.ended(one, ended, changes)?,
            }
        }
        Ok(())
    }

    fn ended(&mut self, one: &mut Running, ended: Ended, changes: &mut Vec<(Change, Outcome)>) -> Result<(), String> {
        (one.task, one.blocked) = (None, false);
        let line = &mut self.log[one.line];
        line.push_str(&format!(" → {}", ended.answer));
        self.counts.acknowledged += u64::from(ended.acknowledged);
        self.counts.collections += u64::from(ended.acknowledged && line.contains(": gc"));
        let what = ended.violation.map(|what| format!("{line}: {what}"));
        changes.extend(ended.change);
        ended.followed.into_iter().for_each(|page| self.follower.found(page));
        what.map_or(Ok(()), Err)
    }

    /// Kills a replica, or with the power all of them.
    fn crash(&mut self, running: &mut [Running], power: bool, changes: &mut Vec<(Change, Outcome)>) {
        let victims: Vec<usize> =
            if power { (0..self.world.replicas.len()).collect() } else { vec![self.random.random_range(0..self.world.replicas.len())] };
        self.log.push(format!("crash of {victims:?}, power {power}"));
        if power {
            // Before the processes are dropped, so that what they were writing is torn.
            self.counts.power_losses += 1;
            self.world.disk.power_loss();
        }
        for one in running.iter_mut().filter(|r| victims.contains(&r.replica) && r.task.is_some()) {
            cut(one, changes);
        }
        for victim in victims {
            self.counts.crashes += u64::from(self.world.replicas[victim].store.take().is_some());
        }
    }
}

fn cut(one: &mut Running, changes: &mut Vec<(Change, Outcome)>) {
    (one.task, one.blocked) = (None, false);
    changes.extend(one.change.take().map(|change| (change, Outcome::Unknown)));
}

fn words(operation: &Operation) -> String {
    match operation {
        Operation::Push { repository, snapshot, tag, manner } => {
            format!("push {manner:?} {} with {} blobs to {repository} {tag:?}", snapshot.digest, snapshot.blobs.len())
        }
        Operation::Change(change) => format!("{change:?}"),
        Operation::Gc(options) => {
            format!("gc {:?} batch {} compact {} dry {}", options.part, options.batch, options.compact, options.dry_run)
        }
        Operation::Audit => "audit".into(),
        Operation::Scrub(full) => format!("scrub, full {full}"),
        Operation::Match { repository, tokens, .. } => format!("match {} tokens in {repository}", tokens.len()),
        Operation::Read { snapshot, .. } => format!("read {}", snapshot.digest),
        Operation::Follow => "follow".into(),
    }
}
