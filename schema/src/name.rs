//! Names: domains, repositories, tags and references to snapshots.

use crate::digest::{Algorithm, Digest, DigestPrefix};
use crate::error::FormatError;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
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
pub(crate) use text_newtype;

pub(crate) fn name_error(what: &'static str, found: &str, reason: &'static str) -> FormatError {
    FormatError::Name { what, found: found.chars().take(300).collect(), reason }
}

/// A namespace of snapshots and tags, such as `team/agent`. The grammar is that of OCI: components
/// of lower-case letters, digits and single separators (`.`, `_`, `__`, or any number of `-`) are
/// joined by `/`. A name has at most 255 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RepositoryName(String);
text_newtype!(RepositoryName, "repository name");

impl FromStr for RepositoryName {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| name_error("repository name", text, reason);
        if !(1..=255).contains(&text.len()) {
            return Err(fail("expected 1 to 255 bytes"));
        }
        text.split('/').try_for_each(component).map_err(fail)?;
        Ok(Self(text.to_owned()))
    }
}

/// A component of a repository name, or the name of a domain: words and single separators.
fn component(text: &str) -> Result<(), &'static str> {
    if text.is_empty() {
        return Err("a component is empty");
    }
    let mut previous_separator = "";
    let mut rest = text;
    while !rest.is_empty() {
        let word = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit()).len();
        if word == 0 {
            return Err("expected lower-case letters, digits and single separators (. _ __ -), not at the ends of a component");
        }
        rest = &rest[word..];
        let separator = rest.len() - rest.trim_start_matches(['.', '_', '-']).len();
        previous_separator = &rest[..separator];
        let legal = matches!(previous_separator, "" | "." | "_" | "__") || previous_separator.bytes().all(|b| b == b'-');
        if !legal {
            return Err("separators are one of . _ __ or dashes");
        }
        rest = &rest[separator..];
        if separator == 0 && !rest.is_empty() {
            return Err("expected lower-case letters, digits and single separators (. _ __ -)");
        }
    }
    if previous_separator.is_empty() { Ok(()) } else { Err("a component ends with a separator") }
}

/// A domain: repositories that share storage. Grammar of one component of a [`RepositoryName`],
/// without dots, at most 40 bytes: it is a part of paths, of URLs and of a database schema's name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DomainName(String);
text_newtype!(DomainName, "domain name");

impl DomainName {
    /// The domain that exists from the first start. A request that names no domain is for this one.
    pub const DEFAULT: &str = "default";
    /// The first segment of the base path of a domain. On storage, the folder that holds the
    /// folders of all domains but the default one.
    pub const FOLDER: &str = "domains";

    /// Whether it is the default domain.
    #[must_use]
    pub fn is_default(&self) -> bool {
        self.0 == Self::DEFAULT
    }
}

impl Default for DomainName {
    fn default() -> Self {
        Self(Self::DEFAULT.to_owned())
    }
}

impl FromStr for DomainName {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let fail = |reason| name_error("domain name", text, reason);
        if !(1..=40).contains(&text.len()) || text.contains('.') {
            return Err(fail("expected 1 to 40 bytes without dots"));
        }
        component(text).map_err(fail)?;
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
        if text.is_empty() || text.len() > 128 {
            return Err(name_error("tag", text, "expected 1 to 128 bytes"));
        }
        if !is_word(text) {
            return Err(name_error("tag", text, WORD));
        }
        Ok(Self(text.to_owned()))
    }
}

const WORD: &str = "expected letters, digits, '_', '.' and '-', the first a letter, digit or '_'";

/// Whether a text has the characters of a tag.
fn is_word(text: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.starts_with(letter) && text.chars().all(|c| letter(c) || c == '.' || c == '-')
}

/// A capture agent, by the name under which it reports to a registry: that of its host, unless a
/// setting says another. 1 to 253 letters, digits, `_`, `.` and `-`, the first a letter, a digit or
/// `_`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AgentName(String);
text_newtype!(AgentName, "agent name");

