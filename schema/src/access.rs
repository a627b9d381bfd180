//! Access tokens: what they look like, and what they permit.
//!
//! ```text
//! pft_0193a7c2e41f0b5d_9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08c0ffee42
//!     id, 16 hex digits  secret, 64 hex digits: 256 random bits                        CRC-32C, 8
//! ```
//!
//! The prefix lets scanners for secrets find a token in a text. The checksum is over everything
//! before it: a mistyped token is recognized without a question to a registry. A registry stores
//! the SHA-256 of the text, which is enough for a secret of full entropy.

use crate::digest::Digest;
use crate::error::FormatError;
use crate::name::{RepositoryName, name_error, text_newtype};
use crate::pattern::Pattern;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// What a caller may be permitted to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    /// Read snapshots, tags and blobs.
    Pull,
    /// Store snapshots, and create or move tags.
    Push,
    /// Delete snapshots and tags.
    Delete,
    /// Operate the registry: collection, scrubs, background tasks, domains, tokens.
    Admin,
}

impl Action {
    /// All of them, in the order in which a scope names them.
    pub const ALL: [Self; 4] = [Self::Pull, Self::Push, Self::Delete, Self::Admin];

    /// Its name in scopes, in the OpenAPI document and in logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "push",
            Self::Delete => "delete",
            Self::Admin => "admin",
        }
    }
}

/// Actions that a token permits in the repositories that a pattern matches:
/// `team/*:pull,push`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AccessScope {
    repositories: Pattern,
    /// Ascending, each once, at least one.
    actions: Vec<Action>,
}

impl AccessScope {
    /// Scopes that one token may have.
    pub const MOST: usize = 32;

    /// The repositories.
    #[must_use]
    pub fn repositories(&self) -> &Pattern {
        &self.repositories
    }

    /// Whether it permits an action in a repository.
    #[must_use]
    pub fn permits(&self, action: Action, repository: &RepositoryName) -> bool {
        self.names(action) && self.repositories.matches(repository.as_str())
    }

    /// Whether it permits an action in every repository, and so for what is about no repository.
    #[must_use]
    pub fn permits_everywhere(&self, action: Action) -> bool {
        self.names(action) && self.repositories.is_everything()
    }

    /// Whether it permits an action in any repository.
    #[must_use]
    pub fn names(&self, action: Action) -> bool {
        self.actions.contains(&action)
    }
}

impl fmt::Display for AccessScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.repositories)?;
        for (at, action) in self.actions.iter().enumerate() {
            write!(f, "{}{}", if at == 0 { "" } else { "," }, action.name())?;
        }
        Ok(())
    }
}

impl FromStr for AccessScope {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| name_error("scope", text, reason);
        let (pattern, names) = text.split_once(':').ok_or_else(|| fail("expected REPOSITORY-PATTERN:ACTIONS, such as team/*:pull,push"))?;
        let repositories = pattern.parse().map_err(|_| fail("the pattern for repositories has letters, digits, . _ - / and *"))?;
        let mut actions = Vec::new();
        for name in names.split(',') {
            let action = Action::ALL.into_iter().find(|action| action.name() == name);
            actions.push(action.ok_or_else(|| fail("the actions are pull, push, delete and admin, with commas between them"))?);
        }
        actions.sort_unstable();
        actions.dedup();
        Ok(Self { repositories, actions })
    }
}

impl TryFrom<String> for AccessScope {
    type Error = FormatError;

    fn try_from(text: String) -> Result<Self, FormatError> {
        text.parse()
    }
}

impl From<AccessScope> for String {
    fn from(scope: AccessScope) -> Self {
        scope.to_string()
    }
}

/// The public part of a token: 16 lower-case hex digits. Later tokens have greater ids.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AccessTokenId(String);
text_newtype!(AccessTokenId, "token id");

impl FromStr for AccessTokenId {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if text.len() != ID_DIGITS || !is_hex(text) {
            return Err(name_error("token id", text, "expected 16 lower-case hex digits"));
        }
        Ok(Self(text.to_owned()))
    }
}

const PREFIX: &str = "pft_";
const ID_DIGITS: usize = 16;
const SECRET_DIGITS: usize = 64;
const SUM_DIGITS: usize = 8;
const LENGTH: usize = PREFIX.len() + ID_DIGITS + 1 + SECRET_DIGITS + SUM_DIGITS;

/// A token with its secret. `Debug` does not show it, and there is no `Display`.
#[derive(Clone)]
pub struct AccessToken(String);

impl AccessToken {
    /// The latest time at which a token may expire: the end of the year 9999.
    pub const LATEST_END: u64 = 253_402_300_799_999;

