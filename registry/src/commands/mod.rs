//! The program `pf-registry`: its commands, one file each.
//!
//! They are in the library so that the futures of the registry are compiled once, and not again for
//! the binary.

mod domain;
mod fsck;
mod gc;
mod health;
mod mirror;
mod rebuild;
mod scrub;
mod serve;
mod token;
mod tool;

use crate::Error;
use crate::config::{Config, Overrides};
use clap::{Arg, Args, CommandFactory as _, Parser, Subcommand};
use pfr_client::cli::{self, Failure};
use pfr_service::settings;
use pfr_service::traces::SERVER_END;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::LazyLock;

/// A durable, content-addressed registry for live model state.
#[derive(Parser)]
#[command(name = "pf-registry", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The command line of `pf-registry`, for its manual pages.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Runs the command that the arguments of this process name, and returns its exit code.
pub fn main() -> ExitCode {
    // Known before the arguments are parsed: an error in them is JSON, too.
    let json = cli::asks_for_json(std::env::args_os());
    // Buckets and databases use TLS, and no crypto provider has been chosen in this process yet.
    let _ = rustls::crypto::ring::default_provider().install_default();
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

/// The error as `pf` reports its own.
fn failure(error: &Error) -> Failure {
    match error.code() {
        Some(code) => {
            let failure = Failure::new(code, error.to_string());
            error.hint().into_iter().fold(failure, Failure::hint)
        }
        None => Failure::interrupted(error.exit_code(), error.to_string()),
    }
}

/// A command.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Serves a store over HTTP. Prints `listening on http(s)://ADDRESS` when ready; logs go to
    /// standard error.
    Serve(serve::Serve),
    /// Collects garbage, once. May run beside a registry that serves the same store.
    #[command(mut_args(of_tool), after_help = MORE)]
    Gc(gc::Gc),
    /// Copies snapshots and tags from one registry to another, or between a registry and this
    /// store.
    #[command(mut_args(of_tool), after_help = MORE)]
    Mirror(Box<mirror::Mirror>),
    /// Reads every pack and names what is damaged. May run beside a registry that serves the same
    /// store.
    #[command(mut_args(of_tool), after_help = MORE)]
    Scrub(scrub::Scrub),
    /// Compares the tables with what the stored nodes say. May run beside a registry that serves
    /// the same store.
    #[command(mut_args(of_tool), after_help = MORE)]
    Fsck(fsck::Fsck),
    /// Asks the registry that these settings start, on this machine, whether it serves. Exit code 0
    /// if it does, 7 if not, 1 if a setting is wrong.
    #[command(mut_args(of_tool), after_help = MORE)]
    Health(health::Health),
    /// Makes, lists and revokes access tokens. May run beside a registry that serves the same
    /// store.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// Lists domains, shows and sets their quotas, wraps their keys again. May run beside a
    /// registry that serves the same store.
    #[command(subcommand)]
    Domain(domain::DomainCommand),
    /// Builds a new database from packs and journal, when the old one is lost. Nothing else may use
    /// the store meanwhile.
    #[command(mut_args(of_tool), after_help = MORE)]
    Rebuild(rebuild::Rebuild),
}

/// Settings that say which store a tool works on.
const WHICH_STORE: [&str; 3] = ["data", "database", "storage"];
/// Settings that say which keys wrap those of domains.
const KEYS: [&str; 3] = ["key_file", "key_command", "old_key_file"];
const DATA: &str = "Directory of the store: packs and metadata. Required unless both --database and --storage are given";
const MORE: &str = "The other settings of `pf-registry serve` are accepted, too; most matter to a server only.";

/// Hides the settings of a server from the help of other commands. They accept them nevertheless:
/// one settings file and one environment serve all commands.
fn of_tool(argument: Arg) -> Arg {
    let id = argument.get_id().as_str();
    let is_data = id == "data";
    if id == "config" || WHICH_STORE.contains(&id) {
        let argument = argument.help_heading("Store");
        // A server makes it; most tools refuse one that is not there.
        return if is_data { argument.help(DATA) } else { argument };
    }
    let of_server = OF_SERVER.contains(id);
    argument.hide(of_server)
}

/// The settings of a server. [`of_tool`] asks for each argument of each command, and to collect
/// them takes as long as the rest of the start of a program.
static OF_SERVER: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let settings = Overrides::augment_args(clap::Command::new("serve"));
    settings.get_arguments().map(|setting| setting.get_id().to_string()).collect()
});

/// The same for a command that is about the keys that wrap those of domains.
fn of_key_tool(argument: Arg) -> Arg {
    if KEYS.contains(&argument.get_id().as_str()) { argument.help_heading("Keys") } else { of_tool(argument) }
}

/// Variables that no flag stands for: command lines can be read by everyone on the machine.
const TOKENS: [&str; 3] = ["PF_REGISTRY_UPSTREAM_TOKEN", "PF_REGISTRY_FROM_TOKEN", "PF_REGISTRY_TO_TOKEN"];

/// The sources of the settings: the same for every command, so that all of them mean the same
/// store.
#[derive(Args)]
pub(crate) struct Settings {
    /// Settings file (TOML); flags and environment variables win over it.
    #[arg(long, env = "PF_REGISTRY_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    overrides: Box<Overrides>,
}

impl Settings {
    /// Reads the settings, and starts the log and the export of traces.
    fn load(self) -> Result<Config, Error> {
        let config = Config::load(self.config.as_deref(), *self.overrides)?;
        let opened = pfr_service::traces::open("pf-registry", &config.trace_settings()).map_err(crate::config::SettingsError::Traces)?;
        pfr_service::log::start(config.log_format, &config.log, opened.traces).map_err(crate::config::SettingsError::Filter)?;
        if let Some(error) = opened.refused {
            tracing::warn!(%error, "no traces are sent");
        }
        settings::warn_of_unknown(&Cli::command(), "PF_REGISTRY_", &TOKENS);
        Ok(config)
    }

    /// Reads the settings for a command that opens no store: it needs no data directory.
    fn read(self) -> Result<Config, Error> {
        Ok(Config::read(self.config.as_deref(), *self.overrides)?)
    }
}

impl Command {
    /// Runs the command to its end.
    pub(crate) fn run(self) -> Result<(), Error> {
        match self {
            Self::Serve(args) => serve::run(args),
            Self::Gc(args) => gc::run(args),
            Self::Mirror(arguments) => mirror::run(*arguments),
            Self::Scrub(args) => scrub::run(args),
            Self::Fsck(args) => fsck::run(args),
            Self::Health(args) => health::run(args),
            Self::Token(command) => token::run(command),
            Self::Domain(command) => domain::run(command),
            Self::Rebuild(args) => rebuild::run(args),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    /// Every start of the program waits for it: a tenth of a second, when each argument of each
    /// command collected the settings of a server.
    #[test]
    fn the_command_line_takes_as_long_as_its_commands_and_not_as_long_as_their_square() {
        let time = |work: &dyn Fn() -> clap::Command| {
            let begun = Instant::now();
            std::hint::black_box(work());
            begun.elapsed()
        };
        let (mut settings, mut whole) = (Duration::MAX, Duration::MAX);
        // The least of many, in alternation: other tests take the processor away meanwhile.
        for _ in 0..50 {
            settings = settings.min(time(&|| Overrides::augment_args(clap::Command::new("serve"))));
            whole = whole.min(time(&|| Cli::command()));
        }
        assert!(whole < settings * 60, "{whole:?} for all commands, {settings:?} for the settings of a server");
    }
}
