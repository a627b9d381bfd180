//! Limits on input from other processes.

/// Limits on input from other processes. Every parser takes them. A registry enforces the defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one JSON node or configuration: 64 MiB. The flat page manifest of an agent with
    /// 380,000 tokens has about 5 MB.
    pub document_bytes: u64,
    /// Pages in one page tree: 16 Mi.
    pub pages: u64,
    /// Sequences in one manifest: 64 Ki.
    pub sequences: u64,
    /// Page indices summed over the sequences of one manifest: 64 Mi. A manifest writes them as
    /// ranges, so a short document can name very many.
    pub sequence_pages: u64,
    /// Raw bytes of one page: 256 MiB. No product of the dimensions of a geometry may exceed it.
    pub page_bytes: u64,
    /// Raw bytes of one blob: 64 GiB.
    pub blob_bytes: u64,
    /// Tensors in one checkpoint: 64 Ki.
    pub tensors: u64,
    /// Layers in one snapshot manifest: 4,096. It has one for each rank and group, and one for each
    /// attachment.
    pub layers: u64,
    /// Bytes of the nodes that one manifest lists: 256 MiB. A reader of a snapshot has all of them
    /// in memory at once.
    pub listed_bytes: u64,
    /// Bytes of one object of a store's journal: 64 MiB. A journal summary has as many objects as
    /// it needs.
    pub journal_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            document_bytes: 64 << 20,
            pages: 16 << 20,
            sequences: 64 << 10,
            sequence_pages: 64 << 20,
            page_bytes: 256 << 20,
            blob_bytes: 64 << 30,
            tensors: 64 << 10,
            layers: 4096,
            listed_bytes: 256 << 20,
            journal_bytes: 64 << 20,
        }
    }
}
