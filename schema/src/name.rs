//! Names: repositories, tags and references to snapshots.

use crate::digest::Digest;
use crate::error::FormatError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

macro_rules! text_newtype {
    ($type:ident, $what:literal) => {
        impl $type {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
        impl TryFrom<String> for $type {
            type Error = FormatError;
            fn try_from(text: String) -> Result<Self, FormatError> {
                text.parse()
            }
        }
        impl From<$type> for String {
            fn from(name: $type) -> Self {
                name.0
            }
        }
    };
}

fn name_error(what: &'static str, found: &str, reason: &'static str) -> FormatError {
    FormatError::Name { what, found: found.chars().take(300).collect(), reason }
}

/// A namespace of snapshots and tags, `team/agent`; OCI's grammar: lower-case letters, digits and single
/// separators (`.`, `_`, `__`, `-`…), components joined by `/`, at most 255 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RepositoryName(String);
text_newtype!(RepositoryName, "repository name");

impl FromStr for RepositoryName {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| Err(name_error("repository name", text, reason));
        if text.is_empty() || text.len() > 255 {
            return fail("expected 1 to 255 bytes");
        }
        for component in text.split('/') {
            if component.is_empty() {
                return fail("a component is empty");
            }
            let mut previous_separator = "";
            let mut rest = component;
            while !rest.is_empty() {
                let word = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()).len();
                if word == 0 {
                    return fail("expected lower-case letters, digits and single separators (. _ __ -), not at the ends of a component");
                }
                rest = &rest[word..];
                let separator = rest.len() - rest.trim_start_matches(['.', '_', '-']).len();
                previous_separator = &rest[..separator];
                let legal = matches!(previous_separator, "" | "." | "_" | "__") || previous_separator.bytes().all(|b| b == b'-');
                if !legal {
                    return fail("separators are one of . _ __ or dashes");
                }
                rest = &rest[separator..];
                if separator == 0 && !rest.is_empty() {
                    return fail("expected lower-case letters, digits and single separators (. _ __ -)");
                }
            }
            if !previous_separator.is_empty() {
                return fail("a component ends with a separator");
            }
        }
        Ok(Self(text.to_owned()))
    }
}

/// A mutable name for a snapshot: `[A-Za-z0-9_][A-Za-z0-9._-]{0,127}`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Tag(String);
text_newtype!(Tag, "tag");

impl Tag {
    /// The tag that a reference without one means.
    pub const LATEST: &str = "latest";
}

impl FromStr for Tag {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if text.is_empty() || text.len() > 128 {
            return Err(name_error("tag", text, "expected 1 to 128 bytes"));
        }
        if !text.starts_with(word) || !text.chars().all(|c| word(c) || c == '.' || c == '-') {
            return Err(name_error("tag", text, "expected letters, digits, '_', '.' and '-', the first a letter, digit or '_'"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Which snapshot of a repository: by tag, `N` parents above a tag, or by digest.
///
/// As text: `tag`, `tag~N` or `sha256:…`; this is also the `{ref}` of REST paths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// The snapshot a tag points to, or the `back`-th first parent of it.
    Tag {
        /// The tag.
        tag: Tag,
        /// How many parents up; 0 is the tag's own snapshot.
        back: u32,
    },
    /// The snapshot itself.
    Digest(Digest),
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag { tag, back: 0 } => write!(f, "{tag}"),
            Self::Tag { tag, back } => write!(f, "{tag}~{back}"),
            Self::Digest(digest) => write!(f, "{digest}"),
        }
    }
}

impl FromStr for Selector {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if text.contains(':') {
            return Ok(Self::Digest(text.parse()?));
        }
        let (tag, back) = match text.split_once('~') {
            None => (text, 0),
            Some((tag, "")) => (tag, 1),
            Some((tag, steps)) => (
                tag,
                Some(steps)
                    .filter(|s| s.bytes().all(|b| b.is_ascii_digit()))
                    .and_then(|s| s.parse().ok())
                    .filter(|n| *n <= 100_000)
                    .ok_or_else(|| name_error("reference", text, "expected a number up to 100000 after '~'"))?,
            ),
        };
        Ok(Self::Tag { tag: tag.parse()?, back })
    }
}

/// `[http(s)://host[:port]/]repository[:tag[~N]|@digest]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The registry's base URL without a trailing slash, if the reference names one.
    pub registry: Option<String>,
    /// The repository.
    pub repository: RepositoryName,
    /// The snapshot, if the reference names one; commands mean `latest` otherwise.
    pub selector: Option<Selector>,
}

impl Reference {
    /// The selector, `latest` if none was given.
    #[must_use]
    pub fn selector_or_latest(&self) -> Selector {
        self.selector.clone().unwrap_or_else(|| Selector::Tag { tag: Tag(Tag::LATEST.to_owned()), back: 0 })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(registry) = &self.registry {
            write!(f, "{registry}/")?;
        }
        write!(f, "{}", self.repository)?;
        match &self.selector {
            None => Ok(()),
            Some(s @ Selector::Tag { .. }) => write!(f, ":{s}"),
            Some(s @ Selector::Digest(_)) => write!(f, "@{s}"),
        }
    }
}

impl FromStr for Reference {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if text.len() > 2048 {
            return Err(name_error("reference", text, "expected at most 2048 bytes"));
        }
        let scheme = ["http://", "https://"].into_iter().find(|s| text.starts_with(s));
        let (registry, path) = match scheme {
            None => (None, text),
            Some(scheme) => {
                let (host, path) = text[scheme.len()..]
                    .split_once('/')
                    .ok_or_else(|| name_error("reference", text, "expected a repository after the registry's address"))?;
                // A user name or password in an address would end up in logs and shell history.
                let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']');
                if host.is_empty() || host.starts_with(':') || !host.chars().all(legal) {
                    return Err(name_error("reference", text, "expected host or host:port after the scheme"));
                }
                (Some(format!("{scheme}{host}")), path)
            }
        };
        let (repository, selector) = if let Some((repository, digest)) = path.split_once('@') {
            (repository, Some(Selector::Digest(digest.parse()?)))
        } else if let Some((repository, tag)) = path.split_once(':') {
            (repository, Some(tag.parse()?))
        } else if let Some((repository, steps)) = path.split_once('~') {
            (repository, Some(format!("{}~{steps}", Tag::LATEST).parse()?))
        } else {
            (path, None)
        };
        Ok(Self { registry, repository: repository.parse()?, selector })
    }
}
