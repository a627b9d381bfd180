//! Reads a snapshot from the registry into memory that is used again, as an agent restores one
//! without its store: the library's [`Passage`] asks for the blobs and verifies each. Only the
//! memory at its end is this program's. Each blob is copied there, as into that of an engine.

use crate::Result;
use crate::contender::http;
use crate::meter::Reported;
use crate::workload::Blob;
use pfr_client::{Flight, Passage, Remote, RemoteOptions, Way, look_up};
use pfr_schema::{Algorithm, Digest, Reference};
use pfr_store::{Options, Store};
use std::path::Path;
use tokio::runtime::Runtime;

/// Bytes in flight: the default of an agent's `restore-bytes`.
const IN_FLIGHT: u64 = 256 << 20;

/// Bytes of the memory that is used again.
const MEMORY: usize = 1 << 20;

/// A host with an empty store, which stays empty.
pub struct Host {
    store: Store,
    flight: Flight,
    memory: Vec<u8>,
    // Dropped last: the others may have tasks in it.
    runtime: Runtime,
}

impl Host {
    /// A host with its store in the directory `dir`.
    pub fn open(dir: &Path) -> Result<Self> {
        let runtime = http::runtime()?;
        let store = runtime.block_on(Store::open(dir, Options::default()))?;
        Ok(Self { store, flight: Flight::new(IN_FLIGHT), memory: vec![0; MEMORY], runtime })
    }

    /// Reads `blobs`, those of the snapshot `reference` in the registry at `url`, in their order.
    ///
    /// # Errors
    /// A blob that the snapshot does not list, that is not what its digest says, or that is larger
    /// than the memory.
    pub fn get(&mut self, url: &str, reference: &str, blobs: &[Blob]) -> Result<Reported> {
        let digest = |blob: &Blob| Digest::from_bytes(Algorithm::Sha256, &blob.digest);
        let digests = blobs.iter().map(digest).collect::<std::result::Result<Vec<Digest>, _>>()?;
        let reference: Reference = reference.parse()?;
        let Self { store, flight, memory, runtime } = self;
        runtime.block_on(async {
            let (remote, repository) = (Remote::new(url, RemoteOptions::default())?, &reference.repository);
            let found = look_up(&remote, repository, &reference.selector_or_latest()).await?;
            let passage = Passage::open(&remote, repository, &found, store, Way::Pass, flight).await?;
            let (mut arrivals, mut at) = (passage.arrivals(&digests), 0);
            for digest in &digests {
                let blob = arrivals.next(digest).await?;
                if memory.len() - at < blob.len() {
                    at = 0;
                }
                let place = memory.get_mut(at..at + blob.len()).ok_or("a blob is larger than the memory")?;
                place.copy_from_slice(&blob);
                at += blob.len();
            }
            drop(arrivals);
            passage.close().await;
            Ok(Reported { bytes_moved: Some(passage.bytes_received()), round_trips: Some(remote.round_trips()), client_memory: None })
        })
    }
}
