//! Completions that know repositories and tags. The script of a shell asks this program how
//! the line may go on, and the program asks the registry, or the local store.

use super::args::{Args, Global, Where};
use super::config::Overrides;
use super::context::Context;
use super::failure::Failure;
use super::usage;
use clap::CommandFactory as _;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, complete};
use clap_complete::env::{CompleteEnv, Elvish, EnvCompleter, Fish, Powershell, Shells, Zsh};
use pfr_client::Site;
use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// The variable of a script that asks. Its value is the shell.
const VARIABLE: &str = "PF_COMPLETE";
/// The program, as the scripts call it.
const PROGRAM: &str = "pf";
/// How long a registry may take: a user has pressed a key, and waits.
const LIMIT: Duration = Duration::from_secs(2);

/// The shells that there are scripts for.
const SHELLS: Shells<'static> = Shells(&[&Bash, &Elvish, &Fish, &Powershell, &Zsh]);

/// Answers the script of a shell. `None` if no script asks: this is a command like any other.
pub fn answer() -> Option<ExitCode> {
    let here = std::env::current_dir().ok();
    let asked = CompleteEnv::with_factory(Args::command).var(VARIABLE).bin(PROGRAM).completer(PROGRAM).shells(SHELLS);
    match asked.try_complete(std::env::args_os(), here.as_deref()) {
        Ok(false) => None,
        Ok(true) => Some(ExitCode::SUCCESS),
        Err(error) => {
            // A closed standard error leaves no place to report that it is closed.
            let _ = error.print();
            Some(ExitCode::from(1))
        }
    }
}

/// The script for a shell.
pub fn script(shell: clap_complete::Shell) -> Result<Vec<u8>, Failure> {
    let (shells, name) = (SHELLS, shell.to_string());
    let shell = shells.completer(&name).ok_or_else(|| Failure::bug(format!("no completion script for {name}")))?;
    let mut script = Vec::new();
    let written = shell.write_registration(VARIABLE, PROGRAM, PROGRAM, PROGRAM, &mut script);
    written.map_err(|error| Failure::io("cannot make the completion script", &error))?;
    Ok(script)
}

/// Completes a reference: a repository, and a tag in it.
pub fn references() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| candidates(typed, true))
}

/// Completes the name of a repository.
pub fn repositories() -> ArgValueCompleter {
    ArgValueCompleter::new(|typed: &OsStr| candidates(typed, false))
}

/// Bash, with a script of our own: the one of clap gives the completer references in pieces,
/// because readline ends words at `:`.
struct Bash;

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == self.name()
    }

    fn write_registration(&self, _: &str, _: &str, _: &str, _: &str, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(include_bytes!("completion/pf.bash"))
    }

    /// The script sends the line up to the cursor, so the last word is the one to complete.
    fn write_complete(&self, command: &mut clap::Command, words: Vec<OsString>, here: Option<&Path>, to: &mut dyn Write) -> io::Result<()> {
        let last = words.len().saturating_sub(1);
        for candidate in complete(command, words, last, here)? {
            to.write_all(candidate.get_value().as_bytes())?;
            to.write_all(b"\n")?;
        }
        Ok(())
    }
}

/// Completions of the typed word. Nothing if the registry does not answer: an error would end up
/// in the line that is being typed.
fn candidates(typed: &OsStr, with_tags: bool) -> Vec<CompletionCandidate> {
    let (Some(typed), Ok(runtime)) = (typed.to_str(), tokio::runtime::Builder::new_current_thread().enable_all().build()) else {
        return Vec::new();
    };
    let found = runtime.block_on(async { tokio::time::timeout(LIMIT, names(typed, with_tags)).await });
    runtime.shutdown_background();
    let names = found.ok().and_then(Result::ok).unwrap_or_default();
    names.into_iter().map(CompletionCandidate::new).collect()
}

async fn names(typed: &str, with_tags: bool) -> Result<Vec<String>, Failure> {
    // No host is asked while its name is being typed.
    if typed.contains("://") || typed.contains('@') {
        return Ok(Vec::new());
    }
    let site = site().await?;
    if let Some((repository, tag)) = typed.split_once(':') {
        return if with_tags { tags(&site, repository, tag).await } else { Ok(Vec::new()) };
    }
    let repositories = site.repositories().await?.into_iter().map(|repository| repository.name.to_string());
    let names: Vec<String> = repositories.filter(|name| name.starts_with(typed)).collect();
    match names.as_slice() {
        [only] if with_tags => tags(&site, only, "").await,
        _ if with_tags => Ok(names.into_iter().map(|name| format!("{name}:")).collect()),
        _ => Ok(names),
    }
}

/// References to the tags of a repository that begin like this.
async fn tags(site: &Site, repository: &str, begin: &str) -> Result<Vec<String>, Failure> {
    let Ok(name) = repository.parse() else { return Ok(Vec::new()) };
    let tags = site.tags(&name).await?.into_iter().filter(|tag| tag.name.as_str().starts_with(begin));
    Ok(tags.map(|tag| format!("{repository}:{}", tag.name)).collect())
}

/// The store that the line means, as far as it is typed.
async fn site() -> Result<Site, Failure> {
    let line = std::env::args_os().skip_while(|argument| argument != "--").skip(1);
    let given = usage::given(line, |name| std::env::var_os(name));
    let tls_ca = std::env::var_os("PF_TLS_CA").map(PathBuf::from);
    let settings = Overrides { registry: given.registry, store: given.store, tls_ca, retries: Some(0), ..Overrides::default() };
    let context = Context::new(Global { settings, json: false, quiet: true })?;
    context.site(Where { local: given.local, remote: false }, None).await
}
