//! Metadata from packs and journal, when the database is lost.

mod names;

use super::check::{Expected, FrameChecks};
use super::{Index, IndexFound, Pace, Piece, READ, read_index, read_piece, read_through};
use crate::Store;
use crate::error::{Error, Result};
use crate::marker;
use crate::metadata::{NewContainer, NewFrame, PackSizes};
use crate::pack_writer::path;
use futures::TryStreamExt as _;
use pfr_schema::api::RebuildReport;
use pfr_schema::digest::Algorithm;
use pfr_schema::frame::Header;
use pfr_schema::pack::{Entry, MAGIC};
use pfr_schema::{Container, Digest, Kind, journal};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long what was found is kept at least: names come back last.
const KEEP: Duration = Duration::from_secs(24 * 3600);
/// Containers adopted in one transaction, and their bytes.
const BATCH: usize = 64;
const BATCH_BYTES: u64 = 8 << 20;

impl Store {
    /// Builds metadata from what lies on storage: blobs from packs, containers from blobs, names from the journal. For a store whose database is lost;
    /// nothing else may use it meanwhile. What no name reaches is garbage after a day.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the database is not empty; [`Error::Unavailable`], [`Error::Full`]: move the half-built database away and begin again.
    pub async fn rebuild(&self, progress: &mut (dyn FnMut(&RebuildReport) + Send)) -> Result<RebuildReport> {
        if !self.metadata.is_empty().await? {
            return Err(Error::Invalid("the database is not empty: move it away first, then rebuild into a new one".into()));
        }
        // The storage may be a copy that was made without it.
        self.mark().await?;
        let mut rebuild = Rebuild { store: self, report: RebuildReport::default(), containers: BTreeMap::new() };
        // Newest first: a blob that was healed or moved is taken from where it lies now.
        for key in rebuild.packs().await?.into_iter().rev() {
            rebuild.pack(&key).await?;
            progress(&rebuild.report);
        }
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_container()) {
            rebuild.layer(kind, progress).await?;
        }
        rebuild.names().await?;
        progress(&rebuild.report);
        Ok(rebuild.report)
    }
}

struct Rebuild<'a> {
    store: &'a Store,
    report: RebuildReport,
    /// Containers found, by kind, and their raw bytes.
    containers: BTreeMap<Kind, BTreeMap<Digest, u64>>,
}

