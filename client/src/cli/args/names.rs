//! Commands about snapshots and tags.

use super::Where;
use super::reference::{Expected, Relative, Repositories, Target};
use crate::cli::completion::{references, repositories};
use pfr_client::Age;
use pfr_schema::{Pattern, Reference, Tag};

/// Arguments of `ls`.
#[derive(Debug, clap::Args)]
pub struct Ls {
    /// List this repository's snapshots and tags
    #[arg(value_name = "REPOSITORY", add = repositories())]
    pub repository: Option<Reference>,
    /// With --local: list the pinned snapshots, of all repositories or of this one
    #[arg(long)]
    pub pinned: bool,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `log`.
#[derive(Debug, clap::Args)]
pub struct Log {
    /// A snapshot and its ancestors; without tag or digest every snapshot of the repository
    #[arg(value_name = "REF", add = references())]
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
    /// The snapshot
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `diff`.
#[derive(Debug, clap::Args)]
pub struct Diff {
    /// The first snapshot
    #[arg(value_name = "A", add = references())]
    pub a: Reference,
    /// The second snapshot; `:TAG` or `@DIGEST` alone means one in the repository of the first
    #[arg(value_name = "B", add = references())]
    pub b: Relative,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `tag`.
#[derive(Debug, clap::Args)]
pub struct TagArgs {
    /// The snapshot
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    /// The new name, in the same repository
    #[arg(value_name = "NEWTAG")]
    pub tag: Tag,
    /// Move the tag only if it points at this digest; `absent`: only if it does not exist
    #[arg(long, value_name = "DIGEST|absent")]
    pub if_tag_is: Option<Expected>,
    #[command(flatten)]
    pub at: Where,
}

pub const RM_EXAMPLES: &str = "\
Examples:
  pf rm team/agent:step-1
  pf rm 'team/agent:try-*' --dry-run
  pf rm team/agent:step-1 team/agent:step-2 'team/agent:try-*'
  pf rm team/agent@sha256:9f86d081884c…

With a tag, only the tag is deleted; with a digest, the snapshot and its tags. If one of them does not exist, nothing is deleted. \
Descendants stay complete.";

/// Arguments of `rm`.
#[derive(Debug, clap::Args)]
pub struct Rm {
    /// repository:tag deletes the tag and keeps its snapshot; repository@digest deletes the
    /// snapshot and its tags; `*` in a tag stands for anything
    #[arg(value_name = "REF", required = true, add = references())]
    pub targets: Vec<Target>,
    /// Change nothing, only show what would be deleted
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub at: Where,
}

pub const PRUNE_EXAMPLES: &str = "\
Examples:
  pf prune team/agent --untagged --dry-run
  pf prune team/agent --keep-last 10 --older-than 30d
  pf prune 'team/*' --tag 'try-*' --older-than 2d
  pf prune '*' --untagged --local

A snapshot that meets every given criterion is deleted with its tags. --keep-last counts the snapshots of a repository that \
--untagged and --tag select, newest first. Descendants stay complete. Garbage collection frees the blobs that only the \
deleted snapshots referred to.";

/// Arguments of `prune`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("criteria").args(["keep_last", "older_than", "untagged", "tag"]).multiple(true).required(true)))]
pub struct Prune {
    /// Repositories; `*` stands for anything
    #[arg(value_name = "REPOSITORY", required = true, add = repositories())]
    pub repositories: Vec<Repositories>,
    /// Keep the newest N of the selected snapshots of each repository
    #[arg(long, value_name = "N")]
    pub keep_last: Option<usize>,
    /// Only snapshots pushed longer ago than this, such as 30d or 12h
    #[arg(long, value_name = "AGE")]
    pub older_than: Option<Age>,
    /// Only snapshots without a tag
    #[arg(long)]
    pub untagged: bool,
    /// Only snapshots whose tags all match; `*` stands for anything; may be given several times
    #[arg(long, value_name = "PATTERN")]
    pub tag: Vec<Pattern>,
    /// Change nothing, only show what would be deleted
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub at: Where,
}

pub const FORK_EXAMPLES: &str = "\
Examples:
  pf fork team/agent:step-2 -n 3
  pf fork team/agent:step-2 -n 100 --prefix try

The first makes the tags step-2-fork-1 to step-2-fork-3, the second try-1 to try-100. If one of the tags exists, none is \
made. No bytes move.";

/// Arguments of `fork`.
#[derive(Debug, clap::Args)]
pub struct Fork {
    /// The snapshot to fork
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    /// Number of forks
    #[arg(short = 'n', long = "count", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub count: u32,
    /// The tags are PREFIX-1 … PREFIX-N; PREFIX is TAG-fork by default
    #[arg(long)]
    pub prefix: Option<String>,
    #[command(flatten)]
    pub at: Where,
}
