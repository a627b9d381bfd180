//! The marker shows that the storage belongs to this store: an object that is written at the first
//! start, or else before the first pack has a row, and that is never deleted. It has a random id,
//! which the tables have too.
//!
//! A bucket that was deleted, a directory whose disk is not mounted and a wrong disk look like a
//! lost pack: every request answers "not found". Only if the marker is found does that mean that a
//! pack is lost. Otherwise the storage is out of reach, and nothing follows from it.
//!
//! The id is in the marker first, and then in the tables. Once the tables have it, no marker is
//! written where none is, and one with another id is another store's. An earlier version wrote a
//! marker without an id, or a person put it there to say that the storage is the right one. Such a
//! marker counts, and gets the id.
//!
//! Tables that have no id yet take that of a storage only if it can be theirs: one of the packs
//! that they list lies on it, or they were never used and no pack lies on it.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::PackState;
use crate::packs::{key_of, path};
use futures::TryStreamExt as _;
use futures::future::ready;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions};
use pfr_schema::journal::{Key, PREFIX};
use std::time::Duration;
use uuid::Uuid;

/// Key of the marker.
pub(crate) const KEY: &str = "pf-store";
/// The line before that of the id, for people.
const WORDS: &str =
    "Packs and the journal of a pf store lie beside this. Without this file nothing that is missing here is taken for lost.";
/// What the line of the id begins with.
const ID: &str = "id ";
/// Bytes of a marker in which an id is looked for.
const LONGEST: u64 = 4096;

/// Packs looked for on a storage before it counts as another store's.
const PROOFS: usize = 64;

/// How long the start of a registry waits for a storage that does not answer.
const START_WAIT: Duration = Duration::from_secs(10);

/// What lies in the place of the marker.
#[derive(Debug)]
enum Marker {
    Missing,
    WithoutId,
    Of(String),
}

impl Marker {
    fn parse(text: &str) -> Self {
        let mut ids = text.lines().filter_map(|line| line.strip_prefix(ID));
        ids.find(|id| Uuid::parse_str(id).is_ok()).map_or(Self::WithoutId, |id| Self::Of(id.to_owned()))
    }
}

/// What is known of the tables of a store. It says from which storage they take their id if they
/// have none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tables {
    /// They were never used. The storage has no packs, and may lack the marker.
    New,
    /// They list packs or names. The storage has one of these packs, if there are any.
    Used,
    /// They are made from the storage, so it is theirs. It may lack the marker.
    Rebuilt,
}

fn new_id() -> String {
    Uuid::now_v7().to_string()
}

fn text_of(id: &str) -> String {
    format!("{WORDS}\n{ID}{id}\n")
}

fn missing() -> Error {
    let reason = format!(
        "there is no {KEY} on it, so this is not the storage of this store, or all of it is gone: is it mounted, is it the right bucket?"
    );
    Error::Unavailable { what: "storage", reason }
}

fn late() -> Error {
    Error::Unavailable { what: "storage", reason: format!("it did not answer within {} s", START_WAIT.as_secs()) }
}

fn of_another(found: &str, known: &str) -> Error {
    let reason = format!(
        "{KEY} on it has the id {found}, and this store's is {known}, so this is not the storage of this store: is it mounted, is it the \
         right bucket, and not that of another registry?"
    );
    Error::Unavailable { what: "storage", reason }
}

fn without_its_packs(looked_for: usize) -> Error {
    let reason = format!(
        "{KEY} is on it, but none of the oldest packs of this store ({looked_for} looked for), so this is not the storage of this store: \
         is it mounted, is it the right bucket? If it is, these packs are lost: move the database away, and rebuild the tables from the \
         storage"
    );
    Error::Unavailable { what: "storage", reason }
}

fn with_packs_of_others() -> Error {
    of_another_database("packs", "the storage has some")
}

