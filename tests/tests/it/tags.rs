//! Tags are linearizable: clients that read, move, delete and commit at once, through registries
//! that are killed, see one order of all changes.

use crate::replicas::backend::{Backend, Database, Packs};
use pfr_client::{Progress, PushTarget, Remote, RemoteOptions, Source, push};
use pfr_schema::api::{CommitRequest, DigestGroup, MissingRequest, TagRequest, TagState};
use pfr_schema::codec::Compression;
use pfr_schema::{Digest, ErrorCode, Kind, RepositoryName, Tag};
use pfr_tests::linearizable::{Condition, Event, Operation, Value, check};
use pfr_tests::{Registry, Shape, SnapshotDir, seed};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const CLIENTS: usize = 6;
/// How many of these never repeat a request whose answer is lost.
const ONCE: usize = 2;
const TAGS: [&str; 3] = ["a", "b", "c"];
/// Snapshots that tags point at.
const SNAPSHOTS: usize = 10;

/// A stale read is planted after this many operations of a tag. The number is small, because the
/// checker needs longer to prove that there is no order than to find one.
const PLANTED: usize = 60;

type History = BTreeMap<&'static str, Vec<Event>>;

/// One client, its registries and what it knows of tags.
struct Client {
    remotes: Vec<Remote>,
    repository: RepositoryName,
    snapshots: Vec<Digest>,
    random: StdRng,
    begun: Instant,
    seen: BTreeMap<&'static str, Value>,
}

impl Client {
    /// Sends one request. Returns the operation with what the answer says; `None` if no request was
    /// sent or the answer says nothing.
    async fn step(&mut self, tag: &'static str) -> Option<Event> {
        let remote = self.remotes[self.random.random_range(0..self.remotes.len())].clone();
        let (repository, name): (RepositoryName, Tag) = (self.repository.clone(), tag.parse().unwrap());
        let value = self.random.random_range(0..self.snapshots.len());
        let snapshot = self.snapshots[value];
        // Half of the changes require that the tag is still where this client saw it last. Another
        // client may have moved it meanwhile.
        let expected = self.random.random_bool(0.5).then(|| self.seen.get(tag).copied().flatten());
        let state = expected.map(|value| value.map_or(TagState::Absent, |value| TagState::At(self.snapshots[value])));
        let kind = self.random.random_range(0..10);
        let mut session = String::new();
        if kind == 9 {
            // These requests prepare a commit. They do not change a tag.
            session = remote.open_push(&repository).await.ok()?.id;
            let group = DigestGroup { kind: Kind::Manifest, digests: vec![snapshot], claim: None };
            remote.missing(&repository, &session, &MissingRequest { groups: vec![group] }).await.ok()?;
        }
        let called = self.begun.elapsed();
        let (operation, failed) = match kind {
            0..4 => match remote.tag(&repository, &name).await {
                Ok(found) => (Operation::Read(Some(self.number(&found.digest))), None),
                Err(error) if error.code() == ErrorCode::TagUnknown => (Operation::Read(None), None),
                Err(error) => {
                    ambiguous(&error);
                    return None;
                }
            },
            4..7 => {
                let request = TagRequest { snapshot: snapshot.to_string(), if_tag_is: state };
                let put = remote.put_tag(&repository, &name, &request).await;
                (Operation::Changed(condition(expected, false), Some(value)), put.err())
            }
            7..9 => {
                let expected = expected.filter(Option::is_some);
                let deleted = remote.delete_tag(&repository, &name, state.filter(|state| *state != TagState::Absent)).await;
                (Operation::Changed(condition(expected, true), None), deleted.err())
            }
            _ => {
                let request = CommitRequest { manifest: snapshot, tag: Some(name), if_tag_is: state };
                let committed = remote.commit(&repository, &session, &request).await;
                (Operation::Changed(condition(expected, false), Some(value)), committed.err())
            }
        };
        let operation = match (operation, failed) {
            (operation, None) => operation,
            (Operation::Changed(condition, _), Some(error)) if matches!(error.code(), ErrorCode::TagMoved | ErrorCode::TagUnknown) => {
                Operation::Refused(condition)
            }
            // Each change of unknown outcome doubles what must be searched. A refused connection
            // proves that nothing was done.
            (Operation::Changed(..), Some(error)) if error.to_string().contains("Connection refused") => return None,
            (Operation::Changed(condition, value), Some(error)) => {
                ambiguous(&error);
                Operation::Lost(condition, value)
            }
            (operation, Some(_)) => operation,
        };
        match operation {
            Operation::Read(value) | Operation::Changed(_, value) => drop(self.seen.insert(tag, value)),
            Operation::Refused(_) | Operation::Lost(..) => drop(self.seen.remove(tag)),
        }
        Some(Event { called, answered: self.begun.elapsed(), operation })
    }

