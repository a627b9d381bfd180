//! Arguments of `login` and `logout`.

use std::path::PathBuf;

pub const LOGIN_EXAMPLES: &str = "\
Examples:
  pf login https://registry.example.com
  pf login --token-file token
  printf %s \"$TOKEN\" | pf login https://registry.example.com/domains/acme

The registry is asked whether the token is valid, and only then is it stored: in tokens.json beside the configuration, readable for \
you alone. Commands send it to this registry and to no other. PF_TOKEN wins over it.";

/// Arguments of `login`.
#[derive(Debug, clap::Args)]
pub struct Login {
    #[command(flatten)]
    pub at: LoginAt,
    /// Read the token from this file; without it, from the terminal, or from standard input
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub token_file: Option<PathBuf>,
}

/// Which registry.
#[derive(Debug, clap::Args)]
pub struct LoginAt {
    /// The registry; without it, the one of the other commands
    #[arg(value_name = "URL", value_hint = clap::ValueHint::Url)]
    pub url: Option<String>,
}
