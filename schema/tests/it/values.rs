//! One logical tensor, laid out in many ways: its value hash depends on what it means only.

use crate::common::{Random, cases};
use pfr_schema::checkpoint::{Dtype, Form, GATHER_BYTES, Layout, Proof, Tensor, value_hash};
use pfr_schema::{Digest, ErrorCode, FormatError, Limits};
use proptest::prelude::*;

/// A way to lay out a tensor: the order of dimensions in memory, padding and direction of each, and
/// slack around.
#[derive(Clone, Debug)]
struct Placement {
    order: Vec<usize>,
    pad: Vec<u64>,
    step: Vec<u64>,
    backwards: Vec<bool>,
    before: u64,
    after: u64,
}

fn placement(random: &mut Random, rank: usize) -> Placement {
    let mut order: Vec<usize> = (0..rank).collect();
    (1..rank).for_each(|i| order.swap(i, random.below(i + 1)));
    let mut some = |end: usize| (0..rank).map(|_| random.below(end) as u64).collect::<Vec<_>>();
    let (pad, step, backwards) = (some(3), some(3), some(2));
    let (before, after) = (random.below(9) as u64, random.below(9) as u64);
    Placement {
        order,
        pad,
        step: step.iter().map(|s| s + 1).collect(),
        backwards: backwards.iter().map(|b| *b == 1).collect(),
        before,
        after,
    }
}

impl Placement {
    /// Strides, offset and elements of the payload.
    fn layout(&self, shape: &[u64]) -> (Layout, u64) {
        let (mut strides, mut offset, mut extent) = (vec![0_i64; shape.len()], self.before, 1);
        for &dimension in self.order.iter().rev() {
            let stride = extent * self.step[dimension] + self.pad[dimension];
            let reach = stride * shape[dimension].saturating_sub(1);
            extent += reach;
            strides[dimension] = stride as i64;
            if self.backwards[dimension] {
                strides[dimension] = -strides[dimension];
                offset += reach;
            }
        }
        (Layout { tag: "placed".into(), strides: Some(strides), offset: Some(offset) }, self.before + extent + self.after)
    }
}

/// Positions of the elements in logical order, by the definition and nothing else.
fn positions(shape: &[u64], layout: &Layout) -> Vec<u64> {
    let count: u64 = shape.iter().product();
    let strides = layout.strides.as_ref().unwrap();
    let at = |mut linear: u64| {
        let mut position = layout.offset.unwrap() as i64;
        for (dimension, stride) in shape.iter().zip(strides).rev() {
            position += (linear % dimension) as i64 * stride;
            linear /= dimension;
        }
        position as u64
    };
    (0..count).map(at).collect()
}

/// Elements (in logical order) in a payload whose other bytes are noise.
fn place(elements: &[Vec<u8>], shape: &[u64], placement: &Placement, random: &mut Random) -> (Layout, Vec<u8>) {
    let (layout, length) = placement.layout(shape);
    let size = elements.first().map_or(1, Vec::len);
    let tail = random.below(size);
    let mut payload = random.bytes(length as usize * size + tail);
    for (element, position) in elements.iter().zip(positions(shape, &layout)) {
        payload[position as usize * size..][..size].copy_from_slice(element);
    }
    (layout, payload)
}

fn shape(random: &mut Random) -> Vec<u64> {
    let rank = random.below(5);
    (0..rank).map(|_| random.below(if rank > 3 { 4 } else { 7 }) as u64 + u64::from(random.below(12) != 0)).collect()
}

fn split(bytes: &[u8], size: usize) -> Vec<Vec<u8>> {
    bytes.chunks_exact(size).map(<[u8]>::to_vec).collect()
}

