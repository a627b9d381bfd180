//! Changes of names whose journal object cannot be written at first, or whose process ends before
//! it is: acknowledged changes are in the journal, and a repeated request is answered as the first
//! was.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, refused};
use object_store::ObjectStore;
use object_store::memory::InMemory;
use pfr_client::{Remote, RemoteOptions};
use pfr_schema::api::{self, ForkRequest, TagRequest, TagState};
use pfr_schema::{Digest, ErrorCode, RepositoryName, Tag};
use pfr_store::{
    Clock, Commit, Metadata, NameChange, Once, Options, PostgresMetadata, PostgresOptions, PushId, SqliteMetadata, Store, TagMove,
};
use pfr_testkit::storage::{Moment, reset, watched};
use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// What metadata lie in.
#[derive(Clone, Copy, Debug)]
enum Database {
    Sqlite,
    Postgres,
}

const DATABASES: [Database; 2] = [Database::Sqlite, Database::Postgres];

impl Database {
    async fn metadata(self) -> Arc<dyn Metadata> {
        match self {
            Self::Sqlite => SqliteMetadata::open_in_memory(Clock::system()).await.unwrap(),
            Self::Postgres => {
                let options = PostgresOptions { max_connections: 4, ..PostgresOptions::default() };
                PostgresMetadata::connect(&pfr_testkit::postgres::database(), options).await.unwrap()
            }
        }
    }
}

/// A registry over a storage that refuses to put whole objects, which journal objects are, as often
/// as it is told.
struct World {
    database: Database,
    packs: Arc<dyn ObjectStore>,
    refusals: Arc<AtomicI64>,
    store: Store,
    registry: Registry,
    first: Snapshot,
    second: Snapshot,
}

impl World {
    /// Two snapshots; tags `main` and `gone` point at the first.
    async fn new(database: Database) -> Self {
        let (packs, refusals): (Arc<dyn ObjectStore>, _) = (Arc::new(InMemory::new()), Arc::new(AtomicI64::new(0)));
        let left = Arc::clone(&refusals);
        let say = move |moment| {
            let refuse = moment == Moment::Put && left.fetch_sub(1, Ordering::SeqCst) > 0;
            Box::pin(async move { if refuse { Err(reset()) } else { Ok(()) } }) as _
        };
        let store = Store::new(watched(Arc::clone(&packs), Arc::new(say)), database.metadata().await, Options::default());
        let registry = Registry::start_over(store.clone()).await;
        let (first, second) = (snapshot(0..2, vec![]), snapshot(2..4, vec![]));
        registry.push(REPO, &first, Some("main")).await;
        registry.push(REPO, &second, None).await;
        registry.push(REPO, &first, Some("gone")).await;
        Self { database, packs, refusals, store, registry, first, second }
    }

    /// The next `count` journal objects cannot be written.
    fn refuse(&self, count: i64) {
        self.refusals.store(count, Ordering::SeqCst);
    }

    fn remote(&self) -> Remote {
        let url = format!("http://{}", self.registry.address);
        Remote::new(&url, RemoteOptions { retries: 3, idle_timeout: Duration::from_secs(20), ..RemoteOptions::default() }).unwrap()
    }

    /// Everything uploaded and not committed.
    async fn uploaded(&self, snapshot: &Snapshot) -> String {
        let push = self.registry.open_push(REPO).await;
        let _: api::FramesStored = ok(self.registry.put_frames(&push, snapshot.stream()).await).await;
        push
    }

    async fn send(&self, method: Method, path: &str, key: Option<&str>, body: &Value) -> Response {
        let mut request = self.registry.request(method, &format!("/v1/repositories/{REPO}/{path}"));
        if !body.is_null() {
            request = request.json(body);
        }
        if let Some(key) = key {
            request = request.header("Idempotency-Key", key);
        }
        request.send().await.unwrap()
    }

    /// A store with an empty database that was rebuilt from the storage.
    async fn rebuilt(&self) -> Store {
        let store = Store::new(Arc::clone(&self.packs), self.database.metadata().await, Options::default());
        store.rebuild(&mut |_| ()).await.unwrap();
        store
    }

