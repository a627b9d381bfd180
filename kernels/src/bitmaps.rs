//! Blocks of codec 2: three bitmaps of exponents, the other bits as they are, and escapes.
//!
//! A 16-bit word is rotated left by one bit. Its high byte is then the exponent, its low byte the
//! mantissa with the sign as the lowest bit. In real pages seven neighbouring exponents cover more
//! than nine of ten values: their distance to `base` takes three bits, and 7 is an escape.
//!
//! Every [`Kernel`] writes and reads the same bytes. A kernel handles whole groups of 64 values;
//! the last group of a block is padded here.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use std::mem::MaybeUninit;

/// Values of a group: the bits of a bitmap.
const GROUP: usize = 64;
/// Raw bytes of a group.
const RAW: usize = 2 * GROUP;
/// Bytes of a group's three bitmaps.
const MAPS: usize = 24;
/// Distance to `base` that stands for an escape.
const ESCAPE: u8 = 7;
/// Values from one that is looked at for `base` to the next. Odd, so that all channels of a head
/// are looked at.
const STRIDE: usize = 29;
/// Bytes before the bitmaps: `base`, and the number of escapes.
pub const HEAD: usize = 3;

/// Instructions that the kernels of codec 2 run on. All of them give the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Isa);

/// Only [`Kernel::available`] makes a [`Kernel`], so that each of them can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Kernel {
    /// The fastest that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if has_avx512() {
                return Self(Isa::Avx512);
            }
            if has_avx2() {
                return Self(Isa::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            return Self(Isa::Neon);
        }
        Self(Isa::Portable)
    }

    /// All that this machine has, the fastest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self::detect()];
        #[cfg(target_arch = "x86_64")]
        if has_avx2() && all != [Self(Isa::Avx2)] {
            all.push(Self(Isa::Avx2));
        }
        if all != [Self::PORTABLE] {
            all.push(Self::PORTABLE);
        }
        all
    }

    /// The reference, in plain Rust.
    pub const PORTABLE: Self = Self(Isa::Portable);

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "AVX2",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => "NEON",
            Isa::Portable => "portable",
        }
    }

    /// Encodes whole groups. Returns the number of escapes.
    fn encode(self, base: u8, groups: Groups<'_>, escapes: &mut [u8]) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `detect` and `available` found the features of `avx512`.
            Isa::Avx512 => unsafe { avx512::encode(base, groups, escapes) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `detect` and `available` found the features of `avx2`.
            Isa::Avx2 => unsafe { avx2::encode(base, groups, escapes) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `detect` found NEON.
            Isa::Neon => unsafe { neon::encode(base, groups, escapes) },
            Isa::Portable => portable::encode(base, groups, escapes),
        }
    }

    /// Decodes whole groups, and writes all of their raw bytes. Returns the number of escapes.
    fn decode(self, base: u8, groups: Encoded<'_>, escapes: &[u8]) -> usize {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `detect` and `available` found the features of `avx512`.
            Isa::Avx512 => unsafe { avx512::decode(base, groups, escapes) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `detect` and `available` found the features of `avx2`.
            Isa::Avx2 => unsafe { avx2::decode(base, groups, escapes) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: `detect` found NEON.
            Isa::Neon => unsafe { neon::decode(base, groups, escapes) },
            Isa::Portable => portable::decode(base, groups, escapes),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("popcnt")
}

/// Whole groups to encode, as many of each.
struct Groups<'a> {
    raw: &'a [[u8; RAW]],
    maps: &'a mut [[u8; MAPS]],
    rest: &'a mut [[u8; GROUP]],
}

/// Whole groups to decode, as many of each.
struct Encoded<'a> {
    maps: &'a [[u8; MAPS]],
    rest: &'a [[u8; GROUP]],
    raw: &'a mut [[MaybeUninit<u8>; RAW]],
    /// About how far behind these the next block has its bitmaps and other bits.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only kernels for x86-64 fetch ahead"))]
    ahead: usize,
}

/// Has the processor fetch what lies `ahead` bytes from here. By itself it fetches only what lies
/// in a row, but bitmaps and other bits of a block lie apart: each block would begin with waiting
/// for memory.
#[cfg(target_arch = "x86_64")]
#[inline]
fn fetch<const N: usize>(bytes: &[u8; N], ahead: usize) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: a hint reads nothing: it may name any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(ahead).cast()) };
}

