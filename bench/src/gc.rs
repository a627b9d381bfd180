//! Garbage collection: its cost by the number of live objects, and its effect on concurrent pushes
//! and reads.

mod beside;
pub mod rows;
pub mod straight;
mod sweep;

use crate::Result;
use crate::goals::{self, Fact};
use crate::machine::{Machine, describe};
use crate::report::{Spread, json};
use serde::Serialize;
use std::path::PathBuf;

/// Arguments of `gc`.
#[derive(clap::Args)]
pub struct Args {
    /// Live objects of each store
    #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000,10000000")]
    live: Vec<u64>,
    /// Objects that become garbage in each round
    #[arg(long, default_value_t = 100_000)]
    garbage: u64,
    /// Rounds; each round measures every store once
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Objects deleted in one transaction
    #[arg(long, default_value_t = 8000)]
    batch: usize,
    /// Write rows straight into the tables of stores with more live objects than this
    #[arg(long, default_value_t = 1_000_000)]
    straight_above: u64,
    /// Live objects of the store for pushes and reads during a collection; 0 skips these
    #[arg(long, default_value_t = 1_000_000)]
    beside_live: u64,
    /// Objects that this collection deletes in one transaction
    #[arg(long, value_delimiter = ',', default_value = "8000,250")]
    beside_batches: Vec<usize>,
    /// Directory on disk to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write all measurements as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Date to record
    #[arg(long)]
    date: Option<String>,
}

#[derive(Serialize)]
struct Report<'a> {
    date: Option<&'a str>,
    machine: &'a Machine,
    garbage: u64,
    batch: usize,
    stores: Vec<sweep::Case>,
    beside: &'a [beside::Phase],
}

/// Measures and prints tables.
pub fn run(args: &Args) -> Result<()> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk)]);
    println!("{machine}\n");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let stores = runtime.block_on(sweep::run(&disk, args))?;
    print_sweeps(&stores);
    println!("{}", goals::render(&goals::of_facts(&swept(&stores))));
    write(args, &machine, &stores, &[])?;
    if args.beside_live > 0 {
        let beside = runtime.block_on(beside::run(&disk, args))?;
        beside::print(&beside);
        write(args, &machine, &stores, &beside)?;
    }
    Ok(())
}

fn write(args: &Args, machine: &Machine, stores: &[sweep::Store], beside: &[beside::Phase]) -> Result<()> {
    let Some(path) = &args.json else { return Ok(()) };
    let (date, garbage, batch) = (args.date.as_deref(), args.garbage, args.batch);
    let stores = stores.iter().map(sweep::Store::case).collect();
    json::write(path, &Report { date, machine, garbage, batch, stores, beside })
}

/// Objects a second in the slowest store.
fn swept(stores: &[sweep::Store]) -> Vec<(Fact, f64)> {
    let of = |store: &sweep::Store| Spread::of(store.rounds.iter().map(|round| round.swept as f64 / round.sweep_seconds));
    let slowest = stores.iter().filter_map(of).map(|spread| spread.median).reduce(f64::min);
    slowest.map(|rate| (Fact::Swept, rate)).into_iter().collect()
}

fn print_sweeps(stores: &[sweep::Store]) {
    println!(
        "| live objects | database | B / object | inserted, objects/s | first look at new packs, objects/s | swept, objects/s (min–max) | × the smallest store's time | longest transaction | when nothing is due |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let median = |store: &sweep::Store, value: fn(&sweep::Round) -> f64| Spread::of(store.rounds.iter().map(value));
    let smallest = stores.first().and_then(|s| median(s, |r| r.sweep_seconds)).map_or(1.0, |s| s.median);
    for store in stores {
        let of = |value: fn(&sweep::Round) -> f64| median(store, value).map_or(0.0, |s| s.median);
        let swept = median(store, |r| r.swept as f64 / r.sweep_seconds).unwrap_or_default();
        println!(
            "| {} | {:.1} MB | {:.0} | {:.0} | {:.0} | {:.0} ({:.0}–{:.0}) | {:.2} | {:.0} ms | {:.2} ms |",
            store.live,
            store.database_bytes as f64 / 1e6,
            store.database_bytes as f64 / store.objects as f64,
            of(|r| r.pushed as f64 / r.push_seconds),
            of(|r| r.pushed as f64 / r.look_seconds),
            swept.median,
            swept.min,
            swept.max,
            of(|r| r.sweep_seconds) / smallest,
            of(|r| r.longest_transaction_seconds * 1e3),
            of(|r| r.idle_seconds * 1e3),
        );
    }
    println!();
}

/// Collects until nothing is due. Returns seconds and the number of objects deleted.
pub async fn collect_all(metadata: &dyn pfr_store::Metadata, batch: usize) -> Result<(f64, u64)> {
    let (seconds, (done, _), _) = sweep::collect_all(metadata, batch).await?;
    Ok((seconds, done.released + done.unclaimed))
}
