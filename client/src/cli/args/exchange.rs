//! Commands that exchange snapshots with layouts and between registries.

use super::{Passed, Where};
use crate::cli::completion::references;
use clap::Subcommand;
use pfr_schema::Reference;

pub const EXPORT_EXAMPLES: &str = "\
Examples:
  pf export team/agent:step-1 ./backup
  pf export team/agent:step-1 team/agent:step-2 ./backup
  pf export team/agent:step-1 agent.tar --local
  pf export team/agent:step-1 oci://ghcr.io/team/agent:step-1
  pf export team/agent:step-1 s3://bucket/backup

A directory, a bucket and a registry take further exports, and only the packs that they lack. \
The last line of stdout is the digest of the last snapshot. After an interruption run the same command again.";

/// Arguments of `export`.
#[derive(Debug, clap::Args)]
pub struct Export {
    /// The snapshots
    #[arg(value_name = "REF", required = true, num_args = 1.., add = references())]
    pub references: Vec<Reference>,
    /// A directory, a file that ends in .tar, oci://HOST/REPOSITORY[:TAG], or a prefix of a bucket:
    /// s3://BUCKET/PREFIX, gs://… or az://…
    #[arg(value_name = "DEST", required = true, value_hint = clap::ValueHint::AnyPath)]
    pub destination: String,
    #[command(flatten)]
    pub at: Where,
}

pub const IMPORT_EXAMPLES: &str = "\
Examples:
  pf import ./backup
  pf import agent.tar team/agent:step-1
  pf import ./backup team/agent:copy --from step-1
  pf import oci://ghcr.io/team/agent:step-1 team/agent:step-1 --local

The first imports all snapshots under their own names. \
`pf import processfork --help` says how to import the images of ProcessFork stores.";

/// Arguments of `import`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Import {
    #[command(subcommand)]
    pub other: Option<ImportOther>,
    /// An export: a directory, a file that ends in .tar, oci://HOST/REPOSITORY[:TAG|@DIGEST], or a
    /// prefix of a bucket: s3://BUCKET/PREFIX, gs://… or az://…
    #[arg(value_name = "SRC", required = true, value_hint = clap::ValueHint::AnyPath)]
    pub source: Option<String>,
    /// Repository and tag of the snapshot; without it all are imported, each under its own name
    #[arg(value_name = "REF", add = references())]
    pub target: Option<Reference>,
    /// Which snapshot of SRC: a tag, REPOSITORY:TAG or the beginning of a digest
    #[arg(long, value_name = "NAME", requires = "target")]
    pub from: Option<String>,
    #[command(flatten)]
    pub at: Where,
}

/// Formats of other programs that can be imported.
#[derive(Debug, Subcommand)]
pub enum ImportOther {
    /// The images of ProcessFork stores, with their lineage
    #[command(after_help = "`pf import processfork --help` lists its options.")]
    Processfork(Passed),
}

pub const COPY_EXAMPLES: &str = "\
Examples:
  pf copy https://a.example/team/agent:step-1 https://b.example/team/agent:step-1
  pf copy team/agent:step-1 https://b.example/archive/agent

Nothing is kept on this machine, and only what the destination lacks is moved. Without a tag the destination gets that of the source. \
After an interruption run the same command again.";

/// Arguments of `copy`.
#[derive(Debug, clap::Args)]
pub struct Copy {
    /// The snapshot
    #[arg(value_name = "SRC", add = references())]
    pub source: Reference,
    /// Repository and tag of the copy
    #[arg(value_name = "DST", add = references())]
    pub target: Reference,
    /// Move the tag only if it points at this digest; `absent`: only if it does not exist
    #[arg(long, value_name = "DIGEST|absent")]
    pub if_tag_is: Option<super::Expected>,
}
