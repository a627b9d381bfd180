//! Runs the contenders in turn: in each round, each of them once in each place, in rotated order. A
//! change on the machine during the run then affects all of them.

use crate::Result;
use crate::contender::docker::{Docker, INSTALL};
use crate::contender::floor::Floor;
use crate::contender::pf::Pf;
use crate::contender::{Contender, sibling};
use crate::floor::Plan;
use crate::machine::{describe, file_system};
use crate::meter::Meter;
use crate::report::{Report, table};
use crate::workload::{Workload, empty_dir};
use pfr_schema::codec::Compression;
use std::path::{Path, PathBuf};

/// Arguments of `run`.
#[derive(clap::Args)]
pub struct Args {
    /// Pages of the workload: 360,448 bytes each
    #[arg(long, default_value_t = 4096)]
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
    /// Only these contenders: floor, write-only, pf (pf-hot, pf-cold and pf-off), docker-registry
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these places: disk, tmpfs
    #[arg(long, value_delimiter = ',')]
    places: Vec<String>,
    /// Write the samples as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Date to write into the JSON
    #[arg(long)]
    date: Option<String>,
    /// The client [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pf: Option<PathBuf>,
    /// The registry [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pf_registry: Option<PathBuf>,
}

/// A directory to work in, and the workload on the same file system.
struct Place {
    name: &'static str,
    dir: PathBuf,
    workload: Workload,
    _copy: Option<tempfile::TempDir>,
}

/// Measures and reports.
pub fn run(args: &Args) -> Result<()> {
    let workload = Workload::prepare(args.pages, &sibling("pf-kv")?)?;
    let places = places(args, workload)?;
    let mut docker = Docker::find()?.filter(|_| args.wants("docker-registry"));
    let notes = match (&mut docker, places.first()) {
        (Some(docker), Some(place)) => vec![format!("docker-registry: {}", docker.tune(&place.workload, &place.dir)?)],
        _ if args.wants("docker-registry") => vec![INSTALL.to_owned()],
        _ => Vec::new(),
    };
    let mut report = Report {
        date: args.date.clone(),
        machine: describe(&places.iter().map(|place| (place.name, place.dir.as_path())).collect::<Vec<_>>()),
        pages: args.pages,
        rounds: 0,
        notes,
        samples: Vec::new(),
    };
    // Emptied after each measurement, removed at the end: see `empty_dir`.
    let mut used = Vec::new();
    for round in 0..args.rounds {
        for place in &places {
            let mut contenders: Vec<Box<dyn Contender + '_>> = Vec::new();
            let direct = place.name == "disk";
            for hash in [true, false] {
                contenders.push(Box::new(Floor { plan: Plan { hash, ..Plan::on(direct) } }));
            }
            let program = |given: &Option<PathBuf>, name| given.clone().map_or_else(|| sibling(name), Ok);
            for compression in Compression::ALL {
                let (pf, registry) = (program(&args.pf, "pf")?, program(&args.pf_registry, "pf-registry")?);
                contenders.push(Box::new(Pf { pf, registry, compression }));
            }
            if let Some(docker) = &mut docker {
                contenders.push(Box::new(Borrowed(docker)));
            }
            contenders.retain(|contender| args.wants(contender.name()));
            let first = round % contenders.len().max(1);
            contenders.rotate_left(first);
            for contender in &mut contenders {
                let dir = tempfile::Builder::new().prefix("pf-bench-").tempdir_in(&place.dir)?;
                let mut meter = Meter { place: place.name, contender: contender.name(), round, samples: &mut report.samples };
                contender.round(&place.workload, dir.path(), &mut meter)?;
                empty_dir(dir.path())?;
                used.push(dir);
            }
        }
        // After each round, so that an interrupted run keeps its results.
        report.rounds = round + 1;
        args.save(&report)?;
    }
    drop(used);
    println!("{}", table::render(&report));
    Ok(())
}

impl Args {
    fn save(&self, report: &Report) -> Result<()> {
        if let Some(path) = &self.json {
            report.write(path)?;
        }
        Ok(())
    }

    fn wants(&self, contender: &str) -> bool {
        let is_meant = |name: &String| name == contender || (name == "pf" && contender.starts_with("pf-"));
        self.only.is_empty() || self.only.iter().any(is_meant)
    }
}

fn places(args: &Args, workload: Workload) -> Result<Vec<Place>> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let mut places = Vec::new();
    let wants = |name: &str| args.places.is_empty() || args.places.iter().any(|place| place == name);
    if wants("tmpfs") && has_room(&args.tmpfs, &workload) {
        let copy = tempfile::Builder::new().prefix("pf-bench-").tempdir_in(&args.tmpfs)?;
        let copied = workload.copy_to(copy.path())?;
        places.push(Place { name: "tmpfs", dir: args.tmpfs.clone(), workload: copied, _copy: Some(copy) });
    }
    if wants("disk") {
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

/// Lends a contender that outlives the round.
struct Borrowed<'a>(&'a mut Docker);

impl Contender for Borrowed<'_> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        self.0.round(workload, dir, meter)
    }
}
