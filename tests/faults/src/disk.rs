//! A storage that forgets: what an object store holds in volatile memory vanishes, or is torn, when the power fails.
//!
//! Complete objects are durable, as `object_store`'s local disk with fsync and every bucket promise. What was begun and not completed is
//! volatile. A dishonest disk acknowledges before it is durable: the bug that a missing fsync is.

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The storage itself. Cheap to clone; all clones are one disk.
#[derive(Clone, Debug)]
pub struct Disk {
    objects: Arc<InMemory>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    random: StdRng,
    /// Uploads that were begun and not completed.
    uploads: BTreeMap<u64, (Path, Vec<u8>)>,
    next: u64,
    /// Complete objects that a dishonest disk has not made durable.
    volatile: Vec<Path>,
    /// Whether it acknowledges before it is durable.
    dishonest: bool,
}

impl Disk {
    /// An empty disk. A dishonest one acknowledges what is not durable yet.
    #[must_use]
    pub fn new(seed: u64, dishonest: bool) -> Self {
        let state = State { random: StdRng::seed_from_u64(seed), uploads: BTreeMap::new(), next: 0, volatile: Vec::new(), dishonest };
        Self { objects: Arc::new(InMemory::new()), state: Arc::new(Mutex::new(state)) }
    }

    /// The power fails: uploads in progress vanish, or leave a prefix under their key, or stay whole; what was only acknowledged likewise.
    pub fn power_loss(&self) {
        let (mut torn, mut gone) = (Vec::new(), Vec::new());
        {
            let mut state = self.state.lock();
            for (_, (path, bytes)) in std::mem::take(&mut state.uploads) {
                match state.random.random_range(0..4) {
                    0 => torn.push((path, bytes)),
                    1 if !bytes.is_empty() => {
                        let len = state.random.random_range(0..bytes.len());
                        torn.push((path, bytes[..len].to_vec()));
                    }
                    _ => {}
                }
            }
            for path in std::mem::take(&mut state.volatile) {
                if state.random.random_bool(0.7) {
                    gone.push(path);
                }
            }
        }
        for (path, bytes) in torn {
            self.plant(&path, bytes);
        }
        for path in gone {
            let _ = self.objects.delete(&path).now_or_never();
        }
    }

    /// Puts bytes under a key, past all rules: what a torn write leaves behind, or a cosmic ray.
    pub fn plant(&self, path: &Path, bytes: Vec<u8>) {
        let _ = self.objects.put(path, PutPayload::from(bytes)).now_or_never();
    }

    /// The bytes of an object.
    #[must_use]
    pub fn bytes(&self, path: &Path) -> Option<Bytes> {
        self.objects.get(path).now_or_never()?.ok()?.bytes().now_or_never()?.ok()
    }

    /// Every key, and how many bytes lie there.
    #[must_use]
    pub fn keys(&self) -> BTreeMap<String, u64> {
        let all: Vec<ObjectMeta> = self.objects.list(None).try_collect().now_or_never().and_then(Result::ok).unwrap_or_default();
        all.into_iter().map(|meta| (meta.location.to_string(), meta.size)).collect()
    }

    fn completed(&self, path: &Path) {
        let mut state = self.state.lock();
        if state.dishonest {
            state.volatile.push(path.clone());
        }
    }
}

impl std::fmt::Display for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a disk that forgets")
    }
}

#[derive(Debug)]
struct Upload {
    disk: Disk,
    id: u64,
}

/// Nobody completes the upload of a process that ended.
impl Drop for Upload {
    fn drop(&mut self) {
        self.disk.state.lock().uploads.remove(&self.id);
    }
}

#[async_trait]
impl MultipartUpload for Upload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (disk, id) = (self.disk.clone(), self.id);
        Box::pin(async move {
            let mut state = disk.state.lock();
            if let Some((_, bytes)) = state.uploads.get_mut(&id) {
                data.iter().for_each(|piece| bytes.extend_from_slice(piece));
            }
            Ok(())
        })
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let upload = self.disk.state.lock().uploads.remove(&self.id);
        let Some((path, bytes)) = upload else {
            return Err(object_store::Error::Generic { store: "disk", source: "the upload is gone".into() });
        };
        let done = self.disk.objects.put(&path, bytes.into()).await?;
        self.disk.completed(&path);
        Ok(done)
    }

    async fn abort(&mut self) -> Result<()> {
        self.disk.state.lock().uploads.remove(&self.id);
        Ok(())
    }
}

#[async_trait]
impl ObjectStore for Disk {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let done = self.objects.put_opts(location, payload, opts).await?;
        self.completed(location);
        Ok(done)
    }

    async fn put_multipart_opts(&self, location: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        let mut state = self.state.lock();
        state.next += 1;
        let id = state.next;
        state.uploads.insert(id, (location.clone(), Vec::new()));
        Ok(Box::new(Upload { disk: self.clone(), id }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.objects.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.objects.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.objects.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.objects.copy_opts(from, to, options).await
    }
}
