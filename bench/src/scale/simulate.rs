//! Simulates a small fleet event by event on real tables: pushes, forks, retention and collection
//! over simulated hours.

use super::costs::Costs;
use super::model::{self, fork_turn};
use super::workload::{Assumptions, Workload};
use crate::Result;
use crate::gc::rows::{Ahead, LEASE, PAGE_BYTES, Rows, StoredRun};
use pfr_schema::{Digest, RepositoryName};
use pfr_store::{Metadata, SqliteMetadata};
use rusqlite::Connection;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::path::Path;
use std::time::{Duration, Instant};

/// A fleet that is small enough to run all its transactions.
fn workload() -> Workload {
    Workload {
        agents_per_host: 1.0,
        page_bytes: 2.0 * PAGE_BYTES as f64,
        run_pages: 16,
        start_pages: 64,
        shared: 0.5,
        prefixes: 4,
        growth_pages: 5,
        turns_per_hour: 20.0,
        session_turns: 20,
        forks: 1,
        fork_turns: 3,
        // Longer than a lease, which keeps everything for an hour.
        retention_hours: 1.5,
        gc_interval_hours: 0.1,
        ..Workload::default()
    }
}

/// A number from the model, and the same from the simulation.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// What is compared.
    pub what: &'static str,
    /// The model's number.
    pub computed: f64,
    /// The simulation's number.
    pub measured: f64,
}

/// An event. The queue orders events by time in milliseconds, then by number.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Delete { snapshot: usize },
    Collect,
    Measure,
    Turn { sequence: usize },
}

/// A session or a fork: a sequence of pages that grows.
#[derive(Clone)]
struct Sequence {
    agent: usize,
    /// Digests of the components of its pages.
    components: Vec<Digest>,
    runs: Vec<StoredRun>,
    /// Pages that are stored before its first turn.
    stored: usize,
    turn: u64,
    /// Turns of a fork; `None` for a session.
    fork_turns: Option<u64>,
    parent: Option<Digest>,
}

struct World<'a> {
    w: Workload,
    rows: Rows<'a>,
    metadata: &'a dyn Metadata,
    ahead: Ahead,
    now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    prefixes: Vec<Sequence>,
    sequences: Vec<Option<Sequence>>,
    snapshots: Vec<(RepositoryName, Digest)>,
    pushes: u64,
    swept: u64,
    sweep_seconds: f64,
}

const HOUR: f64 = 3_600_000.0;

pub async fn run(tmpfs: &Path, hosts: usize, costs: &Costs) -> Result<Vec<Comparison>> {
    let (dir, ahead, start) = (tempfile::Builder::new().prefix("pf-bench-scale-").tempdir_in(tmpfs)?, Ahead::default(), Instant::now());
    let path = dir.path().join("metadata.sqlite");
    let metadata = SqliteMetadata::open(&path, ahead.clock()).await?;
    let w = workload();
    let mut world = World {
        w,
        rows: Rows::new(&*metadata, 1),
        metadata: &*metadata,
        ahead,
        now: 0,
        events: BinaryHeap::new(),
        number: 0,
        prefixes: Vec::new(),
        sequences: Vec::new(),
        snapshots: Vec::new(),
        pushes: 0,
        swept: 0,
        sweep_seconds: 0.0,
    };
    world.prefixes().await?;
    let session = w.session_turns as f64 / w.turns_per_hour;
    for agent in 0..hosts {
        // Sessions start at even distances, so that the fleet is in its steady state once the first
        // ones are deleted.
        world.at((agent as f64 / hosts as f64 * session * HOUR) as u64, Event::Turn { sequence: agent });
        let prefix = world.prefixes[agent % world.prefixes.len()].clone();
        world.sequences.push(Some(Sequence { agent, ..prefix }));
    }
    // Agents start one after the other until `session`. The snapshots of the first sessions are
    // deleted one session and the retention later.
    let steady = 2.0 * session + w.retention_hours + 3.5 * w.gc_interval_hours;
    let window = session;
    for tick in 1..=((steady + window) / w.gc_interval_hours) as u64 {
        world.at((tick as f64 * w.gc_interval_hours * HOUR) as u64, Event::Collect);
    }
    // Half-way between two collections, when there is as much garbage as on average.
    world.at((steady * HOUR) as u64, Event::Measure);
    world.play().await?;
    let (pushes, swept) = (world.pushes, world.swept);
    let samples = 20;
    let (mut live, inserted) = (Live::default(), inserted(&path)?);
    let window_start = world.now;
    for sample in 1..=samples {
        let at = window_start + (f64::from(sample) / f64::from(samples) * window * HOUR) as u64;
        world.at(at, Event::Measure);
        world.play().await?;
        live.add(&path)?;
    }
    let hours = (world.now - window_start) as f64 / HOUR;
    eprintln!("{} pushes of {hosts} hosts simulated in {:.1} s", world.pushes, start.elapsed().as_secs_f64());
    let fleet = model::fleet(&Assumptions { workload: w, ..Assumptions::default() }, costs, hosts as f64);
    let per_hour = |count: u64| count as f64 / hours;
    let mean = |sum: f64| sum / f64::from(samples);
    let compare = |what, computed, measured| Comparison { what, computed, measured };
    Ok(vec![
        compare("pushes an hour", fleet.pushes * 3600.0, per_hour(world.pushes - pushes)),
        compare("objects inserted an hour", fleet.objects_in * 3600.0, per_hour(self::inserted(&path)? - inserted)),
        compare("objects collected an hour", fleet.objects_in * 3600.0, per_hour(world.swept - swept)),
        compare("snapshots in the store", fleet.snapshots, mean(live.snapshots)),
        compare("objects in the store", fleet.objects, mean(live.objects)),
        compare("nodes in the store", fleet.containers, mean(live.containers)),
        compare("stored bytes", fleet.bucket_bytes, mean(live.page_bytes)),
        compare("bytes of the tables", fleet.database_bytes, mean(live.table_bytes)),
    ])
}

