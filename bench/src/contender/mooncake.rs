//! Mooncake's store over TCP: a master, one process that owns the memory, and a client that puts
//! and gets batches without a copy. In memory only. It neither hashes nor keeps anything on disk.

use super::python::{Client, Python, check};
use super::{Contender, Found, Programs, free_port, reads};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::usage::Server;
use crate::workload::Workload;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = include_str!("python/mooncake.py");
const INSTALL: &str = "python3 -m venv peers && peers/bin/pip install mooncake-transfer-engine-non-cuda, with \
                       apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2, then --python peers/bin/python";

struct Mooncake {
    python: PathBuf,
}

/// Finds the package.
pub fn find(programs: &Programs) -> Found {
    check(&programs.python, "mooncake", "mooncake.store", INSTALL)?;
    Ok(Box::new(Mooncake { python: programs.python.clone() }))
}

impl Contender for Mooncake {
    fn runs_in(&self, place: &str) -> bool {
        place == "tmpfs"
    }

    /// With a fresh owner: a put of a key that is there does nothing.
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (raw, blobs) = (workload.base.bytes(), &workload.base.blobs);
        let (port, metrics) = (free_port()?, free_port()?);
        let address = format!("127.0.0.1:{port}");
        let mut master = Command::new(&self.python);
        master.args(["-m", "mooncake.cli", "-rpc_address=127.0.0.1", "-enable_metric_reporting=false"]);
        master.arg(format!("-rpc_port={port}")).arg(format!("-metrics_port={metrics}")).current_dir(dir);
        let master = Server::start(&mut master, port, &dir.join("mooncake-master.log"))?;
        // A third more than the blobs: above nine tenths it begins to forget.
        let segment = (raw + raw / 3).next_multiple_of(64 << 20).to_string();
        let [owner_port, client_port] = [free_port()?.to_string(), free_port()?.to_string()];
        let owner = ["owner", &owner_port, &address, &segment].map(OsStr::new);
        let owner = Python::start(&self.python, SCRIPT, &owner, dir, "mooncake-owner")?;
        let client = [client_port.as_str(), &address].map(OsStr::new);
        let mut client = Client::start(&self.python, SCRIPT, &client, dir, "mooncake-client")?;
        let servers = [master.pid(), owner.pid(), client.pid()];
        workload.base.warm()?;
        meter.measure(Step::Push, raw, dir, &servers, || client.put(blobs).map(|()| Reported::default()))?;
        reads()
            .try_for_each(|(step, hash)| meter.measure(step, raw, dir, &servers, || client.get(blobs, hash).map(|()| Reported::default())))
    }
}
