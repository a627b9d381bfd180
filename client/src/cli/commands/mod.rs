//! One module per command, or per family of commands.

pub mod agent;
pub mod capture;
mod copy;
mod diff;
mod drain;
mod events;
mod exports;
mod gc;
mod inspect;
mod jobs;
mod list;
pub mod log;
mod login;
mod matching;
mod names;
mod pins;
mod prune;
pub mod pull;
pub mod push;
mod remove;
mod retention;
mod scrub;
mod signing;
pub mod stats;
mod tasks;
mod usage;
mod verify;

use super::args::{Command, Import, ImportOther};
use super::beside::{DEMO, IMPORT_PROCESSFORK, become_program};
use super::completion;
use super::context::Context;
use super::failure::Failure;
use super::output::human::{natural, number};
use pfr_schema::Tag;
use serde::Serialize;
use std::io::Read as _;
use std::path::Path;

/// Runs a command.
pub async fn run(context: &mut Context, command: Command) -> Result<(), Failure> {
    match command {
        Command::Push(args) => push::run(context, args).await,
        Command::Pull(args) => pull::run(context, args).await,
        Command::Copy(args) => copy::run(context, args).await,
        Command::Export(args) => exports::export(context, args).await,
        Command::Ls(args) if args.pinned => pins::list(context, args).await,
        Command::Ls(args) => list::run(context, args).await,
        Command::Log(args) => log::run(context, args).await,
        Command::Inspect(args) => inspect::run(context, args).await,
        Command::Diff(args) => diff::run(context, args).await,
        Command::Tag(args) => names::tag(context, args).await,
        Command::Rm(args) => remove::run(context, args).await,
        Command::Prune(args) => prune::run(context, args).await,
        Command::Fork(args) => names::fork(context, args).await,
        Command::Stats(args) => stats::run(context, args).await,
        Command::Df(args) => usage::run(context, args).await,
        Command::Gc(args) => gc::run(context, args).await,
        Command::Pin(args) => gc::pin(context, args).await,
        Command::Verify(args) => verify::run(context, args).await,
        Command::Sign(args) => signing::sign(context, args).await,
        Command::Keygen(args) => signing::keygen(context, args),
        Command::Scrub(args) => scrub::run(context, args).await,
        Command::Tasks(args) => tasks::run(context, args).await,
        Command::Events(args) => events::run(context, args).await,
        Command::Retention(args) => retention::run(context, args).await,
        Command::Signing(args) => signing::run(context, args).await,
        Command::Engines(args) => agent::engines(context, args).await,
        Command::Sequences(args) => agent::sequences(context, args).await,
        Command::Snapshot(args) => capture::snapshot(context, args).await,
        Command::Restore(args) => capture::restore(context, args).await,
        Command::Restores(args) => agent::restores(context, args).await,
        Command::Match(args) => matching::run(context, args).await,
        Command::Pushes(at) => agent::pushes(context, at).await,
        Command::Drain(args) => drain::run(context, args).await,
        Command::Warm(args) => jobs::warm(context, args).await,
        Command::Jobs(args) => jobs::jobs(context, args).await,
        Command::Import(Import { other: Some(ImportOther::Processfork(passed)), .. }) => {
            Err(become_program(IMPORT_PROCESSFORK, context, passed))
        }
        Command::Import(args) => exports::import(context, args).await,
        Command::Login(args) => login::login(context, args).await,
        Command::Logout(at) => login::logout(context, at).await,
        Command::Completions(args) => {
            let script = completion::script(args.shell)?;
            context.out.write(&script)
        }
        Command::Demo(passed) => Err(become_program(DEMO, context, passed)),
        Command::Version => version(context),
    }
}

/// What a message calls a file; `-` is stdin.
fn shown(path: &Path) -> String {
    if path == Path::new("-") { "stdin".to_owned() } else { path.display().to_string() }
}

/// Reads a file of at most so many bytes; `-` is stdin.
fn read(path: &Path, most: u64) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let failed = |e: std::io::Error| Failure::io(&format!("cannot read {}", shown(path)), &e);
    if path == Path::new("-") {
        std::io::stdin().lock().take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    } else {
        std::fs::File::open(path).and_then(|file| file.take(most + 1).read_to_end(&mut bytes)).map_err(failed)?;
    }
    if bytes.len() as u64 > most {
        return Err(Failure::usage(format!("{} has more than {most} bytes", shown(path))));
    }
    Ok(bytes)
}

/// The version of this program, as JSON.
#[derive(Serialize)]
struct Version {
    version: &'static str,
}

fn version(context: &mut Context) -> Result<(), Failure> {
    let version = env!("CARGO_PKG_VERSION");
    match context.json {
        true => context.out.json(&Version { version }),
        false => context.out.line(format!("pf {version}")),
    }
}

/// Tags in a table cell: the first few, and how many more.
fn tags(tags: &[Tag]) -> String {
    const SHOWN: usize = 3;
    let mut sorted: Vec<&str> = tags.iter().map(Tag::as_str).collect();
    sorted.sort_by(|a, b| natural(a, b));
    let mut text = sorted.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if tags.len() > SHOWN {
        text.push_str(&format!(" +{}", number((tags.len() - SHOWN) as u64)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_tags_are_counted() {
        let named = |n: usize| (1..=n).map(|i| format!("t-{i}").parse().unwrap()).collect::<Vec<Tag>>();
        assert_eq!([tags(&named(0)), tags(&named(2)), tags(&named(5))], ["", "t-1, t-2", "t-1, t-2, t-3 +2"]);
        assert_eq!(tags(&named(10_003)), "t-1, t-2, t-3 +10,000");
        let by_name: Vec<Tag> = ["f-1", "f-10", "f-2"].map(|t| t.parse().unwrap()).into();
        assert_eq!(tags(&by_name), "f-1, f-2, f-10");
    }
}
