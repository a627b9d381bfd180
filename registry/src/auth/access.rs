//! The extractor of a handler's access, and the check that each handler has one.

use super::action::{Permission, Push, name_of};
use super::caller::{Caller, Target};
use crate::app::App;
use crate::audit::Trail;
use crate::domains::Domain;
use crate::http::base;
use crate::http::path::Path;
use crate::problem::ApiError;
use crate::rates::Throttled;
use axum::extract::FromRequestParts;
use axum::handler::Handler;
use axum::http::request::Parts;
use pfr_schema::{Action, ErrorCode, RepositoryName};
use pfr_store::{Error, LivePush, PushId};
use std::marker::PhantomData;
use std::sync::Arc;

/// Proof that the caller may do `A` to a scope: a repository, or [`AllRepositories`] of a domain. A
/// handler has the repository's name and the domain's store from here only, so it cannot act on
/// another one.
pub(crate) struct Access<A, S = RepositoryName> {
    /// What the caller may act on.
    pub(crate) to: S,
    /// The domain that it is in.
    pub(crate) domain: Arc<Domain>,
    /// Who asks: for answers that depend on what the caller may see.
    pub(crate) caller: Caller,
    /// For the audit log: a change goes there in its own transaction.
    pub(crate) trail: Trail,
    action: PhantomData<A>,
}

impl<A: Permission, S: Scope> FromRequestParts<App> for Access<A, S> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let action = A::ACTION.filter(|_| !S::is_open(app));
        let trail = Trail::of(parts)?;
        // First: an unknown caller learns nothing, not even that a name is malformed.
        let caller = match &app.gate {
            Some(gate) if action.is_some() => gate.caller(parts).await?,
            _ => Caller::Anyone,
        };
        let is_first = trail.is_first();
        let is_limited = S::IS_LIMITED && action.is_some() && is_first;
        let named = match base::domain_of(parts) {
            Ok(name) => S::of(parts).await.map(|to| (name, to)),
            Err(malformed) => Err(malformed),
        };
        if is_limited && named.is_err() {
            // A flood of malformed names is one, too.
            app.rates.admit(&caller, trail.source(), None, None)?;
        }
        let (name, to) = named?;
        let decided = action.map_or(Ok(()), |action| caller.decide(action, &name, to.target()));
        let path = parts.uri.path();
        tracing::trace!(action = name_of(action), domain = %name, path, is_permitted = decided.is_ok(), "access decided");
        trail.about(parts, &name, to.target()).await;
        if is_limited {
            let domain = decided.is_ok().then_some(&name);
            app.rates.admit(&caller, trail.source(), domain, parts.extensions.get::<Throttled>())?;
        }
        decided?;
        // Only now: a caller that may not use a domain does not learn whether there is one. Nor
        // does any caller by what is open to all, which is the same in every domain.
        let domain = match A::ACTION {
            Some(_) => app.domains.get(&name).await?,
            None => Arc::clone(app.domains.default_domain()),
        };
        if is_first {
            trail.begin(&domain).await?;
        }
        Ok(Self { to, domain, caller, trail, action: PhantomData })
    }
}

/// What an action is about.
pub(crate) trait Scope: Sized + Send {
    /// Whether requests about it count against the limits on requests.
    const IS_LIMITED: bool = true;
    /// Reads it from the request's path.
    fn of(parts: &mut Parts) -> impl Future<Output = Result<Self, ApiError>> + Send;
    /// The same, for the decision.
    fn target(&self) -> Target<'_>;
    /// Whether the settings open it to every caller.
    fn is_open(_app: &App) -> bool {
        false
    }
}

impl Scope for RepositoryName {
    async fn of(parts: &mut Parts) -> Result<Self, ApiError> {
        let Path(repository) = Path::from_request_parts(parts, &()).await?;
        Ok(repository)
    }

    fn target(&self) -> Target<'_> {
        Target::Repository(self)
    }
}

/// The scope of an action on a domain as a whole.
pub(crate) struct AllRepositories;

