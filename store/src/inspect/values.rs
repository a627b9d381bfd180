//! Value hashes of checkpoint tensors, recomputed while their payloads are read.
//!
//! A payload whose elements lie in order is hashed piece by piece, in constant memory. Any other
//! payload has to be in memory as a whole. The format limits it to
//! [`pfr_schema::checkpoint::GATHER_BYTES`], and a store holds one of them at a time.

use crate::error::{Error, Result};
use bytes::Bytes;
use pfr_schema::checkpoint::{Checkpoint, Proof, Tensor, ValueHasher};
use pfr_schema::codec::Decoder;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, FormatError};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Values may have this many times the bytes of their payloads, and [`VALUE_ALLOWANCE`] besides.
/// Real tensors have at most 8 times: an `f64` that is stored in one byte.
const VALUE_RATIO: u64 = 16;
/// Further bytes that values may have.
const VALUE_ALLOWANCE: u64 = 64 << 20;
/// Bytes of a payload hashed before the next check that the caller is still connected. Its values
/// have at most eight times as many: a MiB.
const STEP: usize = 128 << 10;

/// Work on blocking threads for one caller. It ends soon after the caller has left. Until then it
/// occupies the caller's place among the verifications that run at once.
#[derive(Clone, Default)]
pub(super) struct Work(Arc<Shared>);

#[derive(Default)]
struct Shared {
    left: AtomicBool,
    /// The place among the verifications that run at once. The last blocking task gives it back.
    _place: Option<OwnedSemaphorePermit>,
}

impl Work {
    pub(super) fn new(place: Option<OwnedSemaphorePermit>) -> Self {
        Self(Arc::new(Shared { left: AtomicBool::new(false), _place: place }))
    }

    fn go_on(&self) -> bool {
        !self.0.left.load(Ordering::Relaxed)
    }

    /// Runs `work` off the async threads. It keeps the place even after the caller has left.
    async fn run<T: Send + 'static>(&self, work: impl FnOnce(&Self) -> Result<T> + Send + 'static) -> Result<T> {
        let this = self.clone();
        pfr_service::task::spawn_blocking(move || work(&this)).await?
    }
}

/// Held by the caller. Dropping it tells the work that the caller has left.
pub(super) struct Caller(pub(super) Work);

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.0.left.store(true, Ordering::Relaxed);
    }
}

/// The caller has left, so this error is never read.
fn stopped() -> Error {
    Error::Internal("a verification was stopped".into())
}

/// Tensors by the payload that holds them, each with its checkpoint.
pub(super) struct Values {
    work: Work,
    by_payload: HashMap<Digest, Arc<Vec<(Digest, Tensor)>>>,
    /// Bytes of all values.
    values: u64,
    /// Bytes of the payloads, each counted once.
    payloads: u64,
    pub computed: u64,
    pub attested: u64,
}

impl Values {
    pub(super) fn new(work: Work) -> Self {
        Self { work, by_payload: HashMap::new(), values: 0, payloads: 0, computed: 0, attested: 0 }
    }

    /// Adds the tensors of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Unprovable`] if the values of all tensors so far have many more bytes than their
    /// payloads.
    pub(super) fn add(&mut self, checkpoint: Digest, parsed: Checkpoint) -> Result<()> {
        for tensor in parsed.tensors {
            if tensor.layout.is_opaque() {
                // Its payload is verified like every blob, and it has no other value.
                self.attested += 1;
                continue;
            }
            self.values = self.values.saturating_add(tensor.value_bytes());
            let tensors = self.by_payload.entry(tensor.payload_hash).or_default();
            if tensors.is_empty() {
                self.payloads = self.payloads.saturating_add(tensor.payload_bytes);
            }
            Arc::make_mut(tensors).push((checkpoint, tensor));
        }
        let limit = self.payloads.saturating_mul(VALUE_RATIO).saturating_add(VALUE_ALLOWANCE);
        if self.values > limit { Err(Error::Unprovable { checkpoint, values: self.values, limit }) } else { Ok(()) }
    }

    /// Checks the tensors of a payload that is in memory as a whole.
    pub(super) async fn check(&mut self, payload: &Digest, raw: impl FnOnce() -> Result<Bytes>) -> Result<()> {
        let Some(tensors) = self.by_payload.get(payload).cloned() else { return Ok(()) };
        self.computed += tensors.len() as u64;
        let raw = raw()?;
        self.work.run(move |work| tensors.iter().try_for_each(|(checkpoint, tensor)| check(work, checkpoint, tensor, &raw))).await
    }

    /// Begins to check the tensors of a payload that comes in pieces; `None` if it has none.
    pub(super) async fn begin(&self, header: &Header, gathering: &Arc<Semaphore>) -> Result<Option<Box<Passing>>> {
        let Some(tensors) = self.by_payload.get(&header.digest).cloned() else { return Ok(None) };
        let hashers = tensors
            .iter()
            .map(|(checkpoint, tensor)| tensor.value_hasher().map_err(|error| wrong(checkpoint, error)))
            .collect::<Result<Vec<_>>>()?;
        let permit = if hashers.iter().any(Option::is_none) { Some(Arc::clone(gathering).acquire_owned().await?) } else { None };
        let decoder = Decoder::new(header.codec, header.raw_len)?;
        Ok(Some(Box::new(Passing { work: self.work.clone(), tensors, hashers, decoder, whole: Vec::new(), permit })))
    }
}

