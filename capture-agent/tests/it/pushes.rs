//! Pushes in the background and drains, against a real registry.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::memory::Fault;
use crate::common::{Host, config, eager, host_of, host_with, reopened};
use pfr_agent::{Agent, Config};
use pfr_registry::Server;
use pfr_schema::agent::{Drain, DrainRequest, Push, PushJob, PushState, SnapshotRequest};
use pfr_schema::api::Problem;
use pfr_schema::{Digest, ErrorCode};
use pfr_store::Pin;
use pfr_testkit::front::{Fate, Front, Seen};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// An address that no program listens on now, and that no other process asks for: on 127.0.0.1
/// another test would get the port.
fn free_address() -> SocketAddr {
    let [_, a, b, c] = std::process::id().to_be_bytes();
    std::net::TcpListener::bind((std::net::Ipv4Addr::new(127, 64 | a, b, c), 0)).unwrap().local_addr().unwrap()
}

async fn registry(dir: &Path, listen: SocketAddr) -> pfr_store::Store {
    let config = pfr_registry::Config { data: dir.to_owned(), listen, ..pfr_registry::Config::default() };
    let server = Server::bind(config).await.unwrap();
    let store = server.store().clone();
    tokio::spawn(server.run(std::future::pending()));
    store
}

/// A host that pushes to `registry` and retries soon, with a sequence to capture.
async fn with_sequence(registry: &str) -> (Host, Synthetic) {
    let host = host_of(registry).await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &[1, 2, 3, 4, 5, 6]);
    (host, engine)
}

/// A host with a sequence to capture, whose registry does not answer.
async fn out_of_reach() -> (Host, Synthetic) {
    with_sequence(&format!("http://{}", free_address())).await
}

/// Leaves a push on disk, as an agent that was killed does; and where.
fn leave_job(config: &Config, digest: Digest, state: PushState) -> (PushJob, std::path::PathBuf) {
    let (id, reference) = ("01a2000a-1c4b-720d-a562-8840f2a3e175".to_owned(), "http://127.0.0.1:1/team/agent:x".to_owned());
    let job = PushJob { id, digest, reference, state, attempts: 1, error: None, code: None, bytes_sent: 0 };
    let file = config.pushes_dir().join(format!("{}.json", job.id));
    std::fs::create_dir_all(config.pushes_dir()).unwrap();
    std::fs::write(&file, serde_json::to_vec(&job).unwrap()).unwrap();
    (job, file)
}

async fn snapshot(host: &Host, engine: &str, reference: &str) -> (Digest, PushJob) {
    let request = SnapshotRequest { reference: reference.into(), push: Push::Background, ..SnapshotRequest::default() };
    let report = host.agent.snapshot(engine, request).await.unwrap();
    (report.digest, report.push.unwrap())
}

