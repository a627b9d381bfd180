//! Restores for engines that ask: a snapshot lies ready for them, and is written into the blocks
//! that a request got.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::memory::{Event, Fault};
use crate::common::{Host, capture, host, restore, tokens, until};
use pfr_agent::engines::Answers as _;
use pfr_schema::agent::{RestoreOutcome, RestoreRecord, RestoreRequest};
use pfr_schema::engine::{Abandon, Fill, Match, MatchKeys, Matched, Outcome, OutcomeRequest, Report, Taking, ToAgent};
use pfr_schema::{Digest, ErrorCode, prefix};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;

#[tokio::test]
async fn an_engine_that_asks_gets_the_deepest_state_that_fits() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    capture(&host, "e", "now").await;
    let asking = Synthetic::start(&host.agent, Spec::hybrid("asks").placed(9, 32).requests_only());
    let handle = host.agent.engines().get("asks").unwrap();
    let ask = async |request: Match| {
        let answer = host.agent.answer(&handle, 0, ToAgent::Match(request)).await.unwrap();
        serde_json::from_value::<Matched>(answer).unwrap()
    };
    let request = || Match { tokens: tokens(62), ..Match::default() };
    assert!(matches!(ask(request()).await, Matched::None { .. }));

    let report = restore(&host, "asks", "now").await.unwrap();
    assert_eq!((report.sequence, report.boundary, report.bytes_written), (None, 61, 0));
    assert_eq!(asking.journal(), []);
    let mut other = request();
    other.tokens[60] += 1;
    for (request, word) in [
        (other, "token 60 differs"),
        (Match { salt: "x".into(), ..request() }, "salt or adapter"),
        (Match { adapter: Some("x".into()), ..request() }, "salt or adapter"),
        (Match { tokens: tokens(61), ..request() }, "no token is left"),
        (Match { tokens: tokens(40), ..request() }, "the request has 40"),
        (Match { computed: 61, ..request() }, "already"),
    ] {
        let Matched::None { reason } = ask(request).await else { panic!("{word}") };
        assert!(reason.contains(word), "{reason}");
    }
    let Matched::Ready { boundary, restore: name, .. } = ask(Match { tokens: tokens(90), computed: 48, ..Match::default() }).await else {
        panic!("nothing ready")
    };
    assert_eq!(boundary, 61);

    // The engine allocates as if the sequence were its own; the content is the first engine's.
    asking.add("mine", &tokens(62));
    let blocks = asking.sequence("mine").blocks;
    let expected = engine.content("s");
    for (group, list) in &blocks {
        assert!(!list.is_empty(), "{group}");
    }
    wipe(&asking);
    assert_ne!(asking.content("mine"), expected);
    let fill = |blocks| ToAgent::Fill(Fill { restore: name.clone(), blocks, after: None, kept: 0, fill: None });
    host.agent.answer(&handle, 0, fill(blocks.clone())).await.unwrap();
    assert_eq!(asking.content("mine"), expected);
    host.agent.answer(&handle, 0, ToAgent::Abandon(Abandon { restore: name.clone(), fill: None })).await.unwrap();

    // Memory that lies: an error, and the state is not offered again.
    asking.set(Fault::WritesLie);
    let error = host.agent.answer(&handle, 0, fill(blocks)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::LiveMismatch);
    assert!(matches!(ask(request()).await, Matched::None { .. }));
}

