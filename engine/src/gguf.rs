//! Reader of GGUF version 3: metadata and tensors of a model file.
//!
//! Every length and offset is checked against the bytes at hand, so a damaged file gives an error
//! and never a panic; memory stays within a small multiple of the file. Strings and tensors borrow
//! from the input.

use crate::error::EngineError;
use std::collections::BTreeMap;

const MAGIC: u32 = u32::from_le_bytes(*b"GGUF");
const MAX_DEPTH: u32 = 4;
const MAX_DIMS: u32 = 4;

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// UTF-8 text.
    Text(&'a str),
    /// Values of one type.
    Array(Vec<Value<'a>>),
}

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Plain 32-bit floats.
    F32,
    /// Blocks of 32: f16 scale, f16 minimum, 4 bits each; 20 bytes.
    Q4_1,
    /// Blocks of 32: f16 scale, 8 bits each; 34 bytes.
    Q8_0,
}

impl TensorType {
    /// Elements and bytes of a block.
    #[must_use]
    pub const fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::Q4_1 => (32, 20),
            Self::Q8_0 => (32, 34),
        }
    }
}

/// A tensor: `rows` rows of `columns` elements, row after row.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Storage of the elements.
    pub kind: TensorType,
    /// Elements of a row (GGUF's first dimension).
    pub columns: usize,
    /// Product of the other dimensions.
    pub rows: usize,
    /// The stored bytes.
    pub data: &'a [u8],
}

/// A parsed file.
#[derive(Debug)]
pub struct Gguf<'a> {
    metadata: BTreeMap<&'a str, Value<'a>>,
    tensors: BTreeMap<&'a str, Tensor<'a>>,
}

impl<'a> Gguf<'a> {
    /// Parses a whole file held in memory.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] on damage, [`EngineError::Unsupported`] on another version or tensor
    /// type.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, EngineError> {
        let mut reader = Reader { bytes, at: 0 };
        if reader.u32()? != MAGIC {
            return Err(EngineError::Gguf("the file does not begin with \"GGUF\"".into()));
        }
        let version = reader.u32()?;
        if version != 3 {
            return Err(EngineError::Unsupported(format!("GGUF version {version}, expected 3")));
        }
        let (tensor_count, pair_count) = (reader.u64()?, reader.u64()?);
        let mut metadata = BTreeMap::new();
        for _ in 0..pair_count {
            let key = reader.text()?;
            let kind = reader.u32()?;
            if metadata.insert(key, reader.value(kind, 0)?).is_some() {
                return Err(EngineError::Gguf(format!("metadata key {key:?} appears twice")));
            }
        }
        let mut infos = Vec::new();
        for _ in 0..tensor_count {
            infos.push(reader.tensor_info()?);
        }
        let alignment = match metadata.get("general.alignment") {
            None => 32,
            Some(Value::Unsigned(n)) if n.is_power_of_two() && *n <= 1 << 20 => *n as usize,
            Some(other) => return Err(EngineError::Gguf(format!("general.alignment is {other:?}"))),
        };
        let data = bytes.get(reader.at.next_multiple_of(alignment)..).unwrap_or_default();
        let mut tensors = BTreeMap::new();
        for info in infos {
            let tensor = info.locate(data)?;
            if tensors.insert(info.name, tensor).is_some() {
                return Err(EngineError::Gguf(format!("tensor {:?} appears twice", info.name)));
            }
        }
        Ok(Self { metadata, tensors })
    }

    /// A tensor by name.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] if the file has none of that name.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'a>, EngineError> {
        self.tensors.get(name).copied().ok_or_else(|| EngineError::Gguf(format!("there is no tensor {name:?}")))
    }

    fn get(&self, key: &str) -> Result<&Value<'a>, EngineError> {
        self.metadata.get(key).ok_or_else(|| EngineError::Gguf(format!("there is no metadata {key:?}")))
    }

    /// A metadata integer.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] if it is missing, negative or something else.
    pub fn integer(&self, key: &str) -> Result<usize, EngineError> {
        let number = match self.get(key)? {
            Value::Unsigned(n) => usize::try_from(*n).ok(),
            Value::Signed(n) => usize::try_from(*n).ok(),
            _ => None,
        };
        number.ok_or_else(|| wrong_type(key, "a non-negative integer"))
    }

    /// A metadata number.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] if it is missing or not a float.
    pub fn float(&self, key: &str) -> Result<f64, EngineError> {
        if let Value::Float(x) = self.get(key)? { Ok(*x) } else { Err(wrong_type(key, "a float")) }
    }

    /// A metadata text.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] if it is missing or not text.
    pub fn text(&self, key: &str) -> Result<&'a str, EngineError> {
        if let Value::Text(x) = self.get(key)? { Ok(x) } else { Err(wrong_type(key, "text")) }
    }

    /// A metadata array of texts.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] if it is missing or not such an array.
    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>, EngineError> {
        let texts = |values: &Vec<Value<'a>>| values.iter().map(|v| if let Value::Text(x) = v { Some(*x) } else { None }).collect();
        if let Value::Array(values) = self.get(key)? { texts(values) } else { None }.ok_or_else(|| wrong_type(key, "an array of texts"))
    }

    /// A metadata array of integers.
    ///
    /// # Errors
    /// [`EngineError::Gguf`] if it is missing or not such an array.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, EngineError> {
        let integer = |v: &Value<'a>| match v {
            Value::Signed(n) => Some(*n),
            Value::Unsigned(n) => i64::try_from(*n).ok(),
            _ => None,
        };
        let integers = |values: &Vec<Value<'a>>| values.iter().map(integer).collect();
        if let Value::Array(values) = self.get(key)? { integers(values) } else { None }
            .ok_or_else(|| wrong_type(key, "an array of integers"))
    }
}

