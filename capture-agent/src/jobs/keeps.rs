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
    /// Whether the store said that it is pinned, since this process started.
    #[serde(skip)]
    pinned: bool,
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
    /// Opens the list, sets its pins again, and ends each in its time. A pin that cannot be set now
    /// is set later; until then its snapshot does not count as kept.
    pub async fn open(config: &Config, store: Store) -> Result<Self> {
        let files: Files<Keep> = Files::open(config.kept_dir()).await?;
        let kept = files.load().await?;
        let keeps = Self(Arc::new(Inner { store, files, kept: Mutex::new(kept), turn: tokio::sync::Mutex::default() }));
        // The agent may have ended between the file and the pin.
        keeps.0.look().await;
        let kept = Arc::downgrade(&keeps.0);
        pfr_service::task::spawn(async move {
            loop {
                tokio::time::sleep(LOOK).await;
                let Some(kept) = kept.upgrade() else { return };
                kept.look().await;
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
        let (before, pinned) = self.0.kept.lock().get(&id).map_or((0, false), |keep| (keep.ends_at, keep.pinned));
        let keep = Keep { id, repository: repository.clone(), digest, ends_at: ends_at.max(before), bytes, pinned };
        // The file first: a pin without one would never end.
        self.0.files.write(&keep).await?;
        self.0.kept.lock().insert(keep.id.clone(), keep.clone());
        match self.0.store.pin(&keep.repository, &keep.digest, Pin::Warm, true).await {
            Ok(_) => {
                self.0.note(&keep, true);
                Ok(keep.ends_at)
            }
            Err(error) => {
                if is_gone(&error) {
                    self.0.forget(&keep).await;
                } else {
                    // It is not known whether the pin was set, nor whether one of before is still
                    // there: it is set again, and the file ends it.
                    self.0.note(&keep, false);
                }
                Err(error.into())
            }
        }
    }

    /// Raw bytes of everything that is kept: of what is pinned.
    pub fn bytes(&self) -> u64 {
        self.0.kept.lock().values().filter(|keep| keep.pinned).fold(0, |sum, keep| sum.saturating_add(keep.bytes))
    }
}

impl Inner {
    /// Ends the pins whose time is over, and sets those that could not be set before.
    async fn look(&self) {
        let now = self.store.options().clock.now();
        let is_due = |keep: &&Keep| keep.ends_at <= now || !keep.pinned;
        if !self.kept.lock().values().any(|keep| is_due(&keep)) {
            return;
        }
        let _turn = self.turn.lock().await;
        let due: Vec<Keep> = self.kept.lock().values().filter(is_due).cloned().collect();
        for keep in due {
            let lasts = keep.ends_at > now;
            // A store that does not answer is asked again later.
            let Some(is_there) = self.pin(&keep, lasts).await else { continue };
            if lasts && is_there {
                self.note(&keep, true);
            } else {
                // The file last: after a kill the pin is taken back again.
                self.forget(&keep).await;
            }
        }
    }

    /// Notes whether the store has pinned it, as far as is known.
    fn note(&self, keep: &Keep, pinned: bool) {
        if let Some(keep) = self.kept.lock().get_mut(&keep.id) {
            keep.pinned = pinned;
        }
    }

    /// Removes a pin from the list.
    async fn forget(&self, keep: &Keep) {
        match self.files.remove(&keep.id).await {
            Ok(()) => drop(self.kept.lock().remove(&keep.id)),
            Err(error) => tracing::warn!(snapshot = %keep.digest, %error, "cannot remove the file of a kept snapshot"),
        }
    }

    /// Sets or removes the pin; whether the store has the snapshot. Nothing if it did not answer.
    async fn pin(&self, keep: &Keep, pinned: bool) -> Option<bool> {
        match self.store.pin(&keep.repository, &keep.digest, Pin::Warm, pinned).await {
            Ok(_) => Some(true),
            // Deleted meanwhile: there is nothing to keep.
            Err(error) if is_gone(&error) => Some(false),
            Err(error) => {
                tracing::warn!(snapshot = %keep.digest, pinned, %error, "cannot change the pin of a snapshot; it is tried again");
                None
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
    use super::away::Away;
    use super::*;
    use crate::error::Error;
    use pfr_store::{SqliteMetadata, storage};
    use std::path::Path;

    /// A store whose metadata a test makes unreachable.
    async fn with_metadata_away(dir: &Path) -> (Arc<Away>, Store) {
        let (packs, _) = storage::open_dir(&dir.join("packs")).unwrap();
        let options = pfr_store::Options::default();
        let away = Away::new(SqliteMetadata::open_in_memory(options.clock.clone()).await.unwrap());
        (Arc::clone(&away), Store::new(packs, away, options))
    }

    #[tokio::test]
    async fn a_snapshot_that_cannot_be_pinned_does_not_count_as_kept() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), pfr_store::Options::default()).await.unwrap();
        let keeps = Keeps::open(&Config::new(dir.path()), store).await.unwrap();
        let kept = keeps.keep(&"team/gone".parse().unwrap(), Digest::sha256(b"gone"), u64::MAX, 9).await;
        assert!(matches!(kept, Err(Error::Store(pfr_store::Error::RepositoryUnknown(_)))), "{kept:?}");
        assert_eq!(keeps.bytes(), 0, "a later job may fetch less");
    }

    #[tokio::test]
    async fn a_pin_that_cannot_be_set_at_the_start_does_not_count_and_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let (config, (away, store)) = (Config::new(dir.path()), with_metadata_away(dir.path()).await);
        let (repository, digest) = ("team/agent".parse().unwrap(), Digest::sha256(b"kept"));
        let keep = Keep { id: "one".into(), repository, digest, ends_at: u64::MAX, bytes: 9, pinned: true };
        let files: Files<Keep> = Files::open(config.kept_dir()).await.unwrap();
        files.write(&keep).await.unwrap();
        away.set(true);
        let keeps = Keeps::open(&config, store).await.unwrap();
        assert_eq!((keeps.bytes(), files.load().await.unwrap().len()), (0, 1), "eviction may take it, and the agent remembers it");
        // The store answers again, and has no such snapshot.
        away.set(false);
        let forgotten = async {
            while !files.load().await.unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), forgotten).await.expect("it is tried again");
    }

    #[tokio::test]
    async fn a_pin_of_before_does_not_count_if_it_cannot_be_set_again() {
        let dir = tempfile::tempdir().unwrap();
        let (away, store) = with_metadata_away(dir.path()).await;
        let keeps = Keeps::open(&Config::new(dir.path()), store).await.unwrap();
        away.set(true);
        let (repository, digest) = ("team/agent".parse().unwrap(), Digest::sha256(b"kept"));
        let keep = async || keeps.keep(&repository, digest, u64::MAX, 9).await;
        assert!(keep().await.is_err());
        // The snapshot was pinned, deleted with its pin, and pulled again.
        keeps.0.kept.lock().values_mut().for_each(|keep| keep.pinned = true);
        assert_eq!(keeps.bytes(), 9);
        assert!(keep().await.is_err());
        assert_eq!(keeps.bytes(), 0, "eviction may take it");
    }
}

