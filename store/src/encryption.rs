//! Encryption at rest: everything that a domain writes to storage, with a key of its own.
//!
//! | file | is |
//! |---|---|
//! | `segments` | the encrypted form of an object |
//! | `objects` | a storage whose objects have that form |
//! | `upload` | uploads to it in parts |
//! | `wrapped` | the domain's key as it is kept: wrapped with another one |
//! | `keys` | the keys that wrap: a file, or a command |
//!
//! The wrapped key lies in the catalogue of domains, which decides, and beside the packs, for a
//! rebuild without a database. A domain is encrypted from its first byte on, or never.

mod keys;
mod objects;
mod segments;
mod upload;
mod wrapped;

pub use keys::{KeyOptions, Keys};
pub use wrapped::WrappedKey;

pub(crate) use segments::{Altered, DomainKey, MAGIC, SEGMENT};

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::marker;
use crate::metadata::Metadata;
use crate::packs::PROBES;
use crate::tasks;
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use objects::SealedObjects;
use pfr_schema::DomainName;
use std::sync::Arc;

/// Where a domain's wrapped key lies on its storage.
pub(crate) const KEY: &str = "pf-key";
/// In the place of the wrapped key of a store that was written to in the clear.
const IN_THE_CLEAR: &str = "";
/// How often a wrapped key is written that another process wraps again meanwhile.
const TRIES: usize = 8;

/// An error of the storage that encrypts.
fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> object_store::Error {
    object_store::Error::Generic { store: "encryption", source: error.into() }
}

/// An object store that encrypts what is written to `packs`, with this key of a domain. In a
/// directory, parts of an upload may be small.
///
/// # Errors
/// [`Error::Internal`].
pub fn encrypted(packs: Arc<dyn ObjectStore>, secret: &[u8; 32], small_parts: bool) -> Result<Arc<dyn ObjectStore>> {
    let key = Arc::new(DomainKey::new(secret)?);
    Ok(Arc::new(SealedObjects::new(packs, key, small_parts)))
}

impl Store {
    /// The same store over a storage that holds what it writes only encrypted. To be said after
    /// [`Store::with_packs_dir`].
    #[must_use]
    pub(crate) fn encrypted(mut self, (key, wrapped): (Arc<DomainKey>, WrappedKey)) -> Self {
        self.packs = Arc::new(SealedObjects::new(self.packs, key, self.packs_dir.is_some()));
        self.wrapped_key = Some(Arc::new(wrapped));
        self
    }

    /// Whether what it writes to storage is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.wrapped_key.is_some()
    }

    /// Writes the wrapped key beside the packs if none is there: before the first pack.
    ///
    /// # Errors
    /// [`Error::Locked`] if another key lies there, or one that cannot be read: a rebuild could not
    /// open what would be written.
    pub(crate) async fn put_key(&self) -> Result<()> {
        let Some(wrapped) = &self.wrapped_key else { return Ok(()) };
        match whole_key(&*self.packs).await? {
            // It may have been wrapped again since this store was opened.
            Some(there) => may_replace(&there, wrapped),
            None => write_key(&*self.packs, wrapped).await,
        }
    }

    /// Makes the key beside the packs that of the catalogue: another process may have been killed
    /// before it wrote the key. Best effort: the catalogue has the key.
    pub(crate) async fn keep_key(&self, catalogue: &dyn Metadata, name: &DomainName) {
        if let Err(error) = self.mirror_key(catalogue, name).await {
            tracing::warn!(%error, domain = %name, "the wrapped key of a domain could not be written beside its packs");
        }
    }

    /// The same, for a caller that says so if it fails.
    ///
    /// # Errors
    /// [`Error::Locked`] if another key lies there, [`Error::Unavailable`] if the storage is away.
    #[boxed]
    pub(crate) async fn mirror_key(&self, catalogue: &dyn Metadata, name: &DomainName) -> Result<()> {
        for _ in 0..TRIES {
            let Some(decides) = key_of(catalogue, name).await? else { return Ok(()) };
            if whole_key(&*self.packs).await?.as_ref() == Some(&decides) {
                return Ok(());
            }
            self.storage_is_there().await?;
            write_key(&*self.packs, &decides).await?;
            // Another process may have wrapped it again in between: the older one must not stay,
            // for the key that opens it may be destroyed.
        }
        Err(Error::Overloaded("another process wraps the key of this domain"))
    }

    /// Notes, before a process writes to a store, that it is not encrypted. Another process may be
    /// about to encrypt it while it is empty: the first of them decides.
    ///
    /// # Errors
    /// [`Error::Locked`] if it is encrypted since.
    pub(crate) async fn decide_clear(&self) -> Result<()> {
        if self.is_encrypted() {
            return Ok(());
        }
        let name = DomainName::default();
        // Before the key is looked for: packs that came after it may be encrypted.
        let has_packs = !self.metadata.packs(None, 1).await?.is_empty();
        let decided = match self.metadata.domain_key(name.clone()).await? {
            Some(decided) => decided,
            // Never encrypted any more, and a full disk must not keep collection from its work.
            None if has_packs => return Ok(()),
            None => self.metadata.enter_domain_key(name, IN_THE_CLEAR.to_owned()).await?,
        };
        is_clear(&decided)
    }
}

