//! The one matrix kernel: up to six rows times a 64-column panel of bfloat16.
//!
//! Why one kernel: projections, `q·Kᵀ` and `p·V` all run through it, so every number the engine
//! produces is defined by the same rule: **each output is a chain of fused multiply-adds in
//! ascending `k`**. The order does not depend on the number of rows, on the vector width or on the
//! caller, hence a token's result has the same bits alone and in a batch, on one thread and on
//! eight, with AVX-512, AVX2 or neither.

use std::fmt;

/// Columns of a panel. Heads have this width too, so a panel is also "one head".
pub const LANES: usize = 64;
/// Rows one call takes at most: 6 × 64 sums fill the 24 of 32 AVX-512 registers that the operands
/// leave.
pub const MAX_ROWS: usize = 6;

/// Instruction set the kernel runs on. All of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// 512-bit registers.
    Avx512,
    /// 256-bit registers and FMA.
    Avx2,
    /// Whatever the compiler was told; slow on x86-64 without FMA.
    Portable,
}

impl Isa {
    /// The best set this machine has.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let wide = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            if fma && wide {
                return Self::Avx512;
            }
            if fma {
                return Self::Avx2;
            }
        }
        Self::Portable
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2",
            Self::Portable => "portable",
        })
    }
}

/// Left operand: element `(r, k)` is `data[r * row + k / 64 * block + k % 64]`.
#[derive(Clone, Copy)]
pub struct Lhs<'a> {
    /// The elements.
    pub data: &'a [f32],
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one run of 64 to the next.
    pub block: usize,
}

/// Right operand: element `(k, j)` is the little-endian bfloat16 at byte `k * row + 2 * j`, `j` <
/// 64.
#[derive(Clone, Copy)]
pub struct Rhs<'a> {
    /// The bytes.
    pub data: &'a [u8],
    /// Bytes from one row to the next.
    pub row: usize,
}

/// The result: element `(r, j)` is `data[r * row + j]`.
pub struct Out<'a> {
    /// The elements.
    pub data: &'a mut [f32],
    /// Elements from one row to the next.
    pub row: usize,
    /// Continue the chains already in `data` instead of starting at zero.
    pub accumulate: bool,
}

/// `out[r][j] = Σₖ lhs[r][k] · rhs[k][j]` for `rows` rows and 64 columns, summed in ascending `k`.
///
/// # Panics
/// If `rows` is not in 1..=6 or an operand is shorter than its shape: a bug in the caller.
pub fn tile(isa: Isa, rows: usize, k: usize, lhs: Lhs<'_>, rhs: Rhs<'_>, out: &mut Out<'_>) {
    assert!((1..=MAX_ROWS).contains(&rows), "rows {rows}");
    if k == 0 {
        if !out.accumulate {
            (0..rows).for_each(|r| out.data[r * out.row..][..LANES].fill(0.0));
        }
        return;
    }
    assert!(k <= LANES || lhs.block >= LANES, "runs of the left operand overlap");
    let last = (k - 1) / LANES * lhs.block + (k - 1) % LANES;
    assert!((rows - 1) * lhs.row + last < lhs.data.len(), "left operand too short");
    assert!((k - 1) * rhs.row + 2 * LANES <= rhs.data.len(), "right operand too short");
    assert!((rows - 1) * out.row + LANES <= out.data.len(), "output too short");
    match rows {
        1 => run::<1>(isa, k, lhs, rhs, out),
        2 => run::<2>(isa, k, lhs, rhs, out),
        3 => run::<3>(isa, k, lhs, rhs, out),
        4 => run::<4>(isa, k, lhs, rhs, out),
        5 => run::<5>(isa, k, lhs, rhs, out),
        _ => run::<6>(isa, k, lhs, rhs, out),
    }
}

