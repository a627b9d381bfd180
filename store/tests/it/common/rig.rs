//! A store over each kind of metadata and storage, whose parts and clock the test controls.

use crate::common::leaks;
use futures::TryStreamExt as _;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use pfr_store::storage::{self, StorageOptions};
use pfr_store::{
    Clock, DomainHome, DomainPacks, DomainTables, Domains, Keys, Metadata, Options, PostgresMetadata, PostgresOptions, SqliteMetadata,
    Store,
};
use pfr_testkit::postgres;
use pfr_testkit::s3::Server;
use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;

/// The kinds of metadata and storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Both in memory: for tests that try very many cases.
    Memory,
    SqliteDisk,
    SqliteS3,
    PostgresDisk,
    PostgresS3,
    /// Packs in memory, encrypted: what tests read and write of them is plaintext.
    SqliteSealed,
}

impl Backend {
    /// The number of cases for this backend: `many` in memory, `few` in a file, half of these on a
    /// server unless this is the long run.
    pub fn some(self, many: u32, few: u32) -> u32 {
        match self {
            Self::Memory => many,
            _ if self.on_postgres() && !pfr_testkit::run::long() => few.div_ceil(2),
            _ => few,
        }
    }

    fn on_postgres(self) -> bool {
        matches!(self, Self::PostgresDisk | Self::PostgresS3)
    }
}

/// Makes a test `name::backend` of each function, which takes a [`Backend`], for each backend that
/// is named.
macro_rules! on_backends {
    ($backends:tt: $($name:ident),+ $(,)?) => { $( on_backends!(@one $name $backends); )+ };
    (@one $name:ident [$($test:ident = $backend:ident),+]) => {
        mod $name {
            $(#[tokio::test]
            async fn $test() {
                super::$name($crate::common::rig::Backend::$backend).await;
            })+
        }
    };
}

/// On each kind of metadata with each kind of packs.
macro_rules! on_every_backend {
    ($($name:ident),+ $(,)?) => {
        on_backends!([sqlite_disk = SqliteDisk, sqlite_s3 = SqliteS3, postgres_disk = PostgresDisk, postgres_s3 = PostgresS3, sealed = SqliteSealed]: $($name),+);
    };
}

/// Likewise, and in memory: many cases there, some on the others.
macro_rules! on_every_backend_and_memory {
    ($($name:ident),+ $(,)?) => {
        on_backends!([memory = Memory, sqlite_disk = SqliteDisk, sqlite_s3 = SqliteS3, postgres_disk = PostgresDisk, postgres_s3 = PostgresS3, sealed = SqliteSealed]: $($name),+);
    };
}

/// Where packs lie.
struct Place {
    packs: Arc<dyn ObjectStore>,
    /// Its directory, if it is one, and what removes it.
    dir: Option<(PathBuf, TempDir)>,
}

impl Place {
    fn new(backend: Backend) -> Self {
        match backend {
            Backend::Memory => Self { packs: Arc::new(InMemory::new()), dir: None },
            Backend::SqliteDisk | Backend::PostgresDisk => {
                let dir = tempfile::tempdir().unwrap();
                let packs = dir.path().join("packs");
                Self { packs: storage::open_dir(&packs).unwrap().0, dir: Some((packs, dir)) }
            }
            Backend::SqliteS3 | Backend::PostgresS3 => Self { packs: in_bucket(), dir: None },
            Backend::SqliteSealed => Self { packs: pfr_store::encrypted(Arc::new(InMemory::new()), &[5; 32], false).unwrap(), dir: None },
        }
    }

    fn store(&self, metadata: &Arc<dyn Metadata>, options: &Options) -> Store {
        let store = Store::new(Arc::clone(&self.packs), Arc::clone(metadata), options.clone());
        match &self.dir {
            Some((dir, _)) => store.with_packs_dir(dir),
            None => store,
        }
    }
}

/// A fresh prefix on the server of the run, or of this thread.
fn in_bucket() -> Arc<dyn ObjectStore> {
    thread_local!(static SERVER: OnceCell<Server> = const { OnceCell::new() });
    SERVER.with(|server| {
        let server = server.get_or_init(Server::shared);
        let options = StorageOptions { environment: server.env(), ..StorageOptions::default() };
        storage::open(&server.prefix(), &options).unwrap().0
    })
}

/// Where metadata lies.
enum Tables {
    Memory,
    File(TempDir),
    /// The URL of a database.
    Database(String),
}

impl Tables {
    fn new(backend: Backend) -> Self {
        match backend {
            Backend::Memory => Self::Memory,
            _ if backend.on_postgres() => Self::Database(postgres::database()),
            _ => Self::File(tempfile::tempdir().unwrap()),
        }
    }

