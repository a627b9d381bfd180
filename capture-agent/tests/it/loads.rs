//! Loads of engines that link the agent: the engine does not wait, nothing runs unproven, and
//! blocks are not given back under a copy.

use crate::common::engine::{Core, Synthetic};
use crate::common::layout::Spec;
use crate::common::memory::{Event, Fault};
use crate::common::{Host, host_with, tokens, until};
use parking_lot::Mutex;
use pfr_agent::Error;
use pfr_agent::library::{Destination, Load, LoadRequest, LoadState, Loader};
use pfr_schema::agent::{Push, RestoreReport, RestoreRequest, SnapshotRequest};
use pfr_schema::engine::Verb;
use pfr_schema::{Digest, ErrorCode};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// What was going on when the guard was let go; `None` as long as it lives.
type Gone = Arc<Mutex<Option<Seen>>>;

struct Seen {
    writing: bool,
    journal: Vec<Event>,
}

struct Guard {
    engine: Arc<Core>,
    gone: Gone,
}

impl Drop for Guard {
    fn drop(&mut self) {
        *self.gone.lock() = Some(Seen { writing: self.engine.watch.is_writing(), journal: self.engine.journal() });
    }
}

/// An agent whose copies are a few pages each, with the snapshot `now` of an engine `e`.
async fn captured() -> (Host, Synthetic, Digest) {
    let host = host_with(|config| config.ring_bytes = 8 << 10).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(62));
    let request = SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() };
    let digest = host.agent.snapshot("e", request).await.unwrap().digest;
    (host, engine, digest)
}

/// An engine that takes no sequences over its link, with blocks for one.
fn own(host: &Host) -> Synthetic {
    let spec = Spec::hybrid("own").placed(9, 32).without(Verb::Allocate);
    let own = Synthetic::start(&host.agent, spec);
    own.add("mine", &tokens(62));
    for memory in &own.memories {
        let size = pfr_agent::memory::PageMemory::size(&**memory);
        memory.put(0, vec![0xee; size as usize]);
    }
    own
}

fn request(engine: &str, tag: &str) -> LoadRequest {
    LoadRequest {
        engine: engine.into(),
        from: RestoreRequest { reference: format!("team/agent:{tag}"), local: true, ..RestoreRequest::default() },
    }
}

fn destination(own: &Synthetic) -> (Destination, Gone) {
    let gone = Gone::default();
    let guard = Guard { engine: Arc::clone(&own.core), gone: Arc::clone(&gone) };
    let blocks = own.sequence("mine").blocks;
    (Destination { sequence: "mine".into(), blocks, guard: Box::new(guard), after: None }, gone)
}

async fn staged(loader: &Loader) -> Load {
    let load = loader.load(request("own", "now"));
    until("it is staged", || !matches!(load.poll(), LoadState::Pending)).await;
    assert!(matches!(load.poll(), LoadState::Staged(_)), "{:?}", load.poll());
    load
}

async fn filled(load: &Load) -> Arc<RestoreReport> {
    until("it is filled", || !matches!(load.poll(), LoadState::Filling)).await;
    match load.poll() {
        LoadState::Filled(report) => report,
        other => panic!("{other:?}"),
    }
}

