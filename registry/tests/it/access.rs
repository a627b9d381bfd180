//! Which action each route asks for, and that it is refused where that action is. A new route
//! belongs into the table and into `calls` below: its action is a decision that must not be made by
//! accident.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, refused};
use pfr_registry::Policy;
use pfr_schema::{Digest, ErrorCode, Kind, api, media_type};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Every operation, and the action that a caller must be allowed.
const TABLE: &[(&str, &str)] = &[
    ("GET /", "admin"),
    ("GET /ui/-/icon.svg", "open"),
    ("GET /ui/-/repositories", "pull"),
    ("GET /ui/-/storage", "admin"),
    ("GET /ui/-/style.css", "open"),
    ("GET /ui/-/tasks", "admin"),
    ("GET /ui/{repo}", "pull"),
    ("GET /ui/{repo}/{ref}", "pull"),
    ("POST /ui/{repo}/{ref}/verify", "pull"),
    ("GET /livez", "open"),
    ("GET /metrics", "open"),
    ("GET /openapi.json", "open"),
    ("GET /readyz", "open"),
    ("DELETE /v1/repositories/{repo}/pushes/{id}", "push"),
    ("DELETE /v1/repositories/{repo}/snapshots/{ref}", "delete"),
    ("DELETE /v1/repositories/{repo}/tags/{tag}", "delete"),
    ("GET /v1/damaged", "admin"),
    ("DELETE /v1/domains/{domain}", "admin"),
    ("GET /v1/domains", "admin"),
    ("GET /v1/domains/{domain}", "admin"),
    ("PUT /v1/domains/{domain}", "admin"),
    ("GET /v1/gc", "admin"),
    ("GET /v1/gc/{run}", "admin"),
    ("GET /v1/repositories", "pull"),
    ("GET /v1/repositories/{repo}/snapshots", "pull"),
    ("GET /v1/repositories/{repo}/snapshots/{ref}", "pull"),
    ("GET /v1/repositories/{repo}/snapshots/{ref}/diff/{other}", "pull"),
    ("GET /v1/repositories/{repo}/snapshots/{ref}/lineage", "pull"),
    ("GET /v1/repositories/{repo}/snapshots/{ref}/page-manifest", "pull"),
    ("GET /v1/repositories/{repo}/stats", "pull"),
    ("GET /v1/repositories/{repo}/tags", "pull"),
    ("GET /v1/repositories/{repo}/tags/{tag}", "pull"),
    ("GET /v1/stats", "pull"),
    ("GET /v1/tasks", "admin"),
    ("GET /v1/usage", "admin"),
    ("POST /v1/gc", "admin"),
    ("POST /v1/repositories/{repo}/forks", "push"),
    ("POST /v1/repositories/{repo}/frames", "pull"),
    ("POST /v1/repositories/{repo}/match", "pull"),
    ("POST /v1/repositories/{repo}/pushes", "push"),
    ("POST /v1/repositories/{repo}/pushes/{id}/commit", "push"),
    ("POST /v1/repositories/{repo}/pushes/{id}/missing", "push"),
    ("POST /v1/repositories/{repo}/snapshots/{ref}/verify", "pull"),
    ("POST /v1/scrub", "admin"),
    ("POST /v1/tasks/{task}/pause", "admin"),
    ("POST /v1/tasks/{task}/resume", "admin"),
    ("PUT /v1/repositories/{repo}/pushes/{id}/frames", "push"),
    ("PUT /v1/repositories/{repo}/tags/{tag}", "push"),
];

/// The document and the list of pages are made from the router's own tables, and each action from
/// the type of the handler's first argument. A handler without an access does not compile.
#[test]
fn every_route_asks_for_the_action_in_the_table() {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let mut found = BTreeMap::new();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("operations") {
            let action = operation["x-pf-action"].as_str().unwrap_or("none");
            found.insert(format!("{} {path}", method.to_uppercase()), action.to_owned());
        }
    }
    found.extend(pfr_registry::routes::actions_of_pages().map(|(route, action)| (route, action.to_owned())));
    let expected: BTreeMap<String, String> = TABLE.iter().map(|(route, action)| ((*route).to_owned(), (*action).to_owned())).collect();
    for (route, action) in &found {
        assert_eq!(expected.get(route), Some(action), "the action of {route}: the table above, and the handler's Access");
    }
    for route in expected.keys() {
        assert!(found.contains_key(route), "the table above has {route}, which is no route");
    }
}

