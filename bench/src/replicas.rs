//! One registry process against three on the same PostgreSQL and the same storage, in alternation:
//! pushes of overlapping snapshots.

use crate::Result;
use crate::contender::pf::serve;
use crate::contender::program;
use crate::generated::{Blob, Generated, component_bytes};
use crate::machine::{Machine, describe};
use crate::report::{Spread, json};
use crate::usage::Server;
use pfr_schema::api::{CommitRequest, Committed, DigestGroup, FramesStored, MissingRequest, MissingResponse, Push};
use pfr_schema::frame;
use pfr_schema::geometry::{Dtype, Geometry};
use reqwest::Client;
use serde::Serialize;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Instant;

/// TinyLlama's pages.
const GEOMETRY: Geometry = Geometry { page_size_tokens: 16, n_layers: 22, n_heads: 4, head_dim: 64, dtype: Dtype::Bf16 };

/// Arguments of `replicas`.
#[derive(clap::Args)]
pub struct Args {
    /// Database of all processes, for example `postgres://postgres@127.0.0.1:5432/bench`; empty
    #[arg(long)]
    database: String,
    /// Storage of all processes: `s3://bucket/prefix` or `file:///directory`
    #[arg(long)]
    storage: String,
    /// The registry [default: beside this program]
    #[arg(long)]
    registry: Option<PathBuf>,
    /// Processes, in turn
    #[arg(long, value_delimiter = ',', default_value = "1,3")]
    replicas: Vec<usize>,
    /// Pushers at a time
    #[arg(long, default_value_t = 6)]
    pushers: usize,
    /// Pushes of each pusher in a round
    #[arg(long, default_value_t = 8)]
    pushes: usize,
    /// Pages of a snapshot
    #[arg(long, default_value_t = 64)]
    pages: u64,
    /// New pages of each push; the others are pages of all pushers of the round
    #[arg(long, default_value_t = 16)]
    new_pages: u64,
    /// Rounds
    #[arg(long, default_value_t = 5)]
    rounds: u64,
    /// Write all measurements as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// What else to record, for example what the processes were limited to
    #[arg(long)]
    note: Option<String>,
    /// Date to record
    #[arg(long)]
    date: Option<String>,
}

/// A round with so many processes.
#[derive(Clone, Copy, Debug)]
struct Sample {
    replicas: usize,
    seconds: f64,
    pushes: u64,
    raw_bytes: u64,
    sent_bytes: u64,
}

#[derive(Serialize)]
struct Report<'a> {
    date: Option<&'a str>,
    note: Option<&'a str>,
    machine: Machine,
    storage: &'a str,
    pushers: usize,
    pages: u64,
    new_pages: u64,
    rounds: u64,
    cases: Vec<Case>,
}

/// All rounds with so many processes.
#[derive(Serialize)]
struct Case {
    replicas: usize,
    pushes_per_second: Spread,
    raw_bytes_per_second: Spread,
    sent_bytes_per_second: Spread,
}

/// Measures and prints a table.
pub fn run(args: &Args) -> Result<()> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let machine = describe(&[]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let program = program(args.registry.as_deref(), "pf-registry")?;
    let shared = ["--database", &args.database, "--storage", &args.storage].map(OsStr::new);
    let mut samples = Vec::new();
    for round in 0..args.rounds {
        for replicas in &args.replicas {
            let servers: Vec<(Server, String)> = (0..*replicas).map(|_| serve(&program, &shared)).collect::<Result<_>>()?;
            let urls: Vec<String> = servers.iter().map(|(_, url)| url.clone()).collect();
            let sample = runtime.block_on(pushes(&urls, round, args))?;
            eprintln!("round {round}: {replicas} processes, {:.1} pushes/s", sample.pushes as f64 / sample.seconds);
            samples.push(sample);
        }
    }
    println!("{} × {}, {}\n", machine.cores, machine.cpu, machine.kernel);
    println!("| processes | pushes/s (min–max) | GB/s of snapshots | GB/s sent | × the first |\n|---|---|---|---|---|");
    let rate = |replicas: usize, value: fn(&Sample) -> f64| {
        Spread::of(samples.iter().filter(|s| s.replicas == replicas).map(|s| value(s) / s.seconds)).unwrap_or_default()
    };
    let first = args.replicas.first().copied().unwrap_or(1);
    for replicas in &args.replicas {
        let pushes = rate(*replicas, |s| s.pushes as f64);
        println!(
            "| {replicas} | {:.1} ({:.1}–{:.1}) | {:.3} | {:.3} | {:.2} |",
            pushes.median,
            pushes.min,
            pushes.max,
            rate(*replicas, |s| s.raw_bytes as f64 / 1e9).median,
            rate(*replicas, |s| s.sent_bytes as f64 / 1e9).median,
            pushes.median / rate(first, |s| s.pushes as f64).median
        );
    }
    if let Some(path) = &args.json {
        let kind = args.storage.split(':').next().unwrap_or_default();
        let (date, pushers, pages, new_pages) = (args.date.as_deref(), args.pushers, args.pages, args.new_pages);
        let case = |replicas: &usize| Case {
            replicas: *replicas,
            pushes_per_second: rate(*replicas, |s| s.pushes as f64),
            raw_bytes_per_second: rate(*replicas, |s| s.raw_bytes as f64),
            sent_bytes_per_second: rate(*replicas, |s| s.sent_bytes as f64),
        };
        let (rounds, cases) = (args.rounds, args.replicas.iter().map(case).collect());
        let note = args.note.as_deref();
        json::write(path, &Report { date, note, machine, storage: kind, pushers, pages, new_pages, rounds, cases })?;
    }
    Ok(())
}

