//! Replicas over one disk and one database, with a clock that jumps.

use crate::disk::Disk;
use crate::failing::failing;
use crate::faults::Faults;
use crate::keyring::Keyring;
use crate::transactions::Transactions;
use object_store::ObjectStore;
use pfr_store::{
    Clock, DomainHome, DomainPacks, DomainTables, Domains, Metadata, Options, PostgresMetadata, PostgresOptions, Result, SqliteMetadata,
    Store,
};
use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// An hour, in milliseconds.
pub const HOUR: u64 = 3_600_000;
/// How long leases last here.
pub const LEASE: Duration = Duration::from_millis(HOUR);

/// A planted bug, which the checks must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Plant {
    /// Storage acknowledges before it is durable: a missing fsync.
    NoFsync,
    /// Collection runs with a clock a day ahead: leases do not hold.
    NoLeases,
    /// Packs are deleted as soon as they are emptied: readers find nothing.
    NoGrace,
}

/// The database of the metadata of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Database {
    /// One file, embedded.
    #[default]
    Sqlite,
    /// A throw-away PostgreSQL server.
    Postgres,
}

/// The settings of a history.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Registries over one storage and database.
    pub replicas: usize,
    /// Bytes of a pack.
    pub pack_bytes: u64,
    /// Whether failed writes leave torn objects.
    pub tears: bool,
    /// A bug to be caught.
    pub plant: Option<Plant>,
    /// The database of the metadata.
    pub database: Database,
    /// Whether a command wraps the keys of domains, and not a file.
    pub key_command: bool,
}

/// A replica, which may be running or not.
#[derive(Debug)]
pub struct Replica {
    /// Its store, while it runs.
    pub store: Option<Store>,
    /// The faults of its calls.
    pub faults: Faults,
}

/// The replicas, their storage, database and clock.
#[derive(Debug)]
pub struct World {
    /// The storage.
    pub disk: Disk,
    /// The replicas.
    pub replicas: Vec<Replica>,
    /// A store over the same data without faults, for checks only.
    pub observer: Store,
    /// The keys that wrap those of encrypted domains.
    pub keyring: Keyring,
    setup: Setup,
    clock: Arc<AtomicU64>,
    dir: TempDir,
    databases: u32,
}

/// A directory in memory if there is one, so that fsync of the database costs nothing.
fn folder() -> std::io::Result<TempDir> {
    let memory = std::path::Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir()) } else { tempfile::tempdir() }
}

/// The PostgreSQL database of this thread: one at a time is in use, and a new one for each history
/// would take longer than the history.
fn postgres_url() -> String {
    thread_local!(static URL: OnceCell<String> = const { OnceCell::new() });
    URL.with(|url| url.get_or_init(pfr_testkit::postgres::database).clone())
}

async fn open(database: Database, file: &Path, clock: Clock) -> Result<Arc<dyn Metadata>> {
    Ok(match database {
        Database::Sqlite => SqliteMetadata::open(file, clock).await?,
        Database::Postgres => PostgresMetadata::connect(&postgres_url(), postgres_options(clock)).await?,
    })
}

fn postgres_options(clock: Clock) -> PostgresOptions {
    PostgresOptions { max_connections: 3, clock: Some(clock), ..PostgresOptions::default() }
}

/// Drops the tables of all domains but the default one.
const DROP_DOMAINS: &str = "DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT nspname FROM pg_namespace WHERE starts_with(nspname, 'pf_') LOOP EXECUTE 'DROP SCHEMA ' || quote_ident(name) || ' CASCADE'; END LOOP;
    END $$";

/// A database without rows. `file` must not exist.
async fn fresh(database: Database, file: &Path, clock: Clock) -> Result<Arc<dyn Metadata>> {
    let metadata = open(database, file, clock).await?;
    if database == Database::Postgres {
        // Sessions of replicas that were killed may still end their transactions: they would hold
        // the tables.
        pfr_testkit::postgres::cut_connections(&postgres_url());
        pfr_testkit::postgres::empty(&postgres_url(), "_sqlx_migrations");
        let _ = pfr_testkit::postgres::sql(&postgres_url(), DROP_DOMAINS);
    }
    Ok(metadata)
}

fn ticking(clock: &Arc<AtomicU64>, ahead: u64) -> Clock {
    let clock = Arc::clone(clock);
    Clock::new(move || clock.fetch_add(1, Ordering::SeqCst) + ahead)
}

