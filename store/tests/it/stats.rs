//! Statistics are exact: compared with a count over every row, on random fork trees.

use crate::common::rig::{Backend, Rig};
use crate::common::{pieces, property};
use futures::future::BoxFuture;
use pfr_schema::api::Freed;
use pfr_schema::codec::Codec;
use pfr_schema::container::Child;
use pfr_schema::frame::Header;
use pfr_schema::run::Shape;
use pfr_schema::snapshot::SnapshotConfig;
use pfr_schema::{Digest, ErrorCode, Kind, RepositoryName};
use pfr_store::{
    Budget, Commit, Error, Metadata, NewContainer, NewFrame, ObjectId, ObjectRow, PackSizes, PushId, SnapshotRow, StatsFilter, Store,
    TagMove,
};
use pfr_testkit::snapshot;
use pfr_testkit::storage::{Moment, watched};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

on_backends!([memory = Memory, sqlite = SqliteDisk, postgres = PostgresDisk]:
    statistics_are_what_a_count_over_all_rows_says,
    statistics_of_a_fork_tree_and_of_an_agent_count_their_snapshots_alone,
);

const LEASE: Duration = Duration::from_secs(60);
/// Bytes of a page, and of a page chunk: so a chunk may be a page of another one.
const PAGE: u64 = 100;
/// Numbers of pages; those behind them are two page chunks.
const PAGES: u8 = 14;

#[derive(Clone, Debug)]
enum Op {
    /// Pages of the chunks of each tree, configuration, a page that is attached too, repository,
    /// tag.
    Push { trees: Vec<Vec<Vec<u8>>>, config: u8, attached: Option<u8>, repository: u8, tag: Option<u8> },
    /// The snapshot with this number of those that there are.
    Delete(usize),
    /// Lets leases end and collects about so many objects.
    Collect(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let chunk = proptest::collection::vec(0..PAGES + 2, 1..5);
    let tree = proptest::collection::vec(chunk, 1..4);
    let trees = proptest::collection::vec(tree, 1..3);
    let push = (trees, 0_u8..4, proptest::option::of(0..PAGES), 0_u8..2, proptest::option::of(0_u8..3))
        .prop_map(|(trees, config, attached, repository, tag)| Op::Push { trees, config, attached, repository, tag });
    prop_oneof![5 => push, 2 => (0_usize..20).prop_map(Op::Delete), 1 => (1_usize..20).prop_map(Op::Collect)]
}

fn name(repository: u8) -> RepositoryName {
    format!("team/agent-{repository}").parse().unwrap()
}

/// The blobs of a push, children first.
#[derive(Default)]
struct Made {
    frames: Vec<NewFrame>,
    known: HashSet<Digest>,
}

impl Made {
    fn frame(&mut self, bytes: &[u8], kind: Kind, raw_len: u64, container: Option<NewContainer>) -> Digest {
        let digest = Digest::sha256(bytes);
        if self.known.insert(digest) {
            // Encoded lengths differ from blob to blob.
            let stored_len = raw_len / 2 + u64::from(digest.as_bytes()[0]);
            self.frames.push(NewFrame { header: Header { codec: Codec::Zstd, kind, digest, raw_len, stored_len }, offset: 0, container });
        }
        digest
    }

    fn page(&mut self, number: u8) -> Digest {
        match number.checked_sub(PAGES) {
            None => self.frame(&[b'p', number], Kind::Blob, PAGE, None),
            Some(0) => self.chunk(&[0, 1]).0,
            Some(_) => self.chunk(&[2, PAGES]).0,
        }
    }

    fn chunk(&mut self, pages: &[u8]) -> (Digest, Shape) {
        let shape = Shape { pages: pages.len() as u32, components: 1, page_bytes: PAGE };
        let child = |digest| Child { digest, kind: Kind::Blob, size: Some(PAGE), shape: None, optional: false };
        let children: Vec<Child> = pages.iter().map(|page| child(self.page(*page))).collect();
        (self.frame(&[b"chunk", pages].concat(), Kind::Run, PAGE, Some(NewContainer { children, shape: Some(shape) })), shape)
    }

