//! What can be typed. Each flag is declared once; commands that share one flatten the struct that has it.

use super::output::human;
use clap::builder::styling::{AnsiColor, Styles};
use clap::{Parser, Subcommand};
use pfr_schema::api::TagState;
use pfr_schema::name::is_bare_digest;
use pfr_schema::{DigestPrefix, FormatError, Reference, RepositoryName, Selector, Tag};
use std::path::PathBuf;
use std::str::FromStr;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::White.on_default().bold())
    .usage(AnsiColor::White.on_default().bold())
    .literal(AnsiColor::Cyan.on_default())
    .placeholder(AnsiColor::White.on_default().dimmed());

const AFTER: &str = "\
A REF is [[http(s)://]host[:port]/]repository[:tag[~N]|@digest], such as team/agent:step-1, or team/agent:step-3~2 for two \
parents up. Without a tag it means the tag `latest`. A digest may be cut short, as in team/agent@2a19b2c9309a.

Exit codes: 0 ok, 1 usage or bad input, 3 conflict (a tag moved), 4 integrity, 5 not found, 6 not permitted, 7 unreachable, \
70 bug.

Try `pf demo` for all of it with a real model.";

/// Keep, fork and move the paged KV caches of LLM agents, each named by its digest.
#[derive(Debug, Parser)]
#[command(name = "pf", version, styles = STYLES, after_help = AFTER, max_term_width = 120, arg_required_else_help = true)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// What every command takes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Global {
    /// Registry for references that name none
    #[arg(long, global = true, value_name = "URL", env = "PF_REGISTRY", hide_env_values = true)]
    pub registry: Option<String>,
    /// Directory of the local store
    #[arg(long, global = true, value_name = "DIR", value_hint = clap::ValueHint::DirPath, env = "PF_STORE", hide_env_values = true)]
    pub store: Option<PathBuf>,
    /// How often a request is tried again, however long that takes [default: 5, and --retry-for for a registry that is gone]
    #[arg(long, global = true, value_name = "N", env = "PF_RETRIES", hide_env_values = true)]
    pub retries: Option<u32>,
    /// How long a registry that has answered and is gone is tried again, such as while it restarts [default: 120]
    #[arg(long, global = true, value_name = "SECONDS", env = "PF_RETRY_FOR", hide_env_values = true)]
    pub retry_for: Option<u64>,
    /// Write one JSON document to stdout instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// No progress bars, no summaries
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// Which store a command looks at.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Where {
    /// Look at the local store, not at a registry
    #[arg(long)]
    pub local: bool,
}

/// Which capture agent a command asks.
#[derive(Clone, Debug, clap::Args)]
pub struct AgentAt {
    /// Control socket of the capture agent
    #[arg(long, value_name = "SOCKET", value_hint = clap::ValueHint::FilePath, env = "PF_AGENT_SOCKET", hide_env_values = true)]
    pub agent: Option<PathBuf>,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Store a snapshot in a registry, sending only what it lacks
    #[command(after_help = PUSH_EXAMPLES)]
    Push(Push),
    /// Fetch a snapshot, only what is missing here
    #[command(after_help = PULL_EXAMPLES)]
    Pull(Pull),
    /// List repositories, or what one of them holds
    Ls(Ls),
    /// Draw the lineage of a snapshot, or of a whole repository
    Log(Log),
    /// Show what a snapshot is made of
    Inspect(Inspect),
    /// Show what differs between two snapshots
    Diff(Diff),
    /// Give a snapshot another name
    Tag(TagArgs),
    /// Delete a tag, or a snapshot with all its tags
    Rm(Rm),
    /// Make N tags of one snapshot: forks share every byte
    #[command(after_help = FORK_EXAMPLES)]
    Fork(Fork),
    /// Show how much snapshots share and what each costs
    #[command(after_help = STATS_EXAMPLES)]
    Stats(Stats),
    /// Show what takes up room, what can be freed, and from when
    #[command(after_help = DF_EXAMPLES)]
    Df(Df),
    /// Free what nothing holds any more, in the local store or in a registry
    #[command(after_help = GC_EXAMPLES)]
    Gc(Gc),
    /// Keep a snapshot of the local store whatever its size
    Pin(Pin),
    /// Prove a snapshot whole: every byte read and hashed
    Verify(Verify),
    /// Check every stored byte, and name what is damaged
    Scrub(Scrub),
    /// List the engines whose state this host's capture agent can take and restore
    Engines(AgentAt),
    /// Capture a sequence of a running engine
    #[command(after_help = SNAPSHOT_EXAMPLES)]
    Snapshot(Snapshot),
    /// Restore a snapshot into a running engine, proven bit by bit
    #[command(after_help = RESTORE_EXAMPLES)]
    Restore(Restore),
    /// Find the deepest snapshot that given tokens can be resumed from
    Match(Match),
    /// List the pushes that the capture agent has to do, and those it did
    Pushes(AgentAt),
    /// Capture and push every sequence on this host
    Drain(DrainArgs),
    /// Take over what another system keeps
    #[command(subcommand)]
    Import(Import),
    /// Print a completion script for a shell
    Completions(Completions),
    /// Show the whole of it with a real model, in under two minutes
    Demo(Demo),
}

