//! The contender `limit`: see [`crate::limit`]. Both of its processes run this program.

use super::{Contender, Found, Programs};
use crate::Result;
use crate::limit::Form;
use crate::meter::{Meter, Reported, Step};
use crate::pack::Lanes;
use crate::usage::{Server, run};
use crate::workload::{Workload, empty_dir, warm_dir};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

struct Limit {
    program: PathBuf,
    connections: usize,
    lanes: Lanes,
}

/// The limit of the goals: it hashes four blobs side by side.
pub fn four(programs: &Programs) -> Found {
    find(programs, Lanes::Four)
}

/// The limit that hashes as many as `pf` does here.
pub fn as_pf(programs: &Programs) -> Found {
    if !Lanes::differ() {
        return Err("limit-as-pf is the same as limit here: pf hashes no more than four blobs side by side".into());
    }
    find(programs, Lanes::AsPf)
}

fn find(programs: &Programs, lanes: Lanes) -> Found {
    let program = std::env::current_exe().map_err(|e| format!("this program cannot be started again: {e}"))?;
    Ok(Box::new(Limit { program, connections: programs.connections, lanes }))
}

impl Limit {
    fn serve(&self, dir: &Path, direct: bool) -> Result<(Server, String)> {
        let mut command = Command::new(&self.program);
        command.args(["limit-side", "serve", "--lanes", self.lanes.name(), "--dir"]).arg(dir).args(direct.then_some("--direct"));
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().ok_or("no stdout")?;
        let server = Server::new(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        Ok((server, line.trim().to_owned()))
    }
}

impl Contender for Limit {
    fn prepare(&mut self, _: &Workload, _: &Path) -> Result<Option<String>> {
        Ok(Some(format!("{} connections; {} blobs are hashed side by side", self.connections, self.lanes.most())))
    }

    fn round(&mut self, workload: &Workload, dir: &Path, meter: &mut Meter<'_>) -> Result<()> {
        let (data, direct, raw) = (dir.join("registry"), meter.place == "disk", workload.base.bytes());
        let (server, address) = self.serve(&data, direct)?;
        let servers = [server.pid()];
        let side = |side: &str| {
            let mut command = Command::new(&self.program);
            command.args(["limit-side", side, "--connections", &self.connections.to_string()]);
            command
        };
        let mut step = |step: Step, command: &mut Command| {
            meter.measure(step, raw, dir, &servers, || {
                let ran = run(command)?;
                Ok(Reported { client_memory: Some(ran.peak_memory), ..Reported::default() })
            })
        };
        workload.base.warm()?;
        step(Step::Push, side("push").args(["--to", &address, "--snapshot"]).arg(&workload.base.dir))?;
        warm_dir(&data)?;
        for (pull, form) in [(Step::PullStore, Form::Packs), (Step::PullDir, Form::Files), (Step::GetVerified, Form::Memory)] {
            let into = dir.join(form.name());
            let mut command = side("pull");
            command
                .args(["--from", &address, "--form", form.name(), "--lanes", self.lanes.name(), "--into"])
                .arg(&into)
                .args(direct.then_some("--direct"));
            step(pull, &mut command)?;
            if into.exists() {
                empty_dir(&into)?;
            }
        }
        Ok(())
    }
}
