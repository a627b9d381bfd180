//! Verification before an allocation: payloads of state tensors must match their digests and value
//! hashes, and the engine's types must hold their values.

use super::cut;
use super::plan::{Origin, Plan, Stated};
use super::source::Source;
use crate::error::{Error, Result, blocking};
use pfr_schema::checkpoint::{Mirror, Proof};
use pfr_schema::{Digest, ErrorCode, FormatError};

/// How the values of state tensors were verified.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Values {
    pub computed: u64,
    pub attested: u64,
}

impl Values {
    /// Counts one.
    pub fn note(&mut self, proof: Proof) {
        match proof {
            Proof::Computed => self.computed += 1,
            Proof::Attested => self.attested += 1,
        }
    }
}

/// Verifies state tensors and pages.
pub(super) async fn all(source: &Source, plan: &Plan) -> Result<Values> {
    let values = states(source, plan).await?;
    pages(source, plan).await?;
    Ok(values)
}

/// Verifies the state tensors one after another. Memory holds one at a time, and its mirror or what
/// is put together from it.
pub(super) async fn states(source: &Source, plan: &Plan) -> Result<Values> {
    let mut values = Values::default();
    let mut blobs = source.blobs(plan.states.iter().flat_map(Stated::blobs).collect()).await?;
    for Stated { rank, origin, .. } in &plan.states {
        let (tensor, convert) = match origin {
            Origin::Tensor { tensor, convert } => (tensor, convert),
            Origin::Cut { cut, replicas } => {
                let Mirror { tensor, bytes } = cut::state(cut, &mut blobs).await?;
                if let Some(replicas) = replicas
                    && let Some(other) = cut::other_replica(replicas, bytes.into(), &mut blobs).await?
                {
                    let what = format!("state {:?} for rank {rank}: replicas of one value", tensor.name);
                    return Err(Error::mismatch(ErrorCode::RankMismatch, what, tensor.value_hash, format!("others in {other}")));
                }
                values.computed += 1;
                continue;
            }
        };
        let (payload, tensor, convert) = (blobs.next(&tensor.payload_hash).await?, tensor.clone(), convert.clone());
        let check = move || {
            tensor.check_payload(&payload)?;
            let proof = tensor.check_value(&payload)?;
            // Finds values that the engine's type does not hold. The mirror is made again when it
            // is written: keeping all of them would take as much memory as the state.
            convert.map_or(Ok(()), |form| tensor.mirror(&payload, &form).map(drop))?;
            Ok::<_, FormatError>(proof)
        };
        values.note(blocking("proving", check).await?);
    }
    Ok(values)
}

/// Reads every page once, so that damage in the store is found before an engine uses it.
async fn pages(source: &Source, plan: &Plan) -> Result<()> {
    let mut digests: Vec<Digest> = plan.paged.iter().flat_map(|paged| paged.digests.iter().copied()).collect();
    let mut seen = std::collections::HashSet::new();
    digests.retain(|digest| seen.insert(*digest));
    let mut blobs = source.blobs(digests.clone()).await?;
    for digest in &digests {
        blobs.next(digest).await?;
    }
    Ok(())
}
