//! The real binaries as child processes.

use crate::{binary, own_address, wait_for};
use serde_json::Value;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// A running `pf-registry`, killed when dropped.
pub struct Registry {
    child: Child,
    data: PathBuf,
    address: String,
    log: PathBuf,
    launch: Launch,
    _dir: Option<TempDir>,
}

/// How a registry is started, again too.
#[derive(Clone)]
struct Launch {
    /// Whether it is given a data directory.
    data: bool,
    options: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Registry {
    /// A registry over an empty directory of its own.
    #[must_use]
    pub fn start() -> Self {
        let dir = TempDir::new().unwrap();
        let mut registry = Self::over(&dir.path().join("data"), &[]);
        registry._dir = Some(dir);
        registry
    }

    /// A registry over a directory that outlives it.
    #[must_use]
    pub fn over(data: &Path, options: &[&str]) -> Self {
        let launch = Launch { data: true, options: options.iter().map(|o| (*o).to_owned()).collect(), environment: Vec::new() };
        Self::spawn(data, &format!("{}:0", own_address()), launch)
    }

    /// Likewise, on an address that others were told before.
    #[must_use]
    pub fn at(data: &Path, listen: &str, options: &[&str]) -> Self {
        let launch = Launch { data: true, options: options.iter().map(|o| (*o).to_owned()).collect(), environment: Vec::new() };
        Self::spawn(data, listen, launch)
    }

    /// A registry over an empty directory of its own, or over none (`data` is false), with more
    /// options and variables.
    #[must_use]
    pub fn start_with(data: bool, options: &[&str], environment: &[(String, String)]) -> Self {
        let dir = TempDir::new().unwrap();
        let launch = Launch { data, options: options.iter().map(|o| (*o).to_owned()).collect(), environment: environment.to_vec() };
        let mut registry = Self::spawn(&dir.path().join("data"), &format!("{}:0", own_address()), launch);
        registry._dir = Some(dir);
        registry
    }

    fn spawn(data: &Path, listen: &str, launch: Launch) -> Self {
        let parent = data.parent().unwrap();
        std::fs::create_dir_all(parent).unwrap();
        let log = parent.join("registry.log");
        let out = parent.join("registry.out");
        std::fs::write(&out, "").unwrap();
        let append = |path: &Path| std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        let mut child = Command::new(binary("pf-registry"))
            .args(["serve", "--listen", listen])
            .args(launch.data.then_some([Path::new("--data"), data]).into_iter().flatten())
            .args(&launch.options)
            .envs(launch.environment.iter().map(|(name, value)| (name, value)))
            .stdout(append(&out))
            .stderr(append(&log))
            .spawn()
            .unwrap();
        let address = wait_for("the registry to listen", 60, || {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("the registry ended with {status}:\n{}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            let text = std::fs::read_to_string(&out).unwrap();
            let line = text.lines().find_map(|l| l.strip_prefix("listening on http")?.trim_start_matches('s').strip_prefix("://"))?;
            text.ends_with('\n').then(|| line.to_owned())
        });
        Self { child, data: data.to_owned(), address, log, launch, _dir: None }
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Base URL, of a registry without TLS.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Its data directory.
    #[must_use]
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Kills it as a power cut would, as far as a process can be.
    pub fn kill(&mut self) {
        drop(self.child.kill());
        self.child.wait().unwrap();
    }

    /// Starts it again over the same data, on the same port, with the same options.
    pub fn restart(&mut self) {
        self.kill();
        let mut again = Self::spawn(&self.data, &self.address, self.launch.clone());
        // The old one, now dropped, holds a process that has ended and no directory.
        again._dir = self._dir.take();
        *self = again;
    }

    /// Bytes of memory it has held at most, from the operating system.
    #[must_use]
    pub fn peak_memory(&self) -> u64 {
        peak_memory(self.child.id())
    }

    /// The value of a metric without labels.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        let text = http_get(&self.address, "/metrics");
        let line = text
            .lines()
            .find(|l| l.starts_with(name) && l[name.len()..].starts_with(' '))
            .unwrap_or_else(|| panic!("no metric {name} in\n{text}"));
        line.rsplit(' ').next().unwrap().trim().parse().unwrap()
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The answer to a GET: head and body.
    #[must_use]
    pub fn get(&self, path: &str) -> String {
        http_get(&self.address, path)
    }

    /// The answer to a request without a body; empty if the registry ended meanwhile.
    #[must_use]
    pub fn ask(&self, method: &str, path: &str) -> String {
        ask(&self.address, method, path)
    }

    /// All metrics, as scraped.
    #[must_use]
    pub fn metrics(&self) -> String {
        http_get(&self.address, "/metrics")
    }

    /// What it has logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(6).collect();
            eprintln!("--- end of the registry's log\n{}", tail.into_iter().rev().collect::<Vec<_>>().join("\n"));
        }
    }
}

fn http_get(address: &str, path: &str) -> String {
    request(address, "GET", path).unwrap()
}

/// The answer of a registry to a request without a body; empty if it ended meanwhile.
#[must_use]
pub fn ask(address: &str, method: &str, path: &str) -> String {
    request(address, method, path).unwrap_or_default()
}

fn request(address: &str, method: &str, path: &str) -> std::io::Result<String> {
    use std::io::Write as _;
    let mut stream = std::net::TcpStream::connect(address)?;
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

/// Peak resident bytes of a live process.
#[must_use]
pub fn peak_memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// The result of a command.
#[derive(Debug)]
pub struct Output {
    /// Exit code; −1 if it was killed.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Peak resident bytes, as far as polling saw them.
    pub peak_memory: u64,
}

impl Output {
    /// Standard output as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// A number of the JSON object.
    #[must_use]
    pub fn number(&self, field: &str) -> u64 {
        self.json()[field].as_u64().unwrap_or_else(|| panic!("no {field} in {self:?}"))
    }

    /// Panics unless it succeeded.
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// The last line of standard output.
    #[must_use]
    pub fn last_line(&self) -> &str {
        self.stdout.lines().last().unwrap_or_default()
    }
}

/// A host: its own home and local store, and a registry to talk to.
pub struct Pf {
    dir: TempDir,
    registry: String,
}

impl Pf {
    /// A fresh host.
    #[must_use]
    pub fn new(registry: &str) -> Self {
        Self { dir: TempDir::new().unwrap(), registry: registry.to_owned() }
    }

    /// A folder of this host's.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The registry it talks to.
    #[must_use]
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Talks to another registry (a proxy, say) from now on.
    pub fn talk_to(&mut self, registry: &str) {
        self.registry = registry.to_owned();
    }

    /// The command, not yet started.
    #[must_use]
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary("pf"));
        command
            .args(arguments)
            .env_clear()
            .env("HOME", self.dir.path())
            .env("PF_STORE", self.path("store"))
            // A registry that never comes back must not delay a test by two minutes.
            .env("PF_RETRY_FOR", "20")
            .env("PF_REGISTRY", &self.registry)
            .env("PF_AGENT_SOCKET", self.path("agent.sock"))
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs it to the end.
    #[must_use]
    pub fn run(&self, arguments: &[&str]) -> Output {
        let mut child = self.command(arguments).spawn().unwrap();
        fn read(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<String> {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                drop(pipe.read_to_end(&mut bytes));
                String::from_utf8_lossy(&bytes).into_owned()
            })
        }
        let (stdout, stderr) = (read(child.stdout.take().unwrap()), read(child.stderr.take().unwrap()));
        let mut peak = 0;
        let status = wait_for("pf to end", 600, || {
            peak = peak.max(peak_memory(child.id()));
            child.try_wait().unwrap()
        });
        Output { code: status.code().unwrap_or(-1), stdout: stdout.join().unwrap(), stderr: stderr.join().unwrap(), peak_memory: peak }
    }