#[tokio::test]
async fn a_request_takes_the_pages_before_the_token_in_which_it_differs() {
    let host = host().await;
    let source = Synthetic::start(&host.agent, Spec::attention("e"));
    source.add("s", &tokens(62));
    let digest = capture(&host, "e", "now").await;
    let engine = Synthetic::start(&host.agent, Spec::attention("asks").placed(9, 32).requests_only());
    restore(&host, "asks", "now").await.unwrap();
    let told = engine.told.lock().last().cloned().unwrap();
    assert_eq!((told.boundaries, told.shortest), (vec![61], Some(8)));
    let handle = host.agent.engines().get("asks").unwrap();
    let call = async |call| host.agent.answer(&handle, 0, call).await;
    let ask = async |request| serde_json::from_value::<Matched>(call(request).await.unwrap()).unwrap();
    let keys = |tokens: &[u32]| {
        let fingerprint = prefix::fingerprint(&engine.spec.deployment);
        let mut keys = prefix::rungs(&fingerprint, "", None, tokens);
        keys.retain(|(at, _)| *at < 61);
        keys.extend((tokens.len() > 61).then(|| (61, prefix::key(&fingerprint, "", None, &tokens[..61]))));
        ToAgent::MatchKeys(MatchKeys { tokens: tokens.len() as u64, keys, ..MatchKeys::default() })
    };

    let mut other = tokens(90);
    other[45] += 1;
    assert_eq!(ask(keys(&other)).await, Matched::Tokens { of: None });
    let request = |tokens: &[u32], computed| ToAgent::Match(Match { tokens: tokens.to_vec(), computed, ..Match::default() });
    let matched = ask(request(&other, 0)).await;
    let Matched::Ready { boundary: 40, restore: name, digest: found, partly: true, tier: None } = matched else { panic!("{matched:?}") };
    assert_eq!(found, digest);
    // A shorter request, one that ends where the state does, one that has all of it, one that has
    // none.
    for (tokens, boundary) in [(tokens(30), 24), (tokens(61), 56), (tokens(62), 61)] {
        let matched = ask(request(&tokens, 0)).await;
        assert!(matches!(matched, Matched::Ready { boundary: at, partly, .. } if at == boundary && partly == (at < 61)), "{matched:?}");
    }
    assert!(matches!(ask(request(&tokens(8), 0)).await, Matched::None { .. }));
    assert!(matches!(ask(request(&other, 40)).await, Matched::None { .. }));
    let of_another = Match { tokens: other.clone(), of: Some(Digest::sha256(b"x")), ..Match::default() };
    assert!(matches!(ask(ToAgent::Match(of_another)).await, Matched::None { .. }));

    // The state that the engine would compute itself.
    engine.add("mine", &other[..41]);
    let (blocks, expected) = (engine.sequence("mine").blocks, engine.content("mine"));
    let fill = |restore: &str, blocks: &Blocks, kept| {
        ToAgent::Fill(Fill { restore: restore.into(), blocks: blocks.clone(), after: None, kept, fill: None })
    };
    wipe(&engine);
    let filled = call(fill(&name, &blocks, 0)).await.unwrap();
    assert_eq!(filled, json!({}), "no logits were recorded there");
    assert_eq!(engine.content("mine"), expected);
    call(fill(&name, &blocks, 16)).await.unwrap();
    wipe(&engine);
    assert_eq!(call(fill(&name, &blocks, 16)).await.unwrap_err().code(), ErrorCode::KeptDiffers);
    let outcomes = vec![Outcome { restore: Some(name.clone()), what: Taking::Taken, count: 3, requests: vec![] }];
    call(ToAgent::Report(Report { outcomes })).await.unwrap();
    assert_eq!(host.agent.staged().info("asks").0[0].outcomes[&Taking::Taken], 3);
    // A position that no match named.
    let forged = name.replace("@40", "@44");
    assert_eq!(call(fill(&forged, &blocks, 0)).await.unwrap_err().code(), ErrorCode::BoundaryMismatch);
}

/// An engine that asks, with a captured snapshot of 61 tokens ready for it: its state is the
/// content of the other engine.
struct Asking {
    host: Host,
    source: Synthetic,
    engine: Synthetic,
    restore: String,
}

impl Asking {
    async fn start() -> Self {
        let host = host().await;
        let source = Synthetic::start(&host.agent, Spec::hybrid("e"));
        source.add("s", &tokens(62));
        capture(&host, "e", "now").await;
        let engine = Synthetic::start(&host.agent, Spec::hybrid("asks").placed(9, 32).requests_only());
        restore(&host, "asks", "now").await.unwrap();
        let mut asking = Self { host, source, engine, restore: String::new() };
        let matched = asking.ask(asking.keys(&tokens(90))).await;
        let Matched::Ready { boundary: 61, restore, .. } = matched else { panic!("{matched:?}") };
        asking.restore = restore;
        asking
    }

    async fn call(&self, call: ToAgent) -> pfr_agent::Result<Value> {
        let handle = self.host.agent.engines().get("asks").unwrap();
        self.host.agent.answer(&handle, 0, call).await
    }

    fn spawn(self: &Arc<Self>, call: ToAgent) -> JoinHandle<pfr_agent::Result<Value>> {
        let asking = Arc::clone(self);
        tokio::spawn(async move { asking.call(call).await })
    }

    async fn ask(&self, call: ToAgent) -> Matched {
        serde_json::from_value(self.call(call).await.unwrap()).unwrap()
    }

