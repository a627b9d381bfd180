//! Which action each route asks for, and what each kind of caller gets from it. A new route belongs
//! into the table and into `calls` below: its action is a decision that must not be made by
//! accident.

use crate::common::snapshot::{Snapshot, snapshot};
use crate::common::{REPO, Registry, ok, problem};
use pfr_schema::api::AuditOutcome;
use pfr_schema::signature::{Payload, PublicKey};
use pfr_schema::{AccessToken, Action, Digest, ErrorCode, Kind, api, media_type};
use pfr_store::NewAccessToken;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// What an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// Nothing that is kept from anyone.
    Nothing,
    Repository,
    /// All of a domain.
    Domain,
    /// The repositories of a domain, as many as the caller may see, or any of them.
    Visible,
    /// Domains and tokens.
    Registry,
    /// Nothing but whether the token is valid.
    Token,
}
use About::*;

/// Every operation, the action that a caller must be allowed, and what it is about.
const TABLE: &[(&str, &str, About)] = &[
    ("DELETE /v1/agents/{agent}", "admin", Domain),
    ("DELETE /v1/domains/{domain}", "admin", Registry),
    ("DELETE /v1/repositories/{repo}/pushes/{id}", "push", Repository),
    ("DELETE /v1/repositories/{repo}/snapshots/{ref}", "delete", Repository),
    ("DELETE /v1/repositories/{repo}/tags/{tag}", "delete", Repository),
    ("DELETE /v1/tokens/{token}", "admin", Registry),
    ("GET /", "pull", Visible),
    ("GET /docs", "open", Nothing),
    ("GET /livez", "open", Nothing),
    ("GET /metrics", "admin", Registry),
    ("GET /openapi.json", "open", Nothing),
    ("GET /readyz", "open", Nothing),
    ("GET /ui", "pull", Visible),
    ("GET /ui/", "pull", Visible),
    ("GET /v1/audit", "admin", Domain),
    ("GET /ui/-/engines", "admin", Domain),
    ("GET /ui/-/icon.svg", "open", Nothing),
    ("GET /ui/-/repositories", "pull", Visible),
    ("GET /ui/-/storage", "admin", Domain),
    ("GET /ui/-/style.css", "open", Nothing),
    ("GET /ui/-/tasks", "admin", Domain),
    ("GET /ui/{repo}", "pull", Repository),
    ("GET /ui/{repo}/{ref}", "pull", Repository),
    ("GET /v1/agents", "admin", Domain),
    ("GET /v1/damaged", "admin", Domain),
    ("GET /v1/domains", "admin", Registry),
    ("GET /v1/domains/{domain}", "admin", Registry),
    ("GET /v1/domains/{domain}/quota", "admin", Registry),
    ("GET /v1/events", "pull", Visible),
    ("GET /v1/gc", "admin", Domain),
    ("GET /v1/gc/{run}", "admin", Domain),
    ("GET /v1/repositories", "pull", Visible),
    ("GET /v1/repositories/{repo}/signatures", "pull", Repository),
    ("GET /v1/repositories/{repo}/snapshots", "pull", Repository),
    ("GET /v1/repositories/{repo}/snapshots/{ref}", "pull", Repository),
    ("GET /v1/repositories/{repo}/snapshots/{ref}/diff/{other}", "pull", Repository),
    ("GET /v1/repositories/{repo}/snapshots/{ref}/lineage", "pull", Repository),
    ("GET /v1/repositories/{repo}/snapshots/{ref}/page-manifest", "pull", Repository),
    ("GET /v1/repositories/{repo}/stats", "pull", Repository),
    ("GET /v1/repositories/{repo}/tags", "pull", Repository),
    ("GET /v1/repositories/{repo}/tags/{tag}", "pull", Repository),
    ("GET /v1/retention", "admin", Domain),
    ("GET /v1/signing", "admin", Domain),
    ("GET /v1/stats", "pull", Domain),
    ("GET /v1/tasks", "admin", Domain),
    ("GET /v1/tokens", "admin", Registry),
    ("GET /v1/usage", "admin", Domain),
    ("DELETE /v2/{repo}/blobs/uploads/{id}", "push", Repository),
    ("DELETE /v2/{repo}/blobs/{digest}", "delete", Repository),
    ("DELETE /v2/{repo}/manifests/{reference}", "delete", Repository),
    ("GET /v2/", "pull", Token),
    ("GET /v2/_catalog", "pull", Visible),
    ("GET /v2/{repo}/blobs/uploads/{id}", "push", Repository),
    ("GET /v2/{repo}/blobs/{digest}", "pull", Repository),
    ("GET /v2/{repo}/manifests/{reference}", "pull", Repository),
    ("GET /v2/{repo}/referrers/{digest}", "pull", Repository),
    ("GET /v2/{repo}/tags/list", "pull", Repository),
    ("PATCH /v2/{repo}/blobs/uploads/{id}", "push", Repository),
    ("POST /v2/{repo}/blobs/uploads", "push", Repository),
    ("PUT /v2/{repo}/blobs/uploads/{id}", "push", Repository),
    ("PUT /v2/{repo}/manifests/{reference}", "push", Repository),
    ("POST /ui/{repo}/{ref}/verify", "pull", Repository),
    ("POST /v1/freed", "pull", Visible),
    ("POST /v1/gc", "admin", Domain),
    ("POST /v1/repositories/{repo}/forks", "push", Repository),
    ("POST /v1/repositories/{repo}/frames", "pull", Repository),
    ("POST /v1/repositories/{repo}/match", "pull", Repository),
    ("POST /v1/repositories/{repo}/pushes", "push", Repository),
    ("POST /v1/repositories/{repo}/pushes/{id}/commit", "push", Repository),
    ("POST /v1/repositories/{repo}/pushes/{id}/missing", "push", Repository),
    ("POST /v1/repositories/{repo}/snapshots/{ref}/signatures", "push", Repository),
    ("POST /v1/repositories/{repo}/snapshots/{ref}/verify", "pull", Repository),
    ("POST /v1/retention/run", "admin", Domain),
    ("POST /v1/scrub", "admin", Domain),
    ("POST /v1/tasks/{task}/pause", "admin", Domain),
    ("POST /v1/tasks/{task}/resume", "admin", Domain),
    ("POST /v1/tokens", "admin", Registry),
    ("PUT /v1/agents/{agent}", "push", Visible),
    ("PUT /v1/domains/{domain}", "admin", Registry),
    ("PUT /v1/domains/{domain}/quota", "admin", Registry),
    ("PUT /v1/repositories/{repo}/pushes/{id}/frames", "push", Repository),
    ("PUT /v1/repositories/{repo}/tags/{tag}", "push", Repository),
    ("PUT /v1/retention", "admin", Domain),
    ("PUT /v1/signing", "admin", Domain),
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
    found.extend(pfr_registry::routes::actions_of_others().map(|(route, action)| (route, action.to_owned())));
    let expected: BTreeMap<String, String> = TABLE.iter().map(|(route, action, _)| ((*route).to_owned(), (*action).to_owned())).collect();
    for (route, action) in &found {
        assert_eq!(expected.get(route), Some(action), "the action of {route}: the table above, and the handler's Access");
    }
    for route in expected.keys() {
        assert!(found.contains_key(route), "the table above has {route}, which is no route");
    }
}

