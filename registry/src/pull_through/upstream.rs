//! The upstream registry: how it is reached, and what its errors mean here.

use crate::config::Config;
use crate::problem::ApiError;
use axum::http::HeaderMap;
use pfr_client::{Error, Remote, RemoteOptions, VIA};
use pfr_schema::ErrorCode;
use pfr_service::Secret;
use std::time::Duration;

/// Registries that a request may have come through.
const HOPS: usize = 8;

/// The registry that is asked for what is not here.
pub(super) struct Upstream {
    remote: Remote,
    /// This process, among registries that ask each other.
    id: String,
}

impl Upstream {
    /// The upstream that the settings name, if they name one. Nothing is sent yet.
    pub(super) fn of(config: &Config) -> Result<Option<Self>, Error> {
        if config.upstream.is_empty() {
            return Ok(None);
        }
        let token = Secret::from_env("PF_REGISTRY_UPSTREAM_TOKEN");
        // A reader waits for the answer, so an upstream that is down must be recognised soon.
        let connect_timeout = Duration::from_secs(3);
        let options = RemoteOptions {
            token,
            token_over_http: config.token_over_http,
            extra_roots: config.extra_roots(),
            retries: 1,
            retry_for: Duration::ZERO,
            connect_timeout,
            ..RemoteOptions::default()
        };
        Ok(Some(Self { remote: Remote::new(&config.upstream, options)?, id: uuid::Uuid::now_v7().to_string() }))
    }

    /// The upstream for a request that came through the registries in `via`. None if this registry
    /// is one of them, or if they are too many.
    pub(super) fn for_request(&self, via: &Via) -> Option<Remote> {
        let hops: Vec<&str> = via.0.split(',').map(str::trim).filter(|hop| !hop.is_empty()).collect();
        if hops.len() >= HOPS || hops.contains(&self.id.as_str()) {
            return None;
        }
        let chain: Vec<&str> = hops.into_iter().chain([self.id.as_str()]).collect();
        Some(self.remote.via(&chain.join(",")))
    }
}

/// The registries that a request has come through: the header `Pf-Via`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Via(String);

impl Via {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        Self(headers.get(VIA).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned())
    }
}

/// Whether the upstream says that it does not have something.
pub(super) fn is_unknown(error: &Error) -> bool {
    use ErrorCode::{BlobUnknown, RepositoryUnknown, SnapshotUnknown, TagUnknown};
    matches!(error.code(), BlobUnknown | RepositoryUnknown | SnapshotUnknown | TagUnknown)
}

/// The failure that the reader gets. An upstream that cannot be asked has not said that it has
/// nothing.
pub(super) fn failure(error: &Error) -> ApiError {
    let code = error.code();
    let (code, detail) = match error {
        Error::Received { digest, .. } => {
            (ErrorCode::CorruptStore, format!("the upstream registry sent wrong bytes for {digest}; nothing of them was kept"))
        }
        _ if is_unknown(error) || matches!(code, ErrorCode::CorruptStore | ErrorCode::AmbiguousDigest) => {
            (code, format!("the upstream registry: {error}"))
        }
        // A reader can do nothing about a quota, nor about a disk.
        _ if matches!(code, ErrorCode::StorageFull | ErrorCode::QuotaExceeded) => {
            (ErrorCode::StorageFull, "no room for the blobs of the upstream registry".to_owned())
        }
        _ => {
            let detail = "this is not here, and the upstream registry cannot be asked; that says nothing about what it holds, try again";
            (ErrorCode::Unavailable, detail.to_owned())
        }
    };
    ApiError::new(code, detail).because(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upstream() -> Upstream {
        let config = Config { upstream: "http://127.0.0.1:1".to_owned(), ..Config::default() };
        Upstream::of(&config).unwrap().unwrap()
    }

    #[test]
    fn a_request_that_came_through_here_or_through_eight_registries_is_not_passed_on() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let upstream = upstream();
        let others = |count: usize| (0..count).map(|n| format!("other-{n}")).collect::<Vec<_>>().join(", ");
        assert!(upstream.for_request(&Via(String::new())).is_some());
        assert!(upstream.for_request(&Via(others(7))).is_some());
        assert!(upstream.for_request(&Via(others(8))).is_none());
        assert!(upstream.for_request(&Via(format!("{},{}", others(2), upstream.id))).is_none());
    }

    #[test]
    fn an_upstream_that_cannot_be_asked_is_unavailable_and_not_unknown() {
        let refused = Error::Unreachable { url: "http://127.0.0.1:1".into(), reason: "refused".into(), attempts: 1 };
        assert!(!is_unknown(&refused));
        assert_eq!(failure(&refused).code, ErrorCode::Unavailable);
    }
}
