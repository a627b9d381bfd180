//! A `pf-kv serve` process, driven line by line.

use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub struct Process {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// Lines read and not yet asked for.
    backlog: VecDeque<Value>,
    pub ready: Value,
}

/// One step of an engine.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    pub token: u64,
    pub logits: String,
    pub boundary: u64,
}

impl Process {
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pf-kv"));
        command.arg("serve").args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut process = Self { child, input, output, backlog: VecDeque::new(), ready: Value::Null };
        process.ready = process.expect("ready");
        process
    }

    /// A process of `model` that attaches to `socket`.
    pub fn attached(model: &str, socket: &Path, arguments: &[&str]) -> Self {
        Self::start(&[&["--model", model, "--blocks", "24", "--agent", socket.to_str().unwrap()], arguments].concat())
    }

    pub fn send(&mut self, command: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
    }

    /// The next line, whatever it is.
    pub fn line(&mut self) -> Value {
        self.backlog.pop_front().unwrap_or_else(|| self.read())
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        assert!(self.output.read_line(&mut line).unwrap() > 0, "the engine has ended: {:?}", self.child.wait());
        serde_json::from_str(&line).unwrap()
    }

    /// What the next line of this kind says; others are kept.
    pub fn expect(&mut self, kind: &str) -> Value {
        if let Some(i) = self.backlog.iter().position(|line| line.get(kind).is_some()) {
            return self.backlog.remove(i).unwrap()[kind].take();
        }
        loop {
            let mut line = self.read();
            match line.get_mut(kind) {
                Some(value) => return value.take(),
                None => self.backlog.push_back(line),
            }
        }
    }

    /// Sends a command and waits for a line.
    pub fn ask(&mut self, command: &Value, kind: &str) -> Value {
        self.send(command);
        self.expect(kind)
    }

    pub fn open(&mut self, tokens: &[u32]) -> String {
        let opened = self.ask(&json!({"open": {"tokens": tokens}}), "opened");
        opened["sequence"].as_str().unwrap().to_owned()
    }

    pub fn start_generating(&mut self, sequence: &str, count: u64) {
        self.send(&json!({"generate": {"sequence": sequence, "count": count}}));
    }

    pub fn steps(&mut self, count: u64) -> Vec<Step> {
        (0..count).map(|_| self.step()).collect()
    }

    pub fn step(&mut self) -> Step {
        let token = self.expect("token");
        Step {
            token: token["token"].as_u64().unwrap(),
            logits: token["logits"].as_str().unwrap().to_owned(),
            boundary: token["boundary"].as_u64().unwrap(),
        }
    }

    pub fn generate(&mut self, sequence: &str, count: u64) -> Vec<Step> {
        self.start_generating(sequence, count);
        let steps = self.steps(count);
        assert_eq!(self.expect("generated"), json!({"sequence": sequence, "count": count}));
        steps
    }

    pub fn memory(&mut self) -> Value {
        self.ask(&json!({"memory": {}}), "memory")
    }

    /// Ends input and waits for the end of the process.
    pub fn quit(mut self) {
        self.input.take();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A failed test must not leave it behind; after `quit` there is nothing to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Tokens that both models have.
pub fn prompt(tokens: usize) -> Vec<u32> {
    let mut rng = pfr_engine::rng::Rng::new(11);
    (0..tokens).map(|_| 30 + rng.below(400) as u32).collect()
}
