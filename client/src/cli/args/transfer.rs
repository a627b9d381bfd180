//! Commands that move snapshots.

use super::AgentAt;
use super::reference::{Expected, Relative};
use crate::cli::completion::references;
use pfr_schema::Reference;
use pfr_schema::codec::Compression;
use std::path::PathBuf;

pub const PUSH_EXAMPLES: &str = "\
Examples:
  pf push ./snapshot team/agent:step-1
  pf push ./snapshot team/agent:step-2 --parent :step-1
  pf push ./snapshot team/agent:head --if-tag-is absent
  pf push team/agent:step-1 https://host/team/agent:step-1

The third fails if the tag exists; the last takes a snapshot of the local store. The last line of stdout is the digest. \
After an interruption run the same command again: it sends what is missing.";

/// Arguments of `push`.
#[derive(Debug, clap::Args)]
pub struct Push {
    /// A snapshot directory, or a REF in the local store
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub source: String,
    /// Repository and tag of the snapshot
    #[arg(value_name = "REF", add = references())]
    pub target: Reference,
    /// Move the tag only if it points at this digest; `absent`: only if it does not exist
    #[arg(long, value_name = "DIGEST|absent")]
    pub if_tag_is: Option<Expected>,
    /// Snapshot that this one continues; twice for a merge; `:TAG` means the target's repository
    #[arg(long, value_name = "REF", add = references())]
    pub parent: Vec<Relative>,
    /// Sign the snapshot with this private key (PEM) before the tag is put; `-` is stdin
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub sign_key: Option<PathBuf>,
    #[command(flatten)]
    pub encode: Encode,
}

/// The setting of commands that read snapshot directories.
#[derive(Debug, clap::Args)]
pub struct Encode {
    /// How pages and tensors of directories are encoded: `hot`, fast; `cold`, smaller; `off`
    /// [default: hot, or off where the processor has no vector instructions for it]
    #[arg(long, value_name = "HOW", env = "PF_COMPRESSION", hide_env_values = true)]
    pub compression: Option<Compression>,
}

pub const PULL_EXAMPLES: &str = "\
Examples:
  pf pull team/agent:step-1
  pf pull team/agent:step-1 ./snapshot
  pf pull team/agent@sha256:9f86d081884c…
  pf pull team/agent:step-1 --for vllm-0         only if it fits this engine

The first keeps the snapshot in the local store, under the same name. The last line of stdout is the digest. \
After an interruption run the same command again: it fetches what is missing.";

/// Arguments of `pull`.
#[derive(Debug, clap::Args)]
pub struct Pull {
    /// The snapshot to fetch
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    /// Write a snapshot directory here, and nothing into the local store
    #[arg(value_hint = clap::ValueHint::DirPath)]
    pub dir: Option<PathBuf>,
    /// Fetch nothing unless one of these public keys (PEM) has signed the snapshot
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, env = "PF_VERIFY_KEY", hide_env_values = true)]
    pub verify_key: Option<PathBuf>,
    /// Refuse a snapshot that does not fit this engine of the agent, before any of it is fetched
    #[arg(long = "for", value_name = "ENGINE")]
    pub engine: Option<String>,
    #[command(flatten)]
    pub at: AgentAt,
}