    /// The question of a request, by the keys at the lengths that the engine was told.
    fn keys(&self, tokens: &[u32]) -> ToAgent {
        let boundaries = self.engine.told.lock().last().map_or(vec![], |states| states.boundaries.clone());
        let fingerprint = prefix::fingerprint(&self.engine.spec.deployment);
        let lengths = boundaries.into_iter().filter(|at| (*at as usize) < tokens.len());
        let keys = lengths.map(|at| (at, prefix::key(&fingerprint, "", None, &tokens[..at as usize]))).collect();
        ToAgent::MatchKeys(MatchKeys { tokens: tokens.len() as u64, keys, ..MatchKeys::default() })
    }

    fn fill(&self, blocks: &Blocks, kept: u64, fill: &str) -> ToAgent {
        ToAgent::Fill(Fill { restore: self.restore.clone(), blocks: blocks.clone(), after: None, kept, fill: Some(fill.into()) })
    }
}

/// Blocks of an engine that asks, with the names of their groups.
type Blocks = BTreeMap<String, Vec<u32>>;

/// An engine whose blocks are being filled, as the fill `a-1`, until its writes are released.
async fn filling() -> (Arc<Asking>, Blocks, JoinHandle<pfr_agent::Result<Value>>) {
    let asking = Arc::new(Asking::start().await);
    let engine = &asking.engine;
    engine.add("mine", &tokens(62));
    let blocks = engine.sequence("mine").blocks;
    engine.watch.hold_writes();
    let filling = asking.spawn(asking.fill(&blocks, 0, "a-1"));
    until("it writes", || engine.watch.is_writing()).await;
    (asking, blocks, filling)
}

#[tokio::test]
async fn an_engine_knows_what_lies_ready_when_the_restore_returns_and_asks_with_keys() {
    let asking = Asking::start().await;
    let told = asking.engine.told.lock().clone();
    assert_eq!(told.last().map(|states| (states.boundaries.clone(), states.expected)), Some((vec![61], false)));
    assert!(told.windows(2).all(|two| two[0].version <= two[1].version), "{told:?}");
    let mut other = tokens(90);
    other[60] += 1;
    let Matched::None { reason } = asking.ask(asking.keys(&other)).await else { panic!("another token") };
    assert!(reason.contains("does not hold"), "{reason}");
    // Asked before the engine knew.
    let early = ToAgent::MatchKeys(MatchKeys { tokens: 90, ..MatchKeys::default() });
    assert_eq!(asking.ask(early).await, Matched::Later {});
    let twice = (16, Digest::sha256(b"x"));
    let senseless = ToAgent::MatchKeys(MatchKeys { tokens: 90, keys: vec![twice, twice], ..MatchKeys::default() });
    assert_eq!(asking.call(senseless).await.unwrap_err().code(), ErrorCode::InvalidRequest);

    // States that are not taken are reported and kept.
    let outcome = |restore: Option<&str>, what| Outcome { restore: restore.map(Into::into), what, count: 2, requests: vec![] };
    let outcomes = vec![outcome(Some(&asking.restore), Taking::FillLate), outcome(None, Taking::AgentSilent)];
    asking.call(ToAgent::Report(Report { outcomes })).await.unwrap();
    let (staged, unmatched) = asking.host.agent.staged().info("asks");
    assert_eq!((staged[0].boundary, staged[0].ready, staged[0].outcomes[&Taking::FillLate]), (61, true, 2));
    assert_eq!(unmatched[&Taking::AgentSilent], 2);

    // A state whose first step has other logits is not offered again.
    let report = async |what| asking.call(ToAgent::Report(Report { outcomes: vec![outcome(Some(&asking.restore), what)] })).await.unwrap();
    report(Taking::LogitsEqual).await;
    assert_eq!(asking.host.agent.staged().info("asks").0[0].outcomes[&Taking::LogitsEqual], 2);
    report(Taking::LogitsDiffer).await;
    assert_eq!(asking.host.agent.staged().info("asks").0.len(), 0);
}

