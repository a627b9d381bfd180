//! What measurements of captures and restores share: their arguments and table, agents, and
//! reference engines in shared memory.

use crate::Result;
use crate::contender::sibling;
use crate::machine::describe;
use crate::report::{Spread, json as results};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Arguments of `capture` and of `restore`.
#[derive(clap::Args)]
pub struct Common {
    /// Rounds; the table shows the median
    #[arg(long, default_value_t = 7)]
    pub rounds: usize,
    /// Directory to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write all measurements as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Common {
    /// A folder to work in.
    pub fn folder(&self) -> Result<tempfile::TempDir> {
        Ok(tempfile::TempDir::new_in(self.dir.clone().unwrap_or_else(std::env::temp_dir))?)
    }

    /// Prints a table with these columns, and writes the JSON. A case is its row and its document.
    pub fn report(&self, folder: &Path, columns: &[&str], cases: impl Iterator<Item = Result<(String, Value)>>) -> Result<()> {
        let machine = describe(&[("work", folder)]);
        println!("{machine}\n\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
        let mut documents = Vec::new();
        for case in cases {
            let (row, document) = case?;
            println!("| {row} |");
            documents.push(document);
        }
        match &self.json {
            Some(path) => results::write(path, &json!({"machine": machine, "rounds": self.rounds, "cases": documents})),
            None => Ok(()),
        }
    }
}

/// Median with minimum and maximum.
pub fn spread(values: &[f64]) -> Result<Spread> {
    Ok(Spread::of(values.iter().copied()).ok_or("no rounds")?)
}

/// Spread of the ratios, round by round.
pub fn ratio(values: &[f64], of: &[f64]) -> Result<Spread> {
    Ok(Spread::of(values.iter().zip(of).map(|(value, of)| value / of)).ok_or("no rounds")?)
}

pub fn text(value: &Value) -> Result<String> {
    Ok(value.as_str().ok_or("no text")?.to_owned())
}

pub fn number(value: &Value) -> Result<u64> {
    Ok(value.as_u64().ok_or("no number")?)
}

pub fn seconds(value: &Value) -> Result<f64> {
    Ok(value.as_f64().ok_or("no seconds")?)
}

/// A program, killed when dropped.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// An agent and the command that talks to it.
pub struct Host {
    dir: PathBuf,
    _agent: Running,
}

impl Host {
    pub fn start(dir: &Path) -> Result<Self> {
        let mut agent = Command::new(sibling("pf-agent")?)
            .args(["serve", "--log", "warn"])
            .args([Path::new("--data"), &dir.join("agent")])
            .args([Path::new("--socket"), &dir.join("agent.sock")])
            .args([Path::new("--engine-socket"), &dir.join("engines.sock")])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("pf-agent: {e}; build it with `cargo build --release -p pfr-agent`"))?;
        let stdout = agent.stdout.take().ok_or("no stdout")?;
        let agent = Running(agent);
        BufReader::new(stdout).read_line(&mut String::new())?;
        Ok(Self { dir: dir.to_owned(), _agent: agent })
    }

    pub fn ask(&self, arguments: &[&str]) -> Result<Value> {
        let mut command = Command::new(sibling("pf")?);
        command.args(arguments).args(["--json", "--quiet"]).env("HOME", &self.dir).env("PF_AGENT_SOCKET", self.dir.join("agent.sock"));
        let output = command.stdin(Stdio::null()).output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

/// A reference engine.
pub struct Engine {
    _running: Running,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Engine {
    pub fn start(dir: &Path, name: &str) -> Result<Self> {
        let mut child = Command::new(sibling("pf-kv")?)
            .args(["serve", "--model", "smollm2", "--blocks", "1024", "--name", name])
            .args([Path::new("--agent"), &dir.join("engines.sock")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("pf-kv: {e}; build it with `cargo build --release -p pfr-engine`"))?;
        let (stdin, stdout) = (child.stdin.take().ok_or("no stdin")?, child.stdout.take().ok_or("no stdout")?);
        let mut engine = Self { _running: Running(child), stdin, stdout: BufReader::new(stdout) };
        engine.expect("attached")?;
        // Its registration may still be on the way to the agent's list.
        std::thread::sleep(Duration::from_millis(200));
        Ok(engine)
    }

    /// Opens a sequence of so many tokens, which differ from round to round. Returns its name.
    pub fn open(&mut self, tokens: usize, round: usize) -> Result<String> {
        let prompt: Vec<usize> = (0..tokens).map(|i| 1 + (i * 37 + 11 + round * 101) % 4000).collect();
        text(&self.ask(&json!({"open": {"tokens": prompt}}), "opened")?["sequence"])
    }

    /// Frees a sequence.
    pub fn free(&mut self, sequence: &str) -> Result<()> {
        self.ask(&json!({"free": {"sequence": sequence}}), "freed").map(drop)
    }

    /// Sends a command, and waits for its event.
    pub fn ask(&mut self, command: &Value, event: &str) -> Result<Value> {
        writeln!(self.stdin, "{command}")?;
        self.stdin.flush()?;
        self.expect(event)
    }

    fn expect(&mut self, name: &str) -> Result<Value> {
        loop {
            let mut line = String::new();
            if self.stdout.read_line(&mut line)? == 0 {
                return Err("the engine ended".into());
            }
            let mut event: Value = serde_json::from_str(&line)?;
            if let Some(error) = event.get("error") {
                return Err(format!("the engine: {error}").into());
            }
            if event.get(name).is_some() {
                return Ok(event[name].take());
            }
        }
    }
}
