//! Checks of everything that a registry stores.

use super::Remote;
use crate::boxed;

use crate::error::Result;
use pfr_schema::api;

impl Remote {
    /// Makes the registry read all its packs. This may take hours.
    ///
    /// # Errors
    /// `overloaded` if another scrub runs.
    #[boxed]
    pub async fn scrub(&self, full: bool, bytes_per_second: Option<u64>) -> Result<api::ScrubReport> {
        let mut url = self.path(&["scrub"]);
        if full {
            url.query_pairs_mut().append_pair("full", "true");
        }
        if let Some(rate) = bytes_per_second {
            url.query_pairs_mut().append_pair("rate", &rate.to_string());
        }
        self.proof(|| self.client.post(url.clone())).await
    }
}
