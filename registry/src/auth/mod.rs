//! Authorization. Each handler takes an [`Access`] or a [`Session`] as its first argument: it names
//! the action, and what the action is about. So authorization is visible where the action is, and a
//! handler without it does not compile ([`action_of`]).
//!
//! ```text
//! Authorization header ─▶ credentials ─▶ Gate: is the token valid? ─▶ Caller ─▶ decide: may it? ─▶ Access
//!                                          401, one answer for all        404 if it may not see, else 403
//!                                          (tokens of issuers: jwt)
//! ```
//!
//! A repository or domain that a caller may not pull is for it one that does not exist
//! ([`Caller`]). A registry that requires no tokens has no [`Gate`], and permits everything. The
//! OpenAPI document has the action of each operation as `x-pf-action`. Decision 45 says why it is
//! so.

mod access;
mod action;
mod caller;
mod credentials;
mod gate;
mod standing;

pub(crate) use access::{Access, AllRepositories, Anywhere, Catalogue, Metrics, Session, SomeRepositories, action_of};
pub(crate) use action::{Admin, Delete, Open, Pull, Push, name_of};
pub(crate) use caller::{Caller, KnownCaller, Target};
pub(crate) use credentials::{basic_challenge, challenges};
pub(crate) use gate::Gate;
pub(crate) use standing::Standing;
