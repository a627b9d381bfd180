//! Where a request carries its token.

use crate::jwt::token::looks_like;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use pfr_schema::AccessToken;
use pfr_service::Secret;

/// A token, not checked yet.
pub(super) enum Credential {
    /// One of the registry.
    Ours(AccessToken),
    /// Perhaps one of an issuer.
    Issued(Secret),
}

/// The token of a request: as `Bearer`, or as the password of `Basic`, for clients that know user
/// names and passwords only. None if there is no header, several, or one that holds no token.
pub(super) fn of(headers: &HeaderMap) -> Option<Credential> {
    let mut found = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (found.next(), found.next()) else { return None };
    let (scheme, rest) = value.to_str().ok()?.split_once(' ')?;
    let rest = rest.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return credential(rest);
    }
    if scheme.eq_ignore_ascii_case("basic") {
        let decoded = String::from_utf8(STANDARD.decode(rest).ok()?).ok()?;
        return credential(decoded.split_once(':')?.1);
    }
    None
}

fn credential(text: &str) -> Option<Credential> {
    let issued = || looks_like(text).then(|| Credential::Issued(Secret::new(text)));
    AccessToken::parse(text).ok().map(Credential::Ours).or_else(issued)
}

/// What a refused request is told about how to send a token.
pub(crate) fn challenges() -> [(HeaderName, HeaderValue); 2] {
    [(header::WWW_AUTHENTICATE, HeaderValue::from_static(r#"Bearer realm="pf-registry""#)), basic_challenge()]
}

/// The same for programs that take the realm of `Bearer` for the address of a token service.
pub(crate) fn basic_challenge() -> (HeaderName, HeaderValue) {
    (header::WWW_AUTHENTICATE, HeaderValue::from_static(r#"Basic realm="pf-registry", charset="UTF-8""#))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> AccessToken {
        AccessToken::new([1; 8], [2; 32])
    }

    fn found(values: &[&str]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        of(&headers).map(|credential| match credential {
            Credential::Ours(token) => token.expose().to_owned(),
            Credential::Issued(token) => token.expose().to_owned(),
        })
    }

    #[test]
    fn a_token_is_a_bearers_or_any_users_password() {
        let token = token();
        let expected = Some(token.expose().to_owned());
        for user in ["", "robot", "a b"] {
            let basic = STANDARD.encode(format!("{user}:{}", token.expose()));
            assert_eq!(found(&[&format!("Basic {basic}")]), expected, "{user}");
            assert_eq!(found(&[&format!("basic  {basic} ")]), expected, "{user}");
        }
        assert_eq!(found(&[&format!("Bearer {}", token.expose())]), expected);
        assert_eq!(found(&[&format!("bEARER {}", token.expose())]), expected);
    }

    #[test]
    fn a_token_of_an_issuer_has_three_parts() {
        let expected = Some("aA0-_.b.c".to_owned());
        assert_eq!(found(&["Bearer aA0-_.b.c"]), expected);
        assert_eq!(found(&[&format!("Basic {}", STANDARD.encode("x:aA0-_.b.c"))]), expected);
        for other in ["a.b", "a.b.c.d", "a.b.c=", "a.b c.d", ".b.c", "a..c", "a.b.ä"] {
            assert_eq!(found(&[&format!("Bearer {other}")]), None, "{other}");
        }
    }

    #[test]
    fn everything_else_is_no_token() {
        let bearer = format!("Bearer {}", token().expose());
        let user_only = format!("Basic {}", STANDARD.encode(token().expose()));
        let digest = format!("Digest {}", token().expose());
        for values in
            [&[][..], &[""], &["Bearer"], &["Bearer x"], &["Basic ?"], &["Basic eDp5"], &[&user_only], &[&digest], &[token().expose()]]
        {
            assert_eq!(found(values), None, "{values:?}");
        }
        assert_eq!(found(&[&bearer, &bearer]), None, "a proxy in front may have read the other one");
    }
}