const SNAPSHOT_EXAMPLES: &str = "\
Examples:
  pf snapshot vllm-0 team/agent:step-9
  pf snapshot vllm-0 team/agent:step-9 --sequence req-17 --exact --push wait

The engine stands still for a moment and goes on; the push runs in the background (`pf pushes`) and survives restarts.";

/// Arguments of `snapshot`.
#[derive(Debug, clap::Args)]
pub struct Snapshot {
    /// Which engine, as `pf engines` lists it
    pub engine: String,
    /// Where to: repository and tag; by default engines/ENGINE and the sequence's name
    #[arg(value_name = "REF")]
    pub target: Option<Reference>,
    /// Which sequence; may be left out if there is just one
    #[arg(long, short)]
    pub sequence: Option<String>,
    /// Whose state it is, for people
    #[arg(long = "as", value_name = "AGENT")]
    pub agent_id: Option<String>,
    /// A label for the snapshot; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<Label>,
    /// Refuse if something that decides the next token is not recorded
    #[arg(long)]
    pub exact: bool,
    /// When the registry gets it
    #[arg(long, value_enum, default_value_t = WhenToPush::Background)]
    pub push: WhenToPush,
    /// Highest scores of the next step to record, compared after a restore; 0 for none
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub oracle: Option<u32>,
    #[command(flatten)]
    pub at: AgentAt,
}

/// When a snapshot is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WhenToPush {
    /// Soon, without waiting for it
    Background,
    /// Now; the command ends when the registry has it
    Wait,
    /// It stays in the agent's store
    Never,
}

const RESTORE_EXAMPLES: &str = "\
Examples:
  pf restore team/agent:step-9 vllm-0
  pf restore team/agent:step-9~2 vllm-0          two snapshots earlier
  pf restore team/agent:step-9 vllm-0 --local    without asking the registry

An engine that takes sequences at any time runs it at once; another takes it with the next request for its tokens. \
What cannot be proven equal is refused, and the engine is as it was.";

/// Arguments of `restore`.
#[derive(Debug, clap::Args)]
pub struct Restore {
    /// What
    #[arg(value_name = "REF")]
    pub reference: Reference,
    /// Into which engine, as `pf engines` lists it
    pub engine: String,
    /// Take it from the agent's store, do not ask a registry
    #[arg(long)]
    pub local: bool,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Arguments of `match`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("deployment").required(true)))]