    fn number(&self, digest: &Digest) -> usize {
        self.snapshots.iter().position(|snapshot| snapshot == digest).unwrap_or_else(|| panic!("a tag points at {digest}"))
    }
}

fn condition(expected: Option<Value>, deletes: bool) -> Condition {
    match expected {
        Some(value) => Condition::Is(value),
        None if deletes => Condition::Exists,
        None => Condition::None,
    }
}

/// Asserts that the error leaves open whether the operation was done: no other error may occur
/// here.
fn ambiguous(error: &pfr_client::Error) {
    let code = error.code();
    assert!(matches!(code, ErrorCode::Unavailable | ErrorCode::PushUnknown), "{code:?}: {error}");
}

fn remote(url: &str, once: bool) -> Remote {
    let (retries, retry_for) = if once { (0, Duration::ZERO) } else { (100, Duration::from_secs(60)) };
    Remote::new(url, RemoteOptions { retries, retry_for, ..RemoteOptions::default() }).unwrap()
}

async fn pushed(remote: &Remote, repository: &RepositoryName) -> Vec<Digest> {
    let home = tempfile::tempdir().unwrap();
    let mut snapshots = Vec::new();
    for number in 0..SNAPSHOTS {
        let dir = SnapshotDir::write(&home.path().join(number.to_string()), Shape::TINY, &[number as u64]);
        let source = Source::Directory(dir.path);
        let compression = Compression::default();
        let target = PushTarget { repository: repository.clone(), tag: None, if_tag_is: None, parents: Vec::new(), compression };
        snapshots.push(push(&source, remote, target, &Progress::default()).await.unwrap().digest);
    }
    snapshots
}

/// Runs clients until `kills` registries were killed and started again. Returns what the clients
/// saw.
fn play(registries: &mut [Registry], kills: usize) -> History {
    let (seed, begun, ended) = (seed(), Instant::now(), AtomicBool::new(false));
    let repository: RepositoryName = "team/agent".parse().unwrap();
    let urls: Vec<String> = registries.iter().map(Registry::url).collect();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let snapshots = runtime().block_on(pushed(&remote(&urls[0], false), &repository));
    let work = |number: usize| {
        let mut client = Client {
            remotes: urls.iter().map(|url| remote(url, number < ONCE)).collect(),
            repository: repository.clone(),
            snapshots: snapshots.clone(),
            random: StdRng::seed_from_u64(seed ^ (number as u64 + 1) << 32),
            begun,
            seen: BTreeMap::new(),
        };
        runtime().block_on(async {
            let mut events = Vec::new();
            while !ended.load(Ordering::Relaxed) {
                let tag = TAGS[client.random.random_range(0..TAGS.len())];
                match client.step(tag).await {
                    Some(event) => events.push((tag, event)),
                    // The registry is down: do not send a thousand requests a second.
                    None => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
            events
        })
    };
    let mut random = StdRng::seed_from_u64(seed);
    let mut history = History::new();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|number| scope.spawn(move || work(number))).collect();
        for _ in 0..kills {
            std::thread::sleep(Duration::from_millis(random.random_range(200..600)));
            let victim = random.random_range(0..registries.len());
            registries[victim].restart();
        }
        std::thread::sleep(Duration::from_millis(300));
        ended.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().unwrap().into_iter().for_each(|(tag, event)| history.entry(tag).or_default().push(event));
        }
    });
    history
}

