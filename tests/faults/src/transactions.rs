//! Metadata behind gates. Sometimes a call fails, before its effect or after it.

use crate::faults::{Fault, Faults};
use crate::gate;
use async_trait::async_trait;
use pfr_schema::api::TagState;
use pfr_schema::journal::Record;
use pfr_schema::{AccessTokenId, Digest, DigestPrefix, DomainName, Kind, RepositoryName, Tag};
// Every type that a transaction takes or gives.
use pfr_store::*;
use std::sync::Arc;
use std::time::Duration;

/// Metadata as one replica sees it.
#[derive(Clone, Debug)]
pub struct Transactions {
    inner: Arc<dyn Metadata>,
    /// The same metadata with a clock that runs ahead: a planted bug, collection that does not
    /// respect leases.
    collects: Arc<dyn Metadata>,
    /// Another planted bug: packs are deleted as soon as they are emptied.
    no_grace: bool,
    faults: Faults,
}

impl Transactions {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Metadata>, faults: Faults) -> Self {
        Self { collects: Arc::clone(&inner), inner, no_grace: false, faults }
    }

    /// Gives collections another clock than all other calls.
    #[must_use]
    pub fn collecting_with(mut self, collects: Arc<dyn Metadata>) -> Self {
        self.collects = collects;
        self
    }

    /// Deletes packs as soon as they are emptied.
    #[must_use]
    pub fn without_grace(mut self) -> Self {
        self.no_grace = true;
        self
    }

    async fn call<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        gate::pass().await;
        let under_way = gate::Call::begin();
        let lost = |reason: &str| Err(Error::Unavailable { what: "metadata", reason: format!("{reason} (injected)") });
        let result = match self.faults.draw(false) {
            Some(Fault::After) => match call.await {
                Ok(_) => lost("the answer was lost"),
                refused => refused,
            },
            Some(_) => lost("connection reset"),
            None => call.await,
        };
        drop(under_way);
        gate::pass().await;
        result
    }
}

/// Wraps each transaction: it passes the gate of its task, and may fail.
macro_rules! decorate {
    ($($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $mode:ident |$with:ident| $work:expr;)+) => {
        #[async_trait]
        impl Metadata for Transactions {
            $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                decorate!(@ $name self, $($argument),*)
            })+

            fn rows_written(&self) -> u64 {
                self.inner.rows_written()
            }
        }
    };
    (@ collect $self:ident, $budget:ident) => {
        $self.call($self.collects.collect($budget)).await
    };
    (@ emptied_packs $self:ident, $grace:ident, $limit:ident) => {{
        let grace = if $self.no_grace { Duration::ZERO } else { $grace };
        $self.call($self.inner.emptied_packs(grace, $limit)).await
    }};
    (@ $name:ident $self:ident, $($argument:ident),*) => {
        $self.call($self.inner.$name($($argument),*)).await
    };
}

metadata_transactions!(decorate);
