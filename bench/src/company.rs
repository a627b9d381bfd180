//! A registry with many clients at once, all of them processes on loopback: its memory while some
//! push and others ask for statistics, and how they share its throughput while some push and others
//! pull.

mod memory;
mod shares;

use crate::Result;
use crate::contender::{pf, program};
use crate::goals::{self, Fact};
use crate::machine::describe;
use pfr_testkit::directory;
use pfr_testkit::snapshot::Shape;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The sizes that the goals are for.
const CLIENTS: u64 = 16;
const PAGES: u64 = 128;
const ASKING: usize = 4;
const FORKS: u64 = 1000;
const TOKENS: u64 = 380_000;

/// Arguments of `company`.
#[derive(clap::Args)]
pub struct Args {
    /// Clients that push at once, and as many that pull
    #[arg(long, default_value_t = CLIENTS)]
    clients: u64,
    /// Pages that each of them moves: 360,448 bytes each
    #[arg(long, default_value_t = PAGES)]
    pages: u64,
    /// Rounds of pushes beside pulls; the table shows the median
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Clients that ask for statistics without a break
    #[arg(long, default_value_t = ASKING)]
    asking: usize,
    /// Forks of the agent whose statistics they ask for
    #[arg(long, default_value_t = FORKS)]
    forks: u64,
    /// Tokens of this agent: 32 a page
    #[arg(long, default_value_t = TOKENS)]
    tokens: u64,
    /// `pf` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    pf: Option<PathBuf>,
    /// `pf-registry` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    registry: Option<PathBuf>,
    /// Directory to work in [default: the system's temporary directory]
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// The programs, and what is pushed.
pub struct Company {
    pf: PathBuf,
    registry: PathBuf,
    /// A snapshot directory for each client. No two have a page in common, nor with those below.
    snapshots: Vec<PathBuf>,
    /// A snapshot of the same size, for those that pull.
    pulled: PathBuf,
    /// A snapshot that is as large as all of `snapshots` together.
    large: PathBuf,
}

/// Measures, and prints what was found.
pub fn run(args: &Args) -> Result<()> {
    let disk = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let machine = describe(&[("disk", &disk)]);
    println!("{machine}\n");
    let folder = tempfile::tempdir_in(&disk)?;
    let (clients, pages) = (args.clients, args.pages);
    let company = Company {
        pf: program(args.pf.as_deref(), "pf")?,
        registry: program(args.registry.as_deref(), "pf-registry")?,
        snapshots: (0..clients).map(|number| snapshot(folder.path(), number, number * pages, pages)).collect::<Result<_>>()?,
        pulled: snapshot(folder.path(), clients, clients * pages, pages)?,
        large: snapshot(folder.path(), clients + 1, (clients + 1) * pages, clients * pages)?,
    };
    println!("| what | median | min–max |\n|---|---|---|");
    let mut facts = Vec::new();
    let shares = shares::run(&company, args, folder.path())?;
    if clients >= CLIENTS && pages >= PAGES && args.rounds > 0 {
        facts.extend([(Fact::TogetherTotal, shares.total), (Fact::TogetherShare, shares.least)]);
    }
    let peak = memory::run(&company, args, folder.path())?;
    if clients >= CLIENTS && pages >= PAGES && args.asking >= ASKING && args.forks >= FORKS && args.tokens >= TOKENS {
        facts.push((Fact::RegistryMemory, peak));
    }
    if !facts.is_empty() {
        println!("\n{}", goals::render(&goals::of_facts(&facts)));
    }
    Ok(())
}

/// Writes snapshot directory number `number`, with so many pages from page number `first` on.
fn snapshot(folder: &Path, number: u64, first: u64, pages: u64) -> Result<PathBuf> {
    let path = folder.join(format!("snapshot-{number}"));
    std::fs::create_dir_all(&path)?;
    directory::write(&path, "page_manifest.json", Shape::TINYLLAMA, &(first..first + pages).collect::<Vec<_>>());
    Ok(path)
}

impl Company {
    /// A client with a home and a local store of its own.
    fn client(&self, url: &str, home: &Path, arguments: &[&OsStr]) -> Result<Command> {
        std::fs::create_dir_all(home)?;
        let mut command = pf::client(&self.pf, url, home, &home.join("store"));
        command.args(arguments);
        Ok(command)
    }

    /// A client for each snapshot, which pushes it to a repository of its own.
    fn pushes(&self, url: &str, dir: &Path) -> Result<Vec<Command>> {
        let push = |(number, snapshot): (usize, &PathBuf)| {
            let reference = format!("bench/pushed-{number}:latest");
            let arguments: [&OsStr; 3] = ["push".as_ref(), snapshot.as_os_str(), reference.as_ref()];
            self.client(url, &dir.join(format!("pushes-{number}")), &arguments)
        };
        self.snapshots.iter().enumerate().map(push).collect()
    }
}
