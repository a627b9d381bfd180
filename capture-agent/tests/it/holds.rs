//! Captures of engines that hold blocks while they run, and what their requests ask for.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::memory::{Event, Fault};
use crate::common::{Host, host, host_with, registry, tokens, until};
use pfr_agent::engines::Answers as _;
use pfr_schema::agent::{Push, PushState, SaveInfo, SaveState, SnapshotRequest};
use pfr_schema::engine::{MatchKeys, Matched, Resume, Save, ToAgent, Verb};
use pfr_schema::{Digest, ErrorCode, prefix};
use std::time::Duration;

fn request(sequence: Option<&str>) -> SnapshotRequest {
    let sequence = sequence.map(Into::into);
    SnapshotRequest { reference: "team/agent:now".into(), sequence, push: Push::Never, ..SnapshotRequest::default() }
}

/// An engine that holds blocks, asks for state, and makes seven steps as soon as a sequence is
/// held.
fn holding(host: &Host, name: &str) -> Synthetic {
    let mut spec = Spec { steps_on_resume: 7, ..Spec::hybrid(name) };
    spec.verbs = vec![Verb::Hold, Verb::Request];
    Synthetic::start(&host.agent, spec)
}

async fn call(host: &Host, engine: &str, call: ToAgent) -> Result<serde_json::Value, pfr_agent::Error> {
    let handle = host.agent.engines().get(engine).unwrap();
    host.agent.answer(&handle, 0, call).await
}

fn save(ticket: &str, sequence: &str, reference: &str) -> ToAgent {
    pushed(ticket, sequence, reference, Push::Never)
}

fn pushed(ticket: &str, sequence: &str, reference: &str, push: Push) -> ToAgent {
    let (ticket, sequence, reference) = (ticket.into(), sequence.into(), reference.into());
    ToAgent::Save(Save { ticket, sequence, reference, parent: None, push, automatic: None })
}

async fn ended(host: &Host, ticket: &str) -> SaveInfo {
    let state = || host.agent.saves().get(ticket).map(|save| save.state);
    until("the save has ended", || matches!(state(), Some(SaveState::Saved | SaveState::Failed))).await;
    host.agent.saves().get(ticket).unwrap()
}

/// A request of 90 tokens that wants to resume from a reference.
async fn resume(host: &Host, engine: &Synthetic, reference: &str, first: bool) -> Matched {
    let fingerprint = prefix::fingerprint(&engine.spec.deployment);
    let told = engine.told.lock().last().map_or(vec![], |states| states.boundaries.clone());
    let keys = told.into_iter().map(|at| (at, prefix::key(&fingerprint, "", None, &tokens(90)[..at as usize]))).collect();
    let request = MatchKeys { tokens: 90, keys, ..MatchKeys::default() };
    let answer = call(host, &engine.spec.name, ToAgent::Resume(Resume { reference: reference.into(), first, request })).await;
    serde_json::from_value(answer.unwrap()).unwrap()
}

/// Asks as an engine does, until the answer is not "later".
async fn resumed(host: &Host, engine: &Synthetic, reference: &str) -> Matched {
    let mut first = true;
    loop {
        match resume(host, engine, reference, first).await {
            Matched::Later {} => first = false,
            other => return other,
        }
    }
}

#[tokio::test]
async fn a_running_engine_is_captured_as_a_paused_one_is() {
    let (still, running) = (host().await, host().await);
    let paused = Synthetic::start(&still.agent, Spec::hybrid("e").without(Verb::Oracle));
    let engine = holding(&running, "e");
    paused.add("s", &tokens(62));
    engine.add("s", &tokens(62));
    let first = still.agent.snapshot("e", request(None)).await.unwrap();
    let second = running.agent.snapshot("e", request(None)).await.unwrap();
    assert_eq!((second.boundary, second.pause_seconds), (61, 0.0));
    assert_eq!(engine.sequence("s").boundary, 68, "it went on while it was copied");
    let layers = async |host: &Host, digest: &Digest| host.agent.store().manifest(digest).await.unwrap().layers;
    assert_eq!(layers(&still, &first.digest).await, layers(&running, &second.digest).await);
    let calls: Vec<Event> = engine.journal().into_iter().filter(|event| matches!(event, Event::Call(_))).collect();
    assert_eq!(calls, ["sequences", "hold", "release"].map(Event::Call));
    assert_eq!(engine.holds(), 0);

    // The next one moves the new pages and follows the first.
    let third = running.agent.snapshot("e", request(Some("s"))).await.unwrap();
    assert_eq!((third.boundary, third.parent), (68, Some(second.digest)));
    let named = SnapshotRequest { parent: Some("team/agent:now".into()), ..request(Some("s")) };
    assert_eq!(running.agent.snapshot("e", named).await.unwrap().parent, Some(third.digest));
    let unknown = SnapshotRequest { parent: Some("team/agent:never".into()), ..request(Some("s")) };
    assert_eq!(running.agent.snapshot("e", unknown).await.unwrap_err().code(), ErrorCode::TagUnknown);
}

