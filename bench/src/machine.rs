//! Describes the machine of a measurement, without names of hosts or paths.

use serde::Serialize;
use std::fmt;
use std::path::Path;

/// A machine, as results describe it.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Model of the processor, as the kernel names it.
    pub cpu: String,
    /// Extensions that matter here.
    pub extensions: Vec<&'static str>,
    /// Cores this process may use.
    pub cores: usize,
    /// Memory, GiB.
    pub memory_gib: u64,
    /// Kernel and architecture.
    pub kernel: String,
    /// File system of each place.
    pub file_systems: Vec<(String, String)>,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}, {}; {:?}", self.cores, self.cpu, self.kernel, self.file_systems)
    }
}

/// Cores this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Describes this machine.
pub fn describe(places: &[(&str, &Path)]) -> Machine {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split_once(':'));
        line.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let flags = field(&info, "flags");
    let extensions = ["sha_ni", "avx2", "avx512f", "sse4_2"].into_iter().filter(|e| flags.split(' ').any(|f| f == *e)).collect();
    let kib: u64 = field(&read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse().unwrap_or(0);
    Machine {
        cpu: format!("{} (family {}, model {})", field(&info, "model name"), field(&info, "cpu family"), field(&info, "model\t")),
        extensions,
        cores: cores(),
        memory_gib: kib.div_ceil(1 << 20),
        kernel: format!("Linux {}, {}", read("/proc/sys/kernel/osrelease").trim(), std::env::consts::ARCH),
        file_systems: places.iter().map(|(name, path)| ((*name).to_owned(), file_system(path))).collect(),
    }
}

/// Type of the file system that holds `path`.
pub fn file_system(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_default();
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mut best = (0, "unknown".to_owned());
    for line in mounts.lines() {
        let mut words = line.split(' ').skip(1);
        if let (Some(at), Some(kind)) = (words.next(), words.next())
            && path.starts_with(at)
            && at.len() >= best.0
        {
            best = (at.len(), kind.to_owned());
        }
    }
    best.1
}
