//! Authorisation. Each handler takes an [`Access`] or a [`Session`] as its first argument: it names
//! the action, and the repository that the action is about. So authorisation is visible where the
//! action is, and a handler without it does not compile ([`action_of`]).
//!
//! There are no tokens yet, so the program's [`Policy`] grants every access: it and [`decide`] are
//! all that changes with them. The OpenAPI document has the action of each operation as
//! `x-pf-action`.

mod access;
mod action;
pub(crate) mod policy;

pub(crate) use access::{Access, AllRepositories, Catalogue, Session, action_of};
pub(crate) use action::{Action, Admin, Delete, Open, Pull, Push};
pub use policy::Policy;

use crate::app::App;
use crate::problem::ApiError;
use axum::http::request::Parts;
use pfr_schema::{DomainName, ErrorCode, RepositoryName};

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

/// Grants or refuses an access.
///
/// # Errors
/// `denied` if the policy does not grant the action. Later `unauthorized` for a caller without a
/// valid token.
pub(crate) fn decide(app: &App, caller: &Parts, question: &Question<'_>) -> Result<(), ApiError> {
    let (action, is_granted) = (question.action.name(), app.policy.grants(question.action));
    tracing::trace!(
        action,
        domain = %question.domain,
        repository = question.repository.map(RepositoryName::as_str),
        path = caller.uri.path(),
        is_granted,
        "access decided"
    );
    if is_granted { Ok(()) } else { Err(ApiError::new(ErrorCode::Denied, format!("this registry does not allow the action {action:?}"))) }
}