/// What the calls below are about.
struct World {
    fork: Snapshot,
    /// Push sessions: one to commit the fork with, one to abort.
    pushes: [String; 2],
    run: String,
}

impl World {
    /// A snapshot, sessions, a collection and a domain.
    async fn make(registry: &Registry) -> Self {
        let base = snapshot(0..20, vec![]);
        registry.push(REPO, &base, Some("base")).await;
        let pushes = [registry.open_push(REPO).await, registry.open_push(REPO).await];
        let run: api::GcReport = ok(registry.post("/v1/gc", &json!({})).await).await;
        let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
        Self { fork: snapshot(10..30, vec![base.manifest]), pushes, run: run.id }
    }

    /// A call of each route that means something: in this order, a caller who may do everything has
    /// success with all of them.
    fn calls(&self) -> Vec<Call> {
        let repo = |rest: &str| (format!("/v1/repositories/{{repo}}{rest}"), format!("/v1/repositories/{REPO}{rest}"));
        let push =
            |which: usize, rest: &str| (format!("/v1/repositories/{{repo}}/pushes/{{id}}{rest}"), format!("{}{rest}", self.pushes[which]));
        let of_tag = |rest: &str| {
            let route = rest.replace("/base", "/{other}");
            (format!("/v1/repositories/{{repo}}/snapshots/{{ref}}{route}"), format!("/v1/repositories/{REPO}/snapshots/base{rest}"))
        };
        let tag = |name: &str| ("/v1/repositories/{repo}/tags/{tag}".to_owned(), format!("/v1/repositories/{REPO}/tags/{name}"));
        let plain = |path: &str| (path.to_owned(), path.to_owned());
        let given = |route: &str, value: &str| {
            let segment = route.split(['{', '}']).nth(1).unwrap_or_default();
            (route.to_owned(), route.replace(&format!("{{{segment}}}"), value))
        };
        let fork = self.fork.manifest;
        let by_digest = ("/v1/repositories/{repo}/snapshots/{ref}".to_owned(), format!("/v1/repositories/{REPO}/snapshots/{fork}"));
        let wanted = json!({"groups": [{"kind": Kind::Manifest, "digests": [fork]}]});
        let question = json!({"tokens": [1, 2], "fingerprint": Digest::sha256(b"")});
        let mut calls = Vec::new();
        let reads = ["/livez", "/metrics", "/openapi.json", "/readyz", "/v1/damaged", "/v1/domains", "/v1/gc", "/v1/repositories"];
        let reads = reads.into_iter().chain(["/v1/stats", "/v1/tasks", "/v1/usage"]).map(plain);
        let reads =
            reads.chain(["/snapshots", "/stats", "/tags"].map(repo)).chain(["", "/diff/base", "/lineage", "/page-manifest"].map(of_tag));
        let reads = reads.chain([tag("base"), given("/v1/gc/{run}", &self.run), given("/v1/domains/{domain}", "acme")]);
        let pages = ["/", "/ui/-/icon.svg", "/ui/-/repositories", "/ui/-/storage", "/ui/-/style.css", "/ui/-/tasks"].map(plain);
        let of_page = |rest: &str| (format!("/ui/{{repo}}{}", rest.replace("base", "{ref}")), format!("/ui/{REPO}{rest}"));
        let reads = reads.chain(pages).chain(["", "/base"].map(of_page));
        calls.extend(reads.map(|path| Call::new(Method::GET, path, Body::None)));
        let of_base = json!({"snapshot": "base"});
        calls.extend([
            Call::new(Method::POST, repo("/match"), Body::Json(question)),
            Call::new(Method::POST, of_tag("/verify"), Body::None),
            Call::new(Method::POST, of_page("/base/verify"), Body::None),
            Call::new(Method::POST, plain("/v1/scrub"), Body::None),
            Call::new(Method::POST, plain("/v1/gc"), Body::Json(json!({"dry_run": true}))),
            Call::new(Method::POST, given("/v1/tasks/{task}/pause", "collection"), Body::Json(json!({"seconds": 60}))),
            Call::new(Method::POST, given("/v1/tasks/{task}/resume", "collection"), Body::None),
            Call::new(Method::POST, repo("/pushes"), Body::Json(json!({}))),
            Call::new(Method::POST, push(0, "/missing"), Body::Json(wanted)),
            Call::new(Method::PUT, push(0, "/frames"), Body::Frames(self.fork.stream())),
            Call::new(Method::POST, push(0, "/commit"), Body::Json(json!({"manifest": fork, "tag": "fork"}))),
            Call::new(Method::POST, repo("/frames"), Body::Json(json!({"digests": [fork]}))),
            Call::new(Method::POST, repo("/forks"), Body::Json(json!({"snapshot": "base", "count": 2, "prefix": "try"}))),
            Call::new(Method::PUT, tag("other"), Body::Json(of_base)),
            Call::new(Method::DELETE, tag("other"), Body::None),
            Call::new(Method::DELETE, by_digest, Body::None),
            Call::new(Method::DELETE, push(1, ""), Body::None),
            Call::new(Method::PUT, given("/v1/domains/{domain}", "more"), Body::None),
            Call::new(Method::DELETE, given("/v1/domains/{domain}", "acme"), Body::None),
        ]);
        calls
    }
}

