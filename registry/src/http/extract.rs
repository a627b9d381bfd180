//! Parsing at the edge: path segments, queries and JSON bodies become validated types or a [`Failure`], never text.

use crate::app::App;
use crate::http::json::{self, SMALL_BODY, Whole};
use crate::mirror::through::Meant;
use crate::problem::Failure;
use axum::extract::{FromRequest, FromRequestParts, Query, RawPathParams, Request};
use axum::http::header;
use axum::http::request::Parts;
use pfr_schema::{ErrorCode, RepositoryName, Selector, Tag};
use pfr_store::PushId;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::OwnedSemaphorePermit;

/// A `{name}` of a route's path, percent-decoded.
pub(crate) trait Segment: Sized {
    /// Its name in the route.
    const NAME: &'static str;
    /// Parses it.
    fn parse(text: &str) -> Result<Self, Failure>;
}

/// A path segment as an extractor.
pub(crate) struct In<T>(pub(crate) T);

impl<S: Send + Sync, T: Segment> FromRequestParts<S> for In<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let segments = RawPathParams::from_request_parts(parts, state)
            .await
            .map_err(|e| Failure::new(ErrorCode::InvalidName, format!("the path cannot be decoded: {e}")))?;
        // Where the upstream was asked what a segment means, that is what it says.
        let meant = parts.extensions.get::<Meant>().and_then(|meant| meant.of(T::NAME));
        let text = meant.or_else(|| segments.iter().find(|(name, _)| *name == T::NAME).map(|(_, text)| text));
        T::parse(text.ok_or_else(|| Failure::internal(format!("the route has no {{{}}}", T::NAME)))?).map(In)
    }
}

impl Segment for RepositoryName {
    const NAME: &'static str = "repo";
    fn parse(text: &str) -> Result<Self, Failure> {
        Ok(text.parse()?)
    }
}

impl Segment for Tag {
    const NAME: &'static str = "tag";
    fn parse(text: &str) -> Result<Self, Failure> {
        Ok(text.parse()?)
    }
}

impl Segment for Selector {
    const NAME: &'static str = "ref";
    fn parse(text: &str) -> Result<Self, Failure> {
        Ok(text.parse()?)
    }
}

/// The second snapshot of a comparison.
pub(crate) struct Other(pub(crate) Selector);

impl Segment for Other {
    const NAME: &'static str = "other";
    fn parse(text: &str) -> Result<Self, Failure> {
        Ok(Self(text.parse()?))
    }
}

/// A push session as a path names it.
pub(crate) struct Push(pub(crate) PushId);

impl Segment for Push {
    const NAME: &'static str = "id";
    fn parse(text: &str) -> Result<Self, Failure> {
        // Ids are ours; what does not look like one was never given out.
        let id = text.parse::<uuid::Uuid>().map_err(|_| unknown_push(text))?;
        Ok(Self(PushId(id.to_string())))
    }
}

/// A collection as a path names it.
pub(crate) struct Run(pub(crate) String);

impl Segment for Run {
    const NAME: &'static str = "run";
    fn parse(text: &str) -> Result<Self, Failure> {
        let id = text.parse::<uuid::Uuid>().map_err(|_| unknown_run(text))?;
        Ok(Self(id.to_string()))
    }
}

/// The failure of a collection that is not there.
pub(crate) fn unknown_run(id: &str) -> Failure {
    let id: String = id.chars().take(64).collect();
    Failure::new(ErrorCode::NotFound, format!("there is no collection {id}; GET /v1/gc lists them"))
}

/// The failure of a push session that is not there.
pub(crate) fn unknown_push(id: &str) -> Failure {
    let id: String = id.chars().take(64).collect();
    pfr_store::Error::PushUnknown(id).into()
}

/// Which page of a list.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Paging {
    /// Where to go on: `next` of the page before.
    #[param(max_length = 1024)]
    after: Option<String>,
    /// Most rows, 1 to 1,000.
    #[param(default = 100, minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

impl Paging {
    const MOST: usize = 1000;

    /// Cursor and checked limit.
    pub(crate) fn checked(self) -> Result<(Option<String>, usize), Failure> {
        if self.after.as_ref().is_some_and(|cursor| cursor.len() > 1024) {
            return Err(Failure::invalid("`after` is not a cursor that this registry gave out"));
        }
        Ok((self.after, limit(self.limit, Self::MOST)?))
    }
}

/// A limit within bounds, 100 if none was given.
pub(crate) fn limit(given: Option<usize>, most: usize) -> Result<usize, Failure> {
    match given.unwrap_or(100) {
        limit if (1..=most).contains(&limit) => Ok(limit),
        limit => Err(Failure::invalid(format!("expected a limit from 1 to {most}, found {limit}"))),
    }
}

/// A query string.
pub(crate) struct Asked<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Asked<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Query(query) = Query::from_request_parts(parts, state).await.map_err(|e| Failure::invalid(e.body_text()))?;
        Ok(Self(query))
    }
}

/// A JSON body; a large one holds its turn until it is dropped.
pub(crate) struct JsonBody<T> {
    pub(crate) value: T,
    _turn: Option<OwnedSemaphorePermit>,
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<App> for JsonBody<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, app: &App) -> Result<Self, Failure> {
        media_type(&request, "application/json")?;
        let Whole { bytes, turn, .. } = json::read(request.into_body(), app).await?;
        let value = if bytes.len() <= SMALL_BODY {
            parse(&bytes)?
        } else {
            // Tens of milliseconds for a hundred thousand digests: not on a thread that moves other requests' bytes.
            tokio::task::spawn_blocking(move || parse(&bytes)).await.map_err(|e| Failure::internal(e.to_string()))??
        };
        Ok(Self { value, _turn: turn })
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    // Its length was checked while it came.
    pfr_schema::json::parse("request body", bytes, u64::MAX).map_err(|error| Failure::invalid(error.to_string()))
}

/// Refuses a body that does not say it is `wanted`.
pub(crate) fn media_type(request: &Request, wanted: &str) -> Result<(), Failure> {
    let given = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    let found = if given.is_empty() { "none".to_owned() } else { format!("{:?}", given.chars().take(100).collect::<String>()) };
    Err(Failure::invalid(format!("expected content-type {wanted}, found {found}")))
}