/// Metadata that a test makes unreachable for a while.
#[cfg(test)]
mod away {
    use async_trait::async_trait;
    use pfr_schema::api::TagState;
    use pfr_schema::journal::Record;
    use pfr_schema::{AccessTokenId, Digest, DigestPrefix, DomainName, Kind, RepositoryName, Tag};
    // Every type that a transaction takes or gives.
    use pfr_store::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    #[derive(Debug)]
    pub(super) struct Away {
        inner: Arc<dyn Metadata>,
        away: AtomicBool,
    }

    impl Away {
        pub(super) fn new(inner: Arc<dyn Metadata>) -> Arc<Self> {
            Arc::new(Self { inner, away: AtomicBool::new(false) })
        }

        pub(super) fn set(&self, away: bool) {
            self.away.store(away, Ordering::SeqCst);
        }

        fn answers(&self) -> Result<()> {
            match self.away.load(Ordering::SeqCst) {
                true => Err(Error::Unavailable { what: "metadata", reason: "connection reset (injected)".into() }),
                false => Ok(()),
            }
        }
    }

    macro_rules! answer {
        ($($(#[$attribute:meta])* $name:ident($($argument:ident: $type:ty),*) -> $result:ty = $mode:ident |$with:ident| $work:expr;)+) => {
            #[async_trait]
            impl Metadata for Away {
                $(async fn $name(&self, $($argument: $type),*) -> Result<$result> {
                    self.answers()?;
                    self.inner.$name($($argument),*).await
                })+

                fn rows_written(&self) -> u64 {
                    self.inner.rows_written()
                }
            }
        };
    }
    metadata_transactions!(answer);
}
