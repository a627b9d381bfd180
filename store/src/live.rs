//! A push session that was found alive.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::PushId;
use crate::packs::Renewal;
use pfr_schema::RepositoryName;
use std::ops::Deref;

/// A push session that was found alive. It may end at any time, so each transaction that writes
/// checks it again.
#[derive(Clone, Debug)]
pub struct LivePush {
    pub(crate) id: PushId,
    /// When its lease must be renewed.
    pub(crate) renewal: Renewal,
}

impl Deref for LivePush {
    type Target = PushId;

    fn deref(&self) -> &PushId {
        &self.id
    }
}

impl LivePush {
    /// A session that was opened or found a moment ago.
    pub(crate) fn found(store: &Store, id: PushId) -> Self {
        Self { id, renewal: Renewal::done(store) }
    }
}

impl Store {
    /// Finds a session of `repository` and renews its lease.
    ///
    /// # Errors
    /// [`Error::PushUnknown`] if the session is over or belongs to another repository. The error
    /// does not tell these apart, so that it does not reveal the other repository.
    pub async fn live_push(&self, repository: &RepositoryName, push: &PushId) -> Result<LivePush> {
        let found = self.metadata.renew_push(push.clone(), self.options.lease).await?;
        if found == *repository { Ok(LivePush::found(self, push.clone())) } else { Err(Error::PushUnknown(push.0.clone())) }
    }
}
