//! Whatever goes wrong in a capture: the engine goes on, nothing is committed, and the next capture
//! works.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::memory::{Event, Fault, Watch};
use crate::common::{Host, host, host_with, tokens, until};
use bytes::Bytes;
use pfr_agent::Error;
use pfr_agent::engines::{Attached, Link};
use pfr_agent::memory::{Deliver, MemoryError, Page, PageMemory};
use pfr_schema::agent::{EngineState, Push, SnapshotRequest};
use pfr_schema::engine::{CallError, Part, Sequence, Table, ToEngine, Verb};
use pfr_schema::{Algorithm, Digest, ErrorCode};
use pfr_store::GcOptions;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

fn request() -> SnapshotRequest {
    SnapshotRequest { reference: "team/agent:now".into(), push: Push::Never, ..SnapshotRequest::default() }
}

async fn snapshots(host: &Host) -> usize {
    match host.agent.store().snapshots(&"team/agent".parse().unwrap(), None, 10).await {
        Ok(page) => page.rows.len(),
        Err(pfr_store::Error::RepositoryUnknown(_)) => 0,
        Err(error) => panic!("{error}"),
    }
}

/// A capture fails with `code`; the engine goes on, and once healed it is captured.
async fn fails(host: &Host, engine: &Synthetic, faults: &[Fault], code: ErrorCode) {
    let before = snapshots(host).await;
    faults.iter().for_each(|fault| engine.set(*fault));
    let error = host.agent.snapshot(&engine.spec.name, request()).await.unwrap_err();
    assert_eq!(error.code(), code, "{faults:?}: {error}");
    assert_eq!(snapshots(host).await, before, "{faults:?}: a snapshot appeared");
    engine.heal();
    until("the engine goes on", || !engine.is_paused()).await;
    until("pins are given back", || engine.pins() == 0).await;
    until("the ring is free", || host.agent.engines().ring().used() == 0).await;
    let report = host.agent.snapshot(&engine.spec.name, request()).await.unwrap_or_else(|error| panic!("after {faults:?}: {error}"));
    assert!(report.boundary > 0);
    until("the engine goes on", || !engine.is_paused() && engine.pins() == 0).await;
}

#[tokio::test]
async fn whatever_fails_the_engine_goes_on_and_nothing_appears() {
    use ErrorCode as Code;
    let cases: &[(&[Fault], Code)] = &[
        (&[Fault::PanicInSetAside], Code::Internal),
        (&[Fault::PanicInHash], Code::Internal),
        (&[Fault::PanicInRead], Code::Internal),
        (&[Fault::HashFails], Code::EngineLost),
        (&[Fault::ReadFails], Code::EngineLost),
        (&[Fault::Torn], Code::TornCopy),
        (&[Fault::TornAside], Code::TornCopy),
        (&[Fault::NoRoom], Code::NoRoom),
        (&[Fault::Refuses("pause")], Code::EngineRefused),
        (&[Fault::Refuses("table")], Code::EngineRefused),
        (&[Fault::Refuses("pin")], Code::EngineRefused),
        (&[Fault::Leaves("table")], Code::EngineLost),
        (&[Fault::BlockTooMany], Code::EngineRefused),
        (&[Fault::BlockTooFew], Code::EngineRefused),
        (&[Fault::BlockOutOfRange], Code::EngineRefused),
        (&[Fault::NullBlock], Code::EngineRefused),
    ];
    for without_pins in [false, true] {
        for (faults, code) in cases {
            if without_pins && faults.contains(&Fault::Refuses("pin")) {
                continue;
            }
            // An agent of its own: what one has stored, another would not read.
            let host = host().await;
            let spec = Spec::hybrid("e");
            let engine = Synthetic::start(&host.agent, if without_pins { spec.without(Verb::Pin) } else { spec });
            engine.add("s", &tokens(50));
            fails(&host, &engine, faults, *code).await;
        }
    }
}

#[tokio::test]
async fn a_capture_whose_pause_ended_under_it_is_void() {
    for (spec, call) in [(Spec::hybrid("e"), "pin"), (Spec::hybrid("e").without(Verb::Pin), "table")] {
        let host = host().await;
        // The steps change what is captured, and it is whole: no hash finds them.
        let engine = Synthetic::start(&host.agent, Spec { steps_on_resume: 3, ..spec });
        engine.add("s", &tokens(50));
        fails(&host, &engine, &[Fault::GoesOnAfter(call)], ErrorCode::Timeout).await;
    }
}

