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

pub(crate) use segments::{Altered, DomainKey, SEGMENT};

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::marker;
use crate::metadata::Metadata;
use crate::packs::PROBES;
use crate::tasks;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use objects::SealedObjects;
use pfr_schema::DomainName;
use std::sync::Arc;

/// Where a domain's wrapped key lies on its storage.
pub(crate) const KEY: &str = "pf-key";

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
    pub(crate) async fn put_key(&self) -> Result<()> {
        let Some(wrapped) = &self.wrapped_key else { return Ok(()) };
        match self.packs.head(&Path::from(KEY)).await {
            Ok(_) => Ok(()),
            Err(object_store::Error::NotFound { .. }) => write_key(&*self.packs, wrapped).await,
            Err(error) => Err(Error::packs(error)),
        }
    }

    /// Makes the key beside the packs that of the catalogue: another process may have been killed
    /// before it wrote the key. Best effort: the catalogue has the key.
    pub(crate) async fn keep_key(&self) {
        let Some(wrapped) = &self.wrapped_key else { return };
        let kept = async {
            if read_key(&*self.packs).await?.as_ref() == Some(&**wrapped) {
                return Ok(());
            }
            self.storage_is_there().await?;
            write_key(&*self.packs, wrapped).await
        };
        if let Err(error) = kept.await {
            tracing::warn!(%error, "the wrapped key of a domain could not be written beside its packs");
        }
    }
}

/// The wrapped key on a storage.
///
/// # Errors
/// [`Error::Locked`] for bytes that are no wrapped key.
#[boxed]
pub(crate) async fn read_key(packs: &dyn ObjectStore) -> Result<Option<WrappedKey>> {
    let found = match packs.get(&Path::from(KEY)).await {
        Ok(found) => found,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(Error::packs(error)),
    };
    if found.meta.size > WrappedKey::LONGEST as u64 {
        return Err(Error::Locked(format!("{KEY} on the storage is too long for a wrapped key")));
    }
    let bytes = found.bytes().await.map_err(Error::packs)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| Error::Locked(format!("{KEY} on the storage is not text")))?;
    WrappedKey::parse(text).map(Some)
}

/// Writes the wrapped key beside the packs.
#[boxed]
pub(crate) async fn write_key(packs: &dyn ObjectStore, wrapped: &WrappedKey) -> Result<()> {
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
        store.keep_key().await;
        Ok(store)
    }

    async fn default_key(&self, store: &Store, name: &DomainName) -> Result<Option<WrappedKey>> {
        if let Some(wrapped) = key_of(&*store.metadata, name).await? {
            return Ok(Some(wrapped));
        }
        if !store.metadata.is_empty().await? {
            if self.encrypt_new() {
                tracing::info!("the default domain is not encrypted: it was made before new domains were to be");
            }
            return Ok(None);
        }
        // A lost database, or the first start.
        let wrapped = match read_key(&*store.packs).await? {
            Some(wrapped) => wrapped,
            None if self.encrypt_new() && is_new(&*store.packs).await? => self.wrap_new().await?,
            None => return Ok(None),
        };
        // One that cannot be opened is not entered.
        self.unwrap(name, &wrapped).await?;
        let entered = store.metadata.enter_domain_key(name.clone(), wrapped.to_string()).await?;
        WrappedKey::parse(&entered).map(Some)
    }
}

/// Whether no store has used this storage, as far as can be seen: tables that are lost do not make
/// one new whose packs are in the clear.
#[boxed]
async fn is_new(packs: &dyn ObjectStore) -> Result<bool> {
    match packs.head(&Path::from(marker::KEY)).await {
        Ok(_) => return Ok(false),
        Err(object_store::Error::NotFound { .. }) => {}
        Err(error) => return Err(Error::packs(error)),
    }
    let others = [PROBES, tasks::PREFIX, DomainName::FOLDER];
    match packs.list_with_delimiter(None).await {
        Ok(top) => Ok(top.common_prefixes.iter().all(|folder| others.contains(&folder.as_ref()))),
        // Without the right to list, a rebuild is not possible either.
        Err(object_store::Error::PermissionDenied { .. } | object_store::Error::NotImplemented { .. }) => Ok(true),
        Err(error) => Err(Error::packs(error)),
    }
}

/// The wrapped key of a domain in the catalogue.
#[boxed]
pub(crate) async fn key_of(catalogue: &dyn Metadata, name: &DomainName) -> Result<Option<WrappedKey>> {
    let text = catalogue.domain_key(name.clone()).await?;
    text.map(|text| WrappedKey::parse(&text)).transpose()
}
