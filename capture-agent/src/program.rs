//! The program `pf-agent`: parses settings, starts the log, serves until a signal.

use crate::config::Overrides;
use crate::{Config, Error, daemon};
use clap::{CommandFactory as _, Parser, Subcommand};
use pfr_client::AgentClient;
use pfr_client::cli::Failure;
use pfr_service::traces::{SERVER_END, TraceSettings};
use pfr_service::{Secret, UserDirs, settings};
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
    },
}

/// Exit code of bad input, as everywhere in `pf`.
const USAGE: u8 = 1;

/// The command line of `pf-agent`, for its manual pages.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the program with the arguments of this process, and returns its exit code.
pub fn main() -> ExitCode {
    let cli = match settings::parse::<Cli>() {
        Ok(cli) => cli,
        Err(error) => {
            // A closed standard error leaves no place to report that it is closed.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let code = match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failure(&error).report(false),
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
            Self::Serve { config, mut overrides } => {
                overrides.token = Secret::from_env("PF_AGENT_TOKEN");
                serve(Config::load(config.as_deref(), *overrides, &dirs)?)
            }
            Self::Health { config, data, socket } => {
                let given = Overrides { data, socket, ..Overrides::default() };
                health(&Config::load(config.as_deref(), given, &dirs)?)
            }
        }
    }
}

/// Longer than a store takes to answer that is only busy.
const HEALTH_LIMIT: Duration = Duration::from_secs(6);

fn health(config: &Config) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::io("start threads"))?;
    let agent = AgentClient::new(&config.socket)?;
    let asked = runtime.block_on(async { tokio::time::timeout(HEALTH_LIMIT, agent.ready()).await });
    let silent = |_| pfr_client::Error::AgentSilent { socket: config.socket.clone(), limit: HEALTH_LIMIT };
    asked.map_err(silent)??;
    // A closed standard output does not make the agent unhealthy.
    let _ = writeln!(std::io::stdout(), "ready");
    Ok(())
}

fn serve(config: Config) -> Result<(), Error> {
    let opened = pfr_service::traces::open("pf-agent", &TraceSettings::default()).map_err(|e| Error::Invalid(e.to_string()))?;
    pfr_service::log::start(config.log_format, &config.log, opened.traces).map_err(|e| Error::Invalid(format!("log: {e}")))?;
    if let Some(error) = opened.refused {
        tracing::warn!(%error, "no traces are sent");
    }
    settings::warn_of_unknown(&Cli::command(), "PF_AGENT_", &["PF_AGENT_TOKEN"]);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(Error::io("start threads"))?;
    let served = runtime.block_on(daemon::serve(config, |config| {
        let mut stdout = std::io::stdout().lock();
        let (control, engines) = (config.socket.display(), config.engine_socket.display());
        // A closed standard output is no reason not to serve.
        let _ = writeln!(stdout, "listening on {control} (control) and {engines} (engines)").and_then(|()| stdout.flush());
    }));
    if matches!(served, Err(Error::Unsettled { .. })) {
        // Its end would close connections under a copy. The end of the process ends the copy first.
        std::mem::forget(runtime);
    } else {
        runtime.shutdown_timeout(Duration::from_secs(2));
    }
    served
}
