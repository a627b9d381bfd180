//! The map of the service: every route, and the OpenAPI document that is made from the same list.
//!
//! `/` and `/v2` are free: the user interface and the OCI distribution API go there.

use crate::app::App;
use crate::handlers::{forks, frames, gc, health, inspect, integrity, pushes, repositories, snapshots, stats, tags};
use crate::http::request;
use crate::mirror::{Upstream, through};
use axum::Router;
use axum::middleware;
use std::sync::Arc;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// What the document says about the whole.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "pf registry",
        description = "A durable, content-addressed registry for live model state. How requests follow each other is in docs/protocol.md.",
    ),
    components(schemas(pfr_schema::api::Problem, pfr_schema::ErrorCode)),
    tags(
        (name = "push", description = "Storing a snapshot: have/want, frames, commit"),
        (name = "read", description = "Reading"),
        (name = "write", description = "Names"),
        (name = "operations", description = "For operators"),
    ),
)]
struct Document;

fn table() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(pushes::open))
        .routes(routes!(pushes::abort))
        .routes(routes!(pushes::missing))
        .routes(routes!(pushes::commit))
        .routes(routes!(frames::put))
        .routes(routes!(frames::get))
        .routes(routes!(repositories::list))
        .routes(routes!(snapshots::list))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(inspect::lineage))
        .routes(routes!(inspect::page_manifest))
        .routes(routes!(inspect::diff))
        .routes(routes!(inspect::verify))
        .routes(routes!(inspect::match_prefix))
        .routes(routes!(tags::list))
        .routes(routes!(tags::get, tags::put, tags::delete))
        .routes(routes!(forks::fork))
        .routes(routes!(stats::all))
        .routes(routes!(stats::of_repository))
        .routes(routes!(stats::usage))
        .routes(routes!(gc::start, gc::list))
        .routes(routes!(gc::get))
        .routes(routes!(integrity::scrub))
        .routes(routes!(integrity::damaged))
        .routes(routes!(health::livez))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .routes(routes!(health::openapi))
}

/// The OpenAPI document, as served and as kept in `registry/openapi.json`.
#[must_use]
pub fn openapi() -> String {
    let document = table().into_openapi();
    let mut text = document.to_pretty_json().unwrap_or_else(|e| unreachable!("the document has string keys only: {e}"));
    text.push('\n');
    text
}

/// The service.
pub(crate) fn service(app: App, upstream: Option<Arc<Upstream>>) -> Router {
    let (mut router, _) = table().split_for_parts();
    if let Some(upstream) = upstream {
        router = router.layer(middleware::from_fn_with_state(upstream, through::middleware));
    }
    router.layer(middleware::from_fn_with_state(app.clone(), request::middleware)).with_state(app)
}

/// Groups of failures, for the OpenAPI document: which problems an endpoint may answer with.
pub(crate) mod failures {
    use pfr_schema::ErrorCode::{self, *};
    use pfr_schema::api::Problem;
    use std::collections::BTreeMap;
    use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};
    use utoipa::{IntoResponses, ToSchema};

    /// What any request may meet.
    const ANY: &[ErrorCode] = &[InvalidRequest, Overloaded, Unavailable, Internal];
    /// What any request with a body may meet.
    const BODY: &[ErrorCode] = &[TooLarge, Timeout];
    /// What any request to a repository may meet.
    const NAMED: &[ErrorCode] = &[InvalidName];

    macro_rules! groups {
        ($($(#[$doc:meta])* $name:ident = [$($base:expr),*];)*) => {$(
            $(#[$doc])*
            pub(crate) struct $name;
            impl IntoResponses for $name {
                fn responses() -> BTreeMap<String, RefOr<Response>> {
                    problems(&[$($base),*])
                }
            }
        )*};
    }

    groups! {
        /// Of the readiness probe.
        Ready = [&[Unavailable]];
        /// Reads that name no repository.
        Listing = [ANY, &[CorruptStore]];
        /// Reads in a repository.
        Reading = [ANY, NAMED, &[AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, NotFound, CorruptStore]];
        /// Proofs.
        Verifying = [ANY, NAMED, &[
            AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, NotFound, CorruptStore, ValueHashMismatch, InexactStorage,
            TooLarge
        ]];
        /// Matches.
        Matching = [ANY, NAMED, BODY, &[RepositoryUnknown, CorruptStore]];
        /// Opening a session.
        Opening = [ANY, NAMED, &[StorageFull]];
        /// Ending a session.
        Aborting = [ANY, NAMED, &[PushUnknown, StorageFull]];
        /// Asking in a session.
        Pushing = [ANY, NAMED, BODY, &[PushUnknown, StorageFull]];
        /// Uploads.
        Uploading = [ANY, NAMED, BODY, &[
            PushUnknown, CorruptFrame, Truncated, DigestMismatch, LengthMismatch, InvalidDocument, MissingBlobs, StorageFull
        ]];
        /// Commits.
        Committing = [ANY, NAMED, BODY, &[PushUnknown, BlobUnknown, InvalidDocument, TagMoved, CorruptStore, StorageFull]];
        /// Downloads.
        Fetching = [ANY, NAMED, BODY, &[RepositoryUnknown, BlobUnknown]];
        /// Collections.
        Collecting = [ANY, BODY, &[StorageFull]];
        /// Checks of the whole store.
        Checking = [ANY, &[StorageFull]];
        /// Reads about collections.
        Collected = [ANY, &[NotFound]];
        /// Changes of names.
        Tagging = [ANY, NAMED, BODY, &[AmbiguousDigest, RepositoryUnknown, SnapshotUnknown, TagUnknown, TagMoved, StorageFull]];
    }

    fn problems(groups: &[&[ErrorCode]]) -> BTreeMap<String, RefOr<Response>> {
        let mut by_status: BTreeMap<String, Vec<&'static str>> = BTreeMap::new();
        for code in groups.iter().copied().flatten() {
            by_status.entry(code.status().to_string()).or_default().push(code.name());
        }
        by_status
            .into_iter()
            .map(|(status, names)| {
                let content = Content::new(Some(RefOr::Ref(Ref::from_schema_name(Problem::name()))));
                let response = ResponseBuilder::new().description(names.join(", ")).content(crate::problem::MEDIA_TYPE, content).build();
                (status, RefOr::T(response))
            })
            .collect()
    }
}
