//! The demo's child processes.

use pfr_client::cli::Failure;
use pfr_client::cli::output::human::printable;
use pfr_schema::ErrorCode;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(10);
const READY: &str = "listening on ";

/// A child and where it writes its log; killed when it is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Running {
    /// Starts `program` in `root`. Its stderr goes to `<name>.log` there.
    ///
    /// It does not get our Ctrl-C, since the demo ends it itself. Of the environment variables of
    /// `pf` programs it gets only the folder of the model.
    pub fn start(program: &Path, root: &Path, name: &str, args: &[&str], stdin: Stdio) -> Result<Self, Failure> {
        let log = root.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log);
        let file = file.map_err(|e| Failure::usage(format!("cannot write {}: {e}", log.display())))?;
        let mut command = Command::new(program);
        for (variable, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("PF_") && name != "PF_CACHE") {
            command.env_remove(variable);
        }
        command.args(args).current_dir(root).stdin(stdin).stdout(Stdio::piped()).stderr(file);
        let child = command.kill_on_drop(true).process_group(0).spawn();
        let child = child.map_err(|e| Failure::usage(format!("cannot start {}: {e}", program.display())))?;
        Ok(Self { child, name: name.to_owned(), log })
    }

    /// The child, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Waits until it has ended by itself, and fails unless its exit code is 0.
    pub async fn ended(&mut self) -> Result<(), Failure> {
        match timeout(STOP_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(self.failed(status)),
            Ok(Err(e)) => Err(Failure::bug(format!("cannot wait for {}: {e}", self.name))),
            Err(_) => Err(Failure::bug(format!("{} did not end within {STOP_LIMIT:?}{}", self.name, tail(&self.log)))),
        }
    }

    /// Asks it to end, and waits until it has.
    pub async fn stop(mut self) -> Result<(), Failure> {
        if let Some(pid) = self.child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed())) {
            // If it has ended already, the wait reports that.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        self.ended().await
    }

    /// An error about it, with the end of its log.
    pub fn failure(&self, code: ErrorCode, what: &str) -> Failure {
        Failure::new(code, format!("{} {what}{}", self.name, tail(&self.log)))
    }

    fn failed(&self, status: ExitStatus) -> Failure {
        let unavailable = status.code() == Some(i32::from(ErrorCode::Unavailable.exit_code()));
        let code = if unavailable { ErrorCode::Unavailable } else { ErrorCode::Internal };
        self.failure(code, &format!("ended badly ({status})"))
    }
}

/// Starts a program that prints the address on which it listens, and waits for that. Returns the
/// line.
pub async fn service(program: &Path, root: &Path, name: &str, args: &[&str]) -> Result<(Running, String), Failure> {
    let mut running = Running::start(program, root, name, args, Stdio::null())?;
    let stdout = running.child.stdout.take().ok_or_else(|| Failure::bug(format!("{name} has no stdout")))?;
    let mut lines = BufReader::new(stdout).lines();
    let ready = async {
        while let Ok(Some(line)) = lines.next_line().await {
            if let Some(place) = line.trim().strip_prefix(READY) {
                return Some(place.trim_end_matches('/').to_owned());
            }
        }
        None
    };
    let Ok(Some(place)) = timeout(START_LIMIT, ready).await else { return Err(running.failure(ErrorCode::Unavailable, "did not start")) };
    // Read the rest of its output, so that the pipe does not fill.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    Ok((running, place))
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

    #[tokio::test]
    async fn a_program_that_does_not_start_shows_its_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let args = ["-c", "echo out; echo last words >&2; exit 7"];
        let failure = service(Path::new("/bin/sh"), dir.path(), "shell", &args).await.unwrap_err();
        assert_eq!(failure.exit(), 7);
        let message = failure.to_string();
        assert!(message.contains("shell did not start") && message.contains("last words"), "{message}");
    }

    #[tokio::test]
    async fn a_program_that_says_where_it_listens_is_stopped_by_a_signal() {
        let dir = tempfile::tempdir().unwrap();
        let args = ["-c", "trap 'exit 0' TERM; echo listening on here/; while :; do read line || sleep 0.01; done"];
        let (running, place) = service(Path::new("/bin/sh"), dir.path(), "shell", &args).await.unwrap();
        assert_eq!(place, "here");
        running.stop().await.unwrap();
    }
}
