//! Programs that lie in the same directory as the running one.
//!
//! Some commands of `pf` are programs of their own: `pf demo` is `pf-demo`, `pf import processfork`
//! is `pf-import-processfork`. `pf` lists them in its help, and turns into them when they are
//! called.

use super::args::Passed;
use super::context::Context;
use super::failure::Failure;
use pfr_schema::ErrorCode;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
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

/// Replaces this process by the program `name`. Returns only if that fails.
pub fn become_program(name: &str, context: &Context, passed: Passed) -> Failure {
    match find(name) {
        Ok(path) => {
            let error = Command::new(&path).args(context.global().arguments()).args(passed.arguments).exec();
            Failure::io(&format!("cannot run {}", path.display()), &error)
        }
        Err(failure) => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Args, Command};
    use clap::Parser as _;
    use std::ffi::OsString;

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
    fn a_missing_program_is_named_with_the_place_where_it_should_be() {
        let failure = find("pf-no-such-program").unwrap_err();
        assert_eq!(failure.exit(), 5);
        let document = failure.document();
        assert!(document.message.contains("/pf-no-such-program") && document.hint.is_some(), "{}", document.message);
    }
}
