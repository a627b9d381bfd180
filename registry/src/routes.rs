//! The map of the service: every route, and the OpenAPI document that is made from the same list.
//!
//! Paths are those of the default domain; `http::base` takes the base path of another one off
//! before the router sees it, and makes one segment of the repository in paths below `/v2`.

use crate::app::App;
use crate::auth::{action_of, name_of};
use crate::examples;
use crate::health;
use crate::http::request;
use crate::oci;
use crate::pull_through::{self, PullThrough};
use crate::ui;
use crate::v1::{
    agents, audit, domains, events, forks, frames, gc, inspect, integrity, pushes, quotas, repositories, retention, signing, snapshots,
    stats, tags, tasks, tokens,
};
use axum::Router;
use axum::middleware;
use axum::routing::{MethodRouter, delete, get, patch, post, put};
use pfr_schema::Action;
use std::sync::Arc;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::{Modify, OpenApi};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use utoipa_axum::routes;

/// The parts of the document that are about the API as a whole.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "pf registry",
        description = "A durable, content-addressed registry for live model state. How requests follow each other is in docs/protocol.md.",
    ),
    servers((
        url = "/domains/{domain}",
        description = "A domain, for paths that begin with `/v1`. Without this base path, `default` is meant. Paths that begin with `/v1/domains` or `/v1/tokens` have none",
        variables(("domain" = (default = "default", description = "Name of the domain"))),
    )),
    modifiers(&Tokens),
    security(("token" = []), ("password" = [])),
    components(schemas(pfr_schema::api::Problem, pfr_schema::ErrorCode)),
    tags(
        (name = "push", description = "Storing a snapshot: have/want, frames, commit"),
        (name = "read", description = "Reading"),
        (name = "write", description = "Names"),
        (name = "operations", description = "For operators"),
    ),
)]
struct Document;

/// How a request carries an access token.
struct Tokens;

impl Modify for Tokens {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let scheme = |scheme, words: &str| {
            let mut http = Http::new(scheme);
            http.description = Some(words.to_owned());
            SecurityScheme::Http(http)
        };
        let token = "An access token. A registry that does not require tokens ignores it";
        components.add_security_scheme("token", scheme(HttpAuthScheme::Bearer, token));
        components.add_security_scheme("password", scheme(HttpAuthScheme::Basic, "Any user name, and an access token as the password"));
    }
}

/// A route for each handler, with the action of its [`Access`](crate::auth::Access) in the
/// document.
macro_rules! guarded {
    ($($module:ident::$handler:ident),+ $(,)?) => {
        OpenApiRouter::with_openapi(Document::openapi())
            $(.routes(named(routes!($module::$handler), action_of(&$module::$handler))))+
    };
}

fn table() -> OpenApiRouter<App> {
    guarded![
        pushes::open,
        pushes::abort,
        pushes::missing,
        pushes::commit,
        frames::put,
        frames::get,
        repositories::list,
        snapshots::list,
        snapshots::get,
        snapshots::delete,
        inspect::lineage,
        inspect::page_manifest,
        inspect::diff,
        inspect::verify,
        inspect::match_prefix,
        tags::list,
        tags::get,
        tags::put,
        tags::delete,
        forks::fork,
        events::follow,
        stats::all,
        stats::of_repository,
        stats::freed,
        stats::usage,
        gc::start,
        gc::list,
        gc::get,
        tasks::list,
        tasks::pause,
        tasks::resume,
        domains::list,
        domains::get,
        domains::put,
        domains::delete,
        quotas::get,
        quotas::put,
        retention::get,
        retention::put,
        retention::run,
        signing::list,
        signing::sign,
        signing::get,
        signing::put,
        tokens::list,
        tokens::create,
        tokens::revoke,
        audit::list,
        agents::list,
        agents::report,
        agents::forget,
        integrity::scrub,
        integrity::damaged,
        health::livez,
        health::readyz,
        health::metrics,
        health::openapi,
    ]
}

/// A route that the document does not have: method, path, action, handler.
type Other = (&'static str, &'static str, Option<Action>, MethodRouter<App>);

