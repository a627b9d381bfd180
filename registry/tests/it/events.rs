//! Events over HTTP: each change once, for readers that come and go; the permissions of readers,
//! and their costs.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, refused, until_metric};
use object_store::memory::InMemory;
use pfr_faults::faults::Faults;
use pfr_faults::transactions::Transactions;
use pfr_schema::api::{Event, EventId, EventKind, EventReset};
use pfr_schema::{ErrorCode, RepositoryName};
use pfr_store::{Clock, GcOptions, Options, SqliteMetadata, Store};
use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Longer than anything here takes.
const FOR_EVER: Duration = Duration::from_secs(60);

/// A reader of server-sent events.
struct Reader {
    answer: Response,
    text: String,
    /// The last id, as a browser keeps it.
    id: String,
    comments: usize,
}

impl Reader {
    async fn of(request: RequestBuilder) -> Self {
        let answer = request.timeout(FOR_EVER * 10).send().await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        assert_eq!(answer.headers()["cache-control"], "no-store");
        Self { answer, text: String::new(), id: String::new(), comments: 0 }
    }

    /// Begins now, and has read where.
    async fn start(registry: &Registry, path: &str) -> Self {
        let mut reader = Self::of(registry.request(reqwest::Method::GET, path)).await;
        reader.begin().await;
        reader
    }

    async fn begin(&mut self) {
        assert_eq!(self.block().await.expect("a beginning"), (None, String::new()));
        assert!(self.id.parse::<EventId>().is_ok(), "{:?}", self.id);
    }

    /// The name and the data of the next block; none at the end.
    async fn block(&mut self) -> Option<(Option<String>, String)> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                let (mut name, mut data) = (None, String::new());
                for line in block.lines() {
                    match line.split_once(": ") {
                        Some(("id", id)) => id.clone_into(&mut self.id),
                        Some(("event", event)) => name = Some(event.to_owned()),
                        Some(("data", text)) => text.clone_into(&mut data),
                        Some(("retry", _)) => {}
                        _ if line.starts_with(':') => self.comments += 1,
                        _ => panic!("no line of server-sent events: {line:?}"),
                    }
                }
                return Some((name, data));
            }
            let piece = tokio::time::timeout(FOR_EVER, self.answer.chunk()).await.expect("it says nothing, and does not end");
            match piece {
                Ok(Some(bytes)) => self.text.push_str(std::str::from_utf8(&bytes).expect("text")),
                // The end, or a connection that was cut.
                Ok(None) | Err(_) => return None,
            }
        }
    }

    /// The next event, and its JSON.
    async fn next(&mut self) -> Option<(Event, Value)> {
        loop {
            let (name, data) = self.block().await?;
            if let Some(name) = name {
                let event: Event = serde_json::from_str(&data).unwrap_or_else(|e| panic!("{e} in {data}"));
                assert_eq!((event.kind.name(), &event.id), (name.as_str(), &self.id));
                return Some((event, serde_json::from_str(&data).expect("JSON")));
            }
        }
    }

    /// So many events, as short texts.
    async fn texts(&mut self, count: usize) -> Vec<String> {
        let mut texts = Vec::new();
        while texts.len() < count {
            texts.push(short(&self.next().await.expect("another event").0));
        }
        texts
    }

    /// All events up to the end.
    async fn rest(mut self) -> Vec<String> {
        let mut texts = Vec::new();
        while let Some((event, _)) = self.next().await {
            texts.push(short(&event));
        }
        texts
    }
}

fn short(event: &Event) -> String {
    let about = event.tag.as_ref().map(ToString::to_string).or(event.digest.map(|digest| digest.short()));
    let repository = event.repository.as_ref().map_or("-", |repository| repository.as_str());
    format!("{} {repository} {}", event.kind.name(), about.unwrap_or_default())
}

async fn put_tag(registry: &Registry, tag: &str, snapshot: &Snapshot) {
    let body = json!({"snapshot": snapshot.manifest.to_string()});
    let _: Value = ok(registry.put(&format!("/v1/repositories/{REPO}/tags/{tag}"), &body).await).await;
}

