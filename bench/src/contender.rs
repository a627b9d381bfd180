//! The programs that are measured.

pub mod docker;
pub mod floor;
pub mod http;
mod limit;
mod lmcache;
mod mooncake;
mod nginx;
mod oras;
pub mod pf;
mod python;
mod redis;
mod restic;
mod seaweedfs;

use crate::Result;
use crate::meter::{Meter, Step};
use crate::pack::Lanes;
use crate::workload::Workload;
use std::path::{Path, PathBuf};

/// A program that can store a workload and give it back.
pub trait Contender {
    /// Whether it is measured in this place, `disk` or `tmpfs`.
    fn runs_in(&self, _place: &str) -> bool {
        true
    }

    /// Prepares the first round, in `parent`. Returns a remark for the reader.
    fn prepare(&mut self, _workload: &Workload, _parent: &Path) -> Result<Option<String>> {
        Ok(None)
    }

    /// One round in `dir`, which is empty and goes away afterwards.
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()>;
}

/// A contender that can run, or why it cannot: in words that name the command that installs it.
pub type Found = std::result::Result<Box<dyn Contender>, String>;

/// Where programs are that are not on the `PATH`.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `pf`.
    pub pf: PathBuf,
    /// `pf-registry`.
    pub pf_registry: PathBuf,
    /// A Python that has the packages of peers.
    pub python: PathBuf,
    /// Connections of the limit.
    pub connections: usize,
}

/// A contender's name, and how it is found.
pub struct Entry {
    /// Name in tables and of `--only`.
    pub name: &'static str,
    /// Finds it.
    pub find: fn(&Programs) -> Found,
}

/// All contenders, in the order of the tables.
pub const ALL: [Entry; 16] = [
    Entry { name: "write-only", find: floor::write_only },
    Entry { name: "floor", find: floor::floor },
    Entry { name: "limit", find: limit::four },
    Entry { name: "limit-as-pf", find: limit::as_pf },
    Entry { name: "pf-off", find: pf::off },
    Entry { name: "pf-encrypted", find: pf::encrypted },
    Entry { name: "pf-hot", find: pf::hot },
    Entry { name: "pf-cold", find: pf::cold },
    Entry { name: "docker-registry", find: docker::find },
    Entry { name: "oras", find: oras::find },
    Entry { name: "restic", find: restic::find },
    Entry { name: "seaweedfs", find: seaweedfs::find },
    Entry { name: "nginx", find: nginx::find },
    Entry { name: "redis", find: redis::find },
    Entry { name: "mooncake", find: mooncake::find },
    Entry { name: "lmcache", find: lmcache::find },
];

/// The names of all contenders.
pub fn names() -> [&'static str; ALL.len()] {
    ALL.each_ref().map(|entry| entry.name)
}

/// A program that lies beside this one.
pub fn sibling(name: &str) -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// The program that an argument names, or that lies beside this one.
pub fn program(given: Option<&Path>, name: &str) -> Result<PathBuf> {
    given.map_or_else(|| sibling(name), |path| Ok(path.to_owned()))
}

/// How a cache is read into memory: each step, and how blobs are hashed, if they are.
fn reads() -> impl Iterator<Item = (Step, Option<Lanes>)> {
    let as_pf = Lanes::differ().then_some((Step::GetVerifiedAsPf, Some(Lanes::AsPf)));
    [(Step::Get, None), (Step::GetVerified, Some(Lanes::Four))].into_iter().chain(as_pf)
}

/// A free port on loopback.
fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Says how to install what is missing.
fn install(name: &str, command: &str) -> String {
    format!("{name} is not installed: {command}")
}
