//! A store whose packs, metadata and clock the test holds in its hands.
#![allow(dead_code, missing_docs, clippy::unwrap_used, reason = "each test file uses a part; a test that cannot go on should stop")]

use futures::TryStreamExt as _;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use pfr_store::{Clock, Metadata, Options, SqliteMetadata, Store};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub struct Rig {
    pub packs: Arc<InMemory>,
    pub metadata: Arc<dyn Metadata>,
    pub now: Arc<AtomicU64>,
    pub store: Store,
}

pub fn options(now: &Arc<AtomicU64>) -> Options {
    let now = Arc::clone(now);
    Options { clock: Clock::new(move || now.fetch_add(1, Ordering::SeqCst)), ..Options::default() }
}

impl Rig {
    pub async fn new() -> Self {
        Self::over(Arc::new(InMemory::new()), Arc::new(AtomicU64::new(1_000_000))).await
    }

    /// New metadata beside packs that may exist.
    pub async fn over(packs: Arc<InMemory>, now: Arc<AtomicU64>) -> Self {
        let options = options(&now);
        let metadata: Arc<dyn Metadata> = Arc::new(SqliteMetadata::open_in_memory(options.clock.clone()).await.unwrap());
        let dyn_packs: Arc<dyn ObjectStore> = packs.clone();
        let store = Store::new(dyn_packs, Arc::clone(&metadata), options);
        Self { packs, metadata, now, store }
    }

    /// Another process on the same packs and metadata.
    pub fn replica(&self) -> Store {
        let packs: Arc<dyn ObjectStore> = self.packs.clone();
        Store::new(packs, Arc::clone(&self.metadata), options(&self.now))
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

    pub fn wait(&self, time: Duration) {
        self.now.fetch_add(time.as_millis() as u64, Ordering::SeqCst);
    }

    /// Lets every lease end and frees what nothing holds, to the last byte.
    pub async fn collect(&self) {
        self.wait(Duration::from_secs(48 * 3600));
        while self.metadata.collect(1000).await.unwrap().more {}
        self.metadata.retire_packs(1000).await.unwrap();
        self.wait(Duration::from_secs(1));
        for pack in self.metadata.drained_packs(Duration::ZERO, 1000).await.unwrap() {
            let shard = &pack.key[pack.key.len() - 2..];
            self.packs.delete(&Path::from(format!("{shard}/{}.pfpack", pack.key))).await.unwrap();
            self.metadata.forget_packs(vec![pack.id]).await.unwrap();
        }
    }
}