    /// Runs it with `--json` at the end.
    #[must_use]
    pub fn json(&self, arguments: &[&str]) -> Value {
        let mut all = arguments.to_vec();
        all.push("--json");
        self.run(&all).ok().json()
    }

    /// Digest of each tag of a repository; empty if there is none.
    #[must_use]
    pub fn tags(&self, repository: &str) -> std::collections::BTreeMap<String, String> {
        let output = self.run(&["ls", repository, "--json"]);
        if output.code == 5 {
            return Default::default();
        }
        let value = output.ok().json();
        let mut tags = std::collections::BTreeMap::new();
        for snapshot in find_array(&value, "snapshots") {
            for tag in snapshot["tags"].as_array().unwrap() {
                tags.insert(tag.as_str().unwrap().to_owned(), snapshot["digest"].as_str().unwrap().to_owned());
            }
        }
        tags
    }

    /// What every client can see of the registry: snapshots with their tags, parents and sizes.
    #[must_use]
    pub fn visible(&self) -> Value {
        let mut snapshots = self.json(&["stats"])["snapshots"].clone();
        for snapshot in snapshots.as_array_mut().unwrap() {
            // The bytes that a deletion would free depend on leased uploads of other clients, which
            // are not visible.
            snapshot.as_object_mut().unwrap().retain(|field, _| !matches!(field.as_str(), "exclusive_bytes" | "shared_bytes"));
        }
        snapshots
    }
}

fn find_array(value: &Value, name: &str) -> Vec<Value> {
    value[name].as_array().cloned().unwrap_or_default()
}
