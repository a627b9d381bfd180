//! Metadata whose calls a test counts, and of which it lets some fail.

use async_trait::async_trait;
use parking_lot::Mutex;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{AccessTokenId, Digest, DigestPrefix, DomainName, Kind, RepositoryName, Tag};
// Every type that a transaction takes or gives.
use pfr_store::*;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Metadata around other metadata.
#[derive(Debug)]
pub struct Watched {
    inner: Arc<dyn Metadata>,
    calls: AtomicUsize,
    /// How many of the next calls of a transaction fail.
    failures: Mutex<HashMap<&'static str, usize>>,
    /// Budgets that end when a transaction is called.
    budgets: Mutex<HashMap<&'static str, Budget>>,
}

impl Watched {
    pub fn new(inner: Arc<dyn Metadata>) -> Arc<Self> {
        Arc::new(Self { inner, calls: AtomicUsize::new(0), failures: Mutex::default(), budgets: Mutex::default() })
    }

    /// Transactions that were called so far.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Lets the next calls of a transaction fail before they do anything.
    pub fn fail(&self, transaction: &'static str, calls: usize) {
        self.failures.lock().insert(transaction, calls);
    }

    /// Ends a budget when a transaction is called.
    pub fn end_at(&self, transaction: &'static str, budget: &Budget) {
        self.budgets.lock().insert(transaction, budget.clone());
    }

    fn called(&self, transaction: &str) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some(budget) = self.budgets.lock().get(transaction) {
            budget.end();
        }
        match self.failures.lock().get_mut(transaction) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(Error::Unavailable { what: "metadata", reason: format!("{transaction}: connection reset (injected)") })
            }
            _ => Ok(()),
        }
    }
}

macro_rules! watch {
    ($($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $mode:ident |$with:ident| $work:expr;)+) => {
        #[async_trait]
        impl Metadata for Watched {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                self.called(stringify!($name))?;
                self.inner.$name($($argument),*).await
            })+

            fn rows_written(&self) -> u64 {
                self.inner.rows_written()
            }
        }
    };
}
metadata_transactions!(watch);
