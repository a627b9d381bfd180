//! Value hashes of checkpoint tensors, recomputed while their payloads pass by.
//!
//! A payload whose elements lie in order is hashed piece by piece in constant memory, whatever its size. Another has at most
//! [`pfr_schema::checkpoint::GATHER_BYTES`], as the format has it, and is held whole; one such at a time in the store.

use crate::error::{Error, Result};
use bytes::Bytes;
use pfr_schema::checkpoint::{Checkpoint, Proof, Tensor, ValueHasher};
use pfr_schema::codec::Decoder;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, FormatError};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Tensors by the payload that holds them, each with its checkpoint.
#[derive(Default)]
pub(super) struct Values {
    by_payload: HashMap<Digest, Arc<Vec<(Digest, Tensor)>>>,
    pub computed: u64,
    pub attested: u64,
}

impl Values {
    pub(super) fn add(&mut self, checkpoint: Digest, parsed: Checkpoint) {
        for tensor in parsed.tensors {
            if tensor.layout.is_opaque() {
                // Its payload is verified as every blob is, and there is nothing else to it.
                self.attested += 1;
                continue;
            }
            let tensors = self.by_payload.entry(tensor.payload_hash).or_default();
            Arc::make_mut(tensors).push((checkpoint, tensor));
        }
    }

    /// Checks what lies in a payload that was read whole.
    pub(super) async fn check(&mut self, payload: &Digest, raw: impl FnOnce() -> Result<Bytes>) -> Result<()> {
        let Some(tensors) = self.by_payload.get(payload).cloned() else { return Ok(()) };
        self.computed += tensors.len() as u64;
        let raw = raw()?;
        blocking(move || tensors.iter().try_for_each(|(checkpoint, tensor)| check(checkpoint, tensor, &raw))).await
    }

    /// Begins to check what lies in a payload that comes in pieces; none if nothing does.
    pub(super) async fn begin(&self, header: &Header, gathering: &Arc<Semaphore>) -> Result<Option<Box<Passing>>> {
        let Some(tensors) = self.by_payload.get(&header.digest).cloned() else { return Ok(None) };
        let hashers = tensors
            .iter()
            .map(|(checkpoint, tensor)| tensor.value_hasher().map_err(|error| wrong(checkpoint, error)))
            .collect::<Result<Vec<_>>>()?;
        let permit = if hashers.iter().any(Option::is_none) {
            Some(Arc::clone(gathering).acquire_owned().await.map_err(|e| Error::Internal(e.to_string()))?)
        } else {
            None
        };
        let decoder = Decoder::new(header.codec, header.raw_len)?;
        Ok(Some(Box::new(Passing { tensors, hashers, decoder, whole: Vec::new(), permit })))
    }
}

/// A payload on its way.
pub(super) struct Passing {
    tensors: Arc<Vec<(Digest, Tensor)>>,
    /// For each tensor; none if its payload must be whole.
    hashers: Vec<Option<ValueHasher>>,
    decoder: Decoder,
    whole: Vec<u8>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Passing {
    /// The next piece, as it is stored.
    pub(super) async fn piece(mut self: Box<Self>, piece: Bytes) -> Result<Box<Self>> {
        blocking(move || {
            let Self { tensors, hashers, decoder, whole, permit } = &mut *self;
            let mut failed = None;
            decoder.update(&piece, &mut |raw| {
                if permit.is_some() {
                    whole.extend_from_slice(raw);
                }
                for ((checkpoint, _), hasher) in tensors.iter().zip(hashers.iter_mut()) {
                    if let Some(Err(error)) = hasher.as_mut().map(|hasher| hasher.update(raw)) {
                        failed.get_or_insert_with(|| wrong(checkpoint, error));
                    }
                }
            })?;
            failed.map_or(Ok(self), Err)
        })
        .await
    }

    /// The payload has passed: how many values were computed.
    pub(super) async fn finish(self: Box<Self>) -> Result<u64> {
        blocking(move || {
            for ((checkpoint, tensor), hasher) in self.tensors.iter().zip(self.hashers) {
                match hasher {
                    Some(hasher) => {
                        hasher.finish().and_then(|found| tensor.check_value_hash(found)).map_err(|error| wrong(checkpoint, error))?
                    }
                    None => check(checkpoint, tensor, &self.whole)?,
                }
            }
            Ok(self.tensors.len() as u64)
        })
        .await
    }
}

fn check(checkpoint: &Digest, tensor: &Tensor, raw: &[u8]) -> Result<()> {
    let proof = tensor.check_value(raw).map_err(|error| wrong(checkpoint, error))?;
    debug_assert_eq!(proof, Proof::Computed, "opaque tensors are not looked at");
    Ok(())
}

fn wrong(checkpoint: &Digest, source: FormatError) -> Error {
    Error::WrongValue { checkpoint: *checkpoint, source }
}

/// Off the async threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Error::Internal(e.to_string()))?
}
