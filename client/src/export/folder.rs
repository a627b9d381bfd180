//! A layout in a directory.
//!
//! One export at a time writes into it: it holds a lock on the directory. A blob is complete and
//! durable before it gets its name, and the index is replaced last. So a killed export leaves
//! blobs that the next one uses, one file under a temporary name that the next one overwrites, and
//! the index as it was.

use super::layout::{Layout, failed, malformed};
use super::spool::{Body, Spool, Written, pieces};
use crate::error::{Error, Result, blocking};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt as _};
use futures::stream::{self, BoxStream};
use futures::{StreamExt as _, TryStreamExt as _};
use pfr_schema::export::{Entry, INDEX_BYTES, INDEX_FILE, Index, LAYOUT_FILE};
use pfr_schema::tree::Document;
use pfr_schema::{Digest, ErrorCode};
use pfr_service::durable::{self, Unfinished};
use std::ffi::OsStr;
use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Read as _, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The name of what is not complete.
const UNFINISHED: &str = ".pf-unfinished";
/// How often to look whether another export has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A directory.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    name: String,
    /// Held while an export writes.
    lock: Option<Arc<OwnedFd>>,
}

impl Folder {
    /// To read from.
    pub async fn open(root: PathBuf) -> Result<Self> {
        let folder = Self { name: root.display().to_string(), root, lock: None };
        let (path, name) = (folder.root.clone(), folder.name.clone());
        blocking(move || if is_layout(&path)? { Ok(()) } else { Err(no_layout(&name)) }).await?;
        Ok(folder)
    }

    /// To write into; it is made if it is not there. Waits until no other export writes into it.
    pub async fn create(root: PathBuf) -> Result<Self> {
        let name = root.display().to_string();
        let path = root.clone();
        let lock = blocking(move || {
            durable::create_dir_all(&path).map_err(Error::io("create", &path))?;
            File::open(&path).map_err(Error::io("open", &path))
        });
        let lock = lock.await?;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => tokio::time::sleep(LOOK).await,
                Err(TryLockError::Error(error)) => return Err(Error::io("lock", &root)(error)),
            }
        }
        let folder = Self { root, name, lock: Some(Arc::new(lock.into())) };
        let (path, handle) = (folder.root.clone(), folder.handle()?);
        blocking(move || prepare(&path, handle)).await?;
        Ok(folder)
    }

    fn blob(&self, digest: &Digest) -> PathBuf {
        blobs(&self.root, digest.algorithm().name()).join(digest.hex())
    }

    fn handle(&self) -> Result<Arc<OwnedFd>> {
        self.lock.clone().ok_or_else(|| Error::Internal("a layout is written that was opened to be read".into()))
    }
}

fn blobs(root: &Path, algorithm: &str) -> PathBuf {
    root.join("blobs").join(algorithm)
}

fn no_layout(name: &str) -> Error {
    failed(name, ErrorCode::NotFound, "there is no OCI layout: expected a directory with the files oci-layout and index.json")
}

/// Whether a directory says that it is a layout, of the version that this code knows.
fn is_layout(root: &Path) -> Result<bool> {
    let path = root.join(LAYOUT_FILE.0);
    let Some(bytes) = read_if_there(&path, 4096)? else { return Ok(false) };
    check_version(&root.display().to_string(), &bytes)?;
    Ok(true)
}

/// Refuses a layout of another version.
pub(super) fn check_version(name: &str, bytes: &[u8]) -> Result<()> {
    let version = serde_json::from_slice::<serde_json::Value>(bytes).ok();
    let version = version.as_ref().and_then(|value| value.get("imageLayoutVersion")?.as_str());
    match version {
        Some("1.0.0") => Ok(()),
        found => {
            let found = found.map_or("none".to_owned(), |found| format!("{:?}", found.chars().take(40).collect::<String>()));
            Err(failed(name, ErrorCode::InvalidDocument, format!("{}: expected the version \"1.0.0\", found {found}", LAYOUT_FILE.0)))
        }
    }
}

/// Makes the folders of a layout in a directory that is empty, or a layout.
fn prepare(root: &Path, handle: Arc<OwnedFd>) -> Result<()> {
    if !is_layout(root)? {
        let mut entries = std::fs::read_dir(root).map_err(Error::io("read", root))?;
        if entries.any(|entry| entry.is_ok_and(|entry| entry.file_name() != UNFINISHED)) {
            let reason = "it is not empty and no OCI layout; export into a new directory".to_owned();
            return Err(Error::Refused { path: root.to_owned(), reason });
        }
        write(root, handle, LAYOUT_FILE.0, LAYOUT_FILE.1)?;
    }
    let folder = blobs(root, "sha256");
    for path in [root.join("blobs"), folder.clone()] {
        if path.symlink_metadata().is_ok_and(|found| !found.is_dir()) {
            return Err(Error::Refused {
                path,
                reason: "it is a link or a file, and blobs are written only into folders of the layout".into(),
            });
        }
    }
    durable::create_dir_all(&folder).map_err(Error::io("create", &folder))
}

