//! The host that a request names.
//!
//! A page of another site can have its own name lead to 127.0.0.1 (DNS rebinding). For a browser
//! that page and a registry on loopback are one site then, so nothing that browsers keep from other
//! sites protects the registry. The browser still sends that name as the host. A registry that
//! requires tokens is safe: the browser has none for that name. Decision 63 has the reasons.

use crate::config::Config;
use crate::problem::ApiError;
use axum::http::uri::Authority;
use axum::http::{Request, Version, header};
use pfr_schema::ErrorCode;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// The name of this machine, and the end of names that never leave it: no DNS server is asked for
/// them.
const LOCAL: &str = "localhost";
const BELOW_LOCAL: &str = ".localhost";

/// The hosts that requests may name.
#[derive(Clone)]
pub(crate) enum Hosts {
    Any,
    /// This machine, by any address, or by one of these names.
    Local(Arc<[String]>),
}

impl Hosts {
    /// Any, but for a registry that only this machine can reach and that asks for no tokens. With a
    /// certificate it needs no check: no other site has one for its name with this key.
    pub(crate) fn of(config: &Config) -> Self {
        match config.require_tokens || config.has_tls() || !config.listen.ip().is_loopback() {
            true => Self::Any,
            false => Self::Local(config.host_names.0.as_slice().into()),
        }
    }

    fn has(&self, host: &str) -> bool {
        let Self::Local(names) = self else { return true };
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        let in_brackets = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_address = in_brackets.map_or_else(|| host.parse::<Ipv4Addr>().is_ok(), |host| host.parse::<Ipv6Addr>().is_ok());
        is_address || host == LOCAL || host.ends_with(BELOW_LOCAL) || names.contains(&host)
    }
}

/// Refuses a request that does not name exactly one host, or not one of `hosts`.
///
/// RFC 9112, section 3.2: a request of HTTP/1.1 names exactly one. With two, a proxy in front could
/// route by the other one.
///
/// # Errors
/// `invalid_request`, `denied`.
pub(super) fn check<B>(request: &Request<B>, hosts: &Hosts) -> Result<(), ApiError> {
    let mut named = request.headers().get_all(header::HOST).iter();
    let host = match (named.next(), named.next()) {
        (None, _) if request.version() < Version::HTTP_11 => return Ok(()),
        (None, _) => return Err(ApiError::invalid("expected one Host header, found none")),
        (Some(_), Some(_)) => return Err(ApiError::invalid(format!("expected one Host header, found {}", named.count() + 2))),
        (Some(host), None) => host,
    };
    let authority = match Authority::try_from(host.as_bytes()) {
        Ok(authority) if !authority.as_str().contains('@') => authority,
        _ => {
            return Err(ApiError::invalid(format!(
                "expected Host: name or name:port, found {:?}",
                String::from_utf8_lossy(host.as_bytes())
            )));
        }
    };
    if hosts.has(authority.host()) {
        return Ok(());
    }
    let name = authority.host();
    let detail = format!(
        "this registry asks for no tokens, so it answers only requests to this machine, and this one is to {name:?}: use 127.0.0.1 or \
         localhost, name {name} in its setting host-names, or have it require tokens"
    );
    Err(ApiError::new(ErrorCode::Denied, detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn config(names: &str) -> Config {
        Config { host_names: names.parse().unwrap(), ..Config::default() }
    }

    fn code(host: &str, config: &Config) -> Option<ErrorCode> {
        let request = Request::builder().header(header::HOST, host).body(()).unwrap();
        check(&request, &Hosts::of(config)).err().map(|error| error.code)
    }

    #[test]
    fn a_name_that_leads_here_from_elsewhere_is_refused_where_no_tokens_are() {
        let local = config("");
        for host in ["127.0.0.1:5077", "127.0.0.1", "10.1.2.3", "[::1]:5077", "localhost", "LOCALHOST:80", "localhost.", "a.b.localhost:1"]
        {
            assert_eq!(code(host, &local), None, "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:5077",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "1.2.3",
            "2130706433",
        ] {
            assert_eq!(code(host, &local), Some(ErrorCode::Denied), "{host}");
        }
        let named = config("pf.example, Other.Example");
        for host in ["pf.example:5077", "PF.example.", "other.example"] {
            assert_eq!(code(host, &named), None, "{host}");
        }
        assert_eq!(code("a.pf.example", &named), Some(ErrorCode::Denied));
        let guarded = Config { require_tokens: true, ..local.clone() };
        let certified = Config { tls_cert: "cert.pem".into(), ..local.clone() };
        let open = Config { listen: ([0, 0, 0, 0], 5077).into(), ..local };
        for config in [guarded, certified, open] {
            assert_eq!(code("evil.example", &config), None);
        }
    }

    proptest! {
        #[test]
        fn no_host_breaks_the_check(host in "[ -~]{0,40}") {
            let found = code(&host, &config(""));
            prop_assert!(matches!(found, None | Some(ErrorCode::Denied | ErrorCode::InvalidRequest)), "{host}: {found:?}");
        }
    }
}
