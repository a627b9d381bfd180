//! One sequence's pages of one attention group, as the model sees them.

use crate::cache::PAGE_TOKENS;
use crate::model::KvSequence;
use pfr_schema::engine::{Component, GroupLayout};

/// Pages found through a block table. A component lies in one part (layers one after another) or in
/// a part for each layer.
pub struct KvView<'a> {
    bytes: &'a mut [u8],
    k: &'a Component,
    v: &'a Component,
    columns: &'a [Option<u32>],
    layer_bytes: usize,
}

impl<'a> KvView<'a> {
    /// # Panics
    /// If the group has no geometry or not two components: a bug in the caller.
    pub(super) fn new(layout: &'a GroupLayout, bytes: &'a mut [u8], columns: &'a [Option<u32>]) -> Self {
        let [k, v] = layout.components.as_slice() else { panic!("group {:?} has no K and V", layout.name) };
        let layers = layout.geometry.map_or(1, |geometry| geometry.n_layers as usize);
        let page: u64 = k.parts.iter().map(|part| part.bytes).sum();
        Self { bytes, k, v, columns, layer_bytes: page as usize / layers }
    }

    /// Where a layer of a page begins.
    fn start(&self, component: &Component, layer: usize, page: usize) -> usize {
        let Some(block) = self.columns[page] else { panic!("column {page} fell out of the window") };
        let (part, within) = match component.parts.as_slice() {
            [whole] => (whole, layer * self.layer_bytes),
            parts => (&parts[layer], 0),
        };
        (part.offset + u64::from(block) * part.block_stride) as usize + within
    }
}

impl KvSequence for KvView<'_> {
    fn k(&self, layer: usize, page: usize) -> &[u8] {
        &self.bytes[self.start(self.k, layer, page)..][..self.layer_bytes]
    }

    fn v(&self, layer: usize, page: usize) -> &[u8] {
        &self.bytes[self.start(self.v, layer, page)..][..self.layer_bytes]
    }

    fn write(&mut self, layer: usize, position: usize, k: &[u16], v: &[u16]) {
        let row = self.layer_bytes / PAGE_TOKENS;
        for (component, values) in [(self.k, k), (self.v, v)] {
            let at = self.start(component, layer, position / PAGE_TOKENS) + position % PAGE_TOKENS * row;
            for (to, value) in self.bytes[at..at + row].as_chunks_mut::<2>().0.iter_mut().zip(values) {
                *to = value.to_le_bytes();
            }
        }
    }
}
