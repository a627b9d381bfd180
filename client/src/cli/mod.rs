//! `pf`: from arguments to an exit code.
//!
//! [`args`] says what can be typed, [`context`] what was configured, [`pfr_client::Site`] hides
//! whether a command looks at a registry or at the local store, `commands` has one module per
//! command, [`output`] is the only place that writes to stdout. Every failure ends as a
//! [`Failure`], which knows its exit code and what the user can do.
//!
//! `pf-demo` and the programs of `tools/` are commands of `pf` too: each is a [`Program`] of its
//! own, which `pf` finds beside itself. They use the public part of this module.

mod args;
pub mod beside;
mod commands;
mod completion;
mod config;
mod context;
mod failure;
pub mod output;
mod program;
pub mod progress;
mod suggest;
mod usage;

pub use args::{Encode, Global, STYLES, repository_of};
pub use commands::agent::print_engines;
pub use commands::log::print as print_lineage;
pub use commands::stats::print as print_stats;
pub use context::Context;
pub use failure::Failure;
pub use program::{Program, main as run};
pub use usage::{asks_for_json, parse_of_server};

use args::{Args, Command};
use clap::CommandFactory as _;
use std::process::ExitCode;

/// The command line of `pf`, for its manual pages.
#[must_use]
pub fn command() -> clap::Command {
    Args::command()
}

/// The program `pf`.
pub fn main() -> ExitCode {
    if let Some(code) = completion::answer() {
        return code;
    }
    match beside::show_help(std::env::args_os().skip(1)) {
        Some(failure) => failure.report(false),
        None => run::<Args>(),
    }
}

impl Program for Args {
    fn resume_hint(&self) -> Option<&'static str> {
        let resumes =
            matches!(self.command, Command::Push(_) | Command::Pull(_) | Command::Copy(_) | Command::Export(_) | Command::Import(_));
        resumes.then_some("run the same command again to resume")
    }

    fn global(&self) -> &Global {
        &self.global
    }

    async fn run(self, context: &mut Context) -> Result<(), Failure> {
        commands::run(context, self.command).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[test]
    fn only_a_command_that_resumes_says_so() {
        let hint = |line: &str| Args::try_parse_from(line.split(' ')).unwrap().resume_hint();
        for line in ["pf push ./x a/b:c", "pf pull a/b:c", "pf copy a/b:c http://h/a/b:c", "pf export a/b:c ./x", "pf import ./x"] {
            assert_eq!(hint(line), Some("run the same command again to resume"), "{line}");
        }
        for line in ["pf ls", "pf events", "pf verify a/b:c", "pf snapshot e", "pf pushes", "pf gc"] {
            assert_eq!(hint(line), None, "{line}");
        }
    }
}
