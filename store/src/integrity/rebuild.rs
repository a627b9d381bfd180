//! Rebuilds metadata from packs and journal after the loss of the database.

mod names;

use super::{Pace, check_frame, read_through};
use crate::Store;
use crate::boxed;
use crate::encryption;
use crate::error::{Error, Result};
use crate::frames::decode;
use crate::marker;
use crate::metadata::{Damage, NewContainer, NewFrame, PackSizes};
use crate::packs::{Expected, FrameChecks, Index, IndexFound, PROBES, READ, key_of, read_index};
use crate::tasks::{self, Budget};
use bytes::Bytes;
use futures::TryStreamExt as _;
use object_store::path::Path;
use pfr_schema::api::RebuildReport;
use pfr_schema::digest::Algorithm;
use pfr_schema::frame::Header;
use pfr_schema::pack::{Entry, MAGIC};
use pfr_schema::{Container, Digest, DomainName, Kind, journal};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

/// How long everything found is kept at least, since tags and snapshots come back last.
const KEEP: Duration = Duration::from_secs(24 * 3600);
/// Nodes adopted in one transaction, and their bytes.
const BATCH: usize = 64;
const BATCH_BYTES: u64 = 8 << 20;

impl Store {
    /// Builds metadata from storage: blobs from packs, nodes from blobs, tags and snapshots from
    /// the journal. For a store whose database is lost; nothing else may use it meanwhile. Blobs
    /// that no snapshot reaches are garbage after a day.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the database is not empty; [`Error::Unavailable`], [`Error::Full`]:
    /// move the half-built database away and begin again.
    #[boxed]
    pub async fn rebuild(&self, progress: &mut (dyn FnMut(&RebuildReport) + Send)) -> Result<RebuildReport> {
        if !self.metadata.is_empty().await? {
            return Err(Error::Invalid("the database is not empty: move it away first, then rebuild into a new one".into()));
        }
        if !self.is_encrypted() && encryption::read_key(&*self.packs).await?.is_some() {
            return Err(Error::Invalid(
                "a wrapped key lies beside the packs, so they are encrypted, and this domain was made without encryption: delete the domain, \
                 keep a copy of its folder, and rebuild it under another name"
                    .into(),
            ));
        }
        // The storage may be another one than these tables were begun with, or a copy that was made
        // without its marker.
        self.metadata.forget_storage_id().await?;
        self.identify(marker::Tables::Rebuilt).await?;
        let mut rebuild = Rebuild { store: self, report: RebuildReport::default(), containers: BTreeMap::new(), beheaded: BTreeMap::new() };
        // Newest first, so that a healed or moved blob is found in its last place.
        for key in rebuild.packs().await?.into_iter().rev() {
            rebuild.pack(&key).await?;
            progress(&rebuild.report);
        }
        for kind in Kind::ALL.into_iter().filter(|kind| kind.is_container()) {
            rebuild.layer(kind, progress).await?;
        }
        rebuild.names().await?;
        rebuild.quarantine().await?;
        if let Err(error) = self.index_prefixes(&Budget::default()).await {
            tracing::warn!(%error, "indexing snapshots for matching failed; the background task tries again");
        }
        progress(&rebuild.report);
        Ok(rebuild.report)
    }
}

struct Rebuild<'a> {
    store: &'a Store,
    report: RebuildReport,
    /// Nodes found, by kind, and their raw bytes.
    containers: BTreeMap<Kind, BTreeMap<Digest, u64>>,
    /// Frames with a bad header, by pack and offset, and what the pack's index says that they are.
    beheaded: BTreeMap<(String, u64), Header>,
}

