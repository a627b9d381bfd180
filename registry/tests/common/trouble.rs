//! Packs on a disk that fails as it is told.

use async_trait::async_trait;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result,
};
use pfr_store::{Clock, Options, SqliteMetadata, Store};
use std::sync::{Arc, Mutex};

/// What the disk does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    None,
    Unreachable,
    Full,
    Panic,
    /// It does not answer.
    Hang,
}

/// A switch for [`Trouble`].
#[derive(Clone, Debug)]
pub struct Switch(Arc<Mutex<Trouble>>);

impl Switch {
    pub fn set(&self, trouble: Trouble) {
        *self.0.lock().expect("the switch") = trouble;
    }

    async fn wait(&self) {
        if *self.0.lock().expect("the switch") == Trouble::Hang {
            std::future::pending::<()>().await;
        }
    }

    fn strike(&self) -> Result<()> {
        let trouble = *self.0.lock().expect("the switch");
        match trouble {
            Trouble::None | Trouble::Hang => Ok(()),
            Trouble::Unreachable => Err(Error::Generic { store: "test", source: "/secret/path: connection reset".into() }),
            Trouble::Full => Err(Error::Generic { store: "test", source: std::io::Error::from(std::io::ErrorKind::StorageFull).into() }),
            Trouble::Panic => panic!("a panic that a test asked for"),
        }
    }
}

/// A store in memory whose packs fail as the switch says.
pub async fn store() -> (Store, Switch) {
    let switch = Switch(Arc::new(Mutex::new(Trouble::None)));
    let packs = Packs { inner: InMemory::new(), switch: switch.clone() };
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.expect("metadata in memory");
    (Store::new(Arc::new(packs), Arc::new(metadata), Options::default()), switch)
}

#[derive(Debug)]
struct Packs {
    inner: InMemory,
    switch: Switch,
}

impl std::fmt::Display for Packs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("packs in trouble")
    }
}

#[async_trait]
impl ObjectStore for Packs {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.switch.wait().await;
        self.switch.strike()?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.switch.strike()?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.switch.wait().await;
        self.switch.strike()?;
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
