//! State tensors as the checkpoint describes them.

use crate::error::Result;
use pfr_schema::Limits;
use pfr_schema::checkpoint::Tensor;
use pfr_schema::engine::State;

/// A tensor with the digests of its payload and of its value.
pub(super) fn describe(state: &State, payload: &[u8], limits: &Limits) -> Result<Tensor> {
    let dtype = |name: &str| name.parse::<pfr_schema::checkpoint::Dtype>();
    let (logical, storage) = (dtype(&state.logical_dtype)?, dtype(&state.storage_dtype)?);
    let (name, kind, shape, layout) = (state.name.clone(), state.kind.clone(), state.shape.clone(), state.layout.clone());
    Ok(Tensor::describe(name, kind, state.layer, shape, logical, storage, layout, payload, limits)?)
}
