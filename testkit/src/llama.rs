//! State files of llama.cpp, made from a description. Their values are drawn from a seed, one
//! for each (row, token), so that files with a common prefix of tokens have equal rows there.

use pfr_schema::llama::{MAGIC, VERSION};

/// A file to be made.
#[derive(Clone, Debug)]
pub struct File {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The sections.
    pub sections: Vec<Section>,
    /// The sequence that cells name, and the stream that they are in.
    pub slot: u32,
}

/// A section to be made.
#[derive(Clone, Debug)]
pub enum Section {
    /// Attention.
    Attention(Attention),
    /// Recurrent state.
    Recurrent {
        /// Layers of the model.
        layers: u32,
        /// Layers that have it.
        with: u32,
        /// Bytes of R, as f32.
        r: u64,
        /// Bytes of S, as f32.
        s: u64,
    },
}

/// An attention section to be made.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Streams of the cache.
    pub streams: u32,
    /// Positions of the cells, in their order.
    pub positions: Vec<u32>,
    /// Whether cells have 12 bytes more.
    pub extra: bool,
    /// Layers.
    pub layers: u32,
    /// Rotations of K and V.
    pub rotation: [u32; 2],
    /// Number and bytes of the type of keys, and bytes of a row.
    pub k: (i32, u64),
    /// The same for values, where there are any.
    pub v: Option<(i32, u64)>,
    /// Bytes of an element of V, where V lies transposed.
    pub transposed: Option<u32>,
}

impl Attention {
    /// `layers` layers in f16 with rows of `row` bytes, and a cell for each position below `cells`.
    #[must_use]
    pub fn plain(cells: u32, layers: u32, row: u64) -> Self {
        let (k, v) = ((1, row), Some((1, row)));
        Self { streams: 1, positions: (0..cells).collect(), extra: false, layers, rotation: [0; 2], k, v, transposed: None }
    }
}

/// Tokens that differ from each other.
#[must_use]
pub fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|i| i * 7 + 3).collect()
}

impl File {
    /// A dense model: `layers` layers in f16 with rows of `row` bytes.
    #[must_use]
    pub fn dense(tokens: Vec<u32>, layers: u32, row: u64) -> Self {
        let sections = vec![Section::Attention(Attention::plain(tokens.len() as u32, layers, row))];
        Self { tokens, sections, slot: 0 }
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let words: Vec<u32> = [u32::MAX, 1, self.tokens.len() as u32].into_iter().chain(self.tokens.iter().copied()).chain([0]).collect();
        [MAGIC, VERSION, words.len() as u32].iter().chain(&words).for_each(|word| out.extend(word.to_le_bytes()));
        for (number, section) in self.sections.iter().enumerate() {
            match section {
                Section::Attention(attention) => self.attention(attention, number as u64, &mut out),
                Section::Recurrent { layers, with, r, s } => {
                    let last = self.tokens.len() as u32 - 1;
                    [1, last, 0, 0, *layers].iter().for_each(|word: &u32| out.extend(word.to_le_bytes()));
                    for (role, row) in [(0, *r), (1, *s)] {
                        for layer in 0..*with {
                            head(&mut out, 0, row);
                            out.extend(self.row(number as u64, role, layer, self.tokens.len(), row));
                        }
                    }
                }
            }
        }
        out
    }

    fn attention(&self, attention: &Attention, section: u64, out: &mut Vec<u8>) {
        let Attention { streams, positions, extra, layers, rotation, k, v, transposed } = attention;
        let mut word = |word: u32| out.extend(word.to_le_bytes());
        word(*streams);
        let stream = self.slot.min(streams - 1);
        (0..stream).for_each(|_| word(0));
        word(positions.len() as u32);
        for position in positions {
            word(*position);
            word(1);
            if *extra {
                [7, 8, *position].into_iter().for_each(&mut word);
            }
            word(self.slot);
        }
        word(u32::from(transposed.is_some()));
        word(*layers);
        rotation.iter().for_each(|size| word(*size));
        for layer in 0..*layers {
            head(out, k.0, k.1);
            positions.iter().for_each(|position| out.extend(self.row(section, 0, layer, *position as usize + 1, k.1)));
        }
        for layer in 0..if v.is_some() { *layers } else { 0 } {
            let (number, row) = v.unwrap();
            let rows: Vec<Vec<u8>> = positions.iter().map(|at| self.row(section, 1, layer, *at as usize + 1, row)).collect();
            let Some(element) = transposed else {
                head(out, number, row);
                rows.iter().for_each(|row| out.extend(row));
                continue;
            };
            out.extend(number.to_le_bytes());
            out.extend(element.to_le_bytes());
            out.extend(((row / u64::from(*element)) as u32).to_le_bytes());
            for at in (0..row as usize).step_by(*element as usize) {
                rows.iter().for_each(|row| out.extend(&row[at..at + *element as usize]));
            }
        }
        (stream + 1..*streams).for_each(|_| out.extend(0_u32.to_le_bytes()));
    }

    /// The state of one layer after `tokens` tokens. Depends on these alone.
    fn row(&self, section: u64, role: u64, layer: u32, tokens: usize, bytes: u64) -> Vec<u8> {
        let mut state = (section << 48) ^ (role << 40) ^ (u64::from(layer) << 24);
        for token in &self.tokens[..tokens] {
            state = (state ^ u64::from(*token)).wrapping_mul(0x5851_F42D_4C95_7F2D).rotate_left(23) ^ 0x9E37_79B9;
        }
        // Small numbers as f32 or f16: no NaN, so that values have one form.
        let draw = |i: u64| (state.wrapping_add(i).wrapping_mul(0x2545_F491_4F6C_DD1D) >> 57) as u8 & 0x3b;
        (0..bytes).map(draw).collect()
    }
}

fn head(out: &mut Vec<u8>, number: i32, row: u64) {
    out.extend(number.to_le_bytes());
    out.extend(row.to_le_bytes());
}
