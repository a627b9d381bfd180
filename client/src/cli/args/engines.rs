//! Commands that talk to the capture agent of this host.

use super::reference::{Label, Short};
use super::{AgentAt, Where};
use crate::cli::completion::{references, repositories};
use pfr_client::{Age, ByteSize};
use pfr_schema::{AgentName, Reference, RepositoryName};
use std::path::PathBuf;

pub const ENGINES_EXAMPLES: &str = "\
Examples:
  pf engines
  pf engines --fleet
  pf engines --fleet --forget gpu-7 gpu-8   hosts that are gone";

/// Arguments of `engines`.
#[derive(Debug, clap::Args)]
pub struct EnginesArgs {
    /// The engines of all hosts whose agents report to the registry; the token needs `admin`. Not
    /// with --agent, as no agent is asked
    #[arg(long)]
    pub fleet: bool,
    /// Have the registry forget these agents, by the names of their hosts in the list. One that
    /// still runs is listed again after its next report
    #[arg(long, value_name = "HOST", num_args = 1.., requires = "fleet")]
    pub forget: Vec<AgentName>,
    #[command(flatten)]
    pub at: AgentAt,
}

pub const SNAPSHOT_EXAMPLES: &str = "\
Examples:
  pf snapshot vllm-0 team/agent:step-9
  pf snapshot vllm-0 team/agent:step-9 --sequence req-17 --exact --push wait

`pf sequences` lists what can be captured. vLLM is not paused. Other engines pause: for milliseconds if they pin their pages, else until \
the pages are copied. The push runs in the background (`pf pushes`) and survives restarts.";

/// Arguments of `snapshot`.
#[derive(Debug, clap::Args)]
pub struct Snapshot {
    /// The engine, as `pf engines` lists it
    pub engine: String,
    /// Repository and tag of the snapshot. Without a tag, the tag is the sequence's name; without a
    /// REF, the repository is engines/ENGINE
    #[arg(value_name = "REF", add = references())]
    pub target: Option<Reference>,
    /// The sequence; may be left out if there is only one
    #[arg(long, short)]
    pub sequence: Option<String>,
    /// Name of the agent that the state belongs to, for users
    #[arg(long = "as", value_name = "AGENT")]
    pub agent_id: Option<String>,
    /// A label for the snapshot; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub label: Vec<Label>,
    /// Refuse if the next token depends on state that is not recorded
    #[arg(long)]
    pub exact: bool,
    /// When to push the snapshot
    #[arg(long, value_enum, default_value_t = WhenToPush::Background)]
    pub push: WhenToPush,
    /// The snapshot that this one follows: a digest, or a reference in the agent's store [default:
    /// the one that the sequence was last captured as or restored from]
    #[arg(long, value_name = "REF")]
    pub parent: Option<String>,
    /// Highest logits of the next step to record, compared after a restore; 0 for none
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub logits: Option<u32>,
    #[command(flatten)]
    pub at: AgentAt,
}

/// When a snapshot is pushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum WhenToPush {
    /// In the background
    Background,
    /// Now; the command ends when the registry has the snapshot
    Wait,
    /// Not at all; the snapshot stays in the agent's store
    Never,
}

/// Arguments of `sequences`.
#[derive(Debug, clap::Args)]
pub struct SequencesArgs {
    /// The engine, as `pf engines` lists it
    pub engine: String,
    #[command(flatten)]
    pub at: AgentAt,
}

pub const RESTORE_EXAMPLES: &str = "\
Examples:
  pf restore team/agent:step-9 vllm-0
  pf restore team/agent:step-9~2 vllm-0           two snapshots earlier
  pf restore team/agent:step-9 vllm-0 --local     without asking the registry
  pf restore team/agent:step-9 vllm-0 --no-store  without filling the agent's store
  pf restore team/agent:step-9 llama-0 -s 3       into a slot of a llama-server
  pf restore team/agent:step-9 vllm-1 --reshard   vllm-1 has another number of ranks

An engine that takes sequences at any time runs it at once; another takes it with the next request for its tokens. \
A restore that cannot be proven equal is refused, and changes nothing in the engine.";