#[tokio::test]
async fn what_became_of_each_request_is_listed_with_the_reason_that_the_engine_gave() {
    let asking = Asking::start().await;
    let engine = &asking.engine;
    engine.add("mine", &tokens(62));
    let blocks = engine.sequence("mine").blocks;
    asking.call(asking.fill(&blocks, 0, "a-1")).await.unwrap();
    asking.call(asking.fill(&blocks, 32, "a-2")).await.unwrap();
    let listed = || asking.host.agent.records().list("asks", usize::MAX).unwrap();
    let outcomes = |records: &[RestoreRecord]| records.iter().map(|record| record.outcome).collect::<Vec<_>>();
    assert_eq!(outcomes(&listed()), [RestoreOutcome::Filled, RestoreOutcome::Filled, RestoreOutcome::Ready]);

    let named = |request: &str, fill: Option<&str>| OutcomeRequest { request: request.into(), fill: fill.map(Into::into) };
    let of = |what, requests| Outcome { restore: Some(asking.restore.clone()), what, count: 1, requests };
    let told = vec![
        of(Taking::TakenOnKept, vec![named("two", Some("a-2"))]),
        of(Taking::EngineHasMore, vec![named("three", None)]),
        Outcome { restore: None, what: Taking::AgentSilent, count: 7, requests: vec![] },
        of(Taking::Taken, vec![named("one", Some("a-1"))]),
        Outcome { restore: None, what: Taking::HitMemory, count: 9, requests: vec![] },
    ];
    asking.call(ToAgent::Report(Report { outcomes: told })).await.unwrap();
    let records = listed();
    let [silent, more, two, one, ready] = &records[..] else { panic!("{records:?}") };
    assert_eq!(
        outcomes(&records),
        [RestoreOutcome::NotTaken, RestoreOutcome::NotTaken, RestoreOutcome::Restored, RestoreOutcome::Restored, RestoreOutcome::Ready]
    );
    assert_eq!((silent.reason, silent.requests, silent.digest), (Some(Taking::AgentSilent), 7, None));
    assert_eq!((more.reason, more.request.as_deref()), (Some(Taking::EngineHasMore), Some("three")));
    assert_eq!((one.request.as_deref(), two.request.as_deref()), (Some("one"), Some("two")));
    for record in [more, two, one, ready] {
        assert_eq!((record.reference.as_deref(), record.digest, record.position), (Some("team/agent:now"), ready.digest, Some(61)));
    }
    // Pages that the engine has are compared and not written.
    assert_eq!((one.pages_kept, one.pages_filled, ready.pages_filled), (0, two.pages_kept + two.pages_filled, 0));
    assert!(0 < two.pages_kept && two.bytes_written < one.bytes_written, "{records:?}");

    // A fill that the memory does not take: its error, and then what the engine made of it.
    engine.set(Fault::WritesLie);
    let error = asking.call(asking.fill(&blocks, 0, "a-3")).await.unwrap_err();
    let failed = &listed()[0];
    assert_eq!((failed.outcome, failed.code, failed.digest), (RestoreOutcome::Failed, Some(error.code()), ready.digest));
    let outcomes = vec![of(Taking::FillFailed, vec![named("four", Some("a-3"))])];
    asking.call(ToAgent::Report(Report { outcomes })).await.unwrap();
    let failed = &listed()[0];
    assert_eq!((failed.outcome, failed.reason), (RestoreOutcome::NotTaken, Some(Taking::FillFailed)));
    assert_eq!((failed.request.as_deref(), failed.error.as_deref()), (Some("four"), Some(error.to_string().as_str())));
    assert_eq!(listed().len(), 6);
}

#[tokio::test]
async fn blocks_that_the_engine_has_are_compared_and_not_written() {
    let asking = Asking::start().await;
    let engine = &asking.engine;
    engine.add("mine", &tokens(62));
    let blocks = engine.sequence("mine").blocks;
    let restores = || asking.host.agent.engines().list().into_iter().find(|info| info.engine == "asks").unwrap().restores;
    assert_eq!(restores(), 0, "ready is not taken");
    engine.forget_journal();
    let filled = asking.call(asking.fill(&blocks, 32, "a-1")).await.unwrap();
    assert_eq!(filled["oracle"]["boundary"], 61, "the logits of the first step go with it: {filled}");
    assert_eq!(engine.content("mine"), asking.source.content("s"));
    assert_eq!(restores(), 1);
    let written = |journal: Vec<Event>| journal.iter().map(|event| if let Event::Write(pages) = event { *pages } else { 0 }).sum::<usize>();
    let part = written(engine.journal());
    engine.forget_journal();
    asking.call(asking.fill(&blocks, 0, "a-2")).await.unwrap();
    let all = written(engine.journal());
    assert!(0 < part && part < all, "{part} of {all} pages written");

    // A page that the engine computed differently: it is not written, and the state stays ready.
    wipe(engine);
    let before = engine.content("mine");
    let error = asking.call(asking.fill(&blocks, 32, "a-3")).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Kept { .. }), "{error}");
    assert_eq!(error.code(), ErrorCode::KeptDiffers);
    let (name, first) = &before[0];
    let after = engine.content("mine");
    let kept = after.iter().filter(|(_, bytes)| bytes.iter().all(|byte| *byte == 0xee)).count();
    assert!(kept > 0, "the engine's own pages are as they were, {name} had {} bytes", first.len());
    assert!(matches!(asking.ask(asking.keys(&tokens(90))).await, Matched::Ready { .. }));
    asking.call(asking.fill(&blocks, 0, "a-4")).await.unwrap();
    assert_eq!(engine.content("mine"), asking.source.content("s"));
    // As many tokens as the state has: there is nothing to fill.
    assert_eq!(asking.call(asking.fill(&blocks, 61, "a-5")).await.unwrap_err().code(), ErrorCode::InvalidRequest);
}