/// The storage has something that the database does not know: another registry's database lists it,
/// or the database was lost.
fn of_another_database(what: &str, found: &str) -> Error {
    let reason = format!(
        "the database has no {what}, and {found}. If another registry uses this storage, two databases cannot share it: give this store a \
         storage of its own, or the database of the other one. Otherwise the database was lost, or was not rebuilt to the end: move it \
         away, and rebuild the tables from the storage while nothing else uses it"
    );
    Error::Unavailable { what: "metadata", reason }
}

impl Store {
    /// Checks the database before a process writes its first pack or object of the journal. Writes
    /// the marker if the store is new; otherwise the storage must have it.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: it is not the storage of this store, or it or the database cannot be
    /// reached. The next call checks again.
    pub(crate) async fn mark(&self) -> Result<()> {
        let mark = || async {
            self.names_are_known().await?;
            self.decide_clear().await?;
            self.identify(self.tables().await?).await
        };
        self.marked.get_or_try_init(mark).await?;
        Ok(())
    }

    /// Whether the storage may lack the marker, unless the tables have its id. It was always
    /// written before the first row of a pack. A store of which all packs were collected is not
    /// new: its journal had an object for each name.
    async fn is_new(&self) -> Result<bool> {
        if !self.metadata.packs(None, 1).await?.is_empty() {
            return Ok(false);
        }
        let journal = self.metadata.journal_state(1).await?;
        Ok(journal.summary == 0 && journal.objects == 0)
    }

    async fn tables(&self) -> Result<Tables> {
        Ok(if self.is_new().await? { Tables::New } else { Tables::Used })
    }

    /// Makes the marker and the tables have one id, and returns it. Writes the marker of a store
    /// that is new, and before it the domain's wrapped key.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the marker is missing although the store is not new or the tables
    /// have an id, or it has another id. Those of [`Self::is_own`] if the tables have no id.
    #[boxed]
    pub(crate) async fn identify(&self, tables: Tables) -> Result<String> {
        // Read before the marker, which is there before it.
        let known = self.metadata.storage_id().await?;
        let mut marker = self.marker().await?;
        let is_missing = matches!(marker, Marker::Missing);
        if is_missing && (known.is_some() || tables == Tables::Used) {
            return Err(missing());
        }
        if !is_missing && known.is_none() && tables != Tables::Rebuilt {
            self.is_own().await?;
        }
        if tables != Tables::Used {
            self.put_key().await?;
        }
        if is_missing {
            marker = self.new_marker().await?;
        }
        let found = match marker {
            Marker::Missing => return Err(missing()),
            Marker::WithoutId => {
                // Processes that do this at once write the same: that of the tables.
                let id = match known {
                    Some(known) => known,
                    None => self.metadata.enter_storage_id(new_id()).await?,
                };
                self.packs.put(&Path::from(KEY), text_of(&id).into()).await.map_err(Error::packs)?;
                return Ok(id);
            }
            Marker::Of(found) => found,
        };
        let known = match known {
            Some(known) => known,
            None => {
                // The process that wrote it may not have come to this. A marker that a power cut
                // takes must not be in the tables.
                self.sync_names().await?;
                self.metadata.enter_storage_id(found.clone()).await?
            }
        };
        if found == known { Ok(known) } else { Err(of_another(&found, &known)) }
    }

    /// Checks that a storage with a marker may be that of these tables, which have no id yet.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the tables list packs, and none of those that were looked for is
    /// there; or the tables were never used, and packs are there.
    #[boxed]
    async fn is_own(&self) -> Result<()> {
        if self.is_new().await? {
            if !self.has_packs().await? {
                return Ok(());
            }
            // Another replica may have written these packs since. Before that it entered the id
            // into the tables, or, if it is of an earlier version, the rows of the packs.
            if self.metadata.storage_id().await?.is_none() && self.is_new().await? {
                return Err(with_packs_of_others());
            }
        }
        // The oldest first. If an earlier version ran while its disk was not mounted, the newest
        // lie on the disk below. And merging replaces new packs.
        let (mut after, mut looked_for) = (None, 0);
        while looked_for < PROOFS {
            let rows = self.metadata.packs(after, PROOFS).await?;
            let Some(last) = rows.last() else { break };
            after = Some(last.id);
            for pack in rows.iter().filter(|pack| pack.state == PackState::Live) {
                match self.packs.head(&path(&pack.key)).await {
                    Ok(found) if found.size == pack.bytes => return Ok(()),
                    Ok(_) | Err(object_store::Error::NotFound { .. }) => looked_for += 1,
                    Err(error) => return Err(Error::packs(error)),
                }
            }
        }
        if looked_for == 0 { Ok(()) } else { Err(without_its_packs(looked_for)) }
    }

