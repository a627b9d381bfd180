//! The store alone, in this process: how fast metadata answers and grows, how fast bytes come in
//! and go out, what a commit costs, and what many small pushes leave.

mod bytes;
mod commits;
mod merging;
mod metadata;
pub mod requests;
pub mod ui;

use crate::Result;
use crate::goals::{self, Fact};
use crate::machine::describe;
use std::path::PathBuf;
use std::time::Instant;

/// The sizes that the goals are for.
const OBJECTS: usize = 1_000_000;
const AGENT: u64 = 380_000;

/// Arguments of `store`.
#[derive(clap::Args)]
pub struct Args {
    /// Objects in the metadata
    #[arg(long, default_value_t = OBJECTS)]
    objects: usize,
    /// Look up and insert on a PostgreSQL server as well, which is started for it and removed; its
    /// programs must be installed
    #[arg(long)]
    postgres: bool,
    /// Pages whose bytes are moved: 360,448 bytes each
    #[arg(long, default_value_t = 2048)]
    pages: usize,
    /// Pages of the smaller snapshot whose fork is committed; the larger one has ten times as many
    #[arg(long, default_value_t = 4096)]
    fork_pages: usize,
    /// Tokens of the agent whose 12th fork is committed, 16 a page, beside a small agent
    #[arg(long, default_value_t = AGENT)]
    agent_tokens: u64,
    /// Small pushes whose packs are merged
    #[arg(long, default_value_t = 3000)]
    small_pushes: u64,
    /// Rounds; the table shows the median
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Directory on disk to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Directory in memory to work in, for bytes
    #[arg(long, default_value = "/dev/shm")]
    tmpfs: PathBuf,
}

/// Measures each operation and prints a line for it.
pub fn run(args: &Args) -> Result<()> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk), ("tmpfs", &args.tmpfs)]);
    println!("{machine}\n");
    println!("| what | median | min–max |\n|---|---|---|");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut facts = Vec::new();
        let mut missing = vec![(Fact::Missing, metadata::sqlite(&disk, args.objects, args.rounds).await?)];
        if args.postgres {
            missing.push((Fact::MissingPostgres, metadata::postgres(args.objects, args.rounds).await?));
        }
        if args.objects >= OBJECTS {
            facts.extend(missing);
        }
        bytes::run(&args.tmpfs, args.pages, args.rounds).await?;
        commits::run(&disk, args.fork_pages, args.rounds).await?;
        let twelfth = commits::twelfth(&disk, args.agent_tokens, args.rounds).await?;
        if args.agent_tokens >= AGENT {
            facts.push((Fact::TwelfthFork, twelfth));
        }
        merging::run(&disk, args.small_pushes).await?;
        if !facts.is_empty() {
            println!("\n{}", goals::render(&goals::of_facts(&facts)));
        }
        Ok(())
    })
}

/// Prints a line of the table. Returns the median.
pub fn line(what: &str, values: &[f64], unit: &str) -> f64 {
    let spread = crate::report::Spread::of(values.iter().copied()).unwrap_or_default();
    println!("| {what} | {} {unit} | {}–{} |", short(spread.median), short(spread.min), short(spread.max));
    spread.median
}

fn short(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// Seconds that `work` takes, and what it returns.
async fn timed<T>(work: impl Future<Output = pfr_store::Result<T>>) -> Result<(f64, T)> {
    let start = Instant::now();
    let value = work.await?;
    Ok((start.elapsed().as_secs_f64(), value))
}
