//! The commands of `pf-registry`, one file each.

mod gc;
mod serve;

use clap::{Args, Subcommand};
use pfr_registry::config::{Config, Overrides};
use pfr_registry::{server, telemetry};
use std::path::PathBuf;

/// A command.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Serves a store over HTTP. Prints `listening on http://ADDRESS` when ready; logs go to standard error.
    Serve(Settings),
    /// Collects garbage, once. May run beside a registry that serves the same store.
    Gc(gc::Gc),
}

/// Where the settings come from: the same for every command, so that all of them mean the same store.
#[derive(Args)]
pub(crate) struct Settings {
    /// Settings file (TOML); flags and environment variables win over it.
    #[arg(long, env = "PF_REGISTRY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    overrides: Box<Overrides>,
}

impl Settings {
    /// Reads the settings and starts the log.
    fn load(self) -> Result<Config, server::Error> {
        let config = Config::load(self.config.as_deref(), *self.overrides)?;
        telemetry::start_log(config.log_format, &config.log).map_err(pfr_registry::config::SettingsError::Filter)?;
        Ok(config)
    }
}

impl Command {
    /// Runs it to its end.
    pub(crate) fn run(self) -> Result<(), server::Error> {
        match self {
            Self::Serve(settings) => serve::run(settings.load()?),
            Self::Gc(args) => gc::run(args),
        }
    }
}