#[tokio::test]
async fn an_engine_gets_its_blocks_back_when_no_late_write_can_come() {
    let (asking, blocks, filling) = filling().await;
    let engine = &asking.engine;
    let abandon = |fill: &str| ToAgent::Abandon(Abandon { restore: asking.restore.clone(), fill: Some(fill.into()) });
    let giving_up = asking.spawn(abandon("a-1"));
    // Its gate is closed, and it still waits.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!giving_up.is_finished(), "a write is in flight");
    engine.watch.release_writes();
    giving_up.await.unwrap().unwrap();
    assert!(!engine.watch.is_writing());
    // All of it was one copy, so it may have ended well.
    drop(filling.await.unwrap());

    // Given up before it came: the call may lie in the socket of another rank.
    asking.call(abandon("a-2")).await.unwrap();
    engine.forget_journal();
    let error = asking.call(asking.fill(&blocks, 0, "a-2")).await.unwrap_err();
    assert!(error.to_string().contains("gave up"), "{error}");
    assert_eq!(engine.journal(), []);
}

#[tokio::test]
async fn an_agent_that_stops_waits_for_copies_and_begins_no_other() {
    let (asking, blocks, filling) = filling().await;
    let engine = &asking.engine;
    let engines = asking.host.agent.engines().clone();
    assert!(!engines.settle(Duration::from_millis(20)).await, "a write is in flight");
    // Neither a fill begins, nor a restore into an engine that takes sequences.
    let error = asking.call(asking.fill(&blocks, 0, "a-2")).await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Ended), "{error}");
    let error = restore(&asking.host, "e", "now").await.unwrap_err();
    assert!(matches!(error, pfr_agent::Error::Ended), "{error}");
    until("its blocks are back", || asking.source.waiting().is_empty()).await;
    let settling = tokio::spawn(async move { engines.settle(Duration::from_secs(20)).await });
    engine.watch.release_writes();
    assert!(settling.await.unwrap(), "the write has ended");
    assert!(!engine.watch.is_writing());
    drop(filling.await.unwrap());
    assert_eq!(asking.host.agent.staged().info("asks").0.len(), 1, "nothing is said against the state");
}

/// An engine that asks.
fn asking(host: &Host, name: &str, weights: &str) -> Synthetic {
    let mut spec = Spec::flat(name).requests_only();
    spec.deployment.insert("weights".into(), json!(weights));
    Synthetic::start(&host.agent, spec)
}

/// A host with a snapshot of 29 tokens.
async fn with_snapshot() -> Host {
    let host = host().await;
    let source = Synthetic::start(&host.agent, Spec::flat("e"));
    source.add("s", &tokens(30));
    capture(&host, "e", "now").await;
    host
}

