//! The base path of a domain: `/domains/NAME` before `/v1/…` and `/v2/…`, and before the pages at
//! `/`, `/ui` and `/ui/…`.
//!
//! It is taken off before the router sees the path, so every route of the API and every page is
//! there for every domain, and routes, metrics and layers know one path each. Nothing else belongs
//! to a domain. Paths below `/v2` get the form that the router knows here, too.

use crate::oci::{self, Folded};
use crate::problem::ApiError;
use axum::http::request::Parts;
use axum::http::uri::{PathAndQuery, Uri};
use axum::http::{Extensions, Request};
use pfr_schema::DomainName;

/// The base path that was taken off a request.
#[derive(Clone)]
struct Base {
    domain: Result<DomainName, ApiError>,
    /// The path as it was sent.
    path: String,
}

/// Takes the base path off a request, if it has one.
pub(crate) fn take_off<B>(request: &mut Request<B>) {
    let path = request.uri().path().to_owned();
    let (mut name, mut rest) = split(request.uri()).map(|(name, rest)| (name.to_owned(), rest)).unzip();
    let inside = rest.as_ref().map_or(path.as_str(), PathAndQuery::path);
    if let Some(Folded { domain, path: folded, tail }) = oci::fold(inside, name.is_none()) {
        let folded = with_query(&folded, request.uri());
        request.extensions_mut().insert(oci::Address(path.get(..path.len().saturating_sub(tail)).unwrap_or(&path).to_owned()));
        name = name.or(domain);
        rest = folded;
    }
    let Some(rest) = rest else { return };
    // The name is not decoded: a proxy that forwards one domain only sees the same bytes.
    let domain = name.map_or_else(|| Ok(DomainName::default()), |name| name.parse::<DomainName>().map_err(ApiError::from));
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = Some(rest);
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
        request.extensions_mut().insert(Base { domain, path });
    }
}

/// A path with the query of the request.
fn with_query(path: &str, uri: &Uri) -> Option<PathAndQuery> {
    uri.query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}")).parse().ok()
}

fn split(uri: &Uri) -> Option<(&str, PathAndQuery)> {
    let path = uri.path().strip_prefix('/')?.strip_prefix(DomainName::FOLDER)?.strip_prefix('/')?;
    let end = path.find('/')?;
    let rest = &path[end..];
    if !["/", "/ui", "/docs"].contains(&rest) && !["/v1/", "/v2/", "/ui/"].iter().any(|prefix| rest.starts_with(prefix)) {
        return None;
    }
    Some((&path[..end], with_query(rest, uri)?))
}

/// The domain that a request is about.
///
/// # Errors
/// `invalid_name`.
pub(crate) fn domain_of(parts: &Parts) -> Result<DomainName, ApiError> {
    domain_in(&parts.extensions)
}

/// The same, from what is attached to the request.
///
/// # Errors
/// `invalid_name`.
pub(crate) fn domain_in(extensions: &Extensions) -> Result<DomainName, ApiError> {
    extensions.get::<Base>().map_or_else(|| Ok(DomainName::default()), |base| base.domain.clone())
}

/// Whether a request is about the default domain.
pub(crate) fn is_default(parts: &Parts) -> bool {
    domain_of(parts).is_ok_and(|domain| domain.is_default())
}

/// The path of a request as it was sent.
pub(crate) fn path_of<'a>(uri: &'a Uri, extensions: &'a Extensions) -> &'a str {
    extensions.get::<Base>().map_or(uri.path(), |base| &base.path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pfr_schema::ErrorCode;

    fn taken(uri: &str) -> (String, Result<DomainName, ErrorCode>, String) {
        let mut request = Request::builder().uri(uri).body(()).unwrap();
        take_off(&mut request);
        let (parts, ()) = request.into_parts();
        let path = path_of(&parts.uri, &parts.extensions).to_owned();
        (parts.uri.to_string(), domain_of(&parts).map_err(|failure| failure.code), path)
    }

    #[test]
    fn the_base_path_is_taken_off_what_belongs_to_a_domain() {
        let acme: DomainName = "acme".parse().unwrap();
        let sent = "/domains/acme/v1/repositories?limit=3";
        assert_eq!(taken(sent), ("/v1/repositories?limit=3".into(), Ok(acme.clone()), "/domains/acme/v1/repositories".into()));
        let whole = taken("http://h:1/domains/acme/v1/repositories/a%2Fb/tags");
        assert_eq!((whole.0.as_str(), whole.1), ("http://h:1/v1/repositories/a%2Fb/tags", Ok(acme)));
        assert_eq!(taken("/domains/default/v1/gc").1, Ok(DomainName::default()));
        for page in ["/", "/ui", "/docs", "/ui/", "/ui/-/storage", "/ui/a%2Fb/t?page=2"] {
            let taken = taken(&format!("/domains/acme{page}"));
            assert_eq!((taken.0.as_str(), taken.1.unwrap().as_str()), (page, "acme"));
        }
        for (sent, domain) in [
            ("/v2/domains/acme/a/b/manifests/t?x=1", "acme"),
            ("/domains/acme/v2/a/b/manifests/t?x=1", "acme"),
            ("/v2/a/b/manifests/t?x=1", "default"),
        ] {
            let taken = taken(sent);
            assert_eq!((taken.0.as_str(), taken.1.unwrap().as_str()), ("/v2/a%2Fb/manifests/t?x=1", domain), "{sent}");
            assert_eq!(Some(taken.2.as_str()), sent.strip_suffix("?x=1"));
        }
        for other in [
            "/v1/gc",
            "/domains",
            "/domains/",
            "/domains/acme",
            "/domains/acme/uix",
            "/domains/acme/livez",
            "/domains/acme/v1",
            "/domains/v1/gc",
        ] {
            assert_eq!(taken(other), (other.to_owned(), Ok(DomainName::default()), other.to_owned()), "{other}");
        }
    }

    #[test]
    fn a_name_that_is_none_is_no_domain() {
        for name in ["", "A", "a.b", "%61cme", "..", "a%2Fb", "-"] {
            assert_eq!(taken(&format!("/domains/{name}/v1/gc")).1, Err(ErrorCode::InvalidName), "{name}");
        }
    }
}