async fn failed(load: &Load) -> Arc<Error> {
    until("it fails", || !matches!(load.poll(), LoadState::Filling | LoadState::Pending)).await;
    match load.poll() {
        LoadState::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_load_brings_the_state_and_keeps_the_guard_to_the_end() {
    let (host, engine, digest) = captured().await;
    let own = own(&host);
    let loader = Loader::new(host.agent.clone(), 2);
    let load = staged(&loader).await;
    let LoadState::Staged(ready) = load.poll() else { panic!() };
    assert_eq!((ready.digest, ready.boundary, &ready.tokens), (digest, 61, &tokens(62)));
    assert!(ready.oracle.as_ref().is_some_and(|oracle| oracle.boundary == 61));
    assert_eq!(own.journal(), []);

    let (destination, gone) = destination(&own);
    load.fill(destination).unwrap();
    let report = filled(&load).await;
    assert_eq!(own.content("mine"), engine.content("s"));
    assert_eq!((report.digest, report.sequence.as_deref(), report.boundary), (digest, Some("mine"), 61));
    let seen = gone.lock().take().unwrap();
    assert_eq!(seen.journal, own.journal(), "memory was touched after the guard was let go");
    let writes = seen.journal.iter().filter(|event| matches!(event, Event::Write(_))).count();
    assert!(writes > 1 && report.bytes_written > 8 << 10, "{:?}", seen.journal);
    assert!(seen.journal.iter().any(|event| matches!(event, Event::Hash(_))) && !seen.writing);
    assert_eq!(host.agent.engines().get("own").unwrap().parent("mine"), Some(digest));
    // It stays so, and takes no other blocks.
    let (second, second_gone) = self::destination(&own);
    assert_eq!(load.fill(second).unwrap_err().code(), ErrorCode::InvalidRequest);
    assert!(second_gone.lock().is_some() && matches!(load.poll(), LoadState::Filled(_)));
}

/// docs/capture.md shows these lines.
#[rustfmt::skip]
#[expect(unused_variables, reason = "the page leaves out what an engine does with them")]
fn on_the_page(
    (agent, reference): (pfr_agent::Agent, String),
    Destination { sequence, blocks, guard, .. }: Destination,
) -> pfr_agent::Result<Load> {
    // The page begins.
    let from = RestoreRequest { reference, ..RestoreRequest::default() };
    let load = Loader::new(agent, 4).load(LoadRequest { engine: "mine".into(), from });
    match load.poll() {                                     // once in each turn of the engine's loop; it never blocks
        LoadState::Staged(ready) => {                       // pulled and verified: take blocks for ready.tokens up to ready.boundary
            load.fill(Destination { sequence, blocks, guard, after: None })?;
        }
        LoadState::Filled(report) => { /* the pages were hashed where they lie: the sequence may run */ }
        LoadState::Failed(error) => { /* the guard was dropped; the blocks hold nothing that may be used */ }
        LoadState::Pending | LoadState::Filling => {}
    }
    // The page ends.
    Ok(load)
}

#[tokio::test]
async fn the_lines_on_the_page_are_these_and_load_a_snapshot() {
    let (_, rest) = include_str!("loads.rs").split_once("// The page begins.\n").unwrap();
    let lines = rest.split_once("    // The page ends.\n").unwrap().0.replace("\n    ", "\n");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/capture.md");
    let page = std::fs::read_to_string(page).unwrap();
    let block = page.split("```rust\n").nth(1).unwrap().split("```").next().unwrap();
    assert_eq!(lines.trim(), block.trim());

    let (host, _engine, digest) = captured().await;
    let mine = Synthetic::start(&host.agent, Spec::hybrid("mine").placed(9, 32).without(Verb::Allocate));
    mine.add("mine", &tokens(62));
    let (destination, gone) = destination(&mine);
    let load = on_the_page((host.agent.clone(), format!("team/agent@{digest}")), destination).unwrap();
    // It was not staged in the first turn of the loop, so its blocks were not taken.
    assert!(gone.lock().is_some());
    until("it is staged", || matches!(load.poll(), LoadState::Staged(_))).await;
    load.fill(self::destination(&mine).0).unwrap();
    assert_eq!(filled(&load).await.digest, digest);
}

#[tokio::test]
async fn a_load_that_fails_lets_the_guard_go_and_stays_failed() {
    use ErrorCode as Code;
    let (host, engine, _) = captured().await;
    let own = own(&host);
    let loader = Loader::new(host.agent.clone(), 1);
    let fails = async |destination: Destination, gone: Gone, code: Code, what: &str| {
        let load = staged(&loader).await;
        load.fill(destination).unwrap();
        let error = failed(&load).await;
        assert_eq!(error.code(), code, "{what}: {error}");
        assert!(gone.lock().take().is_some_and(|seen| !seen.writing), "{what}");
        let (again, again_gone) = self::destination(&own);
        assert_eq!(load.fill(again).unwrap_err().code(), Code::InvalidRequest);
        assert!(again_gone.lock().is_some() && matches!(load.poll(), LoadState::Failed(_)), "{what}");
    };
    for (fault, code) in [
        (Fault::WritesLie, Code::LiveMismatch),
        (Fault::WriteFails, Code::EngineLost),
        (Fault::HashFails, Code::EngineLost),
        (Fault::ReadFails, Code::EngineLost),
        (Fault::PanicInWrite, Code::Internal),
        (Fault::PanicInHash, Code::Internal),
    ] {
        own.set(fault);
        let (destination, gone) = destination(&own);
        fails(destination, gone, code, &format!("{fault:?}")).await;
        own.heal();
    }
    own.forget_journal();
    let (mut short, gone) = destination(&own);
    short.blocks.get_mut("main").unwrap().pop();
    fails(short, gone, Code::EngineRefused, "a block too few").await;
    let (mut beyond, gone) = destination(&own);
    beyond.blocks.get_mut("main").unwrap()[0] = 9999;
    fails(beyond, gone, Code::EngineRefused, "a block that is not there").await;
    assert_eq!(own.journal(), []);

    let mut other = Spec::hybrid("other");
    other.deployment.insert("weights".into(), json!("sha256:x"));
    let _other = Synthetic::start(&host.agent, other);
    for (request, code) in [
        (request("nobody", "now"), Code::EngineUnknown),
        (request("own", "nothing"), Code::TagUnknown),
        (request("other", "now"), Code::FingerprintMismatch),
    ] {
        assert_eq!(failed(&loader.load(request)).await.code(), code);
    }
    // Nothing of all that is left: the same blocks take the state.
    let load = staged(&loader).await;
    let (good, _) = destination(&own);
    load.fill(good).unwrap();
    filled(&load).await;
    assert_eq!(own.content("mine"), engine.content("s"));
}

/// Whether a thread of this process sleeps, or is gone.
fn sleeps(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(thread).join("stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.trim_start().starts_with('S'))
}

#[tokio::test]
async fn a_dropped_load_waits_for_the_copy_in_flight_and_begins_no_other() {
    let (host, engine, _) = captured().await;
    let own = own(&host);
    let loader = Loader::new(host.agent.clone(), 1);
    let load = staged(&loader).await;
    let (destination, gone) = destination(&own);
    own.watch.hold_writes();
    load.fill(destination).unwrap();
    until("it writes", || own.watch.is_writing()).await;
    let (tell, told) = std::sync::mpsc::channel();
    let dropping = std::thread::spawn(move || {
        tell.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        drop(load);
    });
    let thread = told.recv().unwrap();
    until("the drop waits", || sleeps(&thread)).await;
    assert!(gone.lock().is_none() && !dropping.is_finished());
    own.watch.release_writes();
    until("the drop has ended", || dropping.is_finished()).await;
    assert!(gone.lock().take().is_some_and(|seen| !seen.writing));

    // The place at the loader and the blocks are free; only one batch had been written.
    let load = staged(&loader).await;
    assert_eq!(own.journal().iter().filter(|event| matches!(event, Event::Write(_))).count(), 1);
    let (again, _) = self::destination(&own);
    load.fill(again).unwrap();
    filled(&load).await;
    assert_eq!(own.content("mine"), engine.content("s"));
}

#[tokio::test]
async fn two_loads_do_not_write_into_the_same_blocks() {
    let (host, engine, _) = captured().await;
    let own = own(&host);
    let loader = Loader::new(host.agent.clone(), 2);
    let (first, second) = (staged(&loader).await, staged(&loader).await);
    own.watch.hold_writes();
    let (destination, first_gone) = destination(&own);
    first.fill(destination).unwrap();
    until("the first writes", || own.watch.is_writing()).await;
    let (destination, second_gone) = self::destination(&own);
    second.fill(destination).unwrap();
    let error = failed(&second).await;
    assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");
    assert!(error.to_string().contains("another restore"), "{error}");
    assert!(second_gone.lock().is_some() && first_gone.lock().is_none());
    own.watch.release_writes();
    filled(&first).await;
    assert_eq!(own.content("mine"), engine.content("s"));
}

#[tokio::test]
async fn a_load_given_up_during_its_pull_leaves_nothing_behind() {
    let (host, ..) = captured().await;
    let _own = own(&host);
    let loader = Loader::new(host.agent.clone(), 1);
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let reference = format!("http://{}/team/agent:now", silent.local_addr().unwrap());
    let pulling =
        loader.load(LoadRequest { engine: "own".into(), from: RestoreRequest { reference, local: false, ..RestoreRequest::default() } });
    let _asked = silent.accept().await.unwrap();
    assert!(matches!(pulling.poll(), LoadState::Pending));
    drop(pulling);
    // There is one place at the loader.
    staged(&loader).await;
}

#[test]
fn the_guard_is_not_let_go_under_a_copy_when_the_runtime_ends() {
    // One thread: when the shutdown returns, every task is gone.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (host, _engine, _) = runtime.block_on(captured());
    let own = own(&host);
    let loader = runtime.block_on(async { Loader::new(host.agent.clone(), 1) });
    let load = runtime.block_on(staged(&loader));
    let (destination, gone) = destination(&own);
    own.watch.hold_writes();
    load.fill(destination).unwrap();
    runtime.block_on(until("it writes", || own.watch.is_writing()));
    runtime.shutdown_background();
    assert!(gone.lock().is_none() && matches!(load.poll(), LoadState::Filling));
    own.watch.release_writes();
    let other = tokio::runtime::Runtime::new().unwrap();
    let error = other.block_on(failed(&load));
    assert!(matches!(*error, Error::Ended), "{error}");
    assert!(gone.lock().take().is_some_and(|seen| !seen.writing));
    assert!(matches!(&*other.block_on(failed(&loader.load(request("own", "now")))), Error::Ended));
}
