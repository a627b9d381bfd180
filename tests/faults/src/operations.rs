//! The operations of clients and operators, and which errors each of them may get.

use crate::check::Library;
use crate::names::{Change, Outcome};
use crate::snapshots::{Snapshot, request};
use crate::{events, gate, prefixes};
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use pfr_schema::api::TagState;
use pfr_schema::frame::{Event, Parser, end_mark};
use pfr_schema::{Digest, ErrorCode, Kind, Limits, RepositoryName, Tag};
use pfr_store::{Error, EventPage, GcOptions, ScrubOptions, Store};
use std::collections::BTreeSet;
use std::sync::Arc;

/// How much of a push happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// All of it.
    Complete,
    /// A part of the frames is uploaded, and nothing more.
    Partial,
    /// All frames are uploaded, then the session is aborted.
    Aborted,
    /// The first upload breaks in the middle. The second one and the commit succeed.
    Broken,
}

/// An operation of a client or an operator.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A push.
    Push {
        /// The repository.
        repository: RepositoryName,
        /// The snapshot.
        snapshot: Arc<Snapshot>,
        /// The tag to move, and the state that it must have before.
        tag: Option<(Tag, Option<TagState>)>,
        /// How much of the push happens.
        manner: Manner,
    },
    /// A change of tags or snapshots.
    Change(Change),
    /// A garbage collection.
    Gc(GcOptions),
    /// An audit of the tables.
    Audit,
    /// A scrub; `true` hashes every blob.
    Scrub(bool),
    /// A search for the snapshot with the longest prefix of these tokens.
    Match {
        /// The repository.
        repository: RepositoryName,
        /// The tokens.
        tokens: Vec<u32>,
        /// The snapshots that the answer may name, those of pushes at the same time among them.
        library: Library,
    },
    /// A read of all blobs of a snapshot.
    Read {
        /// The snapshot.
        snapshot: Arc<Snapshot>,
        /// Whether the snapshot must be there, since no task deletes it meanwhile.
        acknowledged: bool,
    },
    /// A read of the log of events.
    Follow,
}

/// Circumstances of a case that explain errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excuses {
    /// Calls of storage or metadata fail at random.
    pub faults: bool,
    /// The clock jumps, or packs are deleted without a grace period.
    pub time: bool,
    /// A rebuild adopted the readable frames of torn packs.
    pub torn: bool,
}

/// How an operation ended.
#[derive(Debug, Default)]
pub struct Ended {
    /// The change that it may have made.
    pub change: Option<(Change, Outcome)>,
    /// Whether it was acknowledged.
    pub acknowledged: bool,
    /// The answer as text, for the list of operations.
    pub answer: String,
    /// The broken promise, if there is one.
    pub violation: Option<String>,
    /// The events that it read.
    pub followed: Option<EventPage>,
}

impl Ended {
    fn new<T: std::fmt::Debug>(change: Option<Change>, answer: &Result<T, Error>, unsure: bool, excuses: Excuses) -> Self {
        let outcome = match answer {
            Ok(_) => Outcome::Done,
            Err(error) if !unsure && refused(error) => Outcome::Refused,
            Err(_) => Outcome::Unknown,
        };
        Self {
            change: change.map(|change| (change, outcome)),
            acknowledged: answer.is_ok(),
            answer: answer.as_ref().map_or_else(ToString::to_string, |_| "done".into()),
            violation: answer.as_ref().err().filter(|e| !excused(e, excuses)).map(|e| format!("{:?}: {e}", e.code())),
            followed: None,
        }
    }
}

/// Whether the store refused a change because of the state of tags and snapshots.
fn refused(error: &Error) -> bool {
    matches!(error, Error::TagMoved { .. } | Error::TagUnknown { .. } | Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_))
}

/// Whether circumstances explain an error. Nothing excuses a bug or damage.
fn excused(error: &Error, excuses: Excuses) -> bool {
    match error.code() {
        ErrorCode::Internal | ErrorCode::CorruptStore => false,
        ErrorCode::Unavailable | ErrorCode::StorageFull if !matches!(error, Error::PackLost(_)) => excuses.faults,
        // A lease protects the blobs that a push asked about or uploaded. While the clock does not
        // jump, none of them can be missing.
        _ => refused(error) || excuses.time || matches!(error, Error::Input(_)),
    }
}