/// A payload that is being read.
pub(super) struct Passing {
    work: Work,
    tensors: Arc<Vec<(Digest, Tensor)>>,
    /// For each tensor; `None` if its payload must be in memory as a whole.
    hashers: Vec<Option<ValueHasher>>,
    decoder: Decoder,
    whole: Vec<u8>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Passing {
    /// The next piece, as it is stored.
    pub(super) async fn piece(mut self: Box<Self>, piece: Bytes) -> Result<Box<Self>> {
        let work = self.work.clone();
        work.run(move |work| {
            let Self { tensors, hashers, decoder, whole, permit, .. } = &mut *self;
            let mut failed = None;
            decoder.update_while(&piece, &mut |raw| {
                if permit.is_some() {
                    whole.extend_from_slice(raw);
                }
                // One payload may be that of many tensors.
                for ((checkpoint, _), hasher) in tensors.iter().zip(hashers.iter_mut()) {
                    for step in raw.chunks(STEP).take_while(|_| work.go_on()) {
                        if let Some(Err(error)) = hasher.as_mut().map(|hasher| hasher.update(step)) {
                            failed.get_or_insert_with(|| wrong(checkpoint, error));
                        }
                    }
                }
                work.go_on()
            })?;
            failed.map_or(Ok(self), Err)
        })
        .await
    }

    /// Ends the payload. Returns how many values were computed.
    pub(super) async fn finish(self: Box<Self>) -> Result<u64> {
        let work = self.work.clone();
        work.run(move |work| {
            for ((checkpoint, tensor), hasher) in self.tensors.iter().zip(self.hashers) {
                match hasher {
                    Some(hasher) => {
                        hasher.finish().and_then(|found| tensor.check_value_hash(found)).map_err(|error| wrong(checkpoint, error))?
                    }
                    None => check(work, checkpoint, tensor, &self.whole)?,
                }
            }
            Ok(self.tensors.len() as u64)
        })
        .await
    }
}

fn check(work: &Work, checkpoint: &Digest, tensor: &Tensor, raw: &[u8]) -> Result<()> {
    if !work.go_on() {
        return Err(stopped());
    }
    let proof = tensor.check_value_while(raw, &mut || work.go_on()).map_err(|error| wrong(checkpoint, error))?.ok_or_else(stopped)?;
    debug_assert_eq!(proof, Proof::Computed, "opaque tensors are not looked at");
    Ok(())
}

fn wrong(checkpoint: &Digest, source: FormatError) -> Error {
    Error::WrongValue { checkpoint: *checkpoint, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Limits;
    use pfr_testkit::snapshot::repeated;
    use std::time::Duration;

    /// Bytes of the payload of [`repeated`].
    const PAYLOAD: u64 = 16;

    /// Adds checkpoints with values of so many bytes, all of the same payload.
    fn added(values: &[u64]) -> Result<()> {
        let mut all = Values::new(Work::default());
        values.iter().try_for_each(|bytes| {
            let document = repeated(*bytes).swap_remove(1);
            all.add(document.digest, Checkpoint::parse(&document.bytes, &Limits::default()).unwrap())
        })
    }

    #[test]
    fn values_of_16_times_their_payloads_and_64_mib_are_computed_and_not_a_byte_more() {
        let most = 16 * PAYLOAD + (64 << 20);
        added(&[most]).unwrap();
        // All checkpoints of a snapshot together, and a payload that they share counts once.
        added(&[most - 7, 7]).unwrap();
        for too_many in [&[most + 1][..], &[most, 1], &[most - 7, 8]] {
            let error = added(too_many).unwrap_err();
            let Error::Unprovable { values, limit, .. } = error else { panic!("{error}") };
            assert_eq!((values, limit), (most + 1, most), "{too_many:?}");
        }
    }

    #[tokio::test]
    async fn a_verification_without_a_caller_stops_and_keeps_its_place_until_then() {
        let places = Arc::new(Semaphore::new(1));
        let caller = Caller(Work::new(Some(Arc::clone(&places).acquire_owned().await.unwrap())));
        let work = caller.0.clone();
        let (begin, begun) = tokio::sync::oneshot::channel();
        let running = pfr_service::task::spawn(async move {
            let hash = move |work: &Work| {
                begin.send(()).unwrap();
                while work.go_on() {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            };
            work.run(hash).await
        });
        begun.await.unwrap();
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        assert_eq!(places.available_permits(), 0, "the work goes on, so its place is taken");
        drop(caller);
        drop(tokio::time::timeout(Duration::from_secs(60), places.acquire()).await.expect("the work ends").unwrap());
    }
}
