//! Records on disk: one JSON file for each, replaced atomically.

use crate::error::{Error, Result, blocking};
use pfr_service::durable;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::Mutex;

/// What is kept in files.
pub(crate) trait Record: Serialize + DeserializeOwned + Send + 'static {
    /// What an error calls their folder.
    const WHAT: &'static str;
    /// Bytes of a file at most.
    const MAX_BYTES: u64;

    /// Its id: the file is named after it.
    fn id(&self) -> &str;
}

/// A folder of records of one kind.
#[derive(Debug)]
pub(crate) struct Files<T> {
    dir: PathBuf,
    /// Held while a file is written or removed.
    turn: Arc<Mutex<()>>,
    records: PhantomData<fn() -> T>,
}

impl<T: Record> Files<T> {
    /// Opens the folder, and makes it if it is not there. On a full disk the first record makes it:
    /// a start needs no free space.
    pub async fn open(dir: PathBuf) -> Result<Self> {
        let files = Self { dir, turn: Arc::default(), records: PhantomData };
        files
            .on(|dir| match durable::create_private_dir_all(dir) {
                Err(error) if is_full(&error) => {
                    tracing::warn!(path = %dir.display(), %error, "cannot make the folder of the {}", T::WHAT);
                    Ok(())
                }
                made => made,
            })
            .await?;
        Ok(files)
    }

    /// All records. A file that does not parse is logged and stays: it may be the only record of a
    /// push.
    pub async fn load(&self) -> Result<BTreeMap<String, T>> {
        self.on(|dir| {
            let mut records = BTreeMap::new();
            let entries = match std::fs::read_dir(dir) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(records),
                entries => entries?,
            };
            for entry in entries {
                let path = entry?.path();
                match path.extension().and_then(|e| e.to_str()) {
                    Some("json") => match read::<T>(&path) {
                        Ok(record) => drop(records.insert(record.id().to_owned(), record)),
                        Err(error) => tracing::error!(path = %path.display(), %error, "cannot read a file of the {}, skipped", T::WHAT),
                    },
                    // A crash interrupted the write, so the record was never confirmed.
                    Some(durable::UNFINISHED) => std::fs::remove_file(&path)?,
                    _ => {}
                }
            }
            Ok(records)
        })
        .await
    }

    pub async fn write(&self, record: &T) -> Result<()> {
        let (name, bytes) = (file_name(record.id()), serde_json::to_vec(record).map_err(|e| Error::Internal(e.to_string()))?);
        self.change(move |dir| match durable::replace(&dir.join(&name), &bytes) {
            // The disk was full when the folder was to be made.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                durable::create_private_dir_all(dir)?;
                durable::replace(&dir.join(&name), &bytes)
            }
            written => written,
        })
        .await
    }

    pub async fn remove(&self, id: &str) -> Result<()> {
        let name = file_name(id);
        self.change(move |dir| match std::fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
        .await
    }

    /// Changes the folder, in the order of the calls. The thread keeps the turn: it goes on if this
    /// future is dropped, and another change of this record would write to the same temporary file.
    async fn change(&self, work: impl FnOnce(&Path) -> io::Result<()> + Send + 'static) -> Result<()> {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        self.on(move |dir| {
            let _turn = turn;
            work(dir)
        })
        .await
    }

    async fn on<R: Send + 'static>(&self, work: impl FnOnce(&Path) -> io::Result<R> + Send + 'static) -> Result<R> {
        let dir = self.dir.clone();
        blocking(T::WHAT, move || work(&dir).map_err(Error::io(format!("{} {}", T::WHAT, dir.display())))).await
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn file_name(id: &str) -> String {
    format!("{id}.json")
}

fn read<T: Record>(path: &Path) -> io::Result<T> {
    let invalid = |reason: String| io::Error::new(io::ErrorKind::InvalidData, reason);
    let length = std::fs::metadata(path)?.len();
    if length > T::MAX_BYTES {
        return Err(invalid(format!("{length} bytes, the limit is {}", T::MAX_BYTES)));
    }
    let record: T = serde_json::from_slice(&std::fs::read(path)?).map_err(|e| invalid(e.to_string()))?;
    if path.file_stem().and_then(|stem| stem.to_str()) == Some(record.id()) {
        Ok(record)
    } else {
        Err(invalid("it has another record's id".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::Digest;
    use pfr_schema::agent::{Job, PushJob, PushState};
    use proptest::prelude::*;

    fn job(id: &str) -> PushJob {
        let digest = Digest::sha256(id.as_bytes());
        PushJob {
            id: id.into(),
            digest,
            reference: "http://r/a:b".into(),
            state: PushState::Waiting,
            attempts: 3,
            error: None,
            code: None,
            bytes_sent: 0,
        }
    }

    #[tokio::test]
    async fn jobs_are_there_again_and_debris_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let files: Files<PushJob> = Files::open(dir.path().join("pushes")).await.unwrap();
        files.write(&job("b")).await.unwrap();
        files.write(&job("a")).await.unwrap();
        files.write(&job("c")).await.unwrap();
        files.remove("c").await.unwrap();
        let at = |name: &str| dir.path().join("pushes").join(name);
        std::fs::write(at("x.new"), b"{").unwrap();
        std::fs::write(at("bad.json"), b"{\"id\":1}").unwrap();
        std::fs::write(at("huge.json"), vec![b' '; PushJob::MAX_BYTES as usize + 1]).unwrap();
        std::fs::copy(at("a.json"), at("other.json")).unwrap();
        let jobs = files.load().await.unwrap();
        assert_eq!(jobs.into_values().collect::<Vec<_>>(), [job("a"), job("b")]);
        assert!(!at("x.new").exists() && at("bad.json").exists());
    }

    #[tokio::test]
    async fn a_write_that_was_given_up_does_not_end_after_the_next_one() {
        let dir = tempfile::tempdir().unwrap();
        let files: Files<PushJob> = Files::open(dir.path().join("pushes")).await.unwrap();
        // As if the disk hung.
        let (goes_on, hangs) = std::sync::mpsc::channel::<()>();
        let first = move |dir: &Path| {
            let _ = hangs.recv();
            durable::replace(&dir.join("a.json"), b"{}")
        };
        drop(futures::poll!(Box::pin(files.change(first))));
        let record = job("a");
        let mut next = Box::pin(files.write(&record));
        let early = tokio::time::timeout(std::time::Duration::from_millis(100), &mut next).await;
        drop(goes_on);
        assert!(early.is_err(), "it did not wait for the one before it");
        next.await.unwrap();
        assert_eq!(files.load().await.unwrap().into_values().collect::<Vec<_>>(), [job("a")]);
    }

    #[tokio::test]
    async fn a_folder_that_could_not_be_made_is_empty_and_made_by_the_first_record() {
        let dir = tempfile::tempdir().unwrap();
        let files: Files<PushJob> = Files::open(dir.path().join("pushes")).await.unwrap();
        std::fs::remove_dir(dir.path().join("pushes")).unwrap();
        assert!(files.load().await.unwrap().is_empty());
        files.remove("a").await.unwrap();
        files.write(&job("a")).await.unwrap();
        assert_eq!(files.load().await.unwrap().into_values().collect::<Vec<_>>(), [job("a")]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("a.json");
            std::fs::write(&path, &bytes).unwrap();
            prop_assert!(read::<PushJob>(&path).is_err() && read::<Job>(&path).is_err());
        }
    }
}
