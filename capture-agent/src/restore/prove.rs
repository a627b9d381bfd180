//! Before anything is allocated: payloads of state tensors hash to their names, and mean what the checkpoint says.

use super::blobs::Blobs;
use super::plan::{Plan, Stated};
use crate::error::{Error, Result};
use pfr_schema::Digest;
use pfr_schema::checkpoint::Proof;
use pfr_store::Store;

/// How values of state tensors were proven.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Values {
    pub computed: u64,
    pub attested: u64,
}

/// Proves state tensors and pages.
pub(super) async fn all(store: &Store, plan: &Plan) -> Result<Values> {
    let values = states(store, plan).await?;
    pages(store, plan).await?;
    Ok(values)
}

/// Proves every state tensor, one after another; none is kept.
pub(super) async fn states(store: &Store, plan: &Plan) -> Result<Values> {
    let mut values = Values::default();
    let mut blobs = Blobs::open(store, plan.states.iter().map(|stated| stated.tensor.payload_hash).collect()).await?;
    for Stated { tensor, .. } in &plan.states {
        let (payload, tensor) = (blobs.next(&tensor.payload_hash).await?, tensor.clone());
        let check = move || tensor.check_payload(&payload).and_then(|()| tensor.check_value(&payload));
        match tokio::task::spawn_blocking(check).await.map_err(|panic| Error::Internal(format!("proving: {panic}")))?? {
            Proof::Computed => values.computed += 1,
            Proof::Attested => values.attested += 1,
        }
    }
    Ok(values)
}

/// Reads every page once, so that a damaged store is found before an engine relies on it.
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
