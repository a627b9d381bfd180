//! The control interface over a real Unix socket.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::{Host, host};
use pfr_agent::control::Control;
use pfr_agent::engines::Answers as _;
use pfr_schema::ErrorCode;
use pfr_schema::agent::{
    Drain, EngineInfo, EngineState, Engines, Job, JobState, Jobs, Push, Pushes, RestoreOutcome, RestoreReport, Restores, SaveInfo,
    SaveState, Sequences, SnapshotReport,
};
use pfr_schema::api::Problem;
use pfr_schema::engine::{Save, ToAgent, Verb};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

struct Client {
    http: reqwest::Client,
}

impl Client {
    async fn of(host: &Host) -> Self {
        let control = Control::bind(host.agent.clone()).unwrap();
        tokio::spawn(control.run(std::future::pending()));
        let socket = host.agent.config().socket.clone();
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        let _ = rustls::crypto::ring::default_provider().install_default();
        Self { http: reqwest::Client::builder().unix_socket(socket).build().unwrap() }
    }

    async fn get(&self, path: &str) -> reqwest::Response {
        self.http.get(format!("http://agent{path}")).send().await.unwrap()
    }

    async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.http.post(format!("http://agent{path}")).body(body.to_string()).send().await.unwrap()
    }
}

async fn problem(response: reqwest::Response) -> Problem {
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let (status, id) = (response.status().as_u16(), response.headers()["x-request-id"].to_str().unwrap().to_owned());
    let problem: Problem = response.json().await.unwrap();
    assert_eq!((problem.status, problem.request_id.as_ref()), (status, Some(&id)));
    problem
}

