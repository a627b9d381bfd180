//! Makes the rows of snapshots without their bytes, through the same transactions as a push.

use crate::Result;
use pfr_schema::codec::Codec;
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;
use pfr_schema::{Digest, Kind, RepositoryName};
use pfr_store::{Clock, Commit, Metadata, NewContainer, NewFrame, PackSizes, PushId, TagMove};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Lease of everything pushed.
pub const LEASE: Duration = Duration::from_secs(3600);
/// Frames of a full pack of such pages.
pub const PACK: usize = 372;
/// Bytes of a page's K or V.
pub const PAGE_BYTES: u64 = 180_224;
/// Approximate bytes of a configuration, page tree or manifest.
pub const DOCUMENT_BYTES: u64 = 600;

/// The machine's clock, moved forward by some time.
#[derive(Clone, Debug, Default)]
pub struct Ahead(Arc<AtomicU64>);

impl Ahead {
    /// The clock.
    pub fn clock(&self) -> Clock {
        let (system, ahead) = (Clock::system(), Arc::clone(&self.0));
        Clock::new(move || system.now() + ahead.load(Ordering::Relaxed))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_millis() as u64, Ordering::Relaxed);
    }
}

/// A stored page chunk, which other snapshots may list too.
#[derive(Clone, Copy, Debug)]
pub struct StoredRun {
    /// Its digest.
    pub digest: Digest,
    /// Its shape.
    pub shape: Shape,
}

/// The shape of a page chunk of `pages` pages.
pub fn shape(pages: usize) -> Shape {
    Shape { pages: pages as u32, components: 2, page_bytes: PAGE_BYTES }
}

/// Bytes of a page chunk's document.
pub fn run_bytes(pages: usize) -> u64 {
    20 + 64 * pages as u64
}

/// The digest of blob number `n`.
pub fn digest(n: u64) -> Digest {
    Digest::sha256(&n.to_le_bytes())
}

/// Makes rows.
pub struct Rows<'a> {
    metadata: &'a dyn Metadata,
    next: u64,
    frames: Vec<NewFrame>,
}

impl<'a> Rows<'a> {
    /// Blobs get numbers from `first` on.
    pub fn new(metadata: &'a dyn Metadata, first: u64) -> Self {
        Self { metadata, next: first, frames: Vec::new() }
    }

    fn fresh(&mut self) -> Digest {
        self.next += 1;
        digest(self.next - 1)
    }

    fn frame(&mut self, digest: Digest, kind: Kind, len: u64, container: Option<NewContainer>) {
        let header = Header { codec: Codec::Raw, kind, digest, raw_len: len, stored_len: len };
        self.frames.push(NewFrame { header, offset: 0, container });
    }

    /// Makes new pages. Returns the digests of their components.
    pub fn pages(&mut self, pages: usize) -> Vec<Digest> {
        (0..2 * pages)
            .map(|_| {
                let digest = self.fresh();
                self.frame(digest, Kind::Blob, PAGE_BYTES, None);
                digest
            })
            .collect()
    }

    /// Makes a page chunk of stored pages.
    pub fn run(&mut self, components: &[Digest]) -> StoredRun {
        let shape = shape(components.len() / 2);
        let child = |digest: &Digest| Child { digest: *digest, kind: Kind::Blob, size: Some(PAGE_BYTES), shape: None, optional: false };
        let container = NewContainer { children: components.iter().map(child).collect(), shape: Some(shape) };
        let digest = self.fresh();
        self.frame(digest, Kind::Run, run_bytes(components.len() / 2), Some(container));
        StoredRun { digest, shape }
    }

    /// Makes configuration, page tree and manifest over page chunks, sends what is pending and
    /// commits. Returns the manifest's digest.
    pub async fn commit(
        &mut self,
        repository: &RepositoryName,
        runs: &[StoredRun],
        parent: Option<Digest>,
        tag: Option<&str>,
    ) -> Result<Digest> {
        let (config, tree, manifest) = (self.fresh(), self.fresh(), self.fresh());
        self.frame(config, Kind::Blob, DOCUMENT_BYTES, None);
        let run = |run: &StoredRun| Child { digest: run.digest, kind: Kind::Run, size: None, shape: Some(run.shape), optional: false };
        self.frame(tree, Kind::Tree, DOCUMENT_BYTES, Some(NewContainer { children: runs.iter().map(run).collect(), shape: None }));
        let part = |digest, kind| Child { digest, kind, size: Some(DOCUMENT_BYTES), shape: None, optional: false };
        let parts = NewContainer { children: vec![part(config, Kind::Blob), part(tree, Kind::Tree)], shape: None };
        self.frame(manifest, Kind::Manifest, DOCUMENT_BYTES, Some(parts));
        let push = PushId(uuid::Uuid::now_v7().to_string());
        self.metadata.open_push(push.clone(), repository.clone(), LEASE).await?;
        let frames = std::mem::take(&mut self.frames);
        for part in frames.chunks(PACK) {
            let (mut part, mut end) = (part.to_vec(), 8);
            for frame in &mut part {
                frame.offset = end;
                end += frame.header.frame_len();
            }
            let pack = self.metadata.begin_pack(uuid::Uuid::now_v7().to_string(), LEASE).await?;
            let sizes = PackSizes { bytes: end + 40 * part.len() as u64, frame_bytes: end - 8 };
            self.metadata.finish_pack(push.clone(), pack, sizes, part, LEASE).await?;
        }
        let tag = tag.map(|tag| tag.parse().map(|tag| TagMove { tag, expected: None })).transpose()?;
        let commit = Commit {
            manifest,
            parents: parent.into_iter().collect(),
            artifact_type: None,
            subject: None,
            tag,
            pin: None,
            marks: vec![],
            agent: None,
            audit: None,
            signed: None,
        };
        self.metadata.commit(push, commit).await?;
        Ok(manifest)
    }

    /// Makes a snapshot of `objects` new objects in page chunks of `run_pages`, which also lists
    /// `shared`. Returns the manifest's digest and its first page chunk.
    pub async fn snapshot(
        &mut self,
        repository: &RepositoryName,
        objects: u64,
        run_pages: usize,
        shared: Option<StoredRun>,
    ) -> Result<(Digest, StoredRun)> {
        let mut runs: Vec<StoredRun> = shared.into_iter().collect();
        let first = runs.len();
        for pages in lengths(objects, run_pages) {
            let components = self.pages(pages);
            runs.push(self.run(&components));
        }
        let own = *runs.get(first).ok_or("a snapshot without a run")?;
        Ok((self.commit(repository, &runs, None, None).await?, own))
    }
}

/// The number of pages of each page chunk in a snapshot of `objects` objects: three of these are
/// configuration, page tree and manifest, and each chunk is one.
pub fn lengths(objects: u64, run_pages: usize) -> Vec<usize> {
    let mut left = objects.saturating_sub(3).max(3);
    let mut lengths = Vec::new();
    while left >= 3 {
        let pages = (((left - 1) / 2) as usize).min(run_pages);
        lengths.push(pages);
        left -= 2 * pages as u64 + 1;
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_has_as_many_objects_as_it_was_asked_for() {
        for objects in [6, 100, 5000, 10_000] {
            let made: u64 = 3 + lengths(objects, 512).iter().map(|pages| 2 * *pages as u64 + 1).sum::<u64>();
            assert!(made <= objects && objects - made <= 2, "{made} of {objects}");
        }
    }
}
