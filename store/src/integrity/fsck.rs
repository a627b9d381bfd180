//! Nodes against their rows, the tables against themselves, then the prefix index against the
//! snapshots.

use crate::Store;
use crate::boxed;
use crate::error::{Error, Result};
use crate::metadata::{ObjectId, ObjectRow, PrefixMark};
use crate::room::Freeing;
use bytes::Bytes;
use pfr_schema::Digest;
use pfr_schema::api::FsckReport;
use pfr_schema::container::{Child, Container};
use std::collections::{BTreeMap, BTreeSet};

/// Packs asked for at a time.
const PAGE: usize = 100;
/// Snapshots that are compared with the prefix index at a time.
const SNAPSHOTS: usize = 64;
/// Maximum number of discrepancies in the report.
const NAMED: usize = 1000;

impl Store {
    /// Reads every node, compares what it lists with what its row says, then recomputes all counts
    /// from the rows, and the prefix index from the documents of the snapshots; with `repair`,
    /// corrects the counts and the index. If a node's row is wrong, no count is corrected, since
    /// its children must not count as unreferenced.
    ///
    /// # Errors
    /// [`Error::Unavailable`]. Differences are in the report, and are not errors.
    #[boxed]
    pub async fn fsck(&self, repair: bool, progress: &mut (dyn FnMut(&FsckReport) + Send)) -> Result<FsckReport> {
        // An fsck works on a full disk too, and writes what it found.
        let _room = self.metadata.make_room(Freeing::Collection).await?;
        let mut fsck = Fsck { store: self, report: FsckReport::default(), unreadable: BTreeMap::new() };
        let mut after = None;
        loop {
            let packs = self.metadata.packs(after, PAGE).await?;
            let Some(last) = packs.last().map(|pack| pack.id) else { break };
            after = Some(last);
            for pack in packs {
                let ids = self.metadata.pack_contents(pack.id).await?.iter().map(|packed| packed.object).collect();
                for row in fsck.rows(ids).await? {
                    if row.kind.is_container() {
                        fsck.container(&row).await?;
                    }
                }
                fsck.report.packs += 1;
                progress(&fsck.report);
            }
        }
        // An unreadable node is damage to bytes and not to the tables; it is in quarantine.
        let trusted = fsck.report.wrong == 0;
        fsck.name_unreadable().await?;
        let uncorrected = fsck.report.wrong;
        let audit = self.metadata.audit(repair && trusted).await?;
        let words = audit.discrepancies.into_iter().map(|d| format!("{}: expected {}, found {}", d.what, d.expected, d.found));
        fsck.report.discrepancies.extend(words);
        fsck.report.wrong += audit.wrong;
        fsck.prefixes(repair).await?;
        let mut report = fsck.report;
        report.discrepancies.truncate(NAMED);
        (report.objects, report.packs) = (audit.objects, audit.packs);
        report.repaired = repair && report.wrong > 0 && uncorrected == 0 && (audit.wrong == 0 || audit.repaired);
        progress(&report);
        Ok(report)
    }
}

struct Fsck<'a> {
    store: &'a Store,
    report: FsckReport,
    /// Nodes whose bytes are bad, in words.
    unreadable: BTreeMap<Digest, String>,
}

