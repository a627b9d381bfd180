//! Events: what happens in a domain, as server-sent events.

use super::Answer;
use crate::app::App;
use crate::auth::{Access, Pull, SomeRepositories, Standing};
use crate::events::{Filter, Follower};
use crate::failures;
use crate::http::query::Query;
use crate::http::sending::OneByOne;
use crate::problem::ApiError;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::Response;
use pfr_schema::Pattern;
use pfr_schema::api::{self, EventId, EventKind};
use serde::Deserialize;

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// Which events, and after which.
#[derive(Debug, Default, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub(crate) struct EventQuery {
    /// The id of the last event that was read: those after it come first. Without it, only what
    /// happens from now on. The header `Last-Event-ID` means the same, and wins.
    #[param(max_length = 64)]
    after: Option<String>,
    /// Only events of repositories that match. `*` stands for any characters, `/` included.
    #[param(value_type = Option<String>, max_length = 255)]
    repository: Option<Pattern>,
    /// Only events of this kind.
    #[param(inline)]
    kind: Option<EventKind>,
    /// With `false` the answer ends with the last event that there is, instead of waiting for more.
    #[param(default = true)]
    follow: Option<bool>,
}

/// Follows what happens
///
/// Server-sent events: snapshots that are pushed, tags that are moved, what is deleted, and what
/// collections free, each once and in order. A reader that comes back with the last id that it has
/// read misses nothing, from whichever replica; ids are kept by browsers and other readers of
/// server-sent events, also where nothing was sent but the id. If the events after an id are not
/// kept any more, the first event is `reset`: then the reader reads the lists again. A caller sees
/// the events of the repositories that it may pull. Every 15 seconds without an event there is a
/// comment. The answer ends when the token is revoked or expires, and when the registry stops.
#[utoipa::path(
    get, path = "/v1/events", operation_id = "follow_events", tag = "read",
    params(
        EventQuery,
        ("last-event-id" = Option<String>, Header, description = "The id of the last event that was read"),
    ),
    responses(
        (status = 200, description = "Events: `data` is JSON, `event` is its `kind`, or `reset`", body = api::Followed, content_type = "text/event-stream"),
        failures::Following,
    ),
)]
pub(crate) async fn follow(
    Access { domain, caller, trail, .. }: Access<Pull, SomeRepositories>,
    State(app): State<App>,
    standing: Standing,
    headers: HeaderMap,
    Query(query): Query<EventQuery>,
) -> Answer<Response> {
    let EventQuery { after, repository, kind, follow } = query;
    let given = match headers.get(LAST_EVENT_ID) {
        Some(value) => {
            Some(value.to_str().map_err(|_| ApiError::invalid("the header Last-Event-ID is not the id of an event"))?.to_owned())
        }
        None => after,
    };
    // Browsers send an empty one where they have none.
    let after: Option<EventId> = given.filter(|id| !id.is_empty()).map(|id| id.parse()).transpose()?;
    let place = app.event_streams.take(&caller, trail.source())?;
    let filter = Filter { repository, kind };
    let follower = Follower::begin(&app.domains, &domain, standing, filter, after, follow.unwrap_or(true), place).await?;
    let mut response = Response::new(Body::from_stream(OneByOne::new(Box::pin(follower.pieces()))));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // A proxy that collects the answer before it passes it on would never pass one on.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(response)
}
