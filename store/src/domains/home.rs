//! Where domains lie: how their parts are opened, found and removed.

use crate::backends::SqliteMetadata;
use crate::encryption::{self, WrappedKey};
use crate::error::{Error, Result};
use crate::marker;
use crate::metadata::Metadata;
use crate::packs::in_directory;
use crate::{Budget, Store};
use futures::future::try_join_all;
use futures::{StreamExt as _, TryStreamExt as _};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{ObjectStore, ObjectStoreExt as _};
use pfr_schema::DomainName;
use pfr_service::durable;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Objects deleted at a time.
const AT_ONCE: usize = 16;
/// The database of a domain, in its folder.
const DATABASE: &str = "metadata.sqlite";

/// Where the domains of a registry lie that are not the default one.
#[derive(Clone, Debug)]
pub struct DomainHome {
    /// Their tables.
    pub tables: DomainTables,
    /// Their packs, journals and markers.
    pub packs: DomainPacks,
}

/// Where tables lie.
#[derive(Clone, Debug)]
pub enum DomainTables {
    /// A SQLite file for each domain, in `domains/NAME` of this directory.
    Files(PathBuf),
    /// A schema for each domain, in the database of the default domain.
    #[cfg(feature = "postgres")]
    Postgres(Arc<crate::PostgresMetadata>),
}

/// Where packs lie.
#[derive(Clone, Debug)]
pub enum DomainPacks {
    /// In `domains/NAME/INSIDE` of a directory, with fsync.
    Files {
        /// The directory.
        root: PathBuf,
        /// The folder in that of a domain; empty for none.
        inside: &'static str,
    },
    /// In `domains/NAME` of a bucket.
    Bucket(Arc<dyn ObjectStore>),
}

impl DomainHome {
    /// The store of a domain, made where it is not there.
    pub(super) async fn open(&self, name: &DomainName, beside: &Store) -> Result<Store> {
        let metadata: Arc<dyn Metadata> = match &self.tables {
            DomainTables::Files(root) => {
                let dir = folder(root, name);
                let (database, options) = (dir.join(DATABASE), beside.options());
                blocking(move || make_dir(&dir)).await?;
                SqliteMetadata::of_domain(name, &database, options.clock.clone(), options.min_free).await?
            }
            #[cfg(feature = "postgres")]
            DomainTables::Postgres(database) => database.of_domain(name).await?,
        };
        let (packs, dir) = self.place(name).await?;
        let store = beside.beside(packs, metadata);
        Ok(match dir {
            Some(dir) => store.with_packs_dir(&dir),
            None => store,
        })
    }

    /// Where the packs of a domain lie, and the directory of them, made where it is not there.
    async fn place(&self, name: &DomainName) -> Result<(Arc<dyn ObjectStore>, Option<PathBuf>)> {
        match &self.packs {
            DomainPacks::Files { root, inside } => {
                let dir = folder(root, name).join(inside);
                let open = move || -> Result<(Arc<dyn ObjectStore>, Option<PathBuf>)> {
                    make_dir(&dir)?;
                    let fail = |e| Error::Unavailable { what: "directory", reason: format!("{}: {e}", dir.display()) };
                    let packs = in_directory(&dir).map_err(fail)?;
                    Ok((packs, Some(dir)))
                };
                blocking(open).await
            }
            DomainPacks::Bucket(bucket) => Ok((Arc::new(PrefixStore::new(Arc::clone(bucket), prefix(name))), None)),
        }
    }

    /// The wrapped key beside the packs of a domain.
    pub(super) async fn key(&self, name: &DomainName) -> Result<Option<WrappedKey>> {
        // A bucket is not listed for it.
        if matches!(self.packs, DomainPacks::Files { .. }) && !self.has_any(name).await? {
            return Ok(None);
        }
        encryption::read_key(&*self.place(name).await?.0).await
    }