    /// The token of this id and this secret.
    #[must_use]
    pub fn new(id: [u8; 8], secret: [u8; 32]) -> Self {
        let text = format!("{PREFIX}{}_{}", hex::encode(id), hex::encode(secret));
        let sum = crc32c::crc32c(text.as_bytes());
        Self(format!("{text}{sum:08x}"))
    }

    /// Reads a token. Errors do not repeat the text, which may be a secret.
    ///
    /// # Errors
    /// What is wrong with it, for people.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let Some(rest) = text.strip_prefix(PREFIX) else { return Err("an access token begins with pft_") };
        let well_formed =
            text.len() == LENGTH && rest.split_once('_').is_some_and(|(id, secret)| id.len() == ID_DIGITS && is_hex(id) && is_hex(secret));
        if !well_formed {
            return Err("an access token has 93 characters: pft_, 16 hex digits, _ and 72 hex digits; this one is not complete");
        }
        let (text_of_sum, sum) = text.split_at(LENGTH - SUM_DIGITS);
        if format!("{:08x}", crc32c::crc32c(text_of_sum.as_bytes())) != sum {
            return Err("the checksum of the access token is wrong: a character was changed");
        }
        Ok(Self(text.to_owned()))
    }

    /// Its public part.
    #[must_use]
    pub fn id(&self) -> AccessTokenId {
        AccessTokenId(self.0[PREFIX.len()..PREFIX.len() + ID_DIGITS].to_owned())
    }

    /// What a registry stores of it.
    #[must_use]
    pub fn hash(&self) -> Digest {
        Digest::sha256(self.0.as_bytes())
    }

    /// The text: for the code that sends it, or shows it once.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AccessToken({})", self.id())
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> AccessToken {
        AccessToken::new([1, 0x93, 0xa7, 0xc2, 0xe4, 0x1f, 0x0b, 0x5d], [7; 32])
    }

    #[test]
    fn a_token_is_read_back_and_says_its_id_but_not_its_secret() {
        let token = token();
        assert_eq!(token.expose().len(), 93);
        let read = AccessToken::parse(token.expose()).unwrap();
        assert_eq!((read.id().as_str(), read.hash()), ("0193a7c2e41f0b5d", token.hash()));
        assert_eq!(format!("{token:?}"), "AccessToken(0193a7c2e41f0b5d)");
    }

    /// The text is a promise to scanners for secrets: `pft_[0-9a-f]{16}_[0-9a-f]{72}`.
    #[test]
    fn the_form_of_a_token_does_not_change() {
        assert_eq!(AccessToken::new([0; 8], [0; 32]).expose(), format!("pft_{}_{}{}", "0".repeat(16), "0".repeat(64), "bd62dc80"));
    }

    #[test]
    fn every_changed_or_lost_character_is_noticed() {
        let token = token();
        let text = token.expose();
        for at in 0..text.len() {
            for other in ["0", "f", "x"] {
                let mut changed = text.to_owned();
                changed.replace_range(at..=at, other);
                assert!(changed == text || AccessToken::parse(&changed).is_err(), "{at}: {other}");
            }
            assert!(AccessToken::parse(&text[..at]).is_err());
        }
        let error = AccessToken::parse("hush").unwrap_err();
        assert!(!error.contains("hush"));
        assert!(AccessToken::parse(&format!("{text}0")).is_err() && AccessToken::parse(&text.to_uppercase()).is_err());
    }

    #[test]
    fn a_scope_permits_its_actions_in_its_repositories() {
        let scope: AccessScope = "team/*:push,pull,push".parse().unwrap();
        assert_eq!(scope.to_string(), "team/*:pull,push");
        let repository = |text: &str| text.parse::<RepositoryName>().unwrap();
        assert!(scope.permits(Action::Pull, &repository("team/a/b")) && scope.permits(Action::Push, &repository("team/a")));
        assert!(!scope.permits(Action::Delete, &repository("team/a")) && !scope.permits(Action::Pull, &repository("teams/a")));
        assert!(scope.names(Action::Push) && !scope.permits_everywhere(Action::Push));
        assert!("*:admin".parse::<AccessScope>().unwrap().permits_everywhere(Action::Admin));
    }

    #[test]
    fn a_scope_without_pattern_or_with_an_unknown_action_is_refused() {
        for wrong in ["", "team/*", "team/*:", ":pull", "team/*:write", "a b:pull", "a:pull,", "a:pull push", "a:Pull"] {
            assert!(wrong.parse::<AccessScope>().is_err(), "{wrong}");
        }
    }
}