#[tokio::test]
async fn a_reader_has_each_change_once_and_goes_on_after_a_break_and_a_restart() {
    let data = tempfile::tempdir().expect("a directory");
    let mut registry = Registry::start_again(data.path(), |_| ()).await;
    let s = snapshot(0..4, vec![]);
    registry.push(REPO, &s, Some("before")).await;
    let mut reader = Reader::start(&registry, "/v1/events").await;
    let start = reader.id.clone();
    let other = snapshot(2..6, vec![s.manifest]);
    registry.push(REPO, &other, Some("t")).await;
    let (pushed, json) = reader.next().await.expect("an event");
    assert_eq!((pushed.kind, pushed.digest, &pushed.parents), (EventKind::Pushed, Some(other.manifest), &vec![s.manifest]));
    assert!(pushed.new_bytes.is_some() && pushed.at > 0 && json["kind"] == "pushed", "{json}");
    assert_eq!(reader.texts(1).await, ["tagged team/agent t"]);
    let middle = reader.id.clone();
    drop(reader);

    // While it is away: a fork is an event for each tag.
    let _: Value =
        ok(registry.post(&format!("/v1/repositories/{REPO}/forks"), &json!({"snapshot": "t", "count": 2, "prefix": "f"})).await).await;
    assert_eq!(registry.delete(&format!("/v1/repositories/{REPO}/tags/f-1")).await.status(), StatusCode::NO_CONTENT);
    registry.stopped().await;
    registry = Registry::start_again(data.path(), |_| ()).await;
    assert_eq!(registry.delete(&format!("/v1/repositories/{REPO}/snapshots/{}", other.manifest)).await.status(), StatusCode::NO_CONTENT);
    let missed = ["tagged team/agent f-1", "tagged team/agent f-2", "deleted team/agent f-1"].map(str::to_owned);
    let deleted = format!("deleted team/agent {}", other.manifest.short());
    let missed: Vec<String> = missed.into_iter().chain([deleted]).collect();
    let by_header = registry.request(reqwest::Method::GET, "/v1/events?follow=false").header("last-event-id", &middle);
    assert_eq!(Reader::of(by_header).await.rest().await, missed);
    let by_query = Reader::of(registry.request(reqwest::Method::GET, &format!("/v1/events?follow=false&after={middle}"))).await;
    assert_eq!(by_query.rest().await, missed);
    // A browser connects again to the address with which it began: the header is newer.
    let both = registry.request(reqwest::Method::GET, &format!("/v1/events?follow=false&after={start}")).header("last-event-id", &middle);
    assert_eq!(Reader::of(both).await.rest().await, missed);
    let mut all = Reader::of(registry.request(reqwest::Method::GET, &format!("/v1/events?after={start}"))).await;
    assert_eq!(all.texts(6).await[2..], missed);
    put_tag(&registry, "live", &s).await;
    assert_eq!(all.texts(1).await, ["tagged team/agent live"]);
    registry.stopped().await;
}

