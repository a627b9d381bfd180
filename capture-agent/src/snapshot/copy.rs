//! Copies pages into the local store: hash in place, ask the store which are missing, copy and
//! encode those, hash again.

use super::capture::canonicalise;
use super::inventory::Inventory;
use super::states::describe;
use crate::Agent;
use crate::copies::SharedPin;
use crate::error::{Error, Result, blocking};
use crate::memory::{MemoryError, Page};
use bytes::Bytes;
use pfr_client::encoding::{Encoder, Encoding};
use pfr_schema::checkpoint::Dtype;
use pfr_schema::codec::Codec;
use pfr_schema::frame::{Header, end_mark};
use pfr_schema::{Algorithm, Digest, FormatError, Kind, Limits, checkpoint};
use pfr_store::PushSession;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use tokio::sync::mpsc;

/// Pieces of frames between the memory and the store. A frame has three, so at most six payloads
/// are in them and in the one that is being sent. Encoded payloads lie outside of the ring, and so
/// does the encoder's buffer: 112 MiB for pages of 16 MiB, the largest that are encoded.
const PIECES: usize = 16;

/// What was copied.
#[derive(Debug)]
pub(super) struct Copied {
    /// The digest of each source.
    pub digests: Vec<Digest>,
    /// The state tensors, by source.
    pub tensors: BTreeMap<usize, checkpoint::Tensor>,
    /// Raw bytes that left the engine's memory.
    pub bytes_moved: u64,
    /// Raw bytes that the store did not have.
    pub bytes_new: u64,
    /// Of these, bytes of state tensors.
    pub bytes_state: u64,
    /// Bytes in which the store holds what is new.
    pub bytes_stored: u64,
}

/// One blob to be copied.
#[derive(Clone, Debug)]
struct Item {
    source: usize,
    digest: Digest,
    page: Page,
    elements: Option<Dtype>,
    /// Whether it goes into the store; state tensors are read in any case, for the digest of their
    /// value.
    lacking: bool,
}

/// Hashes all sources and copies those that the store does not have.
pub(super) async fn copy(agent: &Agent, session: &PushSession, inventory: &Arc<Inventory>, pin: SharedPin) -> Result<Copied> {
    let (hashing, pinned) = (Arc::clone(inventory), pin.clone());
    let digests = blocking("hashing", move || {
        // Bound to a name, so that the closure owns it.
        let _pinned = pinned;
        hash(&hashing)
    });
    let digests = digests.await?;

    let wanted = digests.iter().map(|digest| (*digest, Kind::Blob)).collect();
    let missing = agent.store().missing(&session.id, wanted).await?;
    // A blob that stands in two places is copied once.
    let mut once = HashSet::new();
    let lacking: HashSet<usize> = missing.into_iter().filter(|at| once.insert(digests[*at])).collect();
    let size = |at: &usize| inventory.sources[*at].page.bytes();
    let states: HashSet<usize> = inventory.tensors.iter().map(|tensor| tensor.source).collect();
    let mut copied = Copied {
        bytes_new: lacking.iter().map(size).sum(),
        bytes_state: lacking.intersection(&states).map(size).sum(),
        bytes_moved: lacking.union(&states).map(size).sum(),
        bytes_stored: 0,
        tensors: BTreeMap::new(),
        digests,
    };
    let mut granted = agent.room().take(copied.bytes_new).await?;

    let encoding = Encoding::new(agent.config().compression, agent.store().options().codecs);
    for memory in 0..inventory.memories.len() {
        let here =
            inventory.sources.iter().enumerate().filter(|(at, s)| s.memory == memory && (lacking.contains(at) || states.contains(at)));
        let items = here.map(|(source, s)| Item {
            source,
            digest: copied.digests[source],
            page: s.page.clone(),
            elements: s.elements,
            lacking: lacking.contains(&source),
        });
        for batch in batches(items.collect(), agent.engines().ring().total() / 2) {
            let new: u64 = batch.iter().filter(|item| item.lacking).map(|item| item.page.bytes()).sum();
            let _turn = agent.engines().turn(&*inventory.memories[memory]).await;
            let Read { tensors, stored } = copy_batch(agent, session, (inventory, &pin), memory, batch, &encoding).await?;
            granted.written(new);
            copied.tensors.extend(tensors);
            copied.bytes_stored += stored;
        }
    }
    metrics::counter!("pf_agent_snapshot_bytes_total", "bytes" => "left-raw").increment(encoding.left_raw());
    Ok(copied)
}

fn hash(inventory: &Inventory) -> std::result::Result<Vec<Digest>, MemoryError> {
    canonicalise(inventory)?;
    let mut digests = vec![None; inventory.sources.len()];
    for (number, memory) in inventory.memories.iter().enumerate() {
        let here: Vec<usize> = (0..inventory.sources.len()).filter(|at| inventory.sources[*at].memory == number).collect();
        let pages: Vec<Page> = here.iter().map(|at| inventory.sources[*at].page.clone()).collect();
        if pages.is_empty() {
            continue;
        }
        let found = memory.hash(Algorithm::Sha256, &pages)?;
        here.into_iter().zip(found).for_each(|(at, digest)| digests[at] = Some(digest));
    }
    let unhashed = || MemoryError::Unreachable { what: "hash", reason: "fewer digests than pages".into() };
    digests.into_iter().map(|digest| digest.ok_or_else(unhashed)).collect()
}

