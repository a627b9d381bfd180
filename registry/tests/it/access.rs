//! Which action each route asks for. A new route belongs into the table below: its action is a
//! decision that must not be made by accident.

use serde_json::Value;
use std::collections::BTreeMap;

/// Every operation, and the action that a caller must be allowed.
const TABLE: &[(&str, &str)] = &[
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

/// The document is made from the router's own table, and each action from the type of the handler's
/// first argument. A handler without an access does not compile.
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
    let expected: BTreeMap<String, String> = TABLE.iter().map(|(route, action)| ((*route).to_owned(), (*action).to_owned())).collect();
    for (route, action) in &found {
        assert_eq!(expected.get(route), Some(action), "the action of {route}: the table above, and the handler's Access");
    }
    for route in expected.keys() {
        assert!(found.contains_key(route), "the table above has {route}, which is no route");
    }
}
