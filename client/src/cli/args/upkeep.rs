//! Commands about a whole store, and about `pf` itself.

use super::{Inside, Repositories, Where};
use crate::cli::completion::{references, repositories};
use pfr_client::Age;
use pfr_client::{ByteSize, scrub_rate};
use pfr_schema::Reference;
use pfr_schema::api::{EventId, EventKind};
use std::path::PathBuf;

pub const STATS_EXAMPLES: &str = "\
Columns:
  logical     bytes the snapshot reaches
  new         bytes that were new when it was pushed
  shared      bytes that another snapshot holds as well
  exclusive   bytes that deleting it would free

Examples:
  pf stats team/agent
  pf stats team/agent --below step-1
  pf stats team/agent --below team/agent:step-1
  pf stats --agent agent-7
  pf stats team/agent --json | jq .dedup_ratio";

/// Arguments of `stats`.
#[derive(Debug, clap::Args)]
pub struct Stats {
    /// Only this repository
    #[arg(value_name = "REPOSITORY", add = repositories())]
    pub repository: Option<Reference>,
    /// Only this snapshot of the repository (a tag, `tag~N`, a digest or a whole reference) and
    /// those that descend from it
    #[arg(long, value_name = "SNAPSHOT", requires = "repository")]
    pub below: Option<Inside>,
    /// Only snapshots whose configuration names this agent
    #[arg(long, value_name = "ID", value_parser = agent_id)]
    pub agent: Option<String>,
    #[command(flatten)]
    pub at: Where,
}

/// The id of an agent, as long as registries take it.
fn agent_id(text: &str) -> Result<String, String> {
    match text.chars().count() {
        1..=255 => Ok(text.to_owned()),
        count => Err(format!("expected 1 to 255 characters, found {count}")),
    }
}

pub const DF_EXAMPLES: &str = "\
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

pub const GC_EXAMPLES: &str = "\
Examples:
  pf gc --dry-run
  pf gc --local
  pf gc --local --max-size 50GiB
  pf gc --local --unfinished

With a size, which `max-store-size` in the configuration file gives for every pull, the local store is a cache: the least \
recently used snapshots are deleted until it fits. `pf pin --local` keeps one. Blobs of an unfinished push or pull stay \
until its lease ends; --unfinished frees them now.";

/// Arguments of `gc`.
#[derive(Debug, clap::Args)]
pub struct Gc {
    /// With --local: delete the least recently used snapshots until the store is no larger
    #[arg(long, value_name = "SIZE")]
    pub max_size: Option<ByteSize>,
    /// With --local: free what interrupted pulls left, too. Ends every unfinished pull, import and
    /// capture into the local store; one that still runs starts again
    #[arg(long)]
    pub unfinished: bool,
    /// Change nothing, only show what would be deleted
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub at: Where,
}

pub const PIN_EXAMPLES: &str = "\
Examples:
  pf pin --local team/agent:step-1
  pf pin --local --remove team/agent:step-1

Only the local store has pins, so --local is needed.";

/// Arguments of `pin`.
#[derive(Debug, clap::Args)]
pub struct Pin {
    /// A snapshot of the local store
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    /// Remove the pin
    #[arg(long)]
    pub remove: bool,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `verify`.
#[derive(Debug, clap::Args)]
pub struct Verify {
    /// The snapshot; with --local, without a REF: every snapshot that has a tag
    #[arg(value_name = "REF", required_unless_present = "local", add = references())]
    pub reference: Option<Reference>,
    /// Check only that one of these public keys (PEM) has signed the snapshot; no byte is read
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, requires = "reference")]
    pub key: Option<PathBuf>,
    #[command(flatten)]
    pub at: Where,
}

pub const SCRUB_EXAMPLES: &str = "\
Examples:
  pf scrub
  pf scrub --full --rate 100MB
  pf scrub --local";

/// Arguments of `scrub`.
#[derive(Debug, clap::Args)]
pub struct Scrub {
    /// Decode and hash every blob, and not only compare checksums
    #[arg(long)]
    pub full: bool,
    /// Read at most this much per second
    #[arg(long, value_name = "SIZE", value_parser = scrub_rate)]
    pub rate: Option<ByteSize>,
    #[command(flatten)]
    pub at: Where,
}

pub const TASKS_EXAMPLES: &str = "\
Examples:
  pf tasks
  pf tasks pause compaction --for 2h
  pf tasks resume compaction

Times are those of the replica that answers; a pause holds in all replicas, and after restarts, until it ends.";

/// Arguments of `tasks`.
#[derive(Debug, clap::Args)]
pub struct Tasks {
    #[command(subcommand)]
    pub command: Option<TaskCommand>,
}

/// Commands for a background task.
#[derive(Debug, clap::Subcommand)]
pub enum TaskCommand {
    /// Stop a task for some time
    Pause {
        /// A task that `pf tasks` lists
        #[arg(value_name = "TASK")]
        task: String,
        /// How long, such as 30m or 2h, at most 30d
        #[arg(long = "for", value_name = "TIME", default_value = "1h")]
        time: Age,
    },
    /// End the pause of a task
    Resume {
        /// A task that `pf tasks` lists
        #[arg(value_name = "TASK")]
        task: String,
    },
}

pub const RETENTION_EXAMPLES: &str = "\
Examples:
  pf retention --json > policies.json
  pf retention set policies.json
  pf retention run --dry-run

A file: {\"policies\": [{\"name\": \"tries\", \"repositories\": \"team/*\", \"tags\": [\"try-*\"], \"max_age_seconds\": 604800}]}

The registry follows its policies by itself, about once an hour.";

/// Arguments of `retention`.
#[derive(Debug, clap::Args)]
pub struct Retention {
    #[command(subcommand)]
    pub command: Option<RetentionCommand>,
}

/// Commands for retention policies.
#[derive(Debug, clap::Subcommand)]
pub enum RetentionCommand {
    /// Replace all policies of the domain by those of a file
    Set {
        /// The policies as JSON; `-` is stdin
        #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
        file: PathBuf,
    },
    /// Delete now what the policies say
    Run {
        /// Change nothing, only show what would be deleted
        #[arg(long)]
        dry_run: bool,
    },
}

pub const EVENTS_EXAMPLES: &str = "\
Examples:
  pf events
  pf events 'team/*' --kind tagged
  pf events --json | jq -c '[.kind, .repository, .tag]'

A cut connection is made again, and no event is lost. Each event has an id in --json; --after goes on behind it, as long as the \
registry keeps events (a week, unless it is set otherwise). With --json each event is one document on one line.";

/// Arguments of `events`.
#[derive(Debug, clap::Args)]
pub struct Events {
    /// Only events of this repository; `*` stands for any characters
    #[arg(value_name = "REPOSITORY", add = repositories())]
    pub repository: Option<Repositories>,
    /// Only this kind: pushed, tagged, deleted or collected
    #[arg(long, value_name = "KIND")]
    pub kind: Option<EventKind>,
    /// Begin behind the event with this id, instead of now
    #[arg(long, value_name = "ID")]
    pub after: Option<EventId>,
    /// End with the last event that there is, instead of waiting for more
    #[arg(long)]
    pub once: bool,
}

/// Arguments of `completions`.
#[derive(Debug, clap::Args)]
pub struct Completions {
    /// The shell
    pub shell: clap_complete::Shell,
}
