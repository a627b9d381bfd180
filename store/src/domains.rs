//! Domains: stores that share a process, and nothing that is stored.
//!
//! A domain is a [`Store`] of its own: own packs, journal, marker and tables. No statement and no
//! path in a store can name another domain. The stores of one process share its memory (the limits
//! of [`crate::Options`] hold for all of them together) and its connections to the database.
//!
//! The default domain's tables hold the catalogue. A domain exists from its row on: whatever is
//! missing of its tables is made when it is opened, so a process that dies while it makes one
//! leaves nothing to clean up. It is deleted in this order, each step of which may be repeated: the
//! row says so, and no request gets its store any more; marker, tables and bytes go (`home`); they
//! go once more when the longest upload is over; when no process deletes any more, the row goes.

mod home;

pub use home::{DomainHome, DomainPacks, DomainTables};

use crate::access::AccessTokens;
use crate::boxed;
use crate::encryption::{self, DomainKey, Keys, WrappedKey};
use crate::error::{Error, Result};
use crate::metadata::{AuditEntry, DomainRow, DomainStep, Page};
use crate::{Budget, RunEnd, Store};
use parking_lot::Mutex;
use pfr_schema::DomainName;
use pfr_schema::api::{DomainInfo, DomainState};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// How long an open domain counts as existing without a look at the catalogue: another process may
/// delete it.
const FRESH: Duration = Duration::from_secs(1);
/// Domains read from the catalogue at a time.
const PAGE: usize = 1000;
/// How long a key that could not be unwrapped is not tried again, at first and at most.
const LOCKED: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(120));
/// Domains that a look at the catalogue opens at a time; others wait.
const OPENED_AT_ONCE: usize = 32;
/// How long a look at the catalogue waits for domains that it opens. Those that take longer open
/// behind it.
const PATIENCE: Duration = Duration::from_secs(2);

/// The domains of a registry, and the open stores of this process. Cheap to clone; clones are one.
///
/// The second part is what the audit log will say of the changes that are made by this clone.
#[derive(Clone, Debug)]
pub struct Domains(Arc<Inner>, Option<Arc<AuditEntry>>);

#[derive(Debug)]
struct Inner {
    default: Store,
    home: Option<DomainHome>,
    /// What opens the keys of encrypted domains.
    keys: Keys,
    open: Mutex<HashMap<DomainName, Opened>>,
    /// Held while the store of a domain is opened.
    opening: Mutex<HashMap<DomainName, Arc<tokio::sync::Mutex<()>>>>,
    /// Domains whose keys could not be unwrapped.
    locked: Mutex<HashMap<DomainName, Locked>>,
    /// Domains that a look at the catalogue has begun to open.
    under_way: Mutex<HashSet<DomainName>>,
    /// Places of those.
    places: Semaphore,
}

/// A domain that a look at the catalogue opens, in a task of its own.
struct UnderWay {
    domains: Domains,
    name: DomainName,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.domains.0.under_way.lock().remove(&self.name);
    }
}

/// A key that could not be unwrapped: each request, and each look at the catalogue, would run the
/// key command again.
#[derive(Debug)]
struct Locked {
    /// Another one is tried at once.
    wrapped: WrappedKey,
    reason: String,
    wait: Duration,
    until: Instant,
}

#[derive(Debug)]
struct Opened {
    store: Store,
    /// Tells a domain from one that was deleted before under the same name.
    created_at: u64,
    /// When the catalogue was last read.
    checked: Instant,
}

impl Domains {
    /// The default domain, and others in `home`. Without a home there are no others.
    #[must_use]
    pub fn new(default: Store, home: Option<DomainHome>) -> Self {
        Self::with_keys(default, home, Keys::default())
    }

    /// The same, of which some may be encrypted. The default one is as [`Keys::open_default`] gives
    /// it.
    #[must_use]
    pub fn with_keys(default: Store, home: Option<DomainHome>, keys: Keys) -> Self {
        let (open, opening, locked) = (Mutex::default(), Mutex::default(), Mutex::default());
        let (under_way, places) = (Mutex::default(), Semaphore::new(OPENED_AT_ONCE));
        Self(Arc::new(Inner { default, home, keys, open, opening, locked, under_way, places }), None)
    }

