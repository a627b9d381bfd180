//! All assumptions of the model: what the fleet does, what machines can do, and unit prices. None
//! of them is measured.

use serde::{Deserialize, Serialize};

/// A TOML file of assumptions. A missing key has the default that is given below.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Assumptions {
    /// What agents do.
    pub workload: Workload,
    /// What machines and services can do.
    pub capacity: Capacity,
    /// Unit prices.
    pub prices: Prices,
}

/// What agents do. Every agent runs one session after the other. Each turn ends with a snapshot.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Workload {
    /// Agents on a GPU host. Default 8.
    pub agents_per_host: f64,
    /// Blobs for each page: K and V. Default 2.
    pub components: u64,
    /// Raw bytes of a page, all components. Default 360,448: 16 tokens of TinyLlama, 22 KiB for
    /// each token.
    pub page_bytes: f64,
    /// Stored bytes for each raw byte. Default 1: no tensor codec.
    pub stored_ratio: f64,
    /// Mean pages of a full page chunk. Default 314: the mean when content decides where chunks of
    /// 64 to 1,024 pages end.
    pub run_pages: u64,
    /// Pages of the context that a session starts with. Default 512: 8,192 tokens.
    pub start_pages: u64,
    /// Share of these pages that other sessions have too (system prompt, tools). Default 0.5.
    pub shared: f64,
    /// Different shared prefixes in the fleet. Default 100.
    pub prefixes: u64,
    /// Pages that a turn adds. Default 32: 512 tokens.
    pub growth_pages: u64,
    /// Turns of an agent in an hour. Default 20.
    pub turns_per_hour: f64,
    /// Turns of a session. Default 40.
    pub session_turns: u64,
    /// Forks of a session, evenly spread over it. Default 2.
    pub forks: u64,
    /// Turns of a fork. Default 5.
    pub fork_turns: u64,
    /// Hours after which a snapshot is deleted. Default 24.
    pub retention_hours: f64,
    /// Hours between collections. Default 0.25.
    pub gc_interval_hours: f64,
    /// Times that a session moves to another host. The host pulls everything except the shared
    /// prefix. Default 1.
    pub moves: f64,
}

impl Default for Workload {
    fn default() -> Self {
        Self {
            agents_per_host: 8.0,
            components: 2,
            page_bytes: 360_448.0,
            stored_ratio: 1.0,
            run_pages: 314,
            start_pages: 512,
            shared: 0.5,
            prefixes: 100,
            growth_pages: 32,
            turns_per_hour: 20.0,
            session_turns: 40,
            forks: 2,
            fork_turns: 5,
            retention_hours: 24.0,
            gc_interval_hours: 0.25,
            moves: 1.0,
        }
    }
}

/// What machines and services can do. These values are assumed, not measured.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Capacity {
    /// Peak load, relative to the mean. Default 3.
    pub peak: f64,
    /// Share of a machine that a plan may use. Default 0.6.
    pub headroom: f64,
    /// Cores of a replica. Default 8.
    pub replica_cores: f64,
    /// Network of a replica, bytes a second. Default 3.1e9: 25 Gbit/s.
    pub replica_network: f64,
    /// Share of downloaded bytes that clients fetch from the bucket themselves. Default 0.
    pub redirected: f64,
    /// Rows that one PostgreSQL writes in a second (inserted, updated or deleted). Default 50,000.
    pub postgres_rows: f64,
    /// Commits of one PostgreSQL in a second. Default 3,000.
    pub postgres_commits: f64,
    /// Bytes of a row in PostgreSQL, relative to SQLite. Default 1.6.
    pub postgres_bytes_ratio: f64,
    /// Memory of a database machine that indexes may fill, bytes. Default 192 GiB.
    pub database_memory: f64,
    /// Disk of a database machine, bytes. Default 8 TB.
    pub database_disk: f64,
    /// Disk of one registry machine without a bucket, bytes. Default 30 TB.
    pub local_disk: f64,
    /// Speed of writes to this disk, bytes a second. Default 2e9.
    pub local_disk_speed: f64,
    /// Writing requests a second that a bucket takes under one prefix. Default 3,500.
    pub bucket_puts: f64,
    /// Bytes of a pack. Default 64 MiB.
    pub pack_bytes: f64,
    /// Bytes of a part of a multi-part upload. Default 5 MiB, as in the store.
    pub part_bytes: f64,
    /// Bytes of a ranged read. Default 4 MiB, as in the store.
    pub range_bytes: f64,
    /// Requests of a push to the registry. Default 5; 3 to 6 are measured by `pf-bench run`.
    pub requests_per_push: f64,
    /// Processor time of the registry for a request, beside its bytes and rows. Default 0.3 ms.
    pub request_seconds: f64,
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            peak: 3.0,
            headroom: 0.6,
            replica_cores: 8.0,
            replica_network: 3.1e9,
            redirected: 0.0,
            postgres_rows: 50_000.0,
            postgres_commits: 3_000.0,
            postgres_bytes_ratio: 1.6,
            database_memory: 192.0 * (1_u64 << 30) as f64,
            database_disk: 8e12,
            local_disk: 30e12,
            local_disk_speed: 2e9,
            bucket_puts: 3_500.0,
            pack_bytes: 67_108_864.0,
            part_bytes: 5_242_880.0,
            range_bytes: 4_194_304.0,
            requests_per_push: 5.0,
            request_seconds: 0.0003,
        }
    }
}

/// Unit prices in any one currency. The defaults are round numbers of a usual size and not those of
/// any provider: replace them.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prices {
    /// A GB in the bucket for a month. Default 0.02.
    pub bucket_gb_month: f64,
    /// A million writing requests. Default 5.
    pub million_puts: f64,
    /// A million reading requests. Default 0.4.
    pub million_gets: f64,
    /// A replica for an hour. Default 0.4.
    pub replica_hour: f64,
    /// A database machine for an hour. Default 2.
    pub database_hour: f64,
    /// A GB of its disk for a month. Default 0.1.
    pub database_gb_month: f64,
    /// A GB between registry, bucket and hosts. Default 0: they are in one place.
    pub traffic_gb: f64,
}

impl Default for Prices {
    fn default() -> Self {
        Self {
            bucket_gb_month: 0.02,
            million_puts: 5.0,
            million_gets: 0.4,
            replica_hour: 0.4,
            database_hour: 2.0,
            database_gb_month: 0.1,
            traffic_gb: 0.0,
        }
    }
}