#[tokio::test]
async fn the_oldest_of_more_than_64_ready_snapshots_goes_and_a_newer_restore_replaces_an_older_one() {
    let host = with_snapshot().await;
    let name = |number: usize| format!("asks-{number}");
    let mut engines: Vec<Synthetic> = (0..66).map(|number| asking(&host, &name(number), "sha256:w")).collect();
    let ready = |number: usize| host.agent.staged().info(&name(number)).0;
    let stage = async |number: usize| restore(&host, &name(number), "now").await.unwrap();
    for number in 0..64 {
        stage(number).await;
    }
    let first = ready(0)[0].restore.clone();
    let report = stage(0).await;
    let again = ready(0);
    assert!(again.len() == 1 && again[0].ready && again[0].digest == report.digest && again[0].restore != first, "{again:?}");
    // The older one has no name any more.
    let handle = host.agent.engines().get(&name(0)).unwrap();
    let fill = ToAgent::Fill(Fill { restore: first, blocks: BTreeMap::new(), after: None, kept: 0, fill: None });
    assert_eq!(host.agent.answer(&handle, 0, fill).await.unwrap_err().code(), ErrorCode::InvalidRequest);

    // Now that of engine 1 is the oldest.
    stage(64).await;
    assert_eq!((0..65).filter(|number| ready(*number).is_empty()).collect::<Vec<_>>(), [1]);
    let told = |engine: &Synthetic| engine.told.lock().last().map(|states| states.boundaries.clone());
    until("the engine that lost it is told", || told(&engines[1]) == Some(vec![])).await;
    assert_eq!(told(&engines[64]), Some(vec![29]));
    // A snapshot that lay ready for an engine that left goes first.
    engines[5].leave();
    stage(65).await;
    assert_eq!((0..66).filter(|number| ready(*number).is_empty()).collect::<Vec<_>>(), [1, 5]);
}

#[tokio::test]
async fn an_engine_that_comes_back_finds_what_lay_ready_and_another_one_of_its_name_cannot_use_it() {
    let host = with_snapshot().await;
    let request = || ToAgent::Match(Match { tokens: tokens(40), ..Match::default() });
    let ask = async || {
        let handle = host.agent.engines().get("asks").unwrap();
        serde_json::from_value::<Matched>(host.agent.answer(&handle, 0, request()).await.unwrap()).unwrap()
    };
    let mut engine = asking(&host, "asks", "sha256:w");
    restore(&host, "asks", "now").await.unwrap();
    engine.leave();
    let engine = asking(&host, "asks", "sha256:w");
    assert!(matches!(ask().await, Matched::Ready { boundary: 29, .. }));
    drop(engine);

    let other = asking(&host, "asks", "sha256:other");
    let Matched::Ready { restore: name, .. } = ask().await else { panic!("tokens alone do not tell the weights") };
    other.add("mine", &tokens(30));
    other.forget_journal();
    let fill = Fill { restore: name, blocks: other.sequence("mine").blocks, after: None, kept: 0, fill: None };
    let handle = host.agent.engines().get("asks").unwrap();
    let error = host.agent.answer(&handle, 0, ToAgent::Fill(fill)).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::FingerprintMismatch, "{error}");
    assert_eq!(other.journal(), [], "its memory was touched");
    assert!(matches!(ask().await, Matched::None { .. }), "it is offered again");
}

#[tokio::test]
async fn who_asks_while_a_snapshot_is_pulled_is_told_to_ask_again() {
    let host = host().await;
    let _asking = Synthetic::start(&host.agent, Spec::hybrid("asks").requests_only());
    let _other = Synthetic::start(&host.agent, Spec::hybrid("other").requests_only());
    let ask = async |engine: &str| {
        let handle = host.agent.engines().get(engine).unwrap();
        let call = ToAgent::Match(Match { tokens: tokens(62), ..Match::default() });
        serde_json::from_value::<Matched>(host.agent.answer(&handle, 0, call).await.unwrap()).unwrap()
    };
    // A registry that takes connections and never answers.
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let reference = format!("http://{}/team/agent:now", silent.local_addr().unwrap());
    let agent = host.agent.clone();
    let pulling =
        tokio::spawn(async move { agent.restore("asks", RestoreRequest { reference, local: false, ..RestoreRequest::default() }).await });
    let _asked = silent.accept().await.unwrap();
    assert_eq!(ask("asks").await, Matched::Later {});
    assert!(matches!(ask("other").await, Matched::None { .. }));
    pulling.abort();
    assert!(pulling.await.unwrap_err().is_cancelled());
    assert!(matches!(ask("asks").await, Matched::None { .. }));
    // Neither does a failure leave it waiting.
    restore(&host, "asks", "nothing").await.unwrap_err();
    assert!(matches!(ask("asks").await, Matched::None { .. }));
}

fn wipe(engine: &Synthetic) {
    for memory in &engine.memories {
        let size = pfr_agent::memory::PageMemory::size(&**memory);
        memory.put(0, vec![0xee; size as usize]);
    }
}
