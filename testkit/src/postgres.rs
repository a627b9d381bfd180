//! PostgreSQL clusters: a data directory of their own, one port on loopback, no passwords.
//!
//! A cluster takes about two seconds to make, so a run of many tests shares one:
//! `pf-rig run -- COMMAND` puts its URL into [`VARIABLE`], and [`database`] makes a fresh database
//! in it. Tests that kill or restart the server start their own.

use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The variable with the URL of a database of the cluster that the test run shares.
pub const VARIABLE: &str = "PF_TEST_POSTGRES";
/// How long a server may take to start or stop. A busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Which failures the data survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// As in production: commits survive a kill and would survive a power cut.
    Real,
    /// No fsync: commits survive a kill of the server, not of the machine. Several times faster.
    Fast,
}

/// A cluster for one test. It is removed when it is dropped, or when this process ends for any
/// reason.
#[derive(Debug)]
pub struct Cluster {
    /// The process that stops the server and removes the directory when this process ends: see
    /// [`reaper`].
    reaper: Option<(Child, ChildStdin)>,
    server: Child,
    dir: PathBuf,
    bin: PathBuf,
    port: u16,
    durability: Durability,
}

impl Cluster {
    /// A new cluster, running, as in production.
    #[must_use]
    pub fn start() -> Self {
        Self::start_with(Durability::Real)
    }

    /// A new cluster, running.
    #[must_use]
    pub fn start_with(durability: Durability) -> Self {
        let bin = binaries();
        let dir = TempDir::with_prefix("pf-postgres-").unwrap();
        if is_root() {
            let (user, group) = nobody();
            chown(dir.path(), Some(user), Some(group)).unwrap();
        }
        // From here on, the reaper removes it.
        let dir = dir.keep();
        let reaper = reaper(&dir);
        let mut init = unprivileged(&bin.join("initdb"));
        init.args(["--auth=trust", "--encoding=UTF8", "--locale=C", "--username=postgres", "--pgdata"]).arg(dir.join("data"));
        if durability == Durability::Fast {
            init.arg("--no-sync");
        }
        let made = init.current_dir(&dir).stdin(Stdio::null()).output().unwrap();
        assert!(
            made.status.success(),
            "initdb failed:\n{}{}",
            String::from_utf8_lossy(&made.stdout),
            String::from_utf8_lossy(&made.stderr)
        );
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let server = spawn(&bin, &dir, port, durability);
            let mut cluster = Self { reaper: None, server, dir: dir.clone(), bin: bin.clone(), port, durability };
            // If another process took the port in between, the server ends at once.
            if cluster.wait_until_ready() {
                cluster.reaper = Some(reaper);
                return cluster;
            }
        }
        panic!("PostgreSQL does not start:\n{}", std::fs::read_to_string(dir.join("log")).unwrap_or_default());
    }

    /// URL of a database of the cluster.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// URL of a new, empty database.
    #[must_use]
    pub fn create_database(&self) -> String {
        create_database(&self.bin, &self.url("postgres"))
    }

    /// Runs one statement as the superuser; returns what `psql -At` prints.
    #[must_use]
    pub fn sql(&self, url: &str, statement: &str) -> String {
        psql(&self.bin, url, &[statement])
    }

    /// Stops the server as an operator does (it ends sessions and rolls transactions back) and
    /// starts it again on the same port.
    pub fn restart(&mut self) {
        self.stop(Signal::INT);
        self.start_again();
    }

    /// Kills every process of the server, as a crash would.
    pub fn kill9(&mut self) {
        // Children first: they would otherwise outlive the postmaster for a moment and hold the
        // data directory.
        let children = format!("/proc/{0}/task/{0}/children", self.server.id());
        let children = std::fs::read_to_string(children).unwrap_or_default();
        drop(self.server.kill());
        children
            .split_whitespace()
            .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
            .for_each(|pid| kill_process(pid, Signal::KILL).unwrap_or(()));
        self.server.wait().unwrap();
        drop(std::fs::remove_file(self.dir.join("data/postmaster.pid")));
    }

    /// Starts it again after [`Self::kill9`], on the same port.
    pub fn start_again(&mut self) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.server = spawn(&self.bin, &self.dir, self.port, self.durability);
            if self.wait_until_ready() {
                return;
            }
            assert!(Instant::now() < deadline, "PostgreSQL does not start again:\n{}", self.log());
        }
    }

    /// What the server has logged.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.join("log")).unwrap_or_default()
    }

    fn stop(&mut self, signal: Signal) {
        // It may have ended already.
        kill_process(Pid::from_child(&self.server), signal).unwrap_or(());
        let deadline = Instant::now() + TIMEOUT;
        while self.server.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                drop(self.server.kill());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it answers; false if it ended.
    fn wait_until_ready(&mut self) -> bool {
        let deadline = Instant::now() + TIMEOUT;
        while self.server.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "PostgreSQL does not answer:\n{}", self.log());
            let mut ask = Command::new(self.bin.join("pg_isready"));
            ask.args(["--quiet", "--host=127.0.0.1", "--username=postgres", "--dbname=postgres"]).arg(format!("--port={}", self.port));
            // Another process may hold the port: ours has a lock file that says it is ready.
            let ours = std::fs::read_to_string(self.dir.join("data/postmaster.pid"))
                .is_ok_and(|file| file.lines().nth(7).is_some_and(|l| l.trim() == "ready"));
            if ours && ask.status().unwrap().success() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop(Signal::QUIT);
        if let Some((mut shell, pipe)) = self.reaper.take() {
            drop(pipe);
            drop(shell.wait());
        }
    }
}

