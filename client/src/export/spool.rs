//! Files in which packs are made: their digest, which is their name, is known at the end.

use crate::error::{Error, Result, blocking};
use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use pfr_schema::{Algorithm, Digest, Hasher};
use pfr_service::durable::Unfinished;
use pfr_service::task::Task;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Pieces that wait for the disk, each of 256 KiB at most.
const AHEAD: usize = 16;
/// Bytes of one read of a file.
const PIECE: u64 = 1 << 20;

/// An empty file.
#[derive(Debug)]
pub(crate) struct Spool {
    body: Body,
    path: PathBuf,
}

/// Where the bytes are.
#[derive(Debug)]
pub(crate) enum Body {
    /// Under a temporary name, where they are to stay.
    Named(Unfinished),
    /// Under no name: nothing of them is left when this process ends.
    Hidden(Arc<File>),
}

/// A complete file.
#[derive(Debug)]
pub(crate) struct Written {
    /// SHA-256 of its bytes.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// The file.
    pub body: Body,
}

impl Spool {
    /// A file that gets its name later.
    pub fn named(file: Unfinished, path: PathBuf) -> Self {
        Self { body: Body::Named(file), path }
    }

    /// A file without a name, in the folder for temporary files (`TMPDIR`).
    pub fn hidden() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("pf-export-{}", uuid::Uuid::now_v7()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(Error::io("create", &path))?;
        std::fs::remove_file(&path).map_err(Error::io("delete", &path))?;
        Ok(Self { body: Body::Hidden(Arc::new(file)), path })
    }

    /// Writes `bytes` and nothing else.
    pub async fn all(self, bytes: impl Into<Bytes>) -> Result<Written> {
        let mut writing = Writing::begin(self);
        writing.write(bytes.into()).await?;
        writing.end().await
    }
}

/// A file that is being written by a thread of its own, which hashes it too.
pub(crate) struct Writing {
    pieces: mpsc::Sender<Bytes>,
    work: Option<Task<Result<Written>>>,
}

impl Writing {
    pub fn begin(spool: Spool) -> Self {
        let (pieces, incoming) = mpsc::channel(AHEAD);
        Self { pieces, work: Some(pfr_service::task::spawn_blocking(move || fill(spool, incoming))) }
    }

    /// Adds bytes.
    pub async fn write(&mut self, bytes: Bytes) -> Result<()> {
        if self.pieces.send(bytes).await.is_ok() {
            return Ok(());
        }
        // The thread has stopped, and knows why.
        self.ended().await.and(Err(Error::Internal("a file was closed while it was written".into())))
    }

    /// The complete file.
    pub async fn end(mut self) -> Result<Written> {
        let (closed, _) = mpsc::channel(1);
        self.pieces = closed;
        self.ended().await
    }

    async fn ended(&mut self) -> Result<Written> {
        let work = self.work.take().ok_or_else(|| Error::Internal("a file was ended twice".into()))?;
        work.await.map_err(|panic| Error::Internal(panic.to_string()))?
    }
}

fn fill(mut spool: Spool, mut incoming: mpsc::Receiver<Bytes>) -> Result<Written> {
    let (mut hasher, mut size) = (Hasher::new(Algorithm::Sha256), 0);
    let path = spool.path;
    let mut write = |file: &File| {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        while let Some(piece) = incoming.blocking_recv() {
            hasher.update(&piece);
            size += piece.len() as u64;
            file.write_all(&piece)?;
        }
        file.flush()
    };
    let written = match &mut spool.body {
        Body::Named(unfinished) => write(unfinished.file()),
        Body::Hidden(file) => write(file),
    };
    written.map_err(Error::io("write", &path))?;
    Ok(Written { digest: hasher.finish(), size, body: spool.body })
}

/// A range of an open file, piece by piece; it fails if the file is shorter.
pub(crate) fn pieces(file: Arc<File>, path: PathBuf, range: Range<u64>) -> BoxStream<'static, Result<Bytes>> {
    let read = move |at: u64| {
        let (file, path, end) = (Arc::clone(&file), path.clone(), range.end);
        async move {
            if at >= end {
                return Ok::<_, Error>(None);
            }
            let len = (end - at).min(PIECE);
            let bytes = blocking(move || {
                let mut bytes = BytesMut::zeroed(usize::try_from(len).unwrap_or_default());
                file.read_exact_at(&mut bytes, at).map_err(Error::io("read", &path))?;
                Ok(bytes.freeze())
            });
            Ok(Some((bytes.await?, at + len)))
        }
    };
    stream::try_unfold(range.start, read).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::TryStreamExt as _;

    #[tokio::test]
    async fn a_hidden_file_has_no_name_and_its_ranges_are_read_back() {
        let whole: Vec<u8> = (0..3_000_000_u32).map(|n| n as u8).collect();
        let mut writing = Writing::begin(Spool::hidden().unwrap());
        for piece in whole.chunks(70_000) {
            writing.write(Bytes::copy_from_slice(piece)).await.unwrap();
        }
        let written = writing.end().await.unwrap();
        assert_eq!((written.digest, written.size), (Digest::sha256(&whole), whole.len() as u64));
        let Body::Hidden(file) = written.body else { panic!("it has a name") };
        for range in [0..10, 5..2_500_000, 2_999_999..3_000_000, 7..7] {
            let read: Vec<Bytes> = pieces(Arc::clone(&file), PathBuf::new(), range.clone()).try_collect().await.unwrap();
            assert!(read.concat() == whole[range.start as usize..range.end as usize], "{range:?}");
        }
        assert!(pieces(file, PathBuf::new(), 0..3_000_001).try_collect::<Vec<_>>().await.is_err());
    }
}