    /// Whether no store has used the place of a domain.
    pub(super) async fn is_new(&self, name: &DomainName) -> Result<bool> {
        if matches!(self.packs, DomainPacks::Files { .. }) && !self.has_any(name).await? {
            return Ok(true);
        }
        encryption::is_new(&*self.place(name).await?.0, false).await
    }

    /// Whether the place of a domain has a marker.
    async fn has_marker(&self, name: &DomainName) -> Result<bool> {
        match &self.packs {
            DomainPacks::Files { root, inside } => is_there(folder(root, name).join(inside).join(marker::KEY)).await,
            DomainPacks::Bucket(bucket) => match bucket.head(&prefix(name).join(marker::KEY)).await {
                Ok(_) => Ok(true),
                Err(object_store::Error::NotFound { .. }) => Ok(false),
                Err(error) => Err(Error::packs(error)),
            },
        }
    }

    /// Whether something of a domain is left, and no marker: as after a removal that was cut, or
    /// before the end of a creation. Of a folder that may not be listed it is not known: nothing is
    /// taken for left then. So nothing that cannot be seen is deleted, and a domain that is not
    /// encrypted can be made there, which needs no list.
    pub(super) async fn is_half_removed(&self, name: &DomainName) -> Result<bool> {
        if self.has_marker(name).await? {
            return Ok(false);
        }
        let has_tables = match &self.tables {
            DomainTables::Files(root) => is_there(folder(root, name).join(DATABASE)).await?,
            #[cfg(feature = "postgres")]
            DomainTables::Postgres(_) => false,
        };
        if has_tables {
            return Ok(true);
        }
        match self.is_new(name).await {
            Err(Error::NotPermitted { what: "packs", .. }) => Ok(false),
            is_new => is_new.map(|is_new| !is_new),
        }
    }

    /// Whether the tables of a domain list packs, and nothing lies in its place: as while its
    /// storage is not mounted.
    pub(super) async fn lacks_packs(&self, name: &DomainName, beside: &Store) -> Result<bool> {
        match &self.tables {
            DomainTables::Files(root) => {
                let database = folder(root, name).join(DATABASE);
                if !is_there(database.clone()).await? || !self.is_new(name).await? {
                    return Ok(false);
                }
                let options = beside.options();
                let tables = SqliteMetadata::of_domain(name, &database, options.clock.clone(), options.min_free).await?;
                Ok(!tables.packs(None, 1).await?.is_empty())
            }
            // Without the catalogue nothing looks for its tables.
            #[cfg(feature = "postgres")]
            DomainTables::Postgres(_) => Ok(false),
        }
    }

    /// Removes everything of a domain; returns whether that was done within the budget, and as long
    /// as the catalogue says that it may. The marker goes first: a rebuild of the catalogue does
    /// not take half a domain for one. Then the wrapped key: without it, what is left cannot be
    /// read. A bucket's objects go last, for they may be many.
    pub(super) async fn remove(&self, name: &DomainName, catalogue: &dyn Metadata, budget: &Budget) -> Result<bool> {
        if !catalogue.may_empty_domain(name.clone()).await? {
            return Ok(false);
        }
        match &self.packs {
            DomainPacks::Files { root, inside } => {
                for key in [marker::KEY, encryption::KEY] {
                    remove_file(folder(root, name).join(inside).join(key)).await?;
                }
            }
            DomainPacks::Bucket(bucket) => {
                for key in [marker::KEY, encryption::KEY] {
                    remove_object(bucket, &prefix(name).join(key)).await?;
                }
            }
        }
        match &self.tables {
            DomainTables::Files(root) => remove_dir(folder(root, name)).await?,
            #[cfg(feature = "postgres")]
            DomainTables::Postgres(database) => database.drop_domain(name).await?,
        }
        match &self.packs {
            DomainPacks::Files { root, .. } => remove_dir(folder(root, name)).await?,
            DomainPacks::Bucket(bucket) => {
                let mut objects = bucket.list(Some(&prefix(name))).chunks(AT_ONCE);
                while let Some(some) = objects.next().await {
                    // Keys of the journal are used again by a new domain of this name.
                    if budget.is_used_up() || !catalogue.may_empty_domain(name.clone()).await? {
                        return Ok(false);
                    }
                    let deletions = some.into_iter().map(|object| async move {
                        let object = object.map_err(Error::packs)?;
                        remove_object(bucket, &object.location).await
                    });
                    try_join_all(deletions).await?;
                }
            }
        }
        Ok(true)
    }

