//! Help, errors of the command line, and tips for the commands of other tools.

use super::failure::Failure;
use super::output::human::without_passwords;
use super::suggest::{Advice, Flags, Suggestion};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use pfr_client::export::Place;
use pfr_service::settings;
use std::ffi::OsString;
use std::process::ExitCode;

/// Whether `--json` is among the arguments.
#[must_use]
pub fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    has_flag(arguments, "--json")
}

/// Whether a flag is among the arguments, with or without `=VALUE`.
pub fn has_flag(arguments: impl Iterator<Item = OsString>, flag: &str) -> bool {
    let is_it = |argument: OsString| argument.to_string_lossy().split('=').next() == Some(flag);
    arguments.take_while(|argument| argument != "--").any(is_it)
}

/// The arguments of `pf`, or of one of its programs. Help, the version and errors are printed, and
/// end it with the exit code.
pub fn parse<P: clap::Parser>(json: bool) -> Result<P, ExitCode> {
    let tips =
        |error: &clap::Error| unknown_command(error).and_then(|word| tip(&word)).or_else(|| of_password(error)).or_else(|| of_place(error));
    parse_with(json, &tips)
}

/// The same for a server, which has no tips for words of other tools.
///
/// # Errors
/// The exit code, when everything is printed.
pub fn parse_of_server<P: clap::Parser>(json: bool) -> Result<P, ExitCode> {
    parse_with(json, &|_| None)
}

fn parse_with<P: clap::Parser>(json: bool, tips: &dyn Fn(&clap::Error) -> Option<Advice>) -> Result<P, ExitCode> {
    if P::command().is_subcommand_required_set() && std::env::args_os().len() < 2 {
        // Fails only if stdout is closed.
        let _ = P::command().print_help();
        return Err(ExitCode::SUCCESS);
    }
    let error = match settings::parse::<P>() {
        Ok(args) => return Ok(args),
        Err(error) => error,
    };
    if !error.use_stderr() {
        let _ = error.print();
        return Err(ExitCode::SUCCESS);
    }
    let tip = tips(&error);
    let flags = given(std::env::args_os(), |name| std::env::var_os(name));
    if json {
        return Err(failure(&error, tip).at(&flags).report(true));
    }
    match tip {
        Some(advice) => Err(failure(&error, Some(advice)).at(&flags).report(false)),
        None => {
            let _ = error.print();
            Err(ExitCode::from(1))
        }
    }
}

/// Variables that no flag stands for.
const VARIABLES: [&str; 5] = ["PF_CONFIG", "PF_TOKEN", "PF_TOKEN_OVER_HTTP", "PF_OCI_USERNAME", "PF_OCI_PASSWORD"];

/// Warnings of variables that are probably misspelt. Others begin with `PF_`, too: those of our
/// servers, and of programs that have nothing to do with `pf`.
pub fn misspelt(command: &clap::Command, names: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut known = settings::variables(command);
    known.extend(VARIABLES.map(str::to_owned));
    let ours = names.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("PF_") && !name.starts_with("PF_REGISTRY_"));
    let warn = |name: String| settings::meant(&name, &known).map(|meant| format!("{name} has no effect; did you mean {meant}?"));
    ours.filter_map(warn).collect()
}

/// Advice for an address with a password, which an error of clap would repeat.
fn of_password(error: &clap::Error) -> Option<Advice> {
    let text = error.to_string();
    let advice = "an address may hold no user name and no password, and none is shown here; PF_TOKEN, or `token` in the \
                  configuration file, holds the token";
    (without_passwords(&text) != text).then(|| advice.into())
}

/// Advice for the address of a bucket, a file or another program's registry where a reference is
/// expected.
fn of_place(error: &clap::Error) -> Option<Advice> {
    let Some(ContextValue::String(value)) = error.get(ContextKind::InvalidValue) else { return None };
    Place::is_address(value).then(|| {
        Suggestion::help("export")
            .then(" says how to write snapshots to such an address, ")
            .run(Suggestion::help("import"))
            .text(" how to read them; a reference names a registry of pf")
    })
}

/// The error in the form of all others.
fn failure(error: &clap::Error, advice: Option<Advice>) -> Failure {
    let (message, hint) = settings::explain(error);
    let failure = Failure::usage(message);
    match advice.or(hint.map(Into::into)) {
        Some(advice) => failure.hint(advice),
        None => failure,
    }
}