/// Runs all pushers at once, each on one of the processes. The bytes of every push are generated
/// before the time is measured.
async fn pushes(urls: &[String], round: u64, args: &Args) -> Result<Sample> {
    let space = (round * 16 + urls.len() as u64) << 32;
    let common: Vec<u64> = (0..args.pages - args.new_pages.min(args.pages)).map(|page| space + page).collect();
    let mut work: Vec<Vec<Generated>> = Vec::new();
    for pusher in 0..args.pushers as u64 {
        let snapshots = (0..args.pushes as u64).map(|push| {
            let first = space + (1 << 24) + (pusher * args.pushes as u64 + push) * args.new_pages;
            Generated::new(GEOMETRY, &common.iter().copied().chain(first..first + args.new_pages).collect::<Vec<_>>())
        });
        work.push(snapshots.collect());
    }
    let client = Client::builder().build()?;
    let start = Instant::now();
    let running = work.into_iter().enumerate().map(|(pusher, snapshots)| {
        let base = format!("{}/v1/repositories/bench%2Fr{round}-{}-{pusher}/", urls[pusher % urls.len()], urls.len());
        let client = client.clone();
        tokio::spawn(async move {
            let mut sent = 0;
            for snapshot in snapshots {
                sent += push(&client, &base, snapshot).await?;
            }
            Ok::<u64, Box<dyn std::error::Error + Send + Sync>>(sent)
        })
    });
    let mut sent_bytes = 0;
    for done in futures::future::join_all(running).await {
        sent_bytes += done??;
    }
    let pushes = (args.pushers * args.pushes) as u64;
    let raw_bytes = pushes * args.pages * 2 * component_bytes(GEOMETRY);
    Ok(Sample { replicas: urls.len(), seconds: start.elapsed().as_secs_f64(), pushes, raw_bytes, sent_bytes })
}

/// Pushes a snapshot as a client does, with all digests in one `missing` request. Returns the bytes
/// of the frames that were sent.
async fn push(client: &Client, base: &str, snapshot: Generated) -> Result<u64> {
    let session: Push = said(client.post(format!("{base}pushes"))).await?;
    let at = format!("{base}pushes/{}/", session.id);
    let groups = snapshot.blobs.chunk_by(|a, b| a.kind == b.kind);
    let groups = groups
        .map(|blobs| DigestGroup { kind: blobs[0].kind, digests: blobs.iter().map(|blob| blob.digest).collect(), claim: None })
        .collect();
    let missing: MissingResponse = said(client.post(format!("{at}missing")).json(&MissingRequest { groups })).await?;
    let lacks = |position: &u64| missing.missing.iter().any(|(start, count)| (*start..start + count).contains(position));
    let wanted = snapshot.blobs.into_iter().zip(0_u64..).filter(|(_, position)| lacks(position));
    let frames: Vec<bytes::Bytes> = wanted.map(|(Blob { frame, .. }, _)| frame).collect();
    let mut body = frames.concat();
    let sent = body.len() as u64;
    body.extend_from_slice(&frame::end_mark(frames.len() as u64));
    let upload = client.put(format!("{at}frames")).header("content-type", "application/vnd.pf.frames.v1").body(body);
    let _: FramesStored = said(upload).await?;
    let commit = CommitRequest { manifest: snapshot.manifest, tag: Some("latest".parse()?), if_tag_is: None };
    let _: Committed = said(client.post(format!("{at}commit")).json(&commit)).await?;
    Ok(sent)
}

/// Sends a request of the API and reads its answer; an error is what the registry says.
pub async fn said<T: serde::de::DeserializeOwned>(request: reqwest::RequestBuilder) -> Result<T> {
    let response = request.send().await?;
    let (status, text) = (response.status(), response.text().await?);
    if !status.is_success() {
        return Err(format!("{status}: {text}").into());
    }
    Ok(serde_json::from_str(&text)?)
}