#[tokio::test(flavor = "multi_thread")]
async fn the_program_asks_the_agent_behind_a_socket_whether_it_works() {
    let host = host().await;
    let client = Client::of(&host).await;
    assert_eq!(client.get("/readyz").await.status(), 200);
    let health = |socket: &Path| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf-agent"));
        command.env_clear().args(["health", "--data", "/nonexistent", "--socket"]).arg(socket).output().unwrap()
    };
    let socket = host.agent.config().socket.clone();
    let found = health(&socket);
    assert_eq!((found.status.code(), found.stdout.as_slice()), (Some(0), b"ready\n".as_slice()), "{found:?}");
    let found = health(&socket.with_file_name("none.sock"));
    let error = String::from_utf8(found.stderr).unwrap();
    assert!(found.status.code() == Some(7) && error.contains("no capture agent answers at"), "{error}");
    assert!(error.contains("hint: `pf-agent serve` starts one; --socket,") && !error.contains("--agent"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_json_the_program_writes_documents_and_its_errors_are_one_object_each() {
    let host = host().await;
    let _client = Client::of(&host).await;
    let run = |arguments: &[&str]| -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf-agent"));
        command.env_clear().args(arguments).arg("--json").output().unwrap()
    };
    let data = host.agent.config().data.display().to_string();
    let socket = host.agent.config().socket.display().to_string();
    let found = run(&["health", "--data", &data, "--socket", &socket]);
    let document: Value = serde_json::from_slice(&found.stdout).unwrap();
    assert_eq!(document, json!({"status": "ready"}), "{found:?}");
    for (arguments, code, exit, has_hint) in [
        (&["health", "--data", "/nonexistent"][..], "unavailable", 7, true),
        (&["health", "--nonsense"], "invalid_request", 1, true),
        (&["serve", "--data", "/dev/null/x"], "unavailable", 7, false),
        (&["serve", "--data", "/dev/null/x", "--report-interval", "never"], "invalid_request", 1, false),
    ] {
        let found = run(arguments);
        let text = String::from_utf8(found.stderr).unwrap();
        let error: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {text}"));
        assert_eq!((found.status.code(), &error["code"], &error["exit_code"]), (Some(exit), &json!(code), &json!(exit)), "{error}");
        assert!(!error["message"].as_str().unwrap().is_empty() && error["hint"].is_string() == has_hint, "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_captured_and_restored_by_request() {
    let host = host().await;
    let client = Client::of(&host).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    let tokens: Vec<u32> = (0..30).collect();
    engine.add("s", &tokens);

    let engines: Engines = client.get("/v1/engines").await.json().await.unwrap();
    assert_eq!(engines.engines.len(), 1);
    let info: EngineInfo = client.get("/v1/engines/e").await.json().await.unwrap();
    assert_eq!((info.engine.as_str(), info.state), ("e", EngineState::Ready {}));

    let listed: Sequences = client.get("/v1/engines/e/sequences").await.json().await.unwrap();
    assert_eq!((listed.sequences.len(), listed.sequences[0].boundary, listed.saves.len()), (1, 29, 0));
    assert!(!engine.is_paused());

    let body = json!({"reference": "team/agent:now", "push": "never"});
    let report: SnapshotReport = client.post("/v1/engines/e/snapshots", &body).await.json().await.unwrap();
    assert_eq!(report.boundary, 29);
    let body = json!({"reference": "team/agent:now", "local": true});
    let restored: RestoreReport = client.post("/v1/engines/e/restores", &body).await.json().await.unwrap();
    assert_eq!((restored.digest, restored.oracle), (report.digest, true));
    let sequence = restored.sequence.clone();
    assert_eq!(engine.content("s"), engine.content(sequence.as_deref().unwrap()));

    // What became of restores is listed, the newest first.
    let body = json!({"reference": "team/agent:never", "local": true});
    assert_eq!(client.post("/v1/engines/e/restores", &body).await.status(), 404);
    let listed: Restores = client.get("/v1/engines/e/restores").await.json().await.unwrap();
    let [failed, done] = &listed.restores[..] else { panic!("two restores in {listed:?}") };
    assert_eq!((failed.outcome, failed.code), (RestoreOutcome::Failed, Some(ErrorCode::TagUnknown)));
    assert_eq!((failed.reference.as_deref(), failed.digest), (Some("team/agent:never"), None));
    assert_eq!((done.outcome, done.digest, done.position), (RestoreOutcome::Restored, Some(report.digest), Some(29)));
    assert_eq!((&done.sequence, done.pages_filled, done.bytes_written), (&sequence, restored.pages, restored.bytes_written));
    let one: Restores = client.get("/v1/engines/e/restores?limit=1").await.json().await.unwrap();
    assert_eq!(one.restores, listed.restores[..1]);

    let body = json!({"repository": "http://127.0.0.1:9/away", "plan_only": true});
    let drain: Drain = client.post("/v1/drain", &body).await.json().await.unwrap();
    assert_eq!((drain.plan.len(), drain.recompute_tokens, drain.bytes), (2, 58, 2 * report.bytes_resident));
    assert!(drain.eta_seconds.unwrap() > 0.0 && drain.done.is_empty());
    let body = json!({"kind": "drain", "repository": "http://127.0.0.1:9/away", "plan": true, "prefill_tokens_per_second": 29});
    let planned: Job = client.post("/v1/jobs", &body).await.json().await.unwrap();
    let plan = planned.drain.unwrap();
    assert_eq!((planned.state, plan.plan, plan.recompute_seconds), (JobState::Planned, drain.plan, Some(2.0)));
    let pushes: Pushes = client.get("/v1/pushes").await.json().await.unwrap();
    assert_eq!(pushes.pushes, []);

    // A drain is a job, whichever way it is asked for.
    let body = json!({"repository": "http://127.0.0.1:9/away", "wait_seconds": 0});
    let drain: Drain = client.post("/v1/drain", &body).await.json().await.unwrap();
    assert_eq!((drain.failed.len(), drain.failed[0].problem.code), (2, ErrorCode::Timeout));
    let listed: Jobs = client.get("/v1/jobs").await.json().await.unwrap();
    let [job] = &listed.jobs[..] else { panic!("one job in {listed:?}") };
    assert_eq!((job.state, job.drain.as_ref(), job.bytes_done), (JobState::Failed, Some(&drain), drain.bytes));
    let path = format!("/v1/jobs/{}", job.id);
    let one: Job = client.get(&path).await.json().await.unwrap();
    let ended: Job = client.http.delete(format!("http://agent{path}")).send().await.unwrap().json().await.unwrap();
    assert_eq!((&one, &ended), (job, job));

    for path in ["/livez", "/readyz"] {
        assert_eq!(client.get(path).await.status(), 200);
    }
    let metrics = client.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("pf_agent_jobs_total{kind=\"drain\",outcome=\"failed\"}"), "{metrics}");
    assert!(metrics.contains("pf_agent_restores_total{outcome=\"ok\"}"), "{metrics}");
    assert!(metrics.contains("pf_agent_requests_total{route=\"/v1/engines/{engine}/snapshots\",status=\"200\"}"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_outcome_of_a_save_is_asked_for_by_its_ticket() {
    let host = host().await;
    let client = Client::of(&host).await;
    let mut spec = Spec::hybrid("e");
    spec.verbs = vec![Verb::Hold];
    let engine = Synthetic::start(&host.agent, spec);
    engine.add("s", &(0..30).collect::<Vec<u32>>());
    let (ticket, reference) = ("t-1".to_owned(), "team/agent:step-1".to_owned());
    let save = Save { ticket, sequence: "s".into(), reference, parent: None, push: Push::Never, automatic: None };
    let handle = host.agent.engines().get("e").unwrap();
    host.agent.answer(&handle, 0, ToAgent::Save(save)).await.unwrap();
    let ended = async {
        loop {
            let save: SaveInfo = client.get("/v1/saves/t-1").await.json().await.unwrap();
            if save.state != SaveState::Pending {
                return save;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let saved = tokio::time::timeout(std::time::Duration::from_secs(20), ended).await.unwrap();
    assert_eq!((saved.state, saved.boundary, saved.reference.as_str()), (SaveState::Saved, Some(29), "team/agent:step-1"));
    let repository = "team/agent".parse().unwrap();
    assert!(host.agent.store().snapshot(&repository, &saved.digest.unwrap()).await.is_ok());
    let listed: Sequences = client.get("/v1/engines/e/sequences").await.json().await.unwrap();
    assert_eq!(listed.saves, [saved]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_a_problem() {
    let host = host().await;
    let client = Client::of(&host).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &[1, 2, 3]);
    for (path, body, code) in [
        ("/v1/engines/e/snapshots", json!({"reference": "a:b", "exakt": true}), ErrorCode::InvalidRequest),
        ("/v1/engines/e/snapshots", json!({"reference": "A B", "push": "never"}), ErrorCode::InvalidName),
        ("/v1/engines/e/snapshots", json!({"reference": "a:b", "push": "never", "sequence": "t"}), ErrorCode::SequenceUnknown),
        ("/v1/engines/f/snapshots", json!({"reference": "a:b", "push": "never"}), ErrorCode::EngineUnknown),
        ("/v1/engines/e/restores", json!({"reference": "a:b", "local": true, "force": true}), ErrorCode::InvalidRequest),
        ("/v1/engines/e/restores", json!({"reference": "a:b", "local": true}), ErrorCode::RepositoryUnknown),
        ("/v1/engines/e/restores", json!({"reference": "http://127.0.0.1:9/a:b"}), ErrorCode::Unavailable),
        ("/v1/engines/f/restores", json!({"reference": "a:b", "local": true}), ErrorCode::EngineUnknown),
        ("/v1/engines/f/checks", json!({}), ErrorCode::EngineUnknown),
        ("/v1/engines/e/checks", json!({}), ErrorCode::FingerprintMismatch),
        ("/v1/engines/e/checks", json!({"force": true}), ErrorCode::InvalidRequest),
        ("/v1/jobs", json!({"references": ["a"]}), ErrorCode::InvalidRequest),
        ("/v1/jobs", json!({"kind": "warm", "references": ["a"]}), ErrorCode::InvalidRequest),
        ("/v1/jobs", json!({"kind": "drain", "repository": "a:b"}), ErrorCode::InvalidRequest),
        ("/v1/drain", json!({"repository": "a:b"}), ErrorCode::InvalidRequest),
        ("/v1/drain", json!([]), ErrorCode::InvalidRequest),
        ("/v1/engines", json!({}), ErrorCode::InvalidRequest),
        ("/v2/engines", json!({}), ErrorCode::NotFound),
        ("/v1/drain", json!({"repository": "x".repeat(2 << 20)}), ErrorCode::TooLarge),
    ] {
        let response = client.post(path, &body).await;
        let status = response.status().as_u16();
        let problem = problem(response).await;
        assert_eq!(problem.code, code, "{path}: {}", problem.detail);
        assert_eq!(status, if path == "/v1/engines" { 405 } else { code.status() });
    }
    for (path, code) in [
        ("/v1/engines/f", ErrorCode::EngineUnknown),
        ("/v1/engines/f/sequences", ErrorCode::EngineUnknown),
        ("/v1/engines/f/restores", ErrorCode::EngineUnknown),
        ("/v1/engines/e/restores?limit=all", ErrorCode::InvalidRequest),
        ("/v1/restores?limit=all", ErrorCode::InvalidRequest),
        ("/v1/engines/e/restores?since=1", ErrorCode::InvalidRequest),
        ("/v1/saves/never", ErrorCode::NotFound),
        ("/v1/jobs/never", ErrorCode::NotFound),
    ] {
        assert_eq!(problem(client.get(path).await).await.code, code, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restores_of_all_engines_are_listed_and_those_of_one_that_has_left_are_marked() {
    let host = host().await;
    let client = Client::of(&host).await;
    let [mut gone, _there] = ["e", "f"].map(|name| Synthetic::start(&host.agent, Spec::hybrid(name)));
    for engine in ["e", "f", "e"] {
        let body = json!({"reference": "team/agent:never", "local": true});
        assert_eq!(client.post(&format!("/v1/engines/{engine}/restores"), &body).await.status(), 404);
    }
    let listed = async |path: &str| {
        let listed: Restores = client.get(path).await.json().await.unwrap();
        let mut engines: Vec<(String, bool)> = listed.restores.into_iter().map(|record| (record.engine, record.gone)).collect();
        engines.sort();
        engines
    };
    let of = |engine: &str, gone: bool| (engine.to_owned(), gone);
    assert_eq!(listed("/v1/restores").await, [of("e", false), of("e", false), of("f", false)]);
    gone.leave();
    assert_eq!(listed("/v1/restores").await, [of("e", true), of("e", true), of("f", false)]);
    assert_eq!(listed("/v1/engines/e/restores?limit=1").await, [of("e", true)]);
    assert_eq!(listed("/v1/restores?limit=2").await.len(), 2);
    // One of the same name has come since.
    let _again = Synthetic::start(&host.agent, Spec::hybrid("e"));
    assert_eq!(listed("/v1/engines/e/restores?limit=1").await, [of("e", false)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_agents_do_not_share_a_folder_or_a_socket() {
    let host = host().await;
    let config = host.agent.config().clone();
    let error = pfr_agent::Agent::open(config).await.unwrap_err();
    assert!(error.to_string().contains("another agent"), "{error}");
    let _client = Client::of(&host).await;
    let error = Control::bind(host.agent.clone()).unwrap_err();
    assert!(error.to_string().contains("another agent listens"), "{error}");
}