/// A value that both types hold, as bytes of each.
fn pair(narrow: Dtype, wide: Dtype, random: &mut Random) -> (Vec<u8>, Vec<u8>) {
    let small = random.below(200) as i64 - 100;
    match (narrow, wide) {
        (Dtype::Bf16, Dtype::F32) => {
            let bits = random.next() as u16;
            let bits = if bits & 0x7fff > 0x7f80 { 0x7fc0 } else { bits };
            (bits.to_le_bytes().to_vec(), (u32::from(bits) << 16).to_le_bytes().to_vec())
        }
        (Dtype::F32, Dtype::F64) => {
            let value = f32::from_bits(random.next() as u32);
            let value = if value.is_nan() { -0.0 } else { value };
            (value.to_le_bytes().to_vec(), f64::from(value).to_le_bytes().to_vec())
        }
        (Dtype::I8, Dtype::I64) => ((small as i8).to_le_bytes().to_vec(), small.to_le_bytes().to_vec()),
        (Dtype::I8, Dtype::F32) => ((small as i8).to_le_bytes().to_vec(), (small as f32).to_le_bytes().to_vec()),
        other => panic!("{other:?}"),
    }
}

fn hash(logical: Dtype, storage: Dtype, shape: &[u64], layout: &Layout, payload: &[u8]) -> Result<String, FormatError> {
    value_hash("recurrent", logical, shape, storage, layout, payload).map(|hash| hash.to_string())
}

/// As it streams by, if it can.
fn streamed(tensor: &Tensor, payload: &[u8], piece: usize) -> Option<String> {
    let mut hasher = tensor.value_hasher().unwrap()?;
    payload.chunks(piece).for_each(|piece| hasher.update(piece).unwrap());
    Some(hasher.finish().unwrap().to_string())
}

fn describe(shape: &[u64], dtype: Dtype, layout: Layout, payload: &[u8]) -> Tensor {
    Tensor::describe("t".into(), "recurrent".into(), None, shape.to_vec(), dtype, dtype, layout, payload, &Limits::default()).unwrap()
}

/// A form that nothing is known of but that its elements fit.
fn form(random: &mut Random, shape: &[u64], dtype: Dtype) -> Form {
    let (layout, elements) = placement(random, shape.len()).layout(shape);
    let tail = random.below(dtype.bytes()) as u64;
    Form { storage_dtype: dtype, layout, bytes: elements * dtype.bytes() as u64 + tail }
}

