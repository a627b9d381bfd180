//! Collection: frees what nothing can reach or is about to reach, at a cost in proportion to the garbage.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::GcTrigger;
use pfr_schema::api::GcReport;
use std::time::Duration;

/// How a collection runs.
#[derive(Clone, Debug)]
pub struct GcOptions {
    /// Why it runs.
    pub trigger: GcTrigger,
    /// Change nothing, say what would be freed.
    pub dry_run: bool,
    /// How long a pack that nothing points to stays on storage: longer than any read, redirect or clock error. Default 1 hour.
    pub horizon: Duration,
    /// Objects deleted in one transaction: bounds how long others wait. Default 2,000.
    pub batch: usize,
    /// Whether packs less than half alive are copied together. Default true.
    pub compact: bool,
}

impl Default for GcOptions {
    fn default() -> Self {
        Self { trigger: GcTrigger::Command, dry_run: false, horizon: Duration::from_secs(3600), batch: 2000, compact: true }
    }
}

impl Store {
    /// Collects garbage until none is due. Any number may run at once, in any number of processes.
    ///
    /// # Errors
    /// [`Error::Unavailable`], [`Error::Full`]; [`Error::Internal`] if references cannot be read: then nothing that hangs on them is deleted.
    pub async fn gc(&self, _options: &GcOptions, _progress: &mut (dyn FnMut(&GcReport) + Send)) -> Result<GcReport> {
        Err(Error::Internal("in the making".into()))
    }
}
