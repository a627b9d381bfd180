//! A copy of the audit logs of all domains in a file, as lines of JSON.
//!
//! The file follows the tables: it gets each record after the record is durable, so nothing waits
//! for it and nothing is lost while it cannot be written. How far it has come is in a second file
//! beside it. A process that is killed between the two writes some lines twice, and none too few:
//! domain and number of a record tell. The file is opened for each batch, so after a rotation the
//! next lines are in a new one.

use super::Audit;
use crate::domains::{Domain, Domains};
use crate::metrics::AUDIT_LAG;
use pfr_schema::api::AuditRecord;
use pfr_service::durable;
use pfr_store::{AuditFilter, Budget, Metadata};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the logs are read for records of other processes.
const FOLLOW: Duration = Duration::from_secs(5);
/// Records of this time are written together: reading them makes writers of the log wait.
const GATHER: Duration = Duration::from_millis(500);
/// Wait after a failure.
const RETRY: Duration = Duration::from_secs(10);
/// Records read and written at a time: what bounds memory.
const BATCH: usize = 1000;

/// A failure to follow.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Store(#[from] pfr_store::Error),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("a bug: {0}")]
    Bug(String),
}

/// How far a domain's log is in the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Position {
    /// When the domain was made: one of the same name that is made later has another time.
    created_at: Option<u64>,
    /// The last record.
    number: u64,
    /// When that was noted: in a log that began anew, another record has its number. A file of an
    /// older version does not say it.
    at: Option<u64>,
}

type Positions = BTreeMap<String, Position>;

/// The file.
pub(crate) struct AuditFile {
    path: PathBuf,
    domains: Domains,
    audit: Arc<Audit>,
}

impl AuditFile {
    /// The file at `path`. It must be possible to write it.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn open(path: &Path, domains: Domains, audit: Arc<Audit>) -> io::Result<Self> {
        let path = std::path::absolute(path)?;
        open(&path)?;
        read_positions(&positions_path(&path))?;
        Ok(Self { path, domains, audit })
    }

    /// Follows the logs until `stopping`, and then once more.
    pub(crate) async fn run(self, stopping: Budget) {
        let mut behind = None;
        loop {
            let wait = match self.follow().await {
                Ok(()) => {
                    behind = None;
                    FOLLOW
                }
                Err(error) => {
                    tracing::warn!(%error, "audit file: not up to date, trying again; the records are in the database");
                    behind.get_or_insert_with(Instant::now);
                    RETRY
                }
            };
            metrics::gauge!(AUDIT_LAG).set(behind.map_or(0.0, |since| since.elapsed().as_secs_f64()));
            if stopping.is_used_up() {
                return;
            }
            tokio::select! {
                () = self.audit.written.notified() => {
                    tokio::select! {
                        () = tokio::time::sleep(GATHER) => {}
                        () = stopping.used_up() => {}
                    }
                }
                () = tokio::time::sleep(wait) => {}
                () = stopping.used_up() => {}
            }
        }
    }

    /// Writes what is not in the file yet.
    async fn follow(&self) -> Result<(), Error> {
        let mut failed = None;
        let positions = self.on_file(|path| read_positions(&positions_path(path))).await?;
        for domain in self.domains.all() {
            // A failure in one domain does not keep the file from the others.
            match self.follow_domain(&domain, positions.get(domain.name.as_str())).await {
                Ok(()) | Err(Error::Store(pfr_store::Error::DomainUnknown(_))) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    async fn follow_domain(&self, domain: &Domain, position: Option<&Position>) -> Result<(), Error> {
        let metadata = domain.store.metadata();
        let last = metadata.last_audit_record().await?;
        if last == 0 || position.is_some_and(|known| known.number == last) {
            return Ok(());
        }
        let created_at = self.domains.catalogue().get(&domain.name).await?.created_at;
        // Numbers begin anew in a domain that was made again, and after a rebuild of its tables.
        let mut after = match position.filter(|known| known.created_at == created_at && known.number <= last) {
            Some(known) if is_of(metadata, known).await? => known.number,
            _ => 0,
        };
        while after < last {
            let filter = AuditFilter { oldest_first: true, with_registry: true, ..AuditFilter::default() };
            let page = metadata.audit_records(filter, Some(after.to_string()), BATCH).await?;
            let Some(newest) = page.rows.last() else { return Ok(()) };
            after = newest.number;
            let (name, position) = (domain.name.to_string(), Position { created_at, number: after, at: Some(newest.at) });
            let lines = lines(&page.rows)?;
            self.on_file(move |path| {
                append(path, &lines)?;
                let mut positions = read_positions(&positions_path(path))?;
                positions.insert(name, position);
                write_positions(&positions_path(path), &positions)
            })
            .await?;
        }
        Ok(())
    }

    /// Works on the file, off the async threads.
    async fn on_file<T: Send + 'static>(&self, work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static) -> Result<T, Error> {
        let path = self.path.clone();
        let done = pfr_service::task::spawn_blocking(move || work(&path).map_err(|source| Error::File { path, source })).await;
        done.map_err(|panic| Error::Bug(panic.to_string()))?
    }
}

/// Whether a position is one of this log: its record is there, or was trimmed.
async fn is_of(log: &dyn Metadata, position: &Position) -> Result<bool, Error> {
    let newest_first = AuditFilter { with_registry: true, ..AuditFilter::default() };
    let page = log.audit_records(newest_first, Some(position.number.saturating_add(1).to_string()), 1).await?;
    let found = page.rows.first().filter(|record| record.number == position.number);
    Ok(found.zip(position.at).is_none_or(|(record, at)| record.at == at))
}

fn lines(records: &[AuditRecord]) -> Result<Vec<u8>, Error> {
    let mut lines = Vec::new();
    for record in records {
        serde_json::to_writer(&mut lines, record).map_err(|error| Error::Bug(error.to_string()))?;
        lines.push(b'\n');
    }
    Ok(lines)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)
}