#[tokio::test]
async fn an_id_that_is_not_known_any_more_is_answered_with_a_reset_and_a_malformed_one_refused() {
    let registry = Registry::start().await;
    let s = snapshot(0..4, vec![]);
    registry.push(REPO, &s, Some("t")).await;
    let mut reader = Reader::start(&registry, "/v1/events").await;
    let start: EventId = reader.id.parse().expect("an id");
    put_tag(&registry, "u", &s).await;
    reader.texts(1).await;
    let last = reader.id.clone();
    assert_eq!(registry.store.metadata().trim_events(Duration::ZERO, 0, 1000).await.unwrap(), 1);
    let later = EventId { number: start.number + 1_000_000, ..start.clone() };
    let elsewhere = EventId { epoch: "abc".into(), ..start.clone() };
    let mut resets = Vec::new();
    for id in [start, later, elsewhere] {
        let mut reader = Reader::of(registry.request(reqwest::Method::GET, &format!("/v1/events?after={id}"))).await;
        let (name, data) = reader.block().await.expect("an event");
        let reset: EventReset = serde_json::from_str(&data).expect("JSON");
        assert_eq!((name.as_deref(), reset.id.as_str(), reader.id.as_str()), (Some("reset"), last.as_str(), last.as_str()), "{id}");
        resets.push(reader);
    }
    put_tag(&registry, "again", &s).await;
    for reader in &mut resets {
        assert_eq!(reader.texts(1).await, ["tagged team/agent again"], "it goes on from there");
    }
    registry.store.metadata().trim_events(Duration::ZERO, 0, 1000).await.unwrap();
    // The last event itself is gone, and nothing after it.
    let log = registry.store.begin_events().await.unwrap();
    let reader =
        Reader::of(registry.request(reqwest::Method::GET, &format!("/v1/events?follow=false&after={}-{}", log.epoch, log.last))).await;
    assert_eq!(reader.rest().await, Vec::<String>::new());
    for (path, header) in [("?after=x", None), ("?after=a-01", None), ("", Some("a-1-2")), ("", Some("\u{fc}")), ("?after=a-1%00", None)] {
        let request = registry.request(reqwest::Method::GET, &format!("/v1/events{path}"));
        let request = match header {
            Some(id) => request.header("last-event-id", id.as_bytes()),
            None => request,
        };
        let answer = request.send().await.expect("an answer");
        assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "{path} {header:?}");
    }
    for path in ["?kind=moved", "?repository=", "?follow=maybe", "?since=5"] {
        refused(registry.get(&format!("/v1/events{path}")).await, ErrorCode::InvalidRequest).await;
    }
}

#[tokio::test]
async fn filters_leave_out_what_does_not_match_and_the_reader_still_comes_back_to_the_end() {
    let registry = Registry::start().await;
    let s = snapshot(0..4, vec![]);
    let start = Reader::start(&registry, "/v1/events").await.id;
    registry.push(REPO, &s, Some("t")).await;
    registry.push("other", &s, Some("t")).await;
    let read = async |query: &str| {
        let path = format!("/v1/events?follow=false&after={start}&{query}");
        Reader::of(registry.request(reqwest::Method::GET, &path)).await.rest().await
    };
    assert_eq!(read("repository=team/*&kind=tagged").await, ["tagged team/agent t"]);
    assert_eq!(read("repository=*r").await.len(), 2);
    assert_eq!(read("kind=pushed").await.len(), 2);
    assert_eq!(read("kind=collected").await, Vec::<String>::new());
    // Nothing matched, and the id at the end is that of the last event all the same.
    let path = format!("/v1/events?follow=false&after={start}&kind=collected");
    let mut reader = Reader::of(registry.request(reqwest::Method::GET, &path)).await;
    while reader.block().await.is_some() {}
    let log = registry.store.begin_events().await.unwrap();
    assert_eq!(reader.id, format!("{}-{}", log.epoch, log.last));
}

/// Two repositories in one domain, and a registry that requires tokens.
async fn guarded(change: impl FnOnce(&mut pfr_registry::Config)) -> (tempfile::TempDir, Registry, Snapshot) {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let s = snapshot(0..4, vec![]);
    for repository in [REPO, "hidden%2Fplans"] {
        registry.push(repository, &s, Some("t")).await;
    }
    registry.stopped().await;
    let registry = Registry::start_again(data.path(), |config| {
        config.require_tokens = true;
        change(config);
    })
    .await;
    (data, registry, s)
}

/// Moves a tag in a repository, as another process on the same store.
async fn moved(registry: &Registry, repository: &str, tag: &str, snapshot: &Snapshot) {
    let repository: RepositoryName = repository.parse().expect("a name");
    registry.store.put_tag(&repository, tag.parse().expect("a tag"), snapshot.manifest, None).await.expect("moved");
}

