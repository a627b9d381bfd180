//! Commands about signatures.

use super::Where;
use crate::cli::completion::references;
use pfr_schema::Reference;
use std::path::PathBuf;

pub const SIGN_EXAMPLES: &str = "\
Examples:
  pf keygen release.key
  pf sign team/agent:step-1 --key release.key
  pf verify team/agent:step-1 --key release.key.pub
  pf pull team/agent:step-1 --verify-key release.key.pub

A signature is of the snapshot that the tag points at now. It has the form that `cosign verify --key` reads.";

/// Arguments of `sign`.
#[derive(Debug, clap::Args)]
pub struct Sign {
    /// The snapshot
    #[arg(value_name = "REF", add = references())]
    pub reference: Reference,
    /// Private key of ed25519 (PEM, PKCS#8); `-` is stdin
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, env = "PF_SIGN_KEY", hide_env_values = true)]
    pub key: PathBuf,
    #[command(flatten)]
    pub at: Where,
}

/// Arguments of `keygen`.
#[derive(Debug, clap::Args)]
pub struct Keygen {
    /// Where the private key goes, which only you can read; the public key goes to FILE.pub
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath, default_value = "pf.key")]
    pub file: PathBuf,
}

pub const SIGNING_EXAMPLES: &str = "\
Examples:
  pf signing --json > signing.json
  pf signing set signing.json

A file: {\"policies\": [{\"name\": \"releases\", \"repositories\": \"team/*\", \"tags\": [\"v*\"], \"keys\": [\"-----BEGIN PUBLIC KEY-----\\n…\"]}]}

Such a tag is then put only on a snapshot that one of the keys has signed.";

/// Arguments of `signing`.
#[derive(Debug, clap::Args)]
pub struct Signing {
    #[command(subcommand)]
    pub command: Option<SigningCommand>,
}

/// Commands for signing policies.
#[derive(Debug, clap::Subcommand)]
pub enum SigningCommand {
    /// Replace all policies of the domain by those of a file
    Set {
        /// The policies as JSON; `-` is stdin
        #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
        file: PathBuf,
    },
}
