//! Ancestors: `tag~N` and lineages take the same few transactions however long the chain is.

use crate::common::rig::{Backend, Rig};
use crate::common::watched::Watched;
use crate::common::{property, repository, tag};
use object_store::memory::InMemory;
use pfr_schema::codec::Codec;
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::journal::Record;
use pfr_schema::{Digest, ErrorCode, Kind, Selector};
use pfr_store::{Clock, Error, Metadata, NewContainer, NewFrame, Options, PackSizes, PushId, SqliteMetadata, Store, TagMove};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

on_backends!([sqlite = SqliteDisk, postgres = PostgresDisk]:
    a_chain_of_ten_thousand_is_walked_in_a_bounded_time,
    lineages_are_what_a_walk_step_by_step_finds,
);

/// Parents of each snapshot, by number: of those before it, or one that is not there.
type Family = Vec<Vec<usize>>;
const ABSENT: usize = usize::MAX;
const LEASE: Duration = Duration::from_secs(3600);

fn digest(number: usize) -> Digest {
    Digest::sha256(&number.to_le_bytes())
}

/// Manifests of nothing but a configuration.
async fn upload(metadata: &dyn Metadata, count: usize) {
    let blob = Digest::sha256(b"configuration");
    let frame = |digest, kind, container| {
        let header = Header { codec: Codec::Raw, kind, digest, raw_len: 8, stored_len: 8 };
        NewFrame { header, offset: 0, container }
    };
    let child = Child { digest: blob, kind: Kind::Blob, size: Some(8), shape: None, optional: false };
    let manifest = |n| frame(digest(n), Kind::Manifest, Some(NewContainer { children: vec![child.clone()], shape: None }));
    let frames = std::iter::once(frame(blob, Kind::Blob, None)).chain((0..count).map(manifest)).collect();
    let push = PushId(uuid::Uuid::now_v7().to_string());
    metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
    let pack = metadata.begin_pack(uuid::Uuid::now_v7().to_string(), LEASE).await.unwrap();
    metadata.finish_pack(push, pack, PackSizes { bytes: 1000, frame_bytes: 900 }, frames, LEASE).await.unwrap();
}

/// Snapshots without pages, the last one under the tag `t`.
async fn family(metadata: &dyn Metadata, family: &Family) {
    upload(metadata, family.len()).await;
    let snapshot = |(n, parents): (usize, &Vec<usize>)| Record::Snapshot {
        repository: repository(),
        manifest: digest(n),
        parents: parents.iter().map(|n| digest(*n)).collect(),
        artifact_type: None,
        subject: None,
        at: 1,
        new_bytes: 0,
    };
    let last = digest(family.len() - 1);
    let tag = Record::Tag { repository: repository(), tag: tag("t"), manifest: last, at: 1 };
    let records = family.iter().enumerate().map(snapshot).chain([tag]).collect();
    assert!(metadata.restore_names(records, 1).await.unwrap().is_empty());
}

/// The same for a chain, written straight into the tables: objects have row ids in their order.
async fn chain(rig: &Rig, length: usize) {
    upload(&*rig.metadata, length).await;
    rig.sql(&format!(
        "INSERT INTO manifests (repository, object, pushed_at, used_at, logical_bytes, new_bytes)
         SELECT r.id, o.id, 1, 1, 0, 0 FROM repositories r CROSS JOIN objects o WHERE o.kind = {} ORDER BY o.id",
        Kind::Manifest as i64
    ));
    rig.sql(
        "INSERT INTO parents (manifest, position, digest)
         SELECT m.id, 0, o.digest FROM manifests m JOIN objects o ON o.id = m.object - 1 JOIN manifests p ON p.object = o.id",
    );
    rig.metadata.put_tags(repository(), digest(length - 1), vec![TagMove { tag: tag("t"), expected: None }]).await.unwrap();
}