/// What the calls below are about.
struct World {
    /// The snapshot at the tag `base`.
    base: Digest,
    fork: Snapshot,
    /// Push sessions: one to commit the fork with, one to abort.
    pushes: [String; 2],
    /// Uploads of the OCI API: one to finish, one to cancel.
    uploads: [String; 2],
    run: String,
    /// A token to revoke.
    spare: AccessToken,
}

impl World {
    /// A snapshot, sessions, a collection and a domain.
    async fn make(registry: &Registry) -> Self {
        let base = snapshot(0..20, vec![]);
        registry.push(REPO, &base, Some("base")).await;
        let pushes = [registry.open_push(REPO).await, registry.open_push(REPO).await];
        let upload = async || registry.open_push(REPO).await.rsplit_once('/').expect("an id").1.to_owned();
        let uploads = [upload().await, upload().await];
        let run: api::GcReport = ok(registry.post("/v1/gc", &json!({})).await).await;
        let _: api::DomainInfo = ok(registry.put("/v1/domains/acme", &json!({})).await).await;
        let spare = registry.token(&["spare:pull"]).await;
        Self { base: base.manifest, fork: snapshot(10..30, vec![base.manifest]), pushes, uploads, run: run.id, spare }
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
        let of_base_alone = json!({"repositories": [{"repository": "team/agent", "snapshots": [self.base]}]});
        let question = json!({"tokens": [1, 2], "fingerprint": Digest::sha256(b"")});
        let mut calls = Vec::new();
        let reads = ["/docs", "/livez", "/metrics", "/openapi.json", "/readyz", "/v1/damaged", "/v1/domains", "/v1/gc", "/v1/repositories"];
        let reads = reads
            .into_iter()
            .chain(["/v1/agents", "/v1/audit", "/v1/retention", "/v1/signing", "/v1/stats", "/v1/tasks", "/v1/tokens", "/v1/usage"])
            .map(plain);
        let reads = reads
            .chain(["/signatures", "/snapshots", "/stats", "/tags"].map(repo))
            .chain(["", "/diff/base", "/lineage", "/page-manifest"].map(of_tag));
        let reads = reads.chain([tag("base"), given("/v1/gc/{run}", &self.run), given("/v1/domains/{domain}", "acme")]);
        let quota = || given("/v1/domains/{domain}/quota", "acme");
        let files = ["/ui/-/icon.svg", "/ui/-/style.css"].map(plain);
        let pages = ["/", "/ui", "/ui/", "/ui/-/engines", "/ui/-/repositories", "/ui/-/storage", "/ui/-/tasks"].map(plain);
        let of_page = |rest: &str| (format!("/ui/{{repo}}{}", rest.replace("base", "{ref}")), format!("/ui/{REPO}{rest}"));
        let events = ("/v1/events".to_owned(), "/v1/events?follow=false".to_owned());
        let reads = reads.chain([quota(), events]).chain(files).chain(pages).chain(["", "/base"].map(of_page));
        calls.extend(reads.map(|path| Call::new(Method::GET, path, Body::None)));
        let of_base = json!({"snapshot": "base"});
        let policies = json!({"policies": [{"name": "none", "repositories": "none/*", "keep_last": 1, "immutable_tags": ["v*"]}]});
        let payload = Payload { snapshot: self.base, repository: REPO.to_owned(), key_id: None, signed_at: None };
        let signed = json!({"signatures": [api::NewSignature::new(payload.to_text(), &[1; 64])]});
        let report = json!({"version": "0.1.0", "interval_seconds": 30, "engines": [], "jobs": []});
        let signing = json!({"policies": [{"name": "none", "repositories": "none/*", "keys": [PublicKey::new([1; 32])]}]});
        calls.extend([
            Call::new(Method::POST, plain("/v1/freed"), Body::Json(of_base_alone)),
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
            Call::new(Method::PUT, quota(), Body::Json(json!({"snapshots": 5}))),
            Call::new(Method::PUT, given("/v1/agents/{agent}", "gpu-1"), Body::Json(report)),
            Call::new(Method::DELETE, given("/v1/agents/{agent}", "gpu-1"), Body::None),
            Call::new(Method::PUT, plain("/v1/retention"), Body::Json(policies)),
            Call::new(Method::POST, plain("/v1/retention/run"), Body::Json(json!({}))),
            Call::new(Method::POST, of_tag("/signatures"), Body::Json(signed)),
            Call::new(Method::PUT, plain("/v1/signing"), Body::Json(signing)),
            Call::new(Method::DELETE, given("/v1/domains/{domain}", "acme"), Body::None),
            Call::new(Method::POST, plain("/v1/tokens"), Body::Json(json!({"label": "new", "scopes": ["new:pull"]}))),
            Call::new(Method::DELETE, given("/v1/tokens/{token}", self.spare.id().as_str()), Body::None),
        ]);
        let oci = |route: &str, which: &str| {
            let segment = route.rfind('{').filter(|_| route.ends_with('}')).unwrap_or(route.len());
            (format!("/v2/{{repo}}{route}"), format!("/v2/{REPO}{}{which}", &route[..segment]))
        };
        let config = Digest::sha256(b"{}").to_string();
        let image = json!({
            "schemaVersion": 2, "mediaType": media_type::OCI_MANIFEST, "layers": [],
            "config": {"mediaType": "x/config", "digest": config, "size": 2}
        });
        let of_upload = |which: usize, rest: &str| oci("/blobs/uploads/{id}", &format!("{}{rest}", self.uploads[which]));
        calls.extend([
            Call::new(Method::GET, plain("/v2/"), Body::None),
            Call::new(Method::GET, plain("/v2/_catalog"), Body::None),
            Call::new(Method::POST, oci("/blobs/uploads", ""), Body::None),
            Call::new(Method::PATCH, of_upload(0, ""), Body::Bytes(b"{}".to_vec())),
            Call::new(Method::GET, of_upload(0, ""), Body::None),
            Call::new(Method::PUT, of_upload(0, &format!("?digest={config}")), Body::None),
            Call::new(Method::DELETE, of_upload(1, ""), Body::None),
            Call::new(Method::PUT, oci("/manifests/{reference}", "image"), Body::Bytes(image.to_string().into_bytes())),
            Call::new(Method::GET, oci("/manifests/{reference}", "image"), Body::None),
            Call::new(Method::GET, oci("/blobs/{digest}", &config), Body::None),
            Call::new(Method::GET, oci("/referrers/{digest}", &config), Body::None),
            Call::new(Method::GET, oci("/tags/list", ""), Body::None),
            Call::new(Method::DELETE, oci("/manifests/{reference}", "image"), Body::None),
            Call::new(Method::DELETE, oci("/blobs/{digest}", &config), Body::None),
        ]);
        calls
    }
}

