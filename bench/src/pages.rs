//! What grows with the number of pages: processor time of an unchanged push, peak memory of the
//! client, and the time of verify, push and pull, for snapshots of many small pages.

use crate::Result;
use crate::contender::pf::{client, serve};
use crate::contender::program;
use crate::goals::{self, Fact};
use crate::machine::describe;
use crate::report::Spread;
use crate::usage::{Watch, mib, run as run_command};
use pfr_testkit::directory;
use pfr_testkit::snapshot::Shape;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The sizes that the goals are for.
const SMALL: u64 = 40_000;
const LARGE: u64 = 200_000;
/// Where the snapshots are pushed to.
const REFERENCE: &str = "bench/pages:latest";

/// Arguments of `pages`.
#[derive(clap::Args)]
pub struct Args {
    /// Pages of the snapshots, each K and V of 128 bytes
    #[arg(long, value_delimiter = ',', default_values_t = [SMALL, LARGE])]
    pages: Vec<u64>,
    /// Rounds; the table shows the medians
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// `pf` [default: beside this program]
    #[arg(long)]
    pf: Option<PathBuf>,
    /// `pf-registry` [default: beside this program]
    #[arg(long)]
    registry: Option<PathBuf>,
    /// Directory to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Push,
    Unchanged,
    Verify,
    Pull,
    PullDirectory,
}

impl Step {
    /// In the order in which they are run.
    const ALL: [Self; 5] = [Self::Push, Self::Unchanged, Self::Verify, Self::Pull, Self::PullDirectory];

    fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Unchanged => "push, unchanged",
            Self::Verify => "verify",
            Self::Pull => "pull into a store",
            Self::PullDirectory => "pull into a directory",
        }
    }

    /// Whether the goal about the time for five times as many pages is for it.
    fn is_linear(self) -> bool {
        self != Self::Unchanged
    }
}

/// One step of one round.
#[derive(Clone, Copy, Debug)]
struct Sample {
    pages: u64,
    step: Step,
    seconds: f64,
    /// Of the client alone.
    processor_seconds: f64,
    peak_memory: u64,
}

/// Measures each step at each size, and prints a table.
pub fn run(args: &Args) -> Result<()> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk)]);
    println!("{} × {}, {}; {:?}\n", machine.cores, machine.cpu, machine.kernel, machine.file_systems);
    let (pf, registry) = (program(args.pf.as_deref(), "pf")?, program(args.registry.as_deref(), "pf-registry")?);
    let folder = tempfile::tempdir_in(&disk)?;
    let mut samples = Vec::new();
    for pages in &args.pages {
        let snapshot = folder.path().join(format!("snapshot-{pages}"));
        std::fs::create_dir_all(&snapshot)?;
        directory::write(&snapshot, "page_manifest.json", Shape::TINY, &(0..*pages).collect::<Vec<_>>());
        for round in 0..args.rounds {
            let dir = tempfile::tempdir_in(folder.path())?;
            samples.extend(one_round(&pf, &registry, &snapshot, dir.path(), *pages)?);
            eprintln!("round {round}: {pages} pages");
        }
        std::fs::remove_dir_all(&snapshot)?;
    }
    println!("| pages | step | time (min–max) | CPU-s of the client | peak memory of the client |\n|---|---|---|---|---|");
    for pages in &args.pages {
        for step in Step::ALL {
            let of = |value: fn(&Sample) -> f64| spread(&samples, *pages, step, value);
            let (time, processor) = (of(|sample| sample.seconds), of(|sample| sample.processor_seconds));
            println!(
                "| {pages} | {} | {:.2} s ({:.2}–{:.2}) | {:.2} | {:.0} MiB |",
                step.name(),
                time.median,
                time.min,
                time.max,
                processor.median,
                of(|sample| mib(sample.peak_memory)).median
            );
        }
    }
    // The goals are for these sizes.
    if [SMALL, LARGE].iter().all(|pages| args.pages.contains(pages)) {
        println!("\n{}", goals::render(&goals::of_facts(&facts(&samples))));
    }
    Ok(())
}

fn spread(samples: &[Sample], pages: u64, step: Step, value: fn(&Sample) -> f64) -> Spread {
    Spread::of(samples.iter().filter(|sample| (sample.pages, sample.step) == (pages, step)).map(value)).unwrap_or_default()
}

/// The numbers that the goals are about: the worst of each.
fn facts(samples: &[Sample]) -> Vec<(Fact, f64)> {
    let time = |pages: u64, step: Step| spread(samples, pages, step, |sample| sample.seconds).median;
    let growth = Step::ALL.into_iter().filter(|step| step.is_linear()).map(|step| time(LARGE, step) / time(SMALL, step).max(0.001));
    let memory = Step::ALL.into_iter().map(|step| spread(samples, LARGE, step, |sample| mib(sample.peak_memory)).median);
    vec![
        (Fact::UnchangedPush, spread(samples, LARGE, Step::Unchanged, |sample| sample.processor_seconds).median),
        (Fact::Growth, growth.fold(0.0, f64::max)),
        (Fact::ClientMemory, memory.fold(0.0, f64::max)),
    ]
}

/// All steps against a registry of their own.
fn one_round(pf: &Path, registry: &Path, snapshot: &Path, dir: &Path, pages: u64) -> Result<Vec<Sample>> {
    let data = dir.join("registry");
    let (_server, url) = serve(registry, &["--data".as_ref(), data.as_os_str()])?;
    let (snapshot, restored) = (snapshot.as_os_str(), dir.join("restored"));
    let reference: &OsStr = REFERENCE.as_ref();
    let mut samples = Vec::new();
    for step in Step::ALL {
        let arguments: Vec<&OsStr> = match step {
            Step::Push | Step::Unchanged => vec!["push".as_ref(), snapshot, reference],
            Step::Verify => vec!["verify".as_ref(), reference],
            Step::Pull => vec!["pull".as_ref(), reference],
            Step::PullDirectory => vec!["pull".as_ref(), reference, restored.as_os_str()],
        };
        // A pull into a directory would take what the store has: it gets an empty one.
        let store = dir.join(if step == Step::PullDirectory { "empty" } else { "store" });
        let mut command = client(pf, &url, dir, &store);
        command.args(&arguments);
        let (watch, start) = (Watch::start(&[]), Instant::now());
        let ran = run_command(&mut command)?;
        let (seconds, processor) = (start.elapsed().as_secs_f64(), watch.stop());
        samples.push(Sample { pages, step, seconds, processor_seconds: processor.ours, peak_memory: ran.peak_memory });
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_step_decides_and_an_unchanged_push_need_not_be_linear() {
        let sample = |pages, step, seconds: f64, peak: u64| Sample {
            pages,
            step,
            seconds,
            processor_seconds: seconds / 2.0,
            peak_memory: peak << 20,
        };
        let samples: Vec<Sample> = Step::ALL
            .into_iter()
            .flat_map(|step| {
                let growth = match step {
                    Step::Unchanged => 100.0,
                    Step::Pull => 7.0,
                    _ => 5.0,
                };
                [sample(SMALL, step, 1.0, 40), sample(LARGE, step, growth, if step == Step::Verify { 90 } else { 50 })]
            })
            .collect();
        let found = facts(&samples);
        assert_eq!(found, [(Fact::UnchangedPush, 50.0), (Fact::Growth, 7.0), (Fact::ClientMemory, 90.0)]);
        assert_eq!(goals::of_facts(&found).len(), 3, "each has its goal");
    }
}
