//! Jobs, and the compatibility contract, against a real registry.

use crate::common::engine::Synthetic;
use crate::common::layout::{Group, Spec};
use crate::common::{Host, config, eager, host_of, registry, reopened, tokens, until};
use pfr_agent::Agent;
use pfr_schema::agent::{
    Job, JobRequest, JobState, Push, PushState, RestoreRequest, SnapshotRequest, Warm, WarmItem, WarmRequest, WarmState,
};
use pfr_schema::{Digest, ErrorCode};
use pfr_store::Pin;
use pfr_testkit::disk::SmallDisk;
use pfr_testkit::front::{Fate, Front, Seen};
use serde_json::json;
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::Semaphore;

fn asks_for_frames(seen: &Seen) -> bool {
    seen.method == "POST" && seen.path.ends_with("/frames")
}

/// A registry, and a host with an engine whose snapshots it has.
struct Rig {
    url: String,
    host: Host,
    source: Synthetic,
    _data: tempfile::TempDir,
}

impl Rig {
    async fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let url = registry(data.path()).await;
        let host = host_of(&url).await;
        let source = Synthetic::start(&host.agent, Spec::hybrid("e"));
        Self { url, host, source, _data: data }
    }

    /// Captures and pushes a sequence of so many tokens.
    async fn pushed(&self, count: u32, reference: &str) -> Digest {
        let sequence = format!("s-{count}");
        self.source.add(&sequence, &tokens(count));
        let request =
            SnapshotRequest { reference: reference.into(), sequence: Some(sequence), push: Push::Wait, ..SnapshotRequest::default() };
        let report = self.host.agent.snapshot("e", request).await.unwrap();
        assert_eq!(report.push.unwrap().state, PushState::Done);
        report.digest
    }
}

fn warm(references: &[&str]) -> WarmRequest {
    WarmRequest { references: references.iter().map(|text| (*text).to_owned()).collect(), ..WarmRequest::default() }
}

async fn begin(host: &Host, request: WarmRequest) -> Job {
    host.agent.begin(JobRequest::Warm(request)).await.unwrap()
}

async fn ended(agent: &Agent, id: &str) -> Job {
    tokio::time::timeout(Duration::from_secs(60), agent.jobs().wait(id)).await.expect("it ends").unwrap()
}

/// Begins a job, and waits for its end.
async fn run(host: &Host, request: WarmRequest) -> (Job, Warm) {
    let job = begin(host, request).await;
    let mut job = ended(&host.agent, &job.id).await;
    let warm = job.warm.take().unwrap_or_default();
    (job, warm)
}

fn states(warm: &Warm) -> Vec<WarmState> {
    warm.items.iter().map(|item| item.state).collect()
}

