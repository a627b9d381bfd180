//! `pf-faults`: plays random histories until one fails, or enough were played.

use clap::Parser;
use pfr_faults::case::{self, Counts};
use pfr_faults::world::{Database, Plant};
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Plays random histories over real stores. Checks after each wave that nothing acknowledged is
/// lost, and at the end that nothing is left over.
#[derive(Parser)]
#[command(name = "pf-faults", version)]
struct Cli {
    /// Seed of the first history; the next ones count up.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Histories to play.
    #[arg(long, default_value_t = u64::MAX)]
    cases: u64,
    /// Operations after which to stop.
    #[arg(long, default_value_t = u64::MAX)]
    rounds: u64,
    /// Seconds after which to stop.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Waves of a history, of up to five operations each.
    #[arg(long, default_value_t = 40)]
    waves: u64,
    /// The database of the metadata.
    #[arg(long, value_enum, default_value_t)]
    database: Database,
    /// Print the first failing history in full, without a search for its shortest failing
    /// beginning.
    #[arg(long)]
    first: bool,
    /// A bug to plant: the run must then fail.
    #[arg(long)]
    plant: Option<Plant>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => unreachable!("no runtime: {error}"),
    };
    let mut out = std::io::stdout().lock();
    let (begun, mut total, mut cases) = (Instant::now(), Counts::default(), 0);
    let end = |out: &mut dyn std::io::Write, total: &Counts, cases: u64, failed: bool| {
        let numbers = serde_json::json!({
            "database": format!("{:?}", cli.database), "first_seed": cli.seed, "cases": cases, "seconds": begun.elapsed().as_secs(), "failed": failed, "counts": total,
        });
        let _ = writeln!(out, "{numbers}");
    };
    while cases < cli.cases && total.rounds < cli.rounds && begun.elapsed() < Duration::from_secs(cli.seconds) {
        match runtime.block_on(case::play(cli.database, cli.seed.wrapping_add(cases), cli.waves, cli.plant)) {
            Ok(counts) => total.add(&counts),
            Err(failure) => {
                let failure = if cli.first { failure } else { runtime.block_on(case::shrink(cli.database, failure, cli.plant)) };
                let _ = writeln!(out, "{failure}");
                end(&mut out, &total, cases + 1, true);
                return ExitCode::FAILURE;
            }
        }
        cases += 1;
    }
    end(&mut out, &total, cases, false);
    ExitCode::SUCCESS
}
