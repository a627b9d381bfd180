//! Reads from `/proc` how much processor time and memory processes use, and how busy the whole
//! machine is. The usage of a server includes that of all processes that it started. Also finds,
//! runs and starts programs.

use crate::Result;
use std::collections::HashSet;
use std::io::Read as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest time until a server accepts connections.
const START: Duration = Duration::from_secs(60);
/// Longest time that a server may take to end by itself.
const END: Duration = Duration::from_secs(20);
/// Longest time that a client command may take.
const LONGEST: Duration = Duration::from_secs(3600);
/// Time between two looks at a client command that runs alone, and at one beside many.
const OFTEN: Duration = Duration::from_millis(5);
const RARELY: Duration = Duration::from_secs(1);

/// Processor time, in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// Used by this process, its children that have ended, and the servers.
    pub ours: f64,
    /// Used by all processes of the machine.
    pub all: f64,
}

/// Counts processor time. The time that counting itself takes is left out: it reads a few hundred
/// files.
pub struct Watch<'a> {
    servers: &'a [u32],
    theirs: f64,
    own: f64,
    all: f64,
}

impl<'a> Watch<'a> {
    /// Counts from now on.
    pub fn start(servers: &'a [u32]) -> Self {
        let theirs = of_trees(servers);
        Self { servers, theirs, all: of_all(), own: of_self() }
    }

    /// The processor time that was used since `start`.
    pub fn stop(self) -> Processor {
        let (own, all) = (of_self() - self.own, of_all() - self.all);
        Processor { ours: own + of_trees(self.servers) - self.theirs, all }
    }
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / rustix::param::clock_ticks_per_second() as f64
}

fn of_self() -> f64 {
    Process::read(Path::new("/proc/self")).map_or(0.0, |process| seconds(process.ticks))
}

fn of_all() -> f64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let cpu: Vec<u64> = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).filter_map(|w| w.parse().ok()).collect();
    // The fields are user, nice, system, (idle, iowait,) irq, softirq, steal.
    seconds([0, 1, 2, 5, 6, 7].iter().filter_map(|i| cpu.get(*i)).sum())
}

fn of_trees(roots: &[u32]) -> f64 {
    seconds(trees(roots).iter().map(|process| process.ticks).sum())
}

/// A line of `/proc/PID/stat`.
struct Process {
    pid: u32,
    parent: u32,
    /// Processor time of the process and of its children that have ended.
    ticks: u64,
}

impl Process {
    fn read(dir: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(dir.join("stat")).ok()?;
        // The name of the program is in parentheses and may hold blanks. So the fields after it are
        // counted.
        let (head, rest) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        Some(Self {
            pid: head.split(' ').next()?.parse().ok()?,
            parent: u32::try_from(number(4)?).ok()?,
            ticks: number(14)? + number(15)? + number(16)? + number(17)?,
        })
    }
}

/// These processes, and all that they have started.
fn trees(roots: &[u32]) -> Vec<Process> {
    if roots.is_empty() {
        return Vec::new();
    }
    let is_process = |path: &PathBuf| path.file_name().is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit());
    let dirs = std::fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path()).filter(is_process);
    let mut all: Vec<Process> = dirs.filter_map(|dir| Process::read(&dir)).collect();
    let mut found: HashSet<u32> = roots.iter().copied().collect();
    // A child may have a smaller process id than its parent, because ids start again from the
    // beginning.
    loop {
        let before = found.len();
        found.extend(all.iter().filter(|process| found.contains(&process.parent)).map(|process| process.pid).collect::<Vec<_>>());
        if found.len() == before {
            break;
        }
    }
    all.retain(|process| found.contains(&process.pid));
    all
}

/// Peak resident memory of a running process, bytes.
fn peak_memory_of(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

/// Peak resident memory of a running process and of all that it started, bytes.
pub fn peak_memory(pid: u32) -> Option<u64> {
    trees(&[pid]).iter().filter_map(|process| peak_memory_of(process.pid)).reduce(|sum, own| sum + own)
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The output of a client command, and its peak memory.
pub struct Ran {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Peak resident memory, bytes.
    pub peak_memory: u64,
}

/// Runs a command to its end and reads its memory every few milliseconds. Kills it after an hour.
pub fn run(command: &mut Command) -> Result<Ran> {
    watched(command, OFTEN)
}

/// Runs a command, and looks at it so often.
fn watched(command: &mut Command, every: Duration) -> Result<Ran> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (pid, ended, start) = (child.id(), AtomicBool::new(false), Instant::now());
    let process = rustix::process::Pid::from_child(&child);
    let mut stderr = child.stderr.take().ok_or("no stderr")?;
    let (output, peak, errors) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = 0;
            while !ended.load(Ordering::Relaxed) {
                peak = peak_memory_of(pid).unwrap_or(0).max(peak);
                if start.elapsed() > LONGEST {
                    let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
                }
                std::thread::park_timeout(every);
            }
            peak
        });
        let errors = scope.spawn(move || {
            let mut errors = String::new();
            stderr.read_to_string(&mut errors).map(|_| errors).unwrap_or_default()
        });
        let output = child.wait_with_output();
        ended.store(true, Ordering::Relaxed);
        watch.thread().unpark();
        (output, watch.join().unwrap_or(0), errors.join().unwrap_or_default())
    });
    let output = output?;
    succeeded(command, output.status, &errors)?;
    Ok(Ran { stdout: output.stdout, peak_memory: peak })
}

