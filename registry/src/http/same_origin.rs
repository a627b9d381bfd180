//! Requests that may change something are accepted from programs and from pages of this registry,
//! and not from pages of other sites.
//!
//! A page of another site can make a browser send a form here: to a registry on loopback, and with
//! the token that the browser keeps since its user signed in. Browsers say where such a request
//! comes from: in `Sec-Fetch-Site` over HTTPS and on loopback, in `Origin` always. A request with
//! neither is no browser's. Answers to reads are kept from other sites by browsers themselves.

use crate::problem::ApiError;
use axum::http::{HeaderMap, HeaderName, Method, header};
use pfr_schema::ErrorCode;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses a request that may change something and that a page of another site sent.
///
/// # Errors
/// `denied`.
pub(super) fn check(method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    if method.is_safe() {
        return Ok(());
    }
    let is_ours = match (headers.get(SEC_FETCH_SITE), headers.get(header::ORIGIN)) {
        (Some(site), _) => site == "same-origin" || site == "none",
        (None, Some(origin)) => {
            let origin = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, host)| host);
            let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
            origin.zip(host).is_some_and(|(origin, host)| origin.eq_ignore_ascii_case(host))
        }
        (None, None) => true,
    };
    if is_ours {
        Ok(())
    } else {
        Err(ApiError::new(
            ErrorCode::Denied,
            "this request was sent by a page of another site; send it from a page of this registry, or by a program",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(given: &[(HeaderName, &str)]) -> bool {
        let headers = given.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
        let headers: HeaderMap = headers.chain([(header::HOST, "pf.example:5077".parse().unwrap())]).collect();
        assert!([Method::GET, Method::HEAD].iter().all(|method| check(method, &headers).is_ok()), "a read");
        let answers = [Method::POST, Method::PUT, Method::DELETE, Method::PATCH].map(|method| check(&method, &headers).is_ok());
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        answers[0]
    }

    #[test]
    fn a_change_that_another_site_asks_for_is_refused() {
        assert!(accepted(&[]), "no browser");
        for site in ["same-origin", "none"] {
            assert!(accepted(&[(SEC_FETCH_SITE, site), (header::ORIGIN, "https://pf.example")]), "{site}");
        }
        for site in ["same-site", "cross-site", "other"] {
            assert!(!accepted(&[(SEC_FETCH_SITE, site), (header::ORIGIN, "http://pf.example:5077")]), "{site}");
        }
        assert!(accepted(&[(header::ORIGIN, "http://PF.example:5077")]));
        for origin in ["null", "http://pf.example", "http://evil.example", "http://pf.example:5077.evil.example", ""] {
            assert!(!accepted(&[(header::ORIGIN, origin)]), "{origin}");
        }
    }
}
