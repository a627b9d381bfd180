//! Tries variants of the floor, so that results are compared with the fastest one.

use crate::Result;
use crate::floor::{Plan, copy};
use crate::machine::cores;
use crate::pack::Piece;
use crate::workload::Workload;
use std::path::PathBuf;
use std::time::Instant;

/// Arguments of `floor`.
#[derive(clap::Args)]
pub struct Args {
    /// Pages of the workload
    #[arg(long, default_value_t = 4096)]
    pages: usize,
    /// Rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Directory to write in
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Prints a line for each variant.
pub fn run(args: &Args) -> Result<()> {
    let workload = Workload::prepare(args.pages, &crate::contender::sibling("pf-kv")?)?;
    let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let pieces: Vec<Piece> = workload.base.blobs.iter().map(Piece::of).collect();
    let mut plans = Vec::new();
    for direct in [false, true] {
        for threads in [1, 2, 4] {
            for buffer in [1 << 20, 4 << 20] {
                plans.push(Plan { threads: threads * cores(), buffer, direct, hash: true });
            }
        }
        plans.push(Plan { hash: false, ..Plan::on(direct) });
    }
    let mut times = vec![Vec::new(); plans.len()];
    for _ in 0..args.rounds {
        for (plan, times) in plans.iter().zip(&mut times) {
            let dir = tempfile::tempdir_in(&parent)?;
            workload.base.warm()?;
            let start = Instant::now();
            copy(&pieces, &dir.path().join("out"), *plan)?;
            times.push(start.elapsed().as_secs_f64());
        }
    }
    for (plan, mut times) in plans.iter().zip(times) {
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!("{median:6.2} s  {:5.2} GB/s  {plan:?}  {times:.2?}", workload.base.bytes() as f64 / median / 1e9);
    }
    Ok(())
}