/// The bytes of a form that holds these elements, by the definition and nothing else.
fn held(elements: &[Vec<u8>], shape: &[u64], form: &Form) -> Vec<u8> {
    let mut bytes = vec![0; form.bytes as usize];
    for (element, position) in elements.iter().zip(positions(shape, &form.layout)) {
        bytes[position as usize * element.len()..][..element.len()].copy_from_slice(element);
    }
    bytes
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn a_mirror_has_every_element_bit_for_bit_where_its_form_says(seed in any::<u64>(), which in 0_usize..15) {
        let (mut random, dtype) = (Random(seed), Dtype::ALL[which]);
        let shape = shape(&mut random);
        let mut bytes = random.bytes(shape.iter().product::<u64>() as usize * dtype.bytes());
        if dtype == Dtype::Bool {
            bytes.iter_mut().for_each(|b| *b &= 1);
        }
        let elements = split(&bytes, dtype.bytes());
        let placement = placement(&mut random, shape.len());
        let (layout, payload) = place(&elements, &shape, &placement, &mut random);
        let tensor = describe(&shape, dtype, layout, &payload);
        let form = form(&mut random, &shape, dtype);
        let mirror = tensor.mirror(&payload, &form).unwrap();
        prop_assert_eq!(&mirror.bytes, &held(&elements, &shape, &form), "{:?} to {:?}", tensor.layout, form);
        prop_assert_eq!((mirror.tensor.value_hash, mirror.tensor.form()), (tensor.value_hash, form));
        mirror.tensor.check_payload(&mirror.bytes).unwrap();
        // And back, without the noise between the elements.
        let back = mirror.tensor.mirror(&mirror.bytes, &tensor.form()).unwrap();
        prop_assert_eq!(back.bytes, held(&elements, &shape, &tensor.form()));
    }

    #[test]
    fn a_mirror_in_another_type_holds_the_same_numbers(seed in any::<u64>(), which in 0_usize..4, widens in any::<bool>()) {
        let (narrow, wide) = [
            (Dtype::Bf16, Dtype::F32), (Dtype::F32, Dtype::F64), (Dtype::I8, Dtype::I64), (Dtype::I8, Dtype::F32),
        ][which];
        let mut random = Random(seed);
        let shape = shape(&mut random);
        let count = shape.iter().product::<u64>();
        let (narrows, wides): (Vec<_>, Vec<_>) = (0..count).map(|_| pair(narrow, wide, &mut random)).unzip();
        let ((from, source), (to, target)) =
            if widens { ((narrow, narrows), (wide, wides)) } else { ((wide, wides), (narrow, narrows)) };
        for logical in [narrow, wide] {
            let placement = placement(&mut random, shape.len());
            let (layout, payload) = place(&source, &shape, &placement, &mut random);
            let (name, kind, limits) = ("t".into(), "recurrent".into(), Limits::default());
            let tensor = Tensor::describe(name, kind, None, shape.clone(), logical, from, layout, &payload, &limits).unwrap();
            let form = form(&mut random, &shape, to);
            let mirror = tensor.mirror(&payload, &form).unwrap();
            prop_assert_eq!(&mirror.bytes, &held(&target, &shape, &form), "{} to {}, {}", from, to, logical);
            prop_assert_eq!(mirror.tensor.value_hash, tensor.value_hash);
            prop_assert_eq!(hash(logical, to, &shape, &form.layout, &mirror.bytes).unwrap(), tensor.value_hash.to_string());
        }
    }

    #[test]
    fn one_number_that_the_other_type_lacks_is_refused_by_its_index(seed in any::<u64>()) {
        let mut random = Random(seed);
        let shape: Vec<u64> = (0..1 + random.below(3)).map(|_| 1 + random.below(20) as u64).collect();
        let count = shape.iter().product::<u64>() as usize;
        let mut values: Vec<f32> = (0..count).map(|_| 1.0 + random.below(99) as f32).collect();
        let at = random.below(count);
        values[at] += 1.0 / 1024.0;
        let elements: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        let placement = placement(&mut random, shape.len());
        let (layout, payload) = place(&elements, &shape, &placement, &mut random);
        let tensor = describe(&shape, Dtype::F32, layout, &payload);
        let error = tensor.mirror(&payload, &form(&mut random, &shape, Dtype::Bf16)).unwrap_err();
        let FormatError::InexactStorage { tensor, index, value, storage, logical } = &error else { panic!("{error}") };
        let linear = index.iter().zip(&shape).fold(0, |linear, (i, dimension)| linear * dimension + i);
        prop_assert_eq!((linear as usize, value.parse::<f32>().unwrap()), (at, values[at]));
        prop_assert_eq!([tensor, storage, logical], ["t", "f32", "bf16"]);
    }

    #[test]
    fn no_mirror_has_two_elements_in_one_place_or_one_outside(
        shape in prop::collection::vec(1_u64..5, 0..4),
        strides in prop::collection::vec(prop_oneof![-20_i64..20, -20_i64..20, any::<i64>()], 4),
        offset in prop_oneof![0_u64..60, 0_u64..60, any::<u64>()],
        bytes in prop_oneof![0_u64..300, 0_u64..300, any::<u64>()],
    ) {
        let payload = Random(1).bytes(shape.iter().product::<u64>() as usize * 2);
        let tensor = describe(&shape, Dtype::I16, Layout::row_major(&shape), &payload);
        let layout = Layout { tag: "any".into(), strides: Some(strides[..shape.len()].to_vec()), offset: Some(offset) };
        let form = Form { storage_dtype: Dtype::I16, layout, bytes };
        match tensor.check_form(&form) {
            Ok(()) => {
                let strides = form.layout.strides.as_deref().unwrap();
                let place = |mut linear: u64| {
                    let mut place = i128::from(offset);
                    for (dimension, stride) in shape.iter().zip(strides).rev() {
                        place += i128::from(linear % dimension) * i128::from(*stride);
                        linear /= dimension;
                    }
                    place
                };
                let places: std::collections::BTreeSet<i128> = (0..shape.iter().product::<u64>()).map(place).collect();
                prop_assert_eq!(places.len() as u64, shape.iter().product::<u64>(), "{:?} of {:?}", strides, shape);
                prop_assert!(places.iter().all(|place| (0..i128::from(bytes / 2)).contains(place)), "{:?}", places);
                if bytes < 300 {
                    prop_assert_eq!(tensor.mirror(&payload, &form).unwrap().bytes, held(&split(&payload, 2), &shape, &form));
                }
            }
            Err(error) => prop_assert!(matches!(error.code(), ErrorCode::InvalidDocument | ErrorCode::TooLarge), "{}", error),
        }
    }

    #[test]
    fn however_a_tensor_is_laid_out_its_value_hash_is_the_same(seed in any::<u64>(), which in 0_usize..15) {
        let (mut random, dtype) = (Random(seed), Dtype::ALL[which]);
        let shape = shape(&mut random);
        let count = shape.iter().product::<u64>() as usize;
        let mut bytes = random.bytes(count * dtype.bytes());
        if dtype == Dtype::Bool {
            bytes.iter_mut().for_each(|b| *b &= 1);
        }
        let elements = split(&bytes, dtype.bytes());
        let plain = describe(&shape, dtype, Layout::row_major(&shape), &bytes);
        for _ in 0..4 {
            let placement = placement(&mut random, shape.len());
            let (layout, payload) = place(&elements, &shape, &placement, &mut random);
            let placed = describe(&shape, dtype, layout, &payload);
            prop_assert_eq!(placed.value_hash, plain.value_hash, "{:?} {:?}", placement, shape);
            prop_assert_eq!(placed.payload_hash == plain.payload_hash, payload == bytes);
            prop_assert_eq!(placed.check_value(&payload).unwrap(), Proof::Computed);
            placed.check_payload(&payload).unwrap();
            if let Some(streamed) = streamed(&placed, &payload, 1 + random.below(40)) {
                prop_assert_eq!(streamed, plain.value_hash.to_string(), "{:?} {:?}", placement, shape);
            }
        }
        prop_assert!(streamed(&plain, &bytes, 7).is_some(), "row-major order streams");
    }

    #[test]
    fn a_wider_storage_type_does_not_change_the_value_and_comes_back(seed in any::<u64>(), which in 0_usize..4) {
        let (narrow, wide) = [
            (Dtype::Bf16, Dtype::F32), (Dtype::F32, Dtype::F64), (Dtype::I8, Dtype::I64), (Dtype::I8, Dtype::F32),
        ][which];
        let mut random = Random(seed);
        let shape = shape(&mut random);
        let count = shape.iter().product::<u64>();
        let (narrows, wides): (Vec<_>, Vec<_>) = (0..count).map(|_| pair(narrow, wide, &mut random)).unzip();
        for logical in [narrow, wide] {
            let mut found = Vec::new();
            for (storage, elements) in [(narrow, &narrows), (wide, &wides)] {
                let placement = placement(&mut random, shape.len());
                let (layout, payload) = place(elements, &shape, &placement, &mut random);
                found.push(hash(logical, storage, &shape, &layout, &payload).unwrap());
            }
            prop_assert_eq!(&found[0], &found[1], "{} {}", narrow, wide);
        }
    }

    #[test]
    fn another_element_is_another_value_and_padding_is_not(seed in any::<u64>()) {
        let mut random = Random(seed);
        let shape: Vec<u64> = (0..1 + random.below(3)).map(|_| 1 + random.below(5) as u64).collect();
        let elements = split(&random.bytes(shape.iter().product::<u64>() as usize * 4), 4);
        let placement = placement(&mut random, shape.len());
        let (layout, payload) = place(&elements, &shape, &placement, &mut random);
        let tensor = describe(&shape, Dtype::I32, layout.clone(), &payload);
        let inside: std::collections::HashSet<u64> = positions(&shape, &layout).into_iter().collect();
        for byte in 0..payload.len() {
            let mut changed = payload.clone();
            changed[byte] ^= 1 << random.below(8);
            let payload_error = tensor.check_payload(&changed).unwrap_err();
            prop_assert_eq!(payload_error.code(), ErrorCode::PayloadHashMismatch);
            match tensor.check_value(&changed) {
                Ok(proof) => prop_assert!(proof == Proof::Computed && !inside.contains(&(byte as u64 / 4)), "byte {}", byte),
                Err(error) => {
                    prop_assert_eq!(error.code(), ErrorCode::ValueHashMismatch);
                    prop_assert!(inside.contains(&(byte as u64 / 4)), "byte {}", byte);
                }
            }
        }
    }

    #[test]
    fn one_element_that_does_not_fit_is_refused_by_its_index(seed in any::<u64>()) {
        let mut random = Random(seed);
        let shape: Vec<u64> = (0..1 + random.below(3)).map(|_| 1 + random.below(40) as u64).collect();
        let count = shape.iter().product::<u64>() as usize;
        let mut values: Vec<f32> = (0..count).map(|_| random.below(100) as f32).collect();
        let at = random.below(count);
        values[at] += 0.5;
        let elements: Vec<Vec<u8>> = values.iter().map(|v| v.to_le_bytes().to_vec()).collect();
        let placement = placement(&mut random, shape.len());
        let (layout, payload) = place(&elements, &shape, &placement, &mut random);
        let error = value_hash("rng", Dtype::I32, &shape, Dtype::F32, &layout, &payload).unwrap_err();
        let FormatError::InexactStorage { index, value, .. } = &error else { panic!("{error}") };
        let linear = index.iter().zip(&shape).fold(0, |linear, (i, dimension)| linear * dimension + i);
        prop_assert_eq!((linear as usize, value.parse::<f32>().unwrap()), (at, values[at]));
    }

    #[test]
    fn no_layout_reads_outside_of_its_payload(
        shape in prop::collection::vec(prop_oneof![0_u64..5, any::<u64>()], 0..6),
        strides in prop::collection::vec(prop_oneof![-6_i64..6, any::<i64>()], 0..6),
        offset in prop_oneof![0_u64..40, any::<u64>()],
        bytes in 0_usize..200,
    ) {
        let layout = Layout { tag: "any".into(), strides: Some(strides.clone()), offset: Some(offset) };
        let count = shape.iter().try_fold(1_u128, |p, d| p.checked_mul(u128::from(*d)));
        // Broadcasts of what fits may stand for gibibytes: allowed, but not worth a test's time.
        prop_assume!(shape.contains(&0) || count.is_none_or(|c| !(1 << 20..=1 << 40).contains(&c)));
        let result = value_hash("rng", Dtype::I16, &shape, Dtype::I16, &layout, &vec![0; bytes]);
        if shape.len() != strides.len() {
            prop_assert!(result.is_err());
        } else if !shape.contains(&0) && count.is_some_and(|c| c < 1 << 20) {
            let (mut low, mut high) = (i128::from(offset), i128::from(offset));
            for (dimension, stride) in shape.iter().zip(&strides) {
                let reach = i128::from(dimension - 1) * i128::from(*stride);
                if reach < 0 { low += reach } else { high += reach }
            }
            prop_assert_eq!(result.is_ok(), low >= 0 && high < bytes as i128 / 2);
        }
    }
}

