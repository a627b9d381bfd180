//! docker-registry (the Debian package, CNCF distribution 2.8) behind a plain HTTP client: a
//! registry of blobs with one blob for each page, and the fastest client that its protocol allows.
//!
//! Push: for each blob HEAD, then POST and PUT if it is not there; then the manifest. The registry
//! does not sync, so a push is not durable when it is acknowledged; the time of a following
//! `syncfs` is recorded besides. Pull: the manifest, then each blob, hashed as it comes and written
//! to a file of its own; then one `syncfs` and a rename of the directory, which is what `pf pull`
//! promises too. Connections are kept alive; their number is found by trial before the run.

mod client;

use super::{Contender, free_port};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::usage::{Server, peak_memory};
use crate::workload::{Snapshot, Workload, warm_dir};
use client::Client;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How to install it.
pub const INSTALL: &str = "docker-registry is not installed: apt-get install docker-registry";
/// Numbers of connections to try.
const CONNECTIONS: [usize; 3] = [4, 8, 16];
/// Blobs in each trial.
const TRIAL_BLOBS: usize = 1024;

/// A docker-registry, and how many connections the client opens.
pub struct Docker {
    program: PathBuf,
    runtime: tokio::runtime::Runtime,
    connections: usize,
}

impl Docker {
    /// Finds the program; `None` if it is not installed.
    pub fn find() -> Result<Option<Self>> {
        let dirs = std::env::var_os("PATH").unwrap_or_default();
        let program = std::env::split_paths(&dirs).map(|dir| dir.join("docker-registry")).find(|path| path.is_file());
        // A process can set it only once. It does not matter which one is set: this is plain HTTP.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        Ok(program.map(|program| Self { program, runtime, connections: 8 }))
    }

    /// Tries numbers of connections on a part of the workload and keeps the best. Returns the
    /// result in words.
    pub fn tune(&mut self, workload: &Workload, parent: &Path) -> Result<String> {
        let part = Snapshot { dir: workload.base.dir.clone(), blobs: workload.base.blobs.iter().take(TRIAL_BLOBS).cloned().collect() };
        part.warm()?;
        let mut found = Vec::new();
        for connections in CONNECTIONS {
            let dir = tempfile::tempdir_in(parent)?;
            let (_server, url) = self.serve(dir.path())?;
            let client = Client::new(&url, connections)?;
            let start = Instant::now();
            self.runtime.block_on(client.push(&part, "base"))?;
            self.runtime.block_on(client.pull("base", &dir.path().join("pulled")))?;
            found.push((start.elapsed().as_secs_f64(), connections));
        }
        let best = found.iter().min_by(|a, b| a.0.total_cmp(&b.0)).ok_or("nothing tried")?;
        self.connections = best.1;
        let tried: Vec<String> = found.iter().map(|(seconds, connections)| format!("{connections}: {seconds:.2} s")).collect();
        Ok(format!("{} connections ({} blobs pushed and pulled with {})", best.1, part.blobs.len(), tried.join(", ")))
    }

    fn serve(&self, dir: &Path) -> Result<(Server, String)> {
        let data = dir.join("registry");
        std::fs::create_dir_all(&data)?;
        let port = free_port()?;
        let config = dir.join("docker-registry.yml");
        // Digests known to exist are kept in memory, as its documentation advises; nothing is
        // logged.
        std::fs::write(
            &config,
            format!(
                "version: 0.1\nlog:\n  level: error\n  accesslog:\n    disabled: true\nstorage:\n  cache:\n    blobdescriptor: inmemory\n  \
                 filesystem:\n    rootdirectory: {}\n    maxthreads: 100\nhttp:\n  addr: 127.0.0.1:{port}\n  secret: bench\n",
                data.display()
            ),
        )?;
        let child = Command::new(&self.program)
            .arg("serve")
            .arg(&config)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .spawn()?;
        let server = Server::new(child);
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() > deadline {
                return Err("docker-registry did not start".into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok((server, format!("http://127.0.0.1:{port}")))
    }
}

impl Contender for Docker {
    fn name(&self) -> &'static str {
        "docker-registry"
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (server, url) = self.serve(dir)?;
        let client = Client::new(&url, self.connections)?;
        let (pid, raw) = (server.pid(), workload.base.bytes());
        let said = |before: client::Moved| {
            let now = client.moved();
            let (bytes, requests) = (now.bytes - before.bytes, now.requests - before.requests);
            Reported { bytes_moved: Some(bytes), round_trips: Some(requests), server_memory: peak_memory(pid), ..Reported::default() }
        };
        let mut push = |step: Step, snapshot: &Snapshot, tag: &str| {
            let before = client.moved();
            snapshot.warm()?;
            meter.measure(step, raw, dir, &[pid], || {
                self.runtime.block_on(client.push(snapshot, tag))?;
                Ok(said(before))
            })
        };
        push(Step::Push, &workload.base, "base")?;
        push(Step::PushFork, &workload.fork, "fork")?;
        push(Step::Repush, &workload.base, "base")?;
        warm_dir(&dir.join("registry"))?;
        let before = client.moved();
        meter.measure(Step::PullDir, raw, dir, &[pid], || {
            self.runtime.block_on(client.pull("base", &dir.join("pulled")))?;
            Ok(said(before))
        })
    }
}