fn is_clear(decided: &str) -> Result<()> {
    if decided == IN_THE_CLEAR {
        return Ok(());
    }
    let words = "another process has encrypted this domain since this one was started: start this one again, with the same settings";
    Err(Error::Locked(words.into()))
}

/// Refuses to replace the key of other packs by that of a domain: nothing could read them then.
fn may_replace(there: &WrappedKey, wrapped: &WrappedKey) -> Result<()> {
    if there.id == wrapped.id {
        return Ok(());
    }
    Err(Error::Locked(format!(
        "{KEY} on the storage has the key {}, and the key of this domain is {}: packs of another domain lie there. Move them away, or give \
         this domain another place",
        there.id, wrapped.id
    )))
}

/// The wrapped key on a storage. One that was cut while it was written is none in a place that no
/// store has used: nothing was encrypted with it.
///
/// # Errors
/// [`Error::Locked`] for bytes that are no wrapped key.
#[boxed]
pub(crate) async fn read_key(packs: &dyn ObjectStore) -> Result<Option<WrappedKey>> {
    match key_text(packs).await? {
        Some(text) if WrappedKey::is_cut(&text) && is_new(packs, false).await? => Ok(None),
        text => text.as_deref().map(WrappedKey::parse).transpose(),
    }
}

/// The same for a process that has the key from the catalogue: one that was cut is none, and is
/// written again.
///
/// # Errors
/// As [`read_key`].
async fn whole_key(packs: &dyn ObjectStore) -> Result<Option<WrappedKey>> {
    let text = key_text(packs).await?.filter(|text| !WrappedKey::is_cut(text));
    text.as_deref().map(WrappedKey::parse).transpose()
}

async fn key_text(packs: &dyn ObjectStore) -> Result<Option<String>> {
    let found = match packs.get(&Path::from(KEY)).await {
        Ok(found) => found,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(Error::packs(error)),
    };
    if found.meta.size > WrappedKey::LONGEST as u64 {
        return Err(Error::Locked(format!("{KEY} on the storage is too long for a wrapped key")));
    }
    let bytes = found.bytes().await.map_err(Error::packs)?;
    let text = String::from_utf8(bytes.to_vec()).map_err(|_| Error::Locked(format!("{KEY} on the storage is not text")))?;
    Ok(Some(text))
}

/// Writes the wrapped key beside the packs, durably.
///
/// # Errors
/// [`Error::Locked`] if another key lies there.
#[boxed]
async fn write_key(packs: &dyn ObjectStore, wrapped: &WrappedKey) -> Result<()> {
    if let Some(there) = whole_key(packs).await? {
        may_replace(&there, wrapped)?;
    }
    let text = format!("{wrapped}\n");
    packs.put(&Path::from(KEY), text.into()).await.map(|_| ()).map_err(Error::packs)
}