#[test]
fn a_payload_larger_than_any_block_hashes_as_its_definition_says() {
    let shape = [3_u64, 70_000];
    let mut bytes = Random(9).bytes(3 * 70_000 * 4);
    // A NaN in the last block only, and in the first.
    bytes[..4].copy_from_slice(&0xffff_ffff_u32.to_le_bytes());
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&0x7f80_0001_u32.to_le_bytes());
    let mut canonical = b"pfv1\nrecurrent\nf32\n".to_vec();
    canonical.extend(2_u32.to_le_bytes());
    shape.iter().for_each(|d| canonical.extend(d.to_le_bytes()));
    for element in bytes.as_chunks::<4>().0 {
        let nan = f32::from_le_bytes(*element).is_nan();
        canonical.extend(if nan { 0x7fc0_0000_u32.to_le_bytes() } else { *element });
    }
    let tensor = describe(&shape, Dtype::F32, Layout::row_major(&shape), &bytes);
    assert_eq!(*tensor.value_hash.digest(), Digest::sha256(&canonical));
    for piece in [1, 4099, 16 << 10, 1 << 20] {
        assert_eq!(streamed(&tensor, &bytes, piece), Some(tensor.value_hash.to_string()), "{piece}");
    }
}

#[test]
fn a_value_that_is_no_longer_wanted_is_not_hashed_to_its_end() {
    let layout = Layout { tag: "x".into(), strides: Some(vec![0]), offset: Some(0) };
    let mut tensor = describe(&[1], Dtype::U8, layout, b"x");
    // A byte that stands for 16 MiB.
    tensor.shape = vec![16 << 20];
    assert_eq!(tensor.value_bytes(), 16 << 20);
    for stop_after in [0, 3] {
        let mut asked = 0;
        let go_on = &mut || {
            asked += 1;
            asked <= stop_after
        };
        assert_eq!(tensor.check_value_while(b"x", go_on), Ok(None));
        assert_eq!(asked, stop_after + 1);
    }
    // Asked once in a MiB of the value, also if its elements are larger than they are stored.
    for (logical, elements) in [(Dtype::U8, 16 << 20), (Dtype::F64, 2 << 20)] {
        for strides in [0, 1] {
            let payload = vec![b'x'; if strides == 0 { 1 } else { elements as usize }];
            let tensor = Tensor {
                logical_dtype: logical,
                shape: vec![elements],
                payload_bytes: payload.len() as u64,
                layout: Layout { tag: "x".into(), strides: Some(vec![strides]), offset: Some(0) },
                ..tensor.clone()
            };
            let mut asked = 0;
            let go_on = &mut || {
                asked += 1;
                true
            };
            assert_eq!(tensor.check_value_while(&payload, go_on).unwrap_err().code(), ErrorCode::ValueHashMismatch);
            assert_eq!(asked, 16, "{logical}, stride {strides}");
        }
    }
}