impl FromStr for AgentName {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if !(1..=253).contains(&text.len()) {
            return Err(name_error("agent name", text, "expected 1 to 253 bytes"));
        }
        if !is_word(text) {
            return Err(name_error("agent name", text, WORD));
        }
        Ok(Self(text.to_owned()))
    }
}

/// Which snapshot of a repository: by tag, `N` parents above a tag, or by digest, which may be
/// shortened.
///
/// As text: `tag`, `tag~N`, `sha256:2a19b2…` or `@2a19b2…`; this is also the `{ref}` of REST paths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Selector {
    /// The snapshot that a tag points at, or an ancestor of that snapshot.
    Tag {
        /// The tag.
        tag: Tag,
        /// How many steps to the first parent; 0 is the tag's own snapshot.
        back: u32,
    },
    /// The snapshot with this digest.
    Digest(Digest),
    /// The only snapshot whose digest begins with this text.
    Prefix(DigestPrefix),
}

impl Selector {
    /// The tag, if this names the tag's own snapshot.
    #[must_use]
    pub fn tag(&self) -> Option<&Tag> {
        match self {
            Self::Tag { tag, back: 0 } => Some(tag),
            Self::Tag { .. } | Self::Digest(_) | Self::Prefix(_) => None,
        }
    }

    /// The selector for a digest, or for the beginning of one.
    fn of_digest(text: &str) -> Result<Self, FormatError> {
        text.parse().map(Self::Digest).or_else(|_| text.parse().map(Self::Prefix))
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tag { tag, back: 0 } => write!(f, "{tag}"),
            Self::Tag { tag, back } => write!(f, "{tag}~{back}"),
            Self::Digest(digest) => write!(f, "{digest}"),
            // Without its algorithm a prefix looks like a tag.
            Self::Prefix(prefix) if prefix.algorithm().is_none() => write!(f, "@{prefix}"),
            Self::Prefix(prefix) => write!(f, "{prefix}"),
        }
    }
}