    /// Whether anything lies in the place of a domain.
    pub(super) async fn has_any(&self, name: &DomainName) -> Result<bool> {
        match &self.packs {
            DomainPacks::Files { root, inside } => {
                let dir = folder(root, name).join(inside);
                blocking(move || Ok(dir.exists())).await
            }
            DomainPacks::Bucket(bucket) => Ok(bucket.list(Some(&prefix(name))).try_next().await.map_err(Error::packs)?.is_some()),
        }
    }

    /// The domains that have a marker.
    pub(super) async fn find(&self) -> Result<Vec<DomainName>> {
        let mut names = Vec::new();
        for name in self.names().await? {
            if self.has_marker(&name).await? {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// The domains of which something is left, and no marker: see [`Self::is_half_removed`]. Tables
    /// in PostgreSQL are not looked for.
    pub(super) async fn left(&self) -> Result<Vec<DomainName>> {
        let mut names = self.names().await?;
        if let DomainTables::Files(root) = &self.tables {
            let root = root.clone();
            names.extend(blocking(move || names_in(&root)).await?);
        }
        let mut left = Vec::new();
        for name in names {
            if self.is_half_removed(&name).await? {
                left.push(name);
            }
        }
        Ok(left)
    }

    /// The names of the folders in which packs of domains may lie.
    async fn names(&self) -> Result<BTreeSet<DomainName>> {
        match &self.packs {
            DomainPacks::Files { root, .. } => {
                let root = root.clone();
                blocking(move || names_in(&root)).await
            }
            DomainPacks::Bucket(bucket) => {
                let folders = bucket.list_with_delimiter(Some(&Path::from(DomainName::FOLDER))).await.map_err(Error::packs)?;
                Ok(folders.common_prefixes.iter().filter_map(|folder| name_of(folder.filename()?)).collect())
            }
        }
    }
}

fn folder(root: &std::path::Path, name: &DomainName) -> PathBuf {
    root.join(DomainName::FOLDER).join(name.as_str())
}

fn prefix(name: &DomainName) -> Path {
    Path::from(DomainName::FOLDER).join(name.as_str())
}

/// Makes a directory, durably, where it is not there.
fn make_dir(dir: &std::path::Path) -> Result<()> {
    durable::create_dir_all(dir).map_err(|e| Error::io("directory", dir, &e))
}

/// The names of the folders of domains in a directory.
fn names_in(root: &std::path::Path) -> Result<BTreeSet<DomainName>> {
    let entries = match std::fs::read_dir(root.join(DomainName::FOLDER)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.map_err(|e| Error::io("directory", root, &e))?,
    };
    let mut found = BTreeSet::new();
    for entry in entries {
        let name = entry.map_err(|e| Error::io("directory", root, &e))?.file_name();
        found.extend(name.to_str().and_then(name_of));
    }
    Ok(found)
}

/// The domain whose folder has this name. The default one has no folder.
fn name_of(folder: &str) -> Option<DomainName> {
    folder.parse().ok().filter(|name: &DomainName| !name.is_default())
}

/// Whether something lies at `path`. A disk that cannot be read is an error: a domain whose marker
/// is not there may be deleted.
async fn is_there(path: PathBuf) -> Result<bool> {
    let look = move || match std::fs::metadata(&path) {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(Error::io("directory", &path, &error)),
    };
    blocking(look).await
}

/// Runs calls of the file system on a blocking thread. On a mount that hangs, they would keep an
/// async thread from the requests of other domains.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    pfr_service::task::spawn_blocking(work).await?
}

async fn remove_object(bucket: &Arc<dyn ObjectStore>, at: &Path) -> Result<()> {
    match bucket.delete(at).await {
        Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
        Err(error) => Err(Error::packs(error)),
    }
}

async fn remove_file(file: PathBuf) -> Result<()> {
    removed(file, |file| std::fs::remove_file(file)).await
}

async fn remove_dir(dir: PathBuf) -> Result<()> {
    removed(dir, |dir| std::fs::remove_dir_all(dir)).await
}

/// Removes something durably, if it is there.
async fn removed(what: PathBuf, remove: fn(&std::path::Path) -> io::Result<()>) -> Result<()> {
    let path = what.clone();
    let work = move || match remove(&what) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => what.parent().map_or(Ok(()), durable::sync_dir),
    };
    let done = pfr_service::task::spawn_blocking(work).await?;
    done.map_err(|e| Error::io("directory", &path, &e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;
    use std::pin::pin;

    fn home(root: &std::path::Path) -> DomainHome {
        let packs = DomainPacks::Files { root: root.into(), inside: "packs" };
        DomainHome { tables: DomainTables::Files(root.into()), packs }
    }

    #[test]
    fn a_mount_that_hangs_holds_up_no_async_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().max_blocking_threads(1).build().expect("a runtime");
        runtime.block_on(async {
            let dir = tempfile::tempdir().expect("a directory");
            let (home, name) = (home(dir.path()), "a".parse::<DomainName>().expect("a name"));
            let beside = Store::open_in_memory(crate::Options::default()).await.expect("a store");
            // As if a call hung: the only blocking thread is busy.
            let (hung, goes_on) = std::sync::mpsc::channel::<()>();
            let busy = pfr_service::task::spawn_blocking(move || goes_on.recv());
            let mut opening = pin!(home.open(&name, &beside));
            assert!(opening.as_mut().now_or_never().is_none());
            assert!(!dir.path().join(DomainName::FOLDER).exists(), "an async thread made it");
            assert!(home.key(&name).now_or_never().is_none());
            assert!(home.is_new(&name).now_or_never().is_none());
            assert!(home.is_half_removed(&name).now_or_never().is_none());
            assert!(home.lacks_packs(&name, &beside).now_or_never().is_none());
            assert!(home.has_any(&name).now_or_never().is_none());
            assert!(home.find().now_or_never().is_none());
            drop(hung);
            opening.await.expect("it goes on");
            assert!(dir.path().join(DomainName::FOLDER).join("a/packs").is_dir());
            assert!(busy.await.expect("it ended").is_err());
        });
    }

    #[tokio::test]
    async fn a_marker_that_cannot_be_looked_for_is_not_taken_for_one_that_is_gone() {
        let dir = tempfile::tempdir().expect("a directory");
        let home = home(dir.path());
        let name: DomainName = "a".parse().expect("a name");
        let inside = folder(dir.path(), &name).join("packs");
        std::fs::create_dir_all(&inside).expect("a folder");
        std::fs::write(folder(dir.path(), &name).join(DATABASE), b"").expect("a file");
        assert!(home.is_half_removed(&name).await.expect("it is looked at"), "it has no marker");
        // A file that the disk does not give: a link to itself.
        std::os::unix::fs::symlink(marker::KEY, inside.join(marker::KEY)).expect("a link");
        let looked = home.is_half_removed(&name).await;
        assert!(matches!(looked, Err(Error::Unavailable { .. })), "it would be deleted: {looked:?}");
        // A file beside the folders of domains is none of them.
        std::fs::remove_file(inside.join(marker::KEY)).expect("the link");
        std::fs::write(dir.path().join(DomainName::FOLDER).join("notes"), b"").expect("a file");
        assert!(home.find().await.expect("they are looked for").is_empty());
    }
}
