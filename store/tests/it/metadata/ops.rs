//! Random transactions, applied to an implementation and to the model.

use super::model::{Blob, LEASE, LEASE_MS, Model, SNAPSHOTS, TAGS, Universe, frames_of};
use super::transcript;
use crate::common::{repository, tag};
use pfr_schema::api::{TagState, snapshot_etag};
use pfr_schema::{Digest, ErrorCode, Kind};
use pfr_store::{
    AuditEntry, AuditRecord, Commit, Damage, Error, GcRun, GcTrigger, JournalRow, Metadata, Moved, NameChange, Once, PackId, PackSizes,
    PackState, Pin, PushId, QuotaLimits, TagMove,
};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Clone, Debug)]
pub enum Op {
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
    /// The answer was lost: the same commit of the same session again.
    CommitAgain(usize),
    PutTags {
        snapshot: usize,
        tags: Vec<usize>,
        expected: Option<usize>,
    },
    DeleteTag {
        tag: usize,
        expected: Option<usize>,
    },
    /// Without a condition, or if it has its tags, or if it has others.
    DeleteSnapshot(usize, Option<bool>),
    Abort(usize),
    Wait(u64),
    /// Collect to the end, so many objects a transaction.
    Collect(usize),
    Compact,
    /// Delete the packs that were emptied at least so many seconds ago.
    DeletePacks(u64),
    Quarantine {
        snapshot: usize,
        blob: usize,
    },
    /// As plain blobs: what an attachment is that has the bytes of a node.
    UploadPlain {
        push: usize,
        snapshot: usize,
        mask: u32,
    },
    /// A quarantined blob is found good where it lies.
    Lift {
        snapshot: usize,
        blob: usize,
    },
    Reassess,
    Renew(usize),
    Touch(usize),
    Pin(usize, bool),
    /// Upload into a pack that collection gave up, or whose row is gone too.
    Late {
        push: usize,
        snapshot: usize,
        forgotten: bool,
    },
    /// The same with what compaction moves.
    LateCompaction {
        forgotten: bool,
    },
    /// Record what is not in the journal yet, at most so many changes.
    Journal(usize),
    ForgetJournal(usize),
    GcRun {
        id: u8,
        finished: bool,
    },
    /// Blobs and snapshots that there may be; none for no quota.
    SetQuota(Option<(u64, u64)>),
    /// Forget what the audit log noted so many seconds ago.
    TrimAuditLog(u64),
}

pub fn op() -> impl Strategy<Value = Op> {
    let (push, push_again) = (0..3_usize, 0..3_usize);
    let snap = 0..SNAPSHOTS;
    let expected = proptest::option::of(0..SNAPSHOTS + 1);
    prop_oneof![
        2 => push.clone().prop_map(Op::OpenPush),
        6 => (push.clone(), snap.clone(), prop_oneof![Just(u32::MAX), any::<u32>()]).prop_map(|(push, snapshot, mask)| Op::Upload { push, snapshot, mask }),
        2 => (push.clone(), snap.clone()).prop_map(|(push, snapshot)| Op::Missing { push, snapshot }),
        5 => (push.clone(), snap.clone(), proptest::option::of(0..TAGS), expected.clone())
            .prop_map(|(push, snapshot, tag, expected)| Op::Commit { push, snapshot, tag, expected: expected.filter(|_| tag.is_some()) }),
        1 => any::<usize>().prop_map(Op::CommitAgain),
        2 => (snap.clone(), proptest::collection::vec(0..TAGS, 1..3), expected.clone())
            .prop_map(|(snapshot, tags, expected)| Op::PutTags { snapshot, tags, expected }),
        2 => (0..TAGS, expected).prop_map(|(tag, expected)| Op::DeleteTag { tag, expected }),
        2 => (snap.clone(), proptest::option::of(any::<bool>())).prop_map(|(snapshot, seen)| Op::DeleteSnapshot(snapshot, seen)),
        1 => push.clone().prop_map(Op::Abort),
        1 => push.clone().prop_map(Op::Renew),
        1 => snap.clone().prop_map(Op::Touch),
        1 => (snap.clone(), any::<bool>()).prop_map(|(snapshot, pinned)| Op::Pin(snapshot, pinned)),
        1 => (push, snap.clone(), any::<bool>()).prop_map(|(push, snapshot, forgotten)| Op::Late { push, snapshot, forgotten }),
        1 => any::<bool>().prop_map(|forgotten| Op::LateCompaction { forgotten }),
        1 => (1..5_usize).prop_map(Op::Journal),
        1 => any::<usize>().prop_map(Op::ForgetJournal),
        1 => (0..6_u8, any::<bool>()).prop_map(|(id, finished)| Op::GcRun { id, finished }),
        2 => proptest::option::of((5..60_u64, 1..7_u64)).prop_map(Op::SetQuota),
        1 => (0..120_u64).prop_map(Op::TrimAuditLog),
        2 => (1..90_u64).prop_map(Op::Wait),
        3 => (1..20_usize).prop_map(Op::Collect),
        1 => Just(Op::Compact),
        1 => (0..60_u64).prop_map(Op::DeletePacks),
        1 => (snap.clone(), 0..12_usize).prop_map(|(snapshot, blob)| Op::Quarantine { snapshot, blob }),
        1 => (push_again, snap.clone(), any::<u32>()).prop_map(|(push, snapshot, mask)| Op::UploadPlain { push, snapshot, mask }),
        1 => (snap, 0..12_usize).prop_map(|(snapshot, blob)| Op::Lift { snapshot, blob }),
        1 => Just(Op::Reassess),
    ]
}

