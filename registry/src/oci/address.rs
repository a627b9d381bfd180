//! Addresses of this API: repository names with slashes, before words that a repository may be
//! called, too.
//!
//! The end of a path says what it is about, so it is taken apart from there, before the router
//! sees it. A name that begins with `domains/NAME/` is one in that domain, as in references of
//! `pf`: the programs for which this API is know no base path.

use crate::http::path::Segment;
use crate::problem::ApiError;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use pfr_schema::{Digest, DomainName, FormatError};
use pfr_store::ManifestName;

/// A path whose repository is one segment.
pub(crate) struct Folded {
    /// The domain that the name begins with.
    pub(crate) domain: Option<String>,
    /// The path that the router knows.
    pub(crate) path: String,
    /// Bytes at the end of the path that do not belong to the address of the repository.
    pub(crate) tail: usize,
}

/// Takes a path below `/v2` apart; none for one that is about no repository.
/// `may_name_domain`: its name may begin with a domain.
pub(crate) fn fold(path: &str, may_name_domain: bool) -> Option<Folded> {
    let segments: Vec<&str> = path.strip_prefix("/v2/")?.split('/').collect();
    let (name, tail) = match &segments[..] {
        [name @ .., "blobs", "uploads"] | [name @ .., "blobs", "uploads", ""] => (name, "blobs/uploads".to_owned()),
        [name @ .., "blobs", "uploads", id] => (name, format!("blobs/uploads/{id}")),
        [name @ .., what @ ("blobs" | "manifests" | "referrers"), which] if !which.is_empty() => (name, format!("{what}/{which}")),
        [name @ .., "tags", "list"] => (name, "tags/list".to_owned()),
        _ => return None,
    };
    let (domain, name) = match name {
        [] => return None,
        [DomainName::FOLDER, domain, name @ ..] if may_name_domain && !name.is_empty() => (Some((*domain).to_owned()), name),
        name => (None, name),
    };
    let tail_len = path.len() - path.trim_end_matches('/').len() + 1 + tail.len();
    Some(Folded { domain, path: format!("/v2/{}/{tail}", name.join("%2F")), tail: tail_len })
}

/// The address of the repository of a request, as the client has it: `/v2/team/agent`.
#[derive(Clone, Debug)]
pub(crate) struct Address(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Address {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| ApiError::internal("a repository without an address"))
    }
}

impl Address {
    /// The address of something in the repository.
    pub(super) fn of(&self, what: &str, which: impl std::fmt::Display) -> String {
        format!("{}/{what}/{which}", self.0)
    }
}

impl Segment for Digest {
    const NAME: &'static str = "digest";
    fn parse(text: &str) -> Result<Self, ApiError> {
        digest(text)
    }
}

/// A digest in a request.
pub(super) fn digest(text: &str) -> Result<Digest, ApiError> {
    text.parse().map_err(|error: FormatError| ApiError::invalid(error.to_string()))
}

impl Segment for ManifestName {
    const NAME: &'static str = "reference";
    fn parse(text: &str) -> Result<Self, ApiError> {
        // No tag has a colon.
        if text.contains(':') {
            return digest(text).map(Self::Digest);
        }
        text.parse().map(Self::Tag).map_err(|error: FormatError| ApiError::invalid(error.to_string()))
    }
}

/// A text as a part of a query.
pub(super) fn encoded(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn folded(path: &str) -> Option<(Option<String>, String, String)> {
        fold(path, true).map(|folded| (folded.domain, folded.path, path[..path.len() - folded.tail].to_owned()))
    }

    #[test]
    fn the_end_of_a_path_says_what_it_is_about() {
        for (path, expected, address) in [
            ("/v2/a/blobs/uploads/", "/v2/a/blobs/uploads", "/v2/a"),
            ("/v2/a/b/blobs/uploads", "/v2/a%2Fb/blobs/uploads", "/v2/a/b"),
            ("/v2/a/b/blobs/uploads/1-2", "/v2/a%2Fb/blobs/uploads/1-2", "/v2/a/b"),
            ("/v2/a/b/c/blobs/sha256:x", "/v2/a%2Fb%2Fc/blobs/sha256:x", "/v2/a/b/c"),
            ("/v2/a%2Fb/manifests/t", "/v2/a%2Fb/manifests/t", "/v2/a%2Fb"),
            ("/v2/blobs/uploads/manifests/t", "/v2/blobs%2Fuploads/manifests/t", "/v2/blobs/uploads"),
            ("/v2/manifests/blobs/d", "/v2/manifests/blobs/d", "/v2/manifests"),
            ("/v2/tags/list/tags/list", "/v2/tags%2Flist/tags/list", "/v2/tags/list"),
            ("/v2/a/referrers/d", "/v2/a/referrers/d", "/v2/a"),
            ("/v2/domains/acme/manifests/t", "/v2/domains%2Facme/manifests/t", "/v2/domains/acme"),
        ] {
            assert_eq!(folded(path), Some((None, expected.to_owned(), address.to_owned())), "{path}");
        }
        let in_domain = folded("/v2/domains/acme/team/agent/tags/list").unwrap();
        assert_eq!(in_domain.0.as_deref(), Some("acme"));
        assert_eq!((in_domain.1.as_str(), in_domain.2.as_str()), ("/v2/team%2Fagent/tags/list", "/v2/domains/acme/team/agent"));
        for path in [
            "/v2",
            "/v2/",
            "/v2/_catalog",
            "/v2/a",
            "/v2/manifests/t",
            "/v2/tags/list",
            "/v2/blobs/uploads/",
            "/v1/a/manifests/t",
            "/v2/é/blobs/",
            "/v2/a/manifests/",
        ] {
            assert_eq!(folded(path), None, "{path}");
        }
    }

    proptest! {
        #[test]
        fn an_address_is_the_beginning_of_its_path(
            parts in proptest::collection::vec("blobs|uploads|manifests|referrers|tags|list|domains|é|a|%2F||.", 0..7),
            end in "/{0,2}",
        ) {
            let path = format!("/v2/{}{end}", parts.join("/"));
            for may_name_domain in [true, false] {
                if let Some(folded) = fold(&path, may_name_domain) {
                    let end = path.len().checked_sub(folded.tail);
                    let address = end.and_then(|end| path.split_at_checked(end));
                    prop_assert!(address.is_some_and(|(name, rest)| name.starts_with("/v2/") && rest.starts_with('/')), "{path}");
                }
            }
        }
    }

    #[test]
    fn a_type_is_the_same_after_a_query() {
        assert_eq!(encoded("application/vnd.x.v1+json"), "application%2Fvnd.x.v1%2Bjson");
    }
}
