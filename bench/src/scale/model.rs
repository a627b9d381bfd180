//! The model of a fleet. It adds up what one session creates and for how long each object lives;
//! Little's law (number = rate × lifetime) then gives the size of the store.

use super::costs::Costs;
use super::workload::{Assumptions, Workload};
use serde::Serialize;

/// What one session, with its forks, adds to the registry.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Session {
    /// Hours from its first snapshot to the first one of the next session.
    pub hours: f64,
    /// Snapshots.
    pub pushes: f64,
    /// New pages.
    pub pages: f64,
    /// New page chunks.
    pub runs: f64,
    /// New objects: components of pages, page chunks, and three documents for each snapshot.
    pub objects: f64,
    /// Entries of new nodes.
    pub children: f64,
    /// Reference counts of stored objects that it raises.
    pub raised: f64,
    /// Digests in its requests for missing blobs.
    pub asked: f64,
    /// Sum of the lifetimes of its objects, hours.
    pub object_hours: f64,
    /// Sum of the lifetimes of its pages, hours.
    pub page_hours: f64,
    /// Sum of the lifetimes of its nodes' entries, hours.
    pub children_hours: f64,
    /// Sum of the lifetimes of its nodes, hours.
    pub container_hours: f64,
    /// Pages of the session at its end, without the shared prefix.
    pub own_pages: f64,
}

/// Adds up a session and its forks.
pub fn session(w: &Workload) -> Session {
    let shared = (w.start_pages as f64 * w.shared).floor() as u64;
    let mut all = Session { hours: w.session_turns as f64 / w.turns_per_hour, ..Session::default() };
    sequence(w, &mut all, shared, w.start_pages - shared, w.session_turns);
    for fork in 0..w.forks {
        let turn = fork_turn(w, fork);
        sequence(w, &mut all, w.start_pages + turn * w.growth_pages, 0, w.fork_turns);
    }
    all.own_pages = (w.start_pages - shared + w.session_turns * w.growth_pages) as f64;
    all
}

/// The turn after which a fork begins.
pub fn fork_turn(w: &Workload, fork: u64) -> u64 {
    (fork + 1) * w.session_turns / (w.forks + 1)
}

/// Adds a sequence that starts with `pages` stored pages. Every turn adds `growth_pages`, the first
/// one `more` besides.
fn sequence(w: &Workload, all: &mut Session, mut pages: u64, more: u64, turns: u64) {
    let components = w.components as f64;
    // On average, garbage waits for half of the time between two collections.
    let kept = w.retention_hours + w.gc_interval_hours / 2.0;
    for turn in 0..turns {
        let after = pages + w.growth_pages + if turn == 0 { more } else { 0 };
        let to_the_end = (turns - 1 - turn) as f64 / w.turns_per_hour + kept;
        let (complete_before, complete) = (pages / w.run_pages, after / w.run_pages);
        let partial = after % w.run_pages;
        let (new_pages, full_runs) = ((after - pages) as f64, (complete - complete_before) as f64);
        let is_partial = f64::from(u8::from(partial > 0));
        let in_runs = (after - complete_before * w.run_pages) as f64 * components;
        let tree = full_runs + complete_before as f64 + is_partial;
        all.pushes += 1.0;
        all.pages += new_pages;
        all.runs += full_runs + is_partial;
        all.objects += new_pages * components + full_runs + is_partial + 3.0;
        all.children += in_runs + tree + 2.0;
        all.raised += (pages - complete_before * w.run_pages) as f64 * components + complete_before as f64;
        all.asked += in_runs + tree + 3.0;
        all.page_hours += new_pages * to_the_end;
        // The next turn replaces a page chunk that is not full. A full one stays as long as the
        // sequence.
        all.object_hours += (new_pages * components + full_runs) * to_the_end + (is_partial + 3.0) * kept;
        all.container_hours += full_runs * to_the_end + (is_partial + 2.0) * kept;
        let full_children = full_runs * w.run_pages as f64 * components;
        all.children_hours += full_children * to_the_end + (partial as f64 * components + tree + 2.0) * kept;
        pages = after;
    }
}