async fn evictable(host: &Host) -> usize {
    host.agent.store().metadata().evictable(100).await.unwrap().len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_does_not_fit_is_refused_before_any_frame_is_asked_for() {
    let rig = Rig::start().await;
    let digest = rig.pushed(62, "team/agent:now").await;

    let front = Front::start(&rig.url, |_| Fate::Pass);
    let b = host_of(&front.url).await;
    let restore = async |engine: &str| {
        b.agent.restore(engine, RestoreRequest { reference: "team/agent:now".into(), ..RestoreRequest::default() }).await
    };
    let mut other = Spec::hybrid("weights");
    other.deployment.insert("weights".into(), json!("sha256:x"));
    other.deployment.insert("backend".into(), json!("other\nkernels"));
    let mut window = Spec::hybrid("window");
    window.groups[2].window = Some(15);
    let mut blocks = Spec::hybrid("blocks");
    blocks.groups[1].block_tokens = 8;
    let mut draft = Spec::hybrid("draft");
    draft.groups.push(Group::opaque("draft"));
    for (spec, code) in [
        (other, ErrorCode::FingerprintMismatch),
        (Spec::hybrid("ranks").ranks(2), ErrorCode::RankMismatch),
        (window, ErrorCode::PageCountMismatch),
        (blocks, ErrorCode::GeometryMismatch),
        (draft, ErrorCode::MissingGroup),
        (Spec::flat("dense"), ErrorCode::MissingGroup),
    ] {
        let name = spec.name.clone();
        let theirs = rig.source.spec.deployment["weights"].clone();
        let engine = Synthetic::start(&b.agent, spec);
        let error = restore(&name).await.unwrap_err();
        assert_eq!((error.code(), engine.journal()), (code, Vec::new()), "{name}: {error}");
        if code == ErrorCode::FingerprintMismatch {
            // Only what differs, with both values, each on its own line.
            let text = error.to_string();
            let lines: Vec<&str> = text.lines().skip(1).collect();
            assert_eq!(lines.len(), 2, "{text}");
            assert!(lines[0].starts_with(r#"  backend: "other\nkernels" in the engine, "#), "{text}");
            assert_eq!(lines[1], format!(r#"  weights: "sha256:x" in the engine, {theirs} in the snapshot"#));
        }
        // A job for this engine leaves it out, too.
        let (job, warm) = run(&b, WarmRequest { engine: Some(name.clone()), ..warm(&["team/agent:now"]) }).await;
        assert_eq!((job.state, states(&warm)), (JobState::Done, vec![WarmState::Skipped]), "{name}");
        assert_eq!(warm.items[0].problem.as_ref().map(|problem| problem.code), Some(code), "{name}");
    }
    assert!(!front.seen().is_empty() && !front.seen().iter().any(asks_for_frames), "a frame was asked for");
    assert!(b.agent.store().snapshot(&"team/agent".parse().unwrap(), &digest).await.is_err());

    let _engine = Synthetic::start(&b.agent, Spec::hybrid("there"));
    assert_eq!(restore("there").await.unwrap().digest, digest);
    assert!(front.seen().iter().any(asks_for_frames));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_warmed_is_planned_fetched_once_and_kept_for_its_time() {
    let rig = Rig::start().await;
    let one = rig.pushed(30, "team/one:latest").await;
    let old = rig.pushed(40, "team/two:old").await;
    let two = rig.pushed(50, "team/two:latest").await;
    rig.pushed(60, "other/three:latest").await;

    let front = Front::start(&rig.url, |_| Fate::Pass);
    let b = host_of(&front.url).await;
    let planned = begin(&b, WarmRequest { plan_only: true, ..warm(&["team/*:latest"]) }).await;
    let plan = planned.warm.unwrap();
    assert_eq!((planned.state, states(&plan)), (JobState::Planned, vec![WarmState::Planned; 2]));
    assert_eq!(plan.items.iter().map(|item| item.digest.unwrap()).collect::<Vec<_>>(), [one, two]);
    assert_eq!((plan.recompute_tokens, plan.recompute_seconds, plan.eta_seconds), (29 + 49, None, None), "nothing is made up");
    assert!(plan.bytes > 0 && plan.bytes == plan.items.iter().map(|item| item.bytes).sum::<u64>());
    assert!(b.agent.jobs().list().is_empty() && evictable(&b).await == 0);
    let known = WarmRequest { plan_only: true, rate: Some(1 << 20), prefill_tokens_per_second: Some(39.0), ..warm(&["team/*:latest"]) };
    let plan = begin(&b, known).await.warm.unwrap();
    assert_eq!((plan.recompute_seconds, plan.eta_seconds), (Some(2.0), Some(plan.bytes as f64 / f64::from(1 << 20))));

    // Two jobs at once fetch it once.
    let keep = |seconds| WarmRequest { keep_seconds: Some(seconds), ..warm(&["team/*:latest"]) };
    let ((first, firsts), (second, seconds)) = tokio::join!(run(&b, keep(3600)), run(&b, keep(3600)));
    assert_eq!((first.state, second.state), (JobState::Done, JobState::Done));
    for (x, y) in firsts.items.iter().zip(&seconds.items) {
        assert_eq!((x.state, y.state), (WarmState::Done, WarmState::Done));
        assert!((x.bytes_received > 0) != (y.bytes_received > 0), "{x:?} {y:?}");
        assert!(x.keep_ends_at.is_some());
    }
    let pins = b.agent.store().pinned().await.unwrap();
    assert_eq!((pins.len(), evictable(&b).await), (2, 0));
    assert!(pins.iter().all(|row| row.pins == [Pin::Warm]));
    let listed = b.agent.jobs().list();
    assert_eq!(listed.iter().map(|job| job.state).collect::<Vec<_>>(), [JobState::Done; 2]);

    // A shorter time does not end a longer one. A snapshot that was not kept before is kept for the
    // shorter one.
    let before = front.seen().iter().filter(|seen| asks_for_frames(seen)).count();
    let (_, again) = run(&b, keep(1)).await;
    assert_eq!(again.items.iter().map(|item| (item.bytes, item.bytes_received)).collect::<Vec<_>>(), [(0, 0); 2]);
    assert_eq!(front.seen().iter().filter(|seen| asks_for_frames(seen)).count(), before, "nothing is fetched again");
    assert_eq!(again.items[0].keep_ends_at.max(firsts.items[0].keep_ends_at), again.items[0].keep_ends_at);
    let (_, newest) = run(&b, WarmRequest { newest: Some(2), keep_seconds: Some(1), ..warm(&["team/two"]) }).await;
    assert_eq!(newest.items.iter().map(|item| item.digest.unwrap()).collect::<Vec<_>>(), [two, old]);
    let ends = async {
        while evictable(&b).await == 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ends).await.expect("a pin ends");
    let pins: Vec<Digest> = b.agent.store().pinned().await.unwrap().iter().map(|row| row.snapshot.digest).collect();
    assert!(pins.len() == 2 && !pins.contains(&old), "{pins:?}");

    // A restore needs no registry now.
    let engine = Synthetic::start(&b.agent, Spec::hybrid("there"));
    let local = RestoreRequest { reference: "team/two:latest".into(), local: true, ..RestoreRequest::default() };
    let restored = b.agent.restore("there", local).await.unwrap();
    assert_eq!(engine.content(&restored.sequence.unwrap()), rig.source.content("s-50"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_keeps_to_its_size_and_names_what_it_does_not_find() {
    let rig = Rig::start().await;
    rig.pushed(30, "team/one:latest").await;
    rig.pushed(60, "team/two:latest").await;
    let b = host_of(&rig.url).await;
    let plan = begin(&b, WarmRequest { plan_only: true, ..warm(&["team/one", "team/two"]) }).await.warm.unwrap();
    let room = plan.items[0].bytes;
    let (job, warm_of) = run(&b, WarmRequest { max_bytes: Some(room), ..warm(&["team/one", "team/two"]) }).await;
    assert_eq!((job.state, states(&warm_of)), (JobState::Done, vec![WarmState::Done, WarmState::Skipped]));
    assert_eq!(warm_of.items[1].problem.as_ref().unwrap().code, ErrorCode::NoRoom);
    assert_eq!((job.bytes_total, job.bytes_done), (room, room));

    let (job, warm_of) = run(&b, warm(&["team/none:x", "none/*", "team/two"])).await;
    assert_eq!((job.state, states(&warm_of)), (JobState::Failed, vec![WarmState::Failed, WarmState::Failed, WarmState::Done]));
    let codes: Vec<ErrorCode> = warm_of.items.iter().filter_map(|item| Some(item.problem.as_ref()?.code)).collect();
    assert_eq!(codes, [ErrorCode::RepositoryUnknown, ErrorCode::NotFound]);
    assert_eq!(job.error.unwrap().code, ErrorCode::RepositoryUnknown);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_snapshots_share_counts_once_in_a_plan_and_in_its_size() {
    let rig = Rig::start().await;
    // The second begins as the first does.
    rig.pushed(64, "team/one:latest").await;
    rig.pushed(96, "team/two:latest").await;
    let b = host_of(&rig.url).await;
    let plan = async |references: &[&str]| begin(&b, WarmRequest { plan_only: true, ..warm(references) }).await.warm.unwrap();
    let (one, two, both) = (plan(&["team/one"]).await, plan(&["team/two"]).await, plan(&["team/one", "team/two"]).await);
    assert!(both.bytes < one.bytes + two.bytes, "{} of {} and {}", both.bytes, one.bytes, two.bytes);
    assert_eq!((both.items[0].bytes, both.items[0].bytes + both.items[1].bytes), (one.bytes, both.bytes));
    // Twice the same adds nothing.
    assert_eq!(plan(&["team/two", "team/two", "team/one"]).await.items[1].bytes, 0);
    let (job, warmed) = run(&b, WarmRequest { max_bytes: Some(both.bytes), ..warm(&["team/one", "team/two"]) }).await;
    assert_eq!((job.state, states(&warmed)), (JobState::Done, vec![WarmState::Done; 2]));
    assert_eq!((job.bytes_total, job.bytes_done), (both.bytes, both.bytes));
    // So many bytes are what the second brings beyond the first.
    let c = host_of(&rig.url).await;
    run(&c, warm(&["team/one"])).await;
    let rest = begin(&c, WarmRequest { plan_only: true, ..warm(&["team/two"]) }).await.warm.unwrap();
    assert_eq!(rest.bytes, both.items[1].bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_with_an_unfinished_job_starts_on_a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    let settings = config(dir.path());
    drop(Agent::open(settings.clone()).await.unwrap());
    // Only the folder of the jobs is full: the store has a reserve of its own.
    let Some(disk) = SmallDisk::mount(&settings.jobs_dir(), 1) else { return };
    let job = json!({"id": "one", "request": {"kind": "warm", "references": ["team/one"]}, "state": "running", "started_at": 1});
    std::fs::write(disk.path().join("one.json"), job.to_string()).unwrap();
    let mut filler = std::fs::File::create(disk.path().join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    for _ in 0..2 {
        let agent = reopened(&settings).await;
        assert_eq!(agent.jobs().get("one").unwrap().state, JobState::Interrupted);
        let refused = agent.begin(JobRequest::Warm(warm(&["http://127.0.0.1:1/team/one"]))).await.unwrap_err();
        assert_eq!(refused.code(), ErrorCode::StorageFull, "{refused}");
        drop(agent);
    }
    drop(filler);
    std::fs::remove_file(disk.path().join("filler")).unwrap();
    let agent = reopened(&settings).await;
    assert_eq!(agent.jobs().get("one").unwrap().state, JobState::Interrupted);
    let written = std::fs::read_to_string(disk.path().join("one.json")).unwrap();
    assert!(written.contains("interrupted"), "with space it is written: {written}");
    drop(agent);
    drop(disk);
    drop(dir);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_is_away_in_the_middle_is_waited_for() {
    let rig = Rig::start().await;
    let digest = rig.pushed(62, "team/agent:now").await;
    // It answers the look-up and not the frames, for longer than the client tries one request.
    let left = Arc::new(AtomicUsize::new(12));
    let away = Arc::clone(&left);
    let front = Front::start(&rig.url, move |seen| {
        let is_struck = asks_for_frames(seen) && away.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
        if is_struck { Fate::Refuse(ErrorCode::Unavailable) } else { Fate::Pass }
    });
    let b = host_of(&front.url).await;
    let job = begin(&b, warm(&["team/agent:now"])).await;
    let note = || b.agent.jobs().get(&job.id).unwrap().note;
    until("it says what it waits for", || note().is_some_and(|note| note.contains("the next try is in"))).await;
    let ended = ended(&b.agent, &job.id).await;
    assert_eq!((ended.state, ended.note, left.load(Ordering::SeqCst)), (JobState::Done, None, 0));
    assert!(b.agent.store().snapshot(&"team/agent".parse().unwrap(), &digest).await.is_ok());
    // A plan does not wait.
    left.store(100, Ordering::SeqCst);
    let c = host_of(&front.url).await;
    let error = c.agent.begin(JobRequest::Warm(WarmRequest { plan_only: true, ..warm(&["team/agent:now"]) })).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_cannot_be_kept_for_a_while_is_kept_later_and_not_pulled_again() {
    let rig = Rig::start().await;
    rig.pushed(62, "team/agent:now").await;
    let front = Front::start(&rig.url, |_| Fate::Pass);
    let b = host_of(&front.url).await;
    // A file where the folder was: nothing can be written there.
    let kept = b.agent.config().kept_dir();
    std::fs::remove_dir(&kept).unwrap();
    std::fs::write(&kept, b"").unwrap();
    let job = begin(&b, warm(&["team/agent:now"])).await;
    let note = || b.agent.jobs().get(&job.id).unwrap().note;
    until("it says what it waits for", || note().is_some_and(|note| note.contains("the next try is in"))).await;
    let asked = || front.seen().iter().filter(|seen| asks_for_frames(seen)).count();
    let before = asked();
    std::fs::remove_file(&kept).unwrap();
    let ended = ended(&b.agent, &job.id).await;
    assert_eq!((ended.state, ended.note, asked()), (JobState::Done, None, before));
    assert_eq!(b.agent.store().pinned().await.unwrap().len(), 1);
}

/// A registry whose frames wait for a permit.
fn held(url: &str) -> (Front, Arc<Semaphore>) {
    let gate = Arc::new(Semaphore::new(0));
    let permits = Arc::clone(&gate);
    (Front::start(url, move |seen| if asks_for_frames(seen) { Fate::Hold(Arc::clone(&permits)) } else { Fate::Pass }), gate)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_ends_and_the_same_request_does_the_rest() {
    let rig = Rig::start().await;
    rig.pushed(30, "team/one:latest").await;
    let (front, gate) = held(&rig.url);
    let b = host_of(&front.url).await;
    let job = begin(&b, warm(&["team/one"])).await;
    until("it asks for frames", || front.seen().iter().any(asks_for_frames)).await;
    assert_eq!(b.agent.jobs().get(&job.id).unwrap().state, JobState::Running);
    let cancelled = tokio::time::timeout(Duration::from_secs(20), b.agent.jobs().cancel(&job.id)).await.expect("it ends").unwrap();
    assert!(cancelled.state == JobState::Cancelled && cancelled.finished_at.is_some(), "{cancelled:?}");
    assert_eq!(b.agent.jobs().cancel(&job.id).await.unwrap(), cancelled, "an end is an end");
    assert_eq!(b.agent.jobs().cancel("none").await.unwrap_err().code(), ErrorCode::NotFound);
    assert!(b.agent.store().resolve(&"team/one".parse().unwrap(), &"latest".parse().unwrap()).await.is_err());
    gate.add_permits(1000);
    assert_eq!(run(&b, warm(&["team/one"])).await.0.state, JobState::Done);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_caller_goes_away_at_once_ends_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let host = host_of(&registry(dir.path()).await).await;
    {
        let mut begins = Box::pin(host.agent.begin(JobRequest::Warm(warm(&["team/none"]))));
        // Ready at once if the job was listed meanwhile.
        drop(futures::poll!(&mut begins));
    }
    until("it is listed", || !host.agent.jobs().list().is_empty()).await;
    let id = host.agent.jobs().list()[0].id.clone();
    let ended = ended(&host.agent, &id).await;
    assert_eq!(ended.state, JobState::Failed, "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_adds_up_whatever_a_registry_says() {
    let rig = Rig::start().await;
    rig.pushed(30, "team/one:latest").await;
    rig.pushed(40, "team/two:latest").await;
    let most = format!("\"boundary\":{}", u64::MAX);
    let front = Front::start(&rig.url, move |seen| {
        let most = most.clone();
        match seen.method.as_str() {
            "GET" => Fate::change(move |body| String::from_utf8(body).unwrap().replace("\"boundary\":29", &most).into_bytes()),
            _ => Fate::Pass,
        }
    });
    let b = host_of(&front.url).await;
    let plan = begin(&b, WarmRequest { plan_only: true, ..warm(&["team/one", "team/two"]) }).await.warm.unwrap();
    assert_eq!(plan.items.iter().map(|item| item.boundary).collect::<Vec<_>>(), [Some(u64::MAX), Some(39)]);
    assert_eq!((states(&plan), plan.recompute_tokens), (vec![WarmState::Planned; 2], u64::MAX));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_so_many_jobs_are_under_way() {
    // It accepts connections and never answers.
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let host = host_of(&format!("http://{}", silent.local_addr().unwrap())).await;
    let mut begun = Vec::new();
    for _ in 0..16 {
        begun.push(begin(&host, warm(&["team/one"])).await);
    }
    let error = host.agent.begin(JobRequest::Warm(warm(&["team/one"]))).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Overloaded, "{error}");
    host.agent.jobs().cancel(&begun[3].id).await.unwrap();
    begin(&host, warm(&["team/one"])).await;
    host.agent.jobs().stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_restart_a_job_is_interrupted_and_the_same_request_does_only_the_rest() {
    let rig = Rig::start().await;
    rig.pushed(30, "team/one:latest").await;
    rig.pushed(60, "team/two:latest").await;
    // The frames of the second wait.
    let front = Front::start(&rig.url, |seen| {
        match asks_for_frames(seen) && seen.path.contains("two") && seen.asked().is_some_and(|asked| asked.len() > 4) {
            true => Fate::Hold(Arc::new(Semaphore::new(0))),
            false => Fate::Pass,
        }
    });
    let data = tempfile::tempdir().unwrap();
    let mut settings = config(data.path());
    eager(&mut settings);
    settings.registry = Some(front.url.clone());
    let agent = Agent::open(settings.clone()).await.unwrap();
    let job = agent.begin(JobRequest::Warm(warm(&["team/one", "team/two"]))).await.unwrap();
    let item = |agent: &Agent, number: usize| -> Option<WarmItem> { agent.jobs().get(&job.id).ok()?.warm?.items.get(number).cloned() };
    until("the first is here and the second waits", || {
        item(&agent, 0).is_some_and(|item| item.state == WarmState::Done)
            && item(&agent, 1).is_some_and(|item| item.state == WarmState::Running)
    })
    .await;
    // As a kill: the file says that the job is under way.
    agent.jobs().stop().await;
    drop(agent);

    settings.registry = Some(rig.url.clone());
    let agent = reopened(&settings).await;
    let found = agent.jobs().get(&job.id).unwrap();
    assert_eq!(found.state, JobState::Interrupted);
    assert_eq!(item(&agent, 0).unwrap().state, WarmState::Done, "what was done is listed");
    let again = agent.begin(JobRequest::Warm(warm(&["team/one", "team/two"]))).await.unwrap();
    let ended = ended(&agent, &again.id).await;
    let items = ended.warm.unwrap().items;
    assert_eq!(ended.state, JobState::Done);
    assert!(items[0].bytes == 0 && items[0].bytes_received == 0 && items[1].bytes_received > 0, "{items:?}");
    assert_eq!(agent.store().pinned().await.unwrap().len(), 2, "both are kept");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_that_this_host_has_saved_anew_is_not_moved_back() {
    let rig = Rig::start().await;
    rig.pushed(30, "team/one:latest").await;
    // Pushes are refused for a while, pulls are not.
    let front =
        Front::start(&rig.url, |seen| if seen.path.ends_with("/pushes") { Fate::Refuse(ErrorCode::Unavailable) } else { Fate::Pass });
    let b = host_of(&front.url).await;
    let engine = Synthetic::start(&b.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(40));
    let request = SnapshotRequest { reference: "team/one:latest".into(), push: Push::Background, ..SnapshotRequest::default() };
    let newer = b.agent.snapshot("e", request).await.unwrap().digest;
    let (job, warm_of) = run(&b, warm(&["team/one"])).await;
    assert_eq!((job.state, states(&warm_of)), (JobState::Done, vec![WarmState::Skipped]), "{warm_of:?}");
    let tag = b.agent.store().tag(&"team/one".parse().unwrap(), &"latest".parse().unwrap()).await.unwrap();
    assert_eq!(tag.digest, newer);
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_before_anything_is_asked_for() {
    let host = host_of("http://127.0.0.1:9").await;
    let many: Vec<&str> = vec!["a"; 65];
    for (request, word) in [
        (warm(&[]), "1 to 64 references"),
        (warm(&many), "1 to 64 references"),
        (warm(&["A B"]), "reference"),
        (WarmRequest { newest: Some(0), ..warm(&["a"]) }, "newest"),
        (WarmRequest { newest: Some(2), ..warm(&["a:b"]) }, "without a tag"),
        (WarmRequest { keep_seconds: Some(u64::MAX), ..warm(&["a"]) }, "seconds at most"),
        (WarmRequest { rate: Some(1), ..warm(&["a"]) }, "bytes a second"),
        (WarmRequest { prefill_tokens_per_second: Some(0.0), ..warm(&["a"]) }, "above 0"),
        (WarmRequest { engine: Some("none".into()), ..warm(&["a"]) }, "no engine"),
    ] {
        let error = host.agent.begin(JobRequest::Warm(request.clone())).await.unwrap_err();
        assert!(
            error.to_string().contains(word) || (word == "reference" && error.code() == ErrorCode::InvalidName),
            "{request:?}: {error}"
        );
    }
    assert!(host.agent.jobs().list().is_empty());
}