/// The three bitmaps of a group.
fn bitmaps(maps: &[u8; MAPS]) -> [u64; 3] {
    let words = maps.as_chunks::<8>().0;
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1]), u64::from_le_bytes(words[2])]
}

fn put_bitmaps(maps: &mut [u8; MAPS], bits: [u64; 3]) {
    for (word, bits) in maps.as_chunks_mut::<8>().0.iter_mut().zip(bits) {
        *word = bits.to_le_bytes();
    }
}

/// For each set of eight bytes, where they are among the eight.
#[cfg(target_arch = "x86_64")]
static COMPRESS: [[u8; 8]; 256] = {
    let mut all = [[0x80; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut from, mut to) = (0, 0);
        while from < 8 {
            if set >> from & 1 == 1 {
                all[set][to] = from as u8;
                to += 1;
            }
            from += 1;
        }
        set += 1;
    }
    all
};

/// The way back: for each of eight bytes, the number of those before it that are in the set. Bytes
/// that are not have the highest bit: shuffling makes them zero.
#[cfg(target_arch = "x86_64")]
static EXPAND: [[u8; 8]; 256] = {
    let mut all = [[0x80; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut from, mut to) = (0, 0);
        while to < 8 {
            if set >> to & 1 == 1 {
                all[set][to] = from;
                from += 1;
            }
            to += 1;
        }
        set += 1;
    }
    all
};

/// Exponent and the other bits of a word.
const fn split(word: [u8; 2]) -> (u8, u8) {
    let rotated = u16::from_le_bytes(word).rotate_left(1);
    ((rotated >> 8) as u8, rotated as u8)
}

/// The word with this exponent and these other bits.
const fn join(exponent: u8, rest: u8) -> [u8; 2] {
    u16::from_le_bytes([rest, exponent]).rotate_right(1).to_le_bytes()
}

/// First of the seven exponents that cover most values. A poor choice costs bytes only.
fn choose_base(words: &[[u8; 2]]) -> u8 {
    // Four counts side by side: equal neighbours need not wait for each other.
    let mut counts = [[0_u16; 256]; 4];
    for (i, word) in words.iter().step_by(STRIDE).enumerate() {
        counts[i % 4][usize::from(split(*word).0)] += 1;
    }
    let [mut total, others @ ..] = counts;
    for other in others {
        total.iter_mut().zip(other).for_each(|(total, other)| *total += other);
    }
    // All sums first, and then the first of the largest: loops that vector instructions take.
    let mut covered = [0_u16; 257 - ESCAPE as usize];
    for enters in 0..usize::from(ESCAPE) {
        covered.iter_mut().zip(&total[enters..]).for_each(|(covered, total)| *covered += total);
    }
    let most = covered.iter().fold(0, |most, covered| most.max(*covered));
    covered.iter().position(|covered| *covered == most).unwrap_or_default() as u8
}

/// Bytes that encoding `values` values may write.
pub const fn room(values: usize) -> usize {
    // A kernel writes 64 bytes where the next escapes go.
    HEAD + values.div_ceil(GROUP) * (MAPS + GROUP) + values + GROUP
}

/// Encodes a block of whole words. Returns the number of bytes, which may exceed those of `raw`.
///
/// # Panics
/// If `out` has less than [`room`]: a bug in the caller.
pub fn encode(kernel: Kernel, raw: &[u8], out: &mut [u8]) -> usize {
    let words = raw.as_chunks::<2>().0;
    let base = choose_base(words);
    let (head, out) = out.split_at_mut(HEAD);
    let (maps, out) = out.split_at_mut(words.len().div_ceil(GROUP) * MAPS);
    let (rest, escapes) = out.split_at_mut(words.len());
    let maps = maps.as_chunks_mut::<MAPS>().0;
    let (whole, tail) = raw.as_chunks::<RAW>();
    let (rest, rest_tail) = rest.as_chunks_mut::<GROUP>();
    let (maps, maps_tail) = maps.split_at_mut(whole.len());
    let mut count = kernel.encode(base, Groups { raw: whole, maps, rest }, escapes);
    if !tail.is_empty() {
        // Padded with `base`, whose bits in the bitmaps are zero.
        let mut raw = [0; RAW];
        raw.as_chunks_mut::<2>().0.fill(join(base, 0));
        raw[..tail.len()].copy_from_slice(tail);
        let mut rest = [[0; GROUP]];
        count += kernel.encode(base, Groups { raw: &[raw], maps: maps_tail, rest: &mut rest }, &mut escapes[count..]);
        rest_tail.copy_from_slice(&rest[0][..rest_tail.len()]);
    }
    head[0] = base;
    head[1..].copy_from_slice(&(count as u16).to_le_bytes());
    HEAD + words.len().div_ceil(GROUP) * MAPS + words.len() + count
}