impl Rebuild<'_> {
    /// Keys of the packs on storage, in order; they begin with the time.
    async fn packs(&mut self) -> Result<Vec<String>> {
        let mut keys = Vec::new();
        let mut objects = self.store.packs.list(None);
        while let Some(object) = objects.try_next().await.map_err(Error::packs)? {
            let location = object.location;
            if location.prefix_matches(&journal::PREFIX.into()) || location.as_ref() == marker::KEY {
                continue;
            }
            match location.filename().and_then(|name| name.strip_suffix(".pfpack")) {
                Some(key) if path(key) == location => keys.push(key.to_owned()),
                _ => self.report.refused.push(format!("{location}: it is no pack")),
            }
        }
        keys.sort_unstable();
        Ok(keys)
    }

    async fn pack(&mut self, key: &str) -> Result<()> {
        let (index, bytes) = match read_index(self.store, &path(key), &self.store.options.limits).await? {
            IndexFound::NoPack => return Ok(()),
            IndexFound::Good(index) => {
                let (entries, bytes) = (self.with_header(key, &index).await?, index.len);
                (entries, PackSizes { bytes, frame_bytes: index.frames_end - MAGIC.len() as u64 })
            }
            IndexFound::Bad(bytes, reason) => {
                let entries = self.salvage(key, bytes).await?;
                self.report.refused.push(format!("{key}: {reason}; {} blobs in it are well", entries.len()));
                if entries.is_empty() {
                    return Ok(());
                }
                let end = entries.last().map_or(0, |entry| entry.offset + entry.header.frame_len());
                (entries, PackSizes { bytes, frame_bytes: end - MAGIC.len() as u64 })
            }
        };
        for Entry { header, .. } in index.iter().filter(|entry| entry.header.kind.is_container()) {
            self.containers.entry(header.kind).or_default().insert(header.digest, header.raw_len);
        }
        self.prove(index.iter().map(|entry| entry.header.digest).collect()).await?;
        let frames = index.into_iter().map(|Entry { offset, header }| NewFrame { header, offset, container: None }).collect();
        let lease = self.store.options.lease.max(KEEP);
        self.report.objects += self.store.metadata.adopt_pack(key.to_owned(), bytes, frames, lease).await?.new;
        self.report.packs += 1;
        Ok(())
    }

    /// Proves the copies of blobs that a newer pack had too: the newest is not the one that was relied on if it was dead space, which scrub leaves
    /// alone. A bad copy gives way to that of the pack taken in next.
    async fn prove(&self, digests: Vec<Digest>) -> Result<()> {
        for known in self.store.metadata.find(digests).await?.into_iter().flatten() {
            self.store.examine(&known.digest).await?;
        }
        Ok(())
    }

    /// The entries of an index whose frames begin as it says.
    async fn with_header(&mut self, key: &str, index: &Index) -> Result<Vec<Entry>> {
        let mut good = Vec::with_capacity(index.entries.len());
        let mut rest = &index.entries[..];
        while let Some(first) = rest.first() {
            // Headers that lie close together are read together, with what lies between them.
            let end = |entry: &Entry| entry.offset + Header::len(entry.header.digest.algorithm()) as u64;
            let count = rest.iter().take_while(|entry| end(entry) - first.offset <= READ).count().max(1);
            let (group, after) = rest.split_at(count);
            let range = first.offset..group.last().map_or(first.offset, end);
            let Piece::Bytes(bytes) = read_piece(self.store, &path(key), range).await? else {
                return Err(Error::Unavailable { what: "packs", reason: format!("pack {key} vanished while it was read") });
            };
            for entry in group {
                let from = (entry.offset - first.offset) as usize;
                let header = entry.header.to_bytes();
                if bytes.get(from..from + header.len()) == Some(&header[..]) {
                    good.push(*entry);
                } else {
                    self.report
                        .refused
                        .push(format!("{key}: the frame of {} at byte {} has a bad header", entry.header.digest, entry.offset));
                }
            }
            rest = after;
        }
        Ok(good)
    }

    /// The frames of a pack without an index: as far as one leads to the next, and only those that prove to be good.
    async fn salvage(&self, key: &str, len: u64) -> Result<Vec<Entry>> {
        let (limits, path) = (&self.store.options.limits, path(key));
        let (mut entries, mut at): (Vec<Entry>, u64) = (Vec::new(), MAGIC.len() as u64);
        while at < len {
            let longest = Header::len(Algorithm::Sha512) as u64;
            let Piece::Bytes(bytes) = read_piece(self.store, &path, at..len.min(at + longest)).await? else { break };
            // Byte 7 of a header is the algorithm's number.
            let algorithm = bytes.get(7).copied().and_then(Algorithm::from_number);
            let header = algorithm.and_then(|a| bytes.get(..Header::len(a))).map(|bytes| Header::parse_exact(bytes, at, limits));
            let Some(Ok(header)) = header else { break };
            entries.push(Entry { offset: at, header });
            at = at.saturating_add(header.frame_len());
        }
        let expected =
            |e: &Entry| Expected { offset: e.offset, digest: e.header.digest, frame_len: e.header.frame_len(), header: Some(e.header) };
        let checks = FrameChecks::new(entries.iter().map(expected).collect(), true, limits.clone());
        let Some(checks) = read_through(self.store, key, 0..len.min(at), checks, &mut Pace::unlimited()).await? else {
            return Ok(Vec::new());
        };
        for (bad, _) in checks.finish() {
            entries.retain(|entry| entry.offset != bad.offset);
        }
        Ok(entries)
    }

    /// Makes the blobs that are containers of a kind containers.
    async fn layer(&mut self, kind: Kind, progress: &mut (dyn FnMut(&RebuildReport) + Send)) -> Result<()> {
        let mut pending: Vec<(Digest, u64)> = self.containers.remove(&kind).unwrap_or_default().into_iter().collect();
        loop {
            let mut refused = BTreeSet::new();
            let mut rest = &pending[..];
            while !rest.is_empty() {
                let mut bytes = 0;
                let within = |(_, len): &&(Digest, u64)| {
                    bytes += len;
                    bytes <= BATCH_BYTES
                };
                let (batch, after) = rest.split_at(rest.iter().take(BATCH).take_while(within).count().max(1));
                refused.extend(self.adopt(kind, batch).await?);
                progress(&self.report);
                rest = after;
            }
            // Containers may list others of their own kind: as long as some come in, others may follow.
            if refused.is_empty() || refused.len() == pending.len() {
                return Ok(());
            }
            pending.retain(|(digest, _)| refused.contains(digest));
        }
    }

    /// Reads, verifies and adopts containers; returns those that lack children.
    async fn adopt(&mut self, kind: Kind, batch: &[(Digest, u64)]) -> Result<Vec<Digest>> {
        let mut containers = Vec::with_capacity(batch.len());
        for (digest, _) in batch {
            let read = self.store.read(digest).await.and_then(|bytes| Ok(Container::parse(kind, &bytes, &self.store.options.limits)?));
            match read {
                Ok(Some(container)) => {
                    containers.push((*digest, kind, NewContainer { children: container.children(), shape: container.shape() }));
                }
                Ok(None) => {}
                Err(Error::Corrupt { reason, .. }) => {
                    self.store.examine(digest).await?;
                    self.report.refused.push(format!("{kind:?} {digest}: {reason}"));
                }
                Err(Error::Format(error)) => self.report.refused.push(format!("{kind:?} {digest}: {error}")),
                Err(error) => return Err(error),
            }
        }
        let count = containers.len() as u64;
        let refused = self.store.metadata.adopt_containers(containers).await?;
        self.report.containers += count - refused.len() as u64;
        Ok(refused)
    }
}