#[tokio::test]
async fn a_caller_has_the_events_of_repositories_that_it_may_pull_and_no_trace_of_others() {
    let (_data, registry, s) = guarded(|_| ()).await;
    let (team, hidden) = (registry.token(&["team/*:pull"]).await, registry.token(&["hidden/*:pull", "*:push"]).await);
    let operator = registry.token(&["*:pull,admin"]).await;
    let follow = async |token: &pfr_schema::AccessToken| {
        let mut reader = Reader::of(registry.request(reqwest::Method::GET, "/v1/events").bearer_auth(token.expose())).await;
        reader.begin().await;
        reader
    };
    let (mut for_team, mut for_hidden, mut for_operator) = (follow(&team).await, follow(&hidden).await, follow(&operator).await);
    moved(&registry, "hidden/plans", "secret", &s).await;
    registry.store.delete_snapshot(&"hidden/plans".parse().unwrap(), &s.manifest).await.unwrap();
    let report = pfr_schema::api::GcReport { released: 1, finished_at: Some(7), ..Default::default() };
    let report = serde_json::to_string(&report).unwrap();
    let (id, trigger) = ("0190aaaa-0000-7000-8000-000000000001".to_owned(), pfr_store::GcTrigger::Command);
    let run = pfr_store::GcRun { id, trigger, started_at: 5, finished_at: Some(7), report };
    registry.store.metadata().record_gc_run(run).await.unwrap();
    registry.store.gc(&GcOptions::default(), &mut |_| ()).await.unwrap();
    moved(&registry, "team/agent", "open", &s).await;
    let (event, json) = for_team.next().await.expect("an event");
    assert_eq!(short(&event), "tagged team/agent open");
    let text = format!("{json} {}", for_team.text);
    assert!(!text.contains("hidden") && !text.contains("secret"), "{text}");
    let deleted = format!("deleted hidden/plans {}", s.manifest.short());
    assert_eq!(for_hidden.texts(2).await, ["tagged hidden/plans secret".to_owned(), deleted.clone()]);
    let all = for_operator.texts(4).await;
    assert_eq!(all, ["tagged hidden/plans secret".to_owned(), deleted, "collected - ".to_owned(), "tagged team/agent open".to_owned()]);
    // Asked for by name, a hidden repository is like one that is not there.
    let path = format!("/v1/events?follow=false&after={}&repository=hidden/*", for_hidden.id);
    let asked = Reader::of(registry.request(reqwest::Method::GET, &path).bearer_auth(team.expose())).await;
    assert_eq!(asked.rest().await, Vec::<String>::new());
    // A token that may push only sees nothing at all.
    let pushes = registry.token(&["*:push"]).await;
    let answer = registry.send_as(&pushes, registry.request(reqwest::Method::GET, "/v1/events")).await;
    refused(answer, ErrorCode::Denied).await;
}

#[tokio::test]
async fn the_stream_of_a_token_that_is_revoked_ends_within_seconds_and_others_go_on() {
    let (_data, registry, s) = guarded(|_| ()).await;
    let (revoked, other) = (registry.token(&["team/*:pull"]).await, registry.token(&["team/*:pull"]).await);
    let mut readers = Vec::new();
    for token in [&revoked, &other] {
        let mut reader = Reader::of(registry.request(reqwest::Method::GET, "/v1/events").bearer_auth(token.expose())).await;
        reader.begin().await;
        readers.push(reader);
    }
    moved(&registry, "team/agent", "a", &s).await;
    for reader in &mut readers {
        assert_eq!(reader.texts(1).await, ["tagged team/agent a"]);
    }
    // By another process.
    registry.tokens().revoke(&revoked.id()).await.expect("revoked");
    let begin = Instant::now();
    assert!(readers[0].next().await.is_none());
    assert!(begin.elapsed() < Duration::from_secs(8), "it went on for {:?}", begin.elapsed());
    moved(&registry, "team/agent", "b", &s).await;
    assert_eq!(readers[1].texts(1).await, ["tagged team/agent b"]);
}

