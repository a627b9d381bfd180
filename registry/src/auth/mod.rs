//! Authorisation. Each handler takes an [`Access`] or a [`Session`] as its first argument: it names
//! the action, and the repository that the action is about. So authorisation is visible where the
//! action is, and a handler without it does not compile ([`action_of`]).
//!
//! There are no tokens yet, so every access is granted: [`decide`] is the only place that changes
//! with them. The OpenAPI document has the action of each operation as `x-pf-action`.

mod access;
mod action;

pub(crate) use access::{Access, AllRepositories, Catalogue, Session, action_of};
pub(crate) use action::{Action, Admin, Delete, Open, Pull, Push};

use crate::app::App;
use crate::problem::ApiError;
use axum::http::request::Parts;
use pfr_schema::{DomainName, RepositoryName};

/// What a caller asks to be allowed.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    /// The action.
    pub(crate) action: Action,
    /// The domain that it is done in.
    pub(crate) domain: &'a DomainName,
    /// The repository that it is done to; none if it concerns all of the domain.
    pub(crate) repository: Option<&'a RepositoryName>,
}

/// Grants or refuses an access. Without tokens every access is granted.
///
/// # Errors
/// None today. Later `unauthorized` for a caller without a valid token, and `denied` for a token
/// that does not allow the action.
pub(crate) fn decide(_app: &App, caller: &Parts, question: &Question<'_>) -> Result<(), ApiError> {
    tracing::trace!(
        action = question.action.name(),
        domain = %question.domain,
        repository = question.repository.map(RepositoryName::as_str),
        path = caller.uri.path(),
        "access granted"
    );
    Ok(())
}