enum Body {
    None,
    Json(Value),
    Frames(Vec<u8>),
}

struct Call {
    /// As in the table.
    route: String,
    method: Method,
    path: String,
    body: Body,
}

impl Call {
    fn new(method: Method, (route, path): (String, String), body: Body) -> Self {
        Self { route: format!("{method} {route}"), method, path, body }
    }

    /// Sends it; to a domain, if `base` is its path.
    async fn send(&self, registry: &Registry, base: &str) -> Response {
        let request = registry.request(self.method.clone(), &format!("{base}{}", self.path));
        let request = match &self.body {
            Body::None => request,
            Body::Json(value) => request.json(value),
            Body::Frames(bytes) => request.header("content-type", media_type::FRAMES).body(bytes.clone()),
        };
        request.send().await.expect("an answer")
    }
}

/// What requests may change, as far as background work does not.
async fn state(registry: &Registry) -> Vec<Value> {
    let mut state = Vec::new();
    for path in ["snapshots", "tags"] {
        state.push(ok(registry.get(&format!("/v1/repositories/{REPO}/{path}")).await).await);
    }
    for path in ["/v1/repositories", "/v1/domains", "/v1/damaged"] {
        state.push(ok(registry.get(path).await).await);
    }
    let tasks: api::TaskList = ok(registry.get("/v1/tasks").await).await;
    state.push(json!(tasks.tasks.iter().map(|task| (&task.name, task.pause_ends_at)).collect::<Vec<_>>()));
    state
}

#[tokio::test]
async fn a_caller_that_may_do_nothing_is_refused_by_every_route_and_changes_nothing() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), Policy::All).await;
    let world = World::make(&registry).await;
    let (calls, before) = (world.calls(), state(&registry).await);
    registry.stopped().await;

    let routes: BTreeSet<&str> = calls.iter().map(|call| call.route.as_str()).collect();
    assert_eq!(routes, TABLE.iter().map(|(route, _)| *route).collect(), "each route is called");
    let actions: BTreeMap<&str, &str> = TABLE.iter().copied().collect();
    let registry = Registry::start_again(data.path(), Policy::OpenOnly).await;
    for call in &calls {
        let action = actions[call.route.as_str()];
        // The answer does not tell whether there is such a domain. The catalogue is in none.
        let is_of_domain = ["/v1/", "/ui/"].iter().any(|prefix| call.path.starts_with(prefix)) || call.path == "/";
        let bases: &[&str] = match action {
            "open" => &[""],
            _ if is_of_domain && !call.path.starts_with("/v1/domains") => &["", "/domains/acme", "/domains/nowhere"],
            _ => &[""],
        };
        for base in bases {
            let answer = call.send(&registry, base).await;
            if action == "open" {
                assert!(answer.status().is_success(), "{}: {}", call.route, answer.status());
            } else {
                let detail = refused(answer, ErrorCode::Denied).await;
                assert!(detail.contains(action), "{}: {detail}", call.route);
            }
        }
    }
    registry.stopped().await;

    let registry = Registry::start_again(data.path(), Policy::All).await;
    assert_eq!(state(&registry).await, before);
    for call in &calls {
        let answer = call.send(&registry, "").await;
        assert!(answer.status().is_success(), "{}: {}: {:?}", call.route, answer.status(), answer.text().await);
    }
    registry.stopped().await;
}
