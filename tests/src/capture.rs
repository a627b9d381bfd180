//! Hosts that capture and restore: `pf-agent` and the reference engine as child processes.

use crate::{Output, Pf, binary, wait_for};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// How long an engine may take to say something. A debug build on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A GPU host without a GPU: a home, a local store, an agent.
pub struct Host {
    /// The `pf` command of this host.
    pub pf: Pf,
    data: PathBuf,
    agent: Option<Child>,
    options: Vec<String>,
}

impl Host {
    /// A fresh host with an agent that runs.
    #[must_use]
    pub fn new(registry: &str) -> Self {
        Self::with(registry, &[])
    }

    /// Likewise, with options for `pf-agent serve`.
    #[must_use]
    pub fn with(registry: &str, options: &[&str]) -> Self {
        let pf = Pf::new(registry);
        let data = pf.path("agent");
        Self::of(pf, data, options)
    }

    /// Likewise, with the agent's data elsewhere.
    #[must_use]
    pub fn over(registry: &str, data: &Path, options: &[&str]) -> Self {
        Self::of(Pf::new(registry), data.to_owned(), options)
    }

    fn of(pf: Pf, data: PathBuf, options: &[&str]) -> Self {
        let mut host = Self { pf, data, agent: None, options: options.iter().map(|o| (*o).to_owned()).collect() };
        host.start_agent();
        host
    }

    /// The agent's data directory.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Where engines register.
    #[must_use]
    pub fn engine_socket(&self) -> PathBuf {
        self.pf.path("engines.sock")
    }

    /// Starts (again) the agent over this host's data, and waits until it answers.
    pub fn start_agent(&mut self) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.pf.path("agent.log")).unwrap();
        let child = Command::new(binary("pf-agent"))
            .arg("serve")
            .args([Path::new("--data"), &self.data])
            .args([Path::new("--socket"), &self.pf.path("agent.sock")])
            .args([Path::new("--engine-socket"), &self.engine_socket()])
            .args(["--registry", self.pf.registry()])
            .args(&self.options)
            .env_clear()
            .env("HOME", self.pf.path("."))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        self.agent = Some(child);
        wait_for("the agent to answer", 60, || {
            if let Some(status) = self.agent.as_mut().unwrap().try_wait().unwrap() {
                panic!("the agent ended with {status}:\n{}", self.log());
            }
            (self.pf.run(&["engines", "--json"]).code == 0).then_some(())
        });
    }

    /// Kills the agent as a power cut would, as far as a process can be.
    pub fn kill_agent(&mut self) {
        if let Some(mut child) = self.agent.take() {
            drop(child.kill());
            child.wait().unwrap();
        }
    }

    /// Ends the agent as a service manager does, and waits until it has ended in order.
    pub fn stop_agent(&mut self) {
        let Some(mut child) = self.agent.take() else { return };
        assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
        let status = wait_for("the agent to end", 60, || child.try_wait().unwrap());
        assert!(status.success(), "{status}:\n{}", self.log());
    }

    /// The code of the last problem that the agent answered.
    #[must_use]
    pub fn last_problem(&self) -> String {
        let log = self.log();
        let code = log.lines().rev().find_map(|line| line.split_once(" code=")?.1.split(' ').next());
        code.unwrap_or_default().to_owned()
    }

    /// What the agent has logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.pf.path("agent.log")).unwrap_or_default()
    }

    /// Starts a reference engine and waits until the agent sees it.
    #[must_use]
    pub fn engine(&self, name: &str, model: Model, options: &[&str]) -> Engine {
        let engine = Engine::start(&self.engine_socket(), name, model, options);
        self.wait_for_engine(name);
        engine
    }

    /// Waits until an engine can be used.
    pub fn wait_for_engine(&self, name: &str) {
        wait_for("the engine to be ready", 60, || {
            let engines = self.pf.json(&["engines"]);
            let ready = |e: &Value| e["engine"] == name && e["state"]["state"] == "ready";
            engines["engines"].as_array().unwrap().iter().any(ready).then_some(())
        });
    }

    /// Captures; the report.
    pub fn snapshot(&self, engine: &str, reference: &str, options: &[&str]) -> Value {
        self.pf.json(&[&["snapshot", engine, reference, "--push", "wait"], options].concat())
    }

    /// Restores; the report.
    pub fn restore(&self, reference: &str, engine: &str) -> Value {
        self.pf.json(&["restore", reference, engine])
    }

    /// Restores. Returns the output of success or failure.
    #[must_use]
    pub fn try_restore(&self, reference: &str, engine: &str) -> Output {
        self.pf.run(&["restore", reference, engine])
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.kill_agent();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(8).collect();
            eprintln!("--- end of the agent's log\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
    }
}

