//! Settings from flags, environment variables and a file, in this order.
//!
//! [`layered!`](crate::layered) declares a struct of optional settings: clap fills one from flags
//! and environment, [`file()`] fills another from a file, and `or` lays the first over the second.

use clap::builder::StyledStr;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Typing errors in a name that is still recognised.
const TYPOS: usize = 2;

/// Declares a struct of optional settings and its method `or`.
#[macro_export]
macro_rules! layered {
    ($(#[$outer:meta])* pub struct $name:ident { $($(#[$inner:meta])* pub $field:ident: Option<$type:ty>,)+ }) => {
        $(#[$outer])*
        pub struct $name { $($(#[$inner])* pub $field: Option<$type>,)+ }

        impl $name {
            /// These settings where they are given, otherwise those of `weaker`.
            #[must_use]
            pub fn or(self, weaker: Self) -> Self {
                Self { $($field: self.$field.or(weaker.$field),)+ }
            }
        }
    };
}

/// Why a settings file was refused.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("cannot read the settings file {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It does not parse.
    #[error("settings file {path}, {reason}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// The line and the reason, as [`read`] gives them.
        reason: String,
    },
}

/// Reads a settings file.
///
/// # Errors
/// [`FileError`] names the file, and never quotes it.
pub fn file<T: DeserializeOwned>(path: &Path) -> Result<T, FileError> {
    let text = std::fs::read_to_string(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    read(&text).map_err(|reason| FileError::Parse { path: path.into(), reason })
}

/// Parses the text of a settings file.
///
/// # Errors
/// `line LINE: REASON`. The text of the line is left out, as it may hold a token.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    toml::from_str(text).map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
        format!("line {}: {}", before.matches('\n').count() + 1, error.message())
    })
}

/// Parses the arguments of this process. An empty environment variable counts as unset:
/// `PF_STORE= pf ls`, or a line `PF_AGENT_LOG=` in a service's file of variables.
///
/// # Errors
/// Those of clap; help and version are among them. They do not depend on the environment, and the
/// help names the variable of each setting, without its value.
pub fn parse<P: clap::Parser>() -> Result<P, clap::Error> {
    let mut command = without(P::command(), &|name| std::env::var_os(name).is_some_and(|value| value.is_empty()));
    let parsed = command.try_get_matches_from_mut(std::env::args_os());
    parsed.and_then(|mut matches| P::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))).map_err(|error| {
        // clap's usage lists settings from the environment as if the user had to type them.
        match named(P::command()).try_get_matches_from(std::env::args_os()) {
            Err(plain) if plain.kind() == error.kind() => plain,
            _ => error,
        }
    })
}

/// An address to listen on, as a setting has it.
///
/// # Errors
/// What is expected.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    let expected = "expected an IP address and a port, such as 127.0.0.1:5077, [::1]:5077 or 0.0.0.0:5077; no name is looked up";
    text.parse().map_err(|_| expected.to_owned())
}

/// The same in a settings file.
///
/// # Errors
/// Those of the deserializer, and what is expected.
pub fn address_in_file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    address(&String::deserialize(deserializer)?).map(Some).map_err(D::Error::custom)
}

/// The variables that a command line reads, in all its commands.
#[must_use]
pub fn variables(command: &clap::Command) -> BTreeSet<String> {
    let own = command.get_arguments().filter_map(clap::Arg::get_env).map(|name| name.to_string_lossy().into_owned());
    own.chain(command.get_subcommands().flat_map(variables)).collect()
}

/// Warns in the log of variables of this process that begin with `prefix`, and that neither the
/// command line reads nor its program by another way (`others`): they are probably misspelt, and a
/// limit that is set so is none.
pub fn warn_of_unknown(command: &clap::Command, prefix: &str, others: &[&str]) {
    let mut known = variables(command);
    known.extend(others.iter().map(|name| (*name).to_owned()));
    let unknown = unknown(std::env::vars_os(), prefix, &known);
    if !unknown.is_empty() {
        tracing::warn!(variables = unknown.join(" "), "these environment variables are no settings and have no effect");
    }
}

/// The names that begin with `prefix` and are none of `known`, in order, without those that
/// Kubernetes makes.
fn unknown(environment: impl Iterator<Item = (OsString, OsString)>, prefix: &str, known: &BTreeSet<String>) -> Vec<String> {
    let named = environment.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let unknown = named.filter(|(name, value)| name.starts_with(prefix) && !known.contains(name) && !is_of_service(name, value));
    let names: BTreeSet<String> = unknown.map(|(name, _)| name).collect();
    names.into_iter().collect()
}

/// Whether this is one of the variables that Kubernetes puts into every container for a Service:
/// one named `pf-registry` gives `PF_REGISTRY_SERVICE_HOST` and `PF_REGISTRY_PORT_5077_TCP_ADDR`.
fn is_of_service(name: &str, value: &OsStr) -> bool {
    let of_protocol = ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| name.contains(protocol));
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || (name.contains("_PORT_") && of_protocol)
        || (name.ends_with("_PORT") && value.to_string_lossy().contains("://"))
}

/// The one of `known` that a name means which is none of them, if it has few typing errors.
#[must_use]
pub fn meant<'a>(name: &str, known: &'a BTreeSet<String>) -> Option<&'a str> {
    if known.contains(name) {
        return None;
    }
    let near = known.iter().map(|other| (strsim::damerau_levenshtein(name, other), other.as_str()));
    near.min().filter(|(typos, _)| *typos <= TYPOS).map(|(_, other)| other)
}

