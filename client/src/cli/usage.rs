//! Help, errors of the command line, and tips for the commands of other tools.

use super::failure::Failure;
use super::suggest::{Advice, Suggestion};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
use std::process::ExitCode;

/// Whether `--json` is among the arguments.
pub fn asks_for_json(arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.take_while(|argument| argument != "--").any(|argument| argument == "--json")
}

/// The arguments of this process. Help, the version and errors are printed, and end it with the
/// exit code.
pub fn parse<P: clap::Parser>(json: bool) -> Result<P, ExitCode> {
    if P::command().is_subcommand_required_set() && std::env::args_os().len() < 2 {
        // Fails only if stdout is closed.
        let _ = P::command().print_help();
        return Err(ExitCode::SUCCESS);
    }
    let error = match pfr_service::settings::parse::<P>() {
        Ok(args) => return Ok(args),
        Err(error) => error,
    };
    if !error.use_stderr() {
        let _ = error.print();
        return Err(ExitCode::SUCCESS);
    }
    let tip = unknown_command(&error).and_then(|word| tip(&word));
    if json {
        return Err(failure(&error, tip).report(true));
    }
    match tip {
        Some(advice) => Err(failure(&error, Some(advice)).report(false)),
        None => {
            let _ = error.print();
            Err(ExitCode::from(1))
        }
    }
}

/// The error in the form of all others.
fn failure(error: &clap::Error, advice: Option<Advice>) -> Failure {
    let (message, hint) = pfr_service::settings::explain(error);
    let failure = Failure::usage(message);
    match advice.or(hint.map(Into::into)) {
        Some(advice) => failure.hint(advice),
        None => failure,
    }
}

fn unknown_command(error: &clap::Error) -> Option<String> {
    match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) => Some(word.clone()),
        _ => None,
    }
}

/// A tip for a command of docker, oras, restic or kubectl that `pf` does not have.
fn tip(word: &str) -> Option<Advice> {
    let says = |text: &str| Some(Advice::from(text));
    match word {
        "images" | "image" | "repos" | "repositories" | "search" => {
            Some(Suggestion::new("ls").then(" lists repositories, and with a repository its snapshots and tags"))
        }
        "info" => Some(Suggestion::new("df").then(" shows what takes up room")),
        "history" | "tree" => says("pf log draws the lineage of a snapshot"),
        "show" | "describe" => says("pf inspect shows what a snapshot is made of"),
        "remove" | "del" | "rmi" | "untag" => says("pf rm deletes tags and snapshots"),
        "forget" | "clean" | "cleanup" => says("pf prune deletes old or untagged snapshots, and pf gc frees their bytes"),
        "copy" | "cp" | "mirror" | "sync" => {
            says("pf pull and then pf push copy a snapshot; pf-registry mirror copies repositories from registry to registry")
        }
        "login" | "logout" | "auth" => says("there is no login: PF_TOKEN, or `token` in the configuration file, holds the token"),
        "save" | "checkpoint" | "capture" => says("pf snapshot captures a sequence of an engine"),
        "load" | "resume" => says("pf restore puts a snapshot back into an engine"),
        "check" | "fsck" => says("pf verify checks a snapshot, pf scrub a whole store; pf-registry fsck checks a registry's tables"),
        "branch" | "clone" => says("pf fork makes tags of one snapshot: no bytes move"),
        "serve" | "server" => says("pf-registry serve starts a registry"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::Args;
    use clap::Parser as _;

    #[test]
    fn words_of_other_tools_get_a_tip_and_are_no_commands() {
        for word in ["images", "copy", "login", "history", "forget", "fsck", "serve", "branch", "load", "save", "show", "rmi", "info"] {
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
    fn json_is_seen_before_the_arguments_are_parsed() {
        let asks = |line: &[&str]| asks_for_json(line.iter().map(Into::into));
        assert!(asks(&["pf", "--json", "nonsense"]) && asks(&["pf", "ls", "--json"]));
        assert!(!asks(&["pf", "ls"]) && !asks(&["pf", "push", "--", "--json"]));
    }

    #[test]
    fn an_error_of_the_command_line_keeps_its_tip() {
        let error = Args::try_parse_from(["pf", "pul", "a"]).unwrap_err();
        let document = failure(&error, None).document();
        assert!(document.message.contains("'pul'") && document.hint.unwrap().contains("pull"), "{}", document.message);
        assert_eq!((document.code, document.exit_code), ("invalid_request", 1));
    }
}