/// Writes or replaces a file of the layout, durably.
fn write(root: &Path, handle: Arc<OwnedFd>, name: &str, bytes: &[u8]) -> Result<()> {
    let written = Unfinished::create(Arc::clone(&handle), UNFINISHED.into(), 0o666).and_then(|mut file| {
        file.file().write_all(bytes)?;
        file.publish(&*handle, OsStr::new(name))
    });
    written.map_err(Error::io("write", &root.join(name)))
}

/// An ordinary file; the read of anything else could wait for ever.
pub(super) fn open_file(path: &Path) -> std::io::Result<File> {
    let file = path.metadata()?;
    if file.is_file() { File::open(path) } else { Err(std::io::Error::new(ErrorKind::InvalidInput, "it is no ordinary file")) }
}

/// The bytes of a file, if there is one of that name.
fn read_if_there(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let file = match open_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file.map_err(Error::io("open", path))?,
    };
    let mut bytes = Vec::new();
    file.take(most + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() as u64 > most {
        return Err(Error::Refused { path: path.to_owned(), reason: format!("it has more than {most} bytes") });
    }
    Ok(Some(bytes))
}

fn index(root: &Path) -> Result<Index> {
    let bytes = read_if_there(&root.join(INDEX_FILE), INDEX_BYTES)?;
    bytes.map_or_else(|| Ok(Index::default()), |bytes| Index::parse(&bytes).map_err(malformed(&root.display().to_string(), INDEX_FILE)))
}

impl Layout for Folder {
    fn name(&self) -> &str {
        &self.name
    }

    fn entries(&self) -> BoxFuture<'_, Result<Vec<Entry>>> {
        let root = self.root.clone();
        blocking(move || Ok(index(&root)?.manifests)).boxed()
    }

    fn manifest<'a>(&'a self, entry: &'a Entry, most: u64) -> BoxFuture<'a, Result<Bytes>> {
        let (path, name, digest) = (self.blob(&entry.digest), self.name.clone(), entry.digest);
        blocking(move || {
            let bytes = read_if_there(&path, most)?;
            bytes.map(Bytes::from).ok_or_else(|| failed(&name, ErrorCode::MissingBlobs, format!("it lists {digest}, which is not there")))
        })
        .boxed()
    }

    fn read(&self, digest: Digest, range: Range<u64>) -> BoxStream<'static, Result<Bytes>> {
        let (path, name) = (self.blob(&digest), self.name.clone());
        let end = range.end;
        let open = blocking(move || {
            let file = match open_file(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Err(failed(&name, ErrorCode::MissingBlobs, format!("its blob {digest} is not there")));
                }
                file => file.map_err(Error::io("open", &path))?,
            };
            if file.metadata().map_err(Error::io("read", &path))?.len() < end {
                return Err(failed(&name, ErrorCode::Truncated, format!("its blob {digest} is shorter than its manifest says")));
            }
            Ok((file, path))
        });
        let open = async move {
            let (file, path) = open.await?;
            Ok::<_, Error>(pieces(Arc::new(file), path, range))
        };
        stream::once(open).try_flatten().boxed()
    }

    fn spool(&self) -> Result<Spool> {
        let file =
            Unfinished::create(self.handle()?, UNFINISHED.into(), 0o666).map_err(Error::io("create", &self.root.join(UNFINISHED)))?;
        Ok(Spool::named(file, self.root.join(UNFINISHED)))
    }

    fn put(&self, blob: Written) -> BoxFuture<'_, Result<bool>> {
        let (root, path) = (self.root.clone(), self.blob(&blob.digest));
        blocking(move || {
            let Body::Named(file) = blob.body else { return Err(Error::Internal("a blob of a folder is elsewhere".into())) };
            let is_new = !path.exists();
            // One that is there is replaced: it may be damaged.
            let folder = blobs(&root, blob.digest.algorithm().name());
            let folder = File::open(&folder).map_err(Error::io("open", &folder))?;
            file.publish(folder, OsStr::new(&blob.digest.hex())).map_err(Error::io("write", &path))?;
            Ok(is_new)
        })
        .boxed()
    }

    fn publish<'a>(&'a self, manifest: &'a Document, entry: Entry) -> BoxFuture<'a, Result<()>> {
        async move {
            self.put(self.spool()?.all(manifest.bytes.clone()).await?).await?;
            let (root, handle, name) = (self.root.clone(), self.handle()?, self.name.clone());
            blocking(move || {
                let mut index = index(&root)?;
                index.add(entry);
                write(&root, handle, INDEX_FILE, &index.to_bytes().map_err(malformed(&name, INDEX_FILE))?)
            })
            .await
        }
        .boxed()
    }

    fn finish(&self) -> BoxFuture<'_, Result<()>> {
        async { Ok(()) }.boxed()
    }
}
