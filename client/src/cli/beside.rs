//! Programs that lie in the same directory as the running one.
//!
//! Some commands of `pf` are programs of their own: `pf demo` is `pf-demo`, `pf import processfork`
//! is `pf-import-processfork`. `pf` lists them in its help, and turns into them when they are
//! called.

use super::args::Passed;
use super::context::Context;
use super::failure::Failure;
use pfr_schema::ErrorCode;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program `name` beside the running one.
///
/// # Errors
/// Exit code 5 if it is not there.
pub fn find(name: &str) -> Result<PathBuf, Failure> {
    let own = std::env::current_exe().map_err(|e| Failure::io("cannot find the directory of this program", &e))?;
    let path = own.with_file_name(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(Failure::new(ErrorCode::NotFound, format!("the program {name} is missing: there is no {}", path.display()))
        .hint("pf and its programs belong in one directory; in a checkout, cargo build --release builds them all"))
}

/// The program of `pf demo`.
pub const DEMO: &str = "pf-demo";
/// The program of `pf import processfork`.
pub const IMPORT_PROCESSFORK: &str = "pf-import-processfork";

/// Replaces this process by a program that prints its help, if `pf help COMMAND` asks for that of a
/// program that is there: the parser of `pf` does not know its options. Returns the failure, or
/// nothing if the parser has to answer.
pub fn show_help(arguments: impl Iterator<Item = OsString>) -> Option<Failure> {
    let path = find(helped(arguments)?).ok()?;
    let error = Command::new(&path).arg("--help").exec();
    Some(cannot_run(&path, &error))
}

/// The program whose help the arguments ask for.
fn helped(arguments: impl Iterator<Item = OsString>) -> Option<&'static str> {
    let words: Vec<String> = arguments.map(|word| word.to_string_lossy().into_owned()).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["help", "demo"] => Some(DEMO),
        ["help", "import", "processfork"] => Some(IMPORT_PROCESSFORK),
        _ => None,
    }
}

fn cannot_run(path: &Path, error: &io::Error) -> Failure {
    Failure::io(&format!("cannot run {}", path.display()), error)
}

/// Replaces this process by the program `name`. Returns only if that fails.
pub fn become_program(name: &str, context: &Context, passed: Passed) -> Failure {
    match find(name) {
        Ok(path) => {
            let error = Command::new(&path).args(context.global().arguments()).args(passed.arguments).exec();
            cannot_run(&path, &error)
        }
        Err(failure) => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Args, Command};
    use clap::Parser as _;

    /// The arguments that the program of a command line gets.
    fn started(line: &[&str]) -> Vec<OsString> {
        let args = Args::try_parse_from(line).unwrap();
        let Command::Demo(passed) = args.command else { panic!("another command") };
        [args.global.arguments(), passed.arguments].concat()
    }

    #[test]
    fn a_program_gets_all_arguments_but_its_name() {
        assert_eq!(started(&["pf", "demo"]), Vec::<OsString>::new());
        assert_eq!(started(&["pf", "demo", "--help"]), ["--help"]);
        assert_eq!(started(&["pf", "demo", "--keep", "a b", "-q"]), ["--keep", "a b", "-q"]);
        let all = [
            "pf",
            "-q",
            "--store",
            "demo",
            "--retries",
            "3",
            "--retry-for",
            "9",
            "demo",
            "--json",
            "--registry",
            "http://r",
            "x",
            "--json",
        ];
        let expected =
            ["--registry", "http://r", "--store", "demo", "--retries", "3", "--retry-for", "9", "--json", "--quiet", "x", "--json"];
        assert_eq!(started(&all), expected);
    }

    #[test]
    fn the_help_of_a_program_is_its_own() {
        let asked = |words: &[&str]| helped(words.iter().map(Into::into));
        assert_eq!(asked(&["help", "demo"]), Some("pf-demo"));
        assert_eq!(asked(&["help", "import", "processfork"]), Some("pf-import-processfork"));
        for other in [&["help"][..], &["help", "import"], &["help", "push"], &["demo", "--help"], &[]] {
            assert_eq!(asked(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_missing_program_is_named_with_the_place_where_it_should_be() {
        let failure = find("pf-no-such-program").unwrap_err();
        assert_eq!(failure.exit(), 5);
        let document = failure.document();
        assert!(document.message.contains("/pf-no-such-program") && document.hint.is_some(), "{}", document.message);
    }
}
