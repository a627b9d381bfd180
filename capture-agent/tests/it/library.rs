//! Saves of engines that link the agent: blocks stay pinned until their copy has landed, and the
//! engine does not wait.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::memory::{Event, Fault};
use crate::common::{Host, host, tokens, until};
use pfr_agent::library::{Refusal, Save, SaveState, Saver, Ticket};
use pfr_schema::ErrorCode;
use pfr_schema::agent::{Push, SnapshotReport, SnapshotRequest};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tells when it was let go, and what had been done to the memory by then.
struct Pin {
    gone: Arc<AtomicBool>,
    engine: Arc<crate::common::engine::Core>,
    seen: Arc<parking_lot::Mutex<Vec<Event>>>,
}

impl Drop for Pin {
    fn drop(&mut self) {
        *self.seen.lock() = self.engine.journal();
        self.gone.store(true, Ordering::SeqCst);
    }
}

struct Watched {
    gone: Arc<AtomicBool>,
    seen: Arc<parking_lot::Mutex<Vec<Event>>>,
}

impl Watched {
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}

fn request() -> SnapshotRequest {
    SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() }
}

fn save(engine: &Synthetic) -> (Save, Watched) {
    let (gone, seen) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let pin = Pin { gone: Arc::clone(&gone), engine: Arc::clone(&engine.core), seen: Arc::clone(&seen) };
    let save = Save { engine: engine.spec.name.clone(), sequence: engine.sequence("s"), pin: Box::new(pin), request: request() };
    (save, Watched { gone, seen })
}

async fn end(ticket: &Ticket) -> SaveState {
    until("the save has ended", || !matches!(ticket.poll(), SaveState::Pending)).await;
    ticket.poll()
}

async fn saved(ticket: &Ticket) -> Arc<SnapshotReport> {
    match end(ticket).await {
        SaveState::Saved(report) => report,
        other => panic!("{other:?}"),
    }
}

fn engine(host: &Host) -> Synthetic {
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    engine
}

#[tokio::test]
async fn a_save_is_the_snapshot_without_a_pause_and_the_pin_outlives_the_copy() {
    let host = host().await;
    let engine = engine(&host);
    let saver = Saver::new(host.agent.clone(), 4);
    let (save, watched) = save(&engine);
    let report = saved(&saver.save(save)).await;
    assert!(watched.is_gone());
    let touches = |event: &&Event| !matches!(event, Event::Call(_));
    let journal = engine.journal();
    let copied: Vec<&Event> = journal.iter().filter(touches).collect();
    let seen = watched.seen.lock().clone();
    assert_eq!(seen.iter().filter(touches).collect::<Vec<_>>(), copied, "memory was touched after the pin was let go");
    assert!(seen.iter().any(|event| matches!(event, Event::Read(_))) && seen.iter().any(|event| matches!(event, Event::Hash(_))));
    assert!(!journal.contains(&Event::Call("pause")), "{journal:?}");

    let snapshot = host.agent.snapshot("e", request()).await.unwrap();
    let store = host.agent.store();
    let (one, two) = (store.manifest(&report.digest).await.unwrap(), store.manifest(&snapshot.digest).await.unwrap());
    assert_eq!(one.layers, two.layers);
    assert_eq!((report.pause_seconds, snapshot.parent), (0.0, Some(report.digest)));
}

#[tokio::test]
async fn a_save_that_fails_lets_the_pin_go() {
    use ErrorCode as Code;
    let faults = [
        (Fault::PanicInSetAside, Code::Internal),
        (Fault::PanicInHash, Code::Internal),
        (Fault::PanicInRead, Code::Internal),
        (Fault::HashFails, Code::EngineLost),
        (Fault::ReadFails, Code::EngineLost),
        (Fault::Torn, Code::TornCopy),
        (Fault::NoRoom, Code::NoRoom),
    ];
    let host = host().await;
    let engine = engine(&host);
    let saver = Saver::new(host.agent.clone(), 4);
    let fails = async |save: Save, watched: Watched, code: Code, what: &str| {
        let SaveState::Failed(error) = end(&saver.save(save)).await else { panic!("{what}") };
        assert_eq!(error.code(), code, "{what}: {error}");
        until(what, || watched.is_gone()).await;
    };
    for (fault, code) in faults {
        engine.set(fault);
        let (save, watched) = save(&engine);
        fails(save, watched, code, &format!("{fault:?}")).await;
        engine.heal();
    }
    let (mut unknown, watched) = save(&engine);
    unknown.engine = "nobody".into();
    fails(unknown, watched, Code::EngineUnknown, "an unknown engine").await;
    let (mut wrong, watched) = save(&engine);
    wrong.sequence.boundary += 1000;
    fails(wrong, watched, Code::EngineRefused, "a boundary beyond the tokens").await;
    let (mut wrong, watched) = save(&engine);
    wrong.sequence.blocks.get_mut("main").unwrap()[0] = 9999;
    fails(wrong, watched, Code::EngineRefused, "a block that is not there").await;

    let (good, watched) = save(&engine);
    saved(&saver.save(good)).await;
    assert!(watched.is_gone());
}

#[tokio::test]
async fn a_save_that_finds_no_room_is_dropped_at_once_and_counted() {
    let host = host().await;
    let engine = engine(&host);
    let saver = Saver::new(host.agent.clone(), 1);
    let ring = host.agent.engines().ring().clone();
    let all = ring.acquire(ring.total()).unwrap();
    let (first, first_pin) = save(&engine);
    let first = saver.save(first);
    until("the first save reads", || engine.journal().iter().any(|event| matches!(event, Event::Read(_)))).await;
    let (second, second_pin) = save(&engine);
    let second = saver.save(second);
    let (third, third_pin) = save(&engine);
    let third = saver.save(third);
    assert!(matches!(third.poll(), SaveState::Dropped(Refusal::Full)), "{:?}", third.poll());
    assert!(third_pin.is_gone() && !first_pin.is_gone() && !second_pin.is_gone());
    assert_eq!(saver.dropped(), 1);
    drop(all);
    // Everything that was taken is saved, also when no more is handed over.
    drop(saver);
    saved(&first).await;
    saved(&second).await;
    assert!(first_pin.is_gone() && second_pin.is_gone());
}

#[test]
fn a_pin_is_not_let_go_under_a_copy_when_the_runtime_ends() {
    // One thread: when the shutdown returns, every task is gone.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let host = runtime.block_on(host());
    let engine = engine(&host);
    let ring = host.agent.engines().ring().clone();
    let all = ring.acquire(ring.total()).unwrap();
    let (save, watched) = save(&engine);
    let saver = runtime.block_on(async { Saver::new(host.agent.clone(), 1) });
    let ticket = saver.save(save);
    runtime.block_on(until("it reads", || engine.journal().iter().any(|event| matches!(event, Event::Read(_)))));
    runtime.shutdown_background();
    assert!(!watched.is_gone());
    drop(all);
    let other = tokio::runtime::Runtime::new().unwrap();
    other.block_on(until("the copy has ended", || watched.is_gone()));
    assert!(matches!(ticket.poll(), SaveState::Pending));
    assert!(matches!(saver.save(self::save(&engine).0).poll(), SaveState::Dropped(Refusal::Ended)));
}
