//! restic and its REST server: backups with deduplication, encrypted and compressed, with restic's
//! default options.
//!
//! A push is a backup of the snapshot directory. A pull is a restore of that backup; restic
//! verifies what it restores.

use super::{Contender, Found, Programs, free_port, install};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::usage::{self, Server, run};
use crate::workload::{Workload, dir_bytes, warm_dir};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names of the server's program: first that of Debian's package, which exists from Debian 13 on,
/// then that of the project itself.
const SERVERS: [&str; 2] = ["restic-rest-server", "rest-server"];
const INSTALL_SERVER: &str = "apt-get install restic-rest-server (from Debian 13 on), \
                              or go install github.com/restic/rest-server/cmd/rest-server@latest (Go 1.24 or newer)";

struct Restic {
    client: PathBuf,
    server: PathBuf,
}

/// Finds restic and its REST server.
pub fn find(_: &Programs) -> Found {
    let client = usage::find(&["restic"]).ok_or_else(|| install("restic", "apt-get install restic"))?;
    let server = usage::find(&SERVERS).ok_or_else(|| install("restic's REST server", INSTALL_SERVER))?;
    Ok(Box::new(Restic { client, server }))
}

impl Contender for Restic {
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (data, port) = (dir.join("registry"), free_port()?);
        std::fs::create_dir(&data)?;
        let address = format!("127.0.0.1:{port}");
        let mut server = Command::new(&self.server);
        server.args(["--no-auth", "--listen", &address, "--path"]).arg(&data);
        let server = Server::start(&mut server, port, &dir.join("rest-server.log"))?;
        let restic = |args: &[&OsStr]| {
            let mut command = Command::new(&self.client);
            command.env("RESTIC_REPOSITORY", format!("rest:http://{address}/w")).env("RESTIC_PASSWORD", "bench");
            command.env("RESTIC_CACHE_DIR", dir.join("cache")).env("HOME", dir).args(args).arg("--quiet");
            command
        };
        run(&mut restic(&["init".as_ref()]))?;
        let (raw, servers) = (workload.base.bytes(), [server.pid()]);
        let step = |meter: &mut Meter<'_>, step: Step, args: &[&OsStr]| {
            meter.measure(step, raw, dir, &servers, || {
                let ran = run(&mut restic(args))?;
                Ok(Reported { client_memory: Some(ran.peak_memory), ..Reported::default() })
            })
        };
        let (base, fork) = (workload.base.dir.as_os_str(), workload.fork.dir.as_os_str());
        workload.base.warm()?;
        step(meter, Step::Push, &["backup".as_ref(), base])?;
        meter.stored(dir_bytes(&data)?);
        warm_dir(&data)?;
        let pulled = dir.join("pulled");
        step(meter, Step::PullDir, &["restore".as_ref(), "latest".as_ref(), "--target".as_ref(), pulled.as_os_str()])?;
        workload.fork.warm()?;
        step(meter, Step::PushFork, &["backup".as_ref(), fork])?;
        step(meter, Step::Repush, &["backup".as_ref(), base])
    }
}