/// Arguments of `restore`.
#[derive(Debug, clap::Args)]
pub struct Restore {
    /// The snapshot
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    /// The engine, as `pf engines` lists it
    pub engine: String,
    /// Take the snapshot from the agent's store, without asking a registry
    #[arg(long)]
    pub local: bool,
    /// Add nothing to the agent's store: pages that it lacks pass from the registry to the engine.
    /// Only for engines that take sequences at any time
    #[arg(long, conflicts_with = "local")]
    pub no_store: bool,
    /// The slot of a llama-server, which may be in use; otherwise an empty one
    #[arg(long, short, value_name = "SLOT")]
    pub sequence: Option<String>,
    /// Cut the state anew if only the engine's ranks differ. The state is equal; the engine may
    /// continue with other low-order bits
    #[arg(long)]
    pub reshard: bool,
    /// Resume at this token position, before the end: a multiple of the tokens of a page, in a
    /// snapshot of full attention only
    #[arg(long, value_name = "TOKENS")]
    pub position: Option<u64>,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Arguments of `restores`.
#[derive(Debug, clap::Args)]
pub struct RestoresArgs {
    /// The engine, as `pf engines` lists it, or one that has left; all of both if left out
    pub engine: Option<String>,
    /// Most restores to show: the last ones. The agent remembers 256 of each engine
    #[arg(long, short = 'n', default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Arguments of `match`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("deployment").required(true)))]
pub struct Match {
    /// Repository to look in
    #[arg(value_name = "REPOSITORY", add = repositories())]
    pub repository: Reference,
    /// Token ids: a JSON array, or u32 little-endian; `-` reads stdin
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub tokens: PathBuf,
    /// Fingerprint of the engine configuration, which may be cut short
    #[arg(long, value_name = "DIGEST", group = "deployment")]
    pub fingerprint: Option<Short>,
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
    pub site: Where,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Arguments of `drain`.
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    /// Repository under which every engine gets one of its own
    #[arg(add = repositories())]
    pub repository: RepositoryName,
    /// Only show the plan
    #[arg(long)]
    pub plan: bool,
    /// Seconds in all for captures and pushes; what is not captured by then is listed, and later
    /// pushes go on in the background [default: 600 for the pushes]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pub wait: Option<u64>,
    /// Tokens that an engine computes in a second, for the plan
    #[arg(long, value_name = "N")]
    pub prefill_tokens_per_second: Option<f64>,
    #[command(flatten)]
    pub at: AgentAt,
}

pub const WARM_EXAMPLES: &str = "\
Examples:
  pf warm team/agent:step-9 --plan
  pf warm 'team/*:latest' --keep 12h --max-size 200GiB
  pf warm 'agents/*' --newest 3 --rate 100MB --detach

Restores go first. What is pulled stays for --keep, however large the store is. The same command again fetches only what is missing.";

/// Arguments of `warm`.
#[derive(Debug, clap::Args)]
pub struct WarmArgs {
    /// Snapshots; * stands for any characters in repository and tag
    #[arg(value_name = "REF", required = true, num_args = 1..=64, add = references())]
    pub references: Vec<String>,
    /// The N snapshots of each repository that were pushed last, instead of a tag
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub newest: Option<u32>,
    /// Only show what would be fetched, and how long that takes
    #[arg(long)]
    pub plan: bool,
    /// Wait for the end; this is the default
    #[arg(long, conflicts_with_all = ["detach", "plan"])]
    pub wait: bool,
    /// Print the id of the job, and do not wait
    #[arg(long, conflicts_with = "plan")]
    pub detach: bool,
    /// Leave out snapshots that do not fit this engine
    #[arg(long = "for", value_name = "ENGINE")]
    pub engine: Option<String>,
    /// How long eviction leaves them alone, such as 12h; 0s: not at all [default: 1d]
    #[arg(long, value_name = "TIME")]
    pub keep: Option<Age>,
    /// Bytes to fetch at most; what does not fit is left out [default: half of the agent's
    /// max-store-size]
    #[arg(long, value_name = "SIZE")]
    pub max_size: Option<ByteSize>,
    /// Bytes a second to receive at most, at least 64KiB
    #[arg(long, value_name = "SIZE")]
    pub rate: Option<ByteSize>,
    /// Tokens that an engine computes in a second, for the plan
    #[arg(long, value_name = "N")]
    pub prefill_tokens_per_second: Option<f64>,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Arguments of `jobs`.
#[derive(Debug, clap::Args)]
pub struct JobsArgs {
    #[command(subcommand)]
    pub command: Option<JobCommand>,
    #[command(flatten)]
    pub at: AgentAt,
}

/// Commands for a job.
#[derive(Debug, clap::Subcommand)]
pub enum JobCommand {
    /// End a job; what it has done stays
    Cancel {
        /// A job that `pf jobs` lists
        #[arg(value_name = "ID")]
        id: String,
        #[command(flatten)]
        at: AgentAt,
    },
}
