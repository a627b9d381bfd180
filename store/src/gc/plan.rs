//! The dry run: what a collection would free, counted down in memory.

use super::run::Run;
use crate::Store;
use crate::error::{Error, Result};
use crate::metadata::{ObjectId, ObjectRow, Suspect};
use std::collections::{HashMap, HashSet};

/// Suspects and objects that are kept in mind: about 100 MiB. Beyond that the numbers are a lower bound.
const MOST: usize = 1_000_000;

/// What would go.
#[derive(Default)]
struct Plan {
    /// References taken away so far, of what may go.
    taken: HashMap<ObjectId, u64>,
    freed: HashSet<ObjectId>,
    bytes: u64,
}

impl Plan {
    fn full(&self) -> bool {
        self.taken.len() + self.freed.len() > MOST
    }

    /// Frees those of `candidates` that have no reference left, and what hung on them; returns how many objects.
    async fn free(&mut self, store: &Store, mut candidates: Vec<ObjectId>) -> Result<u64> {
        let before = self.freed.len();
        while !candidates.is_empty() && !self.full() {
            candidates.sort_unstable();
            candidates.dedup();
            candidates.retain(|id| !self.freed.contains(id));
            let mut next = Vec::new();
            for row in known(store, candidates).await? {
                if self.taken.get(&row.id).copied().unwrap_or(0) < row.refs {
                    continue;
                }
                self.freed.insert(row.id);
                self.bytes += row.frame_len;
                for child in row.children {
                    *self.taken.entry(child).or_default() += 1;
                    next.push(child);
                }
            }
            candidates = next;
        }
        Ok((self.freed.len() - before) as u64)
    }
}

/// Rows of objects. Those whose children are not known are left out: a collection parks them.
async fn known(store: &Store, ids: Vec<ObjectId>) -> Result<Vec<ObjectRow>> {
    match store.rows(ids.clone()).await {
        Err(Error::Internal(_)) => {}
        other => return other,
    }
    let mut rows = Vec::new();
    for id in ids {
        match store.metadata.objects(vec![id]).await {
            Ok(found) => rows.extend(found),
            Err(Error::Internal(reason)) => tracing::warn!(id, reason, "an object cannot be read; run fsck"),
            Err(error) => return Err(error),
        }
    }
    Ok(rows)
}

impl Run<'_> {
    /// Adds up what is due. Leases are looked at for what was uploaded and never held, not for what a deleted snapshot leaves behind: that goes when
    /// they end.
    pub(super) async fn plan(&mut self) {
        let planned = self.count_due().await;
        self.note(planned);
    }

    async fn count_due(&mut self) -> Result<()> {
        let mut plan = Plan::default();
        let suspects = self.store.metadata.suspects(MOST).await?;
        let mut capped = suspects.len() == MOST;
        let released: Vec<ObjectId> = suspects.iter().filter_map(|s| if let Suspect::Object(id) = s { Some(*id) } else { None }).collect();
        for objects in released.chunks(self.options.batch.max(1)) {
            self.report.released += plan.free(self.store, objects.to_vec()).await?;
            self.report.freed_bytes = plan.bytes;
            self.progress().await;
        }
        for suspect in &suspects {
            if let Suspect::Pack(pack) = suspect {
                let unclaimed = self.store.metadata.unclaimed(*pack).await?;
                self.report.unclaimed += plan.free(self.store, unclaimed).await?;
                self.report.freed_bytes = plan.bytes;
                self.progress().await;
            }
            capped |= plan.full();
        }
        let drained = self.store.metadata.drained_packs(self.options.horizon, MOST).await?;
        self.report.packs_deleted = drained.len() as u64;
        self.report.deleted_bytes = drained.iter().map(|pack| pack.bytes).sum();
        if capped {
            self.report.error = Some(format!("there are more than {MOST} objects to look at: the numbers are a lower bound"));
        }
        Ok(())
    }
}