/// Bytes after the head of a block of `raw_len` bytes.
pub fn body_len(head: [u8; HEAD], raw_len: usize) -> usize {
    let values = raw_len / 2;
    values.div_ceil(GROUP) * MAPS + values + usize::from(u16::from_le_bytes([head[1], head[2]]))
}

/// Decodes a block of [`body_len`] bytes: adds its `len` bytes to `raw`, whose memory need not be
/// cleared before. Nothing is added if the block is malformed.
///
/// # Errors
/// What is wrong.
///
/// # Panics
/// If `body` has another length: a bug in the caller.
pub fn decode(kernel: Kernel, head: [u8; HEAD], body: &[u8], len: usize, raw: &mut Vec<u8>) -> Result<(), &'static str> {
    raw.reserve(len);
    write(kernel, head, body, &mut raw.spare_capacity_mut()[..len])?;
    // SAFETY: `write` has written all of them.
    unsafe { raw.set_len(raw.len() + len) };
    Ok(())
}

/// Writes every byte of `raw` if the block is not malformed, else none.
fn write(kernel: Kernel, head: [u8; HEAD], body: &[u8], raw: &mut [MaybeUninit<u8>]) -> Result<(), &'static str> {
    let (base, ahead) = (head[0], body.len());
    let values = raw.len() / 2;
    let (maps, body) = body.split_at(values.div_ceil(GROUP) * MAPS);
    let (rest, escapes) = body.split_at(values);
    let maps = maps.as_chunks::<MAPS>().0;
    let count = |maps: &[u8; MAPS]| {
        let [a, b, c] = bitmaps(maps);
        (a & b & c).count_ones() as usize
    };
    if maps.iter().map(count).sum::<usize>() != escapes.len() {
        return Err("the bitmaps have another number of escapes than the block says");
    }
    let (whole, tail) = raw.as_chunks_mut::<RAW>();
    let (rest, rest_tail) = rest.as_chunks::<GROUP>();
    let (maps, maps_tail) = maps.split_at(whole.len());
    if let [last] = maps_tail {
        let beyond = u64::MAX << (values % GROUP);
        if bitmaps(last).iter().any(|bits| bits & beyond != 0) {
            return Err("bits beyond the last value");
        }
    }
    // Kernels write as many groups as the shortest of the three has.
    assert!(maps.len() == whole.len() && rest.len() == whole.len(), "whole groups");
    let used = kernel.decode(base, Encoded { maps, rest, raw: whole, ahead }, escapes);
    if !tail.is_empty() {
        let mut rest = [[0; GROUP]];
        rest[0][..rest_tail.len()].copy_from_slice(rest_tail);
        let mut raw = [[MaybeUninit::new(0); RAW]];
        kernel.decode(base, Encoded { maps: maps_tail, rest: &rest, raw: &mut raw, ahead: 0 }, &escapes[used..]);
        tail.copy_from_slice(&raw[0][..tail.len()]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Words of which `rare` in 256 have any exponent, the others one of seven.
    fn words(seed: u64, values: usize, rare: u64) -> Vec<u8> {
        let mut state = seed;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 24
        };
        let mut word = || {
            let (bits, exponent) = (next(), next());
            let exponent = if bits % 256 < rare { exponent } else { 120 + exponent % 7 };
            join(exponent as u8, (bits >> 8) as u8)
        };
        (0..values).flat_map(|_| word()).collect()
    }

    fn encoded(kernel: Kernel, raw: &[u8]) -> Vec<u8> {
        let mut out = vec![0xA5; room(raw.len() / 2)];
        let len = encode(kernel, raw, &mut out);
        out.truncate(len);
        out
    }

    fn decoded(kernel: Kernel, stored: &[u8], raw_len: usize) -> Result<Vec<u8>, &'static str> {
        let (head, body) = stored.split_first_chunk::<HEAD>().unwrap();
        assert_eq!(body.len(), body_len(*head, raw_len));
        let mut raw = vec![0x5A; 3];
        decode(kernel, *head, body, raw_len, &mut raw)?;
        assert_eq!(raw[..3], [0x5A; 3], "what lay there stays");
        Ok(raw.split_off(3))
    }

    #[test]
    fn every_kernel_gives_the_bytes_of_the_portable_one_for_every_length() {
        for kernel in Kernel::available() {
            for values in (0..300).chain([1000, 4032, 4095, 4096]) {
                for rare in [0, 1, 16, 100, 256] {
                    let raw = words(values as u64 + rare, values, rare);
                    let stored = encoded(Kernel::PORTABLE, &raw);
                    assert!(encoded(kernel, &raw) == stored, "{} values, {rare}, {}", values, kernel.name());
                    assert!(decoded(kernel, &stored, raw.len()).unwrap() == raw, "{} values, {rare}, {}", values, kernel.name());
                }
            }
        }
    }

    #[test]
    fn every_word_survives_with_every_base_in_every_kernel() {
        // All 65,536 words, each group with exponents far apart, so that all bases and all numbers
        // of escapes occur.
        for kernel in Kernel::available() {
            for step in [1_u16, 77, 129, 4097, 32_769] {
                let all: Vec<u8> = (0..=u16::MAX).flat_map(|i| i.wrapping_mul(step).to_le_bytes()).collect();
                for block in all.chunks(8192) {
                    let stored = encoded(kernel, block);
                    assert!(stored == encoded(Kernel::PORTABLE, block), "{}", kernel.name());
                    assert!(decoded(kernel, &stored, block.len()).unwrap() == block, "{}", kernel.name());
                }
            }
            for base in 0..=255 {
                let block: Vec<u8> = (0..=255).flat_map(|e: u8| join(if e.is_multiple_of(2) { base } else { e }, e)).collect();
                let stored = encoded(kernel, &block);
                assert!(decoded(kernel, &stored, block.len()).unwrap() == block, "{} {base}", kernel.name());
            }
        }
    }

    #[test]
    fn a_base_near_the_end_wraps_alike_in_every_kernel() {
        // The encoder never chooses more than 249; another writer may.
        let raw: Vec<u8> = [255, 0, 1, 4, 5, 6].iter().flat_map(|e| join(*e, 7)).collect();
        let codes = [0_u64, 1, 2, 5, 6, 7];
        let mut maps = [0; MAPS];
        put_bitmaps(&mut maps, [0, 1, 2].map(|bit| (0..6).map(|i| (codes[i] >> bit & 1) << i).sum()));
        let stored = [&[255, 1, 0][..], &maps, &[7; 6], &[6]].concat();
        for kernel in Kernel::available() {
            assert_eq!(decoded(kernel, &stored, 12).unwrap(), raw, "{}", kernel.name());
        }
    }

    #[test]
    fn a_kernel_that_lacks_room_for_escapes_panics_and_drops_none() {
        // No exponent is near this base.
        let raw = words(1, GROUP, 0);
        for kernel in Kernel::available() {
            let (mut maps, mut rest, mut escapes) = ([[0; MAPS]], [[0; GROUP]], [0; GROUP - 1]);
            let groups = Groups { raw: raw.as_chunks::<RAW>().0, maps: &mut maps, rest: &mut rest };
            let encoding = std::panic::AssertUnwindSafe(|| kernel.encode(0, groups, &mut escapes));
            assert!(std::panic::catch_unwind(encoding).is_err(), "{}", kernel.name());
        }
    }

    #[test]
    fn a_false_number_of_escapes_and_bits_beyond_the_end_are_refused_and_nothing_is_added() {
        for kernel in Kernel::available() {
            let raw = words(1, 100, 20);
            let mut stored = encoded(kernel, &raw);
            let (mut head, body) = (*stored.first_chunk::<HEAD>().unwrap(), stored.split_off(HEAD));
            let mut out = vec![0x5A; 3];
            let mut refused = |head, body: &[u8], reason: &str| {
                assert!(decode(kernel, head, body, raw.len(), &mut out).unwrap_err().contains(reason));
                assert_eq!(out, [0x5A; 3]);
            };
            let mut beyond = body.clone();
            beyond[MAPS + 7] |= 0x80;
            refused(head, &beyond, "beyond the last value");
            head[1] += 1;
            refused(head, &[&body[..], &[0]].concat(), "another number of escapes");
            head[1] -= 2;
            refused(head, &body[..body.len() - 1], "another number of escapes");
        }
    }
}
