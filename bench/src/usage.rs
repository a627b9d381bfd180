//! What processes use, read from `/proc`: processor time, peak memory, and how busy the whole
//! machine was.

use crate::Result;
use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Processor seconds: of this process with its children that have ended, of `servers`, and of the
/// whole machine.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// Of this process, its children and `servers`.
    pub ours: f64,
    /// Of all processes.
    pub all: f64,
}

/// Reads the counters.
pub fn processor(servers: &[u32]) -> Processor {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let of = |path: String, fields: &[usize]| -> f64 {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        // The name, in parentheses, may hold blanks: count from what follows it.
        let words: Vec<&str> = text.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        fields.iter().filter_map(|field| words.get(field - 3)?.parse::<f64>().ok()).sum::<f64>() / ticks
    };
    let ours =
        of("/proc/self/stat".into(), &[14, 15, 16, 17]) + servers.iter().map(|pid| of(format!("/proc/{pid}/stat"), &[14, 15])).sum::<f64>();
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let cpu: Vec<f64> = stat.lines().next().unwrap_or_default().split_whitespace().skip(1).filter_map(|w| w.parse().ok()).collect();
    // user, nice, system, and after idle and iowait: irq, softirq, steal.
    let all = [0, 1, 2, 5, 6, 7].iter().filter_map(|i| cpu.get(*i)).sum::<f64>() / ticks;
    Processor { ours, all }
}

/// Peak resident memory of a running process, bytes.
pub fn peak_memory(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

/// The output of a client command, and its peak memory.
pub struct Ran {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Peak resident memory, bytes.
    pub peak_memory: u64,
}

/// Runs a command to its end and reads its memory every few milliseconds.
pub fn run(command: &mut Command) -> Result<Ran> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (pid, ended) = (child.id(), AtomicBool::new(false));
    let mut stderr = child.stderr.take().ok_or("no stderr")?;
    let (output, peak, words) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut peak = 0;
            while !ended.load(Ordering::Relaxed) {
                peak = peak_memory(pid).unwrap_or(0).max(peak);
                std::thread::park_timeout(Duration::from_millis(5));
            }
            peak
        });
        let words = scope.spawn(move || {
            let mut words = String::new();
            stderr.read_to_string(&mut words).map(|_| words).unwrap_or_default()
        });
        let output = child.wait_with_output();
        ended.store(true, Ordering::Relaxed);
        watch.thread().unpark();
        (output, watch.join().unwrap_or(0), words.join().unwrap_or_default())
    });
    let output = output?;
    if !output.status.success() {
        let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        return Err(format!("{program} ended with {}: {}", output.status, words.trim()).into());
    }
    Ok(Ran { stdout: output.stdout, peak_memory: peak })
}

/// A server process, which is ended when this is dropped.
pub struct Server(Child);

impl Server {
    /// Ends `child` when the result is dropped.
    pub fn new(child: Child) -> Self {
        Self(child)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        drop(self.0.wait());
    }
}