    fn manifest(&mut self, trees: &[Vec<Vec<u8>>], config: u8, attached: Option<u8>) -> Digest {
        let mut children = vec![(self.frame(&[b'c', config], Kind::Blob, 30 + u64::from(config), None), Kind::Blob)];
        children.extend(attached.map(|page| (self.page(page), Kind::Blob)));
        for tree in trees {
            let chunks: Vec<(Digest, Shape)> = tree.iter().map(|pages| self.chunk(pages)).collect();
            let child = |(digest, shape): &(Digest, Shape)| Child {
                digest: *digest,
                kind: Kind::Run,
                size: None,
                shape: Some(*shape),
                optional: false,
            };
            let container = NewContainer { children: chunks.iter().map(child).collect(), shape: None };
            children.push((self.frame(format!("tree {tree:?}").as_bytes(), Kind::Tree, 70, Some(container)), Kind::Tree));
        }
        let child = |(digest, kind)| Child { digest, kind, size: None, shape: None, optional: false };
        let bytes = format!("manifest {trees:?} {config} {attached:?}");
        let container = NewContainer { children: children.into_iter().map(child).collect(), shape: None };
        self.frame(bytes.as_bytes(), Kind::Manifest, 50, Some(container))
    }
}

async fn push(metadata: &dyn Metadata, repository: RepositoryName, made: Made, manifest: Digest, tag: Option<u8>) {
    let push = PushId(uuid::Uuid::now_v7().to_string());
    metadata.open_push(push.clone(), repository, LEASE).await.unwrap();
    let pack = metadata.begin_pack(uuid::Uuid::now_v7().to_string(), LEASE).await.unwrap();
    let bytes = made.frames.iter().map(|frame| frame.header.frame_len()).sum();
    let sizes = PackSizes { bytes: bytes + 100, frame_bytes: bytes };
    metadata.finish_pack(push.clone(), pack, sizes, made.frames, LEASE).await.unwrap();
    let tag = tag.map(|tag| TagMove { tag: format!("t{tag}").parse().unwrap(), expected: None });
    let commit = Commit {
        manifest,
        parents: vec![],
        artifact_type: None,
        subject: None,
        tag,
        pin: None,
        marks: vec![],
        agent: None,
        audit: None,
        signed: None,
    };
    metadata.commit(push, commit).await.unwrap();
}

async fn snapshots(metadata: &dyn Metadata, repositories: &[RepositoryName]) -> Vec<(RepositoryName, SnapshotRow)> {
    let mut all = Vec::new();
    for name in repositories {
        if let Ok(page) = metadata.snapshots(name.clone(), None, usize::MAX).await {
            all.extend(page.rows.into_iter().rev().map(|row| (name.clone(), row)));
        }
    }
    all
}

/// Every row that there is below some snapshots.
async fn rows(metadata: &dyn Metadata, of: &[(RepositoryName, SnapshotRow)]) -> HashMap<ObjectId, ObjectRow> {
    let mut rows = HashMap::new();
    let mut level: Vec<ObjectId> = of.iter().map(|(_, row)| row.object).collect();
    while !level.is_empty() {
        let found = metadata.objects(level).await.unwrap();
        let below: HashSet<ObjectId> = found.iter().flat_map(|row| row.children.iter().copied()).collect();
        rows.extend(found.into_iter().map(|row| (row.id, row)));
        level = below.into_iter().filter(|id| !rows.contains_key(id)).collect();
    }
    rows
}

/// Raw bytes, and frame bytes, of what is below an object and was not seen.
fn reach(id: ObjectId, rows: &HashMap<ObjectId, ObjectRow>, seen: &mut HashSet<ObjectId>) -> (u64, u64) {
    if !seen.insert(id) {
        return (0, 0);
    }
    let row = &rows[&id];
    let below = row.children.iter().map(|child| reach(*child, rows, seen));
    below.fold((row.size, row.frame_len), |sum, add| (sum.0 + add.0, sum.1 + add.1))
}

/// Raw bytes, and frame bytes, that go when snapshots and their tags go, by counting references
/// down.
fn freed(snapshots: &[&SnapshotRow], rows: &HashMap<ObjectId, ObjectRow>) -> (u64, u64) {
    let mut left: HashMap<ObjectId, u64> = rows.iter().map(|(id, row)| (*id, row.refs)).collect();
    let (mut bytes, mut stored) = (0, 0);
    let mut next: Vec<ObjectId> = snapshots.iter().flat_map(|snapshot| vec![snapshot.object; 1 + snapshot.tags.len()]).collect();
    while let Some(id) = next.pop() {
        let left = left.get_mut(&id).unwrap();
        *left -= 1;
        if *left == 0 {
            bytes += rows[&id].size;
            stored += rows[&id].frame_len;
            next.extend(&rows[&id].children);
        }
    }
    (bytes, stored)
}

/// With little room for lists some nodes are left, and the parts add up to the whole.
async fn looks_at_some(metadata: &dyn Metadata, nodes: Vec<ObjectId>) {
    for list_bytes in [0, 6] {
        let (mut left, mut looked_at, mut listed) = (nodes.clone(), 0, 0);
        while !left.is_empty() {
            let held = metadata.held(left.clone(), vec![], list_bytes).await.unwrap();
            assert!(held.left.len() < left.len() && held.left.iter().all(|id| left.contains(id)), "{held:?} of {left:?}");
            looked_at += left.len() - held.left.len();
            listed += held.shared.iter().map(|object| object.seen).sum::<u64>();
            left = held.left;
        }
        let whole = metadata.held(nodes.clone(), vec![], u64::MAX).await.unwrap();
        assert_eq!((looked_at, whole.left.len()), (nodes.len(), 0));
        assert_eq!(listed, whole.shared.iter().map(|object| object.seen).sum::<u64>(), "{list_bytes}");
    }
}

async fn compare(store: &Store, metadata: &dyn Metadata, repository: Option<&RepositoryName>) {
    let names: Vec<RepositoryName> = repository.map_or_else(|| (0..2).map(name).collect(), |name| vec![name.clone()]);
    let all = snapshots(metadata, &names).await;
    let found = match store.stats(repository).await {
        Ok(found) => found,
        Err(error) => return assert!(all.is_empty() && repository.is_some(), "{error}"),
    };
    let rows = rows(metadata, &all).await;
    let (mut seen, mut unique, mut stored) = (HashSet::new(), 0, 0);
    assert_eq!((found.snapshots.len(), found.omitted), (all.len(), 0));
    for ((name, row), found) in all.iter().zip(&found.snapshots) {
        let (new, new_stored) = reach(row.object, &rows, &mut seen);
        (unique, stored) = (unique + new, stored + new_stored);
        let (exclusive, _) = freed(&[row], &rows);
        assert_eq!((name, row.digest, row.logical_bytes), (&found.repository, found.digest, found.logical));
        assert_eq!((found.new, found.exclusive), (new, exclusive), "new and exclusive bytes of {}", row.digest);
        assert_eq!(found.shared, row.logical_bytes - exclusive);
        let alone = store.snapshot_stats(name, &row.digest).await.unwrap();
        assert_eq!((alone.exclusive, alone.shared, alone.new), (exclusive, found.shared, row.new_bytes), "{} alone", row.digest);
    }
    assert_eq!((found.unique, found.stored), (unique, stored));
    if repository.is_some() {
        return;
    }
    // Together, and with one that is not there: all, and others of these.
    for (first, step) in [(0, 1), (0, 2), (1, 3)] {
        let chosen: Vec<&(RepositoryName, SnapshotRow)> = all.iter().skip(first).step_by(step).collect();
        let mut named: BTreeMap<RepositoryName, BTreeSet<Digest>> = BTreeMap::new();
        named.entry(name(0)).or_default().insert(Digest::sha256(b"absent"));
        for (of, row) in &chosen {
            named.entry(of.clone()).or_default().insert(row.digest);
        }
        let chosen: Vec<&SnapshotRow> = chosen.into_iter().map(|(_, row)| row).collect();
        let (bytes, stored_bytes) = freed(&chosen, &rows);
        let expected = Freed { snapshots: chosen.len() as u64, bytes, stored_bytes };
        assert_eq!(store.freed_by(&named, &Budget::default()).await.unwrap(), Some(expected), "{named:?}");
    }
    looks_at_some(metadata, rows.values().filter(|row| !row.children.is_empty()).map(|row| row.id).collect()).await;
}

async fn statistics_are_what_a_count_over_all_rows_says(on: Backend) {
    property(on.some(80, 7), proptest::collection::vec(op(), 1..24), move |ops| async move {
        let rig = Rig::new(on).await;
        let (store, metadata) = (&rig.store, &*rig.metadata);
        for op in ops {
            match op {
                Op::Push { trees, config, attached, repository, tag } => {
                    let mut made = Made::default();
                    let manifest = made.manifest(&trees, config, attached);
                    push(metadata, name(repository), made, manifest, tag).await;
                }
                Op::Delete(which) => {
                    let all = snapshots(metadata, &[name(0), name(1)]).await;
                    if !all.is_empty() {
                        let (repository, row) = &all[which % all.len()];
                        metadata.delete_snapshot(repository.clone(), row.digest).await.unwrap();
                    }
                }
                Op::Collect(budget) => {
                    rig.wait(LEASE * 2);
                    metadata.collect(budget).await.unwrap();
                }
            }
            compare(store, metadata, None).await;
            compare(store, metadata, Some(&name(0))).await;
        }
    })
    .await;
}

/// Pushes a snapshot whose configuration names an agent.
async fn pushed(store: &Store, numbers: &[u64], agent: Option<&str>, parents: Vec<Digest>) -> Digest {
    pushed_to(store, &name(0), numbers, agent, parents).await
}

async fn pushed_to(store: &Store, repository: &RepositoryName, numbers: &[u64], agent: Option<&str>, parents: Vec<Digest>) -> Digest {
    let config = SnapshotConfig { agent: agent.map(str::to_owned), parents, ..SnapshotConfig::default() };
    let made = snapshot::Shape::TINY.snapshot(numbers).config(config).build();
    let session = store.open_push(repository).await.unwrap();
    store.ingest(&session.id, pieces(&made.stream(), 777)).await.unwrap();
    store.commit(&session.id, made.digest(), None, None).await.unwrap();
    made.digest()
}

async fn statistics_of_a_fork_tree_and_of_an_agent_count_their_snapshots_alone(on: Backend) {
    let rig = Rig::new(on).await;
    let (store, metadata) = (&rig.store, &*rig.metadata);
    let root = pushed(store, &[1, 2, 3], Some("a"), vec![]).await;
    let left = pushed(store, &[1, 2, 4], Some("a"), vec![root]).await;
    let right = pushed(store, &[1, 5], Some("b"), vec![root]).await;
    let beside = pushed(store, &[1, 6], None, vec![]).await;
    let end = pushed(store, &[1, 2, 4, 7], Some("b"), vec![left]).await;
    let (all, whole) = (snapshots(metadata, &[name(0)]).await, store.stats(Some(&name(0))).await.unwrap());
    let cases = [
        (Some(root), None, vec![root, left, right, end]),
        (Some(left), None, vec![left, end]),
        (Some(beside), None, vec![beside]),
        (None, Some("a"), vec![root, left]),
        (None, Some("b"), vec![right, end]),
        (None, Some("nobody\0"), vec![]),
        (None, Some(""), vec![]),
        (Some(left), Some("b"), vec![end]),
        (Some(beside), Some("a"), vec![]),
    ];
    for (below, agent, expected) in cases {
        let filter = StatsFilter { below, agent: agent.map(str::to_owned) };
        let found = store.stats_of(Some(&name(0)), &filter).await.unwrap();
        assert_eq!(found.snapshots.iter().map(|one| one.digest).collect::<Vec<_>>(), expected, "{filter:?}");
        assert_eq!((found.below, &found.agent), (filter.below, &filter.agent), "it says what it is about");
        let chosen: Vec<_> = all.iter().filter(|(_, row)| expected.contains(&row.digest)).cloned().collect();
        let rows = rows(metadata, &chosen).await;
        let mut seen = HashSet::new();
        let reached: Vec<(u64, u64)> = chosen.iter().map(|(_, row)| reach(row.object, &rows, &mut seen)).collect();
        assert_eq!(found.snapshots.iter().map(|one| one.new).collect::<Vec<_>>(), reached.iter().map(|one| one.0).collect::<Vec<_>>());
        assert_eq!(
            (found.unique, found.stored),
            (reached.iter().map(|one| one.0).sum::<u64>(), reached.iter().map(|one| one.1).sum::<u64>())
        );
        for one in &found.snapshots {
            let alone = whole.snapshots.iter().find(|other| other.digest == one.digest).unwrap();
            assert_eq!((one.exclusive, one.logical), (alone.exclusive, alone.logical), "{filter:?}: {}", one.digest);
        }
    }
    let unknown: RepositoryName = "team/nobody".parse().unwrap();
    for agent in [None, Some("a".to_owned())] {
        let filter = StatsFilter { below: None, agent };
        let found = store.stats_of(Some(&unknown), &filter).await;
        assert_eq!(found.unwrap_err().code(), ErrorCode::RepositoryUnknown, "{filter:?}");
    }

    // In all repositories: what the agent's snapshots in several of them share counts once.
    let elsewhere = pushed_to(store, &name(1), &[1, 2, 8], Some("a"), vec![]).await;
    pushed_to(store, &name(1), &[9], Some("b"), vec![]).await;
    let filter = StatsFilter { below: None, agent: Some("a".into()) };
    let found = store.stats_of(None, &filter).await.unwrap();
    let expected = [(name(0), root), (name(0), left), (name(1), elsewhere)];
    assert_eq!(found.snapshots.iter().map(|one| (one.repository.clone(), one.digest)).collect::<Vec<_>>(), expected);
    assert_eq!((&found.repository, &found.agent), (&None, &filter.agent));
    let both = snapshots(metadata, &[name(0), name(1)]).await;
    let chosen: Vec<_> = both.into_iter().filter(|(_, row)| expected.iter().any(|(_, digest)| *digest == row.digest)).collect();
    let (rows, mut seen) = (rows(metadata, &chosen).await, HashSet::new());
    assert_eq!(found.unique, chosen.iter().map(|(_, row)| reach(row.object, &rows, &mut seen).0).sum::<u64>());

    // A rebuild knows no agents: the first question reads them.
    let new = rig.over_memory(rig.fork().await).await;
    new.store.rebuild(&mut |_| ()).await.unwrap();
    let filter = StatsFilter { below: None, agent: Some("b".into()) };
    assert_eq!(new.metadata.unread_agents(name(0), 0, 10).await.unwrap().len(), 5);
    for _ in 0..2 {
        let found: HashSet<Digest> =
            new.store.stats_of(Some(&name(0)), &filter).await.unwrap().snapshots.iter().map(|one| one.digest).collect();
        assert_eq!(found, HashSet::from([right, end]));
        assert!(new.metadata.unread_agents(name(0), 0, 10).await.unwrap().is_empty(), "they are read once");
    }
}

#[tokio::test]
async fn snapshots_whose_agent_cannot_be_read_now_are_not_left_out_of_an_answer() {
    let rig = Rig::new(Backend::SqliteDisk).await;
    let snapshot = pushed(&rig.store, &[1, 2], Some("a"), vec![]).await;
    // As a version before agents would have committed it.
    rig.sql("UPDATE manifests SET agent = NULL");
    let say = |moment: Moment| -> BoxFuture<'static, object_store::Result<()>> {
        Box::pin(async move {
            let denied = Box::new(std::io::Error::from(std::io::ErrorKind::PermissionDenied));
            if moment == Moment::Get { Err(object_store::Error::Generic { store: "test", source: denied }) } else { Ok(()) }
        })
    };
    let store = Store::new(watched(Arc::clone(&rig.packs), Arc::new(say)), Arc::clone(&rig.metadata), rig.options());
    let filter = StatsFilter { below: None, agent: Some("a".into()) };
    let refused = store.stats_of(Some(&name(0)), &filter).await.unwrap_err();
    assert!(matches!(refused, Error::NotPermitted { .. }), "{refused}");
    let found = rig.store.stats_of(Some(&name(0)), &filter).await.unwrap();
    assert_eq!(found.snapshots.iter().map(|one| one.digest).collect::<Vec<_>>(), [snapshot]);
}