#[tokio::test]
async fn an_engine_is_not_kept_paused_longer_than_the_limit() {
    for without_pins in [false, true] {
        let host = host_with(|config| config.pause_limit = Duration::from_nanos(1)).await;
        let spec = Spec::hybrid("e");
        let engine = Synthetic::start(&host.agent, if without_pins { spec.without(Verb::Pin) } else { spec });
        engine.add("s", &tokens(50));
        let error = host.agent.snapshot("e", request()).await.unwrap_err();
        assert!(matches!(error, Error::PauseEnded { .. }), "{error}");
        until("the engine goes on", || !engine.is_paused()).await;
        assert_eq!(snapshots(&host).await, 0);
    }
}

#[tokio::test]
async fn a_state_that_the_store_has_already_is_hashed_again_all_the_same() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    host.agent.snapshot("e", request()).await.unwrap();
    // Nothing of it would be copied now; its value is computed of what is read.
    fails(&host, &engine, &[Fault::TornAside], ErrorCode::TornCopy).await;
}

#[tokio::test]
async fn an_engine_that_does_not_answer_in_time_is_told_to_go_on() {
    for call in ["pause", "table", "pin"] {
        let host = host_with(|config| config.engine_timeout = Duration::from_millis(50)).await;
        let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
        engine.add("s", &tokens(50));
        fails(&host, &engine, &[Fault::Silent(call)], ErrorCode::EngineLost).await;
        let resumed = engine.journal().iter().filter(|event| **event == Event::Call("resume")).count();
        assert!(resumed >= 2, "{call}: {:?}", engine.journal());
    }
}

#[tokio::test]
async fn logits_that_do_not_come_do_not_fail_a_snapshot() {
    for fault in [Fault::Silent("oracle"), Fault::Refuses("oracle"), Fault::Leaves("oracle")] {
        let host = host_with(|config| config.engine_timeout = Duration::from_millis(50)).await;
        let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
        engine.add("s", &tokens(50));
        engine.set(fault);
        assert!(!host.agent.snapshot("e", request()).await.unwrap().oracle, "{fault:?}");
    }
}

#[tokio::test]
async fn a_resume_that_is_refused_is_tried_again() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    engine.set(Fault::Refuses("resume"));
    let running = tokio::spawn({
        let agent = host.agent.clone();
        async move { agent.snapshot("e", request()).await }
    });
    until("it was refused twice", || engine.journal().iter().filter(|event| **event == Event::Call("resume")).count() > 2).await;
    assert!(engine.is_paused());
    engine.heal();
    running.await.unwrap().unwrap();
    assert!(!engine.is_paused());
}

#[tokio::test]
async fn a_capture_that_is_given_up_lets_the_engine_go_on() {
    for call in ["pause", "table", "pin", "oracle"] {
        let host = host().await;
        let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
        engine.add("s", &tokens(50));
        engine.set(Fault::Silent(call));
        let agent = host.agent.clone();
        let running = tokio::spawn(async move { agent.snapshot("e", request()).await });
        until(call, || engine.journal().contains(&Event::Call(call))).await;
        running.abort();
        assert!(running.await.unwrap_err().is_cancelled());
        engine.heal();
        until("the engine goes on", || !engine.is_paused() && engine.pins() == 0).await;
        assert_eq!(snapshots(&host).await, 0, "{call}");
        assert!(host.agent.snapshot("e", request()).await.is_ok(), "{call}");
    }
}