impl FromStr for Selector {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if let Some(digest) = text.strip_prefix('@') {
            return Self::of_digest(digest);
        }
        if text.contains(':') {
            return Self::of_digest(text);
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

impl Serialize for Selector {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Selector {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// `[[http(s)://]host[:port]/[domains/name/]]repository[:tag[~N]|@digest]`.
///
/// Without a scheme, docker's rule says whether the first component is a host: a `/` follows it,
/// and it is `localhost` or contains a `.` or a `:`. A loopback host is reached over http, any
/// other over https. A `/` at the beginning says that the reference has no host. After a host,
/// `domains/NAME/` names a domain. A repository of the default domain whose own name begins with
/// `domains/NAME/` is written with `domains/default/` before it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The registry's base URL without a trailing slash, if the reference names a registry. It ends
    /// with the base path of the domain, if the reference names one other than the default.
    pub registry: Option<String>,
    /// The repository.
    pub repository: RepositoryName,
    /// The snapshot, if the reference names one. Commands take `latest` otherwise.
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
        match &self.registry {
            Some(registry) => {
                write!(f, "{registry}/")?;
                if !registry.contains("/domains/") && domain_and_path(self.repository.as_str()).is_some() {
                    write!(f, "{}/{}/", DomainName::FOLDER, DomainName::DEFAULT)?;
                }
            }
            None if host_and_path(self.repository.as_str()).is_some() => f.write_str("/")?,
            None => {}
        }
        write!(f, "{}", self.repository)?;
        match &self.selector {
            None => Ok(()),
            Some(s @ Selector::Tag { .. }) => write!(f, ":{s}"),
            Some(Selector::Digest(digest)) => write!(f, "@{digest}"),
            Some(Selector::Prefix(prefix)) => write!(f, "@{prefix}"),
        }
    }
}

impl FromStr for Reference {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if text.len() > 2048 {
            return Err(name_error("reference", text, "expected at most 2048 bytes"));
        }
        let (registry, path) = split_registry(text)?;
        if registry.is_some() && path.is_empty() {
            return Err(name_error("reference", text, "expected a repository after the registry's address"));
        }
        if registry.is_none() && is_bare_digest(path) {
            return Err(name_error("reference", text, "a digest needs its repository: REPOSITORY@DIGEST"));
        }
        let (repository, selector) = if let Some((repository, digest)) = path.split_once('@') {
            (repository, Some(Selector::of_digest(digest)?))
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

/// Whether `text` is `<algorithm>:<hex>`, complete or shortened, even too much. Read as a
/// reference, it would be a tag of a repository `sha256`.
#[must_use]
pub fn is_bare_digest(text: &str) -> bool {
    let known = |name: &str| Algorithm::ALL.iter().any(|algorithm| algorithm.name() == name);
    let is_short = |hex: &str| (1..DigestPrefix::MIN).contains(&hex.len()) && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    text.split_once(':').is_some_and(|(name, hex)| known(name) && (is_short(hex) || text.parse::<DigestPrefix>().is_ok()))
}

/// The registry's base URL, if `text` names a registry, and the rest of `text`.
fn split_registry(text: &str) -> Result<(Option<String>, &str), FormatError> {
    if let Some((scheme, rest)) = text.split_once("://") {
        if !matches!(scheme, "http" | "https") {
            return Err(name_error("reference", text, "unknown scheme; a registry is at http://HOST or https://HOST"));
        }
        let (host, path) =
            rest.split_once('/').ok_or_else(|| name_error("reference", text, "expected a repository after the registry's address"))?;
        check_host(text, host)?;
        return Ok(with_domain(format!("{scheme}://{host}"), path));
    }
    if let Some((host, path)) = host_and_path(text) {
        // Without a scheme, `text` may be the path of a file, such as `../x`.
        if !host.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[') || host.contains("..") {
            return Err(name_error("reference", text, "expected a repository, or host/repository"));
        }
        check_host(text, host)?;
        let scheme = if is_loopback(host) { "http" } else { "https" };
        return Ok(with_domain(format!("{scheme}://{host}"), path));
    }
    // A leading `/` is allowed only where it is needed. Otherwise a path of a file that was given
    // by mistake would be taken for a repository.
    match text.strip_prefix('/') {
        Some(path) if host_and_path(path).is_some() => Ok((None, path)),
        Some(_) => {
            let reason = "a / in front is only for a repository that could be taken for a host, such as /my.team/agent; leave it out";
            Err(name_error("reference", text, reason))
        }
        None => Ok((None, text)),
    }
}

/// The base URL of the domain that `path` begins with, and the rest of `path`. If `path` names no
/// domain, or the default one, the base URL is that of the registry.
fn with_domain(registry: String, path: &str) -> (Option<String>, &str) {
    match domain_and_path(path) {
        Some((domain, path)) if domain.is_default() => (Some(registry), path),
        Some((domain, path)) => (Some(format!("{registry}/{}/{domain}", DomainName::FOLDER)), path),
        None => (Some(registry), path),
    }
}

/// The domain that a path begins with, and what follows.
fn domain_and_path(path: &str) -> Option<(DomainName, &str)> {
    let (name, rest) = path.strip_prefix(DomainName::FOLDER)?.strip_prefix('/')?.split_once('/')?;
    Some((name.parse().ok()?, rest))
}

/// The first component, if it is a host by docker's rule, and what follows.
fn host_and_path(text: &str) -> Option<(&str, &str)> {
    let (first, rest) = text.split_once('/')?;
    let is_host = first == "localhost" || first.contains(['.', ':']);
    is_host.then_some((first, rest))
}

fn check_host(text: &str, host: &str) -> Result<(), FormatError> {
    // A user name or password in an address would end up in logs and shell history.
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '[' | ']');
    if host.is_empty() || host.starts_with(':') || !host.chars().all(legal) {
        return Err(name_error("reference", text, "expected host or host:port before the repository"));
    }
    let port = if host.ends_with(']') { None } else { host.rsplit_once(':').map(|(_, port)| port) };
    if port.is_some_and(|port| port.is_empty() || port.len() > 5 || !port.bytes().all(|b| b.is_ascii_digit())) {
        return Err(name_error("reference", text, "expected a number after the host's colon; a tag comes after the repository"));
    }
    Ok(())
}

/// Whether `host[:port]` is this machine.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}
