//! Restores whose pages pass from a registry to the engine: in the order in which it needs them, in
//! bounded memory, verified on the way, with the local store behind them or without it.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::memory::{Event, Fault};
use crate::common::{Host, host_with, registry, tokens, until};
use parking_lot::Mutex;
use pfr_agent::Error;
use pfr_agent::control::Control;
use pfr_schema::agent::{EngineInfo, JobRequest, JobState, Push, RestoreReport, RestoreRequest, SnapshotRequest, Stored, WarmRequest};
use pfr_schema::checkpoint::Checkpoint;
use pfr_schema::engine::Verb;
use pfr_schema::run::Run;
use pfr_schema::tree::PageTree;
use pfr_schema::{Digest, ErrorCode, Kind, Limits, media_type};
use pfr_store::GcOptions;
use pfr_testkit::frames::{claiming, stream};
use pfr_testkit::front::{Fate, Front, Seen};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Bytes of a page of [`Group::flat`], and what it takes of the bytes in flight: both copies, in
/// whole KiB.
const PAGE: usize = 768;
const COST: u64 = 2 << 10;
/// Pages that may be in flight in a small budget.
const FEW: usize = 4;

/// Steps that an engine makes to show that it continues alike.
const STEPS: u32 = 9;

type Content = Vec<(String, Vec<u8>)>;
type Decide = Box<dyn FnMut(&Seen) -> Fate + Send>;
/// The fate of a request for a page or a state tensor; other requests are passed on.
type Rule = Arc<Mutex<Decide>>;

/// A snapshot in a registry, and a host that lacks it behind a proxy.
struct Scene {
    _here: Host,
    source: Synthetic,
    /// The state that was captured, and what becomes of it in [`STEPS`] steps.
    captured: Content,
    continued: Content,
    there: Host,
    front: Front,
    rule: Rule,
    digest: Digest,
    /// Digests of pages by group, those of a rank after those of the rank before; of state tensors
    /// under their names.
    blobs: BTreeMap<String, Vec<Digest>>,
    _registry: tempfile::TempDir,
}

impl Scene {
    async fn of(spec: Spec, restore_bytes: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = registry(dir.path()).await;
        let here = host_with(|config| config.registry = Some(url.clone())).await;
        let source = Synthetic::start(&here.agent, spec);
        source.add("s", &tokens(62));
        let request = SnapshotRequest { reference: "team/agent:now".into(), push: Push::Wait, ..SnapshotRequest::default() };
        let digest = here.agent.snapshot(&source.spec.name, request).await.unwrap().digest;
        let blobs = blobs(&here, &digest).await;
        let all: HashSet<Digest> = blobs.values().flatten().copied().collect();
        let captured = source.content("s");
        source.step("s", STEPS);
        let continued = source.content("s");
        let pass: Decide = Box::new(|_: &Seen| Fate::Pass);
        let rule: Rule = Arc::new(Mutex::new(pass));
        let given = Arc::clone(&rule);
        let front = Front::start(&url, move |seen| match seen.asked() {
            Some(asked) if asked.iter().any(|digest| all.contains(digest)) => (given.lock())(seen),
            _ => Fate::Pass,
        });
        let there = host_with(|config| {
            config.registry = Some(front.url.clone());
            config.restore_bytes = restore_bytes;
        })
        .await;
        Self { _here: here, source, captured, continued, there, front, rule, digest, blobs, _registry: dir }
    }

    /// Another engine of the same kind on the host that lacks the snapshot.
    fn engine(&self, name: &str) -> Synthetic {
        let mut spec = self.source.spec.clone().placed(7, 64);
        spec.name = name.into();
        Synthetic::start(&self.there.agent, spec)
    }

    fn set(&self, rule: impl FnMut(&Seen) -> Fate + Send + 'static) {
        *self.rule.lock() = Box::new(rule);
    }

    async fn restore(&self, engine: &str, no_store: bool) -> pfr_agent::Result<RestoreReport> {
        self.there.agent.restore(engine, request(no_store)).await
    }

    /// Pages and state tensors that were asked for, in order, from the request `from` on.
    fn asked(&self, from: usize) -> Vec<Digest> {
        let all: HashSet<Digest> = self.blobs.values().flatten().copied().collect();
        let seen = self.front.seen();
        seen[from..].iter().filter_map(Seen::asked).flatten().filter(|digest| all.contains(digest)).collect()
    }

