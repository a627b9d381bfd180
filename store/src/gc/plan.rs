//! What a collection would do, counted in memory: the dry run, eviction's choice, and the report of
//! what is protected.

use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{Candidate, Health, Lease, ObjectId, ObjectRow, PackId, PackRow, PackState, Queued};
use pfr_schema::api::{OpenSession, Protected};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// How many candidates and objects a plan holds in memory: about 100 MiB. With more of them, its
/// numbers are a lower bound.
pub(super) const MOST: usize = 1_000_000;
/// Rows of packs read in one query.
const PACKS: usize = 1000;
/// Packs whose objects are read in one query. A pack may hold some hundred thousand small objects.
const CONTENTS: usize = 256;
/// Bytes of a pack besides its frames and their entries in the index.
const EMPTY_PACK: u64 = (pfr_schema::pack::MAGIC.len() + pfr_schema::pack::FOOTER_LEN) as u64;
/// Sessions named in a report.
const SESSIONS: usize = 100;
/// Open sessions searched for those that a report names.
const OPEN: usize = 100_000;

/// Which leases count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leases {
    All,
    /// Those that belong to no session: as if every session had ended.
    OfNoSession,
    None,
}

/// Objects that would be deleted.
pub(super) struct Plan<'a> {
    store: &'a Store,
    /// Objects looked at in one query.
    batch: usize,
    /// Which leases keep what they cover.
    leases: Leases,
    /// References taken away so far from objects that may be deleted.
    taken: HashMap<ObjectId, u64>,
    freed: HashSet<ObjectId>,
    /// Objects that would be deleted if no lease covered them.
    leased: BTreeMap<ObjectId, Lease>,
    /// Frame bytes that packs lose.
    lost: HashMap<PackId, u64>,
    pub bytes: u64,
}

impl<'a> Plan<'a> {
    pub(super) fn new(store: &'a Store, batch: usize, leases: Leases) -> Self {
        Self {
            store,
            batch: batch.max(1),
            leases,
            taken: HashMap::new(),
            freed: HashSet::new(),
            leased: BTreeMap::new(),
            lost: HashMap::new(),
            bytes: 0,
        }
    }

    /// Live bytes of a pack once this is carried out.
    pub(super) fn left(&self, pack: &PackRow) -> u64 {
        pack.live_bytes.saturating_sub(self.lost.get(&pack.id).copied().unwrap_or(0))
    }

    pub(super) fn is_full(&self) -> bool {
        self.taken.len() + self.freed.len() + self.leased.len() > MOST
    }

    /// Frees the candidates of one entry of the queue, and what only they referred to. Returns the
    /// number of freed objects.
    pub(super) async fn entry(&mut self, queued: &Queued) -> Result<u64> {
        let candidates = self.candidates(&[queued]).await?;
        self.free(candidates).await
    }

    /// The objects that these entries make candidates. One query for all packs: every small push
    /// leaves an entry for its pack, and there may be thousands.
    async fn candidates(&self, queued: &[&Queued]) -> Result<Vec<ObjectId>> {
        let (mut objects, mut packs) = (Vec::new(), Vec::new());
        for queued in queued {
            match queued.candidate {
                Candidate::Object(object) => objects.push(object),
                Candidate::Pack(pack) => packs.push(pack),
            }
        }
        if !packs.is_empty() {
            objects.extend(self.store.metadata.unheld(packs).await?);
        }
        Ok(objects)
    }