/// What the reference engine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Model {
    /// SmolLM2-135M: a trained dense transformer.
    Dense,
    /// Linear attention, convolution, a sliding window and full attention; random weights.
    Hybrid,
}

impl Model {
    fn name(self) -> &'static str {
        match self {
            Self::Dense => "smollm2",
            Self::Hybrid => "hybrid",
        }
    }

    /// A prompt of `count` tokens.
    #[must_use]
    pub fn prompt(self, count: usize) -> Vec<u32> {
        (0..count as u32).map(|i| 1 + (i * 37 + 11) % 400).collect()
    }
}

/// A running reference engine, killed when dropped.
pub struct Engine {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Value>,
    /// Events that no caller has waited for yet.
    early: VecDeque<Value>,
    log: PathBuf,
}

/// One generated token: its id, and the digest of the logits of its step.
pub type Step = (u64, String);

impl Engine {
    /// Starts `pf-kv serve`.
    #[must_use]
    pub fn start(agent: &Path, name: &str, model: Model, options: &[&str]) -> Self {
        let log = agent.with_file_name(format!("{name}.log"));
        let stderr = std::fs::OpenOptions::new().create(true).append(true).open(&log).unwrap();
        let mut child = Command::new(binary("pf-kv"))
            .args(["serve", "--model", model.name(), "--name", name, "--threads", "1", "--agent"])
            .arg(agent)
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let value = serde_json::from_str(&line).unwrap_or_else(|e| panic!("the engine says {line:?}: {e}"));
                if sender.send(value).is_err() {
                    break;
                }
            }
        });
        let mut engine = Self { stdin: child.stdin.take(), child, lines, early: VecDeque::new(), log };
        engine.expect("ready");
        engine
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a command.
    pub fn say(&mut self, command: &Value) {
        let stdin = self.stdin.as_mut().unwrap();
        writeln!(stdin, "{command}").unwrap();
        stdin.flush().unwrap();
    }

    fn next(&mut self) -> Value {
        self.lines.recv_timeout(TIMEOUT).unwrap_or_else(|e| panic!("{e}: {}", std::fs::read_to_string(&self.log).unwrap_or_default()))
    }

    /// Waits for an event of this name; others are kept for later.
    pub fn expect(&mut self, name: &str) -> Value {
        if let Some(i) = self.early.iter().position(|event| event.get(name).is_some()) {
            return self.early.remove(i).unwrap()[name].take();
        }
        loop {
            let mut event = self.next();
            if event.get("error").is_some() && name != "error" {
                panic!("the engine: {event}");
            }
            if event.get(name).is_some() {
                return event[name].take();
            }
            self.early.push_back(event);
        }
    }

    /// Opens a sequence over a prompt; its name.
    pub fn open(&mut self, tokens: &[u32]) -> String {
        self.say(&json!({"open": {"tokens": tokens}}));
        self.expect("opened")["sequence"].as_str().unwrap().to_owned()
    }

    /// Starts generating.
    pub fn begin(&mut self, sequence: &str, count: usize, delay_ms: u64) {
        self.say(&json!({"generate": {"sequence": sequence, "count": count, "delay_ms": delay_ms}}));
    }

    /// Generates to the end.
    pub fn generate(&mut self, sequence: &str, count: usize) -> Vec<Step> {
        self.begin(sequence, count, 0);
        self.steps(sequence, count)
    }

    /// The next `count` tokens of a sequence that generates.
    pub fn steps(&mut self, sequence: &str, count: usize) -> Vec<Step> {
        let mut steps = Vec::new();
        while steps.len() < count {
            let token = self.expect("token");
            if token["sequence"] == sequence {
                steps.push((token["token"].as_u64().unwrap(), token["logits"].as_str().unwrap().to_owned()));
            }
        }
        steps
    }

    /// A copy of a sequence; its name.
    pub fn fork(&mut self, sequence: &str) -> String {
        self.say(&json!({"fork": {"sequence": sequence}}));
        self.expect("opened")["sequence"].as_str().unwrap().to_owned()
    }

    /// Its sequences.
    pub fn sequences(&mut self) -> Vec<String> {
        self.say(&json!({"sequences": {}}));
        self.expect("sequences").as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    }

    /// Forgets a sequence.
    pub fn free(&mut self, sequence: &str) {
        self.say(&json!({"free": {"sequence": sequence}}));
        self.expect("freed");
    }

    /// Everything in the engine: a digest of the pages in use, and which blocks are.
    pub fn fingerprint(&mut self) -> String {
        self.say(&json!({"memory": {}}));
        self.expect("memory").to_string()
    }

    /// Kills it.
    pub fn kill(&mut self) {
        drop(self.child.kill());
        self.child.wait().unwrap();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.stdin = None;
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
