//! LMCache's file system backend: the client behind its adapter `fs_native`, in a process of its
//! own, with a file for each blob. It neither hashes nor syncs.

use super::python::{Client, check};
use super::{Contender, Found, Programs, reads};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::workload::{Workload, dir_bytes, warm_dir};
use std::path::{Path, PathBuf};

const SCRIPT: &str = include_str!("python/lmcache.py");
const INSTALL: &str = "python3 -m venv peers && peers/bin/pip install lmcache (several GB: it needs torch), then --python peers/bin/python";

struct LmCache {
    python: PathBuf,
}

/// Finds the package.
pub fn find(programs: &Programs) -> Found {
    check(&programs.python, "lmcache", "torch, lmcache.lmcache_fs", INSTALL)?;
    Ok(Box::new(LmCache { python: programs.python.clone() }))
}

impl Contender for LmCache {
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (raw, blobs, data) = (workload.base.bytes(), &workload.base.blobs, dir.join("registry"));
        std::fs::create_dir(&data)?;
        let mut client = Client::start(&self.python, SCRIPT, &[data.as_os_str()], dir, "lmcache")?;
        let servers = [client.pid()];
        workload.base.warm()?;
        meter.measure(Step::Push, raw, dir, &servers, || client.put(blobs).map(|()| Reported::default()))?;
        meter.stored(dir_bytes(&data)?);
        warm_dir(&data)?;
        reads()
            .try_for_each(|(step, hash)| meter.measure(step, raw, dir, &servers, || client.get(blobs, hash).map(|()| Reported::default())))
    }
}
