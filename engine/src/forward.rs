//! The forward pass: RMSNorm, rotary attention with grouped heads, SwiGLU, tied output.
//!
//! Activations are kept panel by panel, `[panel][token][64]`: threads then write disjoint slices,
//! and a head is a panel. A token's numbers depend on nothing but the tokens before it; see
//! `kernel` for why that holds bit for bit however the tokens are batched.

use crate::cache::PAGE_TOKENS;
use crate::kernel::{LANES, Lhs, MAX_ROWS, Out, Rhs, tile};
use crate::math;
use crate::model::{KvSequence, Matrix, Model, bytes_of};
use crate::parallel::split;

/// Tokens of one pass through the layers: enough to reuse weights from cache, few enough for
/// activations to stay there.
const CHUNK: usize = 128;

/// Activations of some tokens, `[panel][token][64]`.
struct Activations {
    tokens: usize,
    data: Vec<f32>,
}

impl Activations {
    fn zero(panels: usize, tokens: usize) -> Self {
        Self { tokens, data: vec![0.0; panels * tokens * LANES] }
    }

    fn panels(&self) -> usize {
        self.data.len() / (self.tokens * LANES)
    }

    fn at(&self, panel: usize, token: usize) -> &[f32] {
        &self.data[(panel * self.tokens + token) * LANES..][..LANES]
    }

    fn at_mut(&mut self, panel: usize, token: usize) -> &mut [f32] {
        &mut self.data[(panel * self.tokens + token) * LANES..][..LANES]
    }

    fn add(&mut self, other: &Self) {
        for (x, y) in self.data.iter_mut().zip(&other.data) {
            *x += y;
        }
    }
}

impl Model {
    /// Runs `tokens` (at least one) at positions `start..` and returns the last one's final hidden
    /// state (`width` numbers). With `write`, K and V of every token go to `kv` first; without,
    /// `kv` must have them already, and they are used.
    ///
    /// # Panics
    /// If `tokens` is empty, a token is outside the vocabulary or `kv` lacks pages: bugs in the
    /// caller.
    pub fn forward<K: KvSequence>(&self, threads: usize, tokens: &[u32], start: usize, kv: &mut K, write: bool) -> Vec<f32> {
        assert!(!tokens.is_empty(), "nothing to run");
        let mut hidden = Vec::new();
        for (i, chunk) in tokens.chunks(CHUNK).enumerate() {
            hidden = self.chunk(threads, chunk, start + i * CHUNK, kv, write);
        }
        hidden
    }

    fn chunk<K: KvSequence>(&self, threads: usize, tokens: &[u32], start: usize, kv: &mut K, write: bool) -> Vec<f32> {
        // One token's products are too short to be worth starting threads for.
        let threads = if tokens.len() == 1 { 1 } else { threads };
        let config = &self.config;
        let rotations: Vec<(f32, f32)> = (start..start + tokens.len()).flat_map(|p| self.rotation(p)).collect();
        let mut x = self.embed(tokens);
        for (index, layer) in self.layers.iter().enumerate() {
            let mut qkv = self.matmul(threads, &layer.qkv, &self.normalise(&x, &layer.attention_norm));
            rotate(&mut qkv, config.heads + config.kv_heads, &rotations);
            if write {
                self.store(index, start, &qkv, kv);
            }
            let attended = self.attention(threads, index, start, &qkv, &*kv);
            x.add(&self.matmul(threads, &layer.attention_out, &attended));
            let mut gate = self.matmul(threads, &layer.gate_up, &self.normalise(&x, &layer.ffn_norm));
            let up = gate.data.split_off(gate.data.len() / 2);
            split(threads, &mut gate.data, tokens.len() * LANES, |first, run| {
                math::swiglu(self.isa, run, &up[first * tokens.len() * LANES..]);
            });
            x.add(&self.matmul(threads, &layer.down, &gate));
        }
        let mut last = Activations::zero(x.panels(), 1);
        for panel in 0..x.panels() {
            last.at_mut(panel, 0).copy_from_slice(x.at(panel, tokens.len() - 1));
        }
        self.normalise(&last, &self.final_norm).data
    }