    /// As [`Self::entry`], for many entries in few queries.
    pub(super) async fn entries<'q>(&mut self, queued: impl Iterator<Item = &'q Queued>) -> Result<u64> {
        let (mut done, mut part, mut packs) = (0, Vec::new(), 0);
        for queued in queued {
            packs += usize::from(matches!(queued.candidate, Candidate::Pack(_)));
            part.push(queued);
            if part.len() >= self.batch || packs >= CONTENTS {
                let candidates = self.candidates(&part).await?;
                done += self.free(candidates).await?;
                part.clear();
                packs = 0;
            }
        }
        let candidates = self.candidates(&part).await?;
        Ok(done + self.free(candidates).await?)
    }

    /// Takes the references of names away from a manifest, and frees it if none is left.
    pub(super) async fn release(&mut self, manifest: ObjectId, names: u64) -> Result<u64> {
        *self.taken.entry(manifest).or_default() += names;
        self.free(vec![manifest]).await
    }

    /// Frees those of `candidates` that have no reference left, and then what only they referred
    /// to. Returns the number of freed objects.
    async fn free(&mut self, mut candidates: Vec<ObjectId>) -> Result<u64> {
        let before = self.freed.len();
        while !candidates.is_empty() && !self.is_full() {
            candidates.sort_unstable();
            candidates.dedup();
            candidates.retain(|id| !self.freed.contains(id));
            let mut next = Vec::new();
            for batch in candidates.chunks(self.batch) {
                let mut rows = known(self.store, batch.to_vec()).await?;
                rows.retain(|row| self.taken.get(&row.id).copied().unwrap_or(0) >= row.refs);
                if self.leases != Leases::None {
                    self.look_at_leases(rows.iter().map(|row| row.id).collect()).await?;
                    rows.retain(|row| !self.leased.contains_key(&row.id));
                }
                for row in rows {
                    self.freed.insert(row.id);
                    self.bytes += row.frame_len;
                    *self.lost.entry(row.pack).or_default() += row.frame_len;
                    for child in row.children {
                        *self.taken.entry(child).or_default() += 1;
                        next.push(child);
                    }
                }
            }
            candidates = next;
        }
        Ok((self.freed.len() - before) as u64)
    }

    async fn look_at_leases(&mut self, ids: Vec<ObjectId>) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let mut leases = self.store.metadata.leases(ids).await?;
        leases.retain(|(_, lease)| self.leases == Leases::All || lease.session.is_none());
        self.leased.extend(leases);
        Ok(())
    }

    /// The blobs that only leases protect.
    pub(super) async fn protected(mut self) -> Result<Protected> {
        let queue = self.store.metadata.queue(false, MOST).await?;
        for part in queue.iter().collect::<Vec<_>>().chunks(CONTENTS) {
            let mut roots = self.candidates(part).await?;
            roots.retain(|id| !self.freed.contains(id));
            for batch in roots.chunks(self.batch) {
                self.look_at_leases(batch.to_vec()).await?;
            }
            if self.is_full() {
                break;
            }
        }
        let mut leased = std::mem::take(&mut self.leased);
        let (before, bytes) = (self.freed.len(), self.bytes);
        self.leases = Leases::None;
        self.free(leased.keys().copied().collect()).await?;
        let (objects, bytes) = ((self.freed.len() - before) as u64, self.bytes - bytes);
        if objects == 0 {
            return Ok(Protected::default());
        }
        // Something else refers to the others, so the lease is not what keeps them.
        leased.retain(|id, _| self.freed.contains(id));
        let sessions: BTreeSet<i64> = leased.values().filter_map(|lease| lease.session).collect();
        let mut open = if sessions.is_empty() { Vec::new() } else { self.store.metadata.unfinished(OPEN).await? };
        open.retain(|session| sessions.contains(&session.session));
        let sessions = open.into_iter().take(SESSIONS).map(|s| OpenSession { repository: s.repository, expires_at: s.until }).collect();
        Ok(Protected { objects, bytes, expires_at: leased.values().map(|lease| lease.until).max(), sessions })
    }
}

/// Rows of objects. Those whose children are not known are left out: a collection defers them.
async fn known(store: &Store, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>> {
    match store.rows(ids.clone()).await {
        Err(Error::Internal(_)) => {}
        other => return other,
    }
    let mut rows = Vec::new();
    for id in ids {
        match store.metadata.objects(vec![id]).await {
            Ok(found) => rows.extend(found),
            Err(Error::Internal(reason)) => tracing::warn!(id, reason, "the row of a node cannot be read; run fsck"),
            Err(error) => return Err(error),
        }
    }
    Ok(rows)
}

/// All packs, as they are listed now.
pub(super) struct Packs(Vec<PackRow>);

/// What becomes of packs.
#[derive(Default)]
pub(super) struct Fates<'p> {
    /// Nothing points to them any more.
    pub emptied: Vec<&'p PackRow>,
    /// Their upload outlived its lease.
    pub abandoned: Vec<&'p PackRow>,
    /// Less than half of their bytes are live; each with its live bytes.
    pub sparse: Vec<(&'p PackRow, u64)>,
    /// Bytes of the others.
    stay: u64,
}

impl Packs {
    pub(super) async fn load(store: &Store) -> Result<Self> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = store.metadata.packs(after, PACKS).await?;
            let Some(last) = page.last() else { return Ok(Self(all)) };
            after = Some(last.id);
            all.extend(page);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &PackRow> {
        self.0.iter()
    }

    /// What becomes of them once the plan is carried out. If `give_up`, every upload counts as
    /// given up.
    pub(super) fn fates(&self, plan: &Plan<'_>, now: u64, give_up: bool) -> Fates<'_> {
        let mut fates = Fates::default();
        for pack in &self.0 {
            let left = plan.left(pack);
            match pack.state {
                PackState::Writing if give_up || pack.keep_until <= now => fates.abandoned.push(pack),
                PackState::Live if left == 0 => fates.emptied.push(pack),
                PackState::Live if left * 2 < pack.frame_bytes && pack.claimed_until <= now => fates.sparse.push((pack, left)),
                PackState::Live | PackState::Writing => fates.stay += pack.bytes,
                PackState::Emptied => {}
            }
        }
        fates
    }
}

impl Fates<'_> {
    /// An estimate of the bytes on storage after all grace periods and compaction.
    pub(super) fn disk(&self) -> u64 {
        let compacted = |(pack, left): &(&PackRow, u64)| {
            // The index has one entry for each frame, so it shrinks in proportion to the copied
            // bytes.
            let index = pack.bytes.saturating_sub(pack.frame_bytes);
            EMPTY_PACK + left + (u128::from(index) * u128::from(*left)).div_ceil(u128::from(pack.frame_bytes.max(1))) as u64
        };
        self.stay + self.sparse.iter().map(compacted).sum::<u64>()
    }

    /// What compaction copies of a sparse pack, and whether nothing stays in it.
    pub(super) async fn moved(store: &Store, plan: &Plan<'_>, pack: &PackRow) -> Result<(u64, bool)> {
        let mut contents = store.metadata.pack_contents(pack.id).await?;
        contents.retain(|frame| !plan.freed.contains(&frame.object));
        let stays = contents.iter().any(|frame| frame.health == Health::Damaged);
        Ok((contents.iter().filter(|frame| frame.health != Health::Damaged).map(|frame| frame.frame_len).sum(), !stays))
    }
}