fn succeeded(command: &Command, status: ExitStatus, errors: &str) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    Err(format!("{program} ended with {status}: {}", errors.trim()).into())
}

/// Runs client commands at the same time, each to its end or for an hour. Returns how long each
/// took, in seconds from their common start. They are rarely looked at meanwhile: often, with many,
/// would take too much of the processors.
///
/// # Errors
/// The first that failed, with what it wrote to stderr.
pub fn together(commands: Vec<Command>) -> Result<Vec<f64>> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let run = |mut command: Command| {
            scope.spawn(move || -> Result<f64> {
                watched(&mut command, RARELY)?;
                Ok(start.elapsed().as_secs_f64())
            })
        };
        let threads: Vec<_> = commands.into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().map_err(|_| "a thread panicked")?).collect()
    })
}

/// The path of the first program with one of these names, on the `PATH` or in the folders in which
/// Debian has servers.
pub fn find(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    dirs.flat_map(|dir| names.iter().map(move |name| dir.join(name))).find(|path| path.is_file())
}

/// A server process, which is ended when this is dropped.
pub struct Server(Child);

impl Server {
    /// Ends `child` when the result is dropped.
    pub fn new(child: Child) -> Self {
        Self(child)
    }

    /// Starts a server that writes its output to the file `log`, and waits until it accepts
    /// connections on a port of loopback.
    pub fn start(command: &mut Command, port: u16, log: &Path) -> Result<Self> {
        let name = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let output = std::fs::File::create(log)?;
        let child = command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output).spawn();
        let mut server = Self(child.map_err(|e| format!("{name}: {e}"))?);
        let deadline = Instant::now() + START;
        loop {
            let answers = TcpStream::connect(("127.0.0.1", port)).is_ok();
            // Another process may have taken the port.
            if server.0.try_wait()?.is_some() || (!answers && Instant::now() > deadline) {
                return Err(format!("{name} did not start: {}", tail(log)).into());
            }
            if answers {
                return Ok(server);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The server's process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

/// The last five lines of a log.
pub fn tail(log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let deadline = Instant::now() + END;
        let mut signal = Some(rustix::process::Signal::TERM);
        while let Ok(None) = self.0.try_wait() {
            if let Some(signal) = signal.take() {
                let _ = rustix::process::kill_process(pid, signal);
            }
            if Instant::now() > deadline {
                drop(self.0.kill());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_of_a_server_and_of_its_children_is_counted() {
        // The shell starts a second shell, which computes, and waits for its end.
        let script = "sh -c 'i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done; echo done; read x' ; true";
        let mut child = Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let servers = [child.id()];
        let watch = Watch::start(&servers);
        let mut line = [0; 5];
        child.stdout.take().unwrap().read_exact(&mut line).unwrap();
        let used = watch.stop();
        assert!(used.ours >= 0.02, "{used:?}");
        assert!(peak_memory(servers[0]).unwrap() > peak_memory_of(servers[0]).unwrap());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[test]
    fn commands_run_together_and_one_that_fails_is_an_error_with_its_message() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            command
        };
        // Each waits for the file that the other one makes.
        let dir = tempfile::tempdir().unwrap();
        let pair = |own: &str, other: &str| {
            let mut command = shell(&format!("touch {own}; while [ ! -e {other} ]; do sleep 0.01; done"));
            command.current_dir(dir.path());
            command
        };
        assert_eq!(together(vec![pair("a", "b"), pair("b", "a")]).unwrap().len(), 2);
        let error = together(vec![shell("true"), shell("echo no room >&2; exit 1")]).unwrap_err().to_string();
        assert_eq!(error, "sh ended with exit status: 1: no room");
    }

    #[test]
    fn a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let started = Server::start(Command::new("sh").args(["-c", "echo no room >&2; exit 1"]), 1, &dir.path().join("log"));
        let error = started.err().unwrap().to_string();
        assert_eq!(error, "sh did not start: no room");
    }
}
