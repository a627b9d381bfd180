//! `pf-registry`: a registry, and the tools for its store.

mod commands;

use clap::Parser;
use std::io::Write as _;
use std::process::ExitCode;

/// A durable, content-addressed registry for live model state.
#[derive(Parser)]
#[command(name = "pf-registry", version)]
struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

/// Exit code of bad input, as everywhere in `pf`.
const USAGE: u8 = 1;

fn main() -> ExitCode {
    // Buckets and databases are reached with TLS; nobody else has chosen a provider yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let cli = match pfr_client::settings::parse::<Cli>() {
        Ok(cli) => cli,
        Err(error) => {
            // Nobody is left to tell when standard error is gone.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "pf-registry: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
