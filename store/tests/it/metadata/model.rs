//! The model: the state of the tables after any sequence of transactions, in plain collections.

use crate::common::{repository, snapshot};
use pfr_schema::api::TagState;
use pfr_schema::codec::Codec;
use pfr_schema::container::Container;
use pfr_schema::frame::Header;
use pfr_schema::{Digest, ErrorCode, Kind, Limits};
use pfr_store::{AuditFilter, Commit, Health, Metadata, NewContainer, NewFrame, PackSizes, PushId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

pub const LEASE: Duration = Duration::from_secs(60);
pub const LEASE_MS: u64 = 60_000;
pub const SNAPSHOTS: usize = 5;
pub const TAGS: usize = 3;

/// A blob of the universe: digest, kind, raw length, what it lists.
pub struct Blob {
    pub digest: Digest,
    pub kind: Kind,
    pub len: u64,
    pub container: Option<NewContainer>,
}

/// All snapshots that ever occur, children first.
pub struct Universe(pub Vec<Vec<Blob>>);

impl Universe {
    /// Snapshots that share pages, runs and configurations.
    pub fn new() -> Self {
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

    pub fn manifest(&self, snapshot: usize) -> Digest {
        self.0[snapshot].last().unwrap().digest
    }

    pub fn state(&self, expected: Option<usize>) -> Option<TagState> {
        expected.map(|i| if i == SNAPSHOTS { TagState::Absent } else { TagState::At(self.manifest(i)) })
    }

    pub fn digests(&self) -> Vec<Digest> {
        self.0.iter().flatten().map(|b| b.digest).collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// The frames that `mask` picks, as they would lie in a pack, and its sizes.
pub fn frames_of(blobs: &[Blob], mask: u32) -> (Vec<(usize, NewFrame)>, PackSizes) {
    let mut offset = 8;
    let picked = blobs.iter().enumerate().filter(|(i, _)| mask >> (i % 32) & 1 == 1);
    let frames = picked
        .map(|(i, b)| {
            let header = Header { codec: Codec::Raw, kind: b.kind, digest: b.digest, raw_len: b.len, stored_len: b.len };
            let frame = NewFrame { header, offset, container: b.container.clone() };
            offset += header.frame_len();
            (i, frame)
        })
        .collect();
    (frames, PackSizes { bytes: offset + 100, frame_bytes: offset - 8 })
}

#[derive(Clone, Debug)]
pub struct Object {
    pub kind: Kind,
    pub children: BTreeSet<Digest>,
    /// Which sessions lease it. 0: none; N: session N alone; -N: several, none newer than N.
    pub lessee: i64,
    pub health: Health,
}

#[derive(Default)]
pub struct Model {
    pub now: u64,
    /// The newest session of each pusher, and its number.
    pub pushes: BTreeMap<usize, (PushId, i64)>,
    /// Sessions that were neither committed nor aborted, by number, and when they expire.
    pub open: BTreeMap<i64, u64>,
    pub opened: i64,
    /// Sessions that committed, until their lease ends: what they committed.
    pub committed: Vec<(PushId, u64, Commit)>,
    pub objects: HashMap<Digest, Object>,
    pub snapshots: BTreeSet<Digest>,
    pub tags: BTreeMap<usize, Digest>,
    /// Blobs and snapshots that there may be.
    pub quota: Option<(u64, u64)>,
    /// The times of the records of the audit log.
    pub noted: Vec<u64>,
}

impl Model {
    /// A change that may be noted in the audit log.
    pub fn changed(&mut self, is_noted: bool) {
        if is_noted {
            self.noted.push(self.now);
        }
    }

    pub fn refs(&self, digest: &Digest) -> u64 {
        let containers = self.objects.values().filter(|o| o.children.contains(digest)).count();
        let names = usize::from(self.snapshots.contains(digest)) + self.tags.values().filter(|d| *d == digest).count();
        (containers + names) as u64
    }

    pub fn open_push(&mut self, push: usize, id: PushId) {
        self.opened += 1;
        self.pushes.insert(push, (id, self.opened));
        self.open.insert(self.opened, self.now + LEASE_MS);
    }

    pub fn abort(&mut self, push: usize) -> Option<PushId> {
        let (id, number) = self.pushes.remove(&push)?;
        self.open.remove(&number);
        Some(id)
    }

    fn expires(&self, push: usize) -> Result<(PushId, i64, u64), ErrorCode> {
        let (id, number) = self.pushes.get(&push).ok_or(ErrorCode::PushUnknown)?;
        let expires = self.open.get(number).copied().filter(|expires| *expires >= self.now).ok_or(ErrorCode::PushUnknown)?;
        Ok((id.clone(), *number, expires))
    }

    /// The number of the session if it is alive; renews as the store does.
    pub fn alive(&mut self, push: usize, always: bool) -> Result<i64, ErrorCode> {
        let (_, number, expires) = self.expires(push)?;
        if always || expires < self.now + LEASE_MS / 2 {
            self.open.insert(number, self.now + LEASE_MS);
        }
        Ok(number)
    }

    /// Whether a live session leases an object with this `lessee`.
    fn leased(&self, lessee: i64) -> bool {
        let live = |(number, expires): (&i64, &u64)| *expires >= self.now && (*number == lessee || *number <= -lessee);
        lessee != 0 && self.open.iter().any(live)
    }

    /// The `lessee` of an object once this session leases it too.
    fn lessee_with(&self, lessee: i64, session: i64) -> i64 {
        if lessee == session || lessee <= -session {
            lessee
        } else if lessee.abs() > session || self.leased(lessee) {
            -lessee.abs().max(session)
        } else {
            session
        }
    }

    /// What nothing holds and no lease covers.
    pub fn free(&self) -> BTreeSet<Digest> {
        self.objects.iter().filter(|(digest, object)| self.refs(digest) == 0 && !self.leased(object.lessee)).map(|(d, _)| *d).collect()
    }

    pub fn tag_state(&self, tag: usize) -> TagState {
        self.tags.get(&tag).map_or(TagState::Absent, |d| TagState::At(*d))
    }

    pub fn visible(&self) -> Result<(), ErrorCode> {
        if self.snapshots.is_empty() { Err(ErrorCode::RepositoryUnknown) } else { Ok(()) }
    }

    pub fn has_snapshot(&self, manifest: &Digest) -> Result<(), ErrorCode> {
        self.visible()?;
        self.snapshots.get(manifest).map(|_| ()).ok_or(ErrorCode::SnapshotUnknown)
    }

    /// Whether it is stored, as that kind, and well.
    pub fn has(&self, digest: &Digest, kind: Kind) -> bool {
        self.objects.get(digest).is_some_and(|o| o.kind.satisfies(kind) && o.health == Health::Complete)
    }

    /// What an upload should do: the number of new blobs. All or nothing.
    pub fn upload(&mut self, push: usize, blobs: &[Blob], frames: &[(usize, NewFrame)]) -> Result<u64, ErrorCode> {
        let (open, objects) = (self.open.clone(), self.objects.clone());
        let done = self.try_upload(push, blobs, frames).and_then(|new| {
            let is_over = new > 0 && self.quota.is_some_and(|(limit, _)| self.objects.len() as u64 > limit);
            if is_over { Err(ErrorCode::QuotaExceeded) } else { Ok(new) }
        });
        if done.is_err() {
            (self.open, self.objects) = (open, objects);
        }
        done
    }

    fn try_upload(&mut self, push: usize, blobs: &[Blob], frames: &[(usize, NewFrame)]) -> Result<u64, ErrorCode> {
        let session = self.alive(push, true)?;
        let mut new = 0;
        for (i, _) in frames {
            let blob = &blobs[*i];
            let lessee = self.lessee_with(self.objects.get(&blob.digest).map_or(0, |object| object.lessee), session);
            let object = self.objects.entry(blob.digest).or_insert_with(|| {
                new += 1;
                Object { kind: Kind::Blob, children: BTreeSet::new(), lessee, health: Health::Complete }
            });
            object.lessee = lessee;
            if object.health == Health::Damaged {
                object.health = if object.kind.is_container() { Health::Incomplete } else { Health::Complete };
            }
            let known = object.clone();
            if let Some(container) = &blob.container
                && (known.kind == Kind::Blob || known.health != Health::Complete)
            {
                if container.children.iter().any(|c| !self.has(&c.digest, c.kind)) {
                    return Err(ErrorCode::MissingBlobs);
                }
                let children = container.children.iter().map(|c| c.digest).collect();
                self.objects.insert(blob.digest, Object { kind: blob.kind, children, health: Health::Complete, ..known });
            }
        }
        Ok(new)
    }

    /// Positions of what is missing; leases the rest.
    pub fn missing(&mut self, blobs: &[Blob], session: i64) -> Vec<usize> {
        let lacking: Vec<usize> = (0..blobs.len()).filter(|i| !self.has(&blobs[*i].digest, blobs[*i].kind)).collect();
        for (i, blob) in blobs.iter().enumerate() {
            if !lacking.contains(&i)
                && let Some(lessee) = self.objects.get(&blob.digest).map(|object| self.lessee_with(object.lessee, session))
                && let Some(object) = self.objects.get_mut(&blob.digest)
            {
                object.lessee = lessee;
            }
        }
        lacking
    }

    pub fn commit(&mut self, push: usize, commit: &Commit, tag: Option<usize>) -> Result<(), ErrorCode> {
        let (id, _, expires) = self.expires(push)?;
        if !self.has(&commit.manifest, Kind::Manifest) {
            return Err(ErrorCode::BlobUnknown);
        }
        if let (Some(t), Some(state)) = (tag, commit.tag.as_ref().and_then(|t| t.expected))
            && self.tag_state(t) != state
        {
            return Err(ErrorCode::TagMoved);
        }
        if let Some((objects, snapshots)) = self.quota.filter(|_| !self.snapshots.contains(&commit.manifest))
            && (self.objects.len() as u64 > objects || self.snapshots.len() as u64 >= snapshots)
        {
            return Err(ErrorCode::QuotaExceeded);
        }
        self.changed(commit.audit.is_some());
        self.snapshots.insert(commit.manifest);
        if let Some(t) = tag {
            self.tags.insert(t, commit.manifest);
        }
        self.abort(push);
        self.committed.push((id, expires, commit.clone()));
        Ok(())
    }

    /// What a committed session answers when it is asked for the same again, whatever became of the
    /// snapshot.
    pub fn commit_again(&self, which: usize) -> Result<(), ErrorCode> {
        let (_, expires, _) = &self.committed[which];
        if *expires >= self.now { Ok(()) } else { Err(ErrorCode::PushUnknown) }
    }

    /// Everything that snapshots and tags reach.
    pub fn reachable(&self) -> BTreeSet<Digest> {
        let mut found = BTreeSet::new();
        let mut queue: Vec<Digest> = self.snapshots.iter().copied().collect();
        while let Some(digest) = queue.pop() {
            if found.insert(digest) {
                queue.extend(self.objects.get(&digest).iter().flat_map(|o| o.children.iter().copied()));
            }
        }
        found
    }

    /// Removes what a collection deleted. Asserts that nothing that is held or leased was deleted,
    /// and that everything else was.
    pub fn collected(&mut self, gone: &BTreeSet<Digest>) {
        let mut left = gone.clone();
        while !left.is_empty() {
            let free: Vec<Digest> = left.intersection(&self.free()).copied().collect();
            assert!(!free.is_empty(), "collection took {left:?}, which something holds or a lease covers");
            for digest in free {
                self.objects.remove(&digest);
                left.remove(&digest);
            }
        }
        assert!(self.free().is_empty(), "collection left {:?}, which nothing holds and no lease covers", self.free());
    }

    /// Nodes that reach `digest`.
    fn ancestors(&self, digest: &Digest) -> BTreeSet<Digest> {
        let (mut found, mut queue) = (BTreeSet::new(), vec![*digest]);
        while let Some(next) = queue.pop() {
            for (parent, _) in self.objects.iter().filter(|(_, o)| o.children.contains(&next)) {
                if found.insert(*parent) {
                    queue.push(*parent);
                }
            }
        }
        found
    }

    pub fn quarantine(&mut self, digest: &Digest) {
        for parent in self.ancestors(digest) {
            if let Some(object) = self.objects.get_mut(&parent).filter(|o| o.health == Health::Complete) {
                object.health = Health::Incomplete;
            }
        }
        if let Some(object) = self.objects.get_mut(digest) {
            object.health = Health::Damaged;
        }
    }

    pub fn lift(&mut self, digest: &Digest) {
        if let Some(object) = self.objects.get_mut(digest).filter(|o| o.health == Health::Damaged) {
            object.health = if object.kind.is_container() { Health::Incomplete } else { Health::Complete };
        }
    }

    pub fn reassess(&mut self) -> u64 {
        let damaged: Vec<Digest> = self.objects.iter().filter(|(_, o)| o.health == Health::Damaged).map(|(d, _)| *d).collect();
        let reaching: BTreeSet<Digest> = damaged.iter().flat_map(|d| self.ancestors(d)).collect();
        let mut cleared = 0;
        for (digest, object) in &mut self.objects {
            if object.health == Health::Incomplete && !reaching.contains(digest) {
                object.health = Health::Complete;
                cleared += 1;
            }
        }
        cleared
    }

    /// The tables equal the model: objects, kinds, references, children, health, tags, snapshots;
    /// and they agree with themselves.
    pub async fn check(&self, metadata: &dyn Metadata, universe: &Universe) {
        let digests = universe.digests();
        let rows = metadata.find(digests.clone()).await.unwrap();
        let locations = metadata.locate(digests.clone()).await.unwrap();
        let ids: HashMap<i64, Digest> = rows.iter().flatten().map(|r| (r.id, r.digest)).collect();
        for ((digest, row), location) in digests.iter().zip(&rows).zip(&locations) {
            assert_eq!(row.is_some(), self.objects.contains_key(digest), "{digest} is stored");
            if let (Some(row), Some(object)) = (row, self.objects.get(digest)) {
                assert_eq!(row.kind, object.kind);
                assert_eq!(row.refs, self.refs(digest), "references of {:?} {digest}", object.kind);
                assert_eq!(row.children.iter().map(|id| ids[id]).collect::<BTreeSet<_>>(), object.children);
                assert_eq!(location.as_ref().unwrap().health, object.health, "health of {:?} {digest}", object.kind);
            }
        }
        let audit = metadata.audit(false).await.unwrap();
        assert_eq!(audit.wrong, 0, "{:?}", audit.discrepancies);
        let filter = AuditFilter { with_registry: true, oldest_first: true, ..AuditFilter::default() };
        let noted = metadata.audit_records(filter, None, 1000).await.unwrap().rows;
        assert_eq!(noted.iter().map(|record| record.at).collect::<Vec<_>>(), self.noted, "{noted:?}");
        let tags = metadata.tags(repository(), None, 100).await;
        let snapshots = metadata.snapshots(repository(), None, 100).await;
        if self.snapshots.is_empty() {
            assert_eq!(tags.unwrap_err().code(), ErrorCode::RepositoryUnknown);
            assert!(metadata.repositories(None, 10).await.unwrap().rows.is_empty());
            return;
        }
        let found: BTreeMap<String, Digest> = tags.unwrap().rows.into_iter().map(|t| (t.name.to_string(), t.digest)).collect();
        let expected: BTreeMap<String, Digest> = self.tags.iter().map(|(t, d)| (format!("t{t}"), *d)).collect();
        assert_eq!(found, expected);
        assert_eq!(snapshots.unwrap().rows.iter().map(|s| s.digest).collect::<BTreeSet<_>>(), self.snapshots);
    }
}