/// Waits until something that was stored is leased, or nothing is any more.
async fn until_leased(host: &Host, leased: bool) {
    let usage = async || host.agent.store().usage(Duration::ZERO).await.unwrap();
    let waited = async {
        while (usage().await.leased.bytes > 0) != leased {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waited).await.unwrap_or_else(|_| panic!("waited in vain until leased: {leased}"));
}

#[tokio::test]
async fn what_a_capture_stored_before_it_was_given_up_is_freed_by_the_next_collection() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    // Its pages are stored while it waits for logits.
    engine.set(Fault::Silent("oracle"));
    let agent = host.agent.clone();
    let running = tokio::spawn(async move { agent.snapshot("e", request()).await });
    until_leased(&host, true).await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    until_leased(&host, false).await;
    let options = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let report = host.agent.store().gc(&options, &mut |_| ()).await.unwrap();
    assert!(report.unclaimed > 0, "{report:?}");
    let usage = host.agent.store().usage(Duration::ZERO).await.unwrap();
    assert_eq!((usage.live_bytes, usage.garbage_bytes, usage.leased.bytes), (0, 0, 0), "{usage:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_hangs_holds_up_no_memory_with_another_ring() {
    let host = host().await;
    let hung = Synthetic::start(&host.agent, Spec { own_ring: true, ..Spec::hybrid("a") });
    let well = Synthetic::start(&host.agent, Spec::hybrid("b"));
    hung.add("s", &tokens(50));
    well.add("s", &tokens(40));
    let held = hung.watch.hold_reads();
    let agent = host.agent.clone();
    let running = tokio::spawn(async move { agent.snapshot("a", request()).await });
    until("it reads", || hung.journal().iter().any(|event| matches!(event, Event::Read(_)))).await;
    let captured = tokio::time::timeout(Duration::from_secs(10), host.agent.snapshot("b", request())).await;
    captured.expect("it waits for the other engine").unwrap();
    drop(held);
    running.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_engine_that_leaves_in_the_middle_fails_the_capture_and_is_forgotten() {
    let host = host().await;
    let mut engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    engine.set(Fault::Silent("pin"));
    let agent = host.agent.clone();
    let running = tokio::spawn(async move { agent.snapshot("e", request()).await });
    until("pin", || engine.journal().contains(&Event::Call("pin"))).await;
    assert!(matches!(&host.agent.engines().list()[0].state, EngineState::Busy { with } if with == "a snapshot"));
    assert!(matches!(host.agent.snapshot("e", request()).await, Err(Error::Busy { .. })));
    engine.leave();
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, Error::Lost { .. }), "{error}");
    assert!(host.agent.engines().list().is_empty());
    assert!(matches!(host.agent.snapshot("e", request()).await, Err(Error::EngineUnknown { .. })));
    assert_eq!(snapshots(&host).await, 0);
}

#[tokio::test]
async fn a_ring_smaller_than_a_page_is_told_before_the_engine_is_stopped() {
    let host = host_with(|config| config.ring_bytes = 700).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    let error = host.agent.snapshot("e", request()).await.unwrap_err();
    assert!(matches!(error, Error::Memory(MemoryError::NoRoom { what: "ring", needed: 768, free: 700 })), "{error}");
    assert_eq!(engine.journal(), []);
}

#[tokio::test]
async fn more_logits_than_a_restore_would_read_are_refused_before_anything_is_captured() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &tokens(50));
    let error = host.agent.snapshot("e", SnapshotRequest { oracle: Some(4097), ..request() }).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidRequest);
    assert_eq!((snapshots(&host).await, engine.journal().len()), (0, 0), "{error}");
}

#[tokio::test]
async fn a_store_that_cannot_write_fails_the_capture_only() {
    let host = host().await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(50));
    let packs = host.agent.config().store_dir().join("packs");
    let aside = packs.with_extension("aside");
    std::fs::rename(&packs, &aside).unwrap();
    std::fs::write(&packs, b"not a folder").unwrap();
    let error = host.agent.snapshot("e", request()).await.unwrap_err();
    assert!(matches!(error, Error::Store(_)), "{error}");
    until("the engine goes on", || !engine.is_paused() && engine.pins() == 0).await;
    assert_eq!(snapshots(&host).await, 0);
    std::fs::remove_file(&packs).unwrap();
    std::fs::rename(&aside, &packs).unwrap();
    host.agent.snapshot("e", request()).await.unwrap();
}

/// Memory that says that it has any size, also more than a machine has. It holds no bytes: reads
/// fail.
#[derive(Debug)]
struct Huge {
    pages: u32,
    page_bytes: u64,
    watch: Arc<Watch>,
}

