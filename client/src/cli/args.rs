//! The command line. Each flag is declared once; commands that share a flag flatten its struct.

mod engines;
mod exchange;
mod login;
mod names;
mod reference;
mod signing;
mod transfer;
mod upkeep;

pub use engines::{
    DrainArgs, EnginesArgs, JobCommand, JobsArgs, Match, Restore, RestoresArgs, SequencesArgs, Snapshot, WarmArgs, WhenToPush,
};
pub use exchange::{Copy, Export, Import, ImportOther};
pub use login::{Login, LoginAt};
pub use names::{Diff, Fork, Inspect, Log, Ls, Prune, Rm, TagArgs};
pub use reference::{Expected, Inside, Relative, Repositories, Short, Target, repository_of};
pub use signing::{Keygen, Sign, Signing, SigningCommand};
pub use transfer::{Encode, Pull, Push};
pub use upkeep::{Completions, Df, Events, Gc, Pin, Retention, RetentionCommand, Scrub, Stats, TaskCommand, Tasks, Verify};

use super::config::{EVERYWHERE, Overrides};
use clap::builder::styling::{AnsiColor, Styles};
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// The styles of help texts.
pub const STYLES: Styles = Styles::styled()
    .header(AnsiColor::White.on_default().bold())
    .usage(AnsiColor::White.on_default().bold())
    .literal(AnsiColor::Cyan.on_default())
    .placeholder(AnsiColor::White.on_default().dimmed());

const AFTER: &str = "\
A REF is [[http(s)://]host[:port]/[domains/NAME/]]repository[:tag[~N]|@digest], such as team/agent:step-1, or team/agent:step-3~2 for two \
parents up. Without a tag it means the tag `latest`; `pf snapshot` makes the tag from the name of the sequence. A digest may be cut \
short, as in team/agent@2a19b2c9309a.

Commands that list, change or check a store use the registry; --local selects the local store.

Exit codes: 0 ok, 1 usage or bad input, 3 conflict (a tag moved), 4 integrity, 5 not found, 6 not permitted, 7 unreachable, \
8 full (a disk or memory), 70 bug.

Try `pf demo` for all of it with a real model.";

/// Keep, fork and move the paged KV caches of LLM agents, each named by its digest.
#[derive(Debug, Parser)]
#[command(name = "pf", version, styles = STYLES, after_help = AFTER, max_term_width = 120)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Clone, Debug, clap::Args)]
pub struct Global {
    /// Options that are settings of the configuration file, too.
    #[command(flatten)]
    pub settings: Overrides,
    /// Write one JSON document to stdout instead of text; an error is one JSON object on stderr
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub json: bool,
    /// No progress bars, no summaries
    #[arg(long, short, global = true, help_heading = EVERYWHERE)]
    pub quiet: bool,
}

impl Global {
    /// The same options as arguments of another program.
    pub fn arguments(&self) -> Vec<OsString> {
        let Self { settings, json, quiet } = self;
        let Overrides { registry, tls_ca, store, retries, retry_for, .. } = settings;
        let values = [
            ("--registry", registry.clone().map(OsString::from)),
            ("--tls-ca", tls_ca.clone().map(OsString::from)),
            ("--store", store.clone().map(OsString::from)),
            ("--retries", retries.map(|n| n.to_string().into())),
            ("--retry-for", retry_for.map(|n| n.to_string().into())),
        ];
        let mut arguments = Vec::new();
        for (name, value) in values {
            arguments.extend(value.into_iter().flat_map(|value| [OsString::from(name), value]));
        }
        arguments.extend(json.then(|| "--json".into()));
        arguments.extend(quiet.then(|| "--quiet".into()));
        arguments
    }
}

/// The store that a command works with: one rule for all commands.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Where {
    /// The local store, not the registry
    #[arg(long, conflicts_with = "remote")]
    pub local: bool,
    /// The registry; this is the default
    #[arg(long)]
    pub remote: bool,
}