    /// Whether packs are on the storage. One that may not be listed counts as a storage without
    /// packs.
    #[boxed]
    async fn has_packs(&self) -> Result<bool> {
        let top = match self.packs.list_with_delimiter(None).await {
            Ok(top) => top,
            Err(object_store::Error::PermissionDenied { .. } | object_store::Error::NotImplemented { .. }) => return Ok(false),
            Err(error) => match Error::packs(error) {
                Error::NotPermitted { .. } => return Ok(false),
                error => return Err(error),
            },
        };
        let is_pack = |object: &ObjectMeta| ready(key_of(&object.location).is_some());
        // Other folders are not listed: the stores of other domains are large, and the root of a
        // disk has a folder that only its administrator may read.
        for folder in top.common_prefixes.iter().filter(|folder| folder.filename().is_some_and(|name| name.len() == 2)) {
            let mut packs = std::pin::pin!(self.packs.list(Some(folder)).try_filter(is_pack));
            if packs.try_next().await.map_err(Error::packs)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Writes a marker with a new id if none is there. Returns the marker that is there afterwards,
    /// which another process may have written.
    async fn new_marker(&self) -> Result<Marker> {
        let (place, text) = (Path::from(KEY), text_of(&new_id()));
        let create = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.packs.put_opts(&place, text.clone().into(), create).await {
            Ok(_) | Err(object_store::Error::AlreadyExists { .. } | object_store::Error::Precondition { .. }) => {}
            // Some storages cannot do that, and any may fail once. A marker that came meanwhile may
            // be in the tables by now, and must not be replaced. Where the storage cannot do it,
            // one of two first starts at once may still be refused.
            Err(_) => match self.marker().await? {
                Marker::Missing => {
                    self.packs.put(&place, text.into()).await.map_err(Error::packs)?;
                }
                first => return Ok(first),
            },
        }
        self.marker().await
    }

    /// What lies in the place of the marker.
    #[boxed]
    async fn marker(&self) -> Result<Marker> {
        let found = match self.packs.get(&Path::from(KEY)).await {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(Marker::Missing),
            Err(error) => return Err(Error::packs(error)),
        };
        if found.meta.size > LONGEST {
            return Ok(Marker::WithoutId);
        }
        let bytes = found.bytes().await.map_err(Error::packs)?;
        Ok(Marker::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Gives a store its id at its first start: from then on a disk that is unmounted before the
    /// first push is not taken for a new one. A storage that fails here does not prevent the start:
    /// the first push does this again.
    ///
    /// # Errors
    /// Those of the database. [`Error::Unavailable`]: it was never used, and the storage has packs.
    async fn introduce(&self) -> Result<()> {
        if self.metadata.storage_id().await?.is_some() {
            return Ok(());
        }
        let tables = self.tables().await?;
        let identified = tokio::time::timeout(START_WAIT, self.identify(tables)).await;
        let error = match identified.unwrap_or_else(|_| Err(late())) {
            Err(
                error @ (Error::Full(_)
                | Error::Locked(_)
                | Error::NotPermitted { .. }
                | Error::Unavailable { what: "storage" | "packs", .. }),
            ) => error,
            done => return done.map(drop),
        };
        tracing::warn!(%error, "the storage has not got its id yet; the first push tries again");
        Ok(())
    }

    /// Called once before requests are served. Checks the database, writes the marker of a store
    /// that is new, and journals the changes of a process that ended before it had done so. A full
    /// disk does not prevent the start: none of these changes was acknowledged, and a client that
    /// repeats one waits for the journal.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: the database is to be rebuilt, or is another store's, or cannot be
    /// reached.
    pub async fn begin_serving(&self) -> Result<()> {
        self.names_are_known().await?;
        self.introduce().await?;
        match self.flush_journal().await {
            Err(error @ Error::Full(_)) => {
                tracing::warn!(%error, "journal: changes of an earlier process cannot be written yet, the disk is full");
                Ok(())
            }
            other => other,
        }
    }

    /// Checks that the database is not an empty one over a storage with a journal. With such a
    /// database, numbers of changes would start again, so a rebuild could not tell new changes from
    /// old ones. A database that was half rebuilt has no number yet either.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: it is to be rebuilt, or it is another store's.
    #[boxed]
    pub async fn names_are_known(&self) -> Result<()> {
        if self.metadata.journal_state(1).await?.last > 0 {
            return Ok(());
        }
        // A summary without any tags and snapshots has the number 0.
        let has_names = |object: &ObjectMeta| ready(Key::parse(object.location.as_ref()).is_ok_and(|key| key.number > 0));
        match std::pin::pin!(self.packs.list(Some(&Path::from(PREFIX))).try_filter(has_names)).try_next().await {
            Ok(None) => return Ok(()),
            // Without the right to list, a rebuild is not possible either, so it cannot be asked
            // for.
            Err(object_store::Error::PermissionDenied { .. } | object_store::Error::NotImplemented { .. }) => return Ok(()),
            Err(error) => return Err(Error::packs(error)),
            Ok(Some(_)) => {}
        }
        // Another process may have written the first name in between.
        if self.metadata.journal_state(1).await?.last > 0 {
            return Ok(());
        }
        Err(of_another_database("tags or snapshots", "the journal on the storage has some"))
    }

    /// Checks that the storage is there and belongs to this store. Call this before taking
    /// something that is not found for lost.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if it does not answer, or answers and lacks the marker though the
    /// store is not new, or has the marker of another store. Those of [`Self::is_own`] if the
    /// tables have no id.
    pub(crate) async fn storage_is_there(&self) -> Result<()> {
        // Read before the marker, which is there before it.
        let known = match self.marked.get() {
            Some(known) => Some(known.clone()),
            None => self.metadata.storage_id().await?,
        };
        match (self.marker().await?, known) {
            (Marker::Of(found), Some(known)) if found != known => Err(of_another(&found, &known)),
            (Marker::Of(_) | Marker::WithoutId, Some(_)) => Ok(()),
            (Marker::Of(_) | Marker::WithoutId, None) => self.is_own().await,
            (Marker::Missing, None) if self.is_new().await? => Ok(()),
            (Marker::Missing, _) => Err(missing()),
        }
    }

    /// [`Self::storage_is_there`] for a storage that is a directory. Its disk may be unmounted
    /// while this process runs: writes then succeed, and lie on the disk below, where nothing finds
    /// them when the other one is mounted again. A bucket that is gone refuses writes.
    ///
    /// # Errors
    /// As [`Self::storage_is_there`].
    pub(crate) async fn directory_is_there(&self) -> Result<()> {
        if self.packs_dir.is_some() { self.storage_is_there().await } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marker_has_the_id_of_its_line_and_whatever_else_lies_there_has_none() {
        let id = new_id();
        let whole = text_of(&id);
        assert!(matches!(Marker::parse(&whole), Marker::Of(found) if found == id));
        // A later version may add lines.
        assert!(matches!(Marker::parse(&format!("{whole}more\n")), Marker::Of(found) if found == id));
        let cut = &whole[..whole.len() - 2];
        for text in ["", WORDS, cut, "id \n", "id one\n", &"\0".repeat(whole.len()), &format!(" {ID}{id}")] {
            assert!(matches!(Marker::parse(text), Marker::WithoutId), "{text:?}");
        }
    }
}
