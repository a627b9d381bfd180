//! oras: the client of its Python package, with a docker-registry. A push is one artifact with a
//! layer for each file of the snapshot directory, sent one after the other. The client does not
//! verify what it pulls, and neither of the two syncs.

use super::python::check;
use super::{Contender, Found, Programs, docker};
use crate::Result;
use crate::meter::{Meter, Reported, Step};
use crate::usage::run;
use crate::workload::{Workload, dir_bytes, warm_dir};
use std::path::{Path, PathBuf};
use std::process::Command;

const SCRIPT: &str = include_str!("python/oras.py");
const INSTALL: &str = "python3 -m venv peers && peers/bin/pip install --no-deps -r tests/requirements-oras.txt, \
                       then --python peers/bin/python";

struct Oras {
    python: PathBuf,
    registry: PathBuf,
}

/// Finds the package and the registry.
pub fn find(programs: &Programs) -> Found {
    check(&programs.python, "oras", "oras.client", INSTALL)?;
    Ok(Box::new(Oras { python: programs.python.clone(), registry: docker::program()? }))
}

impl Contender for Oras {
    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (server, address) = docker::serve(&self.registry, dir)?;
        let (servers, raw, data) = ([server.pid()], workload.base.bytes(), dir.join("registry"));
        let step = |meter: &mut Meter<'_>, step: Step, verb: &str, place: &Path| {
            let mut command = Command::new(&self.python);
            command.env("HOME", dir).args(["-c", SCRIPT, verb, &address]).arg(place);
            meter.measure(step, raw, dir, &servers, || {
                let ran = run(&mut command)?;
                Ok(Reported { client_memory: Some(ran.peak_memory), ..Reported::default() })
            })
        };
        workload.base.warm()?;
        step(meter, Step::Push, "push", &workload.base.dir)?;
        meter.stored(dir_bytes(&data)?);
        warm_dir(&data)?;
        step(meter, Step::PullDir, "pull", &dir.join("pulled"))
    }
}
