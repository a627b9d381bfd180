//! A real registry in this process, snapshot directories to push, and a front that gets in the way.

#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
pub mod agent;
pub mod sample;

use pfr_client::{Destination, Error, Progress, PullReport, PushReport, PushTarget, Remote, RemoteOptions, Source, pull, push};
use pfr_registry::{Config, Server};
use pfr_schema::codec::Compression;
use pfr_schema::{Digest, RepositoryName, Selector, Tag};
use pfr_store::{Options, Store};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A registry that serves until the test ends.
pub struct Registry {
    pub url: String,
    pub store: Store,
    dir: TempDir,
}

impl Registry {
    pub async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub async fn start_with(change: impl FnOnce(&mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config { data: dir.path().join("store"), listen: ([127, 0, 0, 1], 0).into(), ..Config::default() };
        change(&mut config);
        Self::run(Server::bind(config).await.unwrap(), dir)
    }

    /// Over a store in `dir` that is open already.
    pub async fn over(store: Store, dir: TempDir, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config { listen: ([127, 0, 0, 1], 0).into(), ..Config::default() };
        change(&mut config);
        Self::run(Server::bind_over(store, config).await.unwrap(), dir)
    }

    fn run(server: Server, dir: TempDir) -> Self {
        let (url, store) = (server.url(), server.store().clone());
        tokio::spawn(server.run(std::future::pending()));
        Self { url, store, dir }
    }

    /// Files that packs are in.
    pub fn packs(&self) -> Vec<PathBuf> {
        packs(self.dir.path())
    }

    pub fn remote(&self) -> Remote {
        remote(&self.url)
    }
}

/// A client that does not wait long.
pub fn remote(url: &str) -> Remote {
    Remote::new(
        url,
        RemoteOptions { retries: 2, retry_for: Duration::ZERO, idle_timeout: Duration::from_secs(20), ..RemoteOptions::default() },
    )
    .unwrap()
}

pub fn repository() -> RepositoryName {
    "team/agent".parse().unwrap()
}

pub fn tag(name: &str) -> Tag {
    name.parse().unwrap()
}

pub fn selector(text: &str) -> Selector {
    text.parse().unwrap()
}

pub fn target(name: &str) -> PushTarget {
    let compression = Compression::default();
    PushTarget { repository: repository(), tag: Some(tag(name)), if_tag_is: None, parents: Vec::new(), compression }
}

pub async fn push_dir(remote: &Remote, path: &Path, name: &str) -> Result<PushReport, Error> {
    push(&Source::Directory(path.into()), remote, target(name), &Progress::default()).await
}

pub async fn pull_dir(remote: &Remote, what: &str, path: &Path) -> Result<PullReport, Error> {
    let destination = Destination::Directory { path: path.into(), store: None };
    pull(remote, &repository(), &selector(what), &destination, &Progress::default()).await
}

pub async fn pull_store(remote: &Remote, what: &str, store: &Store) -> Result<PullReport, Error> {
    let destination = Destination::Store { store: store.clone(), repository: repository(), tag: Some(tag("here")) };
    pull(remote, &repository(), &selector(what), &destination, &Progress::default()).await
}

pub async fn memory() -> Store {
    Store::open_in_memory(Options::default()).await.unwrap()
}

/// Files below `dir` that packs are in, and what unfinished uploads left of some.
pub fn packs(dir: &Path) -> Vec<PathBuf> {
    paths(dir).into_iter().filter(|path| path.to_string_lossy().contains(".pfpack")).collect()
}

/// `pf` with a home and store in `dir`; exit code, stdout, stderr.
pub fn pf(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pf"));
    command.env_clear().env("HOME", dir).env("PF_STORE", dir.join("store")).args(args).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The commands that `pf --help` lists.
pub fn commands(dir: &Path) -> BTreeSet<String> {
    let (_, help, _) = pf(dir, &["--help"]);
    let listed = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    // A line without a command goes on with the words of the line before.
    let command = |line: &str| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')).map(str::to_owned);
    listed.lines().filter_map(command).map(|line| line.split(' ').next().unwrap().to_owned()).collect()
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap_or_else(|_| panic!("waited in vain until {what}"));
}

/// Whether a repository has nothing to show.
pub async fn is_empty(store: &Store) -> bool {
    match store.snapshots(&repository(), None, 10).await {
        Ok(page) => page.rows.is_empty(),
        Err(error) => error.code() == pfr_schema::ErrorCode::RepositoryUnknown,
    }
}

/// Every file below a directory. They are not opened: a process that closes a file loses its locks
/// on it, and with them a database that is in use.
fn paths(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut stack) = (Vec::new(), vec![root.to_owned()]);
    while let Some(path) = stack.pop() {
        for entry in std::fs::read_dir(&path).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { stack.push(path) } else { found.push(path) }
        }
    }
    found
}

/// Every file below a directory, by relative path.
pub fn files(root: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    let named = |path: PathBuf| (path.strip_prefix(root).unwrap().display().to_string(), std::fs::read(&path).unwrap());
    paths(root).into_iter().map(named).collect()
}

/// The names in [`files`], for messages.
pub fn same_files(a: &Path, b: &Path) {
    let (a, b) = (files(a), files(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(bytes == &b[name], "{name} differs");
    }
}

pub fn digest_of(bytes: &[u8]) -> Digest {
    Digest::sha256(bytes)
}
