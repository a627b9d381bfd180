//! Arguments that name snapshots.

use crate::cli::failure::Failure;
use crate::cli::suggest::Suggestion;
use pfr_client::Site;
use pfr_schema::api::TagState;
use pfr_schema::name::is_bare_digest;
use pfr_schema::{Digest, DigestPrefix, FormatError, Pattern, Reference, RepositoryName, Selector};
use std::fmt;
use std::str::FromStr;

/// `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label(pub String, pub String);

impl FromStr for Label {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self(key.into(), value.into())),
            _ => Err("expected KEY=VALUE".into()),
        }
    }
}

/// A reference that may leave out the repository: `:TAG`, `@DIGEST`, `sha256:…`, or a whole
/// [`Reference`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Relative {
    /// In the repository of the first reference.
    Same(Selector),
    /// In any repository.
    Other(Reference),
}

impl Relative {
    /// The complete reference. Takes parts that it leaves out, the registry too, from `base`.
    pub fn seen_from(&self, base: &Reference) -> Reference {
        match self {
            Self::Same(selector) => Reference { selector: Some(selector.clone()), ..base.clone() },
            Self::Other(reference) => {
                Reference { registry: reference.registry.clone().or_else(|| base.registry.clone()), ..reference.clone() }
            }
        }
    }
}

impl FromStr for Relative {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        match text.strip_prefix(':') {
            Some(selector) => selector.parse().map(Self::Same),
            None if text.starts_with('@') || is_bare_digest(text) => text.parse().map(Self::Same),
            None => text.parse().map(Self::Other),
        }
    }
}

/// A snapshot of the repository that the command names: a tag, `tag~N` or a digest alone, or a
/// whole [`Reference`]. Unlike in a [`Relative`], a word alone is a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inside(pub Relative);

impl FromStr for Inside {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        match text.parse().map(Relative::Same) {
            Err(_) if text.contains(['/', ':', '@']) => text.parse().map(Self),
            snapshot => snapshot.map(Self),
        }
    }
}

/// The state in which a tag must be to be moved: `absent`, or a digest, which may be cut short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Known in full.
    State(TagState),
    /// To be looked up.
    Prefix(DigestPrefix),
}

impl Expected {
    /// The same, with the full digest.
    pub async fn state(expected: Option<Self>, site: &Site, repository: &RepositoryName) -> Result<Option<TagState>, Failure> {
        Ok(match expected {
            None => None,
            Some(Self::State(state)) => Some(state),
            Some(Self::Prefix(prefix)) => {
                let snapshot = site.snapshot(repository, &Selector::Prefix(prefix)).await;
                Some(TagState::At(snapshot.map_err(|error| Failure::from(error).context("--if-tag-is"))?.digest))
            }
        })
    }
}

impl FromStr for Expected {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        if let Ok(state) = text.parse() {
            return Ok(Self::State(state));
        }
        Ok(match text.parse()? {
            Short::Full(digest) => Self::State(TagState::At(digest)),
            Short::Prefix(prefix) => Self::Prefix(prefix),
        })
    }
}

/// A digest, which may be cut short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Short {
    /// In full.
    Full(Digest),
    /// To be looked up.
    Prefix(DigestPrefix),
}

impl FromStr for Short {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        let digest = text.strip_prefix('@').unwrap_or(text);
        digest.parse().map(Self::Full).or_else(|_| digest.parse().map(Self::Prefix))
    }
}

/// A target of `pf rm`: one tag or snapshot, or every tag that a pattern matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A tag or a snapshot.
    One(Reference),
    /// The tags of a repository that match.
    Tags {
        /// The repository, without tag or digest.
        repository: Reference,
        /// The pattern.
        pattern: Pattern,
    },
}

