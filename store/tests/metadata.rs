//! Behaviour suite of [`Metadata`]: random transactions against a model in memory. Every implementation is added to
//! [`backends`]; where two differ, one of them is wrong.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod common;

use common::{repository, snapshot, tag};
use pfr_schema::api::TagState;
use pfr_schema::codec::Codec;
use pfr_schema::container::Container;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, ErrorCode, Kind, Limits};
use pfr_store::{
    Clock, Commit, Metadata, NewContainer, NewFrame, PackSizes, PostgresMetadata, PostgresOptions, PushId, SqliteMetadata, TagMove,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const LEASE: Duration = Duration::from_secs(60);

async fn backends(clock: Clock, dir: &std::path::Path) -> Vec<(&'static str, Arc<dyn Metadata>)> {
    vec![
        ("sqlite in memory", Arc::new(SqliteMetadata::open_in_memory(clock.clone()).await.unwrap())),
        ("sqlite on disk", Arc::new(SqliteMetadata::open(&dir.join("metadata.sqlite"), clock.clone()).await.unwrap())),
        ("postgres", Arc::new(postgres(clock).await)),
    ]
}

/// An empty database: the first one of this thread, emptied.
async fn postgres(clock: Clock) -> PostgresMetadata {
    thread_local!(static URL: std::cell::OnceCell<String> = const { std::cell::OnceCell::new() });
    let url = URL.with(|url| url.get_or_init(pfr_rig::postgres::database).clone());
    let metadata = PostgresMetadata::connect(&url, PostgresOptions { max_connections: 4, clock: Some(clock) }).await.unwrap();
    pfr_rig::postgres::empty(&url, "_sqlx_migrations");
    metadata
}

#[derive(Clone, Debug)]
enum Op {
    OpenPush(usize),
    /// Upload the frames of a snapshot that the mask picks.
    Upload {
        push: usize,
        snapshot: usize,
        mask: u32,
    },
    Missing {
        push: usize,
        snapshot: usize,
    },
    Commit {
        push: usize,
        snapshot: usize,
        tag: Option<usize>,
        expected: Option<usize>,
    },
    PutTags {
        snapshot: usize,
        tags: Vec<usize>,
        expected: Option<usize>,
    },
    DeleteTag {
        tag: usize,
        expected: Option<usize>,
    },
    DeleteSnapshot(usize),
    Abort(usize),
    Wait(u64),
}

const SNAPSHOTS: usize = 5;
const TAGS: usize = 3;

fn op() -> impl Strategy<Value = Op> {
    let push = 0..3_usize;
    let snap = 0..SNAPSHOTS;
    let expected = proptest::option::of(0..SNAPSHOTS + 1);
    prop_oneof![
        2 => push.clone().prop_map(Op::OpenPush),
        6 => (push.clone(), snap.clone(), prop_oneof![Just(u32::MAX), any::<u32>()]).prop_map(|(push, snapshot, mask)| Op::Upload { push, snapshot, mask }),
        2 => (push.clone(), snap.clone()).prop_map(|(push, snapshot)| Op::Missing { push, snapshot }),
        5 => (push.clone(), snap.clone(), proptest::option::of(0..TAGS), expected.clone())
            .prop_map(|(push, snapshot, tag, expected)| Op::Commit { push, snapshot, tag, expected: expected.filter(|_| tag.is_some()) }),
        2 => (snap.clone(), proptest::collection::vec(0..TAGS, 1..3), expected.clone())
            .prop_map(|(snapshot, tags, expected)| Op::PutTags { snapshot, tags, expected }),
        2 => (0..TAGS, expected).prop_map(|(tag, expected)| Op::DeleteTag { tag, expected }),
        1 => snap.prop_map(Op::DeleteSnapshot),
        1 => push.prop_map(Op::Abort),
        1 => (1..90_u64).prop_map(Op::Wait),
    ]
}

/// A blob of the universe: digest, kind, raw length, what it lists.
struct Blob {
    digest: Digest,
    kind: Kind,
    len: u64,
    container: Option<NewContainer>,
}

struct Universe(Vec<Vec<Blob>>);

impl Universe {
    /// Snapshots that share pages, runs and configurations.
    fn new() -> Self {
        let lists: [&[u64]; SNAPSHOTS] = [&[1, 2], &[1, 2, 3], &[3], &[2, 1], &[1, 1, 4]];
        Self(
            lists
                .iter()
                .map(|numbers| {
                    let s = snapshot(numbers, vec![]);
                    let pages =
                        s.pages.iter().map(|p| Blob { digest: Digest::sha256(p), kind: Kind::Blob, len: p.len() as u64, container: None });
                    let documents = s.documents().into_iter().map(|d| {
                        let container = Container::parse(d.kind, &d.bytes, &Limits::default()).unwrap();
                        let container = container.map(|c| NewContainer { children: c.children(), shape: c.shape() });
                        Blob { digest: d.digest, kind: d.kind, len: d.bytes.len() as u64, container }
                    });
                    pages.chain(documents).collect()
                })
                .collect(),
        )
    }

    fn manifest(&self, snapshot: usize) -> Digest {
        self.0[snapshot].last().unwrap().digest
    }

    fn state(&self, expected: Option<usize>) -> Option<TagState> {
        expected.map(|i| if i == SNAPSHOTS { TagState::Absent } else { TagState::At(self.manifest(i)) })
    }
}

#[derive(Default)]
struct Model {
    now: u64,
    pushes: BTreeMap<usize, (PushId, u64)>,
    /// Digest → kind, children (each once).
    objects: HashMap<Digest, (Kind, BTreeSet<Digest>)>,
    snapshots: BTreeSet<Digest>,
    tags: BTreeMap<usize, Digest>,
}

impl Model {
    fn refs(&self, digest: &Digest) -> u64 {
        let containers = self.objects.values().filter(|(_, children)| children.contains(digest)).count();
        let names = usize::from(self.snapshots.contains(digest)) + self.tags.values().filter(|d| *d == digest).count();
        (containers + names) as u64
    }

    /// The session's id if it is alive; renews as the store does.
    fn alive(&mut self, push: usize, always: bool) -> Result<PushId, ErrorCode> {
        let (now, lease) = (self.now, LEASE.as_millis() as u64);
        let (id, expires) = self.pushes.get_mut(&push).filter(|(_, expires)| *expires >= now).ok_or(ErrorCode::PushUnknown)?;
        if always || *expires < now + lease / 2 {
            *expires = now + lease;
        }
        Ok(id.clone())
    }

    fn tag_state(&self, tag: usize) -> TagState {
        self.tags.get(&tag).map_or(TagState::Absent, |d| TagState::At(*d))
    }
}

fn frames_of(blobs: &[Blob], mask: u32) -> Vec<(usize, NewFrame)> {
    let picked = blobs.iter().enumerate().filter(|(i, _)| mask >> (i % 32) & 1 == 1);
    picked
        .map(|(i, b)| {
            let header = Header { codec: Codec::Raw, kind: b.kind, digest: b.digest, raw_len: b.len, stored_len: b.len };
            (i, NewFrame { header, offset: 8 + i as u64, container: b.container.clone() })
        })
        .collect()
}

async fn run(metadata: &dyn Metadata, ops: &[Op], clock: &AtomicU64) {
    let universe = Universe::new();
    let mut model = Model { now: clock.load(Ordering::SeqCst), ..Model::default() };
    for (step, op) in ops.iter().enumerate() {
        let found = apply(metadata, op, &universe, &mut model, clock, step).await;
        if let Err((expected, found)) = found {
            panic!("step {step}, {op:?}: expected {expected}, found {found}");
        }
        check(metadata, &model, &universe).await;
    }
}

type Outcome = Result<(), (String, String)>;

fn compare<T: std::fmt::Debug>(expected: Result<(), ErrorCode>, found: pfr_store::Result<T>) -> Outcome {
    match (&expected, &found) {
        (Ok(()), Ok(_)) => Ok(()),
        (Err(code), Err(error)) if error.code() == *code => Ok(()),
        _ => Err((format!("{expected:?}"), format!("{found:?}"))),
    }
}

async fn apply(metadata: &dyn Metadata, op: &Op, universe: &Universe, model: &mut Model, clock: &AtomicU64, step: usize) -> Outcome {
    match op {
        Op::OpenPush(push) => {
            let id = PushId(format!("push-{step}"));
            model.pushes.insert(*push, (id.clone(), model.now + LEASE.as_millis() as u64));
            compare(Ok(()), metadata.open_push(id, repository(), LEASE).await)
        }
        Op::Upload { push, snapshot, mask } => {
            let frames = frames_of(&universe.0[*snapshot], *mask);
            let pack = metadata.begin_pack(format!("pack-{step}"), LEASE).await.unwrap();
            let id = model.pushes.get(push).map_or(PushId("none".into()), |(id, _)| id.clone());
            let expected = upload(model, *push, &universe.0[*snapshot], &frames);
            let found = metadata.finish_pack(id, pack, PackSizes { bytes: 1000, frame_bytes: 900 }, frames.into_iter().map(|(_, f)| f).collect(), LEASE).await;
            match (expected, found) {
                (Ok(new), Ok(stored)) if stored.new == new => Ok(()),
                (Err(code), Err(error)) if error.code() == code => Ok(()),
                (expected, found) => Err((format!("{expected:?}"), format!("{found:?}"))),
            }
        }
        Op::Missing { push, snapshot } => {
            let blobs = &universe.0[*snapshot];
            let wanted = blobs.iter().map(|b| (b.digest, b.kind)).collect();
            let id = model.pushes.get(push).map_or(PushId("none".into()), |(id, _)| id.clone());
            let found = metadata.missing(id, wanted, LEASE).await;
            match model.alive(*push, false) {
                Err(code) => compare(Err(code), found),
                Ok(_) => {
                    let lacking = |b: &Blob| !model.objects.get(&b.digest).is_some_and(|(kind, _)| kind.satisfies(b.kind));
                    let expected: Vec<usize> = (0..blobs.len()).filter(|i| lacking(&blobs[*i])).collect();
                    if found.as_ref().is_ok_and(|f| *f == expected) { Ok(()) } else { Err((format!("{expected:?}"), format!("{found:?}"))) }
                }
            }
        }
        Op::Commit { push, snapshot, tag: tag_number, expected } => {
            let manifest = universe.manifest(*snapshot);
            let move_tag = tag_number.map(|t| TagMove { tag: tag(&format!("t{t}")), expected: universe.state(*expected) });
            let id = model.pushes.get(push).map_or(PushId("none".into()), |(id, _)| id.clone());
            let commit = Commit { manifest, parents: vec![], artifact_type: None, subject: None, tag: move_tag.clone() };
            let found = metadata.commit(id, commit).await;
            let outcome = (|| {
                let now = model.now;
                model.pushes.get(push).filter(|(_, expires)| *expires >= now).ok_or(ErrorCode::PushUnknown)?;
                model.objects.get(&manifest).filter(|(kind, _)| *kind == Kind::Manifest).ok_or(ErrorCode::BlobUnknown)?;
                if let (Some(t), Some(state)) = (tag_number, universe.state(*expected))
                    && model.tag_state(*t) != state
                {
                    return Err(ErrorCode::TagMoved);
                }
                model.snapshots.insert(manifest);
                if let Some(t) = tag_number {
                    model.tags.insert(*t, manifest);
                }
                model.pushes.remove(push);
                Ok(())
            })();
            compare(outcome, found)
        }
        Op::PutTags { snapshot, tags, expected } => {
            let manifest = universe.manifest(*snapshot);
            let moves = tags.iter().map(|t| TagMove { tag: tag(&format!("t{t}")), expected: universe.state(*expected) }).collect();
            let found = metadata.put_tags(repository(), manifest, moves).await;
            let outcome = visible(model).and_then(|()| {
                model.snapshots.get(&manifest).ok_or(ErrorCode::SnapshotUnknown)?;
                let mut after = model.tags.clone();
                for t in tags {
                    let state = after.get(t).map_or(TagState::Absent, |d| TagState::At(*d));
                    if universe.state(*expected).is_some_and(|e| e != state) {
                        return Err(ErrorCode::TagMoved);
                    }
                    after.insert(*t, manifest);
                }
                model.tags = after;
                Ok(())
            });
            compare(outcome, found)
        }
        Op::DeleteTag { tag: t, expected } => {
            let found = metadata.delete_tag(repository(), tag(&format!("t{t}")), universe.state(*expected)).await;
            let outcome = visible(model).and_then(|()| {
                if universe.state(*expected).is_some_and(|e| e != model.tag_state(*t)) {
                    return Err(ErrorCode::TagMoved);
                }
                model.tags.remove(t).map(|_| ()).ok_or(ErrorCode::TagUnknown)
            });
            compare(outcome, found)
        }
        Op::DeleteSnapshot(snapshot) => {
            let manifest = universe.manifest(*snapshot);
            let found = metadata.delete_snapshot(repository(), manifest).await;
            let outcome = visible(model).and_then(|()| {
                if !model.snapshots.remove(&manifest) {
                    return Err(ErrorCode::SnapshotUnknown);
                }
                model.tags.retain(|_, d| *d != manifest);
                Ok(())
            });
            compare(outcome, found)
        }
        Op::Abort(push) => {
            let id = model.pushes.remove(push).map_or(PushId("none".into()), |(id, _)| id);
            compare(Ok(()), metadata.close_push(id).await)
        }
        Op::Wait(seconds) => {
            model.now = clock.fetch_add(seconds * 1000, Ordering::SeqCst) + seconds * 1000;
            Ok(())
        }
    }
}

fn visible(model: &Model) -> Result<(), ErrorCode> {
    if model.snapshots.is_empty() { Err(ErrorCode::RepositoryUnknown) } else { Ok(()) }
}

/// What an upload should do: the number of new blobs.
fn upload(model: &mut Model, push: usize, blobs: &[Blob], frames: &[(usize, NewFrame)]) -> Result<u64, ErrorCode> {
    let before = model.pushes.get(&push).cloned();
    model.alive(push, true)?;
    let mut after = model.objects.clone();
    let mut new = 0;
    for (i, _) in frames {
        let blob = &blobs[*i];
        after.entry(blob.digest).or_insert_with(|| {
            new += 1;
            (Kind::Blob, BTreeSet::new())
        });
        if let Some(container) = &blob.container
            && after[&blob.digest].0 == Kind::Blob
        {
            if container.children.iter().any(|c| !after.get(&c.digest).is_some_and(|(kind, _)| kind.satisfies(c.kind))) {
                // All or nothing: the lease is not renewed either.
                if let Some(before) = before {
                    model.pushes.insert(push, before);
                }
                return Err(ErrorCode::MissingBlobs);
            }
            after.insert(blob.digest, (blob.kind, container.children.iter().map(|c| c.digest).collect()));
        }
    }
    model.objects = after;
    Ok(new)
}

/// The store's state equals the model's: objects, kinds, references, children, tags, snapshots.
async fn check(metadata: &dyn Metadata, model: &Model, universe: &Universe) {
    let digests: Vec<Digest> = universe.0.iter().flatten().map(|b| b.digest).collect::<BTreeSet<_>>().into_iter().collect();
    let rows = metadata.find(digests.clone()).await.unwrap();
    let ids: HashMap<i64, Digest> = rows.iter().flatten().map(|r| (r.id, r.digest)).collect();
    for (digest, row) in digests.iter().zip(&rows) {
        assert_eq!(row.is_some(), model.objects.contains_key(digest), "{digest} is stored");
        if let (Some(row), Some((kind, children))) = (row, model.objects.get(digest)) {
            assert_eq!(row.kind, *kind);
            assert_eq!(row.refs, model.refs(digest), "references of {kind:?} {digest}");
            assert_eq!(&row.children.iter().map(|id| ids[id]).collect::<BTreeSet<_>>(), children);
        }
    }
    let tags = metadata.tags(repository(), None, 100).await;
    let snapshots = metadata.snapshots(repository(), None, 100).await;
    if model.snapshots.is_empty() {
        assert_eq!(tags.unwrap_err().code(), ErrorCode::RepositoryUnknown);
        assert!(metadata.repositories(None, 10).await.unwrap().rows.is_empty());
        return;
    }
    let found: BTreeMap<String, Digest> = tags.unwrap().rows.into_iter().map(|t| (t.name.to_string(), t.digest)).collect();
    let expected: BTreeMap<String, Digest> = model.tags.iter().map(|(t, d)| (format!("t{t}"), *d)).collect();
    assert_eq!(found, expected);
    assert_eq!(snapshots.unwrap().rows.iter().map(|s| s.digest).collect::<BTreeSet<_>>(), model.snapshots);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_transactions_leaves_the_state_that_the_model_has(ops in proptest::collection::vec(op(), 1..60)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let now = Arc::new(AtomicU64::new(1_000_000));
            let clock = { let now = Arc::clone(&now); Clock::new(move || now.load(Ordering::SeqCst)) };
            for (name, backend) in backends(clock, dir.path()).await {
                println!("{name}");
                run(&*backend, &ops, &now).await;
            }
        });
    }
}

