//! Capture and restore through the real programs: how long the engine is paused, and how many bytes
//! move, by length of the session.
//!
//! The engine is the reference engine in shared memory. The floor of a capture is the same bytes,
//! hashed once and written with one fsync. All sessions take turns, so that other load on the
//! machine affects all of them.

use crate::Result;
use crate::contender::sibling;
use crate::machine::describe;
use crate::report::{Spread, json as results};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Arguments of `capture`.
#[derive(clap::Args)]
pub struct Args {
    /// Lengths of the sessions, tokens
    #[arg(long, value_delimiter = ',', default_values_t = [128, 512, 2000])]
    tokens: Vec<usize>,
    /// Rounds; the table shows the median
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Directory to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write all measurements as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The measurements of one session length.
#[derive(Default)]
struct Session {
    name: String,
    resident: u64,
    first: Vec<f64>,
    floor: Vec<f64>,
    grown: Vec<f64>,
    grown_moved: u64,
    pause: Vec<f64>,
    restore: Vec<f64>,
}

/// Measures and prints a table.
pub fn run(args: &Args) -> Result<()> {
    let place = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::TempDir::new_in(&place)?;
    let host = Host::start(dir.path())?;
    let mut engine = Engine::start(dir.path(), "a")?;
    let mut sessions: Vec<Session> = args.tokens.iter().map(|_| Session::default()).collect();
    for round in 0..args.rounds {
        for (session, tokens) in sessions.iter_mut().zip(&args.tokens) {
            // New tokens in each round: a capture does not copy what the store has.
            let prompt: Vec<usize> = (0..*tokens).map(|i| 1 + (i * 37 + 11 + round * 101) % 4000).collect();
            engine.say(&json!({"open": {"tokens": prompt}}))?;
            session.name = text(&engine.expect("opened")?["sequence"])?;
            let first = host.snapshot("a", &session.name, &format!("bench/s{tokens}:first-{round}"))?;
            session.resident = number(&first["resident_bytes"])?;
            session.first.push(seconds(&first["total_seconds"])?);
            session.pause.push(seconds(&first["pause_seconds"])?);
            session.floor.push(floor(dir.path(), session.resident)?);
            engine.say(&json!({"generate": {"sequence": session.name, "count": 1}}))?;
            engine.expect("generated")?;
            let reference = format!("bench/s{tokens}:grown-{round}");
            let grown = host.snapshot("a", &session.name, &reference)?;
            session.grown.push(seconds(&grown["total_seconds"])?);
            session.grown_moved = number(&grown["moved_bytes"])?;
            session.pause.push(seconds(&grown["pause_seconds"])?);
            let restored = host.ask(&["restore", &reference, "a", "--local"])?;
            session.restore.push(seconds(&restored["total_seconds"])?);
            for sequence in [session.name.clone(), text(&restored["sequence"])?] {
                engine.say(&json!({"free": {"sequence": sequence}}))?;
                engine.expect("freed")?;
            }
        }
    }
    let machine = describe(&[("work", dir.path())]);
    println!("{} × {}, {}; {:?}\n", machine.cores, machine.cpu, machine.kernel, machine.file_systems);
    println!(
        "| tokens | resident | engine stands still | first capture | × floor | one token later | moved | restore |\n|---|---|---|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    for (session, tokens) in sessions.iter().zip(&args.tokens) {
        let spread = |values: &[f64]| Spread::of(values.iter().copied()).ok_or("no rounds");
        let ratios: Vec<f64> = session.first.iter().zip(&session.floor).map(|(ours, floor)| ours / floor).collect();
        let (pause, first, ratio) = (spread(&session.pause)?, spread(&session.first)?, spread(&ratios)?);
        let (grown, restore) = (spread(&session.grown)?, spread(&session.restore)?);
        println!(
            "| {tokens} | {:.1} MB | {:.2} ms | {:.1} ms | {:.2} | {:.1} ms | {} KB | {:.1} ms |",
            session.resident as f64 / 1e6,
            pause.median * 1e3,
            first.median * 1e3,
            ratio.median,
            grown.median * 1e3,
            session.grown_moved / 1000,
            restore.median * 1e3
        );
        rows.push(json!({
            "tokens": tokens, "bytes_resident": session.resident, "pause_seconds": pause, "first_seconds": first, "first_of_floor": ratio,
            "grown_seconds": grown, "grown_bytes_moved": session.grown_moved, "restore_seconds": restore,
        }));
    }
    if let Some(path) = &args.json {
        results::write(path, &json!({"machine": machine, "rounds": args.rounds, "cases": rows}))?;
    }
    Ok(())
}

/// Seconds to hash as many bytes once and write them durably: the least that a capture has to do.
fn floor(dir: &Path, bytes: u64) -> Result<f64> {
    let data: Vec<u8> = (0..bytes).map(|i| (i >> 3) as u8).collect();
    let path = dir.join("floor");
    let start = Instant::now();
    std::hint::black_box(Sha256::digest(&data));
    let mut file = std::fs::File::create(&path)?;
    file.write_all(&data)?;
    file.sync_all()?;
    let took = start.elapsed().as_secs_f64();
    std::fs::remove_file(&path)?;
    Ok(took)
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

    fn snapshot(&self, engine: &str, sequence: &str, reference: &str) -> Result<Value> {
        self.ask(&["snapshot", engine, reference, "--sequence", sequence, "--push", "never", "--logits", "0"])
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

    pub fn say(&mut self, command: &Value) -> Result<()> {
        writeln!(self.stdin, "{command}")?;
        Ok(self.stdin.flush()?)
    }

    pub fn expect(&mut self, name: &str) -> Result<Value> {
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