impl Target {
    /// The reference without the pattern.
    pub fn reference(&self) -> &Reference {
        match self {
            Self::One(reference) | Self::Tags { repository: reference, .. } => reference,
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('*') {
            return text.parse().map(Self::One).map_err(|e: FormatError| e.to_string());
        }
        let (repository, pattern) = text
            .rsplit_once(':')
            .filter(|(repository, tag)| !repository.contains('*') && !tag.contains('/'))
            .ok_or("expected REPOSITORY:PATTERN, such as 'team/agent:try-*'; a pattern stands for tags of one repository".to_owned())?;
        let repository: Reference = repository.parse().map_err(|e: FormatError| e.to_string())?;
        if repository.selector.is_some() {
            return Err(format!("expected REPOSITORY:PATTERN, found {text:?}"));
        }
        Ok(Self::Tags { repository, pattern: pattern.parse().map_err(|e: FormatError| e.to_string())? })
    }
}

/// The repositories that a pattern matches, in one registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repositories {
    /// The registry's base URL, if one is named.
    pub registry: Option<String>,
    /// What the names match.
    pub pattern: Pattern,
}

impl FromStr for Repositories {
    type Err = String;

    /// A host may stand before the pattern, as in a reference.
    fn from_str(text: &str) -> Result<Self, String> {
        let plain = || text.parse().map(|pattern| Self { registry: None, pattern }).map_err(|e: FormatError| e.to_string());
        // `x` for `*` keeps the length: the repository of this reference tells where the pattern
        // begins.
        let Ok(named) = text.replace('*', "x").parse::<Reference>() else { return plain() };
        let (host, pattern) = text.split_at(text.len().saturating_sub(named.repository.as_str().len()));
        if named.selector.is_some() {
            return plain();
        }
        if host.contains('*') {
            return Err(format!("a host has no `*`: {text:?}; write /{text} if it is a part of the repository's name"));
        }
        let pattern = pattern.parse().map_err(|e: FormatError| e.to_string())?;
        Ok(Self { registry: named.registry, pattern })
    }
}

impl fmt::Display for Repositories {
    /// As it is read again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pattern = self.pattern.to_string();
        match &self.registry {
            Some(registry) => write!(f, "{registry}/{pattern}"),
            // It would be taken for a host.
            None if pattern.parse::<Self>().ok().as_ref() != Some(self) => write!(f, "/{pattern}"),
            None => f.write_str(&pattern),
        }
    }
}

/// The repository that a reference without tag or digest names.
pub fn repository_of(reference: &Reference) -> Result<RepositoryName, Failure> {
    if reference.selector.is_none() {
        return Ok(reference.repository.clone());
    }
    let hint = match registry_meant(reference) {
        Some(registry) => Suggestion::new("ls").arg("--registry").arg(registry).then(" lists the repositories of that registry"),
        None => Suggestion::new("inspect").here().arg(reference).then(" shows one snapshot"),
    };
    Err(Failure::usage(format!("expected a repository without a tag or digest, found {reference}")).hint(hint))
}