#[test]
fn an_opaque_tensor_is_the_same_only_byte_for_byte() {
    let layout = Layout { tag: "vendor".into(), strides: None, offset: None };
    let mut tensor = describe(&[100], Dtype::F32, layout, b"bytes");
    assert_eq!(tensor.check_value(b"bytes").unwrap(), Proof::Attested);
    assert_eq!(tensor.check_value(b"Bytes").unwrap_err().code(), ErrorCode::PayloadHashMismatch);
    assert_eq!(tensor.check_value(b"byte").unwrap_err().code(), ErrorCode::LengthMismatch);
    // Another writer may vouch for its value in its own way.
    tensor.value_hash = describe(&[1], Dtype::U8, Layout::row_major(&[1]), b"x").value_hash;
    assert_eq!(tensor.check_value(b"bytes").unwrap(), Proof::Attested);
    assert!(tensor.value_hasher().unwrap().is_none());
}

#[test]
fn a_tensor_is_not_described_if_it_would_not_parse() {
    let limits = Limits { blob_bytes: 1000, ..Limits::default() };
    let describe = |name: &str, kind: &str, shape: Vec<u64>, layout: Layout, bytes: usize| {
        Tensor::describe(name.into(), kind.into(), None, shape, Dtype::U8, Dtype::U8, layout, &vec![0; bytes], &limits)
    };
    let row = Layout::row_major(&[4]);
    assert!(describe("a", "rng", vec![4], row.clone(), 4).is_ok());
    let refusals = [
        (describe("", "rng", vec![4], row.clone(), 4), "name: expected 1 to 200 bytes without control characters"),
        (describe("a", "other:\n", vec![4], row.clone(), 4), "kind: expected 1 to 200 bytes without control characters"),
        (describe("a", "rng", vec![1; 33], row.clone(), 4), "shape: expected at most 32 dimensions, found 33"),
        (describe("a", "rng", vec![4], row.clone(), 3), "layout: expected elements within the payload's 3, found elements 0 to 3"),
        (describe("a", "rng", vec![4], row, 1001), "a tensor payload in bytes is too large: 1001, the limit is 1000"),
        (
            describe("a", "rng", vec![1001], Layout { tag: "b".into(), strides: Some(vec![0]), offset: Some(0) }, 1),
            "a tensor's logical value in bytes is too large: 1001",
        ),
    ];
    for (result, message) in refusals {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(message), "{error}: {message}");
    }
}

