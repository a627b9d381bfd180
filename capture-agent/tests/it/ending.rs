//! An agent that ends. In the middle of a fill the engine takes its blocks back when it sees the
//! end of the connection, so nothing may be written after that. What a capture had stored is
//! garbage. A real process, real shared memory.

use crate::common::client::{Client, memfd_of};
use crate::common::layout::{Group, Spec};
use crate::common::registry;
use pfr_client::{Remote, RemoteOptions};
use pfr_schema::engine::{Sequence, Verb};
use pfr_store::{Options, Store};
use pfr_testkit::frames;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Columns of the state, and bytes of a block: together one batch of the agent's.
const COLUMNS: u32 = 64;
const BLOCK: u64 = 1 << 20;
const BLOCK_TOKENS: u32 = 16;
/// Enough on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// One block after another, none of them alike. Block 0 stands for none.
fn memory() -> Vec<u8> {
    let mut bytes = vec![0; (u64::from(2 * COLUMNS + 1) * BLOCK) as usize];
    for (block, bytes) in bytes.chunks_exact_mut(BLOCK as usize).enumerate().skip(1).take(COLUMNS as usize) {
        bytes.as_chunks_mut::<8>().0.iter_mut().enumerate().for_each(|(at, word)| *word = ((block << 32) + at + 1).to_le_bytes());
    }
    bytes
}

/// The engine's end: its memory, and what it did when the connection ended.
struct Engine {
    memory: Arc<File>,
    writing: Arc<Mutex<UnixStream>>,
    answers: Receiver<Value>,
    /// Calls that it leaves without an answer.
    unanswered: Receiver<Value>,
    /// Returns what the last words of the blocks were when it saw the end.
    reader: JoinHandle<Vec<u64>>,
}

/// The last words of the blocks that a fill writes: they are not 0 once the block is written.
fn marks(memory: &File) -> Vec<u64> {
    let mark = |block: u32| {
        let mut word = [0; 8];
        memory.read_exact_at(&mut word, u64::from(block + 1) * BLOCK - 8).unwrap();
        u64::from_le_bytes(word)
    };
    targets().into_iter().map(mark).collect()
}

fn targets() -> Vec<u32> {
    (COLUMNS + 1..=2 * COLUMNS).collect()
}

/// The agent may be gone.
fn send(stream: &Mutex<UnixStream>, message: &Value) {
    let json = serde_json::to_vec(message).unwrap();
    let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
    bytes.extend(json);
    drop(stream.lock().unwrap().write_all(&bytes));
}

fn receive(stream: &mut UnixStream) -> Option<Value> {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).ok()?;
    let mut json = vec![0; u32::from_le_bytes(prefix) as usize];
    stream.read_exact(&mut json).ok()?;
    Some(serde_json::from_slice(&json).unwrap())
}

fn sequence() -> Sequence {
    let boundary = u64::from(COLUMNS * BLOCK_TOKENS);
    let blocks = BTreeMap::from([("main".to_owned(), (1..=COLUMNS).collect())]);
    Sequence { id: "s".into(), tokens: (0..=COLUMNS * BLOCK_TOKENS).collect(), boundary, blocks, ..Sequence::default() }
}

impl Engine {
    async fn register(socket: &Path, memory: &Arc<File>) -> Self {
        Self::register_with(socket, memory, &[Verb::Pause, Verb::Table, Verb::Request], None).await
    }

    /// An engine that serves these verbs, and leaves one call without an answer.
    async fn register_with(socket: &Path, memory: &Arc<File>, verbs: &[Verb], silent_at: Option<&'static str>) -> Self {
        let group =
            Group { block_tokens: BLOCK_TOKENS, blocks: 2 * COLUMNS + 1, layers: 1, token_bytes: BLOCK / 16, ..Group::opaque("main") };
        let mut spec = Spec::with("e", vec![group]);
        spec.verbs = verbs.to_vec();
        let mut client = Client::connect(socket).await;
        let fd: OwnedFd = memory.try_clone().unwrap().into();
        let answer = client.register(&json!(spec.register(0)), &[&fd]).await.unwrap();
        assert!(answer["ok"].is_object(), "{answer}");
        let stream = client.stream.into_std().unwrap();
        stream.set_nonblocking(false).unwrap();
        let ((tell, answers), (leave, unanswered)) = (channel(), channel());
        let (mut reading, writing) = (stream.try_clone().unwrap(), Arc::new(Mutex::new(stream)));
        let (answering, seen) = (Arc::clone(&writing), Arc::clone(memory));
        let reader = std::thread::spawn(move || {
            while let Some(message) = receive(&mut reading) {
                let ok = match message["call"].as_str() {
                    None => {
                        drop(tell.send(message));
                        continue;
                    }
                    call if call == silent_at => {
                        drop(leave.send(message));
                        continue;
                    }
                    Some("table") => json!({"sequences": [sequence()]}),
                    Some("resume" | "release") => json!({"held": true}),
                    Some(_) => json!({}),
                };
                send(&answering, &json!({"id": message["id"], "ok": ok}));
            }
            marks(&seen)
        });
        Self { memory: Arc::clone(memory), writing, answers, unanswered, reader }
    }

