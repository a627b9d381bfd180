//! Runs the contenders in turn: in each round, each of them once in each place, in rotated order. A
//! change on the machine during the run then affects all of them.

use crate::Result;
use crate::contender::{self, ALL, Contender, Entry, Programs, program, sibling};
use crate::goals;
use crate::machine::{cores, describe, file_system};
use crate::meter::Meter;
use crate::pack::Lanes;
use crate::report::{Report, table};
use crate::workload::{Workload, empty_dir};
use clap::builder::PossibleValuesParser;
use std::path::{Path, PathBuf};

/// Full size of the workload; the goals are for it, or for more.
const PAGES: usize = 4096;

/// Arguments of `run` and of `limit`.
#[derive(clap::Args)]
pub struct Common {
    /// Pages of the workload: 360,448 bytes each
    #[arg(long, default_value_t = PAGES)]
    pages: usize,
    /// Rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Directory on disk to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// A second directory to work in, in memory
    #[arg(long, default_value = "/dev/shm")]
    tmpfs: PathBuf,
    /// Only these places
    #[arg(long, value_delimiter = ',', value_parser = ["disk", "tmpfs"])]
    places: Vec<String>,
    /// Connections of the limit [default: two a core]
    #[arg(long)]
    connections: Option<usize>,
    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Date to write into the JSON
    #[arg(long)]
    date: Option<String>,
}

/// Arguments of `run`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,
    /// Only these contenders; an error if one is not installed; `pf` stands for all its settings
    /// [default: all that are]
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(["pf"].into_iter().chain(contender::names())))]
    only: Vec<String>,
    /// The client [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pf: Option<PathBuf>,
    /// The registry [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pf_registry: Option<PathBuf>,
    /// A Python with the packages of Mooncake, LMCache and oras
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,
}

/// A directory to work in, and the workload on the same file system.
struct Place {
    name: &'static str,
    dir: PathBuf,
    workload: Workload,
    _copy: Option<tempfile::TempDir>,
}

/// Measures all contenders, and grades pf by the goals.
pub fn run(args: &Args) -> Result<()> {
    let programs = Programs {
        pf: program(args.pf.as_deref(), "pf")?,
        pf_registry: program(args.pf_registry.as_deref(), "pf-registry")?,
        python: args.python.clone(),
        connections: args.common.connections(),
    };
    let report = measure(&args.common, &programs, &args.only)?;
    println!("{}", table::render(&report));
    if args.common.pages < PAGES {
        println!("The goals are for {PAGES} pages or more. This run had {}.\n", args.common.pages);
    }
    println!("{}", goals::render(&goals::of_run(&report)));
    Ok(())
}

/// The floor, with and without hashing, and the limits.
fn limits() -> Vec<String> {
    let names = ["write-only", "floor", "limit", "limit-as-pf"];
    names.into_iter().filter(|name| *name != "limit-as-pf" || Lanes::differ()).map(str::to_owned).collect()
}

/// Measures the limits beside the floor.
pub fn limit(common: &Common) -> Result<()> {
    let none = PathBuf::new;
    let programs = Programs { pf: none(), pf_registry: none(), python: none(), connections: common.connections() };
    println!("{}", table::render(&measure(common, &programs, &limits())?));
    Ok(())
}

/// A contender that takes part.
struct Measured {
    name: &'static str,
    contender: Box<dyn Contender>,
}

fn measure(args: &Common, programs: &Programs, only: &[String]) -> Result<Report> {
    let (mut contenders, mut missing) = (Vec::new(), Vec::new());
    for Entry { name, find } in ALL {
        let is_meant = |wanted: &String| wanted == name || (wanted == "pf" && name.starts_with("pf-"));
        if !only.is_empty() && !only.iter().any(is_meant) {
            continue;
        }
        match find(programs) {
            Ok(contender) => contenders.push(Measured { name, contender }),
            Err(why) if only.is_empty() => missing.push((name, why)),
            Err(why) => return Err(why.into()),
        }
    }
    for (name, why) in &missing {
        eprintln!("{name}: not measured: {why}");
    }
    let workload = Workload::prepare(args.pages, &sibling("pf-kv")?)?;
    let new_bytes = workload.new_bytes();
    let places = places(args, workload)?;
    let mut notes = Vec::new();
    if args.wants("tmpfs") && places.iter().all(|place| place.name != "tmpfs") {
        notes.push(format!("tmpfs: not measured: {} is not in memory, or has not five times the workload free", args.tmpfs.display()));
    }
    if let Some(place) = places.first() {
        for Measured { name, contender } in &mut contenders {
            notes.extend(contender.prepare(&place.workload, &place.dir)?.map(|remark| format!("{name}: {remark}")));
        }
    }
    let mut report = Report {
        date: args.date.clone(),
        machine: describe(&places.iter().map(|place| (place.name, place.dir.as_path())).collect::<Vec<_>>()),
        pages: args.pages,
        rounds: 0,
        notes,
        missing,
        new_bytes,
        samples: Vec::new(),
    };
    // Emptied after each measurement, removed at the end: see `empty_dir`.
    let mut used = Vec::new();
    for round in 0..args.rounds {
        let first = round % contenders.len().max(1);
        for place in &places {
            let (last, next) = contenders.split_at_mut(first);
            for measured in next.iter_mut().chain(last) {
                if !measured.contender.runs_in(place.name) {
                    continue;
                }
                let dir = tempfile::Builder::new().prefix("pf-bench-").tempdir_in(&place.dir)?;
                let mut meter = Meter { place: place.name, contender: measured.name, round, samples: &mut report.samples };
                measured.contender.round(&place.workload, dir.path(), &mut meter)?;
                empty_dir(dir.path())?;
                used.push(dir);
            }
        }
        // After each round, so that an interrupted run keeps its results.
        report.rounds = round + 1;
        if let Some(path) = &args.json {
            report.write(path)?;
        }
    }
    drop(used);
    Ok(report)
}

impl Common {
    fn connections(&self) -> usize {
        self.connections.unwrap_or(2 * cores())
    }

    fn wants(&self, place: &str) -> bool {
        self.places.is_empty() || self.places.iter().any(|wanted| wanted == place)
    }
}

fn places(args: &Common, workload: Workload) -> Result<Vec<Place>> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let mut places = Vec::new();
    if args.wants("tmpfs") && has_room(&args.tmpfs, &workload) {
        let copy = tempfile::Builder::new().prefix("pf-bench-").tempdir_in(&args.tmpfs)?;
        let copied = workload.copy_to(copy.path())?;
        places.push(Place { name: "tmpfs", dir: args.tmpfs.clone(), workload: copied, _copy: Some(copy) });
    }
    if args.wants("disk") {
        if file_system(&disk) == "tmpfs" {
            return Err(format!("{} is in memory: name a directory on disk with --dir", disk.display()).into());
        }
        places.insert(0, Place { name: "disk", dir: disk, workload, _copy: None });
    }
    Ok(places)
}

/// Whether `dir` is in memory and has room for the workload, a registry and a pulled copy.
fn has_room(dir: &Path, workload: &Workload) -> bool {
    let room = rustix::fs::statvfs(dir).map_or(0, |s| s.f_bavail * s.f_frsize);
    file_system(dir) == "tmpfs" && room > 5 * workload.base.bytes()
}
