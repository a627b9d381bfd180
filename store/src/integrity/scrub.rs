//! The walk over all packs.

use super::{Pace, read_through};
use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::journal::Newest;
use crate::metadata::{Damage, Health, JournalRow, PackRow, PackState, Packed};
use crate::packs::{Expected, FrameChecks, Index, IndexFound, read_index};
use pfr_schema::api::{DamagedBlob, ScrubReport};
use pfr_schema::{Digest, Kind, pack};
use std::collections::{HashMap, HashSet};

/// Packs asked for at a time.
const PAGE: usize = 100;
/// Damaged blobs asked for at a time.
const DAMAGED: usize = 1000;
/// Number of consecutive unreadable packs after which the storage counts as out of reach.
const UNREADABLE: usize = 3;

/// Objects of the journal that are deleted after a new summary. Collections delete the rest.
const JOURNAL: usize = 10_000;

/// How a scrub runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScrubOptions {
    /// Decode and hash every blob, and not only compare checksums.
    pub full: bool,
    /// Bytes a second that are read at most. Default: no limit.
    pub bytes_per_second: Option<u64>,
}

impl Store {
    /// Reads every live pack from its first byte to its last and compares each with its checksums.
    /// Blobs that are bad are quarantined and named with the snapshots that reach them; if a byte
    /// elsewhere is bad, the live blobs are copied to a new pack. `progress` is called for every
    /// pack.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if storage or metadata cannot be reached, also if the storage turns
    /// out not to be the store's own: then nothing that is missing on it is quarantined. Damage is
    /// in the report, and is not an error.
    #[boxed]
    pub async fn scrub(&self, options: &ScrubOptions, progress: &mut (dyn FnMut(&ScrubReport) + Send)) -> Result<ScrubReport> {
        let report = ScrubReport { full: options.full, ..ScrubReport::default() };
        let mut scrub = Scrub { store: self, full: options.full, pace: Pace::new(options.bytes_per_second), unreadable: 0, report };
        let mut after = None;
        loop {
            let packs = self.metadata.packs(after, PAGE).await?;
            let Some(last) = packs.last().map(|pack| pack.id) else { break };
            after = Some(last);
            for pack in packs.into_iter().filter(|pack| pack.state == PackState::Live) {
                scrub.pack(&pack).await?;
                progress(&scrub.report);
            }
        }
        scrub.journal().await?;
        self.metadata.reassess().await?;
        let mut report = scrub.report;
        report.damaged = self.damaged().await?;
        Ok(report)
    }

    /// Blobs in quarantine, and the snapshots that reach them.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[boxed]
    pub async fn damaged(&self) -> Result<Vec<DamagedBlob>> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = self.metadata.damaged(after, DAMAGED).await?;
            all.extend(page.rows.into_iter().map(DamagedBlob::from));
            after = page.next;
            if after.is_none() {
                return Ok(all);
            }
        }
    }
}

struct Scrub<'a> {
    store: &'a Store,
    full: bool,
    pace: Pace,
    /// Packs in a row that could not be read.
    unreadable: usize,
    report: ScrubReport,
}

/// What was found in a pack.
#[derive(Default)]
struct Findings {
    damage: Vec<Damage>,
    /// Bad bytes outside of blobs: the pack is to be copied.
    unsound: Vec<String>,
    /// Bad frames that no blob uses: the pack is to be copied, and nothing is lost.
    dead: Vec<String>,
    missing: bool,
    /// Blobs in quarantine whose frames have a good checksum.
    doubtful: Vec<Digest>,
}