impl Operation {
    /// The change that it makes if it succeeds.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        match self {
            Self::Push { repository, snapshot, tag, manner: Manner::Complete | Manner::Broken } => Some(Change::Commit {
                repository: repository.clone(),
                snapshot: snapshot.digest,
                parents: snapshot.parents.clone(),
                tag: tag.clone(),
            }),
            Self::Change(change) => Some(change.clone()),
            _ => None,
        }
    }

    /// Runs the operation on `store`.
    pub async fn run(self, store: Store, excuses: Excuses) -> Ended {
        let change = self.change();
        match self {
            Self::Push { repository, snapshot, tag, manner } => {
                let (answer, unsure) = push(&store, &repository, &snapshot, tag, manner).await;
                Ended::new(change, &answer, unsure, excuses)
            }
            Self::Change(wanted) => Ended::new(change, &apply(&store, wanted).await, false, excuses),
            Self::Gc(options) => {
                let answer = store.gc(&options, &mut |_| ()).await;
                let mut ended = Ended::new(None, &answer, false, excuses);
                if let Ok(report) = answer {
                    ended.answer =
                        format!("released {} unclaimed {} packs deleted {}", report.released, report.unclaimed, report.packs_deleted);
                }
                ended
            }
            Self::Audit => {
                let answer = store.metadata().audit(false).await;
                let mut ended = Ended::new(None, &answer, false, excuses);
                if let Ok(audit) = answer
                    && audit.wrong > 0
                {
                    ended.violation = Some(format!("the tables are wrong: {:#?}", audit.discrepancies));
                }
                ended
            }
            Self::Scrub(full) => {
                let answer = store.scrub(&ScrubOptions { full, bytes_per_second: None }, &mut |_| ()).await;
                let mut ended = Ended::new(None, &answer, false, excuses);
                match answer {
                    Ok(report) if report.damaged.iter().any(|blob| !excuses.torn || !blob.snapshots.is_empty()) => {
                        ended.violation = Some(format!("damaged: {:?}", report.damaged))
                    }
                    Ok(report) if !report.bad_packs.is_empty() && !excuses.faults && !excuses.torn => {
                        ended.violation = Some(format!("bad packs: {:?}", report.bad_packs));
                    }
                    _ => {}
                }
                ended
            }
            Self::Match { repository, tokens, library } => {
                let answer = store.match_prefix(&repository, &request(tokens.clone())).await;
                let mut ended = Ended::new(None, &answer, false, excuses);
                if let Ok(answer) = answer {
                    ended.answer = format!("{:?} at {}", answer.digest, answer.boundary);
                    ended.violation = prefixes::is_sound(&answer, &tokens, &library).err();
                }
                ended
            }
            Self::Read { snapshot, acknowledged } => read(&store, &snapshot, acknowledged, excuses).await,
            Self::Follow => {
                let answer = store.metadata().events(0, events::MOST).await;
                let mut ended = Ended::new(None, &answer, false, excuses);
                ended.followed = answer.ok();
                ended
            }
        }
    }
}

async fn apply(store: &Store, change: Change) -> Result<(), Error> {
    match change {
        Change::Tags { repository, snapshot, moves } => {
            // A fork makes several tags in one transaction. Other tags are moved one by one.
            let prefix = moves.first().and_then(|(tag, _)| tag.as_str().strip_suffix("-1").map(str::to_owned));
            match (prefix, moves) {
                (Some(prefix), moves) => {
                    store.fork(&repository, snapshot, &prefix, u32::try_from(moves.len()).unwrap_or(1)).await.map(|_| ())
                }
                (None, moves) => {
                    for (tag, expected) in moves {
                        store.put_tag(&repository, tag, snapshot, expected).await?;
                    }
                    Ok(())
                }
            }
        }
        Change::Untag { repository, tag, expected } => store.delete_tag(&repository, &tag, expected).await,
        Change::Delete { repository, snapshot } => store.delete_snapshot(&repository, &snapshot).await,
        Change::Commit { .. } => Err(Error::Internal("a commit is part of a push".into())),
    }
}

type Frames = Vec<Result<Bytes, std::io::Error>>;

fn stream_of(frames: Vec<Bytes>, broken_at: Option<usize>) -> Frames {
    let count = frames.len() as u64;
    let whole: Vec<u8> = frames.concat();
    match broken_at {
        Some(at) => {
            vec![Ok(Bytes::copy_from_slice(&whole[..at.min(whole.len())])), Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset))]
        }
        None => vec![Ok(whole.into()), Ok(end_mark(count).into())],
    }
}