impl Rebuild<'_> {
    /// Keys of the packs on storage, in order; they begin with the time.
    async fn packs(&mut self) -> Result<Vec<String>> {
        let mut keys = Vec::new();
        let top = self.store.packs.list_with_delimiter(None).await.map_err(Error::packs)?;
        let mut locations: Vec<Path> = top.objects.into_iter().map(|object| object.location).collect();
        locations.retain(|location| ![marker::KEY, encryption::KEY].contains(&location.as_ref()));
        // The stores of other domains are not even listed.
        let others = [journal::PREFIX, PROBES, tasks::PREFIX, DomainName::FOLDER];
        for folder in top.common_prefixes.iter().filter(|folder| !others.contains(&folder.as_ref())) {
            let objects = self.store.packs.list(Some(folder)).map_ok(|object| object.location);
            locations.extend(objects.try_collect::<Vec<_>>().await.map_err(Error::packs)?);
        }
        for location in locations {
            match key_of(&location) {
                Some(key) => keys.push(key.to_owned()),
                None => self.report.refused.push(format!("{location}: it is no pack")),
            }
        }
        keys.sort_unstable();
        Ok(keys)
    }

    async fn pack(&mut self, key: &str) -> Result<()> {
        let (index, bytes) = match read_index(self.store, key).await? {
            IndexFound::NoPack => return Ok(()),
            IndexFound::Good(index) => {
                self.look_at_headers(key, &index).await?;
                (index.entries, PackSizes { bytes: index.len, frame_bytes: index.frames_end - MAGIC.len() as u64 })
            }
            IndexFound::Bad(..) if self.lacks_its_key(key).await? => {
                self.report.refused.push(format!(
                    "{key}: it is encrypted, and {} is not beside the packs: put that object back, and rebuild into a new database",
                    encryption::KEY
                ));
                return Ok(());
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
        let well = self.prove(index.iter().map(|entry| entry.header.digest).collect()).await?;
        let mut frames = Vec::with_capacity(index.len());
        for Entry { offset, header } in index {
            if !header.kind.is_container() || self.takes_place(key, offset, &header, &well).await? {
                frames.push(NewFrame { header, offset, container: None });
            }
            if header.kind.is_container() {
                self.containers.entry(header.kind).or_default().insert(header.digest, header.raw_len);
            }
        }
        let lease = self.store.options.lease.max(KEEP);
        self.report.objects += self.store.metadata.adopt_pack(key.to_owned(), bytes, frames, lease).await?.new;
        self.report.packs += 1;
        Ok(())
    }

    /// Whether a pack of a domain that passes for one without encryption is encrypted.
    async fn lacks_its_key(&self, key: &str) -> Result<bool> {
        if self.store.is_encrypted() {
            return Ok(false);
        }
        let begin = self.store.read_pack_to_check(key, 0..encryption::MAGIC.len() as u64).await?;
        Ok(begin.is_some_and(|begin| begin[..] == encryption::MAGIC[..]))
    }

    /// Verifies the copies of blobs that a newer pack had too: the newest copy may have been dead
    /// space, which scrub does not check. A bad copy is replaced by that of the next adopted pack.
    /// Returns the good ones.
    async fn prove(&self, digests: Vec<Digest>) -> Result<HashSet<Digest>> {
        let mut well = HashSet::new();
        for known in self.store.metadata.find(digests).await?.into_iter().flatten() {
            if self.store.examine(&known.digest).await?.is_none() {
                well.insert(known.digest);
            }
        }
        Ok(well)
    }

    /// Whether the frame of a node is to be taken in. If all newer frames of it say that it is
    /// a plain blob, it goes before them, as only it tells the next rebuild; but not before a good
    /// one if it is bad.
    async fn takes_place(&self, key: &str, offset: u64, header: &Header, well: &HashSet<Digest>) -> Result<bool> {
        if !well.contains(&header.digest) {
            return Ok(true);
        }
        if self.containers.values().any(|known| known.contains_key(&header.digest)) {
            return Ok(false);
        }
        let expected = Expected::from(&Entry { offset, header: *header });
        Ok(check_frame(self.store, key, expected).await?.is_none())
    }

    /// Checks that the frames of a pack begin as its index says. The index has a checksum of its
    /// own and has all fields of the headers, so a frame with a bad header is still known.
    async fn look_at_headers(&mut self, key: &str, index: &Index) -> Result<()> {
        let mut rest = &index.entries[..];
        while let Some(first) = rest.first() {
            // Headers that lie close together are read together, with what lies between them.
            let end = |entry: &Entry| entry.offset + Header::len(entry.header.digest.algorithm()) as u64;
            let count = rest.iter().take_while(|entry| end(entry) - first.offset <= READ).count().max(1);
            let (group, after) = rest.split_at(count);
            let range = first.offset..group.last().map_or(first.offset, end);
            let Some(bytes) = self.store.read_pack_to_check(key, range).await? else {
                return Err(Error::Unavailable { what: "packs", reason: format!("pack {key} vanished while it was read") });
            };
            for entry in group {
                let from = (entry.offset - first.offset) as usize;
                let header = entry.header.to_bytes();
                if bytes.get(from..from + header.len()) != Some(&header[..]) {
                    let words = format!("{key}: the frame of {} at byte {} has a bad header", entry.header.digest, entry.offset);
                    self.report.refused.push(words);
                    self.beheaded.insert((key.to_owned(), entry.offset), entry.header);
                }
            }
            rest = after;
        }
        Ok(())
    }

    /// The frames of a pack without an index: as far as each leads to the next, and only the good
    /// ones.
    async fn salvage(&self, key: &str, len: u64) -> Result<Vec<Entry>> {
        let limits = &self.store.options.limits;
        let (mut entries, mut at): (Vec<Entry>, u64) = (Vec::new(), MAGIC.len() as u64);
        while at < len {
            let longest = Header::len(Algorithm::Sha512) as u64;
            let Some(bytes) = self.store.read_pack_to_check(key, at..len.min(at + longest)).await? else { break };
            // Byte 7 of a header is the algorithm's number.
            let algorithm = bytes.get(7).copied().and_then(Algorithm::from_number);
            let header = algorithm.and_then(|a| bytes.get(..Header::len(a))).map(|bytes| Header::parse_exact(bytes, at, limits));
            let Some(Ok(header)) = header else { break };
            entries.push(Entry { offset: at, header });
            at = at.saturating_add(header.frame_len());
        }
        let checks = FrameChecks::new(entries.iter().map(Expected::from).collect(), true, limits.clone());
        let Some(checks) = read_through(self.store, key, 0..len.min(at), checks, &mut Pace::unlimited()).await? else {
            return Ok(Vec::new());
        };
        for (bad, _) in checks.finish() {
            entries.retain(|entry| entry.offset != bad.offset);
        }
        Ok(entries)
    }

    /// Turns the blobs of one kind of node into nodes.
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
            // Nodes may list others of their own kind: as long as some come in, others may
            // follow.
            if refused.is_empty() || refused.len() == pending.len() {
                return Ok(());
            }
            pending.retain(|(digest, _)| refused.contains(digest));
        }
    }

    /// Reads, verifies and adopts nodes; returns those that lack children.
    async fn adopt(&mut self, kind: Kind, batch: &[(Digest, u64)]) -> Result<Vec<Digest>> {
        let mut containers = Vec::with_capacity(batch.len());
        for (digest, _) in batch {
            let bytes = match self.store.read(digest).await {
                Err(error @ Error::Corrupt { .. }) => self.without_header(digest).await?.ok_or(error),
                other => other,
            };
            let read = bytes.and_then(|bytes| Ok(Container::parse(kind, &bytes, &self.store.options.limits)?));
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

    /// Reads a node whose frame has a bad header by what the index says of it; `None` if its
    /// payload is bad as well.
    async fn without_header(&self, digest: &Digest) -> Result<Option<Bytes>> {
        let Some(location) = self.store.metadata.locate(vec![*digest]).await?.pop().flatten() else { return Ok(None) };
        let Some(header) = self.beheaded.get(&(location.pack.clone(), location.offset)) else { return Ok(None) };
        let range = location.offset..location.offset + location.frame_len;
        let Some(bytes) = self.store.read_pack_to_check(&location.pack, range).await? else { return Ok(None) };
        if bytes.len() as u64 != location.frame_len {
            return Ok(None);
        }
        let mut frame = header.to_bytes();
        frame.extend_from_slice(&bytes[frame.len()..]);
        let (digest, limits) = (*digest, self.store.options.limits.clone());
        let decoded = pfr_service::task::spawn_blocking(move || decode(&digest, &frame.into(), &limits)).await;
        Ok(decoded?.ok())
    }

    /// Quarantines the blobs in frames with a bad header, as a scrub would: tags and snapshots
    /// stay, and a push heals the blobs.
    async fn quarantine(&mut self) -> Result<()> {
        let damage = std::mem::take(&mut self.beheaded).into_iter().map(|((pack, offset), header)| Damage {
            digest: header.digest,
            pack,
            reason: format!("the frame at byte {offset} has a bad header"),
        });
        let quarantined = self.store.metadata.quarantine(damage.collect()).await?.len();
        if quarantined > 0 {
            tracing::error!(quarantined, "blobs are damaged: push a snapshot that reaches them, or scrub with a mirror");
        }
        Ok(())
    }
}