/// Cuts a list so that each piece fits into the ring: the store takes pages in groups, and releases
/// none before the group is complete.
fn batches(items: Vec<Item>, most: u64) -> Vec<Vec<Item>> {
    let mut batches: Vec<Vec<Item>> = Vec::new();
    let mut bytes = 0;
    for item in items {
        let more = item.page.bytes();
        match batches.last_mut() {
            Some(batch) if bytes + more <= most => {
                bytes += more;
                batch.push(item);
            }
            _ => {
                bytes = more;
                batches.push(vec![item]);
            }
        }
    }
    batches
}

async fn copy_batch(
    agent: &Agent,
    session: &PushSession,
    (inventory, pin): (&Arc<Inventory>, &SharedPin),
    memory: usize,
    batch: Vec<Item>,
    encoding: &Encoding,
) -> Result<Read> {
    let by_digest: HashMap<Digest, usize> = batch.iter().map(|item| (item.digest, item.source)).collect();
    let (pieces, mut stream) = mpsc::channel(PIECES);
    let (reading, pinned, limits) = (Arc::clone(inventory), pin.clone(), agent.store().options().limits.clone());
    let encoder = encoding.encoder();
    let reader = blocking("copying", move || {
        let _pinned = pinned;
        read(&reading, memory, &batch, &limits, encoder, &pieces)
    });
    let ingested = agent.store().ingest(&session.id, futures::stream::poll_fn(|context| stream.poll_recv(context))).await;
    // Ends the reader if the store stopped.
    drop(stream);
    let read = reader.await;
    let torn =
        |digest: &Digest| Error::TornCopy { what: by_digest.get(digest).map_or_else(|| digest.to_string(), |at| inventory.describe(*at)) };
    match (read, ingested) {
        (Err(Error::Memory(MemoryError::Stopped)), Ok(_)) => Err(Error::Internal("the store stopped listening".into())),
        (Err(Error::Memory(MemoryError::Stopped)) | Ok(_), Err(error)) => Err(match &error {
            pfr_store::Error::Frame { digest, source: FormatError::DigestMismatch { .. }, .. } => torn(digest),
            _ => error.into(),
        }),
        (Err(error), _) => Err(error),
        (Ok(read), Ok(_)) => Ok(read),
    }
}

/// What became of a batch.
#[derive(Default)]
struct Read {
    tensors: BTreeMap<usize, checkpoint::Tensor>,
    /// Bytes of payloads that went into the store.
    stored: u64,
}

/// Reads a batch, encodes it, and sends it as a stream of frames. Blocks.
fn read(
    inventory: &Inventory,
    memory: usize,
    batch: &[Item],
    limits: &Limits,
    mut encoder: Encoder,
    pieces: &mpsc::Sender<std::result::Result<Bytes, String>>,
) -> Result<Read> {
    let pages: Vec<Page> = batch.iter().map(|item| item.page.clone()).collect();
    let (mut done, mut frames, mut failed) = (Read::default(), 0, None);
    let send = |piece: Bytes| pieces.blocking_send(Ok(piece)).is_ok();
    let mut deliver = |at: usize, payload: Bytes| {
        let item = &batch[at];
        if let Some(tensor) = inventory.tensors.iter().find(|tensor| tensor.source == item.source) {
            match describe(&tensor.state, &payload, limits) {
                Ok(tensor) if tensor.payload_hash == item.digest => drop(done.tensors.insert(item.source, tensor)),
                Ok(_) => failed = Some(Error::TornCopy { what: inventory.describe(item.source) }),
                Err(error) => failed = Some(error),
            }
            if failed.is_some() {
                return false;
            }
        }
        if !item.lacking {
            return true;
        }
        frames += 1;
        let raw_len = payload.len() as u64;
        // The encoded copy takes no room in the ring.
        let encoded = encoder.encode(&payload, item.elements).map(|(codec, encoded)| (codec, Bytes::from(encoded.into_owned())));
        let (codec, payload) = encoded.unwrap_or((Codec::Raw, payload));
        let header = Header { codec, kind: Kind::Blob, digest: item.digest, raw_len, stored_len: payload.len() as u64 };
        done.stored += header.stored_len;
        let checksum = Bytes::copy_from_slice(&crc32c::crc32c(&payload).to_le_bytes());
        encoder.wait(|| send(header.to_bytes().into()) && send(payload) && send(checksum))
    };
    let read = inventory.memories[memory].read(&pages, &mut deliver);
    if let Some(error) = failed {
        return Err(error);
    }
    if let Err(error) = read {
        // Without the error the store would report a cut stream.
        drop(pieces.blocking_send(Err(error.to_string())));
        return Err(error.into());
    }
    if !send(end_mark(frames).into()) {
        return Err(MemoryError::Stopped.into());
    }
    Ok(done)
}
