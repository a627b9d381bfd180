//! Cuts a plan into requests.

use crate::plan::{FRAME_OVERHEAD, Item, Plan, cut};
use pfr_schema::tree::Document;
use std::sync::Arc;

/// The frames of one request: blobs, then nodes, children first.
#[derive(Clone, Debug, Default)]
pub(super) struct Batch {
    pub blobs: Arc<[Item]>,
    pub containers: Arc<[Document]>,
}

impl Batch {
    pub fn frames(&self) -> u64 {
        (self.blobs.len() + self.containers.len()) as u64
    }
}

/// Requests in two groups: those of the first may be in flight together, those of the second follow
/// one after the other.
#[derive(Debug, Default)]
pub(super) struct Batches {
    pub together: Vec<Batch>,
    pub in_order: Vec<Batch>,
}

/// Whether a plan goes in one request.
pub(super) fn fits(plan: &Plan, limit: u64) -> bool {
    plan.bytes() + FRAME_OVERHEAD * (plan.blobs.len() + plan.containers.len()) as u64 <= limit
}

/// Cuts a plan into requests of at most `limit` bytes; a larger blob gets one of its own.
///
/// A plan that fits goes in one request. Otherwise blobs go first, and nodes only when all
/// blobs are acknowledged.
pub(super) fn batches(plan: Plan, limit: u64) -> Batches {
    if fits(&plan, limit) {
        let all = Batch { blobs: plan.blobs.into(), containers: plan.containers.into() };
        return Batches { together: Vec::new(), in_order: Some(all).into_iter().filter(|b| b.frames() > 0).collect() };
    }
    let blobs = cut(plan.blobs, Item::bytes, limit).into_iter().map(|blobs| Batch { blobs: blobs.into(), ..Batch::default() });
    let containers = cut(plan.containers, |d| d.bytes.len() as u64, limit).into_iter();
    Batches {
        together: blobs.collect(),
        in_order: containers.map(|containers| Batch { containers: containers.into(), ..Batch::default() }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::{Digest, Kind};

    fn plan(blobs: &[u64], containers: &[usize]) -> Plan {
        let item = |size: &u64| Item { digest: Digest::sha256(&size.to_le_bytes()), kind: Kind::Blob, size: Some(*size), elements: None };
        Plan {
            blobs: blobs.iter().map(item).collect(),
            containers: containers.iter().map(|len| Document::new(Kind::Run, vec![0; *len])).collect(),
        }
    }

    #[test]
    fn a_small_plan_goes_in_one_request() {
        let found = batches(plan(&[100, 200], &[10, 20]), 2000);
        assert_eq!((found.together.len(), found.in_order.len(), found.in_order[0].frames()), (0, 1, 4));
        let nothing = batches(plan(&[], &[]), 1000);
        assert_eq!(nothing.together.len() + nothing.in_order.len(), 0);
    }

    #[test]
    fn a_large_plan_sends_blobs_first() {
        let found = batches(plan(&[400, 400, 400, 5000, 1], &[10, 20]), 1100);
        let sizes: Vec<usize> = found.together.iter().map(|b| b.blobs.len()).collect();
        assert_eq!(sizes, [2, 1, 1, 1]);
        assert!(found.together.iter().all(|b| b.containers.is_empty()));
        assert_eq!(found.in_order.len(), 1);
        assert_eq!(found.in_order[0].containers.len(), 2);
    }
}