impl World {
    /// Makes an empty world.
    ///
    /// # Errors
    /// The database cannot be opened.
    pub async fn new(seed: u64, setup: Setup) -> Result<Self> {
        let failed = |e: std::io::Error| pfr_store::Error::Unavailable { what: "directory", reason: e.to_string() };
        let (dir, keyring) = (folder().map_err(failed)?, Keyring::new(setup.key_command).map_err(failed)?);
        let clock = Arc::new(AtomicU64::new(1_800_000_000_000));
        let disk = Disk::new(seed, setup.plant == Some(Plant::NoFsync));
        let metadata = fresh(setup.database, &dir.path().join("0.sqlite"), ticking(&clock, 0)).await?;
        let options = options(&setup, &clock);
        let observer = Store::new(disk.storage(), metadata, options);
        let replicas =
            (0..setup.replicas as u64).map(|i| Replica { store: None, faults: Faults::new(seed ^ (i + 1) << 32, 0.0) }).collect();
        let mut world = Self { disk, replicas, observer, keyring, setup, clock, dir, databases: 0 };
        for i in 0..world.replicas.len() {
            world.start(i).await?;
        }
        Ok(world)
    }

    fn database(&self) -> PathBuf {
        self.dir.path().join(format!("{}.sqlite", self.databases))
    }

    async fn metadata(&self, ahead: u64) -> Result<Arc<dyn Metadata>> {
        open(self.setup.database, &self.database(), ticking(&self.clock, ahead)).await
    }

    /// Starts a replica, if it does not run.
    ///
    /// # Errors
    /// The database cannot be opened.
    pub async fn start(&mut self, replica: usize) -> Result<()> {
        if self.replicas[replica].store.is_some() {
            return Ok(());
        }
        let faults = self.replicas[replica].faults.clone();
        let mut metadata = Transactions::new(self.metadata(0).await?, faults.clone());
        match self.setup.plant {
            Some(Plant::NoLeases) => metadata = metadata.collecting_with(self.metadata(24 * HOUR).await?),
            Some(Plant::NoGrace) => metadata = metadata.without_grace(),
            Some(Plant::NoFsync) | None => {}
        }
        let packs = self.storage(replica);
        self.replicas[replica].store = Some(Store::new(packs, Arc::new(metadata), options(&self.setup, &self.clock)));
        Ok(())
    }

    /// The storage as a replica sees it.
    fn storage(&self, replica: usize) -> Arc<dyn ObjectStore> {
        failing(self.disk.storage(), self.replicas[replica].faults.clone(), self.setup.tears)
    }

    /// All domains without faults, for checks only.
    ///
    /// # Errors
    /// The database cannot be opened.
    pub async fn domains(&self) -> Result<Domains> {
        Ok(Domains::with_keys(self.observer.clone(), Some(self.home(self.disk.storage()).await?), self.keyring.keys()?))
    }

    /// All domains as a replica sees them, if it runs.
    ///
    /// # Errors
    /// The database cannot be opened.
    pub async fn domains_of(&self, replica: usize) -> Result<Option<Domains>> {
        let Some(store) = self.replicas[replica].store.clone() else { return Ok(None) };
        Ok(Some(Domains::with_keys(store, Some(self.home(self.storage(replica)).await?), self.keyring.keys()?)))
    }

    async fn home(&self, packs: Arc<dyn ObjectStore>) -> Result<DomainHome> {
        let tables = match self.setup.database {
            Database::Sqlite => DomainTables::Files(self.dir.path().join(format!("domains-{}", self.databases))),
            Database::Postgres => {
                DomainTables::Postgres(Arc::new(PostgresMetadata::open(&postgres_url(), postgres_options(ticking(&self.clock, 0))).await?))
            }
        };
        Ok(DomainHome { tables, packs: DomainPacks::Bucket(packs) })
    }

    /// Replaces the database by an empty one. All replicas stop.
    ///
    /// # Errors
    /// The database cannot be opened.
    pub async fn lose_database(&mut self) -> Result<()> {
        self.replicas.iter_mut().for_each(|replica| replica.store = None);
        self.databases += 1;
        let metadata = fresh(self.setup.database, &self.database(), ticking(&self.clock, 0)).await?;
        self.observer = Store::new(self.disk.storage(), metadata, options(&self.setup, &self.clock));
        Ok(())
    }

    /// Moves the clock, forward or back.
    pub fn jump(&self, milliseconds: i64) {
        if milliseconds >= 0 {
            self.clock.fetch_add(milliseconds.unsigned_abs(), Ordering::SeqCst);
        } else {
            self.clock.fetch_sub(milliseconds.unsigned_abs(), Ordering::SeqCst);
        }
    }

    /// Sets the faults of every replica.
    pub fn set_faults(&self, rate: f64, full: bool) {
        self.replicas.iter().for_each(|replica| replica.faults.set(rate, full));
    }
}

fn options(setup: &Setup, clock: &Arc<AtomicU64>) -> Options {
    Options { lease: LEASE, pack_bytes: setup.pack_bytes, clock: ticking(clock, 0), ..Options::default() }
}