/// Runs the operations, compares after each; at the end lets every lease end and expects what is
/// reachable and nothing else. Returns what the implementation said about everything now and then.
pub async fn run(metadata: &dyn Metadata, ops: &[Op], clock: &AtomicU64) -> Vec<String> {
    let mut said = Vec::new();
    let universe = Universe::new();
    let mut model = Model { now: clock.load(Ordering::SeqCst), ..Model::default() };
    for (step, op) in ops.iter().enumerate() {
        let found = apply(metadata, op, &universe, &mut model, clock, step).await;
        if let Err((expected, found)) = found {
            panic!("step {step}, {op:?}: expected {expected}, found {found}");
        }
        model.check(metadata, &universe).await;
        if step % 4 == 3 || step + 1 == ops.len() {
            said.push(transcript::of(metadata, &universe).await);
        }
    }
    model.now = clock.fetch_add(2 * LEASE_MS, Ordering::SeqCst) + 2 * LEASE_MS;
    collect(metadata, &universe, &mut model, 7).await;
    let left: BTreeSet<Digest> = model.objects.keys().copied().collect();
    assert_eq!(left, model.reachable(), "collection left garbage");
    delete_emptied(metadata, Duration::ZERO).await;
    model.check(metadata, &universe).await;
    assert!(metadata.candidates(1000).await.unwrap().is_empty(), "the queue is worked off");
    for pack in metadata.packs(None, 10_000).await.unwrap() {
        assert!(pack.state == PackState::Live && pack.live_bytes > 0, "{pack:?} should be gone");
    }
    said.push(transcript::of(metadata, &universe).await);
    said
}

type Outcome = Result<(), (String, String)>;

fn compare<T: std::fmt::Debug>(expected: Result<(), ErrorCode>, found: pfr_store::Result<T>) -> Outcome {
    match (&expected, &found) {
        (Ok(()), Ok(_)) => Ok(()),
        (Err(code), Err(error)) if error.code() == *code => Ok(()),
        _ => Err((format!("{expected:?}"), format!("{found:?}"))),
    }
}

fn same<T: std::fmt::Debug + PartialEq>(expected: &T, found: &T) -> Outcome {
    if expected == found { Ok(()) } else { Err((format!("{expected:?}"), format!("{found:?}"))) }
}

async fn collect(metadata: &dyn Metadata, universe: &Universe, model: &mut Model, budget: usize) {
    let mut deleted = 0;
    loop {
        let done = metadata.collect(budget).await.unwrap();
        // The children of the last node come on top.
        assert!(done.released + done.unclaimed <= budget as u64 + 16, "a step stays near its budget: {done:?}");
        deleted += done.released + done.unclaimed;
        if !done.more {
            break;
        }
    }
    let digests = universe.digests();
    let rows = metadata.find(digests.clone()).await.unwrap();
    let gone = digests.iter().zip(rows).filter(|(d, row)| row.is_none() && model.objects.contains_key(d)).map(|(d, _)| *d).collect();
    model.collected(&gone);
    assert_eq!(deleted, gone.len() as u64, "what collection says it deleted");
}

