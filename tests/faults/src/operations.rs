//! What clients and operators do, and what they may be told.

use crate::gate;
use crate::names::{Change, Outcome};
use crate::snapshots::Snapshot;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream;
use pfr_schema::api::TagState;
use pfr_schema::frame::{Event, Parser, end_mark};
use pfr_schema::{Digest, ErrorCode, Kind, Limits, RepositoryName, Tag};
use pfr_store::{Error, GcOptions, ScrubOptions, Store};
use std::collections::BTreeSet;
use std::sync::Arc;

/// How a push goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// To its end.
    Whole,
    /// A part of the frames, then silence.
    Partial,
    /// Everything but the commit, then an abort.
    Aborted,
    /// The stream of frames breaks in the middle; tried again.
    Broken,
}

/// An operation of a client or an operator.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A push.
    Push {
        /// Where to.
        repository: RepositoryName,
        /// What.
        snapshot: Arc<Snapshot>,
        /// Under which tag, and where that must be.
        tag: Option<(Tag, Option<TagState>)>,
        /// How.
        manner: Manner,
    },
    /// Names change.
    Change(Change),
    /// A collection.
    Gc(GcOptions),
    /// The tables are audited.
    Audit,
    /// Packs are read and checked; every blob is hashed if it is a full one.
    Scrub(bool),
    /// A snapshot is read whole.
    Read {
        /// Its blobs.
        snapshot: Arc<Snapshot>,
        /// Whether it must be there: nobody deletes it meanwhile.
        acknowledged: bool,
    },
}

/// What the circumstances excuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excuses {
    /// Calls fail now and then.
    pub faults: bool,
    /// The clock jumps, or packs go without a grace period.
    pub time: bool,
    /// A rebuild took in what was good of torn packs.
    pub torn: bool,
}

/// How an operation ended.
#[derive(Debug, Default)]
pub struct Ended {
    /// What it may have changed.
    pub change: Option<(Change, Outcome)>,
    /// Whether it was acknowledged.
    pub acknowledged: bool,
    /// In words, for the list of operations.
    pub answer: String,
    /// What must never happen.
    pub violation: Option<String>,
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
        }
    }
}

/// The names were not as the change needs them.
fn refused(error: &Error) -> bool {
    matches!(error, Error::TagMoved { .. } | Error::TagUnknown { .. } | Error::SnapshotUnknown { .. } | Error::RepositoryUnknown(_))
}

/// Whether circumstances explain an error. Bugs and damage have no excuse.
fn excused(error: &Error, excuses: Excuses) -> bool {
    match error.code() {
        ErrorCode::Internal | ErrorCode::CorruptStore => false,
        ErrorCode::Unavailable | ErrorCode::StorageFull if !matches!(error, Error::PackLost(_)) => excuses.faults,
        // What was asked about or uploaded is safe until the lease ends: nothing of it can be missing while time goes as it should.
        _ => refused(error) || excuses.time || matches!(error, Error::Input(_)),
    }
}

impl Operation {
    /// What it changes, if it gets that far.
    #[must_use]
    pub fn change(&self) -> Option<Change> {
        match self {
            Self::Push { repository, snapshot, tag, manner: Manner::Whole | Manner::Broken } => Some(Change::Commit {
                repository: repository.clone(),
                snapshot: snapshot.digest,
                parents: snapshot.parents.clone(),
                tag: tag.clone(),
            }),
            Self::Change(change) => Some(change.clone()),
            _ => None,
        }
    }

    /// Carries it out.
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
            Self::Read { snapshot, acknowledged } => read(&store, &snapshot, acknowledged, excuses).await,
        }
    }
}

async fn apply(store: &Store, change: Change) -> Result<(), Error> {
    match change {
        Change::Tags { repository, snapshot, moves } => {
            // Forks are tags that must not exist yet, all at once; the rest moves one by one.
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

/// The client's way: ask from the top down, send what is missing from the bottom up, commit; ask again if the answer was lost.
/// Also says whether an earlier attempt may have happened.
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
        Manner::Whole | Manner::Broken => {}
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
        Manner::Whole | Manner::Aborted => {}
    }
    // Large pushes come in several requests.
    let cut = if frames.len() > 12 { frames.len() / 2 } else { frames.len() };
    for part in [&frames[..cut], &frames[cut..]] {
        if !part.is_empty() {
            store.ingest(session, stream::iter(stream_of(part.to_vec(), None))).await?;
        }
    }
    Ok(())
}

/// Reads every blob as a client does: located once, taken slowly, hashed by the reader.
async fn read(store: &Store, snapshot: &Snapshot, acknowledged: bool, excuses: Excuses) -> Ended {
    let mut located = false;
    let answer = read_all(store, snapshot, &mut located).await;
    let mut ended = Ended::new(None, &answer, false, excuses);
    match answer {
        // Deleted meanwhile: not there, or there until the reader is done, because packs drain for longer than any read.
        Err(error) if !acknowledged && !located => ended.violation = (error.code() == ErrorCode::Internal).then(|| error.to_string()),
        Err(error) if excuses.time && error.code() != ErrorCode::Internal => ended.violation = None,
        Err(error) if located && error.code() == ErrorCode::BlobUnknown => {
            ended.violation = Some(format!("in the middle of a read: {error}"))
        }
        Ok(read) if read != snapshot.blobs.keys().copied().collect() => {
            ended.violation = Some(format!("of {} a reader got other blobs than it asked for", snapshot.digest));
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
