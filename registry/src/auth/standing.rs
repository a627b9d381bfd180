//! The caller of a request whose answer goes on for hours.

use super::caller::{Caller, Target};
use super::gate::Gate;
use crate::app::App;
use crate::problem::ApiError;
use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, header};
use pfr_schema::{Action, DomainName};
use std::sync::Arc;

/// Answers whether the caller of a request still may do what it asked for. A token may be revoked
/// or expire, and the settings for an issuer may change, after the answer has begun.
pub(crate) struct Standing {
    gate: Option<Arc<Gate>>,
    /// Those of the request, without other headers: they are kept as long as the answer goes on.
    parts: Parts,
}

impl FromRequestParts<App> for Standing {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let mut kept = HeaderMap::new();
        for value in parts.headers.get_all(header::AUTHORIZATION) {
            kept.append(header::AUTHORIZATION, value.clone());
        }
        let mut parts = parts.clone();
        parts.headers = kept;
        Ok(Self { gate: app.gate.clone(), parts })
    }
}

impl Standing {
    /// The caller, if it still may pull from a domain. Costs no question to the database more often
    /// than requests with the same token do.
    ///
    /// # Errors
    /// As for a new request.
    pub(crate) async fn pulls(&self, domain: &DomainName) -> Result<Caller, ApiError> {
        let Some(gate) = &self.gate else { return Ok(Caller::Anyone) };
        let caller = gate.caller(&self.parts).await?;
        caller.decide(Action::Pull, domain, Target::Some)?;
        Ok(caller)
    }
}