fn wrong_type(key: &str, expected: &str) -> EngineError {
    EngineError::Gguf(format!("metadata {key:?} is not {expected}"))
}

struct TensorInfo<'a> {
    name: &'a str,
    dims: Vec<u64>,
    kind: TensorType,
    offset: u64,
}

impl<'a> TensorInfo<'a> {
    fn locate(&self, data: &'a [u8]) -> Result<Tensor<'a>, EngineError> {
        let damaged = |what: &str| EngineError::Gguf(format!("tensor {:?} {what}", self.name));
        let size = |n: u64| usize::try_from(n).map_err(|_| damaged("is too large"));
        let columns = size(*self.dims.first().ok_or_else(|| damaged("has no dimensions"))?)?;
        let mut rows = 1_usize;
        for dim in &self.dims[1..] {
            rows = rows.checked_mul(size(*dim)?).ok_or_else(|| damaged("is too large"))?;
        }
        let (elements, bytes) = self.kind.block();
        if columns % elements != 0 {
            return Err(damaged("has rows that do not end on a block"));
        }
        let row = (columns / elements).checked_mul(bytes);
        let length = row.and_then(|row| row.checked_mul(rows)).ok_or_else(|| damaged("is too large"))?;
        let start = size(self.offset)?;
        let end = start.checked_add(length).ok_or_else(|| damaged("is too large"))?;
        let data = data.get(start..end).ok_or_else(|| damaged("reaches past the end of the file"))?;
        Ok(Tensor { kind: self.kind, columns, rows, data })
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], EngineError> {
        let taken = self.at.checked_add(n).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| EngineError::Gguf(format!("the file ends inside a field at byte {}", self.at)))?;
        self.at += n;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], EngineError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, EngineError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, EngineError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<&'a str, EngineError> {
        let at = self.at;
        let length = usize::try_from(self.u64()?).unwrap_or(usize::MAX);
        std::str::from_utf8(self.take(length)?).map_err(|_| EngineError::Gguf(format!("the text at byte {at} is not UTF-8")))
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value<'a>, EngineError> {
        Ok(match kind {
            0 => Value::Unsigned(self.array::<1>()?[0].into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 if depth < MAX_DEPTH => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // An element takes at least one byte, so a false count ends in "the file ends
                // inside a field".
                let mut values = Vec::new();
                for _ in 0..count {
                    values.push(self.value(kind, depth + 1)?);
                }
                Value::Array(values)
            }
            9 => return Err(EngineError::Gguf(format!("arrays nested deeper than {MAX_DEPTH}"))),
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => return Err(EngineError::Gguf(format!("metadata type {other} at byte {}", self.at))),
        })
    }

    fn tensor_info(&mut self) -> Result<TensorInfo<'a>, EngineError> {
        let name = self.text()?;
        let dim_count = self.u32()?;
        if dim_count > MAX_DIMS {
            return Err(EngineError::Gguf(format!("tensor {name:?} has {dim_count} dimensions, at most {MAX_DIMS} are allowed")));
        }
        let dims = (0..dim_count).map(|_| self.u64()).collect::<Result<_, _>>()?;
        let kind = match self.u32()? {
            0 => TensorType::F32,
            3 => TensorType::Q4_1,
            8 => TensorType::Q8_0,
            other => return Err(EngineError::Unsupported(format!("tensor {name:?} has GGML type {other}; known are F32, Q4_1 and Q8_0"))),
        };
        Ok(TensorInfo { name, dims, kind, offset: self.u64()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(out: &mut Vec<u8>, s: &str) {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    }

    fn sample() -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3_u32.to_le_bytes());
        out.extend(1_u64.to_le_bytes());
        out.extend(3_u64.to_le_bytes());
        text(&mut out, "a.count");
        out.extend(4_u32.to_le_bytes());
        out.extend(7_u32.to_le_bytes());
        text(&mut out, "a.name");
        out.extend(8_u32.to_le_bytes());
        text(&mut out, "name");
        text(&mut out, "a.list");
        out.extend(9_u32.to_le_bytes());
        out.extend(5_u32.to_le_bytes());
        out.extend(2_u64.to_le_bytes());
        out.extend(1_i32.to_le_bytes());
        out.extend((-2_i32).to_le_bytes());
        text(&mut out, "w");
        out.extend(2_u32.to_le_bytes());
        out.extend(32_u64.to_le_bytes());
        out.extend(1_u64.to_le_bytes());
        out.extend(8_u32.to_le_bytes());
        out.extend(0_u64.to_le_bytes());
        out.resize(out.len().next_multiple_of(32) + 34, 1);
        out
    }

    #[test]
    fn reads_metadata_and_tensors() {
        let bytes = sample();
        let gguf = Gguf::parse(&bytes).unwrap();
        assert_eq!(gguf.integer("a.count").unwrap(), 7);
        assert_eq!(gguf.text("a.name").unwrap(), "name");
        assert_eq!(gguf.integers("a.list").unwrap(), [1, -2]);
        let w = gguf.tensor("w").unwrap();
        assert_eq!((w.columns, w.rows, w.data.len(), w.kind), (32, 1, 34, TensorType::Q8_0));
        assert!(gguf.integer("a.list").is_err() && gguf.text("nothing").is_err() && gguf.tensor("x").is_err());
    }

    #[test]
    fn damage_is_an_error_and_never_a_panic() {
        let bytes = sample();
        for end in 0..bytes.len() {
            assert!(Gguf::parse(&bytes[..end]).is_err(), "cut at {end}");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 9, 0x7F, 0xFF] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                let _ = Gguf::parse(&damaged);
            }
        }
        let mut endless = sample();
        endless[16..24].fill(0xFF);
        assert!(Gguf::parse(&endless).is_err());
    }
}