    fn ask(&self, id: u64, call: &str, args: &Value) {
        send(&self.writing, &json!({"id": id, "call": call, "args": args}));
    }

    /// Begins a fill of blocks that hold zeros.
    fn begin_fill(&self) {
        for block in targets() {
            self.memory.write_all_at(&[0; 8], u64::from(block + 1) * BLOCK - 8).unwrap();
        }
        self.ask(1, "match", &json!({"tokens": sequence().tokens, "computed": 0, "salt": ""}));
        let answer = self.answers.recv_timeout(TIMEOUT).unwrap();
        assert_eq!(answer["ok"]["match"], "ready", "{answer}");
        let blocks = json!({"main": targets()});
        self.ask(2, "fill", &json!({"restore": answer["ok"]["restore"], "blocks": blocks, "kept": 0, "fill": "f-1"}));
    }

    fn written(&self) -> usize {
        marks(&self.memory).iter().filter(|mark| **mark != 0).count()
    }
}

/// A real agent.
struct Agent(Child);

impl Agent {
    fn start(dir: &Path) -> Self {
        Self::start_with(dir, &[], &[])
    }

    fn start_with(dir: &Path, options: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_pf-agent"))
            .args(["serve", "--data"])
            .arg(dir)
            .arg("--socket")
            .arg(dir.join("agent.sock"))
            .arg("--engine-socket")
            .arg(dir.join("engines.sock"))
            .args(options)
            .env_clear()
            .env("HOME", dir)
            .envs(environment.iter().copied())
            .stdout(Stdio::piped())
            .stderr(File::create(dir.join("agent.log")).unwrap())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.starts_with("listening on "), "{line}");
        Self(process)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The agent may end before it answers.
async fn try_post(dir: &Path, path: &str, body: &Value) -> reqwest::Result<reqwest::Response> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let http = reqwest::Client::builder().unix_socket(dir.join("agent.sock")).build().unwrap();
    http.post(format!("http://agent{path}")).body(body.to_string()).send().await
}

async fn post(dir: &Path, path: &str, body: &Value) {
    let answer = try_post(dir, path, body).await.unwrap();
    let (status, text) = (answer.status(), answer.text().await.unwrap());
    assert!(status.is_success(), "{path}: {status} {text}");
}

/// Ends an agent by a signal when it has written so many blocks. Returns how many were written when
/// the engine saw the end.
async fn end(dir: &Path, memory: &Arc<File>, signal: Signal, after: usize) -> usize {
    let mut agent = Agent::start(dir);
    let engine = Engine::register(&dir.join("engines.sock"), memory).await;
    post(dir, "/v1/engines/e/restores", &json!({"reference": "team/agent:now", "local": true})).await;
    engine.begin_fill();
    let begun = std::time::Instant::now();
    while engine.written() < after {
        assert!(begun.elapsed() < TIMEOUT, "nothing is written");
    }
    kill_process(Pid::from_child(&agent.0), signal).unwrap();
    let seen = engine.reader.join().unwrap();
    // Longer than a batch takes.
    std::thread::sleep(Duration::from_millis(300));
    let written = seen.iter().filter(|mark| **mark != 0).count();
    assert_eq!(marks(memory), seen, "{written} of {COLUMNS} blocks were written at the end of the connection, and others later");
    agent.0.wait().unwrap();
    written
}

