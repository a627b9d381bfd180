//! Snapshots that eviction leaves alone for a time: pins with an end. Each is one file, so that a
//! pin ends after a restart too.

use crate::config::Config;
use crate::error::Result;
use crate::files::{Files, Record};
use parking_lot::Mutex;
use pfr_schema::{Digest, RepositoryName};
use pfr_store::{Pin, Store};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// How often pins are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// A pin that ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Keep {
    id: String,
    repository: RepositoryName,
    digest: Digest,
    /// Milliseconds since 1970.
    ends_at: u64,
    /// Raw bytes of everything that it lists.
    bytes: u64,
}

impl Record for Keep {
    const WHAT: &'static str = "list of kept snapshots";
    const MAX_BYTES: u64 = 4096;

    fn id(&self) -> &str {
        &self.id
    }
}

/// The pins of an agent. Cheap to clone; all clones are one.
#[derive(Clone, Debug)]
pub(super) struct Keeps(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    store: Store,
    files: Files<Keep>,
    kept: Mutex<BTreeMap<String, Keep>>,
    /// One change at a time: a pin that ends is not the one that begins.
    turn: tokio::sync::Mutex<()>,
}

impl Keeps {
    /// Opens the list, sets its pins again, and ends each in its time.
    pub async fn open(config: &Config, store: Store) -> Result<Self> {
        let files: Files<Keep> = Files::open(config.kept_dir()).await?;
        let kept = files.load().await?;
        let keeps = Self(Arc::new(Inner { store, files, kept: Mutex::new(kept), turn: tokio::sync::Mutex::default() }));
        let found: Vec<Keep> = keeps.0.kept.lock().values().cloned().collect();
        for keep in found {
            // The agent may have ended between the file and the pin.
            keeps.0.pin(&keep, true).await;
        }
        keeps.0.expire().await;
        let kept = Arc::downgrade(&keeps.0);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(kept) = kept.upgrade() else { return };
                kept.expire().await;
            }
        });
        Ok(keeps)
    }

    /// Keeps a snapshot of the store at least until then. Returns until when it is kept.
    ///
    /// # Errors
    /// [`crate::Error::Io`], and [`crate::Error::Store`] if the snapshot cannot be pinned: then
    /// eviction may take it.
    pub async fn keep(&self, repository: &RepositoryName, digest: Digest, ends_at: u64, bytes: u64) -> Result<u64> {
        let id = hex::encode(&Digest::sha256(format!("{repository}@{digest}").as_bytes()).as_bytes()[..16]);
        let _turn = self.0.turn.lock().await;
        let before = self.0.kept.lock().get(&id).map_or(0, |keep| keep.ends_at);
        let keep = Keep { id, repository: repository.clone(), digest, ends_at: ends_at.max(before), bytes };
        // The file first: a pin without one would never end.
        self.0.files.write(&keep).await?;
        self.0.kept.lock().insert(keep.id.clone(), keep.clone());
        match self.0.store.pin(&keep.repository, &keep.digest, Pin::Warm, true).await {
            Ok(_) => Ok(keep.ends_at),
            Err(error) => {
                // Of any other failure it is not known whether the pin was set: the file ends it.
                if is_gone(&error) {
                    self.0.forget(&keep).await;
                }
                Err(error.into())
            }
        }
    }

    /// Raw bytes of everything that is kept.
    pub fn bytes(&self) -> u64 {
        self.0.kept.lock().values().fold(0, |sum, keep| sum.saturating_add(keep.bytes))
    }
}

impl Inner {
    /// Ends the pins whose time is over.
    async fn expire(&self) {
        let now = self.store.options().clock.now();
        let is_over = |keep: &&Keep| keep.ends_at <= now;
        if !self.kept.lock().values().any(|keep| is_over(&keep)) {
            return;
        }
        let _turn = self.turn.lock().await;
        let over: Vec<Keep> = self.kept.lock().values().filter(is_over).cloned().collect();
        for keep in over {
            // A store that does not answer is asked again later.
            if !self.pin(&keep, false).await {
                continue;
            }
            // The file last: after a kill the pin is taken back again.
            self.forget(&keep).await;
        }
    }

    /// Removes a pin from the list.
    async fn forget(&self, keep: &Keep) {
        match self.files.remove(&keep.id).await {
            Ok(()) => drop(self.kept.lock().remove(&keep.id)),
            Err(error) => tracing::warn!(snapshot = %keep.digest, %error, "cannot remove the file of a kept snapshot"),
        }
    }

    /// Sets or removes the pin; whether the store did it, or has no such snapshot.
    async fn pin(&self, keep: &Keep, pinned: bool) -> bool {
        match self.store.pin(&keep.repository, &keep.digest, Pin::Warm, pinned).await {
            Ok(_) => true,
            // Deleted meanwhile: there is nothing to keep.
            Err(error) if is_gone(&error) => true,
            Err(error) => {
                tracing::warn!(snapshot = %keep.digest, pinned, %error, "cannot change the pin of a snapshot");
                false
            }
        }
    }
}

/// Whether the store has no such snapshot.
fn is_gone(error: &pfr_store::Error) -> bool {
    matches!(error, pfr_store::Error::SnapshotUnknown { .. } | pfr_store::Error::RepositoryUnknown(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[tokio::test]
    async fn a_snapshot_that_cannot_be_pinned_does_not_count_as_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), pfr_store::Options::default()).await.unwrap();
        let keeps = Keeps::open(&Config::new(dir.path()), store).await.unwrap();
        let kept = keeps.keep(&"team/gone".parse().unwrap(), Digest::sha256(b"gone"), u64::MAX, 9).await;
        assert!(matches!(kept, Err(Error::Store(pfr_store::Error::RepositoryUnknown(_)))), "{kept:?}");
        assert_eq!(keeps.bytes(), 0, "a later job may fetch less");
    }
}