fn linearizable(mut registries: Vec<Registry>, kills: usize) {
    let history = play(&mut registries, kills);
    let count = |which: fn(&Operation) -> bool| history.values().flatten().filter(|event| which(&event.operation)).count();
    let counts = [
        ("read", count(|operation| matches!(operation, Operation::Read(_)))),
        ("changed", count(|operation| matches!(operation, Operation::Changed(..)))),
        ("refused", count(|operation| matches!(operation, Operation::Refused(_)))),
        ("lost", count(|operation| matches!(operation, Operation::Lost(..)))),
    ];
    println!("{kills} kills: {counts:?}");
    assert!(counts.iter().take(3).all(|(_, count)| *count > 20), "{counts:?}: the test tests too little");
    for (tag, events) in &history {
        check(events).unwrap_or_else(|reason| panic!("tag {tag}: {reason}"));
        let some = beginning(events, PLANTED);
        check(&some).unwrap_or_else(|reason| panic!("the beginning of the history of tag {tag}: {reason}"));
        assert!(check(&with_a_stale_read(&some)).is_err(), "tag {tag}: the checker did not notice a stale read");
    }
}

/// The beginning of a history. Calls that had not ended by then may have taken place or not.
fn beginning(events: &[Event], count: usize) -> Vec<Event> {
    let mut events = events.to_vec();
    events.sort_by_key(|event| event.called);
    let Some(end) = events.get(count).map(|event| event.called) else { return events };
    let cut = |event: &Event| match event.operation {
        _ if event.called >= end => None,
        Operation::Changed(condition, value) if event.answered > end => {
            Some(Event { operation: Operation::Lost(condition, value), ..*event })
        }
        Operation::Read(_) | Operation::Refused(_) if event.answered > end => None,
        _ => Some(*event),
    };
    events.iter().filter_map(cut).collect()
}

/// The same history, and at its end two more changes and a read that sees the first of them.
fn with_a_stale_read(events: &[Event]) -> Vec<Event> {
    let after = events.iter().map(|event| event.answered).max().unwrap_or_default() + Duration::from_millis(1);
    let at = |millis: u64, operation| {
        let called = after + Duration::from_millis(millis);
        Event { called, answered: called, operation }
    };
    // No other change writes these values, not even one whose answer was lost.
    let (old, new) = (Some(usize::MAX - 1), Some(usize::MAX));
    let changes = [old, new].map(|value| Operation::Changed(Condition::None, value));
    let mut events = events.to_vec();
    events.extend([at(0, changes[0]), at(1, changes[1]), at(2, Operation::Read(old))]);
    events
}

fn over_sqlite(kills: usize) {
    let data = tempfile::tempdir().unwrap();
    linearizable(vec![Registry::over(&data.path().join("data"), &[])], kills);
}

fn over_replicas(kills: usize) {
    let backend = Backend::new(Database::Postgres, Packs::Directory);
    linearizable((0..3).map(|_| backend.registry(&["--storage-retries", "0"])).collect(), kills);
}

#[test]
fn tags_of_a_registry_that_is_killed_are_linearizable() {
    over_sqlite(4);
}

#[test]
fn tags_of_three_replicas_that_are_killed_are_linearizable() {
    over_replicas(5);
}

mod long {
    #[test]
    fn tags_of_a_registry_that_is_killed_are_linearizable() {
        super::over_sqlite(100);
    }

    #[test]
    fn tags_of_three_replicas_that_are_killed_are_linearizable() {
        super::over_replicas(100);
    }
}
