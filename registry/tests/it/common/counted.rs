//! Metadata whose transactions a test counts.

use async_trait::async_trait;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{AccessTokenId, Digest, DigestPrefix, DomainName, Kind, RepositoryName, Tag};
// Every type that a transaction takes or gives.
use pfr_store::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Metadata around other metadata.
#[derive(Debug)]
pub struct Counted {
    inner: Arc<dyn Metadata>,
    calls: AtomicUsize,
}

impl Counted {
    pub fn new(inner: Arc<dyn Metadata>) -> Arc<Self> {
        Arc::new(Self { inner, calls: AtomicUsize::new(0) })
    }

    /// Transactions that were called so far.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

macro_rules! count {
    ($($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $mode:ident |$with:ident| $work:expr;)+) => {
        #[async_trait]
        impl Metadata for Counted {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                self.calls.fetch_add(1, Ordering::Relaxed);
                self.inner.$name($($argument),*).await
            })+

            fn rows_written(&self) -> u64 {
                self.inner.rows_written()
            }
        }
    };
}
metadata_transactions!(count);
