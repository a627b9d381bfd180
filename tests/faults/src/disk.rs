//! A storage that loses objects that are not durable, or parts of them, when the power fails.
//!
//! Complete objects are durable, as `object_store`'s local disk with fsync and every bucket
//! promise. Uploads that are not completed are volatile. A dishonest disk acknowledges objects
//! before they are durable: the bug of a missing fsync.

use async_trait::async_trait;
use bytes::Bytes;
use futures::{FutureExt as _, TryStreamExt as _};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload, Result};
use parking_lot::Mutex;
use pfr_testkit::storage::{Call, Hooks, Moment, hooked};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The storage itself. Cheap to clone; all clones are one disk.
#[derive(Clone, Debug)]
pub struct Disk {
    objects: Arc<InMemory>,
    state: Arc<Mutex<State>>,
    storage: Arc<dyn ObjectStore>,
}

#[derive(Debug)]
struct State {
    random: StdRng,
    /// Uploads that were begun and not completed.
    uploads: BTreeMap<u64, (Path, Vec<u8>)>,
    /// Complete objects that a dishonest disk has not made durable.
    volatile: Vec<Path>,
    /// Whether it acknowledges objects before they are durable.
    dishonest: bool,
}

impl Disk {
    /// An empty disk. A dishonest one acknowledges objects before they are durable.
    #[must_use]
    pub fn new(seed: u64, dishonest: bool) -> Self {
        let state = State { random: StdRng::seed_from_u64(seed), uploads: BTreeMap::new(), volatile: Vec::new(), dishonest };
        let (objects, state) = (Arc::new(InMemory::new()), Arc::new(Mutex::new(state)));
        let storage = hooked(Arc::clone(&objects) as _, Arc::new(Follow(Arc::clone(&state))));
        Self { objects, state, storage }
    }

    /// The disk as a storage.
    #[must_use]
    pub fn storage(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.storage)
    }

    /// The power fails. Uploads in progress vanish, leave a prefix under their key, or stay
    /// complete. Objects that are acknowledged and not durable may vanish.
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

    /// Puts bytes under a key, like a torn write or bit rot.
    pub fn plant(&self, path: &Path, bytes: Vec<u8>) {
        let _ = self.objects.put(path, PutPayload::from(bytes)).now_or_never();
    }

    /// The bytes of an object.
    #[must_use]
    pub fn bytes(&self, path: &Path) -> Option<Bytes> {
        self.objects.get(path).now_or_never()?.ok()?.bytes().now_or_never()?.ok()
    }

    /// Every key, with the length of its object.
    #[must_use]
    pub fn keys(&self) -> BTreeMap<String, u64> {
        let all: Vec<ObjectMeta> = self.objects.list(None).try_collect().now_or_never().and_then(Result::ok).unwrap_or_default();
        all.into_iter().map(|meta| (meta.location.to_string(), meta.size)).collect()
    }
}

/// Keeps track of what is not durable yet.
#[derive(Debug)]
struct Follow(Arc<Mutex<State>>);

#[async_trait]
impl Hooks for Follow {
    async fn before(&self, call: &Call) -> Result<Option<Error>> {
        let mut state = self.0.lock();
        match call.moment {
            Moment::Open => drop(state.uploads.insert(call.upload, (call.location.clone(), Vec::new()))),
            Moment::Part => {
                if let Some((_, bytes)) = state.uploads.get_mut(&call.upload) {
                    call.bytes.iter().for_each(|piece| bytes.extend_from_slice(piece));
                }
            }
            Moment::Complete if state.uploads.remove(&call.upload).is_none() => {
                return Err(Error::Generic { store: "disk", source: "the upload is gone".into() });
            }
            _ => {}
        }
        Ok(None)
    }

    async fn after(&self, call: &Call, succeeded: bool) -> Result<()> {
        let mut state = self.0.lock();
        if succeeded && state.dishonest && matches!(call.moment, Moment::Put | Moment::Complete) {
            state.volatile.push(call.location.clone());
        }
        Ok(())
    }

    /// The upload of a process that ended is never completed.
    fn ended(&self, upload: u64) {
        self.0.lock().uploads.remove(&upload);
    }
}