impl Scrub<'_> {
    async fn pack(&mut self, row: &PackRow) -> Result<()> {
        let mut findings = match self.look(row).await {
            Ok(findings) => findings,
            Err(error @ (Error::Unavailable { what: "packs", .. } | Error::NotPermitted { what: "packs", .. } | Error::Full(_))) => {
                self.unreadable += 1;
                if self.unreadable >= UNREADABLE {
                    return Err(error);
                }
                self.report.unread.push(format!("{}: {error}", row.key));
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.unreadable = 0;
        if findings.missing && !self.is_live(row).await? {
            return Ok(());
        }
        self.report.packs += 1;
        if !findings.damage.is_empty() {
            let found = findings.damage.len();
            let quarantined = self.store.metadata.quarantine(findings.damage).await?.len();
            tracing::error!(pack = row.key, found, quarantined, "blobs of a pack are damaged");
        }
        for digest in findings.doubtful {
            self.store.examine(&digest).await?;
        }
        if findings.unsound.is_empty() && findings.dead.is_empty() {
            return Ok(());
        }
        let mut end = "";
        if !findings.missing && self.is_live(row).await? {
            self.store.evacuate(row).await?;
            end = "; what is good in it lies in a new pack now";
        }
        if findings.unsound.is_empty() {
            let words = format!("{}: {}{end}", row.key, findings.dead.join("; "));
            tracing::warn!(found = words, "a pack has bad frames that no blob uses");
            self.report.dead_frames.push(words);
            return Ok(());
        }
        findings.unsound.append(&mut findings.dead);
        let words = format!("{}: {}{end}", row.key, findings.unsound.join("; "));
        tracing::error!(found = words, "a pack is damaged");
        self.report.bad_packs.push(words);
        Ok(())
    }

    /// Whether the pack still has objects, and was not collected since it was listed.
    async fn is_live(&self, row: &PackRow) -> Result<bool> {
        let now = self.store.metadata.packs(Some(row.id - 1), 1).await?;
        Ok(now.first().is_some_and(|pack| pack.id == row.id && pack.state == PackState::Live))
    }

    async fn look(&mut self, row: &PackRow) -> Result<Findings> {
        let contents = self.store.metadata.pack_contents(row.id).await?;
        let mut findings = Findings::default();
        let index = match read_index(self.store, &row.key).await? {
            IndexFound::NoPack => return Ok(not_there(row, &contents)),
            IndexFound::Bad(len, reason) => {
                findings.unsound.push(reason);
                Err(len)
            }
            IndexFound::Good(index) => Ok(index),
        };
        // A frame whose header is bad does not say where the next one begins: the index does, or
        // else the rows.
        let (expected, end) = match &index {
            Ok(index) => (index.entries.iter().map(Expected::from).collect(), index.frames_end),
            Err(len) => (contents.iter().map(Expected::from).collect::<Vec<_>>(), *len),
        };
        let frames = expected.len() as u64;
        match self.magic(row).await? {
            Some(true) => {}
            Some(false) => findings.unsound.push("the magic at its beginning is wrong".into()),
            None => return Ok(not_there(row, &contents)),
        }
        let checks = FrameChecks::new(expected, self.full, self.store.options.limits.clone());
        let Some(checks) = read_through(self.store, &row.key, 0..end, checks, &mut self.pace).await? else {
            return Ok(not_there(row, &contents));
        };
        self.report.frames += frames;
        self.report.bytes += index.as_ref().map_or_else(|len| *len, |index| index.len);
        let lies: HashMap<u64, &Packed> = contents.iter().map(|packed| (packed.offset, packed)).collect();
        for (frame, reason) in checks.finish() {
            if lies.get(&frame.offset).is_some_and(|packed| packed.digest == frame.digest) {
                findings.damage.push(Damage { digest: frame.digest, pack: row.key.clone(), reason });
            } else {
                findings.dead.push(format!("a frame that nothing points to, {} at byte {}: {reason}", frame.digest, frame.offset));
            }
        }
        if let Ok(index) = &index {
            findings.damage.extend(displaced(row, &contents, index));
            findings.unsound.extend(misnamed(&contents, index));
        }
        let bad: HashSet<Digest> = findings.damage.iter().map(|damage| damage.digest).collect();
        let doubtful = contents.iter().filter(|packed| packed.health == Health::Damaged && !bad.contains(&packed.digest));
        findings.doubtful.extend(doubtful.map(|packed| packed.digest));
        Ok(findings)
    }

    async fn magic(&self, row: &PackRow) -> Result<Option<bool>> {
        let magic = self.store.read_pack_to_check(&row.key, 0..pack::MAGIC.len() as u64).await?;
        Ok(magic.map(|bytes| bytes[..] == pack::MAGIC[..]))
    }

    /// Reads the journal's objects; if one is bad, a summary makes it superfluous.
    async fn journal(&mut self) -> Result<()> {
        let mut bad = false;
        let rows = self.store.metadata.journal().await?;
        let newest = Newest::of(&rows)?;
        // Superfluous objects may be gone already.
        for row in rows.iter().filter(|row| newest.as_ref().is_none_or(|newest| !newest.covers(row))) {
            let reason = match self.store.read_journal(&row.key).await {
                Ok(Some(_)) => continue,
                // Another process has replaced it since.
                Ok(None) if self.is_superfluous(row).await? => continue,
                Ok(None) => self.store.storage_is_there().await.map(|()| "it is not there".to_owned())?,
                Err(Error::Format(source)) => source.to_string(),
                Err(error) => return Err(error),
            };
            bad = true;
            self.report.bad_packs.push(format!("{}: {reason}; all names are in a new journal summary now", row.key));
        }
        if bad {
            self.store.write_summary().await?;
            self.store.trim_journal(JOURNAL).await?;
        }
        Ok(())
    }

    async fn is_superfluous(&self, row: &JournalRow) -> Result<bool> {
        let rows = self.store.metadata.journal().await?;
        let newest = Newest::of(&rows)?;
        Ok(!rows.contains(row) || newest.is_some_and(|newest| newest.covers(row)))
    }
}

fn not_there(row: &PackRow, contents: &[Packed]) -> Findings {
    let damage =
        |packed: &Packed| Damage { digest: packed.digest, pack: row.key.clone(), reason: format!("pack {} is not there", row.key) };
    let unsound = vec!["it is not there".into()];
    Findings { damage: contents.iter().map(damage).collect(), unsound, missing: true, ..Findings::default() }
}

/// Nodes whose frame headers do not say that they are nodes, so that a rebuild would not recognise
/// them. A copy has the right header.
fn misnamed(contents: &[Packed], index: &Index) -> Option<String> {
    let entries: HashMap<u64, Kind> = index.entries.iter().map(|entry| (entry.offset, entry.header.kind)).collect();
    let other = |packed: &&Packed| entries.get(&packed.offset).is_some_and(|kind| *kind != packed.kind);
    let count = contents.iter().filter(|packed| packed.kind.is_container() && packed.health != Health::Damaged).filter(other).count();
    (count > 0).then(|| format!("nodes whose frames have another kind in their headers: {count}"))
}

/// Objects at positions where the pack's index has something else.
fn displaced(row: &PackRow, contents: &[Packed], index: &Index) -> Vec<Damage> {
    let entries: HashMap<u64, &pack::Entry> = index.entries.iter().map(|entry| (entry.offset, entry)).collect();
    let lies = |packed: &&Packed| {
        entries.get(&packed.offset).is_some_and(|e| e.header.digest == packed.digest && e.header.frame_len() == packed.frame_len)
    };
    let damage = |packed: &Packed| Damage {
        digest: packed.digest,
        pack: row.key.clone(),
        reason: format!("pack {}, byte {}: its index has no frame of it there", row.key, packed.offset),
    };
    contents.iter().filter(|packed| !lies(packed)).map(damage).collect()
}
