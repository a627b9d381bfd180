/// Limits on foreign input. Every parser takes them; the defaults are what a registry enforces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one JSON container or configuration: 64 MiB. A 380 K-token agent's flat manifest is
    /// about 5 MB.
    pub document_bytes: u64,
    /// Pages in one tree: 16 Mi.
    pub pages: u64,
    /// Sequences in one manifest: 64 Ki.
    pub sequences: u64,
    /// Page indices summed over the sequences of one manifest: 64 Mi. Ranges are small; what they
    /// stand for is not.
    pub sequence_pages: u64,
    /// Raw bytes of one page: 256 MiB. Every product of a geometry stays below it.
    pub page_bytes: u64,
    /// Raw bytes of one blob: 64 GiB.
    pub blob_bytes: u64,
    /// Tensors in one checkpoint: 64 Ki.
    pub tensors: u64,
    /// Layers in one snapshot manifest: 4,096 (world size × groups, and attachments).
    pub layers: u64,
    /// Bytes of the containers that one manifest lists: 256 MiB. A reader of a snapshot has them in
    /// memory at once.
    pub listed_bytes: u64,
    /// Bytes of one object of a store's own journal: 64 MiB. A summary has as many objects as it
    /// needs.
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
