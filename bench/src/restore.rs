//! Restores on a host that lacks the pages: passing from the registry to the engine, with the local
//! store behind it and without it, beside a pull with a restore afterwards.
//!
//! The engine is the reference engine in shared memory. The floor is the same bytes over one socket
//! on loopback into memory, hashed there side by side, as a client of a cache that verifies would
//! do. All ways take turns over the same snapshot. Peers are in `run`, where they read the same
//! workload into memory with and without verification.

use crate::Result;
use crate::capture::{Engine, Host, number, seconds, text};
use crate::contender::{pf, sibling};
use crate::machine::describe;
use crate::report::{Spread, json as results};
use pfr_schema::{Algorithm, Digest};
use serde_json::json;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bytes of a blob of the floor: a page of the reference engine is about as large.
const BLOB: usize = 184_320;

/// Arguments of `restore`.
#[derive(clap::Args)]
pub struct Args {
    /// Lengths of the sessions, tokens
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2000])]
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
    bytes: u64,
    floor: Vec<f64>,
    passing: Vec<f64>,
    kept: Vec<f64>,
    pulled: Vec<f64>,
}

/// Measures and prints a table.
pub fn run(args: &Args) -> Result<()> {
    let place = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let dir = tempfile::TempDir::new_in(&place)?;
    let data = dir.path().join("registry");
    let (_registry, url) = pf::serve(&sibling("pf-registry")?, &["--data".as_ref(), data.as_ref()])?;
    let host = |name: &str| -> Result<(Host, Engine)> {
        let dir = dir.path().join(name);
        std::fs::create_dir(&dir)?;
        Ok((Host::start(&dir)?, Engine::start(&dir, name)?))
    };
    let ((here, mut source), (there, mut engine)) = (host("here")?, host("there")?);
    let mut sessions: Vec<Session> = args.tokens.iter().map(|_| Session::default()).collect();
    for round in 0..args.rounds {
        for (session, tokens) in sessions.iter_mut().zip(&args.tokens) {
            // New tokens in each round: the other host must lack the pages.
            let prompt: Vec<usize> = (0..*tokens).map(|i| 1 + (i * 37 + 11 + round * 101) % 4000).collect();
            source.say(&json!({"open": {"tokens": prompt}}))?;
            let sequence = text(&source.expect("opened")?["sequence"])?;
            let reference = format!("{url}/bench/s{tokens}:r{round}");
            let captured = here.ask(&["snapshot", "here", &reference, "--sequence", &sequence, "--push", "wait"])?;
            session.bytes = number(&captured["resident_bytes"])?;
            source.say(&json!({"free": {"sequence": sequence}}))?;
            source.expect("freed")?;
            session.floor.push(floor(session.bytes)?);
            let mut restore = |arguments: &[&str]| -> Result<f64> {
                let mut all = vec!["restore", reference.as_str(), "there"];
                all.extend(arguments);
                let restored = there.ask(&all)?;
                engine.say(&json!({"free": {"sequence": text(&restored["sequence"])?}}))?;
                engine.expect("freed")?;
                seconds(&restored["total_seconds"])
            };
            session.passing.push(restore(&["--no-store"])?);
            session.kept.push(restore(&[])?);
            let afterwards = restore(&["--local"])?;
            // Into the store of the command, which is another one than the agent's.
            session.pulled.push(seconds(&there.ask(&["pull", &reference])?["seconds"])? + afterwards);
        }
    }
    print(args, dir.path(), &sessions)
}

fn print(args: &Args, dir: &Path, sessions: &[Session]) -> Result<()> {
    let machine = describe(&[("work", dir)]);
    println!("{} × {}, {}; {:?}\n", machine.cores, machine.cpu, machine.kernel, machine.file_systems);
    println!(
        "| tokens | resident | floor | without the store | × floor | store behind it | pull, then restore |\n|---|---|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    for (session, tokens) in sessions.iter().zip(&args.tokens) {
        let spread = |values: &[f64]| Spread::of(values.iter().copied()).ok_or("no rounds");
        let ratios: Vec<f64> = session.passing.iter().zip(&session.floor).map(|(ours, floor)| ours / floor).collect();
        let (floor, passing, ratio) = (spread(&session.floor)?, spread(&session.passing)?, spread(&ratios)?);
        let (kept, pulled) = (spread(&session.kept)?, spread(&session.pulled)?);
        println!(
            "| {tokens} | {:.1} MB | {:.1} ms | {:.1} ms | {:.2} | {:.1} ms | {:.1} ms |",
            session.bytes as f64 / 1e6,
            floor.median * 1e3,
            passing.median * 1e3,
            ratio.median,
            kept.median * 1e3,
            pulled.median * 1e3
        );
        rows.push(json!({
            "tokens": tokens, "bytes_resident": session.bytes, "floor_seconds": floor, "no_store_seconds": passing,
            "no_store_of_floor": ratio, "store_behind_seconds": kept, "pull_then_restore_seconds": pulled,
        }));
    }
    if let Some(path) = &args.json {
        results::write(path, &json!({"machine": machine, "rounds": args.rounds, "cases": rows}))?;
    }
    Ok(())
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
    for group in memory.chunks_mut(BLOB * Digest::SIDE_BY_SIDE) {
        stream.read_exact(group)?;
        let blobs: Vec<&[u8]> = group.chunks(BLOB).collect();
        std::hint::black_box(Digest::of_each(Algorithm::Sha256, &blobs));
    }
    let took = start.elapsed().as_secs_f64();
    sender.join().map_err(|_| "the sender panicked")??;
    Ok(took)
}