pub struct Match {
    /// Repository to look in
    #[arg(value_name = "REPOSITORY")]
    pub repository: Reference,
    /// Token ids: a JSON array, or u32 little-endian; `-` reads stdin
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub tokens: PathBuf,
    /// Deployment fingerprint that must match
    #[arg(long, value_name = "DIGEST", group = "deployment")]
    pub fingerprint: Option<pfr_schema::Digest>,
    /// The fingerprint of this engine, as the agent knows it
    #[arg(long, value_name = "ENGINE", group = "deployment")]
    pub engine: Option<String>,
    /// Tenant salt of the prefix
    #[arg(long, default_value = "")]
    pub salt: String,
    /// Adapter (LoRA) of the prefix
    #[arg(long)]
    pub adapter: Option<String>,
    #[command(flatten)]
    pub side: Where,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Arguments of `drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    /// Repository under which every engine gets one of its own
    pub repository: RepositoryName,
    /// Only say what there is to do
    #[arg(long)]
    pub plan: bool,
    /// Seconds to wait for the registry to have it; what is late goes on in the background
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub wait: Option<u64>,
    #[command(flatten)]
    pub at: AgentAt,
}

/// What can be imported.
#[derive(Debug, Subcommand)]
pub enum Import {
    /// The images of ProcessFork stores, with their lineage
    #[command(after_help = IMPORT_EXAMPLES)]
    Processfork(ImportProcessfork),
}

const IMPORT_EXAMPLES: &str = "\
Examples:
  pf import processfork ~/.processfork --dry-run
  pf import processfork ~/.processfork --repository team/old
  pf import processfork ~/.processfork/images/9f86d081884c….json --local

Images of agent KIND go to PREFIX/KIND, tagged with the first 16 digits of their own digest. Run it again whenever there \
are more of them: what is there already is neither made nor sent twice.";

/// Arguments of `import processfork`.
#[derive(Debug, clap::Args)]
pub struct ImportProcessfork {
    /// Directories of stores, or single images within them; an image's ancestors come along
    #[arg(value_name = "STORE|FILE", required = true, value_hint = clap::ValueHint::AnyPath)]
    pub paths: Vec<PathBuf>,
    /// Repository, of a registry too, below which they go
    #[arg(long, value_name = "PREFIX", default_value = "processfork")]
    pub repository: Reference,
    /// Into the local store, not into a registry
    #[arg(long)]
    pub local: bool,
    /// Only read and check everything but the contents of pages
    #[arg(long)]
    pub dry_run: bool,
}

/// `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label(pub String, pub String);

impl FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self(key.into(), value.into())),
            _ => Err("expected KEY=VALUE".into()),
        }
    }
}

const PUSH_EXAMPLES: &str = "\
Examples:
  pf push ./snapshot team/agent:step-1
  pf push ./snapshot team/agent:step-2 --parent :step-1
  pf push ./snapshot team/agent:head --if-tag-is absent
  pf push team/agent:step-1 https://host/team/agent:step-1

The third fails if the tag exists; the last takes a snapshot of the local store. The last line of stdout is the digest. \
Interrupted, run the same command again: what arrived is not sent twice.";

/// Arguments of `push`.
#[derive(Debug, clap::Args)]
pub struct Push {
    /// A snapshot directory, or a REF in the local store
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub source: String,
    /// Where to: repository and tag
    #[arg(value_name = "REF")]
    pub target: Reference,
    /// Move the tag only if it is at this digest, or is `absent`
    #[arg(long, value_name = "DIGEST|absent")]
    pub if_tag_is: Option<Expected>,
    /// Snapshot that this one continues; twice for a merge; `:TAG` means the target's repository
    #[arg(long, value_name = "REF")]
    pub parent: Vec<Relative>,
}

const PULL_EXAMPLES: &str = "\
Examples:
  pf pull team/agent:step-1
  pf pull team/agent:step-1 ./snapshot
  pf pull team/agent@sha256:9f86d081884c…

The first keeps the snapshot in the local store, under the same name. The last line of stdout is the digest. \
Interrupted, run the same command again: what arrived is not fetched twice.";

/// Arguments of `pull`.
#[derive(Debug, clap::Args)]
pub struct Pull {
    /// What to fetch
    #[arg(value_name = "REF")]
    pub reference: Reference,
    /// Write a snapshot directory here, past the local store
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
}