/// The command without the environment variables of these names.
fn without(command: clap::Command, unset: &dyn Fn(&OsStr) -> bool) -> clap::Command {
    let command = command.mut_args(|argument| match argument.get_env() {
        Some(name) if unset(name) => argument.env(None::<&str>),
        _ => argument,
    });
    command.mut_subcommands(|command| without(command, unset))
}

/// The command without environment variables. The help of each argument names its variable.
fn named(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|argument| {
        let Some(name) = argument.get_env().map(|name| name.to_string_lossy().into_owned()) else { return argument };
        let add = |text: &StyledStr| format!("{text} [env: {name}]");
        let (short, long) = (argument.get_help().map(add), argument.get_long_help().map(add));
        let mut argument = argument.env(None::<&str>);
        if let Some(text) = short {
            argument = argument.help(text);
        }
        if let Some(text) = long {
            argument = argument.long_help(text);
        }
        argument
    });
    command.mut_subcommands(named)
}

/// The message of an error of the command line, and its advice, without the usage that clap prints
/// between them.
#[must_use]
pub fn explain(error: &clap::Error) -> (String, Option<String>) {
    let text = error.to_string();
    let (message, rest) = text.split_once("\n\n").unwrap_or((&text, ""));
    let tips: Vec<&str> = rest.lines().filter_map(|line| line.trim().strip_prefix("tip: ")).collect();
    let usage = rest.lines().map(str::trim).find(|line| line.starts_with("Usage: "));
    let message = message.strip_prefix("error: ").unwrap_or(message).trim().to_owned();
    (message, if tips.is_empty() { usage.map(str::to_owned) } else { Some(tips.join("; ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    layered! {
        #[derive(Debug, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Given {
            pub token: Option<String>,
            pub retries: Option<u32>,
        }
    }

    #[test]
    fn the_stronger_layer_wins_setting_by_setting() {
        let stronger = Given { token: None, retries: Some(1) };
        let weaker = Given { token: Some("a".into()), retries: Some(2) };
        assert_eq!(stronger.or(weaker), Given { token: Some("a".into()), retries: Some(1) });
    }

    #[test]
    fn a_variable_that_is_no_setting_is_told_from_those_of_kubernetes() {
        let command = clap::Command::new("server")
            .arg(clap::Arg::new("log").long("log").env("PF_X_LOG"))
            .subcommand(clap::Command::new("serve").arg(clap::Arg::new("grace").long("grace").env("PF_X_GC_GRACE_SECONDS")));
        let known = variables(&command);
        assert_eq!(known, ["PF_X_GC_GRACE_SECONDS", "PF_X_LOG"].map(str::to_owned).into());
        let environment = [
            ("PF_X_LOG", "info"),
            ("PF_X_GC_GRACE", "7"),
            ("PF_Y_LOG", "info"),
            ("PF_X_LISTEN_PORT", "7"),
            ("PF_X_SERVICE_HOST", "10.0.0.1"),
            ("PF_X_SERVICE_PORT", "5077"),
            ("PF_X_SERVICE_PORT_HTTP", "5077"),
            ("PF_X_PORT", "tcp://10.0.0.1:5077"),
            ("PF_X_PORT_5077_TCP", "tcp://10.0.0.1:5077"),
            ("PF_X_PORT_5077_TCP_ADDR", "10.0.0.1"),
            ("PF_X_METRICS_SERVICE_HOST", "10.0.0.1"),
        ];
        let environment = environment.map(|(name, value)| (OsString::from(name), OsString::from(value)));
        assert_eq!(unknown(environment.into_iter(), "PF_X_", &known), ["PF_X_GC_GRACE", "PF_X_LISTEN_PORT"]);
    }

    #[test]
    fn a_misspelt_name_is_recognised_and_another_one_is_not() {
        let known: BTreeSet<String> = ["PF_REGISTRY", "PF_STORE", "PF_TOKEN"].map(str::to_owned).into();
        for (name, other) in [("PF_TOKNE", Some("PF_TOKEN")), ("PF_REGISTRYS", Some("PF_REGISTRY")), ("PF_PORT", None), ("PF_TOKEN", None)]
        {
            assert_eq!(meant(name, &known), other, "{name}");
        }
    }

    #[test]
    fn an_address_to_listen_on_is_explained() {
        #[derive(Debug, Deserialize)]
        struct Listens {
            #[serde(deserialize_with = "address_in_file")]
            listen: Option<SocketAddr>,
        }
        for text in ["localhost", "localhost:5077", "127.0.0.1", ":5077"] {
            assert!(address(text).unwrap_err().contains("such as 127.0.0.1:5077"), "{text}");
            let error = read::<Listens>(&format!("listen = {text:?}")).unwrap_err();
            assert!(error.starts_with("line 1: expected an IP address and a port"), "{error}");
        }
        assert_eq!(read::<Listens>("listen = \"[::1]:5077\"").unwrap().listen, Some(address("[::1]:5077").unwrap()));
    }

    #[test]
    fn an_error_names_the_file_and_the_line_and_never_quotes_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("settings.toml");
        for text in ["retries = 1\ntokn = 'hush'", "\ntoken = 'hush", "\ntoken = ['hush']", "\ntoken = 'hush' x"] {
            std::fs::write(&path, text).unwrap();
            let error = file::<Given>(&path).unwrap_err().to_string();
            assert!(error.contains("settings.toml, line 2: ") && !error.contains("hush"), "{error}");
        }
        let missing = file::<Given>(&dir.path().join("none"));
        assert!(matches!(missing, Err(FileError::Read { .. })));
    }
}
