//! Widening of stored tensor rows to f32.

use crate::error::EngineError;
use crate::gguf::{Tensor, TensorType};
use crate::math::from_f16;

/// Writes row `row` of `tensor` into `out` (`columns` elements).
///
/// # Errors
/// [`EngineError::Gguf`] if the row does not exist or `out` has another length.
pub fn row_into(tensor: &Tensor<'_>, row: usize, out: &mut [f32]) -> Result<(), EngineError> {
    let (elements, bytes) = tensor.kind.block();
    let length = tensor.columns / elements * bytes;
    let data = row.checked_mul(length).and_then(|start| tensor.data.get(start..start.checked_add(length)?));
    let (Some(data), true) = (data, out.len() == tensor.columns) else {
        let rows = tensor.rows;
        return Err(EngineError::Gguf(format!("row {row} of {rows}, {} of {} columns", out.len(), tensor.columns)));
    };
    let half = |b: &[u8]| from_f16(u16::from_le_bytes([b[0], b[1]]));
    match tensor.kind {
        TensorType::F32 => {
            for (out, four) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*four);
            }
        }
        TensorType::Q4_1 => {
            for (out, block) in out.as_chunks_mut::<32>().0.iter_mut().zip(data.as_chunks::<20>().0) {
                let (scale, minimum) = (half(&block[..2]), half(&block[2..4]));
                for (i, byte) in block[4..].iter().enumerate() {
                    out[i] = f32::from(byte & 15) * scale + minimum;
                    out[i + 16] = f32::from(byte >> 4) * scale + minimum;
                }
            }
        }
        TensorType::Q8_0 => {
            for (out, block) in out.as_chunks_mut::<32>().0.iter_mut().zip(data.as_chunks::<34>().0) {
                let scale = half(&block[..2]);
                for (out, byte) in out.iter_mut().zip(&block[2..]) {
                    *out = f32::from(i8::from_le_bytes([*byte])) * scale;
                }
            }
        }
    }
    Ok(())
}

/// A whole tensor as f32, for the small ones.
///
/// # Errors
/// [`EngineError::Gguf`] if the tensor is not `length` elements in one row.
pub fn vector(tensor: &Tensor<'_>, length: usize) -> Result<Vec<f32>, EngineError> {
    let mut out = vec![0.0; length];
    row_into(tensor, 0, &mut out)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn q4_1_is_nibble_times_scale_plus_minimum() {
        let mut data = vec![0x00, 0x3C, 0x00, 0xC0]; // scale 1, minimum −2
        data.extend((0..16).map(|i| (15 - i) << 4 | i));
        let mut out = [0.0; 32];
        row_into(&Tensor { kind: TensorType::Q4_1, columns: 32, rows: 1, data: &data }, 0, &mut out).unwrap();
        for i in 0..16 {
            assert_eq!(out[i], i as f32 - 2.0);
            assert_eq!(out[i + 16], (15 - i) as f32 - 2.0);
        }
    }

    #[test]
    fn q8_0_is_byte_times_scale() {
        let mut data = vec![0x00, 0x38]; // scale 0.5
        data.extend((0..32_i8).map(|i| (i - 16).to_le_bytes()[0]));
        let out = vector(&Tensor { kind: TensorType::Q8_0, columns: 32, rows: 1, data: &data }, 32).unwrap();
        assert!(out.iter().enumerate().all(|(i, x)| *x == (i as f32 - 16.0) / 2.0));
    }

    #[test]
    fn a_row_out_of_range_is_an_error() {
        let tensor = Tensor { kind: TensorType::F32, columns: 2, rows: 1, data: &[0; 8] };
        assert!(row_into(&tensor, 1, &mut [0.0; 2]).is_err());
        assert!(row_into(&tensor, usize::MAX, &mut [0.0; 2]).is_err());
        assert!(row_into(&tensor, 0, &mut [0.0; 3]).is_err());
    }
}