/// A fleet in the steady state. Rates are per second, means over the day.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Fleet {
    /// GPU hosts.
    pub hosts: f64,
    /// Pushes.
    pub pushes: f64,
    /// Requests to the registry.
    pub requests: f64,
    /// Objects inserted; collections delete as many.
    pub objects_in: f64,
    /// Reference counts raised; as many are lowered.
    pub raised: f64,
    /// Digests in requests for missing blobs.
    pub asked: f64,
    /// Bytes uploaded by hosts.
    pub bytes_in: f64,
    /// Bytes downloaded by hosts.
    pub bytes_out: f64,
    /// Writing requests to the bucket.
    pub bucket_puts: f64,
    /// Reading requests to the bucket.
    pub bucket_gets: f64,
    /// Snapshots in the registry.
    pub snapshots: f64,
    /// Objects in the registry.
    pub objects: f64,
    /// Nodes in the registry.
    pub containers: f64,
    /// Sum of the bytes of all snapshots, as if they shared nothing.
    pub logical_bytes: f64,
    /// Bytes in the bucket.
    pub bucket_bytes: f64,
    /// Objects in the bucket.
    pub bucket_objects: f64,
    /// Bytes of the tables on SQLite.
    pub database_bytes: f64,
    /// Of these, bytes of the indexes over digests. Random look-ups are fast if these fit into
    /// memory.
    pub index_bytes: f64,
    /// Share of its time that one SQLite writer is busy at peaks.
    pub sqlite_busy: f64,
    /// Cores of the registry at peaks.
    pub cores: f64,
    /// Replicas.
    pub replicas: f64,
    /// PostgreSQL machines.
    pub databases: f64,
    /// Cost of a month.
    pub cost: Cost,
}

/// Cost of a month, in the currency of [`Prices`](super::workload::Prices).
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Cost {
    /// Bytes in the bucket.
    pub bucket: f64,
    /// Requests to the bucket.
    pub requests: f64,
    /// Replicas.
    pub replicas: f64,
    /// Database machines and their disks.
    pub databases: f64,
    /// Traffic.
    pub traffic: f64,
    /// The sum of these.
    pub total: f64,
}

const MONTH_HOURS: f64 = 730.0;

/// Computes a fleet.
pub fn fleet(a: &Assumptions, costs: &Costs, hosts: f64) -> Fleet {
    let (w, c, p) = (&a.workload, &a.capacity, &a.prices);
    let s = session(w);
    let sessions_hour = hosts * w.agents_per_host / s.hours;
    let rate = sessions_hour / 3600.0;
    let stored_page = w.page_bytes * w.stored_ratio;
    let prefix_pages = (w.start_pages as f64 * w.shared).floor() * w.prefixes as f64;
    let mut f = Fleet { hosts, pushes: rate * s.pushes, objects_in: rate * s.objects, raised: rate * s.raised, ..Fleet::default() };
    f.asked = rate * s.asked;
    f.bytes_in = rate * s.pages * stored_page;
    f.bytes_out = rate * w.moves * s.own_pages * stored_page;
    f.requests = f.pushes * c.requests_per_push + rate * w.moves * (4.0 + s.own_pages * stored_page / c.pack_bytes);
    let pushed_bytes = f.bytes_in / f.pushes;
    // Each push writes a journal object and a pack; a large pack takes a request for each part, one
    // to begin and one to complete the upload. Deletions cost nothing.
    let parts = (pushed_bytes / c.part_bytes).ceil();
    f.bucket_puts = f.pushes * (if parts > 1.0 { parts + 2.0 } else { 1.0 } + 1.0);
    f.bucket_gets = f.bytes_out / c.range_bytes;
    f.snapshots = sessions_hour * s.pushes * w.retention_hours;
    f.objects = sessions_hour * s.object_hours + prefix_pages * w.components as f64;
    f.containers = sessions_hour * s.container_hours;
    f.bucket_bytes = (sessions_hour * s.page_hours + prefix_pages) * stored_page;
    f.bucket_objects = f.bucket_bytes / pushed_bytes.min(c.pack_bytes) + f.snapshots * 0.01;
    f.logical_bytes = f.snapshots * stored_page * (w.start_pages as f64 + w.session_turns as f64 * w.growth_pages as f64 / 2.0);
    f.database_bytes =
        f.objects * costs.object_bytes + sessions_hour * s.children_hours * costs.child_bytes + f.snapshots * costs.snapshot_bytes;
    f.index_bytes = f.objects * costs.digest_index_bytes;
    f.sqlite_busy =
        c.peak * (f.objects_in / costs.inserted + f.objects_in / costs.swept + 2.0 * f.raised / costs.raised + f.pushes / costs.commits);
    f.cores = c.peak
        * (f.bytes_in / costs.bytes_in
            + f.bytes_out * (1.0 - c.redirected) / costs.bytes_out
            + f.requests * c.request_seconds
            + f.asked / costs.asked);
    let network = c.peak * f.bytes_in.max(f.bytes_out * (1.0 - c.redirected));
    // At least two, so that one may fail.
    f.replicas = (f.cores / (c.replica_cores * c.headroom)).max(network / (c.replica_network * c.headroom)).ceil().max(2.0);
    f.databases = postgres(a, &f).into_iter().fold(0.0, f64::max).ceil().max(1.0);
    f.cost = Cost {
        bucket: f.bucket_bytes / 1e9 * p.bucket_gb_month,
        requests: MONTH_HOURS * 3600.0 * (f.bucket_puts * p.million_puts + f.bucket_gets * p.million_gets) / 1e6,
        replicas: f.replicas * MONTH_HOURS * p.replica_hour,
        databases: f.databases * MONTH_HOURS * p.database_hour + f.database_bytes * c.postgres_bytes_ratio / 1e9 * p.database_gb_month,
        traffic: MONTH_HOURS * 3600.0 * (f.bytes_in + f.bytes_out) / 1e9 * p.traffic_gb,
        total: 0.0,
    };
    f.cost.total = f.cost.bucket + f.cost.requests + f.cost.replicas + f.cost.databases + f.cost.traffic;
    f
}

