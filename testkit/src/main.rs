//! `pf-rig run -- COMMAND…`: runs a command with servers to test against, named in its environment,
//! and tears them down when it ends.

use pfr_testkit::postgres::{self, Cluster, Durability};
use pfr_testkit::run;
use pfr_testkit::s3::{self, Server};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitCode;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str = "usage: pf-rig run -- COMMAND [ARGUMENT…]

Starts PostgreSQL and an S3 server in temporary directories on loopback, names them in PF_TEST_POSTGRES and PF_TEST_S3, runs the
command, stops the servers and ends as the command did.

In the long run (PF_LONG=1) it draws a seed for proptest and prints it, unless PROPTEST_RNG_SEED is set.

Puts the command's temporary files into memory where there is enough of it, so that no test waits for a disk. Not with PF_LONG=1, and
not if TMPDIR is set.";

/// The seed of proptest. `.cargo/config.toml` has that of the normal run.
const PROPTEST_SEED: &str = "PROPTEST_RNG_SEED";
/// Bytes that must be free in memory before temporary files go there.
const ENOUGH: u64 = 6 << 30;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (verb, dashes, program) = (arguments.next(), arguments.next(), arguments.next());
    let (Some(program), true, true) = (program, verb.is_some_and(|v| v == "run"), dashes.is_some_and(|d| d == "--")) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let (cluster, bucket) = (Cluster::start_with(Durability::Fast), Server::start());
    let mut command = Command::new(&program);
    command.args(arguments).env(postgres::VARIABLE, cluster.url("postgres")).env(s3::VARIABLE, bucket.variable());
    let memory = folder_in_memory();
    command.envs(memory.iter().map(|folder| ("TMPDIR", folder.path())));
    if run::long() && std::env::var_os(PROPTEST_SEED).is_none() {
        let seed = run::random();
        eprintln!("{PROPTEST_SEED}={seed}");
        command.env(PROPTEST_SEED, seed.to_string());
    }
    let code = match run_to_end(command).await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("pf-rig: {}: {error}", program.to_string_lossy());
            127
        }
    };
    drop((cluster, bucket, memory));
    ExitCode::from(code)
}

/// A folder in memory for temporary files, if there is enough memory.
fn folder_in_memory() -> Option<TempDir> {
    if run::long() || std::env::var_os("TMPDIR").is_some() {
        return None;
    }
    let (memory, shared) = (std::fs::read_to_string("/proc/meminfo").ok()?, Path::new("/dev/shm"));
    let available =
        memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?.trim().trim_end_matches(" kB").parse::<u64>().ok()?;
    let volume = rustix::fs::statvfs(shared).ok()?;
    // Tests load libraries that they have compiled.
    let executable = !volume.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC);
    let enough = (available << 10).min(volume.f_bavail * volume.f_frsize) >= ENOUGH;
    if executable && enough { tempfile::tempdir_in(shared).ok() } else { None }
}

/// Runs the command to its end. Passes on a signal that asks us to stop, and waits for the command.
async fn run_to_end(mut command: Command) -> std::io::Result<u8> {
    let (mut interrupted, mut terminated) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut child = command.spawn()?;
    let id = child.id().and_then(|id| rustix::process::Pid::from_raw(id.try_into().ok()?));
    let pass_on = |number| {
        if let Some(id) = id {
            // It may have ended already.
            rustix::process::kill_process(id, number).unwrap_or(());
        }
    };
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            _ = interrupted.recv() => pass_on(rustix::process::Signal::INT),
            _ = terminated.recv() => pass_on(rustix::process::Signal::TERM),
        }
    };
    let code = status.code().or_else(|| status.signal().map(|number| 128 + number)).unwrap_or(1);
    Ok(u8::try_from(code).unwrap_or(1))
}