#[tokio::test]
async fn readers_are_as_many_as_may_be_and_take_no_places_of_requests() {
    let registry = Registry::start_with(|config| (config.max_event_streams, config.max_requests, config.queue_seconds) = (2, 1, 2)).await;
    let readers = [Reader::start(&registry, "/v1/events").await, Reader::start(&registry, "/v1/events").await];
    let answer = registry.get("/v1/events").await;
    assert_eq!(answer.headers()["retry-after"], "10");
    assert!(refused(answer, ErrorCode::Overloaded).await.contains("max-event-streams"));
    until_metric(&registry, "pf_event_streams 2").await;
    // The only place of a request is free.
    registry.push(REPO, &snapshot(0..4, vec![]), Some("t")).await;
    drop(readers);
    until_metric(&registry, "pf_event_streams 0").await;
    Reader::start(&registry, "/v1/events").await;
}

#[tokio::test]
async fn one_token_cannot_keep_all_others_from_following() {
    let (_data, registry, s) = guarded(|config| (config.max_event_streams, config.max_event_streams_per_caller) = (4, 2)).await;
    let (greedy, other) = (registry.token(&["*:pull"]).await, registry.token(&["*:pull"]).await);
    let ask = |token: &pfr_schema::AccessToken| registry.request(reqwest::Method::GET, "/v1/events").bearer_auth(token.expose());
    let mut held = Vec::new();
    for token in [&greedy, &greedy, &other] {
        let mut reader = Reader::of(ask(token)).await;
        reader.begin().await;
        held.push(reader);
    }
    let answer = ask(&greedy).send().await.expect("an answer");
    assert_eq!(answer.headers()["retry-after"], "10");
    assert!(refused(answer, ErrorCode::RateLimited).await.contains("max-event-streams-per-caller"));
    moved(&registry, "team/agent", "a", &s).await;
    assert_eq!(held[2].texts(1).await, ["tagged team/agent a"]);
    // A stream that ends gives its place back.
    drop(held.remove(0));
    let again = async {
        while ask(&greedy).send().await.expect("an answer").status() != StatusCode::OK {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(FOR_EVER, again).await.expect("the place of a stream that ended is free");
}

#[tokio::test]
async fn a_registry_that_stops_ends_its_readers_at_once() {
    let registry = Registry::start_with(|config| config.shutdown_grace = 50).await;
    let mut reader = Reader::start(&registry, "/v1/events").await;
    let begin = Instant::now();
    registry.stopped().await;
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert!(reader.next().await.is_none());
}

#[tokio::test]
async fn an_idle_reader_lives_beyond_every_limit_and_has_a_comment_now_and_then() {
    let registry = Registry::start_with(|config| (config.body_idle_seconds, config.header_seconds) = (1, 1)).await;
    let mut reader = Reader::start(&registry, "/v1/events?kind=tagged").await;
    let begin = Instant::now();
    let s = snapshot(0..4, vec![]);
    registry.push(REPO, &s, None).await;
    assert_eq!(reader.block().await.expect("a comment"), (None, String::new()));
    assert!(reader.comments == 1 && begin.elapsed() > Duration::from_secs(13), "{:?}", begin.elapsed());
    let log = registry.store.begin_events().await.unwrap();
    assert_eq!(reader.id, format!("{}-{}", log.epoch, log.last), "with the id of what was left out");
    put_tag(&registry, "t", &s).await;
    assert_eq!(reader.texts(1).await, ["tagged team/agent t"]);
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_cut() {
    let registry = Registry::start_with(|config| config.body_idle_seconds = 1).await;
    let s = snapshot(0..4, vec![]);
    registry.push(REPO, &s, Some("t")).await;
    let start = Reader::start(&registry, "/v1/events").await.id;
    // More than the buffers of a connection hold.
    for fork in 0..5 {
        let body = json!({"snapshot": "t", "count": 10_000, "prefix": format!("fork-{fork}-{}", "x".repeat(100))});
        let _: Value = ok(registry.post(&format!("/v1/repositories/{REPO}/forks"), &body).await).await;
    }
    let mut stream = TcpStream::connect(registry.address).await.expect("a connection");
    let head = format!("GET /v1/events?after={start} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write_all(head.as_bytes()).await.expect("written");
    let mut beginning = [0; 15];
    stream.read_exact(&mut beginning).await.expect("an answer");
    assert_eq!(&beginning, b"HTTP/1.1 200 OK");
    until_metric(&registry, "pf_event_streams 1").await;
    until_metric(&registry, "pf_event_streams 0").await;
    // One that takes them has all of them.
    let path = format!("/v1/events?follow=false&after={start}");
    assert_eq!(Reader::of(registry.request(reqwest::Method::GET, &path)).await.rest().await.len(), 50_000);
}

#[tokio::test]
async fn an_answer_that_ends_before_the_last_event_is_cut_for_a_reader_that_does_not_wait() {
    let faults = Faults::new(0, 0.0);
    let metadata = SqliteMetadata::open_in_memory(Clock::system()).await.expect("metadata");
    let metadata = Arc::new(Transactions::new(metadata, faults.clone()));
    let registry = Registry::start_over(Store::new(Arc::new(InMemory::new()), metadata, Options::default())).await;
    let start = Reader::start(&registry, "/v1/events").await.id;
    registry.push(REPO, &snapshot(0..4, vec![]), Some("t")).await;
    let fork = json!({"snapshot": "t", "count": 1000, "prefix": "f"});
    let _: Value = ok(registry.post(&format!("/v1/repositories/{REPO}/forks"), &fork).await).await;
    let ask = || registry.request(reqwest::Method::GET, &format!("/v1/events?follow=false&after={start}")).send();
    let all = ask().await.expect("an answer").text().await.expect("all of it");
    assert_eq!(all.matches("\nevent: ").count(), 1002);
    // A database that fails now and then, at the beginning or between two pages of events.
    faults.set(0.1, false);
    let mut cut = 0;
    for _ in 0..30 {
        let Ok(answer) = ask().await else {
            cut += 1;
            continue;
        };
        if answer.status() != StatusCode::OK {
            assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
            continue;
        }
        match answer.text().await {
            Ok(text) => assert!(text == all, "it ended in order after {} of {} bytes", text.len(), all.len()),
            Err(_) => cut += 1,
        }
    }
    assert!(cut > 0, "no answer met a fault");
    faults.set(0.0, false);
}

#[tokio::test]
async fn each_domain_has_events_of_its_own_and_those_of_a_deleted_one_end() {
    let registry = Registry::start().await;
    let _: Value = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
    let mut reader = Reader::start(&registry, "/domains/acme/v1/events").await;
    let mut default = Reader::start(&registry, "/v1/events").await;
    let s = snapshot(0..4, vec![]);
    registry.push(REPO, &s, Some("t")).await;
    assert_eq!(default.texts(2).await[1], "tagged team/agent t");
    let mut push: Value = ok(registry.post(&format!("/domains/acme/v1/repositories/{REPO}/pushes"), &json!({})).await).await;
    let push = push["id"].take();
    let path = format!("/domains/acme/v1/repositories/{REPO}/pushes/{}", push.as_str().expect("an id"));
    let _: Value = ok(registry.put_frames(&path, s.stream()).await).await;
    let _: Value = ok(registry.post(&format!("{path}/commit"), &json!({"manifest": s.manifest, "tag": "mine"})).await).await;
    assert_eq!(reader.texts(2).await[1], "tagged team/agent mine");
    let id = reader.id.clone();
    assert_eq!(registry.delete("/v1/domains/acme").await.status(), StatusCode::ACCEPTED);
    assert!(reader.next().await.is_none());
    refused(registry.get(&format!("/domains/acme/v1/events?after={id}")).await, ErrorCode::DomainUnknown).await;
}