    async fn open(&self, clock: Clock) -> Arc<dyn Metadata> {
        match self {
            Self::Memory => SqliteMetadata::open_in_memory(clock).await.unwrap(),
            Self::File(dir) => SqliteMetadata::open(&dir.path().join("metadata.sqlite"), clock).await.unwrap(),
            Self::Database(url) => {
                let options = PostgresOptions { max_connections: 6, clock: Some(clock), ..PostgresOptions::default() };
                PostgresMetadata::connect(url, options).await.unwrap()
            }
        }
    }
}

pub struct Rig {
    pub backend: Backend,
    pub packs: Arc<dyn ObjectStore>,
    pub metadata: Arc<dyn Metadata>,
    pub now: Arc<AtomicU64>,
    pub store: Store,
    options: Options,
    place: Arc<Place>,
    tables: Tables,
}

impl Rig {
    /// An empty store whose clock moves on by a millisecond each time it is read.
    pub async fn new(backend: Backend) -> Self {
        let now = Arc::new(AtomicU64::new(1_000_000));
        let clock = clock(&now, 1);
        Self::over(backend, Arc::new(Place::new(backend)), now, Options { clock, ..Options::default() }).await
    }

    /// An empty store whose clock moves only when the test moves it.
    pub async fn still(backend: Backend, options: Options) -> Self {
        let now = Arc::new(AtomicU64::new(1_000_000_000));
        let clock = clock(&now, 0);
        Self::over(backend, Arc::new(Place::new(backend)), now, Options { clock, ..options }).await
    }

    async fn over(backend: Backend, place: Arc<Place>, now: Arc<AtomicU64>, options: Options) -> Self {
        let tables = Tables::new(backend);
        let metadata = tables.open(options.clock.clone()).await;
        let (packs, store) = (Arc::clone(&place.packs), place.store(&metadata, &options));
        Self { backend, packs, metadata, now, store, options, place, tables }
    }

    /// New metadata beside the same packs.
    pub async fn beside(&self) -> Self {
        Self::over(self.backend, Arc::clone(&self.place), Arc::clone(&self.now), self.options.clone()).await
    }

    /// New metadata beside a copy of the packs.
    pub async fn beside_copy(&self) -> Self {
        let place = Place::new(self.backend);
        self.copy_to(&*place.packs).await;
        Self::over(self.backend, Arc::new(place), Arc::clone(&self.now), self.options.clone()).await
    }

    /// New metadata beside other packs in memory.
    pub async fn over_memory(&self, packs: Arc<InMemory>) -> Self {
        let place = Place { packs, dir: None };
        Self::over(Backend::Memory, Arc::new(place), Arc::clone(&self.now), self.options.clone()).await
    }

    /// A copy of everything where packs are.
    pub async fn fork(&self) -> Arc<InMemory> {
        let copy = Arc::new(InMemory::new());
        self.copy_to(&*copy).await;
        copy
    }

    async fn copy_to(&self, packs: &dyn ObjectStore) {
        for path in self.list(None).await {
            packs.put(&path, self.bytes(&path).await.into()).await.unwrap();
        }
    }

    pub fn options(&self) -> Options {
        self.options.clone()
    }

    async fn metadata_of_another(&self) -> Arc<dyn Metadata> {
        match self.tables {
            // Metadata in memory cannot be opened a second time, so share it.
            Tables::Memory => Arc::clone(&self.metadata),
            _ => self.tables.open(self.options.clock.clone()).await,
        }
    }

    /// Another process on the same packs and metadata, as far as the store can tell.
    pub async fn another(&self) -> Store {
        self.place.store(&self.metadata_of_another().await, &self.options)
    }

    /// The domains of another process, with so many connections to a shared database.
    pub async fn domains(&self, connections: u32) -> Domains {
        self.domains_with(connections, Keys::default()).await
    }

    /// The same, with keys for encrypted ones.
    pub async fn domains_with(&self, connections: u32, keys: Keys) -> Domains {
        let clock = self.options.clock.clone();
        let (metadata, tables): (Arc<dyn Metadata>, DomainTables) = match &self.tables {
            Tables::Memory => unreachable!("tables in memory are those of one domain"),
            Tables::File(dir) => (self.tables.open(clock).await, DomainTables::Files(dir.path().to_owned())),
            Tables::Database(url) => {
                let options = PostgresOptions { max_connections: connections, clock: Some(clock), ..PostgresOptions::default() };
                let metadata = Arc::new(PostgresMetadata::open(url, options).await.unwrap());
                (Arc::clone(&metadata).metadata(), DomainTables::Postgres(metadata))
            }
        };
        let packs = match &self.place.dir {
            Some((dir, _)) => DomainPacks::Files { root: dir.clone(), inside: "" },
            None => DomainPacks::Bucket(Arc::clone(&self.packs)),
        };
        Domains::with_keys(self.place.store(&metadata, &self.options), Some(DomainHome { tables, packs }), keys)
    }

