//! Forms are accepted from pages of this registry only.
//!
//! Another site may hold a form that is sent here by a browser which can reach the registry, or
//! later carries a caller's credentials. Browsers say where a form comes from: in `Sec-Fetch-Site`
//! over HTTPS and on loopback, in `Origin` always. A request with neither is no browser's, and
//! could as well use the API.

use crate::problem::ApiError;
use axum::http::{HeaderMap, HeaderName, header};
use pfr_schema::ErrorCode;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Refuses a form of another site.
///
/// # Errors
/// `denied`.
pub(super) fn check(headers: &HeaderMap) -> Result<(), ApiError> {
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
        Err(ApiError::new(ErrorCode::Denied, "this form was sent by a page of another site; open the page here and use its button"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(given: &[(HeaderName, &str)]) -> bool {
        let headers = given.iter().map(|(name, value)| (name.clone(), value.parse().unwrap()));
        check(&headers.chain([(header::HOST, "pf.example:5077".parse().unwrap())]).collect()).is_ok()
    }

    #[test]
    fn a_form_of_another_site_is_refused() {
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
