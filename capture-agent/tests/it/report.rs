//! Reports to a registry: they say what there is, and a registry that takes none holds up nothing.

use crate::common::engine::Synthetic;
use crate::common::layout::Spec;
use crate::common::{Host, capture, eager, host_with, registry, tokens};
use axum::body::Bytes;
use axum::http::StatusCode;
use pfr_agent::report;
use pfr_client::{Remote, RemoteOptions};
use pfr_schema::agent::{DrainRequest, JobRequest, JobState};
use pfr_schema::api::{AgentEngineState, AgentInfo, AgentJobKind};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

async fn host(registry: Option<String>, seconds: u64) -> Host {
    host_with(|config| {
        eager(config);
        config.registry = registry;
        config.report_interval = Duration::from_secs(seconds);
        config.report_name = Some("gpu-1".parse().unwrap());
    })
    .await
}

/// Waits until a registry has a report for which something holds.
async fn reported(remote: &Remote, what: &str, holds: impl Fn(&AgentInfo) -> bool) -> AgentInfo {
    let waited = async {
        loop {
            let agents = remote.agents(None, 10).await.unwrap().agents;
            match agents.into_iter().find(|agent| holds(agent)) {
                Some(agent) => return agent,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waited).await.unwrap_or_else(|_| panic!("waited in vain until {what}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registry_learns_of_engines_and_of_drains() {
    let dir = tempfile::tempdir().unwrap();
    let url = registry(dir.path()).await;
    let host = host(Some(url.clone()), 1).await;
    let reports = tokio::spawn(report::run(host.agent.clone()));
    let remote = Remote::new(&url, RemoteOptions::default()).unwrap();
    let empty = reported(&remote, "it is known", |_| true).await;
    assert_eq!((empty.name.as_str(), empty.silent, empty.report.interval_seconds), ("gpu-1", false, 1));

    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(30));
    let known = reported(&remote, "its engine is known", |agent| !agent.report.engines.is_empty()).await;
    let fingerprint = host.agent.engines().list()[0].fingerprint;
    let [found] = &known.report.engines[..] else { panic!("one engine in {known:?}") };
    assert_eq!((found.engine.as_str(), found.fingerprint, found.state), ("e", fingerprint, AgentEngineState::Ready));

    let repository = format!("{url}/away");
    let request = DrainRequest { repository: repository.clone(), ..DrainRequest::default() };
    let begun = host.agent.begin(JobRequest::Drain(request)).await.unwrap();
    let ended = host.agent.jobs().wait(&begun.id).await.unwrap();
    assert_eq!(ended.state, JobState::Done, "{ended:?}");
    let drained = reported(&remote, "its drain has ended", |agent| agent.report.jobs.iter().any(|job| job.finished_at.is_some())).await;
    let [job] = &drained.report.jobs[..] else { panic!("one job in {drained:?}") };
    assert_eq!((job.id.as_str(), job.kind, job.about.as_ref()), (begun.id.as_str(), AgentJobKind::Drain, Some(&repository)));
    assert_eq!((job.state, job.bytes_done, job.finished_at), (JobState::Done, ended.bytes_done, ended.finished_at));
    reports.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_hangs_holds_up_nothing() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let host = host(Some(format!("http://{}", listener.local_addr().unwrap())), 1).await;
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    engine.add("s", &tokens(30));
    let reports = tokio::spawn(report::run(host.agent.clone()));
    // The report is under way, and gets no answer.
    let _silent = listener.accept().await.unwrap();
    capture(&host, "e", "t").await;
    assert!(!reports.is_finished());
    reports.abort();
}

/// The wait for the next report begins with the answer to the one before. So if no part of the
/// interval were left out, no report could come within an interval after an answer, on any machine.
#[tokio::test(flavor = "multi_thread")]
async fn reports_leave_out_a_part_of_the_interval() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let host = host(Some(format!("http://{}", listener.local_addr().unwrap())), 1).await;
    let (tell, mut answered) = mpsc::unbounded_channel();
    let answer = move |_report: Bytes| {
        let _ = tell.send(Instant::now());
        async { StatusCode::NO_CONTENT }
    };
    tokio::spawn(axum::serve(listener, axum::Router::new().fallback(answer)).into_future());
    let reports = tokio::spawn(report::run(host.agent.clone()));
    let waited = async {
        let mut before = answered.recv().await.unwrap();
        loop {
            let next = answered.recv().await.unwrap();
            if next.duration_since(before) < host.agent.config().report_interval {
                return;
            }
            before = next;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.expect("a report that comes before the end of an interval");
    reports.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_report_says_that_the_agent_has_stopped_until_it_is_started_again() {
    let dir = tempfile::tempdir().unwrap();
    let url = registry(dir.path()).await;
    let host = host(Some(url.clone()), 1).await;
    let remote = Remote::new(&url, RemoteOptions::default()).unwrap();
    let engine = Synthetic::start(&host.agent, Spec::hybrid("e"));
    let last = report::last(&host.agent);
    drop(engine);
    report::stopped(&host.agent, last).await;
    let stopped = remote.agents(None, 10).await.unwrap().agents;
    assert_eq!(stopped.iter().map(|agent| (agent.name.as_str(), agent.report.stopped)).collect::<Vec<_>>(), [("gpu-1", true)]);
    let engines: Vec<&str> = stopped[0].report.engines.iter().map(|engine| engine.engine.as_str()).collect();
    assert_eq!(engines, ["e"], "those that the host had");
    let reports = tokio::spawn(report::run(host.agent.clone()));
    reported(&remote, "it runs again", |agent| !agent.report.stopped).await;
    reports.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_hangs_or_is_gone_does_not_hold_up_the_end() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let host = host(Some(url), 1).await;
    // A report on its way may take ten seconds.
    let limit = Duration::from_secs(8);
    tokio::time::timeout(limit, report::stopped(&host.agent, report::last(&host.agent))).await.expect("it gives up on one that hangs");
    drop(listener);
    tokio::time::timeout(limit, report::stopped(&host.agent, report::last(&host.agent))).await.expect("it gives up on one that is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_reported_without_a_registry_or_an_interval() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    for (registry, seconds) in [(None, 1), (Some(url), 0)] {
        let host = host(registry, seconds).await;
        tokio::time::timeout(Duration::from_secs(20), report::run(host.agent.clone())).await.expect("it ends at once");
        report::stopped(&host.agent, report::last(&host.agent)).await;
    }
}