enum Body {
    None,
    Json(Value),
    Frames(Vec<u8>),
    Bytes(Vec<u8>),
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

    /// The request; to a domain, if `base` is its path.
    fn request(&self, registry: &Registry, base: &str, token: Option<&str>) -> RequestBuilder {
        let request = registry.request(self.method.clone(), &format!("{base}{}", self.path));
        let request = match &self.body {
            Body::None => request,
            Body::Json(value) => request.json(value),
            Body::Frames(bytes) => request.header("content-type", media_type::FRAMES).body(bytes.clone()),
            Body::Bytes(bytes) => request.body(bytes.clone()),
        };
        match token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn send(&self, registry: &Registry, base: &str, token: Option<&str>) -> Response {
        self.request(registry, base, token).send().await.expect("an answer")
    }

    /// What it is about, and the action.
    fn asks(&self) -> (About, &'static str) {
        TABLE.iter().find(|(route, ..)| *route == self.route).map(|(_, action, about)| (*about, *action)).expect("a route of the table")
    }

    /// The base paths to send it to: those of a domain that there is, and of one that there is not.
    fn bases(&self) -> &'static [&'static str] {
        match self.asks().0 {
            Nothing | Registry | Token => &[""],
            Repository | Domain | Visible => &["", "/domains/acme", "/domains/nowhere"],
        }
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

/// The code of the registry and the message in an error of the OCI API.
async fn oci_error(answer: Response) -> (ErrorCode, String) {
    let errors: Value = answer.json().await.expect("JSON");
    let error = &errors["errors"][0];
    let code = serde_json::from_value(error["detail"]["code"].clone()).expect("a code of the registry");
    (code, error["message"].as_str().expect("a message").to_owned())
}

/// The code and the detail of a refusal.
async fn refusal(answer: Response) -> (ErrorCode, String) {
    let challenges: Vec<String> =
        answer.headers().get_all("www-authenticate").iter().map(|value| value.to_str().expect("text").to_owned()).collect();
    if answer.headers()["content-type"] == "application/json" {
        // Docker asks the first of several challenges, and knows this one.
        let basic = challenges.len() == 1 && challenges[0].starts_with("Basic ");
        let (code, detail) = oci_error(answer).await;
        assert_eq!(basic, code == ErrorCode::Unauthorized, "{challenges:?}");
        return (code, detail);
    }
    let problem = problem(answer).await;
    let says_how = challenges.iter().any(|text| text.starts_with("Bearer ")) && challenges.iter().any(|text| text.starts_with("Basic "));
    assert_eq!(says_how, problem.code == ErrorCode::Unauthorized, "{challenges:?}");
    (problem.code, problem.detail)
}

/// Tokens that open nothing, or not what is asked for.
struct Callers {
    expired: AccessToken,
    revoked: AccessToken,
    /// Everything, in another repository.
    other_repository: AccessToken,
    /// Everything, in the domain `acme` only.
    other_domain: AccessToken,
    /// For each action: all others, everywhere.
    all_but: BTreeMap<&'static str, AccessToken>,
    /// For each action: that one, in the repositories of the team, and everywhere.
    only: BTreeMap<&'static str, [AccessToken; 2]>,
}

impl Callers {
    async fn make(registry: &Registry) -> Self {
        let tokens = registry.tokens();
        let make = async |scope: &str, domain: Option<&str>, expires_at| {
            let (label, scopes) = ("test".to_owned(), vec![scope.parse().expect("a scope")]);
            let domain = domain.map(|name| name.parse().expect("a domain"));
            tokens.create(NewAccessToken { label, domain, scopes, expires_at }).await.expect("a token").0
        };
        const ALL: &str = "*:pull,push,delete,admin";
        let soon = registry.store.options().clock.now() + 500;
        let expired = make(ALL, None, Some(soon)).await;
        let revoked = make(ALL, None, None).await;
        tokens.revoke(&revoked.id()).await.expect("revoked");
        let (mut all_but, mut only) = (BTreeMap::new(), BTreeMap::new());
        for action in Action::ALL {
            let others: Vec<&str> = Action::ALL.iter().filter(|other| **other != action).map(|other| other.name()).collect();
            all_but.insert(action.name(), make(&format!("*:{}", others.join(",")), None, None).await);
            let name = action.name();
            only.insert(name, [make(&format!("team/*:{name}"), None, None).await, make(&format!("*:{name}"), None, None).await]);
        }
        let (other_repository, other_domain) =
            (make("other/*:pull,push,delete,admin", None, None).await, make(ALL, Some("acme"), None).await);
        while registry.store.options().clock.now() < soon {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        Self { expired, revoked, other_repository, other_domain, all_but, only }
    }

    /// Sends a call as every caller that must be refused, and checks how.
    async fn are_refused(&self, registry: &Registry, call: &Call) {
        let (about, action) = call.asks();
        let ask = async |base: &str, token: Option<&str>| refusal(call.send(registry, base, token).await).await;
        // No valid token: one answer for all reasons, whatever the domain.
        let unknown = AccessToken::new([0; 8], [0; 32]);
        let no_token = ask("", None).await;
        assert_eq!(no_token.0, ErrorCode::Unauthorized, "{}", call.route);
        for base in call.bases() {
            for token in ["garbage", unknown.expose(), self.expired.expose(), self.revoked.expose()] {
                assert_eq!(ask(base, Some(token)).await, no_token, "{} at {base:?}", call.route);
            }
            assert_eq!(ask(base, None).await, no_token, "{} at {base:?}", call.route);
        }
        if about == Token {
            return;
        }
        // The scope lacks the action: said so only to a caller that sees the repository.
        let (code, detail) = ask("", Some(self.all_but[action].expose())).await;
        match about {
            Repository if action == "pull" => assert_eq!(code, ErrorCode::RepositoryUnknown, "{}: {detail}", call.route),
            _ => assert!(code == ErrorCode::Denied && detail.contains(action), "{}: {code}: {detail}", call.route),
        }
        // Another repository: this one is not there, as if it were not.
        let other = Some(self.other_repository.expose());
        match about {
            Repository => {
                assert_eq!(ask("", other).await, (ErrorCode::RepositoryUnknown, "repository team/agent does not exist".to_owned()))
            }
            Domain | Registry => assert_eq!(ask("", other).await.0, ErrorCode::Denied, "{}", call.route),
            Visible => {
                let answer = call.send(registry, "", other).await;
                let (status, text) = (answer.status(), answer.text().await.expect("text"));
                assert!(status.is_success() && !text.contains("team"), "{}: {status}: {text}", call.route);
            }
            Nothing | Token => unreachable!("{} is open", call.route),
        }
        // Another domain: neither is this one, and a domain that exists is like one that does not.
        let other = Some(self.other_domain.expose());
        match about {
            Registry => assert_eq!(ask("", other).await.0, ErrorCode::Denied, "{}", call.route),
            _ => {
                for (base, name) in [("", "default"), ("/domains/more", "more"), ("/domains/nowhere", "nowhere")] {
                    let detail = format!(
                        "domain {name} does not exist for this access token, which is for the domain acme: use the registry's address \
                         with /domains/acme at its end"
                    );
                    assert_eq!(ask(base, other).await, (ErrorCode::DomainUnknown, detail), "{} at {base:?}", call.route);
                }
            }
        }
    }

    /// The token that permits this call, and no more than it must.
    fn right(&self, call: &Call) -> Option<&str> {
        let (about, action) = call.asks();
        match about {
            Nothing => None,
            Repository | Visible => Some(self.only[action][0].expose()),
            Token => Some(self.other_repository.expose()),
            Domain | Registry => Some(self.only[action][1].expose()),
        }
    }
}

/// Every operation × no token, garbage, an unknown, an expired and a revoked one, one without the
/// action, one for another repository, one for another domain, the right one in a request that
/// another site makes a browser send, and the right one.
#[tokio::test]
async fn every_route_refuses_every_caller_but_the_right_one_and_a_refusal_changes_nothing() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let world = World::make(&registry).await;
    let _: api::DomainInfo = ok(registry.put("/v1/domains/more", &json!({})).await).await;
    let callers = Callers::make(&registry).await;
    let (calls, before) = (world.calls(), state(&registry).await);
    registry.stopped().await;

    let routes: BTreeSet<&str> = calls.iter().map(|call| call.route.as_str()).collect();
    assert_eq!(routes, TABLE.iter().map(|(route, ..)| *route).collect(), "each route is called");
    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    for call in &calls {
        match call.asks().0 {
            Nothing => {
                for token in [None, Some("garbage"), Some(callers.revoked.expose())] {
                    let answer = call.send(&registry, "", token).await;
                    assert!(answer.status().is_success(), "{}: {}", call.route, answer.status());
                }
            }
            _ => callers.are_refused(&registry, call).await,
        }
        // A browser sends the token that it keeps also when a page of another site makes it ask.
        if call.method != Method::GET {
            let (token, sites) = (callers.right(call), [("sec-fetch-site", "cross-site"), ("origin", "https://elsewhere.example")]);
            for (name, value) in sites {
                let answer = call.request(&registry, "", token).header(name, value).send().await.expect("an answer");
                let (code, detail) = refusal(answer).await;
                assert!(code == ErrorCode::Denied && detail.contains("another site"), "{}: {code}: {detail}", call.route);
            }
        }
    }
    registry.stopped().await;

    let registry = Registry::start_again(data.path(), |_| ()).await;
    assert_eq!(state(&registry).await, before);
    let refused = recorded(&registry, AuditOutcome::Refused).await;
    let expected: BTreeSet<String> =
        TABLE.iter().filter(|(.., about)| !matches!(about, Nothing | Token)).map(|(route, ..)| operation_id(route)).collect();
    assert_eq!(refused, expected, "the audit log has each refusal");
    registry.stopped().await;
    let registry = Registry::start_again(data.path(), |config| config.require_tokens = true).await;
    for call in &calls {
        let answer = call.send(&registry, "", callers.right(call)).await;
        assert!(answer.status().is_success(), "{}: {}: {:?}", call.route, answer.status(), answer.text().await);
    }
    registry.stopped().await;
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let changes = [
        "DELETE /v2/{repo}/blobs/{digest}",
        "DELETE /v2/{repo}/manifests/{reference}",
        "PUT /v2/{repo}/manifests/{reference}",
        "commit",
        "create_domain",
        "create_token",
        "delete_domain",
        "delete_snapshot",
        "delete_tag",
        "forget_agent",
        "fork",
        "put_tag",
        "revoke_token",
        "set_retention",
        "set_signing",
        "sign",
    ];
    // That of `set_quota` is in the log of the domain, which is deleted.
    assert_eq!(recorded(&registry, AuditOutcome::Done).await, changes.map(str::to_owned).into());
    let work = ["pause_task", "resume_task", "run_retention", "scrub", "start_gc"];
    assert_eq!(recorded(&registry, AuditOutcome::Begun).await, work.map(str::to_owned).into());
    registry.stopped().await;
}

/// The operations of the audit log that ended like this, with a token.
async fn recorded(registry: &Registry, outcome: AuditOutcome) -> BTreeSet<String> {
    let (mut found, mut after) = (BTreeSet::new(), String::new());
    loop {
        let list: api::AuditList = ok(registry.get(&format!("/v1/audit?limit=1000{after}")).await).await;
        let of_callers = list.records.into_iter().filter(|record| record.outcome == outcome);
        found.extend(of_callers.filter(|record| record.token.is_some()).map(|record| record.operation));
        match list.next {
            Some(next) => after = format!("&after={next}"),
            None => return found,
        }
    }
}

/// The id of the operation of a route: a page has none but the route.
fn operation_id(route: &str) -> String {
    let document: Value = serde_json::from_str(&pfr_registry::routes::openapi()).expect("the document is JSON");
    let (method, path) = route.split_once(' ').expect("a method and a path");
    document["paths"][path][method.to_lowercase()]["operationId"].as_str().unwrap_or(route).to_owned()
}

/// Without tokens, every caller may do everything, whatever it sends.
#[tokio::test]
async fn a_registry_that_requires_no_tokens_reads_none() {
    let data = tempfile::tempdir().expect("a directory");
    let registry = Registry::start_again(data.path(), |_| ()).await;
    let world = World::make(&registry).await;
    for call in &world.calls() {
        let answer = call.send(&registry, "", Some("garbage")).await;
        assert!(answer.status().is_success(), "{}: {}: {:?}", call.route, answer.status(), answer.text().await);
    }
    registry.stopped().await;
}
