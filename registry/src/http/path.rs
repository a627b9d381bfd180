//! Segments of a request's path, as validated types.

use crate::http::resolved::ResolvedRefs;
use crate::problem::ApiError;
use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use pfr_schema::{AccessTokenId, AgentName, DomainName, ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::PushId;

/// A `{name}` of a route's path, percent-decoded.
pub(crate) trait Segment: Sized {
    /// Its name in the route.
    const NAME: &'static str;
    /// Parses it.
    fn parse(text: &str) -> Result<Self, ApiError>;
}

/// A path segment as an extractor.
pub(crate) struct Path<T>(pub(crate) T);

impl<S: Send + Sync, T: Segment> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let segments = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|e| ApiError::new(ErrorCode::InvalidName, format!("the path cannot be decoded: {e}")))?;
        let resolved = parts.extensions.get::<ResolvedRefs>().and_then(|resolved| resolved.get(T::NAME));
        let text = resolved.or_else(|| segments.iter().find(|(name, _)| *name == T::NAME).map(|(_, text)| text));
        T::parse(text.ok_or_else(|| ApiError::internal(format!("the route has no {{{}}}", T::NAME)))?).map(Path)
    }
}

impl Segment for DomainName {
    const NAME: &'static str = "domain";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(text.parse()?)
    }
}

impl Segment for AgentName {
    const NAME: &'static str = "agent";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(text.parse()?)
    }
}

impl Segment for AccessTokenId {
    const NAME: &'static str = "token";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(text.parse()?)
    }
}

impl Segment for RepositoryName {
    const NAME: &'static str = "repo";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(text.parse()?)
    }
}

impl Segment for Tag {
    const NAME: &'static str = "tag";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(text.parse()?)
    }
}

impl Segment for Selector {
    const NAME: &'static str = "ref";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(text.parse()?)
    }
}

/// The second snapshot of a comparison.
pub(crate) struct OtherRef(pub(crate) Selector);

impl Segment for OtherRef {
    const NAME: &'static str = "other";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(Self(text.parse()?))
    }
}

impl Segment for PushId {
    const NAME: &'static str = "id";
    fn parse(text: &str) -> Result<Self, ApiError> {
        // The registry makes these ids. One of another form cannot be an id of a session.
        let id = text.parse::<uuid::Uuid>().map_err(|_| unknown_push(text))?;
        Ok(Self(id.to_string()))
    }
}

/// The id of a collection.
pub(crate) struct CollectionId(pub(crate) String);

impl Segment for CollectionId {
    const NAME: &'static str = "run";
    fn parse(text: &str) -> Result<Self, ApiError> {
        let id = text.parse::<uuid::Uuid>().map_err(|_| unknown_collection(text))?;
        Ok(Self(id.to_string()))
    }
}

/// The failure of a collection that does not exist.
pub(crate) fn unknown_collection(id: &str) -> ApiError {
    let id: String = id.chars().take(64).collect();
    ApiError::new(ErrorCode::NotFound, format!("there is no collection {id}; GET /v1/gc lists them"))
}

/// The name of a background task.
pub(crate) struct TaskName(pub(crate) String);

impl Segment for TaskName {
    const NAME: &'static str = "task";
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(Self(text.to_owned()))
    }
}

/// The failure of a background task that does not exist.
pub(crate) fn unknown_task(name: &str) -> ApiError {
    let name: String = name.chars().take(64).collect();
    ApiError::new(ErrorCode::NotFound, format!("there is no background task {name:?}; GET /v1/tasks lists them"))
}

/// The failure of a push session that does not exist.
pub(crate) fn unknown_push(id: &str) -> ApiError {
    let id: String = id.chars().take(64).collect();
    pfr_store::Error::PushUnknown(id).into()
}