impl Scope for AllRepositories {
    async fn of(_parts: &mut Parts) -> Result<Self, ApiError> {
        Ok(Self)
    }

    fn target(&self) -> Target<'_> {
        Target::Domain
    }
}

/// The scope of an action on those repositories of a domain that the caller may use: the handler
/// leaves the others out.
pub(crate) struct SomeRepositories;

impl Scope for SomeRepositories {
    async fn of(_parts: &mut Parts) -> Result<Self, ApiError> {
        Ok(Self)
    }

    fn target(&self) -> Target<'_> {
        Target::Some
    }
}

/// The scope of a question whose answer tells nothing: every valid token may ask it.
pub(crate) struct Anywhere;

impl Scope for Anywhere {
    async fn of(_parts: &mut Parts) -> Result<Self, ApiError> {
        Ok(Self)
    }

    fn target(&self) -> Target<'_> {
        Target::Nothing
    }
}

/// The scope of the metrics, which name all domains.
pub(crate) struct Metrics;

impl Scope for Metrics {
    const IS_LIMITED: bool = false;

    async fn of(_parts: &mut Parts) -> Result<Self, ApiError> {
        Ok(Self)
    }

    fn target(&self) -> Target<'_> {
        Target::Registry
    }

    fn is_open(app: &App) -> bool {
        app.open_metrics
    }
}

/// The scope of an action on the registry itself: its domains and its tokens.
pub(crate) struct Catalogue;

impl Scope for Catalogue {
    async fn of(parts: &mut Parts) -> Result<Self, ApiError> {
        if base::is_default(parts) {
            return Ok(Self);
        }
        Err(ApiError::new(ErrorCode::NotFound, "this address is in no domain: ask without /domains/NAME at the front of the path"))
    }

    fn target(&self) -> Target<'_> {
        Target::Registry
    }
}

/// Proof that the caller may push to a repository, and that the session in the request's path is
/// one of this repository.
pub(crate) struct Session {
    /// The repository.
    pub(crate) repository: RepositoryName,
    /// The domain that both are in.
    pub(crate) domain: Arc<Domain>,
    /// The session.
    pub(crate) push: LivePush,
    /// Who pushes.
    pub(crate) caller: Caller,
}

impl FromRequestParts<App> for Session {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, ApiError> {
        let Access { to: repository, domain, caller, .. } = Access::<Push>::from_request_parts(parts, app).await?;
        let Path(push): Path<PushId> = Path::from_request_parts(parts, app).await?;
        let found = domain.store.live_push(&repository, &push).await;
        if let Err(Error::PushUnknown(_)) = &found {
            app.claims.end(&domain.name, &repository, &push);
        }
        Ok(Self { push: found?, repository, domain, caller })
    }
}

/// Arguments of a handler, of which the first is its [`Access`] or [`Session`].
#[diagnostic::on_unimplemented(
    message = "the first argument of a handler must be its `Access` or `Session`",
    note = "add `_: Access<Pull>` (or Push, Delete, Admin, Open) before the other arguments"
)]
pub(crate) trait AccessFirst {
    /// The action that the handler performs.
    const ACTION: Option<Action>;
}

macro_rules! access_first {
    ($([$($argument:ident),*])+) => {$(
        impl<M, A: Permission, S, $($argument),*> AccessFirst for (M, Access<A, S>, $($argument,)*) {
            const ACTION: Option<Action> = A::ACTION;
        }
        impl<M, $($argument),*> AccessFirst for (M, Session, $($argument,)*) {
            const ACTION: Option<Action> = Push::ACTION;
        }
    )+};
}

access_first! { [] [T1] [T1, T2] [T1, T2, T3] [T1, T2, T3, T4] [T1, T2, T3, T4, T5] }

/// The action that a handler performs, from its signature.
pub(crate) fn action_of<H: Handler<T, App>, T: AccessFirst>(_handler: &H) -> Option<Action> {
    T::ACTION
}
