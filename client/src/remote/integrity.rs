//! Proof that what a registry stores is well.

use super::Remote;
use super::send::PROOF_TIMEOUT;
use crate::error::Result;
use pfr_schema::api;

/// Bytes of a report: it may name very many blobs.
const REPORT: usize = 256 << 20;

impl Remote {
    /// Has the registry read its packs; takes as long as that takes.
    ///
    /// # Errors
    /// `overloaded` if it is proving something else.
    pub async fn scrub(&self, full: bool, bytes_per_second: Option<u64>) -> Result<api::ScrubReport> {
        let mut url = self.path(&["scrub"]);
        if full {
            url.query_pairs_mut().append_pair("full", "true");
        }
        if let Some(rate) = bytes_per_second {
            url.query_pairs_mut().append_pair("rate", &rate.to_string());
        }
        let response = self.send(PROOF_TIMEOUT, || self.client.post(url.clone())).await?;
        let bytes = self.read(response, REPORT).await?;
        self.parse(&bytes)
    }
}