/// URL of a fresh database: in the run's cluster if there is one, else in one that this process
/// starts on first use.
#[must_use]
pub fn database() -> String {
    static OWN: OnceLock<Cluster> = OnceLock::new();
    match std::env::var(VARIABLE) {
        Ok(url) => create_database(&binaries(), &url),
        Err(_) => OWN.get_or_init(|| Cluster::start_with(Durability::Fast)).create_database(),
    }
}

fn create_database(bin: &Path, url: &str) -> String {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("pf_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    // A process of another machine or of an earlier run may have had our process id.
    let statements = [format!("DROP DATABASE IF EXISTS {name}"), format!("CREATE DATABASE {name} TEMPLATE template0")];
    drop(psql(bin, url, &statements.each_ref().map(String::as_str)));
    let (server, parameters) = url.split_once('?').map_or((url, ""), |(server, parameters)| (server, parameters));
    let server = server.rsplit_once('/').map_or(server, |(server, _)| server);
    if parameters.is_empty() { format!("{server}/{name}") } else { format!("{server}/{name}?{parameters}") }
}

/// Runs statements, each in its own transaction; returns what `psql -At` prints.
fn psql(bin: &Path, url: &str, statements: &[&str]) -> String {
    let run = Command::new(bin.join("psql"))
        .args(["--no-psqlrc", "--quiet", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1"])
        .args(statements.iter().flat_map(|statement| ["--command", statement]))
        .arg(url)
        .env("PGOPTIONS", "-c client_min_messages=warning")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(run.status.success(), "{statements:?}: {}", String::from_utf8_lossy(&run.stderr));
    String::from_utf8_lossy(&run.stdout).trim_end().to_owned()
}

fn spawn(bin: &Path, dir: &Path, port: u16, durability: Durability) -> Child {
    let log = File::options().create(true).append(true).open(dir.join("log")).unwrap();
    let mut command = unprivileged(&bin.join("postgres"));
    command.arg("-D").arg(dir.join("data")).args(["-c", "listen_addresses=127.0.0.1", "-c", &format!("port={port}")]);
    command.args(["-c", &format!("unix_socket_directories={}", dir.display()), "-c", "max_connections=300", "-c", "shared_buffers=256MB"]);
    command.args(["-c", "max_wal_size=256MB", "-c", "log_min_messages=warning"]);
    if durability == Durability::Fast {
        // Whole pages are still logged: a kill may come in the middle of writing one.
        command.args(["-c", "fsync=off"]);
        // Each test has a database, and by default one of them is looked at every few milliseconds.
        command.args(["-c", "autovacuum_naptime=10min"]);
    }
    // A process group of its own, so that Ctrl-C at the terminal goes to this process only.
    command.current_dir(dir).process_group(0).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
}

/// A shell that waits until our end of a pipe is closed, which happens whenever this process ends.
/// Then it stops the server and removes the directory.
fn reaper(dir: &Path) -> (Child, ChildStdin) {
    let script = r#"
        trap '' INT TERM HUP
        cat >/dev/null
        pid=$(head -n 1 "$0/data/postmaster.pid" 2>/dev/null) && kill -QUIT "$pid" 2>/dev/null
        tries=0
        while [ -f "$0/data/postmaster.pid" ] && kill -0 "$pid" 2>/dev/null && [ $tries -lt 100 ]; do sleep 0.05; tries=$((tries + 1)); done
        rm -rf "$0"
    "#;
    let mut shell = Command::new("sh")
        .arg("-c")
        .arg(script)
        .arg(dir)
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pipe = shell.stdin.take().unwrap();
    (shell, pipe)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// User and group of `nobody`: PostgreSQL refuses to run as root.
fn nobody() -> (u32, u32) {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let line = users.lines().find(|line| line.starts_with("nobody:")).unwrap_or("nobody:x:65534:65534");
    let mut numbers = line.split(':').skip(2).map(|n| n.parse().expect("a number"));
    (numbers.next().expect("a user id"), numbers.next().expect("a group id"))
}

fn unprivileged(program: &Path) -> Command {
    let mut command = Command::new(program);
    if is_root() {
        let (user, group) = nobody();
        command.uid(user).gid(group);
    }
    command
}

/// The folder of the server's programs.
fn binaries() -> PathBuf {
    let complete = |dir: &Path| ["initdb", "postgres", "psql", "pg_isready"].iter().all(|name| dir.join(name).exists());
    let mut places: Vec<PathBuf> =
        std::fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|e| e.path().join("bin")).collect();
    // The newest first.
    places.sort_by_key(|path| std::cmp::Reverse(path.parent().and_then(|p| p.file_name()?.to_str()?.parse::<u32>().ok())));
    places.extend(std::env::var_os("PATH").iter().flat_map(std::env::split_paths));
    // A script on Debian, which takes longer than a statement: asked only where nothing else helps.
    let asked = || {
        let asked = Command::new("pg_config").arg("--bindir").output().ok().filter(|o| o.status.success())?;
        Some(PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim())).filter(|dir| complete(dir))
    };
    places.into_iter().find(|dir| complete(dir)).or_else(asked).unwrap_or_else(|| {
        panic!("no PostgreSQL server is installed (initdb, postgres, psql, pg_isready in PATH, /usr/lib/postgresql/*/bin or `pg_config --bindir`). On Debian: apt-get install postgresql")
    })
}

/// Empties every table of a database but `kept`; row ids begin again. A tenth of what a fresh
/// database costs.
pub fn empty(url: &str, kept: &str) {
    let statement = format!(
        "DO $$ BEGIN EXECUTE (SELECT 'TRUNCATE ' || string_agg(quote_ident(tablename), ', ') || ' RESTART IDENTITY CASCADE'
         FROM pg_tables WHERE schemaname = 'public' AND tablename <> '{kept}'); END $$"
    );
    drop(psql(&binaries(), url, &[&statement]));
}

/// Runs one statement; returns what `psql -At` prints.
#[must_use]
pub fn sql(url: &str, statement: &str) -> String {
    psql(&binaries(), url, &[statement])
}

/// Ends every session of a database, whatever it is doing.
pub fn cut_connections(url: &str) {
    let statement = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    drop(psql(&binaries(), url, &[statement]));
}