impl Keys {
    /// The store of the default domain, encrypted if its catalogue has a key, or if it is new and
    /// new domains are to be encrypted. To be called before anything uses the store.
    ///
    /// # Errors
    /// [`Error::Locked`] if its key cannot be unwrapped.
    #[boxed]
    pub async fn open_default(&self, store: Store) -> Result<Store> {
        let name = DomainName::default();
        let Some(wrapped) = self.default_key(&store, &name).await? else { return Ok(store) };
        let key = self.unwrap(&name, &wrapped).await?;
        let store = store.encrypted((key, wrapped));
        store.keep_key(&*store.metadata, &name).await;
        Ok(store)
    }

    async fn default_key(&self, store: &Store, name: &DomainName) -> Result<Option<WrappedKey>> {
        let decided = store.metadata.domain_key(name.clone()).await?;
        if let Some(wrapped) = decided.as_deref().map(key_in).transpose()?.flatten() {
            return Ok(Some(wrapped));
        }
        if decided.is_some() || !store.metadata.is_empty().await? {
            if self.encrypt_new() {
                tracing::info!("the default domain is not encrypted: it was made before new domains were to be");
            }
            return Ok(None);
        }
        // A lost database, or nothing was written yet.
        let is_started = store.metadata.storage_id().await?.is_some();
        let wrapped = match read_key(&*store.packs).await? {
            Some(wrapped) => wrapped,
            None if self.encrypt_new() && is_new(&*store.packs, is_started).await? => self.wrap_new().await?,
            None => {
                if self.encrypt_new() {
                    let reason = "its storage has a marker or packs that these tables do not know";
                    tracing::warn!(reason, "the default domain is not encrypted, although new domains are to be");
                }
                return Ok(None);
            }
        };
        // One that cannot be opened is not entered.
        self.unwrap(name, &wrapped).await?;
        let entered = store.metadata.enter_domain_key(name.clone(), wrapped.to_string()).await?;
        key_in(&entered)
    }
}

/// Whether no store has used this storage, as far as can be seen: tables that are lost do not make
/// one new whose packs are in the clear. A bucket without the right to list counts as new. Where
/// tables that are not lost know the id of the marker, the marker alone says nothing: it is written
/// at the first start (`is_started`).
///
/// # Errors
/// [`Error::NotPermitted`] for a folder that may not be listed: packs in the clear may lie there,
/// so no domain in it is encrypted. [`Error::Unavailable`].
#[boxed]
pub(crate) async fn is_new(packs: &dyn ObjectStore, is_started: bool) -> Result<bool> {
    match packs.head(&Path::from(marker::KEY)).await {
        Ok(_) if !is_started => return Ok(false),
        Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
        Err(error) => return Err(Error::packs(error)),
    }
    let others = [PROBES, tasks::PREFIX, DomainName::FOLDER];
    let top = match packs.list_with_delimiter(None).await {
        Ok(top) => top,
        // Without the right to list, a rebuild is not possible either.
        Err(object_store::Error::PermissionDenied { .. } | object_store::Error::NotImplemented { .. }) => return Ok(true),
        Err(error) => return Err(Error::packs(error)),
    };
    for folder in top.common_prefixes.iter().filter(|folder| !others.contains(&folder.as_ref())) {
        // Some buckets list folders for a while after their last object was deleted.
        if packs.list(Some(folder)).try_next().await.map_err(Error::packs)?.is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The wrapped key of a domain in the catalogue.
#[boxed]
pub(crate) async fn key_of(catalogue: &dyn Metadata, name: &DomainName) -> Result<Option<WrappedKey>> {
    let text = catalogue.domain_key(name.clone()).await?;
    Ok(text.as_deref().map(key_in).transpose()?.flatten())
}

/// The wrapped key that a row of the catalogue has.
fn key_in(row: &str) -> Result<Option<WrappedKey>> {
    if row == IN_THE_CLEAR { Ok(None) } else { WrappedKey::parse(row).map(Some) }
}