macro_rules! others {
    ($module:ident: $($name:literal $method:ident $path:literal $handler:ident),+ $(,)?) => {
        vec![$(($name, $path, action_of(&$module::$handler), $method($module::$handler))),+]
    };
}

/// The pages of the user interface. No client is written against them, so the document does not
/// have them.
fn pages() -> Vec<Other> {
    others![ui:
        "GET" get "/" overview,
        "GET" get "/docs" docs,
        "GET" get "/ui" start,
        "GET" get "/ui/" start,
        "GET" get "/ui/-/repositories" repositories,
        "GET" get "/ui/-/storage" storage,
        "GET" get "/ui/-/engines" engines,
        "GET" get "/ui/-/tasks" tasks,
        "GET" get "/ui/-/style.css" style,
        "GET" get "/ui/-/icon.svg" icon,
        "GET" get "/ui/{repo}" repository,
        "GET" get "/ui/{repo}/{ref}" snapshot,
        "POST" post "/ui/{repo}/{ref}/verify" verify,
    ]
}

/// The OCI Distribution API, whose document is its specification.
fn oci_routes() -> Vec<Other> {
    others![oci:
        "GET" get "/v2/" ping,
        "GET" get "/v2/_catalog" catalog,
        "GET" get "/v2/{repo}/tags/list" tags,
        "GET" get "/v2/{repo}/referrers/{digest}" referrers,
        "GET" get "/v2/{repo}/manifests/{reference}" get_manifest,
        "PUT" put "/v2/{repo}/manifests/{reference}" put_manifest,
        "DELETE" delete "/v2/{repo}/manifests/{reference}" delete_manifest,
        "GET" get "/v2/{repo}/blobs/{digest}" get_blob,
        "DELETE" delete "/v2/{repo}/blobs/{digest}" delete_blob,
        "POST" post "/v2/{repo}/blobs/uploads" begin,
        "GET" get "/v2/{repo}/blobs/uploads/{id}" status,
        "PATCH" patch "/v2/{repo}/blobs/uploads/{id}" append,
        "PUT" put "/v2/{repo}/blobs/uploads/{id}" finish,
        "DELETE" delete "/v2/{repo}/blobs/uploads/{id}" cancel,
    ]
}

/// Each route that the document does not have as `GET /path`, and the action that a caller must be
/// allowed.
pub fn actions_of_others() -> impl Iterator<Item = (String, &'static str)> {
    pages().into_iter().chain(oci_routes()).map(|(method, path, action, _)| (format!("{method} {path}"), name_of(action)))
}

/// Names the action of an operation in the document.
fn named((schemas, mut paths, methods): UtoipaMethodRouter<App>, action: Option<Action>) -> UtoipaMethodRouter<App> {
    for path in paths.paths.values_mut() {
        for operation in [&mut path.get, &mut path.put, &mut path.post, &mut path.delete].into_iter().flatten() {
            examples::add(operation);
            let extensions = operation.extensions.get_or_insert_default();
            extensions.insert("x-pf-action".to_owned(), name_of(action).into());
            if action.is_none() {
                operation.security = Some(vec![SecurityRequirement::default()]);
            }
        }
    }
    (schemas, paths, methods)
}

/// The OpenAPI document, as it is served. It is not made at each start, which would take as long as
/// the rest of the start of a server. A test compares it with [`openapi`].
pub(crate) const DOCUMENT: &str = include_str!("../openapi.json");

/// The OpenAPI document, made of the routes; it is kept in `registry/openapi.json`.
#[must_use]
pub fn openapi() -> String {
    let document = table().into_openapi();
    let mut text = document.to_pretty_json().unwrap_or_else(|e| unreachable!("the document has string keys only: {e}"));
    text.push('\n');
    text
}

/// The service.
pub(crate) fn service(app: App, pull_through: Option<Arc<PullThrough>>) -> Router {
    let (mut router, _) = table().split_for_parts();
    for (_, path, _, handler) in pages().into_iter().chain(oci_routes()) {
        router = router.route(path, handler);
    }
    if let Some(layer) = pull_through {
        router = router.layer(middleware::from_fn_with_state((app.clone(), layer), pull_through::middleware));
    }
    router.layer(middleware::from_fn_with_state(app.clone(), request::middleware)).with_state(app)
}
