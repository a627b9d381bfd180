//! Scalar mathematics written out, so that results do not depend on the C library or the compiler.
//!
//! Only IEEE operations with one defined result are used (`+ × ÷ √` and fused multiply-add), in a
//! fixed order. The loops over slices are compiled for each instruction set; all of them give the
//! same bits.

use crate::kernel::Isa;

/// Rounds to bfloat16, ties to even. NaN stays NaN.
#[must_use]
#[inline]
pub fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// Widens a bfloat16.
#[must_use]
#[inline]
pub fn from_bf16(x: u16) -> f32 {
    f32::from_bits(u32::from(x) << 16)
}

/// Widens an IEEE binary16.
#[must_use]
pub fn from_f16(x: u16) -> f32 {
    let sign = u32::from(x & 0x8000) << 16;
    let exponent = u32::from(x >> 10) & 0x1F;
    let mantissa = u32::from(x & 0x3FF);
    let magnitude = match exponent {
        0 => return f32::from_bits(sign | (mantissa as f32 / 16_777_216.0).to_bits()),
        31 => 0x7F80_0000 | mantissa << 13,
        _ => (exponent + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// `eˣ` within 2 ulp for `x` in −87..88, clamped outside.
#[must_use]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 · 2²³: adding it rounds to an integer held in the low bits
    let x = x.clamp(-87.0, 88.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
    let n = shifted - SHIFT;
    let r = n.mul_add(-0.693_145_75, x);
    let r = n.mul_add(-1.428_606_8e-6, r);
    let mut p = 1.987_569_1e-4_f32;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5, 1.0, 1.0] {
        p = p.mul_add(r, c);
    }
    let power = shifted.to_bits().wrapping_sub(SHIFT.to_bits()).wrapping_add(127) << 23;
    p * f32::from_bits(power)
}

/// Sine and cosine of `x` in radians, |x| below 10⁶, error below 10⁻¹².
#[must_use]
pub fn sin_cos(x: f64) -> (f64, f64) {
    use std::f64::consts::{FRAC_2_PI, FRAC_PI_2};
    const REST: f64 = 6.123_233_995_736_766e-17; // π/2 beyond FRAC_PI_2
    let quarter = (x * FRAC_2_PI).round_ties_even();
    let r = quarter.mul_add(-REST, quarter.mul_add(-FRAC_PI_2, x));
    let r2 = r * r;
    let (mut s, mut c) = (0.0, 0.0);
    for n in (1..=8_i32).rev() {
        let m = f64::from(2 * n);
        s = (1.0 + s) * (-r2 / (m * (m + 1.0)));
        c = (1.0 + c) * (-r2 / (m * (m - 1.0)));
    }
    let (s, c) = (r * (1.0 + s), 1.0 + c);
    match (quarter as i64).rem_euclid(4) {
        0 => (s, c),
        1 => (c, -s),
        2 => (-s, -c),
        _ => (-c, s),
    }
}

/// Compiles a slice loop once per instruction set and picks one at run time.
macro_rules! per_isa {
    ($(#[$doc:meta])* pub fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name(isa: Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa::detect` found the features.
                Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}

per_isa! {
    /// Replaces scores by `exp(score − max)` and returns their sum. Element `i` is added in lane
    /// `i % 16`.
    pub fn softmax_terms(scores: &mut [f32]) -> f32 {
        let mut max = [f32::NEG_INFINITY; 16];
        for chunk in scores.chunks(16) {
            for (max, x) in max.iter_mut().zip(chunk) {
                *max = if *x > *max { *x } else { *max };
            }
        }
        let max = max.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
        for x in scores.iter_mut() {
            *x = exp(*x - max);
        }
        let mut sums = [0.0_f32; 16];
        for chunk in scores.chunks(16) {
            for (sum, x) in sums.iter_mut().zip(chunk) {
                *sum += *x;
            }
        }
        sums.iter().sum()
    }
}

per_isa! {
    /// `gate ← gate · sigmoid(gate) · up`, element by element.
    pub fn swiglu(gate: &mut [f32], up: &[f32]) {
        for (gate, up) in gate.iter_mut().zip(up) {
            *gate = *gate / (1.0 + exp(-*gate)) * up;
        }
    }
}

/// Sum of squares; element `i` of `xs` is added in lane `i % 16` of `sums`.
pub fn add_squares(sums: &mut [f32; 16], xs: &[f32]) {
    for chunk in xs.chunks(16) {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += x * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even() {
        for (x, want) in [(1.0, 0x3F80), (1.003_906_2, 0x3F80), (1.011_718_8, 0x3F82), (-2.5, 0xC020), (f32::INFINITY, 0x7F80)] {
            assert_eq!(bf16(x), want, "{x}");
        }
        assert!(from_bf16(bf16(f32::NAN)).is_nan());
        assert_eq!(from_bf16(bf16(f32::from_bits(0x3F80_8001))), f32::from_bits(0x3F81_0000));
    }

    #[test]
    fn f16_widens() {
        for (bits, want) in [(0x3C00, 1.0), (0xC000, -2.0), (0x7BFF, 65504.0), (0x0001, 5.960_464_5e-8), (0x8000, -0.0)] {
            assert_eq!(from_f16(bits).to_bits(), f32::to_bits(want));
        }
        assert!(from_f16(0x7E00).is_nan());
    }

    #[test]
    fn exp_and_sin_cos_are_accurate() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) / want - 1.0).abs() < 3e-7, "{x}");
        }
        assert_eq!(exp(0.0), 1.0);
        for i in 0..100_000 {
            let x = f64::from(i) * 0.083;
            let (s, c) = sin_cos(x);
            assert!((s - x.sin()).abs() < 1e-12 && (c - x.cos()).abs() < 1e-12, "{x}");
        }
    }

    #[test]
    fn loops_have_the_same_bits_on_every_instruction_set() {
        let xs: Vec<f32> = (0..77).map(|i| (i as f32 * 0.37 - 11.0) * 1.3).collect();
        let all = if Isa::detect() == Isa::Avx512 { vec![Isa::Avx2, Isa::Avx512] } else { vec![Isa::detect()] };
        let run = |isa| {
            let (mut a, mut b) = (xs.clone(), xs.clone());
            let sum = softmax_terms(isa, &mut a);
            swiglu(isa, &mut b, &xs);
            a.iter().chain(&b).chain([&sum]).map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        for isa in all {
            assert_eq!(run(isa), run(Isa::Portable));
        }
    }
}