    fn equals(&self, engine: &Synthetic, report: &RestoreReport) {
        let restored = report.sequence.as_ref().unwrap();
        assert_eq!(report.digest, self.digest);
        assert_eq!(engine.content(restored), self.captured);
        engine.step(restored, STEPS);
        assert_eq!(engine.content(restored), self.continued, "it continues otherwise");
    }

    async fn disk_bytes(&self) -> u64 {
        self.there.agent.store().stats(None).await.unwrap().disk
    }
}

fn request(no_store: bool) -> RestoreRequest {
    RestoreRequest { reference: "team/agent:now".into(), no_store, ..RestoreRequest::default() }
}

async fn blobs(host: &Host, digest: &Digest) -> BTreeMap<String, Vec<Digest>> {
    let (store, limits) = (host.agent.store(), Limits::default());
    let mut blobs: BTreeMap<String, Vec<Digest>> = BTreeMap::new();
    for layer in store.manifest(digest).await.unwrap().layers {
        let bytes = store.read(&layer.digest).await.unwrap();
        match layer.media_type.as_str() {
            media_type::TREE => {
                let tree = PageTree::parse(&bytes, &limits).unwrap();
                for (run, _) in tree.run_shapes() {
                    let run = Run::parse(&store.read(&run).await.unwrap(), &limits).unwrap();
                    blobs.entry(tree.group.name.clone()).or_default().extend_from_slice(run.digests());
                }
            }
            media_type::CHECKPOINT => {
                for tensor in Checkpoint::parse(&bytes, &limits).unwrap().tensors {
                    blobs.entry(tensor.name).or_default().push(tensor.payload_hash);
                }
            }
            _ => {}
        }
    }
    blobs
}