/// The stores that arguments and environment name. The parser does not say: it stops at the first
/// error.
pub fn given(arguments: impl Iterator<Item = OsString>, environment: impl Fn(&str) -> Option<OsString>) -> Flags {
    let (mut local, mut registry, mut store) = (false, environment("PF_REGISTRY"), environment("PF_STORE"));
    let mut arguments = arguments.take_while(|argument| argument != "--");
    while let Some(argument) = arguments.next() {
        let text = argument.to_string_lossy();
        let (name, value) = text.split_once('=').map_or((&*text, None), |(name, value)| (name, Some(OsString::from(value))));
        match name {
            "--local" => local = true,
            "--registry" => registry = value.or_else(|| arguments.next()),
            "--store" => store = value.or_else(|| arguments.next()),
            _ => {}
        }
    }
    // A flag without a value counts as not given.
    let (registry, store) = (registry.filter(|url| !url.is_empty()), store.filter(|path| !path.is_empty()));
    let registry = registry.map(|url| url.to_string_lossy().into_owned());
    Flags { local, registry, store: store.map(Into::into), places: Flags::places_of(environment), ..Flags::default() }
}

fn unknown_command(error: &clap::Error) -> Option<String> {
    match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) => Some(word.clone()),
        _ => None,
    }
}

/// A tip for a command of docker, oras, restic or kubectl that `pf` does not have.
fn tip(word: &str) -> Option<Advice> {
    Some(match word {
        "images" | "image" | "repos" | "repositories" | "search" => {
            Suggestion::new("ls").here().then(" lists repositories, and with a repository its snapshots and tags")
        }
        "info" => Suggestion::new("df").here().then(" shows what takes up room"),
        "history" | "tree" => Suggestion::help("log").then(" says how to draw the lineage of a snapshot"),
        "show" | "describe" => Suggestion::help("inspect").then(" says how to see what a snapshot is made of"),
        "remove" | "del" | "rmi" | "untag" => Suggestion::help("rm").then(" says how to delete tags and snapshots"),
        "forget" | "clean" | "cleanup" => Suggestion::help("prune")
            .then(" says how to delete old or untagged snapshots, and ")
            .run(Suggestion::new("gc").here())
            .text(" frees their bytes"),
        "cp" | "mirror" | "sync" => Suggestion::help("copy")
            .then(" says how to copy a snapshot from registry to registry; `pf-registry mirror` copies repositories"),
        "auth" | "signin" | "whoami" => Suggestion::new("login").then(" stores a token for a registry"),
        "save" | "checkpoint" | "capture" => Suggestion::help("snapshot").then(" says how to capture a sequence of an engine"),
        "load" | "resume" => Suggestion::help("restore").then(" says how to put a snapshot back into an engine"),
        "check" | "fsck" => Suggestion::help("verify")
            .then(" says how to check a snapshot, ")
            .run(Suggestion::new("scrub").here())
            .text(" checks a whole store; `pf-registry fsck --data DIR` checks a registry's tables"),
        "branch" | "clone" => Suggestion::help("fork").then(" says how to make tags of one snapshot: no bytes move"),
        "serve" | "server" => "`pf-registry serve --data DIR` starts a registry".into(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Args;
    use clap::{CommandFactory as _, Parser as _};

    #[test]
    fn words_of_other_tools_get_a_tip_and_are_no_commands() {
        for word in ["images", "cp", "auth", "history", "forget", "fsck", "serve", "branch", "load", "save", "show", "rmi", "info"] {
            let error = Args::try_parse_from(["pf", word]).unwrap_err();
            assert_eq!(unknown_command(&error).as_deref(), Some(word));
            assert!(tip(word).is_some(), "{word}");
        }
        for word in ["list", "delete", "du", "version"] {
            let error = Args::try_parse_from(["pf", word]).err();
            assert!(error.is_none_or(|e| e.kind() != ErrorKind::InvalidSubcommand), "{word} is a command");
        }
    }

    #[test]
    fn a_tip_means_the_stores_of_the_line_that_did_not_parse() {
        let flags = |line: &[&str], environment: Option<&str>| {
            given(line.iter().map(Into::into), |name| environment.filter(|_| ["PF_REGISTRY", "PF_STORE"].contains(&name)).map(Into::into))
        };
        let shown = |flags: Flags| [Suggestion::new("ls").here().render(&flags), Suggestion::new("ls").local().render(&flags)];
        assert_eq!(shown(flags(&["pf", "images"], None)), ["pf ls", "pf ls --local"]);
        let both = flags(&["pf", "images", "--registry=http://r", "--store", "a b"], Some("http://environment"));
        assert_eq!(shown(both), ["pf ls --registry http://r", "pf ls --local --store 'a b'"]);
        assert_eq!(shown(flags(&["pf", "images", "--local"], Some("/s"))), ["pf ls --local --store /s"; 2]);
        assert_eq!(shown(flags(&["pf", "images", "--registry"], Some(""))), ["pf ls", "pf ls --local"]);
    }

    #[test]
    fn a_misspelt_variable_is_named_and_those_of_others_are_not() {
        let names = ["PF_TOKNE", "PF_STORE", "PF_CONFIG", "PF_REGISTRY_LOG", "PF_AGENT_DATA", "PF_CACHE", "PF_PROGRAM", "PF_PORT", "HOME"];
        let warnings = misspelt(&Args::command(), names.iter().map(OsString::from));
        assert_eq!(warnings, ["PF_TOKNE has no effect; did you mean PF_TOKEN?"]);
    }

    #[test]
    fn json_is_seen_before_the_arguments_are_parsed() {
        let asks = |line: &[&str]| asks_for_json(line.iter().map(Into::into));
        assert!(asks(&["pf", "--json", "nonsense"]) && asks(&["pf", "ls", "--json"]));
        assert!(!asks(&["pf", "ls"]) && !asks(&["pf", "push", "--", "--json"]));
    }

    #[test]
    fn a_flag_is_found_with_and_without_its_value() {
        let given = |line: &[&str]| has_flag(line.iter().map(Into::into), "--registry");
        assert!(given(&["pf", "ls", "--registry", "http://r"]) && given(&["pf", "--registry=http://r", "ls"]));
        assert!(!given(&["pf", "ls", "--registry-x"]) && !given(&["pf", "demo", "--", "--registry", "http://r"]));
    }

    #[test]
    fn an_error_of_the_command_line_hides_a_password_and_says_so() {
        let error = Args::try_parse_from(["pf", "inspect", "http://me:hush@h/team/agent:x"]).unwrap_err();
        let document = failure(&error, of_password(&error)).document();
        assert!(!document.message.contains("hush") && document.message.contains("http://h/team/agent:x"), "{}", document.message);
        assert!(document.hint.unwrap().contains("PF_TOKEN"));
        assert_eq!(of_password(&Args::try_parse_from(["pf", "inspect", "Team/x"]).unwrap_err()), None);
    }

    #[test]
    fn an_address_that_is_no_reference_gets_a_tip() {
        for line in [["pf", "push", "./x", "oci://h/a:b"], ["pf", "pull", "s3://b/p", "./x"], ["pf", "copy", "a/b", "file:///x"]] {
            let error = Args::try_parse_from(line).unwrap_err();
            let advice = of_place(&error).unwrap().to_string();
            assert!(advice.contains("pf export --help") && advice.contains("pf import --help"), "{advice}");
        }
        assert_eq!(of_place(&Args::try_parse_from(["pf", "pull", "Team/x"]).unwrap_err()), None);
    }

    #[test]
    fn an_import_is_of_a_layout_or_of_another_program() {
        for (line, is_fine) in [
            (&["pf", "import", "./backup"][..], true),
            (&["pf", "import", "./backup", "team/agent:x", "--from", "y", "--local"], true),
            (&["pf", "import", "processfork", "x", "--dry-run"], true),
            (&["pf", "import"], false),
            (&["pf", "import", "./backup", "--from", "y"], false),
        ] {
            assert_eq!(Args::try_parse_from(line).is_ok(), is_fine, "{line:?}");
        }
        assert!(Args::try_parse_from(["pf", "export", "a/b:c", "a/b:d", "./x", "--local"]).is_ok());
        assert!(Args::try_parse_from(["pf", "export", "a/b:c"]).is_err());
    }

    #[test]
    fn an_error_of_the_command_line_keeps_its_tip() {
        let error = Args::try_parse_from(["pf", "pul", "a"]).unwrap_err();
        let document = failure(&error, None).document();
        assert!(document.message.contains("'pul'") && document.hint.unwrap().contains("pull"), "{}", document.message);
        assert_eq!((document.code, document.exit_code), ("invalid_request", 1));
    }
}
