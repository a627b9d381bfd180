//! `pf login` and `pf logout`: the stored token of a registry.

use crate::cli::args::{Login, LoginAt};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use pfr_client::TokenCheck;
use pfr_schema::{AccessToken, ErrorCode};
use pfr_service::Secret;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use serde_json::json;
use std::io::{BufRead as _, IsTerminal as _, Write as _};

pub async fn login(context: &mut Context, args: Login) -> Result<(), Failure> {
    let url = context.registry_at(args.at.url.as_deref())?;
    let token = match &args.token_file {
        Some(path) => {
            let read = std::fs::read_to_string(path);
            read.map_err(|error| Failure::io(&format!("cannot read the token file {}", path.display()), &error))?
        }
        None if std::io::stdin().is_terminal() => prompt(&url).await?,
        None => line().await?,
    };
    let token = token.trim();
    if token.is_empty() {
        return Err(Failure::usage("no token was given").hint("--token-file FILE names a file that has it"));
    }
    if token.starts_with("pft_") {
        AccessToken::parse(token).map_err(|reason| Failure::usage(reason).hint("copy it again, complete"))?;
    }
    let token = Secret::new(token);
    // Without a token first: a registry that serves everyone would call any text valid.
    if context.remote_at(&url, None)?.check_token().await? == TokenCheck::Valid {
        return Err(Failure::usage(format!("the registry at {url} requires no token; nothing was stored")));
    }
    match context.remote_at(&url, Some(token.clone()))?.check_token().await? {
        TokenCheck::Valid => {}
        TokenCheck::Refused => {
            let message = format!("the registry at {url} refuses this token; nothing was stored");
            let hint = "it may have expired or been revoked: ask the registry's operator for a new one";
            return Err(Failure::new(ErrorCode::Unauthorized, message).hint(hint));
        }
        TokenCheck::OtherDomain(reason) => {
            let message = format!("the token is not for {url}, nothing was stored: {reason}");
            return Err(
                Failure::new(ErrorCode::DomainUnknown, message).hint("the address of a domain is that of the registry and /domains/NAME")
            );
        }
    }
    context.tokens().store(&url, &token)?;
    let file = context.tokens().file().map(|path| path.display().to_string());
    let said = [format!("the token is stored in {}", file.clone().unwrap_or_default())];
    context.report(&json!({"registry": url, "file": file}), said, &format!("logged in to {url}"))
}

pub async fn logout(context: &mut Context, at: LoginAt) -> Result<(), Failure> {
    let url = context.registry_at(at.url.as_deref())?;
    let was_there = context.tokens().remove(&url)?;
    let last = if was_there { format!("logged out of {url}") } else { format!("no token is stored for {url}") };
    let said = was_there.then(|| "the token is still valid: its registry can revoke it".to_owned());
    context.report(&json!({"registry": url, "removed": was_there}), said, &last)
}

/// Asks for the token on the terminal, which does not show it.
async fn prompt(url: &str) -> Result<String, Failure> {
    let mut stderr = std::io::stderr();
    // A closed stderr hides the question only.
    let _ = write!(stderr, "Token for {url}: ").and_then(|()| stderr.flush());
    let silent = Silent::begin();
    let line = line().await;
    drop(silent);
    let _ = writeln!(stderr);
    line
}

/// The first line of standard input.
async fn line() -> Result<String, Failure> {
    let read = || {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map(|_| line)
    };
    let line = pfr_service::task::spawn_blocking(read).await.map_err(|error| Failure::bug(error.to_string()))?;
    line.map_err(|error| Failure::io("cannot read the token from standard input", &error))
}

/// A terminal that does not show what is typed, until it is dropped: also when Ctrl-C ends the
/// command.
struct Silent(Option<Termios>);

impl Silent {
    fn begin() -> Self {
        let before = tcgetattr(std::io::stdin()).ok();
        if let Some(mut modes) = before.clone() {
            modes.local_modes.remove(LocalModes::ECHO);
            // A terminal that cannot hide what is typed still takes it.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, &modes);
        }
        Self(before)
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // A terminal that is gone needs no echo.
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, before);
        }
    }
}
