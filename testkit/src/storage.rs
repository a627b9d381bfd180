//! An object store around another one, in which a test can have a say: wait, fail, or do something else first.

use async_trait::async_trait;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result, UploadPart,
};
use std::fmt;
use std::sync::Arc;

/// What is about to happen, or has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before an object is put in one piece.
    Put,
    /// Before an upload in parts begins.
    Open,
    /// Before a part of it is sent.
    Part,
    /// Before it is completed.
    Complete,
    /// It is completed, and the answer on its way.
    Completed,
    /// Before an object is read.
    Get,
}

/// Called at each moment; an error is the answer to whoever asked.
pub type Say = Arc<dyn Fn(Moment) -> BoxFuture<'static, Result<()>> + Send + Sync>;

/// An object store in which somebody has a say.
pub struct Watched {
    inner: Arc<dyn ObjectStore>,
    say: Say,
}

/// `inner`, with `say` asked at every [`Moment`].
#[must_use]
pub fn watched(inner: Arc<dyn ObjectStore>, say: Say) -> Arc<dyn ObjectStore> {
    Arc::new(Watched { inner, say })
}

/// A connection that was cut.
#[must_use]
pub fn reset() -> Error {
    Error::Generic { store: "test", source: "connection reset (injected)".into() }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "watched {:?}", self.inner)
    }
}

impl fmt::Display for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "watched {}", self.inner)
    }
}

struct Upload {
    inner: Box<dyn MultipartUpload>,
    say: Say,
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "watched {:?}", self.inner)
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let mut said = (self.say)(Moment::Part);
        match (&mut said).now_or_never() {
            Some(Err(error)) => Box::pin(async move { Err(error) }),
            Some(Ok(())) => self.inner.put_part(data),
            // Who waits for long has no say any more in whether it is sent: the upload cannot be kept until then.
            None => {
                let part = self.inner.put_part(data);
                Box::pin(async move {
                    said.await?;
                    part.await
                })
            }
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        (self.say)(Moment::Complete).await?;
        let done = self.inner.complete().await?;
        (self.say)(Moment::Completed).await?;
        Ok(done)
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

#[async_trait]
impl ObjectStore for Watched {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        (self.say)(Moment::Put).await?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(&self, location: &Path, options: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        (self.say)(Moment::Open).await?;
        let inner = self.inner.put_multipart_opts(location, options).await?;
        Ok(Box::new(Upload { inner, say: Arc::clone(&self.say) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        (self.say)(Moment::Get).await?;
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