/// Appends lines, all or none, durably.
fn append(path: &Path, lines: &[u8]) -> io::Result<()> {
    let mut file = open(path)?;
    let before = file.metadata()?.len();
    let written = begin_line(&mut file, before).and_then(|()| file.write_all(lines)).and_then(|()| file.sync_data());
    if written.is_err() {
        // Best effort: a part of a line ends where the next one begins.
        drop(file.set_len(before));
    }
    written
}

/// Ends a line of which a killed process wrote a part only; it is written again.
fn begin_line(file: &mut File, length: u64) -> io::Result<()> {
    let mut last = [b'\n'];
    if length > 0 {
        file.seek(SeekFrom::Start(length - 1))?;
        file.read_exact(&mut last)?;
    }
    if last == [b'\n'] { Ok(()) } else { file.write_all(b"\n") }
}

fn positions_path(path: &Path) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(".position");
    name.into()
}

fn read_positions(path: &Path) -> io::Result<Positions> {
    match std::fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Positions::new()),
        Err(error) => Err(error),
    }
}

fn write_positions(path: &Path, positions: &Positions) -> io::Result<()> {
    durable::replace(path, &serde_json::to_vec(positions)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_appended_whole_and_a_torn_one_does_not_spoil_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.log");
        append(&path, b"{\"a\":1}\n").unwrap();
        // As a power cut leaves it.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"b\"").unwrap();
        append(&path, b"{\"b\":2}\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"a\":1}\n{\"b\"\n{\"b\":2}\n");
        std::fs::rename(&path, dir.path().join("audit.log.1")).unwrap();
        append(&path, b"{\"c\":3}\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"c\":3}\n", "a rotated file is not written to any more");
    }

    #[test]
    fn positions_are_read_back_and_a_file_that_holds_none_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = positions_path(&dir.path().join("audit.log"));
        assert_eq!(path.file_name().unwrap(), "audit.log.position");
        assert_eq!(read_positions(&path).unwrap(), Positions::new());
        let positions = Positions::from([("acme".to_owned(), Position { created_at: Some(5), number: 7, at: Some(9) })]);
        write_positions(&path, &positions).unwrap();
        assert_eq!(read_positions(&path).unwrap(), positions);
        std::fs::write(&path, r#"{"acme":{"created_at":5,"number":7}}"#).unwrap();
        assert_eq!(read_positions(&path).unwrap()["acme"].at, None, "of an older version");
        std::fs::write(&path, "half").unwrap();
        assert!(read_positions(&path).is_err(), "to begin anew would write everything twice");
    }
}
