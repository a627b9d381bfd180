//! `pf-registry`: parses settings, starts the log, serves until a signal.

use clap::{Parser, Subcommand};
use pfr_registry::config::{Config, Overrides, SettingsError};
use pfr_registry::{Server, server, telemetry};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// A durable, content-addressed registry for live model state.
#[derive(Parser)]
#[command(name = "pf-registry", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves a store over HTTP. Prints `listening on http://ADDRESS` when ready; logs go to standard error.
    Serve {
        /// Settings file (TOML); flags and environment variables win over it.
        #[arg(long, env = "PF_REGISTRY_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        #[command(flatten)]
        overrides: Box<Overrides>,
    },
}

/// Exit code of bad input, as everywhere in `pf`.
const USAGE: u8 = 1;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody is left to tell when standard error is gone.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    let Command::Serve { config, overrides } = cli.command;
    let done = Config::load(config.as_deref(), *overrides).map_err(server::Error::from).and_then(serve);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pf-registry: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn serve(config: Config) -> Result<(), server::Error> {
    telemetry::start_log(config.log_format, &config.log).map_err(SettingsError::Filter)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(server::Error::Runtime)?;
    let served = runtime.block_on(async {
        let server = Server::bind(config).await?;
        // Before anyone is told that it runs: a signal must not find it unprepared.
        let signals = server::signals()?;
        let mut stdout = std::io::stdout().lock();
        // A closed standard output is no reason not to serve.
        let _ = writeln!(stdout, "listening on http://{}", server.local_addr()).and_then(|()| stdout.flush());
        drop(stdout);
        server.run(signals).await
    });
    // Blocking work that outlived the grace period was not acknowledged; the store finds its debris.
    runtime.shutdown_timeout(Duration::from_secs(2));
    served
}