async fn a_chain_of_ten_thousand_is_walked_in_a_bounded_time(on: Backend) {
    const LENGTH: usize = 10_000;
    let rig = Rig::new(on).await;
    chain(&rig, LENGTH).await;
    let store = &rig.store;
    let resolve = async |back: usize| store.resolve(&repository(), &format!("t~{back}").parse::<Selector>().unwrap()).await;
    let start = Instant::now();
    assert_eq!(resolve(LENGTH - 1).await.unwrap(), digest(0));
    assert_eq!(resolve(5000).await.unwrap(), digest(LENGTH - 5001));
    let beyond = resolve(LENGTH).await.unwrap_err().to_string();
    assert!(beyond.contains(&format!("t~{LENGTH}: {} has no parent", digest(0))), "{beyond}");
    let all = store.lineage(&repository(), &digest(LENGTH - 1), LENGTH).await.unwrap();
    assert!(!all.truncated && all.snapshots.iter().map(|s| s.digest).eq((0..LENGTH).rev().map(digest)));
    // Ten thousand round trips would take longer, whatever the machine.
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

/// The ancestors of a snapshot, found one by one.
async fn step_by_step(store: &Store, from: Digest) -> Vec<Digest> {
    let (mut found, mut seen, mut queue) = (Vec::new(), HashSet::from([from]), VecDeque::from([from]));
    while let Some(next) = queue.pop_front() {
        if let Ok(row) = store.snapshot(&repository(), &next).await {
            queue.extend(row.parents.iter().copied().filter(|parent| seen.insert(*parent)));
            found.push(next);
        }
    }
    found
}

async fn lineages_are_what_a_walk_step_by_step_finds(on: Backend) {
    let parents = (0_usize..40, 0_usize..40, 0_usize..4);
    let families = proptest::collection::vec(parents, 1..24).prop_map(|drawn| {
        let parent = |n: usize, drawn: usize| if n == 0 || drawn > 35 { ABSENT - drawn } else { drawn % n };
        let parents = |(n, (a, b, count)): (usize, (usize, usize, usize))| -> Vec<usize> {
            let both = [parent(n, a), parent(n, b)];
            both[..count.min(2)].to_vec()
        };
        drawn.into_iter().enumerate().map(parents).collect::<Family>()
    });
    property(on.some(8, 8), families, move |drawn| async move {
        let rig = Rig::new(on).await;
        family(&*rig.metadata, &drawn).await;
        let store = &rig.store;
        let number: HashMap<Digest, usize> = (0..drawn.len()).map(|n| (digest(n), n)).collect();
        for from in 0..drawn.len() {
            let expected = step_by_step(store, digest(from)).await;
            for limit in [1, 2, expected.len(), 100] {
                let lineage = store.lineage(&repository(), &digest(from), limit).await.unwrap();
                let found: Vec<Digest> = lineage.snapshots.iter().map(|s| s.digest).collect();
                assert_eq!(found, expected[..expected.len().min(limit)], "{from} of {drawn:?}, limit {limit}");
                assert_eq!(lineage.truncated, expected.len() > limit);
            }
        }
        for parent in 0..drawn.len() {
            let expected: Vec<Digest> = (0..drawn.len()).filter(|n| drawn[*n].contains(&parent)).map(digest).collect();
            for limit in [1, 100] {
                let found = store.continuations(&repository(), &digest(parent), limit).await.unwrap();
                let found: Vec<Digest> = found.into_iter().map(|s| s.digest).collect();
                assert_eq!(found, expected[..expected.len().min(limit)], "of {parent} in {drawn:?}");
            }
        }
        let mut at = drawn.len() - 1;
        for back in 0..30 {
            let selector = Selector::Tag { tag: tag("t"), back };
            let found = store.resolve(&repository(), &selector).await;
            assert_eq!(found.as_ref().ok(), Some(&digest(at)), "{selector} of {drawn:?}");
            let walked = store.ancestor(&repository(), &digest(drawn.len() - 1), back.into()).await.unwrap();
            assert_eq!((walked.digest, walked.steps), (digest(at), back.into()));
            let Some(next) = drawn[at].first() else { break };
            match number.get(&digest(*next)) {
                Some(parent) => at = *parent,
                None => {
                    let refused = store.resolve(&repository(), &Selector::Tag { tag: tag("t"), back: back + 1 }).await.unwrap_err();
                    assert!(matches!(&refused, Error::SnapshotUnknown { snapshot, .. } if *snapshot == digest(*next).to_string()));
                    break;
                }
            }
        }
        let unknown = store.lineage(&repository(), &digest(1000), 10).await.unwrap_err();
        assert_eq!(unknown.code(), ErrorCode::SnapshotUnknown);
    })
    .await;
}

#[tokio::test]
async fn a_longer_way_takes_no_more_transactions() {
    let watched = Watched::new(SqliteMetadata::open_in_memory(Clock::system()).await.unwrap());
    family(&*watched, &(0..300).map(|n: usize| n.checked_sub(1).into_iter().collect()).collect()).await;
    let store = Store::new(Arc::new(InMemory::new()), watched.clone(), Options::default());
    for back in [1, 10, 299] {
        let before = watched.calls();
        store.resolve(&repository(), &Selector::Tag { tag: tag("t"), back }).await.unwrap();
        store.lineage(&repository(), &digest(299), back as usize).await.unwrap();
        assert_eq!(watched.calls() - before, 2, "t~{back}");
    }
}
