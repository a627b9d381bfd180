//! docker-registry (the Debian package, CNCF distribution 2.8) behind a plain HTTP client: a
//! registry of blobs with one blob for each page, and the fastest client that its protocol allows.
//!
//! Push: for each blob HEAD, then POST and PUT if it is not there; then the manifest. The registry
//! does not sync, so a push is not durable when it is acknowledged; the time of a following
//! `syncfs` is recorded besides. Pull: the manifest, then each blob, hashed as it comes and written
//! to a file of its own; then one `syncfs` and a rename of the directory, which is what `pf pull`
//! promises too. Connections are kept alive; their number is found by trial before the run.

mod client;

use super::http::{self, best_connections};
use super::{Contender, Found, Programs, free_port, install};
use crate::Result;
use crate::meter::{Meter, Step};
use crate::usage::{self, Server};
use crate::workload::{Snapshot, Workload, dir_bytes, warm_dir};
use client::Client;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// A docker-registry, and how many connections the client opens.
struct Docker {
    program: PathBuf,
    runtime: tokio::runtime::Runtime,
    connections: usize,
}

/// Finds the contender.
pub fn find(_: &Programs) -> Found {
    Ok(Box::new(Docker { program: program()?, runtime: http::runtime()?, connections: 8 }))
}

/// Finds the program.
pub fn program() -> std::result::Result<PathBuf, String> {
    usage::find(&["docker-registry"]).ok_or_else(|| install("docker-registry", "apt-get install docker-registry"))
}

/// Starts it with its data in `registry` in `dir`. Returns it with its host and port.
pub fn serve(program: &Path, dir: &Path) -> Result<(Server, String)> {
    let data = dir.join("registry");
    std::fs::create_dir_all(&data)?;
    let port = free_port()?;
    let config = dir.join("docker-registry.yml");
    // Digests known to exist are kept in memory, as its documentation advises; nothing is logged.
    std::fs::write(
        &config,
        format!(
            "version: 0.1\nlog:\n  level: error\n  accesslog:\n    disabled: true\nstorage:\n  cache:\n    blobdescriptor: inmemory\n  \
             filesystem:\n    rootdirectory: {}\n    maxthreads: 100\nhttp:\n  addr: 127.0.0.1:{port}\n  secret: bench\n",
            data.display()
        ),
    )?;
    let server = Server::start(Command::new(program).arg("serve").arg(&config), port, &dir.join("docker-registry.log"))?;
    Ok((server, format!("127.0.0.1:{port}")))
}

impl Docker {
    /// Starts it. Returns it with its URL.
    fn serve(&self, dir: &Path) -> Result<(Server, String)> {
        let (server, address) = serve(&self.program, dir)?;
        Ok((server, format!("http://{address}")))
    }
}

impl Contender for Docker {
    fn prepare(&mut self, workload: &Workload, parent: &Path) -> Result<Option<String>> {
        let (best, words) = best_connections(workload, parent, |part, dir, connections| {
            let (_server, url) = self.serve(dir)?;
            let client = Client::new(&url, connections)?;
            let start = Instant::now();
            self.runtime.block_on(client.push(part, "base"))?;
            self.runtime.block_on(client.pull("base", &dir.join("pulled")))?;
            Ok(start.elapsed())
        })?;
        self.connections = best;
        Ok(Some(words))
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (server, url) = self.serve(dir)?;
        let client = Client::new(&url, self.connections)?;
        let (servers, raw, data) = ([server.pid()], workload.base.bytes(), dir.join("registry"));
        let push = |meter: &mut Meter<'_>, step: Step, snapshot: &Snapshot, tag: &str| {
            let before = client.moved();
            snapshot.warm()?;
            meter.measure(step, raw, dir, &servers, || {
                self.runtime.block_on(client.push(snapshot, tag))?;
                Ok(client.moved().since(before))
            })
        };
        push(meter, Step::Push, &workload.base, "base")?;
        meter.stored(dir_bytes(&data)?);
        push(meter, Step::PushFork, &workload.fork, "fork")?;
        push(meter, Step::Repush, &workload.base, "base")?;
        warm_dir(&data)?;
        let before = client.moved();
        meter.measure(Step::PullDir, raw, dir, &servers, || {
            self.runtime.block_on(client.pull("base", &dir.join("pulled")))?;
            Ok(client.moved().since(before))
        })
    }
}