/// Pushes as the client does: asks for missing blobs, nodes first; sends them, children before
/// their nodes; and commits. Repeats the commit if its answer was lost. The `bool` says whether an
/// earlier attempt to commit may have succeeded.
pub(crate) async fn push(
    store: &Store,
    repository: &RepositoryName,
    snapshot: &Snapshot,
    tag: Option<(Tag, Option<TagState>)>,
    manner: Manner,
) -> (Result<(), Error>, bool) {
    let session = match store.open_push(repository).await {
        Ok(session) => session,
        Err(error) => return (Err(error), false),
    };
    if let Err(error) = upload(store, &session.id, snapshot, manner).await {
        return (Err(error), false);
    }
    match manner {
        Manner::Partial => return (Ok(()), false),
        Manner::Aborted => return (store.abort(&session.id).await, false),
        Manner::Complete | Manner::Broken => {}
    }
    let (tag, expected) = tag.unzip();
    let mut unsure = false;
    for _ in 0..3 {
        match store.commit(&session.id, snapshot.digest, tag.clone(), expected.flatten()).await {
            Ok(_) => return (Ok(()), unsure),
            Err(Error::Unavailable { .. } | Error::NotPermitted { .. } | Error::Full(_)) => unsure = true,
            Err(error) => return (Err(error), unsure),
        }
    }
    (Err(Error::Unavailable { what: "registry", reason: "three attempts failed".into() }), true)
}

async fn upload(store: &Store, session: &pfr_store::LivePush, snapshot: &Snapshot, manner: Manner) -> Result<(), Error> {
    let (containers, blobs): (Vec<_>, Vec<_>) = snapshot.order.iter().copied().partition(|(_, kind)| *kind != Kind::Blob);
    let mut wanted: BTreeSet<Digest> = BTreeSet::new();
    for ask in [containers, blobs] {
        let missing = store.missing(session, ask.clone()).await?;
        wanted.extend(missing.into_iter().filter_map(|i| ask.get(i)).map(|(digest, _)| *digest));
    }
    let frames = snapshot.frames(|digest| wanted.contains(digest));
    if frames.is_empty() {
        return Ok(());
    }
    match manner {
        Manner::Partial => {
            let some = frames[..frames.len().div_ceil(2)].to_vec();
            return store.ingest(session, stream::iter(stream_of(some, None))).await.map(|_| ());
        }
        Manner::Broken => {
            let half = frames.iter().map(Bytes::len).sum::<usize>() / 2;
            if let Err(error) = store.ingest(session, stream::iter(stream_of(frames.clone(), Some(half)))).await
                && !matches!(error, Error::Input(_))
            {
                return Err(error);
            }
            gate::pass().await;
        }
        Manner::Complete | Manner::Aborted => {}
    }
    // The client sends a large push in several requests.
    let cut = if frames.len() > 12 { frames.len() / 2 } else { frames.len() };
    for part in [&frames[..cut], &frames[cut..]] {
        if !part.is_empty() {
            store.ingest(session, stream::iter(stream_of(part.to_vec(), None))).await?;
        }
    }
    Ok(())
}

/// Reads every blob as a client does: locates all of them once, reads slowly, and hashes each.
async fn read(store: &Store, snapshot: &Snapshot, acknowledged: bool, excuses: Excuses) -> Ended {
    let mut located = false;
    let answer = read_all(store, snapshot, &mut located).await;
    let mut ended = Ended::new(None, &answer, false, excuses);
    match answer {
        // Another task may have deleted the snapshot. Then either no blob is found at the start, or
        // every one can be read to the end: the grace period is longer than any read.
        Err(error) if !acknowledged && !located => ended.violation = (error.code() == ErrorCode::Internal).then(|| error.to_string()),
        Err(error) if excuses.time && error.code() != ErrorCode::Internal => ended.violation = None,
        Err(error) if located && error.code() == ErrorCode::BlobUnknown => {
            ended.violation = Some(format!("in the middle of a read: {error}"))
        }
        Ok(read) if read != snapshot.blobs.keys().copied().collect() => {
            ended.violation = Some(format!("a read of {} returned other blobs than it asked for", snapshot.digest));
        }
        _ => {}
    }
    ended
}

async fn read_all(store: &Store, snapshot: &Snapshot, located: &mut bool) -> Result<BTreeSet<Digest>, Error> {
    let digests: Vec<Digest> = snapshot.blobs.keys().copied().collect();
    let mut frames = store.frames(digests).await?;
    *located = true;
    let mut parser = Parser::new(Limits::default());
    let (mut found, mut payload) = (BTreeSet::new(), Vec::new());
    while let Some(piece) = frames.next().await {
        parser.push(piece?);
        gate::pass().await;
        while let Some(event) = parser.next()? {
            match event {
                Event::Begin(_) | Event::End => payload.clear(),
                Event::Payload(bytes) => payload.extend_from_slice(&bytes),
                Event::Finish { .. } => {
                    let digest = Digest::sha256(&payload);
                    if snapshot.blobs.get(&digest).is_some_and(|bytes| *bytes == payload) {
                        found.insert(digest);
                    }
                    payload.clear();
                }
            }
        }
    }
    parser.finish()?;
    Ok(found)
}
