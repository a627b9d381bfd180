//! Chooses the next token from logits, reproducibly.

use crate::math;
use crate::rng::Rng;

/// How to choose.
#[derive(Clone, Debug)]
pub enum Sampler {
    /// The token with the highest logit; the lowest token among equals.
    Greedy,
    /// One of the `k` most probable tokens, at a temperature, from a seeded generator.
    TopK {
        /// Candidates.
        k: usize,
        /// Divides the logits; above 0.
        temperature: f32,
        /// The generator.
        rng: Rng,
    },
}

impl Sampler {
    /// Varied text for corpora: the 40 most probable tokens at temperature 0.8.
    #[must_use]
    pub fn varied(seed: u64) -> Self {
        Self::TopK { k: 40, temperature: 0.8, rng: Rng::new(seed) }
    }

    /// The next token; 0 if there are no logits.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        let Self::TopK { k, temperature, rng } = self else { return best(logits) };
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_score = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let k = (*k).clamp(1, logits.len().max(1));
        if k < order.len() {
            order.select_nth_unstable_by(k, by_score);
            order.truncate(k);
        }
        order.sort_unstable_by(by_score);
        let Some(top) = order.first().map(|t| logits[*t as usize]) else { return 0 };
        let weights: Vec<f32> = order.iter().map(|t| math::exp((logits[*t as usize] - top) / *temperature)).collect();
        let mut left = rng.unit() * weights.iter().sum::<f32>();
        for (token, weight) in order.iter().zip(weights) {
            left -= weight;
            if left < 0.0 {
                return *token;
            }
        }
        order[0]
    }
}

fn best(logits: &[f32]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, score) in (0_u32..).zip(logits) {
        if *score > best.0 {
            best = (*score, token);
        }
    }
    best.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_best() {
        assert_eq!(Sampler::Greedy.choose(&[1.0, 3.0, 3.0, -1.0]), 1);
        assert_eq!(Sampler::Greedy.choose(&[]), 0);
    }

    #[test]
    fn top_k_stays_among_the_best_and_repeats_with_its_seed() {
        let logits: Vec<f32> = (0..100).map(|i| (i * 37 % 100) as f32 / 50.0).collect();
        let draw = |seed| {
            let mut sampler = Sampler::varied(seed);
            (0..50).map(|_| sampler.choose(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!(draw(1).iter().all(|t| logits[*t as usize] >= 1.2));
    }
}
