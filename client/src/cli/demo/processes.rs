//! The demo's child processes: the programs that lie beside `pf`.

use crate::cli::failure::Failure;
use crate::cli::output::human::printable;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(10);
const READY: &str = "listening on ";

/// The program `name` in the directory of the running `pf`.
pub fn sibling(name: &str, package: &str) -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(|e| Failure::new(1, format!("cannot tell where pf itself is: {e}")))?;
    let path = own.with_file_name(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(Failure::new(5, format!("{name} is not beside pf: there is no {}", path.display()))
        .hint(format!("build it with cargo build --release -p {package}")))
}

/// A registry of our own, killed when it is dropped.
pub struct Registry {
    child: Child,
    url: String,
    log: PathBuf,
}

impl Registry {
    /// Starts `pf-registry` over `data` on a free port, and waits until it listens.
    pub async fn start(program: &Path, data: &Path, log: PathBuf) -> Result<Self, Failure> {
        let mut child = command(program, &log)?
            .arg("serve")
            .arg("--data")
            .arg(data)
            .args(["--listen", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::new(1, format!("cannot start {}: {e}", program.display())))?;
        let stdout = child.stdout.take().ok_or_else(|| Failure::new(70, "the registry has no stdout"))?;
        let mut lines = BufReader::new(stdout).lines();
        let ready = async {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some(url) = line.trim().strip_prefix(READY) {
                    return Some(url.trim_end_matches('/').to_owned());
                }
            }
            None
        };
        let Ok(Some(url)) = timeout(START_LIMIT, ready).await else {
            return Err(Failure::new(7, format!("the registry did not start{}", tail(&log))));
        };
        // Whatever else it says must not fill the pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self { child, url, log })
    }

    /// Where it listens.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Asks it to end, and waits until it has.
    pub async fn stop(mut self) -> Result<(), Failure> {
        if let Some(pid) = self.child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed())) {
            // If it is gone already, waiting says so.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        match timeout(STOP_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(Failure::new(70, format!("the registry ended badly ({status}){}", tail(&self.log)))),
            Ok(Err(e)) => Err(Failure::new(70, format!("cannot wait for the registry: {e}"))),
            Err(_) => Err(Failure::new(70, format!("the registry did not end within {STOP_LIMIT:?}{}", tail(&self.log)))),
        }
    }
}

/// Runs a program to its end and gives what it wrote to stdout. What it wrote to stderr is in `log`.
pub async fn run(program: &Path, args: &[String], log: &Path) -> Result<String, Failure> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let child = command(program, log)?
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| Failure::new(1, format!("cannot start {}: {e}", program.display())))?;
    let output = child.wait_with_output().await.map_err(|e| Failure::new(70, format!("cannot wait for {name}: {e}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let exit = output.status.code().and_then(|c| u8::try_from(c).ok()).filter(|c| *c != 0).unwrap_or(70);
    Err(Failure::new(exit, format!("{name} failed ({}){}", output.status, tail(log))))
}

/// A child that dies with us and does not get our Ctrl-C: we end it ourselves.
fn command(program: &Path, log: &Path) -> Result<Command, Failure> {
    let file = File::options().create(true).append(true).open(log);
    let file = file.map_err(|e| Failure::new(1, format!("cannot write {}: {e}", log.display())))?;
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).stderr(file).kill_on_drop(true).process_group(0);
    Ok(command)
}

/// The last lines of a log, for an error message.
fn tail(log: &Path) -> String {
    const LINES: usize = 12;
    let text = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    if lines.is_empty() {
        return String::new();
    }
    let shown = lines[lines.len().saturating_sub(LINES)..].join("\n    ");
    format!(":\n    {}", printable(&shown))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_says_how_to_build_it() {
        let failure = sibling("pf-no-such-program", "pfr-none").unwrap_err();
        assert_eq!(failure.exit(), 5);
        let Failure::Error { hint, .. } = failure else { panic!("an error") };
        assert_eq!(hint.as_deref(), Some("build it with cargo build --release -p pfr-none"));
    }

    #[tokio::test]
    async fn a_failing_program_shows_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let args = ["-c".to_owned(), "echo out; echo last words >&2; exit 7".to_owned()];
        let Failure::Error { exit, message, .. } = run(Path::new("/bin/sh"), &args, &log).await.unwrap_err() else { panic!("an error") };
        assert_eq!(exit, 7);
        assert!(message.contains("last words"), "{message}");
    }
}
