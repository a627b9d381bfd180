//! Restores on a host that lacks the pages: passing from the registry to the engine, with the local
//! store behind it and without it, beside a pull with a restore afterwards.
//!
//! The engine is the reference engine in shared memory. The floor is the same bytes over one socket
//! on loopback into memory, hashed there side by side, as a client of a cache that verifies would
//! do. All ways take turns over the same snapshot. Peers are in `run`, where they read the same
//! workload into memory with and without verification.

use crate::Result;
use crate::agents::{Common, Engine, Host, number, ratio, seconds, spread, text};
use crate::contender::{pf, sibling};
use pfr_schema::{Algorithm, Digest};
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

/// Bytes of a blob of the floor: a page of the reference engine is about as large.
const BLOB: usize = 184_320;

/// Arguments of `restore`.
#[derive(clap::Args)]
pub struct Args {
    /// Lengths of the sessions, tokens
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2000])]
    tokens: Vec<usize>,
    #[command(flatten)]
    common: Common,
}

/// The measurements of one session length.
#[derive(Default)]
struct Session {
    bytes: u64,
    floor: Vec<f64>,
    passing: Vec<f64>,
    kept: Vec<f64>,
    pulled: Vec<f64>,
}

/// Measures and prints a table.
pub fn run(args: &Args) -> Result<()> {
    let dir = args.common.folder()?;
    let data = dir.path().join("registry");
    let (_registry, url) = pf::serve(&sibling("pf-registry")?, &["--data".as_ref(), data.as_ref()])?;
    let host = |name: &str| -> Result<(Host, Engine)> {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir)?;
        Ok((Host::start(&dir)?, Engine::start(&dir, name)?))
    };
    let ((here, mut source), (there, mut engine)) = (host("here")?, host("there")?);
    let mut sessions: Vec<Session> = args.tokens.iter().map(|_| Session::default()).collect();
    for round in 0..args.common.rounds {
        for (session, tokens) in sessions.iter_mut().zip(&args.tokens) {
            // The other host must lack the pages.
            let sequence = source.open(*tokens, round)?;
            let reference = format!("{url}/bench/s{tokens}:r{round}");
            let captured = here.ask(&["snapshot", "here", &reference, "--sequence", &sequence, "--push", "wait"])?;
            session.bytes = number(&captured["resident_bytes"])?;
            source.free(&sequence)?;
            session.floor.push(floor(session.bytes)?);
            let mut restore = |arguments: &[&str]| -> Result<f64> {
                let mut all = vec!["restore", reference.as_str(), "there"];
                all.extend(arguments);
                let restored = there.ask(&all)?;
                engine.free(&text(&restored["sequence"])?)?;
                seconds(&restored["total_seconds"])
            };
            session.passing.push(restore(&["--no-store"])?);
            session.kept.push(restore(&[])?);
            let afterwards = restore(&["--local"])?;
            // Into the store of the command, which is another one than the agent's.
            session.pulled.push(seconds(&there.ask(&["pull", &reference])?["seconds"])? + afterwards);
        }
    }
    let columns = ["tokens", "resident", "floor", "without the store", "× floor", "store behind it", "pull, then restore"];
    args.common.report(dir.path(), &columns, sessions.iter().zip(&args.tokens).map(|(session, tokens)| session.case(*tokens)))
}

impl Session {
    fn case(&self, tokens: usize) -> Result<(String, Value)> {
        let (floor, passing, ratio) = (spread(&self.floor)?, spread(&self.passing)?, ratio(&self.passing, &self.floor)?);
        let (kept, pulled) = (spread(&self.kept)?, spread(&self.pulled)?);
        let row = format!(
            "{tokens} | {:.1} MB | {:.1} ms | {:.1} ms | {:.2} | {:.1} ms | {:.1} ms",
            self.bytes as f64 / 1e6,
            floor.median * 1e3,
            passing.median * 1e3,
            ratio.median,
            kept.median * 1e3,
            pulled.median * 1e3
        );
        let document = json!({
            "tokens": tokens, "bytes_resident": self.bytes, "floor_seconds": floor, "no_store_seconds": passing,
            "no_store_of_floor": ratio, "store_behind_seconds": kept, "pull_then_restore_seconds": pulled,
        });
        Ok((row, document))
    }
}

/// Seconds to bring as many bytes over a socket into memory and to hash them: the least that a
/// verified restore has to do.
fn floor(bytes: u64) -> Result<f64> {
    let blobs = usize::try_from(bytes)?.div_ceil(BLOB);
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let address = listener.local_addr()?;
    let sender = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        let blob: Vec<u8> = (0..BLOB).map(|i| (i >> 3) as u8).collect();
        (0..blobs).try_for_each(|_| stream.write_all(&blob))
    });
    let mut memory = vec![1_u8; blobs * BLOB];
    let start = Instant::now();
    let mut stream = TcpStream::connect(address)?;
    for group in memory.chunks_mut(BLOB * Digest::side_by_side(BLOB as u64)) {
        stream.read_exact(group)?;
        let blobs: Vec<&[u8]> = group.chunks(BLOB).collect();
        std::hint::black_box(Digest::of_each(Algorithm::Sha256, &blobs));
    }
    let took = start.elapsed().as_secs_f64();
    sender.join().map_err(|_| "the sender panicked")??;
    Ok(took)
}
