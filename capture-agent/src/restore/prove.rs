//! Verification before an allocation: payloads of state tensors must match their digests and value
//! hashes.

use super::blobs::Blobs;
use super::plan::{Plan, Stated};
use crate::error::{Result, blocking};
use pfr_schema::Digest;
use pfr_schema::checkpoint::Proof;
use pfr_store::Store;

/// How the values of state tensors were verified.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Values {
    pub computed: u64,
    pub attested: u64,
}

/// Verifies state tensors and pages.
pub(super) async fn all(store: &Store, plan: &Plan) -> Result<Values> {
    let values = states(store, plan).await?;
    pages(store, plan).await?;
    Ok(values)
}

/// Verifies the state tensors one after another. Memory holds one at a time.
pub(super) async fn states(store: &Store, plan: &Plan) -> Result<Values> {
    let mut values = Values::default();
    let mut blobs = Blobs::open(store, plan.states.iter().map(|stated| stated.tensor.payload_hash).collect()).await?;
    for Stated { tensor, .. } in &plan.states {
        let (payload, tensor) = (blobs.next(&tensor.payload_hash).await?, tensor.clone());
        let check = move || tensor.check_payload(&payload).and_then(|()| tensor.check_value(&payload));
        match blocking("proving", check).await? {
            Proof::Computed => values.computed += 1,
            Proof::Attested => values.attested += 1,
        }
    }
    Ok(values)
}

/// Reads every page once, so that damage in the store is found before an engine uses it.
async fn pages(store: &Store, plan: &Plan) -> Result<()> {
    let mut digests: Vec<Digest> = plan.paged.iter().flat_map(|paged| paged.digests.iter().copied()).collect();
    let mut seen = std::collections::HashSet::new();
    digests.retain(|digest| seen.insert(*digest));
    let mut blobs = Blobs::open(store, digests.clone()).await?;
    for digest in &digests {
        blobs.next(digest).await?;
    }
    Ok(())
}
