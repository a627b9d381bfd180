//! An object store that fails: slowly, before the effect, after it, in the middle, and for want of space.
//!
//! Wraps any other. Every call passes the task's gate before and after, so a schedule decides who goes first and who is killed in between.

use crate::gate;
use crate::weather::{Fault, Weather};
use async_trait::async_trait;
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use std::sync::Arc;

/// The failing store.
#[derive(Clone, Debug)]
pub struct Failing {
    inner: Arc<dyn ObjectStore>,
    weather: Weather,
    /// Whether a write that fails can leave a part of its bytes under its key: buckets cannot, file systems without rename can.
    tears: bool,
}

impl Failing {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn ObjectStore>, weather: Weather, tears: bool) -> Self {
        Self { inner, weather, tears }
    }

    async fn call<T>(&self, writes: bool, call: impl Future<Output = Result<T>>) -> Result<T> {
        gate::pass().await;
        for _ in 0..self.weather.latency() {
            gate::pass().await;
        }
        let result = match self.weather.draw(writes) {
            Some(fault @ (Fault::Reset | Fault::Before | Fault::Full)) => Err(error(fault)),
            Some(fault) => call.await.and_then(|_| Err(error(fault))),
            None => call.await,
        };
        gate::pass().await;
        result
    }

    /// Leaves a part of `bytes` under the key and fails.
    async fn tear(&self, location: &Path, bytes: Vec<u8>) -> Error {
        let len = self.weather.below(bytes.len());
        // What is there already stays: no storage in use loses a whole object to a write of the same key that fails.
        if self.inner.head(location).await.is_err() {
            drop(self.inner.put(location, bytes[..len].to_vec().into()).await);
        }
        error(Fault::Torn)
    }
}

fn error(fault: Fault) -> Error {
    let source: Box<dyn std::error::Error + Send + Sync> = match fault {
        Fault::Reset => "connection reset by peer (injected)".into(),
        Fault::Before => "503 slow down (injected, nothing happened)".into(),
        Fault::After => "500 internal error (injected, it happened)".into(),
        Fault::Torn => "500 internal error (injected, a part was written)".into(),
        Fault::Full => Box::new(std::io::Error::from(std::io::ErrorKind::StorageFull)),
    };
    Error::Generic { store: "failing", source }
}

fn flat(payload: &PutPayload) -> Vec<u8> {
    payload.iter().flat_map(|piece| piece.iter().copied()).collect()
}

impl std::fmt::Display for Failing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "failing {}", self.inner)
    }
}

#[derive(Debug)]
struct FailingUpload {
    store: Failing,
    location: Path,
    inner: Box<dyn MultipartUpload>,
    /// What was sent, to be torn.
    sent: Vec<u8>,
}

#[async_trait]
impl MultipartUpload for FailingUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.sent.extend_from_slice(&flat(&data));
        match self.store.weather.draw(true) {
            Some(Fault::After) => {
                let part = self.inner.put_part(data);
                Box::pin(async move { part.await.and_then(|()| Err(error(Fault::After))) })
            }
            Some(fault) => Box::pin(async move { Err(error(fault)) }),
            None => self.inner.put_part(data),
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let store = self.store.clone();
        gate::pass().await;
        let result = match store.weather.draw(true) {
            Some(Fault::Torn) if store.tears => Err(store.tear(&self.location, std::mem::take(&mut self.sent)).await),
            Some(Fault::After) => self.inner.complete().await.and_then(|_| Err(error(Fault::After))),
            Some(fault) => Err(error(fault)),
            None => self.inner.complete().await,
        };
        gate::pass().await;
        result
    }

    async fn abort(&mut self) -> Result<()> {
        let store = self.store.clone();
        store.call(true, self.inner.abort()).await
    }
}

#[async_trait]
impl ObjectStore for Failing {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        gate::pass().await;
        let result = match self.weather.draw(true) {
            Some(Fault::Torn) if self.tears => Err(self.tear(location, flat(&payload)).await),
            Some(Fault::After) => self.inner.put_opts(location, payload, opts).await.and_then(|_| Err(error(Fault::After))),
            Some(fault) => Err(error(fault)),
            None => self.inner.put_opts(location, payload, opts).await,
        };
        gate::pass().await;
        result
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.call(true, self.inner.put_multipart_opts(location, opts)).await?;
        Ok(Box::new(FailingUpload { store: self.clone(), location: location.clone(), inner, sent: Vec::new() }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.call(false, self.inner.get_opts(location, options)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let each = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let location = location?;
                store.call(false, store.inner.delete(&location)).await.map(|()| location)
            }
        };
        locations.then(each).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.weather.draw(false) {
            Some(fault) => stream::once(async move { Err(error(fault)) }).boxed(),
            None => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.call(false, self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.call(true, self.inner.copy_opts(from, to, options)).await
    }
}