/// What the audit log says of a change; at every other step there is none.
fn entry(step: usize) -> Option<AuditEntry> {
    let token = step.is_multiple_of(3).then(|| "a token".to_owned());
    let record = AuditRecord { operation: format!("step {step}"), status: Some(201), token, ..AuditRecord::default() };
    let entry = AuditEntry { record, status_if_there: Some(200), of_registry: step.is_multiple_of(5), overrides: false };
    (!step.is_multiple_of(2)).then_some(entry)
}

/// Changes names, at every other step as a caller that repeats each request: the second time
/// changes nothing, and is not noted again.
async fn change(metadata: &dyn Metadata, change: NameChange, step: usize) -> pfr_store::Result<()> {
    if step.is_multiple_of(2) {
        return match change {
            NameChange::PutTags { snapshot, moves } => metadata.put_tags(repository(), snapshot, moves).await,
            NameChange::DeleteTag { tag, expected } => metadata.delete_tag(repository(), tag, expected).await,
            NameChange::DeleteSnapshot { snapshot, etag: None } => metadata.delete_snapshot(repository(), snapshot).await,
            NameChange::DeleteSnapshot { snapshot, etag: Some(etag) } => metadata.delete_snapshot_if(repository(), snapshot, etag).await,
        };
    }
    let once = |request: &str| Once { session: PushId(format!("change-{step}")), request: Digest::sha256(request.as_bytes()) };
    metadata.change_names(repository(), change.clone(), Some(once("this")), LEASE, entry(step), None).await?;
    let changes = metadata.unjournaled(usize::MAX).await.unwrap();
    metadata.change_names(repository(), change.clone(), Some(once("this")), LEASE, entry(step), None).await.unwrap();
    let other = metadata.change_names(repository(), change, Some(once("that")), LEASE, entry(step), None).await.unwrap_err();
    assert_eq!(other.code(), ErrorCode::InvalidRequest, "{other}");
    assert_eq!(metadata.unjournaled(usize::MAX).await.unwrap(), changes, "a repeated change is made once");
    Ok(())
}

async fn delete_emptied(metadata: &dyn Metadata, grace: Duration) {
    metadata.empty_packs(1000).await.unwrap();
    let emptied = metadata.emptied_packs(grace, 1000).await.unwrap();
    assert!(emptied.iter().all(|p| p.state == PackState::Emptied && p.live_bytes == 0));
    metadata.forget_packs(emptied.iter().map(|p| p.id).collect()).await.unwrap();
}

/// Copies what is alive in sparse packs into a new one, as the store does.
async fn compact(metadata: &dyn Metadata, key: String) {
    let sparse = metadata.claim_sparse_packs(10, Duration::from_secs(5)).await.unwrap();
    assert!(metadata.claim_sparse_packs(10, Duration::from_secs(5)).await.unwrap().is_empty(), "what is claimed is not claimed again");
    let (mut moved, mut offset) = (Vec::new(), 8);
    for pack in &sparse {
        assert!(pack.live_bytes * 2 < pack.frame_bytes);
        for object in metadata.pack_contents(pack.id).await.unwrap() {
            moved.push(Moved { object: object.object, from: pack.id, offset });
            offset += object.frame_len;
        }
    }
    if !moved.is_empty() {
        let pack = metadata.begin_pack(key, LEASE).await.unwrap();
        metadata.finish_compaction(pack, PackSizes { bytes: offset + 100, frame_bytes: offset - 8 }, moved).await.unwrap();
    }
}

/// A pack that collection gave up before it was finished; if `forgotten`, its row is gone too.
async fn given_up(metadata: &dyn Metadata, key: String, forgotten: bool) -> PackId {
    let pack = metadata.begin_pack(key, Duration::ZERO).await.unwrap();
    assert!(metadata.empty_packs(1000).await.unwrap().abandoned > 0);
    if forgotten {
        metadata.forget_packs(vec![pack]).await.unwrap();
    }
    pack
}