/// How many PostgreSQL machines are needed for rows, commits, memory and disk, in this order.
pub fn postgres(a: &Assumptions, f: &Fleet) -> [f64; 4] {
    let c = &a.capacity;
    let rows = c.peak * (2.0 * f.objects_in + 2.0 * f.raised + 8.0 * f.pushes);
    [
        rows / (c.postgres_rows * c.headroom),
        c.peak * f.pushes * 4.0 / (c.postgres_commits * c.headroom),
        f.index_bytes * c.postgres_bytes_ratio / c.database_memory,
        f.database_bytes * c.postgres_bytes_ratio / (c.database_disk * c.headroom),
    ]
}

/// A resource that runs out, and the fleet size at which it does.
#[derive(Clone, Debug, Serialize)]
pub struct Limit {
    /// The resource.
    pub what: &'static str,
    /// GPU hosts at which it runs out.
    pub hosts: f64,
    /// Whether the number follows from measurements of this run, or else from assumed capacities.
    pub measured: bool,
    /// What to add then.
    pub then: &'static str,
}

/// All limits, in order of fleet size. Every load is proportional to the number of hosts, except
/// for constants that do not matter at this size.
pub fn limits(a: &Assumptions, costs: &Costs) -> Vec<Limit> {
    const AT: f64 = 1000.0;
    let (f, c) = (fleet(a, costs, AT), &a.capacity);
    let [rows, commits, memory, disk] = postgres(a, &f);
    let limit = |what, used: f64, measured, then| Limit { what, hosts: AT / used, measured, then };
    let network = c.peak * f.bytes_in.max(f.bytes_out * (1.0 - c.redirected)) / (c.replica_network * c.headroom);
    let mut limits = vec![
        limit("disk of one machine without a bucket", f.bucket_bytes / (c.local_disk * c.headroom), false, "a bucket"),
        limit("speed of that disk", c.peak * f.bytes_in / (c.local_disk_speed * c.headroom), false, "a bucket"),
        limit("the one SQLite writer", f.sqlite_busy / c.headroom, true, "PostgreSQL"),
        limit("processors of one registry", f.cores / (c.replica_cores * c.headroom), true, "replicas"),
        limit("network of one registry", network, false, "replicas; redirected downloads"),
        limit("rows written by one PostgreSQL", rows, false, "a database for each group of domains"),
        limit("commits of one PostgreSQL", commits, false, "the same"),
        limit("memory for the index over digests", memory, false, "the same, or more memory"),
        limit("disk of one PostgreSQL", disk, false, "the same, or more disk"),
        limit(
            "requests under one prefix of the bucket",
            c.peak * f.bucket_puts / c.bucket_puts,
            false,
            "keys are random: the store splits prefixes",
        ),
    ];
    limits.sort_by(|a, b| a.hosts.total_cmp(&b.hosts));
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_only_starts_has_its_pages_once() {
        let w =
            Workload { session_turns: 1, forks: 0, start_pages: 64, shared: 0.5, growth_pages: 0, run_pages: 16, ..Workload::default() };
        let s = session(&w);
        assert_eq!((s.pages, s.runs, s.objects), (32.0, 2.0, 64.0 + 2.0 + 3.0));
        assert_eq!((s.raised, s.children), (2.0, 64.0 + 4.0 + 2.0), "two shared page chunks are listed, not written");
    }

    #[test]
    fn a_turn_replaces_the_last_page_chunk() {
        let w =
            Workload { session_turns: 2, forks: 0, start_pages: 16, shared: 0.0, growth_pages: 4, run_pages: 16, ..Workload::default() };
        let s = session(&w);
        // 20 pages are a full page chunk and one of 4. With 24, the full one stays, and one of 8
        // replaces that of 4.
        assert_eq!((s.pages, s.runs, s.raised), (24.0, 3.0, 8.0 + 1.0));
    }
}