#[tokio::test]
async fn blocks_that_were_reused_before_the_copy_ended_publish_nothing() {
    let host = host().await;
    let engine = holding(&host, "e");
    engine.add("s", &tokens(30));
    engine.set(Fault::GoesOnAfter("hold"));
    let error = host.agent.snapshot("e", request(None)).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::HoldEnded { .. }), "{error}");
    let repository = "team/agent".parse().unwrap();
    let tag = pfr_schema::Selector::Tag { tag: "now".parse().unwrap(), back: 0 };
    assert!(host.agent.store().resolve(&repository, &tag).await.is_err(), "it was published");
    engine.heal();
    host.agent.snapshot("e", request(None)).await.unwrap();
}

#[tokio::test]
async fn whatever_fails_lets_the_blocks_go() {
    let host = host().await;
    let engine = holding(&host, "e");
    engine.add("s", &tokens(30));
    for fault in [Fault::PanicInHash, Fault::ReadFails, Fault::Torn, Fault::NoRoom] {
        engine.set(fault);
        host.agent.snapshot("e", request(None)).await.unwrap_err();
        until("the blocks are let go", || engine.holds() == 0).await;
        engine.heal();
    }
    let error = host.agent.snapshot("e", request(Some("other"))).await.unwrap_err();
    assert!(matches!(&error, pfr_agent::Error::SequenceUnknown { known, .. } if known == "s"), "{error}");
    engine.add("t", &tokens(10));
    let error = host.agent.snapshot("e", request(None)).await.unwrap_err();
    assert!(matches!(&error, pfr_agent::Error::SequenceAmbiguous { known, .. } if known == "s, t"), "{error}");
}

#[tokio::test]
async fn a_request_saves_its_sequence_and_the_ticket_tells_the_digest() {
    let host = host().await;
    let engine = holding(&host, "e");
    engine.add("s", &tokens(62));
    call(&host, "e", save("t-1", "s", "team/agent:step-1")).await.unwrap();
    let saved = ended(&host, "t-1").await;
    assert_eq!((saved.state, saved.boundary, saved.error.as_deref()), (SaveState::Saved, Some(61), None));
    let tag = pfr_schema::Selector::Tag { tag: "step-1".parse().unwrap(), back: 0 };
    assert_eq!(host.agent.store().resolve(&"team/agent".parse().unwrap(), &tag).await.ok(), saved.digest);

    for (wrong, word) in [
        (save("t-1", "s", "team/agent:step-2"), "twice"),
        (save("", "s", "team/agent:step-2"), "1 to 64 bytes"),
        (save("t-2", "s", "team/agent@2a19b2c9309a"), "under a tag"),
        (save("t-2", "s", "http://127.0.0.1:9/team/agent:x"), "no other registry"),
    ] {
        let error = call(&host, "e", wrong).await.unwrap_err();
        assert!(error.code() == ErrorCode::InvalidRequest && error.to_string().contains(word), "{error}");
    }
    call(&host, "e", save("t-3", "gone", "team/agent:step-3")).await.unwrap();
    let failed = ended(&host, "t-3").await;
    assert_eq!((failed.state, failed.code), (SaveState::Failed, Some(ErrorCode::SequenceUnknown)));
    assert_eq!(host.agent.saves().of("e").len(), 2);

    let plain = Synthetic::start(&host.agent, Spec::hybrid("pauses"));
    plain.add("s", &tokens(20));
    let error = call(&host, "pauses", save("t-4", "s", "team/agent:x")).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::NotServed { verb: "hold", .. }), "{error}");
}