    /// Asserts that a rebuild brings back the current tags and snapshots. Returns where the tag
    /// points.
    async fn comes_back(&self, name: &str) -> Option<Digest> {
        let rebuilt = self.rebuilt().await;
        let names = async |store: &Store| {
            let tags = store.tags(&repository(), None, 1000).await.unwrap().rows;
            let tags: Vec<(Tag, Digest)> = tags.into_iter().map(|row| (row.name, row.digest)).collect();
            let snapshots = store.snapshots(&repository(), None, 1000).await.unwrap().rows;
            (tags, snapshots.into_iter().map(|row| row.digest).collect::<Vec<_>>())
        };
        let (found, there) = (names(&rebuilt).await, names(&self.store).await);
        assert_eq!(found, there, "{:?}: what a rebuild brings back, and what the registry says", self.database);
        found.0.into_iter().find(|(tag, _)| tag.as_str() == name).map(|(_, digest)| digest)
    }
}

fn repository() -> RepositoryName {
    "team/agent".parse().unwrap()
}

fn tag(name: &str) -> Tag {
    name.parse().unwrap()
}

fn key() -> String {
    uuid::Uuid::now_v7().to_string()
}

/// A change by a client whose first try is not journaled: a world of its own for each, so that they
/// wait for their second tries at the same time.
macro_rules! repeated {
    ($database:ident, |$world:ident, $remote:ident| $change:block) => {
        async {
            let $world = World::new($database).await;
            let $remote = $world.remote();
            $change
        }
    };
}

#[tokio::test]
async fn a_change_that_a_client_repeats_because_the_journal_failed_survives_a_rebuild() {
    futures::future::join_all(DATABASES.map(async |database| {
        let commit = repeated!(database, |world, remote| {
            let third = snapshot(4..6, vec![]);
            let push = world.uploaded(&third).await;
            world.refuse(1);
            let request = api::CommitRequest { manifest: third.manifest, tag: Some(tag("third")), if_tag_is: Some(TagState::Absent) };
            let committed = remote.commit(&repository(), push.rsplit('/').next().unwrap(), &request).await.unwrap();
            assert!(committed.created && committed.new_bytes > 0, "{committed:?}");
            assert_eq!(world.comes_back("third").await, Some(third.manifest));
        });
        let put_tag = repeated!(database, |world, remote| {
            let (first, second) = (world.first.manifest, world.second.manifest);
            world.refuse(1);
            let request = TagRequest { snapshot: second.to_string(), if_tag_is: Some(TagState::At(first)) };
            assert_eq!(remote.put_tag(&repository(), &tag("main"), &request).await.unwrap().digest, second);
            assert_eq!(world.comes_back("main").await, Some(second));
        });
        let fork = repeated!(database, |world, remote| {
            world.refuse(1);
            let request = ForkRequest { snapshot: "main".into(), count: 3, prefix: "try".into() };
            let forked = remote.fork(&repository(), &request).await.unwrap();
            assert_eq!((forked.digest, forked.tags.len()), (world.first.manifest, 3));
            assert_eq!(world.comes_back("try-3").await, Some(world.first.manifest));
        });
        let delete_tag = repeated!(database, |world, remote| {
            world.refuse(1);
            remote.delete_tag(&repository(), &tag("gone"), Some(TagState::At(world.first.manifest))).await.unwrap();
            assert_eq!(world.comes_back("gone").await, None);
        });
        let delete_snapshot = repeated!(database, |world, remote| {
            let first = world.first.manifest;
            world.refuse(1);
            remote.delete_snapshot(&repository(), &first).await.unwrap();
            assert_eq!(world.comes_back("main").await, None);
            assert!(world.rebuilt().await.snapshot(&repository(), &first).await.is_err());
        });
        tokio::join!(commit, put_tag, fork, delete_tag, delete_snapshot);
    }))
    .await;
}