async fn tries(agent: &Agent, id: &str, at_least: u32) -> PushJob {
    crate::common::until("it was tried", || agent.pushes().list().iter().any(|job| job.id == id && job.attempts >= at_least)).await;
    agent.pushes().list().into_iter().find(|job| job.id == id).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_is_on_disk_before_it_is_promised() {
    // The listener never answers, so the first attempt does not end, and nothing else writes the
    // job.
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let host = host_with(|config| config.registry = Some(url)).await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &[1, 2, 3]);
    let (digest, job) = snapshot(&host, "e", "team/agent:x").await;
    let files = std::fs::read_dir(host.agent.config().pushes_dir()).unwrap();
    let texts: Vec<String> = files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect();
    assert!(matches!(&texts[..], [one] if one.contains(&job.id) && one.contains(&digest.to_string())), "{texts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_comes_later_gets_it_also_after_a_restart() {
    let (address, dir) = (free_address(), tempfile::tempdir().unwrap());
    let url = format!("http://{address}");
    let (mut host, mut engine) = with_sequence(&url).await;
    let (digest, job) = snapshot(&host, "e", "team/agent:x").await;
    let tried = tries(&host.agent, &job.id, 2).await;
    assert_eq!(tried.reference, format!("{url}/team/agent:x"));
    assert!(tried.error.unwrap().contains("does not answer"));
    assert_ne!(tried.state, PushState::Failed);

    // The agent restarts; the queue is where it was.
    engine.leave();
    drop(engine);
    let mut settings = config(host.dir.path());
    eager(&mut settings);
    settings.registry = Some(url.clone());
    drop(std::mem::replace(&mut host.agent, Agent::open(config(dir.path())).await.unwrap()));
    let again = reopened(&settings).await;
    let [found] = &again.pushes().list()[..] else { panic!("one push") };
    assert_eq!((&found.id, found.digest), (&job.id, digest));

    let remote = tempfile::tempdir().unwrap();
    let store = registry(remote.path(), address).await;
    let done = again.pushes().wait(&job.id).await.unwrap();
    assert_eq!((done.state, done.error), (PushState::Done, None));
    assert!(done.bytes_sent > 0);
    let tag = store.tag(&"team/agent".parse().unwrap(), &"x".parse().unwrap()).await.unwrap();
    assert_eq!(tag.digest, digest);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_committed_whose_push_cannot_be_remembered() {
    let (host, _engine) = out_of_reach().await;
    let dir = host.agent.config().pushes_dir();
    std::fs::remove_dir_all(&dir).unwrap();
    std::fs::write(&dir, b"in the way").unwrap();
    let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Background, ..SnapshotRequest::default() };
    let error = host.agent.snapshot("e", request).await.unwrap_err();
    assert!(error.to_string().contains("push queue"), "{error}");
    assert!(host.agent.store().tag(&"team/agent".parse().unwrap(), &"x".parse().unwrap()).await.is_err());
    assert!(host.agent.pushes().list().is_empty());

    std::fs::remove_file(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    let (digest, _) = snapshot(&host, "e", "team/agent:x").await;
    assert_eq!(host.agent.store().tag(&"team/agent".parse().unwrap(), &"x".parse().unwrap()).await.unwrap().digest, digest);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_snapshot_was_never_committed_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let settings = config(dir.path());
    // As a kill leaves it before the commit.
    let (_, file) = leave_job(&settings, Digest::sha256(b"nothing"), PushState::Waiting);
    let agent = Agent::open(settings).await.unwrap();
    assert!(agent.pushes().list().is_empty() && !file.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_failed_after_its_names_were_written_is_pushed_all_the_same() {
    let (host, _engine) = out_of_reach().await;
    let journal = host.agent.config().store_dir().join("packs/journal");
    drop(std::fs::remove_dir_all(&journal));
    std::fs::create_dir_all(journal.parent().unwrap()).unwrap();
    std::fs::write(&journal, b"in the way").unwrap();
    let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Background, ..SnapshotRequest::default() };
    host.agent.snapshot("e", request).await.unwrap_err();
    let there = host.agent.store().tag(&"team/agent".parse().unwrap(), &"x".parse().unwrap()).await.unwrap();
    let [job] = &host.agent.pushes().list()[..] else { panic!("one push") };
    assert_eq!(job.digest, there.digest);
    tries(&host.agent, &job.id, 1).await;
    assert!(host.agent.store().metadata().evictable(100).await.unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_pushed_when_the_agent_ended_is_not_kept_for_ever() {
    let mut host = host_with(eager).await;
    let mut engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &[1, 2, 3, 4, 5, 6]);
    let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Never, ..SnapshotRequest::default() };
    let digest = host.agent.snapshot("e", request).await.unwrap().digest;
    // As a kill leaves it after the push was written down as done and before the pin is taken back.
    let repository = "team/agent".parse().unwrap();
    assert!(host.agent.store().pin(&repository, &digest, Pin::UntilPushed, true).await.unwrap());
    let (job, _) = leave_job(host.agent.config(), digest, PushState::Done);
    engine.leave();
    drop(engine);
    let other = tempfile::tempdir().unwrap();
    drop(std::mem::replace(&mut host.agent, Agent::open(config(other.path())).await.unwrap()));
    let again = reopened(&config(host.dir.path())).await;
    assert_eq!(again.pushes().list(), [job]);
    assert!(again.store().metadata().evictable(100).await.unwrap().iter().any(|snapshot| snapshot.digest == digest));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_is_known_after_a_restart_however_much_its_registry_says() {
    let problem = serde_json::to_vec(&Problem::new(ErrorCode::Unavailable, "x".repeat(200_000))).unwrap();
    let instead = move |_: &Seen| Fate::Instead(503, "application/problem+json", problem.clone());
    let registry = Front::start("http://127.0.0.1:1", |_: &Seen| Fate::Refuse(ErrorCode::Unavailable));
    let front = Front::start(&registry.url, instead);
    let (mut host, mut engine) = with_sequence(&front.url).await;
    let (_, job) = snapshot(&host, "e", "team/agent:x").await;
    let said = tries(&host.agent, &job.id, 1).await.error.unwrap();
    assert!(said.starts_with("xxx") && said.len() < 10_000, "{said}");

    engine.leave();
    drop(engine);
    let mut settings = config(host.dir.path());
    settings.registry = Some(front.url.clone());
    let elsewhere = tempfile::tempdir().unwrap();
    drop(std::mem::replace(&mut host.agent, Agent::open(config(elsewhere.path())).await.unwrap()));
    let again = reopened(&settings).await;
    assert!(again.pushes().list().iter().any(|found| found.id == job.id), "it was forgotten");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_is_believed() {
    let dir = tempfile::tempdir().unwrap();
    let address = free_address();
    let _store = registry(dir.path(), address).await;
    let host = host_with(eager).await;
    let nothing = Digest::sha256(b"nothing");
    let job = host.agent.pushes().add(nothing, &format!("http://{address}/team/agent:x")).await.unwrap();
    let failed = host.agent.pushes().wait(&job.id).await.unwrap();
    assert_eq!((failed.state, failed.attempts), (PushState::Failed, 1));
    assert!(failed.error.is_some());
    for reference in ["team/agent:x", "http://h/team/agent:x~1", "http://h/Team:x"] {
        let code = host.agent.pushes().add(nothing, reference).await.unwrap_err().code();
        assert!(matches!(code, ErrorCode::InvalidRequest | ErrorCode::InvalidName), "{reference}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_whose_token_is_refused_or_cannot_be_read_waits_for_another_one() {
    let (dir, tokens) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let url = crate::common::registry(dir.path()).await;
    let is_renewed = Arc::new(AtomicBool::new(false));
    let renewed = Arc::clone(&is_renewed);
    let rule = move |_: &Seen| if renewed.load(Ordering::Relaxed) { Fate::Pass } else { Fate::Refuse(ErrorCode::Unauthorized) };
    let front = Front::start(&url, rule);
    let token = tokens.path().join("token");
    std::fs::write(&token, "old").unwrap();
    let host = host_with(|config| {
        eager(config);
        (config.registry, config.token_file) = (Some(front.url.clone()), Some(token.clone()));
    })
    .await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &[1, 2, 3, 4, 5, 6]);
    // A client that waits for the push is told at once: it may wait for a user.
    let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Wait, ..SnapshotRequest::default() };
    let job = host.agent.snapshot("e", request).await.unwrap().push.unwrap();
    assert_eq!((job.state, job.code, job.error.as_deref()), (PushState::Waiting, Some(ErrorCode::Unauthorized), Some("by rule")));
    assert_ne!(tries(&host.agent, &job.id, job.attempts + 2).await.state, PushState::Failed);

    std::fs::write(&token, " \n").unwrap();
    let is_empty = |job: &PushJob| job.error.as_ref().is_some_and(|error| error.contains("is empty"));
    crate::common::until("the file was read", || host.agent.pushes().list().iter().any(is_empty)).await;
    let attempts = host.agent.pushes().list()[0].attempts;
    assert_ne!(tries(&host.agent, &job.id, attempts + 2).await.state, PushState::Failed);

    std::fs::write(&token, "new").unwrap();
    is_renewed.store(true, Ordering::Relaxed);
    let done = host.agent.pushes().wait(&job.id).await.unwrap();
    assert_eq!((done.state, done.digest, done.error), (PushState::Done, job.digest, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_waits_for_a_push_is_told_of_a_full_quota_and_the_push_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let url = crate::common::registry(dir.path()).await;
    let has_room = Arc::new(AtomicBool::new(false));
    let room = Arc::clone(&has_room);
    let rule = move |_: &Seen| if room.load(Ordering::Relaxed) { Fate::Pass } else { Fate::Refuse(ErrorCode::QuotaExceeded) };
    let front = Front::start(&url, rule);
    let (host, _engine) = with_sequence(&front.url).await;
    let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Wait, ..SnapshotRequest::default() };
    let asked = tokio::time::timeout(Duration::from_secs(20), host.agent.snapshot("e", request)).await;
    let job = asked.expect("it waits until a snapshot is deleted").unwrap().push.unwrap();
    assert_eq!((job.state, job.code), (PushState::Waiting, Some(ErrorCode::QuotaExceeded)));

    has_room.store(true, Ordering::Relaxed);
    let done = host.agent.pushes().wait(&job.id).await.unwrap();
    assert_eq!((done.state, done.digest, done.error), (PushState::Done, job.digest, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_push_to_a_tag_wins_however_long_the_first_took() {
    let (address, dir) = (free_address(), tempfile::tempdir().unwrap());
    let (host, engine) = with_sequence(&format!("http://{address}")).await;
    let (_, first) = snapshot(&host, "e", "team/agent:x").await;
    tries(&host.agent, &first.id, 1).await;
    engine.step("s", 3);
    let (last, second) = snapshot(&host, "e", "team/agent:x").await;
    let store = registry(dir.path(), address).await;
    assert_eq!(host.agent.pushes().wait(&second.id).await.unwrap().state, PushState::Done);
    assert_eq!(host.agent.pushes().wait(&first.id).await.unwrap().state, PushState::Done);
    assert_eq!(store.tag(&"team/agent".parse().unwrap(), &"x".parse().unwrap()).await.unwrap().digest, last);
}

async fn drain(host: &Host, wait_seconds: u64) -> Drain {
    let request =
        DrainRequest { repository: "team/evacuated".into(), plan_only: false, wait_seconds: Some(wait_seconds), ..DrainRequest::default() };
    host.agent.drain(request).await.unwrap()
}

fn codes(drain: &Drain) -> Vec<(&str, &str, ErrorCode)> {
    drain.failed.iter().map(|f| (f.engine.as_str(), f.sequence.as_str(), f.problem.code)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_says_what_the_registry_has_and_does_not_wait_for_ever() {
    let (address, dir) = (free_address(), tempfile::tempdir().unwrap());
    let host = host_of(&format!("http://{address}")).await;
    let (one, two) = (Synthetic::start(&host.agent, Spec::flat("one")), Synthetic::start(&host.agent, Spec::hybrid("two")));
    one.add("s", &[1, 2, 3, 4, 5, 6]);
    two.add("t", &[7, 8, 9]);
    let plan = DrainRequest { repository: "team/evacuated".into(), plan_only: true, ..DrainRequest::default() };
    let plan = host.agent.drain(plan).await.unwrap();
    let items: Vec<(&str, &str, u64)> = plan.plan.iter().map(|i| (i.engine.as_str(), i.reference.as_str(), i.boundary)).collect();
    assert_eq!(items, [("one", "team/evacuated/one:s", 5), ("two", "team/evacuated/two:t", 2)]);
    assert_eq!((plan.recompute_tokens, plan.eta_seconds, plan.done.len(), plan.failed.len()), (7, None, 0, 0));
    assert!(plan.bytes > 0 && host.agent.pushes().list().is_empty());

    // No registry answers: both are captured, and reported as not pushed.
    let late = drain(&host, 0).await;
    assert_eq!(codes(&late), [("one", "s", ErrorCode::Timeout), ("two", "t", ErrorCode::Timeout)]);
    assert!(late.done.is_empty() && late.failed[0].problem.detail.contains("is in this host's store"), "{late:?}");
    let jobs = host.agent.pushes().list();
    assert_eq!(jobs.len(), 2);
    assert!(!one.is_paused() && !two.is_paused());

    // The pushes went on: they are done when a registry is there.
    let store = registry(dir.path(), address).await;
    for job in jobs {
        assert_eq!(host.agent.pushes().wait(&job.id).await.unwrap().state, PushState::Done);
    }
    one.step("s", 2);
    let done = drain(&host, 60).await;
    assert_eq!(codes(&done), []);
    assert!(done.eta_seconds.is_some());
    for (report, name) in done.done.iter().zip(["one", "two"]) {
        assert_eq!(report.push.as_ref().map(|job| job.state), Some(PushState::Done));
        let (repository, tag) = (format!("team/evacuated/{name}").parse().unwrap(), report.sequence.parse().unwrap());
        assert_eq!(store.tag(&repository, &tag).await.unwrap().digest, report.digest);
    }
    assert_eq!(done.done.iter().map(|report| report.boundary).collect::<Vec<_>>(), [7, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_that_hang_take_no_longer_than_a_drain_may_wait_and_the_others_are_captured() {
    let host = host_of(&format!("http://{}", free_address())).await;
    let hung = ["a", "b"].map(|name| Synthetic::start(&host.agent, Spec::flat(name)));
    hung.iter().for_each(|engine| engine.set(Fault::Silent("pause")));
    let well = Synthetic::start(&host.agent, Spec::flat("c"));
    well.add("s", &[1, 2, 3, 4, 5, 6]);
    let begun = std::time::Instant::now();
    let drained = drain(&host, 1).await;
    // One after another they would take ten seconds each.
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert_eq!(codes(&drained), [("a", "", ErrorCode::Timeout), ("b", "", ErrorCode::Timeout), ("c", "s", ErrorCode::Timeout)]);
    assert_eq!(drained.failed[0].problem.detail, "a did not list its sequences within 5 s");
    assert!(drained.failed[2].problem.detail.contains("is in this host's store"), "{drained:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_that_hangs_is_given_up_in_time_and_takes_no_time_from_other_engines() {
    let host = host_of(&format!("http://{}", free_address())).await;
    let [hung, well, busy] = ["a", "b", "c"].map(|name| Synthetic::start(&host.agent, Spec::flat(name)));
    hung.add("s", &[1, 2, 3, 4, 5, 6]);
    hung.add("t", &[7, 8, 9]);
    well.add("u", &[10, 11, 12]);
    busy.add("v", &[13, 14, 15]);
    let taken = host.agent.engines().get("c").unwrap().take("a restore").unwrap();
    // It lists its sequences, and hangs once it is paused for a capture.
    hung.set(Fault::Silent("pin"));
    let drained = drain(&host, 1).await;
    assert!(codes(&drained).iter().all(|(_, _, code)| *code == ErrorCode::Timeout), "{drained:?}");
    let mut details: Vec<(&str, &str)> = drained.failed.iter().map(|f| (f.sequence.as_str(), f.problem.detail.as_str())).collect();
    details.sort_unstable();
    let [("s", s), ("t", t), ("u", u), ("v", v)] = details[..] else { panic!("{details:?}") };
    assert_eq!([s, t], ["s of a was not captured within 5 s", "t of a was not captured within 5 s"]);
    assert_eq!(v, "v of c, which was busy with a restore, was not captured within 5 s");
    assert!(u.contains("is in this host's store"), "{u}");
    assert_eq!(host.agent.pushes().list().len(), 1, "nothing of the others is on its way");
    crate::common::until("the engine goes on", || !hung.is_paused() && hung.pins() == 0).await;

    hung.heal();
    drop(taken);
    let again = drain(&host, 0).await;
    assert!(again.failed.iter().all(|failure| failure.problem.detail.contains("is in this host's store")), "{again:?}");
    assert_eq!((again.failed.len(), host.agent.pushes().list().len()), (4, 5), "u is captured and pushed once more");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_in_line_for_a_busy_engine_and_opens_nothing_meanwhile() {
    let (address, dir, timeout) = (free_address(), tempfile::tempdir().unwrap(), Duration::from_millis(500));
    let _registry = registry(dir.path(), address).await;
    let host = host_with(|config| {
        eager(config);
        (config.registry, config.engine_timeout) = (Some(format!("http://{address}")), timeout);
    })
    .await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &[1, 2, 3, 4, 5, 6]);
    let taken = host.agent.engines().get("e").unwrap().take("a restore").unwrap();
    let written = || host.agent.store().metadata().rows_written();
    let before = written();
    let ends = async {
        let note = || host.agent.jobs().list().first().and_then(|job| job.note.clone());
        crate::common::until("it waits", || note().is_some_and(|note| note.contains("capturing s of e"))).await;
        // Longer than an engine may take to answer.
        tokio::time::sleep(timeout * 2).await;
        assert_eq!(written(), before, "a session was opened");
        drop(taken);
    };
    let (drained, ()) = tokio::join!(drain(&host, 60), ends);
    assert_eq!((codes(&drained), drained.done.len()), (vec![], 1), "{drained:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_captures_an_engine_that_connects_again_while_it_waits_in_line() {
    let (host, mut engine) = out_of_reach().await;
    let taken = host.agent.engines().get("e").unwrap().take("a restore").unwrap();
    let connects = async {
        let note = || host.agent.jobs().list().first().and_then(|job| job.note.clone());
        crate::common::until("it waits", || note().is_some_and(|note| note.contains("capturing s of e"))).await;
        engine.leave();
        let again = Synthetic::start(&host.agent, Spec::flat("e"));
        again.add("s", &[1, 2, 3, 4, 5, 6]);
        drop(taken);
        again
    };
    let (drained, _again) = tokio::join!(drain(&host, 1), connects);
    let details: Vec<&str> = drained.failed.iter().map(|failure| failure.problem.detail.as_str()).collect();
    assert!(matches!(details[..], [detail] if detail.contains("is in this host's store")), "it is captured: {drained:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_tells_of_pushes_that_were_refused() {
    // A server that knows no such page.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, axum::Router::new()).into_future());
    let (host, _engine) = with_sequence(&url).await;
    let drained = drain(&host, 60).await;
    assert_eq!(codes(&drained), [("e", "s", ErrorCode::InvalidRequest)]);
    assert!(drained.done.is_empty() && drained.failed[0].problem.detail.contains("refused"), "{drained:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_begins_although_its_caller_no_longer_waits() {
    let (host, _engine) = out_of_reach().await;
    let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Never, ..SnapshotRequest::default() };
    let digest = host.agent.snapshot("e", request).await.unwrap().digest;
    drop(futures::poll!(Box::pin(host.agent.pushes().add(digest, "http://127.0.0.1:9/team/agent:x"))));
    crate::common::until("it is tried", || host.agent.pushes().list().iter().any(|job| job.attempts > 0)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_waits_pins_its_snapshot_again_if_a_push_by_hand_took_the_pin() {
    let (host, _engine) = out_of_reach().await;
    let (digest, job) = snapshot(&host, "e", "team/agent:x").await;
    tries(&host.agent, &job.id, 1).await;
    let (store, repository) = (host.agent.store(), "team/agent".parse().unwrap());
    // As `pf push` does when another registry has the snapshot.
    store.pin(&repository, &digest, Pin::UntilPushed, false).await.unwrap();
    let pinned = async {
        while !store.pinned().await.unwrap().iter().any(|row| row.snapshot.digest == digest) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), pinned).await.expect("its snapshot may be evicted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pin_ends_whatever_other_repositories_wait_for_or_have_taken() {
    let (address, dir) = (free_address(), tempfile::tempdir().unwrap());
    let _registry = registry(dir.path(), address).await;
    let host = host_with(eager).await;
    let engine = Synthetic::start(&host.agent, Spec::flat("e"));
    engine.add("s", &[1, 2, 3, 4, 5, 6]);
    let captured = async || {
        let request = SnapshotRequest { reference: "team/agent:x".into(), push: Push::Never, ..SnapshotRequest::default() };
        host.agent.snapshot("e", request).await.unwrap().digest
    };
    let evictable = async |digest: Digest| host.agent.store().metadata().evictable(100).await.unwrap().iter().any(|s| s.digest == digest);
    let freed = async |digest: Digest| {
        let freed = async {
            while !evictable(digest).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), freed).await.expect("it stays pinned");
    };
    let pushed = async |digest: Digest, reference: String| {
        let job = host.agent.pushes().add(digest, &reference).await.unwrap();
        host.agent.pushes().wait(&job.id).await.unwrap().state
    };
    // Another repository waits for the same snapshot.
    let one = captured().await;
    let waiting = host.agent.pushes().add(one, "http://127.0.0.1:9/team/other:x").await.unwrap();
    tries(&host.agent, &waiting.id, 1).await;
    assert_eq!(pushed(one, format!("http://{address}/team/agent:x")).await, PushState::Done);
    freed(one).await;
    // It was refused for this repository, and then taken for another one.
    engine.step("s", 3);
    let two = captured().await;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let refusing = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(axum::serve(listener, axum::Router::new()).into_future());
    assert_eq!(pushed(two, format!("{refusing}/team/agent:x")).await, PushState::Failed);
    assert!(!evictable(two).await, "this host has the only copy");
    assert_eq!(pushed(two, format!("http://{address}/team/other:y")).await, PushState::Done);
    freed(two).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_clears_its_own_pin_and_no_other() {
    let (address, dir) = (free_address(), tempfile::tempdir().unwrap());
    let (host, engine) = with_sequence(&format!("http://{address}")).await;
    let (store, repository) = (host.agent.store().clone(), "team/agent".parse().unwrap());
    let evictable = async |digest| store.metadata().evictable(100).await.unwrap().iter().any(|s| s.digest == digest);
    let (by_hand, first) = snapshot(&host, "e", "team/agent:x").await;
    engine.step("s", 3);
    let (other, second) = snapshot(&host, "e", "team/agent:y").await;
    // No registry answers yet: both are the only copy, pinned by hand or not.
    for digest in [by_hand, other] {
        assert!(store.pin(&repository, &digest, Pin::ByHand, true).await.unwrap());
        assert!(store.pin(&repository, &digest, Pin::ByHand, false).await.unwrap(), "it waits to be pushed");
        assert!(!evictable(digest).await);
    }
    // A push that is refused at once leaves the pin to the one that waits.
    host.agent.pushes().add(by_hand, "http://127.0.0.1:99999/team/agent:x").await.unwrap_err();
    assert!(!evictable(by_hand).await, "another push of it waits");
    store.pin(&repository, &by_hand, Pin::ByHand, true).await.unwrap();
    let _registry = registry(dir.path(), address).await;
    assert_eq!(host.agent.pushes().wait(&first.id).await.unwrap().state, PushState::Done);
    assert_eq!(host.agent.pushes().wait(&second.id).await.unwrap().state, PushState::Done);
    // The pin goes after the push is said to be done.
    let freed = async {
        while !evictable(other).await {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), freed).await.unwrap();
    // And that of the first by the time a third has come and gone.
    engine.step("s", 3);
    let (_, third) = snapshot(&host, "e", "team/agent:z").await;
    host.agent.pushes().wait(&third.id).await.unwrap();
    assert!(!evictable(by_hand).await, "a person pinned it");
    assert!(!store.pin(&repository, &by_hand, Pin::ByHand, false).await.unwrap());
    assert!(evictable(by_hand).await);
}
