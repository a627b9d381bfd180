//! An object store around another one, with hooks: a test can wait, fail, tear a write, or do
//! something else around each call.

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A point in time around a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before an object is put in one piece.
    Put,
    /// Before an upload in parts begins.
    Open,
    /// Before a part of an upload is sent.
    Part,
    /// Before an upload is completed.
    Complete,
    /// After an upload was completed, before the answer.
    Completed,
    /// Before an upload is given up.
    Abort,
    /// Before an object is read.
    Get,
    /// Before an object is deleted.
    Delete,
    /// Before objects are listed.
    List,
    /// Before objects of one folder are listed.
    ListFolder,
    /// Before an object is copied.
    Copy,
}

/// A call of the object store.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which call.
    pub moment: Moment,
    /// The key of the object, or the prefix of a list.
    pub location: Path,
    /// Bytes that are written. [`Moment::Complete`] has those of all parts.
    pub bytes: Vec<Bytes>,
    /// Number of the upload in parts; 0 for other calls.
    pub upload: u64,
}

impl Call {
    fn of(moment: Moment, location: &Path) -> Self {
        Self { moment, location: location.clone(), bytes: Vec::new(), upload: 0 }
    }
}

/// Called around each call.
#[async_trait]
pub trait Hooks: fmt::Debug + Send + Sync + 'static {
    /// Before a call. `Err` is its answer, and it does not happen. `Ok(Some(error))` is its answer
    /// although it happens.
    async fn before(&self, call: &Call) -> Result<Option<Error>>;

    /// After a call that [`Self::before`] let through. An error replaces its answer.
    /// [`Moment::Part`] and [`Moment::List`] are left out.
    async fn after(&self, _call: &Call, _succeeded: bool) -> Result<()> {
        Ok(())
    }

    /// An upload in parts has ended, or was dropped.
    fn ended(&self, _upload: u64) {}
}

/// `inner` with hooks.
#[must_use]
pub fn hooked(inner: Arc<dyn ObjectStore>, hooks: Arc<dyn Hooks>) -> Arc<dyn ObjectStore> {
    Arc::new(Hooked { inner, hooks, uploads: Arc::default() })
}

/// Called before the first six [`Moment`]s and before reads. An error is the answer.
pub type Say = Arc<dyn Fn(Moment) -> BoxFuture<'static, Result<()>> + Send + Sync>;

/// `inner`, with `say` called at the moments that a test most often needs.
#[must_use]
pub fn watched(inner: Arc<dyn ObjectStore>, say: Say) -> Arc<dyn ObjectStore> {
    hooked(inner, Arc::new(Watch(say)))
}

/// A connection that was cut.
#[must_use]
pub fn reset() -> Error {
    Error::Generic { store: "test", source: "connection reset (injected)".into() }
}

struct Watch(Say);

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

#[async_trait]
impl Hooks for Watch {
    async fn before(&self, call: &Call) -> Result<Option<Error>> {
        if matches!(call.moment, Moment::Put | Moment::Open | Moment::Part | Moment::Complete | Moment::Get) {
            (self.0)(call.moment).await?;
        }
        Ok(None)
    }

    async fn after(&self, call: &Call, succeeded: bool) -> Result<()> {
        if succeeded && call.moment == Moment::Complete { (self.0)(Moment::Completed).await } else { Ok(()) }
    }
}

#[derive(Clone, Debug)]
struct Hooked {
    inner: Arc<dyn ObjectStore>,
    hooks: Arc<dyn Hooks>,
    /// Uploads in parts so far.
    uploads: Arc<AtomicU64>,
}

impl Hooked {
    async fn run<T>(&self, call: Call, work: impl Future<Output = Result<T>>) -> Result<T> {
        let lost = self.hooks.before(&call).await?;
        let done = work.await;
        self.hooks.after(&call, done.is_ok()).await?;
        lost.map_or(done, Err)
    }
}

impl fmt::Display for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hooked {}", self.inner)
    }
}

#[derive(Debug)]
struct Upload {
    store: Hooked,
    inner: Box<dyn MultipartUpload>,
    call: Call,
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.store.hooks.ended(self.call.upload);
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        self.call.bytes.extend(data.iter().cloned());
        let call = Call { moment: Moment::Part, bytes: data.iter().cloned().collect(), ..self.call.clone() };
        let hooks = Arc::clone(&self.store.hooks);
        let mut verdict = async move { hooks.before(&call).await }.boxed();
        match (&mut verdict).now_or_never() {
            Some(Err(error)) => async move { Err(error) }.boxed(),
            Some(Ok(lost)) => {
                let part = self.inner.put_part(data);
                async move { part.await.and_then(|()| lost.map_or(Ok(()), Err)) }.boxed()
            }
            // A hook that waits cannot hold back the part, since the upload cannot be borrowed for
            // that long.
            None => {
                let part = self.inner.put_part(data);
                async move {
                    let lost = verdict.await?;
                    part.await.and_then(|()| lost.map_or(Ok(()), Err))
                }
                .boxed()
            }
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let call = Call { moment: Moment::Complete, ..self.call.clone() };
        self.store.run(call, self.inner.complete()).await
    }

    async fn abort(&mut self) -> Result<()> {
        let call = Call { moment: Moment::Abort, ..self.call.clone() };
        self.store.run(call, self.inner.abort()).await
    }
}

#[async_trait]
impl ObjectStore for Hooked {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let call = Call { bytes: payload.iter().cloned().collect(), ..Call::of(Moment::Put, location) };
        self.run(call, self.inner.put_opts(location, payload, options)).await
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let upload = self.uploads.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call { upload, ..Call::of(Moment::Open, location) };
        let inner = self.run(call.clone(), self.inner.put_multipart_opts(location, options)).await?;
        Ok(Box::new(Upload { store: self.clone(), inner, call }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.run(Call::of(Moment::Get, location), self.inner.get_opts(location, options)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let store = self.clone();
        let each = move |location: Result<Path>| {
            let store = store.clone();
            async move {
                let location = location?;
                store.run(Call::of(Moment::Delete, &location), store.inner.delete(&location)).await.map(|()| location)
            }
        };
        locations.then(each).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (hooks, listed) = (Arc::clone(&self.hooks), self.inner.list(prefix));
        let call = Call::of(Moment::List, &prefix.cloned().unwrap_or_default());
        let verdict = async move { hooks.before(&call).await.and_then(|lost| lost.map_or(Ok(listed), Err)) };
        stream::once(verdict).try_flatten().boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let call = Call::of(Moment::ListFolder, &prefix.cloned().unwrap_or_default());
        self.run(call, self.inner.list_with_delimiter(prefix)).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.run(Call::of(Moment::Copy, to), self.inner.copy_opts(from, to, options)).await
    }
}