#[tokio::test]
async fn saves_of_one_engine_do_not_refuse_each_other() {
    let host = host().await;
    let engine = holding(&host, "e");
    for at in 0..3 {
        engine.add(&format!("s-{at}"), &tokens(20 + at));
        call(&host, "e", save(&format!("t-{at}"), &format!("s-{at}"), &format!("team/agent:s-{at}"))).await.unwrap();
    }
    for at in 0..3 {
        let saved = ended(&host, &format!("t-{at}")).await;
        assert_eq!(saved.state, SaveState::Saved, "{saved:?}");
    }
    assert_eq!(engine.holds(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn saves_that_hang_are_given_up_and_those_of_other_engines_go_on() {
    // A save may take ten times as long.
    let host = host_with(|config| config.pause_limit = Duration::from_millis(300)).await;
    let verbs = vec![Verb::Hold, Verb::Request];
    let mut spec = Spec { own_ring: true, verbs, ..Spec::hybrid("hung") };
    // Four sequences, and a copy of the last block of each.
    spec.groups.iter_mut().for_each(|group| group.blocks = group.blocks.max(16));
    let hung = Synthetic::start(&host.agent, spec);
    let well = holding(&host, "well");
    well.add("s", &tokens(40));
    let held = hung.watch.hold_reads();
    for at in 0..4 {
        hung.add(&format!("s-{at}"), &tokens(20 + at));
        call(&host, "hung", save(&format!("t-{at}"), &format!("s-{at}"), &format!("team/agent:s-{at}"))).await.unwrap();
    }
    call(&host, "well", save("t-4", "s", "team/agent:well")).await.unwrap();
    for at in 0..4 {
        let given_up = ended(&host, &format!("t-{at}")).await;
        assert_eq!((given_up.state, given_up.code), (SaveState::Failed, Some(ErrorCode::Timeout)), "{given_up:?}");
        assert_eq!(given_up.error, Some(format!("s-{at} of hung was not captured within 3 s")));
    }
    let saved = ended(&host, "t-4").await;
    assert_eq!(saved.state, SaveState::Saved, "{saved:?}");
    drop(held);
    until("the blocks are let go", || hung.holds() == 0).await;
}

#[tokio::test]
async fn a_request_resumes_from_what_it_names() {
    let host = host().await;
    let engine = holding(&host, "e");
    engine.add("s", &tokens(62));
    let digest = host.agent.snapshot("e", request(None)).await.unwrap().digest;
    let Matched::Ready { boundary: 61, digest: found, restore, partly: false, tier: None } =
        resumed(&host, &engine, "team/agent:now").await
    else {
        panic!("nothing is ready")
    };
    assert_eq!(found, digest);
    // The second request finds it verified: nothing is read again.
    engine.forget_journal();
    let again = resumed(&host, &engine, "team/agent:now").await;
    assert_eq!(again, Matched::Ready { boundary: 61, digest, restore, partly: false, tier: None });

    for (reference, word) in [
        ("team/agent:never", "tag_unknown"),
        ("", "invalid"),
        ("no such/thing", "invalid"),
        ("http://127.0.0.1:9/a/b:c", "no other registry"),
    ] {
        let Matched::None { reason } = resumed(&host, &engine, reference).await else { panic!("{reference}") };
        assert!(reason.contains(word), "{reason}");
    }

    // A tag that moves: the next request gets what it points to now.
    let other = Synthetic::start(&host.agent, Spec::hybrid("other"));
    other.add("s", &tokens(50));
    let moved = host.agent.snapshot("other", request(None)).await.unwrap().digest;
    let Matched::Ready { boundary: 49, digest: found, .. } = resumed(&host, &engine, "team/agent:now").await else {
        panic!("the tag has moved")
    };
    assert_eq!(found, moved);
}

#[tokio::test]
async fn a_request_goes_back_by_a_number_of_parents() {
    let host = host().await;
    let engine = holding(&host, "e");
    engine.add("s", &tokens(62));
    let first = host.agent.snapshot("e", request(None)).await.unwrap();
    let second = host.agent.snapshot("e", request(None)).await.unwrap();
    assert_eq!((second.boundary, second.parent), (68, Some(first.digest)));
    // The engine went another way than the request after token 62.
    let now = resumed(&host, &engine, "team/agent:now").await;
    assert!(matches!(now, Matched::None { .. }), "{now:?}");
    let before = resumed(&host, &engine, "team/agent:now~1").await;
    assert!(matches!(before, Matched::Ready { boundary: 61, digest, .. } if digest == first.digest), "{before:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_resume_asks_the_registry_unless_a_save_here_is_not_pushed_yet() {
    let dir = tempfile::tempdir().unwrap();
    let url = registry(dir.path()).await;
    let of = |url: &str| {
        let url = url.to_owned();
        host_with(move |config| config.registry = Some(url))
    };
    let (a, b) = (of(&url).await, of(&url).await);
    let (here, there) = (holding(&a, "e"), holding(&b, "e"));
    here.add("s", &tokens(62));
    there.add("s", &tokens(50));
    call(&a, "e", pushed("t-1", "s", "team/agent:x", Push::Background)).await.unwrap();
    let job = ended(&a, "t-1").await.push.expect("it is pushed");
    let state = || a.agent.pushes().list().into_iter().find(|push| push.id == job).map(|push| push.state);
    until("it is pushed", || state().is_none_or(|state| state == PushState::Done)).await;
    // Another host moves the tag.
    let wanted = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Wait, ..SnapshotRequest::default() };
    let moved = b.agent.snapshot("e", wanted).await.unwrap().digest;
    let found = resumed(&a, &here, "team/agent:x").await;
    assert!(matches!(found, Matched::Ready { boundary: 49, digest, .. } if digest == moved), "{found:?}");
    // A newer save here that stays here.
    here.add("u", &tokens(40));
    call(&a, "e", save("t-2", "u", "team/agent:x")).await.unwrap();
    let saved = ended(&a, "t-2").await.digest;
    let found = resumed(&a, &here, "team/agent:x").await;
    assert!(matches!(found, Matched::Ready { boundary: 39, digest, .. } if Some(digest) == saved), "{found:?}");

    // A further one that fails changes nothing.
    call(&a, "e", save("t-4", "gone", "team/agent:x")).await.unwrap();
    assert_eq!(ended(&a, "t-4").await.state, SaveState::Failed);
    let found = resumed(&a, &here, "team/agent:x").await;
    assert!(matches!(found, Matched::Ready { boundary: 39, digest, .. } if Some(digest) == saved), "{found:?}");

    // The registry of a third host is away: the agent finds a save here that waits to be pushed.
    let c = of("http://127.0.0.1:9").await;
    let alone = holding(&c, "e");
    alone.add("s", &tokens(62));
    call(&c, "e", pushed("t-3", "s", "team/agent:x", Push::Background)).await.unwrap();
    let saved = ended(&c, "t-3").await.digest;
    let found = resumed(&c, &alone, "team/agent:x").await;
    assert!(matches!(found, Matched::Ready { boundary: 61, digest, .. } if Some(digest) == saved), "{found:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn ancestors_of_a_save_that_is_not_pushed_come_from_the_registry() {
    let dir = tempfile::tempdir().unwrap();
    let url = registry(dir.path()).await;
    let of = || {
        let url = url.clone();
        host_with(move |config| config.registry = Some(url))
    };
    let (a, b) = (of().await, of().await);
    let (there, here) = (holding(&a, "e"), holding(&b, "e"));
    there.add("s", &tokens(62));
    let mut digests = Vec::new();
    for _ in 0..3 {
        let wanted = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Wait, ..SnapshotRequest::default() };
        digests.push(a.agent.snapshot("e", wanted).await.unwrap().digest);
    }
    // The third one comes here, and a save that follows it stays here.
    resumed(&b, &here, "team/agent:x").await;
    here.add("s", &tokens(40));
    let follow = |ticket: &str, reference: &str, parent: String| {
        let ToAgent::Save(save) = save(ticket, "s", reference) else { unreachable!() };
        ToAgent::Save(Save { parent: Some(parent), ..save })
    };
    call(&b, "e", follow("t-1", "team/agent:x", "team/agent:x".into())).await.unwrap();
    assert_eq!(ended(&b, "t-1").await.state, SaveState::Saved);
    let found = resumed(&b, &here, "team/agent:x~3").await;
    assert!(matches!(found, Matched::Ready { boundary: 61, digest, .. } if digest == digests[0]), "{found:?}");

    // The parent of this one is not here, and the registry does not know the save.
    call(&b, "e", follow("t-2", "team/agent:y", digests[1].to_string())).await.unwrap();
    assert_eq!(ended(&b, "t-2").await.state, SaveState::Saved);
    let found = resumed(&b, &here, "team/agent:y~2").await;
    assert!(matches!(found, Matched::Ready { boundary: 61, digest, .. } if digest == digests[0]), "{found:?}");

    let Matched::None { reason } = resumed(&b, &here, "team/agent:y~3").await else { panic!("it is nowhere") };
    assert!(reason.contains("snapshot_unknown"), "{reason}");
}

/// The engine of the tests waits for room in the ring too, on a thread of the runtime.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_resume_waits_for_the_save_under_that_name_and_no_other_request_waits_for_it() {
    let host = host().await;
    let engine = holding(&host, "e");
    engine.add("s", &tokens(62));
    let ring = host.agent.engines().ring().clone();
    let all = ring.acquire(ring.total()).unwrap();
    call(&host, "e", save("t-1", "s", "team/agent:step-1")).await.unwrap();
    // It waits for room to read into.
    until("the save holds the blocks", || engine.journal().contains(&Event::Call("hold"))).await;
    assert_eq!(resume(&host, &engine, "team/agent:step-1", true).await, Matched::Later {});
    let other = call(&host, "e", ToAgent::MatchKeys(MatchKeys { tokens: 40, ..MatchKeys::default() })).await.unwrap();
    assert!(matches!(serde_json::from_value(other).unwrap(), Matched::None { .. }));
    drop(all);
    let Matched::Ready { boundary: 61, digest, .. } = resumed(&host, &engine, "team/agent:step-1").await else { panic!("not ready") };
    assert_eq!(Some(digest), ended(&host, "t-1").await.digest);
}
