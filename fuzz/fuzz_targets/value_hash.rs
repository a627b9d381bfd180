#![no_main]
//! Any layout over any payload is refused or hashed without a read outside of it, and the same
//! whole as in pieces.

use libfuzzer_sys::fuzz_target;
use pfr_schema::Limits;
use pfr_schema::checkpoint::{Dtype, Layout, Proof, Tensor};

fuzz_target!(|input: (u8, u8, Vec<(u64, i64)>, u64, u8, &[u8])| {
    let (logical, storage, dimensions, offset, piece, payload) = input;
    let dtype = |number: u8| Dtype::ALL[usize::from(number) % Dtype::ALL.len()];
    let (shape, strides): (Vec<u64>, Vec<i64>) = dimensions.into_iter().unzip();
    let elements = shape.iter().fold(1_u64, |product, dimension| product.saturating_mul(*dimension));
    if elements > 1 << 16 && !shape.contains(&0) {
        return;
    }
    let layout = Layout { tag: "fuzz".into(), strides: Some(strides), offset: Some(offset) };
    let (logical, storage, limits) = (dtype(logical), dtype(storage), Limits::default());
    let Ok(tensor) = Tensor::describe("t".into(), "rng".into(), None, shape, logical, storage, layout, payload, &limits) else { return };
    assert_eq!(tensor.check_value(payload), Ok(Proof::Computed));
    if let Some(mut hasher) = tensor.value_hasher().expect("it was described") {
        payload.chunks(usize::from(piece) + 1).for_each(|piece| hasher.update(piece).expect("it was hashed before"));
        assert_eq!(hasher.finish(), Ok(tensor.value_hash));
    }
});