/// Arguments of `ls`.
#[derive(Debug, clap::Args)]
pub struct Ls {
    /// List this repository's snapshots and tags
    #[arg(value_name = "REPOSITORY")]
    pub repository: Option<Reference>,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `log`.
#[derive(Debug, clap::Args)]
pub struct Log {
    /// A snapshot and its ancestors; without tag or digest every snapshot of the repository
    #[arg(value_name = "REF")]
    pub reference: Reference,
    #[command(flatten)]
    pub at: Where,
    /// Most snapshots to show
    #[arg(long, short = 'n', default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
}

/// Arguments of `inspect`.
#[derive(Debug, clap::Args)]
pub struct Inspect {
    /// Which snapshot
    #[arg(value_name = "REF")]
    pub reference: Reference,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `diff`.
#[derive(Debug, clap::Args)]
pub struct Diff {
    /// The first snapshot
    #[arg(value_name = "A")]
    pub a: Reference,
    /// The second; `:TAG` or `@DIGEST` alone mean the first one's repository
    #[arg(value_name = "B")]
    pub b: Relative,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `tag`.
#[derive(Debug, clap::Args)]
pub struct TagArgs {
    /// Which snapshot
    #[arg(value_name = "REF")]
    pub reference: Reference,
    /// The new name, in the same repository
    #[arg(value_name = "NEWTAG")]
    pub tag: Tag,
    /// Move the tag only if it is at this digest, or is `absent`
    #[arg(long, value_name = "DIGEST|absent")]
    pub if_tag_is: Option<Expected>,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `rm`.
#[derive(Debug, clap::Args)]
pub struct Rm {
    /// repository:tag deletes the tag and keeps its snapshot; repository@digest deletes the snapshot and its tags
    #[arg(value_name = "REF")]
    pub reference: Reference,
    #[command(flatten)]
    pub at: Where,
}

const FORK_EXAMPLES: &str = "\
Examples:
  pf fork team/agent:step-2 -n 3
  pf fork team/agent:step-2 -n 100 --prefix try

The first makes the tags step-2-fork-1 to step-2-fork-3, the second try-1 to try-100. If one of the tags exists, none is \
made. No bytes move.";

/// Arguments of `fork`.
#[derive(Debug, clap::Args)]
pub struct Fork {
    /// What to fork
    #[arg(value_name = "REF")]
    pub reference: Reference,
    /// How many forks
    #[arg(short = 'n', long = "count", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: u32,
    /// Tags are PREFIX-1 … PREFIX-N; by default TAG-fork
    #[arg(long)]
    pub prefix: Option<String>,
    #[command(flatten)]
    pub at: Where,
}

const STATS_EXAMPLES: &str = "\
Columns:
  logical     bytes the snapshot reaches
  new         bytes it brought first
  shared      bytes that another snapshot holds as well
  exclusive   bytes that deleting it would free

Examples:
  pf stats team/agent
  pf stats team/agent --json | jq .dedup_ratio";

/// Arguments of `stats`.
#[derive(Debug, clap::Args)]
pub struct Stats {
    /// Only this repository
    #[arg(value_name = "REPOSITORY")]
    pub repository: Option<Reference>,
    #[command(flatten)]
    pub at: Where,
}

const DF_EXAMPLES: &str = "\
Rows:
  snapshots    held by a snapshot; deleting snapshots and garbage collection free it
  leased       held by no snapshot, kept for a push or pull that has not ended
  garbage      held by nothing; the next `pf gc` frees it
  dead         room between blobs in packs; compaction gives it back once half of a pack is dead
  deleted      kept on storage for the grace period
  unfinished   uploads that have not ended";

/// Arguments of `df`.
#[derive(Debug, clap::Args)]
pub struct Df {
    #[command(flatten)]
    pub at: Where,
}

const GC_EXAMPLES: &str = "\
Examples:
  pf gc
  pf gc --max-size 50GiB
  pf gc --unfinished
  pf gc --remote --dry-run

With a size, which `max-store-size` in the configuration file gives for every pull, the local store is a cache: it loses the \
least recently used snapshots until it fits, wherever else they are. `pf pin` keeps one. What an unfinished push or pull \
stored stays until its lease ends; --unfinished frees it now.";

/// Arguments of `gc`.
#[derive(Debug, clap::Args)]
pub struct Gc {
    /// Delete the least recently used snapshots until the local store is no larger
    #[arg(long, value_name = "SIZE", conflicts_with = "remote")]
    pub max_size: Option<pfr_client::ByteSize>,
    /// Free what interrupted pulls left, too: ends every unfinished pull, import and capture into the local store; one that still runs starts again
    #[arg(long, conflicts_with = "remote")]
    pub unfinished: bool,
    /// Change nothing, show what would go
    #[arg(long)]
    pub dry_run: bool,
    /// Have the registry collect, not the local store
    #[arg(long)]
    pub remote: bool,
}

/// Arguments of `pin`.
#[derive(Debug, clap::Args)]
pub struct Pin {
    /// Which snapshot of the local store
    #[arg(value_name = "REF")]
    pub reference: Reference,
    /// No longer
    #[arg(long)]
    pub remove: bool,
}

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Verify {
    /// Which snapshot; with --local, without a REF: whatever has a tag
    #[arg(value_name = "REF", required_unless_present = "local")]
    pub reference: Option<Reference>,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `scrub`.
#[derive(Debug, clap::Args)]
pub struct Scrub {
    /// Have the registry check what it stores, not the local store
    #[arg(long)]
    pub remote: bool,
    /// Decode and hash every blob, and not only compare checksums
    #[arg(long)]
    pub full: bool,
}

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}

/// Arguments of `demo`.
#[derive(Debug, clap::Args)]
pub struct Demo {
    /// Work in this directory and keep it
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    pub keep: Option<PathBuf>,
    /// The model that runs
    #[arg(long, value_enum, default_value_t = DemoModel::Smollm2)]
    pub model: DemoModel,
}

/// A model of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum DemoModel {
    /// SmolLM2-135M: tells a story; fetched once, 93 MB
    Smollm2,
    /// Random weights and recurrent state: tells numbers; needs no network
    Hybrid,
}

/// A reference that may leave out the repository: `:TAG`, `@DIGEST`, `sha256:…`, or a whole [`Reference`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Relative {
    /// In the repository at hand.
    Same(Selector),
    /// Anywhere.
    Other(Reference),
}

impl Relative {
    /// The whole reference, seen from `base`; a registry is inherited too.
    pub fn seen_from(&self, base: &Reference) -> Reference {
        match self {
            Self::Same(selector) => Reference { selector: Some(selector.clone()), ..base.clone() },
            Self::Other(reference) => {
                Reference { registry: reference.registry.clone().or_else(|| base.registry.clone()), ..reference.clone() }
            }
        }
    }
}

impl FromStr for Relative {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        match text.strip_prefix(':') {
            Some(selector) => selector.parse().map(Self::Same),
            None if text.starts_with('@') || is_bare_digest(text) => text.parse().map(Self::Same),
            None => text.parse().map(Self::Other),
        }
    }
}

/// Where a tag should be for a command to move it: `absent`, or a digest, which may be cut short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Known in full.
    State(TagState),
    /// To be looked up.
    Prefix(DigestPrefix),
}