#[test]
fn a_broadcast_becomes_elements_of_its_own() {
    let broadcast = Layout { tag: "b".into(), strides: Some(vec![0, 1]), offset: Some(1) };
    let tensor = describe(&[2, 3], Dtype::U8, broadcast, b"xabc");
    let form = |strides: &[i64], bytes| {
        let layout = Layout { tag: "f".into(), strides: Some(strides.to_vec()), offset: Some(0) };
        Form { storage_dtype: Dtype::U8, layout, bytes }
    };
    assert_eq!(tensor.mirror(b"xabc", &form(&[4, 1], 8)).unwrap().bytes, b"abc\0abc\0");
    assert_eq!(tensor.mirror(b"xabc", &form(&[1, 2], 6)).unwrap().bytes, b"aabbcc");
    // The other way round two elements would be one.
    let dense = describe(&[2, 3], Dtype::U8, Layout::row_major(&[2, 3]), b"abcabc");
    let error = dense.mirror(b"abcabc", &tensor.form()).unwrap_err().to_string();
    assert!(error.contains("t: layout.strides: expected elements that do not overlap, found strides [0, 1] of shape [2, 3]"), "{error}");
}

#[test]
fn a_mirror_of_other_bytes_or_of_a_form_that_cannot_be_read_is_refused() {
    let mut tensor = describe(&[2], Dtype::F32, Layout::row_major(&[2]), &[0; 8]);
    let form = Form { storage_dtype: Dtype::Bf16, layout: Layout::row_major(&[2]), bytes: 4 };
    assert_eq!(tensor.mirror(&[0; 8], &form).unwrap().bytes, [0; 4]);
    assert_eq!(tensor.mirror(&[0; 9], &form).unwrap_err().code(), ErrorCode::LengthMismatch);
    let other_value = [[0; 4], 1_f32.to_le_bytes()].concat();
    assert_eq!(tensor.mirror(&other_value, &form).unwrap_err().code(), ErrorCode::ValueHashMismatch);
    let opaque = Layout { tag: "vendor".into(), strides: None, offset: None };
    assert_eq!(tensor.check_form(&Form { layout: opaque.clone(), ..form.clone() }).unwrap_err().code(), ErrorCode::InvalidDocument);
    let huge = Form { bytes: GATHER_BYTES + 1, ..form.clone() };
    assert_eq!(tensor.check_form(&huge).unwrap_err().code(), ErrorCode::TooLarge);
    tensor.layout = opaque;
    assert_eq!(tensor.check_form(&form).unwrap_err().code(), ErrorCode::InvalidDocument);
}

#[test]
fn the_tag_is_a_name_of_an_affine_layout_and_all_there_is_of_an_opaque_one() {
    let form = |tag: &str, strides: Option<Vec<i64>>| {
        let offset = strides.as_ref().map(|_| 0);
        Form { storage_dtype: Dtype::F32, layout: Layout { tag: tag.into(), strides, offset }, bytes: 8 }
    };
    let row = || Some(vec![1]);
    assert!(form("a", row()).reads_as(&form("b", row())));
    assert!(!form("a", row()).reads_as(&form("a", Some(vec![-1]))));
    assert!(!form("a", row()).reads_as(&Form { bytes: 12, ..form("a", row()) }));
    assert!(!form("a", row()).reads_as(&Form { storage_dtype: Dtype::I32, ..form("a", row()) }));
    assert!(form("a", None).reads_as(&form("a", None)));
    assert!(!form("a", None).reads_as(&form("b", None)));
    assert!(!form("a", None).reads_as(&form("a", row())));
    assert_eq!(form("a", row()).to_string(), "a f32 (strides [1], offset 0, 8 bytes)");
}