    /// The logits of every token of the vocabulary after a final hidden state.
    ///
    /// # Panics
    /// If `hidden` has not `width` numbers: a bug in the caller.
    #[must_use]
    pub fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        assert_eq!(hidden.len(), self.config.width, "hidden state");
        self.matmul(1, &self.embedding, &Activations { tokens: 1, data: hidden.to_vec() }).data
    }

    fn embed(&self, tokens: &[u32]) -> Activations {
        let mut x = Activations::zero(self.config.width / LANES, tokens.len());
        for panel in 0..x.panels() {
            for (t, token) in tokens.iter().enumerate() {
                for (i, x) in x.at_mut(panel, t).iter_mut().enumerate() {
                    *x = self.embedding.at(*token as usize, panel * LANES + i);
                }
            }
        }
        x
    }

    /// Cosine and sine of each of a head's 32 pairs at a position.
    fn rotation(&self, position: usize) -> impl Iterator<Item = (f32, f32)> {
        self.frequencies.iter().map(move |frequency| {
            let (sin, cos) = math::sin_cos(position as f64 * frequency);
            (cos as f32, sin as f32)
        })
    }

    fn normalise(&self, x: &Activations, weights: &[f32]) -> Activations {
        let mut out = Activations::zero(x.panels(), x.tokens);
        for t in 0..x.tokens {
            let mut sums = [0.0; 16];
            (0..x.panels()).for_each(|panel| math::add_squares(&mut sums, x.at(panel, t)));
            let mean = sums.iter().sum::<f32>() / weights.len() as f32;
            let scale = 1.0 / (mean + self.config.epsilon).sqrt();
            for (panel, weights) in weights.chunks(LANES).enumerate() {
                let terms = x.at(panel, t).iter().zip(weights);
                for (out, (x, w)) in out.at_mut(panel, t).iter_mut().zip(terms) {
                    *out = x * scale * w;
                }
            }
        }
        out
    }

    fn matmul(&self, threads: usize, matrix: &Matrix, x: &Activations) -> Activations {
        let tokens = x.tokens;
        let mut out = Activations::zero(matrix.panels(), tokens);
        split(threads, &mut out.data, tokens * LANES, |first, run| {
            for (i, panel) in run.chunks_mut(tokens * LANES).enumerate() {
                let rhs = Rhs { data: matrix.panel(first + i), row: 2 * LANES };
                for t in (0..tokens).step_by(MAX_ROWS) {
                    let lhs = Lhs { data: &x.data[t * LANES..], row: LANES, block: tokens * LANES };
                    let mut out = Out { data: &mut panel[t * LANES..], row: LANES, accumulate: false };
                    tile(self.isa, MAX_ROWS.min(tokens - t), matrix.inputs, lhs, rhs, &mut out);
                }
            }
        });
        out
    }

    fn store<K: KvSequence>(&self, layer: usize, start: usize, qkv: &Activations, kv: &mut K) {
        let (heads, kv_heads) = (self.config.heads, self.config.kv_heads);
        for t in 0..qkv.tokens {
            let row = |first: usize| -> Vec<u16> { (first..first + kv_heads).flat_map(|h| qkv.at(h, t)).map(|x| math::bf16(*x)).collect() };
            kv.write(layer, start + t, &row(heads), &row(heads + kv_heads));
        }
    }

    /// Attention of every query head over the cache.
    fn attention<K: KvSequence>(&self, threads: usize, layer: usize, start: usize, qkv: &Activations, kv: &K) -> Activations {
        let (tokens, kv_heads) = (qkv.tokens, self.config.kv_heads);
        let group = self.config.heads / kv_heads;
        // A job is one KV head and as many tokens as its group of query heads leaves rows for.
        let per_job = MAX_ROWS / group;
        let jobs = tokens.div_ceil(per_job);
        let size = per_job * group * LANES;
        let mut done = vec![0.0; kv_heads * jobs * size];
        split(threads, &mut done, size, |first, run| {
            let mut keys = Keys { head: usize::MAX, data: Vec::new() };
            let mut scores = Vec::new();
            for (i, out) in run.chunks_mut(size).enumerate() {
                let (head, t) = ((first + i) / jobs, (first + i) % jobs * per_job);
                keys.prepare(kv, layer, head, kv_heads, start + tokens);
                let job = Job { layer, head, group, kv_heads, position: start + t, tokens: per_job.min(tokens - t) };
                let mut q = [0.0; MAX_ROWS * LANES];
                for (row, q) in q.chunks_mut(LANES).take(job.tokens * group).enumerate() {
                    for (q, x) in q.iter_mut().zip(qkv.at(head * group + row % group, t + row / group)) {
                        *q = x * 0.125; // 1 / √64
                    }
                }
                self.attend(&job, &q, &keys, kv, &mut scores, out);
            }
        });
        let mut out = Activations::zero(self.config.heads, tokens);
        for (i, rows) in done.chunks(size).enumerate() {
            let (head, first) = (i / jobs, i % jobs * per_job);
            for (row, values) in rows.chunks(LANES).enumerate().take((tokens - first) * group) {
                out.at_mut(head * group + row % group, first + row / group).copy_from_slice(values);
            }
        }
        out
    }

    fn attend<K: KvSequence>(&self, job: &Job, q: &[f32], keys: &Keys, kv: &K, scores: &mut Vec<f32>, out: &mut [f32]) {
        let rows = job.tokens * job.group;
        let longest = job.position + job.tokens;
        let stride = longest.next_multiple_of(LANES);
        scores.resize(rows * stride, 0.0);
        for (panel, at) in (0..longest).step_by(LANES).enumerate() {
            let lhs = Lhs { data: q, row: LANES, block: LANES };
            let rhs = Rhs { data: keys.panel(panel), row: 2 * LANES };
            tile(self.isa, rows, LANES, lhs, rhs, &mut Out { data: &mut scores[at..], row: stride, accumulate: false });
        }
        let mut sums = [0.0; MAX_ROWS];
        for (row, sum) in sums.iter_mut().enumerate().take(rows) {
            let seen = job.position + row / job.group + 1;
            *sum = math::softmax_terms(self.isa, &mut scores[row * stride..][..seen]);
        }
        // Positions all rows see go through the kernel together, the later ones token by token.
        self.mix(job, kv, scores, stride, 0..rows, 0..job.position + 1, out);
        for t in 1..job.tokens {
            let rows = t * job.group..rows;
            self.mix(job, kv, scores, stride, rows, job.position + t..job.position + t + 1, out);
        }
        for (row, sum) in out.chunks_mut(LANES).zip(sums).take(rows) {
            let scale = 1.0 / sum;
            row.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// Adds `scores[row][p] · V[p]` for the given rows and positions (which lie in one page unless
    /// they begin at 0) to the rows of `out`.
    #[allow(clippy::too_many_arguments)]
    fn mix<K: KvSequence>(
        &self,
        job: &Job,
        kv: &K,
        scores: &[f32],
        stride: usize,
        rows: std::ops::Range<usize>,
        positions: std::ops::Range<usize>,
        out: &mut [f32],
    ) {
        let row_bytes = job.kv_heads * LANES * 2;
        let mut at = positions.start;
        while at < positions.end {
            let (page, slot) = (at / PAGE_TOKENS, at % PAGE_TOKENS);
            let count = (PAGE_TOKENS - slot).min(positions.end - at);
            let lhs = Lhs { data: &scores[rows.start * stride + at..], row: stride, block: LANES };
            let rhs = Rhs { data: &kv.v(job.layer, page)[slot * row_bytes + job.head * LANES * 2..], row: row_bytes };
            let mut out = Out { data: &mut out[rows.start * LANES..], row: LANES, accumulate: at > 0 };
            tile(self.isa, rows.len(), count, lhs, rhs, &mut out);
            at += count;
        }
    }
}

/// Query rows that run together: `tokens × group`, all reading one KV head.
struct Job {
    layer: usize,
    head: usize,
    group: usize,
    kv_heads: usize,
    /// Position of the first token.
    position: usize,
    tokens: usize,
}

/// K of one head with positions as columns, `[panel of 64 positions][64][64]`: the form in which
/// the kernel computes 64 scores at once. Four little-endian values to a word.
struct Keys {
    head: usize,
    data: Vec<u64>,
}

/// Words of a line of 64 values.
const LINE: usize = LANES / 4;

impl Keys {
    /// Turns the pages that hold `positions` positions, unless that head's are there already.
    fn prepare<K: KvSequence>(&mut self, kv: &K, layer: usize, head: usize, kv_heads: usize, positions: usize) {
        if self.head == head {
            return;
        }
        self.head = head;
        self.data.resize(positions.div_ceil(LANES) * LANES * LINE, 0);
        let row_bytes = kv_heads * LANES * 2;
        for page in 0..positions.div_ceil(PAGE_TOKENS) {
            let first = page * PAGE_TOKENS;
            let panel = &mut self.data[first / LANES * LANES * LINE..][..LANES * LINE];
            for (quad, rows) in kv.k(layer, page).chunks(4 * row_bytes).enumerate() {
                let row = |i: usize| &rows[i * row_bytes + head * LANES * 2..][..LANES * 2];
                turn([row(0), row(1), row(2), row(3)], &mut panel[(first % LANES) / 4 + quad..]);
            }
        }
    }

    fn panel(&self, panel: usize) -> &[u8] {
        bytes_of(&self.data[panel * LANES * LINE..][..LANES * LINE])
    }
}

/// Writes element `i` of four rows of 64 values as one word to `lines[i × LINE]`.
fn turn(rows: [&[u8]; 4], lines: &mut [u64]) {
    let words = rows.map(|row| row.as_chunks::<8>().0);
    for i in 0..LINE {
        let word = words.map(|words| u64::from_le_bytes(words[i]));
        for element in 0..4 {
            let [a, b, c, d] = word.map(|w| w >> (16 * element) & 0xFFFF);
            lines[(4 * i + element) * LINE] = (a | b << 16 | c << 32 | d << 48).to_le();
        }
    }
}

/// Rotates the pairs (i, i + 32) of the first `heads` panels by each token's angles.
fn rotate(x: &mut Activations, heads: usize, rotations: &[(f32, f32)]) {
    let (half, tokens) = (LANES / 2, x.tokens);
    for (i, head) in x.data.chunks_mut(LANES).take(heads * tokens).enumerate() {
        let (low, high) = head.split_at_mut(half);
        let angles = &rotations[i % tokens * half..][..half];
        for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}
