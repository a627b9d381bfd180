//! Files in which `llama-server` saves a slot (`POST /slots/ID?action=save`): the state of one
//! sequence of llama.cpp, version 4, little-endian.
//!
//! ```text
//! file       = u32 magic | u32 4 | u32 words | words × i32 | section …
//! words      = -1 | 1 | n | n × token | 0 (images and other media; none)         or the tokens alone
//! attention  = u32 streams | streams × (u32 cells, and if these are not 0: body)   one stream has cells
//! body       = cells × cell | u32 V is transposed | u32 layers | 2 × u32 rotation | layers × K | layers × V, or none (latent)
//! cell       = i32 position | u32 1 | (12 bytes: position in an image, token) | i32 sequence
//! K, V       = i32 type | u64 bytes of a row | cells × row
//! transposed = i32 type | u32 bytes of an element | u32 rows | rows × cells × element
//! recurrent  = u32 1 | i32 position | u32 0 | u32 0 | u32 layers | as many R as S, up to the end of the file; form of K
//! ```
//!
//! The file does not say which sections it has, whether cells have their 12 bytes, and whether
//! there are V: [`parse`] tries each, and refuses a file that can be read in no way, or in two. The
//! *head* is everything except rows. It says where all rows lie, so a file can be laid out from its
//! head alone.
//!
//! Source: `llama_context::state_seq_save_file`, `llama_kv_cache::state_write`,
//! `llama_memory_recurrent::state_write` and `server_tokens::serialize` of llama.cpp b11434. None
//! of their code is here.

mod element;
mod parse;

pub use element::Element;
pub use parse::{At, Bytes, Head, Source, parse};

use crate::digest::Digest;

/// First number of a file.
pub const MAGIC: u32 = 0x6767_7371;
/// The version that is read here.
pub const VERSION: u32 = 4;

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The tokens of the slot.
    pub tokens: Vec<u32>,
    /// Tokens with state: those up to the last position. 0 for a slot without tokens.
    pub boundary: u64,
    /// In the order of the file.
    pub sections: Vec<Section>,
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of the head.
    pub head_bytes: u64,
}

/// The state of one memory of the context: of attention, of sliding windows, recurrent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Streams of the cache; 0 for recurrent state.
    pub streams: u32,
    /// Position of each cell. All are different.
    pub positions: Vec<u32>,
    /// 12 bytes for each cell, or nothing.
    pub extra: Vec<u8>,
    /// Sizes of the rotations of K and V in a quantized cache; 0 without.
    pub rotation: [u32; 2],
    /// In the order of the file.
    pub blocks: Vec<Block>,
}

/// What rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Keys, or the latent vectors.
    K,
    /// Values.
    V,
    /// Windows of convolutions.
    R,
    /// Recurrent states.
    S,
}

/// The rows of one layer, all cells one after another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What they are.
    pub role: Role,
    /// Their number among the blocks of this role: files do not say which layers are left out.
    pub number: u32,
    /// Type of an element.
    pub element: Element,
    /// Bytes of one cell.
    pub row: u64,
    /// Whether cells are the inner dimension: `row / element` times one element of each cell.
    pub transposed: bool,
    /// Where they begin in the file.
    pub at: u64,
    /// Bytes of all.
    pub bytes: u64,
}

impl Section {
    /// Whether it has a cell for every position below `boundary`.
    #[must_use]
    pub fn is_complete(&self, boundary: u64) -> bool {
        self.streams > 0 && self.positions.len() as u64 == boundary
    }

    /// The forms of its blocks, equal neighbours as one: `30 K f16 384, 30 V f16 384 transposed`.
    #[must_use]
    pub fn form(&self) -> String {
        let mut forms: Vec<(u32, String)> = Vec::new();
        for block in &self.blocks {
            let transposed = if block.transposed { " transposed" } else { "" };
            let form = format!("{:?} {} {}{transposed}", block.role, block.element.name(), block.row);
            match forms.last_mut() {
                Some((count, last)) if *last == form => *count += 1,
                _ => forms.push((1, form)),
            }
        }
        forms.iter().map(|(count, form)| format!("{count} {form}")).collect::<Vec<_>>().join(", ")
    }
}

impl State {
    /// The forms of its sections, with the number of streams. Equal exactly if one server can have
    /// written both files.
    #[must_use]
    pub fn form(&self) -> String {
        let section = |section: &Section| match section.streams {
            0 => format!("recurrent: {}", section.form()),
            streams => {
                let ([k, v], cell) = (section.rotation, 12 + section.cell_extra());
                format!("{streams} streams, {cell} bytes a cell, rotations {k} and {v}: {}", section.form())
            }
        };
        self.sections.iter().map(section).collect::<Vec<_>>().join("; ")
    }

    /// The parts of the head, as ranges of the file.
    pub fn gaps(&self) -> impl Iterator<Item = std::ops::Range<u64>> + '_ {
        let blocks = self.sections.iter().flat_map(|section| &section.blocks);
        let starts = std::iter::once(0).chain(blocks.clone().map(|block| block.at + block.bytes));
        starts.zip(blocks.map(|block| block.at).chain([self.bytes])).map(|(start, end)| start..end)
    }
}

impl Section {
    /// Bytes that each cell has besides position, count and sequence.
    fn cell_extra(&self) -> usize {
        self.extra.len().checked_div(self.positions.len()).unwrap_or_default()
    }

    /// The layout of its pages for a page tree: opaque, and different where the bytes of a page
    /// are.
    #[must_use]
    pub fn layout(&self) -> String {
        const LONGEST: usize = 200;
        let [k, v] = self.rotation;
        let rotated = if (k, v) == (0, 0) { String::new() } else { format!("/rotated-{k}-{v}") };
        let layout = format!("opaque/llama.cpp/state-{VERSION}/{}{rotated}", self.form().replace(", ", "/").replace(' ', "-"));
        if layout.len() <= LONGEST { layout } else { format!("opaque/llama.cpp/state-{VERSION}/{}", Digest::sha256(layout.as_bytes())) }
    }
}
