//! Capture and restore through the real programs: how long the engine is paused, and how many bytes
//! move, by length of the session.
//!
//! The engine is the reference engine in shared memory. The floor of a capture is the same bytes,
//! hashed once and written with one fsync. All sessions take turns, so that other load on the
//! machine affects all of them.

use crate::Result;
use crate::agents::{Common, Engine, Host, number, ratio, seconds, spread, text};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use std::io::Write as _;
use std::path::Path;
use std::time::Instant;

/// Arguments of `capture`.
#[derive(clap::Args)]
pub struct Args {
    /// Lengths of the sessions, tokens
    #[arg(long, value_delimiter = ',', default_values_t = [128, 512, 2000])]
    tokens: Vec<usize>,
    #[command(flatten)]
    common: Common,
}

/// The measurements of one session length.
#[derive(Default)]
struct Session {
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
    let dir = args.common.folder()?;
    let host = Host::start(dir.path())?;
    let mut engine = Engine::start(dir.path(), "a")?;
    let capture = |sequence: &str, reference: &str| {
        host.ask(&["snapshot", "a", reference, "--sequence", sequence, "--push", "never", "--logits", "0"])
    };
    let mut sessions: Vec<Session> = args.tokens.iter().map(|_| Session::default()).collect();
    for round in 0..args.common.rounds {
        for (session, tokens) in sessions.iter_mut().zip(&args.tokens) {
            // A capture does not copy what the store has.
            let sequence = engine.open(*tokens, round)?;
            let first = capture(&sequence, &format!("bench/s{tokens}:first-{round}"))?;
            session.resident = number(&first["resident_bytes"])?;
            session.first.push(seconds(&first["total_seconds"])?);
            session.pause.push(seconds(&first["pause_seconds"])?);
            session.floor.push(floor(dir.path(), session.resident)?);
            engine.ask(&json!({"generate": {"sequence": sequence, "count": 1}}), "generated")?;
            let reference = format!("bench/s{tokens}:grown-{round}");
            let grown = capture(&sequence, &reference)?;
            session.grown.push(seconds(&grown["total_seconds"])?);
            session.grown_moved = number(&grown["moved_bytes"])?;
            session.pause.push(seconds(&grown["pause_seconds"])?);
            let restored = host.ask(&["restore", &reference, "a", "--local"])?;
            session.restore.push(seconds(&restored["total_seconds"])?);
            engine.free(&sequence)?;
            engine.free(&text(&restored["sequence"])?)?;
        }
    }
    let columns = ["tokens", "resident", "engine stands still", "first capture", "× floor", "one token later", "moved", "restore"];
    args.common.report(dir.path(), &columns, sessions.iter().zip(&args.tokens).map(|(session, tokens)| session.case(*tokens)))
}

impl Session {
    fn case(&self, tokens: usize) -> Result<(String, Value)> {
        let (pause, first, ratio) = (spread(&self.pause)?, spread(&self.first)?, ratio(&self.first, &self.floor)?);
        let (grown, restore) = (spread(&self.grown)?, spread(&self.restore)?);
        let row = format!(
            "{tokens} | {:.1} MB | {:.2} ms | {:.1} ms | {:.2} | {:.1} ms | {} KB | {:.1} ms",
            self.resident as f64 / 1e6,
            pause.median * 1e3,
            first.median * 1e3,
            ratio.median,
            grown.median * 1e3,
            self.grown_moved / 1000,
            restore.median * 1e3
        );
        let document = json!({
            "tokens": tokens, "bytes_resident": self.resident, "pause_seconds": pause, "first_seconds": first, "first_of_floor": ratio,
            "grown_seconds": grown, "grown_bytes_moved": self.grown_moved, "restore_seconds": restore,
        });
        Ok((row, document))
    }
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