/// The capture agent that a command asks.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentAt {
    /// Control socket of the capture agent
    #[arg(long, value_name = "SOCKET", value_hint = clap::ValueHint::FilePath, env = "PF_AGENT_SOCKET", hide_env_values = true)]
    pub agent: Option<PathBuf>,
}

/// Everything after the name of a command that is a program of its own.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub struct Passed {
    /// Arguments; --help lists them
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true, value_hint = clap::ValueHint::AnyPath)]
    pub arguments: Vec<OsString>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Store a snapshot in a registry, sending only the parts that it lacks
    #[command(after_help = transfer::PUSH_EXAMPLES)]
    Push(Push),
    /// Fetch a snapshot, only the parts that are missing here
    #[command(after_help = transfer::PULL_EXAMPLES)]
    Pull(Pull),
    /// Copy a snapshot from registry to registry, only the parts that are missing there
    #[command(after_help = exchange::COPY_EXAMPLES)]
    Copy(Copy),
    /// Write snapshots into files, a bucket or a registry of another program, as OCI artifacts
    #[command(after_help = exchange::EXPORT_EXAMPLES)]
    Export(Export),
    /// List repositories, or the contents of one
    #[command(visible_alias = "list")]
    Ls(Ls),
    /// Draw the lineage of a snapshot, or of a whole repository
    Log(Log),
    /// Show the parts of a snapshot
    Inspect(Inspect),
    /// Compare two snapshots
    Diff(Diff),
    /// Give a snapshot another name
    Tag(TagArgs),
    /// Delete tags, or snapshots with all their tags
    #[command(visible_alias = "delete", after_help = names::RM_EXAMPLES)]
    Rm(Rm),
    /// Delete old or untagged snapshots of a repository
    #[command(after_help = names::PRUNE_EXAMPLES)]
    Prune(Prune),
    /// Make N tags of one snapshot: forks share every byte
    #[command(after_help = names::FORK_EXAMPLES)]
    Fork(Fork),
    /// Show how much snapshots share, and the size of each
    #[command(after_help = upkeep::STATS_EXAMPLES)]
    Stats(Stats),
    /// Show the use of disk space, what can be freed, and when
    #[command(visible_alias = "du", after_help = upkeep::DF_EXAMPLES)]
    Df(Df),
    /// Free blobs that no snapshot refers to
    #[command(after_help = upkeep::GC_EXAMPLES)]
    Gc(Gc),
    /// Keep a snapshot in the local store, however large the store is
    #[command(after_help = upkeep::PIN_EXAMPLES)]
    Pin(Pin),
    /// Verify a snapshot: every byte is read and hashed, or with --key its signature is checked
    Verify(Verify),
    /// Sign a snapshot
    #[command(after_help = signing::SIGN_EXAMPLES)]
    Sign(Sign),
    /// Make a pair of keys for signatures
    Keygen(Keygen),
    /// Check every stored byte, and list damaged blobs
    #[command(after_help = upkeep::SCRUB_EXAMPLES)]
    Scrub(Scrub),
    /// Show the background work of the registry, pause or resume it
    #[command(after_help = upkeep::TASKS_EXAMPLES)]
    Tasks(Tasks),
    /// Show and set what the registry deletes by itself, and have it done now
    #[command(after_help = upkeep::RETENTION_EXAMPLES)]
    Retention(Retention),
    /// Show and set which tags of the registry need signed snapshots
    #[command(after_help = signing::SIGNING_EXAMPLES)]
    Signing(Signing),
    /// Follow what happens in the registry: pushes, tags, deletions, collections
    #[command(after_help = upkeep::EVENTS_EXAMPLES)]
    Events(Events),
    /// List the engines whose state this host's capture agent can take and restore
    #[command(after_help = engines::ENGINES_EXAMPLES)]
    Engines(EnginesArgs),
    /// List the sequences of an engine that can be captured, and what its requests saved
    Sequences(SequencesArgs),
    /// Capture a sequence of a running engine
    #[command(after_help = engines::SNAPSHOT_EXAMPLES)]
    Snapshot(Snapshot),
    /// Restore a snapshot into a running engine, proven bit by bit
    #[command(after_help = engines::RESTORE_EXAMPLES)]
    Restore(Restore),
    /// List the last restores of this host's engines, and states that were not taken, with reasons
    Restores(RestoresArgs),
    /// Find the deepest snapshot that given tokens can be resumed from
    Match(Match),
    /// List the pushes of the capture agent, open and done
    Pushes(AgentAt),
    /// Capture and push every sequence on this host
    Drain(DrainArgs),
    /// Pull snapshots into the agent's store ahead of the restores that need them
    #[command(after_help = engines::WARM_EXAMPLES)]
    Warm(WarmArgs),
    /// List the jobs of the capture agent, or cancel one
    Jobs(JobsArgs),
    /// Take over snapshots that were exported, or the state that another system keeps
    #[command(after_help = exchange::IMPORT_EXAMPLES)]
    Import(Import),
    /// Store an access token for a registry, once the registry has accepted it
    #[command(after_help = login::LOGIN_EXAMPLES)]
    Login(Login),
    /// Forget the stored token of a registry
    Logout(LoginAt),
    /// Print a completion script for a shell
    Completions(Completions),
    /// Show everything with a real model, in under two minutes
    #[command(after_help = "`pf demo --help` lists its options.")]
    Demo(Passed),
    /// Print the version
    #[command(hide = true)]
    Version,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::output::human;
    use clap::{Args as _, CommandFactory as _};
    use pfr_schema::Reference;

    #[test]
    fn every_help_text_renders_and_fits_120_columns() {
        let mut command = Args::command().term_width(120);
        command.build();
        let mut texts = vec![command.render_long_help().to_string()];
        for subcommand in command.get_subcommands_mut() {
            texts.push(subcommand.render_help().to_string());
            texts.push(subcommand.render_long_help().to_string());
        }
        assert!(texts.len() > 26);
        for line in texts.iter().flat_map(|t| t.lines()) {
            assert!(human::columns(line) <= 120, "{line}");
        }
    }

    #[test]
    fn options_of_a_program_are_not_among_those_of_every_command() {
        let program = Global::augment_args(clap::Command::new("program")).arg(clap::Arg::new("own").long("own"));
        let heading = |name: &str| program.get_arguments().find(|argument| argument.get_id() == name).unwrap().get_help_heading();
        assert_eq!(heading("own"), None);
        let ours = ["registry", "tls_ca", "store", "retries", "retry_for", "json", "quiet"];
        assert_eq!(ours.map(heading), [Some(EVERYWHERE); 7]);
    }

    #[test]
    fn the_parser_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn short_references_stay_in_the_repository_of_the_first_one() {
        let base: Reference = "http://r:1/team/agent:a".parse().unwrap();
        let seen = |text: &str| text.parse::<Relative>().unwrap().seen_from(&base).to_string();
        assert_eq!(seen(":b~2"), "http://r:1/team/agent:b~2");
        assert_eq!(seen("other:b"), "http://r:1/other:b");
        assert_eq!(seen("http://s/other"), "http://s/other");
        assert!(":".parse::<Relative>().is_err());
    }

    #[test]
    fn bad_references_are_usage_errors() {
        let error = Args::try_parse_from(["pf", "inspect", "Team/Agent"]).unwrap_err();
        assert!(error.use_stderr() && error.to_string().contains("lower-case"), "{error}");
        assert!(Args::try_parse_from(["pf", "verify"]).is_err());
        assert!(Args::try_parse_from(["pf", "verify", "--local"]).is_ok());
        assert!(Args::try_parse_from(["pf", "fork", "a:b", "-n", "0"]).is_err());
    }
}
