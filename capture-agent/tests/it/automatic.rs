//! Automatic mode: saves within a budget, and state that is looked for in the store and the
//! registry.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::memory::Fault;
use crate::common::{Host, host, host_with, registry, tokens, until};
use pfr_agent::engines::Answers as _;
use pfr_schema::agent::{Push, SaveState, SnapshotRequest};
use pfr_schema::engine::{Automatic, Dropped, Fill, Find, Match, Matched, Save, Saving, Tier, ToAgent, Verb};
use pfr_schema::{Digest, ErrorCode};
use std::time::Duration;

/// Full attention in pages of 4 tokens.
fn attention(name: &str, verbs: &[Verb]) -> Spec {
    let mut spec = Spec::with(name, vec![Group::flat("main")]);
    if !verbs.is_empty() {
        spec.verbs = verbs.to_vec();
    }
    spec
}

async fn call(host: &Host, engine: &str, call: ToAgent) -> Result<serde_json::Value, pfr_agent::Error> {
    let handle = host.agent.engines().get(engine).unwrap();
    host.agent.answer(&handle, 0, call).await
}

async fn capture(host: &Host, engine: &str, sequence: &str, reference: &str, push: Push) -> Digest {
    let sequence = Some(sequence.to_owned());
    let request = SnapshotRequest { reference: reference.into(), sequence, push, ..SnapshotRequest::default() };
    host.agent.snapshot(engine, request).await.unwrap().digest
}

fn find(name: &str, tokens: Vec<u32>, least: u64) -> Find {
    let request = Some(Match { tokens, ..Match::default() });
    Find { name: name.into(), repository: Some("agents/alice".parse().unwrap()), least, limit_ms: 2000, request }
}