/// The registry that `localhost:5077` probably means. Without a `/` behind it, it is a repository
/// and its tag.
fn registry_meant(reference: &Reference) -> Option<String> {
    let name = reference.repository.as_str();
    if reference.registry.is_some() || !(name == "localhost" || name.contains('.')) {
        return None;
    }
    format!("{reference}/x").parse::<Reference>().ok()?.registry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_of_repositories_may_name_its_registry() {
        let read = |text: &str| text.parse::<Repositories>().map(|read| (read.registry, read.pattern.to_string()));
        for (text, registry, pattern) in [
            ("*", None, "*"),
            ("team/*", None, "team/*"),
            ("-*", None, "-*"),
            ("/my.team/*", None, "my.team/*"),
            ("localhost:5077/team/a", Some("http://localhost:5077"), "team/a"),
            ("localhost:5077/*", Some("http://localhost:5077"), "*"),
            ("registry.example/domains/acme/te*m", Some("https://registry.example/domains/acme"), "te*m"),
            ("http://127.0.0.1:1/team/*/x", Some("http://127.0.0.1:1"), "team/*/x"),
        ] {
            assert_eq!(read(text), Ok((registry.map(str::to_owned), pattern.to_owned())), "{text}");
            let named = text.parse::<Repositories>().unwrap();
            assert_eq!(named.to_string().parse::<Repositories>(), Ok(named), "{text}");
        }
        for wrong in [
            "",
            "team/agent:x",
            "localhost:5077/team/agent:x",
            "http://*.example/team",
            "my.te*m/x",
            "r.example/domains/*/x",
            "localhost:5077/",
            "http://r:1/a b",
        ] {
            assert!(read(wrong).is_err(), "{wrong}: {:?}", read(wrong));
        }
    }

    #[test]
    fn a_star_in_a_tag_is_a_pattern_and_nowhere_else() {
        let target = |text: &str| text.parse::<Target>();
        let Ok(Target::Tags { repository, pattern }) = target("http://r:1/team/agent:try-*") else { panic!("a pattern") };
        assert_eq!(repository.to_string(), "http://r:1/team/agent");
        assert!(pattern.matches("try-1") && !pattern.matches("retry-1") && !pattern.matches("main"));
        assert!(matches!(target("team/agent:main"), Ok(Target::One(_))));
        for wrong in ["team/*", "team/*:x", "team/agent:x:*", "*", "team/agent:a?*", "http://r:1/te*m"] {
            assert!(target(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_address_without_a_repository_is_told_from_a_repository_with_a_tag() {
        let meant = |text: &str| registry_meant(&text.parse().unwrap());
        assert_eq!(meant("localhost:5077").as_deref(), Some("http://localhost:5077"));
        assert_eq!(meant("pf.example.com:443").as_deref(), Some("https://pf.example.com:443"));
        for repository in ["agent:5077", "team/agent:5077", "/my.team/agent:5077", "localhost:step-1", "http://h/localhost:5077"] {
            assert_eq!(meant(repository), None, "{repository}");
        }
    }

    #[test]
    fn a_digest_alone_means_the_repository_of_the_first_reference() {
        let base: Reference = "http://r:1/team/agent:a".parse().unwrap();
        let seen = |text: &str| text.parse::<Relative>().unwrap().seen_from(&base).to_string();
        assert_eq!(seen("@2a19b2c9"), "http://r:1/team/agent@2a19b2c9");
        assert_eq!(seen("sha256:2a19b2c9"), "http://r:1/team/agent@sha256:2a19b2c9");
        for short in ["@2a1", "sha256:2a1", "team/agent@2a1"] {
            let error = short.parse::<Relative>().unwrap_err().to_string();
            assert!(error.contains("at least 6 hex digits"), "{short}: {error}");
        }
    }

    #[test]
    fn a_snapshot_of_the_repository_is_a_tag_a_digest_or_a_whole_reference() {
        let base: Reference = "http://127.0.0.1:5077/team/agent".parse().unwrap();
        let seen = |text: &str| text.parse::<Inside>().unwrap().0.seen_from(&base).to_string();
        let digest = pfr_schema::Digest::sha256(b"x").to_string();
        let full = |rest: &str| format!("{base}{rest}");
        for (text, meant) in [
            ("step-1", full(":step-1")),
            (":step-1", full(":step-1")),
            ("step-1~2", full(":step-1~2")),
            ("@2a19b2c9", full("@2a19b2c9")),
            ("sha256:2a19b2c9", full("@sha256:2a19b2c9")),
            ("team/agent:step-1", full(":step-1")),
            (format!("team/agent@{digest}").as_str(), full(&format!("@{digest}"))),
            ("127.0.0.1:5077/team/agent:step-1", full(":step-1")),
            ("agent:step-1", "http://127.0.0.1:5077/agent:step-1".to_owned()),
            ("https://h/team/agent@2a19b2c9", "https://h/team/agent@2a19b2c9".to_owned()),
        ] {
            assert_eq!(seen(text), meant, "{text}");
        }
        for wrong in ["", "a b", "@", "~", "Team/Agent:x", "team/agent:a b"] {
            assert!(wrong.parse::<Inside>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_state_of_a_tag_is_absent_or_a_digest_that_may_be_cut_short() {
        let expected = |text: &str| text.parse::<Expected>();
        assert_eq!(expected("absent"), Ok(Expected::State(TagState::Absent)));
        let digest = pfr_schema::Digest::sha256(b"x");
        assert_eq!(expected(&digest.to_string()), Ok(Expected::State(TagState::At(digest))));
        for short in [digest.short(), format!("@{}", digest.short()), format!("sha256:{}", digest.short())] {
            assert!(matches!(expected(&short), Ok(Expected::Prefix(prefix)) if prefix.matches(&digest)), "{short}");
        }
        assert!(expected("latest").is_err());
        assert!(expected("2a1").unwrap_err().to_string().contains("at least 6 hex digits"));
    }
}
