//! Addresses of repositories: `oci://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]`.

use crate::error::{Error, Result};
use crate::remote::is_loopback;
use pfr_schema::{Digest, RepositoryName, Tag};
use reqwest::Url;
use std::fmt;

/// The beginning of an address.
pub(in crate::export) const SCHEME: &str = "oci://";
/// Docker's registry, whose API has another host than its names.
const DOCKER: (&str, &str) = ("docker.io", "registry-1.docker.io");

/// A manifest of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// The manifest that a tag points at.
    Tag(Tag),
    /// That one.
    Digest(Digest),
}

/// A repository of a registry, and perhaps a manifest there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// `http(s)://host[:port]/`: http to this machine, https to any other.
    pub base: Url,
    /// The host as it was given: credentials are stored under this name.
    pub host: String,
    /// The repository.
    pub repository: RepositoryName,
    /// The manifest.
    pub named: Option<Named>,
}

impl Address {
    /// Parses an address.
    ///
    /// # Errors
    /// [`Error::Url`]; no error repeats a password.
    pub fn parse(text: &str) -> Result<Self> {
        // Without a user name and password.
        let (scheme, rest) = text.split_once("://").unwrap_or(("oci", text));
        let host_end = rest.find('/').unwrap_or(rest.len());
        let begin = rest[..host_end].rfind('@').map_or(0, |at| at + 1);
        let shown: String = format!("{scheme}://{}", &rest[begin..]).chars().take(100).collect();
        let fail =
            |reason: &str| Error::Layout { place: shown.clone(), code: pfr_schema::ErrorCode::InvalidName, reason: reason.to_owned() };
        let expected = "expected oci://HOST[:PORT]/REPOSITORY[:TAG|@DIGEST]";
        let (host, rest) = text.strip_prefix(SCHEME).and_then(|rest| rest.split_once('/')).ok_or_else(|| fail(expected))?;
        if host.is_empty() || !host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte)) {
            return Err(fail(&format!("{expected}, without a user name or password")));
        }
        let (repository, named) = match rest.split_once('@') {
            Some((repository, digest)) => {
                (repository, Some(Named::Digest(digest.parse().map_err(|_| fail("expected a whole digest after @"))?)))
            }
            None => match rest.split_once(':') {
                Some((repository, tag)) => {
                    (repository, Some(Named::Tag(tag.parse().map_err(|_| fail("expected a tag after the last colon"))?)))
                }
                None => (rest, None),
            },
        };
        let repository = repository.parse().map_err(|_| fail("expected the name of a repository, in lower case"))?;
        let api = if host == DOCKER.0 { DOCKER.1 } else { host };
        let url = |scheme: &str| format!("{scheme}://{api}/").parse::<Url>().ok().filter(|url| url.host_str().is_some());
        let base = url("http").filter(is_loopback).or_else(|| url("https")).ok_or_else(|| fail(expected))?;
        Ok(Self { base, host: host.to_owned(), repository, named })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.host, self.repository)?;
        match &self.named {
            Some(Named::Tag(tag)) => write!(f, ":{tag}"),
            Some(Named::Digest(digest)) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_http_on_this_machine_and_https_elsewhere() {
        for (text, base, repository, tag) in [
            ("oci://ghcr.io/team/agent:step-1", "https://ghcr.io/", "team/agent", Some("step-1")),
            ("oci://127.0.0.1:5000/agent", "http://127.0.0.1:5000/", "agent", None),
            ("oci://localhost:5000/a/b/c:x", "http://localhost:5000/", "a/b/c", Some("x")),
            ("oci://[::1]:5000/a:x", "http://[::1]:5000/", "a", Some("x")),
            ("oci://docker.io/team/agent", "https://registry-1.docker.io/", "team/agent", None),
        ] {
            let address = Address::parse(text).unwrap();
            assert_eq!((address.base.as_str(), address.repository.as_str()), (base, repository));
            assert_eq!(address.named, tag.map(|tag| Named::Tag(tag.parse().unwrap())));
            assert_eq!(address.to_string(), text);
        }
        let digest = Digest::sha256(b"x");
        assert_eq!(Address::parse(&format!("oci://h/a@{digest}")).unwrap().named, Some(Named::Digest(digest)));
    }

    #[test]
    fn what_is_no_address_is_refused_and_no_password_is_shown() {
        for text in [
            "oci://",
            "oci://h",
            "oci:///a",
            "oci://h/",
            "oci://h/A",
            "oci://h/a:",
            "oci://h/a@sha256:12",
            "oci://h/a/../b",
            "oci://h?x/a",
            "http://h/a",
        ] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
        let error = Address::parse("oci://user:hush@h/a").unwrap_err();
        assert!(!error.to_string().contains("hush"), "{error}");
    }
}
