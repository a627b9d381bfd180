//! What the agent's tests share: a synthetic engine with any layout, and an agent in a folder of
//! its own.

#![allow(dead_code, clippy::unwrap_used)]

pub mod client;
pub mod engine;
pub mod layout;
pub mod llama;
pub mod memory;

use pfr_agent::{Agent, Config};
use pfr_schema::Digest;
use pfr_schema::agent::{Push, RestoreReport, RestoreRequest, SnapshotRequest};
use std::time::Duration;

/// An agent in a folder of its own.
pub struct Host {
    pub agent: Agent,
    pub dir: tempfile::TempDir,
}

/// An agent with a ring of 8 MiB and timeouts of 10 s.
pub async fn host() -> Host {
    host_with(|_| {}).await
}

pub async fn host_with(change: impl FnOnce(&mut Config)) -> Host {
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(dir.path());
    change(&mut config);
    let agent = Agent::open(config).await.unwrap();
    Host { agent, dir }
}

pub fn config(dir: &std::path::Path) -> Config {
    Config { ring_bytes: 8 << 20, engine_timeout: Duration::from_secs(10), ..Config::new(dir) }
}

/// An agent that retries soon, with a registry for references without one.
pub async fn host_of(registry: &str) -> Host {
    host_with(|config| {
        eager(config);
        config.registry = Some(registry.to_owned());
    })
    .await
}

pub fn eager(config: &mut Config) {
    config.push_retry = Duration::from_millis(20);
    config.push_retry_max = Duration::from_millis(100);
}

/// Opens an agent again in the folder of one that was dropped: the lock ends with its last task.
pub async fn reopened(settings: &Config) -> Agent {
    let opening = async {
        loop {
            match Agent::open(settings.clone()).await {
                Ok(agent) => return agent,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), opening).await.expect("the agent opens")
}

/// A registry in this process, over a folder; its URL.
pub async fn registry(dir: &std::path::Path) -> String {
    let listen = ([127, 0, 0, 1], 0).into();
    let config = pfr_registry::Config { data: dir.to_owned(), listen, ..pfr_registry::Config::default() };
    let server = pfr_registry::Server::bind(config).await.unwrap();
    let url = format!("http://{}", server.local_addr());
    tokio::spawn(server.run(std::future::pending()));
    url
}

/// Tokens of a sequence; a longer one begins with a shorter one.
pub fn tokens(count: u32) -> Vec<u32> {
    (0..count).map(|i| i * 7 + 3).collect()
}

/// Captures the sequence of an engine as `team/agent:{tag}`, on this host only.
pub async fn capture(host: &Host, engine: &str, tag: &str) -> Digest {
    let reference = format!("team/agent:{tag}");
    let request = SnapshotRequest { reference, push: Push::Never, ..SnapshotRequest::default() };
    host.agent.snapshot(engine, request).await.unwrap().digest
}

/// Restores `team/agent:{tag}` from this host.
pub async fn restore(host: &Host, engine: &str, tag: &str) -> pfr_agent::Result<RestoreReport> {
    let request = RestoreRequest { reference: format!("team/agent:{tag}"), local: true, ..RestoreRequest::default() };
    host.agent.restore(engine, request).await
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), waited).await.unwrap_or_else(|_| panic!("waited in vain until {what}"));
}