fn run<const R: usize>(isa: Isa, k: usize, lhs: Lhs<'_>, rhs: Rhs<'_>, out: &mut Out<'_>) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Isa::detect` found the features; `tile` checked that every index below is in
        // bounds.
        Isa::Avx512 => unsafe { x86::tile_avx512::<R>(k, lhs, rhs, out) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 => unsafe { x86::tile_avx2::<R>(k, lhs, rhs, out) },
        _ => portable::<R>(k, lhs, rhs, out),
    }
}

fn portable<const R: usize>(k: usize, lhs: Lhs<'_>, rhs: Rhs<'_>, out: &mut Out<'_>) {
    const W: usize = 16;
    for j in (0..LANES).step_by(W) {
        let mut sums = [[0.0_f32; W]; R];
        if out.accumulate {
            for (r, sum) in sums.iter_mut().enumerate() {
                sum.copy_from_slice(&out.data[r * out.row + j..][..W]);
            }
        }
        for i in 0..k {
            let at = i / LANES * lhs.block + i % LANES;
            let bytes = &rhs.data[i * rhs.row + 2 * j..][..2 * W];
            let mut b = [0.0_f32; W];
            for (b, two) in b.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *b = f32::from_bits(u32::from(u16::from_le_bytes(*two)) << 16);
            }
            for (r, sum) in sums.iter_mut().enumerate() {
                let a = lhs.data[r * lhs.row + at];
                for (sum, b) in sum.iter_mut().zip(b) {
                    *sum = a.mul_add(b, *sum);
                }
            }
        }
        for (r, sum) in sums.iter().enumerate() {
            out.data[r * out.row + j..][..W].copy_from_slice(sum);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Explicit vectors: the register blocking is what the speed depends on.

    use super::{LANES, Lhs, Out, Rhs};
    use std::arch::x86_64::*;

    /// Writes the kernel for one instruction set, which has vectors of `$lanes` numbers and
    /// computes `$vectors` of them at a time.
    macro_rules! tile {
        ($name:ident, $features:literal, $lanes:literal, $vectors:literal, $zero:ident, $load:ident, $store:ident, $splat:ident, $fma:ident, $widen:ident) => {
            /// # Safety
            /// The instruction set, and operands long enough for `R` rows and `k` steps (checked by
            /// `super::tile`).
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name<const R: usize>(k: usize, lhs: Lhs<'_>, rhs: Rhs<'_>, out: &mut Out<'_>) {
                let (a, c) = (lhs.data.as_ptr(), out.data.as_mut_ptr());
                for j in (0..LANES).step_by($lanes * $vectors) {
                    let mut sums = [[$zero(); $vectors]; R];
                    // SAFETY: the caller guarantees that every offset formed here lies inside its
                    // slice.
                    unsafe {
                        if out.accumulate {
                            for (r, sum) in sums.iter_mut().enumerate() {
                                for (q, sum) in sum.iter_mut().enumerate() {
                                    *sum = $load(c.add(r * out.row + j + q * $lanes));
                                }
                            }
                        }
                        let mut step = rhs.data.as_ptr().add(2 * j);
                        let mut i = 0;
                        while i < k {
                            let block = a.add(i / LANES * lhs.block);
                            for n in 0..LANES.min(k - i) {
                                let mut w = [$zero(); $vectors];
                                for (q, w) in w.iter_mut().enumerate() {
                                    *w = $widen(step.add(q * 2 * $lanes));
                                }
                                for (r, sum) in sums.iter_mut().enumerate() {
                                    let x = $splat(*block.add(r * lhs.row + n));
                                    for (sum, w) in sum.iter_mut().zip(w) {
                                        *sum = $fma(x, w, *sum);
                                    }
                                }
                                step = step.wrapping_add(rhs.row);
                            }
                            i += LANES;
                        }
                        for (r, sum) in sums.iter().enumerate() {
                            for (q, sum) in sum.iter().enumerate() {
                                $store(c.add(r * out.row + j + q * $lanes), *sum);
                            }
                        }
                    }
                }
            }
        };
    }

    /// Sixteen bfloat16 numbers as numbers of 32 bits.
    ///
    /// # Safety
    /// AVX-512F, and 32 bytes at `from`.
    #[target_feature(enable = "avx512f")]
    unsafe fn widen_512(from: *const u8) -> __m512 {
        // SAFETY: the caller's promise.
        let half = unsafe { _mm256_loadu_si256(from.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)))
    }

    /// Eight bfloat16 numbers as numbers of 32 bits.
    ///
    /// # Safety
    /// AVX2, and 16 bytes at `from`.
    #[target_feature(enable = "avx2")]
    unsafe fn widen_256(from: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        let half = unsafe { _mm_loadu_si128(from.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)))
    }

    tile!(tile_avx512, "avx512f", 16, 4, _mm512_setzero_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_set1_ps, _mm512_fmadd_ps, widen_512);
    tile!(tile_avx2, "avx2,fma", 8, 2, _mm256_setzero_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_set1_ps, _mm256_fmadd_ps, widen_256);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed;
        (0..n)
            .map(|_| {
                x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (x >> 8) as f32 / 8_388_608.0 - 1.0
            })
            .collect()
    }

    fn panel(k: usize, row: usize) -> Vec<u8> {
        noise(k * row / 2, 7).iter().flat_map(|x| crate::math::bf16(*x).to_le_bytes()).collect()
    }

    fn compute(isa: Isa, rows: usize, k: usize, splits: &[usize]) -> Vec<u32> {
        let blocks = k.div_ceil(LANES);
        let a = noise(blocks * LANES * rows, 3);
        let b = panel(k, 384);
        let mut c = vec![9.0; rows * LANES];
        let mut done = 0;
        for split in splits.iter().copied().chain([k]) {
            let lhs = Lhs { data: &a[done / LANES * rows * LANES + done % LANES..], row: LANES, block: rows * LANES };
            let rhs = Rhs { data: &b[done * 384..], row: 384 };
            tile(isa, rows, split - done, lhs, rhs, &mut Out { data: &mut c, row: LANES, accumulate: done > 0 });
            done = split;
        }
        c.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn every_instruction_set_row_count_and_split_gives_the_same_bits() {
        let mut sets = vec![Isa::Portable];
        match Isa::detect() {
            Isa::Avx512 => sets.extend([Isa::Avx2, Isa::Avx512]),
            Isa::Avx2 => sets.push(Isa::Avx2),
            Isa::Portable => {}
        }
        for k in [1, 16, 64, 128, 576] {
            for rows in 1..=MAX_ROWS {
                let want = compute(Isa::Portable, rows, k, &[]);
                for isa in &sets {
                    assert_eq!(compute(*isa, rows, k, &[]), want, "{isa} rows {rows} k {k}");
                    if k >= 128 {
                        assert_eq!(compute(*isa, rows, k, &[64, 128]), want, "{isa} rows {rows} k {k} split");
                    }
                }
            }
        }
    }

    #[test]
    fn the_sum_is_right() {
        let a = noise(64, 3);
        let b = panel(64, 128);
        let mut c = vec![0.0; 64];
        tile(
            Isa::detect(),
            1,
            64,
            Lhs { data: &a, row: 64, block: 64 },
            Rhs { data: &b, row: 128 },
            &mut Out { data: &mut c, row: 64, accumulate: false },
        );
        for (j, c) in c.iter().enumerate() {
            let b = |k: usize| f64::from(crate::math::from_bf16(u16::from_le_bytes([b[k * 128 + 2 * j], b[k * 128 + 2 * j + 1]])));
            let want: f64 = (0..64).map(|k| f64::from(a[k]) * b(k)).sum();
            assert!((f64::from(*c) - want).abs() < 1e-4);
        }
    }

    #[test]
    #[should_panic(expected = "too short")]
    fn a_short_operand_is_refused() {
        let mut c = vec![0.0; 64];
        tile(
            Isa::detect(),
            1,
            65,
            Lhs { data: &[0.0; 64], row: 64, block: 64 },
            Rhs { data: &[0; 65 * 128], row: 128 },
            &mut Out { data: &mut c, row: 64, accumulate: false },
        );
    }
}