#[tokio::test]
async fn a_refusal_after_a_change_that_was_not_journaled_waits_for_the_journal() {
    for database in DATABASES {
        let world = World::new(database).await;
        let (first, second) = (world.first.manifest, world.second.manifest);
        let third = snapshot(4..6, vec![]);
        let push = world.uploaded(&third).await;
        let commit = format!("pushes/{}/commit", push.rsplit('/').next().unwrap());
        // Without a key the second try meets the effect of the first.
        let changes = [
            (Method::POST, commit.as_str(), json!({"manifest": third.manifest, "tag": "third", "if_tag_is": "absent"}), None),
            (Method::PUT, "tags/main", json!({"snapshot": second, "if_tag_is": first}), Some(ErrorCode::TagMoved)),
            (Method::POST, "forks", json!({"snapshot": second, "count": 2, "prefix": "try"}), Some(ErrorCode::TagMoved)),
            (Method::DELETE, "tags/gone", Value::Null, Some(ErrorCode::TagUnknown)),
            (Method::DELETE, &format!("snapshots/{second}"), Value::Null, Some(ErrorCode::SnapshotUnknown)),
        ];
        for (method, path, body, code) in changes {
            world.refuse(2);
            for _ in 0..2 {
                let response = world.send(method.clone(), path, None, &body).await;
                refused(response, ErrorCode::Unavailable).await;
                assert!(!world.store.metadata().unjournaled(10).await.unwrap().is_empty(), "{path}: it happened, and is not journaled");
            }
            let response = world.send(method, path, None, &body).await;
            match code {
                Some(code) => drop(refused(response, code).await),
                None => assert!(ok::<api::Committed>(response).await.created, "a repeated commit is answered as the first"),
            }
            world.comes_back("main").await;
        }
    }
}

#[tokio::test]
async fn a_repeated_request_with_its_key_is_answered_as_the_first_was() {
    for database in DATABASES {
        let world = World::new(database).await;
        let (first, second) = (world.first.manifest, world.second.manifest);
        let put = key();
        // Relative words mean something else once the tag has moved.
        let child = snapshot(6..8, vec![second]);
        world.registry.push(REPO, &child, Some("walk")).await;
        let back = json!({"snapshot": "walk~1", "if_tag_is": child.manifest});
        for _ in 0..3 {
            let info: api::TagInfo = ok(world.send(Method::PUT, "tags/walk", Some(&put), &back).await).await;
            assert_eq!(info.digest, second);
        }
        let response = world.send(Method::PUT, "tags/walk", Some(&put), &json!({"snapshot": first})).await;
        assert!(refused(response, ErrorCode::InvalidRequest).await.contains("another request"));
        let anew = json!({"snapshot": second, "if_tag_is": child.manifest});
        refused(world.send(Method::PUT, "tags/walk", Some(&key()), &anew).await, ErrorCode::TagMoved).await;
        refused(world.send(Method::PUT, "tags/walk", Some("again"), &back).await, ErrorCode::InvalidRequest).await;

        let fork = key();
        for _ in 0..2 {
            let body = json!({"snapshot": "walk", "count": 2, "prefix": "f"});
            let forked: api::Forked = ok(world.send(Method::POST, "forks", Some(&fork), &body).await).await;
            assert_eq!((forked.digest, forked.tags.len()), (second, 2));
        }
        let deletions = [("tags/f-1".to_owned(), key()), (format!("snapshots/{second}"), key())];
        for (path, key) in &deletions {
            for _ in 0..2 {
                assert_eq!(world.send(Method::DELETE, path, Some(key), &Value::Null).await.status(), StatusCode::NO_CONTENT);
            }
        }
        refused(world.send(Method::DELETE, &deletions[0].0, Some(&key()), &Value::Null).await, ErrorCode::TagUnknown).await;
        // A refused change was not made, and may be asked for again.
        let late = key();
        let body = json!({"snapshot": first, "if_tag_is": "absent"});
        refused(world.send(Method::PUT, "tags/main", Some(&late), &body).await, ErrorCode::TagMoved).await;
        assert_eq!(world.send(Method::DELETE, "tags/main", None, &Value::Null).await.status(), StatusCode::NO_CONTENT);
        let _: api::TagInfo = ok(world.send(Method::PUT, "tags/main", Some(&late), &body).await).await;
    }
}