#[tokio::test]
async fn lists_come_in_pages_that_join_without_gaps() {
    let dir = tempfile::tempdir().unwrap();
    for (name, metadata) in backends(Clock::system(), dir.path()).await {
        let universe = Universe::new();
        let pack = metadata.begin_pack("pack".into(), LEASE).await.unwrap();
        let push = PushId("p".into());
        metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
        let frames = universe.0.iter().flat_map(|blobs| frames_of(blobs, u32::MAX)).map(|(_, f)| f).collect();
        metadata.finish_pack(push, pack, PackSizes { bytes: 1000, frame_bytes: 900 }, frames, LEASE).await.unwrap();
        for snapshot in 0..SNAPSHOTS {
            let push = PushId(format!("p{snapshot}"));
            metadata.open_push(push.clone(), repository(), LEASE).await.unwrap();
            let commit = Commit {
                manifest: universe.manifest(snapshot),
                parents: vec![],
                artifact_type: None,
                subject: None,
                tag: Some(TagMove { tag: tag(&format!("tag-{snapshot}")), expected: None }),
            };
            metadata.commit(push, commit).await.unwrap();
        }
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = metadata.snapshots(repository(), after, 2).await.unwrap();
            all.extend(page.rows.into_iter().map(|r| r.digest));
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let newest_first: Vec<Digest> = (0..SNAPSHOTS).rev().map(|i| universe.manifest(i)).collect();
        assert_eq!(all, newest_first, "{name}");
        let first = metadata.tags(repository(), None, 3).await.unwrap();
        assert_eq!(first.next.as_deref(), Some("tag-2"), "{name}");
        assert_eq!(metadata.tags(repository(), first.next, 3).await.unwrap().rows.len(), 2, "{name}");
        assert_eq!(metadata.snapshots(repository(), Some("x".into()), 2).await.unwrap_err().code(), ErrorCode::InvalidRequest);
    }
}