    /// The same domains for one request: each change of the catalogue or of access tokens that it
    /// makes is in the audit log, in the transaction of the change.
    #[must_use]
    pub fn audited(&self, entry: AuditEntry) -> Self {
        Self(Arc::clone(&self.0), Some(Arc::new(entry)))
    }

    /// The store of the default domain.
    #[must_use]
    pub fn default_store(&self) -> &Store {
        &self.0.default
    }

    /// The access tokens, which are kept beside the catalogue.
    #[must_use]
    pub fn access_tokens(&self) -> AccessTokens {
        let store = self.0.default.clone();
        AccessTokens::new(match self.audit_entry() {
            Some(entry) => store.audited(entry),
            None => store,
        })
    }

    /// The store of a domain. It is one that may be served: its names are known, and journaled.
    ///
    /// # Errors
    /// [`Error::DomainUnknown`], also while it is being deleted. [`Error::Unavailable`] if its
    /// database is to be rebuilt. [`Error::Locked`] if its key cannot be unwrapped; after a failure
    /// at once, also while the key is tried again.
    #[boxed]
    pub async fn open(&self, name: &DomainName) -> Result<Store> {
        if name.is_default() {
            return Ok(self.0.default.clone());
        }
        if let Some(opened) = self.0.open.lock().get(name).filter(|opened| opened.checked.elapsed() < FRESH) {
            return Ok(opened.store.clone());
        }
        let row = self.live(name).await?;
        if let Some(store) = self.confirmed(&row) {
            return Ok(store);
        }
        let opening = Arc::clone(self.0.opening.lock().entry(name.clone()).or_default());
        let _one_at_a_time = match opening.try_lock() {
            Ok(first) => first,
            Err(_) => {
                let failed = self.0.locked.lock().get(name).map(|locked| locked.reason.clone());
                if let Some(reason) = failed {
                    // A key service that hung before may hang again: requests do not wait for it.
                    return Err(Error::Locked(reason));
                }
                opening.lock().await
            }
        };
        if let Some(store) = self.confirmed(&row) {
            return Ok(store);
        }
        let store = self.assemble(name).await?;
        store.begin_serving().await?;
        // It may have been deleted meanwhile.
        let row = self.live(name).await?;
        let opened = Opened { store: store.clone(), created_at: row.created_at, checked: Instant::now() };
        self.0.open.lock().insert(name.clone(), opened);
        Ok(store)
    }