/// Asks as an engine does, until the answer is not "later".
async fn found(host: &Host, find: Find) -> Matched {
    let again = Find { name: find.name.clone(), ..Find::default() };
    let mut next = find;
    let asked = async {
        loop {
            match serde_json::from_value(call(host, "asks", ToAgent::Find(next)).await.unwrap()).unwrap() {
                Matched::Later {} => next = again.clone(),
                other => return other,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), asked).await.unwrap()
}

#[tokio::test]
async fn the_store_is_searched_and_what_lies_ready_comes_first() {
    let host = host().await;
    let source = Synthetic::start(&host.agent, attention("e", &[]));
    source.add("s", &tokens(62));
    let first = capture(&host, "e", "s", "agents/alice:one", Push::Never).await;
    let engine = Synthetic::start(&host.agent, attention("asks", &[Verb::Request]).placed(9, 32));

    let mut other = tokens(90);
    other[45] += 1;
    let matched = found(&host, find("f-1", other.clone(), 8)).await;
    let Matched::Ready { boundary: 44, restore, digest, partly: true, tier: Some(Tier::Store) } = matched else { panic!("{matched:?}") };
    assert_eq!(digest, first);
    engine.add("mine", &other[..45]);
    let (blocks, expected) = (engine.sequence("mine").blocks, engine.content("mine"));
    engine.add("rubbish", &tokens(40));
    call(&host, "asks", ToAgent::Fill(Fill { restore, blocks, after: None, kept: 0, fill: None })).await.unwrap();
    assert_eq!(engine.content("mine"), expected);

    // The same once more, and a deeper one that only the store has.
    let matched = found(&host, find("f-2", other.clone(), 8)).await;
    assert!(matches!(matched, Matched::Ready { boundary: 44, tier: Some(Tier::Memory), .. }), "{matched:?}");
    let mut longer = other.clone();
    longer.extend(tokens(10));
    source.add("t", &longer);
    let second = capture(&host, "e", "t", "agents/alice:two", Push::Never).await;
    let matched = found(&host, find("f-3", longer.clone(), 8)).await;
    // Not the end: the last token of the request is left to compute.
    assert!(matches!(matched, Matched::Ready { boundary: 99, digest, tier: Some(Tier::Store), .. } if digest == second), "{matched:?}");

    // Too little to gain, another user's repository, another salt.
    let other_salt = Match { tokens: other.clone(), salt: "x".into(), ..Match::default() };
    for (name, wanted) in [
        ("f-4", find("f-4", other.clone(), 95)),
        ("f-5", Find { repository: Some("agents/bob".parse().unwrap()), ..find("f-5", tokens(20), 32) }),
        ("f-6", Find { request: Some(other_salt), ..find("f-6", vec![], 8) }),
        ("f-7", find("f-7", vec![1; 50], 8)),
        ("f-8", find("f-8", vec![], 8)),
    ] {
        let matched = found(&host, wanted).await;
        assert!(matches!(matched, Matched::None { .. }), "{name}: {matched:?}");
    }
    let nameless = Find { name: "f-9".into(), ..Find::default() };
    assert_eq!(call(&host, "asks", ToAgent::Find(nameless)).await.unwrap_err().code(), ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn the_registry_is_asked_for_what_the_store_does_not_have() {
    let dir = tempfile::tempdir().unwrap();
    let url = registry(dir.path()).await;
    let of = |url: String| host_with(move |config| config.registry = Some(url));
    let (a, b) = (of(url.clone()).await, of(url).await);
    let source = Synthetic::start(&a.agent, attention("e", &[]));
    source.add("s", &tokens(62));
    let digest = capture(&a, "e", "s", "agents/alice:one", Push::Wait).await;
    let _engine = Synthetic::start(&b.agent, attention("asks", &[Verb::Request]).placed(9, 32));
    let matched = found(&b, find("f-1", tokens(90), 8)).await;
    assert!(
        matches!(matched, Matched::Ready { boundary: 61, digest: found, tier: Some(Tier::Registry), .. } if found == digest),
        "{matched:?}"
    );
    let matched = found(&b, find("f-2", tokens(90), 8)).await;
    assert!(matches!(matched, Matched::Ready { tier: Some(Tier::Memory), .. }), "{matched:?}");
}

#[tokio::test]
async fn a_registry_that_does_not_answer_costs_a_bounded_time() {
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let host = host_with(|config| config.registry = Some(url)).await;
    let source = Synthetic::start(&host.agent, attention("e", &[]));
    source.add("s", &tokens(30));
    capture(&host, "e", "s", "agents/alice:one", Push::Never).await;
    let _engine = Synthetic::start(&host.agent, attention("asks", &[Verb::Request]).placed(9, 32));
    // The store's state is offered, although the registry may have more.
    let matched = found(&host, Find { limit_ms: 50, ..find("f-1", tokens(90), 8) }).await;
    assert!(matches!(matched, Matched::Ready { boundary: 29, tier: Some(Tier::Store), .. }), "{matched:?}");
}

fn automatic(ticket: &str, bytes_per_second: Option<u64>) -> ToAgent {
    let reference = format!("agents/alice:auto-{ticket}");
    let automatic = Some(Automatic { bytes_per_second });
    ToAgent::Save(Save { ticket: ticket.into(), sequence: "s".into(), reference, parent: None, push: Push::Never, automatic })
}

#[tokio::test]
async fn automatic_saves_keep_to_their_budget_of_new_bytes() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, attention("e", &[Verb::Hold]));
    engine.add("s", &tokens(62));
    let save = async |ticket, rate| -> Saving { serde_json::from_value(call(&host, "e", automatic(ticket, rate)).await.unwrap()).unwrap() };
    assert_eq!(save("t-1", Some(1)).await, Saving::default());
    let state = || host.agent.saves().get("t-1").map(|save| save.state);
    until("it is saved", || state() == Some(SaveState::Saved)).await;
    assert_eq!(host.agent.store().metadata().evictable(10).await.unwrap().len(), 1, "a cached turn may be evicted");
    assert_eq!(save("t-2", Some(1)).await, Saving { dropped: Some(Dropped::Budget) });
    assert!(host.agent.saves().get("t-2").is_none(), "nothing is queued");
    assert_eq!(save("t-3", None).await, Saving::default(), "without a budget there is no end of it");
}

#[tokio::test]
async fn an_automatic_save_that_waits_to_be_pushed_is_neither_evicted_nor_pruned() {
    let host = host_with(|config| config.registry = Some("http://127.0.0.1:9".into())).await;
    let engine = Synthetic::start(&host.agent, attention("e", &[Verb::Hold]));
    engine.add("s", &tokens(62));
    let ToAgent::Save(save) = automatic("t-1", None) else { unreachable!() };
    call(&host, "e", ToAgent::Save(Save { push: Push::Background, ..save })).await.unwrap();
    let save = || host.agent.saves().get("t-1").unwrap();
    until("it is saved", || save().state == SaveState::Saved).await;
    let store = host.agent.store();
    assert_eq!(store.metadata().evictable(10).await.unwrap().len(), 0);
    // `pf prune` leaves what is in this list.
    let pinned = store.pinned().await.unwrap();
    assert!(pinned.len() == 1 && Some(pinned[0].snapshot.digest) == save().digest, "{pinned:?}");
}

#[tokio::test]
async fn automatic_saves_are_dropped_while_the_agent_is_behind() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, attention("e", &[Verb::Hold]));
    engine.add("s", &tokens(62));
    engine.set(Fault::Silent("hold"));
    let mut dropped = 0;
    for number in 0..40 {
        let answer = call(&host, "e", automatic(&format!("t-{number}"), None)).await.unwrap();
        let saving: Saving = serde_json::from_value(answer).unwrap();
        assert_eq!(saving.dropped.is_some(), number >= 32, "{number}");
        dropped += usize::from(saving.dropped == Some(Dropped::Behind));
    }
    assert_eq!(dropped, 8);
    // Saves that requests ask for have a queue of their own length.
    let wanted =
        Save { ticket: "wanted".into(), sequence: "s".into(), reference: "a/b:c".into(), parent: None, push: Push::Never, automatic: None };
    assert_eq!(call(&host, "e", ToAgent::Save(wanted)).await.unwrap(), serde_json::json!({}));
}
