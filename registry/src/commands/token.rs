//! `pf-registry token`: makes, lists and revokes access tokens, on the database.

use super::tool::{on_catalogue, print};
use super::{MORE, Settings, of_tool};
use crate::Error;
use crate::audit::of_command;
use clap::{Args, Subcommand};
use pfr_client::{Age, human};
use pfr_schema::api::{AccessTokenCreated, AccessTokenInfo, AccessTokenList};
use pfr_schema::{AccessScope, AccessToken, AccessTokenId, DomainName, FormatError};
use pfr_store::NewAccessToken;
use std::str::FromStr;

/// Tokens read at a time.
const PAGE: usize = 1000;

/// What to do with tokens.
#[derive(Subcommand)]
pub(crate) enum TokenCommand {
    /// Makes a token and prints it. It is shown this once: the registry stores only its hash.
    #[command(mut_args(of_tool), after_help = EXAMPLES)]
    Create(Create),
    /// Lists tokens, without their secrets.
    #[command(mut_args(of_tool), after_help = MORE)]
    List(List),
    /// Revokes a token. Running registries refuse it within five seconds.
    #[command(mut_args(of_tool), after_help = MORE)]
    Revoke(Revoke),
}

const EXAMPLES: &str = "\
Examples:
  pf-registry token create --data DIR --label operator --scope '*:pull,push,delete,admin'
  pf-registry token create --data DIR --label 'build machine' --scope 'team/*:pull,push' --expires-in 90d

The other settings of `pf-registry serve` are accepted, too; most matter to a server only.";

/// Arguments of `token create`.
#[derive(Args)]
pub(crate) struct Create {
    /// What the token is for, or which machine has it; shown in lists.
    #[arg(long, value_name = "TEXT")]
    label: String,
    /// What it permits: PATTERN:ACTIONS. `*` in a pattern for repositories stands for any
    /// characters; the actions are pull, push, delete and admin. May be given several times.
    #[arg(long = "scope", value_name = "SCOPE", required = true)]
    scopes: Vec<AccessScope>,
    /// The only domain that it is for [default: every domain].
    #[arg(long, value_name = "NAME")]
    domain: Option<DomainName>,
    /// How long it is valid, such as 12h or 90d [default: until it is revoked].
    #[arg(long, value_name = "TIME")]
    expires_in: Option<Age>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// Arguments of `token list`.
#[derive(Args)]
pub(crate) struct List {
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// Arguments of `token revoke`.
#[derive(Args)]
pub(crate) struct Revoke {
    /// The token's id, as `list` shows it, or the token itself.
    #[arg(value_name = "ID")]
    token: Named,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    settings: Settings,
}

/// A token, named by its id or by itself.
#[derive(Clone, Debug)]
struct Named(AccessTokenId);

impl FromStr for Named {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        AccessToken::parse(text).map(|token| token.id()).or_else(|_| text.parse()).map(Self)
    }
}

pub(super) fn run(command: TokenCommand) -> Result<(), Error> {
    match command {
        TokenCommand::Create(args) => create(args),
        TokenCommand::List(args) => list(args),
        TokenCommand::Revoke(args) => revoke(args),
    }
}

fn create(args: Create) -> Result<(), Error> {
    let Create { label, scopes, domain, expires_in, json, settings } = args;
    let created = on_catalogue(&settings.load()?, async |domains| {
        let now = domains.default_store().options().clock.now();
        let expires_at = expires_in.map(|age| now.saturating_add(u64::try_from(age.0.as_millis()).unwrap_or(u64::MAX)));
        let new = NewAccessToken { label, domain, scopes, expires_at };
        let (token, row) = domains.audited(of_command("create_token")).access_tokens().create(new).await.map_err(Error::Work)?;
        Ok(AccessTokenCreated { token: token.expose().to_owned(), info: row.into() })
    })?;
    print(&created, json, |created| format!("{}\n", created.token));
    Ok(())
}

fn list(args: List) -> Result<(), Error> {
    let tokens = on_catalogue(&args.settings.load()?, async |domains| {
        let (mut tokens, mut after) = (Vec::new(), None);
        loop {
            let page = domains.access_tokens().list(after, PAGE).await.map_err(Error::Work)?;
            tokens.extend(page.rows.into_iter().map(AccessTokenInfo::from));
            after = page.next;
            if after.is_none() {
                let now = domains.default_store().options().clock.now();
                return Ok((AccessTokenList { tokens, next: None }, now));
            }
        }
    })?;
    let (tokens, now) = tokens;
    print(&tokens, args.json, |list| list.tokens.iter().map(|token| line(token, now)).collect());
    Ok(())
}

fn revoke(args: Revoke) -> Result<(), Error> {
    let revoked: AccessTokenInfo = on_catalogue(&args.settings.load()?, async |domains| {
        Ok(domains.audited(of_command("revoke_token")).access_tokens().revoke(&args.token.0).await.map_err(Error::Work)?.into())
    })?;
    print(&revoked, args.json, |token| format!("revoked  {} ({})\n", token.id, token.label));
    Ok(())
}

/// One token on one line.
fn line(token: &AccessTokenInfo, now: u64) -> String {
    let day = |at: u64| human::rfc3339(at).chars().take(10).collect::<String>();
    let state = match (token.revoked_at, token.expires_at) {
        (Some(at), _) => format!("revoked {}", day(at)),
        (None, Some(at)) if at <= now => format!("expired {}", day(at)),
        (None, Some(at)) => format!("expires {}", day(at)),
        (None, None) => "valid".to_owned(),
    };
    let used = token.used_at.map_or_else(|| "never used".to_owned(), |at| format!("used {}", day(at)));
    let domain = token.domain.as_ref().map_or_else(|| "all domains".to_owned(), |name| format!("domain {name}"));
    let scopes: Vec<String> = token.scopes.iter().map(ToString::to_string).collect();
    format!("{}  {state}  {used}  {domain}  {}  {}\n", token.id, scopes.join(" "), token.label)
}