    /// Opens all domains that exist but the default one, side by side, and closes those that do
    /// not. One that cannot be opened is left out. So is one that takes long, as while a key
    /// service hangs: it opens behind this call, and a later one has it.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the catalogue cannot be read.
    #[boxed]
    pub async fn open_all(&self) -> Result<Vec<(DomainName, Store)>> {
        let (mut stores, mut exist, mut after) = (Vec::new(), HashSet::new(), None);
        let mut opening = JoinSet::new();
        loop {
            let page = self.catalogue().domains(after, PAGE).await?;
            for row in page.rows.into_iter().filter(|row| row.deleting_since.is_none()) {
                match self.confirmed(&row) {
                    Some(store) => stores.push((row.name.clone(), store)),
                    None => self.begin_to_open(&row.name, &mut opening),
                }
                // If it is open, it stays open.
                exist.insert(row.name);
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let until = tokio::time::Instant::now() + PATIENCE;
        while let Ok(Some(opened)) = tokio::time::timeout_at(until, opening.join_next()).await {
            match opened {
                Ok(opened) => stores.extend(opened),
                Err(error) => tracing::error!(%error, "opening a domain failed"),
            }
        }
        opening.detach_all();
        self.0.open.lock().retain(|name, opened| exist.contains(name) || opened.checked.elapsed() < FRESH);
        self.0.locked.lock().retain(|name, _| exist.contains(name));
        Ok(stores)
    }

    /// Begins to open a domain in a task of its own, unless one is about it already.
    fn begin_to_open(&self, name: &DomainName, tasks: &mut JoinSet<Option<(DomainName, Store)>>) {
        if !self.0.under_way.lock().insert(name.clone()) {
            return;
        }
        let under_way = UnderWay { domains: Self(Arc::clone(&self.0), None), name: name.clone() };
        pfr_service::task::spawn_in(tasks, async move {
            let UnderWay { domains, name } = &under_way;
            let _place = domains.0.places.acquire().await.ok()?;
            match domains.open(name).await {
                Ok(store) => Some((name.clone(), store)),
                Err(Error::DomainUnknown(_)) => None,
                Err(error) => {
                    tracing::warn!(%error, domain = %name, "domain cannot be opened");
                    None
                }
            }
        });
    }

    /// Makes a domain, and finishes one that another process began to make; returns whether it is
    /// new. Whether it is encrypted is as [`Keys`] say.
    ///
    /// # Errors
    /// [`Error::DomainBusy`] while a domain of this name is being deleted. [`Error::Invalid`] if
    /// there can be no other domains here, if no key was given for a domain that is to be
    /// encrypted, or if one of this name was half removed when the catalogue was lost.
    /// [`Error::Locked`] if the key cannot be used.
    #[boxed]
    pub async fn create(&self, name: &DomainName) -> Result<(DomainInfo, bool)> {
        self.create_as(name, None).await
    }

    /// The same, and says whether it is encrypted.
    ///
    /// # Errors
    /// As [`Self::create`]; [`Error::Invalid`] too if a domain is there that is not as it is to be,
    /// or its bytes, after the catalogue was lost: that does not change.
    #[boxed]
    pub async fn create_as(&self, name: &DomainName, encrypted: Option<bool>) -> Result<(DomainInfo, bool)> {
        if name.is_default() {
            let info = self.default_info();
            return as_wanted(&info, encrypted).map(|()| (info, false));
        }
        self.home()?;
        let catalogue = self.catalogue();
        let before = catalogue.domain(name.clone()).await?;
        if before.is_none() && self.is_half_removed(name).await? {
            return Err(Error::Invalid(format!(
                "some of domain {name} is left, and its marker is not there. Make sure that its storage is mounted and complete: \
                 then the domain was being deleted when the catalogue was lost; delete it once more, and make it when it is gone"
            )));
        }
        // A name is not free again within the time that passes until the row is made.
        let key = match before {
            Some(row) if row.deleting_since.is_none() => as_wanted(&info(row), encrypted).map(|()| None)?,
            None => self.new_key(name, encrypted).await?,
            Some(_) => None,
        };
        let (row, is_new) = catalogue.create_domain(name.clone(), key, self.audit_entry()).await?;
        let info = info(row);
        as_wanted(&info, encrypted)?;
        // The marker is how a rebuild of a lost catalogue finds a domain that is empty.
        self.open(name).await?.mark().await?;
        Ok((info, is_new))
    }

    /// Wraps the key of a domain again, with the key that wraps now, in the catalogue and then
    /// beside the packs; returns whether it has a key. May be repeated, and run beside other
    /// processes. No pack is written.
    ///
    /// # Errors
    /// [`Error::Locked`] if the key cannot be unwrapped, or another one lies beside the packs.
    /// [`Error::DomainUnknown`], also while it is being deleted. [`Error::Unavailable`] if the
    /// storage is away: the catalogue may have the new one then; once more does the rest.
    #[boxed]
    pub async fn rewrap(&self, name: &DomainName) -> Result<bool> {
        if !name.is_default() {
            self.live(name).await?;
        }
        let Some(before) = encryption::key_of(self.catalogue(), name).await? else { return Ok(false) };
        if let Some(wrapped) = self.0.keys.rewrap(name, &before).await? {
            let (from, to) = (before.to_string(), wrapped.to_string());
            if !self.catalogue().rewrap_domain_key(name.clone(), from, to, self.audit_entry()).await? {
                return Err(Error::Overloaded("another process wraps the key of this domain, or deletes it"));
            }
        }
        // Another run may have been killed here. A storage that is away is no success: the key that
        // opens what lies there may be destroyed after it.
        let store = match name.is_default() {
            true => self.0.default.clone(),
            false => self.home()?.open(name, &self.0.default).await?,
        };
        store.mirror_key(self.catalogue(), name).await?;
        Ok(true)
    }

    /// The wrapped key of a domain that is to be made, if it is to be encrypted: the one that lies
    /// in its place, if the catalogue was lost.
    async fn new_key(&self, name: &DomainName, encrypted: Option<bool>) -> Result<Option<String>> {
        let home = self.home()?;
        if let Some(there) = home.key(name).await? {
            if encrypted == Some(false) {
                return Err(Error::Invalid(format!(
                    "an encrypted domain lies in the place of domain {name}: rebuild the catalogue, or move it away"
                )));
            }
            // One that cannot be opened is not entered.
            self.0.keys.unwrap(name, &there).await?;
            return Ok(Some(there.to_string()));
        }
        if !encrypted.unwrap_or(self.0.keys.encrypt_new()) {
            return Ok(None);
        }
        if !home.is_new(name).await? {
            return Err(Error::Invalid(format!(
                "a store that is not encrypted lies in the place of domain {name}: rebuild the catalogue, or move it away"
            )));
        }
        Ok(Some(self.0.keys.wrap_new().await?.to_string()))
    }

    /// Makes a domain whose tags and snapshots are to be rebuilt from the packs and the journal in
    /// its place, and opens it without asking for them. Only a rebuild may use it.
    ///
    /// # Errors
    /// As [`Self::create`], and [`Error::DomainUnknown`] if nothing lies there.
    #[boxed]
    pub async fn adopt(&self, name: &DomainName) -> Result<Store> {
        if name.is_default() {
            return Ok(self.0.default.clone());
        }
        if self.catalogue().domain(name.clone()).await?.is_none() && !self.home()?.has_any(name).await? {
            return Err(Error::DomainUnknown(name.clone()));
        }
        let key = self.key_on_storage(name).await?;
        self.catalogue().create_domain(name.clone(), key, None).await?;
        self.assemble(name).await
    }

    /// Enters all domains into the catalogue whose stores lie in their places; returns their names.
    /// For a catalogue that was lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn find(&self) -> Result<Vec<DomainName>> {
        let Some(home) = &self.0.home else { return Ok(Vec::new()) };
        let names = home.find().await?;
        for name in &names {
            let key = self.key_on_storage(name).await?;
            match self.catalogue().create_domain(name.clone(), key, None).await {
                Ok(_) | Err(Error::DomainBusy(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(names)
    }

    /// The domains of which packs or tables are there, but neither a marker nor a row in the
    /// catalogue. Each was being made or deleted when the catalogue was lost, or its storage is not
    /// complete. [`Self::delete`] removes what is left.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn left(&self) -> Result<Vec<DomainName>> {
        let Some(home) = &self.0.home else { return Ok(Vec::new()) };
        let mut left = Vec::new();
        for name in home.left().await? {
            if self.catalogue().domain(name.clone()).await?.is_none() {
                left.push(name);
            }
        }
        Ok(left)
    }

    /// Begins to delete a domain: from now on it is unknown, here at once and in other processes
    /// within a second or two. [`Self::remove_deleted`] does the rest. Once more changes nothing.
    /// A removal that had begun when the catalogue was lost goes on. With `lost`, tables without a
    /// row in the catalogue are deleted too although no pack that they list lies on the storage.
    ///
    /// # Errors
    /// [`Error::DomainUnknown`]. [`Error::Invalid`] for the default domain, and without `lost` for
    /// such tables: the catalogue was lost, and the storage may not be mounted.
    #[boxed]
    pub async fn delete(&self, name: &DomainName, lost: bool) -> Result<DomainInfo> {
        if name.is_default() {
            return Err(Error::Invalid("the default domain cannot be deleted".into()));
        }
        let catalogue = self.catalogue();
        let is_left = catalogue.domain(name.clone()).await?.is_none() && self.is_half_removed(name).await?;
        if is_left && !lost && self.home()?.lacks_packs(name, &self.0.default).await? {
            return Err(Error::Invalid(format!(
                "the tables of domain {name} list packs, and nothing of it lies on the storage. Make sure that its storage is mounted, and \
                 rebuild the catalogue. If its packs are lost, delete it with `?lost=true`"
            )));
        }
        let row = catalogue.delete_domain(name.clone(), is_left, self.audit_entry()).await?;
        self.0.open.lock().remove(name);
        Ok(info(row))
    }

    /// Deletes the tables and bytes of domains that are being deleted; called repeatedly. Without
    /// tables an upload that is under way cannot renew its lease: one lease after the first
    /// deletion no more bytes arrive, and the remains are deleted. Another lease later no process
    /// deletes any more, and the row is deleted: then a new domain may have the place.
    ///
    /// # Errors
    /// The first, after the step of every domain was tried; the next call goes on.
    /// [`Error::Unavailable`] if the catalogue cannot be read.
    #[boxed]
    pub async fn remove_deleted(&self, budget: &Budget) -> Result<RunEnd> {
        let (mut end, mut failed) = (RunEnd::Finished, None);
        for (name, step) in self.catalogue().deleted_domains(self.0.default.options.lease).await? {
            self.0.open.lock().remove(&name);
            match self.take_step(&name, step, budget).await {
                Ok(RunEnd::Finished) => {}
                Ok(RunEnd::Stopped) => end = RunEnd::Stopped,
                // A failure in one domain does not keep the task from the others.
                Err(error) => {
                    tracing::warn!(%error, domain = %name, "removal of a deleted domain failed");
                    failed.get_or_insert(error);
                }
            }
        }
        failed.map_or(Ok(end), Err)
    }

    /// Whether a removal of this domain had begun when the catalogue was lost.
    async fn is_half_removed(&self, name: &DomainName) -> Result<bool> {
        let Some(home) = &self.0.home else { return Ok(false) };
        // A row is made before anything else: a domain that is being made has one now.
        Ok(home.is_half_removed(name).await? && self.catalogue().domain(name.clone()).await?.is_none())
    }

    /// Takes the next step of a removal.
    async fn take_step(&self, name: &DomainName, step: DomainStep, budget: &Budget) -> Result<RunEnd> {
        match step {
            DomainStep::Empty | DomainStep::EmptyLast => {
                if budget.is_used_up() || !self.home()?.remove(name, self.catalogue(), budget).await? {
                    return Ok(RunEnd::Stopped);
                }
                self.catalogue().domain_emptied(name.clone(), step == DomainStep::EmptyLast).await?;
            }
            DomainStep::Wait => {}
            DomainStep::Forget => {
                self.catalogue().forget_domain(name.clone()).await?;
                tracing::info!(domain = %name, "domain deleted");
            }
        }
        Ok(RunEnd::Finished)
    }

    /// A domain, also one that is being deleted.
    ///
    /// # Errors
    /// [`Error::DomainUnknown`].
    #[boxed]
    pub async fn get(&self, name: &DomainName) -> Result<DomainInfo> {
        if name.is_default() {
            return Ok(self.default_info());
        }
        let row = self.catalogue().domain(name.clone()).await?;
        row.map(info).ok_or_else(|| Error::DomainUnknown(name.clone()))
    }

    /// Domains by name.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a cursor that is none.
    #[boxed]
    pub async fn list(&self, after: Option<String>, limit: usize) -> Result<Page<DomainInfo>> {
        let is_ahead = after.as_deref().is_none_or(|after| after < DomainName::DEFAULT);
        let Page { rows, mut next } = self.catalogue().domains(after, limit).await?;
        let mut rows: Vec<DomainInfo> = rows.into_iter().map(info).collect();
        let at = rows.partition_point(|row| row.name.as_str() < DomainName::DEFAULT);
        if is_ahead && (at < rows.len() || next.is_none()) {
            rows.insert(at, self.default_info());
            if rows.len() > limit {
                rows.truncate(limit);
                next = rows.last().map(|row| row.name.to_string());
            }
        }
        Ok(Page { rows, next })
    }

    fn audit_entry(&self) -> Option<AuditEntry> {
        self.1.as_deref().cloned()
    }

    fn catalogue(&self) -> &dyn crate::Metadata {
        &*self.0.default.metadata
    }

    fn home(&self) -> Result<&DomainHome> {
        self.0.home.as_ref().ok_or_else(|| Error::Invalid("this store has no place for other domains".into()))
    }

    /// The row of a domain that may be used. The store of one that may not is closed.
    async fn live(&self, name: &DomainName) -> Result<DomainRow> {
        match self.catalogue().domain(name.clone()).await? {
            Some(row) if row.deleting_since.is_none() => Ok(row),
            _ => {
                self.0.open.lock().remove(name);
                Err(Error::DomainUnknown(name.clone()))
            }
        }
    }

    /// The open store of the domain with this row.
    fn confirmed(&self, row: &DomainRow) -> Option<Store> {
        let mut open = self.0.open.lock();
        let opened = open.get_mut(&row.name).filter(|opened| opened.created_at == row.created_at)?;
        opened.checked = Instant::now();
        Some(opened.store.clone())
    }

    async fn assemble(&self, name: &DomainName) -> Result<Store> {
        let Some(wrapped) = encryption::key_of(self.catalogue(), name).await? else {
            return self.home()?.open(name, &self.0.default).await;
        };
        // Before anything of it is made.
        let key = self.unwrap(name, &wrapped).await?;
        let store = self.home()?.open(name, &self.0.default).await?.encrypted((key, wrapped));
        store.keep_key(self.catalogue(), name).await;
        Ok(store)
    }

    /// The key of a domain; after a failure not at once again.
    async fn unwrap(&self, name: &DomainName, wrapped: &WrappedKey) -> Result<Arc<DomainKey>> {
        let before = match self.0.locked.lock().get(name).filter(|locked| locked.wrapped == *wrapped) {
            Some(locked) if Instant::now() < locked.until => return Err(Error::Locked(locked.reason.clone())),
            before => before.map(|locked| locked.wait),
        };
        let opened = self.0.keys.unwrap(name, wrapped).await;
        let mut all = self.0.locked.lock();
        match &opened {
            Err(Error::Locked(reason)) => {
                let wait = before.map_or(LOCKED.0, |before| LOCKED.1.min(before * 2));
                let until = Instant::now() + wait;
                all.insert(name.clone(), Locked { wrapped: wrapped.clone(), reason: reason.clone(), wait, until });
            }
            _ => drop(all.remove(name)),
        }
        opened
    }

    async fn key_on_storage(&self, name: &DomainName) -> Result<Option<String>> {
        let key: Option<WrappedKey> = self.home()?.key(name).await?;
        Ok(key.map(|key| key.to_string()))
    }

    fn default_info(&self) -> DomainInfo {
        let (name, encrypted) = (DomainName::default(), self.0.default.is_encrypted());
        DomainInfo { name, state: DomainState::Live, created_at: None, deleting_since: None, encrypted }
    }
}

fn as_wanted(info: &DomainInfo, encrypted: Option<bool>) -> Result<()> {
    match (encrypted, info.encrypted) {
        (Some(true), false) => Err(Error::Invalid(format!("domain {} is there and is not encrypted, and stays so", info.name))),
        (Some(false), true) => Err(Error::Invalid(format!("domain {} is there and is encrypted, and stays so", info.name))),
        _ => Ok(()),
    }
}

fn info(row: DomainRow) -> DomainInfo {
    let state = if row.deleting_since.is_some() { DomainState::Deleting } else { DomainState::Live };
    let (created_at, deleting_since) = (Some(row.created_at), row.deleting_since);
    DomainInfo { name: row.name, state, created_at, deleting_since, encrypted: row.encrypted }
}