/// A lost pack is reported before any other error.
fn lost<T: std::fmt::Debug>(found: pfr_store::Result<T>) -> Outcome {
    match &found {
        Err(Error::PackLost(_)) => Ok(()),
        _ => Err(("a lost pack".into(), format!("{found:?}"))),
    }
}

pub async fn apply(metadata: &dyn Metadata, op: &Op, universe: &Universe, model: &mut Model, clock: &AtomicU64, step: usize) -> Outcome {
    let session = |model: &Model, push: &usize| model.pushes.get(push).map_or(PushId("none".into()), |(id, _)| id.clone());
    match op {
        Op::OpenPush(push) => {
            let id = PushId(format!("push-{step}"));
            model.open_push(*push, id.clone());
            compare(Ok(()), metadata.open_push(id, repository(), LEASE).await)
        }
        Op::Upload { push, snapshot, mask } => {
            let (frames, sizes) = frames_of(&universe.0[*snapshot], *mask);
            let pack = metadata.begin_pack(format!("pack-{step}"), LEASE).await.unwrap();
            let id = session(model, push);
            let expected = model.upload(*push, &universe.0[*snapshot], &frames);
            let found = metadata.finish_pack(id, pack, sizes, frames.into_iter().map(|(_, f)| f).collect(), LEASE).await;
            same(&expected, &found.map(|stored| stored.new).map_err(|e| e.code()))
        }
        Op::UploadPlain { push, snapshot, mask } => {
            let plain: Vec<Blob> =
                universe.0[*snapshot].iter().map(|b| Blob { kind: Kind::Blob, container: None, digest: b.digest, len: b.len }).collect();
            let (frames, sizes) = frames_of(&plain, *mask);
            let pack = metadata.begin_pack(format!("pack-{step}"), LEASE).await.unwrap();
            let id = session(model, push);
            let expected = model.upload(*push, &plain, &frames);
            let found = metadata.finish_pack(id, pack, sizes, frames.into_iter().map(|(_, f)| f).collect(), LEASE).await;
            same(&expected, &found.map(|stored| stored.new).map_err(|e| e.code()))
        }
        Op::Missing { push, snapshot } => {
            let blobs = &universe.0[*snapshot];
            let wanted = blobs.iter().map(|b| (b.digest, b.kind)).collect();
            let found = metadata.missing(session(model, push), wanted, LEASE).await;
            let expected = model.alive(*push, false).map(|session| model.missing(blobs, session));
            same(&expected, &found.map_err(|e| e.code()))
        }
        Op::Commit { push, snapshot, tag: tag_number, expected } => {
            let move_tag = tag_number.map(|t| TagMove { tag: tag(&format!("t{t}")), expected: universe.state(*expected) });
            let manifest = universe.manifest(*snapshot);
            let commit = Commit {
                manifest,
                parents: vec![],
                artifact_type: None,
                subject: None,
                tag: move_tag,
                pin: None,
                marks: vec![],
                agent: None,
                audit: entry(step),
                signed: None,
            };
            let found = metadata.commit(session(model, push), commit.clone()).await;
            compare(model.commit(*push, &commit, *tag_number), found)
        }
        Op::CommitAgain(which) => {
            if model.committed.is_empty() {
                return Ok(());
            }
            let which = which % model.committed.len();
            let (id, _, commit) = model.committed[which].clone();
            let tags = metadata.tags(repository(), None, 100).await.ok().map(|page| page.rows);
            compare(model.commit_again(which), metadata.commit(id.clone(), commit.clone()).await)?;
            assert_eq!(metadata.tags(repository(), None, 100).await.ok().map(|page| page.rows), tags, "a repeated commit moves nothing");
            // Another commit of the same session is not the same.
            let other = Commit { tag: Some(TagMove { tag: tag("other"), expected: None }), ..commit };
            compare(Err(ErrorCode::PushUnknown), metadata.commit(id, other).await)
        }
        Op::PutTags { snapshot, tags, expected } => {
            let manifest = universe.manifest(*snapshot);
            let moves = tags.iter().map(|t| TagMove { tag: tag(&format!("t{t}")), expected: universe.state(*expected) }).collect();
            let found = change(metadata, NameChange::PutTags { snapshot: manifest, moves }, step).await;
            let outcome = model.visible().and_then(|()| {
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
            model.changed(outcome.is_ok() && entry(step).is_some());
            compare(outcome, found)
        }
        Op::DeleteTag { tag: t, expected } => {
            let (name, expected_state) = (tag(&format!("t{t}")), universe.state(*expected));
            let found = change(metadata, NameChange::DeleteTag { tag: name, expected: expected_state }, step).await;
            let outcome = model.visible().and_then(|()| {
                if universe.state(*expected).is_some_and(|e| e != model.tag_state(*t)) {
                    return Err(ErrorCode::TagMoved);
                }
                model.tags.remove(t).map(|_| ()).ok_or(ErrorCode::TagUnknown)
            });
            model.changed(outcome.is_ok() && entry(step).is_some());
            compare(outcome, found)
        }
        Op::DeleteSnapshot(snapshot, seen) => {
            let manifest = universe.manifest(*snapshot);
            let etag = seen.map(|right| {
                let has = model.tags.iter().filter(|(_, at)| **at == manifest).map(|(t, _)| tag(&format!("t{t}")));
                snapshot_etag(&manifest, &has.chain((!right).then(|| tag("gone"))).collect::<Vec<_>>())
            });
            let found = change(metadata, NameChange::DeleteSnapshot { snapshot: manifest, etag }, step).await;
            let outcome = model.visible().and_then(|()| {
                if !model.snapshots.contains(&manifest) {
                    return Err(ErrorCode::SnapshotUnknown);
                }
                if *seen == Some(false) {
                    return Err(ErrorCode::TagMoved);
                }
                model.snapshots.remove(&manifest);
                model.tags.retain(|_, d| *d != manifest);
                Ok(())
            });
            model.changed(outcome.is_ok() && entry(step).is_some());
            compare(outcome, found)
        }
        Op::Abort(push) => {
            let id = model.abort(*push).unwrap_or(PushId("none".into()));
            compare(Ok(()), metadata.close_push(id).await)
        }
        Op::Wait(seconds) => {
            model.now = clock.fetch_add(seconds * 1000, Ordering::SeqCst) + seconds * 1000;
            Ok(())
        }
        Op::Collect(budget) => {
            collect(metadata, universe, model, *budget).await;
            Ok(())
        }
        Op::Compact => {
            compact(metadata, format!("compact-{step}")).await;
            Ok(())
        }
        Op::DeletePacks(seconds) => {
            delete_emptied(metadata, Duration::from_secs(*seconds)).await;
            Ok(())
        }
        Op::Quarantine { snapshot, blob } => {
            let blobs = &universe.0[*snapshot];
            let digest = blobs[blob % blobs.len()].digest;
            let Some(location) = metadata.locate(vec![digest]).await.unwrap().remove(0) else { return Ok(()) };
            let damage = |pack: String| vec![Damage { digest, pack, reason: "found bad".into() }];
            same(&Vec::<Digest>::new(), &metadata.quarantine(damage("another pack".into())).await.unwrap())?;
            let before = model.objects[&digest].health == pfr_store::Health::Damaged;
            let expected = if before { vec![] } else { vec![digest] };
            same(&expected, &metadata.quarantine(damage(location.pack)).await.unwrap())?;
            model.quarantine(&digest);
            let listed = metadata.damaged(None, 1000).await.unwrap().rows;
            let damaged: BTreeSet<Digest> =
                model.objects.iter().filter(|(_, o)| o.health == pfr_store::Health::Damaged).map(|(d, _)| *d).collect();
            same(&damaged, &listed.iter().map(|row| row.digest).collect())
        }
        Op::Lift { snapshot, blob } => {
            let blobs = &universe.0[*snapshot];
            let digest = blobs[blob % blobs.len()].digest;
            let Some(location) = metadata.locate(vec![digest]).await.unwrap().remove(0) else { return Ok(()) };
            same(&0, &metadata.lift_quarantine(vec![(digest, "another pack".into())]).await.unwrap())?;
            let expected = u64::from(model.objects[&digest].health == pfr_store::Health::Damaged);
            same(&expected, &metadata.lift_quarantine(vec![(digest, location.pack)]).await.unwrap())?;
            model.lift(&digest);
            Ok(())
        }
        Op::Reassess => same(&model.reassess(), &metadata.reassess().await.unwrap()),
        Op::Renew(push) => {
            let id = session(model, push);
            let expected = model.alive(*push, false).map(|_| repository());
            same(&expected, &metadata.renew_push(id, LEASE).await.map_err(|e| e.code()))
        }
        Op::Touch(snapshot) => {
            let manifest = universe.manifest(*snapshot);
            compare(model.has_snapshot(&manifest), metadata.touch_snapshot(repository(), manifest).await)
        }
        Op::Pin(snapshot, pinned) => {
            let manifest = universe.manifest(*snapshot);
            compare(model.has_snapshot(&manifest), metadata.pin_snapshot(repository(), manifest, Pin::ByHand, *pinned).await)
        }
        Op::Late { push, snapshot, forgotten } => {
            let (frames, sizes) = frames_of(&universe.0[*snapshot], u32::MAX);
            let pack = given_up(metadata, format!("late-{step}"), *forgotten).await;
            let id = session(model, push);
            let found = metadata.finish_pack(id, pack, sizes, frames.into_iter().map(|(_, f)| f).collect(), LEASE).await;
            lost(found)
        }
        Op::LateCompaction { forgotten } => {
            let pack = given_up(metadata, format!("late-{step}"), *forgotten).await;
            let mut moved = Vec::new();
            for from in metadata.packs(None, 1000).await.unwrap() {
                let contents = metadata.pack_contents(from.id).await.unwrap();
                moved.extend(contents.iter().map(|packed| Moved { object: packed.object, from: from.id, offset: packed.offset }));
            }
            let sizes = PackSizes { bytes: 1000, frame_bytes: 900 };
            lost(metadata.finish_compaction(pack, sizes, moved).await)
        }
        Op::Journal(limit) => {
            let changes = metadata.unjournaled(*limit).await.unwrap();
            if let (Some(first), Some(last)) = (changes.first(), changes.last()) {
                let row = JournalRow {
                    key: format!("journal/{step}"),
                    first: first.seq,
                    last: last.seq,
                    summary: step.is_multiple_of(2),
                    records: changes.len() as u64,
                };
                // Twice is no error.
                metadata.journaled(vec![row.clone()]).await.unwrap();
                metadata.journaled(vec![row]).await.unwrap();
            }
            Ok(())
        }
        Op::ForgetJournal(which) => {
            let rows = metadata.journal().await.unwrap();
            if !rows.is_empty() {
                let keys = vec![rows[which % rows.len()].key.clone(), "journal/never was".into()];
                metadata.forget_journal(keys).await.unwrap();
            }
            Ok(())
        }
        Op::GcRun { id, finished } => {
            let trigger = [GcTrigger::Schedule, GcTrigger::Command, GcTrigger::Request][usize::from(*id) % 3];
            let run = GcRun {
                id: format!("run-{id}"),
                trigger,
                started_at: model.now,
                finished_at: finished.then_some(model.now),
                report: format!("{{\"step\":{step}}}"),
            };
            compare(Ok(()), metadata.record_gc_run(run).await)
        }
        Op::SetQuota(limits) => {
            model.quota = *limits;
            let (objects, snapshots) = limits.unzip();
            let quota = metadata.set_quota(QuotaLimits { bytes: None, objects, snapshots }, None).await.unwrap();
            let used = quota.map(|quota| (quota.used_objects, quota.used_snapshots));
            same(&limits.map(|_| (model.objects.len() as u64, model.snapshots.len() as u64)), &used)
        }
        Op::TrimAuditLog(seconds) => {
            let kept = Duration::from_secs(*seconds);
            let old = model.now.saturating_sub(seconds * 1000);
            let before = model.noted.len();
            model.noted.retain(|at| *at >= old);
            same(&((before - model.noted.len()) as u64), &metadata.trim_audit_log(kept, 1 << 40, 1000).await.unwrap())
        }
    }
}
