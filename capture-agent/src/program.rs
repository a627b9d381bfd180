//! The program `pf-agent`: parses settings, starts the log, serves until a signal.

use crate::config::Overrides;
use crate::{Config, Error, daemon};
use clap::{Parser, Subcommand};
use pfr_client::cli::Failure;
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
}

/// Exit code of bad input, as everywhere in `pf`.
const USAGE: u8 = 1;

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
    let Command::Serve { config, mut overrides } = cli.command;
    overrides.token = Secret::from_env("PF_AGENT_TOKEN");
    match Config::load(config.as_deref(), *overrides, &UserDirs::of_process()).and_then(serve) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => Failure::new(error.code(), error.to_string()).report(false),
    }
}

fn serve(config: Config) -> Result<(), Error> {
    pfr_service::log::start(config.log_format, &config.log).map_err(|e| Error::Invalid(format!("log: {e}")))?;
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