    /// Whether there are tables of a domain.
    pub fn has_tables(&self, domain: &str) -> bool {
        match &self.tables {
            Tables::Memory => false,
            Tables::File(dir) => dir.path().join("domains").join(domain).exists(),
            Tables::Database(_) => {
                self.sql(&format!("SELECT count(*)::text FROM pg_namespace WHERE nspname = 'pf_{domain}'")).trim() != "0"
            }
        }
    }

    /// Reopens the store as after a restart of the process.
    pub async fn reopen(&mut self) {
        self.metadata = self.metadata_of_another().await;
        self.store = self.place.store(&self.metadata, &self.options);
    }

    pub async fn list(&self, prefix: Option<&str>) -> Vec<Path> {
        let prefix = prefix.map(Path::from);
        let mut paths: Vec<Path> = self.packs.list(prefix.as_ref()).map_ok(|o| o.location).try_collect().await.unwrap();
        paths.sort();
        paths
    }

    pub async fn pack_paths(&self) -> Vec<Path> {
        self.list(None).await.into_iter().filter(|p| p.as_ref().ends_with(".pfpack")).collect()
    }

    /// Everything where packs are, without the journal and the store's marker, with its size; in a
    /// directory also what the object store does not show.
    pub async fn pack_files(&self) -> BTreeMap<String, u64> {
        let mut files = match &self.place.dir {
            Some((dir, _)) => leaks::files(dir),
            None => self.packs.list(None).map_ok(|o| (o.location.to_string(), o.size)).try_collect().await.unwrap(),
        };
        files.retain(|name, _| leaks::is_pack(name));
        files
    }

    /// The directory of the packs.
    pub fn packs_dir(&self) -> &std::path::Path {
        &self.place.dir.as_ref().expect("packs in a directory").0
    }

    pub async fn bytes(&self, path: &Path) -> Vec<u8> {
        self.packs.get(path).await.unwrap().bytes().await.unwrap().to_vec()
    }

    pub async fn put(&self, path: &Path, bytes: Vec<u8>) {
        self.packs.put(path, bytes.into()).await.unwrap();
    }

    pub async fn flip(&self, path: &Path, at: usize) {
        let mut bytes = self.bytes(path).await;
        bytes[at] ^= 0x10;
        self.put(path, bytes).await;
    }

    /// Runs a statement on the tables from outside, with bytes as `x'…'`; the first value that it
    /// returns.
    pub fn sql(&self, statement: &str) -> String {
        match &self.tables {
            Tables::Memory => unreachable!("tables in memory cannot be spoilt from outside"),
            Tables::File(dir) => {
                let connection = rusqlite::Connection::open(dir.path().join("metadata.sqlite")).unwrap();
                let mut statement = connection.prepare(statement).unwrap();
                let mut rows = statement.query([]).unwrap();
                let value = rows.next().unwrap().map(|row| row.get::<_, rusqlite::types::Value>(0).unwrap());
                match value {
                    Some(rusqlite::types::Value::Integer(number)) => number.to_string(),
                    Some(rusqlite::types::Value::Text(text)) => text,
                    other => format!("{other:?}"),
                }
            }
            Tables::Database(url) => postgres::sql(url, &statement.replace("x'", "'\\x")),
        }
    }

    pub fn wait(&self, time: Duration) {
        self.now.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }

    pub fn seconds(&self, seconds: u64) {
        self.wait(Duration::from_secs(seconds));
    }

    /// Lets every lease end and frees what nothing holds, to the last byte.
    pub async fn collect(&self) {
        self.wait(Duration::from_secs(48 * 3600));
        while self.metadata.collect(1000).await.unwrap().more {}
        self.metadata.empty_packs(1000).await.unwrap();
        self.wait(Duration::from_secs(1));
        for pack in self.metadata.emptied_packs(Duration::ZERO, 1000).await.unwrap() {
            match self.packs.delete(&pack_path(&pack.key)).await {
                Ok(()) => {}
                // Its rows were refused, and its writer deleted its bytes.
                Err(object_store::Error::NotFound { .. }) if pack.bytes == 0 => {}
                Err(error) => panic!("{error}"),
            }
            self.metadata.forget_packs(vec![pack.id]).await.unwrap();
        }
    }
}

/// Where a pack lies.
pub fn pack_path(key: &str) -> Path {
    Path::from(format!("{}/{key}.pfpack", &key[key.len() - 2..]))
}

fn clock(now: &Arc<AtomicU64>, step: u64) -> Clock {
    let now = Arc::clone(now);
    Clock::new(move || now.fetch_add(step, Ordering::SeqCst))
}