#[tokio::test]
async fn a_repeated_commit_is_answered_as_the_first_was_whatever_became_of_the_snapshot() {
    for database in DATABASES {
        let world = World::new(database).await;
        let third = snapshot(4..6, vec![]);
        let push = world.uploaded(&third).await;
        let path = format!("pushes/{}/commit", push.rsplit('/').next().unwrap());
        let body = json!({"manifest": third.manifest, "tag": "third", "if_tag_is": "absent"});
        let commit = async |repo: &str| {
            let path = format!("/v1/repositories/{repo}/{path}");
            world.registry.post(&path, &body).await
        };
        let first = commit(REPO).await;
        assert_eq!(first.status(), StatusCode::CREATED);
        let first: Value = ok(first).await;
        let again = commit(REPO).await;
        assert_eq!(again.status(), StatusCode::CREATED);
        assert_eq!(ok::<Value>(again).await, first);
        // Not in another repository, and not another commit.
        refused(commit("other%2Fagent").await, ErrorCode::PushUnknown).await;
        let other = world.send(Method::POST, &path, None, &json!({"manifest": third.manifest, "tag": "other"})).await;
        refused(other, ErrorCode::PushUnknown).await;
        let deleted = world.send(Method::DELETE, &format!("snapshots/{}", third.manifest), None, &Value::Null).await;
        assert_eq!(deleted.status(), StatusCode::NO_CONTENT);
        assert_eq!(ok::<Value>(commit(REPO).await).await, first);
        assert!(world.store.tag(&repository(), &tag("third")).await.is_err(), "it changes nothing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_change_sent_many_times_at_once_is_made_once_and_answered_alike() {
    for database in DATABASES {
        let world = World::new(database).await;
        let third = snapshot(4..6, vec![]);
        for round in 0..4 {
            let push = world.uploaded(&third).await;
            let path = format!("pushes/{}/commit", push.rsplit('/').next().unwrap());
            let commit = json!({"manifest": third.manifest, "tag": format!("c-{round}"), "if_tag_is": "absent"});
            let (key, fork) = (key(), json!({"snapshot": "main", "count": 5, "prefix": format!("f-{round}")}));
            let commits = futures::future::join_all((0..4).map(|_| world.send(Method::POST, &path, None, &commit)));
            let forks = futures::future::join_all((0..4).map(|_| world.send(Method::POST, "forks", Some(&key), &fork)));
            let (commits, forks) = tokio::join!(commits, forks);
            for (answers, wanted) in [(commits, if round == 0 { 201 } else { 200 }), (forks, 201)] {
                for answer in answers {
                    assert_eq!(answer.status().as_u16(), wanted, "{database:?}, round {round}: {:?}", answer.text().await);
                }
            }
        }
        world.comes_back("c-0").await;
    }
}

#[tokio::test]
async fn a_change_whose_process_ended_before_the_journal_is_journaled_when_it_is_asked_for_again() {
    for database in DATABASES {
        let world = World::new(database).await;
        let (metadata, second) = (world.store.metadata(), world.second.manifest);
        let third = snapshot(4..6, vec![]);
        let push = world.uploaded(&third).await;
        let id = push.rsplit('/').next().unwrap().to_owned();
        // As if the process had ended between the transaction and the journal: then the client asks
        // the next one.
        let commit = Commit {
            manifest: third.manifest,
            parents: vec![],
            artifact_type: None,
            subject: None,
            tag: Some(TagMove { tag: tag("third"), expected: Some(TagState::Absent) }),
            pin: None,
            marks: vec![],
            agent: None,
            audit: None,
            signed: None,
        };
        metadata.commit(PushId(id.clone()), commit).await.unwrap();
        let body = json!({"manifest": third.manifest, "tag": "third", "if_tag_is": "absent"});
        let again: api::Committed = ok(world.send(Method::POST, &format!("pushes/{id}/commit"), None, &body).await).await;
        assert!(again.created);
        assert_eq!(world.comes_back("third").await, Some(third.manifest));

        // Each change, and all that its request asks, as the registry takes the digest of it.
        let first = world.first.manifest;
        let fork = ForkRequest { snapshot: second.to_string(), count: 3, prefix: "try".into() };
        let moves = vec![TagMove { tag: tag("new"), expected: Some(TagState::Absent) }];
        let changes = [
            (
                (Method::PUT, "tags/new".to_owned(), json!({"snapshot": second, "if_tag_is": "absent"})),
                serde_json::to_vec(&("put_tag", tag("new"), second.to_string(), Some(TagState::Absent))),
                NameChange::PutTags { snapshot: second, moves },
            ),
            (
                (Method::POST, "forks".to_owned(), serde_json::to_value(&fork).unwrap()),
                serde_json::to_vec(&("fork", &fork)),
                NameChange::fork(second, &fork.prefix, fork.count).unwrap().0,
            ),
            (
                (Method::DELETE, "tags/gone".to_owned(), Value::Null),
                serde_json::to_vec(&("delete_tag", tag("gone"), None::<TagState>)),
                NameChange::DeleteTag { tag: tag("gone"), expected: None },
            ),
            (
                (Method::DELETE, format!("snapshots/{first}"), Value::Null),
                serde_json::to_vec(&("delete_snapshot", first, None::<Digest>)),
                NameChange::DeleteSnapshot { snapshot: first, etag: None },
            ),
        ];
        for ((method, path, body), request, change) in changes {
            let key = key();
            let once = Once { session: PushId(key.clone()), request: Digest::sha256(&request.unwrap()) };
            metadata.change_names(repository(), change, Some(once), Duration::from_secs(600), None, None).await.unwrap();
            assert!(!metadata.unjournaled(10).await.unwrap().is_empty(), "{path}: the process ended before the journal");
            let answer = world.send(method, &path, Some(&key), &body).await;
            assert!(answer.status().is_success(), "{path}: {}", answer.text().await.unwrap());
            assert_eq!(metadata.unjournaled(10).await.unwrap(), [], "{path}: it is acknowledged, and not in the journal");
            world.comes_back("new").await;
        }
        let rebuilt = world.rebuilt().await;
        for (name, there) in [("new", true), ("try-3", true), ("gone", false), ("main", false)] {
            assert_eq!(rebuilt.tag(&repository(), &tag(name)).await.is_ok(), there, "{name}");
        }
        assert!(rebuilt.snapshot(&repository(), &first).await.is_err());
    }
}

#[tokio::test]
async fn what_a_killed_process_left_is_journaled_before_the_next_one_serves() {
    let dir = tempfile::tempdir().unwrap();
    let config = crate::common::config(&dir);
    let first = snapshot(0..2, vec![]);
    {
        let store = Store::open(&config.data, Options::default()).await.unwrap();
        let registry = Registry::start_over(store.clone()).await;
        registry.push(REPO, &first, Some("main")).await;
        let moves = vec![TagMove { tag: tag("left"), expected: None }];
        store.metadata().put_tags(repository(), first.manifest, moves).await.unwrap();
        assert_eq!(store.metadata().unjournaled(10).await.unwrap().len(), 1);
        registry.stopped().await;
    }
    let server = pfr_registry::Server::bind(config.clone()).await.unwrap();
    assert_eq!(server.store().metadata().unjournaled(10).await.unwrap(), []);
    drop(server);
    std::fs::remove_file(config.data.join("metadata.sqlite")).unwrap();
    for rest in ["metadata.sqlite-wal", "metadata.sqlite-shm"] {
        // They may be gone with the last connection.
        let _ = std::fs::remove_file(config.data.join(rest));
    }
    let store = Store::open(&config.data, Options::default()).await.unwrap();
    store.rebuild(&mut |_| ()).await.unwrap();
    assert_eq!(store.tag(&repository(), &tag("left")).await.unwrap().digest, first.manifest);
}
