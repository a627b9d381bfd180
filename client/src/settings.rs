//! What the settings of all our programs have in common: variables that are set to nothing, and files that may hold a token.

use serde::de::DeserializeOwned;

/// Reads a file of settings. The error says the line and what is wrong with it, and not as the parser does, who quotes the line: it may hold a token.
///
/// # Errors
/// `line LINE: REASON`.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", before.matches('\n').count() + 1, error.message())
    })
}

/// Parses the arguments of this process, for whom a variable that is set to nothing is one that is not set: `PF_STORE= pf ls`, or a line
/// `PF_AGENT_LOG=` in a service's file of variables.
///
/// # Errors
/// What clap says of the arguments, help and version among it.
pub fn parse<P: clap::Parser>() -> Result<P, clap::Error> {
    let mut command = without_empty(P::command());
    let mut matches = command.try_get_matches_from_mut(std::env::args_os())?;
    P::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

fn without_empty(command: clap::Command) -> clap::Command {
    let is_empty = |name: &std::ffi::OsStr| std::env::var_os(name).is_some_and(|value| value.is_empty());
    let command = command.mut_args(|argument| match argument.get_env() {
        Some(name) if is_empty(name) => argument.env(None::<&str>),
        _ => argument,
    });
    command.mut_subcommands(without_empty)
}