async fn captured(dir: &Path) -> Arc<File> {
    let memory = Arc::new(File::from(memfd_of("pf-ending", &memory())));
    let agent = Agent::start(dir);
    let engine = Engine::register(&dir.join("engines.sock"), &memory).await;
    post(dir, "/v1/engines/e/snapshots", &json!({"reference": "team/agent:now", "push": "never"})).await;
    drop(agent);
    engine.reader.join().unwrap();
    memory
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_agent_writes_nothing_after_the_engine_has_seen_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let memory = captured(dir.path()).await;
    let mut cut = 0;
    // On a busy machine the kill may come when the fill has ended.
    for round in 0..30 {
        let written = end(dir.path(), &memory, Signal::KILL, 1 + round % 8).await;
        cut += usize::from(written < COLUMNS as usize);
        if cut == 3 {
            return;
        }
    }
    assert!(cut > 0, "no kill came in the middle of a fill");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_agent_ends_no_connection_under_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let memory = captured(dir.path()).await;
    for _ in 0..3 {
        end(dir.path(), &memory, Signal::TERM, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_agent_finishes_the_saves_that_were_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Arc::new(File::from(memfd_of("pf-ending", &memory())));
    let mut agent = Agent::start(dir.path());
    let verbs = [Verb::Hold, Verb::Request];
    let engine = Engine::register_with(&dir.path().join("engines.sock"), &memory, &verbs, Some("hold")).await;
    engine.ask(1, "save", &json!({"ticket": "t-1", "sequence": "s", "reference": "team/agent:saved", "push": "never"}));
    let hold = engine.unanswered.recv_timeout(TIMEOUT).unwrap();
    kill_process(Pid::from_child(&agent.0), Signal::TERM).unwrap();
    send(&engine.writing, &json!({"id": hold["id"], "ok": sequence()}));
    assert!(agent.0.wait().unwrap().success());
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    store.tag(&"team/agent".parse().unwrap(), &"saved".parse().unwrap()).await.expect("it was saved before the end");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_killed_agent_had_stored_of_a_capture_is_garbage_when_the_next_agent_has_started() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Arc::new(File::from(memfd_of("pf-ending", &memory())));
    let agent = Agent::start(dir.path());
    let verbs = [Verb::Pause, Verb::Table];
    let engine = Engine::register_with(&dir.path().join("engines.sock"), &memory, &verbs, Some("resume")).await;
    let folder = dir.path().to_owned();
    tokio::spawn(async move {
        let request = json!({"reference": "team/agent:now", "push": "never"});
        drop(try_post(&folder, "/v1/engines/e/snapshots", &request).await);
    });
    // Without pins the engine goes on when its pages are stored.
    engine.unanswered.recv_timeout(TIMEOUT).unwrap();
    // An interrupted pull goes on with what it has stored.
    let store = Store::open(&dir.path().join("store"), Options::default()).await.unwrap();
    let pull = store.open_push(&"team/pulled".parse().unwrap()).await.unwrap();
    let pulled = bytes::Bytes::from(frames::stream([frames::blob(b"pulled")]));
    store.ingest(&pull.id, futures::stream::iter([Ok::<_, Infallible>(pulled)])).await.unwrap();
    let usage = async || store.usage(Duration::ZERO).await.unwrap();
    let before = usage().await;
    assert!(before.leased.bytes > BLOCK && before.garbage_bytes == 0, "{before:?}");
    // SIGKILL.
    drop(agent);

    let _next = Agent::start(dir.path());
    let after = usage().await;
    assert!(after.garbage_bytes > BLOCK, "{after:?}");
    assert!((1..BLOCK).contains(&after.leased.bytes), "what was pulled stays: {after:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_report_of_an_agent_names_the_engines_that_its_end_lets_go() {
    let (dir, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let url = registry(dir.path()).await;
    let remote = Remote::new(&url, RemoteOptions::default()).unwrap();
    let memory = Arc::new(File::from(memfd_of("pf-ending", &memory())));
    // The end of an agent waits only a second for its last report: a busy machine may take longer.
    for _ in 0..10 {
        let options = ["--registry", &url, "--report-name", "gpu-1", "--report-interval", "3600"];
        let mut agent = Agent::start_with(data.path(), &options, &[]);
        let engine = Engine::register(&data.path().join("engines.sock"), &memory).await;
        kill_process(Pid::from_child(&agent.0), Signal::TERM).unwrap();
        assert!(agent.0.wait().unwrap().success());
        engine.reader.join().unwrap();
        let reported = remote.agents(None, 10).await.unwrap().agents;
        let last = reported.iter().map(|agent| &agent.report).find(|report| report.stopped);
        if let Some(last) = last {
            let engines: Vec<&str> = last.engines.iter().map(|engine| engine.engine.as_str()).collect();
            assert_eq!(engines, ["e"]);
            return;
        }
    }
    panic!("the registry was never told of an end");
}

#[test]
fn a_variable_that_is_no_setting_is_named_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    drop(Agent::start_with(dir.path(), &[], &[("PF_AGENT_LOG", "info"), ("PF_AGENT_DATE", "/x"), ("PF_AGENT_PORT", "tcp://10.0.0.1:80")]));
    let log = std::fs::read_to_string(dir.path().join("agent.log")).unwrap();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("have no effect")).collect();
    let [warning] = warnings[..] else { panic!("{log}") };
    assert!(warning.contains("PF_AGENT_DATE") && !warning.contains("PF_AGENT_LOG") && !warning.contains("PF_AGENT_PORT"), "{warning}");
}
