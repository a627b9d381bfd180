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

/// Parses the arguments of this process. An empty environment variable counts as unset: `PF_STORE= pf ls`, or a line
/// `PF_AGENT_LOG=` in a service's file of variables.
///
/// # Errors
/// What clap says of the arguments, help and version among it. The usage in it does not depend on the environment.
pub fn parse<P: clap::Parser>() -> Result<P, clap::Error> {
    let mut command = without(P::command(), &|name| std::env::var_os(name).is_some_and(|value| value.is_empty()));
    let parsed = command.try_get_matches_from_mut(std::env::args_os());
    parsed.and_then(|mut matches| P::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))).map_err(|error| {
        // clap's usage lists what the environment gives as if the user had to type it.
        match without(P::command(), &|_| true).try_get_matches_from(std::env::args_os()) {
            Err(plain) if plain.kind() == error.kind() => plain,
            _ => error,
        }
    })
}

/// The command without the environment variables of these names.
fn without(command: clap::Command, unset: &dyn Fn(&std::ffi::OsStr) -> bool) -> clap::Command {
    let command = command.mut_args(|argument| match argument.get_env() {
        Some(name) if unset(name) => argument.env(None::<&str>),
        _ => argument,
    });
    command.mut_subcommands(|command| without(command, unset))
}

/// What an error of the command line says, and what it advises, without the usage that clap prints between them.
#[must_use]
pub fn explain(error: &clap::Error) -> (String, Option<String>) {
    let text = error.to_string();
    let (message, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
    let tips: Vec<&str> = rest.lines().filter_map(|line| line.trim().strip_prefix("tip: ")).collect();
    let usage = rest.lines().map(str::trim).find(|line| line.starts_with("Usage: "));
    let message = message.strip_prefix("error: ").unwrap_or(message).trim().to_owned();
    (message, if tips.is_empty() { usage.map(str::to_owned) } else { Some(tips.join("; ")) })
}