fn inserted(path: &Path) -> Result<u64> {
    let count: i64 = Connection::open(path)?.query_row("SELECT seq FROM sqlite_sequence WHERE name = 'objects'", [], |r| r.get(0))?;
    Ok(count as u64)
}

/// Sums over all samples of what the store holds.
#[derive(Default)]
struct Live {
    snapshots: f64,
    objects: f64,
    containers: f64,
    page_bytes: f64,
    table_bytes: f64,
}

impl Live {
    fn add(&mut self, path: &Path) -> Result<()> {
        let connection = Connection::open(path)?;
        let number = |sql: &str| connection.query_row(sql, [], |r| r.get::<_, f64>(0));
        self.snapshots += number("SELECT CAST(COUNT(*) AS REAL) FROM manifests")?;
        self.objects += number("SELECT CAST(COUNT(*) AS REAL) FROM objects")?;
        self.containers += number("SELECT CAST(COUNT(*) AS REAL) FROM containers")?;
        self.page_bytes += number(&format!("SELECT CAST(SUM(size) AS REAL) FROM objects WHERE size = {PAGE_BYTES}"))?;
        self.table_bytes += number(
            "SELECT CAST(SUM(pgsize) AS REAL) FROM dbstat WHERE name IN ('objects', 'objects_digest', 'objects_pack', 'containers', 'manifests',
             'sqlite_autoindex_manifests_1', 'manifests_list', 'manifests_object', 'manifests_used', 'parents', 'tags', 'tags_manifest')",
        )?;
        Ok(())
    }
}

impl World<'_> {
    fn at(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, event)));
    }

    /// Makes the prefixes that sessions share. Their snapshots are never deleted.
    async fn prefixes(&mut self) -> Result<()> {
        let pages = (self.w.start_pages as f64 * self.w.shared) as usize;
        for _ in 0..self.w.prefixes {
            let components = self.rows.pages(pages);
            let runs: Vec<_> = components.chunks(2 * self.w.run_pages as usize).map(|part| self.rows.run(part)).collect();
            self.rows.commit(&"fleet/prefixes".parse()?, &runs, None, None).await?;
            let runs = runs.into_iter().filter(|run| u64::from(run.shape.pages) == self.w.run_pages).collect();
            self.prefixes.push(Sequence { agent: 0, components, runs, stored: pages, turn: 0, fork_turns: None, parent: None });
        }
        Ok(())
    }

    /// Runs events until the next measurement.
    async fn play(&mut self) -> Result<()> {
        while let Some(Reverse((at, _, event))) = self.events.pop() {
            self.ahead.advance(Duration::from_millis(at - self.now));
            self.now = at;
            match event {
                Event::Measure => return Ok(()),
                Event::Turn { sequence } => self.turn(sequence).await?,
                Event::Delete { snapshot } => {
                    let (name, digest) = self.snapshots[snapshot].clone();
                    self.metadata.delete_snapshot(name, digest).await?;
                }
                Event::Collect => {
                    let (seconds, swept) = crate::gc::collect_all(self.metadata, 2000).await?;
                    (self.swept, self.sweep_seconds) = (self.swept + swept, self.sweep_seconds + seconds);
                }
            }
        }
        Ok(())
    }

    async fn turn(&mut self, number: usize) -> Result<()> {
        let Some(mut s) = self.sequences[number].take() else { return Ok(()) };
        let (w, is_session) = (self.w, s.fork_turns.is_none());
        let more = if s.turn == 0 && is_session { w.start_pages as usize - s.stored } else { 0 };
        let new = self.rows.pages(w.growth_pages as usize + more);
        s.components.extend(new);
        let full = 2 * w.run_pages as usize;
        s.runs.truncate(s.runs.iter().take_while(|run| u64::from(run.shape.pages) == w.run_pages).count());
        for part in s.components[s.runs.len() * full..].chunks(full) {
            s.runs.push(self.rows.run(part));
        }
        let name: RepositoryName = format!("fleet/agent-{}", s.agent).parse()?;
        let manifest = self.rows.commit(&name, &s.runs, s.parent, None).await?;
        (s.parent, s.turn, self.pushes) = (Some(manifest), s.turn + 1, self.pushes + 1);
        self.snapshots.push((name, manifest));
        let retention = (w.retention_hours * HOUR) as u64;
        self.at(self.now + retention, Event::Delete { snapshot: self.snapshots.len() - 1 });
        let next = self.now + (HOUR / w.turns_per_hour) as u64;
        if is_session {
            for _ in (0..w.forks).filter(|fork| fork_turn(&w, *fork) == s.turn) {
                self.sequences.push(Some(Sequence { turn: 0, fork_turns: Some(w.fork_turns), ..s.clone() }));
                self.at(next, Event::Turn { sequence: self.sequences.len() - 1 });
            }
        }
        let turns = s.fork_turns.unwrap_or(w.session_turns);
        if s.turn == turns && is_session {
            // The next session of the agent.
            let prefix = self.prefixes[self.snapshots.len() % self.prefixes.len()].clone();
            s = Sequence { agent: s.agent, ..prefix };
        } else if s.turn == turns {
            return Ok(());
        }
        self.sequences[number] = Some(s);
        self.at(next, Event::Turn { sequence: number });
        Ok(())
    }
}

// `workload` retains snapshots for longer than a lease. With a shorter retention, the lease would
// keep objects longer than the model says.
const _: () = assert!(LEASE.as_secs() == 3600);