impl FromStr for Expected {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let digest = text.strip_prefix('@').unwrap_or(text);
        digest.parse().map(Self::State).or_else(|_| digest.parse().map(Self::Prefix))
    }
}

/// The repository that a reference without tag or digest names.
pub fn repository_of(reference: &Reference) -> Result<RepositoryName, super::failure::Failure> {
    match &reference.selector {
        None => Ok(reference.repository.clone()),
        Some(_) => Err(super::failure::Failure::usage(format!("expected a repository without a tag or digest, found {reference}"))
            .hint(format!("`pf inspect {}` shows one snapshot", human::one_line(&reference.to_string())))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

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
    fn the_parser_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn short_references_stay_in_the_repository_at_hand() {
        let base: Reference = "http://r:1/team/agent:a".parse().unwrap();
        let seen = |text: &str| text.parse::<Relative>().unwrap().seen_from(&base).to_string();
        assert_eq!(seen(":b~2"), "http://r:1/team/agent:b~2");
        assert_eq!(seen("other:b"), "http://r:1/other:b");
        assert_eq!(seen("http://s/other"), "http://s/other");
        assert!(":".parse::<Relative>().is_err());
        assert_eq!(seen("@2a19b2c9"), "http://r:1/team/agent@2a19b2c9");
        assert_eq!(seen("sha256:2a19b2c9"), "http://r:1/team/agent@sha256:2a19b2c9");
    }

    #[test]
    fn the_state_of_a_tag_is_absent_or_a_digest_that_may_be_cut_short() {
        let expected = |text: &str| text.parse::<Expected>();
        assert_eq!(expected("absent"), Ok(Expected::State(TagState::Absent)));
        let digest = pfr_schema::Digest::sha256(b"x");
        assert_eq!(expected(&digest.to_string()), Ok(Expected::State(TagState::At(digest))));
        for short in [digest.short(), format!("@{}", digest.short()), format!("sha256:{}", digest.short())] {
            assert!(matches!(expected(&short), Ok(Expected::Prefix(prefix)) if prefix.matches(&digest)), "{short}");
        }
        assert!(expected("latest").is_err() && expected("2a1").is_err());
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