/// Whether nothing is left of a restore that failed.
fn as_before(engine: &Synthetic, free: usize) {
    assert!(engine.sequences().is_empty() && engine.waiting().is_empty());
    assert_eq!(engine.free_blocks("main"), free);
    let journal = engine.journal();
    assert!(!journal.contains(&Event::Call("activate")) && !journal.contains(&Event::Call("discard under a copy")), "{journal:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_store_the_engine_continues_alike_and_the_store_has_nothing() {
    let mut spec = Spec::hybrid("e").ranks(2);
    spec.groups.push(Group { replicated: true, ..Group::opaque("shared") });
    let scene = Scene::of(spec, 256 << 20).await;
    let engine = scene.engine("there");
    let report = scene.restore("there", true).await.unwrap();
    assert_eq!((report.in_store, report.oracle), (Stored::Not, true));
    assert_eq!((report.values_computed, report.values_attested), (4, 0), "two tensors of two ranks");
    assert!(report.bytes_pulled > 0);
    scene.equals(&engine, &report);
    assert_eq!(scene.disk_bytes().await, 0);
    assert_eq!(scene.there.agent.flight().used(), 0);
    // It is asked for again, whole: nothing was kept.
    let (seen, first) = (scene.front.seen().len(), scene.asked(0));
    let again = scene.engine("again");
    let report = scene.restore("again", true).await.unwrap();
    scene.equals(&again, &report);
    assert_eq!(scene.asked(seen), first);
    // Ranks that hold the same page get it from one request.
    let distinct: HashSet<&Digest> = first.iter().collect();
    assert_eq!(distinct.len(), first.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_is_filled_behind_the_engine() {
    let scene = Scene::of(Spec::hybrid("e"), 256 << 20).await;
    let engine = scene.engine("there");
    let report = scene.restore("there", false).await.unwrap();
    assert_eq!(report.in_store, Stored::Behind);
    scene.equals(&engine, &report);
    // A restore that begins now waits for it, and needs no registry.
    scene.set(|_| Fate::Refuse(ErrorCode::Unavailable));
    let other = scene.engine("other");
    let local = RestoreRequest { local: true, ..request(false) };
    let second = scene.there.agent.restore("other", local).await.unwrap();
    assert_eq!((second.in_store, second.bytes_pulled), (Stored::Here, 0));
    scene.equals(&other, &second);
    // Nor does one by tag: the registry is asked for the tag, and for no page.
    let seen = scene.front.seen().len();
    let third = scene.engine("third");
    let report = scene.restore("third", false).await.unwrap();
    assert_eq!((report.in_store, scene.asked(seen)), (Stored::Here, Vec::new()));
    scene.equals(&third, &report);
    assert_eq!(scene.there.agent.flight().used(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_are_asked_for_in_the_order_in_which_the_engine_lists_its_groups() {
    let states: &[(&str, u64)] = &[("layers.1.conv", 24), ("layers.1.ssm", 100)];
    let groups = vec![Group::opaque("zeta"), Group::recurrent("mamba", states), Group::flat("alpha")];
    let scene = Scene::of(Spec::with("e", groups), 256 << 20).await;
    let engine = scene.engine("there");
    let report = scene.restore("there", true).await.unwrap();
    scene.equals(&engine, &report);
    let order = ["zeta", "layers.1.conv", "layers.1.ssm", "alpha"];
    let expected: Vec<Digest> = order.iter().flat_map(|name| scene.blobs[*name].clone()).collect();
    assert_eq!(scene.asked(0), expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_is_asked_for_than_may_be_in_flight_and_the_progress_is_shown() {
    let bound = FEW as u64 * COST;
    let scene = Scene::of(Spec::flat("e"), bound).await;
    let engine = scene.engine("there");
    let control = Control::bind(scene.there.agent.clone()).unwrap();
    tokio::spawn(control.run(std::future::pending()));
    drop(rustls::crypto::ring::default_provider().install_default());
    let http = reqwest::Client::builder().unix_socket(scene.there.agent.config().socket.clone()).build().unwrap();
    let info = async || http.get("http://agent/v1/engines/there").send().await.unwrap().json::<EngineInfo>().await.unwrap();
    assert_eq!(info().await.restoring, []);

    engine.watch.hold_writes();
    let agent = scene.there.agent.clone();
    let restoring = tokio::spawn(async move { agent.restore("there", request(true)).await });
    until("the engine is written to", || engine.watch.is_writing()).await;
    until("the budget is used up", || scene.there.agent.flight().used() == bound).await;
    assert!((1..=FEW).contains(&scene.asked(0).len()), "{} pages", scene.asked(0).len());
    let shown = info().await.restoring;
    let [progress] = &shown[..] else { panic!("{shown:?}") };
    let total = (scene.blobs["main"].len() * PAGE) as u64;
    assert_eq!((progress.digest, progress.bytes_total), (scene.digest, total));
    assert!((PAGE as u64..=(FEW * PAGE) as u64).contains(&progress.bytes_verified), "{progress:?}");

    engine.watch.release_writes();
    let report = restoring.await.unwrap().unwrap();
    scene.equals(&engine, &report);
    assert_eq!((scene.there.agent.flight().used(), info().await.restoring), (0, Vec::new()));
    assert_eq!(scene.asked(0).len(), scene.blobs["main"].len());
}

#[tokio::test(flavor = "multi_thread")]
async fn two_restores_share_the_bytes_in_flight_and_both_end() {
    let bound = FEW as u64 * COST;
    let scene = Scene::of(Spec::flat("e"), bound).await;
    let engines = [scene.engine("one"), scene.engine("two")];
    engines.iter().for_each(|engine| engine.watch.hold_writes());
    let begin = |name: &'static str, no_store| {
        let agent = scene.there.agent.clone();
        tokio::spawn(async move { agent.restore(name, request(no_store)).await })
    };
    let restores = [begin("one", false), begin("two", true)];
    until("the budget is used up", || scene.there.agent.flight().used() == bound).await;
    assert!(scene.asked(0).len() <= FEW, "{} pages", scene.asked(0).len());
    engines.iter().for_each(|engine| engine.watch.release_writes());
    for (restore, engine) in restores.into_iter().zip(&engines) {
        let report = restore.await.unwrap().unwrap();
        scene.equals(engine, &report);
    }
    until("nothing is in flight", || scene.there.agent.flight().used() == 0).await;
}

/// Passes requests for these blobs on, and refuses others.
fn only(passed: Vec<Digest>) -> impl FnMut(&Seen) -> Fate + Send + 'static {
    move |seen| match seen.asked() {
        Some(asked) if asked.iter().all(|digest| passed.contains(digest)) => Fate::Pass,
        _ => Fate::Refuse(ErrorCode::Unavailable),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_dies_leaves_the_engine_as_it_was_and_the_next_try_asks_for_the_rest() {
    // One page for each request.
    let scene = Scene::of(Spec::flat("e"), FEW as u64 * COST).await;
    let engine = scene.engine("there");
    let free = engine.free_blocks("main");
    let (came, rest) = scene.blobs["main"].split_at(5);
    // Without the store nothing is kept; with it, what was verified.
    for no_store in [true, false] {
        scene.set(only(came.to_vec()));
        let error = scene.restore("there", no_store).await.unwrap_err();
        assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
        until("the blocks are back", || engine.waiting().is_empty()).await;
        as_before(&engine, free);
        until("nothing is in flight", || scene.there.agent.flight().used() == 0).await;
        assert_eq!(scene.disk_bytes().await == 0, no_store);
    }
    scene.set(|_| Fate::Pass);
    let seen = scene.front.seen().len();
    let report = scene.restore("there", false).await.unwrap();
    scene.equals(&engine, &report);
    let asked: HashSet<Digest> = scene.asked(seen).into_iter().collect();
    assert_eq!(asked, rest.iter().copied().collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_was_changed_on_the_way_is_refused() {
    let scene = Scene::of(Spec::flat("e"), FEW as u64 * COST).await;
    let engine = scene.engine("there");
    let free = engine.free_blocks("main");
    let flip = |_: &Seen| {
        Fate::change(|mut body| {
            let at = body.len() / 2;
            body[at] ^= 1;
            body
        })
    };
    let other = |seen: &Seen| {
        let asked = seen.asked().unwrap();
        let frames = asked.iter().map(|digest| claiming(Kind::Blob, *digest, &[7; PAGE]));
        Fate::Instead(200, media_type::FRAMES, stream(frames))
    };
    let longer = |seen: &Seen| {
        let frames = seen.asked().unwrap();
        let frames = frames.iter().map(|digest| claiming(Kind::Blob, *digest, &[7; PAGE + 1]));
        Fate::Instead(200, media_type::FRAMES, stream(frames))
    };
    type Lie = fn(&Seen) -> Fate;
    let lies: [(&str, Lie, ErrorCode); 3] = [
        ("a flipped byte", flip, ErrorCode::CorruptFrame),
        ("other bytes under the digest", other, ErrorCode::DigestMismatch),
        ("more bytes", longer, ErrorCode::LengthMismatch),
    ];
    for no_store in [true, false] {
        for (what, lie, code) in lies {
            let count = AtomicUsize::new(0);
            engine.forget_journal();
            scene.set(move |seen| if count.fetch_add(1, Ordering::Relaxed) == 6 { lie(seen) } else { Fate::Pass });
            let error = scene.restore("there", no_store).await.unwrap_err();
            assert!(matches!(error, Error::Client(_)), "{what}: {error}");
            assert_eq!(error.code(), code, "{what}: {error}");
            until("the blocks are back", || engine.waiting().is_empty()).await;
            as_before(&engine, free);
        }
    }
    scene.set(|_| Fate::Pass);
    let report = scene.restore("there", false).await.unwrap();
    scene.equals(&engine, &report);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_fails_gets_nothing_and_the_store_keeps_what_came() {
    let scene = Scene::of(Spec::hybrid("e"), 256 << 20).await;
    let engine = scene.engine("there");
    let free = engine.free_blocks("main");
    for (fault, code) in [
        (Fault::WritesLie, ErrorCode::LiveMismatch),
        (Fault::WriteFails, ErrorCode::EngineLost),
        (Fault::PanicInWrite, ErrorCode::Internal),
        (Fault::OtherLogits, ErrorCode::OracleMismatch),
        (Fault::Refuses("allocate"), ErrorCode::EngineRefused),
    ] {
        engine.set(fault);
        engine.forget_journal();
        let error = scene.restore("there", false).await.unwrap_err();
        assert_eq!(error.code(), code, "{fault:?}: {error}");
        until("the blocks are back", || engine.waiting().is_empty()).await;
        engine.heal();
        as_before(&engine, free);
        until("nothing is in flight", || scene.there.agent.flight().used() == 0).await;
    }
    // Every page had come.
    let seen = scene.front.seen().len();
    let report = scene.restore("there", false).await.unwrap();
    assert_eq!(scene.asked(seen), []);
    scene.equals(&engine, &report);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_that_is_given_up_ends_its_requests_and_gives_all_back() {
    let bound = FEW as u64 * COST;
    let scene = Scene::of(Spec::flat("e"), bound).await;
    let engine = scene.engine("there");
    let free = engine.free_blocks("main");
    engine.watch.hold_writes();
    let agent = scene.there.agent.clone();
    let restoring = tokio::spawn(async move { agent.restore("there", request(false)).await });
    until("the engine is written to", || engine.watch.is_writing()).await;
    until("the budget is used up", || scene.there.agent.flight().used() == bound).await;
    restoring.abort();
    assert!(restoring.await.unwrap_err().is_cancelled());
    engine.watch.release_writes();
    until("nothing is in flight", || scene.there.agent.flight().used() == 0).await;
    until("the blocks are back", || engine.waiting().is_empty() && engine.free_blocks("main") == free).await;
    as_before(&engine, free);
    // The store has what came. Nothing holds it: a collection takes it long before a lease ends.
    let at_once = GcOptions { grace: Duration::ZERO, ..GcOptions::default() };
    let becomes = async |is_empty: bool| {
        while (scene.disk_bytes().await == 0) != is_empty {
            if is_empty {
                scene.there.agent.store().gc(&at_once, &mut |_| ()).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), becomes(false)).await.expect("it keeps what came");
    tokio::time::timeout(Duration::from_secs(20), becomes(true)).await.expect("its session ends");
    let report = scene.restore("there", false).await.unwrap();
    scene.equals(&engine, &report);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_asks_needs_the_store() {
    let scene = Scene::of(Spec::flat("e"), 256 << 20).await;
    let mut spec = Spec::flat("asks");
    spec.verbs = vec![Verb::Request];
    let _asking = Synthetic::start(&scene.there.agent, spec);
    let error = scene.restore("asks", true).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::InvalidRequest, "{error}");
    assert!(error.to_string().contains("without --no-store"), "{error}");
    assert_eq!(scene.asked(0), []);
    assert_eq!(scene.restore("asks", false).await.unwrap().in_store, Stored::Here);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_in_the_background_gives_way_while_pages_pass_to_an_engine() {
    let scene = Scene::of(Spec::flat("e"), FEW as u64 * COST).await;
    let engine = scene.engine("there");
    engine.watch.hold_writes();
    let agent = scene.there.agent.clone();
    let restoring = tokio::spawn(async move { agent.restore("there", request(true)).await });
    until("the engine is written to", || engine.watch.is_writing()).await;
    let warm = WarmRequest { references: vec!["team/agent:now".into()], ..WarmRequest::default() };
    let job = scene.there.agent.begin(JobRequest::Warm(warm)).await.unwrap();
    // Nodes are asked for one level after another, and each piece of an answer waits for 2 s.
    let ended = scene.there.agent.jobs().wait(&job.id);
    assert!(tokio::time::timeout(Duration::from_secs(3), ended).await.is_err(), "it did not wait for the restore");
    engine.watch.release_writes();
    let report = restoring.await.unwrap().unwrap();
    scene.equals(&engine, &report);
    let ended = scene.there.agent.jobs().wait(&job.id);
    let ended = tokio::time::timeout(Duration::from_secs(60), ended).await.expect("it ends").unwrap();
    assert_eq!(ended.state, JobState::Done, "{ended:?}");
}

/// Token position of a restore that leaves pages for the local store to fetch behind it.
const PART: u64 = 32;

/// A registry that holds back the last page, which restores up to [`PART`] do not ask for.
fn without_the_last_page(scene: &Scene) -> Arc<Semaphore> {
    let (gate, last) = (Arc::new(Semaphore::new(0)), *scene.blobs["main"].last().unwrap());
    let held = Arc::clone(&gate);
    scene.set(move |seen| match seen.asked() {
        Some(asked) if asked.contains(&last) => Fate::Hold(Arc::clone(&held)),
        _ => Fate::Pass,
    });
    gate
}

fn part() -> RestoreRequest {
    RestoreRequest { position: Some(PART), ..request(false) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_that_was_saved_anew_meanwhile_stays() {
    let scene = Scene::of(Spec::flat("e"), 256 << 20).await;
    let engine = scene.engine("there");
    let gate = without_the_last_page(&scene);
    let report = scene.there.agent.restore("there", part()).await.unwrap();
    assert_eq!(report.in_store, Stored::Behind);
    let restored = report.sequence.unwrap();
    engine.step(&restored, STEPS);
    let save =
        SnapshotRequest { reference: "team/agent:now".into(), sequence: Some(restored), push: Push::Never, ..SnapshotRequest::default() };
    let saved = scene.there.agent.snapshot("there", save).await.unwrap().digest;
    assert_ne!(saved, scene.digest);
    gate.add_permits(100);
    let (store, repository) = (scene.there.agent.store(), "team/agent".parse().unwrap());
    let complete = async {
        while store.snapshot(&repository, &scene.digest).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), complete).await.expect("the store has it");
    assert_eq!(store.tag(&repository, &"now".parse().unwrap()).await.unwrap().digest, saved);
}