impl Huge {
    /// An engine with this memory, and a sequence that fills it.
    fn attach(self, host: &Host, name: &str) -> Attached {
        let mut register = Spec::with(name, vec![crate::common::layout::Group::opaque("main")]).register(0);
        register.memories[0].bytes = self.size();
        let bytes = self.page_bytes;
        let group = &mut register.groups[0];
        (group.block_tokens, group.blocks, group.null_block) = (1, self.pages, None);
        group.components[0].parts = vec![Part { memory: "kv".into(), offset: 0, block_stride: bytes, bytes, share: None }];
        let engine = Arc::new(self);
        let memory: Arc<dyn PageMemory> = Arc::clone(&engine) as _;
        host.agent.engines().attach(register, vec![memory], engine).unwrap()
    }
}

impl PageMemory for Huge {
    fn size(&self) -> u64 {
        self.page_bytes * u64::from(self.pages)
    }
    fn preflight(&self, _aside: u64, _largest: u64) -> Result<(), MemoryError> {
        Ok(())
    }
    fn hash(&self, _algorithm: Algorithm, pages: &[Page]) -> Result<Vec<Digest>, MemoryError> {
        Ok(pages.iter().map(|page| Digest::sha256(&page.spans[0].offset.to_le_bytes())).collect())
    }
    fn read(&self, pages: &[Page], _deliver: &mut Deliver<'_>) -> Result<(), MemoryError> {
        self.watch.read_begins(Event::Read(pages.len()));
        Err(MemoryError::Unreachable { what: "read", reason: "there are no bytes".into() })
    }
    fn set_aside(&self, pages: &[Page]) -> Result<Box<dyn PageMemory>, MemoryError> {
        panic!("all {} pages are full", pages.len())
    }
    fn write(&self, _pages: &[(Page, Bytes)], _after: Option<&[u8; 64]>) -> Result<(), MemoryError> {
        panic!("nothing is restored")
    }
}

#[async_trait::async_trait]
impl Link for Huge {
    async fn call(&self, call: ToEngine) -> Result<Value, CallError> {
        if !matches!(call, ToEngine::Table(_)) {
            return Ok(json!({"pin": 1, "held": true}));
        }
        let blocks = [("main".to_owned(), (0..self.pages).collect())].into();
        let (tokens, boundary) = (vec![1; self.pages as usize], u64::from(self.pages));
        Ok(json!(Table { sequences: vec![Sequence { id: "s".into(), tokens, boundary, blocks, ..Sequence::default() }] }))
    }
}

#[tokio::test]
async fn more_bytes_than_the_disk_has_room_for_are_not_begun() {
    let host = host().await;
    // 16 TiB.
    let _engine = Huge { pages: 1 << 16, page_bytes: 256 << 20, watch: Arc::default() }.attach(&host, "huge");
    let error = host.agent.snapshot("huge", request()).await.unwrap_err();
    assert!(matches!(error, Error::NoRoom { what: "disk", .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_captures_at_once_are_not_granted_the_same_room() {
    let host = host().await;
    let stat = rustix::fs::statvfs(host.dir.path()).unwrap();
    // Two thirds of the disk for each, in pages of 128 MiB at most.
    let bytes = stat.f_bavail * stat.f_frsize / 3 * 2;
    let pages = (bytes >> 27) as u32 + 1;
    let watch = Arc::new(Watch::default());
    let engine = |name: &str| Huge { pages, page_bytes: bytes / u64::from(pages), watch: Arc::clone(&watch) }.attach(&host, name);
    let _engines = ["one", "two"].map(engine);
    let held = watch.hold_reads();
    let agent = host.agent.clone();
    let running = tokio::spawn(async move { agent.snapshot("one", request()).await });
    until("the first copies", || !watch.journal.lock().is_empty()).await;
    let second = tokio::time::timeout(Duration::from_secs(10), host.agent.snapshot("two", request())).await;
    let error = second.expect("the second one copies, too").unwrap_err();
    assert!(matches!(error, Error::NoRoom { what: "disk", .. }), "{error}");
    drop(held);
    // The end of the first gives its room back.
    assert_eq!(running.await.unwrap().unwrap_err().code(), ErrorCode::EngineLost);
    assert_eq!(host.agent.snapshot("two", request()).await.unwrap_err().code(), ErrorCode::EngineLost);
}
