//! The program `pf-agent`: parses settings, starts the log, serves until a signal.

use crate::config::Overrides;
use crate::{Config, Error, daemon};
use clap::{CommandFactory as _, Parser, Subcommand};
use pfr_client::AgentClient;
use pfr_client::cli::{self, Failure};
use pfr_service::traces::{SERVER_END, TraceSettings};
use pfr_service::{Secret, UserDirs, settings};
use serde::Serialize;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// The capture agent: engines on this host, captured into a local store and restored from it.
#[derive(Parser)]
#[command(name = "pf-agent", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves engines and control. Prints `listening on SOCKET (control) and SOCKET (engines)` when
    /// ready; logs go to standard error.
    Serve {
        /// Settings file (TOML); flags and environment variables win over it.
        #[arg(long, env = "PF_AGENT_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// Print both sockets as JSON when ready; an error is one JSON object on standard error.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        overrides: Box<Overrides>,
    },
    /// Asks the agent of this host whether it works and reaches its store. Exit code 0 if it does,
    /// 7 if not, 1 if a setting is wrong.
    Health {
        /// Settings file (TOML) of the agent; flags and environment variables win over it.
        #[arg(long, env = "PF_AGENT_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// Its data folder, which has the control socket if nothing says another place.
        #[arg(long, env = "PF_AGENT_DATA", value_name = "DIR")]
        data: Option<PathBuf>,
        /// Its control socket.
        #[arg(long, env = "PF_AGENT_SOCKET", value_name = "PATH")]
        socket: Option<PathBuf>,
        /// Print the result as JSON; an error is one JSON object on standard error.
        #[arg(long)]
        json: bool,
    },
}

/// The command line of `pf-agent`, for its manual pages.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the program with the arguments of this process, and returns its exit code.
pub fn main() -> ExitCode {
    // Known before the arguments are parsed: an error in them is JSON, too.
    let json = cli::asks_for_json(std::env::args_os());
    let cli = match cli::parse_of_server::<Cli>(json) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let code = match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error).report(json),
    };
    pfr_service::traces::finish(SERVER_END);
    code
}

/// The error as `pf` reports its own, with this program's names of options.
fn failure(error: &Error) -> Failure {
    let failure = Failure::new(error.code(), error.to_string());
    match error {
        Error::Client(pfr_client::Error::NoAgent { .. }) => {
            failure.hint("`pf-agent serve` starts one; --socket, PF_AGENT_SOCKET, or `socket` in its settings file say where its socket is")
        }
        _ => failure,
    }
}

impl Command {
    fn run(self) -> Result<(), Error> {
        let dirs = UserDirs::of_process();
        match self {
            Self::Serve { config, json, mut overrides } => {
                overrides.token = Secret::from_env("PF_AGENT_TOKEN");
                serve(Config::load(config.as_deref(), *overrides, &dirs)?, json)
            }
            Self::Health { config, data, socket, json } => {
                let given = Overrides { data, socket, ..Overrides::default() };
                health(&Config::load(config.as_deref(), given, &dirs)?, json)
            }
        }
    }
}

/// Prints what happened: as JSON, or as a line of text. A closed standard output does not make the
/// command fail.
fn print<T: Serialize>(happened: &T, json: bool, line: impl FnOnce(&T) -> String) {
    let text =
        if json { pfr_client::json::document(happened).map(|document| document.to_string()).unwrap_or_default() } else { line(happened) };
    let mut stdout = std::io::stdout().lock();
    let _ = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// What is printed of an agent that works.
#[derive(Serialize)]
struct Healthy {
    status: &'static str,
}

/// What is printed when it is ready.
#[derive(Serialize)]
struct Listening {
    socket: String,
    engine_socket: String,
}

/// Longer than a store takes to answer that is only busy.
const HEALTH_LIMIT: Duration = Duration::from_secs(6);

fn health(config: &Config, json: bool) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::io("start threads"))?;
    let agent = AgentClient::new(&config.socket)?;
    let asked = runtime.block_on(async { tokio::time::timeout(HEALTH_LIMIT, agent.ready()).await });
    let silent = |_| pfr_client::Error::AgentSilent { socket: config.socket.clone(), limit: HEALTH_LIMIT };
    asked.map_err(silent)??;
    print(&Healthy { status: "ready" }, json, |healthy| healthy.status.to_owned());
    Ok(())
}

fn serve(config: Config, json: bool) -> Result<(), Error> {
    let opened = pfr_service::traces::open("pf-agent", &TraceSettings::default()).map_err(|e| Error::Invalid(e.to_string()))?;
    pfr_service::log::start(config.log_format, &config.log, opened.traces).map_err(|e| Error::Invalid(format!("log: {e}")))?;
    if let Some(error) = opened.refused {
        tracing::warn!(%error, "no traces are sent");
    }
    settings::warn_of_unknown(&Cli::command(), "PF_AGENT_", &["PF_AGENT_TOKEN"]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(Error::io("start threads"))?;
    let served = runtime.block_on(daemon::serve(config, |config| {
        let [socket, engine_socket] = [&config.socket, &config.engine_socket].map(|path| path.display().to_string());
        let listening = Listening { socket, engine_socket };
        print(&listening, json, |l| format!("listening on {} (control) and {} (engines)", l.socket, l.engine_socket));
    }));
    if matches!(served, Err(Error::Unsettled { .. })) {
        // Its end would close connections under a copy. The end of the process ends the copy first.
        std::mem::forget(runtime);
    } else {
        runtime.shutdown_timeout(Duration::from_secs(2));
    }
    served
}