impl Fsck<'_> {
    fn wrong(&mut self, row: &ObjectRow, words: &str) {
        self.report.wrong += 1;
        if self.report.discrepancies.len() < NAMED {
            self.report.discrepancies.push(format!("object {} {:?} {}: {words}", row.id, row.kind, row.digest));
        }
    }

    /// Rows of objects; those that cannot be read are the audit's to report.
    async fn rows(&mut self, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>> {
        match self.store.rows(ids.clone()).await {
            Err(Error::Internal(_)) => {}
            other => return other,
        }
        let mut rows = Vec::new();
        for id in ids {
            match self.store.metadata.objects(vec![id]).await {
                Ok(found) => rows.extend(found),
                Err(Error::Internal(reason)) => {
                    self.report.wrong += 1;
                    self.report.discrepancies.push(format!("object {id}: {reason}"));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(rows)
    }

    /// Reads a node; one that is in quarantine is looked at again.
    async fn read(&self, row: &ObjectRow) -> Result<Bytes> {
        let read = self.store.read(&row.digest).await;
        if matches!(read, Err(Error::Corrupt { .. })) && self.store.examine(&row.digest).await?.is_none() {
            return self.store.read(&row.digest).await;
        }
        read
    }

    /// Says of each node that cannot be read which snapshots are lost with it until it is
    /// pushed again.
    async fn name_unreadable(&mut self) -> Result<()> {
        // Reassess the nodes above blobs that a second read has released.
        self.store.reassess().await?;
        if self.unreadable.is_empty() {
            return Ok(());
        }
        let reached: BTreeMap<Digest, Vec<String>> = self.store.damaged().await?.into_iter().map(|b| (b.digest, b.snapshots)).collect();
        for (digest, words) in std::mem::take(&mut self.unreadable) {
            let snapshots = reached.get(&digest).map(|names| names.join(", ")).filter(|names| !names.is_empty());
            let snapshots = snapshots.unwrap_or_else(|| "no snapshot".into());
            self.report.wrong += 1;
            if self.report.discrepancies.len() < NAMED {
                self.report.discrepancies.push(format!("{words}; lost with it until it is pushed again: {snapshots}"));
            }
        }
        Ok(())
    }

    /// Compares the prefix index with what the documents of the snapshots say; with `repair`,
    /// corrects it.
    async fn prefixes(&mut self, repair: bool) -> Result<()> {
        let mut after = 0;
        loop {
            let page = self.store.metadata.prefixed(after, SNAPSHOTS).await?;
            let Some(last) = page.last() else { return Ok(()) };
            after = last.manifest;
            let mut corrected = Vec::new();
            for row in page {
                let [expected, instead] = match self.store.expected_marks(&row.digest).await {
                    Ok(marks) => marks.map(BTreeSet::from_iter),
                    Err(error @ (Error::Unavailable { .. } | Error::Full(_) | Error::Overloaded(_))) => return Err(error),
                    // Deleted since its row was read, or damaged, which a scrub reports.
                    Err(_) => continue,
                };
                let found: BTreeSet<PrefixMark> = row.marks.iter().copied().collect();
                let rows_are_right = if row.is_indexed { found == expected || found == instead } else { found.is_empty() };
                if rows_are_right && row.elsewhere == 0 {
                    continue;
                }
                self.report.wrong += 1;
                if self.report.discrepancies.len() < NAMED {
                    let all = found.len() + row.elsewhere;
                    let wanted = if row.is_indexed { expected.clone() } else { BTreeSet::new() };
                    let (wanted, right) = (wanted.len(), found.intersection(&wanted).count());
                    let words = format!("expected {wanted} rows in the prefix index, found {all}, of which {right} are right");
                    self.report.discrepancies.push(format!("snapshot {}: {words}", row.digest));
                }
                corrected.push((row.manifest, expected.into_iter().collect()));
            }
            if repair && !corrected.is_empty() {
                self.store.metadata.correct_prefixes(corrected).await?;
            }
        }
    }

    async fn container(&mut self, row: &ObjectRow) -> Result<()> {
        let bytes = match self.read(row).await {
            Ok(bytes) => bytes,
            // Collected since its row was read.
            Err(Error::BlobUnknown { .. }) => return Ok(()),
            Err(Error::Corrupt { reason, .. }) => {
                let words = format!("object {} {:?} {}: it cannot be read: {reason}", row.id, row.kind, row.digest);
                self.unreadable.insert(row.digest, words);
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        self.report.containers += 1;
        let container = match Container::parse(row.kind, &bytes, &self.store.options.limits) {
            Ok(Some(container)) => container,
            Ok(None) => return Ok(()),
            Err(error) => {
                self.wrong(row, &format!("it is none: {error}"));
                return Ok(());
            }
        };
        let Some(words) = self.compare(row, &container.children()).await? else { return Ok(()) };
        // It may have been collected, with its children, while it was looked at.
        if self.store.metadata.find(vec![row.digest]).await?.first().and_then(Option::as_ref) == Some(row) {
            self.wrong(row, &words);
        }
        Ok(())
    }

    /// Reports where the row of a node differs from its bytes.
    async fn compare(&self, row: &ObjectRow, children: &[Child]) -> Result<Option<String>> {
        let unique: BTreeMap<_, _> = children.iter().map(|child| (child.digest, child)).collect();
        let found = match self.store.metadata.find(unique.keys().copied().collect()).await {
            Err(Error::Internal(reason)) => return Ok(Some(reason)),
            other => other?,
        };
        let recorded: BTreeSet<ObjectId> = row.children.iter().copied().collect();
        let mut ids = BTreeSet::new();
        for (child, object) in unique.values().zip(found) {
            match object {
                // It was not there when the node came.
                None if child.optional => false,
                Some(object) if child.optional && !recorded.contains(&object.id) => false,
                None => return Ok(Some(format!("it lists {}, which is not stored", child.digest))),
                Some(object) if !object.kind.satisfies(child.kind) => {
                    return Ok(Some(format!("it lists {} as {:?}, the tables say {:?}", child.digest, child.kind, object.kind)));
                }
                Some(object) if child.size.is_some_and(|size| size != object.size) => {
                    return Ok(Some(format!("it lists {} with {:?} bytes, the tables say {}", child.digest, child.size, object.size)));
                }
                Some(object) => ids.insert(object.id),
            };
        }
        if ids == recorded {
            return Ok(None);
        }
        let (lacks, more) = (ids.difference(&recorded).count(), recorded.difference(&ids).count());
        Ok(Some(format!("of {} children its row lacks {lacks}, and has {more} that it does not list", ids.len())))
    }
}
