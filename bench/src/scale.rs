//! Computes from measured costs what a fleet of GPU hosts needs: rates, rows, bytes, replicas and
//! prices, and which resource runs out first. A simulation with real tables checks the model.

mod costs;
mod model;
mod simulate;
mod workload;

use crate::Result;
use crate::machine::{Machine, describe};
use crate::report::json;
use costs::Costs;
use model::{Fleet, Limit};
use serde::Serialize;
use simulate::Comparison;
use std::path::PathBuf;
use workload::Assumptions;

/// Arguments of `scale`.
#[derive(clap::Args)]
pub struct Args {
    /// TOML file of assumptions: workload, capacities, prices; without it, defaults
    #[arg(long)]
    assumptions: Option<PathBuf>,
    /// Print the assumptions as TOML and exit
    #[arg(long)]
    print_assumptions: bool,
    /// Sizes of the fleets to compute, in GPU hosts
    #[arg(long, value_delimiter = ',', default_value = "1,3,10,30,100,300,1000,3000,10000")]
    hosts: Vec<f64>,
    /// Hosts of the simulation; 0 skips the simulation
    #[arg(long, default_value_t = 100)]
    simulated_hosts: usize,
    /// Directory on disk to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Directory in memory to work in, for the rates of bytes and for the simulation's tables
    #[arg(long, default_value = "/dev/shm")]
    tmpfs: PathBuf,
    /// Write all results as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Date to record
    #[arg(long)]
    date: Option<String>,
}

#[derive(Serialize)]
struct Report {
    date: Option<String>,
    machine: Machine,
    assumptions: Assumptions,
    costs: Costs,
    simulation: Vec<Comparison>,
    session: model::Session,
    fleets: Vec<Fleet>,
    limits: Vec<Limit>,
}

/// Measures costs, runs the simulation, computes fleets, and prints them.
pub fn run(args: &Args) -> Result<()> {
    let assumptions: Assumptions = match &args.assumptions {
        Some(path) => toml::from_str(&std::fs::read_to_string(path)?)?,
        None => Assumptions::default(),
    };
    if args.print_assumptions {
        print!("{}", toml::to_string(&assumptions)?);
        return Ok(());
    }
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk), ("tmpfs", &args.tmpfs)]);
    println!("{machine}\n");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let costs = runtime.block_on(costs::measure(&disk, &args.tmpfs))?;
    print_costs(&costs);
    let simulation =
        if args.simulated_hosts == 0 { Vec::new() } else { runtime.block_on(simulate::run(&args.tmpfs, args.simulated_hosts, &costs))? };
    print_simulation(&simulation);
    let fleets: Vec<Fleet> = args.hosts.iter().map(|hosts| model::fleet(&assumptions, &costs, *hosts)).collect();
    let limits = model::limits(&assumptions, &costs);
    print_fleets(&fleets);
    print_limits(&limits);
    if let Some(path) = &args.json {
        let session = model::session(&assumptions.workload);
        let report = Report { date: args.date.clone(), machine, assumptions, costs, simulation, session, fleets, limits };
        json::write(path, &report)?;
    }
    Ok(())
}

fn print_costs(c: &Costs) {
    println!("| measured here | |\n|---|---|");
    for (what, value, unit) in [
        ("objects indexed", c.inserted, "/s"),
        ("reference counts raised", c.raised, "/s"),
        ("objects collected", c.swept, "/s"),
        ("digests looked up for pushes", c.asked, "/s"),
        ("small pushes, 32 at a time", c.commits, "/s"),
        ("bytes in, one stream", c.bytes_in / 1e6, "MB/s"),
        ("bytes out, one stream", c.bytes_out / 1e6, "MB/s"),
        ("row and indexes of an object", c.object_bytes, "B"),
        ("of these, the index over digests", c.digest_index_bytes, "B"),
        ("entry of a node", c.child_bytes, "B"),
        ("rows of a snapshot", c.snapshot_bytes, "B"),
    ] {
        println!("| {what} | {} {unit} |", short(value));
    }
    println!();
}

fn print_simulation(comparisons: &[Comparison]) {
    if comparisons.is_empty() {
        return;
    }
    println!("| simulated with real tables | computed | measured | measured / computed |\n|---|---|---|---|");
    for c in comparisons {
        println!("| {} | {} | {} | {:.3} |", c.what, short(c.computed), short(c.measured), c.measured / c.computed);
    }
    println!();
}

fn print_fleets(fleets: &[Fleet]) {
    println!(
        "| hosts | pushes/s | requests/s | objects/s in and out | in, MB/s | out, MB/s | snapshots | objects | tables (SQLite), GB | bucket, TB | sharing saves | bucket writes/s | SQLite busy at peak | cores at peak | replicas | databases | a month |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for f in fleets {
        println!(
            "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {:.0} × | {} | {} % | {} | {} | {} | {} |",
            f.hosts,
            short(f.pushes),
            short(f.requests),
            short(f.objects_in),
            short(f.bytes_in / 1e6),
            short(f.bytes_out / 1e6),
            short(f.snapshots),
            short(f.objects),
            short(f.database_bytes / 1e9),
            short(f.bucket_bytes / 1e12),
            f.logical_bytes / f.bucket_bytes,
            short(f.bucket_puts),
            short(f.sqlite_busy * 100.0),
            short(f.cores),
            f.replicas,
            f.databases,
            short(f.cost.total),
        );
    }
    println!();
}

fn print_limits(limits: &[Limit]) {
    println!("| limit | at hosts | rests on | then |\n|---|---|---|---|");
    for l in limits {
        println!(
            "| {} | {} | {} | {} |",
            l.what,
            short(l.hosts),
            if l.measured { "costs measured here" } else { "assumed capacity" },
            l.then
        );
    }
}

/// Three digits, with a unit for thousands.
fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        v if v >= 1e12 => (value / 1e12, " T"),
        v if v >= 1e9 => (value / 1e9, " G"),
        v if v >= 1e6 => (value / 1e6, " M"),
        v if v >= 1e4 => (value / 1e3, " K"),
        _ => (value, ""),
    };
    let digits = if scaled.abs() >= 100.0 {
        0
    } else if scaled.abs() >= 10.0 {
        1
    } else {
        2
    };
    format!("{scaled:.digits$}{unit}")
}
