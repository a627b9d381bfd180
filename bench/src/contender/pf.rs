//! `pf` and `pf-registry`, as processes on loopback, as a user runs them: once for each setting of
//! `--compression`, and once with an encrypted domain. What an agent does is done in this process.

mod memory;

use super::{Contender, Found, Programs};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::usage::{Server, run};
use crate::workload::{Workload, empty_dir, warm_dir};
use memory::Host;
use pfr_schema::codec::Compression;
use serde::Deserialize;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The two programs.
struct Pf {
    /// The client.
    pf: PathBuf,
    /// The registry.
    registry: PathBuf,
    /// How the client encodes what it pushes.
    compression: Compression,
    /// Whether the registry encrypts what it writes.
    encrypts: bool,
}

/// With `--compression off`.
pub fn off(programs: &Programs) -> Found {
    find(programs, Compression::Off, false)
}

/// With `--compression off`, into a domain that is encrypted: beside [`off`] this is the price of
/// encryption.
pub fn encrypted(programs: &Programs) -> Found {
    find(programs, Compression::Off, true)
}

/// With `--compression hot`.
pub fn hot(programs: &Programs) -> Found {
    find(programs, Compression::Hot, false)
}

/// With `--compression cold`.
pub fn cold(programs: &Programs) -> Found {
    find(programs, Compression::Cold, false)
}

/// Finds both programs.
fn find(programs: &Programs, compression: Compression, encrypts: bool) -> Found {
    let Programs { pf, pf_registry: registry, .. } = programs.clone();
    if let Some(program) = [&pf, &registry].into_iter().find(|program| !program.is_file()) {
        return Err(format!("{} is not there: cargo build --release --workspace --bins", program.display()));
    }
    Ok(Box::new(Pf { pf, registry, compression, encrypts }))
}

/// The fields that are read from `--json` of a push or a pull.
#[derive(Deserialize)]
struct Report {
    #[serde(rename = "sent_bytes", alias = "received_bytes")]
    moved_bytes: u64,
    round_trips: u64,
}

/// The field that is read from `stats --json`.
#[derive(Deserialize)]
struct Stats {
    stored_bytes: u64,
}

/// Starts the registry `program` with `arguments` on a free port. Returns it with its base URL.
pub fn serve(program: &Path, arguments: &[&OsStr]) -> Result<(Server, String)> {
    let mut child = Command::new(program)
        .args(["serve", "--listen", "127.0.0.1:0", "--log", "warn"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|e| format!("{}: {e}; build it with `cargo build --release -p pfr-registry`", program.display()))?;
    let stdout = child.stdout.take().ok_or("no stdout")?;
    let server = Server::new(child);
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    let url = line.trim().rsplit(' ').next().filter(|url| url.starts_with("http://")).ok_or("pf-registry did not start")?;
    Ok((server, url.to_owned()))
}

/// The client `program` without its arguments, with a home and a local store of its own.
pub fn client(program: &Path, url: &str, home: &Path, store: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("HOME", home).env_remove("XDG_CONFIG_HOME").env_remove("XDG_DATA_HOME").env_remove("PF_TOKEN");
    command.args(["--quiet", "--registry", url, "--store"]).arg(store);
    command
}

/// A key file: 32 bytes as base64, for its owner only. It protects nothing here.
fn write_key(path: &Path) -> Result<()> {
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(writeln!(file, "{}=", "A".repeat(43))?)
}

impl Pf {
    fn client(&self, url: &str, home: &Path, store: &Path) -> Command {
        let mut command = client(&self.pf, url, home, store);
        command.arg("--json").env("PF_COMPRESSION", self.compression.name());
        command
    }
}

impl Contender for Pf {
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (data, key) = (dir.join("registry"), dir.join("domains.key"));
        let mut arguments: Vec<&OsStr> = vec!["--data".as_ref(), data.as_os_str()];
        if self.encrypts {
            write_key(&key)?;
            arguments.extend(["--encrypt-new-domains".as_ref(), "--key-file".as_ref(), key.as_os_str()]);
        }
        let (server, url) = serve(&self.registry, &arguments)?;
        let servers = [server.pid()];
        let raw = workload.base.bytes();
        let step = |meter: &mut Meter<'_>, step: Step, store: &str, args: &[&OsStr]| {
            let mut command = self.client(&url, dir, &dir.join(store));
            command.args(args);
            meter.measure(step, raw, dir, &servers, || {
                let ran = run(&mut command)?;
                let report: Report = serde_json::from_slice(&ran.stdout)?;
                Ok(Reported {
                    bytes_moved: Some(report.moved_bytes),
                    round_trips: Some(report.round_trips),
                    client_memory: Some(ran.peak_memory),
                })
            })
        };
        let (base, fork) = (workload.base.dir.as_os_str(), workload.fork.dir.as_os_str());
        workload.base.warm()?;
        step(meter, Step::Push, "unused", &["push".as_ref(), base, "bench/w:base".as_ref()])?;
        let stats = run(self.client(&url, dir, &dir.join("unused")).arg("stats"))?;
        let Stats { stored_bytes } = serde_json::from_slice(&stats.stdout)?;
        meter.stored(stored_bytes);
        warm_dir(&data)?;
        step(meter, Step::PullStore, "store", &["pull".as_ref(), "bench/w:base".as_ref()])?;
        empty_dir(&dir.join("store"))?;
        step(meter, Step::PullDir, "unused", &["pull".as_ref(), "bench/w:base".as_ref(), dir.join("pulled").as_os_str()])?;
        empty_dir(&dir.join("pulled"))?;
        let mut host = Host::open(&dir.join("host"))?;
        meter.measure(Step::GetVerified, raw, dir, &servers, || host.get(&url, "bench/w:base", &workload.base.blobs))?;
        workload.base.warm()?;
        step(meter, Step::PushFork, "unused", &["push".as_ref(), fork, "bench/w:fork".as_ref()])?;
        step(meter, Step::Repush, "unused", &["push".as_ref(), base, "bench/w:base".as_ref()])
    }
}
